/* The parameters: one table, a row a tensor. Floor 3.
 *
 * Two levels. A *named tensor* is what the world calls a parameter: "model.layers.3.mlp.experts.7.gate_proj.weight",
 * with its shape, init law and decay. A *weight* is what an op reads: named tensors that are multiplied together lie in
 * one block of memory (gate over up; q_a over kv_a; all local experts), each part starting at a multiple of row_align
 * rows. Every named tensor is a contiguous range of its weight, so count, init, checkpoint, hash, Hugging Face names,
 * optimizer shards and placement all walk the same list. Adding a tensor is adding a row (params.c). */
#ifndef TRAIN_MOE_PARAMS_H
#define TRAIN_MOE_PARAMS_H

#include "cut.h"
#include "kernels/base/arena.h"
#include "shape.h"
#include "state.h"

typedef enum {
    /* of the whole model */
    WEIGHT_EMBED,
    WEIGHT_FINAL_NORM,
    WEIGHT_HEAD,
    /* of a block */
    WEIGHT_ATTN_NORM,
    WEIGHT_QKV_A, /* q_a over kv_a, or kv_a alone */
    WEIGHT_Q_NORM,
    WEIGHT_Q_B, /* q_b, or q_proj where there is no q latent */
    WEIGHT_KV_NORM,
    WEIGHT_KV_B,
    WEIGHT_O,
    WEIGHT_FFN_NORM,
    WEIGHT_GATE_UP, /* of the dense MLP, or of the shared experts */
    WEIGHT_DOWN,
    WEIGHT_ROUTER,
    WEIGHT_ROUTER_BIAS,    /* (E) f32, moved by bias_step, not by the optimizer */
    WEIGHT_EXPERT_GATE_UP, /* (El, 2F, D) */
    WEIGHT_EXPERT_DOWN,    /* (El, D, F) */
    /* of an MTP block, beside those of a block */
    WEIGHT_ENORM,
    WEIGHT_HNORM,
    WEIGHT_EH_PROJ,
    WEIGHT_MTP_NORM,
    WEIGHT_COUNT
} WeightId;

/* A Linear of a block: E4M3 in FP8, in training and in a folder's files. Embedding, head, router, norms and eh_proj are
 * not. (V3 3.3.1) */
bool weight_is_block_linear(WeightId id);

typedef enum { OPTIMIZER_ADAMW, OPTIMIZER_NONE } Optimizer;
typedef enum { INIT_NORMAL, INIT_ONE, INIT_ZERO } InitLaw;

typedef struct {
    Tensor w;       /* what ops read: the master, its BF16 copy, or E4M3 blocks */
    Tensor wt;      /* E4M3 only: the transpose, which input gradients are multiplied with */
    Tensor wide;    /* the BF16 copy beside E4M3, where only one of Fprop and Dgrad is in FP8 */
    Tensor dw;      /* gradient, f32, summed over the micro-batches of a step */
    int64_t offset; /* elements from the start of the gradients' arena */
    int64_t numel;  /* elements with padding rows */
    bool decay;
    Optimizer optimizer;
    bool is_expert;
    /* of the ranks that hold it alike (GROUP_DATA, of experts GROUP_EXPERT_DATA), in the order of the group: who saves,
     * counts and, under ZeRO-1, updates what */
    const Interval *shards;
    Interval shard;               /* this rank's */
    Interval updated;             /* what this rank updates, and has moments of: its shard, or all without ZeRO-1 */
    int64_t master_at, moment_at; /* where the f32 that is held begins in those arenas: all of a weight that ops read as
                                     f32, else what is updated; and the moments of what is updated */
    int64_t first_partial;        /* of its blocks (cut.h), of experts those of expert 0, among the partial sums of the
                                     gradients' norm */
} Weight;

typedef struct {
    Weight weight[WEIGHT_COUNT]; /* absent ones have numel 0 */
    Tensor counts; /* (E) i32: tokens routed to each expert in this step; none in a dense block. In the step's record
                      (staging.h), to which the model points it. */
    Tensor slot_of_expert; /* (E) i32: where each expert lies; none in a dense block */
} Block;

typedef struct {
    char name[TENSOR_NAME_LEN];
    uint64_t id; /* of the name: the same on every layout; names the random numbers of init and the hash */
    InitLaw init;
    Optimizer optimizer;
    int block; /* -1: of the whole model */
    WeightId weight;
    int expert; /* global expert, -1 = none */
    int ndim;
    int64_t shape[2];
    int64_t offset; /* of element 0 in the flat arenas */
    int64_t numel;
} NamedTensor;

