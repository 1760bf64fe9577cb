/* See config_table.h. Types of one value: numbers, words, texts; and the messages that all types share. */
#include "config_table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------------------------------------------------- messages */

void hint_set(char *hint, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    vsnprintf(hint, ERR_LEN, fmt, args);
    va_end(args);
    make_one_line(hint);
}

const char *read_where(const Reader *r, const char *section, int line, char *buf, size_t buf_len) {
    bool in_model_file = r->model_name[0] && (strcmp(section, "model") == 0 || strncmp(section, "model.", 6) == 0);
    const char *file = in_model_file ? r->model_name : r->name;
    if (line < 0)
        snprintf(buf, buf_len, "--set %.80s", r->sets[-line - 1]);
    else if (line > 0)
        snprintf(buf, buf_len, "%s:%d", file, line);
    else
        snprintf(buf, buf_len, "%s", file);
    return buf;
}

int read_refuse(Reader *r, const Field *f, const cJSON *item, const char *fmt, ...) {
    char what[ERR_LEN / 2], where[WHERE_LEN];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    read_where(r, f->section, json_line(item), where, sizeof where);
    return err_set(r->err, "%s: %s.%s %s", where, f->section, f->name, what);
}

static const char *number_text(double x, bool whole, char *buf, size_t buf_len) {
    if (whole && x < 1e15)
        snprintf(buf, buf_len, "%.0f", x);
    else
        snprintf(buf, buf_len, "%g", x);
    return buf;
}

const char *field_range(const Field *f, char *buf, size_t buf_len) {
    char min[32], max[32];
    const FieldType *t = f->type;
    bool whole = t != &type_number && t != &type_number_or_null && t != &type_rate_or_null && t != &type_schedule &&
                 t != &type_capacity;
    buf[0] = 0;
    if (f->type == &type_seed) snprintf(buf, buf_len, "[0, 18446744073709551615]");
    if (f->type->has_range)
        snprintf(buf, buf_len, "[%s, %s]", number_text(f->min, whole, min, sizeof min),
                 number_text(f->max, whole, max, sizeof max));
    return buf;
}

/* "auto|cpu" as "auto, cpu". */
static const char *choices_text(const Field *f, char *buf, size_t buf_len) {
    size_t n = 0;
    for (const char *p = f->unit; *p && n + 3 < buf_len; p++) {
        if (*p == '|') buf[n++] = ',';
        buf[n++] = *p == '|' ? ' ' : *p;
    }
    buf[n] = 0;
    return buf;
}

const char *field_expects(const Field *f, char *buf, size_t buf_len) {
    char range[80], choices[160] = "";
    field_range(f, range, sizeof range);
    if (f->type->has_choices) choices_text(f, choices, sizeof choices);
    if (f->type->has_range && f->min == f->max)
        snprintf(buf, buf_len, "%.0f", f->min);
    else
        snprintf(buf, buf_len, "%s%s%s%s%s", f->type->phrase, range[0] ? " in " : "", range, choices, f->type->tail);
    return buf;
}

int read_refuse_value(Reader *r, const Field *f, const cJSON *item) {
    char expects[256], found[96];
    const bool takes_number = f->type->has_range || f->type == &type_seed, is_set = json_line(item) < 0;
    if (cJSON_IsString(item) && takes_number)
        hint_set(r->hint, is_set ? "numbers look like 12, -0.5, 3e-4 or 100e9" : "numbers are written without quotes");
    else if (f->type == &type_boolean && (cJSON_IsNumber(item) || cJSON_IsString(item)))
        hint_set(r->hint, "write true or false, in small letters and without quotes");
    else if (cJSON_IsNumber(item) && f->type == &type_text)
        hint_set(r->hint, "write it in quotes");
    else if (cJSON_IsNull(item) && f->def)
        hint_set(r->hint, "leave the key out for its default, %s", f->def);
    else
        hint_set(r->hint, "%s", f->help);
    return read_refuse(r, f, item, "must be %s, found %s", field_expects(f, expects, sizeof expects),
                       json_describe(item, found, sizeof found));
}

