/* What the CPU ops share: rows as `real`, exact BF16 rounding, a vectorisable exp. See tensor.h for `real`.
 *
 * An op reads a row with row_in() and writes one with row_out() + row_done(). For DTYPE_F32 these hand out the row
 * itself; for the others they convert through a buffer of the caller's stack, so that every loop of the reference is
 * written once, over `real`, and BF16 and FP8 exist by rounding exactly where a tensor is stored. */
#ifndef TRAIN_MOE_CPU_H
#define TRAIN_MOE_CPU_H

#include <math.h>
#include <string.h>

#include "kernels/base/ints.h"
#include "kernels/ops.h"
#include "tiles.h"

/* One source, compiled for the baseline, for AVX2 with FMA and for AVX-512; the loader picks one at start. Sums keep
 * the order of the source text in all of them, but vector widths differ: bits are equal on equal machines. Levels and
 * features, not names of processors: for "arch=haswell" gcc tests the exact model, and every other machine would run
 * the baseline. It cannot clone a function with an OpenMP region: put the row kernel into its own `static CPU_CLONES`
 * function and call that from the parallel loop. */
#if !defined(__x86_64__) || !defined(__GNUC__) || defined(__clang__) || defined(__SANITIZE_ADDRESS__)
#define CPU_CLONES
#elif __GNUC__ >= 12
#define CPU_HAS_CLONES
#define CPU_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CPU_HAS_CLONES
#define CPU_CLONES __attribute__((target_clones("default", "fma", "avx512f")))
#endif

static inline real bf16_to_real(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &wide, 4);
    return (real)f;
}

/* Round to nearest, ties to even; NaN stays NaN (quiet), infinities stay. */
static inline uint16_t real_to_bf16(real x) {
    float f = (float)x;
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x0040u);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

/* What an E4M3 number says, without a branch: see select_float. */
static inline real e4m3_to_real(uint8_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x80u) << 24, magnitude = bits & 0x7Fu;
    const uint32_t normal = (magnitude << 20) + ((127u - 7u) << 23);
    const uint32_t is_normal = 0u - (uint32_t)(magnitude >= 8), is_nan = 0u - (uint32_t)(magnitude == 0x7F);
    const float small = (float)(int32_t)magnitude * 0x1p-9f;
    uint32_t wide;
    memcpy(&wide, &small, 4);
    wide = (normal & is_normal) | (wide & ~is_normal) | (is_nan & 0x7FC00000u) | sign;
    float f;
    memcpy(&f, &wide, 4);
    return (real)f;
}

/* The rows of tiles, scale by scale. */
static inline void tiles_in(Tensor t, int64_t i, real *buf) {
    for (int64_t col = 0; col < t.shape[1]; col += SCALE_TILE) {
        const int64_t n = min_i64(t.shape[1] - col, SCALE_TILE);
        float part[SCALE_TILE];
        tile_read(part, t, i, col, n);
        for (int64_t j = 0; j < n; j++) buf[col + j] = (real)part[j];
    }
}

static inline void tiles_done(Tensor t, int64_t i, const real *row) {
    for (int64_t col = 0; col < t.shape[1]; col += SCALE_TILE) {
        const int64_t n = min_i64(t.shape[1] - col, SCALE_TILE);
        float part[SCALE_TILE];
        for (int64_t j = 0; j < n; j++) part[j] = tile_round((float)row[col + j]);
        tile_write(t, i, col, part, n);
    }
}

/* Row `i` of a tensor (its last dimension at leading index i) as shape[ndim-1] reals: the row itself, or buf filled. */
static inline const real *row_in(Tensor t, int64_t i, real *buf) {
    if (t.dtype == DTYPE_F32) return (const real *)t.data + i * t.ld;
    if (t.dtype != DTYPE_BF16) {
        tiles_in(t, i, buf);
        return buf;
    }
    const uint16_t *bits = (const uint16_t *)t.data + i * t.ld;
    int64_t n = t.shape[t.ndim - 1];
    for (int64_t j = 0; j < n; j++) buf[j] = bf16_to_real(bits[j]);
    return buf;
}

