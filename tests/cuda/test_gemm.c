/* The dense GEMM against the CPU: all kinds, dtypes, strides. */
#include "tests/cuda/cuda_test.h"

typedef struct {
    GemmKind kind;
    bool accumulate;
} Product;

static void gemm(const Side *s) {
    const Product *p = (const Product *)s->context;
    op_gemm(s->device, s->t[0], s->t[1], s->t[2], p->kind, p->accumulate, STREAM_COMPUTE);
}

static Tensor operand(Dtype dtype, int64_t rows, int64_t cols, int64_t gap, uint64_t seed) {
    return t_normal(gap ? t_slice(dtype, rows, cols, gap) : T2(dtype, rows, cols), 1, seed);
}

/* m, n: extents of y; k: length of the sums. */
static void expect_gemm(GemmKind kind, bool accumulate, Dtype in, Dtype out, int64_t m, int64_t n, int64_t k,
                        int64_t gap) {
    static const char *const kinds[] = {"fprop", "dgrad", "wgrad"};
    const Product p = {kind, accumulate};
    Tensor a = kind == GEMM_WGRAD ? operand(in, k, m, gap, 1) : operand(in, m, k, gap, 1);
    Tensor b = kind == GEMM_FPROP ? operand(in, n, k, gap, 2) : operand(in, k, n, gap, 2);
    Tensor y = operand(out, m, n, gap, 3);
    Case c = {.name = case_name("%s %s (%d, %d) over %d, %s to %s, gap %d", accumulate ? "+=" : "=", kinds[kind],
                                (int)m, (int)n, (int)k, dtype_name(in), dtype_name(out), (int)gap),
              .run = gemm,
              .context = &p,
              .args = {{"y", y, accumulate ? ARG_ADD : ARG_OUT}, {"a", a, ARG_IN}, {"b", b, ARG_IN}},
              .f32_tolerance = CUDA_SUM_TOLERANCE};
    expect_case(&c);
    t_free_all();
}

TEST(cuda_gemm_awkward_shapes) {
    static const int64_t shapes[][3] = {{1, 1, 1},   {1, 64, 129},   {33, 1, 7},
                                        {7, 33, 65}, {130, 258, 31}, {128, 64, 192}};
    for (int i = 0; i < 6; i++) {
        for (int variant = 0; variant < 12; variant++) {
            const GemmKind kind = (GemmKind)(variant % 3);
            const bool accumulate = variant / 3 % 2;
            const Dtype in = act_dtypes[variant / 6];
            expect_gemm(kind, accumulate, in, in, shapes[i][0], shapes[i][1], shapes[i][2], 0);
            if (in == DTYPE_BF16)
                expect_gemm(kind, accumulate, in, DTYPE_F32, shapes[i][0], shapes[i][1], shapes[i][2], 0);
        }
    }
}

TEST(cuda_gemm_column_slices) {
    for (int kind = 0; kind < 3; kind++) {
        for (int d = 0; d < 2; d++) {
            expect_gemm((GemmKind)kind, false, act_dtypes[d], act_dtypes[d], 65, 72, 80, 16); /* 16-byte addresses */
            expect_gemm((GemmKind)kind, true, act_dtypes[d], DTYPE_F32, 65, 72, 80, 2);       /* others */
        }
    }
}

TEST(cuda_gemm_large) {
    expect_gemm(GEMM_FPROP, false, DTYPE_F32, DTYPE_F32, 300, 512, 4096, 0);
    expect_gemm(GEMM_WGRAD, true, DTYPE_BF16, DTYPE_F32, 512, 384, 4096, 0);
    expect_gemm(GEMM_DGRAD, false, DTYPE_BF16, DTYPE_BF16, 1024, 576, 2048, 0);
}

/* ---- heads ------------------------------------------------------------------------------------------------------- */

typedef struct {
    GemmKind kind;
    int64_t y_width, a_width, b_height;
    HeadSteps steps;
} Heads;

static void run_heads(const Side *s) {
    const Heads *h = (const Heads *)s->context;
    op_head_gemm(s->device, tensor_cols(s->t[0], 0, h->y_width), tensor_cols(s->t[1], 0, h->a_width),
                 tensor_rows(s->t[2], 0, h->b_height), h->kind, h->steps, STREAM_COMPUTE);
}

/* The two products of absorbed attention: q_nope by W_UK, o_latent by W_UV. */
static void expect_heads(Dtype dtype, int64_t T, int H, int64_t nope, int64_t rope, int64_t value, int64_t width) {
    const Heads heads[] = {{GEMM_DGRAD, width, nope, nope, {H, width, nope + rope, nope + value}},
                           {GEMM_FPROP, value, width, value, {H, value, width, nope + value}}};
    for (int i = 0; i < 2; i++) {
        const HeadSteps steps = heads[i].steps;
        Tensor y = T2(dtype, T, H * steps.y_cols), a = t_normal(T2(dtype, T, H * steps.a_cols), 1, 1);
        Tensor b = t_normal(T2(dtype, H * steps.b_rows, width), 1, 2);
        Case c = {.name = case_name("%s heads, T %d, %d x (%d, %d), kind %d", dtype_name(dtype), (int)T, H,
                                    (int)heads[i].y_width, (int)heads[i].a_width, (int)heads[i].kind),
                  .run = run_heads,
                  .context = &heads[i],
                  .args = {{"y", y, ARG_OUT}, {"a", a, ARG_IN}, {"b", b, ARG_IN}}};
        expect_case(&c);
        t_free_all();
    }
}

TEST(cuda_head_gemm) {
    for (int d = 0; d < 2; d++) {
        expect_heads(act_dtypes[d], 1, 2, 8, 4, 6, 12);
        expect_heads(act_dtypes[d], 1, 4, 32, 16, 32, 64);
        expect_heads(act_dtypes[d], 5, 3, 5, 2, 7, 9);
        expect_heads(act_dtypes[d], 1, 16, 128, 64, 128, 512);
        expect_heads(act_dtypes[d], 1, 1, 16, 8, 16, 32);
    }
}
