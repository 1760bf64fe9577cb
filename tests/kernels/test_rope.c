#include <math.h>

#include "kernels/cpu/cpu.h"
#include "op_test.h"

typedef struct {
    AttentionShape shape;
    Tensor q, k, v, q_in, kv, k_pe, position, inv_freq;
    Tensor dq_in, dkv, dk_pe, dq, dk, dv;
} Rope;

static Rope rope_make(Dtype dtype, int64_t T, AttentionShape s) {
    const int64_t H = s.n_heads, qk = H * (s.nope + s.rope), v = H * s.value, kv = H * (s.nope + s.value);
    Rope r = {.shape = s,
              .q = T2(dtype, T, qk),
              .k = T2(dtype, T, qk),
              .v = T2(dtype, T, v),
              .q_in = t_normal(T2(dtype, T, qk), 1, 1),
              .kv = t_normal(T2(dtype, T, kv), 1, 2),
              .k_pe = t_normal(t_slice(dtype, T, s.rope, 8), 1, 3),
              .position = T1(DTYPE_I32, T),
              .inv_freq = T1(DTYPE_F32, s.rope / 2),
              .dq_in = T2(dtype, T, qk),
              .dkv = T2(dtype, T, kv),
              .dk_pe = t_slice(dtype, T, s.rope, 6),
              .dq = t_normal(T2(dtype, T, qk), 1, 4),
              .dk = t_normal(T2(dtype, T, qk), 1, 5),
              .dv = t_normal(T2(dtype, T, v), 1, 6)};
    for (int64_t t = 0; t < T; t++) t_set(r.position, t, t % 5 == 3 ? -1 : (double)(t * 17 % 100));
    for (int64_t i = 0; i < s.rope / 2; i++) t_set(r.inv_freq, i, pow(10000, -2.0 * (double)i / (double)s.rope));
    return r;
}

static void forward(Rope *r) {
    op_rope_split_forward(DEV, r->q, r->k, r->v, r->q_in, r->kv, r->k_pe, r->position, r->inv_freq, r->shape,
                          STREAM_COMPUTE);
}

static void backward(Rope *r) {
    op_rope_split_backward(DEV, r->dq_in, r->dkv, r->dk_pe, r->dq, r->dk, r->dv, r->position, r->inv_freq, r->shape,
                           STREAM_COMPUTE);
}

static const AttentionShape shapes[] = {
    {.n_heads = 1, .nope = 0, .rope = 2, .value = 1, .scale = 1, .rope_mscale = 1},
    {.n_heads = 3, .nope = 5, .rope = 6, .value = 7, .scale = 1, .rope_mscale = 1},
    {.n_heads = 2, .nope = 8, .rope = 4, .value = 3, .scale = 1, .rope_mscale = 1.25},
    {.n_heads = 2, .nope = 4, .rope = 0, .value = 3, .scale = 1, .rope_mscale = 1}};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

/* Complex numbers: pair (2i, 2i+1) times mscale exp(j position inv_freq). */
static void rotated(double *y, Tensor x, int64_t first, const Rope *r, int64_t t, double direction) {
    double at = fmax(0, t_get(r->position, t));
    for (int64_t i = 0; i < r->shape.rope / 2; i++) {
        double angle = direction * (double)((real)at * (real)t_get(r->inv_freq, i));
        double re = t_get(x, first + 2 * i), im = t_get(x, first + 2 * i + 1);
        y[2 * i] = r->shape.rope_mscale * (re * cos(angle) - im * sin(angle));
        y[2 * i + 1] = r->shape.rope_mscale * (re * sin(angle) + im * cos(angle));
    }
}

