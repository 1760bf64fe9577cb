/* A weighted mixture of sources: whose is the i-th sample. Floor 1.
 *
 * The endless row of sample numbers 0, 1, 2, ... is dealt out along a chain of choices: this source, or one of those
 * behind it. Of the n numbers that reach a choice, the source of share p (its weight over its own and those behind it)
 * has floor(n p), the n-th going to it where that count grows. So each is a pure function of (weights, i) that needs no
 * state, every source's samples come in their own order 0, 1, 2, ... without a gap, and at any point of a run no source
 * of k is more than k samples away from its weight's share: each batch holds the mixture, not only their mean. Shares
 * are rounded to 2^-52; no source is left out for a small weight. */
#ifndef TRAIN_MOE_MIX_H
#define TRAIN_MOE_MIX_H

#include <stdint.h>

#include "config.h"

typedef struct {
    int n;
    uint64_t share[SOURCES_MAX]; /* of what reaches this source's choice, in 2^-63; the last takes all */
} Mix;

/* weights: n >= 1 numbers above 0; only their ratios count. */
void mix_init(Mix *m, const double *weights, int n);

/* The source of sample number i, and *local = how many before i were its. */
int mix_at(const Mix *m, int64_t i, int64_t *local);

/* counts[k] = how many of the numbers 0 .. i-1 are source k's; together i. */
void mix_counts(const Mix *m, int64_t i, int64_t *counts);

#endif
