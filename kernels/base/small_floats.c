/* See small_floats.h. */
#include "small_floats.h"

#include <float.h>
#include <math.h>
#include <string.h>

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* ---- bf16 -------------------------------------------------------------------------------------------------------- */

float float_from_bf16(uint16_t bits) {
    return float_of((uint32_t)bits << 16);
}

uint16_t bf16_from_float(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (uint16_t)(bits >> 16 | 0x0040u);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

/* ---- f16 --------------------------------------------------------------------------------------------------------- */

float float_from_f16(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, magnitude = bits & 0x7FFFu;
    float x;
    if (magnitude >= 0x7C00u)
        x = float_of(0x7F800000u | (magnitude & 0x3FFu) << 13);
    else if (magnitude < 0x0400u)
        x = (float)magnitude * 0x1p-24f; /* no implicit one */
    else
        x = float_of((magnitude << 13) + ((127u - 15u) << 23));
    return float_of(bits_of(x) | sign);
}

/* ---- e4m3 -------------------------------------------------------------------------------------------------------- */

float float_from_e4m3(uint8_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x80u) << 24, magnitude = bits & 0x7Fu;
    float x;
    if (magnitude == 0x7Fu)
        x = NAN;
    else if (magnitude < 0x08u)
        x = (float)magnitude * 0x1p-9f; /* no implicit one */
    else
        x = float_of((magnitude << 20) + ((127u - 7u) << 23));
    return float_of(bits_of(x) | sign);
}

uint8_t e4m3_from_float(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint8_t)(sign | 0x7Fu);
    if (magnitude >= 0x43E00000u) return (uint8_t)(sign | 0x7Eu); /* 448 */
    uint32_t rounded;
    if (magnitude < 0x3C800000u) /* below 2^-6 steps are 2^-9, which is the last place of a float at 2^14 */
        rounded = bits_of(float_of(magnitude) + 0x1p14f) - bits_of(0x1p14f);
    else
        rounded = ((magnitude + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20) - ((127u - 7u) << 3);
    return (uint8_t)(sign | rounded);
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static float block_scale(const float *w, int64_t rows, int64_t cols, int64_t ld) {
    float amax = 0;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++) amax = fmaxf(amax, fabsf(w[i * ld + j]));
    const float scale = amax / E4M3_MAX;
    return scale >= FLT_MIN ? scale : 1;
}

static int64_t at_most(int64_t n, int64_t limit) {
    return n < limit ? n : limit;
}

void e4m3_block_scales(float *scale, const float *w, int64_t rows, int64_t cols) {
    for (int64_t i = 0; i < rows; i += SCALE_BLOCK)
        for (int64_t j = 0; j < cols; j += SCALE_BLOCK)
            *scale++ =
                block_scale(w + i * cols + j, at_most(rows - i, SCALE_BLOCK), at_most(cols - j, SCALE_BLOCK), cols);
}

void e4m3_block_quantize(uint8_t *q, const float *w, const float *scale, int64_t first, int64_t n, int64_t cols) {
    const int64_t blocks = (cols + SCALE_BLOCK - 1) / SCALE_BLOCK;
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < cols; j++)
            q[i * cols + j] =
                e4m3_from_float(w[i * cols + j] / scale[(first + i) / SCALE_BLOCK * blocks + j / SCALE_BLOCK]);
}
