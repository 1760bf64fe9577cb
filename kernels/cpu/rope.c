/* The rotary embedding, and the split of MLA's projections into heads. The report rotates complex pairs (2i, 2i+1), not
 * halves; one rotated k_pe is copied to every head. Backward is the transpose: the rotation by the negative angle, and
 * a sum over heads where forward copied. */
#include <tgmath.h>

#include "cpu.h"
#include "cpu_ops.h"

/* direction 1 rotates, -1 rotates back. The angle is a product of reals, as on the device. */
static void angles(real *cosine, real *sine, int32_t position, const real *inv_freq, int64_t n, double mscale,
                   real direction) {
    const real at = position < 0 ? 0 : (real)position;
    for (int64_t i = 0; i < n; i++) cosine[i] = cos(at * inv_freq[i]) * (real)mscale;
    for (int64_t i = 0; i < n; i++) sine[i] = sin(at * inv_freq[i]) * (real)mscale * direction;
}

/* y may be x. */
static inline void rotate(real *y, const real *x, const real *cosine, const real *sine, int64_t n_pairs) {
    for (int64_t i = 0; i < n_pairs; i++) {
        real even = x[2 * i], odd = x[2 * i + 1];
        y[2 * i] = even * cosine[i] - odd * sine[i];
        y[2 * i + 1] = even * sine[i] + odd * cosine[i];
    }
}

static inline void copy(real *y, const real *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i];
}

typedef struct {
    Tensor q, k, v, q_in, kv, k_pe; /* or their gradients */
    AttentionShape shape;
} Heads;

static CPU_CLONES void forward_row(const Heads *a, const real *cosine, const real *sine, int64_t t) {
    const int64_t Dn = a->shape.nope, Dr = a->shape.rope, Dv = a->shape.value, Dqk = Dn + Dr;
    real q_in_buf[row_buf(a->q_in)], kv_buf[row_buf(a->kv)], k_pe_buf[row_buf(a->k_pe)], rotated[Dr + 1];
    real q_buf[row_buf(a->q)], k_buf[row_buf(a->k)], v_buf[row_buf(a->v)];
    const real *q_in = row_in(a->q_in, t, q_in_buf), *kv = row_in(a->kv, t, kv_buf);
    real *q = row_out(a->q, t, q_buf), *k = row_out(a->k, t, k_buf), *v = row_out(a->v, t, v_buf);
    rotate(rotated, row_in(a->k_pe, t, k_pe_buf), cosine, sine, Dr / 2);
    for (int64_t h = 0; h < a->shape.n_heads; h++) {
        copy(q + h * Dqk, q_in + h * Dqk, Dn);
        rotate(q + h * Dqk + Dn, q_in + h * Dqk + Dn, cosine, sine, Dr / 2);
        copy(k + h * Dqk, kv + h * (Dn + Dv), Dn);
        copy(k + h * Dqk + Dn, rotated, Dr);
        copy(v + h * Dv, kv + h * (Dn + Dv) + Dn, Dv);
    }
    row_done(a->q, t, q);
    row_done(a->k, t, k);
    row_done(a->v, t, v);
}

void cpu_rope_split_forward(Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe, Tensor position,
                            Tensor inv_freq, AttentionShape shape, Stream s) {
    (void)s;
    const Heads heads = {q, k, v, q_in, kv, k_pe, shape};
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < q.shape[0]; t++) {
        real cosine[shape.rope / 2 + 1], sine[shape.rope / 2 + 1];
        angles(cosine, sine, ((const int32_t *)position.data)[t], (const real *)inv_freq.data, shape.rope / 2,
               shape.rope_mscale, 1);
        forward_row(&heads, cosine, sine, t);
    }
}

/* The members of a are gradients: q, k and v are read, q_in, kv and k_pe written. */
static CPU_CLONES void backward_row(const Heads *a, const real *cosine, const real *sine, int64_t t) {
    const int64_t Dn = a->shape.nope, Dr = a->shape.rope, Dv = a->shape.value, Dqk = Dn + Dr;
    real q_in_buf[row_buf(a->q_in)], kv_buf[row_buf(a->kv)], k_pe_buf[row_buf(a->k_pe)], sum[Dr + 1];
    real q_buf[row_buf(a->q)], k_buf[row_buf(a->k)], v_buf[row_buf(a->v)];
    const real *dq = row_in(a->q, t, q_buf), *dk = row_in(a->k, t, k_buf), *dv = row_in(a->v, t, v_buf);
    real *dq_in = row_out(a->q_in, t, q_in_buf), *dkv = row_out(a->kv, t, kv_buf);
    real *dk_pe = row_out(a->k_pe, t, k_pe_buf);
    for (int64_t i = 0; i < Dr; i++) sum[i] = 0;
    for (int64_t h = 0; h < a->shape.n_heads; h++) {
        copy(dq_in + h * Dqk, dq + h * Dqk, Dn);
        rotate(dq_in + h * Dqk + Dn, dq + h * Dqk + Dn, cosine, sine, Dr / 2);
        copy(dkv + h * (Dn + Dv), dk + h * Dqk, Dn);
        copy(dkv + h * (Dn + Dv) + Dn, dv + h * Dv, Dv);
        for (int64_t i = 0; i < Dr; i++) sum[i] += dk[h * Dqk + Dn + i];
    }
    rotate(dk_pe, sum, cosine, sine, Dr / 2);
    row_done(a->q_in, t, dq_in);
    row_done(a->kv, t, dkv);
    row_done(a->k_pe, t, dk_pe);
}

void cpu_rope_split_backward(Tensor dq_in, Tensor dkv, Tensor dk_pe, Tensor dq, Tensor dk, Tensor dv, Tensor position,
                             Tensor inv_freq, AttentionShape shape, Stream s) {
    (void)s;
    const Heads heads = {dq, dk, dv, dq_in, dkv, dk_pe, shape};
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < dq.shape[0]; t++) {
        real cosine[shape.rope / 2 + 1], sine[shape.rope / 2 + 1];
        angles(cosine, sine, ((const int32_t *)position.data)[t], (const real *)inv_freq.data, shape.rope / 2,
               shape.rope_mscale, -1);
        backward_row(&heads, cosine, sine, t);
    }
}

static CPU_CLONES void rotate_row(const Tensor *y, const Tensor *x, AttentionShape shape, const real *cosine,
                                  const real *sine, int64_t t) {
    const int64_t Dn = shape.nope, Dqk = Dn + shape.rope;
    real x_buf[row_buf(*x)], y_buf[row_buf(*y)];
    const real *in = row_in(*x, t, x_buf);
    real *out = row_out(*y, t, y_buf);
    for (int64_t h = 0; h < shape.n_heads; h++) {
        copy(out + h * Dqk, in + h * Dqk, Dn);
        rotate(out + h * Dqk + Dn, in + h * Dqk + Dn, cosine, sine, shape.rope / 2);
    }
    row_done(*y, t, out);
}

void cpu_rope_forward(Tensor y, Tensor x, Tensor position, Tensor inv_freq, AttentionShape shape, Stream s) {
    (void)s;
#pragma omp parallel for schedule(static) if (x.shape[0] > 1)
    for (int64_t t = 0; t < x.shape[0]; t++) {
        real cosine[shape.rope / 2 + 1], sine[shape.rope / 2 + 1];
        angles(cosine, sine, ((const int32_t *)position.data)[t], (const real *)inv_freq.data, shape.rope / 2,
               shape.rope_mscale, 1);
        rotate_row(&y, &x, shape, cosine, sine, t);
    }
}
