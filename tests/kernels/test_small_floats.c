/* kernels/base/small_floats: every value of every small format, and every way a float can lie between two of them. */
#include "kernels/base/small_floats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/rng.h"
#include "tests/test.h"

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

/* sign, exponent bits (with bias) and fraction bits, by the definition. */
static double value_of(uint32_t code, int exponent_bits, int fraction_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (int)(code >> fraction_bits) & ((1 << exponent_bits) - 1);
    const double fraction = (double)(code & ((1u << fraction_bits) - 1)) / (1 << fraction_bits);
    const double sign = code >> (exponent_bits + fraction_bits) & 1 ? -1 : 1;
    return exponent == 0 ? sign * ldexp(fraction, 1 - bias) : sign * ldexp(1 + fraction, exponent - bias);
}

TEST(e4m3_every_code) {
    for (uint32_t code = 0; code < 256; code++) {
        const float x = float_from_e4m3((uint8_t)code);
        if ((code & 0x7F) == 0x7F) {
            EXPECT(isnan(x), "code %02x is %g", code, (double)x);
            EXPECT_EQ(e4m3_from_float(x) & 0x7F, 0x7F);
            continue;
        }
        EXPECT((double)x == value_of(code, 4, 3) && !!signbit(x) == (int)(code >> 7), "code %02x is %g", code,
               (double)x);
        EXPECT_EQ(e4m3_from_float(x), code);
    }
    EXPECT(float_from_e4m3(0x7E) == E4M3_MAX && float_from_e4m3(1) == 0x1p-9f, "largest and smallest");
}

/* The nearest of the 127 magnitudes, ties to the even code, by search. */
static int nearest_e4m3(double x) {
    int low = 0, high = 0x7E;
    if (x >= 448) return 0x7E;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (value_of((uint32_t)middle, 4, 3) <= x)
            low = middle;
        else
            high = middle;
    }
    const double below = x - value_of((uint32_t)low, 4, 3), above = value_of((uint32_t)high, 4, 3) - x;
    return below < above || (below == above && low % 2 == 0) ? low : high;
}

/* Rounding sees the upper 20 bits of the magnitude, the next one, and whether anything follows: all of these. */
TEST(e4m3_every_rounding) {
    static const uint32_t tails[] = {0, 1, 0x7FF, 0x800, 0x801, 0xFFF};
    int64_t wrong = 0;
    for (uint32_t head = 0; head < 1u << 19; head++)
        for (int i = 0; i < 6; i++) {
            const uint32_t bits = head << 12 | tails[i];
            const float x = float_of(bits);
            const int expected = isnan(x) ? 0x7F : nearest_e4m3((double)x);
            wrong +=
                e4m3_from_float(x) != expected || e4m3_from_float(float_of(bits | 0x80000000u)) != (expected | 0x80);
        }
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(e4m3_from_float(INFINITY), 0x7E);
    EXPECT_EQ(e4m3_from_float(-1e30f), 0xFE);
    EXPECT_EQ(e4m3_from_float(0x1p-10f), 0);
    EXPECT_EQ(e4m3_from_float(nextafterf(0x1p-10f, 1)), 1);
    EXPECT_EQ(e4m3_from_float(-0.0f), 0x80);
}

/* Every boundary between two neighbours, and the floats beside it. */
TEST(e4m3_every_tie) {
    for (int code = 0; code < 0x7E; code++) {
        const float tie = (float)((value_of((uint32_t)code, 4, 3) + value_of((uint32_t)code + 1, 4, 3)) / 2);
        EXPECT_EQ(e4m3_from_float(tie), code % 2 ? code + 1 : code);
        EXPECT_EQ(e4m3_from_float(nextafterf(tie, 0)), code);
        EXPECT_EQ(e4m3_from_float(nextafterf(tie, 1000)), code + 1);
    }
}

TEST(f16_every_code) {
    for (uint32_t code = 0; code < 1 << 16; code++) {
        const float x = float_from_f16((uint16_t)code);
        if ((code & 0x7C00) == 0x7C00)
            EXPECT(code & 0x3FF ? isnan(x) : isinf(x) && !!signbit(x) == (int)(code >> 15), "code %04x is %g", code,
                   (double)x);
        else
            EXPECT((double)x == value_of(code, 5, 10) && !!signbit(x) == (int)(code >> 15), "code %04x is %g", code,
                   (double)x);
    }
}

TEST(bf16_every_code_and_tie) {
    for (uint32_t code = 0; code < 1 << 16; code++) {
        const float x = float_from_bf16((uint16_t)code);
        EXPECT_EQ(bits_of(x), code << 16);
        if (isnan(x)) {
            EXPECT(isnan(float_from_bf16(bf16_from_float(x))), "NaN %04x", code);
            EXPECT(isnan(float_from_bf16(bf16_from_float(float_of(0x7F800001u)))), "a NaN with a low bit alone");
            continue;
        }
        EXPECT_EQ(bf16_from_float(x), code);
        if (isinf(x)) continue;
        const uint32_t tie = code << 16 | 0x8000;
        EXPECT_EQ(bf16_from_float(float_of(tie)), code + (code & 1));
        EXPECT_EQ(bf16_from_float(float_of(tie - 1)), code);
        EXPECT_EQ(bf16_from_float(float_of(tie + 1)), code + 1);
    }
}

