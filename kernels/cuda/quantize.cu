/* As cpu/quantize.c: a block of threads a square of 128 x 128. Rows leave from registers. Columns of a bf16 matrix
 * come from the same registers by way of shared memory, so x is read once for both; columns of tiles have a kernel of
 * their own, whose threads load four columns of sixteen rows each. */
#include "blocks.cuh"

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

enum {
    ROWS_PASSES = 4, /* of a block that makes rows alone */
    WIDE_WORDS = TILE / 8 * 3,
    REQUANTIZE_BLOCKS = 5, /* of an SM: as many as find registers without spills */
    E5M6_STRIP = 4         /* squares */
};

/* Two rows of E5M6 tiles a warp, on their way to memory. */
typedef uint32_t WideRows[SQUARE_WARPS][2][WIDE_WORDS];

/* Where a thread's part of the rows of E5M6 tiles goes: by words; or, exchanged with the other lanes of its two
 * rows, by sixteen bytes, if rows begin at multiples of that. */
typedef struct {
    uint32_t *word, *sixteen;
    float *scale;
    bool packed, has_col, has_sixteen;
    int row_words, n_rows;
} WideTarget;

__device__ static inline WideTarget wide_target(const Tiles &q, int64_t row, int64_t col, int n_rows, int n_cols) {
    const int lane = threadIdx.x % 32, c = lane % TILE_LANES * LANE_COLUMNS, row_words = (int)(q.ld / 8 * 3);
    uint32_t *first = (uint32_t *)q.data + row * row_words + col / 8 * 3;
    const int side = lane / (WIDE_WORDS / 4), at = lane % (WIDE_WORDS / 4) * 4;
    return {first + c / 8 * 3,
            first + side * row_words + at,
            q.scale + col / TILE * q.scale_ld + row,
            q.ld % 32 == 0,
            c < n_cols,
            side < 2 && at < n_cols / 8 * 3,
            row_words,
            n_rows};
}

/* `turn` changes with each call, and all lanes of the warp call it. */
__device__ static inline void wide_row_store(const WideTarget &to, WideRows (&wide)[2], int turn, int r,
                                             const LanePack &x) {
    const int lane = threadIdx.x % 32, c = lane % TILE_LANES * LANE_COLUMNS;
    const RawColumns<DTYPE_E5M6> raw = row_tile_e5m6(x);
    const bool has = r < to.n_rows && to.has_col;
    if (has && c == 0) to.scale[r] = raw.scale;
    if (!to.packed) {
#pragma unroll
        for (int i = 0; i < 3; i++)
            if (has) to.word[(int64_t)r * to.row_words + i] = raw.word[i];
        return;
    }
    uint32_t(*rows)[WIDE_WORDS] = wide[turn][threadIdx.x / 32];
#pragma unroll
    for (int i = 0; i < 3; i++) rows[lane / TILE_LANES][c / 8 * 3 + i] = raw.word[i];
    __syncwarp();
    const int first = r - lane / TILE_LANES, side = lane / (WIDE_WORDS / 4); /* of the warp's rows */
    if (to.has_sixteen && first + side < to.n_rows)
        *(uint4 *)(to.sixteen + (int64_t)first * to.row_words) = ((const uint4 *)rows)[lane];
}

/* All of a thread's part of PASSES * SQUARE_ROWS rows is on its way before any is used. COLUMNS: of bf16, a whole
 * square. */
