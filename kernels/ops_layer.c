/* The wrappers of ops.h for the mathematics of a model, from the embedding to the loss. See ops.c. */
#include "base/ints.h"
#include "ops_check.h"

/* ---- embedding --------------------------------------------------------------------------------------------------- */

void op_embed_forward(const Device *d, Tensor y, Tensor ids, Tensor w, Stream s) {
    const char *op = "embed_forward";
    check_act(op, "w", w, -1, -1);
    check_vector(op, "ids", ids, DTYPE_I32, -1);
    check_act(op, "y", y, ids.shape[0], w.shape[1]);
    Tensor writes[] = {y}, reads[] = {ids, w};
    WATCH(op, s, writes, reads);
    d->ops->embed_forward(y, ids, w, s);
}

void op_embed_backward(const Device *d, Tensor dw, Tensor dy, Tensor ids, Stream s) {
    const char *op = "embed_backward";
    check_matrix(op, "dw", dw, DTYPE_F32, -1, -1);
    check_vector(op, "ids", ids, DTYPE_I32, -1);
    check_act(op, "dy", dy, ids.shape[0], dw.shape[1]);
    Tensor writes[] = {dw}, reads[] = {dw, dy, ids};
    WATCH_IN_PLACE(op, s, writes, reads, 1);
    d->ops->embed_backward(dw, dy, ids, s);
}

/* ---- residual add and RMSNorm ------------------------------------------------------------------------------------ */

void op_residual_rmsnorm_forward(const Device *d, Tensor r, Tensor y, Tensor q, Tensor rstd, Tensor x, Tensor branch,
                                 Tensor w, double eps, Stream s) {
    const char *op = "residual_rmsnorm_forward";
    check_act(op, "x", x, -1, -1);
    const int64_t T = x.shape[0], D = x.shape[1];
    const bool is_sum = tensor_is_none(rstd), has_y = !tensor_is_none(y), has_q = !tensor_is_none(q);
    CHECK(has_y || has_q || is_sum, "%s: y and q are none", op);
    CHECK(!is_sum || (!has_y && !has_q && !tensor_is_none(r) && tensor_is_none(w)),
          "%s: rstd is none: the sum is r, with y, q and w none too", op);
    if (has_y) check_act(op, "y", y, T, D);
    if (has_q) check_tiles(op, "q", q, T, D);
    if (!is_sum) check_vector(op, "rstd", rstd, DTYPE_F32, T);
    if (!is_sum) check_vector(op, "w", w, DTYPE_F32, D);
    if (!tensor_is_none(r)) check_act(op, "r", r, T, D);
    if (!tensor_is_none(branch)) {
        check_shape(op, "branch", branch, 3, -1, T, D);
        CHECK(is_act(branch.dtype) && tensor_is_contiguous(branch), "%s: branch is strided or not act", op);
        CHECK(!tensor_is_none(r), "%s: r is none, but there is a branch", op);
    }
    CHECK(eps > 0, "%s: eps %g", op, eps);
    Tensor writes[] = {r, y, q, rstd}, reads[] = {x, branch, w};
    WATCH_IN_PLACE(op, s, writes, reads, r.data == x.data);
    d->ops->residual_rmsnorm_forward(r, y, q, rstd, x, branch, w, eps, s);
}

