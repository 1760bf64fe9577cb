/* The small floating-point formats of weight files: exact conversions to and from float. Floor 0.
 *
 *   bf16   1 sign, 8 exponent, 7 fraction bits: the upper half of a float
 *   f16    1, 5, 10: IEEE half
 *   e4m3   1, 4, 3: bias 7, no infinities; 448 (0x7E) is the largest number, 0x7F is NaN, the smallest is 2^-9
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

float float_from_bf16(uint16_t bits);
float float_from_f16(uint16_t bits);
float float_from_e4m3(uint8_t bits);

/* Beyond the largest bf16: infinity. */
uint16_t bf16_from_float(float x);
/* Beyond 448, infinities included: 448 with the sign (saturating). */
uint8_t e4m3_from_float(float x);

/* The scales of a matrix in blocks of 128 x 128: w is about e4m3 * scale. Blocks at the edges are partial; what they
 * lack counts as zero.
 *   scale  (ceil(rows/128), ceil(cols/128))  written: amax / 448 of each block; 1 where amax is 0 or so small that
 *          amax / 448 is no normal float
 *   w      (rows, cols), finite */
void e4m3_block_scales(float *scale, const float *w, int64_t rows, int64_t cols);
/* q = e4m3(w / scale): rows [first, first + n) of the matrix; q and w point at the first of them.
 * Off by at most |w| / 16 where |w| >= scale / 64, by scale / 1024 below (and a rounding of float). */
void e4m3_block_quantize(uint8_t *q, const float *w, const float *scale, int64_t first, int64_t n, int64_t cols);

#ifdef __cplusplus
}
#endif
#endif
