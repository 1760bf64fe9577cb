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

/* ---- e5m6 -------------------------------------------------------------------------------------------------------- */

float float_from_e5m6(uint16_t bits) {
    if ((bits & 0x7FFu) == 0x7FFu) return NAN;
    return float_from_f16((uint16_t)((bits & 0xFFFu) << 4));
}

uint16_t e5m6_from_float(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 20 & 0x800u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return (uint16_t)(sign | 0x7FFu);
    if (magnitude >= 0x477E0000u) return (uint16_t)(sign | 0x7BFu); /* 65024 */
    uint32_t rounded;
    if (magnitude < 0x38800000u) /* below 2^-14 steps are 2^-20, which is the last place of a float at 2^3 */
        rounded = bits_of(float_of(magnitude) + 0x1p3f) - bits_of(0x1p3f);
    else
        rounded = ((magnitude + 0xFFFFu + (magnitude >> 17 & 1u)) >> 17) - ((127u - 15u) << 6);
    return (uint16_t)(sign | rounded);
}

void e5m6_pack(uint32_t words[3], const uint16_t bits[8]) {
    uint32_t v[8];
    for (int i = 0; i < 8; i++) v[i] = bits[i] & 0xFFFu;
    words[0] = v[0] << 20 | v[1] << 8 | v[2] >> 4;
    words[1] = v[2] << 28 | v[3] << 16 | v[4] << 4 | v[5] >> 8;
    words[2] = v[5] << 24 | v[6] << 12 | v[7];
}

void e5m6_unpack(uint16_t bits[8], const uint32_t words[3]) {
    const uint32_t a = words[0], b = words[1], c = words[2];
    const uint32_t v[8] = {a >> 20, a >> 8, a << 4 | b >> 28, b >> 16, b >> 4, b << 8 | c >> 24, c >> 12, c};
    for (int i = 0; i < 8; i++) bits[i] = (uint16_t)(v[i] & 0xFFFu);
}

/* ---- scales ------------------------------------------------------------------------------------------------------ */

/* The exponent k of the smallest 2^k * (1 + max_fraction) * 2^max_exponent that is not below amax: adding what the
 * fraction lacks to a whole carries into the exponent exactly where amax has the larger fraction. */
static float scale_pow2(float amax, uint32_t max_fraction, int max_exponent) {
    const uint32_t bits = bits_of(amax);
    if (bits == 0) return 1;
    if (bits >= 0x7F800000u) return NAN;
    const int exponent = (int)((bits + 0x7FFFFFu - max_fraction) >> 23) - max_exponent;
    return float_of((uint32_t)(exponent < 1 ? 1 : exponent) << 23);
}

float e4m3_scale_pow2(float amax) {
    return scale_pow2(amax, 0x600000u, 8); /* 448 = 1.75 * 2^8 */
}

float e5m6_scale_pow2(float amax) {
    return scale_pow2(amax, 0x7E0000u, 15); /* 65024 = (2 - 2^-6) * 2^15 */
}

float e4m3_scale_nearest(float amax) {
    const float scale = amax / E4M3_MAX;
    if (!isfinite(scale)) return NAN;
    return scale >= FLT_MIN ? scale : 1;
}

float amax_of(const float *x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFFu;
        most = magnitude > most ? magnitude : most;
    }
    return float_of(most);
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static float block_scale(const float *w, int64_t rows, int64_t cols, int64_t ld) {
    float amax = 0;
    for (int64_t i = 0; i < rows; i++) {
        const float of_row = amax_of(w + i * ld, cols);
        if (bits_of(of_row) > bits_of(amax)) amax = of_row;
    }
    return e4m3_scale_nearest(amax);
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
