/* Which algorithm is the fastest for a GEMM. See tune.c.
 *
 * Candidates are the heuristic's first CANDIDATES_MAX that sum each output in one piece; the first of them is what a
 * run without a table takes. Each is run on random data, in sets of operands that lie so far apart in memory that the
 * L2 cache holds none of them when its turn comes again. Rounds go over all candidates, so a clock that drifts slows
 * all of them alike, and a candidate's time is its median over the rounds. It has to give equal bits twice, and the
 * first one's numbers within rounding. What is not faster by gain_min is no reason to leave the heuristic. */
#include "tune_gemm.h"

#include <stdio.h>
#include <string.h>

#include "kernels/cuda/gemm.cuh"
#include "measure.cuh"

enum { CANDIDATES_MAX = 32, ROUNDS = 9, SETS_MAX = 64 };
static const double gain_min = 0.01, round_ms = 3;

#define S STREAM_COMPUTE

/* ---- data -------------------------------------------------------------------------------------------------------- */

/* out[0] = bits of the largest |x|, out[1] of the largest |x - y|, out[2] = elements whose bits differ. Over
 * rows of ld; what lies between them is not looked at. NaN counts as infinite. */
template <typename T>
static __global__ void compare_kernel(unsigned *out, const T *x, const T *y, int64_t rows, int64_t cols, int64_t ld) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < rows * cols;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t at = i / cols * ld + i % cols;
        const float a = to_f32(x[at]), b = to_f32(y[at]), difference = fabsf(a - b);
        atomicMax(&out[0], __float_as_uint(isfinite(a) ? fabsf(a) : INFINITY));
        atomicMax(&out[1], __float_as_uint(isfinite(difference) ? difference : INFINITY));
        if (__float_as_uint(a) != __float_as_uint(b)) atomicAdd(&out[2], 1u);
    }
}

/* The operands of one call: a, b and y of ours behind each other. */
typedef struct {
    size_t bytes_a, bytes_b, bytes_y, stride; /* stride: of a set */
    int n_sets;
    char *base;
    char *y_first, *y_reference; /* y before any call; y of the first candidate */
    float *scales;               /* FP8: of both operands, all the same */
    unsigned *result;            /* 3 */
    int alignment;
} Operands;

static size_t padded(size_t bytes) {
    return (bytes + 511) / 256 * 256; /* room for an address that is aligned less */
}

static void *allocate(size_t bytes) {
    void *p = NULL;
    return cudaMalloc(&p, bytes) == cudaSuccess ? p : NULL;
}

/* E4M3: any bytes but NaN's. */
static __global__ void fill_bytes_kernel(uint8_t *x, int64_t n, uint32_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const uint32_t h = hash_of(i, seed);
        x[i] = (uint8_t)((h & 0x7F) == 0x7F ? h - 1 : h);
    }
}

static void fill(Dtype dtype, void *x, size_t bytes, uint32_t seed) {
    const int64_t n = (int64_t)(bytes / dtype_size(dtype));
    if (dtype == DTYPE_E4M3) {
        fill_bytes_kernel<<<2048, 256, 0, cuda_stream(S)>>>((uint8_t *)x, n, seed);
        LAUNCH_CHECK();
        return;
    }
    if (dtype == DTYPE_BF16)
        fill_kernel<<<2048, 256, 0, cuda_stream(S)>>>((bf16 *)x, n, seed);
    else
        fill_kernel<<<2048, 256, 0, cuda_stream(S)>>>((float *)x, n, seed);
    LAUNCH_CHECK();
}

static char *a_of(const Operands *o, int set) {
    return o->base + (size_t)(set % o->n_sets) * o->stride + o->alignment % 16;
}
static char *b_of(const Operands *o, int set) {
    return a_of(o, set) + padded(o->bytes_a);
}
static char *y_of(const Operands *o, int set) {
    return b_of(o, set) + padded(o->bytes_b);
}

