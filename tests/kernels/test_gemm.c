#include <math.h>

#include "op_test.h"

enum { GAP = 6 };

typedef struct {
    GemmKind kind;
    int64_t m, n, k; /* of the product: y (m, n), k summed */
    Tensor y, a, b;
    bool accumulate;
} Case;

static const char *const kind_name[] = {"fprop", "dgrad", "wgrad"};

/* Operands in the layout of the kind, filled with normal numbers; column slices if `gap`. */
static Case case_make(GemmKind kind, int64_t m, int64_t n, int64_t k, Dtype in, Dtype out, int64_t gap) {
    Case c = {.kind = kind, .m = m, .n = n, .k = k};
    c.a = kind == GEMM_WGRAD ? t_slice(in, k, m, gap) : t_slice(in, m, k, gap);
    c.b = kind == GEMM_FPROP ? t_slice(in, n, k, gap) : t_slice(in, k, n, gap);
    c.y = t_slice(out, m, n, gap);
    t_normal(c.a, 1, 11);
    t_normal(c.b, 1, 12);
    return c;
}

/* The same product by three loops in double, added to y as it stands if the case accumulates. */
static double *want_of(const Case *c) {
    double *want = t_doubles(c->y);
    const double *a = t_doubles(c->a), *b = t_doubles(c->b);
    for (int64_t i = 0; i < c->m; i++)
        for (int64_t j = 0; j < c->n; j++) {
            double sum = 0;
            for (int64_t k = 0; k < c->k; k++)
                sum += a[c->kind == GEMM_WGRAD ? k * c->m + i : i * c->k + k] *
                       b[c->kind == GEMM_FPROP ? j * c->k + k : k * c->n + j];
            want[i * c->n + j] = (c->accumulate ? want[i * c->n + j] : 0) + sum;
        }
    return want;
}

static void run_case(void *context) {
    const Case *c = (const Case *)context;
    op_gemm(DEV, c->y, c->a, c->b, c->kind, c->accumulate, STREAM_COMPUTE);
}

static void check_case(Case c) {
    const double *want = want_of(&c);
    if (!c.accumulate) t_poison(c.y);
    run_case(&c);
    double tolerance = c.y.dtype == DTYPE_BF16 ? BF16_TOLERANCE : OP_TOLERANCE, error = t_error(c.y, want);
    EXPECT(error <= tolerance, "%s %lld x %lld x %lld, y %s, accumulate %d: error %.3g", kind_name[c.kind],
           (long long)c.m, (long long)c.n, (long long)c.k, dtype_name(c.y.dtype), c.accumulate, error);
    EXPECT(t_gap_is_intact(c.y, GAP), "%s %lld x %lld x %lld wrote outside its columns", kind_name[c.kind],
           (long long)c.m, (long long)c.n, (long long)c.k);
}

TEST(gemm_of_odd_sizes) {
    static const int64_t sizes[] = {1, 7, 33, 65, 129};
    for (int kind = GEMM_FPROP; kind <= GEMM_WGRAD; kind++)
        for (int i = 0; i < 125; i++) {
            Case c =
                case_make((GemmKind)kind, sizes[i % 5], sizes[i / 5 % 5], sizes[i / 25], DTYPE_F32, DTYPE_F32, GAP);
            check_case(c);
            c.accumulate = true;
            check_case(c);
            t_free_all();
        }
}

TEST(gemm_with_bf16) {
    static const Dtype dtypes[][2] = {
        {DTYPE_BF16, DTYPE_BF16}, {DTYPE_BF16, DTYPE_F32}, {DTYPE_F32, DTYPE_BF16}}; /* operands, output */
    static const int64_t shapes[][3] = {{1, 1, 1}, {33, 65, 129}, {64, 96, 48}, {129, 7, 700}};
    for (int kind = GEMM_FPROP; kind <= GEMM_WGRAD; kind++)
        for (int d = 0; d < 3; d++)
            for (int i = 0; i < 4; i++) {
                Case c = case_make((GemmKind)kind, shapes[i][0], shapes[i][1], shapes[i][2], dtypes[d][0], dtypes[d][1],
                                   GAP);
                check_case(c);
                t_normal(c.y, 3, 13);
                c.accumulate = true;
                check_case(c);
                t_free_all();
            }
}

/* Sums over more than one chunk of k, outputs wider and higher than what is packed at a time. */
TEST(gemm_of_long_sums) {
    static const int64_t shapes[][3] = {{5, 9, 513}, {13, 290, 1030}, {790, 34, 1025}, {31, 1100, 110}, {2, 3, 5000}};
    for (int kind = GEMM_FPROP; kind <= GEMM_WGRAD; kind++)
        for (int i = 0; i < 5; i++) {
            Case c = case_make((GemmKind)kind, shapes[i][0], shapes[i][1], shapes[i][2], DTYPE_F32, DTYPE_F32, GAP);
            c.accumulate = i % 2;
            check_case(c);
            t_free_all();
        }
}

TEST(gemm_of_nothing) {
    for (int kind = GEMM_FPROP; kind <= GEMM_WGRAD; kind++) {
        Case c = case_make((GemmKind)kind, 5, 9, 0, DTYPE_F32, DTYPE_F32, GAP);
        check_case(c);
        Tensor none = T2(DTYPE_F32, 0, 9);
        Tensor a = kind == GEMM_WGRAD ? T2(DTYPE_F32, 4, 0) : T2(DTYPE_F32, 0, 4);
        Tensor b = kind == GEMM_FPROP ? T2(DTYPE_F32, 9, 4) : T2(DTYPE_F32, 4, 9);
        op_gemm(DEV, none, a, b, (GemmKind)kind, false, STREAM_COMPUTE);
    }
}

