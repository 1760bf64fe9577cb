/* Attention over a cache of latents: the formula in double, chunks and their edges, and the absorbed form against
 * keys and values made from the latents. */
#include <math.h>
#include <string.h>

#include "op_test.h"

enum { GAP = 6 };

typedef struct {
    int64_t n_tokens, n_rows, width; /* T, n, Dc */
    AttentionShape shape;
    Tensor o, partial, q_latent, q, cache;
} Case;

static Case case_make(int64_t n_tokens, int64_t n_rows, int n_heads, int64_t width, int64_t nope, int64_t rope,
                      Dtype dtype) {
    Case c = {.n_tokens = n_tokens, .n_rows = n_rows, .width = width};
    c.shape = (AttentionShape){.n_heads = n_heads, .nope = nope, .rope = rope, .value = 5, .rope_mscale = 1};
    c.shape.scale = 1 / sqrt((double)(nope + rope));
    const int64_t n_chunks = (n_rows + DECODE_CHUNK - 1) / DECODE_CHUNK;
    c.o = t_poison(t_slice(dtype, n_tokens, n_heads * width, GAP));
    c.partial = t_poison(T2(DTYPE_F32, n_tokens * n_heads * n_chunks, width + 2));
    c.q_latent = t_normal(t_slice(dtype, n_tokens, n_heads * width, GAP), 0.7, 1);
    c.q = t_normal(t_slice(dtype, n_tokens, n_heads * (nope + rope), GAP), 1.5, 2);
    c.cache = t_normal(t_slice(dtype, n_rows, width + rope, GAP), 1, 3);
    return c;
}

static void run(void *context) {
    const Case *c = (const Case *)context;
    op_attention_decode(DEV, c->o, c->partial, c->q_latent, c->q, c->cache, c->shape, STREAM_COMPUTE);
}

/* The contract's sum, one token and head at a time. */
static void want_of(const Case *c, double *o, int64_t t, int64_t h) {
    const int64_t Dc = c->width, Dr = c->shape.rope, Dqk = c->shape.nope + Dr, H = c->shape.n_heads;
    const int64_t n_seen = c->n_rows - c->n_tokens + 1 + t;
    double p[1024], largest = -INFINITY, sum = 0;
    REQUIRE(n_seen <= 1024, "case too long for its reference");
    for (int64_t j = 0; j < n_seen; j++) {
        p[j] = 0;
        for (int64_t d = 0; d < Dc; d++)
            p[j] += t_get(c->q_latent, (t * H + h) * Dc + d) * t_get(c->cache, j * (Dc + Dr) + d);
        for (int64_t d = 0; d < Dr; d++)
            p[j] += t_get(c->q, (t * H + h) * Dqk + c->shape.nope + d) * t_get(c->cache, j * (Dc + Dr) + Dc + d);
        p[j] *= c->shape.scale;
        largest = fmax(largest, p[j]);
    }
    for (int64_t j = 0; j < n_seen; j++) sum += p[j] = exp(p[j] - largest);
    for (int64_t d = 0; d < Dc; d++) {
        double *out = o + (t * H + h) * Dc + d;
        *out = 0;
        for (int64_t j = 0; j < n_seen; j++) *out += p[j] / sum * t_get(c->cache, j * (Dc + Dr) + d);
    }
}

