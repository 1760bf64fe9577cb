/* SwiGLU, with the routing weight multiplied into its output, so that the combine of expert rows is a plain sum.
 *
 * For FP8 the same arithmetic runs over squares of 128 x 128, because a scale of a column covers 128 rows. */
#include "cpu.h"
#include "cpu_ops.h"

static CPU_CLONES void forward_row(const Tensor *y, const Tensor *y_rows, const Tensor *h, real weight, int64_t m) {
    const bool plain = !tensor_is_none(*y);
    const int64_t F = plain ? y->shape[1] : y_rows->shape[1];
    real h_buf[row_buf(*h)], y_buf[F];
    const real *a = row_in(*h, m, h_buf), *c = a + h->shape[1] - F;
    real *out = plain ? row_out(*y, m, y_buf) : y_buf;
    for (int64_t i = 0; i < F; i++) out[i] = weight * a[i] * sigmoid_real(a[i]) * c[i];
    if (plain) row_done(*y, m, out);
    if (!tensor_is_none(*y_rows)) row_done(*y_rows, m, out);
}

static void store_h(const Tensor *h_rows, const Tensor *h, int64_t m) {
    real buf[row_buf(*h)];
    row_done(*h_rows, m, row_in(*h, m, buf));
}

void cpu_swiglu_forward(Tensor y, Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s) {
    (void)s;
    const real *weights = (const real *)weight.data;
    const int64_t n_rows = rows_in_use(h);
#pragma omp parallel for schedule(static) if (n_rows > 1)
    for (int64_t m = 0; m < n_rows; m++) {
        forward_row(&y, &y_rows, &h, weights ? weights[m] : 1, m);
        if (!tensor_is_none(h_rows)) store_h(&h_rows, &h, m);
    }
}

typedef struct {
    real da, dc, y; /* gradients of gate and up; the output */
    real dweight;   /* a summand of the weight's gradient */
} SwigluGradient;

static inline SwigluGradient gradient_of(real a, real c, real g, real weight) {
    const real sigmoid = sigmoid_real(a), silu = a * sigmoid;
    const SwigluGradient d = {g * weight * c * sigmoid * (1 + a * (1 - sigmoid)), g * weight * silu, weight * silu * c,
                              g * silu * c};
    return d;
}

/* Returns the gradient of the weight. */
static CPU_CLONES real backward_row(const Tensor *dh, const Tensor *dy, const Tensor *h, real weight, int64_t m) {
    const int64_t F = dy->shape[1], G = h->shape[1];
    real h_buf[row_buf(*h)], dy_buf[row_buf(*dy)], dh_buf[row_buf(*dh)];
    const real *a = row_in(*h, m, h_buf), *c = a + G - F, *g = row_in(*dy, m, dy_buf);
    const bool plain = !tensor_is_none(*dh);
    real *da = plain ? row_out(*dh, m, dh_buf) : NULL, *dc = plain ? da + G - F : NULL;
    real dweight = 0;
    if (plain) {
#pragma omp simd reduction(+ : dweight)
        for (int64_t i = 0; i < F; i++) {
            const SwigluGradient d = gradient_of(a[i], c[i], g[i], weight);
            dweight += d.dweight;
            da[i] = d.da;
            dc[i] = d.dc;
        }
        for (int64_t i = F; i < G - F; i++) da[i] = 0;
        row_done(*dh, m, da);
    } else {
#pragma omp simd reduction(+ : dweight)
        for (int64_t i = 0; i < F; i++) dweight += gradient_of(a[i], c[i], g[i], weight).dweight;
    }
    return dweight;
}

/* The part [col, col + n) of 128 rows, in tiles of gate, of up, and of the output. */
static void backward_square(Quantized dh, Tensor y_columns, const Tensor *dy, const Tensor *h, const real *weights,
                            int64_t row, int64_t n_rows, int64_t col, int64_t n) {
    const int64_t F = dy->shape[1], G = h->shape[1];
    Square da, dc, y;
    for (int64_t r = 0; r < n_rows; r++) {
        real h_buf[row_buf(*h)], dy_buf[row_buf(*dy)];
        const real *a = row_in(*h, row + r, h_buf), *c = a + G - F, *g = row_in(*dy, row + r, dy_buf);
        for (int64_t i = 0; i < n; i++) {
            const SwigluGradient d = gradient_of(a[col + i], c[col + i], g[col + i], weights ? weights[row + r] : 1);
            da.row[r][i] = tile_round((float)d.da);
            dc.row[r][i] = tile_round((float)d.dc);
            y.row[r][i] = tile_round((float)d.y);
        }
    }
    const Quantized none = {tensor_none(), y_columns};
    square_write(dh, &da, row, col, n_rows, n);
    square_write(dh, &dc, row, G - F + col, n_rows, n);
    square_write(none, &y, row, col, n_rows, n);
}

static void backward_squares(Quantized dh, Tensor y_columns, Tensor dy, Tensor h, const real *weights, int64_t n_rows) {
    const int64_t F = dy.shape[1], squares = ceil_div(F, SCALE_TILE);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < ceil_div(n_rows, SCALE_TILE) * squares; i++) {
        const int64_t row = i / squares * SCALE_TILE, col = i % squares * SCALE_TILE;
        backward_square(dh, y_columns, &dy, &h, weights, row, min_i64(n_rows - row, SCALE_TILE), col,
                        min_i64(F - col, SCALE_TILE));
    }
}

void cpu_swiglu_backward(Tensor dh, Quantized dhq, Tensor y_columns, Tensor dweight, Tensor dy, Tensor h, Tensor weight,
                         Stream s) {
    (void)s;
    const real *weights = (const real *)weight.data;
    const int64_t n_rows = rows_in_use(h);
    if (tensor_is_none(dh)) backward_squares(dhq, y_columns, dy, h, weights, n_rows);
    if (tensor_is_none(dh) && !weights) return;
#pragma omp parallel for schedule(static)
    for (int64_t m = 0; m < n_rows; m++) {
        real sum = backward_row(&dh, &dy, &h, weights ? weights[m] : 1, m);
        if (weights) ((real *)dweight.data)[m] = sum;
    }
}
