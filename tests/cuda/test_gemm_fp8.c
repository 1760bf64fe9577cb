/* FP8 products against the CPU's, dense and grouped: all kinds, tails of every extent, experts without rows. */
#include <math.h>

#include "tests/cuda/fp8_test.h"

/* Of the norms: difference to result. */
static double norm_error(Tensor got, Tensor want) {
    double difference = 0, whole = 0;
    for (int64_t i = 0; i < tensor_numel(want); i++) {
        const double d = t_get(got, i) - t_get(want, i);
        difference += d * d;
        whole += t_get(want, i) * t_get(want, i);
    }
    return sqrt(difference / fmax(whole, 1e-300));
}

/* ---- dense ------------------------------------------------------------------------------------------------------- */

static void gemm(const Side *s, const Fp8Case *f) {
    op_gemm(s->device, fp8_at(s, f, 0), fp8_at(s, f, 1), fp8_at(s, f, 2), f->kind, f->flag, STREAM_COMPUTE);
}

/* y (M, N) over K terms: the case, with its bits and guards; then the whole against f32 of the CPU. */
static void expect_gemm(GemmKind kind, bool accumulate, Dtype out, int64_t M, int64_t N, int64_t K) {
    static const char *const kinds[] = {"fprop", "dgrad", "wgrad"};
    const char *name = case_name("fp8 %s %s (%d, %d) over %d to %s", accumulate ? "+=" : "=", kinds[kind], (int)M,
                                 (int)N, (int)K, dtype_name(out));
    for (int pass = 0; pass < 2; pass++) {
        Tensor a = h_rows_of(t_normal(T2(DTYPE_BF16, M, K), 1, 1)), b, bt;
        if (kind == GEMM_WGRAD)
            b = h_rows_of(t_normal(T2(DTYPE_BF16, N, K), 1e-5, 2));
        else
            h_weight(&b, &bt, 0, N, K, 0.02, 2);
        Tensor y = t_normal(T2(out, M, N), accumulate ? 1e-4 : 1, 3);
        if (pass == 0) {
            Fp8Case *f = fp8_case(name, gemm);
            f->kind = kind, f->flag = accumulate;
            f->c.f32_tolerance = 1e-3; /* the tensor core keeps 14 bits of a sum of 128 products */
            fp8_arg(f, "y", y, accumulate ? ARG_ADD : ARG_OUT);
            fp8_arg(f, "a", a, ARG_IN);
            fp8_arg(f, "b", b, ARG_IN);
            fp8_expect(f);
            continue;
        }
        Tensor exact = T2(DTYPE_F32, M, N), ours = d_copy(T2(out, M, N));
        op_gemm(CPU, exact, a, b, kind, false, STREAM_COMPUTE);
        op_gemm(GPU, ours, d_fp8(a), d_fp8(b), kind, false, STREAM_COMPUTE);
        const double error = norm_error(d_read(ours), exact);
        EXPECT(error < (out == DTYPE_BF16 ? 2e-3 : 3e-4), "%s: off by %g of its norm", name, error);
        d_free_all();
        t_free_all();
    }
}

TEST(cuda_gemm_fp8) {
    static const int64_t shapes[][3] = {{128, 128, 128},  {16, 16, 128},    {32, 80, 256},
                                        {256, 576, 2048}, {384, 272, 640},  {128, 2112, 512},
                                        {256, 512, 576},  {128, 256, 2112}, {1024, 512, 1408}};
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
        const int64_t M = shapes[i][0], N = shapes[i][1], K = shapes[i][2];
        expect_gemm(GEMM_FPROP, false, DTYPE_BF16, M, N, K);
        expect_gemm(GEMM_DGRAD, false, DTYPE_BF16, M, N, K);
        expect_gemm(GEMM_FPROP, false, DTYPE_F32, M, N, K);
        if (K % SCALE_TILE == 0) expect_gemm(GEMM_WGRAD, true, DTYPE_F32, M, N, K);
    }
}

/* Rows that are no eights, which the library does not take: one as in generation, and a short prompt's. */
TEST(cuda_gemm_fp8_few_rows) {
    static const int64_t shapes[][3] = {{1, 144, 272},  {1, 2112, 7168}, {2, 4096, 512}, {7, 16, 128},
                                        {7, 576, 2048}, {9, 80, 128},    {100, 272, 640}};
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
        const int64_t M = shapes[i][0], N = shapes[i][1], K = shapes[i][2];
        expect_gemm(GEMM_FPROP, false, DTYPE_BF16, M, N, K);
        expect_gemm(GEMM_DGRAD, false, DTYPE_BF16, M, N, K);
        expect_gemm(GEMM_FPROP, true, DTYPE_F32, M, N, K);
    }
}

/* Rows of scales beyond one block of rows, and more blocks across than four: the strides of both layouts. */
TEST(cuda_gemm_fp8_large) {
    expect_gemm(GEMM_FPROP, false, DTYPE_BF16, 512, 1536, 4096);
    expect_gemm(GEMM_DGRAD, false, DTYPE_BF16, 512, 2048, 3072);
    expect_gemm(GEMM_WGRAD, true, DTYPE_F32, 1536, 1024, 2048);
}

