/* SwiGLU with and without routing weight, rows bounded on the device, a gap between gate and up. */
#include "tests/cuda/cuda_test.h"

static Tensor bounded(const Side *s, Tensor h) {
    h.n_rows = (const int32_t *)s->t[5].data;
    return h;
}

static void forward(const Side *s) {
    op_swiglu_forward(s->device, s->t[3], tensor_none(), tensor_none(), bounded(s, s->t[2]), s->t[4], STREAM_COMPUTE);
}

static void backward(const Side *s) {
    op_swiglu_backward(s->device, s->t[0], quantized_none(), tensor_none(), s->t[1], s->t[3], bounded(s, s->t[2]),
                       s->t[4], STREAM_COMPUTE);
}

/* n_rows < 0: all, and no bound. F_gap: columns between the parts. */
static void expect_swiglu(Dtype dtype, int64_t M, int64_t F, int64_t F_gap, int n_rows, bool weighted, int64_t gap) {
    const int64_t G = 2 * F + F_gap;
    Tensor h = t_normal(t_slice(dtype, M, G, gap), 2, 1), y = t_normal(t_slice(dtype, M, F, gap), 1, 2);
    Tensor weight = weighted ? t_normal(T1(DTYPE_F32, M), 1, 3) : tensor_none();
    Tensor dweight = weighted ? T1(DTYPE_F32, M) : tensor_none(),
           bound = n_rows < 0 ? tensor_none() : t_ids(&n_rows, 1);
    const char *name = case_name("%s M %d (%d), F %d + %d, %s, gap %d", dtype_name(dtype), (int)M, n_rows, (int)F,
                                 (int)F_gap, weighted ? "weighted" : "plain", (int)gap);
    Case b = {.name = name,
              .run = backward,
              .args = {{"dh", t_slice(dtype, M, G, gap), ARG_OUT},
                       {"dweight", dweight, ARG_OUT},
                       {"h", h, ARG_IN},
                       {"dy", y, ARG_IN},
                       {"weight", weight, ARG_IN},
                       {"n_rows", bound, ARG_IN}}};
    expect_case(&b);
    Case f = b;
    f.run = forward;
    f.args[0].t = f.args[1].t = tensor_none();
    f.args[3].name = "y", f.args[3].kind = ARG_OUT;
    expect_case(&f);
}

TEST(cuda_swiglu_awkward_shapes) {
    static const int64_t shapes[][4] = {{0, 8, 0, 0},     {1, 1, 0, 0},     {1, 8, 0, 0},
                                        {5, 33, 3, 0},    {130, 64, 64, 8}, {7, 72, 8, 2},
                                        {300, 264, 0, 0}, {3, 1408, 0, 0},  {9, 1000, 24, 16}};
    for (int i = 0; i < 18; i++) {
        const int64_t *n = shapes[i / 2], M = n[0];
        for (int weighted = 0; weighted < 2; weighted++) {
            expect_swiglu(act_dtypes[i % 2], M, n[1], n[2], -1, weighted, n[3]);
            expect_swiglu(act_dtypes[i % 2], M, n[1], n[2], 0, weighted, n[3]);
            expect_swiglu(act_dtypes[i % 2], M, n[1], n[2], (int)(M * 2 / 3), weighted, n[3]);
        }
        t_free_all();
    }
}

TEST(cuda_swiglu_large) {
    expect_swiglu(DTYPE_BF16, 3000, 1408, 0, 2900, true, 0);
    t_free_all();
    expect_swiglu(DTYPE_BF16, 100, 18432, 0, -1, false, 0);
    expect_swiglu(DTYPE_F32, 700, 2048, 0, 650, true, 0);
}