template <Dtype SOURCE, bool WIDE_ROWS, bool COLUMNS, int PASSES>
static __global__ void __launch_bounds__(SQUARE_THREADS, PASSES == SQUARE_PASSES ? 4 : 6)
    quantize_kernel(Tiles rows, Tiles columns, Source x, int across) {
    const int64_t M = rows_in_use(x.n_rows, x.M), row = (int64_t)(blockIdx.x / across) * (PASSES * SQUARE_ROWS);
    if (row >= M) return;
    const int64_t col = (int64_t)(blockIdx.x % across) * TILE;
    const int n_rows = (int)min(M - row, (int64_t)PASSES * SQUARE_ROWS), n_cols = (int)min(x.C - col, (int64_t)TILE);
    const int c = threadIdx.x % TILE_LANES * LANE_COLUMNS;
    RawColumns<SOURCE> raw[PASSES];
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++)
        raw[pass] = raw_load<SOURCE>(x, row + square_row(pass), col + c, square_row(pass) < n_rows && c < n_cols);
    const auto pack_of_pass = [&](int pass) {
        if constexpr (SOURCE == DTYPE_BF16) {
            return lane_pack(raw[pass]);
        } else {
            float v[LANE_COLUMNS];
            raw_unpack(v, raw[pass]);
            return pack_of<bf16>(v);
        }
    };
    if constexpr (WIDE_ROWS) {
        __shared__ __align__(16) WideRows wide[2];
        const WideTarget to = wide_target(rows, row, col, n_rows, n_cols);
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++)
            wide_row_store(to, wide, pass % 2, square_row(pass), pack_of_pass(pass));
    } else if (rows.data) {
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int r = square_row(pass);
            row_tile_store(rows, row + r, col + c, pack_of_pass(pass), r < n_rows && c < n_cols);
        }
    }
    if constexpr (COLUMNS) {
        __shared__ Square square;
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) square_put(&square, square_row(pass), c, pack_of_pass(pass));
        __syncthreads();
        const ColumnPart part = square_part(&square);
        columns_begin(&square, part);
        __syncthreads();
        columns_quantize(columns, &square, part, row, col, n_cols);
        __syncthreads();
        columns_store(columns, &square, row, col, n_rows, n_cols);
    }
}

template <Dtype SOURCE, bool WIDE_ROWS, bool COLUMNS> static void quantize(Quantized q, Tensor x, cudaStream_t stream) {
    const int PASSES = COLUMNS ? (int)SQUARE_PASSES : (int)ROWS_PASSES;
    const int64_t across = ceil_div(x.shape[1], TILE), blocks = ceil_div(x.shape[0], PASSES * SQUARE_ROWS) * across;
    CHECK(blocks <= INT32_MAX, "quantize: %lld squares", (long long)blocks);
    quantize_kernel<SOURCE, WIDE_ROWS, COLUMNS, PASSES><<<(unsigned)blocks, SQUARE_THREADS, 0, stream>>>(
        tiles_of(q.rows), tiles_of(q.columns), source_of(x), (int)across);
    LAUNCH_CHECK();
}

/* ---- columns of tiles -------------------------------------------------------------------------------------------- */

/* The squares of a matrix of M rows, of which row n is row row_token[n] of x, or, if that is negative, zero; NULL: row
 * n. */
typedef struct {
    const uint8_t *data;
    const float *scale;
    const int32_t *n_rows, *row_token;
    int M, C;
    uint32_t row_bytes;
    int64_t scale_ld;
} Squares;

typedef struct {
    int row, col, n_rows, n_cols; /* elements */
} SquareAt;

/* A thread's part of a square of tiles: four columns of the rows of its warp, as they lie in memory. Of E5M6 those are
 * 48 bits: one word and half of the next, or half of one and the next. */
template <Dtype SOURCE> struct RawPart { uint32_t row[SQUARE_WARP_ROWS][SOURCE == DTYPE_E4M3 ? 1 : 2]; };

/* WHOLE: all rows and columns exist. mine: the row of x that is row lane % 16 of the warp's; negative: zeros. */
template <bool WHOLE, bool GATHER, Dtype SOURCE>
__device__ static inline void load_part(RawPart<SOURCE> *x, const Squares &a, const SquareAt &at, int mine) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * SQUARE_WARP_ROWS;
    const uint8_t *data =
        a.data + (SOURCE == DTYPE_E4M3 ? at.col + lane * 4 : at.col / 8 * 12 + (lane / 2 * 3 + lane % 2) * 4);
    const bool has_col = lane * 4 < at.n_cols;
