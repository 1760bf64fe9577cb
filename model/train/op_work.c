/* See op_work.h. */
#include "op_work.h"

#include <string.h>

#include "kernels/base/ints.h"

/* Ops of a block and around blocks, as counted on the quick start. */
enum { OPS_OF_MOE_BLOCK = 66, OPS_OF_DENSE_BLOCK = 48, OPS_OF_DEPTH = 45, OPS_OF_CHUNK = 5, PHASES_WITH_OPS = 6 };

void op_work_add(OpWork *sum, const OpWork *w) {
    sum->linear += w->linear;
    sum->linear_gradient += w->linear_gradient;
    sum->routed += w->routed;
    sum->routed_gradient += w->routed_gradient;
    sum->bf16 += w->bf16;
    sum->core_forward += w->core_forward;
    sum->core_backward += w->core_backward;
    sum->gradient_bytes += w->gradient_bytes;
    sum->bf16_gradient_bytes += w->bf16_gradient_bytes;
    sum->bytes += w->bytes;
    sum->remade += w->remade;
    sum->remade_bytes += w->remade_bytes;
    sum->ops += w->ops;
}

/* ---- attn -------------------------------------------------------------------------------------------------------- */

/* Weights that the remade q, k and v are multiplied with again. */
static double up_weights(const ModelShape *s) {
    return (double)(s->Dq ? s->Dq : s->D) * (double)s->qk_width + (double)s->Dc * (double)s->kv_width;
}

static double attn_weights(const ModelShape *s) {
    const double D = (double)s->D, latents = (double)(s->Dq + s->Dc + s->attention.rope);
    return latents * D + up_weights(s) + (double)s->v_width * D;
}

/* Elements a token's ops read and write: two norms with residual and branch (4 D forward, 6 D backward each), the
 * latents' norms, splitting and rotating q, k, v. */
static double attn_elements(const ModelShape *s, Pass pass) {
    const double D = (double)s->D, latents = (double)(s->Dq + s->Dc);
    const double heads = 2 * (double)s->kv_width + 3 * (double)s->qk_width;
    return pass == PASS_BACKWARD_WEIGHT ? 0 : (pass == PASS_FORWARD ? 8 : 12) * D + 2 * latents + heads;
}

/* Bytes that FP8 adds: inputs of weight gradients transposed (a byte read, a byte written; attention's output by way of
 * its 12-bit form), gradients quantised both ways (two bytes read, two written). */
static double attn_cast_bytes(const ModelShape *s, Pass pass) {
    const double D = (double)s->D, latents = (double)(s->Dq + s->Dc);
    if (!s->fp8 || pass == PASS_FORWARD) return s->fp8 ? 1.5 * (double)s->v_width : 0;
    if (pass == PASS_BACKWARD_WEIGHT) return 2 * (D + latents) + 2.5 * (double)s->v_width;
    return 4 * (D + (double)(s->qk_width + s->kv_width) + latents + (double)s->attention.rope);
}

static OpWork attn_work(const ModelShape *s, bool is_moe, Pass pass) {
    const double T = (double)s->T, products = 2 * T * attn_weights(s);
    const double router = is_moe ? 2 * T * (double)s->D * s->router.n_experts : 0;
    const AttentionShape *a = &s->attention;
    const double qk = (double)(a->nope + a->rope), v = (double)a->value;
    const double head_pairs = 2 * T * ((double)s->S + 1) / 2 * a->n_heads; /* causal */
    OpWork w = {.bf16 = router, .bytes = T * (2 * attn_elements(s, pass) + attn_cast_bytes(s, pass))};
    if (pass == PASS_BACKWARD_WEIGHT) {
        w.linear_gradient = products;
        w.gradient_bytes = 8 * attn_weights(s);
        w.bf16_gradient_bytes = is_moe ? 8 * (double)s->D * s->router.n_experts : 0;
        return w;
    }
    w.linear = products;
    if (pass == PASS_FORWARD) w.core_forward = head_pairs * (qk + v);
    if (pass == PASS_FORWARD) return w;
    w.core_backward = head_pairs * (3 * qk + 2 * v);
    if (s->recompute & RECOMPUTE_NORMS) w.remade_bytes += 2 * T * (4 * (double)s->D + 2 * (double)(s->Dq + s->Dc));
    if (!(s->recompute & RECOMPUTE_UP_PROJECTIONS)) return w;
    w.remade_bytes += 2 * T * (2 * (double)s->kv_width + 3 * (double)s->qk_width);
    w.remade = 2 * T * up_weights(s);
    return w;
}

/* ---- experts ----------------------------------------------------------------------------------------------------- */

/* Width of SwiGLU rows a token has in a block: its experts' and the shared ones', or the dense MLP's. */
static double swiglu_width(const ModelShape *s, bool is_moe) {
    return is_moe ? (double)s->router.n_chosen * (double)s->F + (double)s->F_shared : (double)s->F_dense;
}

