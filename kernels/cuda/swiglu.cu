/* As cpu/swiglu.c, but a warp per row, which walks the row in packs; the gradient of the weight is a butterfly. */
#include "common.cuh"

enum {
    SWIGLU_WARPS = 4, /* rows of a block */
    SWIGLU_BLOCKS_PER_SM = 32,
    FORWARD_PACKS = 3, /* of each input, on their way at once */
    BACKWARD_PACKS = 2
};

template <typename T, int N>
static __global__ void __launch_bounds__(32 * SWIGLU_WARPS, 5)
    forward_kernel(T *__restrict__ y, int64_t y_ld, const T *__restrict__ h, int64_t h_ld,
                   const float *__restrict__ weights, const int32_t *n_rows, int64_t M, int F, int G) {
    const int64_t rows = rows_in_use(n_rows, M), stride = (int64_t)gridDim.x * SWIGLU_WARPS;
    for (int64_t m = (int64_t)blockIdx.x * SWIGLU_WARPS + threadIdx.y; m < rows; m += stride) {
        const float weight = weights ? weights[m] : 1;
        const T *a = h + m * h_ld, *c = a + G - F;
        T *out = y + m * y_ld;
        for (int first = threadIdx.x * N; first < F; first += 32 * N * FORWARD_PACKS) {
            Pack<T, N> gate[FORWARD_PACKS], up[FORWARD_PACKS];
#pragma unroll
            for (int k = 0; k < FORWARD_PACKS; k++) {
                const int i = first + 32 * N * k;
                if (i < F) gate[k] = load_pack<N>(a + i), up[k] = load_pack<N>(c + i);
            }
#pragma unroll
            for (int k = 0; k < FORWARD_PACKS; k++) {
                const int i = first + 32 * N * k;
                if (i >= F) break;
                float x[N], z[N];
                unpack(x, gate[k]);
                unpack(z, up[k]);
#pragma unroll
                for (int j = 0; j < N; j++) x[j] = weight * x[j] * sigmoid_for<T>(x[j]) * z[j];
                store_pack(out + i, pack_of<T>(x));
            }
        }
    }
}

void cuda_swiglu_forward(Tensor y, Tensor h, Tensor weight, Stream s) {
    CHECK(y.dtype == h.dtype, "swiglu_forward: %s to %s", dtype_name(h.dtype), dtype_name(y.dtype));
    const int64_t M = h.shape[0];
    CHECK(h.shape[1] < COLUMNS_MAX, "swiglu: %lld columns", (long long)h.shape[1]);
    if (M == 0) return;
    const unsigned grid = grid_for(ceil_div(M, SWIGLU_WARPS), SWIGLU_BLOCKS_PER_SM);
    const dim3 block(32, SWIGLU_WARPS);
    const bool packed = rows_are_packed(y) && rows_are_packed(h);
    ACT_SWITCH(h.dtype, T, {
        auto kernel = packed ? forward_kernel<T, Pack<T>::N> : forward_kernel<T, 1>;
        kernel<<<grid, block, 0, cuda_stream(s)>>>(data_of<T>(y), y.ld, data_of<T>(h), h.ld, data_of<float>(weight),
                                                   h.n_rows, M, (int)y.shape[1], (int)h.shape[1]);
    });
    LAUNCH_CHECK();
}

template <typename T, int N>
static __global__ void __launch_bounds__(32 * SWIGLU_WARPS, 4)
    backward_kernel(T *__restrict__ dh, int64_t dh_ld, float *__restrict__ dweight, const T *__restrict__ dy,
                    int64_t dy_ld, const T *__restrict__ h, int64_t h_ld, const float *__restrict__ weights,
                    const int32_t *n_rows, int64_t M, int F, int G) {
    const int64_t rows = rows_in_use(n_rows, M), stride = (int64_t)gridDim.x * SWIGLU_WARPS;
    for (int64_t m = (int64_t)blockIdx.x * SWIGLU_WARPS + threadIdx.y; m < rows; m += stride) {
        const float weight = weights ? weights[m] : 1;
        const T *a = h + m * h_ld, *c = a + G - F, *g = dy + m * dy_ld;
        T *da = dh + m * dh_ld, *dc = da + G - F;
        float sum = 0;
        for (int first = threadIdx.x * N; first < F; first += 32 * N * BACKWARD_PACKS) {
            Pack<T, N> gate[BACKWARD_PACKS], up[BACKWARD_PACKS], gradient[BACKWARD_PACKS];
#pragma unroll
            for (int k = 0; k < BACKWARD_PACKS; k++) {
                const int i = first + 32 * N * k;
                if (i < F)
                    gate[k] = load_pack<N>(a + i), up[k] = load_pack<N>(c + i), gradient[k] = load_pack<N>(g + i);
            }
#pragma unroll
            for (int k = 0; k < BACKWARD_PACKS; k++) {
                const int i = first + 32 * N * k;
                if (i >= F) break;
                float x[N], z[N], d[N];
                unpack(x, gate[k]);
                unpack(z, up[k]);
                unpack(d, gradient[k]);
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const float sigmoid = sigmoid_for<T>(x[j]), silu = x[j] * sigmoid, scaled = d[j] * weight;
                    sum += d[j] * silu * z[j];
                    x[j] = scaled * z[j] * sigmoid * (1 + x[j] * (1 - sigmoid));
                    z[j] = scaled * silu;
                }
                store_pack(da + i, pack_of<T>(x));
                store_pack(dc + i, pack_of<T>(z));
            }
        }
        for (int i = F + threadIdx.x; i < G - F; i += 32) da[i] = from_f32<T>(0);
        if (!weights) continue;
        sum = warp_sum(sum);
        if (threadIdx.x == 0) dweight[m] = sum;
    }
}

void cuda_swiglu_backward(Tensor dh, Tensor dweight, Tensor dy, Tensor h, Tensor weight, Stream s) {
    CHECK(dh.dtype == h.dtype && dy.dtype == h.dtype, "swiglu_backward: %s, %s, %s", dtype_name(dh.dtype),
          dtype_name(dy.dtype), dtype_name(h.dtype));
    const int64_t M = h.shape[0];
    CHECK(h.shape[1] < COLUMNS_MAX, "swiglu: %lld columns", (long long)h.shape[1]);
    if (M == 0) return;
    const unsigned grid = grid_for(ceil_div(M, SWIGLU_WARPS), SWIGLU_BLOCKS_PER_SM);
    const dim3 block(32, SWIGLU_WARPS);
    const bool packed = rows_are_packed(dh) && rows_are_packed(dy) && rows_are_packed(h);
    ACT_SWITCH(h.dtype, T, {
        auto kernel = packed ? backward_kernel<T, Pack<T>::N> : backward_kernel<T, 1>;
        kernel<<<grid, block, 0, cuda_stream(s)>>>(data_of<T>(dh), dh.ld, data_of<float>(dweight), data_of<T>(dy),
                                                   dy.ld, data_of<T>(h), h.ld, data_of<float>(weight), h.n_rows, M,
                                                   (int)dy.shape[1], (int)h.shape[1]);
    });
    LAUNCH_CHECK();
}
