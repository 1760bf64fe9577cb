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
    SQUARE_LD = TILE + 8 /* bf16: rows start in different banks */
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

/* ---- scales ------------------------------------------------------------------------------------------------------ */

/* See scale_pow2 in base/small_floats.c; `bits` are those of the largest magnitude. */
__device__ inline float scale_pow2(uint32_t bits, uint32_t max_fraction, int max_exponent) {
    const int exponent = (int)((bits + 0x7FFFFFu - max_fraction) >> 23) - max_exponent;
    const float scale = __uint_as_float((uint32_t)max(exponent, 1) << 23);
    return bits == 0 ? 1.0f : bits >= 0x7F800000u ? __uint_as_float(0x7FC00000u) : scale;
}
__device__ inline float e4m3_scale(uint32_t amax_bits) {
    return scale_pow2(amax_bits, 0x600000u, 8);
}
__device__ inline float e5m6_scale(uint32_t amax_bits) {
    return scale_pow2(amax_bits, 0x7E0000u, 15);
}
/* 1 / scale, exactly: a power of two, or NaN. */
__device__ inline float inverse_pow2(float scale) {
    const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
    return scale == scale ? inverse : scale;
}

/* Bits of the largest magnitude of eight numbers, and of the sixteen lanes' 128. NaN is above all. */
__device__ inline uint32_t amax_bits(const float (&x)[LANE_COLUMNS]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; i++) most = max(most, __float_as_uint(x[i]) & 0x7FFFFFFFu);
    return most;
}
__device__ inline uint32_t lanes_max(uint32_t x) {
#pragma unroll
    for (int offset = TILE_LANES / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
    return x;
}

/* ---- elements ---------------------------------------------------------------------------------------------------- */

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
/* Two numbers from the low 16 bits: by way of f16, which holds every E4M3 number. */
__device__ inline float2 from_e4m3x2(uint32_t bits) {
    uint32_t halves = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)bits));
#endif
    float2 y;
    asm("{.reg .f16 low, high;\n"
        " mov.b32 {low, high}, %2;\n"
        " cvt.f32.f16 %0, low;\n"
        " cvt.f32.f16 %1, high;}"
        : "=f"(y.x), "=f"(y.y)
        : "r"(halves));
    return y;
}

__device__ inline uint32_t to_e5m6(float x) {
    const uint32_t bits = __float_as_uint(x), sign = bits >> 20 & 0x800u, magnitude = bits & 0x7FFFFFFFu;
    const uint32_t small = __float_as_uint(__uint_as_float(magnitude) + 0x1p3f) - __float_as_uint(0x1p3f);
    const uint32_t normal = ((magnitude + 0xFFFFu + (magnitude >> 17 & 1u)) >> 17) - ((127u - 15u) << 6);
    const uint32_t rounded = magnitude >= 0x477E0000u ? 0x7BFu : magnitude < 0x38800000u ? small : normal;
    return magnitude > 0x7F800000u ? 0x7FFu : sign | rounded;
}
__device__ inline float from_e5m6(uint32_t bits) {
    const uint32_t sign = bits << 20 & 0x80000000u, magnitude = bits & 0x7FFu;
    const float small = (float)magnitude * 0x1p-20f, normal = __uint_as_float((magnitude << 17) + ((127u - 15u) << 23));
    const float x = magnitude == 0x7FFu ? __uint_as_float(0x7FC00000u) : magnitude < 0x40u ? small : normal;
    return __uint_as_float(__float_as_uint(x) | sign);
}

/* ---- eight columns of a row -------------------------------------------------------------------------------------- */

/* As they lie in memory. Kernels load several before they use the first: a store that may alias holds loads back. */
template <Dtype SOURCE> struct RawColumns {
    uint32_t word[SOURCE == DTYPE_BF16 ? 4 : SOURCE == DTYPE_E4M3 ? 2 : 3];
    float scale;
};

/* `col` is a multiple of 8. Columns that do not exist (!has) are zero. */
template <Dtype SOURCE>
__device__ inline RawColumns<SOURCE> raw_load(const Source &x, int64_t row, int64_t col, bool has) {
    RawColumns<SOURCE> raw = {};
    if (!has) return raw;
    if constexpr (SOURCE == DTYPE_BF16) {
        const uint4 v = *(const uint4 *)((const bf16 *)x.data + row * x.ld + col);
        raw.word[0] = v.x, raw.word[1] = v.y, raw.word[2] = v.z, raw.word[3] = v.w;
    } else {
        raw.scale = x.scale[col / TILE * x.scale_ld + row];
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
        const uint32_t bits[8] = {a >> 20, a >> 8, a << 4 | b >> 28, b >> 16, b >> 4, b << 8 | c >> 24, c >> 12, c};
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = from_e5m6(bits[i] & 0xFFFu) * raw.scale;
    }
}

/* As bf16 keeps them. */
__device__ inline void columns_round(float (&x)[LANE_COLUMNS]) {
    const Pack<bf16, LANE_COLUMNS> v = pack_of<bf16>(x);
    unpack(x, v);
}

