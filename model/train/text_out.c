/* See text_out.h. */
#include "text_out.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/check.h"

enum { EXAMPLES = 6 };

TextOut text_out_make(FILE *out, const Tokenizer *t) {
    return (TextOut){.out = out, .tokenizer = t};
}

/* https://no-color.org and its opposite. */
static bool wants_colour(FILE *out) {
    const char *none = getenv("NO_COLOR"), *force = getenv("CLICOLOR_FORCE"), *term = getenv("TERM");
    if (none && *none) return false;
    if (force && *force && strcmp(force, "0") != 0) return true;
    return fileno(out) >= 0 && isatty(fileno(out)) && !(term && strcmp(term, "dumb") == 0);
}

/* ---- colours ----------------------------------------------------------------------------------------------------- */

/* One of the terminal's 6 x 6 x 6 cube that reads on black and on white. Neighbouring experts are far apart, and any
 * two below the number of such colours differ. */
static int colour_of(int expert) {
    int cube[216], n = 0;
    for (int i = 0; i < 216; i++) {
        const int r = i / 36, g = i / 6 % 6, b = i % 6, most = r > g ? (r > b ? r : b) : (g > b ? g : b);
        const int least = r < g ? (r < b ? r : b) : (g < b ? g : b);
        if (most >= 4 && most - least >= 2 && r + g + b <= 10) cube[n++] = 16 + i;
    }
    int step = n * 5 / 13; /* about the golden section; prime to n, so that n experts get n colours */
    for (;; step++) {
        int a = n, b = step;
        while (b) {
            const int rest = a % b;
            a = b, b = rest;
        }
        if (a == 1) break;
    }
    return cube[(int64_t)expert * step % n];
}

static void colour_on(const TextOut *t, int expert) {
    if (t->is_coloured && expert >= 0) fprintf(t->out, "\033[38;5;%dm", colour_of(expert));
}

static void colour_off(const TextOut *t, int expert) {
    if (t->is_coloured && expert >= 0) fputs("\033[0m", t->out);
}

/* ---- the text ---------------------------------------------------------------------------------------------------- */

void text_out_show_experts(TextOut *t, int n_experts, int64_t n_max, const char *legend) {
    t->n_experts = n_experts;
    t->n_max = n_max;
    t->is_coloured = wants_colour(t->out);
    t->ids = (int32_t *)malloc((size_t)(n_max + 1) * sizeof *t->ids);
    t->experts = (int32_t *)malloc((size_t)(n_max + 1) * sizeof *t->experts);
    CHECK(t->ids && t->experts, "no memory for %lld tokens", (long long)n_max);
    fprintf(t->out, "%s\n", legend);
}

void text_out_token(TextOut *t, int32_t id, int expert) {
    if (t->experts && expert >= 0 && t->n < t->n_max) {
        t->ids[t->n] = id;
        t->experts[t->n++] = expert;
    }
    size_t n;
    const char *bytes = tokenizer_is_special(t->tokenizer, id) ? NULL : tokenizer_bytes(t->tokenizer, id, &n);
    if (!bytes) return;
    char out[UTF8_STREAM_OUT_MAX(256)];
    colour_on(t, expert);
    while (n > 0) {
        const size_t part = n < 256 ? n : 256, length = utf8_stream_put(&t->stream, bytes, part, out);
        fwrite(out, 1, length, t->out);
        bytes += part;
        n -= part;
    }
    colour_off(t, expert);
    fflush(t->out);
}

void text_out_end(TextOut *t) {
    char rest[UTF8_STREAM_OUT_MAX(0)];
    fwrite(rest, 1, utf8_stream_end(&t->stream, rest), t->out);
    fputs("\n", t->out);
    fflush(t->out);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

typedef struct {
    int32_t key; /* expert, or token id */
    int64_t count, first;
} Tally;

/* By count; equal ones by where they came first. */
static int compare_tallies(const void *a, const void *b) {
    const Tally *x = (const Tally *)a, *y = (const Tally *)b;
    if (x->count != y->count) return x->count > y->count ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

static void add(Tally *tallies, int64_t *n, int32_t key, int64_t position) {
    int64_t i = 0;
    while (i < *n && tallies[i].key != key) i++;
    if (i == *n) tallies[(*n)++] = (Tally){key, 0, position};
    tallies[i].count++;
}

/* In quotes, and on one line whatever the bytes are. */
static void print_quoted(const TextOut *t, int32_t id) {
    size_t n;
    const char *bytes = tokenizer_bytes(t->tokenizer, id, &n);
    fputs(" '", t->out);
    for (size_t i = 0; bytes && i < n;) {
        uint32_t code_point;
        const size_t length = utf8_next(bytes + i, n - i, &code_point);
        if (bytes[i] == '\n')
            fputs("\\n", t->out);
        else if (code_point == UTF8_INVALID || code_point < ' ' || (code_point >= 0x7F && code_point < 0xA0))
            for (size_t k = 0; k < length; k++) fprintf(t->out, "\\x%02X", (unsigned char)bytes[i + k]);
        else
            fwrite(bytes + i, 1, length, t->out);
        i += length;
    }
    fputs("'", t->out);
}

void text_out_table(TextOut *t, int n_rows) {
    Tally *experts = (Tally *)calloc((size_t)(t->n + 1), sizeof *experts);
    Tally *tokens = (Tally *)calloc((size_t)(t->n + 1), sizeof *tokens);
    CHECK(experts && tokens, "no memory for a table of %lld tokens", (long long)t->n);
    int64_t n_experts = 0;
    for (int64_t i = 0; i < t->n; i++) add(experts, &n_experts, t->experts[i], i);
    qsort(experts, (size_t)n_experts, sizeof *experts, compare_tallies);
    fprintf(t->out, "%lld of %d experts came first for %lld tokens\n", (long long)n_experts, t->n_experts,
            (long long)t->n);
    for (int64_t row = 0; row < n_experts && row < n_rows; row++) {
        const int expert = experts[row].key;
        int64_t n_tokens = 0;
        for (int64_t i = 0; i < t->n; i++)
            if (t->experts[i] == expert) add(tokens, &n_tokens, t->ids[i], i);
        qsort(tokens, (size_t)n_tokens, sizeof *tokens, compare_tallies);
        colour_on(t, expert);
        fprintf(t->out, "expert %4d", expert);
        colour_off(t, expert);
        fprintf(t->out, "  %5lld tokens %5.1f %% ", (long long)experts[row].count,
                100.0 * (double)experts[row].count / (double)t->n);
        for (int64_t i = 0; i < n_tokens && i < EXAMPLES; i++) print_quoted(t, tokens[i].key);
        fputs("\n", t->out);
    }
    free(tokens);
    free(experts);
    free(t->ids);
    free(t->experts);
    t->ids = t->experts = NULL;
}
