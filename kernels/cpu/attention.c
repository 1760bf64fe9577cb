/* Causal attention within documents, softmax and its gradient, by blocks of BLOCK queries x BLOCK keys.
 *
 * Scores are never stored for longer than a block. Forward keeps a running maximum and sum for each query; backward
 * makes the probabilities again from lse. One work item is a block of rows of one head, for everything that is written:
 * o and lse, then dq, then dk and dv, so nothing is shared, and every sum runs over blocks in ascending order whoever
 * computes it. That costs backward a second product for the scores, and needs no atomics and no assumption about
 * doc_start.
 *
 * All products are gemm_local() on blocks that lie in local arrays, padded with zeros. "rows" holds a block as it lies
 * in memory, "columns" holds it turned, so that the vectors of the product run over its rows. */
#include "kernels/base/check.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/gemm_core.h"

enum { BLOCK = 64, HEAD_MAX = 256 };

typedef struct {
    int64_t n_tokens, width_qk, width_v; /* T, Dqk, Dv */
    int64_t padded_qk, padded_v;         /* widths of the local arrays */
    real scale;
    const int32_t *doc_start;
} Attention;

/* A block of queries: what the softmax of each needs. Rows past n are zero and harmless. */
typedef struct {
    int64_t first, n;
    int32_t first_key[BLOCK];
    int32_t least_key, last_start; /* smallest and largest first_key */
    real lse[BLOCK], delta[BLOCK];
} Queries;

static Attention attention_make(Tensor q, Tensor doc_start, AttentionShape shape) {
    Attention a = {.n_tokens = q.shape[0], .width_qk = shape.nope + shape.rope, .width_v = shape.value};
    CHECK(a.width_qk <= HEAD_MAX && a.width_v <= HEAD_MAX, "head widths %lld and %lld exceed %d", (long long)a.width_qk,
          (long long)a.width_v, HEAD_MAX);
    a.padded_qk = (a.width_qk + GEMM_LANES - 1) / GEMM_LANES * GEMM_LANES;
    a.padded_v = (a.width_v + GEMM_LANES - 1) / GEMM_LANES * GEMM_LANES;
    a.scale = (real)shape.scale;
    a.doc_start = (const int32_t *)doc_start.data;
    return a;
}

static int64_t block_rows(const Attention *a, int64_t first) {
    return a->n_tokens - first < BLOCK ? a->n_tokens - first : BLOCK;
}

/* ---- blocks between tensors and local arrays ---- */

static inline real element(Tensor x, int64_t at) {
    return x.dtype == DTYPE_F32 ? ((const real *)x.data)[at] : bf16_to_real(((const uint16_t *)x.data)[at]);
}

/* rows[i][d] = x[first + i, col + d], zero past n rows and past width. */
static CPU_CLONES void load_rows(real *rows, int64_t padded, Tensor x, int64_t first, int64_t n, int64_t col,
                                 int64_t width) {
    if (n < BLOCK || width < padded) memset(rows, 0, (size_t)(BLOCK * padded) * sizeof *rows);
    for (int64_t i = 0; i < n; i++) {
        int64_t at = (first + i) * x.ld + col;
        if (x.dtype == DTYPE_F32)
            memcpy(rows + i * padded, (const real *)x.data + at, (size_t)width * sizeof *rows);
        else
            for (int64_t d = 0; d < width; d++) rows[i * padded + d] = bf16_to_real(((const uint16_t *)x.data)[at + d]);
    }
}

/* columns[d][i] = x[first + i, col + d], zero past n. */
static void load_columns(real *columns, Tensor x, int64_t first, int64_t n, int64_t col, int64_t width) {
    if (n < BLOCK) memset(columns, 0, (size_t)(width * BLOCK) * sizeof *columns);
    for (int64_t i = 0; i < n; i++)
        for (int64_t d = 0; d < width; d++) columns[d * BLOCK + i] = element(x, (first + i) * x.ld + col + d);
}

/* x[first + i, col + d] = factor[i] * rows[i][d], factor NULL: 1. */
static CPU_CLONES void store_rows(Tensor x, int64_t first, int64_t n, int64_t col, int64_t width, const real *rows,
                                  int64_t padded, const real *factor) {
    for (int64_t i = 0; i < n; i++) {
        int64_t at = (first + i) * x.ld + col;
        real by = factor ? factor[i] : 1;
        const real *row = rows + i * padded;
        if (x.dtype == DTYPE_F32)
            for (int64_t d = 0; d < width; d++) ((real *)x.data)[at + d] = by * row[d];
        else
            for (int64_t d = 0; d < width; d++) ((uint16_t *)x.data)[at + d] = real_to_bf16(by * row[d]);
    }
}

