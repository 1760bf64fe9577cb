/* Phase attn: Multi-head Latent Attention between two norms, and the router behind them. (V3 2.1.1, 2.1.2; eq. 1-11)
 *
 *   xn  = RMSNorm(x)
 *   c_q = RMSNorm(W_DQ xn),  c_kv = RMSNorm(W_DKV xn),  k_pe = W_KR xn       one GEMM: q_a over kv_a
 *   q   = W_UQ c_q           or W_Q xn where q has no latent
 *   kv  = W_UKV c_kv         per head: Dn of the key, Dv of the value
 *   o   = attention(rope(q), [k_nope ; rope(k_pe)], v);  x1 = x + W_O o
 *   u   = RMSNorm(x1);       router: see ops.h
 *
 * The norm of the k_pe part is not taken; k_pe is shared by all heads. */
#include "kernels/base/ints.h"
#include "observe.h"

/* Column slices of the fused latents. */
static Tensor latent_q(Layer *l, Tensor qkv_a) {
    return tensor_cols(qkv_a, 0, l->shape->Dq);
}
static Tensor latent_kv(Layer *l, Tensor qkv_a) {
    return tensor_cols(qkv_a, l->shape->kv_a_row, l->shape->Dc);
}
static Tensor latent_k_pe(Layer *l, Tensor qkv_a) {
    return tensor_cols(qkv_a, l->shape->kv_a_row + l->shape->Dc, l->shape->attention.rope);
}

/* y, or its tiles q, whichever this precision has. */
static void norm(Layer *l, Tensor y, Tensor q, ActId rstd, Tensor x, WeightId w) {
    op_residual_rmsnorm_forward(l->device, tensor_none(), y, q, l->a->t[rstd], x, tensor_none(), l->w->weight[w].w,
                                l->shape->eps, STREAM_COMPUTE);
}

static void norm_backward(Layer *l, Tensor dx, WeightId w, Tensor dy, Tensor dr, Tensor r, ActId rstd) {
    Tensor partial = l->a->t[ACT_PARTIAL];
    partial = tensor_2d(partial.data, partial.dtype, partial.shape[0], r.shape[1]);
    op_residual_rmsnorm_backward(l->device, dx, l->w->weight[w].dw, partial, dy, dr, r, l->a->t[rstd],
                                 l->w->weight[w].w, STREAM_COMPUTE);
}

/* ---- made again in backward -------------------------------------------------------------------------------------- */

void remake_xn(Layer *l) {
    Tensor *t = l->a->t;
    norm(l, t[ACT_XN], t[ACT_XN_Q], ACT_XN_RSTD, t[ACT_X], WEIGHT_ATTN_NORM);
}

void remake_cq(Layer *l) {
    Tensor *t = l->a->t;
    norm(l, t[ACT_CQ], t[ACT_CQ_Q], ACT_CQ_RSTD, latent_q(l, t[ACT_QKV_A]), WEIGHT_Q_NORM);
}

void remake_ckv(Layer *l) {
    Tensor *t = l->a->t;
    norm(l, t[ACT_CKV], t[ACT_CKV_Q], ACT_CKV_RSTD, latent_kv(l, t[ACT_QKV_A]), WEIGHT_KV_NORM);
}

void remake_u(Layer *l) {
    norm(l, l->a->t[ACT_U], tensor_none(), ACT_U_RSTD, l->a->t[ACT_X1], WEIGHT_FFN_NORM);
}

void remake_u_q(Layer *l) {
    norm(l, tensor_none(), l->a->t[ACT_U_Q], ACT_U_RSTD, l->a->t[ACT_X1], WEIGHT_FFN_NORM);
}

/* Attention's backward reads O as it was kept. */
void remake_o(Layer *l) {
    op_copy(l->device, l->a->t[ACT_O], l->a->t[ACT_O_E5M6], STREAM_COMPUTE);
}