/* Bytes of SwiGLU (3 of its width forward, 5 backward), and in MoE blocks of rows copied to experts and back (5 K D)
 * and their sums (8 D); FP8 adds transposes of inputs and quantises the output's gradient both ways. */
static double experts_bytes(const ModelShape *s, bool is_moe, Pass pass) {
    const double D = (double)s->D, rows = is_moe ? s->router.n_chosen * D : 0, width = swiglu_width(s, is_moe);
    if (pass == PASS_BACKWARD_WEIGHT) return s->fp8 ? 2 * (D + rows) : 0;
    const double elements = (pass == PASS_FORWARD ? 3 : 5) * width + 2.5 * rows + (is_moe ? 4 * D : 0);
    return 2 * elements + (s->fp8 && pass == PASS_BACKWARD_INPUT ? 4 * D + width : 0);
}

static OpWork experts_work(const ModelShape *s, bool is_moe, Pass pass) {
    const double T = (double)s->T, D = (double)s->D, mlp = 3 * D * (double)(is_moe ? s->F_shared : s->F_dense);
    const double expert = is_moe ? 3 * D * (double)s->F : 0;
    const double products = 2 * T * mlp, routed = 2 * T * expert * s->router.n_chosen;
    OpWork w = {.bytes = T * experts_bytes(s, is_moe, pass)};
    if (pass == PASS_BACKWARD_WEIGHT) {
        w.linear_gradient = products;
        w.routed_gradient = routed;
        w.gradient_bytes = 8 * (mlp + expert * s->n_local);
        return w;
    }
    w.linear = products;
    w.routed = routed;
    if (pass == PASS_BACKWARD_INPUT && s->recompute & RECOMPUTE_SWIGLU)
        w.remade_bytes = 2 * T * 3 * swiglu_width(s, is_moe);
    return w;
}

/* ---- all --------------------------------------------------------------------------------------------------------- */

OpWork op_work_of_phase(const ModelShape *s, int block, Phase phase, Pass pass) {
    const bool is_moe = shape_block_is_moe(s, block);
    OpWork w = {0};
    if (phase == PHASE_DISPATCH || phase == PHASE_COMBINE) return w;
    w = phase == PHASE_ATTN ? attn_work(s, is_moe, pass) : experts_work(s, is_moe, pass);
    w.ops = (double)(is_moe ? OPS_OF_MOE_BLOCK : OPS_OF_DENSE_BLOCK) / PHASES_WITH_OPS;
    return w;
}

OpWork op_work_of_block(const ModelShape *s, int block) {
    OpWork sum = {0};
    for (int pass = PASS_FORWARD; pass <= PASS_BACKWARD_WEIGHT; pass++) {
        const OpWork attn = op_work_of_phase(s, block, PHASE_ATTN, (Pass)pass);
        const OpWork experts = op_work_of_phase(s, block, PHASE_EXPERTS, (Pass)pass);
        op_work_add(&sum, &attn);
        op_work_add(&sum, &experts);
    }
    return sum;
}

OpWork op_work_of_head(const ModelShape *s) {
    const double T = (double)s->T, D = (double)s->D, depths = 1 + s->n_mtp;
    const double chunks = (double)ceil_div(s->T, s->head_chunk), projections = 2 * D * D * s->n_mtp;
    const OpWork w = {.bf16 = 6 * T * (D * (double)s->V * depths + projections),
                      .bf16_gradient_bytes = 8 * (D * (double)s->V + projections),
                      .bytes = 2 * T * 3 * (double)s->V_padded * depths,
                      .ops = depths * (OPS_OF_DEPTH + OPS_OF_CHUNK * chunks)};
    return w;
}

OpTime op_time(const OpWork *w, const GpuRates *r, bool fp8) {
    const double tera = 1e12, copy = 1e9 * r->hbm;
    const double traffic = 1e9 * (r->stream > 0 ? r->stream : SHARE_OF_COPY * r->hbm);
    const double linear = fp8 ? r->gemm_fp8 : r->gemm_bf16, routed = fp8 ? r->grouped_fp8 : r->grouped_bf16;
    /* A rate of weight gradients of its own has what they add to memory in it. */
    const bool has_own = fp8 && r->gradient_fp8 > 0;
    const double gradient_bytes = w->bf16_gradient_bytes + (has_own ? 0 : w->gradient_bytes);
    OpTime t = {.products = (w->linear / linear + w->bf16 / r->gemm_bf16 +
                             w->linear_gradient / (has_own ? r->gradient_fp8 : linear)) /
                            tera,
                .grouped = (w->routed / routed + w->routed_gradient / (has_own ? r->gradient_fp8 : routed)) / tera,
                .attention = (w->core_forward / r->attention_forward + w->core_backward / r->attention_backward) / tera,
                .gradients = gradient_bytes / copy,
                .traffic = w->bytes / traffic,
                .launches = 1e-6 * r->op_us * w->ops,
                .recompute = w->remade / linear / tera + w->remade_bytes / traffic};
    t.sum = t.products + t.grouped + t.attention + t.gradients + t.traffic + t.launches + t.recompute;
    return t;
}