#pragma unroll
    for (int r = 0; r < SQUARE_WARP_ROWS; r++) {
        const int n = GATHER                           ? __shfl_sync(0xFFFFFFFFu, mine, r)
                      : WHOLE || first + r < at.n_rows ? at.row + first + r
                                                       : -1;
        const uint32_t *word = (const uint32_t *)(data + (uint64_t)(uint32_t)n * a.row_bytes);
#pragma unroll
        for (int i = 0; i < (SOURCE == DTYPE_E4M3 ? 1 : 2); i++)
            x->row[r][i] = WHOLE || (n >= 0 && has_col) ? word[i] : 0;
    }
}

/* What they mean. */
__device__ static inline uint2 four_of(const uint32_t (&word)[1], float scale) {
    const float2 low = from_e4m3x2(word[0] & 0xFFFFu), high = from_e4m3x2(word[0] >> 16);
    const float x[4] = {low.x * scale, low.y * scale, high.x * scale, high.y * scale};
    const Pack<bf16, 4> four = pack_of<bf16>(x);
    return *(const uint2 *)four.x;
}
__device__ static inline uint2 four_of(const uint32_t (&word)[2], float scale) {
    const bool odd = threadIdx.x % 2;
    const float2 low = from_f16x2(e5m6_halves(__funnelshift_l(word[1], word[0], odd * 16)));
    const float2 high = from_f16x2(e5m6_halves(odd ? word[1] << 8 : __funnelshift_l(word[1], word[0], 24)));
    const float x[4] = {low.x * scale, low.y * scale, high.x * scale, high.y * scale};
    const Pack<bf16, 4> four = pack_of<bf16>(x);
    return *(const uint2 *)four.x;
}

/* ---- the same of E4M3 in f16, for half the work ---- */

/* E4M3 numbers of a square as f16, in units of 2^(largest - FACTOR_TOP), where `largest` is the exponent of its largest
 * scale: exact where no other exponent is more than FACTOR_REACH below it. */
enum { FACTOR_TOP = 7, FACTOR_REACH = 21, F16_BIAS = 15, F32_BIAS = 127 };

/* Writes what the numbers of this warp's rows are multiplied with, a pair of f16 each; returns `largest` with its bias,
 * or -1: the scales are too far from each other, too small, or NaN. All warps see the same. Rows that do not exist have
 * scale 0. */
__device__ static inline int row_factors(uint32_t *factor, const float *scale) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * SQUARE_WARP_ROWS;
    unsigned most = 0, least = 0xFFFFFFFFu;
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        const unsigned exponent = __float_as_uint(scale[i * 32 + lane]) >> 23;
        most = max(most, exponent), least = min(least, exponent - 1); /* 0 becomes the largest */
    }
    const int largest = (int)__reduce_max_sync(0xFFFFFFFFu, most);
    const int smallest = (int)__reduce_min_sync(0xFFFFFFFFu, least) + 1; /* 0: there is none */
    if (smallest != 0 && (largest - smallest > FACTOR_REACH || largest > 254 || largest < 32)) return -1;
    if (lane < SQUARE_WARP_ROWS) {
        const int exponent = (int)(__float_as_uint(scale[first + lane]) >> 23);
        const int mine = exponent == 0 ? 0 : (exponent - largest + FACTOR_TOP + F16_BIAS) << 10;
        factor[first + lane] = (uint32_t)mine * 0x10001u;
    }
    __syncwarp();
    return largest;
}

__device__ static inline uint2 four_f16_of(const uint32_t (&word)[1], uint32_t factor) {
    return make_uint2(f16x2_product(f16x2_of_e4m3x2(word[0] & 0xFFFFu), factor),
                      f16x2_product(f16x2_of_e4m3x2(word[0] >> 16), factor));
}

