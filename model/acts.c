/* See acts.h. The makers say every shape once; the table says the rest. */
#include "acts.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/ints.h"
#include "layer.h"

/* ---- shapes ------------------------------------------------------------------------------------------------------ */

#define MAKE(name, tensor)                                                                                             \
    static Tensor make_##name(const ModelShape *s, bool is_moe) {                                                      \
        (void)s, (void)is_moe;                                                                                         \
        return tensor;                                                                                                 \
    }
#define MAKE_MOE(name, tensor) MAKE(name, is_moe ? tensor : tensor_none())

static Tensor act_2d(const ModelShape *s, int64_t rows, int64_t cols) {
    return tensor_2d(NULL, s->act, rows, cols);
}
static Tensor f32_1d(int64_t n) {
    return tensor_1d(NULL, DTYPE_F32, n);
}
static Tensor f32_2d(int64_t rows, int64_t cols) {
    return tensor_2d(NULL, DTYPE_F32, rows, cols);
}
static Tensor i32_2d(int64_t rows, int64_t cols) {
    return tensor_2d(NULL, DTYPE_I32, rows, cols);
}

/* Width of gate | up: the up part starts at an aligned row of the fused weight. */
static int64_t gate_up(const ModelShape *s, int64_t width) {
    return round_up(width, s->row_align) + width;
}
/* Width of the MLP that every token passes: dense, or the shared experts; 0 = none. */
static int64_t mlp_width(const ModelShape *s, bool is_moe) {
    return is_moe ? s->F_shared : s->F_dense;
}
static int64_t qkv_a_width(const ModelShape *s) {
    return s->kv_a_row + s->Dc + s->attention.rope;
}
static Tensor mlp_2d(const ModelShape *s, bool is_moe, bool fused) {
    int64_t width = mlp_width(s, is_moe);
    return width ? act_2d(s, s->T, fused ? gate_up(s, width) : width) : tensor_none();
}
/* Planes of u's gradient: the MLP that every token passes, one for each expert rank, the router's. */
static Tensor du_planes(const ModelShape *s, bool is_moe) {
    return tensor_3d(NULL, s->act, (mlp_width(s, is_moe) ? 1 : 0) + (is_moe ? s->R + 1 : 0), s->T, s->D);
}
static int64_t partials(const ModelShape *s) {
    return ceil_div(s->T, RMSNORM_PARTIAL_ROWS);
}
static int64_t widest_norm(const ModelShape *s) {
    int64_t w = s->D > s->Dq ? s->D : s->Dq;
    return w > s->Dc ? w : s->Dc;
}

MAKE(hidden, act_2d(s, s->T, s->D))
MAKE(per_token, f32_1d(s->T))
MAKE(qkv_a, act_2d(s, s->T, qkv_a_width(s)))
MAKE(cq, s->Dq ? act_2d(s, s->T, s->Dq) : tensor_none())
MAKE(cq_rstd, s->Dq ? f32_1d(s->T) : tensor_none())
MAKE(ckv, act_2d(s, s->T, s->Dc))
MAKE(kv, act_2d(s, s->T, s->kv_width))
MAKE(qk, act_2d(s, s->T, s->qk_width))
MAKE(v, act_2d(s, s->T, s->v_width))
MAKE(per_head, f32_2d(s->T, s->attention.n_heads))
/* Decoding alone. */
MAKE(latents, s->cache_len ? act_2d(s, s->T, s->attention.n_heads * s->Dc) : tensor_none())
MAKE(decode_partial, s->cache_len
                         ? f32_2d(s->T * s->attention.n_heads * ceil_div(s->cache_len, DECODE_CHUNK), s->Dc + 2)
                         : tensor_none())