/* lse and delta may be absent (forward). */
static Queries load_queries(const Attention *a, int64_t first, Tensor lse, Tensor delta, int64_t head) {
    Queries u = {.first = first, .n = block_rows(a, first), .least_key = INT32_MAX};
    for (int64_t i = 0; i < BLOCK; i++) {
        if (i >= u.n) {
            u.first_key[i] = (int32_t)(first + i);
            continue;
        }
        u.first_key[i] = a->doc_start[first + i];
        if (u.first_key[i] < u.least_key) u.least_key = u.first_key[i];
        if (u.first_key[i] > u.last_start) u.last_start = u.first_key[i];
        if (lse.data) u.lse[i] = ((const real *)lse.data)[(first + i) * lse.ld + head];
        if (delta.data) u.delta[i] = ((const real *)delta.data)[(first + i) * delta.ld + head];
    }
    return u;
}

/* Whether some query of the block may not see some key of the block at `key`. */
static bool is_masked(const Queries *u, int64_t key) {
    return key + BLOCK > u->first || u->last_start > key;
}

static inline bool sees(const Queries *u, int64_t i, int32_t key) {
    return (key >= u->first_key[i]) & (key <= (int32_t)u->first + (int32_t)i);
}

/* ---- forward ---- */

/* Turns the scores s[j][i] of key j and query i into exp(scale s - largest[i]); the running maximum and sum of each
 * query move on, `shrink` is what earlier sums must be multiplied with. */
static CPU_CLONES void softmax_block(real *s, const Queries *u, int64_t key, real scale, real *largest, real *sum,
                                     real *shrink) {
    real top[BLOCK];
    memcpy(top, largest, sizeof top);
    bool masked = is_masked(u, key);
    for (int64_t j = 0; j < BLOCK; j++) {
        real *row = s + j * BLOCK;
        if (masked)
            for (int64_t i = 0; i < BLOCK; i++) row[i] = sees(u, i, (int32_t)(key + j)) ? row[i] : (real)-INFINITY;
        for (int64_t i = 0; i < BLOCK; i++) {
            row[i] *= scale;
            top[i] = row[i] > top[i] ? row[i] : top[i];
        }
    }
    for (int64_t i = 0; i < BLOCK; i++) {
        shrink[i] = exp_real(largest[i] - top[i]);
        largest[i] = top[i];
        sum[i] *= shrink[i];
    }
    for (int64_t j = 0; j < BLOCK; j++) {
        real *row = s + j * BLOCK;
        for (int64_t i = 0; i < BLOCK; i++) {
            row[i] = exp_real(row[i] - top[i]);
            sum[i] += row[i];
        }
    }
}

static CPU_CLONES void scale_rows(real *rows, int64_t padded, const real *factor) {
    for (int64_t i = 0; i < BLOCK; i++)
        for (int64_t d = 0; d < padded; d++) rows[i * padded + d] *= factor[i];
}

static void forward_block(const Attention *a, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, int64_t first,
                          int64_t head) {
    real q_columns[HEAD_MAX * BLOCK], k_rows[BLOCK * HEAD_MAX], v_rows[BLOCK * HEAD_MAX], s[BLOCK * BLOCK];
    real out[BLOCK * HEAD_MAX], largest[BLOCK], sum[BLOCK], factor[BLOCK];
    const int64_t col_qk = head * a->width_qk, col_v = head * a->width_v;
    Queries u = load_queries(a, first, tensor_none(), tensor_none(), head);
    load_columns(q_columns, q, first, u.n, col_qk, a->width_qk);
    for (int64_t i = 0; i < BLOCK; i++) {
        largest[i] = (real)-1e30; /* Finite: a query may see nothing of the first blocks. */
        sum[i] = 0;
    }
    memset(out, 0, (size_t)(BLOCK * a->padded_v) * sizeof *out);
    for (int64_t key = u.least_key / BLOCK * BLOCK; key <= first; key += BLOCK) {
        load_rows(k_rows, a->padded_qk, k, key, block_rows(a, key), col_qk, a->width_qk);
        load_rows(v_rows, a->padded_v, v, key, block_rows(a, key), col_v, a->width_v);
        gemm_local(BLOCK, BLOCK, a->width_qk, k_rows, a->padded_qk, 1, q_columns, BLOCK, s, BLOCK, false);
        softmax_block(s, &u, key, a->scale, largest, sum, factor);
        scale_rows(out, a->padded_v, factor);
        gemm_local(BLOCK, a->padded_v, BLOCK, s, 1, BLOCK, v_rows, a->padded_v, out, a->padded_v, true);
    }
    for (int64_t i = 0; i < u.n; i++) {
        factor[i] = 1 / sum[i];
        ((real *)lse.data)[(first + i) * lse.ld + head] = largest[i] + (real)log((double)sum[i]);
    }
    store_rows(o, first, u.n, col_v, a->width_v, out, a->padded_v, factor);
}

