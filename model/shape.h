/* The numbers of a model and of its micro-batch, derived once from the configuration. Floor 3.
 * Letters as in kernels/tensor.h. */
#ifndef TRAIN_MOE_SHAPE_H
#define TRAIN_MOE_SHAPE_H

#include "data/config.h"
#include "kernels/comm/comm.h"
#include "kernels/ops.h"

/* Bits beside those of memory.recompute, which follow from the rest of the configuration. */
enum {
    RECOMPUTE_FOR_FP8 = 1 << 16,     /* wide for one reader alone */
    RECOMPUTE_FROM_E5M6 = 1 << 17,   /* attention's output */
    RECOMPUTE_FROM_TILES = 1 << 18,  /* SwiGLU's input */
    RECOMPUTE_EXPERT_ROWS = 1 << 19, /* from the tokens received, which are kept; or else: */
    RECOMPUTE_RECEIVED = 1 << 20,    /* expert rows are kept, being fewer, and the tokens received are not */
    RECOMPUTE_UNASKED =
        RECOMPUTE_FOR_FP8 | RECOMPUTE_FROM_E5M6 | RECOMPUTE_FROM_TILES | RECOMPUTE_EXPERT_ROWS | RECOMPUTE_RECEIVED
};

/* What of FP8 a run uses (precision.fp8). */
typedef struct {
    bool fprop, dgrad, wgrad;            /* GEMMs of the block Linears that multiply E4M3 */
    bool swiglu_input, attention_output; /* what backward finds of them has the digits of E4M3, of E5M6 */
    /* From these: is there only one form of a Linear's input, of its output's gradient, the tiles that both of its
     * readers take? Do SwiGLU's kernels read and write tiles? (Else they are wide, and quantised by themselves.) */
    bool inputs, gradients, swiglu;
} Fp8Parts;

enum { CHUNKS_MAX = 2 };

/* Kept rows of a micro-batch that input-backward reads last, or weight-backward; gradients that wait for the latter. */
typedef enum { SLOT_INPUT, SLOT_WEIGHT, SLOT_GRADIENT, SLOT_KINDS } SlotKind;

/* A run of blocks that a micro-batch passes at one go: the model, or a pipeline stage. */
typedef struct {
    int first, end; /* main layers */
    bool embeds;    /* takes tokens in, else what the stage before sends */
    bool has_loss;  /* behind its layers stand final norm, head, loss and all MTP depths; else it sends */
    /* Micro-batches whose rows are held at once; no gradients: backward is never split, they lie in scratch. */
    int n_slots[SLOT_KINDS];
} Chunk;

/* What a rank holds of the model, and of how many micro-batches. */
typedef struct {
    int n_chunks;
    Chunk chunk[CHUNKS_MAX];
    bool embedding;         /* embeds, or has the loss of a model with MTP */
    bool shares_embedding;  /* another rank of the pipeline has a copy: their gradients are summed */
    bool embedding_is_copy; /* and speaks for it */
    bool is_copy;           /* another rank has all of this and speaks for it (DualPipe) */
    bool pairs;             /* a forward and a backward run at once: each has its own scratch */
    int n_batches;          /* micro-batches whose tokens are on the device */
    int n_boundaries;       /* (T, D) tensors between stages, sent or received */
} RankPart;

