/* As cpu/swiglu.c, but a warp per row, which walks the row in packs; the gradient of the weight is a butterfly. In FP8
 * backward a block takes squares of 128 x 128, whose columns go through shared memory. */
#include "tiles.cuh"

enum {
    SWIGLU_WARPS = 4, /* rows of a block */
    SWIGLU_BLOCKS_PER_SM = 32,
    FORWARD_PACKS = 3,      /* of each input, on their way at once */
    FORWARD_SEGMENT = 6144, /* columns of a row for a warp, in FP8: a multiple of what is on its way at once */
    BACKWARD_PACKS = 2,
    SQUARE_AHEAD = 4 /* passes of a square, likewise */
};

/* a: gate, c: up. */
template <typename T> __device__ static inline float swiglu(float a, float c, float weight) {
    return weight * (a * sigmoid_for<T>(a) * c);
}

/* Gradients of gate and up, the output, and a summand of the weight's gradient; g: the gradient of the output. */
typedef struct {
    float da, dc, y, dweight;
} SwigluGradient;

template <typename T> __device__ static inline SwigluGradient gradient_of(float a, float c, float g, float weight) {
    const float sigmoid = sigmoid_for<T>(a), silu = a * sigmoid, product = silu * c, scaled = g * weight;
    return {scaled * c * (sigmoid + silu * (1 - sigmoid)), scaled * silu, weight * product, g * product};
}

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
                for (int j = 0; j < N; j++) x[j] = swiglu<T>(x[j], z[j], weight);
                store_pack(out + i, pack_of<T>(x));
            }
        }
    }
}

/* To tiles, of the output and of h itself. */
static __global__ void __launch_bounds__(32 * SWIGLU_WARPS, 8)
    forward_tiles_kernel(Tiles y_rows, Tiles h_rows, const bf16 *__restrict__ h, int64_t h_ld,
                         const float *__restrict__ weights, const int32_t *n_rows, int64_t M, int F) {
    const int64_t rows = rows_in_use(n_rows, M), stride = (int64_t)gridDim.x * SWIGLU_WARPS;
    const int lane_col = threadIdx.x * LANE_COLUMNS, begin = blockIdx.y * FORWARD_SEGMENT;
    const int end = min(begin + FORWARD_SEGMENT, F);
    for (int64_t m = (int64_t)blockIdx.x * SWIGLU_WARPS + threadIdx.y; m < rows; m += stride) {
        const float weight = weights ? weights[m] : 1;
        const bf16 *a = h + m * h_ld;
        for (int first = begin; first < end; first += 32 * LANE_COLUMNS * FORWARD_PACKS) {
            LanePack gate[FORWARD_PACKS] = {}, up[FORWARD_PACKS] = {};
#pragma unroll
            for (int k = 0; k < FORWARD_PACKS; k++) {
                const int i = first + k * 32 * LANE_COLUMNS + lane_col;
                if (i < F) gate[k] = load_pack<LANE_COLUMNS>(a + i), up[k] = load_pack<LANE_COLUMNS>(a + F + i);
            }
#pragma unroll
            for (int k = 0; k < FORWARD_PACKS; k++) {
                const int at = first + k * 32 * LANE_COLUMNS, i = at + lane_col;
                if (at >= end) break; /* the lanes stay together */
                float x[LANE_COLUMNS], z[LANE_COLUMNS];
                unpack(x, gate[k]);
                unpack(z, up[k]);
#pragma unroll
                for (int j = 0; j < LANE_COLUMNS; j++) x[j] = swiglu<bf16>(x[j], z[j], weight);
                row_tile_store(y_rows, m, i, pack_of<bf16>(x), i < F);
                if (h_rows.data) row_tile_store(h_rows, m, i, gate[k], F + i, up[k], i < F);
            }
        }
    }
}

static void forward_tiles(Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s) {
    const int64_t M = h.shape[0], F = y_rows.shape[1];
    CHECK(h.dtype == DTYPE_BF16 && F % LANE_COLUMNS == 0 && h.shape[1] == 2 * F && rows_are_packed(h),
          "swiglu_forward: FP8 of %s, width %lld", dtype_name(h.dtype), (long long)F);
    const dim3 grid(grid_for(ceil_div(M, SWIGLU_WARPS), SWIGLU_BLOCKS_PER_SM), (unsigned)ceil_div(F, FORWARD_SEGMENT));
    forward_tiles_kernel<<<grid, dim3(32, SWIGLU_WARPS), 0, cuda_stream(s)>>>(
        tiles_of(y_rows), tiles_of(h_rows), data_of<bf16>(h), h.ld, data_of<float>(weight), h.n_rows, M, (int)F);
    LAUNCH_CHECK();
}

