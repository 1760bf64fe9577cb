/* See shape.h. */
#include "shape.h"

#include <math.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/ints.h"

/* YaRN's magnitude: 0.1 m ln(s) + 1. */
static double yarn_mscale(double factor, double m) {
    return factor <= 1 ? 1 : 0.1 * m * log(factor) + 1;
}

static AttentionShape attention_shape(const ModelConfig *m) {
    AttentionShape a;
    memset(&a, 0, sizeof a);
    a.n_heads = m->num_attention_heads;
    a.nope = m->qk_nope_head_dim;
    a.rope = m->qk_rope_head_dim;
    a.value = m->v_head_dim;
    a.scale = 1 / sqrt((double)(a.nope + a.rope));
    a.rope_mscale = 1;
    if (!m->rope.yarn) return a;
    /* The softmax takes mscale_all_dim squared; cos and sin take what of mscale is left (1 for V2 and V3). */
    const RopeConfig *r = &m->rope;
    if (r->mscale_all_dim != 0) {
        double all = yarn_mscale(r->factor, r->mscale_all_dim);
        a.scale *= all * all;
    }
    if (r->has_attention_factor)
        a.rope_mscale = r->attention_factor;
    else if (r->mscale != 0 && r->mscale_all_dim != 0)
        a.rope_mscale = yarn_mscale(r->factor, r->mscale) / yarn_mscale(r->factor, r->mscale_all_dim);
    else
        a.rope_mscale = yarn_mscale(r->factor, 1);
    return a;
}

static RouterShape router_shape(const ModelConfig *m) {
    RouterShape r;
    memset(&r, 0, sizeof r);
    r.n_experts = m->n_routed_experts;
    r.n_chosen = m->num_experts_per_tok;
    r.n_group = m->n_group;
    r.topk_group = m->topk_group;
    r.score = m->scoring_func == SCORING_SIGMOID ? ROUTER_SIGMOID : ROUTER_SOFTMAX;
    r.group_score = m->topk_method == TOPK_NOAUX_TC ? GROUP_SCORE_TOP2 : GROUP_SCORE_MAX;
    if (m->topk_method == TOPK_GREEDY) r.n_group = r.topk_group = 1;
    r.normalize = m->norm_topk_prob;
    r.scale = m->routed_scaling_factor;
    return r;
}

/* Rows of the logits held at once. Any number gives the same losses; bits of the head's gradient follow it. */
static int64_t head_chunk(const ModelShape *s, int64_t asked, int64_t logits_bytes) {
    if (asked > 0) return asked;
    const int64_t bytes = logits_bytes > 0 ? logits_bytes : 1 << 20;
    const int64_t rows = bytes / (s->V_padded * (int64_t)dtype_size(s->act));
    /* Few rows are for a cache: a little more does no harm. Many are a GPU's: whole tiles of 128. */
    return rows < 1024 ? max_i64(64, round_up(rows, 64)) : rows / 128 * 128;
}

static Fp8Parts fp8_parts(const Fp8Config *c) {
    Fp8Parts p = {c->fprop, c->dgrad, c->wgrad, c->swiglu_input, c->attention_output, false, false, false};
    p.inputs = p.fprop && p.wgrad;
    p.gradients = p.dgrad && p.wgrad;
    p.swiglu = p.inputs && p.gradients && p.swiglu_input;
    return p;
}

static int recompute_by_fp8(const Fp8Parts *p) {
    return RECOMPUTE_FOR_FP8 | (p->attention_output ? RECOMPUTE_FROM_E5M6 : 0) | (p->swiglu ? RECOMPUTE_FROM_TILES : 0);
}

