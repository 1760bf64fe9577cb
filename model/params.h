/* The parameters: one table, a row a tensor. Floor 3.
 *
 * Two levels. A *named tensor* is what the world calls a parameter: "model.layers.3.mlp.experts.7.gate_proj.weight",
 * with its shape, init law and decay. A *weight* is what an op reads: named tensors that are multiplied together lie in
 * one block of memory (gate over up; q_a over kv_a; all local experts), each part starting at a multiple of row_align
 * rows. Every named tensor is a contiguous range of its weight, so count, init, checkpoint, hash, Hugging Face names,
 * optimizer shards and placement all walk the same list. Adding a tensor is adding a row (params.c). */
#ifndef TRAIN_MOE_PARAMS_H
#define TRAIN_MOE_PARAMS_H

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
    int64_t offset; /* elements from the start of the flat arenas */
    int64_t numel;  /* elements with padding rows */
    bool decay;
    Optimizer optimizer;
} Weight;

typedef struct {
    Weight weight[WEIGHT_COUNT]; /* absent ones have numel 0 */
    Tensor counts; /* (E) i32: tokens routed to each expert in this step; none in a dense block. In the step's record
                      (staging.h), to which the model points it. */
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
    NamedTensor *named; /* malloc'd, in the order of the table */
    /* The flat arenas, all of `numel` elements at the same offsets: what all ranks hold alike, then, from `experts` on,
     * the weights of the local experts. */
    int64_t numel, experts;
    Tensor master, grad, m, v;
} Params;

/* Builds the list: no memory but the lists themselves. params_free releases them. */
void params_make(Params *p, const ModelShape *shape);
void params_free(Params *p);

/* Lays the flat arenas out in `keep` and points every weight into them; a counting arena only counts. */
void params_layout(Params *p, Arena *keep);

/* Writes masters (and copies) from (seed, tensor id, element); moments, gradients and router biases are zero. */
void params_init(const Params *p, const Device *d, uint64_t seed, double init_std);
/* What ops read from the masters, for every weight: rounded or quantised; after masters were loaded. */
void params_cast(const Params *p, const Device *d);

/* A BF16 or f32 weight as one row of elements. */
Tensor weight_flat(Tensor w);

/* The list as a checkpoint sees it: master, m and v of every named tensor that the optimizer moves, router biases
 * alone. malloc'd; the caller frees it. */
StateTensor *params_state(const Params *p, int64_t *n);

/* 64-bit wrapping sum over the elements of mix(tensor id, element index, f32 bits) of masters and router biases. Waits
 * for the device. */
uint64_t params_hash(const Params *p, const Device *d);
/* The same of a copy of the flat masters in host memory, on any thread. */
uint64_t params_hash_copy(const Params *p, const void *master);
/* The same over the weights of all ranks, each once: equal on any layout. All ranks call it. */
uint64_t params_hash_of_job(const Params *p, const Device *d, const Mesh *mesh);
/* Is this rank the one that saves and counts the tensor? Others hold copies. */
bool params_is_owner(const Mesh *mesh, const NamedTensor *t);
/* The summands of elements [first, first + n) of one tensor, for weights that are not in memory. */
uint64_t params_hash_part(const NamedTensor *t, int64_t first, const float *x, int64_t n);

typedef struct {
    int64_t total;  /* of the main model */
    int64_t mtp;    /* of the MTP blocks, without the shared embedding and head */
    int64_t active; /* that one token passes in the main model: head counted, input embedding not */
} ParamCount;
/* Of named tensors, router biases not counted (Hugging Face keeps them as buffers). */
ParamCount params_count(const Params *p);

#endif