/* The transposes for weight gradients, from what is kept. */
static void columns_from(Layer *l, ActId columns, Tensor x) {
    const Quantized q = {tensor_none(), l->a->t[columns]};
    op_quantize(l->device, q, x, STREAM_COMPUTE);
}

void remake_xn_t(Layer *l) {
    columns_from(l, ACT_XN_T, act(l, act_input_id(l->shape, ACT_XN)));
}

void remake_cq_t(Layer *l) {
    columns_from(l, ACT_CQ_T, act(l, act_input_id(l->shape, ACT_CQ)));
}

void remake_ckv_t(Layer *l) {
    columns_from(l, ACT_CKV_T, act(l, act_input_id(l->shape, ACT_CKV)));
}

void remake_o_t(Layer *l) {
    columns_from(l, ACT_O_T, l->a->t[l->shape->fp8_parts.attention_output ? ACT_O_E5M6 : ACT_O]);
}

void remake_u_t(Layer *l) {
    columns_from(l, ACT_U_T, act(l, act_input_id(l->shape, ACT_U)));
}

/* The up-projections and the split: q, k and v at once. */
void remake_qkv(Layer *l) {
    Tensor *t = l->a->t;
    Tensor q_source = act_rows(l, l->shape->Dq ? ACT_CQ : ACT_XN);
    op_gemm(l->device, t[ACT_Q], q_source, weight_fprop(l, WEIGHT_Q_B), GEMM_FPROP, false, STREAM_COMPUTE);
    op_gemm(l->device, t[ACT_KV], act_rows(l, ACT_CKV), weight_fprop(l, WEIGHT_KV_B), GEMM_FPROP, false,
            STREAM_COMPUTE);
    op_rope_split_forward(l->device, t[ACT_Q], t[ACT_K], t[ACT_V], t[ACT_Q], t[ACT_KV], latent_k_pe(l, t[ACT_QKV_A]),
                          l->batch->position, l->inv_freq, l->shape->attention, STREAM_COMPUTE);
    l->a->remade[ACT_Q] = l->a->remade[ACT_K] = l->a->remade[ACT_V] = true;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static void route(Layer *l) {
    Tensor *t = l->a->t;
    op_gemm(l->device, t[ACT_LOGITS], t[ACT_U], l->w->weight[WEIGHT_ROUTER].w, GEMM_FPROP, false, STREAM_COMPUTE);
    op_router_forward(l->device, t[ACT_IDS], t[ACT_WEIGHTS], t[ACT_SCORES], l->count ? l->w->counts : tensor_none(),
                      t[ACT_SEQ_COUNT], l->stats, t[ACT_LOGITS], l->w->weight[WEIGHT_ROUTER_BIAS].w, l->batch->position,
                      l->shape->router, STREAM_COMPUTE);
}

/* FP8: tiles for o_proj, more digits for backward. */
static void store_o(Layer *l) {
    Tensor *t = l->a->t;
    layer_quantize(l, (Quantized){t[ACT_O_Q], tensor_none()}, t[ACT_O]);
    if (l->keeps) layer_quantize(l, (Quantized){t[ACT_O_E5M6], tensor_none()}, t[ACT_O]);
}

/* Norm, latents and query heads, not yet rotated. */
static void attn_begin(Layer *l, Tensor x, Tensor branch) {
    const Device *d = l->device;
    const Weight *w = l->w->weight;
    Tensor *t = l->a->t;
    op_residual_rmsnorm_forward(d, t[ACT_X], t[ACT_XN], t[ACT_XN_Q], t[ACT_XN_RSTD], x, branch, w[WEIGHT_ATTN_NORM].w,
                                l->shape->eps, STREAM_COMPUTE);
    Tensor xn = t[act_rows_id(l->shape, ACT_XN)];
    op_gemm(d, t[ACT_QKV_A], xn, weight_fprop(l, WEIGHT_QKV_A), GEMM_FPROP, false, STREAM_COMPUTE);
    if (l->shape->Dq) remake_cq(l);
    Tensor q_source = l->shape->Dq ? t[act_rows_id(l->shape, ACT_CQ)] : xn;
    op_gemm(d, t[ACT_Q], q_source, weight_fprop(l, WEIGHT_Q_B), GEMM_FPROP, false, STREAM_COMPUTE);
}

/* From the heads' outputs to the router. */
static void attn_end(Layer *l) {
    const Device *d = l->device;
    const Weight *w = l->w->weight;
    Tensor *t = l->a->t;
    store_o(l);
    op_gemm(d, tensor_plane(t[ACT_ATTN_OUT], 0), t[act_rows_id(l->shape, ACT_O)], weight_fprop(l, WEIGHT_O), GEMM_FPROP,
            false, STREAM_COMPUTE);
    op_residual_rmsnorm_forward(d, t[ACT_X1], t[ACT_U], t[ACT_U_Q], t[ACT_U_RSTD], t[ACT_X], t[ACT_ATTN_OUT],
                                w[WEIGHT_FFN_NORM].w, l->shape->eps, STREAM_COMPUTE);
    if (l->is_moe) route(l);
}

void layer_attn_forward(Layer *l, Tensor x, Tensor branch) {
    RANGE(l->device, "attn forward");
    const Device *d = l->device;
    const ModelShape *s = l->shape;
    Tensor *t = l->a->t;

    attn_begin(l, x, branch);
    remake_ckv(l);
    op_gemm(d, t[ACT_KV], t[act_rows_id(s, ACT_CKV)], weight_fprop(l, WEIGHT_KV_B), GEMM_FPROP, false, STREAM_COMPUTE);
    op_rope_split_forward(d, t[ACT_Q], t[ACT_K], t[ACT_V], t[ACT_Q], t[ACT_KV], latent_k_pe(l, t[ACT_QKV_A]),
                          l->batch->position, l->inv_freq, s->attention, STREAM_COMPUTE);
    op_attention_forward(d, t[ACT_O], t[ACT_LSE], t[ACT_Q], t[ACT_K], t[ACT_V], l->batch->doc_start, s->attention,
                         STREAM_COMPUTE);
    attn_end(l);
    layer_observe(l, IN_ATTN);
}

/* ---- generation -------------------------------------------------------------------------------------------------- */

void layer_cache_forward(Layer *l) {
    const AttentionShape h = l->shape->attention;
    const Tensor *t = l->a->t;
    op_copy(l->device, tensor_cols(l->cache, 0, l->shape->Dc), t[act_rows_id(l->shape, ACT_CKV)], STREAM_COMPUTE);
    op_copy(l->device, tensor_cols(l->cache, l->shape->Dc, h.rope), tensor_cols(t[ACT_K], h.nope, h.rope),
            STREAM_COMPUTE);
}

/* The normed latents of new tokens, as W_UKV would find them: in FP8 rounded to E4M3. */
static void cache_latents(Layer *l, Tensor latents) {
    const Tensor none = tensor_none(), tiles = l->a->t[ACT_CKV_Q];
    const bool is_fp8 = act_rows_id(l->shape, ACT_CKV) == ACT_CKV_Q;
    norm(l, is_fp8 ? none : latents, is_fp8 ? tiles : none, ACT_CKV_RSTD, latent_kv(l, l->a->t[ACT_QKV_A]),
         WEIGHT_KV_NORM);
    if (is_fp8) op_copy(l->device, latents, tiles, STREAM_COMPUTE);
}

/* W_UKV for products by heads, whose rows blocks of 128 do not follow: in FP8 what the blocks mean, made again for each
 * pass, so that no wide copy of a weight is kept. */
static Tensor head_weight(Layer *l) {
    const Tensor w = weight_fprop(l, WEIGHT_KV_B), wide = l->a->t[ACT_KV_B];
    if (w.dtype != DTYPE_E4M3) return w;
    op_copy(l->device, wide, w, STREAM_COMPUTE);
    return wide;
}

/* k_nope = W_UK c and v = W_UV c are linear in the latent c, so q_nope . k_nope = (W_UK^T q_nope) . c, and the sum of
 * p v is W_UV times the sum of p c. (V2 2.1.2) */
void layer_attn_decode(Layer *l, Tensor x, Tensor branch) {
    const Device *d = l->device;
    const ModelShape *s = l->shape;
    const AttentionShape h = s->attention;
    const int64_t Dqk = h.nope + h.rope, n_partials = s->T * h.n_heads * ceil_div(l->cache.shape[0], DECODE_CHUNK);
    AttentionShape k_pe = h; /* one head that is rotated whole */
    k_pe.n_heads = 1, k_pe.nope = 0;
    const HeadSteps query = {h.n_heads, s->Dc, Dqk, h.nope + h.value};
    const HeadSteps value = {h.n_heads, h.value, s->Dc, h.nope + h.value};
    Tensor *t = l->a->t, kv_b = head_weight(l);
    Tensor own = tensor_rows(l->cache, l->cache.shape[0] - s->T, s->T);

    attn_begin(l, x, branch);
    cache_latents(l, tensor_cols(own, 0, s->Dc));
    op_rope_forward(d, tensor_cols(own, s->Dc, h.rope), latent_k_pe(l, t[ACT_QKV_A]), l->batch->position, l->inv_freq,
                    k_pe, STREAM_COMPUTE);
    op_rope_forward(d, t[ACT_Q], t[ACT_Q], l->batch->position, l->inv_freq, h, STREAM_COMPUTE);
    op_head_gemm(d, tensor_cols(t[ACT_Q_LATENT], 0, s->Dc), tensor_cols(t[ACT_Q], 0, h.nope),
                 tensor_rows(kv_b, 0, h.nope), GEMM_DGRAD, query, STREAM_COMPUTE);
    op_attention_decode(d, t[ACT_O_LATENT], tensor_rows(t[ACT_DECODE_PARTIAL], 0, n_partials), t[ACT_Q_LATENT],
                        t[ACT_Q], l->cache, h, STREAM_COMPUTE);
    op_head_gemm(d, tensor_cols(t[ACT_O], 0, h.value), tensor_cols(t[ACT_O_LATENT], 0, s->Dc),
                 tensor_rows(kv_b, h.nope, h.value), GEMM_FPROP, value, STREAM_COMPUTE);
    attn_end(l);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

static void route_backward(Layer *l) {
    Tensor *t = l->a->t;
    op_router_backward(l->device, t[ACT_DLOGITS], t[ACT_DWEIGHTS], t[ACT_IDS], t[ACT_WEIGHTS], t[ACT_SCORES],
                       t[ACT_SEQ_COUNT], l->batch->position, l->params, l->shape->router, STREAM_COMPUTE);
    Tensor plane = tensor_plane(t[ACT_DU], t[ACT_DU].shape[0] - 1);
    op_gemm(l->device, plane, t[ACT_DLOGITS], l->w->weight[WEIGHT_ROUTER].w, GEMM_DGRAD, false, STREAM_COMPUTE);
}

/* From the heads' gradients back to the fused latents and to xn. */
static void latents_backward(Layer *l) {
    const Device *d = l->device;
    const ModelShape *s = l->shape;
    Tensor *t = l->a->t;
    op_gemm(d, t[ACT_DCKV], gradient_rows(l, ACT_DKV), weight_dgrad(l, WEIGHT_KV_B), GEMM_DGRAD, false, STREAM_COMPUTE);
    norm_backward(l, latent_kv(l, t[ACT_DQKV_A]), WEIGHT_KV_NORM, t[ACT_DCKV], tensor_none(),
                  latent_kv(l, t[ACT_QKV_A]), ACT_CKV_RSTD);
    Tensor dq = gradient_rows(l, ACT_DQ);
    if (s->Dq) {
        op_gemm(d, t[ACT_DCQ], dq, weight_dgrad(l, WEIGHT_Q_B), GEMM_DGRAD, false, STREAM_COMPUTE);
        norm_backward(l, latent_q(l, t[ACT_DQKV_A]), WEIGHT_Q_NORM, t[ACT_DCQ], tensor_none(),
                      latent_q(l, t[ACT_QKV_A]), ACT_CQ_RSTD);
    }
    op_gemm(d, t[ACT_DXN], gradient_rows(l, ACT_DQKV_A), weight_dgrad(l, WEIGHT_QKV_A), GEMM_DGRAD, false,
            STREAM_COMPUTE);
    if (!s->Dq) op_gemm(d, t[ACT_DXN], dq, weight_dgrad(l, WEIGHT_Q_B), GEMM_DGRAD, true, STREAM_COMPUTE);
}

void layer_attn_backward_input(Layer *l, Tensor dx) {
    RANGE(l->device, "attn backward input");
    const Device *d = l->device;
    const ModelShape *s = l->shape;
    Tensor *t = l->a->t;

    if (l->is_moe) route_backward(l);
    norm_backward(l, t[ACT_DX1], WEIGHT_FFN_NORM, t[ACT_DU], l->dout, t[ACT_X1], ACT_U_RSTD);
    op_gemm(d, t[ACT_DO], gradient_rows(l, ACT_DX1), weight_dgrad(l, WEIGHT_O), GEMM_DGRAD, false, STREAM_COMPUTE);
    op_attention_backward(d, t[ACT_DQ], t[ACT_DK], t[ACT_DV], t[ACT_DELTA], t[ACT_DO], act(l, ACT_O), act(l, ACT_Q),
                          act(l, ACT_K), act(l, ACT_V), t[ACT_LSE], l->batch->doc_start, s->attention, STREAM_COMPUTE);
    /* Rows between the latents belong to padding rows of the fused weight: their gradient is zero. */
    if (s->kv_a_row > s->Dq) op_zero(d, t[ACT_DQKV_A], STREAM_COMPUTE);
    op_rope_split_backward(d, t[ACT_DQ], t[ACT_DKV], latent_k_pe(l, t[ACT_DQKV_A]), t[ACT_DQ], t[ACT_DK], t[ACT_DV],
                           l->batch->position, l->inv_freq, s->attention, STREAM_COMPUTE);
    latents_backward(l);
    norm_backward(l, dx, WEIGHT_ATTN_NORM, t[ACT_DXN], t[ACT_DX1], t[ACT_X], ACT_XN_RSTD);
    layer_observe(l, IN_ATTN_BACK);
}

/* dw += dy^T x */
static void wgrad(Layer *l, WeightId w, ActId dy, ActId x) {
    op_gemm(l->device, l->w->weight[w].dw, act_columns(l, dy), act_columns(l, x), GEMM_WGRAD, true, STREAM_COMPUTE);
}

void layer_attn_backward_weight(Layer *l) {
    RANGE(l->device, "attn backward weight");
    const Device *d = l->device;
    const Weight *w = l->w->weight;
    Tensor *t = l->a->t;
    const ActId q_source = l->shape->Dq ? ACT_CQ : ACT_XN;
    wgrad(l, WEIGHT_O, ACT_DX1, ACT_O);
    wgrad(l, WEIGHT_KV_B, ACT_DKV, ACT_CKV);
    wgrad(l, WEIGHT_Q_B, ACT_DQ, q_source);
    wgrad(l, WEIGHT_QKV_A, ACT_DQKV_A, ACT_XN);
    if (l->is_moe) op_gemm(d, w[WEIGHT_ROUTER].dw, t[ACT_DLOGITS], act(l, ACT_U), GEMM_WGRAD, true, STREAM_COMPUTE);
}
