/* The grouped GEMMs against the CPU: all kinds and dtypes, tails of every extent, experts with and without rows. */
#include "tests/cuda/cuda_test.h"

enum { EXPERTS_MAX = 64 };

/* Blocks of GROUP_ALIGN rows of each expert. */
typedef struct {
    int n_experts;
    int blocks[8];
} Rows;

static const Rows usual = {5, {1, 0, 3, 2, 0}}, one_has_all = {3, {0, 11, 0}}, nobody = {4, {0}},
                  only_last = {3, {0, 0, 1}};

static Tensor starts_of(Rows r) {
    int start[EXPERTS_MAX + 1] = {0};
    for (int e = 0; e < r.n_experts; e++) start[e + 1] = start[e] + GROUP_ALIGN * r.blocks[e % 8];
    return t_ids(start, r.n_experts + 1);
}

static void grouped_gemm(const Side *s) {
    op_grouped_gemm(s->device, s->t[0], s->t[1], s->t[2], s->t[3], *(const GemmKind *)s->context, STREAM_COMPUTE);
}

static void grouped_wgrad(const Side *s) {
    op_grouped_wgrad(s->device, s->t[0], s->t[1], s->t[2], s->t[3], STREAM_COMPUTE);
}

/* (rows, cols), of which the first in_use are random; the rest is NaN, and must neither be read nor written. */
static Tensor rows_make(Dtype dtype, int64_t rows, int64_t cols, int64_t gap, int64_t in_use, uint64_t seed) {
    Tensor t = t_poison(gap ? t_slice(dtype, rows, cols, gap) : T2(dtype, rows, cols));
    if (in_use > 0) t_normal(tensor_rows(t, 0, in_use), 1, seed);
    return t;
}

/* w of each expert is (out, in). */
static void expect_grouped(GemmKind kind, Rows r, int64_t out, int64_t in, int64_t gap, Dtype dtype) {
    static const char *const kinds[] = {"fprop", "dgrad", "wgrad"};
    Tensor start = starts_of(r);
    const int64_t in_use = (int64_t)t_get(start, r.n_experts), capacity = in_use + GROUP_ALIGN + 3;
    Tensor x = rows_make(dtype, capacity, in, gap, in_use, 1), y = rows_make(dtype, capacity, out, gap, in_use, 2);
    Case c = {.name = case_name("%s %s, %d experts, %d rows, %d x %d, gap %d", kinds[kind], dtype_name(dtype),
                                r.n_experts, (int)in_use, (int)out, (int)in, (int)gap),
              .run = kind == GEMM_WGRAD ? grouped_wgrad : grouped_gemm,
              .context = &kind,
              .f32_tolerance = CUDA_SUM_TOLERANCE};
    const Arg last = {"expert_start", start, ARG_IN};
    if (kind == GEMM_WGRAD) {
        Tensor dw = t_normal(T3(DTYPE_F32, r.n_experts, out, in), 1, 3);
        const Arg args[] = {{"dw", dw, ARG_ADD}, {"dy", y, ARG_IN}, {"x", x, ARG_IN}, last};
        for (int i = 0; i < 4; i++) c.args[i] = args[i];
    } else {
        Tensor w = t_normal(T3(dtype, r.n_experts, out, in), 1, 4);
        const bool is_dgrad = kind == GEMM_DGRAD;
        const Arg args[] = {{"y", is_dgrad ? x : y, ARG_OUT}, {"x", is_dgrad ? y : x, ARG_IN}, {"w", w, ARG_IN}, last};
        for (int i = 0; i < 4; i++) c.args[i] = args[i];
    }
    expect_case(&c);
    t_free_all();
}

static void expect_all_kinds(Rows r, int64_t out, int64_t in, int64_t gap, Dtype dtype) {
    for (int kind = 0; kind < 3; kind++) expect_grouped((GemmKind)kind, r, out, in, gap, dtype);
}

TEST(cuda_grouped_odd_widths) {
    static const int64_t widths[][2] = {{1, 1}, {7, 33}, {65, 33}, {64, 48}, {24, 129}, {33, 257}};
    for (int i = 0; i < 6; i++)
        for (int d = 0; d < 2; d++)
            for (int64_t gap = 0; gap < 6; gap += 3)
                expect_all_kinds(usual, widths[i][0], widths[i][1], gap, act_dtypes[d]);
}

/* Rows of whole 16-byte chunks: the copies in the background, with tails in every direction. The wide tile is taken
 * where the output has 256, 512, ... columns; a gap of 16 shifts the rows by 8 elements. */
TEST(cuda_grouped_chunked_widths) {
    static const int64_t widths[][2] = {{256, 64}, {64, 256}, {512, 192}, {200, 88}, {88, 200},
                                        {136, 8},  {8, 136},  {504, 496}, {248, 40}, {40, 248}};
    for (int i = 0; i < 10; i++) {
        expect_all_kinds(usual, widths[i][0], widths[i][1], i % 2 * 16, DTYPE_BF16);
        expect_all_kinds(one_has_all, widths[i][0], widths[i][1], (i + 1) % 2 * 16, DTYPE_BF16);
    }
}

TEST(cuda_grouped_extreme_rows) {
    for (int d = 0; d < 2; d++) {
        expect_all_kinds(nobody, 72, 80, 0, act_dtypes[d]);
        expect_all_kinds(only_last, 72, 80, 0, act_dtypes[d]);
        expect_all_kinds(one_has_all, 72, 80, 0, act_dtypes[d]);
    }
}

/* More tiles than blocks: every block walks over several, across experts. */
TEST(cuda_grouped_large) {
    const Rows many = {64, {1, 2, 0, 3, 1, 0, 2, 1}}, few = {4, {5, 9, 1, 7}};
    expect_all_kinds(many, 704, 512, 0, DTYPE_BF16);
    expect_all_kinds(few, 2816, 1024, 0, DTYPE_BF16);
    expect_all_kinds(few, 1024, 1408, 0, DTYPE_BF16);
    expect_all_kinds(few, 704, 512, 0, DTYPE_F32);
}
