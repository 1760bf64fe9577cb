/* See gemm_table.h. */
#include "gemm_table.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/file.h"

static const char builtin[] =
#include "gemm_rows.inc"
    "";

enum { TABLE_BYTES_MAX = 16 << 20 };

static const char *const kind_names[] = {[GEMM_FPROP] = "fprop", [GEMM_DGRAD] = "dgrad", [GEMM_WGRAD] = "wgrad"};
static const char *const attribute_names[GEMM_ATTRIBUTES] = {
    [GEMM_ID] = "id",         [GEMM_TILE] = "tile",       [GEMM_STAGES] = "stages",
    [GEMM_SPLITK] = "splitk", [GEMM_SWIZZLE] = "swizzle", [GEMM_REDUCTION] = "reduction",
    [GEMM_CUSTOM] = "custom", [GEMM_INNER] = "inner",     [GEMM_CLUSTER] = "cluster"};

/* ---- a row as text ----------------------------------------------------------------------------------------------- */

const char *gemm_place_text(char *buf, int64_t buf_len, const GemmPlace *p) {
    snprintf(buf, (size_t)buf_len, "sm_%d, %d SMs, cuBLASLt %lld.%lld.%lld", p->arch, p->n_sms,
             (long long)p->library / 10000, (long long)p->library / 100 % 100, (long long)p->library % 100);
    return buf;
}

const char *gemm_call_text(char *buf, int64_t buf_len, const GemmCall *c) {
    snprintf(buf, (size_t)buf_len, "%s %lldx%lldx%lld %s>%s%s", kind_names[c->kind], (long long)c->m, (long long)c->n,
             (long long)c->k, dtype_name(c->in), dtype_name(c->out), c->accumulate ? " add" : "");
    return buf;
}

void gemm_row_text(char *text, const GemmRow *row) {
    const GemmPlace *p = &row->place;
    const GemmCall *c = &row->call;
    int used = snprintf(
        text, GEMM_ROW_LEN,
        "sm_%d/%d %lld.%lld.%lld %s %lldx%lldx%lld ld %lld,%lld,%lld %s>%s %s align %d sms %d :", p->arch, p->n_sms,
        (long long)p->library / 10000, (long long)p->library / 100 % 100, (long long)p->library % 100,
        kind_names[c->kind], (long long)c->m, (long long)c->n, (long long)c->k, (long long)c->lda, (long long)c->ldb,
        (long long)c->ldy, dtype_name(c->in), dtype_name(c->out), c->accumulate ? "add" : "set", c->alignment, c->sms);
    for (int i = 0; i < GEMM_ATTRIBUTES; i++)
        used += snprintf(text + used, (size_t)(GEMM_ROW_LEN - used), " %s %d", attribute_names[i], row->attribute[i]);
    for (int i = 0; i < GEMM_ALGO_WORDS; i++)
        used += snprintf(text + used, (size_t)(GEMM_ROW_LEN - used), "%s%llx", i ? "." : " : ",
                         (unsigned long long)row->word[i]);
    CHECK(used < GEMM_ROW_LEN, "a row of %d characters", used);
}

static int dtype_find(const char *name) {
    for (int d = 0; d < DTYPE_COUNT; d++)
        if (strcmp(dtype_name((Dtype)d), name) == 0) return d;
    return -1;
}

/* In front of the first colon. Returns the characters read, or -1. */
static int parse_call(GemmRow *row, const char *text) {
    GemmPlace *p = &row->place;
    GemmCall *c = &row->call;
    char kind[8], types[24], add[4];
    long long major, minor, patch, m, n, k, lda, ldb, ldy;
    int used = -1;
    if (sscanf(text, " sm_%d/%d %lld.%lld.%lld %7s %lldx%lldx%lld ld %lld,%lld,%lld %23s %3s align %d sms %d :%n",
               &p->arch, &p->n_sms, &major, &minor, &patch, kind, &m, &n, &k, &lda, &ldb, &ldy, types, add,
               &c->alignment, &c->sms, &used) != 16 ||
        used < 0)
        return -1;
    p->library = major * 10000 + minor * 100 + patch;
    c->m = m, c->n = n, c->k = k, c->lda = lda, c->ldb = ldb, c->ldy = ldy;
    int which = -1;
    for (int i = 0; i < 3; i++)
        if (strcmp(kind, kind_names[i]) == 0) which = i;
    char *between = strchr(types, '>');
    if (which < 0 || !between) return -1;
    *between = 0;
    const int in = dtype_find(types), out = dtype_find(between + 1);
    c->accumulate = strcmp(add, "add") == 0;
    if (in < 0 || out < 0 || (!c->accumulate && strcmp(add, "set") != 0)) return -1;
    c->kind = (GemmKind)which, c->in = (Dtype)in, c->out = (Dtype)out;
    return used;
}

int gemm_row_parse(GemmRow *row, const char *text) {
    memset(row, 0, sizeof *row);
    int used = parse_call(row, text);
    if (used < 0) return -1;
    text += used;
    for (int i = 0; i < GEMM_ATTRIBUTES; i++) {
        char name[16];
        if (sscanf(text, " %15s %d%n", name, &row->attribute[i], &used) != 2 || strcmp(name, attribute_names[i]) != 0)
            return -1;
        text += used;
    }
    used = 0;
    (void)sscanf(text, " :%n", &used);
    if (used == 0) return -1;
    text += used;
    for (int i = 0; i < GEMM_ALGO_WORDS; i++) {
        unsigned long long word;
        if (sscanf(text, i ? ".%llx%n" : " %llx%n", &word, &used) != 1) return -1;
        row->word[i] = word;
        text += used;
    }
    return text[strspn(text, " \r")] == 0 ? 0 : -1;
}