/* Sets that fill the L2 cache three times, fewer if memory is short. */
static void operands_make(Operands *o, const GemmCall *c) {
    const bool fp8 = c->in == DTYPE_E4M3;
    const int64_t rows_a = c->kind == GEMM_WGRAD && !fp8 ? c->k : c->m;
    const int64_t rows_b = c->kind == GEMM_FPROP || fp8 ? c->n : c->k;
    const size_t n_scales = fp8 ? (size_t)(c->k / SCALE_TILE + 4) * (size_t)(c->m + c->n) : 4;
    memset(o, 0, sizeof *o);
    o->alignment = c->alignment;
    o->bytes_a = (size_t)(rows_a * c->lda) * dtype_size(c->in);
    o->bytes_b = (size_t)(rows_b * c->ldb) * dtype_size(c->in);
    o->bytes_y = (size_t)(c->m * c->ldy) * dtype_size(c->out);
    o->stride = padded(o->bytes_a) + padded(o->bytes_b) + padded(o->bytes_y);
    int l2_bytes;
    CUDA_CHECK(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, cuda_context()->device));
    const size_t wanted = 3 * (size_t)l2_bytes / o->stride + 2;
    o->n_sets = wanted < SETS_MAX ? (int)wanted : SETS_MAX;
    while (!(o->base = (char *)allocate((size_t)o->n_sets * o->stride)) && o->n_sets > 2) {
        (void)cudaGetLastError();
        o->n_sets--;
    }
    o->y_first = (char *)allocate(padded(o->bytes_y));
    o->y_reference = (char *)allocate(padded(o->bytes_y));
    o->scales = (float *)allocate(n_scales * sizeof *o->scales);
    o->result = (unsigned *)allocate(3 * sizeof *o->result);
    CHECK(o->base && o->y_first && o->y_reference && o->scales && o->result,
          "no device memory for %zu bytes of operands", o->stride);
    /* 0x3B3B3B3B is 0.0029: numbers of about 1. */
    CUDA_CHECK(cudaMemsetAsync(o->scales, 0x3B, n_scales * sizeof *o->scales, cuda_stream(S)));
    for (int i = 0; i < o->n_sets; i++) {
        fill(c->in, a_of(o, i), o->bytes_a, 3 * (uint32_t)i + 1);
        fill(c->in, b_of(o, i), o->bytes_b, 3 * (uint32_t)i + 2);
        fill(c->out, y_of(o, i), o->bytes_y, 3 * (uint32_t)i + 3);
    }
    CUDA_CHECK(cudaMemcpyAsync(o->y_first, y_of(o, 0), o->bytes_y, cudaMemcpyDeviceToDevice, cuda_stream(S)));
}

static void operands_free(Operands *o) {
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaFree(o->base));
    CUDA_CHECK(cudaFree(o->y_first));
    CUDA_CHECK(cudaFree(o->y_reference));
    CUDA_CHECK(cudaFree(o->scales));
    CUDA_CHECK(cudaFree(o->result));
}

/* ---- right? ------------------------------------------------------------------------------------------------------ */

typedef struct {
    float largest, difference;
    unsigned n_different;
} Comparison;

static Comparison compare(const Operands *o, const GemmCall *c, const void *x, const void *y) {
    unsigned bits[3];
    Comparison result;
    CUDA_CHECK(cudaMemsetAsync(o->result, 0, sizeof bits, cuda_stream(S)));
    if (c->out == DTYPE_BF16)
        compare_kernel<<<2048, 256, 0, cuda_stream(S)>>>(o->result, (const bf16 *)x, (const bf16 *)y, c->m, c->n,
                                                         c->ldy);
    else
        compare_kernel<<<2048, 256, 0, cuda_stream(S)>>>(o->result, (const float *)x, (const float *)y, c->m, c->n,
                                                         c->ldy);
    LAUNCH_CHECK();
    CUDA_CHECK(cudaMemcpyAsync(bits, o->result, sizeof bits, cudaMemcpyDeviceToHost, cuda_stream(S)));
    CUDA_CHECK(cudaStreamSynchronize(cuda_stream(S)));
    memcpy(&result.largest, &bits[0], 4);
    memcpy(&result.difference, &bits[1], 4);
    result.n_different = bits[2];
    return result;
}

static void run_set(const Operands *o, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, int set) {
    Tensor y = tensor_none(), a = y, b = y;
    y.data = y_of(o, set), a.data = a_of(o, set), b.data = b_of(o, set);
    a.dtype = b.dtype = p->row.call.in, y.dtype = p->row.call.out;
    a.scale = b.scale = o->scales;
    gemm_plan_run(p, algo, y, a, b, S);
}

static void run_afresh(const Operands *o, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo) {
    CUDA_CHECK(cudaMemcpyAsync(y_of(o, 0), o->y_first, o->bytes_y, cudaMemcpyDeviceToDevice, cuda_stream(S)));
    run_set(o, p, algo, 0);
}

