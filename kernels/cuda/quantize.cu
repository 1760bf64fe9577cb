/* As cpu/quantize.c: a block of threads a square of 128 x 128. Rows leave from registers. Columns of a bf16 matrix
 * come from the same registers by way of shared memory, so x is read once for both; columns of tiles have a kernel of
 * their own, which copies the next square's bytes into shared memory while it works on this one. */
#include "blocks.cuh"

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

enum {
    ROWS_PASSES = 4, /* of a block that makes rows of E4M3 alone */
    WIDE_WORDS = TILE / 8 * 3,
    REQUANTIZE_STAGES = 2
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
    const int PASSES = COLUMNS || WIDE_ROWS ? (int)SQUARE_PASSES : (int)ROWS_PASSES;
    const int64_t across = ceil_div(x.shape[1], TILE), blocks = ceil_div(x.shape[0], PASSES * SQUARE_ROWS) * across;
    CHECK(blocks <= INT32_MAX, "quantize: %lld squares", (long long)blocks);
    quantize_kernel<SOURCE, WIDE_ROWS, COLUMNS, PASSES><<<(unsigned)blocks, SQUARE_THREADS, 0, stream>>>(
        tiles_of(q.rows), tiles_of(q.columns), source_of(x), (int)across);
    LAUNCH_CHECK();
}

/* ---- columns of tiles -------------------------------------------------------------------------------------------- */

/* A square of tiles as it lies in memory; of rows and columns that do not exist, zeros. */
template <Dtype SOURCE> struct RawSquare {
    static const int ROW_BYTES = SOURCE == DTYPE_E4M3 ? TILE : WIDE_WORDS * 4;
    alignas(16) uint32_t word[TILE][ROW_BYTES / 4];
    alignas(16) float scale[TILE];
};
template <Dtype SOURCE> struct Requantize {
    ColumnBytes bytes;
    RawSquare<SOURCE> stage[REQUANTIZE_STAGES];
    alignas(16) uint32_t factor[TILE]; /* see row_factors */
};

/* The squares of a matrix of M rows, of which row n is row row_token[n] of x, or, if that is negative, zero; NULL: row
 * n. */
typedef struct {
    const uint8_t *data;
    const float *scale;
    const int32_t *n_rows, *row_token;
    int M, C, row_bytes;
    int64_t scale_ld;
} Squares;

typedef struct {
    int row, col, n_rows, n_cols; /* elements */
} SquareAt;

/* Where a block is on its way through the squares: square `at` of row or column `outer` of them. E4M3: down a column of
 * squares, so that rows of the transpose are written one behind the other, and rows that several experts gather come
 * from L2. E5M6: along a row. */
typedef struct {
    int at, outer, inner; /* inner: how many there are in a row or column */
} SquareWalk;

__device__ static inline void walk_on(SquareWalk *walk, int n) {
    for (walk->at += n; walk->at >= walk->inner; walk->at -= walk->inner) walk->outer++;
}
template <Dtype SOURCE> __device__ static inline SquareAt square_of(const SquareWalk &walk, int M, int C) {
    const int row = (SOURCE == DTYPE_E4M3 ? walk.at : walk.outer) * TILE;
    const int col = (SOURCE == DTYPE_E4M3 ? walk.outer : walk.at) * TILE;
    return {row, col, min(M - row, (int)TILE), min(C - col, (int)TILE)};
}
__device__ static inline bool exists(const SquareAt &at) {
    return at.n_rows > 0 && at.n_cols > 0;
}

/* Rows of x that a thread copies for a square, and the one whose scale it copies; -1: zeros. CHUNK: bytes of a copy;
 * neighbouring threads copy neighbouring bytes. */
template <Dtype SOURCE, int CHUNK> struct SquareRows {
    static const int ROW_CHUNKS = RawSquare<SOURCE>::ROW_BYTES / CHUNK;
    static const int COPIES = TILE * ROW_CHUNKS / SQUARE_THREADS;
    int of_copy[COPIES], of_scale;
};

template <bool GATHER, Dtype SOURCE, int CHUNK>
__device__ static inline void find_rows(SquareRows<SOURCE, CHUNK> *rows, const Squares &a, const SquareAt &at) {
    const auto row_of = [&](int r) { return r >= at.n_rows ? -1 : GATHER ? a.row_token[at.row + r] : at.row + r; };
#pragma unroll
    for (int k = 0; k < rows->COPIES; k++)
        rows->of_copy[k] = row_of((k * SQUARE_THREADS + (int)threadIdx.x) / rows->ROW_CHUNKS);
    rows->of_scale = row_of(threadIdx.x);
}

