/* The activations of a block: one table, a row a tensor. Floor 3.
 *
 * A row says how large the tensor is, who reads it last, and, if it may be recomputed, how it is made again. From this
 * follows where it lives:
 *
 *   kept       in a slot of its micro-batch, from forward until its last reader (input- or weight-backward)
 *   gradient   in a slot of the ring of what waits for its weight-backward; in scratch where nothing ever waits, and
 *              where weight-backward reads tiles of it: then the tiles wait
 *   scratch    only inside the phases it is needed in; shared by all blocks
 *   remade     scratch too: backward asks act(layer, id), which returns it or makes it again. There is no `if` about
 *              recomputation anywhere in the mathematics; memory.recompute only changes the table's verdict.
 *
 * A pipeline has several micro-batches under way (shape.h: Chunk.n_slots). Every kept row then has as many copies, and
 * acts_point says which are meant. */
#ifndef TRAIN_MOE_ACTS_H
#define TRAIN_MOE_ACTS_H

#include "params.h"

typedef enum {
    /* attn */
    ACT_X,  /* residual stream at the attention norm */
    ACT_XN, /* its norm */
    ACT_XN_RSTD,
    ACT_QKV_A, /* raw latents: [q | kv | k_pe], or [kv | k_pe] */
    ACT_CQ,    /* normed q latent */
    ACT_CQ_RSTD,
    ACT_CKV, /* normed kv latent */
    ACT_CKV_RSTD,
    ACT_KV, /* kv up-projection before the split */
    ACT_Q,  /* heads, rotated */
    ACT_K,
    ACT_V,
    ACT_O, /* attention output */
    ACT_LSE,
    ACT_Q_LATENT, /* decoding: heads in the width of the cache, W_UK absorbed */
    ACT_O_LATENT, /* decoding: attention output before W_UV */
    ACT_DECODE_PARTIAL,
    ACT_KV_B,     /* decoding in FP8: what the layer's kv_b means, which heads multiply by */
    ACT_ATTN_OUT, /* after o_proj: a branch row */
    ACT_X1,       /* residual stream at the FFN norm */
    ACT_U,        /* its norm */
    ACT_U_RSTD,
    ACT_LOGITS, /* of the router */
    ACT_SCORES,
    ACT_IDS,
    ACT_WEIGHTS,
    ACT_SEQ_COUNT,
    /* dispatch */
    ACT_RECEIVED, /* u of the tokens sent here; u itself on one expert rank */
    ACT_RECEIVED_IDS,
    ACT_RECEIVED_WEIGHTS,
    /* experts */
    ACT_ROW_TOKEN,
    ACT_ROW_WEIGHT,
    ACT_TOKEN_ROW,
    ACT_EXPERT_START,
    ACT_XG,     /* expert rows: received tokens in expert order */
    ACT_H,      /* gate | up */
    ACT_A,      /* SwiGLU output times routing weight */
    ACT_Y,      /* expert output rows */
    ACT_ROUTED, /* received tokens' sum over their local experts; combine's own plane on one expert rank */
    ACT_HS,     /* dense MLP or shared experts: gate | up */
    ACT_AS,
    /* gradients, in the order backward makes them */
    ACT_DRECEIVED, /* block output's gradient of the received tokens */
    ACT_DYG,       /* the same in expert rows */
    ACT_DA,
    ACT_DROW_WEIGHT,
    ACT_DH,
    ACT_DXG,
    ACT_DROUTED, /* received tokens' gradient, summed over their local experts */
    ACT_DRECEIVED_WEIGHTS,
    ACT_DAS,
    ACT_DHS,
    ACT_DU, /* (J, T, D): planes of u's gradient: shared or dense MLP, expert ranks, router */
    ACT_DWEIGHTS,
    ACT_DLOGITS,
    ACT_DX1, /* gradient of the residual stream at the FFN norm */
    ACT_DO,
    ACT_DELTA,
    ACT_DQ,
    ACT_DK,
    ACT_DV,
    ACT_DKV,
    ACT_DQKV_A,
    ACT_DCQ,
    ACT_DCKV,
    ACT_DXN,
    ACT_PARTIAL, /* partial sums of norm weights' gradients */
    /* FP8: the rows above as E4M3 tiles of their rows (_Q) and of their transposes (_T) */
    ACT_XN_Q,
    ACT_XN_T,
    ACT_CQ_Q,
    ACT_CQ_T,
    ACT_CKV_Q,
    ACT_CKV_T,
    ACT_O_Q,
    ACT_O_T,
    ACT_O_E5M6, /* what is kept of O: attention's backward needs more digits (V3 3.3.3) */
    ACT_U_Q,
    ACT_U_T,
    ACT_XG_Q,
    ACT_XG_T,
    ACT_H_Q,
    ACT_A_Q,
    ACT_A_T,
    ACT_HS_Q,
    ACT_AS_Q,
    ACT_AS_T,
    ACT_DOUT_Q, /* of the layer's output's gradient */
    ACT_DOUT_T,
    ACT_DRECEIVED_Q, /* no weight's gradient reads it */
    ACT_DYG_Q,
    ACT_DYG_T,
    ACT_DH_Q,
    ACT_DH_T,
    ACT_DHS_Q,
    ACT_DHS_T,
    ACT_DX1_Q,
    ACT_DX1_T,
    ACT_DQ_Q,
    ACT_DQ_T,
    ACT_DKV_Q,
    ACT_DKV_T,
    ACT_DQKV_A_Q,
    ACT_DQKV_A_T,
    ACT_COUNT
} ActId;

