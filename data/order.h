/* The order of samples: which one is the c-th to be consumed. Floor 1.
 *
 * Three numbers, each a pure function of the one before, so that a run of any layout that is resumed anywhere sees the
 * same data and nothing but one counter has to be saved:
 *
 *   consumed   0, 1, 2, ...: samples trained on so far; the data position of a checkpoint.
 *   number     a place in the endless order, epoch after epoch. data.skip lists ranges [first, last) of numbers that
 *              are stepped over: the c-th consumed sample is the c-th number (from 0) outside all ranges. Without
 *              ranges number = consumed. A range that begins at or behind the present number changes nothing before it.
 *   index      a sample of the source: the permutation of epoch number / n, applied to number % n.
 *
 * The permutation is computed, not stored: a Feistel network over the a x b grid that holds 0 .. n-1, a and b near the
 * root of n. A cell (x, y) goes through rounds x += F(round, y) mod a, y += F(round + 1, x) mod b, each of which is
 * undone by a subtraction, so the whole is a bijection of the grid. F is Philox of (seed, epoch, round, half). The grid
 * has fewer than a cells too many; an image outside 0 .. n-1 is sent through again until it lies inside (cycle
 * walking), which is a bijection of 0 .. n-1. */
#ifndef TRAIN_MOE_ORDER_H
#define TRAIN_MOE_ORDER_H

#include <stdbool.h>
#include <stdint.h>

#include "config.h"

/* The number of samples of an endless source, whose index is the number itself. */
#define SAMPLES_ENDLESS INT64_MAX

typedef struct {
    uint64_t seed;
    int64_t n_samples; /* of the source, >= 1 */
    bool shuffle;      /* false: index = number % n_samples */
    int n_skip;        /* ranges, ascending, disjoint, none empty */
    int64_t skip[SKIP_RANGES_MAX][2];
} SampleOrder;

/* skip: n_skip ranges [first, last) in any order, overlaps allowed; NULL if n_skip is 0. Returns -1 with err on a range
 * that begins below zero or ends before it begins. */
int sample_order_init(SampleOrder *o, uint64_t seed, int64_t n_samples, bool shuffle, const int64_t (*skip)[2],
                      int n_skip, char *err);

int64_t sample_order_number(const SampleOrder *o, int64_t consumed);
/* The source's sample for a number; *epoch (or NULL) counts from 0. */
int64_t sample_order_index(const SampleOrder *o, int64_t number, int64_t *epoch);

/* The image of i under the permutation of 0 .. n-1 that (seed, epoch) name; 0 <= i < n. */
int64_t permutation_at(uint64_t seed, int64_t epoch, int64_t n, int64_t i);

#endif
