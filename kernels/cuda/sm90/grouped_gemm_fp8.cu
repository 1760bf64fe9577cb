/* Products of the routed experts in E4M3, by TMA and wgmma. (V3 3.3.2; the contract is grouped_gemm's in ops.h)
 *
 * One block an SM walks the tiles of 128 x 128. One warp fetches: for each 128 of the sum a stage of both operands, as
 * TMA writes them, and of the scales that go with rows. Two warpgroups multiply, 64 rows each, and promote: the tensor
 * core's sum of 128 terms is multiplied by the scales into f32 registers. While one promotes, the other's products
 * run; nothing but the stages ties them together, so one may finish a tile while the other is in the next.
 *
 *   rows   (fprop, dgrad)  scales of x by row, one of w for the whole tile and 128 terms
 *   wgrad                  scales of both operands by row: of the tile's rows, and of its columns
 *
 * Each element is summed by one thread over ascending k: the bits do not depend on the walk. */
#include "hopper.cuh"
#include "kernels/cuda/grouped.cuh"

enum {
    TILE_M = 128,
    TILE_N = 128,
    TILE_K = 128,  /* bytes: a swizzled row, and a scale */
    CONSUMERS = 2, /* warpgroups */
    THREADS = 128 * (CONSUMERS + 1),
    GROUP_M = TILE_M / CONSUMERS,
    OUT_LD = TILE_N + 8, /* elements: rows start in different banks, at multiples of 16 bytes */
    EXPERTS_MAX = 1024
};

/* What a kind writes, and the stages that fit beside a tile of it. */
template <GemmKind KIND> struct Kind {
    typedef bf16 Out;
    static const int STAGES = 5;
};
template <> struct Kind<GEMM_WGRAD> {
    typedef float Out;
    static const int STAGES = 4;
};

template <GemmKind KIND> struct Shared {
    static const int STAGES = Kind<KIND>::STAGES;
    alignas(1024) uint8_t a[STAGES][TILE_M * TILE_K];
    alignas(1024) uint8_t b[STAGES][TILE_N * TILE_K];
    alignas(16) float a_scale[STAGES][TILE_M], b_scale[STAGES][TILE_N];
    alignas(16) typename Kind<KIND>::Out out[CONSUMERS][GROUP_M][OUT_LD];
    alignas(8) uint64_t full[STAGES], empty[STAGES];
    int32_t start[EXPERTS_MAX + 1];
};
static_assert(sizeof(Shared<GEMM_FPROP>) <= 227 << 10 && sizeof(Shared<GEMM_WGRAD>) <= 227 << 10, "of an SM");

/* Beside Grouped: where the scales lie. Rows: b's are those of w's blocks. */
typedef struct {
    const float *a, *b;
    int64_t a_ld, b_ld;
    int64_t b_plane; /* rows: scales of an expert's w */
} Scales;

/* A stage of the kind's, and how often it has been round. */
typedef struct {
    int stage;
    uint32_t parity;
} Ring;

template <GemmKind KIND> __device__ inline void ring_next(Ring *r) {
    r->stage = r->stage + 1 == Kind<KIND>::STAGES ? 0 : r->stage + 1;
    r->parity ^= r->stage == 0;
}

template <GemmKind KIND> __device__ inline int pieces_of(const Tile &t, const Grouped &g) {
    return (KIND == GEMM_WGRAD ? t.n_rows : g.k) / TILE_K;
}

/* ---- the fetching warp ------------------------------------------------------------------------------------------- */

/* As many of 128 scales as exist, from the first of the tile's rows. */
__device__ inline uint32_t scale_bytes(int n) {
    return (uint32_t)min(n, TILE_M) * (uint32_t)sizeof(float);
}

template <GemmKind KIND>
__device__ inline void fetch(Shared<KIND> *s, const CUtensorMap *a_map, const CUtensorMap *b_map, const Grouped &g,
                             const Scales &scales) {
    Ring ring = {0, 1}; /* the first wait of a fresh barrier is over at once */
    Tile t = {};
    for (t.at = blockIdx.x; tile_seek<KIND, TILE_M, TILE_N>(&t, g, s->start); t.at += (int)gridDim.x) {
        const int a_row = KIND == GEMM_WGRAD ? t.m0 : t.row0 + t.m0,
                  b_row = KIND == GEMM_WGRAD ? t.n0 : t.expert * g.n + t.n0;
        const int k0 = KIND == GEMM_WGRAD ? t.row0 : 0, pieces = pieces_of<KIND>(t, g);
        const uint32_t a_bytes = scale_bytes(KIND == GEMM_WGRAD ? g.m - t.m0 : TILE_M);
        const uint32_t b_bytes = KIND == GEMM_WGRAD ? scale_bytes(g.n - t.n0) : 0;
        for (int i = 0; i < pieces; i++, ring_next<KIND>(&ring)) {
            const uint32_t full = smem_address(&s->full[ring.stage]);
            barrier_wait(smem_address(&s->empty[ring.stage]), ring.parity);
            barrier_arrive_expect(full, (TILE_M + TILE_N) * TILE_K + a_bytes + b_bytes);
            const int k = k0 + i * TILE_K;
            tma_load_2d(smem_address(s->a[ring.stage]), a_map, k, a_row, full);
            tma_load_2d(smem_address(s->b[ring.stage]), b_map, k, b_row, full);
            bulk_load(smem_address(s->a_scale[ring.stage]), scales.a + k / TILE_K * scales.a_ld + a_row, a_bytes, full);
            if (KIND == GEMM_WGRAD)
                bulk_load(smem_address(s->b_scale[ring.stage]), scales.b + k / TILE_K * scales.b_ld + b_row, b_bytes,
                          full);
        }
    }
}

