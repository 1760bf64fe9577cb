/* See json.h. The tree and its numbers; the grammar is in json_scan.c. */
#include "json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/file.h"

int json_line(const cJSON *item) {
    return item->valueint;
}

void json_set_line(cJSON *item, int line) {
    item->valueint = line;
    cJSON *child;
    cJSON_ArrayForEach(child, item) json_set_line(child, line);
}

const char *json_spelling(const cJSON *item) {
    return cJSON_IsNumber(item) && item->valuestring ? item->valuestring : "";
}

const char *json_describe(const cJSON *item, char *buf, size_t buf_len) {
    if (cJSON_IsString(item)) {
        bool is_long = strlen(item->valuestring) > 40;
        snprintf(buf, buf_len, "the string \"%.40s%s\"", item->valuestring, is_long ? "..." : "");
    } else if (cJSON_IsNumber(item)) {
        snprintf(buf, buf_len, "the number %s", json_spelling(item));
    } else {
        snprintf(buf, buf_len, "%s",
                 cJSON_IsArray(item)    ? "a list"
                 : cJSON_IsObject(item) ? "an object"
                 : cJSON_IsTrue(item)   ? "true"
                 : cJSON_IsFalse(item)  ? "false"
                                        : "null");
    }
    return buf;
}

/* ------------------------------------------------------------------------------------------------------- the tree */

typedef struct {
    const char *text, *name;
    size_t size;
    const JsonMark *marks;
    size_t n_marks, next; /* the record of the item about to be visited */
    size_t line_offset;   /* lines are counted once, as offsets only grow */
    int line;
    char *err, *hint;
} TreeWalk;

typedef struct {
    const char *key;
    size_t offset;
} MemberKey;

static int compare_keys(const void *a, const void *b) {
    const MemberKey *x = (const MemberKey *)a, *y = (const MemberKey *)b;
    int order = strcmp(x->key, y->key);
    return order ? order : (x->offset > y->offset) - (x->offset < y->offset);
}

static int refuse_equal_keys(TreeWalk *w, MemberKey *keys, size_t n) {
    qsort(keys, n, sizeof *keys, compare_keys);
    for (size_t i = 1; i < n; i++) {
        if (strcmp(keys[i].key, "//") == 0 || strcmp(keys[i - 1].key, keys[i].key) != 0) continue;
        int line, column, first_line, first_column;
        json_position(w->text, keys[i - 1].offset, &first_line, &first_column);
        json_position(w->text, keys[i].offset, &line, &column);
        snprintf(w->hint, ERR_LEN, "keep one of the two; only the comment key \"//\" may be repeated");
        return err_set(w->err, "%s:%d:%d: key \"%.100s\" is given twice, first at %d:%d", w->name, line, column,
                       keys[i].key, first_line, first_column);
    }
    return 0;
}

/* A number ends the text or stands before white space, a comma or a bracket. */
static int keep_spelling(cJSON *number, const char *text, size_t left) {
    size_t length = 0;
    while (length < left && !strchr(" \t\r\n,]}", text[length])) length++;
    number->valuestring = (char *)cJSON_malloc(length + 1);
    if (!number->valuestring) return -1;
    memcpy(number->valuestring, text, length);
    number->valuestring[length] = 0;
    return 0;
}

/* Visits the items in the order of the text, which is the order of the records. */
static int annotate(TreeWalk *w, cJSON *item) {
    CHECK(w->next < w->n_marks, "%s: tree and text differ", w->name);
    size_t offset = w->marks[w->next++].value;
    for (; w->line_offset < offset; w->line_offset++) w->line += w->text[w->line_offset] == '\n';
    item->valueint = w->line;
    if (cJSON_IsNumber(item) && keep_spelling(item, w->text + offset, w->size - offset) != 0)
        return err_set(w->err, "%s: out of memory", w->name);

    size_t n = (size_t)cJSON_GetArraySize(item), i = 0;
    MemberKey *keys = cJSON_IsObject(item) && n > 1 ? (MemberKey *)malloc(n * sizeof *keys) : NULL;
    if (cJSON_IsObject(item) && n > 1 && !keys) return err_set(w->err, "%s: out of memory", w->name);
    int result = 0;
    cJSON *child;
    cJSON_ArrayForEach(child, item) {
        if (keys) keys[i++] = (MemberKey){child->string, w->marks[w->next].key};
        if ((result = annotate(w, child)) != 0) goto done;
    }
    if (keys) result = refuse_equal_keys(w, keys, n);
done:
    free(keys);
    return result;
}

