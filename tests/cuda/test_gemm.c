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
