/* The small floating-point formats of weight files: exact conversions to and from float. Floor 0.
 *
 *   bf16   1 sign, 8 exponent, 7 fraction bits: the upper half of a float
 *   f16    1, 5, 10: IEEE half
 *   e4m3   1, 4, 3: bias 7, no infinities; 448 (0x7E) is the largest number, 0x7F is NaN, the smallest is 2^-9
 *   e5m6   1, 5, 6: the upper 12 bits of an IEEE half; 65024 (0x7BF) is the largest number, 0x7FF is NaN, no infinities
 *
 * From float: to the nearest, ties to even; NaN stays NaN. */
#ifndef TRAIN_MOE_SMALL_FLOATS_H
#define TRAIN_MOE_SMALL_FLOATS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { SCALE_BLOCK = 128 };
#define E4M3_MAX 448.0f
#define E5M6_MAX 65024.0f

float float_from_bf16(uint16_t bits);
float float_from_f16(uint16_t bits);
float float_from_e4m3(uint8_t bits);
float float_from_e5m6(uint16_t bits); /* the low 12 bits */

/* Beyond the largest bf16: infinity. */
uint16_t bf16_from_float(float x);
/* Beyond 448, infinities included: 448 with the sign (saturating). */
uint8_t e4m3_from_float(float x);
/* Beyond 65024: 65024 with the sign. */
uint16_t e5m6_from_float(float x);

/* Eight values of 12 bits in three words, the first in the top bits of the first word. */
void e5m6_pack(uint32_t words[3], const uint16_t bits[8]);
void e5m6_unpack(uint16_t bits[8], const uint32_t words[3]);

/* The scale of a tile whose largest magnitude is amax, so that amax / scale fits the format (V3 3.3.2). There is no
 * floor under amax: gradients of 1e-12 keep their digits. A tile of zeros has scale 1; an amax that is infinite or NaN
 * gives NaN, which every product with the tile then shows.
 *   pow2     the smallest power of two that fits, at least 2^-126: multiplying with it and its inverse is exact
 *   nearest  amax / 448; 1 where that is no normal float */
float e4m3_scale_pow2(float amax);
float e4m3_scale_nearest(float amax);
float e5m6_scale_pow2(float amax);
/* The largest magnitude of n numbers, NaN above all. */
float amax_of(const float *x, int64_t n);

/* The scales of a matrix in blocks of 128 x 128: w is about e4m3 * scale. Blocks at the edges are partial; what they
 * lack counts as zero.
 *   scale  (ceil(rows/128), ceil(cols/128))  written: e4m3_scale_nearest of each block
 *   w      (rows, cols), finite */
void e4m3_block_scales(float *scale, const float *w, int64_t rows, int64_t cols);
/* q = e4m3(w / scale): rows [first, first + n) of the matrix; q and w point at the first of them.
 * Off by at most |w| / 16 where |w| >= scale / 64, by scale / 1024 below (and a rounding of float). */
void e4m3_block_quantize(uint8_t *q, const float *w, const float *scale, int64_t first, int64_t n, int64_t cols);

#ifdef __cplusplus
}
#endif
#endif
