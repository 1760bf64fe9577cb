/* What the programs that time kernels share: random numbers on the device, and the median. */
#ifndef TRAIN_MOE_MEASURE_CUH
#define TRAIN_MOE_MEASURE_CUH

#include <stdlib.h>

#include "kernels/cuda/common.cuh"

static __host__ __device__ __forceinline__ uint32_t hash_of(int64_t i, uint32_t seed) {
    uint32_t h = (uint32_t)i * 2654435761u ^ seed;
    h ^= h >> 15, h *= 2246822519u, h ^= h >> 13, h *= 3266489917u, h ^= h >> 16;
    return h;
}

/* Uniform in [-1, 1). */
template <typename T> static __global__ void fill_kernel(T *x, int64_t n, uint32_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        x[i] = from_f32<T>((float)(hash_of(i, seed) >> 8) * (2.0f / 16777216.0f) - 1);
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of n values, which it sorts. */
static double median(double *values, int n) {
    qsort(values, (size_t)n, sizeof *values, by_value);
    return values[n / 2];
}

#endif
