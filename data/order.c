/* See order.h. */
#include "order.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/rng.h"

/* Four rounds make a Feistel network of strong random functions a strong permutation; with more the small ones, where
 * few values of F matter, are evenly spread too. */
enum { ROUNDS = 8 };

static int64_t root_ceil(int64_t n) {
    int64_t root = (int64_t)sqrt((double)n);
    while (root > 1 && (root - 1) >= (n + root - 2) / (root - 1)) root--;
    while (root < (n + root - 1) / root) root++;
    return root;
}

static int64_t round_value(uint64_t seed, int64_t epoch, int round, int64_t half, int64_t modulus) {
    uint64_t index = (uint64_t)round << 32 | (uint64_t)half; /* halves stay below 2^32 */
    return (int64_t)(rng_bits(seed, RNG_SHUFFLE, (uint64_t)epoch, index) % (uint64_t)modulus);
}

int64_t permutation_at(uint64_t seed, int64_t epoch, int64_t n, int64_t i) {
    CHECK(i >= 0 && i < n, "element %lld of %lld", (long long)i, (long long)n);
    int64_t a = root_ceil(n), b = (n + a - 1) / a;
    do {
        int64_t x = i / b, y = i % b;
        for (int round = 0; round < ROUNDS; round += 2) {
            x = (x + round_value(seed, epoch, round, y, a)) % a;
            y = (y + round_value(seed, epoch, round + 1, x, b)) % b;
        }
        i = x * b + y;
    } while (i >= n);
    return i;
}

static int compare_ranges(const void *a, const void *b) {
    const int64_t *x = (const int64_t *)a, *y = (const int64_t *)b;
    return x[0] != y[0] ? (x[0] > y[0] ? 1 : -1) : (x[1] > y[1]) - (x[1] < y[1]);
}

int sample_order_init(SampleOrder *o, uint64_t seed, int64_t n_samples, bool shuffle, const int64_t (*skip)[2],
                      int n_skip, char *err) {
    CHECK(n_samples >= 1, "%lld samples", (long long)n_samples);
    CHECK(n_skip >= 0 && n_skip <= SKIP_RANGES_MAX, "%d skip ranges", n_skip);
    memset(o, 0, sizeof *o);
    o->seed = seed;
    o->n_samples = n_samples;
    o->shuffle = shuffle;
    if (n_skip == 0) return 0;
    int64_t sorted[SKIP_RANGES_MAX][2];
    memcpy(sorted, skip, (size_t)n_skip * sizeof sorted[0]);
    qsort(sorted, (size_t)n_skip, sizeof sorted[0], compare_ranges);
    for (int i = 0; i < n_skip; i++) {
        int64_t first = sorted[i][0], last = sorted[i][1];
        if (first < 0 || last < first)
            return err_set(err, "data.skip: [%lld, %lld] is no range of samples [first, last)", (long long)first,
                           (long long)last);
        if (first == last) continue;
        int64_t *before = o->n_skip > 0 ? o->skip[o->n_skip - 1] : NULL;
        if (before && first <= before[1]) {
            if (last > before[1]) before[1] = last;
            continue;
        }
        o->skip[o->n_skip][0] = first;
        o->skip[o->n_skip++][1] = last;
    }
    return 0;
}

int64_t sample_order_number(const SampleOrder *o, int64_t consumed) {
    CHECK(consumed >= 0, "consumed sample %lld", (long long)consumed);
    int64_t number = consumed;
    for (int i = 0; i < o->n_skip && number >= o->skip[i][0]; i++) number += o->skip[i][1] - o->skip[i][0];
    return number;
}

int64_t sample_order_index(const SampleOrder *o, int64_t number, int64_t *epoch) {
    int64_t n = o->n_samples;
    int64_t e = n == SAMPLES_ENDLESS ? 0 : number / n;
    if (epoch) *epoch = e;
    if (n == SAMPLES_ENDLESS) return number;
    return o->shuffle ? permutation_at(o->seed, e, n, number % n) : number % n;
}
