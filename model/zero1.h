/* What ZeRO-1 moves between the ranks that hold the same weights: gradients to who updates them, and back what ops read
 * of the updated weights. Floor 3. (V3 3.1: ZeRO-1; DESIGN 9)
 *
 * One call a bucket: the weights of one block that one group shares. A rank's shards (cut.h) of a bucket, one behind
 * the other and as long as the longest rank's, are its slice of a reduce_scatter or an all_gather; they are packed and
 * unpacked in pieces that fit the memory set aside. Sums are in rank order, so their bits are those of an all_reduce.
 * All of it runs on STREAM_COMM, in the same order on all ranks; the caller orders it among other streams. */
#ifndef TRAIN_MOE_ZERO1_H
#define TRAIN_MOE_ZERO1_H

#include "params.h"

/* f32 elements of memory that these calls need. */
int64_t zero1_bucket_numel(const Params *p);

/* Sums the gradients of a block (-1: embedding, final norm, head) over the ranks that hold the weights. Then a rank's
 * shards are the sums, and the rest is undefined; without ZeRO-1 all are the sums. */
void zero1_reduce(const Params *p, Comm *c, int block);

/* Brings what ops read of a block's weights (BF16 copies, f32 masters, E4M3 blocks, not their transposes) from who has
 * updated it. */
void zero1_gather(const Params *p, Comm *c, int block);

#endif