/* ---- the multiplying warpgroups ---------------------------------------------------------------------------------- */

/* sum += products of one stage, scaled. `w`: the scale of w's block; wgrad reads its columns' scales instead. */
template <GemmKind KIND>
__device__ inline void piece_add(float (&sum)[64], Shared<KIND> *s, const Ring &ring, int group, float w) {
    const int lane = threadIdx.x % 32, row = group * GROUP_M + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const uint64_t a = wgmma_operand(smem_address(s->a[ring.stage]) + (uint32_t)(group * GROUP_M * TILE_K));
    const uint64_t b = wgmma_operand(smem_address(s->b[ring.stage]));
    float part[64];
    barrier_wait(smem_address(&s->full[ring.stage]), ring.parity);
    const float upper = s->a_scale[ring.stage][row] * w, lower = s->a_scale[ring.stage][row + 8] * w;
    float2 column[16];
    if (KIND == GEMM_WGRAD)
#pragma unroll
        for (int j = 0; j < 16; j++) column[j] = *(const float2 *)&s->b_scale[ring.stage][j * 8 + lane % 4 * 2];
    wgmma_touch(part);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < TILE_K / 32; k++) wgmma_e4m3_64x128(part, a + 2 * k, b + 2 * k, k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_touch(part);
    if (lane == 0) barrier_arrive(smem_address(&s->empty[ring.stage]));
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 c = KIND == GEMM_WGRAD ? column[j] : make_float2(1, 1);
        sum[4 * j] += upper * c.x * part[4 * j];
        sum[4 * j + 1] += upper * c.y * part[4 * j + 1];
        sum[4 * j + 2] += lower * c.x * part[4 * j + 2];
        sum[4 * j + 3] += lower * c.y * part[4 * j + 3];
    }
}

__device__ inline void pair_put(bf16 *to, float a, float b) {
    *(__nv_bfloat162 *)to = __floats2bfloat162_rn(a, b);
}
__device__ inline void pair_put(float *to, float a, float b) {
    *(float2 *)to = make_float2(a, b);
}
/* A warp's 16 x 128 sums into shared memory, from where whole rows leave. */
template <typename Out> __device__ inline void sums_put(Out (*out)[OUT_LD], const float (&sum)[64]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 16; j++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            pair_put(&out[lane / 4 + half * 8][j * 8 + lane % 4 * 2], sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
}

/* Rounds a group's 64 x 128 sums and writes them, 16 rows a warp: rows of 256 bytes. */
template <GemmKind KIND>
__device__ inline void rows_write(const float (&sum)[64], Shared<KIND> *s, int group, const Tile &t, const Grouped &g) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
    bf16(*out)[OUT_LD] = s->out[group] + first;
    __syncwarp();
    sums_put(out, sum);
    __syncwarp();
    const int col = lane % 16 * 8;
    if (t.n0 + col >= g.n) return;
    bf16 *y = (bf16 *)g.y + (int64_t)(t.row0 + t.m0 + group * GROUP_M + first) * g.y_ld + t.n0 + col;
#pragma unroll
    for (int r = 0; r < 16; r += 2) *(int4 *)(y + (r + lane / 16) * g.y_ld) = *(const int4 *)&out[r + lane / 16][col];
}

/* Adds them to dw, whole rows where they lie while the next tile is multiplied. Each element of dw has one addition,
 * so their order does not show. */
template <GemmKind KIND>
__device__ inline void wgrad_add(const float (&sum)[64], Shared<KIND> *s, int group, const Tile &t, const Grouped &g) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16;
    float(*out)[OUT_LD] = s->out[group] + first;
    bulk_wait_read(); /* the last tile's rows have left */
    __syncwarp();
    sums_put(out, sum);
    bulk_fence();
    __syncwarp();
    const int row = t.m0 + group * GROUP_M + first + lane, n = min(g.n - t.n0, TILE_N);
    if (lane < 16 && row < g.m)
        bulk_add((float *)g.y + t.expert * g.plane + row * g.y_ld + t.n0, smem_address(out[lane]),
                 (uint32_t)n * (uint32_t)sizeof(float));
    bulk_commit();
}