MAKE(attn_out, tensor_3d(NULL, s->act, 1, s->T, s->D))
MAKE_MOE(scores, f32_2d(s->T, s->router.n_experts))
MAKE_MOE(dlogits, act_2d(s, s->T, s->router.n_experts))
MAKE_MOE(ids, i32_2d(s->T, s->router.n_chosen))
MAKE_MOE(weights, f32_2d(s->T, s->router.n_chosen))
MAKE_MOE(seq_count, i32_2d(s->B, s->router.n_experts))
MAKE_MOE(received, act_2d(s, s->T_received, s->D))
MAKE_MOE(received_ids, i32_2d(s->T_received, s->router.n_chosen))
MAKE_MOE(received_weights, f32_2d(s->T_received, s->router.n_chosen))
/* Only where expert ranks differ: one rank computes into the place that combine would fill. */
MAKE_MOE(exchanged, s->R > 1 ? act_2d(s, s->T_received, s->D) : tensor_none())
MAKE_MOE(exchanged_weights, s->R > 1 ? f32_2d(s->T_received, s->router.n_chosen) : tensor_none())
MAKE_MOE(row_i32, tensor_1d(NULL, DTYPE_I32, s->N))
MAKE_MOE(row_f32, f32_1d(s->N))
MAKE_MOE(token_row, i32_2d(s->T_received, s->router.n_chosen))
MAKE_MOE(expert_start, tensor_1d(NULL, DTYPE_I32, s->n_local + 1))
MAKE_MOE(rows_d, act_2d(s, s->N, s->D))
MAKE_MOE(rows_h, act_2d(s, s->N, gate_up(s, s->F)))
MAKE_MOE(rows_f, act_2d(s, s->N, s->F))
MAKE(hs, mlp_2d(s, is_moe, true))
MAKE(as, mlp_2d(s, is_moe, false))
MAKE(du, du_planes(s, is_moe))
MAKE(partial, f32_2d(partials(s), widest_norm(s)))

/* ---- the table --------------------------------------------------------------------------------------------------- */

#define KEPT(name, make, reader)                                                                                       \
    { name, make, LIFE_KEPT, reader, 0, 0, NULL, ACT_COUNT }
#define REMADE(name, make, reader, phases, bit, remake)                                                                \
    { name, make, LIFE_KEPT, reader, phases, bit, remake, ACT_COUNT }
#define SAME(name, make, reader, other)                                                                                \
    { name, make, LIFE_KEPT, reader, 0, 0, NULL, other }
#define GRADIENT(name, make)                                                                                           \
    { name, make, LIFE_GRADIENT, READER_WEIGHT, 0, 0, NULL, ACT_COUNT }
#define SCRATCH(name, make, phases)                                                                                    \
    { name, make, LIFE_SCRATCH, READER_NONE, phases, 0, NULL, ACT_COUNT }

enum { IN_BACK = IN_EXPERTS_BACK | IN_ATTN_BACK | IN_WEIGHT_BACK };

