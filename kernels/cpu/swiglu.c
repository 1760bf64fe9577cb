/* SwiGLU, with the routing weight multiplied into its output, so that the combine of expert rows is a plain sum. */
#include "cpu.h"
#include "cpu_ops.h"

static CPU_CLONES void forward_row(const Tensor *y, const Tensor *h, real weight, int64_t m) {
    const int64_t F = y->shape[1];
    real h_buf[row_buf(*h)], y_buf[row_buf(*y)];
    const real *a = row_in(*h, m, h_buf), *c = a + h->shape[1] - F;
    real *out = row_out(*y, m, y_buf);
    for (int64_t i = 0; i < F; i++) out[i] = weight * a[i] * sigmoid_real(a[i]) * c[i];
    row_done(*y, m, out);
}

void cpu_swiglu_forward(Tensor y, Tensor h, Tensor weight, Stream s) {
    (void)s;
    const real *weights = (const real *)weight.data;
    const int64_t n_rows = rows_in_use(h);
#pragma omp parallel for schedule(static) if (n_rows > 1)
    for (int64_t m = 0; m < n_rows; m++) forward_row(&y, &h, weights ? weights[m] : 1, m);
}

/* Returns the gradient of the weight. */
static CPU_CLONES real backward_row(const Tensor *dh, const Tensor *dy, const Tensor *h, real weight, int64_t m) {
    const int64_t F = dy->shape[1], G = h->shape[1];
    real h_buf[row_buf(*h)], dy_buf[row_buf(*dy)], dh_buf[row_buf(*dh)];
    const real *a = row_in(*h, m, h_buf), *c = a + G - F, *g = row_in(*dy, m, dy_buf);
    real *da = row_out(*dh, m, dh_buf), *dc = da + G - F;
    real dweight = 0;
#pragma omp simd reduction(+ : dweight)
    for (int64_t i = 0; i < F; i++) {
        real sigmoid = sigmoid_real(a[i]), silu = a[i] * sigmoid, up = c[i];
        dweight += g[i] * silu * up;
        da[i] = g[i] * weight * up * sigmoid * (1 + a[i] * (1 - sigmoid));
        dc[i] = g[i] * weight * silu;
    }
    for (int64_t i = F; i < G - F; i++) da[i] = 0;
    row_done(*dh, m, da);
    return dweight;
}

void cpu_swiglu_backward(Tensor dh, Tensor dweight, Tensor dy, Tensor h, Tensor weight, Stream s) {
    (void)s;
    const real *weights = (const real *)weight.data;
    const int64_t n_rows = rows_in_use(h);
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < n_rows; m++) {
        real sum = backward_row(&dh, &dy, &h, weights ? weights[m] : 1, m);
        if (weights) ((real *)dweight.data)[m] = sum;
    }
}