static void copy_y(const Operands *o, char *to) {
    CUDA_CHECK(cudaMemcpyAsync(to, y_of(o, 0), o->bytes_y, cudaMemcpyDeviceToDevice, cuda_stream(S)));
}

/* Equal bits in two runs, and the reference's numbers: sums of k products of numbers below 1 differ by their order. */
static bool is_right(const Operands *o, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo) {
    const GemmCall *c = &p->row.call;
    const double tolerance = c->out == DTYPE_BF16 ? 1.0 / 128 : 1e-4;
    run_afresh(o, p, algo);
    const Comparison with_first = compare(o, c, o->y_reference, y_of(o, 0));
    if (!(with_first.difference <= tolerance * with_first.largest)) return false;
    char *again = y_of(o, 1); /* a set of its own */
    copy_y(o, again);
    run_afresh(o, p, algo);
    const bool is_equal = compare(o, c, again, y_of(o, 0)).n_different == 0;
    fill(c->out, again, o->bytes_y, 6);
    return is_equal;
}

/* ---- fast? ------------------------------------------------------------------------------------------------------- */

/* Milliseconds of a call, mean of n on the sets from `first` on. */
static double time_of(const Operands *o, const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, int first, int n) {
    static cudaEvent_t from, to;
    if (!from) {
        CUDA_CHECK(cudaEventCreate(&from));
        CUDA_CHECK(cudaEventCreate(&to));
    }
    float ms;
    CUDA_CHECK(cudaEventRecord(from, cuda_stream(S)));
    for (int i = first; i < first + n; i++) run_set(o, p, algo, i);
    CUDA_CHECK(cudaEventRecord(to, cuda_stream(S)));
    CUDA_CHECK(cudaEventSynchronize(to));
    CUDA_CHECK(cudaEventElapsedTime(&ms, from, to));
    return ms / n;
}

/* Medians of n candidates into ms. */
static void time_all(double *ms, const Operands *o, const GemmPlan *p, const cublasLtMatmulAlgo_t *algos, int n) {
    static double times[CANDIDATES_MAX][ROUNDS];
    const double once = time_of(o, p, &algos[0], 0, 4);
    const int calls = once * 4 > round_ms ? 4 : (int)(round_ms / once);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < n; i++) {
            const int which = (i + round) % n;        /* nobody is always behind the same one */
            (void)time_of(o, p, &algos[which], 0, 1); /* its code is loaded; its set is not timed */
            times[which][round] = time_of(o, p, &algos[which], 1, calls);
        }
    for (int i = 0; i < n; i++) ms[i] = median(times[i], ROUNDS);
}

static void tune(GemmPlan *p, GemmRows *rows) {
    cublasLtMatmulAlgo_t algos[CANDIDATES_MAX], right[CANDIDATES_MAX];
    double ms[CANDIDATES_MAX];
    char text[128];
    Operands o;
    const GemmCall *c = &p->row.call;
    const int found = gemm_candidates(algos, CANDIDATES_MAX, p);
    CHECK(found > 0, "cuBLASLt knows no algorithm for %s", gemm_call_text(text, sizeof text, c));
    operands_make(&o, c);
    run_afresh(&o, p, &algos[0]);
    copy_y(&o, o.y_reference);
    int n = 0;
    for (int i = 0; i < found; i++)
        if (is_right(&o, p, &algos[i])) right[n++] = algos[i];
    CHECK(n > 0, "no algorithm gives equal bits twice: %s", gemm_call_text(text, sizeof text, c));
    time_all(ms, &o, p, right, n);
    int best = 0;
    for (int i = 1; i < n; i++)
        if (ms[i] < ms[best]) best = i;
    if (ms[best] > (1 - gain_min) * ms[0]) best = 0;
    gemm_plan_use(p, &right[best]);
    gemm_rows_put(rows, &p->row);
    const double tflops = 2e-9 * (double)c->m * (double)c->n * (double)c->k;
    printf("%-44s  first %8.4f ms %6.1f TF   best %8.4f ms %6.1f TF   %+5.1f %%   %2d of %2d, place %d\n",
           gemm_call_text(text, sizeof text, c), ms[0], tflops / ms[0], ms[best], tflops / ms[best],
           100 * (ms[0] / ms[best] - 1), n, found, best + 1);
    fflush(stdout);
    operands_free(&o);
}

void tune_gemms(GemmRows *rows) {
    for (int i = 0; i < gemm_n_plans(); i++) tune(gemm_plan(i), rows);
}