static const ActRow table[ACT_COUNT] = {
    [ACT_X] = KEPT("residual", make_hidden, READER_WEIGHT),
    [ACT_XN] = REMADE("norms", make_hidden, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_xn),
    [ACT_XN_RSTD] = KEPT("norms' rstd", make_per_token, READER_WEIGHT),
    [ACT_QKV_A] = KEPT("latents", make_qkv_a, READER_WEIGHT),
    [ACT_CQ] = REMADE("norms", make_cq, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_cq),
    [ACT_CQ_RSTD] = KEPT("norms' rstd", make_cq_rstd, READER_WEIGHT),
    [ACT_CKV] = REMADE("norms", make_ckv, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_ckv),
    [ACT_CKV_RSTD] = KEPT("norms' rstd", make_per_token, READER_WEIGHT),
    [ACT_KV] = SCRATCH("kv before the split", make_kv, IN_ATTN | IN_ATTN_BACK),
    [ACT_Q] = REMADE("q, k, v", make_qk, READER_INPUT, IN_ATTN | IN_ATTN_BACK, RECOMPUTE_UP_PROJECTIONS, remake_qkv),
    [ACT_K] = REMADE("q, k, v", make_qk, READER_INPUT, IN_ATTN | IN_ATTN_BACK, RECOMPUTE_UP_PROJECTIONS, remake_qkv),
    [ACT_V] = REMADE("q, k, v", make_v, READER_INPUT, IN_ATTN | IN_ATTN_BACK, RECOMPUTE_UP_PROJECTIONS, remake_qkv),
    [ACT_O] = KEPT("attention output", make_v, READER_WEIGHT),
    [ACT_LSE] = KEPT("attention lse", make_per_head, READER_INPUT),
    [ACT_Q_LATENT] = SCRATCH("latent heads", make_latents, IN_ATTN),
    [ACT_O_LATENT] = SCRATCH("latent heads", make_latents, IN_ATTN),
    [ACT_DECODE_PARTIAL] = SCRATCH("attention of cache chunks", make_decode_partial, IN_ATTN),
    [ACT_ATTN_OUT] = SCRATCH("attention branch", make_attn_out, IN_ATTN),
    [ACT_X1] = KEPT("residual", make_hidden, READER_WEIGHT),
    [ACT_U] = REMADE("norms", make_hidden, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_u),
    [ACT_U_RSTD] = KEPT("norms' rstd", make_per_token, READER_WEIGHT),
    [ACT_LOGITS] = SCRATCH("router logits", make_scores, IN_ATTN),
    [ACT_SCORES] = KEPT("routing", make_scores, READER_INPUT),
    [ACT_IDS] = KEPT("routing", make_ids, READER_INPUT),
    [ACT_WEIGHTS] = KEPT("routing", make_weights, READER_INPUT),
    [ACT_SEQ_COUNT] = KEPT("routing", make_seq_count, READER_INPUT),

    [ACT_RECEIVED] = SAME("received tokens", make_received, READER_WEIGHT, ACT_U),
    [ACT_RECEIVED_IDS] = SAME("routing", make_received_ids, READER_INPUT, ACT_IDS),
    [ACT_RECEIVED_WEIGHTS] = SAME("routing", make_received_weights, READER_INPUT, ACT_WEIGHTS),

    [ACT_ROW_TOKEN] = KEPT("expert row map", make_row_i32, READER_WEIGHT),
    [ACT_ROW_WEIGHT] = KEPT("expert row map", make_row_f32, READER_WEIGHT),
    [ACT_TOKEN_ROW] = KEPT("expert row map", make_token_row, READER_WEIGHT),
    [ACT_EXPERT_START] = KEPT("expert row map", make_expert_start, READER_WEIGHT),
    [ACT_XG] = REMADE("expert rows", make_rows_d, READER_WEIGHT, IN_EXPERTS | IN_WEIGHT_BACK, -1, remake_xg),
    [ACT_H] = KEPT("expert gate and up", make_rows_h, READER_WEIGHT),
    [ACT_A] =
        REMADE("expert SwiGLU", make_rows_f, READER_WEIGHT, IN_EXPERTS | IN_WEIGHT_BACK, RECOMPUTE_SWIGLU, remake_a),
    [ACT_Y] = SCRATCH("expert output rows", make_rows_d, IN_EXPERTS),
    [ACT_ROUTED] = SCRATCH("routed sum", make_exchanged, IN_EXPERTS),
    [ACT_HS] = KEPT("dense and shared gate and up", make_hs, READER_WEIGHT),
    [ACT_AS] = REMADE("dense and shared SwiGLU", make_as, READER_WEIGHT, IN_EXPERTS | IN_WEIGHT_BACK, RECOMPUTE_SWIGLU,
                      remake_as),

    [ACT_DRECEIVED] = SCRATCH("gradient of received", make_exchanged, IN_BACK),
    [ACT_DYG] = REMADE("gradient of expert output", make_rows_d, READER_WEIGHT, IN_BACK, -1, remake_dyg),
    [ACT_DA] = SCRATCH("gradient of expert SwiGLU", make_rows_f, IN_EXPERTS_BACK),
    [ACT_DROW_WEIGHT] = SCRATCH("gradient of row weights", make_row_f32, IN_EXPERTS_BACK),
    [ACT_DH] = GRADIENT("gradient of expert gate and up", make_rows_h),
    [ACT_DXG] = SCRATCH("gradient of expert rows", make_rows_d, IN_EXPERTS_BACK),
    [ACT_DROUTED] = SCRATCH("gradient of routed tokens", make_exchanged, IN_EXPERTS_BACK),
    [ACT_DRECEIVED_WEIGHTS] = SCRATCH("gradient of routing", make_exchanged_weights, IN_EXPERTS_BACK),
    [ACT_DAS] = SCRATCH("gradient of dense and shared SwiGLU", make_as, IN_EXPERTS_BACK),
    [ACT_DHS] = GRADIENT("gradient of dense and shared gate and up", make_hs),
    [ACT_DU] = SCRATCH("gradient of u, by plane", make_du, IN_EXPERTS_BACK | IN_ATTN_BACK),
    [ACT_DWEIGHTS] = SCRATCH("gradient of routing", make_weights, IN_EXPERTS_BACK | IN_ATTN_BACK),
    [ACT_DLOGITS] = GRADIENT("gradient of router logits", make_dlogits),
    [ACT_DX1] = GRADIENT("gradient of the residual", make_hidden),
    [ACT_DO] = SCRATCH("gradient of attention output", make_v, IN_ATTN_BACK),
    [ACT_DELTA] = SCRATCH("attention delta", make_per_head, IN_ATTN_BACK),
    [ACT_DQ] = GRADIENT("gradient of q", make_qk),
    [ACT_DK] = SCRATCH("gradient of k and v", make_qk, IN_ATTN_BACK),
    [ACT_DV] = SCRATCH("gradient of k and v", make_v, IN_ATTN_BACK),
    [ACT_DKV] = GRADIENT("gradient of kv", make_kv),
    [ACT_DQKV_A] = GRADIENT("gradient of latents", make_qkv_a),
    [ACT_DCQ] = SCRATCH("gradient of norms", make_cq, IN_ATTN_BACK),
    [ACT_DCKV] = SCRATCH("gradient of norms", make_ckv, IN_ATTN_BACK),
    [ACT_DXN] = SCRATCH("gradient of norms", make_hidden, IN_ATTN_BACK),
    [ACT_PARTIAL] = SCRATCH("partial sums", make_partial, IN_ATTN_BACK),
};