/* Where to write row `i`: the row itself, or buf. Call row_done() with the same pointer when it is complete. */
static inline real *row_out(Tensor t, int64_t i, real *buf) {
    return t.dtype == DTYPE_F32 ? (real *)t.data + i * t.ld : buf;
}

static inline void row_done(Tensor t, int64_t i, const real *row) {
    if (t.dtype == DTYPE_F32) return;
    if (t.dtype != DTYPE_BF16) {
        tiles_done(t, i, row);
        return;
    }
    uint16_t *bits = (uint16_t *)t.data + i * t.ld;
    int64_t n = t.shape[t.ndim - 1];
    for (int64_t j = 0; j < n; j++) bits[j] = real_to_bf16(row[j]);
}

/* Elements of the buffer that row_in and row_out of `t` need: its row, or 1 (unused) where it is f32 or none. */
static inline int64_t row_buf(Tensor t) {
    return t.dtype > DTYPE_F32 && t.shape[t.ndim - 1] > 0 ? t.shape[t.ndim - 1] : 1;
}

/* Rows that hold something: *n_rows where routing decides, else shape[0]. */
static inline int64_t rows_in_use(Tensor t) {
    return t.n_rows ? *t.n_rows : t.shape[0];
}

/* c ? a : b by bits. Where a branch with a constant stands, gcc follows the constant through the arithmetic behind it,
 * splits the path and then does not vectorise the loop. */
static inline float select_float(bool c, float a, float b) {
    uint32_t mask = 0u - (uint32_t)c, bits_a, bits_b;
    memcpy(&bits_a, &a, 4);
    memcpy(&bits_b, &b, 4);
    bits_b = (bits_a & mask) | (bits_b & ~mask);
    memcpy(&b, &bits_b, 4);
    return b;
}

/* e^x: infinity above 88.72, zero below -87.68. Plain arithmetic without a branch, so that loops over it vectorise
 * without fast-math: x = n ln 2 + r; 2^n from the exponent bits; e^r = 1 + (r + r^2 q(r)) on [-ln2/2, ln2/2] with q of
 * degree 4, interpolated at Chebyshev nodes. Error below 1.1 ulp (tests/kernels/test_cpu.c); NaN stays NaN. The double
 * build uses libm. */
static inline real exp_real(real x) {
#ifdef REAL_IS_DOUBLE
    return exp(x);
#else
    float clamped = select_float(x > 89.0f, 89.0f, select_float(x < -89.0f, -89.0f, x));
    float shifted = clamped * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the nearest integer stands in the low bits */
    float n = shifted - 12582912.0f;
    float r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f; /* ln 2 in two parts */
    float q = 1.39261836e-3f;
    q = q * r + 8.36317905e-3f;
    q = q * r + 4.16665546e-2f;
    q = q * r + 1.66665770e-1f;
    q = q * r + 0.5f;
    float p = 1.0f + (r + r * r * q);
    int32_t exponent;
    memcpy(&exponent, &shifted, 4);
    exponent -= 0x4B400000;
    int32_t half = exponent >> 1, rest = exponent - half; /* two factors, because n reaches 128 */
    uint32_t bits_half = (uint32_t)(half + 127) << 23;
    uint32_t bits_rest = exponent < -126 ? 0 : (uint32_t)(rest + 127) << 23; /* the float 0: flushes to zero */
    float scale_half, scale_rest;
    memcpy(&scale_half, &bits_half, 4);
    memcpy(&scale_rest, &bits_rest, 4);
    return p * scale_half * scale_rest;
#endif
}

static inline real sigmoid_real(real x) {
    return (real)1 / ((real)1 + exp_real(-x));
}

/* The instruction set the clones run with: "AVX-512", "AVX2", "x86-64", or the architecture's name. */
const char *cpu_isa_name(void);

#endif