void cpu_attention_forward(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor doc_start, AttentionShape shape,
                           Stream s) {
    (void)s;
    const Attention a = attention_make(q, doc_start, shape);
#pragma omp parallel for collapse(2) schedule(static, 1)
    for (int64_t first = 0; first < a.n_tokens; first += BLOCK)
        for (int64_t head = 0; head < shape.n_heads; head++) forward_block(&a, o, lse, q, k, v, first, head);
}

/* ---- backward ---- */

static void delta_row(const Attention *a, Tensor delta, Tensor d_o, Tensor o, int64_t t, int64_t n_heads) {
    for (int64_t head = 0; head < n_heads; head++) {
        real sum = 0;
        for (int64_t d = head * a->width_v; d < (head + 1) * a->width_v; d++)
            sum += element(d_o, t * d_o.ld + d) * element(o, t * o.ld + d);
        ((real *)delta.data)[t * delta.ld + head] = sum;
    }
}

/* s: scores to probabilities p. dp: gradient of p to that of the unscaled score, scale p (dp - delta). Rows of both are
 * queries and columns keys, or the other way round. */
static inline __attribute__((always_inline)) void softmax_gradient(real *s, real *dp, const Queries *u, int64_t key,
                                                                   real scale, bool rows_are_queries) {
    bool masked = is_masked(u, key);
    for (int64_t row = 0; row < BLOCK; row++) {
        real *p = s + row * BLOCK, *dp_row = dp + row * BLOCK;
        for (int64_t col = 0; col < BLOCK; col++)
            p[col] = exp_real(p[col] * scale - u->lse[rows_are_queries ? row : col]);
        if (masked)
            for (int64_t col = 0; col < BLOCK; col++) {
                int64_t query = rows_are_queries ? row : col;
                p[col] = sees(u, query, (int32_t)(key + (rows_are_queries ? col : row))) ? p[col] : 0;
            }
        for (int64_t col = 0; col < BLOCK; col++)
            dp_row[col] = scale * p[col] * (dp_row[col] - u->delta[rows_are_queries ? row : col]);
    }
}

static CPU_CLONES void softmax_gradient_by_query(real *s, real *dp, const Queries *u, int64_t key, real scale) {
    softmax_gradient(s, dp, u, key, scale, true);
}

static CPU_CLONES void softmax_gradient_by_key(real *s, real *dp, const Queries *u, int64_t key, real scale) {
    softmax_gradient(s, dp, u, key, scale, false);
}

/* dq of a block of queries: over the keys that they see. */
static void backward_queries(const Attention *a, Tensor dq, Tensor delta, Tensor d_o, Tensor q, Tensor k, Tensor v,
                             Tensor lse, int64_t first, int64_t head) {
    real q_columns[HEAD_MAX * BLOCK], do_columns[HEAD_MAX * BLOCK], k_rows[BLOCK * HEAD_MAX], v_rows[BLOCK * HEAD_MAX];
    real s[BLOCK * BLOCK], dp[BLOCK * BLOCK], dq_rows[BLOCK * HEAD_MAX];
    const int64_t col_qk = head * a->width_qk, col_v = head * a->width_v;
    Queries u = load_queries(a, first, lse, delta, head);
    load_columns(q_columns, q, first, u.n, col_qk, a->width_qk);
    load_columns(do_columns, d_o, first, u.n, col_v, a->width_v);
    memset(dq_rows, 0, (size_t)(BLOCK * a->padded_qk) * sizeof *dq_rows);
    for (int64_t key = u.least_key / BLOCK * BLOCK; key <= first; key += BLOCK) {
        load_rows(k_rows, a->padded_qk, k, key, block_rows(a, key), col_qk, a->width_qk);
        load_rows(v_rows, a->padded_v, v, key, block_rows(a, key), col_v, a->width_v);
        gemm_local(BLOCK, BLOCK, a->width_qk, k_rows, a->padded_qk, 1, q_columns, BLOCK, s, BLOCK, false);
        gemm_local(BLOCK, BLOCK, a->width_v, v_rows, a->padded_v, 1, do_columns, BLOCK, dp, BLOCK, false);
        softmax_gradient_by_key(s, dp, &u, key, a->scale);
        gemm_local(BLOCK, a->padded_qk, BLOCK, dp, 1, BLOCK, k_rows, a->padded_qk, dq_rows, a->padded_qk, true);
    }
    store_rows(dq, first, u.n, col_qk, a->width_qk, dq_rows, a->padded_qk, NULL);
}

