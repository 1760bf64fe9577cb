/* See op_calls.h. Small odd shapes: T tokens, D wide, two heads, four experts of which two are local. */
#include "op_calls.h"

#include <string.h>

enum { T = 6, D = 8, V = 11, H = 2, NOPE = 3, ROPE = 4, VALUE = 5, E = 4, K = 2, LOCAL = 2, F = 3, SEQ = 3 };
enum { ROWS = T * K + (GROUP_ALIGN - 1) * LOCAL, QK = H * (NOPE + ROPE) };

static uint64_t next_seed;

static Tensor f32_vector(int64_t n) {
    return t_normal(T1(DTYPE_F32, n), 1, ++next_seed);
}
static Tensor f32_matrix(int64_t rows, int64_t cols) {
    return t_normal(T2(DTYPE_F32, rows, cols), 1, ++next_seed);
}
static Tensor f32_planes(int64_t planes, int64_t rows, int64_t cols) {
    return t_normal(T3(DTYPE_F32, planes, rows, cols), 1, ++next_seed);
}
/* 0, 1, ... below `limit`, over and over. */
static Tensor i32_cycle(Tensor t, int limit) {
    for (int64_t i = 0; i < tensor_numel(t); i++) t_set(t, i, (double)(i % limit));
    return t;
}
static Tensor i32_vector(int64_t n, int limit) {
    return i32_cycle(T1(DTYPE_I32, n), limit);
}
static Tensor stats_of(OpCall *c) {
    return tensor_1d(&c->stats, DTYPE_F64, (int64_t)sizeof c->stats / 8);
}
static Tensor params_of(OpCall *c) {
    return tensor_1d(&c->params, DTYPE_F64, (int64_t)sizeof c->params / 8);
}
static Tensor state_of(OpCall *c) {
    return tensor_1d(&c->state, DTYPE_F64, (int64_t)sizeof c->state / 8);
}

#define A c->a
#define S c->stream

/* ---- copies and embedding ---------------------------------------------------------------------------------------- */

static void make_zero(OpCall *c) {
    A[0] = f32_matrix(T, D);
}
static void run_zero(const Device *d, OpCall *c) {
    op_zero(d, A[0], S);
}
static void make_copy(OpCall *c) {
    A[0] = T2(DTYPE_BF16, T, D), A[1] = f32_matrix(T, D);
}
static void run_copy(const Device *d, OpCall *c) {
    op_copy(d, A[0], A[1], S);
}
static void make_embed_forward(OpCall *c) {
    A[0] = f32_matrix(T, D), A[1] = i32_vector(T, V), A[2] = f32_matrix(V, D);
}
static void run_embed_forward(const Device *d, OpCall *c) {
    op_embed_forward(d, A[0], A[1], A[2], S);
}
static void make_embed_backward(OpCall *c) {
    A[0] = f32_matrix(V, D), A[1] = f32_matrix(T, D), A[2] = i32_vector(T, 2);
}
static void run_embed_backward(const Device *d, OpCall *c) {
    op_embed_backward(d, A[0], A[1], A[2], S);
}

/* ---- norm and GEMM ----------------------------------------------------------------------------------------------- */