/* Four rows of two columns, once multiplied: each column's bytes. */
typedef struct {
    uint32_t low, high;
} TwoColumns;

__device__ static inline TwoColumns two_columns(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t factors) {
    const auto bytes = [=](uint32_t two) { return e4m3x2_of_f16x2(f16x2_product(two, factors)); };
    const uint32_t upper = bytes(a) | bytes(b) << 16, lower = bytes(c) | bytes(d) << 16;
    return {__byte_perm(upper, lower, 0x6420), __byte_perm(upper, lower, 0x7531)};
}

/* As columns_quantize; the scale's exponent is that of columns_amax, one more behind 1.75, and the factor's is what it
 * lacks to 448. False, in all warps, and nothing written: a column is so small beside the square that f16 has no factor
 * for it, or has NaN. */
__device__ static inline bool columns_quantize_f16(const Tiles &q, ColumnBytes *bytes, const ColumnPart &x, int largest,
                                                   const SquareAt &at) {
    enum { ONE = 1 << 10, BEHIND_1_75 = 0xFF, TOP = F16_BIAS + FACTOR_TOP + 8 }; /* of a magnitude of scale 2^largest */
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint2 most = columns_amax(bytes);
    bool is_odd = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned amax = (i < 2 ? most.x : most.y) >> i % 2 * 16 & 0xFFFFu;
        is_odd = is_odd || amax - 1 < 8 * ONE - BEHIND_1_75 - 1 || amax > 31 * ONE;
    }
    if (__any_sync(0xFFFFFFFFu, is_odd)) return false;
    const uint2 exponents = {(most.x + BEHIND_1_75 * 0x10001u) & 31u * ONE * 0x10001u,
                             (most.y + BEHIND_1_75 * 0x10001u) & 31u * ONE * 0x10001u};
    const uint2 factors = {__vminu2((TOP + 8) * ONE * 0x10001u - exponents.x, 30 * ONE * 0x10001u),
                           __vminu2((TOP + 8) * ONE * 0x10001u - exponents.y, 30 * ONE * 0x10001u)};
    uint32_t word[4][4]; /* of a column */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint2 *four = &x.row[i * 4];
        const TwoColumns left = two_columns(four[0].x, four[1].x, four[2].x, four[3].x, factors.x);
        const TwoColumns right = two_columns(four[0].y, four[1].y, four[2].y, four[3].y, factors.y);
        word[0][i] = left.low, word[1][i] = left.high, word[2][i] = right.low, word[3][i] = right.high;
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        *column_at(bytes, lane * 4 + k, lane % 8, warp) = make_uint4(word[k][0], word[k][1], word[k][2], word[k][3]);
    if (warp == 0 && lane * 4 < at.n_cols) {
        float scale[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int exponent = (int)((k < 2 ? exponents.x : exponents.y) >> k % 2 * 16 & 0xFFFFu) / ONE;
            scale[k] = __uint_as_float(exponent ? (uint32_t)(exponent - TOP + largest) << 23 : 0x3F800000u);
        }
        float2 *out = (float2 *)(q.scale + at.row / TILE * q.scale_ld + at.col + lane * 4);
        out[0] = make_float2(scale[0], scale[1]), out[1] = make_float2(scale[2], scale[3]);
    }
    return true;
}

/* ---- the kernel ---- */

/* What the threads share while they work on a square. Rows that do not exist have scale 0. */
typedef struct {
    ColumnBytes bytes;
    alignas(16) float scale[TILE];
    alignas(16) uint32_t factor[TILE]; /* see row_factors */
} Requantize;

/* The square's columns as bytes in shared memory; false: f16 does not hold them. */
__device__ static inline bool requantize_f16(const Tiles &columns, Requantize *s, const RawPart<DTYPE_E4M3> &raw,
                                             const SquareAt &at) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int largest = row_factors(s->factor, s->scale);
    if (largest < 0) return false;
    ColumnPart part;
    uint2 most = {0, 0};