/* dk and dv of a block of keys: over the queries that see them. */
static void backward_keys(const Attention *a, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor q, Tensor k,
                          Tensor v, Tensor lse, int64_t key, int64_t head) {
    real k_columns[HEAD_MAX * BLOCK], v_columns[HEAD_MAX * BLOCK], q_rows[BLOCK * HEAD_MAX], do_rows[BLOCK * HEAD_MAX];
    real s[BLOCK * BLOCK], dp[BLOCK * BLOCK], dk_rows[BLOCK * HEAD_MAX], dv_rows[BLOCK * HEAD_MAX];
    const int64_t col_qk = head * a->width_qk, col_v = head * a->width_v, n = block_rows(a, key);
    load_columns(k_columns, k, key, n, col_qk, a->width_qk);
    load_columns(v_columns, v, key, n, col_v, a->width_v);
    memset(dk_rows, 0, (size_t)(BLOCK * a->padded_qk) * sizeof *dk_rows);
    memset(dv_rows, 0, (size_t)(BLOCK * a->padded_v) * sizeof *dv_rows);
    for (int64_t first = key; first < a->n_tokens; first += BLOCK) {
        Queries u = load_queries(a, first, lse, delta, head);
        if (u.least_key >= key + n) continue;
        load_rows(q_rows, a->padded_qk, q, first, u.n, col_qk, a->width_qk);
        load_rows(do_rows, a->padded_v, d_o, first, u.n, col_v, a->width_v);
        gemm_local(BLOCK, BLOCK, a->width_qk, q_rows, a->padded_qk, 1, k_columns, BLOCK, s, BLOCK, false);
        gemm_local(BLOCK, BLOCK, a->width_v, do_rows, a->padded_v, 1, v_columns, BLOCK, dp, BLOCK, false);
        softmax_gradient_by_query(s, dp, &u, key, a->scale);
        gemm_local(BLOCK, a->padded_v, BLOCK, s, 1, BLOCK, do_rows, a->padded_v, dv_rows, a->padded_v, true);
        gemm_local(BLOCK, a->padded_qk, BLOCK, dp, 1, BLOCK, q_rows, a->padded_qk, dk_rows, a->padded_qk, true);
    }
    store_rows(dk, key, n, col_qk, a->width_qk, dk_rows, a->padded_qk, NULL);
    store_rows(dv, key, n, col_v, a->width_v, dv_rows, a->padded_v, NULL);
}

void cpu_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor o, Tensor q, Tensor k,
                            Tensor v, Tensor lse, Tensor doc_start, AttentionShape shape, Stream s) {
    (void)s;
    const Attention a = attention_make(q, doc_start, shape);
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < a.n_tokens; t++) delta_row(&a, delta, d_o, o, t, shape.n_heads);
#pragma omp parallel for collapse(2) schedule(static, 1)
    for (int64_t first = 0; first < a.n_tokens; first += BLOCK)
        for (int64_t head = 0; head < shape.n_heads; head++)
            backward_queries(&a, dq, delta, d_o, q, k, v, lse, first, head);
#pragma omp parallel for collapse(2) schedule(static, 1)
    for (int64_t key = 0; key < a.n_tokens; key += BLOCK)
        for (int64_t head = 0; head < shape.n_heads; head++)
            backward_keys(&a, dk, dv, delta, d_o, q, k, v, lse, key, head);
}