/* Sides that are no multiples of 128: scales of partial blocks, and the bound on what is lost. */
TEST(e4m3_blocks) {
    enum { ROWS = 300, COLS = 130, BLOCKS = 3 * 2 };
    static float w[ROWS * COLS], scale[BLOCKS];
    static uint8_t q[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++)
        w[i] = (float)((rng_uniform(3, RNG_TEST, 0, (uint64_t)i) - 0.5) * ldexp(1, (int)(i % 23) - 12));
    for (int i = 0; i < 128; i++)
        for (int j = 128; j < 130; j++) w[i * COLS + j] = 0; /* a block of nothing */
    w[299 * COLS + 129] = 1e-42f;                            /* and one of next to nothing */
    for (int i = 256; i < 300; i++)
        for (int j = 128; j < 130; j++) w[i * COLS + j] *= 1e-38f;
    e4m3_block_scales(scale, w, ROWS, COLS);
    for (int at = 0; at < ROWS; at += 77) /* in pieces that cut blocks */
        e4m3_block_quantize(q + at * COLS, w + at * COLS, scale, at, ROWS - at < 77 ? ROWS - at : 77, COLS);
    EXPECT(scale[1] == 1, "a zero block has scale %g", (double)scale[1]);
    for (int b = 0; b < BLOCKS; b++) {
        float amax = 0;
        for (int i = b / 2 * 128; i < ROWS && i < b / 2 * 128 + 128; i++)
            for (int j = b % 2 * 128; j < COLS && j < b % 2 * 128 + 128; j++) {
                const double x = (double)w[i * COLS + j],
                             y = (double)float_from_e4m3(q[i * COLS + j]) * (double)scale[b];
                const double bound = fmax(fabs(x) / 16, (double)scale[b] / 1024) * (1 + 1e-6);
                EXPECT(fabs(x - y) <= bound, "element %d, %d: %g became %g, scale %g", i, j, x, y, (double)scale[b]);
                amax = fmaxf(amax, fabsf(w[i * COLS + j]));
            }
        if (amax > 1e-30f) EXPECT(scale[b] == amax / 448, "block %d: %g of %g", b, (double)scale[b], (double)amax);
    }
}

/* ---- e5m6 and scales --------------------------------------------------------------------------------------------- */

TEST(e5m6_every_code_and_tie) {
    for (uint32_t code = 0; code < 0x7C0; code++) {
        const double value = value_of(code, 5, 6);
        EXPECT((double)float_from_e5m6((uint16_t)code) == value, "code %03x is %g", code, value);
        EXPECT_EQ(e5m6_from_float((float)value), code);
        EXPECT_EQ(e5m6_from_float((float)-value), code | 0x800);
        if (code == 0x7BF) break;
        const float tie = (float)((value + value_of(code + 1, 5, 6)) / 2);
        EXPECT_EQ(e5m6_from_float(tie), code % 2 ? code + 1 : code);
        EXPECT_EQ(e5m6_from_float(nextafterf(tie, 0)), code);
        EXPECT_EQ(e5m6_from_float(nextafterf(tie, 1e6f)), code + 1);
    }
    EXPECT(float_from_e5m6(0x7BF) == E5M6_MAX, "the largest");
    EXPECT_EQ(e5m6_from_float(1e30f), 0x7BF);
    EXPECT_EQ(e5m6_from_float(-INFINITY), 0xFBF);
    EXPECT(isnan(float_from_e5m6(e5m6_from_float(NAN))), "NaN stays NaN");
}

TEST(e5m6_packs_twelve_bits) {
    uint16_t in[8], out[8];
    uint32_t words[3];
    for (int i = 0; i < 8; i++) in[i] = (uint16_t)(0x123 * (i + 1) & 0xFFF);
    e5m6_pack(words, in);
    EXPECT_EQ(words[0] >> 20, in[0]);
    EXPECT_EQ(words[2] & 0xFFF, in[7]);
    e5m6_unpack(out, words);
    for (int i = 0; i < 8; i++) EXPECT_EQ(out[i], in[i]);
}

/* The smallest power of two that fits; beside the boundaries too. */
static void expect_scale(float amax, float scale, float most) {
    EXPECT((double)scale * (double)most >= (double)amax, "amax %g: scale %g is too small", (double)amax, (double)scale);
    const bool is_least = scale == 0x1p-126f || (double)scale / 2 * (double)most < (double)amax;
    EXPECT(is_least, "amax %g: scale %g is not the smallest", (double)amax, (double)scale);
    EXPECT((bits_of(scale) & 0x7FFFFF) == 0, "scale %g is no power of two", (double)scale);
}

TEST(scales_are_the_smallest_that_fit) {
    for (int exponent = -130; exponent <= 127; exponent++)
        for (int i = 0; i < 5; i++) {
            static const float fractions[] = {1, 1.5f, 1.75f, 1.984375f, 1.99f};
            const float x = ldexpf(fractions[i], exponent);
            const float amax[] = {x, nextafterf(x, 0), nextafterf(x, INFINITY)};
            for (int k = 0; k < 3; k++) {
                if (!isfinite(amax[k]) || amax[k] == 0) continue;
                expect_scale(amax[k], e4m3_scale_pow2(amax[k]), E4M3_MAX);
                expect_scale(amax[k], e5m6_scale_pow2(amax[k]), E5M6_MAX);
            }
        }
    float (*const scales[])(float) = {e4m3_scale_pow2, e5m6_scale_pow2, e4m3_scale_nearest};
    for (int i = 0; i < 3; i++) {
        EXPECT(scales[i](0) == 1, "a tile of zeros");
        EXPECT(isnan(scales[i](INFINITY)) && isnan(scales[i](NAN)), "an amax that is not finite shows");
    }
    EXPECT(e4m3_scale_nearest(44.8f) == 44.8f / 448, "amax / 448");
    const float x[] = {-3, 2, NAN, 1}, y[] = {-3, 2, -0.0f, 1};
    EXPECT(isnan(amax_of(x, 4)) && amax_of(y, 4) == 3 && amax_of(y, 0) == 0, "amax");
}
