/* Residual add and RMSNorm in one pass over a row, because the row of the residual stream is read once for both.
 *
 *     r = x + sum_j branch[j]         y = r rstd w,   rstd = (mean(r^2) + eps)^-1/2
 *
 * Backward, with g = dy w:
 *
 *     dr += rstd g - r rstd^3 mean(g r)         dw += sum_t dy r rstd
 *
 * The sum over tokens of dw runs in partials of RMSNORM_PARTIAL_ROWS rows, so that threads may share the rows while the
 * order of the sum stays fixed. */
#include <tgmath.h>

#include "cpu.h"
#include "cpu_ops.h"

static CPU_CLONES void forward_row(const Tensor *r, const Tensor *y, const Tensor *q, real *rstd, const Tensor *x,
                                   const Tensor *branch, const real *w, real eps, int64_t t) {
    const int64_t D = x->shape[1];
    real x_buf[row_buf(*x)], r_buf[row_buf(*r)], y_buf[D], branch_buf[row_buf(*branch)];
    const real *row = row_in(*x, t, x_buf);
    if (!tensor_is_none(*r)) {
        real *sum = row_out(*r, t, r_buf);
        for (int64_t i = 0; i < D; i++) sum[i] = row[i];
        for (int64_t j = 0; j < branch->shape[0]; j++) { /* none: shape 0 */
            const real *added = row_in(*branch, j * x->shape[0] + t, branch_buf);
            for (int64_t i = 0; i < D; i++) sum[i] += added[i];
        }
        row_done(*r, t, sum);
        row = row_in(*r, t, r_buf); /* as stored: rounded, if r is bf16 */
    }
    if (!rstd) return;
    real squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < D; i++) squares += row[i] * row[i];
    const real inverse = 1 / sqrt(squares / (real)D + eps);
    real *out = tensor_is_none(*y) ? y_buf : row_out(*y, t, y_buf);
    for (int64_t i = 0; i < D; i++) out[i] = row[i] * inverse * w[i];
    if (!tensor_is_none(*y)) row_done(*y, t, out);
    if (!tensor_is_none(*q)) row_done(*q, t, out);
    rstd[t] = inverse;
}

void cpu_residual_rmsnorm_forward(Tensor r, Tensor y, Tensor q, Tensor rstd, Tensor x, Tensor branch, Tensor w,
                                  double eps, Stream s) {
    (void)s;
#pragma omp parallel for schedule(static) if (x.shape[0] > 1)
    for (int64_t t = 0; t < x.shape[0]; t++)
        forward_row(&r, &y, &q, (real *)rstd.data, &x, &branch, (const real *)w.data, (real)eps, t);
}

/* The gradient of y: row t, or the sum of the J planes' rows in the order of j. */
static inline const real *gradient_row(const Tensor *dy, int64_t t, int64_t T, real *sum, real *buf) {
    if (dy->ndim == 2) return row_in(*dy, t, buf);
    for (int64_t j = 0; j < dy->shape[0]; j++) {
        const real *added = row_in(*dy, j * T + t, buf);
        for (int64_t i = 0; i < dy->shape[2]; i++) sum[i] = j ? sum[i] + added[i] : added[i];
    }
    return sum;
}

static CPU_CLONES void backward_row(const Tensor *dx, real *dw, const Tensor *dy, const Tensor *dr, const Tensor *r,
                                    real rstd, const real *w, int64_t t) {
    const int64_t D = r->shape[1];
    real dx_buf[row_buf(*dx)], dy_buf[row_buf(*dy)], dr_buf[row_buf(*dr)], r_buf[row_buf(*r)];
    real g_buf[dy->ndim == 3 ? D : 1];
    const real *g = gradient_row(dy, t, r->shape[0], g_buf, dy_buf), *row = row_in(*r, t, r_buf);
    real dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < D; i++) dot += g[i] * w[i] * row[i];
    const real along = dot * rstd * rstd * rstd / (real)D;
    real *out = row_out(*dx, t, dx_buf);
    if (tensor_is_none(*dr)) {
        for (int64_t i = 0; i < D; i++) out[i] = rstd * w[i] * g[i] - along * row[i];
    } else {
        const real *residual = row_in(*dr, t, dr_buf);
        for (int64_t i = 0; i < D; i++) out[i] = residual[i] + (rstd * w[i] * g[i] - along * row[i]);
    }
    row_done(*dx, t, out);
    for (int64_t i = 0; i < D; i++) dw[i] += g[i] * row[i] * rstd;
}

void cpu_residual_rmsnorm_backward(Tensor dx, Tensor dw, Tensor partial, Tensor dy, Tensor dr, Tensor r, Tensor rstd,
                                   Tensor w, Stream s) {
    (void)s;
    const int64_t T = r.shape[0], D = r.shape[1], n_partials = partial.shape[0];
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < n_partials; p++) {
        real *sum = (real *)partial.data + p * partial.ld;
        memset(sum, 0, (size_t)D * sizeof(real));
        int64_t last = (p + 1) * RMSNORM_PARTIAL_ROWS < T ? (p + 1) * RMSNORM_PARTIAL_ROWS : T;
        for (int64_t t = p * RMSNORM_PARTIAL_ROWS; t < last; t++)
            backward_row(&dx, sum, &dy, &dr, &r, ((const real *)rstd.data)[t], (const real *)w.data, t);
    }
    if (n_partials == 0) return;
    real *total = (real *)partial.data;
    for (int64_t p = 1; p < n_partials; p++) {
        const real *sum = (const real *)partial.data + p * partial.ld;
        for (int64_t i = 0; i < D; i++) total[i] += sum[i];
    }
    for (int64_t i = 0; i < D; i++) ((real *)dw.data)[i] += total[i];
}
