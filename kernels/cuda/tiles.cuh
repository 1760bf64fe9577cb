/* As cpu/tiles.h: numbers on their way into E4M3 and E5M6 tiles, with the same bits.
 *
 * Sixteen lanes hold the 128 columns of a row tile, eight each, so the largest magnitude is a butterfly of four steps.
 * Columns go through a square of 128 x 128 bf16 in shared memory; what is quantised is a bf16 always. */
#ifndef TRAIN_MOE_TILES_CUH
#define TRAIN_MOE_TILES_CUH

#include "common.cuh"

enum {
    TILE = SCALE_TILE,
    LANE_COLUMNS = 8,                 /* of a row tile */
    TILE_LANES = TILE / LANE_COLUMNS, /* 16: half a warp */
    SQUARE_THREADS = 256,
    SQUARE_ROWS = SQUARE_THREADS / TILE_LANES, /* that a block holds at once */
    SQUARE_PASSES = TILE / SQUARE_ROWS,
    SQUARE_WARPS = SQUARE_THREADS / 32,
    SQUARE_WARP_ROWS = TILE / SQUARE_WARPS, /* while columns are quantised */
    E5M6_BIAS = 15,
    BF16_FRACTION_BITS = 7
};

/* Tiles as kernels write them; data NULL: absent. */
typedef struct {
    uint8_t *data;
    float *scale;
    int64_t ld, scale_ld;
} Tiles;

static inline Tiles tiles_of(Tensor t) {
    const Tiles tiles = {(uint8_t *)t.data, t.scale, t.ld, t.scale_ld};
    return tiles;
}

/* A matrix of bf16 or tiles as kernels read it. */
typedef struct {
    const void *data;
    const float *scale;
    int64_t ld, scale_ld;
    const int32_t *n_rows;
    int64_t M, C;
} Source;

static inline Source source_of(Tensor t) {
    const Source x = {t.data, t.scale, t.ld, t.scale_ld, t.n_rows, t.shape[0], t.shape[1]};
    return x;
}

/* In quantize.cu: the tiles of x's columns. Row n < M of the matrix is row row_token[n] of x, or, if that is negative,
 * zero; row_token NULL: row n. n_rows bounds the rows, as a tensor's. */
void cuda_requantize_columns(Tensor columns, Tensor x, const int32_t *row_token, int64_t M, const int32_t *n_rows,
                             cudaStream_t stream);

/* ---- scales ------------------------------------------------------------------------------------------------------ */

/* A power of two, or NaN, and what numbers are multiplied with: its inverse, exactly; of a zero tile some number. */
typedef struct {
    float scale, inverse;
} TileScale;

/* See scale_pow2 in base/small_floats.c. amax: the largest magnitude, a bf16. */
__device__ inline TileScale scale_pow2(uint32_t amax, uint32_t max_fraction, int max_exponent) {
    const uint32_t bits = amax << 16, nan = 0x7FC00000u;
    const uint32_t exponent = (uint32_t)max((int)((bits + 0x7FFFFFu - max_fraction) >> 23) - max_exponent, 1) << 23;
    const bool is_finite = bits < 0x7F800000u;
    return {__uint_as_float(!is_finite  ? nan
                            : bits == 0 ? 0x3F800000u
                                        : exponent),
            __uint_as_float(is_finite ? (254u << 23) - exponent : nan)};
}
__device__ inline float e4m3_scale(uint32_t amax) {
    return scale_pow2(amax, 0x600000u, 8).scale;
}
/* The inverses of two such scales, as bf16, in half the instructions: what is subtracted from 262 is the exponent of
 * the magnitude, one more behind 1.75. */
__device__ inline uint32_t e4m3_inverses(uint32_t amax) {
    const uint32_t exponents = (amax + 0x001F001Fu) & 0x7F807F80u, is_nan = (amax + 0x00800080u) & 0x80008000u;
    return (0x83008300u - __vmaxu2(exponents, 0x04800480u)) | (is_nan - (is_nan >> 15));
}
/* One of two bf16, twice. */
__device__ inline uint32_t low_twice(uint32_t two) {
    return __byte_perm(two, 0, 0x1010);
}
__device__ inline uint32_t high_twice(uint32_t two) {
    return __byte_perm(two, 0, 0x3232);
}
__device__ inline TileScale e5m6_scale(uint32_t amax) {
    return scale_pow2(amax, 0x7E0000u, 15);
}