const ActRow *act_row(ActId id) {
    return &table[id];
}

/* ---- layout ------------------------------------------------------------------------------------------------------ */

static bool row_is_remade(const ActRow *row, const ModelShape *s) {
    return row->recompute == -1 || (row->recompute & s->recompute) != 0;
}

static void place(Tensor *t, Arena *arena, const char *name) {
    t->data = arena_alloc(arena, tensor_bytes(*t), name);
}

/* Scratch of all blocks is the same memory: laid out once for each kind of block. A row that lives in one phase shares
 * its place with the rows of the other phases; one that spans phases comes first, and is shared with nobody. */
static void scratch_layout(BlockActs *kind, const ModelShape *s, bool is_moe, bool training, Arena *scratch) {
    const size_t start = arena_mark(scratch);
    bool in_scratch[ACT_COUNT];
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = &table[id];
        kind->t[id] = row->make(s, is_moe);
        in_scratch[id] = !tensor_is_none(kind->t[id]) && tensor_numel(kind->t[id]) > 0 &&
                         (row->life != LIFE_KEPT || !training || row_is_remade(row, s)) &&
                         !(s->R == 1 && row->same_as != ACT_COUNT);
        if (!training && !(row->phases & (IN_ATTN | IN_EXPERTS)) && row->life != LIFE_KEPT) in_scratch[id] = false;
        const bool spans = row->life != LIFE_SCRATCH || (row->phases & (row->phases - 1)) != 0;
        if (in_scratch[id] && spans) place(&kind->t[id], scratch, row->name);
    }
    const size_t shared = arena_mark(scratch);
    size_t end = shared;
    for (int phase = IN_ATTN; phase <= IN_WEIGHT_BACK; phase *= 2) {
        for (int id = 0; id < ACT_COUNT; id++)
            if (in_scratch[id] && table[id].life == LIFE_SCRATCH && table[id].phases == phase)
                place(&kind->t[id], scratch, table[id].name);
        if (arena_mark(scratch) > end) end = arena_mark(scratch);
        arena_release(scratch, shared);
    }
    arena_release(scratch, start);
    if (end > scratch->peak) scratch->peak = end;
}