/* ---- grouped ----------------------------------------------------------------------------------------------------- */

/* Groups of GROUP_ALIGN rows of each expert. */
typedef struct {
    int n_experts;
    int blocks[8];
} Rows;

static const Rows usual = {5, {1, 0, 3, 2, 0}}, one_has_all = {3, {0, 11, 0}}, nobody = {4, {0}},
                  only_last = {3, {0, 0, 1}}, many = {64, {1, 2, 0, 3, 1, 0, 2, 1}};

static Tensor starts_of(Rows r) {
    int start[65] = {0};
    for (int e = 0; e < r.n_experts; e++) start[e + 1] = start[e] + GROUP_ALIGN * r.blocks[e % 8];
    return t_ids(start, r.n_experts + 1);
}

static void grouped_gemm(const Side *s, const Fp8Case *f) {
    op_grouped_gemm(s->device, fp8_at(s, f, 0), fp8_at(s, f, 1), fp8_at(s, f, 2), fp8_at(s, f, 3), f->kind,
                    STREAM_COMPUTE);
}
static void grouped_wgrad(const Side *s, const Fp8Case *f) {
    op_grouped_wgrad(s->device, fp8_at(s, f, 0), fp8_at(s, f, 1), fp8_at(s, f, 2), fp8_at(s, f, 3), STREAM_COMPUTE);
}

/* Tiles of `used` of N rows of normal numbers, along the rows or along the columns; the others stay poisoned: they must
 * not be read. */
static Tensor part_of_rows(int64_t N, int64_t cols, int used, bool columns, double scale, uint64_t seed) {
    Tensor x = t_normal(T2(DTYPE_BF16, N, cols), scale, seed);
    x.n_rows = (const int32_t *)t_ids(&used, 1).data;
    return columns ? h_columns_of(x) : h_rows_of(x);
}

static void expect_rows(Rows r, GemmKind kind, int64_t out, int64_t in) {
    Tensor start = starts_of(r), w, wt;
    const int used = (int)t_get(start, r.n_experts);
    const int64_t N = used + 2 * GROUP_ALIGN;
    h_weight(&w, &wt, r.n_experts, out, in, 0.02, 4);
    Fp8Case *f = fp8_case(case_name("grouped fp8 %s, %d experts, %d rows, %d x %d",
                                    kind == GEMM_FPROP ? "fprop" : "dgrad", r.n_experts, used, (int)out, (int)in),
                          grouped_gemm);
    f->kind = kind;
    fp8_arg(f, "y", T2(DTYPE_BF16, N, out), ARG_OUT);
    fp8_arg(f, "x", part_of_rows(N, in, used, false, 1, 5), ARG_IN);
    fp8_arg(f, "w", w, ARG_IN);
    fp8_arg(f, "expert_start", start, ARG_IN);
    fp8_expect(f);
}

static void expect_wgrad(Rows r, int64_t out, int64_t in) {
    Tensor start = starts_of(r);
    const int used = (int)t_get(start, r.n_experts);
    const int64_t N = used + 2 * GROUP_ALIGN;
    Fp8Case *f =
        fp8_case(case_name("grouped fp8 wgrad, %d experts, %d rows, %d x %d", r.n_experts, used, (int)out, (int)in),
                 grouped_wgrad);
    f->c.f32_tolerance = 1e-3; /* the tensor core keeps 14 bits of a sum of 128 products */
    fp8_arg(f, "dw", t_normal(T3(DTYPE_F32, r.n_experts, out, in), 1, 3), ARG_ADD);
    fp8_arg(f, "dy^T", part_of_rows(N, out, used, true, 1, 6), ARG_IN);
    fp8_arg(f, "x^T", part_of_rows(N, in, used, true, 1, 7), ARG_IN);
    fp8_arg(f, "expert_start", start, ARG_IN);
    fp8_expect(f);
}

TEST(cuda_grouped_fp8) {
    static const int64_t sizes[][2] = {{128, 128}, {256, 384}, {144, 256}, {520, 128}, {704, 512}};
    const Rows *const all[] = {&usual, &one_has_all, &nobody, &only_last};
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 4; k++) {
            const int64_t out = sizes[i][0], in = sizes[i][1];
            expect_rows(*all[k], GEMM_FPROP, out, in);
            expect_rows(*all[k], GEMM_DGRAD, out, in);
            expect_wgrad(*all[k], out, in);
            expect_wgrad(*all[k], in, out);
        }
}

/* More tiles than blocks: every block walks over several, across experts. */
TEST(cuda_grouped_fp8_large) {
    expect_rows(many, GEMM_FPROP, 704, 512);
    expect_wgrad(many, 704, 512);
    expect_rows(usual, GEMM_DGRAD, 2816, 1024);
    expect_wgrad(usual, 2816, 1024);
}
