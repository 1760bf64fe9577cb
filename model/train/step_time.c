/* See step_time.h. */
#include "step_time.h"

#include <string.h>

#include "kernels/base/ints.h"

/* What memory-bound ops attain of a copy, the mean of tests/bench/results.jsonl; ops of a block and around blocks, as
 * counted on the quick start. */
#define SHARE_OF_COPY 0.85
enum { OPS_OF_MOE_BLOCK = 66, OPS_OF_DENSE_BLOCK = 48, OPS_OF_DEPTH = 45, OPS_OF_CHUNK = 5 };

/* Weights that the remade q, k and v are multiplied with again. */
static double up_weights(const ModelShape *s) {
    return (double)(s->Dq ? s->Dq : s->D) * (double)s->qk_width + (double)s->Dc * (double)s->kv_width;
}

/* Width of SwiGLU rows a token has in a block: its experts' and the shared ones', or the dense MLP's. */
static double swiglu_width(const ModelShape *s, int block) {
    return shape_block_is_moe(s, block) ? (double)s->router.n_chosen * (double)s->F + (double)s->F_shared
                                        : (double)s->F_dense;
}

/* Elements a token's ops read and write in a block, forward and backward, products and attention apart: two norms with
 * residual and branch (4 D forward, 6 D backward each), the latents' norms, splitting and rotating q, k, v, SwiGLU (3
 * of its width forward, 5 backward), and in MoE blocks rows copied to experts and back (5 K D) with their sums (8 D).
 */
static double block_elements(const ModelShape *s, int block) {
    const double D = (double)s->D, latents = (double)(s->Dq + s->Dc), K = s->router.n_chosen;
    const double heads = 2 * (double)s->kv_width + 3 * (double)s->qk_width;
    double n = 20 * D + 4 * latents + 2 * heads + 8 * swiglu_width(s, block);
    if (shape_block_is_moe(s, block)) n += 5 * K * D + 8 * D;
    return n;
}

static double remade_elements(const ModelShape *s, int block) {
    double n = 0;
    if (s->recompute & RECOMPUTE_NORMS) n += 4 * (double)s->D + 2 * (double)(s->Dq + s->Dc);
    if (s->recompute & RECOMPUTE_UP_PROJECTIONS) n += 2 * (double)s->kv_width + 3 * (double)s->qk_width;
    if (s->recompute & RECOMPUTE_SWIGLU) n += 3 * swiglu_width(s, block);
    return n;
}

static double launches(const ModelShape *s) {
    const double chunks = (double)ceil_div(s->T, s->head_chunk);
    return (double)shape_n_moe(s) * OPS_OF_MOE_BLOCK + (double)(s->n_blocks - shape_n_moe(s)) * OPS_OF_DENSE_BLOCK +
           (1 + s->n_mtp) * (OPS_OF_DEPTH + OPS_OF_CHUNK * chunks);
}

bool step_time(StepTime *t, const ModelShape *s, const ModelCount *count, Compute compute, const GpuRates *r) {
    memset(t, 0, sizeof *t);
    if (compute == COMPUTE_FP32) return false;
    const bool fp8 = compute == COMPUTE_FP8 && r->peak_fp8 > 0;
    const double gemm = 1e12 * (fp8 ? r->gemm_fp8 : r->gemm_bf16), bf16 = 1e12 * r->gemm_bf16;
    const double grouped = 1e12 * (fp8 ? r->grouped_fp8 : r->grouped_bf16);
    const double copy = 1e9 * r->hbm, traffic = SHARE_OF_COPY * copy, T = (double)s->T, width = 2;

    double flops[PART_COUNT];
    for (int i = 0; i < PART_COUNT; i++) flops[i] = T * (count->main[i].flops + count->mtp[i].flops);
    t->products = (flops[PART_ATTENTION] + flops[PART_DENSE_MLP] + flops[PART_SHARED]) / gemm +
                  (flops[PART_HEAD] + flops[PART_ROUTER] + flops[PART_MTP_PROJECTION]) / bf16;
    t->grouped = flops[PART_ROUTED] / grouped;

    /* The core's model FLOPs are three forwards; backward really does five products, the scores' among them. */
    const AttentionShape *a = &s->attention;
    const double qk = (double)(a->nope + a->rope), v = (double)a->value, pairs = T * ((double)s->S + 1) / 2;
    const double head_pairs = 2 * pairs * a->n_heads * s->n_blocks;
    t->attention =
        head_pairs * ((qk + v) / (1e12 * r->attention_forward) + (3 * qk + 2 * v) / (1e12 * r->attention_backward));

    const double params = (double)(count->main_total.params + count->mtp_total.params);
    t->gradients = 8 * (params - (double)count->main[PART_EMBEDDING].params) / copy;
    double elements = 3 * (double)s->V_padded * (1 + s->n_mtp), remade = 0;
    for (int b = 0; b < s->n_blocks; b++) {
        elements += block_elements(s, b);
        remade += remade_elements(s, b);
    }
    t->traffic = T * elements * width / traffic;
    t->launches = 1e-6 * r->op_us * launches(s);
    t->recompute = T * remade * width / traffic;
    if (s->recompute & RECOMPUTE_UP_PROJECTIONS) t->recompute += T * 2 * up_weights(s) * s->n_blocks / gemm;
    t->micro_batch = t->products + t->grouped + t->attention + t->gradients + t->traffic + t->launches + t->recompute;

    /* Norm, AdamW and zeroing: f32 gradient three times, master and moments there and back, the copy. */
    const double moments = s->moment == DTYPE_F32 ? 16 : 8;
    t->update = params * (3 * 4 + 2 * 4 + moments + 2) / copy;
    return true;
}