char *field_text(const Field *f, const void *base) {
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "no memory");
    f->type->print(out, f, (const char *)base + f->offset);
    CHECK(fclose(out) == 0 && text, "no memory");
    return text;
}

/* --------------------------------------------------------------------------------------------------------- numbers */

static void store_integer(const Field *f, int64_t value, void *to) {
    int narrow = (int)value;
    CHECK(f->size == sizeof value || f->size == sizeof narrow, "%s.%s: %zu bytes", f->section, f->name, f->size);
    memcpy(to, f->size == sizeof value ? (void *)&value : (void *)&narrow, f->size);
}

static int64_t stored_integer(const Field *f, const void *from) {
    int64_t value;
    int narrow;
    memcpy(f->size == sizeof value ? (void *)&value : (void *)&narrow, from, f->size);
    return f->size == sizeof value ? value : narrow;
}

static int read_integer(Reader *r, const Field *f, const cJSON *item, void *to) {
    int64_t value;
    if (json_int64(item, &value) != 0 || (double)value < f->min || (double)value > f->max)
        return read_refuse_value(r, f, item);
    store_integer(f, value, to);
    return 0;
}

static void print_integer(FILE *out, const Field *f, const void *from) {
    fprintf(out, "%lld", (long long)stored_integer(f, from));
}

/* null is stored as 0, as a token id as -1. */
static int read_integer_or_null(Reader *r, const Field *f, const cJSON *item, void *to) {
    if (!cJSON_IsNull(item)) return read_integer(r, f, item, to);
    store_integer(f, f->type == &type_integer_or_null ? 0 : -1, to);
    return 0;
}

static void print_integer_or_null(FILE *out, const Field *f, const void *from) {
    if (stored_integer(f, from) == (f->type == &type_integer_or_null ? 0 : -1))
        fputs("null", out);
    else
        print_integer(out, f, from);
}

/* Of a list of ids, all are checked and the first is taken. */
static int read_token_ids(Reader *r, const Field *f, const cJSON *item, void *to) {
    if (!cJSON_IsArray(item)) return read_integer_or_null(r, f, item, to);
    if (cJSON_GetArraySize(item) == 0) return read_refuse(r, f, item, "is an empty list");
    int64_t ignored;
    const cJSON *child;
    cJSON_ArrayForEach(child, item) if (read_integer(r, f, child, child == item->child ? to : &ignored) != 0) return -1;
    return 0;
}

static int read_seed(Reader *r, const Field *f, const cJSON *item, void *to) {
    bool negative;
    uint64_t value;
    if (!cJSON_IsNumber(item) || json_integer(item, &negative, &value) != JSON_INTEGER_EXACT || negative)
        return read_refuse_value(r, f, item);
    memcpy(to, &value, sizeof value);
    return 0;
}

static void print_seed(FILE *out, const Field *f, const void *from) {
    (void)f;
    fprintf(out, "%llu", (unsigned long long)*(const uint64_t *)from);
}

static int read_number(Reader *r, const Field *f, const cJSON *item, void *to) {
    double value;
    if (json_double(item, &value) != 0 || !(value >= f->min && value <= f->max)) return read_refuse_value(r, f, item);
    memcpy(to, &value, sizeof value);
    return 0;
}

static void print_number(FILE *out, const Field *f, const void *from) {
    (void)f;
    json_write_double(out, *(const double *)from);
}

/* null is stored as 0, as a rate (where 0 is a value of its own) as -1. */
static double number_for_null(const Field *f) {
    return f->type == &type_rate_or_null ? -1 : 0;
}

static int read_number_or_null(Reader *r, const Field *f, const cJSON *item, void *to) {
    if (!cJSON_IsNull(item)) return read_number(r, f, item, to);
    double value = number_for_null(f);
    memcpy(to, &value, sizeof value);
    return 0;
}