#pragma unroll
    for (int r = 0; r < SQUARE_WARP_ROWS; r++) {
        part.row[r] = four_f16_of(raw.row[r], s->factor[warp * SQUARE_WARP_ROWS + r]);
        most.x = f16_magnitudes_max(most.x, part.row[r].x);
        most.y = f16_magnitudes_max(most.y, part.row[r].y);
    }
    s->bytes.amax[warp][lane] = most;
    __syncthreads();
    const bool done = columns_quantize_f16(columns, &s->bytes, part, largest, at);
    __syncthreads();
    return done;
}

template <Dtype SOURCE>
__device__ static inline void requantize_bf16(const Tiles &columns, Requantize *s, const RawPart<SOURCE> &raw,
                                              const SquareAt &at) {
    ColumnPart part;
#pragma unroll
    for (int r = 0; r < SQUARE_WARP_ROWS; r++)
        part.row[r] = four_of(raw.row[r], s->scale[threadIdx.x / 32 * SQUARE_WARP_ROWS + r]);
    columns_begin(&s->bytes, part);
    __syncthreads();
    columns_quantize(columns, &s->bytes, part, at.row, at.col, at.n_cols);
    __syncthreads();
}

/* Block (x, y, z): square x of row y of strip z of them. */
template <Dtype SOURCE, bool GATHER>
static __global__ void __launch_bounds__(SQUARE_THREADS, REQUANTIZE_BLOCKS)
    requantize_kernel(Tiles columns, Squares a) {
    __shared__ Requantize s;
    const int row = blockIdx.y * TILE, col = (int)(blockIdx.z * gridDim.x + blockIdx.x) * TILE;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * SQUARE_WARP_ROWS;
    const int own = row + first + lane % SQUARE_WARP_ROWS;
    int mine = own >= a.M ? -1 : GATHER ? a.row_token[own] : own; /* on its way beside the count of rows */
    const int M = (int)rows_in_use(a.n_rows, a.M);
    if (row >= M || col >= a.C) return;
    if (own >= M) mine = -1;
    const SquareAt at = {row, col, min(M - row, (int)TILE), min(a.C - col, (int)TILE)};
    RawPart<SOURCE> raw;
    if (__all_sync(0xFFFFFFFFu, mine >= 0) && at.n_cols == TILE)
        load_part<true, GATHER>(&raw, a, at, mine);
    else
        load_part<false, GATHER>(&raw, a, at, mine);
    if (lane < SQUARE_WARP_ROWS)
        s.scale[first + lane] = mine >= 0 ? a.scale[(int64_t)(col / TILE) * a.scale_ld + mine] : 0;
    __syncthreads();
    if constexpr (SOURCE == DTYPE_E4M3) {
        if (!requantize_f16(columns, &s, raw, at)) {
            load_part<false, GATHER>(&raw, a, at, mine); /* kept, it would take a block's registers */
            requantize_bf16(columns, &s, raw, at);
        }
    } else {
        requantize_bf16(columns, &s, raw, at);
    }
    columns_store(columns, &s.bytes, row, col, at.n_rows, at.n_cols);
}

/* Squares go down a column: rows of the transpose are written one behind the other, and rows that several experts
 * gather come from L2. Those of E5M6 that lie side by side share lines of it, so they go down by the strip. */
template <Dtype SOURCE, bool GATHER> static void requantize(Tensor columns, const Squares *a, cudaStream_t stream) {
    const unsigned strip = SOURCE == DTYPE_E4M3 ? 1 : E5M6_STRIP;
    const dim3 grid(strip, (unsigned)ceil_div(a->M, TILE), (unsigned)ceil_div(a->C, strip * TILE));
    CHECK(grid.y < 65536 && grid.z < 65536, "quantize: tiles of %d x %d", a->M, a->C);
    requantize_kernel<SOURCE, GATHER><<<grid, SQUARE_THREADS, 0, stream>>>(tiles_of(columns), *a);
    LAUNCH_CHECK();
}

