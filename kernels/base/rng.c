/* See rng.h. */
#include "rng.h"

#include <math.h>

void philox4x32(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]) {
    const uint32_t m0 = 0xD2511F53u, m1 = 0xCD9E8D57u; /* multipliers of the paper */
    const uint32_t w0 = 0x9E3779B9u, w1 = 0xBB67AE85u; /* Weyl increments of the key */
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)m0 * c0, p1 = (uint64_t)m1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += w0;
        k1 += w1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

uint64_t mix64(uint64_t x) {
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93ull;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93ull;
    x ^= x >> 32;
    return x;
}

/* Counter = (index low, index high, step low, step high and purpose); steps stay below 2^56, so purpose fits on top. */
static void block_of(uint32_t out[4], uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t index) {
    const uint32_t counter[4] = {(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)step,
                                 (uint32_t)(step >> 32) ^ ((uint32_t)purpose << 24)};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    philox4x32(out, counter, key);
}

uint64_t rng_bits(uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t index) {
    uint32_t r[4];
    block_of(r, seed, purpose, step, index);
    return (uint64_t)r[1] << 32 | r[0];
}

static double uniform_of(uint32_t low, uint32_t high) {
    return (double)(((uint64_t)high << 32 | low) >> 11) * 0x1.0p-53;
}

double rng_uniform(uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t index) {
    uint32_t r[4];
    block_of(r, seed, purpose, step, index);
    return uniform_of(r[0], r[1]);
}

static void normal_pair(double pair[2], uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t pair_index) {
    uint32_t r[4];
    block_of(r, seed, purpose, step, pair_index);
    double radius = sqrt(-2.0 * log(1.0 - uniform_of(r[0], r[1]))); /* 1 - u is never 0 */
    double angle = 6.283185307179586 * uniform_of(r[2], r[3]);
    pair[0] = radius * cos(angle);
    pair[1] = radius * sin(angle);
}

double rng_normal(uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t index) {
    double pair[2];
    normal_pair(pair, seed, purpose, step, index / 2);
    return pair[index % 2];
}

void rng_normal_fill(double *out, int64_t n, uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t first) {
    double pair[2];
    for (int64_t i = 0; i < n; i++) {
        uint64_t index = first + (uint64_t)i;
        if (i == 0 || index % 2 == 0) normal_pair(pair, seed, purpose, step, index / 2);
        out[i] = pair[index % 2];
    }
}