static void make_norm_forward(OpCall *c) {
    A[0] = f32_matrix(T, D), A[1] = f32_matrix(T, D), A[2] = f32_vector(T);
    A[3] = f32_matrix(T, D), A[4] = f32_planes(2, T, D), A[5] = f32_vector(D);
}
static void run_norm_forward(const Device *d, OpCall *c) {
    op_residual_rmsnorm_forward(d, A[0], A[1], tensor_none(), A[2], A[3], A[4], A[5], c->eps, S);
}
static void make_norm_backward(OpCall *c) {
    A[0] = f32_matrix(T, D), A[1] = f32_vector(D), A[2] = f32_matrix(1, D), A[3] = f32_matrix(T, D);
    A[4] = f32_matrix(T, D), A[5] = f32_matrix(T, D), A[6] = t_fill(T1(DTYPE_F32, T), 0.7), A[7] = f32_vector(D);
}
static void make_norm_backward_planes(OpCall *c) {
    make_norm_backward(c);
    A[3] = f32_planes(2, T, D);
}
static void run_norm_backward(const Device *d, OpCall *c) {
    op_residual_rmsnorm_backward(d, A[0], A[1], A[2], A[3], A[4], A[5], A[6], A[7], S);
}
static void make_gemm_added(OpCall *c) {
    c->kind = GEMM_FPROP, c->accumulate = true;
    A[0] = f32_matrix(T, F), A[1] = f32_matrix(T, D), A[2] = f32_matrix(F, D);
}
static void make_gemm_dgrad(OpCall *c) {
    c->kind = GEMM_DGRAD;
    A[0] = f32_matrix(T, D), A[1] = f32_matrix(T, F), A[2] = f32_matrix(F, D);
}
static void make_gemm_wgrad(OpCall *c) {
    c->kind = GEMM_WGRAD;
    A[0] = f32_matrix(F, D), A[1] = f32_matrix(T, F), A[2] = f32_matrix(T, D);
}
static void run_gemm(const Device *d, OpCall *c) {
    op_gemm(d, A[0], A[1], A[2], c->kind, c->accumulate, S);
}

static const HeadSteps head_steps = {H, F, D, F + 1};
static void make_head_gemm(OpCall *c) {
    c->kind = GEMM_FPROP;
    A[0] = tensor_cols(f32_matrix(T, H * F), 0, F), A[1] = tensor_cols(f32_matrix(T, H * D), 0, D);
    A[2] = tensor_rows(f32_matrix(H * (F + 1), D), 0, F);
}
static void run_head_gemm(const Device *d, OpCall *c) {
    op_head_gemm(d, A[0], A[1], A[2], c->kind, head_steps, S);
}

/* ---- rope and attention ------------------------------------------------------------------------------------------ */

static void make_rope_forward(OpCall *c) {
    A[0] = f32_matrix(T, QK), A[1] = f32_matrix(T, QK), A[2] = f32_matrix(T, H * VALUE), A[3] = f32_matrix(T, QK);
    A[4] = f32_matrix(T, H * (NOPE + VALUE)), A[5] = f32_matrix(T, ROPE);
    A[6] = i32_vector(T, SEQ), A[7] = f32_vector(ROPE / 2);
}
static void run_rope_forward(const Device *d, OpCall *c) {
    op_rope_split_forward(d, A[0], A[1], A[2], A[3], A[4], A[5], A[6], A[7], c->heads, S);
}
static void make_rope_backward(OpCall *c) {
    A[0] = f32_matrix(T, QK), A[1] = f32_matrix(T, H * (NOPE + VALUE)), A[2] = f32_matrix(T, ROPE);
    A[3] = f32_matrix(T, QK), A[4] = f32_matrix(T, QK), A[5] = f32_matrix(T, H * VALUE);
    A[6] = i32_vector(T, SEQ), A[7] = f32_vector(ROPE / 2);
}
static void run_rope_backward(const Device *d, OpCall *c) {
    op_rope_split_backward(d, A[0], A[1], A[2], A[3], A[4], A[5], A[6], A[7], c->heads, S);
}
static void make_rope(OpCall *c) {
    A[0] = f32_matrix(T, QK), A[1] = f32_matrix(T, QK), A[2] = i32_vector(T, SEQ), A[3] = f32_vector(ROPE / 2);
}
static void run_rope(const Device *d, OpCall *c) {
    op_rope_forward(d, A[0], A[1], A[2], A[3], c->heads, S);
}
static Tensor doc_starts(void) {
    Tensor t = T1(DTYPE_I32, T);
    for (int64_t i = 0; i < T; i++) t_set(t, i, (double)(i / SEQ * SEQ));
    return t;
}
static void make_attention_forward(OpCall *c) {
    A[0] = f32_matrix(T, H * VALUE), A[1] = f32_matrix(T, H), A[2] = f32_matrix(T, QK), A[3] = f32_matrix(T, QK);
    A[4] = f32_matrix(T, H * VALUE), A[5] = doc_starts();
}
static void run_attention_forward(const Device *d, OpCall *c) {
    op_attention_forward(d, A[0], A[1], A[2], A[3], A[4], A[5], c->heads, S);
}
static void make_attention_backward(OpCall *c) {
    A[0] = f32_matrix(T, QK), A[1] = f32_matrix(T, QK), A[2] = f32_matrix(T, H * VALUE), A[3] = f32_matrix(T, H);
    A[4] = f32_matrix(T, H * VALUE), A[5] = f32_matrix(T, H * VALUE), A[6] = f32_matrix(T, QK);
    A[7] = f32_matrix(T, QK), A[8] = f32_matrix(T, H * VALUE), A[9] = t_fill(T2(DTYPE_F32, T, H), 2);
    A[10] = doc_starts();
}
static void run_attention_backward(const Device *d, OpCall *c) {
    op_attention_backward(d, A[0], A[1], A[2], A[3], A[4], A[5], A[6], A[7], A[8], A[9], A[10], c->heads, S);
}

