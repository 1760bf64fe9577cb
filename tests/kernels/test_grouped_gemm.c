#include <math.h>

#include "op_test.h"

enum { N_EXPERTS = 5, CAPACITY = 9 * GROUP_ALIGN };

/* Expert 1 and the last have no rows. */
static const int usual_start[N_EXPERTS + 1] = {
    0, GROUP_ALIGN, GROUP_ALIGN, 4 * GROUP_ALIGN, 6 * GROUP_ALIGN, 6 * GROUP_ALIGN};

typedef struct {
    GemmKind kind;
    Tensor y, x, w, start, dw;
} Case;

/* y (N, n) = x (N, k) times the weight of each expert; rows past the last expert are NaN in x. */
static Case case_make(GemmKind kind, const int *start, int64_t n, int64_t k, Dtype dtype) {
    Case c = {.kind = kind, .start = t_ids(start, N_EXPERTS + 1)};
    int64_t in_use = start[N_EXPERTS];
    c.x = t_poison(t_slice(dtype, CAPACITY, k, 4));
    c.y = t_poison(t_slice(dtype, CAPACITY, n, 4));
    c.w = kind == GEMM_FPROP ? T3(dtype, N_EXPERTS, n, k) : T3(dtype, N_EXPERTS, k, n);
    t_normal(tensor_rows(c.x, 0, in_use), 1, 21);
    t_normal(c.w, 1, 22);
    return c;
}

static void run_case(void *context) {
    const Case *c = (const Case *)context;
    op_grouped_gemm(DEV, c->y, c->x, c->w, c->start, c->kind, STREAM_COMPUTE);
}

/* Against three loops in double; rows past the last expert must still hold the NaN they were given. */
static void check_case(Case c) {
    const int64_t n = c.y.shape[1], k = c.x.shape[1], in_use = (int64_t)t_get(c.start, N_EXPERTS);
    double *want = t_doubles(c.y);
    const double *x = t_doubles(c.x), *w = t_doubles(c.w);
    int64_t e = 0;
    for (int64_t i = 0; i < in_use; i++) {
        while (i >= (int64_t)t_get(c.start, e + 1)) e++;
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t m = 0; m < k; m++)
                sum += x[i * k + m] * w[e * n * k + (c.kind == GEMM_FPROP ? j * k + m : m * n + j)];
            want[i * n + j] = sum;
        }
    }
    run_case(&c);
    double error = in_use ? t_error(tensor_rows(c.y, 0, in_use), want) : 0;
    EXPECT(error <= (c.y.dtype == DTYPE_BF16 ? BF16_TOLERANCE : OP_TOLERANCE), "kind %d, %lld x %lld: error %.3g",
           (int)c.kind, (long long)n, (long long)k, error);
    int64_t n_written = 0;
    for (int64_t i = in_use * n; i < CAPACITY * n; i++) n_written += !isnan(t_get(c.y, i));
    EXPECT_EQ(n_written, 0);
    EXPECT(t_gap_is_intact(c.y, 4), "kind %d wrote outside its columns", (int)c.kind);
}

TEST(grouped_gemm_of_usual_rows) {
    static const int64_t widths[][2] = {{1, 1}, {7, 33}, {65, 33}, {64, 48}, {24, 129}};
    for (int i = 0; i < 5; i++)
        for (int kind = GEMM_FPROP; kind <= GEMM_DGRAD; kind++)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                check_case(
                    case_make((GemmKind)kind, usual_start, widths[i][0], widths[i][1], bf16 ? DTYPE_BF16 : DTYPE_F32));
                t_free_all();
            }
}

TEST(grouped_gemm_of_extreme_rows) {
    static const int starts[][N_EXPERTS + 1] = {{0, 0, 0, 0, 0, 0},
                                                {0, 0, 0, CAPACITY, CAPACITY, CAPACITY}, /* all to one */
                                                {0, 0, 0, 0, 0, GROUP_ALIGN}};
    for (int i = 0; i < 3; i++)
        for (int kind = GEMM_FPROP; kind <= GEMM_DGRAD; kind++)
            check_case(case_make((GemmKind)kind, starts[i], 33, 20, DTYPE_F32));
}

TEST(grouped_gemm_bits_do_not_depend_on_threads) {
    for (int kind = GEMM_FPROP; kind <= GEMM_DGRAD; kind++) {
        Case c = case_make((GemmKind)kind, usual_start, 67, 50, DTYPE_F32);
        Tensor y = tensor_rows(c.y, 0, usual_start[N_EXPERTS]);
        expect_same_bits("grouped_gemm", run_case, &c, &y, 1);
    }
}

