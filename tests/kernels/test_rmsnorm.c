#include <math.h>

#include "op_test.h"

static const double eps = 1e-5;

typedef struct {
    Tensor r, y, rstd, x, branch, w;
    Tensor dx, dw, partial, dy, dr;
} Norm;

static int64_t partial_rows(int64_t T) {
    return (T + RMSNORM_PARTIAL_ROWS - 1) / RMSNORM_PARTIAL_ROWS;
}

static Norm norm_make(Dtype dtype, int64_t T, int64_t D, int64_t J) {
    Norm n = {.r = T2(dtype, T, D),
              .y = T2(dtype, T, D),
              .rstd = T1(DTYPE_F32, T),
              .x = t_normal(T2(dtype, T, D), 1, 1),
              .branch = J > 0 ? t_normal(T3(dtype, J, T, D), 0.5, 2) : tensor_none(),
              .w = t_normal(T1(DTYPE_F32, D), 1, 3),
              .dx = T2(dtype, T, D),
              .dw = T1(DTYPE_F32, D),
              .partial = T2(DTYPE_F32, partial_rows(T), D),
              .dy = t_normal(T2(dtype, T, D), 1, 4),
              .dr = t_normal(T2(dtype, T, D), 1, 5)};
    return n;
}

static void forward(void *context) {
    Norm *n = (Norm *)context;
    op_residual_rmsnorm_forward(DEV, n->r, n->y, tensor_none(), n->rstd, n->x, n->branch, n->w, eps, STREAM_COMPUTE);
}

static void backward(Norm *n) {
    op_residual_rmsnorm_backward(DEV, n->dx, n->dw, n->partial, n->dy, n->dr, n->r, n->rstd, n->w, STREAM_COMPUTE);
}

/* y and rstd of the rows r, in double. */
static void reference(double *y, double *rstd, Tensor r, Tensor w) {
    const int64_t T = r.shape[0], D = r.shape[1];
    for (int64_t t = 0; t < T; t++) {
        double squares = 0;
        for (int64_t i = 0; i < D; i++) squares += t_get(r, t * D + i) * t_get(r, t * D + i);
        rstd[t] = 1 / sqrt(squares / (double)D + eps);
        for (int64_t i = 0; i < D; i++) y[t * D + i] = t_get(r, t * D + i) * rstd[t] * t_get(w, i);
    }
}

TEST(rmsnorm_forward_against_double) {
    static const int64_t shapes[][3] = {{1, 1, 0}, {1, 7, 1}, {3, 33, 2}, {65, 128, 1}, {130, 48, 3}};
    for (int i = 0; i < 10; i++) {
        Dtype dtype = i % 2 ? DTYPE_BF16 : DTYPE_F32;
        double tolerance = dtype == DTYPE_BF16 ? BF16_TOLERANCE : OP_TOLERANCE;
        const int64_t T = shapes[i / 2][0], D = shapes[i / 2][1], J = shapes[i / 2][2];
        Norm n = norm_make(dtype, T, D, J);
        double *sum = t_doubles(n.x), *y = t_doubles(n.x), *rstd = t_doubles(n.rstd);
        for (int64_t k = 0; k < J * T * D; k++) sum[k % (T * D)] += t_get(n.branch, k);
        t_poison(n.r), t_poison(n.y), t_poison(n.rstd);
        forward(&n);
        EXPECT(t_error(n.r, sum) <= tolerance, "r of %dx%d, %d branches: error %g", (int)T, (int)D, (int)J,
               t_error(n.r, sum));
        reference(y, rstd, n.r, n.w); /* y comes from r as stored */
        EXPECT(t_error(n.y, y) <= tolerance, "y of %dx%d: error %g", (int)T, (int)D, t_error(n.y, y));
        EXPECT(t_error(n.rstd, rstd) < OP_TOLERANCE, "rstd: error %g", t_error(n.rstd, rstd));
        t_free_all();
    }
}