void op_residual_rmsnorm_backward(const Device *d, Tensor dx, Tensor dw, Tensor partial, Tensor dy, Tensor dr, Tensor r,
                                  Tensor rstd, Tensor w, Stream s) {
    const char *op = "residual_rmsnorm_backward";
    check_act(op, "r", r, -1, -1);
    const int64_t T = r.shape[0], D = r.shape[1];
    check_act(op, "dx", dx, T, D);
    if (dy.ndim == 3) {
        check_shape(op, "dy", dy, 3, -1, T, D);
        CHECK(is_act(dy.dtype) && tensor_is_contiguous(dy), "%s: dy is strided or not act", op);
    } else {
        check_act(op, "dy", dy, T, D);
    }
    if (!tensor_is_none(dr)) check_act(op, "dr", dr, T, D);
    check_vector(op, "dw", dw, DTYPE_F32, D);
    check_vector(op, "rstd", rstd, DTYPE_F32, T);
    check_vector(op, "w", w, DTYPE_F32, D);
    check_matrix(op, "partial", partial, DTYPE_F32, (T + RMSNORM_PARTIAL_ROWS - 1) / RMSNORM_PARTIAL_ROWS, D);
    Tensor writes[] = {dx, dw, partial}, reads[] = {dw, dy, dr, r, rstd, w};
    WATCH_IN_PLACE(op, s, writes, reads, (dx.data == dr.data) | 2);
    d->ops->residual_rmsnorm_backward(dx, dw, partial, dy, dr, r, rstd, w, s);
}

/* ---- GEMM -------------------------------------------------------------------------------------------------------- */

/* FP8: the sum runs over the last dimension of a and b. */
static void check_gemm_fp8(const char *op, Tensor y, Tensor a, Tensor b, GemmKind kind) {
    check_tiles(op, "a", a, y.shape[0], -1);
    if (kind == GEMM_WGRAD)
        check_tiles(op, "b", b, y.shape[1], a.shape[1]);
    else
        check_blocks(op, "b", b, 0, y.shape[1], a.shape[1]);
    CHECK(tensor_is_contiguous(a) && tensor_is_contiguous(b), "%s: a or b is strided", op);
    if (kind == GEMM_WGRAD)
        check_matrix(op, "y", y, DTYPE_F32, -1, -1);
    else
        check_act(op, "y", y, -1, -1);
}

static void check_gemm(const char *op, Tensor y, Tensor a, Tensor b, GemmKind kind) {
    check_act(op, "a", a, -1, -1);
    check_act(op, "b", b, -1, -1);
    int64_t rows = 0, cols = 0, inner_a = 0, inner_b = 0;
    switch (kind) {
    case GEMM_FPROP: rows = a.shape[0], inner_a = a.shape[1], cols = b.shape[0], inner_b = b.shape[1]; break;
    case GEMM_DGRAD: rows = a.shape[0], inner_a = a.shape[1], cols = b.shape[1], inner_b = b.shape[0]; break;
    case GEMM_WGRAD: rows = a.shape[1], inner_a = a.shape[0], cols = b.shape[1], inner_b = b.shape[0]; break;
    }
    CHECK(inner_a == inner_b, "%s kind %d: inner extents %lld and %lld", op, (int)kind, (long long)inner_a,
          (long long)inner_b);
    check_act(op, "y", y, rows, cols);
}

void op_gemm(const Device *d, Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s) {
    const char *op = "gemm";
    if (a.dtype == DTYPE_E4M3)
        check_gemm_fp8(op, y, a, b, kind);
    else
        check_gemm(op, y, a, b, kind);
    Tensor writes[] = {y}, reads[] = {a, b, accumulate ? y : tensor_none()};
    WATCH_IN_PLACE(op, s, writes, reads, accumulate);
    d->ops->gemm(y, a, b, kind, accumulate, s);
}

/* All heads of a matrix of which the tensor is head 0's columns, or rows. */
static Tensor all_heads(Tensor head, int n_heads, int64_t cols, int64_t rows) {
    head.shape[0] += (n_heads - 1) * rows;
    head.shape[1] += (n_heads - 1) * cols;
    return head;
}

