/* As cpu/quantize.c: a block of threads a square of 128 x 128. Rows leave from registers, columns through shared
 * memory, so x is read once for both. */
#include "blocks.cuh"

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* All of a thread's part of the square is on its way before any is used. */
template <Dtype SOURCE, bool WIDE_ROWS, bool COLUMNS>
static __global__ void __launch_bounds__(SQUARE_THREADS, 4)
    quantize_kernel(Tiles rows, Tiles columns, Source x, int across) {
    const int64_t M = rows_in_use(x.n_rows, x.M), row = (int64_t)(blockIdx.x / across) * TILE;
    if (row >= M) return;
    const int64_t col = (int64_t)(blockIdx.x % across) * TILE;
    const int n_rows = (int)min(M - row, (int64_t)TILE), n_cols = (int)min(x.C - col, (int64_t)TILE);
    const int c = threadIdx.x % TILE_LANES * LANE_COLUMNS;
    RawColumns<SOURCE> raw[SQUARE_PASSES];
#pragma unroll
    for (int pass = 0; pass < SQUARE_PASSES; pass++)
        raw[pass] = raw_load<SOURCE>(x, row + square_row(pass), col + c, square_row(pass) < n_rows && c < n_cols);
    if (rows.data) {
#pragma unroll
        for (int pass = 0; pass < SQUARE_PASSES; pass++) {
            const int r = square_row(pass);
            float v[LANE_COLUMNS];
            raw_unpack(v, raw[pass]);
            if constexpr (WIDE_ROWS)
                row_tile_store_e5m6(rows, row + r, col + c, v, r < n_rows && c < n_cols);
            else
                row_tile_store(rows, row + r, col + c, v, r < n_rows && c < n_cols);
        }
    }
    if constexpr (COLUMNS) {
        __shared__ Square square;
#pragma unroll
        for (int pass = 0; pass < SQUARE_PASSES; pass++) {
            if constexpr (SOURCE == DTYPE_BF16) {
                square_put(&square, square_row(pass), c, raw[pass]);
            } else {
                float v[LANE_COLUMNS];
                raw_unpack(v, raw[pass]);
                square_put(&square, square_row(pass), c, v);
            }
        }
        square_columns_store(columns, &square, row, col, n_rows, n_cols);
    }
}

template <Dtype SOURCE, bool WIDE_ROWS> static void quantize(Quantized q, Tensor x, cudaStream_t stream) {
    const int64_t across = ceil_div(x.shape[1], TILE), blocks = ceil_div(x.shape[0], TILE) * across;
    CHECK(blocks <= INT32_MAX, "quantize: %lld squares", (long long)blocks);
    auto kernel = tensor_is_none(q.columns) ? quantize_kernel<SOURCE, WIDE_ROWS, false>
                                            : quantize_kernel<SOURCE, WIDE_ROWS, true>;
    kernel<<<(unsigned)blocks, SQUARE_THREADS, 0, stream>>>(tiles_of(q.rows), tiles_of(q.columns), source_of(x),
                                                            (int)across);
    LAUNCH_CHECK();
}

void cuda_quantize(Quantized q, Tensor x, Stream s) {
    const bool wide = q.rows.dtype == DTYPE_E5M6;
    CHECK(x.dtype != DTYPE_F32 && (!wide || x.dtype == DTYPE_BF16), "quantize: %s to %s", dtype_name(x.dtype),
          dtype_name(q.rows.dtype));
    if (tensor_numel(x) == 0) return;
    CHECK(x.dtype != DTYPE_BF16 || rows_are_packed(x), "quantize: rows of %lld at %p", (long long)x.ld, x.data);
    if (wide)
        quantize<DTYPE_BF16, true>(q, x, cuda_stream(s));
    else if (x.dtype == DTYPE_BF16)
        quantize<DTYPE_BF16, false>(q, x, cuda_stream(s));
    else if (x.dtype == DTYPE_E4M3)
        quantize<DTYPE_E4M3, false>(q, x, cuda_stream(s));
    else
        quantize<DTYPE_E5M6, false>(q, x, cuda_stream(s));
}

/* ---- what tiles mean --------------------------------------------------------------------------------------------- */

