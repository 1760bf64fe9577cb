#include <math.h>

#include "op_test.h"

typedef struct {
    Tensor y, h, weight, dh, dweight, dy;
} Swiglu;

static Swiglu swiglu_make(Dtype dtype, int64_t M, int64_t F, int64_t gap, bool has_weight) {
    Swiglu s = {.y = t_poison(T2(dtype, M, F)),
                .h = t_normal(T2(dtype, M, 2 * F + gap), 2, 1),
                .weight = has_weight ? t_normal(T1(DTYPE_F32, M), 1, 2) : tensor_none(),
                .dh = t_poison(T2(dtype, M, 2 * F + gap)),
                .dweight = has_weight ? t_poison(T1(DTYPE_F32, M)) : tensor_none(),
                .dy = t_normal(T2(dtype, M, F), 1, 3)};
    if (gap > 0) t_poison(tensor_cols(s.h, F, gap)); /* not read */
    return s;
}

static void forward(Swiglu *s) {
    op_swiglu_forward(DEV, s->y, tensor_none(), tensor_none(), s->h, s->weight, STREAM_COMPUTE);
}

static void backward(Swiglu *s) {
    op_swiglu_backward(DEV, s->dh, quantized_none(), tensor_none(), s->dweight, s->dy, s->h, s->weight, STREAM_COMPUTE);
}

/* y, dh and dweight of the first n_rows rows, in double. */
static void reference(const Swiglu *s, double *y, double *dh, double *dweight, int64_t n_rows) {
    const int64_t F = s->y.shape[1], G = s->h.shape[1];
    for (int64_t m = 0; m < n_rows; m++) {
        double w = tensor_is_none(s->weight) ? 1 : t_get(s->weight, m);
        dweight[m] = 0;
        for (int64_t j = F; j < G - F; j++) dh[m * G + j] = 0;
        for (int64_t j = 0; j < F; j++) {
            double a = t_get(s->h, m * G + j), c = t_get(s->h, m * G + G - F + j), g = t_get(s->dy, m * F + j);
            double sigmoid = 1 / (1 + exp(-a));
            y[m * F + j] = w * a * sigmoid * c;
            dh[m * G + j] = g * w * c * (sigmoid + a * sigmoid * (1 - sigmoid));
            dh[m * G + G - F + j] = g * w * a * sigmoid;
            dweight[m] += g * a * sigmoid * c;
        }
    }
}

TEST(swiglu_against_double) {
    static const int64_t shapes[][3] = {{1, 1, 0}, {1, 5, 0}, {7, 33, 0}, {9, 40, 88}, {130, 24, 3}};
    for (int i = 0; i < 20; i++) {
        Dtype dtype = i % 2 ? DTYPE_BF16 : DTYPE_F32;
        double tolerance = dtype == DTYPE_BF16 ? BF16_TOLERANCE : OP_TOLERANCE;
        const int64_t M = shapes[i / 4][0], F = shapes[i / 4][1], gap = shapes[i / 4][2];
        Swiglu s = swiglu_make(dtype, M, F, gap, i / 2 % 2);
        double *y = t_doubles(s.y), *dh = t_doubles(s.h), *dweight = t_doubles(T1(DTYPE_F32, M));
        reference(&s, y, dh, dweight, M);
        forward(&s);
        backward(&s);
        EXPECT(t_error(s.y, y) <= tolerance, "%dx%d: y off by %g", (int)M, (int)F, t_error(s.y, y));
        EXPECT(t_error(s.dh, dh) <= tolerance, "%dx%d: dh off by %g", (int)M, (int)F, t_error(s.dh, dh));
        if (!tensor_is_none(s.weight))
            EXPECT(t_error(s.dweight, dweight) < OP_TOLERANCE, "dweight off by %g", t_error(s.dweight, dweight));
        t_free_all();
    }
}

/* Rows past *n_rows are neither read nor written; none at all are legal too. */
TEST(swiglu_rows_in_use) {
    for (int32_t n = 0; n <= 6; n += 3) {
        Swiglu s = swiglu_make(DTYPE_F32, 8, 5, 2, true);
        t_poison(tensor_rows(s.h, n, 8 - n)), t_poison(tensor_rows(s.dy, n, 8 - n));
        t_poison(tensor_rows(s.weight, n, 8 - n));
        s.h.n_rows = &n;
        Tensor y = t_copy(s.y), dh = t_copy(s.dh), dweight = t_copy(s.dweight);
        forward(&s);
        backward(&s);
        EXPECT(t_is_finite(tensor_rows(s.y, 0, n)) && t_is_finite(tensor_rows(s.dh, 0, n)), "%d rows: not written", n);
        EXPECT(t_same_bits(tensor_rows(s.y, n, 8 - n), tensor_rows(y, n, 8 - n)), "y past row %d was written", n);
        EXPECT(t_same_bits(tensor_rows(s.dh, n, 8 - n), tensor_rows(dh, n, 8 - n)), "dh past row %d was written", n);
        EXPECT(t_same_bits(tensor_rows(s.dweight, n, 8 - n), tensor_rows(dweight, n, 8 - n)), "dweight past row %d", n);
    }
}

TEST(swiglu_of_large_inputs_is_finite) {
    Swiglu s = swiglu_make(DTYPE_F32, 1, 4, 0, false);
    static const double a[4] = {-1e4, -100, 100, 1e4};
    for (int i = 0; i < 4; i++) t_set(s.h, i, a[i]), t_set(s.h, 4 + i, 2), t_set(s.dy, i, 1);
    forward(&s);
    backward(&s);
    for (int i = 0; i < 4; i++) {
        EXPECT_NEAR(t_get(s.y, i), a[i] > 0 ? 2 * a[i] : 0, 1e-30);
        EXPECT_NEAR(t_get(s.dh, i), a[i] > 0 ? 2 : 0, 1e-30);
    }
}

static double loss(void *context) {
    forward((Swiglu *)context);
    return t_dot_normal(((Swiglu *)context)->y, 3);
}

TEST(swiglu_gradient) {
    for (int has_weight = 0; has_weight < 2; has_weight++) {
        Swiglu s = swiglu_make(DTYPE_F32, 6, 9, 0, has_weight);
        backward(&s);
        fd_check("swiglu h", s.h, s.dh, loss, NULL, &s, 200, NULL);
        if (has_weight) fd_check("swiglu weight", s.weight, s.dweight, loss, NULL, &s, 200, NULL);
    }
}

static void both(void *context) {
    forward((Swiglu *)context);
    backward((Swiglu *)context);
}

TEST(swiglu_threads) {
    Swiglu s = swiglu_make(DTYPE_BF16, 77, 35, 5, true);
    Tensor outputs[] = {s.y, s.dh, s.dweight};
    expect_same_bits("swiglu", both, &s, outputs, 3);
}
