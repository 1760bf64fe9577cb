/* Memory, streams and copies of the CUDA backend. */
#include <math.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "tests/cuda/cuda_test.h"

TEST(cuda_memory_is_zeroed_and_aligned) {
    const size_t bytes = 3 << 20;
    char *p = op_alloc(GPU, bytes);
    REQUIRE(p != NULL, "no device memory");
    EXPECT((uintptr_t)p % 256 == 0, "address %p", (void *)p);
    Tensor host = t_poison(T1(DTYPE_F32, (int64_t)bytes / 4));
    op_copy_out(GPU, host.data, p, bytes, STREAM_COPY);
    op_synchronize(GPU, STREAM_COPY);
    for (int64_t i = 0; i < tensor_numel(host); i++) REQUIRE(t_get(host, i) == 0, "element %lld", (long long)i);
    op_release(GPU, p);
    EXPECT(op_alloc(GPU, (size_t)1 << 50) == NULL, "a petabyte was found");
    p = op_alloc(GPU, 0); /* and the refusal is forgotten */
    EXPECT(p != NULL, "no device memory after a refusal");
    op_release(GPU, p);
    op_release(GPU, NULL);
}

TEST(cuda_device_is_described) {
    CudaDevice info;
    char err[ERR_LEN], hint[ERR_LEN];
    EXPECT(cuda_start(cuda_device_count(NULL), &info, err, hint) == -1 && strstr(err, "GPU") && hint[0],
           "no such GPU: %s", err);
    REQUIRE(cuda_start(0, &info, err, hint) == 0, "%s", err);
    EXPECT(info.name[0] && info.major >= 8 && info.n_sms > 0, "%s, sm_%d%d, %d SMs", info.name, info.major, info.minor,
           info.n_sms);
    DeviceMemory m;
    cuda_memory(&m);
    EXPECT(m.free > 0 && m.free <= m.total && m.held > 0 && m.held + m.free <= m.total, "%lld of %lld bytes free",
           (long long)m.free, (long long)m.total);
    EXPECT(info.driver_version >= info.runtime_version / 1000 * 1000, "driver %d, runtime %d", info.driver_version,
           info.runtime_version);
    cuda_stop();
    cuda_stop(); /* once more does nothing */
}

static void copy(const Side *s) {
    op_copy(s->device, s->t[0], s->t[1], STREAM_COMPUTE);
}

TEST(cuda_copies_and_casts) {
    static const int64_t shapes[][2] = {{1, 1}, {3, 7}, {65, 128}, {300, 1000}};
    for (int i = 0; i < 16; i++) {
        const int64_t rows = shapes[i / 4][0], cols = shapes[i / 4][1];
        Tensor x = t_normal(t_slice(act_dtypes[i % 2], rows, cols, 6), 3, 1),
               y = t_slice(act_dtypes[i / 2 % 2], rows, cols, 2);
        Case c = {.name =
                      case_name("%s (%d, %d) to %s", dtype_name(x.dtype), (int)rows, (int)cols, dtype_name(y.dtype)),
                  .run = copy,
                  .args = {{"y", y, ARG_OUT}, {"x", x, ARG_IN}},
                  .f32_tolerance = 1e-30,
                  .bf16_tolerance = 1e-30};
        expect_case(&c);
        t_free_all();
    }
    Tensor ids = t_normal(T1(DTYPE_I32, 1000), 1e5, 1), to = T1(DTYPE_I32, 1000);
    Case c = {.name = "i32", .run = copy, .args = {{"y", to, ARG_OUT}, {"x", ids, ARG_IN}}};
    expect_case(&c);
}

/* Ties to even, infinities, NaN, overflow to infinity, subnormals: the bits of the CPU. */
TEST(cuda_rounds_as_the_cpu) {
    static const float special[] = {0,
                                    -0.0f,
                                    1.00390625f,  /* half way, down to even */
                                    1.01171875f,  /* half way, up to even */
                                    1.003906369f, /* a bit more than half */
                                    INFINITY,
                                    -INFINITY,
                                    3.4028235e38f,
                                    1e-40f,
                                    -1e-45f};
    const int n = (int)(sizeof special / sizeof *special);
    Tensor x = T1(DTYPE_F32, n), y = T1(DTYPE_BF16, n);
    for (int i = 0; i < n; i++) t_set(x, i, (double)special[i]);
    op_copy(CPU, y, x, STREAM_COMPUTE);
    Tensor gpu_x = d_copy(x), gpu_y = d_copy(t_poison(T1(DTYPE_BF16, n)));
    op_copy(GPU, gpu_y, gpu_x, STREAM_COMPUTE);
    EXPECT(t_same_bits(d_read(gpu_y), y), "other bits");
    t_fill(x, NAN);
    op_copy(GPU, gpu_y, d_copy(x), STREAM_COMPUTE);
    EXPECT(isnan(t_get(d_read(gpu_y), 0)), "NaN became %g", t_get(d_read(gpu_y), 0));
}

static void zero(const Side *s) {
    op_zero(s->device, s->t[0], STREAM_COMPUTE);
}

TEST(cuda_zeros) {
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    for (int i = 0; i < 3; i++) {
        Case c = {.name = dtype_name(dtypes[i]), .run = zero, .args = {{"y", T3(dtypes[i], 3, 5, 7), ARG_OUT}}};
        expect_case(&c);
    }
}

/* A chain over all streams: each copies what the one before it left, ordered by events alone. */
TEST(cuda_events_order_streams) {
    const int64_t n = 1 << 22;
    Tensor link[STREAM_COUNT + 1];
    for (int i = 0; i <= STREAM_COUNT; i++) link[i] = d_copy(t_fill(T1(DTYPE_F32, n), i));
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < STREAM_COUNT; i++) {
            if (i > 0) op_event_wait(GPU, i - 1, (Stream)i);
            op_copy(GPU, link[i + 1], link[i], (Stream)i);
            op_event_record(GPU, i, (Stream)i);
        }
        op_event_wait(GPU, STREAM_COUNT - 1, (Stream)0);
    }
    op_synchronize(GPU, (Stream)(STREAM_COUNT - 1));
    Tensor last = d_read(link[STREAM_COUNT]);
    for (int64_t i = 0; i < n; i++) REQUIRE(t_get(last, i) == 0, "element %lld is %g", (long long)i, t_get(last, i));
}