typedef struct Layer Layer;

typedef enum { LIFE_KEPT, LIFE_GRADIENT, LIFE_SCRATCH } Life;
/* Phases a scratch row is needed in. */
enum { IN_ATTN = 1, IN_EXPERTS = 2, IN_EXPERTS_BACK = 4, IN_ATTN_BACK = 8, IN_WEIGHT_BACK = 16, IN_ALL = 31 };
/* Last reader of a kept row, whatever memory.recompute says: a row that others are made from is read when they are. */
typedef enum { READER_NONE, READER_INPUT, READER_WEIGHT } LastReader;

typedef struct {
    const char *name;                                 /* as in the memory plan */
    Tensor (*make)(const ModelShape *s, bool is_moe); /* shape and dtype, no memory; none = this block has it not */
    Life life;
    LastReader last_reader;
    int phases;               /* of a scratch row; of a remade one in backward; of a gradient whose tiles wait */
    int recompute;            /* RECOMPUTE_* bit that makes it a remade row; -1 = always remade; 0 = never */
    void (*remake)(Layer *l); /* writes the row from kept ones; may write others of its group */
    ActId same_as;            /* shares this row's memory on one expert rank (ACT_COUNT: none) */
} ActRow;

const ActRow *act_row(ActId id);
/* Is it made again in backward, by memory.recompute or in any case? */
bool act_is_remade(const ActRow *row, const ModelShape *s);
/* What becomes of the row in this shape: one that is made again is scratch, and so is a gradient whose tiles wait. */
Life act_life(const ActRow *row, const ModelShape *s);
/* The row that holds `id` for GEMMs over its rows, or over its columns: its tiles in FP8, itself otherwise. */
ActId act_rows_id(const ModelShape *s, ActId id);
ActId act_columns_id(const ModelShape *s, ActId id);
/* The row that keeps a Linear's input `id`, from which its other forms are made and which travels to the experts. */
ActId act_input_id(const ModelShape *s, ActId id);

/* The tensors of one block. */
typedef struct {
    Tensor t[ACT_COUNT];
    Tensor dout;            /* (T, D): gradient of the block's output, read by weight-backward too */
    bool remade[ACT_COUNT]; /* in this backward */
    int slot[SLOT_KINDS];   /* to which t points */
} BlockActs;

/* The tiles of `id`, of its rows and of its columns: those that this precision has. */
Quantized act_tiles(const BlockActs *a, ActId id);

/* Everything one micro-batch leaves between forward and backward on this rank, and the scratch around it. */
typedef struct {
    ModelShape shape;
    bool training;      /* else forward only: nothing is kept */
    int batch;          /* whose tokens these are: of the model's micro-batches on the device */
    BlockActs *blocks;  /* n_blocks, of which this rank's have memory; malloc'd */
    Tensor branch;      /* (J, T, D): what the last block added; read by the next norm */
    Tensor dout[2];     /* (T, D): gradient of a block's output where blocks share one; of a first block's input */
    int depth_slot;     /* to which the tensors of all depths point */
    Tensor x0;          /* (T, D) what enters the first block of a depth: embedding, or eh_proj's output */
    struct {            /* per depth: 0 = main model, k = MTP; in slots of the rank that has the loss */
        Tensor x_final; /* residual stream at the final norm */
        Tensor hidden;  /* final norm: what the head, and the next depth, read */
        Tensor hidden_rstd;
        Tensor dhidden;                   /* left by the head */
        Tensor emb, emb_rstd, h_rstd, eh; /* MTP only: embedding, norms' rstd, [enorm(emb) ; hnorm(h)] */
    } depth[LOSSES_MAX];
    Tensor logits, loss; /* (head_chunk, V_padded), (T) */
    Tensor deh, demb, partial;
} Acts;

/* Builds and lays out: kept rows in `slots`, the rest in `scratch`. Call on counting arenas, then on real ones. */
void acts_layout(Acts *a, const ModelShape *shape, bool training, Arena *slots, Arena *scratch);
/* The same rows with scratch of their own, for forwards that run beside backwards of `a` (RankPart.pairs). */
void acts_layout_beside(Acts *beside, const Acts *a, Arena *scratch);
/* The chunk's rows are those of the slots from now on, and nothing is made again yet. */
void acts_point(Acts *a, int chunk, const int slot[SLOT_KINDS]);
void acts_free(Acts *a);

#endif