ModelShape shape_make(const Config *c, const Mesh *mesh, int64_t logits_bytes) {
    const ModelConfig *m = &c->model;
    ModelShape s;
    memset(&s, 0, sizeof s);
    s.row_align = c->precision.compute == COMPUTE_FP8 ? 128 : 16;
    s.D = m->hidden_size;
    s.V = m->vocab_size;
    s.V_padded = round_up(s.V, s.row_align);
    s.L = m->num_hidden_layers;
    s.n_mtp = m->num_nextn_predict_layers;
    s.n_blocks = s.L + s.n_mtp;
    s.n_dense = m->first_k_dense_replace >= s.L ? s.n_blocks : m->first_k_dense_replace;
    s.Dq = m->q_lora_rank;
    s.Dc = m->kv_lora_rank;
    s.attention = attention_shape(m);
    s.qk_width = s.attention.n_heads * (s.attention.nope + s.attention.rope);
    s.kv_width = s.attention.n_heads * (s.attention.nope + s.attention.value);
    s.v_width = s.attention.n_heads * s.attention.value;
    s.kv_a_row = s.Dq ? round_up(s.Dq, s.row_align) : 0;
    s.F_dense = m->intermediate_size;
    s.F = m->moe_intermediate_size;
    s.F_shared = (int64_t)m->n_shared_experts * m->moe_intermediate_size;
    s.router = router_shape(m);
    s.R = mesh->n_ep;
    s.n_local = s.router.n_experts / s.R;
    s.first_slot = mesh->ep * s.n_local;
    s.n_data = mesh->size[GROUP_DATA];
    s.data_rank = mesh->rank_in[GROUP_DATA];
    s.n_expert_data = mesh->size[GROUP_EXPERT_DATA];
    s.expert_data_rank = mesh->rank_in[GROUP_EXPERT_DATA];
    s.zero1 = c->parallel.zero1;
    s.capacity = c->moe.capacity;
    s.eps = m->rms_norm_eps;
    s.act = c->precision.compute == COMPUTE_FP32 ? DTYPE_F32 : DTYPE_BF16;
    s.moment = c->precision.moments == MOMENTS_FP32 ? DTYPE_F32 : DTYPE_BF16;
    s.fp8 = c->precision.compute == COMPUTE_FP8;
    if (s.fp8) s.fp8_parts = fp8_parts(&c->precision.fp8);
    s.counts_fp8 = s.fp8 && c->log.fp8_every_steps > 0;
    s.recompute = (c->memory.recompute & ~RECOMPUTE_AUTO) | (s.fp8 ? recompute_by_fp8(&s.fp8_parts) : 0);
    s.head_chunk = head_chunk(&s, c->memory.head_chunk_tokens, logits_bytes);
    s.part = shape_whole(s.L);
    return shape_with_batch(s, c->train.micro_batch_size, c->train.seq_len);
}

ModelShape shape_with_batch(ModelShape s, int64_t B, int64_t S) {
    s.B = B;
    s.S = S;
    s.T = B * S;
    s.router.seq_len = S;
    s.T_received = s.R * s.T;
    const int64_t padding = (GROUP_ALIGN - 1) * (int64_t)s.n_local, K = s.router.n_chosen;
    const double average = (double)(s.T * K), worst = (double)(s.T_received * min_i64(K, s.n_local));
    s.N = (int64_t)(s.capacity > 0 ? fmin(worst, ceil(s.capacity * average)) : worst) + padding;
    if (s.fp8) s.N = round_up(s.N, GROUP_ALIGN); /* the length of a row of transposes */
    CHECK(s.N <= INT32_MAX && s.T_received <= INT32_MAX, "%lld expert rows do not fit 32-bit row ids", (long long)s.N);
    const bool has_few_rows = s.R > 1 && s.N < s.T_received;
    s.recompute &= ~(RECOMPUTE_EXPERT_ROWS | RECOMPUTE_RECEIVED);
    s.recompute |= has_few_rows ? RECOMPUTE_RECEIVED : RECOMPUTE_EXPERT_ROWS;
    s.head_chunk = min_i64(s.head_chunk, s.T);
    return s;
}

/* ---- the part of a rank ------------------------------------------------------------------------------------------ */

RankPart shape_whole(int L) {
    RankPart p;
    memset(&p, 0, sizeof p);
    p.n_chunks = 1;
    p.chunk[0] = (Chunk){.end = L, .embeds = true, .has_loss = true, .n_slots = {1, 1, 0}};
    p.embedding = true;
    p.n_batches = 1;
    return p;
}

int shape_chunk_of(const ModelShape *s, int block) {
    for (int c = 0; c < s->part.n_chunks; c++) {
        const Chunk *chunk = &s->part.chunk[c];
        if (block >= s->L ? chunk->has_loss : block >= chunk->first && block < chunk->end) return c;
    }
    return -1;
}

int shape_chunk_blocks(const ModelShape *s, int chunk) {
    const Chunk *c = &s->part.chunk[chunk];
    return c->end - c->first + (c->has_loss ? s->n_mtp : 0);
}