TEST(rope_split_forward_against_double) {
    for (int i = 0; i < 2 * N_SHAPES; i++) {
        const AttentionShape s = shapes[i / 2];
        Dtype dtype = i % 2 ? DTYPE_BF16 : DTYPE_F32;
        double tolerance = i % 2 ? BF16_TOLERANCE : OP_TOLERANCE;
        const int64_t T = i == 0 ? 1 : 9, Dqk = s.nope + s.rope, Dkv = s.nope + s.value;
        Rope r = rope_make(dtype, T, s);
        double *q = t_doubles(r.q), *k = t_doubles(r.k), *v = t_doubles(r.v);
        for (int64_t t = 0; t < T; t++) {
            for (int64_t h = 0; h < s.n_heads; h++) {
                const int64_t row = (t * s.n_heads + h) * Dqk, kv_row = (t * s.n_heads + h) * Dkv;
                for (int64_t j = 0; j < s.nope; j++) q[row + j] = t_get(r.q_in, row + j);
                for (int64_t j = 0; j < s.nope; j++) k[row + j] = t_get(r.kv, kv_row + j);
                for (int64_t j = 0; j < s.value; j++)
                    v[(t * s.n_heads + h) * s.value + j] = t_get(r.kv, kv_row + s.nope + j);
                rotated(q + row + s.nope, r.q_in, row + s.nope, &r, t, 1);
                rotated(k + row + s.nope, r.k_pe, t * s.rope, &r, t, 1);
            }
        }
        t_poison(r.q), t_poison(r.k), t_poison(r.v);
        forward(&r);
        EXPECT(t_error(r.q, q) <= tolerance, "shape %d: q off by %g", i, t_error(r.q, q));
        EXPECT(t_error(r.k, k) <= tolerance, "shape %d: k off by %g", i, t_error(r.k, k));
        EXPECT(t_error(r.v, v) == 0, "shape %d: v off by %g", i, t_error(r.v, v));
        EXPECT(t_gap_is_intact(r.k_pe, 8), "k_pe's matrix was written");

        Tensor apart = r.q;
        r.q = r.q_in;
        forward(&r);
        EXPECT(t_same_bits(apart, r.q), "shape %d: q in place differs", i);
    }
}

/* Interleaved pairs by hand: at position 1 and frequency 1 the vector (1, 0, 0, 1) becomes (cos 1, sin 1, 0, 1) when
 * the second pair does not turn. The half layout would mix elements 0 and 2. */
TEST(rope_pairs_are_interleaved) {
    const AttentionShape s = {.n_heads = 1, .nope = 0, .rope = 4, .value = 1, .scale = 1, .rope_mscale = 1};
    Rope r = rope_make(DTYPE_F32, 1, s);
    static const double x[4] = {1, 0, 0, 1};
    for (int i = 0; i < 4; i++) t_set(r.q_in, i, x[i]), t_set(r.k_pe, i, x[i]);
    t_set(r.position, 0, 1), t_set(r.inv_freq, 0, 1), t_set(r.inv_freq, 1, 0);
    forward(&r);
    const double want[4] = {cos(1), sin(1), 0, 1};
    EXPECT(t_error(r.q, want) < 1e-7 && t_error(r.k, want) < 1e-7, "q is (%g, %g, %g, %g)", t_get(r.q, 0),
           t_get(r.q, 1), t_get(r.q, 2), t_get(r.q, 3));
}

TEST(rope_split_backward_against_double) {
    for (int i = 0; i < 2 * N_SHAPES; i++) {
        const AttentionShape s = shapes[i / 2];
        Dtype dtype = i % 2 ? DTYPE_BF16 : DTYPE_F32;
        double tolerance = i % 2 ? BF16_TOLERANCE : OP_TOLERANCE;
        const int64_t T = i == 0 ? 1 : 9, Dqk = s.nope + s.rope, Dkv = s.nope + s.value, H = s.n_heads;
        Rope r = rope_make(dtype, T, s);
        double *dq_in = t_doubles(r.dq_in), *dkv = t_doubles(r.dkv), *dk_pe = t_doubles(r.dk_pe), one[8];
        for (int64_t j = 0; j < T * s.rope; j++) dk_pe[j] = 0;
        for (int64_t t = 0; t < T; t++) {
            for (int64_t h = 0; h < H; h++) {
                const int64_t row = (t * H + h) * Dqk, kv_row = (t * H + h) * Dkv;
                for (int64_t j = 0; j < s.nope; j++) dq_in[row + j] = t_get(r.dq, row + j);
                for (int64_t j = 0; j < s.nope; j++) dkv[kv_row + j] = t_get(r.dk, row + j);
                for (int64_t j = 0; j < s.value; j++) dkv[kv_row + s.nope + j] = t_get(r.dv, (t * H + h) * s.value + j);
                rotated(dq_in + row + s.nope, r.dq, row + s.nope, &r, t, -1);
                rotated(one, r.dk, row + s.nope, &r, t, -1);
                for (int64_t j = 0; j < s.rope; j++) dk_pe[t * s.rope + j] += one[j];
            }
        }
        t_poison(r.dq_in), t_poison(r.dkv), t_poison(r.dk_pe);
        backward(&r);
        EXPECT(t_error(r.dq_in, dq_in) <= tolerance, "shape %d: dq_in off by %g", i, t_error(r.dq_in, dq_in));
        EXPECT(t_error(r.dkv, dkv) == 0, "shape %d: dkv off by %g", i, t_error(r.dkv, dkv));
        EXPECT(t_error(r.dk_pe, dk_pe) <= tolerance, "shape %d: dk_pe off by %g", i, t_error(r.dk_pe, dk_pe));
        EXPECT(t_gap_is_intact(r.dk_pe, 6), "the gap beside dk_pe was written");

        Tensor apart = r.dq_in;
        r.dq_in = r.dq;
        backward(&r);
        EXPECT(t_same_bits(apart, r.dq_in), "shape %d: dq in place differs", i);
    }
}