template <typename Y, Dtype SOURCE> static __global__ void dequantize_kernel(Y *y, int64_t y_ld, Source x) {
    const int64_t per_row = x.C / LANE_COLUMNS, n = x.M * per_row;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / per_row, col = i % per_row * LANE_COLUMNS;
        float v[LANE_COLUMNS];
        raw_unpack(v, raw_load<SOURCE>(x, row, col, true));
        store_pack(y + row * y_ld + col, pack_of<Y>(v));
    }
}

void cuda_dequantize(Tensor y, Tensor x, Stream s) {
    const unsigned grid = grid_for(ceil_div(tensor_numel(x), 256 * LANE_COLUMNS), 16);
    if (tensor_numel(x) == 0) return;
    ACT_SWITCH(y.dtype, Y, {
        auto kernel = x.dtype == DTYPE_E4M3 ? dequantize_kernel<Y, DTYPE_E4M3> : dequantize_kernel<Y, DTYPE_E5M6>;
        kernel<<<grid, 256, 0, cuda_stream(s)>>>(data_of<Y>(y), y.ld, source_of(x));
    });
    LAUNCH_CHECK();
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(SQUARE_THREADS, 3)
    quantize_weight_kernel(WeightBlocks w, const float *__restrict__ master) {
    __shared__ BlockBytes bytes;
    const WeightBlock at = weight_block(w, blockIdx.x);
    float x[BLOCK_PASSES][4];
#pragma unroll
    for (int pass = 0; pass < BLOCK_PASSES; pass++) {
        const int r = block_row(pass), c = block_col();
        const float4 v = r < at.n_rows && c < at.n_cols ? *(const float4 *)(master + at.offset + (int64_t)r * w.I + c)
                                                        : make_float4(0, 0, 0, 0);
        x[pass][0] = v.x, x[pass][1] = v.y, x[pass][2] = v.z, x[pass][3] = v.w;
    }
    weight_block_store(w, at, x, &bytes);
}

void cuda_quantize_weight(Tensor w, Tensor wt, Tensor master, Stream s) {
    const WeightBlocks blocks = weight_blocks(w, wt);
    if (blocks.n == 0) return;
    quantize_weight_kernel<<<(unsigned)blocks.n, SQUARE_THREADS, 0, cuda_stream(s)>>>(blocks, data_of<float>(master));
    LAUNCH_CHECK();
}

static __global__ void __launch_bounds__(SQUARE_THREADS) transpose_weight_kernel(WeightBlocks w) {
    __shared__ BlockBytes bytes;
    const WeightBlock at = weight_block(w, blockIdx.x);
    const uint8_t *in = w.data + at.offset;
    const int c = block_col();
#pragma unroll
    for (int pass = 0; pass < BLOCK_PASSES; pass++) {
        const int r = block_row(pass);
        if (r < at.n_rows && c < at.n_cols) bytes.word[r][c / 4] = *(const uint32_t *)(in + (int64_t)r * w.I + c);
    }
    __syncthreads();
    weight_block_transpose(w, at, &bytes, w.scale[(at.plane * w.down + at.row) * w.scale_ld + at.col]);
}

void cuda_transpose_weight(Tensor wt, Tensor w, Stream s) {
    const WeightBlocks blocks = weight_blocks(w, wt);
    if (blocks.n == 0) return;
    transpose_weight_kernel<<<(unsigned)blocks.n, SQUARE_THREADS, 0, cuda_stream(s)>>>(blocks);
    LAUNCH_CHECK();
}

/* ---- what is in them --------------------------------------------------------------------------------------------- */

/* A warp counts 128 columns of a row at a time. Integers may be added in any order, so the sums are atomic. */
enum { STATS_THREADS = 256, STATS_WARPS = STATS_THREADS / 32, STATS_WORDS = sizeof(TileStats) / 8 };

/* One plane of tiles, or planes of blocks. */
typedef struct {
    const uint8_t *data;
    const float *scale;
    const int32_t *n_rows;
    int64_t planes, M, C, ld, scale_ld, plane_scales;
    int64_t across; /* tiles of a row */
    bool is_blocks;
} Counted;

typedef unsigned long long Word; /* what atomics take */

__device__ inline void add_to(int64_t *sum, uint32_t n) {
    if (n > 0) atomicAdd((Word *)sum, (Word)n);
}

/* How many bytes of the mask are set. */
__device__ inline uint32_t bytes_set(uint32_t mask) {
    return (uint32_t)__popc(mask) / 8;
}

/* Of one thread. 2^32 values are more than it ever sees. */
typedef struct {
    uint32_t values, zeros, subnormals, largest, nans, amax_bits;
} ThreadStats;

/* Four numbers with one scale. */
__device__ inline void count_codes(ThreadStats &stats, uint32_t codes, float scale) {
    const uint32_t magnitudes = codes & 0x7F7F7F7Fu, zero = __vcmpeq4(magnitudes, 0);
    const uint32_t nan = __vcmpeq4(magnitudes, 0x7F7F7F7Fu), numbers = magnitudes & ~nan;
    stats.values += 4;
    stats.zeros += bytes_set(zero);
    stats.subnormals += bytes_set(__vcmpltu4(magnitudes, 0x08080808u) & ~zero);
    stats.largest += bytes_set(__vcmpeq4(magnitudes, 0x7E7E7E7Eu));
    stats.nans += bytes_set(nan);
    const float2 low = from_e4m3x2(numbers & 0xFFFFu), high = from_e4m3x2(numbers >> 16);
    const uint32_t bits = __float_as_uint(fmaxf(fmaxf(low.x, low.y), fmaxf(high.x, high.y)) * scale);
    if (bits <= 0x7F800000u) stats.amax_bits = max(stats.amax_bits, bits);
}

__device__ inline void count_scale(TileStats *stats, float scale) {
    const int exponent = (int)(__float_as_uint(scale) >> 23) - 127;
    if (scale == scale) add_to(&stats->scales[max(0, min(exponent - SCALE_EXPONENT_FIRST, SCALE_EXPONENTS - 1))], 1);
}

static __global__ void __launch_bounds__(STATS_THREADS) tile_stats_kernel(TileStats *stats, Counted x) {
    __shared__ TileStats sum;
    for (int i = threadIdx.x; i < STATS_WORDS; i += STATS_THREADS) ((Word *)&sum)[i] = 0;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const int64_t M = rows_in_use(x.n_rows, x.M), n = x.planes * M * x.across;
    ThreadStats own = {};
    for (int64_t i = blockIdx.x * (int64_t)STATS_WARPS + threadIdx.x / 32; i < n;
         i += gridDim.x * (int64_t)STATS_WARPS) {
        const int64_t plane = i / x.across / M, row = i / x.across % M, tile = i % x.across,
                      col = tile * TILE + lane * 4;
        const float scale =
            x.scale[x.is_blocks ? plane * x.plane_scales + row / TILE * x.scale_ld + tile : tile * x.scale_ld + row];
        if (col < x.C) count_codes(own, *(const uint32_t *)(x.data + (plane * M + row) * x.ld + col), scale);
        if (lane == 0 && (!x.is_blocks || row % TILE == 0)) count_scale(&sum, scale);
    }
    add_to(&sum.values, own.values);
    add_to(&sum.zeros, own.zeros);
    add_to(&sum.subnormals, own.subnormals);
    add_to(&sum.largest, own.largest);
    add_to(&sum.nans, own.nans);
    atomicMax((Word *)&sum.amax_bits, (Word)own.amax_bits);
    __syncthreads();
    for (int i = threadIdx.x; i < STATS_WORDS; i += STATS_THREADS) {
        const Word word = ((const Word *)&sum)[i];
        Word *to = (Word *)stats + i;
        if (to == (Word *)&stats->amax_bits)
            atomicMax(to, word);
        else if (word > 0)
            atomicAdd(to, word);
    }
}

void cuda_tile_stats(TileStats *stats, Tensor x, Stream s) {
    const bool is_blocks = x.scale_layout == SCALE_BLOCK_128X128;
    const int64_t planes = x.ndim == 3 ? x.shape[0] : 1, M = x.shape[x.ndim - 2], C = x.shape[x.ndim - 1];
    if (tensor_numel(x) == 0) return;
    const Counted counted = {(const uint8_t *)x.data,     x.scale,           x.n_rows, planes, M, C, x.ld, x.scale_ld,
                             tensor_n_scales(x) / planes, ceil_div(C, TILE), is_blocks};
    const unsigned grid = grid_for(ceil_div(planes * M * counted.across, STATS_WARPS), 8);
    tile_stats_kernel<<<grid, STATS_THREADS, 0, cuda_stream(s)>>>(stats, counted);
    LAUNCH_CHECK();
}
