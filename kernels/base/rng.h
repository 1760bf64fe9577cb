/* Random numbers without state: Philox4x32-10 of (seed, purpose, step, index). Floor 0.
 *
 * A number depends on nothing but these four, so a run of any layout draws the same ones and a checkpoint holds no
 * generator state. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). */
#ifndef TRAIN_MOE_RNG_H
#define TRAIN_MOE_RNG_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a number is for: equal (seed, step, index) under two purposes are independent. */
typedef enum {
    RNG_INIT = 1,      /* step = tensor id, index = element */
    RNG_SHUFFLE = 2,   /* step = epoch, index = sample */
    RNG_SAMPLE = 3,    /* step = training step, index = token of the generation */
    RNG_SYNTHETIC = 4, /* step = sample, index = token */
    RNG_TEST = 5
} RngPurpose;

/* The raw block: counter (c0..c3), key (k0, k1), ten rounds. */
void philox4x32(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);

/* 64 random bits. */
uint64_t rng_bits(uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t index);
/* Uniform in [0, 1), 53 bits. */
double rng_uniform(uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t index);
/* Standard normal (Box-Muller; elements 2i and 2i+1 share one block). */
double rng_normal(uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t index);
/* out[i] = rng_normal(seed, purpose, step, first + i), for i < n: the same values, half the blocks. */
void rng_normal_fill(double *out, int64_t n, uint64_t seed, RngPurpose purpose, uint64_t step, uint64_t first);

/* A 64-bit finaliser (full avalanche) for hashes of ids and bits; not for random numbers. */
uint64_t mix64(uint64_t x);

#ifdef __cplusplus
}
#endif
#endif