template <GemmKind KIND>
__device__ inline void multiply(Shared<KIND> *s, int group, const Grouped &g, const Scales &scales) {
    Ring ring = {0, 0};
    Tile t = {};
    for (t.at = blockIdx.x; tile_seek<KIND, TILE_M, TILE_N>(&t, g, s->start); t.at += (int)gridDim.x) {
        const int pieces = pieces_of<KIND>(t, g);
        const float *w = scales.b + t.expert * scales.b_plane + t.n0 / TILE_N * scales.b_ld; /* rows */
        float sum[64] = {0}, next = KIND == GEMM_WGRAD ? 1 : w[0];
        for (int i = 0; i < pieces; i++, ring_next<KIND>(&ring)) {
            const float now = next;
            if (KIND != GEMM_WGRAD && i + 1 < pieces) next = w[i + 1];
            piece_add<KIND>(sum, s, ring, group, now);
        }
        if constexpr (KIND == GEMM_WGRAD)
            wgrad_add(sum, s, group, t, g);
        else
            rows_write(sum, s, group, t, g);
    }
    if (KIND == GEMM_WGRAD) bulk_wait();
}

template <GemmKind KIND>
static __global__ void __launch_bounds__(THREADS, 1)
    grouped_fp8_kernel(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, Grouped g,
                       Scales scales) {
    extern __shared__ __align__(1024) uint8_t shared[];
    Shared<KIND> *s = (Shared<KIND> *)shared;
    if (threadIdx.x == 0) {
        tma_prefetch(&a_map);
        tma_prefetch(&b_map);
        for (int i = 0; i < s->STAGES; i++) {
            barrier_init(smem_address(&s->full[i]), 1);
            barrier_init(smem_address(&s->empty[i]), 4 * CONSUMERS); /* a lane of each warp */
        }
        barrier_init_done();
    }
    start_load(s->start, g); /* and all wait */
    const int group = threadIdx.x / 128;
    if (group == CONSUMERS) {
        registers_give<40>();
        if (threadIdx.x == CONSUMERS * 128) fetch<KIND>(s, &a_map, &b_map, g, scales);
    } else {
        registers_take<232>();
        multiply<KIND>(s, group, g, scales);
    }
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <GemmKind KIND>
static void launch(const CUtensorMap &a, const CUtensorMap &b, const Grouped &g, const Scales &scales,
                   int64_t max_tiles, cudaStream_t stream) {
    static bool allowed;
    CHECK(g.n_experts <= EXPERTS_MAX, "%d experts on a GPU", g.n_experts);
    if (!allowed)
        CUDA_CHECK(cudaFuncSetAttribute(grouped_fp8_kernel<KIND>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)sizeof(Shared<KIND>)));
    allowed = true;
    const unsigned grid = (unsigned)min_i64(cuda_context()->n_sms, max_tiles);
    grouped_fp8_kernel<KIND><<<grid, THREADS, sizeof(Shared<KIND>), stream>>>(a, b, g, scales);
    LAUNCH_CHECK();
}

void grouped_gemm_fp8(Tensor y, Tensor x, Tensor w, Tensor expert_start, cudaStream_t stream) {
    const int64_t El = w.shape[0], O = w.shape[1], I = w.shape[2], N = x.shape[0];
    CHECK(y.dtype == DTYPE_BF16 && y.ld % 8 == 0 && is_aligned(y.data) && O % 8 == 0 && I % TILE_K == 0 && N % 4 == 0,
          "grouped_gemm: FP8 (%lld, %lld) by (%lld, %lld)", (long long)N, (long long)I, (long long)O, (long long)I);
    Grouped g = {};
    g.y = y.data, g.y_ld = y.ld;
    g.start = data_of<int32_t>(expert_start);
    g.n_experts = (int)El, g.n = (int)O, g.k = (int)I;
    const Scales scales = {x.scale, w.scale, x.scale_ld, w.scale_ld, ceil_div(O, SCALE_TILE) * w.scale_ld};
    launch<GEMM_FPROP>(tma_map_bytes(x.data, N, I, x.ld, TILE_M), tma_map_bytes(w.data, El * O, I, I, TILE_N), g,
                       scales, ceil_div(N, TILE_M) * ceil_div(O, TILE_N), stream);
}

void grouped_wgrad_fp8(Tensor dw, Tensor dy, Tensor x, Tensor expert_start, cudaStream_t stream) {
    const int64_t El = dw.shape[0], O = dw.shape[1], I = dw.shape[2], N = x.shape[1];
    CHECK(O % 4 == 0 && I % 4 == 0 && N % 16 == 0 && is_aligned(dw.data), "grouped_wgrad: FP8 (%lld, %lld) over %lld",
          (long long)O, (long long)I, (long long)N);
    Grouped g = {};
    g.y = dw.data, g.y_ld = dw.ld, g.plane = O * I;
    g.start = data_of<int32_t>(expert_start);
    g.n_experts = (int)El, g.m = (int)O, g.n = (int)I;
    const Scales scales = {dy.scale, x.scale, dy.scale_ld, x.scale_ld, 0};
    launch<GEMM_WGRAD>(tma_map_bytes(dy.data, O, N, dy.ld, TILE_M), tma_map_bytes(x.data, I, N, x.ld, TILE_N), g,
                       scales, El * ceil_div(O, TILE_M) * ceil_div(I, TILE_N), stream);
}
