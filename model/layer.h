/* A layer is four phases, in the order of the report. Floor 3.
 *
 *   attn      add branch + norm, MLA, add + norm, router
 *   dispatch  bytes only: tokens to the ranks of their experts
 *   experts   expand, routed MLP, shared MLP, local reduction
 *   combine   bytes only; its rows are added by the next attn
 *
 * Each has _forward and _backward_input; attn and experts also _backward_weight. Between layers goes the pair
 * (residual, branch rows). A layer never knows the schedule. A dense layer has empty dispatch and combine. */
#ifndef TRAIN_MOE_LAYER_H
#define TRAIN_MOE_LAYER_H

#include "acts.h"

typedef enum { PHASE_ATTN, PHASE_DISPATCH, PHASE_EXPERTS, PHASE_COMBINE, PHASE_COUNT } Phase;
typedef enum { PASS_FORWARD, PASS_BACKWARD_INPUT, PASS_BACKWARD_WEIGHT } Pass;

/* The device's copy of a micro-batch (data/batch.h says what the rows mean). */
typedef struct {
    Tensor tokens[LOSSES_MAX], targets[LOSSES_MAX]; /* (T) i32 each, by depth */
    Tensor position, doc_start;
} Batch;

/* All that a phase may touch. */
struct Layer {
    const Device *device;
    Comm *comm;
    const ModelShape *shape;
    const Block *w;
    BlockActs *a;
    const Batch *batch;
    Tensor inv_freq;
    const StepParams *params; /* on the device */
    StepStats *stats;
    Tensor cache;        /* (n, Dc + Dr) generation: this layer's latents, of which the last T are the tokens' own */
    Tensor dout;         /* (T, D) in backward: gradient of the layer's output, residual and branch rows alike */
    TileStats *observed; /* (OBSERVED_COUNT) of this block: what its FP8 tensors hold is added (observe.h); NULL: not */
    bool is_moe;
    bool keeps; /* what backward needs */
    bool count; /* training: routing is counted for the bias */
};

/* The tensor of a row: kept, or made again. */
Tensor act(Layer *l, ActId id);
/* A row as the operand of a GEMM over its rows, or of its weight's gradient: see act_rows_id. For backward. */
Tensor act_rows(Layer *l, ActId id);
Tensor act_columns(Layer *l, ActId id);
/* The same for a gradient that backward has just made: quantised both ways in FP8. Returns its rows. */
Tensor gradient_rows(Layer *l, ActId id);
/* Writes those of the tiles that this precision has; nothing if none. */
void layer_quantize(Layer *l, Quantized q, Tensor x);
/* A tensor of expert rows, bounded by the rows in use. */
Tensor expert_rows(const Layer *l, ActId id);
/* What inputs are multiplied with, and gradients of outputs: w; in FP8 its blocks, and those of w^T. */
Tensor weight_fprop(const Layer *l, WeightId id);
Tensor weight_dgrad(const Layer *l, WeightId id);
/* Remade rows of an earlier backward are void; FP8: the gradient of the layer's output as tiles. */
void layer_backward_begin(Layer *l);

/* x (T, D) residual, branch (J, T, D) or none -> ACT_X1, the residual that leaves the layer. */
void layer_attn_forward(Layer *l, Tensor x, Tensor branch);
/* Writes the cache's rows after layer_attn_forward. */
void layer_cache_forward(Layer *l);
/* Phase attn for tokens behind what is cached: the same numbers, with W_UK and W_UV absorbed, over the cache. Writes
 * the tokens' own rows of the cache first. */
void layer_attn_decode(Layer *l, Tensor x, Tensor branch);
void layer_dispatch_forward(Layer *l);
/* branch (J, T, D): plane 0 = dense MLP or shared experts (if any); the routed planes are combine's. */
void layer_experts_forward(Layer *l, Tensor branch);
void layer_combine_forward(Layer *l, Tensor branch);

void layer_combine_backward(Layer *l);
void layer_experts_backward_input(Layer *l);
void layer_dispatch_backward(Layer *l);
/* dx (T, D): written, the gradient of the layer's input. */
void layer_attn_backward_input(Layer *l, Tensor dx);

/* Weight gradients, added to dw. Input-backward of the same phase came before; other layers may lie between. */
void layer_experts_backward_weight(Layer *l);
void layer_attn_backward_weight(Layer *l);

/* Planes of the branch that a layer of this kind writes. */
int layer_branch_planes(const ModelShape *s, bool is_moe);

/* remake functions for the table (acts.c) */
void remake_xn(Layer *l);
void remake_cq(Layer *l);
void remake_ckv(Layer *l);
void remake_qkv(Layer *l);
void remake_u(Layer *l);
void remake_xg(Layer *l);
void remake_a(Layer *l);
void remake_as(Layer *l);
void remake_dyg(Layer *l);
void remake_o(Layer *l);
void remake_xn_t(Layer *l);
void remake_cq_t(Layer *l);
void remake_ckv_t(Layer *l);
void remake_o_t(Layer *l);
void remake_u_q(Layer *l);
void remake_u_t(Layer *l);
void remake_xg_t(Layer *l);

#endif