void op_head_gemm(const Device *d, Tensor y, Tensor a, Tensor b, GemmKind kind, HeadSteps steps, Stream s) {
    const char *op = "head_gemm";
    CHECK(kind != GEMM_WGRAD && steps.n_heads > 0, "%s: kind %d, %d heads", op, (int)kind, steps.n_heads);
    check_gemm(op, y, a, b, kind);
    CHECK(steps.y_cols >= y.shape[1] && steps.a_cols >= 0 && steps.b_rows >= 0, "%s: heads of y %lld columns apart", op,
          (long long)steps.y_cols);
    Tensor writes[] = {all_heads(y, steps.n_heads, steps.y_cols, 0)};
    Tensor reads[] = {all_heads(a, steps.n_heads, steps.a_cols, 0), all_heads(b, steps.n_heads, 0, steps.b_rows)};
    check_act(op, "y", writes[0], -1, -1);
    check_act(op, "a", reads[0], -1, -1);
    WATCH(op, s, writes, reads);
    d->ops->head_gemm(y, a, b, kind, steps, s);
}

/* ---- rope and attention ------------------------------------------------------------------------------------------ */

static void check_heads(const char *op, AttentionShape a) {
    CHECK(a.n_heads > 0 && a.nope >= 0 && a.rope >= 0 && a.rope % 2 == 0 && a.value > 0 && a.nope + a.rope > 0,
          "%s: heads %d, widths %lld + %lld, %lld", op, a.n_heads, (long long)a.nope, (long long)a.rope,
          (long long)a.value);
}

void op_rope_split_forward(const Device *d, Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe,
                           Tensor position, Tensor inv_freq, AttentionShape shape, Stream s) {
    const char *op = "rope_split_forward";
    check_heads(op, shape);
    const int64_t T = q_in.shape[0], H = shape.n_heads, qk = H * (shape.nope + shape.rope);
    check_act(op, "q_in", q_in, T, qk);
    check_act(op, "q", q, T, qk);
    check_act(op, "k", k, T, qk);
    check_act(op, "v", v, T, H * shape.value);
    check_act(op, "kv", kv, T, H * (shape.nope + shape.value));
    check_act(op, "k_pe", k_pe, T, shape.rope);
    check_vector(op, "position", position, DTYPE_I32, T);
    check_vector(op, "inv_freq", inv_freq, DTYPE_F32, shape.rope / 2);
    Tensor writes[] = {q, k, v}, reads[] = {q_in, kv, k_pe, position, inv_freq};
    WATCH_IN_PLACE(op, s, writes, reads, q.data == q_in.data);
    d->ops->rope_split_forward(q, k, v, q_in, kv, k_pe, position, inv_freq, shape, s);
}

void op_rope_split_backward(const Device *d, Tensor dq_in, Tensor dkv, Tensor dk_pe, Tensor dq, Tensor dk, Tensor dv,
                            Tensor position, Tensor inv_freq, AttentionShape shape, Stream s) {
    const char *op = "rope_split_backward";
    check_heads(op, shape);
    const int64_t T = dq.shape[0], H = shape.n_heads, qk = H * (shape.nope + shape.rope);
    check_act(op, "dq", dq, T, qk);
    check_act(op, "dq_in", dq_in, T, qk);
    check_act(op, "dk", dk, T, qk);
    check_act(op, "dv", dv, T, H * shape.value);
    check_act(op, "dkv", dkv, T, H * (shape.nope + shape.value));
    check_act(op, "dk_pe", dk_pe, T, shape.rope);
    check_vector(op, "position", position, DTYPE_I32, T);
    check_vector(op, "inv_freq", inv_freq, DTYPE_F32, shape.rope / 2);
    Tensor writes[] = {dq_in, dkv, dk_pe}, reads[] = {dq, dk, dv, position, inv_freq};
    WATCH_IN_PLACE(op, s, writes, reads, dq_in.data == dq.data);
    d->ops->rope_split_backward(dq_in, dkv, dk_pe, dq, dk, dv, position, inv_freq, shape, s);
}

void op_rope_forward(const Device *d, Tensor y, Tensor x, Tensor position, Tensor inv_freq, AttentionShape shape,
                     Stream s) {
    const char *op = "rope_forward";
    check_heads(op, shape);
    const int64_t T = x.shape[0], qk = shape.n_heads * (shape.nope + shape.rope);
    check_act(op, "x", x, T, qk);
    check_act(op, "y", y, T, qk);
    check_vector(op, "position", position, DTYPE_I32, T);
    check_vector(op, "inv_freq", inv_freq, DTYPE_F32, shape.rope / 2);
    Tensor writes[] = {y}, reads[] = {x, position, inv_freq};
    WATCH_IN_PLACE(op, s, writes, reads, y.data == x.data);
    d->ops->rope_forward(y, x, position, inv_freq, shape, s);
}