/* Magnitudes of bf16 are in the order of integers, NaN above all; here two at a time. The sign goes in an addition: the
 * pipe of multiplications has room where that of integers has none. */
__device__ inline uint32_t magnitudes(uint32_t two) {
    uint32_t y;
    asm("abs.bf16x2 %0, %1;" : "=r"(y) : "r"(two));
    return y;
}
__device__ inline uint32_t magnitudes_max(uint32_t most, uint32_t two) {
    return __vmaxu2(most, magnitudes(two));
}
/* The same of f16, whose NaN is 0x7FFF. */
__device__ inline uint32_t f16_magnitudes_max(uint32_t most, uint32_t two) {
    uint32_t y;
    asm("{.reg .b32 magnitudes;\n"
        " abs.f16x2 magnitudes, %2;\n"
        " max.NaN.f16x2 %0, %1, magnitudes;}"
        : "=r"(y)
        : "r"(most), "r"(two));
    return y;
}
__device__ inline uint32_t larger_of(uint32_t two) {
    return max(two >> 16, two & 0xFFFFu);
}

/* ---- elements ---------------------------------------------------------------------------------------------------- */

/* Two bf16, times powers of two: exact, but for numbers that every format here takes for zero. */
__device__ inline float2 times_pow2(uint32_t two, uint32_t factors) {
    const __nv_bfloat162 y = __hmul2(*(const __nv_bfloat162 *)&two, *(const __nv_bfloat162 *)&factors);
    const uint32_t bits = *(const uint32_t *)&y;
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u));
}
/* Two f32 that are bf16, as such. */
__device__ inline uint32_t bf16_pair(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

/* To the nearest, ties to even, saturating; NaN is 0x7F. The first is the low byte. */
__device__ inline uint32_t e4m3x2(float first, float second) {
    uint16_t y = 0;
#if __CUDA_ARCH__ >= 890 /* an older GPU is refused when the device is opened */
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(second), "f"(first));
#endif
    return y;
}
__device__ inline uint32_t e4m3x4(float a, float b, float c, float d) {
    return e4m3x2(a, b) | e4m3x2(c, d) << 16;
}
/* The same of two f16. */
__device__ inline uint32_t e4m3x2_of_f16x2(uint32_t halves) {
    uint16_t y = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(y) : "r"(halves));
#endif
    return y;
}
__device__ inline float2 from_f16x2(uint32_t halves) {
    float2 y;
    asm("{.reg .f16 low, high;\n"
        " mov.b32 {low, high}, %2;\n"
        " cvt.f32.f16 %0, low;\n"
        " cvt.f32.f16 %1, high;}"
        : "=f"(y.x), "=f"(y.y)
        : "r"(halves));
    return y;
}
/* Two numbers from the low 16 bits as f16, which holds every E4M3 number; and as f32. */
__device__ inline uint32_t f16x2_of_e4m3x2(uint32_t bits) {
    uint32_t halves = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)bits));
#endif
    return halves;
}
__device__ inline float2 from_e4m3x2(uint32_t bits) {
    return from_f16x2(f16x2_of_e4m3x2(bits));
}
__device__ inline uint32_t f16x2_product(uint32_t a, uint32_t b) {
    uint32_t y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

/* Two f16 that E5M6 holds exactly, the first in the high half: E5M6 is an f16 less its last four bits. Rounding is
 * that of an addition whose last place is that of E5M6, 2^-20 at the least. A tile's scale keeps its numbers in
 * range. */
__device__ inline float round_e5m6(float x) {
    const float power = __uint_as_float(__float_as_uint(x) & 0x7F800000u), one = fmaxf(power * 0x1p17f, 0x1p3f);
    return copysignf(__fsub_rn(__fadd_rn(fabsf(x), one), one), x);
}
__device__ inline uint32_t e5m6x2(float first, float second) {
    uint32_t halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(round_e5m6(first)), "f"(round_e5m6(second)));
    return halves;
}
/* The same in the low 24 bits; and back, from the high ones. */
__device__ inline uint32_t e5m6_bits(uint32_t halves) {
    return halves >> 8 & 0xFFF000u | halves >> 4 & 0xFFFu;
}
__device__ inline uint32_t e5m6_halves(uint32_t bits) {
    return bits >> 16 & 0xFFF0u | bits << 12 & 0xFFF00000u;
}

/* ---- eight columns of a row -------------------------------------------------------------------------------------- */