/* dw (El, O, I) by three loops, added to what it holds. Rows past the last expert are NaN. */
static void check_wgrad(const int *start, int64_t out, int64_t in, Dtype dtype) {
    Case c = case_make(GEMM_FPROP, start, out, in, dtype);
    const int64_t in_use = start[N_EXPERTS];
    if (in_use) t_normal(tensor_rows(c.y, 0, in_use), 1, 23);
    Tensor dw = t_normal(T3(DTYPE_F32, N_EXPERTS, out, in), 1, 24);
    Tensor before = t_copy(dw);
    double *want = t_doubles(dw);
    const double *x = t_doubles(c.x), *dy = t_doubles(c.y);
    for (int64_t e = 0; e < N_EXPERTS; e++)
        for (int64_t i = 0; i < out; i++)
            for (int64_t j = 0; j < in; j++)
                for (int64_t row = start[e]; row < start[e + 1]; row++)
                    want[(e * out + i) * in + j] += dy[row * out + i] * x[row * in + j];
    op_grouped_wgrad(DEV, dw, c.y, c.x, c.start, STREAM_COMPUTE);
    double error = t_error(dw, want);
    EXPECT(error <= OP_TOLERANCE, "wgrad %lld x %lld: error %.3g", (long long)out, (long long)in, error);
    for (int64_t e = 0; e < N_EXPERTS; e++)
        if (start[e] == start[e + 1])
            EXPECT(t_same_bits(tensor_plane(dw, e), tensor_plane(before, e)), "expert %d without rows changed", (int)e);
}

TEST(grouped_wgrad_of_usual_rows) {
    static const int64_t widths[][2] = {{1, 1}, {7, 33}, {65, 33}, {48, 64}};
    static const int none[N_EXPERTS + 1] = {0};
    for (int i = 0; i < 4; i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            check_wgrad(usual_start, widths[i][0], widths[i][1], bf16 ? DTYPE_BF16 : DTYPE_F32);
            t_free_all();
        }
    check_wgrad(none, 9, 5, DTYPE_F32);
}

static void run_wgrad(void *context) {
    const Case *c = (const Case *)context;
    t_fill(c->dw, 1);
    op_grouped_wgrad(DEV, c->dw, c->y, c->x, c->start, STREAM_COMPUTE);
}

TEST(grouped_wgrad_bits_do_not_depend_on_threads) {
    static const int all_to_one[N_EXPERTS + 1] = {0, 0, CAPACITY, CAPACITY, CAPACITY, CAPACITY};
    for (int i = 0; i < 2; i++) {
        Case c = case_make(GEMM_FPROP, i ? all_to_one : usual_start, 67, 50, DTYPE_F32);
        run_case(&c);
        c.dw = T3(DTYPE_F32, N_EXPERTS, 67, 50);
        expect_same_bits("grouped_wgrad", run_wgrad, &c, &c.dw, 1);
    }
}

static double loss_of_case(void *context) {
    const Case *c = (const Case *)context;
    run_case(context);
    return t_dot_normal(tensor_rows(c->y, 0, (int64_t)t_get(c->start, N_EXPERTS)), 25);
}

TEST(grouped_gemm_gradients) {
    Case c = case_make(GEMM_FPROP, usual_start, 6, 5, DTYPE_F32);
    const int64_t in_use = usual_start[N_EXPERTS];
    Tensor dy = t_poison(T2(DTYPE_F32, CAPACITY, 6)), dx = t_poison(T2(DTYPE_F32, CAPACITY, 5));
    Tensor dw = T3(DTYPE_F32, N_EXPERTS, 6, 5);
    t_normal(tensor_rows(dy, 0, in_use), 1, 25);
    op_grouped_gemm(DEV, dx, dy, c.w, c.start, GEMM_DGRAD, STREAM_COMPUTE);
    op_grouped_wgrad(DEV, dw, dy, c.x, c.start, STREAM_COMPUTE);
    fd_check("x", tensor_rows(c.x, 0, in_use), tensor_rows(dx, 0, in_use), loss_of_case, NULL, &c, 300, NULL);
    fd_check("w", c.w, dw, loss_of_case, NULL, &c, 300, NULL);
}