static void check_qkv(const char *op, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor doc_start, AttentionShape a) {
    check_heads(op, a);
    const int64_t T = q.shape[0], H = a.n_heads;
    check_act(op, "q", q, T, H * (a.nope + a.rope));
    check_act(op, "k", k, T, H * (a.nope + a.rope));
    check_act(op, "v", v, T, H * a.value);
    check_matrix(op, "lse", lse, DTYPE_F32, T, H);
    check_vector(op, "doc_start", doc_start, DTYPE_I32, T);
}

void op_attention_forward(const Device *d, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor doc_start,
                          AttentionShape shape, Stream s) {
    const char *op = "attention_forward";
    check_qkv(op, q, k, v, lse, doc_start, shape);
    check_act(op, "o", o, q.shape[0], shape.n_heads * shape.value);
    Tensor writes[] = {o, lse}, reads[] = {q, k, v, doc_start};
    WATCH(op, s, writes, reads);
    d->ops->attention_forward(o, lse, q, k, v, doc_start, shape, s);
}

void op_attention_backward(const Device *d, Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor o,
                           Tensor q, Tensor k, Tensor v, Tensor lse, Tensor doc_start, AttentionShape shape, Stream s) {
    const char *op = "attention_backward";
    check_qkv(op, q, k, v, lse, doc_start, shape);
    const int64_t T = q.shape[0];
    check_act(op, "dq", dq, T, q.shape[1]);
    check_act(op, "dk", dk, T, k.shape[1]);
    check_act(op, "dv", dv, T, v.shape[1]);
    check_act(op, "o", o, T, v.shape[1]);
    check_act(op, "d_o", d_o, T, v.shape[1]);
    check_matrix(op, "delta", delta, DTYPE_F32, T, shape.n_heads);
    Tensor writes[] = {dq, dk, dv, delta}, reads[] = {d_o, o, q, k, v, lse, doc_start};
    WATCH(op, s, writes, reads);
    d->ops->attention_backward(dq, dk, dv, delta, d_o, o, q, k, v, lse, doc_start, shape, s);
}

void op_attention_decode(const Device *d, Tensor o, Tensor partial, Tensor q_latent, Tensor q, Tensor cache,
                         AttentionShape shape, Stream s) {
    const char *op = "attention_decode";
    check_heads(op, shape);
    check_act(op, "cache", cache, -1, -1);
    const int64_t T = q.shape[0], H = shape.n_heads, n = cache.shape[0], Dc = cache.shape[1] - shape.rope;
    CHECK(Dc > 0 && T > 0 && n >= T, "%s: %lld tokens over %lld rows of %lld + %lld", op, (long long)T, (long long)n,
          (long long)Dc, (long long)shape.rope);
    check_act(op, "o", o, T, H * Dc);
    check_act(op, "q_latent", q_latent, T, H * Dc);
    check_act(op, "q", q, T, H * (shape.nope + shape.rope));
    check_matrix(op, "partial", partial, DTYPE_F32, T * H * ceil_div(n, DECODE_CHUNK), Dc + 2);
    Tensor writes[] = {o, partial}, reads[] = {q_latent, q, cache};
    WATCH(op, s, writes, reads);
    d->ops->attention_decode(o, partial, q_latent, q, cache, shape, s);
}

/* ---- router ------------------------------------------------------------------------------------------------------ */

