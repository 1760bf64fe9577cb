/* Dense FP8 products of few rows, as generation has them: what cuBLASLt, which takes rows by eights, leaves to us.
 *
 * Such a product takes as long as the weight's bytes take to arrive, so each is read once for a row of a. A warp owns
 * OUTPUTS neighbouring rows of the weight, from which its lanes read 16 bytes each at once: chunks of 512 terms, whose
 * parts of 16 lie in one scale each. Sums are f32 by lane over ascending chunks, then over the lanes in a butterfly:
 * the bits follow from the shape alone. */
#ifndef TRAIN_MOE_GEMM_FEW_ROWS_CUH
#define TRAIN_MOE_GEMM_FEW_ROWS_CUH

#include "tiles.cuh"

enum { OUTPUTS = 4, FEW_WARPS = 4, LANE_TERMS = 16 };

/* y (M, N) = or += a (M, K) b (N, K)^T; a tiles, b blocks. */
typedef struct {
    const uint8_t *a, *b;
    const float *a_scale, *b_scale;
    int64_t a_scale_ld, b_scale_ld, y_ld;
    int N, K;
    bool accumulate;
} FewRows;

__device__ static inline void terms_of(float (&x)[LANE_TERMS], uint4 bytes) {
    const uint32_t word[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int i = 0; i < LANE_TERMS / 2; i++) {
        const float2 two = from_e4m3x2(word[i / 2] >> (i % 2 * 16) & 0xFFFFu);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
}

/* sum[i] += this lane's terms of output n + i. */
__device__ static inline void add_terms(float (&sum)[OUTPUTS], const FewRows &g, int row, int n, int k) {
    uint4 b[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++)
        b[i] = n + i < g.N ? *(const uint4 *)(g.b + (int64_t)(n + i) * g.K + k) : make_uint4(0, 0, 0, 0);
    float x[LANE_TERMS];
    terms_of(x, *(const uint4 *)(g.a + (int64_t)row * g.K + k));
    /* OUTPUTS divides a block's rows, so one scale is for all. */
    const float scale = g.a_scale[k / TILE * g.a_scale_ld + row] * g.b_scale[n / TILE * g.b_scale_ld + k / TILE];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        float w[LANE_TERMS], part = 0;
        terms_of(w, b[i]);
#pragma unroll
        for (int j = 0; j < LANE_TERMS; j++) part = fmaf(x[j], w[j], part);
        sum[i] = fmaf(scale, part, sum[i]);
    }
}

template <typename Y> static __global__ void __launch_bounds__(32 * FEW_WARPS) few_rows_kernel(Y *y, FewRows g) {
    const int lane = threadIdx.x % 32, n = (blockIdx.x * FEW_WARPS + threadIdx.x / 32) * OUTPUTS, row = blockIdx.y;
    if (n >= g.N) return;
    float sum[OUTPUTS] = {0};
    for (int k = lane * LANE_TERMS; k < g.K; k += 32 * LANE_TERMS) add_terms(sum, g, row, n, k);
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        const float all = warp_sum(sum[i]);
        Y *to = y + row * g.y_ld + n + i;
        if (lane == i && n + i < g.N) *to = from_f32<Y>(g.accumulate ? to_f32(*to) + all : all);
    }
}

/* FP8's FPROP and DGRAD for any number of rows. */
static inline void gemm_few_rows(Tensor y, Tensor a, Tensor b, bool accumulate, cudaStream_t stream) {
    const int64_t M = y.shape[0], N = y.shape[1], K = a.shape[1];
    CHECK(M < 65536 && N < INT32_MAX && K % LANE_TERMS == 0 && K < INT32_MAX && is_aligned(a.data) &&
              is_aligned(b.data),
          "gemm: FP8 (%lld, %lld) by (%lld, %lld)", (long long)M, (long long)K, (long long)N, (long long)K);
    const FewRows g = {
        data_of<uint8_t>(a), data_of<uint8_t>(b), a.scale, b.scale, a.scale_ld, b.scale_ld, y.ld, (int)N, (int)K,
        accumulate};
    const dim3 grid((unsigned)ceil_div(N, FEW_WARPS * OUTPUTS), (unsigned)M);
    ACT_SWITCH(y.dtype, Y, { few_rows_kernel<Y><<<grid, 32 * FEW_WARPS, 0, stream>>>(data_of<Y>(y), g); });
    LAUNCH_CHECK();
}

#endif
