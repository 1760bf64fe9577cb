/* As cpu/swiglu.c, but a warp per row, which walks the row in packs; the gradient of the weight is a butterfly. In FP8
 * backward a block takes squares of 128 x 128, whose columns go through shared memory. */
#include "tiles.cuh"

enum {
    SWIGLU_WARPS = 4, /* rows of a block */
    SWIGLU_BLOCKS_PER_SM = 32,
    FORWARD_PACKS = 3, /* of each input, on their way at once */
    BACKWARD_PACKS = 2,
    SQUARE_AHEAD = 4 /* passes of a square, likewise */
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

/* To tiles, of the output and of h itself. */
static __global__ void __launch_bounds__(32 * SWIGLU_WARPS)
    forward_tiles_kernel(Tiles y_rows, Tiles h_rows, const bf16 *__restrict__ h, int64_t h_ld,
                         const float *__restrict__ weights, const int32_t *n_rows, int64_t M, int F) {
    const int64_t rows = rows_in_use(n_rows, M), stride = (int64_t)gridDim.x * SWIGLU_WARPS;
    for (int64_t m = (int64_t)blockIdx.x * SWIGLU_WARPS + threadIdx.y; m < rows; m += stride) {
        const float weight = weights ? weights[m] : 1;
        const bf16 *a = h + m * h_ld;
#pragma unroll 2
        for (int first = 0; first < F; first += 32 * LANE_COLUMNS) {
            const int i = first + threadIdx.x * LANE_COLUMNS;
            const bool has = i < F;
            float x[LANE_COLUMNS] = {0}, z[LANE_COLUMNS] = {0}, y[LANE_COLUMNS];
            if (has) {
                unpack(x, load_pack<LANE_COLUMNS>(a + i));
                unpack(z, load_pack<LANE_COLUMNS>(a + F + i));
            }
#pragma unroll
            for (int j = 0; j < LANE_COLUMNS; j++) y[j] = weight * x[j] * sigmoid_for<bf16>(x[j]) * z[j];
            columns_round(y);
            row_tile_store(y_rows, m, i, y, has);
            if (!h_rows.data) continue;
            row_tile_store(h_rows, m, i, x, has);
            row_tile_store(h_rows, m, F + i, z, has);
        }
    }
}

static void forward_tiles(Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s) {
    const int64_t M = h.shape[0], F = y_rows.shape[1];
    CHECK(h.dtype == DTYPE_BF16 && F % LANE_COLUMNS == 0 && h.shape[1] == 2 * F && rows_are_packed(h),
          "swiglu_forward: FP8 of %s, width %lld", dtype_name(h.dtype), (long long)F);
    forward_tiles_kernel<<<grid_for(ceil_div(M, SWIGLU_WARPS), SWIGLU_BLOCKS_PER_SM), dim3(32, SWIGLU_WARPS), 0,
                           cuda_stream(s)>>>(tiles_of(y_rows), tiles_of(h_rows), data_of<bf16>(h), h.ld,
                                             data_of<float>(weight), h.n_rows, M, (int)F);
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

/* ---- backward in FP8 --------------------------------------------------------------------------------------------- */

/* Gate, up and output of a square on their way into columns. */
typedef struct {
    Square da, dc, y;
} SwigluSquares;

typedef struct {
    Tiles dh_rows, dh_columns, y_columns;
    Source h, dy;
    float *dweight;
    const float *weights;
    const int32_t *n_rows;
    int64_t M;
    int F, across, squares; /* blocks of a row, and squares that each takes, one after the other */
} SwigluTiles;

/* Half a warp a row; a thread keeps the weight's gradients of its rows while the block walks the columns. */
static __global__ void __launch_bounds__(SQUARE_THREADS, 2) backward_tiles_kernel(SwigluTiles a) {
    extern __shared__ __align__(16) char shared[];
    SwigluSquares *square = (SwigluSquares *)shared;
    const int blocks_across = a.across;
    const int64_t rows = rows_in_use(a.n_rows, a.M), row = (int64_t)(blockIdx.x / blocks_across) * TILE;
    if (row >= rows) return;
    const int first = (int)(blockIdx.x % blocks_across) * a.squares * TILE, last = min(first + a.squares * TILE, a.F);
    const int n_rows = (int)min(rows - row, (int64_t)TILE), lane_col = threadIdx.x % TILE_LANES * LANE_COLUMNS;
    float dweight[SQUARE_PASSES] = {0};
    for (int col = first; col < last; col += TILE) {
        const int c = col + lane_col;
        RawColumns<DTYPE_E4M3> gate_raw[SQUARE_AHEAD], up_raw[SQUARE_AHEAD];
        RawColumns<DTYPE_BF16> g_raw[SQUARE_AHEAD];
#pragma unroll
        for (int pass = 0; pass < SQUARE_PASSES; pass++) {
            if (pass % SQUARE_AHEAD == 0) {
#pragma unroll
                for (int k = 0; k < SQUARE_AHEAD; k++) {
                    const int64_t m = row + square_row(pass + k);
                    gate_raw[k] = raw_load<DTYPE_E4M3>(a.h, m, c, m < rows);
                    up_raw[k] = raw_load<DTYPE_E4M3>(a.h, m, a.F + c, m < rows);
                    g_raw[k] = raw_load<DTYPE_BF16>(a.dy, m, c, m < rows);
                }
            }
            const int r = square_row(pass);
            const bool has = r < n_rows;
            const float weight = !has ? 0 : a.weights ? a.weights[row + r] : 1;
            float gate[LANE_COLUMNS], up[LANE_COLUMNS], g[LANE_COLUMNS], y[LANE_COLUMNS];
            raw_unpack(gate, gate_raw[pass % SQUARE_AHEAD]);
            raw_unpack(up, up_raw[pass % SQUARE_AHEAD]);
            raw_unpack(g, g_raw[pass % SQUARE_AHEAD]);
#pragma unroll
            for (int j = 0; j < LANE_COLUMNS; j++) {
                const float sigmoid = sigmoid_for<bf16>(gate[j]), silu = gate[j] * sigmoid, scaled = g[j] * weight;
                dweight[pass] += g[j] * silu * up[j];
                y[j] = weight * gate[j] * sigmoid * up[j];
                gate[j] = scaled * up[j] * sigmoid * (1 + gate[j] * (1 - sigmoid));
                up[j] = scaled * silu;
            }
            columns_round(gate);
            columns_round(up);
            row_tile_store(a.dh_rows, row + r, c, gate, has);
            row_tile_store(a.dh_rows, row + r, a.F + c, up, has);
            square_put(&square->da, r, lane_col, gate);
            square_put(&square->dc, r, lane_col, up);
            square_put(&square->y, r, lane_col, y);
        }
        square_columns_store(a.dh_columns, &square->da, row, col, n_rows, TILE);
        square_columns_store(a.dh_columns, &square->dc, row, a.F + col, n_rows, TILE);
        square_columns_store(a.y_columns, &square->y, row, col, n_rows, TILE);
        __syncthreads();
    }
    if (!a.weights) return;
#pragma unroll
    for (int pass = 0; pass < SQUARE_PASSES; pass++) {
        const int r = square_row(pass);
        float sum = dweight[pass];
#pragma unroll
        for (int offset = TILE_LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
        if (r < n_rows && lane_col == 0) a.dweight[row + r] = sum;
    }
}

static void backward_tiles(Quantized dh, Tensor y_columns, Tensor dweight, Tensor dy, Tensor h, Tensor weight,
                           Stream s) {
    const int64_t M = h.shape[0], F = dy.shape[1], across = F / TILE;
    CHECK(dy.dtype == DTYPE_BF16 && rows_are_packed(dy) && h.dtype == DTYPE_E4M3, "swiglu_backward: FP8 of %s, %s",
          dtype_name(dy.dtype), dtype_name(h.dtype));
    static bool allowed;
    if (!allowed)
        CUDA_CHECK(cudaFuncSetAttribute(backward_tiles_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        (int)sizeof(SwigluSquares)));
    allowed = true;
    SwigluTiles a = {tiles_of(dh.rows),
                     tiles_of(dh.columns),
                     tiles_of(y_columns),
                     source_of(h),
                     source_of(dy),
                     data_of<float>(dweight),
                     data_of<float>(weight),
                     h.n_rows,
                     M,
                     (int)F,
                     (int)across,
                     1};
    if (a.weights) a.squares = (int)across, a.across = 1; /* one block sums a row's gradient */
    const int64_t blocks = ceil_div(M, TILE) * a.across;
    CHECK(blocks < INT32_MAX, "swiglu_backward: %lld squares", (long long)blocks);
    backward_tiles_kernel<<<(unsigned)blocks, SQUARE_THREADS, sizeof(SwigluSquares), cuda_stream(s)>>>(a);
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