static void make_attention_decode(OpCall *c) {
    A[0] = f32_matrix(T, H * D), A[1] = f32_matrix(T * H, D + 2), A[2] = f32_matrix(T, H * D), A[3] = f32_matrix(T, QK);
    A[4] = f32_matrix(T + 5, D + ROPE);
}
static void run_attention_decode(const Device *d, OpCall *c) {
    op_attention_decode(d, A[0], A[1], A[2], A[3], A[4], c->heads, S);
}

/* ---- router ------------------------------------------------------------------------------------------------------ */

static void make_router_forward(OpCall *c) {
    A[0] = T2(DTYPE_I32, T, K), A[1] = f32_matrix(T, K), A[2] = f32_matrix(T, E), A[3] = i32_vector(E, 3);
    A[4] = T2(DTYPE_I32, T / SEQ, E), A[5] = stats_of(c), A[6] = f32_matrix(T, E), A[7] = f32_vector(E);
    A[8] = i32_vector(T, SEQ);
}
static void run_router_forward(const Device *d, OpCall *c) {
    op_router_forward(d, A[0], A[1], A[2], A[3], A[4], &c->stats, A[6], A[7], A[8], c->router, S);
}
static void make_router_backward(OpCall *c) {
    A[0] = f32_matrix(T, E), A[1] = f32_matrix(T, K), A[2] = i32_cycle(T2(DTYPE_I32, T, K), E);
    A[3] = f32_matrix(T, K), A[4] = t_fill(T2(DTYPE_F32, T, E), 0.4), A[5] = i32_cycle(T2(DTYPE_I32, T / SEQ, E), 3);
    A[6] = i32_vector(T, SEQ), A[7] = params_of(c);
}
static void run_router_backward(const Device *d, OpCall *c) {
    op_router_backward(d, A[0], A[1], A[2], A[3], A[4], A[5], A[6], &c->params, c->router, S);
}
static void make_bias_step(OpCall *c) {
    A[0] = f32_vector(E), A[1] = i32_vector(E, 3), A[2] = params_of(c), A[3] = stats_of(c);
}
static void run_bias_step(const Device *d, OpCall *c) {
    op_bias_step(d, A[0], A[1], &c->params, &c->stats, S);
}

/* ---- rows of the experts ----------------------------------------------------------------------------------------- */