static void print_number_or_null(FILE *out, const Field *f, const void *from) {
    if (*(const double *)from == number_for_null(f))
        fputs("null", out);
    else
        print_number(out, f, from);
}

/* ------------------------------------------------------------------------------------------------- words and texts */

static int read_boolean(Reader *r, const Field *f, const cJSON *item, void *to) {
    if (!cJSON_IsBool(item)) return read_refuse_value(r, f, item);
    *(bool *)to = cJSON_IsTrue(item);
    return 0;
}

static void print_boolean(FILE *out, const Field *f, const void *from) {
    (void)f;
    fputs(*(const bool *)from ? "true" : "false", out);
}

/* Place of a word in "a|b|c", or -1. */
static int choice_index(const char *choices, const char *word) {
    int index = 0;
    for (const char *p = choices;; index++) {
        size_t n = strcspn(p, "|");
        if (strlen(word) == n && strncmp(p, word, n) == 0) return index;
        if (!p[n]) return -1;
        p += n + 1;
    }
}

/* Enums of the header have the size of an int; two choices may also be a bool. */
static int read_choice(Reader *r, const Field *f, const cJSON *item, void *to) {
    int index = cJSON_IsString(item) ? choice_index(f->unit, item->valuestring) : -1;
    if (index < 0) return read_refuse_value(r, f, item);
    if (f->size == sizeof(bool))
        *(bool *)to = index == 1;
    else
        store_integer(f, index, to);
    return 0;
}

static void print_choice(FILE *out, const Field *f, const void *from) {
    int64_t index = f->size == sizeof(bool) ? *(const bool *)from : stored_integer(f, from);
    const char *p = f->unit;
    for (; index > 0; index--) p += strcspn(p, "|") + 1;
    fprintf(out, "\"%.*s\"", (int)strcspn(p, "|"), p);
}

static int read_text(Reader *r, const Field *f, const cJSON *item, void *to) {
    if (!cJSON_IsString(item)) return read_refuse_value(r, f, item);
    size_t length = strlen(item->valuestring);
    if (length >= f->size) return read_refuse(r, f, item, "has %zu bytes, at most %zu are kept", length, f->size - 1);
    if (length == 0 && !f->def) return read_refuse(r, f, item, "must not be empty");
    memset(to, 0, f->size);
    memcpy(to, item->valuestring, length);
    return 0;
}

static void print_text(FILE *out, const Field *f, const void *from) {
    (void)f;
    json_write_string(out, (const char *)from);
}

static int read_word(Reader *r, const Field *f, const cJSON *item, void *to) {
    if (!cJSON_IsString(item) || choice_index(f->unit, item->valuestring) < 0) return read_refuse_value(r, f, item);
    return read_text(r, f, item, to);
}

const FieldType type_integer = {"integer", "an integer", "", true, false, read_integer, print_integer};
const FieldType type_integer_or_null = {"integer or null",    "an integer",         " or null", true, false,
                                        read_integer_or_null, print_integer_or_null};
const FieldType type_token_id = {"token id or null",   "a token id",         " or null", true, false,
                                 read_integer_or_null, print_integer_or_null};
const FieldType type_token_ids = {"token id or null", "a token id",         ", a list of them, or null", true, false,
                                  read_token_ids,     print_integer_or_null};
const FieldType type_seed = {"integer", "an integer", "", false, false, read_seed, print_seed};
const FieldType type_number = {"number", "a number", "", true, false, read_number, print_number};
const FieldType type_number_or_null = {"number or null",    "a number",          " or null", true, false,
                                       read_number_or_null, print_number_or_null};
const FieldType type_rate_or_null = {"number or null",    "a number",          " or null", true, false,
                                     read_number_or_null, print_number_or_null};
const FieldType type_boolean = {"true or false", "true or false", "", false, false, read_boolean, print_boolean};
const FieldType type_choice = {"choice", "one of ", "", false, true, read_choice, print_choice};
const FieldType type_word = {"choice", "one of ", "", false, true, read_word, print_text};
const FieldType type_text = {"text", "a string", "", false, false, read_text, print_text};