/* As they lie in memory. Kernels load several before they use the first: a store that may alias holds loads back. */
template <Dtype SOURCE> struct RawColumns {
    uint32_t word[SOURCE == DTYPE_BF16 ? 4 : SOURCE == DTYPE_E4M3 ? 2 : 3];
    float scale;
};

/* `col` is a multiple of 8. Columns that do not exist (!has) are zero. BLOCKS: the scales are those of blocks. */
template <Dtype SOURCE, bool BLOCKS = false>
__device__ inline RawColumns<SOURCE> raw_load(const Source &x, int64_t row, int64_t col, bool has) {
    RawColumns<SOURCE> raw = {};
    if (!has) return raw;
    if constexpr (SOURCE == DTYPE_BF16) {
        const uint4 v = *(const uint4 *)((const bf16 *)x.data + row * x.ld + col);
        raw.word[0] = v.x, raw.word[1] = v.y, raw.word[2] = v.z, raw.word[3] = v.w;
    } else {
        raw.scale = x.scale[BLOCKS ? row / TILE * x.scale_ld + col / TILE : col / TILE * x.scale_ld + row];
        if constexpr (SOURCE == DTYPE_E4M3) {
            const uint2 v = *(const uint2 *)((const uint8_t *)x.data + row * x.ld + col);
            raw.word[0] = v.x, raw.word[1] = v.y;
        } else {
            const uint32_t *word = (const uint32_t *)x.data + (row * x.ld + col) / 8 * 3;
#pragma unroll
            for (int i = 0; i < 3; i++) raw.word[i] = word[i];
        }
    }
    return raw;
}

/* What they mean. */
template <Dtype SOURCE> __device__ inline void raw_unpack(float (&y)[LANE_COLUMNS], const RawColumns<SOURCE> &raw) {
    if constexpr (SOURCE == DTYPE_BF16) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            y[2 * i] = __uint_as_float(raw.word[i] << 16);
            y[2 * i + 1] = __uint_as_float(raw.word[i] & 0xFFFF0000u);
        }
    } else if constexpr (SOURCE == DTYPE_E4M3) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = from_e4m3x2(raw.word[i / 2] >> (i % 2 * 16) & 0xFFFFu);
            y[2 * i] = two.x * raw.scale;
            y[2 * i + 1] = two.y * raw.scale;
        }
    } else {
        const uint32_t a = raw.word[0], b = raw.word[1], c = raw.word[2];
        const uint32_t halves[4] = {e5m6_halves(a), e5m6_halves(__funnelshift_l(b, a, 24)),
                                    e5m6_halves(__funnelshift_l(c, b, 16)), e5m6_halves(c << 8)};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 two = from_f16x2(halves[i]);
            y[2 * i] = two.x * raw.scale;
            y[2 * i + 1] = two.y * raw.scale;
        }
    }
}

/* Eight columns as bf16. */
typedef Pack<bf16, LANE_COLUMNS> LanePack;

__device__ inline LanePack lane_pack(const RawColumns<DTYPE_BF16> &raw) {
    LanePack x;
    *(uint4 *)x.x = make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]);
    return x;
}

/* Their largest magnitude; and that of the sixteen lanes of a row tile, two tiles at a time. */
__device__ inline uint32_t amax_of(const LanePack &x) {
    const uint32_t *word = (const uint32_t *)x.x;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 2; i++) most = magnitudes_max(most, word[i]);
    return larger_of(most);
}
__device__ inline uint32_t lanes_max(uint32_t two) {
#pragma unroll
    for (int offset = TILE_LANES / 2; offset > 0; offset /= 2)
        two = __vmaxu2(two, __shfl_xor_sync(0xFFFFFFFFu, two, offset));
    return two;
}

/* As E4M3, once multiplied. */
__device__ inline uint2 e4m3_bytes(const LanePack &x, uint32_t inverse) {
    const uint32_t *two = (const uint32_t *)x.x;
    float2 y[LANE_COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 2; i++) y[i] = times_pow2(two[i], inverse);
    return make_uint2(e4m3x4(y[0].x, y[0].y, y[1].x, y[1].y), e4m3x4(y[2].x, y[2].y, y[3].x, y[3].y));
}

/* A row tile, of which this lane has eight columns; all lanes of the warp call it. A lane whose columns do not exist
 * says so by !has, and has zeros. */
