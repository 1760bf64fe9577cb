/* See cut.h. */
#include "cut.h"

#include <stdlib.h>

#include "kernels/base/check.h"
#include "kernels/base/ints.h"

int64_t cut_blocks(int64_t planes, int64_t rows) {
    return planes * ceil_div(rows, CUT_ROWS);
}

Interval cut_block(int64_t planes, int64_t rows, int64_t cols, int64_t block) {
    const int64_t per_plane = ceil_div(rows, CUT_ROWS), plane = block / per_plane;
    const int64_t row = block % per_plane * CUT_ROWS;
    CHECK(plane < planes, "block %lld of %lld planes", (long long)block, (long long)planes);
    return (Interval){(plane * rows + row) * cols, min_i64(rows - row, CUT_ROWS) * cols};
}

Interval interval_overlap(Interval a, Interval b) {
    const int64_t first = max_i64(a.first, b.first), end = min_i64(a.first + a.n, b.first + b.n);
    return (Interval){first, max_i64(end - first, 0)};
}

/* Blocks [begin, end) as elements. */
static Interval run_of(int64_t begin, int64_t end, int64_t planes, int64_t rows, int64_t cols) {
    if (begin == end) return (Interval){0, 0};
    const Interval first = cut_block(planes, rows, cols, begin), last = cut_block(planes, rows, cols, end - 1);
    return (Interval){first.first, last.first + last.n - first.first};
}

typedef struct {
    int64_t load;
    int rank;
} Taker;

static int by_load(const void *a, const void *b) {
    const Taker *x = (const Taker *)a, *y = (const Taker *)b;
    if (x->load != y->load) return x->load < y->load ? -1 : 1;
    return x->rank - y->rank;
}

static int by_length(const void *a, const void *b) {
    const Interval *x = (const Interval *)a, *y = (const Interval *)b;
    if (x->n != y->n) return x->n > y->n ? -1 : 1;
    return x->first < y->first ? -1 : x->first > y->first;
}

void cut_weight(Interval *shards, int64_t *load, int n_ranks, int64_t planes, int64_t rows, int64_t cols) {
    const int64_t n = cut_blocks(planes, rows);
    Interval *run = (Interval *)calloc((size_t)n_ranks, sizeof *run);
    Taker *taker = (Taker *)calloc((size_t)n_ranks, sizeof *taker);
    CHECK(run && taker, "no memory to cut a weight for %d ranks", n_ranks);
    for (int r = 0; r < n_ranks; r++) {
        run[r] = run_of(n * r / n_ranks, n * (r + 1) / n_ranks, planes, rows, cols);
        taker[r] = (Taker){load[r], r};
    }
    qsort(run, (size_t)n_ranks, sizeof *run, by_length);
    qsort(taker, (size_t)n_ranks, sizeof *taker, by_load);
    for (int r = 0; r < n_ranks; r++) {
        shards[taker[r].rank] = run[r];
        load[taker[r].rank] += run[r].n;
    }
    free(run);
    free(taker);
}