typedef struct {
    ModelShape shape;
    Block top;     /* embedding, final norm, head */
    Block *blocks; /* n_blocks; malloc'd */
    int64_t n_named;
    NamedTensor *named; /* malloc'd, in the order of the table; of a block's experts, in that of their slots */
    /* Which expert lies in a slot: (M, E), the M MoE blocks in ascending order; malloc'd. Local experts are slots
     * [first_slot, first_slot + El). On the device the other way round: */
    int32_t *expert_of_slot;
    Tensor slot_of_expert; /* (M, E) i32 */
    /* The flat arenas. Gradients: `numel` elements, what all ranks hold alike, then, from `experts` on, the weights of
     * the local experts. Masters and moments are in the same order, and on one rank at the same offsets; under ZeRO-1
     * they are this rank's shards, and what ops read as f32. */
    int64_t numel, experts;
    int64_t n_master, n_moments;
    Tensor master, grad, m, v;
    Interval *shards; /* malloc'd: those of all weights */
    /* The gradients' norm: a partial for each block of every weight of the model, this rank's or not, experts by their
     * number, so that its bits are those of one rank. `partial_intervals`, on the device: this rank's shards in `grad`;
     * of other blocks nothing. */
    int64_t n_partials;
    Tensor partials; /* f64 */
    Interval *partial_intervals;
    Tensor bucket; /* f32: what travels between ranks at once (zero1.h); none without ZeRO-1, or alone */
} Params;

/* Builds the list: no memory but the lists themselves. params_free releases them. */
void params_make(Params *p, const ModelShape *shape);
/* The list of all ranks together: as of one that has all blocks and all experts. */
void params_make_whole(Params *p, const ModelShape *shape);
/* Experts lie elsewhere from now on: as this (M, E) table says, of each block a permutation, the same on all ranks.
 * Offsets, extents and shards stay, and get the names of other experts; what is in memory is void. */
void params_place(Params *p, const int32_t *expert_of_slot);
void params_free(Params *p);

/* Lays the flat arenas out in `keep` and points every weight into them; a counting arena only counts. */
void params_layout(Params *p, Arena *keep);
/* Once there is memory behind them, and after params_place: writes partial_intervals and slot_of_expert. */
void params_write_tables(const Params *p, const Device *d);

/* Writes the masters from (seed, tensor id, element); moments, gradients and router biases are zero. */
void params_init(const Params *p, const Device *d, uint64_t seed, double init_std);
/* What ops read from the masters that this rank holds: rounded or quantised. model_cast brings the rest. */
void params_cast(const Params *p, const Device *d);
/* Is any of the weight's rows another rank's to update? FP8 transposes it when all rows are there. */
bool params_is_shared(const Weight *w);

/* A BF16 or f32 weight as one row of elements. */
Tensor weight_flat(Tensor w);

/* Where the f32 of what this rank updates lies, its gradients and moments. */
Tensor params_master(const Params *p, const Weight *w);
Tensor params_grad(const Params *p, const Weight *w);
Tensor params_moment(Tensor arena, const Weight *w);
/* The same rows of w or of the wide copy, as elements; of the E4M3 w as one matrix of blocks. */
Tensor params_rows(const Weight *w, Tensor whole);
Tensor params_blocks(const Weight *w);
/* FP8: the scales of an interval of whole blocks of w. */
Interval params_scales(const Weight *w, Interval elements);

/* -1: what belongs to the whole model. */
const Block *params_block(const Params *p, int block);
/* The weight that a named tensor is a part of, and the element of it where the tensor begins. */
const Weight *params_weight(const Params *p, const NamedTensor *t);
int64_t params_begin(const Params *p, const NamedTensor *t);
/* Elements of the tensor: whose master this rank holds; which this rank, of those that hold it, saves and counts. */
Interval params_held(const Params *p, const NamedTensor *t);
Interval params_owned(const Params *p, const NamedTensor *t);
/* Where in the masters' arena element `e` of the tensor is, one that is held. */
int64_t params_master_at(const Params *p, const NamedTensor *t, int64_t e);

/* The list as a checkpoint sees it: what this rank holds of master, m and v of every named tensor that the optimizer
 * moves, of router biases alone; nothing of a tensor: no item. malloc'd; the caller frees it. */
StateTensor *params_state(const Params *p, int64_t *n);
/* The part of it that this rank, of those that hold it, saves. */
StateTensor *params_saved(const Params *p, int64_t *n);

/* 64-bit wrapping sum over the elements of mix(tensor id, element index, f32 bits) of masters and router biases. Waits
 * for the device. */
uint64_t params_hash(const Params *p, const Device *d);
/* The same of what this rank saves: over all ranks each weight once, so that their sum is equal on any layout. Of the
 * device's masters, or of a copy of them in host memory, on any thread. */
uint64_t params_hash_saved(const Params *p, const Device *d);
uint64_t params_hash_copy(const Params *p, const void *master);
/* That sum. All ranks call it. */
uint64_t params_hash_of_job(const Params *p, const Device *d);
/* The summands of elements [first, first + n) of one tensor, for weights that are not in memory. */
uint64_t params_hash_part(const NamedTensor *t, int64_t first, const float *x, int64_t n);

typedef struct {
    int64_t total;  /* of the main model */
    int64_t mtp;    /* of the MTP blocks, without the shared embedding and head */
    int64_t active; /* that one token passes in the main model: head counted, input embedding not */
} ParamCount;
/* Of all ranks' named tensors, router biases not counted (Hugging Face keeps them as buffers). */
ParamCount params_count(const Params *p);

#endif
