/* What the ops of a block have to do: FLOPs by kind, bytes by kind, of one micro-batch on one rank. Floor 5.
 *
 * Counted from the shape, for each phase (layer.h) and pass; routing is taken as even, so each of R expert ranks has
 * T*K rows of experts. A forecast is these numbers over the rates of a GPU (rates.h). */
#ifndef TRAIN_MOE_OP_WORK_H
#define TRAIN_MOE_OP_WORK_H

#include "model/parallel/overlap.h"
#include "model/shape.h"
#include "rates.h"

typedef struct {
    double linear, linear_gradient;     /* FLOPs of a block's Linears: forward and input gradient; weight gradient */
    double routed, routed_gradient;     /* the same of the routed experts */
    double bf16;                        /* FLOPs of what is never FP8: router, head, eh_proj */
    double core_forward, core_backward; /* FLOPs of the attention core; backward does five products */
    double gradient_bytes;              /* of f32 gradients of Linears and experts, read and written */
    double bf16_gradient_bytes;         /* the same of what is never FP8 */
    double bytes;                       /* of all other ops */
    double remade, remade_bytes;        /* FLOPs of Linears and bytes that memory.recompute adds */
    double ops;                         /* launched */
} OpWork;

void op_work_add(OpWork *sum, const OpWork *w);

/* One phase and pass of one block; nothing for dispatch and combine. */
OpWork op_work_of_phase(const ModelShape *s, int block, Phase phase, Pass pass);
/* All of them. */
OpWork op_work_of_block(const ModelShape *s, int block);
/* Head and losses of all depths, with the head's gradients, and MTP's input projections: what the last stage has beside
 * blocks. */
OpWork op_work_of_head(const ModelShape *s);

/* Seconds by what they are spent on. */
typedef struct {
    double products, grouped, attention, gradients, traffic, launches, recompute, sum;
} OpTime;

/* fp8: products of blocks at the rates of FP8. */
OpTime op_time(const OpWork *w, const GpuRates *r, bool fp8);

#endif