static void check_router(const char *op, RouterShape r, int64_t T) {
    CHECK(r.n_experts > 0 && r.n_chosen > 0 && r.n_group > 0 && r.n_experts % r.n_group == 0,
          "%s: E %d, K %d, groups %d", op, r.n_experts, r.n_chosen, r.n_group);
    CHECK(r.topk_group > 0 && r.topk_group <= r.n_group && r.n_chosen <= r.topk_group * (r.n_experts / r.n_group),
          "%s: K %d of %d groups of %d", op, r.n_chosen, r.topk_group, r.n_experts / r.n_group);
    CHECK(r.seq_len > 0 && T % r.seq_len == 0, "%s: T %lld, S %lld", op, (long long)T, (long long)r.seq_len);
}

void op_router_forward(const Device *d, Tensor ids, Tensor weights, Tensor scores, Tensor counts, Tensor seq_count,
                       StepStats *stats, Tensor logits, Tensor bias, Tensor position, RouterShape shape, Stream s) {
    const char *op = "router_forward";
    const int64_t T = logits.shape[0], E = shape.n_experts, K = shape.n_chosen;
    check_router(op, shape, T);
    check_matrix(op, "logits", logits, DTYPE_F32, T, E);
    check_matrix(op, "ids", ids, DTYPE_I32, T, K);
    check_matrix(op, "weights", weights, DTYPE_F32, T, K);
    check_matrix(op, "scores", scores, DTYPE_F32, T, E);
    check_matrix(op, "seq_count", seq_count, DTYPE_I32, T / shape.seq_len, E);
    check_vector(op, "position", position, DTYPE_I32, T);
    if (!tensor_is_none(counts)) check_vector(op, "counts", counts, DTYPE_I32, E);
    if (!tensor_is_none(bias)) check_vector(op, "bias", bias, DTYPE_F32, E);
    Tensor writes[] = {ids, weights, scores, counts, seq_count, stats_tensor(stats)};
    Tensor reads[] = {counts, logits, bias, position, stats_tensor(stats)};
    WATCH_IN_PLACE(op, s, writes, reads, 8 | 32);
    d->ops->router_forward(ids, weights, scores, counts, seq_count, stats, logits, bias, position, shape, s);
}

void op_router_backward(const Device *d, Tensor dlogits, Tensor dweights, Tensor ids, Tensor weights, Tensor scores,
                        Tensor seq_count, Tensor position, const StepParams *params, RouterShape shape, Stream s) {
    const char *op = "router_backward";
    const int64_t T = scores.shape[0], E = shape.n_experts, K = shape.n_chosen;
    check_router(op, shape, T);
    check_act(op, "dlogits", dlogits, T, E);
    check_matrix(op, "dweights", dweights, DTYPE_F32, T, K);
    check_matrix(op, "ids", ids, DTYPE_I32, T, K);
    check_matrix(op, "weights", weights, DTYPE_F32, T, K);
    check_matrix(op, "scores", scores, DTYPE_F32, T, E);
    check_matrix(op, "seq_count", seq_count, DTYPE_I32, T / shape.seq_len, E);
    check_vector(op, "position", position, DTYPE_I32, T);
    Tensor writes[] = {dlogits}, reads[] = {dweights, ids, weights, scores, seq_count, position, params_tensor(params)};
    WATCH(op, s, writes, reads);
    d->ops->router_backward(dlogits, dweights, ids, weights, scores, seq_count, position, params, shape, s);
}

void op_bias_step(const Device *d, Tensor bias, Tensor counts, const StepParams *params, const StepStats *stats,
                  Stream s) {
    check_vector("bias_step", "bias", bias, DTYPE_F32, -1);
    check_vector("bias_step", "counts", counts, DTYPE_I32, bias.shape[0]);
    Tensor writes[] = {bias}, reads[] = {bias, counts, params_tensor(params), stats_tensor(stats)};
    WATCH_IN_PLACE("bias_step", s, writes, reads, 1);
    d->ops->bias_step(bias, counts, params, stats, s);
}

/* ---- rows of the experts ----------------------------------------------------------------------------------------- */

