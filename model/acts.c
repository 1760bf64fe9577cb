/* See acts.h. The makers say every shape once; the table says the rest. */
#include "acts.h"

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
static Tensor tiles(bool has, int64_t rows, int64_t cols) {
    return has && rows > 0 && cols > 0 ? tensor_tiles(NULL, NULL, DTYPE_E4M3, rows, cols) : tensor_none();
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

/* A row of which there are tiles alone where this part of FP8 is in use. */
#define MAKE_WIDE(name, part, tensor) MAKE(name, s->fp8_parts.part ? tensor_none() : tensor)
#define MAKE_WIDE_MOE(name, part, tensor) MAKE_MOE(name, s->fp8_parts.part ? tensor_none() : tensor)
/* Its tiles: of the rows for the GEMM `part`, of the columns for Wgrad. */
#define MAKE_TILES(name, part, rows, cols)                                                                             \
    MAKE(name##_q, tiles(s->fp8_parts.part, rows, cols))                                                               \
    MAKE(name##_t, tiles(s->fp8_parts.wgrad, cols, rows))
#define MAKE_TILES_MOE(name, part, rows, cols)                                                                         \
    MAKE_MOE(name##_q, tiles(s->fp8_parts.part, rows, cols))                                                           \
    MAKE_MOE(name##_t, tiles(s->fp8_parts.wgrad, cols, rows))

MAKE(hidden, act_2d(s, s->T, s->D))
MAKE_WIDE(norm, inputs, act_2d(s, s->T, s->D))
MAKE(per_token, f32_1d(s->T))
MAKE(qkv_a, act_2d(s, s->T, qkv_a_width(s)))
MAKE_WIDE(cq, inputs, s->Dq ? act_2d(s, s->T, s->Dq) : tensor_none())
MAKE(dcq, s->Dq ? act_2d(s, s->T, s->Dq) : tensor_none())
MAKE(cq_rstd, s->Dq ? f32_1d(s->T) : tensor_none())
MAKE_WIDE(ckv, inputs, act_2d(s, s->T, s->Dc))
MAKE(dckv, act_2d(s, s->T, s->Dc))
MAKE(kv, act_2d(s, s->T, s->kv_width))
MAKE(qk, act_2d(s, s->T, s->qk_width))
MAKE(v, act_2d(s, s->T, s->v_width))
MAKE(per_head, f32_2d(s->T, s->attention.n_heads))
/* Decoding alone. */
MAKE(latents, s->cache_len ? act_2d(s, s->T, s->attention.n_heads * s->Dc) : tensor_none())
MAKE(decode_partial, s->cache_len
                         ? f32_2d(s->T * s->attention.n_heads * ceil_div(s->cache_len, DECODE_CHUNK), s->Dc + 2)
                         : tensor_none())
MAKE(kv_b, s->cache_len && s->fp8_parts.fprop ? act_2d(s, s->kv_width, s->Dc) : tensor_none())
MAKE(attn_out, tensor_3d(NULL, s->act, 1, s->T, s->D))
MAKE_MOE(scores, f32_2d(s->T, s->router.n_experts))
MAKE_MOE(dlogits, act_2d(s, s->T, s->router.n_experts))
MAKE_MOE(ids, i32_2d(s->T, s->router.n_chosen))
MAKE_MOE(weights, f32_2d(s->T, s->router.n_chosen))
MAKE_MOE(seq_count, i32_2d(s->B, s->router.n_experts))
/* What is sent: tiles, or wide rows. */
static Tensor sent(const ModelShape *s, bool as_tiles) {
    return as_tiles ? tiles(true, s->T_received, s->D) : act_2d(s, s->T_received, s->D);
}
MAKE_MOE(received, sent(s, s->fp8_parts.inputs))
MAKE_WIDE_MOE(dreceived, gradients, s->R > 1 ? sent(s, false) : tensor_none())
MAKE_MOE(dreceived_q, s->R > 1 && s->fp8_parts.gradients ? sent(s, true) : tensor_none())
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
MAKE_WIDE_MOE(xg, inputs, act_2d(s, s->N, s->D))
MAKE_WIDE_MOE(a, swiglu, act_2d(s, s->N, s->F))
MAKE_WIDE_MOE(dyg, gradients, act_2d(s, s->N, s->D))
MAKE_WIDE_MOE(dh, swiglu, act_2d(s, s->N, gate_up(s, s->F)))
MAKE(hs, mlp_2d(s, is_moe, true))
MAKE(das, mlp_2d(s, is_moe, false))
MAKE_WIDE(as, swiglu, mlp_2d(s, is_moe, false))
MAKE_WIDE(dhs, swiglu, mlp_2d(s, is_moe, true))
MAKE(du, du_planes(s, is_moe))
MAKE(partial, f32_2d(partials(s), widest_norm(s)))

MAKE_TILES(norm, fprop, s->T, s->D)
MAKE_TILES(cq, fprop, s->T, s->Dq)
MAKE_TILES(ckv, fprop, s->T, s->Dc)
MAKE_TILES(o, fprop, s->T, s->v_width)
MAKE(o_e5m6, s->fp8_parts.attention_output ? tensor_tiles(NULL, NULL, DTYPE_E5M6, s->T, s->v_width) : tensor_none())
MAKE_TILES_MOE(xg, fprop, s->N, s->D)
MAKE_MOE(h_q, tiles(s->fp8_parts.swiglu_input, s->N, 2 * s->F))
MAKE_TILES_MOE(a, fprop, s->N, s->F)
MAKE(hs_q, tiles(s->fp8_parts.swiglu_input, s->T, 2 * mlp_width(s, is_moe)))
MAKE_TILES(as, fprop, s->T, mlp_width(s, is_moe))
MAKE(dout_q, tiles(s->fp8_parts.dgrad, s->T, s->D))
MAKE(dout_t, tiles(s->fp8_parts.wgrad &&mlp_width(s, is_moe), s->D, s->T))
MAKE_TILES_MOE(dyg, dgrad, s->N, s->D)
MAKE_TILES_MOE(dh, dgrad, s->N, 2 * s->F)
MAKE_TILES(dhs, dgrad, s->T, 2 * mlp_width(s, is_moe))
MAKE_TILES(dx1, dgrad, s->T, s->D)
MAKE_TILES(dq, dgrad, s->T, s->qk_width)
MAKE_TILES(dkv, dgrad, s->T, s->kv_width)
MAKE_TILES(dqkv_a, dgrad, s->T, qkv_a_width(s))

/* ---- the table --------------------------------------------------------------------------------------------------- */

#define KEPT(name, make, reader)                                                                                       \
    { name, make, LIFE_KEPT, reader, 0, 0, NULL, ACT_COUNT }
#define REMADE(name, make, reader, phases, bit, remake)                                                                \
    { name, make, LIFE_KEPT, reader, phases, bit, remake, ACT_COUNT }
#define SAME(name, make, reader, other)                                                                                \
    { name, make, LIFE_KEPT, reader, 0, 0, NULL, other }
#define GRADIENT(name, make)                                                                                           \
    { name, make, LIFE_GRADIENT, READER_WEIGHT, 0, 0, NULL, ACT_COUNT }
/* One of which FP8's Wgrad reads tiles, made in these phases. */
#define WIDE_GRADIENT(name, make, phases)                                                                              \
    { name, make, LIFE_GRADIENT, READER_WEIGHT, phases, 0, NULL, ACT_COUNT }
/* The transpose of a kept row, for its weight's gradient. */
#define COLUMNS(name, make, remake)                                                                                    \
    { name, make, LIFE_KEPT, READER_WEIGHT, IN_WEIGHT_BACK, -1, remake, ACT_COUNT }
#define SCRATCH(name, make, phases)                                                                                    \
    { name, make, LIFE_SCRATCH, READER_NONE, phases, 0, NULL, ACT_COUNT }

enum { IN_BACK = IN_EXPERTS_BACK | IN_ATTN_BACK | IN_WEIGHT_BACK };

static const ActRow table[ACT_COUNT] = {
    [ACT_X] = KEPT("residual", make_hidden, READER_WEIGHT),
    [ACT_XN] = REMADE("norms", make_norm, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_xn),
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
    [ACT_O] = REMADE("attention output", make_v, READER_WEIGHT, IN_ATTN | IN_ATTN_BACK | IN_WEIGHT_BACK,
                     RECOMPUTE_FROM_E5M6, remake_o),
    [ACT_LSE] = KEPT("attention lse", make_per_head, READER_INPUT),
    [ACT_Q_LATENT] = SCRATCH("latent heads", make_latents, IN_ATTN),
    [ACT_O_LATENT] = SCRATCH("latent heads", make_latents, IN_ATTN),
    [ACT_DECODE_PARTIAL] = SCRATCH("attention of cache chunks", make_decode_partial, IN_ATTN),
    [ACT_KV_B] = SCRATCH("kv_b for heads", make_kv_b, IN_ATTN),
    [ACT_ATTN_OUT] = SCRATCH("attention branch", make_attn_out, IN_ATTN),
    [ACT_X1] = KEPT("residual", make_hidden, READER_WEIGHT),
    [ACT_U] = REMADE("norms", make_hidden, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS | RECOMPUTE_FOR_FP8, remake_u),
    [ACT_U_RSTD] = KEPT("norms' rstd", make_per_token, READER_WEIGHT),
    [ACT_LOGITS] = SCRATCH("router logits", make_scores, IN_ATTN),
    [ACT_SCORES] = KEPT("routing", make_scores, READER_INPUT),
    [ACT_IDS] = KEPT("routing", make_ids, READER_INPUT),
    [ACT_WEIGHTS] = KEPT("routing", make_weights, READER_INPUT),
    [ACT_SEQ_COUNT] = KEPT("routing", make_seq_count, READER_INPUT),

    [ACT_RECEIVED] = {"received tokens", make_received, LIFE_KEPT, READER_WEIGHT, IN_ATTN | IN_EXPERTS,
                      RECOMPUTE_RECEIVED, NULL, ACT_U},
    [ACT_RECEIVED_IDS] = SAME("routing", make_received_ids, READER_INPUT, ACT_IDS),
    [ACT_RECEIVED_WEIGHTS] = SAME("routing", make_received_weights, READER_INPUT, ACT_WEIGHTS),

    [ACT_ROW_TOKEN] = KEPT("expert row map", make_row_i32, READER_WEIGHT),
    [ACT_ROW_WEIGHT] = KEPT("expert row map", make_row_f32, READER_WEIGHT),
    [ACT_TOKEN_ROW] = KEPT("expert row map", make_token_row, READER_WEIGHT),
    [ACT_EXPERT_START] = KEPT("expert row map", make_expert_start, READER_WEIGHT),
    [ACT_XG] =
        REMADE("expert rows", make_xg, READER_WEIGHT, IN_EXPERTS | IN_WEIGHT_BACK, RECOMPUTE_EXPERT_ROWS, remake_xg),
    [ACT_H] = REMADE("expert gate and up", make_rows_h, READER_WEIGHT, IN_EXPERTS, RECOMPUTE_FROM_TILES, NULL),
    [ACT_A] = REMADE("expert SwiGLU", make_a, READER_WEIGHT, IN_EXPERTS | IN_WEIGHT_BACK,
                     RECOMPUTE_SWIGLU | RECOMPUTE_FOR_FP8, remake_a),
    [ACT_Y] = SCRATCH("expert output rows", make_rows_d, IN_EXPERTS),
    [ACT_ROUTED] = SCRATCH("routed sum", make_exchanged, IN_EXPERTS),
    [ACT_HS] = REMADE("dense and shared gate and up", make_hs, READER_WEIGHT, IN_EXPERTS, RECOMPUTE_FROM_TILES, NULL),
    [ACT_AS] = REMADE("dense and shared SwiGLU", make_as, READER_WEIGHT, IN_EXPERTS | IN_WEIGHT_BACK,
                      RECOMPUTE_SWIGLU | RECOMPUTE_FOR_FP8, remake_as),

    [ACT_DRECEIVED] = WIDE_GRADIENT("gradient of received", make_dreceived, IN_EXPERTS_BACK),
    [ACT_DYG] = REMADE("gradient of expert output", make_dyg, READER_WEIGHT, IN_BACK, -1, remake_dyg),
    [ACT_DA] = SCRATCH("gradient of expert SwiGLU", make_rows_f, IN_EXPERTS_BACK),
    [ACT_DROW_WEIGHT] = SCRATCH("gradient of row weights", make_row_f32, IN_EXPERTS_BACK),
    [ACT_DH] = WIDE_GRADIENT("gradient of expert gate and up", make_dh, IN_EXPERTS_BACK),
    [ACT_DXG] = SCRATCH("gradient of expert rows", make_rows_d, IN_EXPERTS_BACK),
    /* These travel while the experts' weights take their gradients. */
    [ACT_DROUTED] = SCRATCH("gradient of routed tokens", make_exchanged, IN_EXPERTS_BACK | IN_WEIGHT_BACK),
    [ACT_DRECEIVED_WEIGHTS] = SCRATCH("gradient of routing", make_exchanged_weights, IN_EXPERTS_BACK | IN_WEIGHT_BACK),
    [ACT_DAS] = SCRATCH("gradient of dense and shared SwiGLU", make_das, IN_EXPERTS_BACK),
    [ACT_DHS] = WIDE_GRADIENT("gradient of dense and shared gate and up", make_dhs, IN_EXPERTS_BACK),
    [ACT_DU] = SCRATCH("gradient of u, by plane", make_du, IN_EXPERTS_BACK | IN_ATTN_BACK),
    [ACT_DWEIGHTS] = SCRATCH("gradient of routing", make_weights, IN_EXPERTS_BACK | IN_ATTN_BACK),
    [ACT_DLOGITS] = GRADIENT("gradient of router logits", make_dlogits),
    [ACT_DX1] = WIDE_GRADIENT("gradient of the residual", make_hidden, IN_ATTN_BACK),
    [ACT_DO] = SCRATCH("gradient of attention output", make_v, IN_ATTN_BACK),
    [ACT_DELTA] = SCRATCH("attention delta", make_per_head, IN_ATTN_BACK),
    [ACT_DQ] = WIDE_GRADIENT("gradient of q", make_qk, IN_ATTN_BACK),
    [ACT_DK] = SCRATCH("gradient of k and v", make_qk, IN_ATTN_BACK),
    [ACT_DV] = SCRATCH("gradient of k and v", make_v, IN_ATTN_BACK),
    [ACT_DKV] = WIDE_GRADIENT("gradient of kv", make_kv, IN_ATTN_BACK),
    [ACT_DQKV_A] = WIDE_GRADIENT("gradient of latents", make_qkv_a, IN_ATTN_BACK),
    [ACT_DCQ] = SCRATCH("gradient of norms", make_dcq, IN_ATTN_BACK),
    [ACT_DCKV] = SCRATCH("gradient of norms", make_dckv, IN_ATTN_BACK),
    [ACT_DXN] = SCRATCH("gradient of norms", make_hidden, IN_ATTN_BACK),
    [ACT_PARTIAL] = SCRATCH("partial sums", make_partial, IN_ATTN_BACK),

    [ACT_XN_Q] = REMADE("norms", make_norm_q, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_xn),
    [ACT_XN_T] = COLUMNS("norms", make_norm_t, remake_xn_t),
    [ACT_CQ_Q] = REMADE("norms", make_cq_q, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_cq),
    [ACT_CQ_T] = COLUMNS("norms", make_cq_t, remake_cq_t),
    [ACT_CKV_Q] = REMADE("norms", make_ckv_q, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_ckv),
    [ACT_CKV_T] = COLUMNS("norms", make_ckv_t, remake_ckv_t),
    [ACT_O_Q] = SCRATCH("attention output", make_o_q, IN_ATTN),
    [ACT_O_T] = COLUMNS("attention output", make_o_t, remake_o_t),
    [ACT_O_E5M6] = KEPT("attention output", make_o_e5m6, READER_WEIGHT),
    [ACT_U_Q] = REMADE("norms", make_norm_q, READER_WEIGHT, IN_ALL, RECOMPUTE_NORMS, remake_u_q),
    [ACT_U_T] = COLUMNS("norms", make_norm_t, remake_u_t),
    [ACT_XG_Q] = REMADE("expert rows", make_xg_q, READER_WEIGHT, IN_EXPERTS, RECOMPUTE_EXPERT_ROWS, NULL),
    [ACT_XG_T] = COLUMNS("expert rows", make_xg_t, remake_xg_t),
    [ACT_H_Q] = KEPT("expert gate and up", make_h_q, READER_INPUT),
    [ACT_A_Q] = SCRATCH("expert SwiGLU", make_a_q, IN_EXPERTS),
    [ACT_A_T] = GRADIENT("expert SwiGLU", make_a_t),
    [ACT_HS_Q] = KEPT("dense and shared gate and up", make_hs_q, READER_INPUT),
    [ACT_AS_Q] = SCRATCH("dense and shared SwiGLU", make_as_q, IN_EXPERTS),
    [ACT_AS_T] = GRADIENT("dense and shared SwiGLU", make_as_t),
    [ACT_DOUT_Q] = SCRATCH("gradient of block output", make_dout_q, IN_EXPERTS_BACK),
    [ACT_DOUT_T] = GRADIENT("gradient of block output", make_dout_t),
    [ACT_DRECEIVED_Q] = SCRATCH("gradient of received", make_dreceived_q, IN_EXPERTS_BACK),
    [ACT_DYG_Q] = REMADE("gradient of expert output", make_dyg_q, READER_INPUT, IN_EXPERTS_BACK, -1, remake_dyg),
    [ACT_DYG_T] = GRADIENT("gradient of expert output", make_dyg_t),
    [ACT_DH_Q] = SCRATCH("gradient of expert gate and up", make_dh_q, IN_EXPERTS_BACK),
    [ACT_DH_T] = GRADIENT("gradient of expert gate and up", make_dh_t),
    [ACT_DHS_Q] = SCRATCH("gradient of dense and shared gate and up", make_dhs_q, IN_EXPERTS_BACK),
    [ACT_DHS_T] = GRADIENT("gradient of dense and shared gate and up", make_dhs_t),
    [ACT_DX1_Q] = SCRATCH("gradient of the residual", make_dx1_q, IN_ATTN_BACK),
    [ACT_DX1_T] = GRADIENT("gradient of the residual", make_dx1_t),
    [ACT_DQ_Q] = SCRATCH("gradient of q", make_dq_q, IN_ATTN_BACK),
    [ACT_DQ_T] = GRADIENT("gradient of q", make_dq_t),
    [ACT_DKV_Q] = SCRATCH("gradient of kv", make_dkv_q, IN_ATTN_BACK),
    [ACT_DKV_T] = GRADIENT("gradient of kv", make_dkv_t),
    [ACT_DQKV_A_Q] = SCRATCH("gradient of latents", make_dqkv_a_q, IN_ATTN_BACK),
    [ACT_DQKV_A_T] = GRADIENT("gradient of latents", make_dqkv_a_t),
};

/* How FP8 GEMMs read a row; 0 (ACT_X is never one) = they do not. */
static const struct {
    ActId rows, columns;
} tiles_of[ACT_COUNT] = {
    [ACT_XN] = {ACT_XN_Q, ACT_XN_T},
    [ACT_CQ] = {ACT_CQ_Q, ACT_CQ_T},
    [ACT_CKV] = {ACT_CKV_Q, ACT_CKV_T},
    [ACT_O] = {ACT_O_Q, ACT_O_T},
    [ACT_U] = {ACT_U_Q, ACT_U_T},
    [ACT_XG] = {ACT_XG_Q, ACT_XG_T},
    [ACT_H] = {ACT_H_Q, 0},
    [ACT_A] = {ACT_A_Q, ACT_A_T},
    [ACT_HS] = {ACT_HS_Q, 0},
    [ACT_AS] = {ACT_AS_Q, ACT_AS_T},
    [ACT_DYG] = {ACT_DYG_Q, ACT_DYG_T},
    [ACT_DH] = {ACT_DH_Q, ACT_DH_T},
    [ACT_DHS] = {ACT_DHS_Q, ACT_DHS_T},
    [ACT_DX1] = {ACT_DX1_Q, ACT_DX1_T},
    [ACT_DQ] = {ACT_DQ_Q, ACT_DQ_T},
    [ACT_DKV] = {ACT_DKV_Q, ACT_DKV_T},
    [ACT_DQKV_A] = {ACT_DQKV_A_Q, ACT_DQKV_A_T},
};

/* Are the rows of `id` read as tiles: an input by Fprop, a gradient by Dgrad, gate and up by SwiGLU's backward? */
static bool rows_are_tiles(const ModelShape *s, ActId id) {
    if (!tiles_of[id].rows) return false;
    if (id == ACT_H || id == ACT_HS) return s->fp8_parts.swiglu;
    return id > ACT_AS ? s->fp8_parts.dgrad : s->fp8_parts.fprop;
}

ActId act_rows_id(const ModelShape *s, ActId id) {
    return rows_are_tiles(s, id) ? tiles_of[id].rows : id;
}

ActId act_columns_id(const ModelShape *s, ActId id) {
    return s->fp8_parts.wgrad && tiles_of[id].columns ? tiles_of[id].columns : id;
}

ActId act_input_id(const ModelShape *s, ActId id) {
    return s->fp8_parts.inputs && tiles_of[id].rows ? tiles_of[id].rows : id;
}

Quantized act_tiles(const BlockActs *a, ActId id) {
    const ActId rows = tiles_of[id].rows, columns = tiles_of[id].columns;
    const Quantized q = {rows ? a->t[rows] : tensor_none(), columns ? a->t[columns] : tensor_none()};
    return q;
}

const ActRow *act_row(ActId id) {
    return &table[id];
}

bool act_is_remade(const ActRow *row, const ModelShape *s) {
    return row->recompute == -1 || (row->recompute & s->recompute) != 0;
}

Life act_life(const ActRow *row, const ModelShape *s) {
    const bool tiles_wait = row->life == LIFE_GRADIENT && row->phases && s->fp8_parts.wgrad;
    return tiles_wait || act_is_remade(row, s) ? LIFE_SCRATCH : row->life;
}