/* ---- many rows --------------------------------------------------------------------------------------------------- */

bool gemm_place_equal(const GemmPlace *a, const GemmPlace *b) {
    return a->arch == b->arch && a->n_sms == b->n_sms && a->library == b->library;
}

bool gemm_call_equal(const GemmCall *a, const GemmCall *b) {
    return a->kind == b->kind && a->m == b->m && a->n == b->n && a->k == b->k && a->lda == b->lda && a->ldb == b->ldb &&
           a->ldy == b->ldy && a->in == b->in && a->out == b->out && a->accumulate == b->accumulate &&
           a->alignment == b->alignment && a->sms == b->sms;
}

const GemmRow *gemm_rows_find(const GemmRows *rows, const GemmPlace *place, const GemmCall *call) {
    for (int i = 0; i < rows->n; i++)
        if (gemm_place_equal(&rows->row[i].place, place) && gemm_call_equal(&rows->row[i].call, call))
            return &rows->row[i];
    return NULL;
}

void gemm_rows_put(GemmRows *rows, const GemmRow *row) {
    const GemmRow *old = gemm_rows_find(rows, &row->place, &row->call);
    if (old) {
        rows->row[old - rows->row] = *row;
        return;
    }
    rows->row = (GemmRow *)realloc(rows->row, (size_t)(rows->n + 1) * sizeof *row);
    CHECK(rows->row, "no memory for %d rows of the GEMM table", rows->n + 1);
    rows->row[rows->n++] = *row;
}

void gemm_rows_free(GemmRows *rows) {
    free(rows->row);
    rows->row = NULL;
    rows->n = 0;
}

int gemm_rows_parse(GemmRows *rows, const char *text, char *err) {
    rows->row = NULL;
    rows->n = 0;
    while (*text) {
        char line[GEMM_ROW_LEN];
        GemmRow row;
        const size_t length = strcspn(text, "\n");
        snprintf(line, sizeof line, "%.*s", (int)(length < sizeof line ? length : sizeof line - 1), text);
        text += length + (text[length] == '\n');
        if (line[strspn(line, " \r")] == 0) continue;
        if (length >= sizeof line || gemm_row_parse(&row, line) != 0) {
            gemm_rows_free(rows);
            return err_set(err, "no row of a GEMM table: %.200s", line);
        }
        gemm_rows_put(rows, &row);
    }
    return 0;
}

void gemm_rows_builtin(GemmRows *rows) {
    char err[ERR_LEN];
    CHECK(gemm_rows_parse(rows, builtin, err) == 0, "%s", err);
}

/* ---- the file of committed rows ---------------------------------------------------------------------------------- */

/* What stands between the quotes of its literals, as lines, in place. */
static void unquote(char *text) {
    char *out = text;
    for (char *line = text; *line;) {
        char *end = line + strcspn(line, "\n"), *next = *end ? end + 1 : end;
        char *last = line[0] == '"' ? strstr(line, "\\n\"") : NULL;
        if (last && last < end) {
            memmove(out, line + 1, (size_t)(last - line - 1));
            out += last - line - 1;
            *out++ = '\n';
        }
        line = next;
    }
    *out = 0;
}

int gemm_rows_read(GemmRows *rows, const char *path, char *err) {
    char *text;
    size_t size;
    rows->row = NULL;
    rows->n = 0;
    if (!path_exists(path)) return 0;
    if (file_read_all(&text, &size, path, TABLE_BYTES_MAX, err) != 0) return -1;
    unquote(text);
    const int result = gemm_rows_parse(rows, text, err);
    free(text);
    return result;
}

static int compare_calls(const void *a, const void *b) {
    const GemmRow *x = (const GemmRow *)a, *y = (const GemmRow *)b;
    const int64_t left[] = {x->place.arch, x->place.n_sms, x->place.library, x->call.in,  x->call.kind,
                            x->call.m,     x->call.n,      x->call.k,        x->call.out, x->call.accumulate,
                            x->call.lda,   x->call.ldb,    x->call.ldy,      x->call.sms, x->call.alignment};
    const int64_t right[] = {y->place.arch, y->place.n_sms, y->place.library, y->call.in,  y->call.kind,
                             y->call.m,     y->call.n,      y->call.k,        y->call.out, y->call.accumulate,
                             y->call.lda,   y->call.ldb,    y->call.ldy,      y->call.sms, y->call.alignment};
    for (size_t i = 0; i < sizeof left / sizeof *left; i++)
        if (left[i] != right[i]) return left[i] < right[i] ? -1 : 1;
    return 0;
}

int gemm_rows_write(const GemmRows *rows, const char *path, char *err) {
    char *text = NULL, line[GEMM_ROW_LEN];
    size_t size;
    GemmRow *sorted = (GemmRow *)malloc((size_t)(rows->n + 1) * sizeof *sorted);
    FILE *out = open_memstream(&text, &size);
    CHECK(sorted && out, "no memory for %d rows of the GEMM table", rows->n);
    if (rows->n) memcpy(sorted, rows->row, (size_t)rows->n * sizeof *sorted);
    qsort(sorted, (size_t)rows->n, sizeof *sorted, compare_calls);
    fputs("/* Algorithms of cuBLASLt by GEMM, GPU and library; gemm_table.h says how to read a row. Written by "
          "`make tune`. */\n",
          out);
    for (int i = 0; i < rows->n; i++) {
        gemm_row_text(line, &sorted[i]);
        fprintf(out, "\"%s\\n\"\n", line);
    }
    int result = fclose(out) == 0 && text ? file_write_durable(path, text, size, err)
                                          : err_set(err, "%s: no memory to write it", path);
    free(text);
    free(sorted);
    return result;
}