void cuda_swiglu_forward(Tensor y, Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s) {
    CHECK(tensor_is_none(y) || y.dtype == h.dtype, "swiglu_forward: %s to %s", dtype_name(h.dtype),
          dtype_name(y.dtype));
    const int64_t M = h.shape[0];
    CHECK(h.shape[1] < COLUMNS_MAX, "swiglu: %lld columns", (long long)h.shape[1]);
    if (M == 0) return;
    if (tensor_is_none(y)) {
        forward_tiles(y_rows, h_rows, h, weight, s);
        return;
    }
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
                    const SwigluGradient of = gradient_of<T>(x[j], z[j], d[j], weight);
                    sum += of.dweight;
                    x[j] = of.da, z[j] = of.dc;
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

/* ---- backward in FP8 --------------------------------------------------------------------------------------------- */

/* Gradients of gate and up, and the output, of a square on their way into columns; and what is one of a row: what its
 * numbers are multiplied with, the largest magnitudes of its gradients, two bf16, and the gradient of its weight so
 * far, the affair of one thread. */
typedef struct {
    Square da, dc, y;
    float gate_scale[TILE], up_scale[TILE], weight[TILE];
    uint32_t amax[TILE];
    float dweight[TILE];
} SwigluShared;

typedef struct {
    Tiles dh_rows, dh_columns, y_columns;
    Source h, dy;
    float *dweight;
    const float *weights; /* NULL: all 1 */
    int F, across;
    int share; /* squares of a block */
} SwigluTiles;

typedef struct {
    int row, col, n_rows; /* elements; rows that exist */
} SwigluSquare;

/* Of a matrix of so many rows, squares in rows of squares: one of them, and the one behind. */
__device__ static inline SwigluSquare square_of(const SwigluTiles &a, int index, int rows) {
    const int row = index / a.across * TILE;
    return {row, index % a.across * TILE, min(rows - row, (int)TILE)};
}
__device__ static inline SwigluSquare square_behind(const SwigluTiles &a, const SwigluSquare &at, int rows) {
    const bool is_row_end = at.col + TILE == a.F;
    const int row = is_row_end ? at.row + TILE : at.row;
    return {row, is_row_end ? 0 : at.col + TILE, min(rows - row, (int)TILE)};
}

/* Eight columns of a row, as they lie in memory. */
typedef struct {
    uint2 gate, up;
    uint4 g;
} SwigluRow;

/* Where this thread's columns lie in the first row of a square, and how many bytes a row has. */
typedef struct {
    const uint8_t *gate, *g;
    int h_bytes, g_bytes, F, n_rows;
} SwigluSource;

__device__ static inline SwigluSource swiglu_source(const SwigluTiles &a, const SwigluSquare &at) {
    const int col = at.col + threadIdx.x % TILE_LANES * LANE_COLUMNS;
    return {(const uint8_t *)a.h.data + at.row * a.h.ld + col,
            (const uint8_t *)((const bf16 *)a.dy.data + at.row * a.dy.ld + col),
            (int)a.h.ld,
            (int)(a.dy.ld * sizeof(bf16)),
            a.F,
            at.n_rows};
}

/* A row that does not exist is that of the last one; its weight is zero, and nobody stores it. */
__device__ static inline SwigluRow load_swiglu_row(const SwigluSource &a, int row) {
    const int r = min(row, a.n_rows - 1);
    const uint8_t *gate = a.gate + (int64_t)r * a.h_bytes;
    return {*(const uint2 *)gate, *(const uint2 *)(gate + a.F), *(const uint4 *)(a.g + (int64_t)r * a.g_bytes)};
}

/* What the numbers of this thread's row of a square are multiplied with: TILE threads have one each. */
typedef struct {
    float gate_scale, up_scale, weight;
} RowFactors;

__device__ static inline RowFactors load_row_factors(const SwigluTiles &a, const SwigluSquare &at) {
    const int row = at.row + min((int)threadIdx.x, at.n_rows - 1);
    const float *scale = a.h.scale + row;
    return {scale[at.col / TILE * a.h.scale_ld], scale[(a.F + at.col) / TILE * a.h.scale_ld],
            (int)threadIdx.x >= at.n_rows ? 0
            : a.weights                   ? a.weights[row]
                                          : 1};
}

__device__ static inline void put_row_factors(SwigluShared *s, const RowFactors &x) {
    s->gate_scale[threadIdx.x] = x.gate_scale, s->up_scale[threadIdx.x] = x.up_scale, s->weight[threadIdx.x] = x.weight;
}

/* Gradients of gate and up and the output of a thread's columns. Returns its part of the weight's gradient. */
__device__ static inline float gradients_of_row(LanePack *da, LanePack *dc, LanePack *y, const SwigluRow &raw,
                                                const RowFactors &by) {
    float gate[LANE_COLUMNS], up[LANE_COLUMNS], g[LANE_COLUMNS], out[LANE_COLUMNS], dweight = 0;
    raw_unpack<DTYPE_E4M3>(gate, {{raw.gate.x, raw.gate.y}, by.gate_scale});
    raw_unpack<DTYPE_E4M3>(up, {{raw.up.x, raw.up.y}, by.up_scale});
    raw_unpack<DTYPE_BF16>(g, {{raw.g.x, raw.g.y, raw.g.z, raw.g.w}, 0});
#pragma unroll
    for (int j = 0; j < LANE_COLUMNS; j++) {
        const SwigluGradient of = gradient_of<bf16>(gate[j], up[j], g[j], by.weight);
        dweight += of.dweight;
        gate[j] = of.da, up[j] = of.dc, out[j] = of.y;
    }
    *da = pack_of<bf16>(gate), *dc = pack_of<bf16>(up), *y = pack_of<bf16>(out);
    return dweight;
}

/* A thread's row of a square: rows of the gradient leave for `out`, their scales wait for store_row_scales, all of it
 * goes into the squares. Returns its part of the weight's gradient. */
__device__ static inline float square_add_row(uint8_t *out, int F, SwigluShared *s, const SwigluRow &raw, int r,
                                              bool has) {
    const int c = threadIdx.x % TILE_LANES * LANE_COLUMNS;
    LanePack da, dc, y;
    const float dweight = gradients_of_row(&da, &dc, &y, raw, {s->gate_scale[r], s->up_scale[r], s->weight[r]});
    square_put(&s->y, r, c, y);
    square_put(&s->da, r, c, da);
    square_put(&s->dc, r, c, dc);
    const uint32_t amax = lanes_max(amax_of(da) | amax_of(dc) << 16), inverses = e4m3_inverses(amax);
    const uint2 da_bytes = e4m3_bytes(da, low_twice(inverses)), dc_bytes = e4m3_bytes(dc, high_twice(inverses));
    if (c == 0) s->amax[r] = amax;
    if (has) *(uint2 *)out = da_bytes, *(uint2 *)(out + F) = dc_bytes;
    return dweight;
}

/* The weight's gradient of a row: this square's share, summed over the row's lanes, joins those before it. */
__device__ static inline void add_dweight(const SwigluTiles &a, SwigluShared *s, const SwigluSquare &at, int r,
                                          float dweight) {
#pragma unroll
    for (int offset = TILE_LANES / 2; offset > 0; offset /= 2) dweight += __shfl_xor_sync(0xFFFFFFFFu, dweight, offset);
    if (threadIdx.x % TILE_LANES > 0) return;
    const float sum = (at.col == 0 ? 0 : s->dweight[r]) + dweight;
    s->dweight[r] = sum;
    if (at.col + TILE == a.F && r < at.n_rows) a.dweight[at.row + r] = sum;
}

/* Of the gradient's rows, one of gate or up a thread. */
__device__ static inline void store_row_scales(const SwigluTiles &a, const SwigluShared *s, const SwigluSquare &at) {
    static_assert(SQUARE_THREADS == 2 * TILE, "a thread a row of gate or up");
    const int r = threadIdx.x % TILE, is_up = threadIdx.x / TILE, col = is_up ? a.F + at.col : at.col;
    if (r < at.n_rows)
        a.dh_rows.scale[col / TILE * a.dh_rows.scale_ld + at.row + r] = e4m3_scale(s->amax[r] >> is_up * 16 & 0xFFFFu);
}

/* Columns of the three squares. While one's bytes go to memory the next one's are made. */
__device__ static inline void square_columns(const SwigluTiles &a, SwigluShared *s, const SwigluSquare &at) {
    Square *squares = &s->da;
    const auto tiles_at = [&](int i) { return i == 2 ? a.y_columns : a.dh_columns; };
    const auto col_at = [&](int i) { return i == 1 ? a.F + at.col : at.col; };
#pragma unroll 1
    for (int i = 0; i < 3; i++) {
        const ColumnPart part = square_part(&squares[i]);
        columns_begin(&squares[i], part);
        __syncthreads();
        if (i > 0) columns_store(tiles_at(i - 1), &squares[i - 1], at.row, col_at(i - 1), at.n_rows, TILE);
        columns_quantize(tiles_at(i), &squares[i], part, at.row, col_at(i), TILE);
    }
    __syncthreads();
    columns_store(tiles_at(2), &squares[2], at.row, col_at(2), at.n_rows, TILE);
}

/* Block b: squares [b, b + 1) * a.share, which follow each other in rows of squares; with weights, whole rows of them.
 * Half a warp a row of elements. Loads run ahead, from one square into the next. */
static __global__ void __launch_bounds__(SQUARE_THREADS, 2) backward_tiles_kernel(SwigluTiles a) {
    extern __shared__ __align__(16) char shared[];
    SwigluShared *s = (SwigluShared *)shared;
    const int rows = (int)rows_in_use(a.h.n_rows, a.h.M), begin = blockIdx.x * a.share;
    const int end = min(begin + a.share, (rows + TILE - 1) / TILE * a.across);
    if (begin >= end) return;
    SwigluSquare at = square_of(a, begin, rows);
    SwigluSource from = swiglu_source(a, at);
    SwigluRow ahead[SQUARE_AHEAD];
#pragma unroll
    for (int k = 0; k < SQUARE_AHEAD; k++) ahead[k] = load_swiglu_row(from, square_row(k));
    const bool has_row = threadIdx.x < TILE;
    if (has_row) put_row_factors(s, load_row_factors(a, at));
    __syncthreads();
    for (int i = begin; i < end; i++) {
        const SwigluSquare next = i + 1 < end ? square_behind(a, at, rows) : at;
        uint8_t *out = a.dh_rows.data + at.row * a.dh_rows.ld + at.col + threadIdx.x % TILE_LANES * LANE_COLUMNS;
        const int ld = (int)a.dh_rows.ld;
#pragma unroll 1
        for (int first = 0; first < SQUARE_PASSES; first += SQUARE_AHEAD) {
            const bool is_last = first + SQUARE_AHEAD == SQUARE_PASSES;
            const int later = is_last ? 0 : first + SQUARE_AHEAD;
            if (is_last) from = swiglu_source(a, next);
#pragma unroll
            for (int k = 0; k < SQUARE_AHEAD; k++) {
                const int r = square_row(first + k);
                const float dweight = square_add_row(out + (int64_t)r * ld, a.F, s, ahead[k], r, r < at.n_rows);
                ahead[k] = load_swiglu_row(from, square_row(later + k));
                if (a.weights) add_dweight(a, s, at, r, dweight);
            }
        }
        __syncthreads();
        RowFactors factors;
        if (has_row) factors = load_row_factors(a, next);
        store_row_scales(a, s, at);
        square_columns(a, s, at);
        if (has_row) put_row_factors(s, factors);
        __syncthreads();
        at = next;
    }
}

static void backward_tiles(Quantized dh, Tensor y_columns, Tensor dweight, Tensor dy, Tensor h, Tensor weight,
                           Stream s) {
    const int64_t M = h.shape[0], F = dy.shape[1], across = F / TILE, down = ceil_div(M, TILE);
    CHECK(dy.dtype == DTYPE_BF16 && rows_are_packed(dy) && h.dtype == DTYPE_E4M3, "swiglu_backward: FP8 of %s, %s",
          dtype_name(dy.dtype), dtype_name(h.dtype));
    static bool allowed;
    if (!allowed) allow_shared(backward_tiles_kernel, sizeof(SwigluShared));
    allowed = true;
    /* One block sums a weight's gradient. */
    const int64_t share = tensor_is_none(weight) ? ceil_div(down * across, grid_for(down * across, 2)) : across;
    const SwigluTiles a = {tiles_of(dh.rows),
                           tiles_of(dh.columns),
                           tiles_of(y_columns),
                           source_of(h),
                           source_of(dy),
                           data_of<float>(dweight),
                           data_of<float>(weight),
                           (int)F,
                           (int)across,
                           (int)share};
    CHECK(M < INT32_MAX - TILE && down * across < INT32_MAX - share, "swiglu_backward: %lld rows", (long long)M);
    backward_tiles_kernel<<<(unsigned)ceil_div(down * across, share), SQUARE_THREADS, sizeof(SwigluShared),
                            cuda_stream(s)>>>(a);
    LAUNCH_CHECK();
}

void cuda_swiglu_backward(Tensor dh, Quantized dhq, Tensor y_columns, Tensor dweight, Tensor dy, Tensor h,
                          Tensor weight, Stream s) {
    CHECK(tensor_is_none(dh) || (dh.dtype == h.dtype && dy.dtype == h.dtype), "swiglu_backward: %s, %s, %s",
          dtype_name(dh.dtype), dtype_name(dy.dtype), dtype_name(h.dtype));
    const int64_t M = h.shape[0];
    CHECK(h.shape[1] < COLUMNS_MAX, "swiglu: %lld columns", (long long)h.shape[1]);
    if (M == 0) return;
    if (tensor_is_none(dh)) {
        backward_tiles(dhq, y_columns, dweight, dy, h, weight, s);
        return;
    }
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