static const struct {
    int64_t n_tokens, n_rows;
    int n_heads;
    int64_t width, nope, rope;
} shapes[] = {{1, 1, 2, 12, 8, 4},   {1, 63, 3, 16, 5, 2},      {1, 64, 1, 7, 3, 0},
              {1, 65, 2, 33, 0, 8},  {1, 500, 4, 64, 32, 16},   {3, 66, 2, 12, 8, 4},
              {70, 130, 2, 9, 4, 2}, {1, 200, 2, 512, 128, 64}, {5, 5, 2, 12, 8, 4}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static Case shape_case(int i, Dtype dtype) {
    return case_make(shapes[i].n_tokens, shapes[i].n_rows, shapes[i].n_heads, shapes[i].width, shapes[i].nope,
                     shapes[i].rope, dtype);
}

TEST(attention_decode_against_double) {
    for (int i = 0; i < 2 * N_SHAPES; i++) {
        Case c = shape_case(i / 2, i % 2 ? DTYPE_BF16 : DTYPE_F32);
        double *want = t_doubles(c.o);
        for (int64_t t = 0; t < c.n_tokens; t++)
            for (int64_t h = 0; h < c.shape.n_heads; h++) want_of(&c, want, t, h);
        run(&c);
        const double error = t_error(c.o, want);
        EXPECT(error <= (i % 2 ? BF16_TOLERANCE : OP_TOLERANCE), "shape %d: off by %g", i, error);
        EXPECT(t_gap_is_intact(c.o, GAP), "the gap beside o was written");
        t_free_all();
    }
}

/* Rows behind a token, and what stands in nope parts of q, are not looked at. */
TEST(attention_decode_reads_only_what_is_seen) {
    Case c = shape_case(6, DTYPE_F32);
    run(&c);
    Tensor first = t_copy(c.o);
    const int64_t width = c.width + c.shape.rope, Dqk = c.shape.nope + c.shape.rope;
    for (int64_t d = 0; d < width; d++) t_set(c.cache, (c.n_rows - 1) * width + d, NAN); /* only the last token's */
    for (int64_t i = 0; i < tensor_numel(c.q); i++)
        if (i % Dqk < c.shape.nope) t_set(c.q, i, NAN);
    run(&c);
    EXPECT(t_same_bits(tensor_rows(c.o, 0, c.n_tokens - 1), tensor_rows(first, 0, c.n_tokens - 1)), "another row");
    EXPECT(!t_is_finite(tensor_rows(c.o, c.n_tokens - 1, 1)), "the last token sees its own row");
}

/* Scores of hundreds: no overflow, and a chunk far below the top adds nothing. */
TEST(attention_decode_is_stable) {
    Case c = shape_case(4, DTYPE_F32);
    for (int64_t i = 0; i < tensor_numel(c.q_latent); i++) t_set(c.q_latent, i, 400 * t_get(c.q_latent, i));
    double *want = t_doubles(c.o);
    for (int64_t h = 0; h < c.shape.n_heads; h++) want_of(&c, want, 0, h);
    run(&c);
    EXPECT(t_error(c.o, want) <= 1e3 * OP_TOLERANCE, "off by %g", t_error(c.o, want));
}

/* With W_UK moved into the query and W_UV behind the sum, the result is attention over the keys and values that the
 * latents stand for: rope_split and attention of the whole sequence, its last token. */
TEST(attention_decode_absorbed_is_attention) {
    enum { T = 90, H = 2, DC = 12, NOPE = 8, ROPE = 4, VALUE = 6, QK = NOPE + ROPE, KV = NOPE + VALUE };
    const AttentionShape s = {.n_heads = H, .nope = NOPE, .rope = ROPE, .value = VALUE, .scale = 0.4, .rope_mscale = 1};
    AttentionShape one = s;
    one.n_heads = 1, one.nope = 0;
    Tensor q_in = t_normal(T2(DTYPE_F32, T, H * QK), 1, 1), latent = t_normal(T2(DTYPE_F32, T, DC), 1, 2);
    Tensor k_pe = t_normal(T2(DTYPE_F32, T, ROPE), 1, 3), kv_b = t_normal(T2(DTYPE_F32, H * KV, DC), 0.4, 4);
    Tensor kv = T2(DTYPE_F32, T, H * KV), q = T2(DTYPE_F32, T, H * QK), k = T2(DTYPE_F32, T, H * QK);
    Tensor v = T2(DTYPE_F32, T, H * VALUE), o = T2(DTYPE_F32, T, H * VALUE), lse = T2(DTYPE_F32, T, H);
    Tensor position = T1(DTYPE_I32, T), start = T1(DTYPE_I32, T), freq = t_normal(T1(DTYPE_F32, ROPE / 2), 1, 5);
    for (int64_t t = 0; t < T; t++) t_set(position, t, (double)t);
    op_gemm(DEV, kv, latent, kv_b, GEMM_FPROP, false, STREAM_COMPUTE);
    op_rope_split_forward(DEV, q, k, v, q_in, kv, k_pe, position, freq, s, STREAM_COMPUTE);
    op_attention_forward(DEV, o, lse, q, k, v, start, s, STREAM_COMPUTE);

    Tensor cache = T2(DTYPE_F32, T, DC + ROPE), q_latent = T2(DTYPE_F32, 1, H * DC),
           o_latent = T2(DTYPE_F32, 1, H * DC);
    Tensor partial = T2(DTYPE_F32, H * 2, DC + 2), got = T2(DTYPE_F32, 1, H * VALUE), last = tensor_rows(q, T - 1, 1);
    op_copy(DEV, tensor_cols(cache, 0, DC), latent, STREAM_COMPUTE);
    op_rope_forward(DEV, tensor_cols(cache, DC, ROPE), k_pe, position, freq, one, STREAM_COMPUTE);
    op_head_gemm(DEV, tensor_cols(q_latent, 0, DC), tensor_cols(last, 0, NOPE), tensor_rows(kv_b, 0, NOPE), GEMM_DGRAD,
                 (HeadSteps){H, DC, QK, KV}, STREAM_COMPUTE);
    op_attention_decode(DEV, o_latent, partial, q_latent, last, cache, s, STREAM_COMPUTE);
    op_head_gemm(DEV, tensor_cols(got, 0, VALUE), tensor_cols(o_latent, 0, DC), tensor_rows(kv_b, NOPE, VALUE),
                 GEMM_FPROP, (HeadSteps){H, VALUE, DC, KV}, STREAM_COMPUTE);
    double *want = t_doubles(tensor_rows(o, T - 1, 1));
    EXPECT(t_error(got, want) <= OP_TOLERANCE, "off by %g", t_error(got, want));
}

TEST(attention_decode_threads) {
    for (int i = 4; i < 7; i++) {
        Case c = shape_case(i, i % 2 ? DTYPE_BF16 : DTYPE_F32);
        expect_same_bits("attention_decode", run, &c, &c.o, 1);
        t_free_all();
    }
}