/* A row tile, of which this lane has eight columns; all lanes of the warp call it. A lane whose columns do not exist
 * says so by !has, and has zeros. */
__device__ inline void row_tile_store(const Tiles &q, int64_t row, int64_t col, const float (&x)[LANE_COLUMNS],
                                      bool has) {
    const float scale = e4m3_scale(lanes_max(amax_bits(x))), inverse = inverse_pow2(scale);
    if (!has) return;
    const uint2 bits = {e4m3x4(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse),
                        e4m3x4(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse)};
    *(uint2 *)(q.data + row * q.ld + col) = bits;
    if (col % TILE == 0) q.scale[col / TILE * q.scale_ld + row] = scale;
}
__device__ inline void row_tile_store_e5m6(const Tiles &q, int64_t row, int64_t col, const float (&x)[LANE_COLUMNS],
                                           bool has) {
    const float scale = e5m6_scale(lanes_max(amax_bits(x))), inverse = inverse_pow2(scale);
    if (!has) return;
    uint32_t v[8], *word = (uint32_t *)q.data + (row * q.ld + col) / 8 * 3;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = to_e5m6(x[i] * inverse);
    word[0] = v[0] << 20 | v[1] << 8 | v[2] >> 4;
    word[1] = v[2] << 28 | v[3] << 16 | v[4] << 4 | v[5] >> 8;
    word[2] = v[5] << 24 | v[6] << 12 | v[7];
    if (col % TILE == 0) q.scale[col / TILE * q.scale_ld + row] = scale;
}

/* ---- a square's columns ------------------------------------------------------------------------------------------ */

typedef struct {
    union {
        alignas(16) bf16 row[TILE][SQUARE_LD];
        uint4 column[TILE][TILE / 16]; /* bytes of a column, sixteen at a time: see column_at */
    };
    uint32_t amax[4][TILE / 2]; /* of two columns, 16 bits each */
} Square;

/* This thread's row of a pass. */
__device__ inline int square_row(int pass) {
    return pass * SQUARE_ROWS + threadIdx.x / TILE_LANES;
}

__device__ inline void square_put(Square *square, int r, int c, const float (&x)[LANE_COLUMNS]) {
    *(Pack<bf16, LANE_COLUMNS> *)&square->row[r][c] = pack_of<bf16>(x);
}

__device__ inline void square_put(Square *square, int r, int c, const RawColumns<DTYPE_BF16> &raw) {
    *(uint4 *)&square->row[r][c] = make_uint4(raw.word[0], raw.word[1], raw.word[2], raw.word[3]);
}

/* Bytes [16 i, 16 i + 16) of column c: pairs of columns have them in different banks. */
__device__ inline uint4 *column_at(Square *square, int c, int i) {
    return &square->column[c][i ^ c / 2 % 8];
}

/* The tiles of the square's columns into q, the transpose: column c is row col + c of q, its first element at `row`.
 * All SQUARE_THREADS call it, with the square complete (it synchronises first); n_rows is a multiple of 16, what the
 * square lacks is zero in it. The bytes go through the square's own memory, so that whole rows of q leave at once. Call
 * __syncthreads before the square is filled again. */
__device__ inline void square_columns_store(const Tiles &q, Square *square, int64_t row, int64_t col, int n_rows,
                                            int n_cols) {
    const int pair = threadIdx.x % 64, quarter = threadIdx.x / 64, first = quarter * 32;
    __syncthreads();
    uint32_t two[32], most = 0; /* magnitudes of bf16 in the order of integers, two at a time */
#pragma unroll
    for (int r = 0; r < 32; r++) {
        two[r] = *(const uint32_t *)&square->row[first + r][2 * pair];
        most = __vmaxu2(most, two[r] & 0x7FFF7FFFu);
    }
    square->amax[quarter][pair] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) most = __vmaxu2(most, square->amax[i][pair]);
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const int c = 2 * pair + side;
        const float scale = e4m3_scale(side ? most & 0xFFFF0000u : most << 16), inverse = inverse_pow2(scale);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x[4];
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const uint32_t bits = two[half * 16 + i * 4 + k];
                    x[k] = __uint_as_float(side ? bits & 0xFFFF0000u : bits << 16) * inverse;
                }
                word[i] = e4m3x4(x[0], x[1], x[2], x[3]);
            }
            *column_at(square, c, quarter * 2 + half) = make_uint4(word[0], word[1], word[2], word[3]);
        }
        if (quarter == 0 && c < n_cols) q.scale[row / TILE * q.scale_ld + col + c] = scale;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < TILE * TILE / 16 / SQUARE_THREADS; k++) {
        const int at = k * SQUARE_THREADS + threadIdx.x, c = at / (TILE / 16), i = at % (TILE / 16);
        if (c < n_cols && i * 16 < n_rows)
            *(uint4 *)(q.data + (col + c) * q.ld + row + i * 16) = *column_at(square, c, i);
    }
}

#endif