template <Dtype SOURCE, int CHUNK>
__device__ static inline void fetch_square(RawSquare<SOURCE> *to, const Squares &a, const SquareAt &at,
                                           const SquareRows<SOURCE, CHUNK> &rows) {
    const int n_bytes = SOURCE == DTYPE_E4M3 ? at.n_cols : at.n_cols / 8 * 12;
    const uint8_t *data = a.data + (SOURCE == DTYPE_E4M3 ? at.col : at.col / 8 * 12);
#pragma unroll
    for (int k = 0; k < rows.COPIES; k++) {
        const int chunk = k * SQUARE_THREADS + threadIdx.x, byte = chunk % rows.ROW_CHUNKS * CHUNK;
        const bool has = rows.of_copy[k] >= 0 && byte < n_bytes;
        const uint8_t *from = data + (int64_t)max(rows.of_copy[k], 0) * a.row_bytes + (has ? byte : 0);
        const uint32_t into = shared_address(to->word) + chunk * CHUNK;
        if constexpr (CHUNK == 16)
            cp_async_16(into, from, has ? CHUNK : 0);
        else
            cp_async_4(into, from, has);
    }
    if (threadIdx.x < TILE)
        cp_async_4(shared_address(to->scale) + threadIdx.x * 4,
                   a.scale + at.col / TILE * a.scale_ld + max(rows.of_scale, 0), rows.of_scale >= 0);
    cp_async_commit();
}

/* Four columns of a row of the square. */
template <Dtype SOURCE> __device__ static inline uint2 read_four(const RawSquare<SOURCE> *square, int r, int lane) {
    float2 low, high;
    if constexpr (SOURCE == DTYPE_E4M3) {
        const uint32_t word = square->word[r][lane];
        low = from_e4m3x2(word & 0xFFFFu), high = from_e4m3x2(word >> 16);
    } else { /* 48 bits: one word and half of the next, or half of one and the next */
        const int odd = lane % 2, at = lane / 2 * 3 + odd;
        const uint32_t first = square->word[r][at], second = square->word[r][at + 1];
        low = from_f16x2(e5m6_halves(__funnelshift_l(second, first, odd * 16)));
        high = from_f16x2(e5m6_halves(odd ? second << 8 : __funnelshift_l(second, first, 24)));
    }
    const float scale = square->scale[r], x[4] = {low.x * scale, low.y * scale, high.x * scale, high.y * scale};
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
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * (TILE / SQUARE_WARPS);
    unsigned most = 0, least = 0xFFFFFFFFu;
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        const unsigned exponent = __float_as_uint(scale[i * 32 + lane]) >> 23;
        most = max(most, exponent), least = min(least, exponent - 1); /* 0 becomes the largest */
    }
    const int largest = (int)__reduce_max_sync(0xFFFFFFFFu, most);
    const int smallest = (int)__reduce_min_sync(0xFFFFFFFFu, least) + 1; /* 0: there is none */
    if (smallest != 0 && (largest - smallest > FACTOR_REACH || largest > 254 || largest < 32)) return -1;
    if (lane < TILE / SQUARE_WARPS) {
        const int exponent = (int)(__float_as_uint(scale[first + lane]) >> 23);
        const int mine = exponent == 0 ? 0 : (exponent - largest + FACTOR_TOP + F16_BIAS) << 10;
        factor[first + lane] = (uint32_t)mine * 0x10001u;
    }
    __syncwarp();
    return largest;
}

__device__ static inline uint2 read_four_f16(const RawSquare<DTYPE_E4M3> *square, const uint32_t *factor, int r,
                                             int lane) {
    const uint32_t word = square->word[r][lane];
    return make_uint2(f16x2_product(f16x2_of_e4m3x2(word & 0xFFFFu), factor[r]),
                      f16x2_product(f16x2_of_e4m3x2(word >> 16), factor[r]));
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
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        const uint32_t exponents = ((pair ? most.y : most.x) + BEHIND_1_75 * 0x10001u) & 31u * ONE * 0x10001u;
        const uint32_t factors = __vminu2((TOP + 8) * ONE * 0x10001u - exponents, 30 * ONE * 0x10001u);
        uint32_t low[4], high[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t y[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                y[k] = e4m3x2_of_f16x2(f16x2_product(pair ? x.row[i * 4 + k].y : x.row[i * 4 + k].x, factors));
            const uint32_t upper = y[0] | y[1] << 16, lower = y[2] | y[3] << 16;
            low[i] = __byte_perm(upper, lower, 0x6420), high[i] = __byte_perm(upper, lower, 0x7531);
        }
        const int c = lane * 4 + pair * 2;
        *column_at(bytes, c, lane % 8, warp) = make_uint4(low[0], low[1], low[2], low[3]);
        *column_at(bytes, c + 1, lane % 8, warp) = make_uint4(high[0], high[1], high[2], high[3]);
        if (warp == pair && c < at.n_cols) {
            const int low_exponent = (int)(exponents & 0xFFFFu) / ONE, high_exponent = (int)(exponents >> 16) / ONE;
            const uint32_t one = 0x3F800000u;
            const uint32_t low_scale = (uint32_t)(low_exponent - TOP + largest) << 23,
                           high_scale = (uint32_t)(high_exponent - TOP + largest) << 23;
            *(uint2 *)(q.scale + at.row / TILE * q.scale_ld + at.col + c) =
                make_uint2(low_exponent ? low_scale : one, high_exponent ? high_scale : one);
        }
    }
    return true;
}