TEST(rmsnorm_forward_in_place_and_without_residual) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Norm n = norm_make(bf16 ? DTYPE_BF16 : DTYPE_F32, 5, 24, 2);
        forward(&n);
        Tensor x = t_copy(n.x);
        Norm in_place = n;
        in_place.x = in_place.r = x;
        in_place.y = t_poison(T2(n.y.dtype, 5, 24));
        forward(&in_place);
        EXPECT(t_same_bits(in_place.r, n.r) && t_same_bits(in_place.y, n.y), "r written over x changes the result");

        Norm plain = n;
        plain.x = n.r, plain.r = plain.branch = tensor_none();
        plain.y = t_poison(T2(n.y.dtype, 5, 24));
        forward(&plain);
        EXPECT(t_same_bits(plain.y, n.y), "the norm of r alone differs");

        Norm sum = n; /* what a stage hands on */
        sum.r = t_poison(T2(n.r.dtype, 5, 24));
        sum.y = sum.rstd = sum.w = tensor_none();
        forward(&sum);
        EXPECT(t_same_bits(sum.r, n.r), "the sum alone differs");
    }
}

/* The rows of a column slice lie at odd addresses; the sums must not notice. */
TEST(rmsnorm_of_column_slices) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Dtype dtype = bf16 ? DTYPE_BF16 : DTYPE_F32;
        Norm n = norm_make(dtype, 6, 37, 0), sliced = n;
        n.r = sliced.r = tensor_none();
        sliced.x = t_slice(dtype, 6, 37, 6), sliced.y = t_poison(t_slice(dtype, 6, 37, 2));
        sliced.dx = t_poison(t_slice(dtype, 6, 37, 10));
        op_copy(DEV, sliced.x, n.x, STREAM_COMPUTE);
        forward(&n), forward(&sliced);
        EXPECT(t_same_bits(sliced.y, n.y), "y of a slice differs");
        n.r = n.x, sliced.r = sliced.x;
        sliced.dw = T1(DTYPE_F32, 37);
        backward(&n), backward(&sliced);
        EXPECT(t_same_bits(sliced.dx, n.dx) && t_same_bits(sliced.dw, n.dw), "the gradient of a slice differs");
        EXPECT(t_gap_is_intact(sliced.x, 6) && t_gap_is_intact(sliced.y, 2) && t_gap_is_intact(sliced.dx, 10),
               "a gap was written");
    }
}

/* dx = dr + rstd (g - r rstd^2 mean(g r)), g = dy w, straight from the formula. */
TEST(rmsnorm_backward_against_double) {
    static const int64_t shapes[][2] = {{1, 1}, {1, 9}, {64, 5}, {65, 32}, {200, 17}};
    for (int i = 0; i < 10; i++) {
        Dtype dtype = i % 2 ? DTYPE_BF16 : DTYPE_F32;
        const int64_t T = shapes[i / 2][0], D = shapes[i / 2][1];
        Norm n = norm_make(dtype, T, D, 0);
        bool has_dr = i % 4 < 2;
        if (!has_dr) n.dr = tensor_none();
        forward(&n);
        t_normal(n.dw, 1, 6), t_poison(n.dx), t_poison(n.partial);
        double *dx = t_doubles(n.x), *dw = t_doubles(n.dw), *rstd = t_doubles(n.rstd);
        for (int64_t t = 0; t < T; t++) {
            double dot = 0;
            for (int64_t k = t * D; k < (t + 1) * D; k++) dot += t_get(n.dy, k) * t_get(n.w, k % D) * t_get(n.r, k);
            for (int64_t k = t * D; k < (t + 1) * D; k++) {
                double g = t_get(n.dy, k) * t_get(n.w, k % D), r = t_get(n.r, k);
                dx[k] = (has_dr ? t_get(n.dr, k) : 0) + rstd[t] * (g - r * rstd[t] * rstd[t] * dot / (double)D);
                dw[k % D] += t_get(n.dy, k) * r * rstd[t];
            }
        }
        Tensor in_place = t_copy(has_dr ? n.dr : n.dy); /* dx may be dr */
        backward(&n);
        EXPECT(t_error(n.dx, dx) <= (dtype == DTYPE_BF16 ? BF16_TOLERANCE : OP_TOLERANCE), "dx of %dx%d: error %g",
               (int)T, (int)D, t_error(n.dx, dx));
        EXPECT(t_error(n.dw, dw) < OP_TOLERANCE, "dw of %dx%d: error %g", (int)T, (int)D, t_error(n.dw, dw));
        if (has_dr) {
            Tensor apart = n.dx;
            n.dx = n.dr = in_place;
            backward(&n);
            EXPECT(t_same_bits(apart, in_place), "dx written over dr differs");
        }
        t_free_all();
    }
}