static void block_layout(BlockActs *b, const BlockActs *kind, const ModelShape *s, bool training, Arena *slots) {
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = &table[id];
        b->t[id] = kind->t[id];
        if (tensor_is_none(b->t[id]) || tensor_numel(b->t[id]) == 0 || row->life != LIFE_KEPT) continue;
        if (!training || row_is_remade(row, s) || (s->R == 1 && row->same_as != ACT_COUNT)) continue;
        place(&b->t[id], slots, row->name);
    }
    for (int id = 0; id < ACT_COUNT; id++)
        if (s->R == 1 && table[id].same_as != ACT_COUNT) b->t[id].data = b->t[table[id].same_as].data;
    memset(b->remade, 0, sizeof b->remade);
}

static Tensor carried(Arena *arena, Tensor t, const char *name) {
    place(&t, arena, name);
    return t;
}

static void depth_layout(Acts *a, int depth, bool training, Arena *slots) {
    const ModelShape *s = &a->shape;
    const Tensor hidden = act_2d(s, s->T, s->D), per_token = f32_1d(s->T);
    a->depth[depth].x0 = carried(slots, hidden, "block input");
    a->depth[depth].x_final = carried(slots, hidden, "final hidden");
    a->depth[depth].hidden = carried(slots, hidden, "final hidden");
    a->depth[depth].hidden_rstd = carried(slots, per_token, "norms' rstd");
    if (training) a->depth[depth].dhidden = carried(slots, hidden, "final hidden");
    if (depth == 0) return;
    a->depth[depth].emb = carried(slots, hidden, "MTP input");
    a->depth[depth].emb_rstd = carried(slots, per_token, "norms' rstd");
    a->depth[depth].h_rstd = carried(slots, per_token, "norms' rstd");
    a->depth[depth].eh = carried(slots, act_2d(s, s->T, 2 * s->D), "MTP input");
}

void acts_layout(Acts *a, const ModelShape *shape, bool training, Arena *slots, Arena *scratch) {
    BlockActs *blocks = a->blocks;
    memset(a, 0, sizeof *a);
    a->shape = *shape;
    a->training = training;
    a->blocks = blocks ? blocks : (BlockActs *)calloc((size_t)shape->n_blocks, sizeof *blocks);
    CHECK(a->blocks, "no memory for the activation list of %d blocks", shape->n_blocks);
    const ModelShape *s = &a->shape;

    const int planes = layer_branch_planes(s, shape_n_moe(s) > 0);
    a->branch = carried(scratch, tensor_3d(NULL, s->act, planes, s->T, s->D), "branch rows");
    a->logits = carried(scratch, act_2d(s, s->head_chunk, s->V_padded), "logits chunk");
    a->loss = carried(scratch, f32_1d(s->T), "token losses");
    if (training) {
        for (int i = 0; i < 2; i++) a->dout[i] = carried(scratch, act_2d(s, s->T, s->D), "gradient of block output");
        a->partial = carried(scratch, make_partial(s, false), "partial sums");
        if (s->n_mtp > 0) {
            a->deh = carried(scratch, act_2d(s, s->T, 2 * s->D), "gradient of MTP input");
            a->demb = carried(scratch, act_2d(s, s->T, s->D), "gradient of MTP input");
        }
    }
    for (int depth = 0; depth <= s->n_mtp; depth++) depth_layout(a, depth, training, slots);

    BlockActs kind[2];
    memset(kind, 0, sizeof kind);
    scratch_layout(&kind[0], s, false, training, scratch);
    if (shape_n_moe(s) > 0) scratch_layout(&kind[1], s, true, training, scratch);
    for (int b = 0; b < s->n_blocks; b++)
        block_layout(&a->blocks[b], &kind[shape_block_is_moe(s, b) ? 1 : 0], s, training, slots);
}

void acts_free(Acts *a) {
    free(a->blocks);
    memset(a, 0, sizeof *a);
}