__device__ inline void row_tile_store(const Tiles &q, int64_t row, int64_t col, const LanePack &x, bool has) {
    const uint32_t amax = lanes_max(amax_of(x));
    const uint2 bytes = e4m3_bytes(x, low_twice(e4m3_inverses(amax)));
    if (!has) return;
    *(uint2 *)(q.data + row * q.ld + col) = bytes;
    if (col % TILE == 0) q.scale[col / TILE * q.scale_ld + row] = e4m3_scale(amax);
}
/* The same for tiles at two columns of one row. */
__device__ inline void row_tile_store(const Tiles &q, int64_t row, int64_t col_x, const LanePack &x, int64_t col_y,
                                      const LanePack &y, bool has) {
    const uint32_t amax = lanes_max(amax_of(x) | amax_of(y) << 16), inverses = e4m3_inverses(amax);
    const uint2 x_bytes = e4m3_bytes(x, low_twice(inverses)), y_bytes = e4m3_bytes(y, high_twice(inverses));
    if (!has) return;
    uint8_t *out = q.data + row * q.ld;
    *(uint2 *)(out + col_x) = x_bytes;
    *(uint2 *)(out + col_y) = y_bytes;
    if (col_x % TILE > 0) return;
    q.scale[col_x / TILE * q.scale_ld + row] = e4m3_scale(amax & 0xFFFFu);
    q.scale[col_y / TILE * q.scale_ld + row] = e4m3_scale(amax >> 16);
}

/* Two numbers of a tile of E5M6 in the low 24 bits, by way of f16. */
__device__ inline uint32_t e5m6_bits_of(uint32_t two, const TileScale &s) {
    const float2 y = times_pow2(two, bf16_pair(s.inverse, s.inverse));
    return e5m6_bits(e5m6x2(y.x, y.y));
}
/* The same, where both are normal in E5M6: a bf16 less its last bit and with another bias, `bias` more than it, of
 * which there are two. */
__device__ inline uint32_t e5m6_bits_of_normal(uint32_t two, uint32_t bias) {
    enum { MAGNITUDES = 0x07FF07FF, FIRST = 0xFFF000 };
    const uint32_t to_even = two >> 1 & 0x00010001u, rounded = magnitudes(two) + to_even - bias;
    const uint32_t numbers = rounded >> 1 & MAGNITUDES | two >> 4 & ~MAGNITUDES;
    return numbers << 12 & FIRST | numbers >> 16 & ~FIRST;
}

/* The three words of a lane's eight columns in E5M6, and the scale. Few warps have a number that is not normal. */
__device__ inline RawColumns<DTYPE_E5M6> row_tile_e5m6(const LanePack &x) {
    const TileScale s = e5m6_scale(lanes_max(amax_of(x)));
    const uint32_t *two = (const uint32_t *)x.x;
    uint32_t least = 0xFFFFFFFFu;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS / 2; i++) least = __vminu2(least, magnitudes(two[i]));
    const int bias = (int)(__float_as_uint(s.scale) >> 23) - E5M6_BIAS, least_normal = (bias + 1) << BF16_FRACTION_BITS;
    const bool is_odd = bias < 0 || s.scale != s.scale || (int)min(least >> 16, least & 0xFFFFu) < least_normal;
    uint32_t v[LANE_COLUMNS / 2];
    if (__any_sync(0xFFFFFFFFu, is_odd)) {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++) v[i] = e5m6_bits_of(two[i], s);
    } else {
#pragma unroll
        for (int i = 0; i < LANE_COLUMNS / 2; i++)
            v[i] = e5m6_bits_of_normal(two[i], (uint32_t)bias * (0x10001u << BF16_FRACTION_BITS));
    }
    RawColumns<DTYPE_E5M6> raw;
    raw.word[0] = __byte_perm(v[1], v[0], 0x6542);
    raw.word[1] = __byte_perm(v[2], v[1], 0x5421);
    raw.word[2] = __byte_perm(v[3], v[2], 0x4210);
    raw.scale = s.scale;
    return raw;
}

/* ---- a square's columns ------------------------------------------------------------------------------------------ */

/* Columns on their way into tiles: bytes of a column, sixteen at a time (see column_at), and the largest magnitudes
 * that each warp saw in its rows, of four columns a lane. */
typedef struct {
    uint4 column[TILE][TILE / 16];
    uint2 amax[SQUARE_WARPS][32];
} ColumnBytes;

/* The same behind a square of bf16, in whose place the bytes are written. */
typedef struct {
    union {
        alignas(16) bf16 row[TILE][TILE];
        uint4 column[TILE][TILE / 16];
    };
    uint2 amax[SQUARE_WARPS][32];
} Square;

