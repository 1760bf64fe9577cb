/* ZeRO-1's cut: which rows of a weight each rank updates, of those that hold it alike. Floor 3. (DESIGN 6, 9)
 *
 * A weight is planes x rows x cols elements, one plane for a matrix, one row for a vector. Its blocks are 128 rows of
 * a plane, the last of a plane maybe fewer: what one scale of an FP8 weight spans, so that a rank quantises its rows
 * alone. A shard is a run of such blocks, hence one interval of elements. Everything here is pure: every rank knows the
 * shards of all. */
#ifndef TRAIN_MOE_CUT_H
#define TRAIN_MOE_CUT_H

#include "kernels/tensor.h"

enum { CUT_ROWS = 128 };

/* Blocks of a weight, and the elements of one. */
int64_t cut_blocks(int64_t planes, int64_t rows);
Interval cut_block(int64_t planes, int64_t rows, int64_t cols, int64_t block);

/* Shares a weight out: shards[r] is what rank r of n_ranks updates, n 0 if nothing. Runs differ by a block; the
 * longer go to the ranks that have least so far, ties to the lower: load[r], elements over all weights cut before, to
 * which the new ones are added. So the loads stay apart by no more than one block of the widest weight, or two where
 * the rows of a plane are no multiple of 128. */
void cut_weight(Interval *shards, int64_t *load, int n_ranks, int64_t planes, int64_t rows, int64_t cols);

/* The elements that two intervals share; n 0 if none. */
Interval interval_overlap(Interval a, Interval b);

#endif