static double loss(void *context) {
    Norm *n = (Norm *)context;
    forward(n);
    return t_dot_normal(n->y, 4) + t_dot_normal(n->r, 5);
}

TEST(rmsnorm_gradient) {
    Norm n = norm_make(DTYPE_F32, 5, 13, 2);
    forward(&n);
    backward(&n);
    fd_check("rmsnorm x", n.x, n.dx, loss, NULL, &n, 100, NULL);
    fd_check("rmsnorm branch 0", tensor_plane(n.branch, 0), n.dx, loss, NULL, &n, 100, NULL);
    fd_check("rmsnorm branch 1", tensor_plane(n.branch, 1), n.dx, loss, NULL, &n, 100, NULL);
    fd_check("rmsnorm w", n.w, n.dw, loss, NULL, &n, 100, NULL);
}

/* The gradient of y in planes: their sum in f32, added in order, as if it had come in one. */
TEST(rmsnorm_gradient_in_planes) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Dtype dtype = bf16 ? DTYPE_BF16 : DTYPE_F32;
        Norm n = norm_make(dtype, 70, 19, 0), whole = norm_make(DTYPE_F32, 70, 19, 0);
        forward(&n);
        n.dy = t_normal(T3(dtype, 3, 70, 19), 1, 9);
        for (int64_t i = 0; i < 70 * 19; i++) {
            real sum = (real)t_get(n.dy, i);
            for (int64_t j = 1; j < 3; j++) sum += (real)t_get(n.dy, j * 70 * 19 + i);
            t_set(whole.dy, i, (double)sum);
            t_set(whole.dr, i, t_get(n.dr, i));
            t_set(whole.r, i, t_get(n.r, i));
        }
        whole.rstd = n.rstd;
        t_poison(n.dx);
        backward(&n), backward(&whole);
        EXPECT(t_same_bits(n.dw, whole.dw), "dw differs");
        if (!bf16) EXPECT(t_same_bits(n.dx, whole.dx), "dx differs");
        if (bf16)
            EXPECT(t_error(n.dx, t_doubles(whole.dx)) <= BF16_TOLERANCE, "dx: %g", t_error(n.dx, t_doubles(whole.dx)));
    }
}

TEST(rmsnorm_of_zeros_is_finite) {
    Norm n = norm_make(DTYPE_F32, 2, 8, 0);
    t_fill(n.x, 0);
    forward(&n);
    backward(&n);
    EXPECT(t_is_finite(n.y) && t_is_finite(n.dx) && t_is_finite(n.dw), "a zero row gives NaN");
    EXPECT_NEAR(t_get(n.rstd, 0), 1 / sqrt(eps), 1e-3);
}

static void both(void *context) {
    Norm *n = (Norm *)context;
    forward(n);
    t_fill(n->dw, 1);
    backward(n);
}

TEST(rmsnorm_threads) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Norm n = norm_make(bf16 ? DTYPE_BF16 : DTYPE_F32, 300, 45, 2);
        Tensor outputs[] = {n.r, n.y, n.rstd, n.dx, n.dw};
        expect_same_bits("rmsnorm", both, &n, outputs, 5);
    }
}
