/* Residual add and RMSNorm, forward and backward: with and without branch, r and dr, in place, as column slices. */
#include "tests/cuda/cuda_test.h"

static void forward(const Side *s) {
    op_residual_rmsnorm_forward(s->device, s->t[0], s->t[1], tensor_none(), s->t[2], s->t[3], s->t[4], s->t[5], 1e-6,
                                STREAM_COMPUTE);
}

static void backward(const Side *s) {
    op_residual_rmsnorm_backward(s->device, s->t[0], s->t[1], s->t[2], s->t[3], s->t[4], s->t[5], s->t[6], s->t[7],
                                 STREAM_COMPUTE);
}

typedef enum { R_NONE, R_OWN, R_IS_X, R_ALONE } Residual;

static void expect_forward(Dtype dtype, int64_t T, int64_t D, int64_t J, Residual residual, int64_t gap) {
    Tensor x = t_normal(t_slice(dtype, T, D, gap), 1, 1), y = t_slice(dtype, T, D, gap),
           w = t_normal(T1(DTYPE_F32, D), 1, 2);
    Tensor branch = J > 0 ? t_normal(T3(dtype, J, T, D), 0.5, 3) : tensor_none();
    const bool is_sum = residual == R_ALONE;
    Tensor r = residual == R_NONE ? tensor_none() : residual == R_IS_X ? x : T2(dtype, T, D);
    Case c = {.name = case_name("%s T %d, D %d, J %d, residual %d, gap %d", dtype_name(dtype), (int)T, (int)D, (int)J,
                                (int)residual, (int)gap),
              .run = forward,
              .args = {{"r", r, residual == R_IS_X ? ARG_ADD : ARG_OUT},
                       {"y", is_sum ? tensor_none() : y, ARG_OUT},
                       {"rstd", is_sum ? tensor_none() : T1(DTYPE_F32, T), ARG_OUT},
                       {"x", x, ARG_IN},
                       {"branch", branch, ARG_IN},
                       {"w", is_sum ? tensor_none() : w, ARG_IN}}};
    expect_case(&c);
}

TEST(cuda_rmsnorm_forward_awkward_shapes) {
    static const int64_t shapes[][3] = {{0, 8, 0},    {1, 1, 0},    {1, 8, 0},    {5, 33, 0},
                                        {130, 64, 8}, {7, 72, 2},   {3, 264, 16}, {17, 2050, 0},
                                        {9, 2056, 8}, {4, 7168, 0}, {3, 7170, 0}};
    for (int i = 0; i < 22; i++) {
        const int64_t *n = shapes[i / 2];
        const Dtype dtype = act_dtypes[i % 2];
        expect_forward(dtype, n[0], n[1], 0, R_NONE, n[2]);
        for (int64_t J = 0; J < 5; J++) {
            expect_forward(dtype, n[0], n[1], J, R_OWN, n[2]);
            expect_forward(dtype, n[0], n[1], J, R_IS_X, n[2]);
            expect_forward(dtype, n[0], n[1], J, R_ALONE, n[2]);
        }
        t_free_all();
    }
}

TEST(cuda_rmsnorm_forward_large) {
    expect_forward(DTYPE_BF16, 2048, 2048, 2, R_OWN, 0);
    expect_forward(DTYPE_BF16, 512, 7168, 1, R_IS_X, 0);
    t_free_all();
    expect_forward(DTYPE_BF16, 1024, 512, 0, R_NONE, 64); /* a latent inside a fused row */
    expect_forward(DTYPE_F32, 256, 7168, 3, R_OWN, 0);
    expect_forward(DTYPE_BF16, 20, 20480, 2, R_OWN, 0); /* wider than a block keeps */
}

typedef enum { DR_NONE, DR_OWN, DR_IS_DX } Passed;

static void expect_backward(Dtype dtype, int64_t T, int64_t D, int64_t J, Passed passed, int64_t gap) {
    const int64_t n_partials = (T + RMSNORM_PARTIAL_ROWS - 1) / RMSNORM_PARTIAL_ROWS;
    Tensor dx = t_normal(t_slice(dtype, T, D, gap), 1, 1), rstd = T1(DTYPE_F32, T);
    for (int64_t t = 0; t < T; t++) t_set(rstd, t, 0.5 + (double)(t % 7) / 8);
    Tensor dy = J == 0 ? t_normal(t_slice(dtype, T, D, gap), 1, 2) : t_normal(T3(dtype, J, T, D), 1, 2);
    Tensor dr = passed == DR_NONE ? tensor_none() : passed == DR_OWN ? t_normal(T2(dtype, T, D), 1, 3) : dx;
    Case c = {.name = case_name("%s T %d, D %d, J %d, dr %d, gap %d", dtype_name(dtype), (int)T, (int)D, (int)J,
                                (int)passed, (int)gap),
              .run = backward,
              .args = {{"dx", dx, passed == DR_IS_DX ? ARG_ADD : ARG_OUT},
                       {"dw", t_normal(T1(DTYPE_F32, D), 1, 4), ARG_ADD},
                       {"partial", T2(DTYPE_F32, n_partials, D), ARG_SCRATCH},
                       {"dy", dy, ARG_IN},
                       {"dr", dr, ARG_IN},
                       {"r", t_normal(T2(dtype, T, D), 1, 5), ARG_IN},
                       {"rstd", rstd, ARG_IN},
                       {"w", t_normal(T1(DTYPE_F32, D), 1, 6), ARG_IN}},
              .f32_tolerance = CUDA_SUM_TOLERANCE};
    expect_case(&c);
}