int shape_chunk_block(const ModelShape *s, int chunk, int i) {
    const Chunk *c = &s->part.chunk[chunk];
    const int n_main = c->end - c->first;
    return i < n_main ? c->first + i : s->L + i - n_main;
}

bool shape_holds_all(const ModelShape *s) {
    for (int b = 0; b < s->n_blocks; b++)
        if (shape_chunk_of(s, b) < 0) return false;
    return s->part.embedding && shape_has_loss(s);
}

bool shape_is_whole(const ModelShape *s) {
    return s->part.chunk[0].embeds && s->part.chunk[0].has_loss;
}

bool shape_has_loss(const ModelShape *s) {
    for (int c = 0; c < s->part.n_chunks; c++)
        if (s->part.chunk[c].has_loss) return true;
    return false;
}

/* ---- blocks and their work --------------------------------------------------------------------------------------- */

bool shape_block_is_moe(const ModelShape *s, int block) {
    return block >= s->n_dense;
}

int shape_n_moe(const ModelShape *s) {
    return s->n_blocks - (s->n_dense < s->n_blocks ? s->n_dense : s->n_blocks);
}

void shape_inv_freq(double *inv_freq, const RopeConfig *rope, int64_t Dr) {
    double low = 0, high = 0;
    if (rope->yarn) {
        /* The dimension that turns `n` times over the original context. */
        const double L0 = (double)rope->original_max_position_embeddings, log_theta = log(rope->theta);
        low = floor((double)Dr * log(L0 / (rope->beta_fast * 2 * M_PI)) / (2 * log_theta));
        high = ceil((double)Dr * log(L0 / (rope->beta_slow * 2 * M_PI)) / (2 * log_theta));
        if (low < 0) low = 0;
        if (high > (double)Dr - 1) high = (double)Dr - 1;
        if (low == high) high += 0.001;
    }
    for (int64_t i = 0; i < Dr / 2; i++) {
        double f = pow(rope->theta, -2.0 * (double)i / (double)Dr);
        if (rope->yarn) {
            double ramp = ((double)i - low) / (high - low);
            ramp = ramp < 0 ? 0 : (ramp > 1 ? 1 : ramp);
            f = f / rope->factor * ramp + f * (1 - ramp);
        }
        inv_freq[i] = f;
    }
}

double shape_block_flops(const ModelShape *s, int block) {
    const double D = (double)s->D;
    double weights =
        (double)(s->Dc + s->attention.rope) * D + (double)s->Dc * (double)s->kv_width + (double)s->v_width * D;
    weights += s->Dq ? (double)s->Dq * D + (double)s->Dq * (double)s->qk_width : D * (double)s->qk_width;
    if (shape_block_is_moe(s, block))
        weights +=
            D * (double)s->router.n_experts + 3 * D * ((double)s->F * (double)s->router.n_chosen + (double)s->F_shared);
    else
        weights += 3 * D * (double)s->F_dense;
    const double head_widths = (double)(s->attention.nope + s->attention.rope + s->attention.value);
    const double core = 2.0 * s->attention.n_heads * head_widths * ((double)s->S + 1) / 2;
    return 6 * weights + 3 * core;
}

double shape_flops_per_token(const ModelShape *s) {
    double flops = 0;
    for (int b = 0; b < s->n_blocks; b++) flops += shape_block_flops(s, b);
    flops += 6.0 * (double)s->D * (double)s->V * (1 + s->n_mtp);
    flops += 6.0 * 2.0 * (double)s->D * (double)s->D * s->n_mtp;
    return flops;
}

double shape_recompute_flops(const ModelShape *s, int choice) {
    const double D = (double)s->D, chosen = (double)(s->router.n_chosen * s->F);
    double flops = 0;
    for (int b = 0; b < s->n_blocks; b++) {
        if (choice == RECOMPUTE_NORMS) flops += 4.0 * (2 * D + (double)s->Dq + (double)s->Dc);
        if (choice == RECOMPUTE_UP_PROJECTIONS)
            flops += 2.0 * ((double)(s->Dq ? s->Dq : s->D) * (double)s->qk_width + (double)s->Dc * (double)s->kv_width);
        if (choice == RECOMPUTE_SWIGLU)
            flops += 6.0 * (shape_block_is_moe(s, b) ? chosen + (double)s->F_shared : (double)s->F_dense);
    }
    return flops;
}
