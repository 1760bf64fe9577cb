/* See check_data.h. */
#include "check_data.h"

#include <stdio.h>
#include <string.h>

#include "format.h"
#include "kernels/base/check.h"

enum { EXCERPT_BYTES = 600 };

static double percent(int64_t part, int64_t whole) {
    return whole > 0 ? 100.0 * (double)part / (double)whole : 0;
}

static void print_series(const CheckData *c) {
    int width = 6;
    for (int i = 0; i < c->n_series; i++) {
        const int length = (int)strlen(c->series[i].name) + 1;
        width = length > width ? length : width;
    }
    printf("%-*s %7s %15s %13s %10s %10s %10s\n", width, "shards", "files", "tokens", "documents", "text", "unpacked",
           "on disk");
    for (int i = 0; i < c->n_series; i++) {
        const CheckSeries *s = &c->series[i];
        printf("%s%-*s %7s %15s %13s %10s %10s %10s\n", s->name, width - (int)strlen(s->name), "*",
               format_grouped(s->n_shards).text, format_grouped(s->n_tokens).text,
               s->n_documents > 0 ? format_grouped(s->n_documents).text : "-",
               s->n_text > 0 ? format_file_size((double)s->n_text).text : "-",
               format_file_size((double)s->n_bytes).text, format_file_size((double)s->n_file_bytes).text);
    }
}

static void print_lengths(const Documents *d) {
    printf("\n%21s %13s %9s %15s %9s\n", "length, tokens", "documents", "share", "tokens", "share");
    for (int k = 0; k < LENGTH_CLASSES; k++) {
        char range[64];
        if (d->count[k] == 0) continue;
        const int64_t low = k ? (int64_t)1 << (k - 1) : 0;
        if (k < 2)
            snprintf(range, sizeof range, "%d", k);
        else
            snprintf(range, sizeof range, "%s-%s", format_grouped(low).text, format_grouped(2 * low - 1).text);
        printf("%21s %13s %7.2f %% %15s %7.2f %%\n", range, format_grouped(d->count[k]).text,
               percent(d->count[k], d->n), format_grouped(d->n_tokens_of[k]).text,
               percent(d->n_tokens_of[k], d->n_tokens));
    }
}

static void print_documents(const CheckData *c) {
    const Documents *d = &c->documents;
    if (d->n == 0) {
        printf(
            "documents  not counted: no document token is known (of a data.json beside the shards, or --tokenizer)\n");
        return;
    }
    printf("documents  %s, mean %s tokens, longest %s, %s empty", format_grouped(d->n).text,
           format_grouped(d->n_tokens / d->n).text, format_grouped(d->longest).text, format_grouped(d->count[0]).text);
    if (d->n_headless > 0) printf("; %s begin before their first shard", format_grouped(d->n_headless).text);
    print_lengths(d);
    printf("\nduplicates %s of %s documents (%.2f %%), %s tokens (%.2f %%)", format_grouped(d->n_duplicates).text,
           format_grouped(d->n_compared).text, percent(d->n_duplicates, d->n_compared),
           format_grouped(d->n_duplicate_tokens).text, percent(d->n_duplicate_tokens, d->n_tokens));
    if (d->n_compared < d->n - d->count[0])
        printf("; %s more were not compared", format_grouped(d->n - d->count[0] - d->n_compared).text);
    for (int i = 0; i < DUPLICATE_PLACES && i < d->n_duplicates; i++) {
        const DocumentPlace *p = &d->duplicates[i];
        printf("\n           %s token %s, %s tokens long, was there before", c->files.gl_pathv[p->file],
               format_grouped(p->token).text, format_grouped(p->length).text);
    }
    printf("\n");
}

static void print_excerpt(const CheckData *c) {
    char text[EXCERPT_TOKENS * 64] = "", line[EXCERPT_BYTES];
    size_t used = 0;
    if (c->n_excerpt == 0) return;
    printf("excerpt    ");
    for (int i = 0; i < c->n_excerpt; i++) {
        size_t n;
        const char *bytes = c->tokenizer ? tokenizer_bytes(c->tokenizer, c->excerpt[i], &n) : NULL;
        if (!c->tokenizer) used += (size_t)snprintf(text + used, sizeof text - used, "%d ", c->excerpt[i]);
        if (!bytes || used + n >= sizeof text) continue;
        memcpy(text + used, bytes, n);
        text[used += n] = 0;
    }
    format_one_line(line, sizeof line, text);
    printf("%s ...\n", line);
}

static void print_ids(CheckData *c) {
    for (int64_t i = 0; i < c->used_room; i++) c->n_used += c->is_used[i];
    printf("ids        largest %s", format_grouped(c->largest_id).text);
    if (c->used_room > 0)
        printf("; %s of %s are used", format_grouped(c->n_used).text, format_grouped(c->used_room).text);
    if (c->documents.document_token >= 0) printf("; document token %d", c->documents.document_token);
    if (c->tokenizer) printf("; %s", c->tokenizer_path);
    printf("\n");
}

static void print_unpacked(const CheckData *c) {
    int64_t bytes;
    const int n = zst_pool_unpacked(c->pool, &bytes);
    if (n > 0)
        printf("note       %d packed in frames too large to enter: training unpacks them when it starts (%s); "
               "scripts/prepare_data.py --pack packs them in small ones\n",
               n, format_file_size((double)bytes).text);
}

void check_data_print(CheckData *c, double seconds) {
    if (!c->args->quiet) {
        print_series(c);
        print_ids(c);
        print_documents(c);
        print_excerpt(c);
        print_unpacked(c);
    }
    printf("checked    %s tokens in %s: ", format_grouped(c->n_tokens).text, format_duration(seconds).text);
    if (c->n_damaged == 0)
        printf("all fine\n");
    else
        printf("%d error%s, see above\n", c->n_damaged, c->n_damaged > 1 ? "s" : "");
}