TEST(cuda_rmsnorm_backward_awkward_shapes) {
    static const int64_t shapes[][3] = {{0, 8, 0},     {1, 1, 0},     {1, 8, 0},     {5, 33, 0},
                                        {130, 64, 8},  {66, 72, 2},   {65, 8, 0},    {127, 264, 16},
                                        {64, 2050, 0}, {70, 2056, 8}, {67, 1536, 0}, {3, 7170, 0},
                                        {33, 1032, 8}, {31, 512, 0},  {32, 1024, 0}, {35, 4096, 0}};
    for (int i = 0; i < 32; i++) {
        const int64_t *n = shapes[i / 2];
        for (int64_t J = 0; J < 4; J++)
            for (int passed = 0; passed < 3; passed++)
                expect_backward(act_dtypes[i % 2], n[0], n[1], J, (Passed)passed, n[2]);
        t_free_all();
    }
}

TEST(cuda_rmsnorm_backward_large) {
    expect_backward(DTYPE_BF16, 2048, 2048, 3, DR_OWN, 0);
    t_free_all();
    expect_backward(DTYPE_BF16, 520, 7168, 1, DR_IS_DX, 0);
    expect_backward(DTYPE_BF16, 130, 7168, 3, DR_OWN, 0);
    t_free_all();
    expect_backward(DTYPE_BF16, 66, 7168, 10, DR_OWN, 0); /* many planes: one stage fits */
    t_free_all();
    expect_backward(DTYPE_BF16, 1024, 512, 0, DR_NONE, 64);
    expect_backward(DTYPE_F32, 130, 7168, 2, DR_OWN, 0);
    expect_backward(DTYPE_BF16, 70, 9216, 0, DR_OWN, 0);
    t_free_all();
    expect_backward(DTYPE_BF16, 34, 16392, 1, DR_OWN, 0); /* wider than a block has columns */
}

/* On both sides of what tells narrow rows from wide ones, and as many rows in a block as the planes leave room for. */
TEST(cuda_rmsnorm_backward_narrow_and_wide) {
    static const int64_t shapes[][3] = {{DTYPE_BF16, 4096, 1}, {DTYPE_BF16, 4104, 1}, {DTYPE_BF16, 5120, 3},
                                        {DTYPE_BF16, 5128, 5}, {DTYPE_BF16, 6144, 0}, {DTYPE_BF16, 16384, 1},
                                        {DTYPE_BF16, 4096, 9}, {DTYPE_F32, 2048, 2},  {DTYPE_F32, 2052, 2},
                                        {DTYPE_F32, 8192, 1},  {DTYPE_F32, 8196, 0}};
    for (int i = 0; i < 11; i++) {
        expect_backward((Dtype)shapes[i][0], 37, shapes[i][1], shapes[i][2], i % 2 ? DR_OWN : DR_IS_DX, 0);
        t_free_all();
    }
}

/* Shapes ask for different amounts of shared memory: a captured launch runs after others that asked for less. */
TEST(cuda_rmsnorm_backward_graph_after_smaller_shapes) {
    Tensor h[8], d[8], less[8];
    const int64_t T = 40, D = 7168;
    for (int i = 0; i < 8; i++)
        h[i] = i == 1 || i == 7 ? t_normal(T1(DTYPE_F32, D), 1, 1)
               : i == 2         ? T2(DTYPE_F32, 2, D)
               : i == 6         ? t_fill(T1(DTYPE_F32, T), 1)
                                : t_normal(T2(DTYPE_BF16, T, D), 1, (uint64_t)i);
    for (int i = 0; i < 8; i++) less[i] = d[i] = d_copy(h[i]);
    less[0] = d_copy(h[0]), less[4] = tensor_none();
    const Side all = {.device = GPU, .t = {d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]}},
               some = {.device = GPU, .t = {less[0], d[1], d[2], d[3], less[4], d[5], d[6], d[7]}};
    backward(&all);
    const Tensor want = d_read(d[0]);
    op_graph_begin(GPU, STREAM_COMPUTE);
    backward(&all);
    Graph *graph = op_graph_end(GPU, STREAM_COMPUTE);
    backward(&some);
    op_zero(GPU, d[0], STREAM_COMPUTE);
    if (graph)
        op_graph_launch(GPU, graph, STREAM_COMPUTE);
    else
        backward(&all);
    const Tensor got = d_read(d[0]);
    int64_t n_wrong = 0;
    for (int64_t i = 0; i < T * D; i++) n_wrong += t_get(got, i) != t_get(want, i);
    EXPECT(n_wrong == 0, "%lld elements of dx differ", (long long)n_wrong);
    if (graph) op_graph_free(GPU, graph);
    d_free_all();
}