/* The product is complete before it meets y: an accumulated y equals y + (y of the plain product), bit for bit. */
TEST(gemm_accumulates_the_complete_product) {
    for (int kind = GEMM_FPROP; kind <= GEMM_WGRAD; kind++) {
        Case c = case_make((GemmKind)kind, 67, 97, 1200, DTYPE_F32, DTYPE_F32, 0);
        run_case(&c);
        Tensor product = t_copy(c.y), before = t_normal(t_copy(c.y), 100, 14);
        for (int64_t i = 0; i < tensor_numel(c.y); i++) t_set(c.y, i, t_get(before, i));
        c.accumulate = true;
        run_case(&c);
        int64_t n_wrong = 0;
        for (int64_t i = 0; i < tensor_numel(c.y); i++) {
            real sum = (real)t_get(before, i) + (real)t_get(product, i);
            n_wrong += t_get(c.y, i) != (double)sum;
        }
        EXPECT_EQ(n_wrong, 0);
    }
}

TEST(gemm_bits_do_not_depend_on_threads) {
    static const int64_t shapes[][3] = {{257, 131, 700}, {1024, 33, 64}, {40, 900, 129}, {192, 128, 2048}};
    for (int kind = GEMM_FPROP; kind <= GEMM_WGRAD; kind++)
        for (int i = 0; i < 4; i++) {
            Case c = case_make((GemmKind)kind, shapes[i][0], shapes[i][1], shapes[i][2], DTYPE_F32, DTYPE_F32, 0);
            expect_same_bits(kind_name[kind], run_case, &c, &c.y, 1);
            t_free_all();
        }
}

/* Every element is the same chain of multiply-adds wherever it stands: a slice of the product is the product of slices.
 */
TEST(gemm_bits_do_not_depend_on_place) {
    Case c = case_make(GEMM_FPROP, 150, 100, 600, DTYPE_F32, DTYPE_F32, 0);
    run_case(&c);
    Case part = c;
    part.y = T2(DTYPE_F32, 31, 41);
    part.a = tensor_rows(c.a, 77, 31);
    part.b = tensor_rows(c.b, 53, 41);
    run_case(&part);
    EXPECT(t_same_bits(part.y, tensor_cols(tensor_rows(c.y, 77, 31), 53, 41)), "a slice has other bits");
}

static double loss_of_case(void *context) {
    run_case(context);
    return t_dot_normal(((Case *)context)->y, 15);
}

/* FPROP against differences: DGRAD and WGRAD are its gradients. */
TEST(gemm_gradients) {
    Case c = case_make(GEMM_FPROP, 9, 17, 35, DTYPE_F32, DTYPE_F32, 0);
    Tensor dy = t_normal(T2(DTYPE_F32, 9, 17), 1, 15), dx = t_poison(T2(DTYPE_F32, 9, 35));
    Tensor dw = T2(DTYPE_F32, 17, 35);
    op_gemm(DEV, dx, dy, c.b, GEMM_DGRAD, false, STREAM_COMPUTE);
    op_gemm(DEV, dw, dy, c.a, GEMM_WGRAD, true, STREAM_COMPUTE);
    fd_check("x", c.a, dx, loss_of_case, NULL, &c, 1000, NULL);
    fd_check("w", c.b, dw, loss_of_case, NULL, &c, 1000, NULL);
}

/* Heads as generation has them: of a row of a, and of the rows of b, a head uses a part. FPROP and DGRAD equal the
 * plain product of each head's slices, bit for bit. */
TEST(head_gemm_is_the_gemm_of_each_head) {
    static const struct {
        int64_t T, y_width, a_width, a_step, b_step; /* b has a_width columns (FPROP) or y_width (DGRAD) */
        int n_heads;
    } cases[] = {{1, 12, 8, 12, 14, 2}, {5, 64, 32, 48, 64, 4}, {1, 512, 128, 192, 256, 3}, {3, 7, 5, 5, 7, 1}};
    for (int i = 0; i < 4; i++)
        for (int kind = GEMM_FPROP; kind <= GEMM_DGRAD; kind++)
            for (int bf16 = 0; bf16 < 2; bf16++) {
                const Dtype dtype = bf16 ? DTYPE_BF16 : DTYPE_F32;
                const int64_t y_width = cases[i].y_width, a_width = cases[i].a_width, H = cases[i].n_heads;
                const int64_t b_height = kind == GEMM_FPROP ? y_width : a_width,
                              b_step = cases[i].b_step > b_height ? cases[i].b_step : b_height;
                const int64_t b_width = kind == GEMM_FPROP ? a_width : y_width;
                Tensor y = t_poison(T2(dtype, cases[i].T, H * y_width)), want = t_poison(t_copy(y));
                Tensor a = t_normal(T2(dtype, cases[i].T, H * cases[i].a_step), 1, 1);
                Tensor b = t_normal(T2(dtype, H * b_step, b_width), 1, 2);
                const HeadSteps steps = {(int)H, y_width, cases[i].a_step, b_step};
                op_head_gemm(DEV, tensor_cols(y, 0, y_width), tensor_cols(a, 0, a_width), tensor_rows(b, 0, b_height),
                             (GemmKind)kind, steps, STREAM_COMPUTE);
                for (int64_t h = 0; h < H; h++)
                    op_gemm(DEV, tensor_cols(want, h * y_width, y_width), tensor_cols(a, h * cases[i].a_step, a_width),
                            tensor_rows(b, h * b_step, b_height), (GemmKind)kind, false, STREAM_COMPUTE);
                EXPECT(t_is_finite(y) && t_same_bits(y, want), "case %d, kind %d, bf16 %d", i, kind, bf16);
                t_free_all();
            }
}