/* The map of T tokens whose choices are i, i + 1: made by the op itself. */
static void set_map(Tensor *map, Tensor *ids, Tensor *weights, Tensor *slots) {
    map[0] = T1(DTYPE_I32, ROWS), map[1] = T1(DTYPE_F32, ROWS);
    map[2] = T2(DTYPE_I32, T, K), map[3] = T1(DTYPE_I32, LOCAL + 1);
    *ids = i32_cycle(T2(DTYPE_I32, T, K), E - 1), *weights = f32_matrix(T, K), *slots = i32_vector(E, E);
}
static MoeMap map_at(const Tensor *map) {
    return (MoeMap){map[0], map[1], map[2], map[3], tensor_none()};
}
static void make_moe_map(OpCall *c) {
    set_map(A, &A[4], &A[5], &A[6]);
}
static void run_moe_map(const Device *d, OpCall *c) {
    op_moe_map(d, map_at(A), A[4], A[5], A[6], c->first_slot, S);
}
static void filled_map(Tensor *map) {
    Tensor ids, weights, slots;
    set_map(map, &ids, &weights, &slots);
    op_moe_map(DEV, map_at(map), ids, weights, slots, 1, STREAM_COMPUTE);
}
static void make_gather_rows(OpCall *c) {
    A[0] = f32_matrix(ROWS, D), A[1] = f32_matrix(T, D);
    filled_map(A + 2);
}
static void run_gather_rows(const Device *d, OpCall *c) {
    op_gather_rows(d, A[0], tensor_none(), A[1], map_at(A + 2), S);
}
static void make_reduce_rows(OpCall *c) {
    A[0] = f32_matrix(T, D), A[1] = f32_matrix(ROWS, D);
    filled_map(A + 2);
}
static void make_reduce_rows_added(OpCall *c) {
    make_reduce_rows(c);
    c->accumulate = true;
}
static void run_reduce_rows(const Device *d, OpCall *c) {
    op_reduce_rows(d, A[0], A[1], map_at(A + 2), c->accumulate, S);
}
static void make_unmap_weights(OpCall *c) {
    A[0] = f32_matrix(T, K), A[1] = f32_vector(ROWS);
    filled_map(A + 2);
}
static void run_unmap_weights(const Device *d, OpCall *c) {
    op_unmap_weights(d, A[0], A[1], map_at(A + 2), S);
}
static void make_grouped_gemm(OpCall *c) {
    Tensor map[4];
    filled_map(map);
    A[0] = f32_matrix(ROWS, F), A[1] = f32_matrix(ROWS, D), A[2] = f32_planes(LOCAL, F, D), A[3] = map[3];
}
static void make_grouped_dgrad(OpCall *c) {
    make_grouped_gemm(c);
    c->kind = GEMM_DGRAD;
    A[0] = f32_matrix(ROWS, D), A[1] = f32_matrix(ROWS, F);
}
static void run_grouped_gemm(const Device *d, OpCall *c) {
    op_grouped_gemm(d, A[0], A[1], A[2], A[3], c->kind, S);
}
static void make_grouped_wgrad(OpCall *c) {
    Tensor map[4];
    filled_map(map);
    A[0] = f32_planes(LOCAL, F, D), A[1] = f32_matrix(ROWS, F), A[2] = f32_matrix(ROWS, D), A[3] = map[3];
}
static void run_grouped_wgrad(const Device *d, OpCall *c) {
    op_grouped_wgrad(d, A[0], A[1], A[2], A[3], S);
}
static void make_swiglu_forward(OpCall *c) {
    A[0] = f32_matrix(T, F), A[1] = f32_matrix(T, 2 * F), A[2] = f32_vector(T);
}
static void run_swiglu_forward(const Device *d, OpCall *c) {
    op_swiglu_forward(d, A[0], tensor_none(), tensor_none(), A[1], A[2], S);
}
static void make_swiglu_backward(OpCall *c) {
    A[0] = f32_matrix(T, 2 * F), A[1] = f32_vector(T), A[2] = f32_matrix(T, F), A[3] = f32_matrix(T, 2 * F);
    A[4] = f32_vector(T);
}
static void run_swiglu_backward(const Device *d, OpCall *c) {
    op_swiglu_backward(d, A[0], quantized_none(), tensor_none(), A[1], A[2], A[3], A[4], S);
}