typedef struct {
    /* the micro-batch */
    int64_t B, S, T;
    /* the model */
    int64_t D, V, V_padded; /* padded rows of embedding and head: never in a softmax, a sample, a count or a file */
    int L;                  /* main layers */
    int n_mtp;              /* MTP depths */
    int n_blocks;           /* L + n_mtp: blocks 0..L-1, then one for each MTP depth */
    int n_dense;            /* the first blocks that are dense; all blocks if it is L */
    int64_t Dq, Dc;         /* latents; Dq = 0: direct q */
    AttentionShape attention;
    int64_t qk_width, kv_width, v_width; /* H*Dqk, H*(Dn+Dv), H*Dv */
    int64_t kv_a_row;                    /* first row of kv_a in the fused q_a + kv_a weight */
    int64_t F_dense, F, F_shared;        /* MLP widths; F_shared = n_shared * F, 0 = none */
    RouterShape router;
    /* this rank's experts and rows */
    int R;                               /* expert-parallel ranks */
    int n_local;                         /* El = E / R */
    int first_slot;                      /* of the local experts */
    int n_data, data_rank;               /* ranks that hold the same other weights, and this one among them */
    int n_expert_data, expert_data_rank; /* likewise the same experts */
    bool zero1;                          /* each of them has its shard of AdamW's state */
    int64_t T_received;                  /* R*T */
    int64_t N;                           /* capacity in expert rows */
    double capacity;                     /* of N, as moe.capacity: times the average; 0 = the worst case */
    int64_t row_align;                   /* fused parts and the vocabulary start at multiples of this many rows */
    double eps;
    Dtype act;          /* activations, and the weights that GEMMs read */
    Dtype moment;       /* AdamW's m and v */
    bool fp8;           /* Linears of the blocks multiply E4M3; the rest is as in bf16 */
    Fp8Parts fp8_parts; /* which of them, and what is kept narrow; none without fp8 */
    bool counts_fp8;    /* what FP8 tensors hold is counted in some steps (log.fp8_every_steps) */
    int recompute;      /* RECOMPUTE_* bits, unasked ones too; AUTO is none until the plan chooses */
    int64_t head_chunk; /* rows of the logits held at once, at most T */
    RankPart part;      /* of this rank; the whole model until a pipeline says otherwise */
    int64_t cache_len;  /* decoding alone: positions of the latent cache, of which the T tokens are the last; else 0 */
} ModelShape;

/* The shape of a training micro-batch. logits_bytes: the device's (ops.h); memory.head_chunk_tokens decides before it.
 */
ModelShape shape_make(const Config *c, const Mesh *mesh, int64_t logits_bytes);
/* The same model over another micro-batch: evaluation, generation. N = min(worst, capacity * T*K + padding): T*K rows
 * is what a rank has on average, and each of its experts may leave GROUP_ALIGN - 1 rows of padding however tokens are
 * routed. worst = R*T * min(K, El) + padding. One rank alone has T*K rows in any case, so capacity changes nothing. */
ModelShape shape_with_batch(ModelShape s, int64_t B, int64_t S);

/* The part that is the whole model, one micro-batch at a time. */
RankPart shape_whole(int L);
/* The chunk that has the block; -1: it is another rank's. */
int shape_chunk_of(const ModelShape *s, int block);
/* Blocks of a chunk, and the i-th in the order of forward: main layers, then MTP's. */
int shape_chunk_blocks(const ModelShape *s, int chunk);
int shape_chunk_block(const ModelShape *s, int chunk, int i);
/* Has this rank all blocks, embedding and head? */
bool shape_holds_all(const ModelShape *s);
/* Is chunk 0 the whole model? */
bool shape_is_whole(const ModelShape *s);
/* Has this rank the final norm, the head and the MTP depths? */
bool shape_has_loss(const ModelShape *s);

bool shape_block_is_moe(const ModelShape *s, int block);
int shape_n_moe(const ModelShape *s); /* MoE blocks, MTP's included */

/* inv_freq[Dr/2] of RoPE, with YaRN's interpolation where configured (V2 eq. 19 ff.; spec of the release). */
void shape_inv_freq(double *inv_freq, const RopeConfig *rope, int64_t Dr);

/* FLOPs of a token, forward and backward: 6 per weight of every GEMM it passes (active experts, head, MTP; not the
 * input embedding), and the attention core over causal pairs, forward and twice backward. Pairs are those of the whole
 * sequence, whether or not a document mask leaves some of them out: packed documents count as one. */
double shape_flops_per_token(const ModelShape *s);
/* The part of one block; MTP's projection and head not counted. */
double shape_block_flops(const ModelShape *s, int block);

/* FLOPs of a token that recomputing one choice (a RECOMPUTE_* bit) adds, over all blocks: 2 per weight of a GEMM, 4 per
 * element of a norm, 6 per element of SwiGLU. */
double shape_recompute_flops(const ModelShape *s, int choice);

#endif
