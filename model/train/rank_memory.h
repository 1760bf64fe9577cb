/* The memory of one rank of a cluster, by name: the plan of the model that the rank would hold. Floor 5.
 *
 *   weights that ops read, and f32 gradients      all that the rank holds
 *   f32 masters and AdamW moments                 a shard (ZeRO-1): of experts over the holders of the same experts, of
 *                                                 other tensors over all that hold them
 *   activations     in the slots that its list of steps fills (model/parallel/slots.h)
 *   scratch         of one block, once more for a forward that runs beside a backward */
#ifndef TRAIN_MOE_RANK_MEMORY_H
#define TRAIN_MOE_RANK_MEMORY_H

#include "model/parallel/schedule.h"
#include "model/parallel/stages.h"
#include "model/params.h"

/* What a plan of a cluster is made from. */
typedef struct {
    const ModelShape *shape; /* of a rank: R expert ranks */
    const Params *params;    /* of that shape: all blocks */
    const PipeSchedule *schedule;
    const Stage *stages;
    const Mesh *mesh;
} ClusterShape;

/* Layers of the stage with its MTP blocks; the i-th block. */
int stage_n_blocks(const ClusterShape *c, int stage);
int stage_block(const ClusterShape *c, int stage, int i);

/* Parameters that a rank of the pipeline holds, the bytes of what ops read of them, and over how many ranks their
 * optimizer is sharded. */
typedef struct {
    double others, experts, others_bytes, experts_bytes;
    int64_t n_others, n_experts;
} RankParams;
RankParams rank_params(const ClusterShape *c, int rank);

typedef struct {
    int64_t bytes; /* all of it */
    Arena items;   /* by name */
} RankMemory;
/* With what c->shape recomputes, on `device` (device_for_plan). */
RankMemory rank_memory(const ClusterShape *c, int rank, const Config *config, const Device *device);

#endif