/* ---- loss and update --------------------------------------------------------------------------------------------- */

static void make_cross_entropy(OpCall *c) {
    A[0] = f32_vector(T), A[1] = f32_matrix(T, V + 2), A[2] = i32_vector(T, V), A[3] = params_of(c);
    c->accumulate = true; /* want_gradient */
}
static void make_cross_entropy_loss(OpCall *c) {
    make_cross_entropy(c);
    c->accumulate = false;
}
static void run_cross_entropy(const Device *d, OpCall *c) {
    op_cross_entropy(d, A[0], A[1], A[2], c->vocab, c->depth, c->accumulate, &c->params, S);
}
static void make_loss_sum(OpCall *c) {
    A[0] = stats_of(c), A[1] = f32_vector(T);
}
static void run_loss_sum(const Device *d, OpCall *c) {
    op_loss_sum(d, &c->stats, A[1], c->depth, S);
}
static void make_grad_squares(OpCall *c) {
    A[0] = T1(DTYPE_F64, 2), A[1] = f32_vector(T), A[2] = T1(DTYPE_F64, 2 * sizeof(Interval) / 8);
    const Interval intervals[2] = {{1, 3}, {4, 2}};
    memcpy(A[2].data, intervals, sizeof intervals);
}
static void run_grad_squares(const Device *d, OpCall *c) {
    op_grad_squares(d, A[0], A[1], (const Interval *)A[2].data, S);
}
static void make_grad_norm(OpCall *c) {
    A[0] = stats_of(c), A[1] = t_fill(T1(DTYPE_F64, T), 2);
}
static void run_grad_norm(const Device *d, OpCall *c) {
    op_grad_norm(d, &c->stats, A[1], S);
}
static void make_update_gate(OpCall *c) {
    A[0] = stats_of(c), A[1] = state_of(c), A[2] = params_of(c);
}
static void run_update_gate(const Device *d, OpCall *c) {
    op_update_gate(d, &c->stats, &c->state, &c->params, S);
}
static void make_adamw_cast(OpCall *c) {
    A[0] = T1(DTYPE_BF16, D), A[1] = f32_vector(D), A[2] = t_fill(T1(DTYPE_F32, D), 0.2);
    A[3] = t_fill(T1(DTYPE_F32, D), 0.3), A[4] = f32_vector(D);
    A[5] = params_of(c), A[6] = stats_of(c), A[7] = state_of(c);
}
static void run_adamw_cast(const Device *d, OpCall *c) {
    op_adamw_cast(d, A[0], tensor_none(), A[1], A[2], A[3], A[4], true, &c->params, &c->stats, &c->state, S);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

#define STATS(access)                                                                                                  \
    { "stats", access, STRUCT, 0 }
#define PARAMS                                                                                                         \
    { "params", READS, STRUCT, 0 }
#define STATE(access)                                                                                                  \
    { "state", access, STRUCT, 0 }
/* Extents of a map that no other argument repeats: tokens' choices (2 of token_row), experts (1 of expert_start). */
#define MAP(row_token, token_row, expert_start)                                                                        \
    {"row_token", row_token, 0, 0}, {"row_weight", UNUSED, 0, 0}, {"token_row", token_row, 0, 2}, {                    \
        "expert_start", expert_start, 0, 1                                                                             \
    }

const OpSpec op_specs[] = {
    {"zero", make_zero, run_zero, {{"y", WRITES, ACT, 3}}},
    {"copy", make_copy, run_copy, {{"y", WRITES, ACT, 0}, {"x", READS, ACT, 0}}},
    {"embed_forward",
     make_embed_forward,
     run_embed_forward,
     {{"y", WRITES, ACT, 0}, {"ids", READS, 0, 0}, {"w", READS, ACT, 1}}},
    {"embed_backward",
     make_embed_backward,
     run_embed_backward,
     {{"dw", BOTH, 0, 1}, {"dy", READS, ACT, 0}, {"ids", READS, 0, 0}}},
    {"residual_rmsnorm_forward",
     make_norm_forward,
     run_norm_forward,
     {{"r", WRITES, ACT, 0},
      {"y", WRITES, ACT, 0},
      {"rstd", WRITES, 0, 0},
      {"x", READS, ACT, 0},
      {"branch", READS, ACT | OPTIONAL, 1},
      {"w", READS, 0, 0}}},
    {"residual_rmsnorm_backward",
     make_norm_backward,
     run_norm_backward,
     {{"dx", WRITES, ACT, 0},
      {"dw", BOTH, 0, 0},
      {"partial", WRITES, 0, 0},
      {"dy", READS, ACT, 0},
      {"dr", READS, ACT | OPTIONAL, 0},
      {"r", READS, ACT, 0},
      {"rstd", READS, 0, 0},
      {"w", READS, 0, 0}}},
    {"residual_rmsnorm_backward",
     make_norm_backward_planes,
     run_norm_backward,
     {{"dx", WRITES, ACT, 0},
      {"dw", BOTH, 0, 0},
      {"partial", WRITES, 0, 0},
      {"dy", READS, ACT, 1},
      {"dr", READS, ACT | OPTIONAL, 0},
      {"r", READS, ACT, 0},
      {"rstd", READS, 0, 0},
      {"w", READS, 0, 0}}},
    {"gemm", make_gemm_added, run_gemm, {{"y", BOTH, ACT, 0}, {"a", READS, ACT, 0}, {"b", READS, ACT, 0}}},
    {"gemm", make_gemm_dgrad, run_gemm, {{"y", WRITES, ACT, 0}, {"a", READS, ACT, 0}, {"b", READS, ACT, 0}}},
    {"gemm", make_gemm_wgrad, run_gemm, {{"y", WRITES, ACT, 0}, {"a", READS, ACT, 0}, {"b", READS, ACT, 0}}},
    {"head_gemm", make_head_gemm, run_head_gemm, {{"y", WRITES, ACT, 0}, {"a", READS, ACT, 0}, {"b", READS, ACT, 0}}},
    {"rope_split_forward",
     make_rope_forward,
     run_rope_forward,
     {{"q", WRITES, ACT, 0},
      {"k", WRITES, ACT, 0},
      {"v", WRITES, ACT, 0},
      {"q_in", READS, ACT, 0},
      {"kv", READS, ACT, 0},
      {"k_pe", READS, ACT, 0},
      {"position", READS, 0, 0},
      {"inv_freq", READS, 0, 0}}},
    {"rope_split_backward",
     make_rope_backward,
     run_rope_backward,
     {{"dq_in", WRITES, ACT, 0},
      {"dkv", WRITES, ACT, 0},
      {"dk_pe", WRITES, ACT, 0},
      {"dq", READS, ACT, 0},
      {"dk", READS, ACT, 0},
      {"dv", READS, ACT, 0},
      {"position", READS, 0, 0},
      {"inv_freq", READS, 0, 0}}},
    {"rope_forward",
     make_rope,
     run_rope,
     {{"y", WRITES, ACT, 0}, {"x", READS, ACT, 0}, {"position", READS, 0, 0}, {"inv_freq", READS, 0, 0}}},
    {"attention_forward",
     make_attention_forward,
     run_attention_forward,
     {{"o", WRITES, ACT, 0},
      {"lse", WRITES, 0, 0},
      {"q", READS, ACT, 0},
      {"k", READS, ACT, 0},
      {"v", READS, ACT, 0},
      {"doc_start", READS, 0, 0}}},
    {"attention_backward",
     make_attention_backward,
     run_attention_backward,
     {{"dq", WRITES, ACT, 0},
      {"dk", WRITES, ACT, 0},
      {"dv", WRITES, ACT, 0},
      {"delta", WRITES, 0, 0},
      {"d_o", READS, ACT, 0},
      {"o", READS, ACT, 0},
      {"q", READS, ACT, 0},
      {"k", READS, ACT, 0},
      {"v", READS, ACT, 0},
      {"lse", READS, 0, 0},
      {"doc_start", READS, 0, 0}}},
    {"attention_decode",
     make_attention_decode,
     run_attention_decode,
     {{"o", WRITES, ACT, 0},
      {"partial", WRITES, 0, 0},
      {"q_latent", READS, ACT, 0},
      {"q", READS, ACT, 0},
      {"cache", READS, ACT, 1}}},
    {"router_forward",
     make_router_forward,
     run_router_forward,
     {{"ids", WRITES, 0, 0},
      {"weights", WRITES, 0, 0},
      {"scores", WRITES, 0, 0},
      {"counts", BOTH, OPTIONAL, 0},
      {"seq_count", WRITES, 0, 0},
      STATS(BOTH),
      {"logits", READS, 0, 0},
      {"bias", READS, OPTIONAL, 0},
      {"position", READS, 0, 0}}},
    {"router_backward",
     make_router_backward,
     run_router_backward,
     {{"dlogits", WRITES, ACT, 0},
      {"dweights", READS, 0, 0},
      {"ids", READS, 0, 0},
      {"weights", READS, 0, 0},
      {"scores", READS, 0, 0},
      {"seq_count", READS, 0, 0},
      {"position", READS, 0, 0},
      PARAMS}},
    {"bias_step", make_bias_step, run_bias_step, {{"bias", BOTH, 0, 0}, {"counts", READS, 0, 0}, PARAMS, STATS(READS)}},
    {"moe_map",
     make_moe_map,
     run_moe_map,
     {{"row_token", WRITES, 0, 0},
      {"row_weight", WRITES, 0, 0},
      {"token_row", WRITES, 0, 0},
      {"expert_start", WRITES, 0, 0},
      {"ids", READS, 0, 0},
      {"weights", READS, 0, 0},
      {"slot_of_expert", READS, 0, 1}}},
    {"gather_rows",
     make_gather_rows,
     run_gather_rows,
     {{"y", WRITES, ACT, 0}, {"x", READS, ACT, 0}, MAP(READS, READS, READS)}},
    {"reduce_rows",
     make_reduce_rows,
     run_reduce_rows,
     {{"y", WRITES, ACT, 0}, {"x", READS, ACT, 0}, MAP(UNUSED, READS, UNUSED)}},
    {"reduce_rows",
     make_reduce_rows_added,
     run_reduce_rows,
     {{"y", BOTH, ACT, 0}, {"x", READS, ACT, 0}, MAP(UNUSED, READS, UNUSED)}},
    {"unmap_weights",
     make_unmap_weights,
     run_unmap_weights,
     {{"dweights", WRITES, 0, 0},
      {"drow_weight", READS, 0, 0},
      {"row_token", UNUSED, 0, 0},
      {"row_weight", UNUSED, 0, 0},
      {"token_row", READS, 0, 0},
      {"expert_start", UNUSED, 0, 1}}},
    {"grouped_gemm",
     make_grouped_gemm,
     run_grouped_gemm,
     {{"y", WRITES, ACT, 0}, {"x", READS, ACT, 0}, {"w", READS, ACT, 0}, {"expert_start", READS, 0, 0}}},
    {"grouped_gemm",
     make_grouped_dgrad,
     run_grouped_gemm,
     {{"y", WRITES, ACT, 0}, {"x", READS, ACT, 0}, {"w", READS, ACT, 0}, {"expert_start", READS, 0, 0}}},
    {"grouped_wgrad",
     make_grouped_wgrad,
     run_grouped_wgrad,
     {{"dw", BOTH, 0, 0}, {"dy", READS, ACT, 0}, {"x", READS, ACT, 0}, {"expert_start", READS, 0, 0}}},
    {"swiglu_forward",
     make_swiglu_forward,
     run_swiglu_forward,
     {{"y", WRITES, ACT, 0}, {"h", READS, ACT, 2}, {"weight", READS, OPTIONAL, 0}}},
    {"swiglu_backward",
     make_swiglu_backward,
     run_swiglu_backward,
     {{"dh", WRITES, ACT, 0},
      {"dweight", WRITES, OPTIONAL, 0},
      {"dy", READS, ACT, 0},
      {"h", READS, ACT, 0},
      {"weight", READS, OPTIONAL, 0}}},
    {"cross_entropy",
     make_cross_entropy,
     run_cross_entropy,
     {{"loss", WRITES, 0, 0}, {"logits", BOTH, ACT, 2}, {"targets", READS, 0, 0}, PARAMS}},
    {"cross_entropy",
     make_cross_entropy_loss,
     run_cross_entropy,
     {{"loss", WRITES, 0, 0}, {"logits", READS, ACT, 2}, {"targets", READS, 0, 0}, PARAMS}},
    {"loss_sum", make_loss_sum, run_loss_sum, {STATS(BOTH), {"loss", READS, 0, 1}}},
    {"grad_squares",
     make_grad_squares,
     run_grad_squares,
     {{"partial", WRITES, 0, 1}, {"g", READS, 0, 1}, {"intervals", READS, STRUCT, 0}}},
    {"grad_norm", make_grad_norm, run_grad_norm, {STATS(BOTH), {"partial", READS, 0, 1}}},
    {"update_gate", make_update_gate, run_update_gate, {STATS(BOTH), STATE(BOTH), PARAMS}},
    {"adamw_cast",
     make_adamw_cast,
     run_adamw_cast,
     {{"copy", WRITES, OPTIONAL, 0},
      {"master", BOTH, 0, 0},
      {"m", BOTH, ACT, 0},
      {"v", BOTH, ACT, 0},
      {"grad", READS, 0, 0},
      PARAMS,
      STATS(READS),
      STATE(READS)}},
};
const int n_op_specs = sizeof op_specs / sizeof *op_specs;

void op_call_make(OpCall *c, const OpSpec *spec) {
    memset(c, 0, sizeof *c);
    next_seed = 0;
    c->eps = 1e-6;
    c->vocab = V;
    c->first_slot = 1;
    c->heads =
        (AttentionShape){.n_heads = H, .nope = NOPE, .rope = ROPE, .value = VALUE, .scale = 0.5, .rope_mscale = 1};
    c->router = (RouterShape){.n_experts = E, .n_chosen = K, .n_group = 2, .topk_group = 1, .scale = 1, .seq_len = SEQ};
    c->params = (StepParams){.step = 1,
                             .inv_tokens = 0.5,
                             .loss_scale = {1},
                             .balance_scale = 1,
                             .lr = 0.1,
                             .beta1 = 0.9,
                             .beta2 = 0.9,
                             .eps = 1e-8,
                             .bias_speed = 0.1,
                             .skip_loss_above = 1e9,
                             .skip_norm_above = 1e9};
    c->stats = (StepStats){.grad_norm_sq = 4, .grad_scale = 0.5};
    c->state.adam_t = 1;
    spec->make(c);
}

int op_n_args(const OpSpec *spec) {
    int n = 0;
    while (n < ARGS_MAX && spec->arg[n].name) n++;
    return n;
}

const OpSpec *op_spec(const char *name) {
    for (int i = 0; i < n_op_specs; i++)
        if (strcmp(op_specs[i].name, name) == 0) return &op_specs[i];
    CHECK(false, "no op %s", name);
    return NULL;
}