static void check_map(const char *op, MoeMap m) {
    check_matrix(op, "token_row", m.token_row, DTYPE_I32, -1, -1);
    check_vector(op, "row_token", m.row_token, DTYPE_I32, -1);
    check_vector(op, "row_weight", m.row_weight, DTYPE_F32, m.row_token.shape[0]);
    check_vector(op, "expert_start", m.expert_start, DTYPE_I32, -1);
    CHECK(m.expert_start.shape[0] >= 2, "%s: no local expert", op);
    if (!tensor_is_none(m.overflow)) check_vector(op, "overflow", m.overflow, DTYPE_F64, 1);
}

void op_moe_map(const Device *d, MoeMap map, Tensor ids, Tensor weights, Tensor slot_of_expert, int first_slot,
                Stream s) {
    const char *op = "moe_map";
    check_map(op, map);
    const int64_t Tr = map.token_row.shape[0], K = map.token_row.shape[1], El = map.expert_start.shape[0] - 1;
    check_matrix(op, "ids", ids, DTYPE_I32, Tr, K);
    check_matrix(op, "weights", weights, DTYPE_F32, Tr, K);
    check_vector(op, "slot_of_expert", slot_of_expert, DTYPE_I32, -1);
    CHECK(first_slot >= 0 && first_slot + El <= slot_of_expert.shape[0], "%s: slots [%d, +%lld) of %lld", op,
          first_slot, (long long)El, (long long)slot_of_expert.shape[0]);
    int64_t worst = Tr * min_i64(K, El) + (GROUP_ALIGN - 1) * El;
    CHECK(!tensor_is_none(map.overflow) || map.row_token.shape[0] >= worst, "%s: capacity %lld below %lld", op,
          (long long)map.row_token.shape[0], (long long)worst);
    Tensor writes[] = {map.row_token, map.row_weight, map.token_row, map.expert_start, map.overflow};
    Tensor reads[] = {ids, weights, slot_of_expert, map.overflow};
    WATCH_IN_PLACE(op, s, writes, reads, 1 << 4);
    d->ops->moe_map(map, ids, weights, slot_of_expert, first_slot, s);
}

void op_gather_rows(const Device *d, Tensor y, Tensor yt, Tensor x, MoeMap map, Stream s) {
    const char *op = "gather_rows";
    check_map(op, map);
    const int64_t N = map.row_token.shape[0];
    check_act_or_tiles(op, "x", x, map.token_row.shape[0], -1);
    CHECK(!tensor_is_none(y) || !tensor_is_none(yt), "%s: y and yt are none", op);
    if (!tensor_is_none(y)) check_act_or_tiles(op, "y", y, N, x.shape[1]);
    CHECK(tensor_is_none(y) || (y.dtype == DTYPE_E4M3) == (x.dtype == DTYPE_E4M3), "%s: y is %s, x is %s", op,
          dtype_name(y.dtype), dtype_name(x.dtype));
    CHECK(tensor_is_none(yt) || x.dtype == DTYPE_E4M3, "%s: yt of %s", op, dtype_name(x.dtype));
    if (!tensor_is_none(yt)) check_tiles(op, "yt", yt, x.shape[1], N);
    Tensor writes[] = {y, yt}, reads[] = {x, map.row_token, map.token_row, map.expert_start};
    WATCH(op, s, writes, reads);
    d->ops->gather_rows(y, yt, x, map, s);
}

void op_reduce_rows(const Device *d, Tensor y, Tensor x, MoeMap map, bool accumulate, Stream s) {
    const char *op = "reduce_rows";
    check_map(op, map);
    check_act(op, "x", x, map.row_token.shape[0], y.shape[1]);
    check_act(op, "y", y, map.token_row.shape[0], -1);
    Tensor writes[] = {y}, reads[] = {x, map.token_row, accumulate ? y : tensor_none()};
    WATCH_IN_PLACE(op, s, writes, reads, accumulate);
    d->ops->reduce_rows(y, x, map, accumulate, s);
}

