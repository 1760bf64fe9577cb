/* A step on many GPUs, from the rates of one: stages of a pipeline, experts over ranks, sharded optimizer. Floor 5.
 *
 *     step = makespan of the schedule + update
 *
 * Each phase of each layer takes what its work takes at the rates (op_work.h); exchange of tokens runs beside it as the
 * table of overlap.h says, and takes some of the multiprocessors; the schedule is simulated with the times of its
 * stages, of each pair of stages, and of what travels between them. The update is counted in full behind the last
 * backward: gradients summed and scattered, AdamW on the shard, weights gathered. */
#ifndef TRAIN_MOE_CLUSTER_H
#define TRAIN_MOE_CLUSTER_H

#include "exchange.h"
#include "rank_memory.h"

typedef struct {
    double forward, backward, backward_input, backward_weight; /* seconds, exchange that is not hidden included */
    double pair; /* with the stage that the same rank holds for the other direction; 0 = the schedule has none */
} StageTimes;

typedef struct {
    GpuRates rates;
    Mesh mesh;
    ScheduleShape schedule;
    int n_nodes;
    ModelShape shape; /* of a rank */
    /* by stage (n_stages) */
    Stage *stages;
    StageTimes *times;
    /* by rank of the pipeline (P) */
    RankMemory *memory;
    int fullest;      /* rank */
    int64_t capacity; /* bytes of a GPU */
    /* of a step, the mean of the ranks of a pipeline */
    double pipeline_s, bubble_s; /* bubble_s is a part of pipeline_s */
    double update_s, step_s;
    double exchange_s, hidden; /* seconds of exchange of a rank; the part that runs beside compute, 0..1 */
    Exchange exchange;         /* of one layer and micro-batch */
    LinkBytes experts, stage_to_stage, optimizer; /* that a GPU sends */
    double tokens;                                /* of a step */
    double tokens_per_s;                          /* of one GPU */
    double model_tflops, mfu;                     /* of one GPU; of the BF16 peak, 0 = above it: FP8 */
    double hours_per_trillion;                    /* GPU-hours for 10^12 tokens */
} Cluster;

/* The schedule runs on mesh.n_pp ranks; device: a GPU as a plan knows it. Returns 0; or -1 with err and a hint (ERR_LEN
 * each): the model cannot be cut so, or the rates do not say enough. */
int cluster_make(Cluster *c, const Config *config, const Mesh *mesh, const ScheduleShape *schedule,
                 const GpuRates *rates, const Device *device, char *err, char *hint);
void cluster_free(Cluster *c);

#endif