cJSON *json_parse(const char *text, size_t size, const char *name, char *err, char *hint, char *key) {
    err[0] = hint[0] = 0;
    if (key) key[0] = 0;
    if (json_check_text(text, size, name, err, hint) != 0) return NULL;
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3, size -= 3;

    JsonMark *marks = NULL;
    size_t n_marks = 0;
    if (json_scan(text, size, name, &marks, &n_marks, err, hint, key) != 0) return NULL;
    cJSON *root = cJSON_ParseWithLength(text, size);
    TreeWalk walk = {text, name, size, marks, n_marks, 0, 0, 1, err, hint};
    if (!root) {
        err_set(err, "%s: cJSON cannot read it, though it is valid JSON (out of memory?)", name);
    } else if (annotate(&walk, root) != 0) {
        cJSON_Delete(root);
        root = NULL;
    }
    free(marks);
    return root;
}

cJSON *json_load(const char *path, size_t max_bytes, char *err, char *hint) {
    char *text;
    size_t size;
    err[0] = hint[0] = 0;
    if (file_read_all(&text, &size, path, max_bytes, err) != 0) return NULL;
    cJSON *root = json_parse(text, size, path, err, hint, NULL);
    free(text);
    return root;
}

/* -------------------------------------------------------------------------------------------------------- numbers */

/* digits * 10^exponent with neither leading nor trailing zeros among the digits. */
JsonInteger json_integer(const cJSON *item, bool *negative, uint64_t *magnitude) {
    char digits[JSON_NUMBER_LEN_MAX + 1];
    int n = 0;
    int64_t exponent = 0;
    bool after_point = false;
    const char *p = json_spelling(item);
    *negative = *p == '-';
    *magnitude = 0;
    for (p += *negative; *p && *p != 'e' && *p != 'E'; p++) {
        if (*p == '.') {
            after_point = true;
            continue;
        }
        if (n > 0 || *p != '0') digits[n++] = *p;
        exponent -= after_point;
    }
    if (*p) {
        int64_t written = strtoll(p + 1, NULL, 10); /* saturates, which is far enough on either side */
        exponent += written > 1000000 ? 1000000 : written < -1000000 ? -1000000 : written;
    }
    for (; n > 0 && digits[n - 1] == '0'; n--) exponent++;
    if (n == 0) {
        *negative = false;
        return JSON_INTEGER_EXACT;
    }
    if (exponent < 0) return JSON_INTEGER_FRACTION;
    if (n + exponent > 20) return JSON_INTEGER_TOO_LARGE;
    for (int i = 0; i < n + (int)exponent; i++) {
        uint64_t digit = i < n ? (uint64_t)(digits[i] - '0') : 0;
        if (__builtin_mul_overflow(*magnitude, 10u, magnitude) || __builtin_add_overflow(*magnitude, digit, magnitude))
            return JSON_INTEGER_TOO_LARGE;
    }
    return JSON_INTEGER_EXACT;
}

int json_int64(const cJSON *item, int64_t *value) {
    bool negative;
    uint64_t magnitude;
    if (!cJSON_IsNumber(item) || json_integer(item, &negative, &magnitude) != JSON_INTEGER_EXACT) return -1;
    if (magnitude > (uint64_t)INT64_MAX + negative) return -1;
    *value = negative ? (int64_t)(0 - magnitude) : (int64_t)magnitude;
    return 0;
}

int json_double(const cJSON *item, double *value) {
    if (!cJSON_IsNumber(item)) return -1;
    const char *spelling = json_spelling(item);
    double x = strtod(spelling, NULL);
    if (!isfinite(x)) return -1;
    size_t zeros = strspn(spelling, "-0.");
    if (x == 0 && spelling[zeros] >= '1' && spelling[zeros] <= '9') return -1;
    *value = x;
    return 0;
}

/* -------------------------------------------------------------------------------------------------------- writing */

void json_write_string(FILE *out, const char *s) {
    fputc('"', out);
    for (; *s; s++) {
        unsigned char ch = (unsigned char)*s;
        if (ch == '"' || ch == '\\') {
            fprintf(out, "\\%c", ch);
        } else if (ch == '\n') {
            fputs("\\n", out);
        } else if (ch == '\t') {
            fputs("\\t", out);
        } else if (ch < 0x20 || ch == 0x7F) {
            fprintf(out, "\\u%04x", ch);
        } else {
            fputc(ch, out);
        }
    }
    fputc('"', out);
}

void json_write_double(FILE *out, double x) {
    CHECK(isfinite(x), "JSON has no spelling for %g", x);
    if (x == floor(x) && fabs(x) < 1e15) {
        fprintf(out, "%.0f", x);
        return;
    }
    char text[40];
    for (int precision = 1; precision <= 17; precision++) {
        snprintf(text, sizeof text, "%.*g", precision, x);
        if (strtod(text, NULL) == x) break;
    }
    fputs(text, out);
}