/* The rotation alone gives the split's q, and, as one head without a nope part, its k_pe, into a slice. */
TEST(rope_forward_is_the_split_s_rotation) {
    for (int i = 0; i < 2 * N_SHAPES; i++) {
        const AttentionShape s = shapes[i / 2];
        const int64_t T = 9, Dqk = s.nope + s.rope;
        Rope r = rope_make(i % 2 ? DTYPE_BF16 : DTYPE_F32, T, s);
        forward(&r);
        Tensor y = t_poison(t_copy(r.q)), in_place = t_copy(r.q_in);
        op_rope_forward(DEV, y, r.q_in, r.position, r.inv_freq, s, STREAM_COMPUTE);
        op_rope_forward(DEV, in_place, in_place, r.position, r.inv_freq, s, STREAM_COMPUTE);
        const double tolerance = i % 2 ? BF16_TOLERANCE : OP_TOLERANCE;
        EXPECT(t_error(y, t_doubles(r.q)) <= tolerance, "shape %d: q", i);
        EXPECT(t_same_bits(in_place, y), "shape %d: q in place", i);
        if (s.rope == 0) continue;
        AttentionShape one = s;
        one.n_heads = 1, one.nope = 0;
        Tensor k_pe = t_poison(t_slice(r.q.dtype, T, s.rope, 6));
        op_rope_forward(DEV, k_pe, r.k_pe, r.position, r.inv_freq, one, STREAM_COMPUTE);
        const double *want = t_doubles(tensor_cols(r.k, Dqk - s.rope, s.rope));
        EXPECT(t_error(k_pe, want) <= tolerance, "shape %d: k_pe", i);
        EXPECT(t_gap_is_intact(k_pe, 6), "the gap beside k_pe was written");
    }
}

static double loss(void *context) {
    Rope *r = (Rope *)context;
    forward(r);
    return t_dot_normal(r->q, 4) + t_dot_normal(r->k, 5) + t_dot_normal(r->v, 6);
}

TEST(rope_split_gradient) {
    for (int i = 1; i < N_SHAPES; i++) {
        Rope r = rope_make(DTYPE_F32, 6, shapes[i]);
        backward(&r);
        fd_check("rope q_in", r.q_in, r.dq_in, loss, NULL, &r, 100, NULL);
        fd_check("rope kv", r.kv, r.dkv, loss, NULL, &r, 100, NULL);
        if (shapes[i].rope > 0) fd_check("rope k_pe", r.k_pe, r.dk_pe, loss, NULL, &r, 100, NULL);
    }
}

static void both(void *context) {
    forward((Rope *)context);
    backward((Rope *)context);
}

TEST(rope_threads) {
    Rope r = rope_make(DTYPE_BF16, 50, shapes[1]);
    Tensor outputs[] = {r.q, r.k, r.v, r.dq_in, r.dkv, r.dk_pe};
    expect_same_bits("rope", both, &r, outputs, 6);
}