/* ---- the kernel ---- */

/* The columns of a square in shared memory, as bytes. */
template <Dtype SOURCE>
__device__ static inline void requantize_square(const Tiles &columns, Requantize<SOURCE> *s,
                                                const RawSquare<SOURCE> *square, const SquareAt &at) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * (TILE / SQUARE_WARPS);
    ColumnPart part;
    if constexpr (SOURCE == DTYPE_E4M3) {
        const int largest = row_factors(s->factor, square->scale);
        if (largest >= 0) {
#pragma unroll
            for (int r = 0; r < TILE / SQUARE_WARPS; r++)
                part.row[r] = read_four_f16(square, s->factor, first + r, lane);
            columns_begin(&s->bytes, part);
            __syncthreads();
            const bool done = columns_quantize_f16(columns, &s->bytes, part, largest, at);
            __syncthreads();
            if (done) return;
        }
    }
#pragma unroll
    for (int r = 0; r < TILE / SQUARE_WARPS; r++) part.row[r] = read_four(square, first + r, lane);
    columns_begin(&s->bytes, part);
    __syncthreads();
    columns_quantize(columns, &s->bytes, part, at.row, at.col, at.n_cols);
    __syncthreads();
}

template <Dtype SOURCE, int CHUNK, bool GATHER>
static __global__ void __launch_bounds__(SQUARE_THREADS, SOURCE == DTYPE_E4M3 ? 4 : 3)
    requantize_kernel(Tiles columns, Squares a) {
    extern __shared__ __align__(16) char shared[];
    Requantize<SOURCE> *s = (Requantize<SOURCE> *)shared;
    const int M = (int)rows_in_use(a.n_rows, a.M);
    SquareWalk walk = {0, 0, max(((SOURCE == DTYPE_E4M3 ? M : a.C) + TILE - 1) / TILE, 1)};
    SquareRows<SOURCE, CHUNK> rows;
    walk_on(&walk, blockIdx.x);
    SquareAt at = square_of<SOURCE>(walk, M, a.C);
    if (!exists(at)) return;
    find_rows<GATHER>(&rows, a, at);
    fetch_square(&s->stage[0], a, at, rows);
    walk_on(&walk, gridDim.x);
    SquareAt next = square_of<SOURCE>(walk, M, a.C);
    find_rows<GATHER>(&rows, a, next);
    for (int stage = 0;; stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads(); /* the square is there; the other stage and the bytes are free */
        if (exists(next)) fetch_square(&s->stage[stage ^ 1], a, next, rows);
        walk_on(&walk, gridDim.x);
        const SquareAt third = square_of<SOURCE>(walk, M, a.C);
        find_rows<GATHER>(&rows, a, third);
        requantize_square(columns, s, &s->stage[stage], at);
        columns_store(columns, &s->bytes, at.row, at.col, at.n_rows, at.n_cols);
        if (!exists(next)) return;
        at = next, next = third;
    }
}

template <Dtype SOURCE, int CHUNK, bool GATHER>
static void requantize(Tensor columns, const Squares *a, cudaStream_t stream) {
    static bool allowed;
    auto kernel = requantize_kernel<SOURCE, CHUNK, GATHER>;
    if (!allowed) allow_shared(kernel, sizeof(Requantize<SOURCE>));
    allowed = true;
    const int64_t n = ceil_div(a->M, TILE) * ceil_div(a->C, TILE);
    CHECK(n < INT32_MAX, "quantize: %lld squares", (long long)n);
    kernel<<<grid_for(n, SOURCE == DTYPE_E4M3 ? 4 : 3), SQUARE_THREADS, sizeof(Requantize<SOURCE>), stream>>>(
        tiles_of(columns), *a);
    LAUNCH_CHECK();
}

void cuda_requantize_columns(Tensor columns, Tensor x, const int32_t *row_token, int64_t M, const int32_t *n_rows,
                             cudaStream_t stream) {
    const int64_t C = x.shape[1], row_bytes = x.dtype == DTYPE_E4M3 ? x.ld : x.ld / 8 * 12;
    CHECK(M < INT32_MAX - TILE && row_bytes < INT32_MAX, "quantize: %lld rows of %lld bytes", (long long)M,
          (long long)row_bytes);
    const Squares a = {(const uint8_t *)x.data, x.scale, n_rows, row_token, (int)M, (int)C, (int)row_bytes, x.scale_ld};
    const bool packed = is_aligned(x.data) && row_bytes % 16 == 0 && C % 32 == 0;
    CHECK(x.dtype == DTYPE_E4M3 || !row_token, "rows of %s are not gathered", dtype_name(x.dtype));
    auto f = packed ? requantize<DTYPE_E5M6, 16, false> : requantize<DTYPE_E5M6, 4, false>;
    if (x.dtype == DTYPE_E4M3) f = packed ? requantize<DTYPE_E4M3, 16, false> : requantize<DTYPE_E4M3, 4, false>;
    if (row_token) f = packed ? requantize<DTYPE_E4M3, 16, true> : requantize<DTYPE_E4M3, 4, true>;
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
