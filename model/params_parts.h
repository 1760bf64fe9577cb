/* What the list of parameters and its shards share, for params.c and params_shard.c alone. Floor 3. */
#ifndef TRAIN_MOE_PARAMS_PARTS_H
#define TRAIN_MOE_PARAMS_PARTS_H

#include "params.h"

/* Block -1 is what belongs to the whole model. */
static inline Block *block_at(Params *p, int block) {
    return block < 0 ? &p->top : &p->blocks[block];
}

/* The expert in a local slot of a MoE block. */
int params_expert(const Params *p, int block, int64_t local);
/* Cuts every weight into the shards of its ranks, and gives what this rank holds its place in the arenas. */
void params_cut(Params *p);
/* The elements of a named tensor that a part of its weight holds. */
Interval params_interval(const Params *p, const NamedTensor *t, Interval part_of_weight);

#endif
