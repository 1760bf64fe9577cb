/* How long a step takes on a GPU, from its rates: a forecast without the GPU. Floor 5.
 *
 *     micro-batch = products + attention + gradient traffic + other ops' traffic + launches + what is recomputed
 *     step        = micro-batches x that + update
 *
 * Products run at the attained rate of their kind; each adds its weight gradients to f32 in memory, once a micro-batch,
 * which is why larger micro-batches are faster. Routing is taken as even. Nothing overlaps, which is true of one GPU,
 * and no exchange between GPUs is counted: cluster.h does. */
#ifndef TRAIN_MOE_STEP_TIME_H
#define TRAIN_MOE_STEP_TIME_H

#include "model/count.h"
#include "op_work.h"

/* Seconds. */
typedef struct {
    OpTime of;     /* a micro-batch */
    double update; /* of a step */
} StepTime;

/* The shape says precision (fp8 in `compute`: products of blocks at the FP8 rates where the GPU has them), micro-batch
 * and what is recomputed. False for f32: GPUs have no rates for it here. */
bool step_time(StepTime *t, const ModelShape *s, const ModelCount *count, Compute compute, const GpuRates *r);

/* Bytes of the update, a parameter: norm, AdamW and zeroing read and write the f32 gradient three times, master and
 * moments there and back, the copy. */
double update_bytes(const ModelShape *s);

#endif