void cuda_requantize_columns(Tensor columns, Tensor x, const int32_t *row_token, int64_t M, const int32_t *n_rows,
                             cudaStream_t stream) {
    const int64_t C = x.shape[1], row_bytes = x.dtype == DTYPE_E4M3 ? x.ld : x.ld / 8 * 12;
    CHECK(M < INT32_MAX - TILE && row_bytes < INT32_MAX, "quantize: %lld rows of %lld bytes", (long long)M,
          (long long)row_bytes);
    const Squares a = {(const uint8_t *)x.data, x.scale,   n_rows, row_token, (int)M, (int)C,
                       (uint32_t)row_bytes,     x.scale_ld};
    CHECK(x.dtype == DTYPE_E4M3 || !row_token, "rows of %s are not gathered", dtype_name(x.dtype));
    auto f = row_token ? requantize<DTYPE_E4M3, true> : requantize<DTYPE_E4M3, false>;
    if (x.dtype == DTYPE_E5M6) f = requantize<DTYPE_E5M6, false>;
    f(columns, &a, stream);
}

void cuda_quantize(Quantized q, Tensor x, Stream s) {
    const bool wide = q.rows.dtype == DTYPE_E5M6, columns = !tensor_is_none(q.columns);
    CHECK(x.dtype != DTYPE_F32 && (!wide || x.dtype == DTYPE_BF16), "quantize: %s to %s", dtype_name(x.dtype),
          dtype_name(q.rows.dtype));
    if (tensor_numel(x) == 0) return;
    CHECK(x.dtype != DTYPE_BF16 || rows_are_packed(x), "quantize: rows of %lld at %p", (long long)x.ld, x.data);
    const cudaStream_t stream = cuda_stream(s);
    if (x.dtype == DTYPE_BF16) {
        auto f = columns ? quantize<DTYPE_BF16, false, true> : quantize<DTYPE_BF16, false, false>;
        if (wide) f = columns ? quantize<DTYPE_BF16, true, true> : quantize<DTYPE_BF16, true, false>;
        f(q, x, stream);
        return;
    }
    if (!tensor_is_none(q.rows)) {
        auto f = x.dtype == DTYPE_E4M3 ? quantize<DTYPE_E4M3, false, false> : quantize<DTYPE_E5M6, false, false>;
        f(q, x, stream);
    }
    if (columns) cuda_requantize_columns(q.columns, x, NULL, x.shape[0], x.n_rows, stream);
}

/* ---- what tiles and blocks mean ---------------------------------------------------------------------------------- */

template <typename Y, Dtype SOURCE, bool BLOCKS = false>
static __global__ void dequantize_kernel(Y *y, int64_t y_ld, Source x) {
    const int64_t per_row = x.C / LANE_COLUMNS, n = x.M * per_row;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / per_row, col = i % per_row * LANE_COLUMNS;
        float v[LANE_COLUMNS];
        raw_unpack(v, raw_load<SOURCE, BLOCKS>(x, row, col, true));
        store_pack(y + row * y_ld + col, pack_of<Y>(v));
    }
}

void cuda_dequantize(Tensor y, Tensor x, Stream s) {
    const unsigned grid = grid_for(ceil_div(tensor_numel(x), 256 * LANE_COLUMNS), 16);
    if (tensor_numel(x) == 0) return;
    ACT_SWITCH(y.dtype, Y, {
        auto kernel = x.dtype == DTYPE_E4M3 ? dequantize_kernel<Y, DTYPE_E4M3> : dequantize_kernel<Y, DTYPE_E5M6>;
        if (x.scale_layout == SCALE_BLOCK_128X128) kernel = dequantize_kernel<Y, DTYPE_E4M3, true>;
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