void op_unmap_weights(const Device *d, Tensor dweights, Tensor drow_weight, MoeMap map, Stream s) {
    const char *op = "unmap_weights";
    check_map(op, map);
    check_matrix(op, "dweights", dweights, DTYPE_F32, map.token_row.shape[0], map.token_row.shape[1]);
    check_vector(op, "drow_weight", drow_weight, DTYPE_F32, map.row_token.shape[0]);
    Tensor writes[] = {dweights}, reads[] = {drow_weight, map.token_row};
    WATCH(op, s, writes, reads);
    d->ops->unmap_weights(dweights, drow_weight, map, s);
}

void op_grouped_gemm(const Device *d, Tensor y, Tensor x, Tensor w, Tensor expert_start, GemmKind kind, Stream s) {
    const char *op = "grouped_gemm";
    CHECK(kind == GEMM_FPROP || kind == GEMM_DGRAD, "%s: kind %d", op, (int)kind);
    CHECK(tensor_is_contiguous(w), "%s: w is strided", op);
    check_vector(op, "expert_start", expert_start, DTYPE_I32, -1);
    check_shape(op, "w", w, 3, expert_start.shape[0] - 1, -1, -1);
    const bool fp8 = x.dtype == DTYPE_E4M3;
    if (fp8) check_tiles(op, "x", x, -1, w.shape[2]);
    if (fp8) check_blocks(op, "w", w, expert_start.shape[0] - 1, -1, -1);
    CHECK(fp8 || is_act(w.dtype), "%s: w is %s, x is %s", op, dtype_name(w.dtype), dtype_name(x.dtype));
    const bool rows_out = kind == GEMM_FPROP || fp8; /* FP8 has w^T for DGRAD */
    const int64_t out = rows_out ? w.shape[1] : w.shape[2], in = rows_out ? w.shape[2] : w.shape[1];
    check_act_or_tiles(op, "x", x, -1, in);
    check_act(op, "y", y, x.shape[0], out);
    Tensor writes[] = {y}, reads[] = {x, w, expert_start};
    WATCH(op, s, writes, reads);
    d->ops->grouped_gemm(y, x, w, expert_start, kind, s);
}

void op_grouped_wgrad(const Device *d, Tensor dw, Tensor dy, Tensor x, Tensor expert_start, Stream s) {
    const char *op = "grouped_wgrad";
    check_vector(op, "expert_start", expert_start, DTYPE_I32, -1);
    CHECK(dw.dtype == DTYPE_F32 && tensor_is_contiguous(dw), "%s: dw", op);
    check_shape(op, "dw", dw, 3, expert_start.shape[0] - 1, -1, -1);
    if (dy.dtype == DTYPE_E4M3) {
        check_tiles(op, "dy^T", dy, dw.shape[1], -1);
        check_tiles(op, "x^T", x, dw.shape[2], dy.shape[1]);
    } else {
        check_act(op, "dy", dy, -1, dw.shape[1]);
        check_act(op, "x", x, dy.shape[0], dw.shape[2]);
    }
    Tensor writes[] = {dw}, reads[] = {dw, dy, x, expert_start};
    WATCH_IN_PLACE(op, s, writes, reads, 1);
    d->ops->grouped_wgrad(dw, dy, x, expert_start, s);
}

/* ---- SwiGLU ------------------------------------------------------------------------------------------------------ */

static void check_swiglu(const char *op, Tensor h, int64_t F, Tensor weight) {
    check_act_or_tiles(op, "h", h, -1, -1);
    CHECK(h.shape[1] >= 2 * F, "%s: h has %lld columns for width %lld", op, (long long)h.shape[1], (long long)F);
    if (!tensor_is_none(weight)) check_vector(op, "weight", weight, DTYPE_F32, h.shape[0]);
}

