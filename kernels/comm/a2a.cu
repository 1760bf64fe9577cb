/* See a2a.h. One thread an element, no sums but those in rank order. */
#include "a2a.h"
#include "kernels/cuda/common.cuh"

enum { THREADS = 256, BLOCKS_MAX = 4096, WARP = 32 };

static unsigned blocks_of(int64_t threads) {
    const int64_t blocks = ceil_div(threads, THREADS);
    return (unsigned)(blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX);
}

__global__ void keep_own_kernel(int32_t *ids, float *weights, const int32_t *slot_of_expert, int ep, int n_local,
                                int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const int32_t id = ids[i];
        if (id >= 0 && slot_of_expert[id] / n_local == ep) continue;
        ids[i] = -1;
        weights[i] = 0;
    }
}

void a2a_keep_own(Tensor ids, Tensor weights, Tensor slot_of_expert, int ep, int n_ep, Stream s) {
    const int64_t n = tensor_numel(ids);
    const int n_local = (int)(tensor_numel(slot_of_expert) / n_ep);
    if (n == 0) return;
    keep_own_kernel<<<blocks_of(n), THREADS, 0, cuda_stream(s)>>>((int32_t *)ids.data, (float *)weights.data,
                                                                  (const int32_t *)slot_of_expert.data, ep, n_local, n);
    LAUNCH_CHECK();
}

/* A warp a row. */
template <typename Bits>
__global__ void zero_absent_kernel(Bits *rows, const int32_t *ids, int64_t D, int K, int64_t n) {
    const int64_t first = (blockIdx.x * (int64_t)blockDim.x + threadIdx.x) / WARP;
    for (int64_t row = first; row < n; row += (int64_t)gridDim.x * blockDim.x / WARP) {
        bool is_here = false;
        for (int k = 0; k < K; k++) is_here |= ids[row * K + k] >= 0;
        for (int64_t i = threadIdx.x % WARP; i < D && !is_here; i += WARP) rows[row * D + i] = 0;
    }
}

void a2a_zero_absent(Tensor rows, Tensor ids, Stream s) {
    const int64_t n = ids.shape[0], D = rows.shape[1];
    const int K = (int)ids.shape[1];
    const size_t width = dtype_size(rows.dtype);
    CHECK(width == 2 || width == 4, "rows of %s", dtype_name(rows.dtype));
    if (n == 0) return;
    if (width == 2)
        zero_absent_kernel<<<blocks_of(n * WARP), THREADS, 0, cuda_stream(s)>>>((uint16_t *)rows.data,
                                                                                (const int32_t *)ids.data, D, K, n);
    else
        zero_absent_kernel<<<blocks_of(n * WARP), THREADS, 0, cuda_stream(s)>>>((uint32_t *)rows.data,
                                                                                (const int32_t *)ids.data, D, K, n);
    LAUNCH_CHECK();
}

/* Sum: the type in which T is added. */
template <typename T, typename Sum> __global__ void sum_kernel(T *y, const T *parts, int size, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        Sum sum = (Sum)parts[i];
        for (int r = 1; r < size; r++) sum += (Sum)parts[r * n + i];
        y[i] = (T)sum;
    }
}

template <typename T, typename Sum> static void sum(Tensor y, const void *parts, int size, Stream s) {
    const int64_t n = tensor_numel(y);
    if (n == 0) return;
    sum_kernel<T, Sum><<<blocks_of(n), THREADS, 0, cuda_stream(s)>>>((T *)y.data, (const T *)parts, size, n);
    LAUNCH_CHECK();
}

void a2a_sum_in_order(Tensor y, const void *parts, int size, Stream s) {
    switch (y.dtype) {
    case DTYPE_F32: sum<float, float>(y, parts, size, s); return;
    case DTYPE_F64: sum<double, double>(y, parts, size, s); return;
    case DTYPE_I32: sum<int32_t, int32_t>(y, parts, size, s); return;
    case DTYPE_BF16: sum<bf16, float>(y, parts, size, s); return;
    case DTYPE_NONE:
    case DTYPE_E4M3:
    case DTYPE_E5M6:
    case DTYPE_COUNT: break;
    }
    CHECK(false, "%s is not summed over ranks", dtype_name(y.dtype));
}