/* This thread's row of a pass. */
__device__ inline int square_row(int pass) {
    return pass * SQUARE_ROWS + threadIdx.x / TILE_LANES;
}

__device__ inline void square_put(Square *square, int r, int c, const LanePack &x) {
    *(LanePack *)&square->row[r][c] = x;
}

/* A thread's part of a square while its columns are quantised: four columns of the sixteen rows of its warp. */
typedef struct {
    uint2 row[SQUARE_WARP_ROWS]; /* bf16 */
} ColumnPart;

__device__ inline ColumnPart square_part(const Square *square) {
    ColumnPart x;
#pragma unroll
    for (int r = 0; r < SQUARE_WARP_ROWS; r++)
        x.row[r] = *(const uint2 *)&square->row[threadIdx.x / 32 * SQUARE_WARP_ROWS + r][threadIdx.x % 32 * 4];
    return x;
}

/* Bytes [16 i, 16 i + 16) of column c; four: c / 4 % 8. Lanes that have neighbouring fours of columns find them in
 * different banks. */
template <typename Bytes> __device__ inline uint4 *column_at(Bytes *bytes, int c, int four, int i) {
    return &bytes->column[c][i ^ four];
}

/* Three steps, with a barrier before each but the first: what a warp's rows have at most; the columns' scales, and the
 * bytes, in place of the square; the bytes to memory. */
template <typename Bytes> __device__ inline void columns_begin(Bytes *bytes, const ColumnPart &x) {
    uint2 most = {0, 0};
#pragma unroll
    for (int r = 0; r < SQUARE_WARP_ROWS; r++) {
        most.x = magnitudes_max(most.x, x.row[r].x);
        most.y = magnitudes_max(most.y, x.row[r].y);
    }
    bytes->amax[threadIdx.x / 32][threadIdx.x % 32] = most;
}

/* Of this lane's four columns. */
template <typename Bytes> __device__ inline uint2 columns_amax(const Bytes *bytes) {
    uint2 most = {0, 0};
#pragma unroll
    for (int w = 0; w < SQUARE_WARPS; w++) {
        most.x = __vmaxu2(most.x, bytes->amax[w][threadIdx.x % 32].x);
        most.y = __vmaxu2(most.y, bytes->amax[w][threadIdx.x % 32].y);
    }
    return most;
}

/* q is the transpose: column c is row col + c of q, its first element at `row`. */
template <typename Bytes>
__device__ inline void columns_quantize(const Tiles &q, Bytes *bytes, const ColumnPart &x, int64_t row, int64_t col,
                                        int n_cols) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint2 most = columns_amax(bytes);
    float *scale = q.scale + row / TILE * q.scale_ld + col + lane * 4;
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        const uint32_t two = pair ? most.y : most.x, inverse = e4m3_inverses(two);
        uint32_t low_word[4], high_word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 y[4];
#pragma unroll
            for (int k = 0; k < 4; k++) y[k] = times_pow2(pair ? x.row[i * 4 + k].y : x.row[i * 4 + k].x, inverse);
            low_word[i] = e4m3x4(y[0].x, y[1].x, y[2].x, y[3].x);
            high_word[i] = e4m3x4(y[0].y, y[1].y, y[2].y, y[3].y);
        }
        const int c = lane * 4 + pair * 2;
        *column_at(bytes, c, lane % 8, warp) = make_uint4(low_word[0], low_word[1], low_word[2], low_word[3]);
        *column_at(bytes, c + 1, lane % 8, warp) = make_uint4(high_word[0], high_word[1], high_word[2], high_word[3]);
        if (warp == pair && c < n_cols)
            *(float2 *)(scale + pair * 2) = make_float2(e4m3_scale(two & 0xFFFFu), e4m3_scale(two >> 16));
    }
}

/* n_rows is a multiple of 16; what the square lacks is zero in it. */
template <typename Bytes>
__device__ inline void columns_store(const Tiles &q, Bytes *bytes, int64_t row, int64_t col, int n_rows, int n_cols) {
    const int i = threadIdx.x % (TILE / 16), own = threadIdx.x / (TILE / 16), four = threadIdx.x / 32;
    uint8_t *out = q.data + (col + own) * q.ld + row + i * 16;
    if (i * 16 >= n_rows) return;
#pragma unroll
    for (int first = 0; first < TILE; first += SQUARE_THREADS / (TILE / 16), out += SQUARE_THREADS / (TILE / 16) * q.ld)
        if (first + own < n_cols) *(uint4 *)out = *column_at(bytes, first + own, four, i);
}

#endif