void op_swiglu_forward(const Device *d, Tensor y, Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s) {
    const char *op = "swiglu_forward";
    CHECK(tensor_is_none(y) != tensor_is_none(y_rows), "%s: y or y_rows", op);
    check_act(op, "h", h, -1, -1);
    check_swiglu(op, h, tensor_is_none(y) ? y_rows.shape[1] : y.shape[1], weight);
    if (!tensor_is_none(y)) check_act(op, "y", y, h.shape[0], -1);
    if (!tensor_is_none(y_rows)) check_tiles(op, "y_rows", y_rows, h.shape[0], -1);
    if (!tensor_is_none(h_rows)) check_tiles(op, "h_rows", h_rows, h.shape[0], h.shape[1]);
    Tensor writes[] = {y, y_rows, h_rows}, reads[] = {h, weight};
    WATCH(op, s, writes, reads);
    d->ops->swiglu_forward(y, y_rows, h_rows, h, weight, s);
}

void op_swiglu_backward(const Device *d, Tensor dh, Quantized dhq, Tensor y_columns, Tensor dweight, Tensor dy,
                        Tensor h, Tensor weight, Stream s) {
    const char *op = "swiglu_backward";
    const int64_t M = h.shape[0], F = dy.shape[1];
    check_act(op, "dy", dy, M, -1);
    check_swiglu(op, h, F, weight);
    if (tensor_is_none(dh)) {
        CHECK(F % SCALE_TILE == 0 && h.shape[1] == 2 * F, "%s: dh is none, width %lld of %lld columns in FP8", op,
              (long long)F, (long long)h.shape[1]);
        check_quantized(op, dhq, M, h.shape[1]);
        check_tiles(op, "y_columns", y_columns, F, M);
    } else {
        check_act(op, "dh", dh, M, h.shape[1]);
        CHECK(tensor_is_none(dhq.rows) && tensor_is_none(dhq.columns) && tensor_is_none(y_columns), "%s: dh and FP8",
              op);
    }
    CHECK(tensor_is_none(weight) == tensor_is_none(dweight), "%s: dweight and weight go together", op);
    if (!tensor_is_none(dweight)) check_vector(op, "dweight", dweight, DTYPE_F32, M);
    Tensor writes[] = {dh, dhq.rows, dhq.columns, y_columns, dweight}, reads[] = {dy, h, weight};
    WATCH(op, s, writes, reads);
    d->ops->swiglu_backward(dh, dhq, y_columns, dweight, dy, h, weight, s);
}

/* ---- head and loss ----------------------------------------------------------------------------------------------- */

void op_cross_entropy(const Device *d, Tensor loss, Tensor logits, Tensor targets, int64_t vocab, int depth,
                      bool want_gradient, const StepParams *params, Stream s) {
    const char *op = "cross_entropy";
    check_act(op, "logits", logits, -1, -1);
    check_vector(op, "loss", loss, DTYPE_F32, logits.shape[0]);
    check_vector(op, "targets", targets, DTYPE_I32, logits.shape[0]);
    CHECK(vocab > 0 && vocab <= logits.shape[1], "%s: vocabulary %lld of %lld columns", op, (long long)vocab,
          (long long)logits.shape[1]);
    CHECK(depth >= 0 && depth < LOSSES_MAX, "%s: depth %d", op, depth);
    Tensor writes[] = {loss, want_gradient ? logits : tensor_none()},
           reads[] = {logits, targets, params_tensor(params)};
    WATCH_IN_PLACE(op, s, writes, reads, 2);
    d->ops->cross_entropy(loss, logits, targets, vocab, depth, want_gradient, params, s);
}

void op_loss_sum(const Device *d, StepStats *stats, Tensor loss, int depth, Stream s) {
    check_vector("loss_sum", "loss", loss, DTYPE_F32, -1);
    CHECK(depth >= 0 && depth < LOSSES_MAX, "loss_sum: depth %d", depth);
    Tensor writes[] = {stats_tensor(stats)}, reads[] = {stats_tensor(stats), loss};
    WATCH_IN_PLACE("loss_sum", s, writes, reads, 1);
    d->ops->loss_sum(stats, loss, depth, s);
}
