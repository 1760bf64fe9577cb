/* The blocked product under gemm, grouped_gemm and attention. Internal to kernels/cpu.
 *
 * C (m, n) = sum over k of A(i, k) B(k, j). Every element of C is one chain of multiply-adds over ascending k, cut into
 * chunks of GEMM_K_CHUNK that are added in order: which thread, tile or edge computes it changes no bit. */
#ifndef TRAIN_MOE_GEMM_CORE_H
#define TRAIN_MOE_GEMM_CORE_H

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/cpu/cpu.h"

enum {
    GEMM_LANES = 64 / sizeof(real), /* widths of gemm_local are multiples of it */
    GEMM_K_CHUNK = 512,             /* k summed in registers before it meets the next partial sum */
    GEMM_SERIAL = 1 << 15           /* products with fewer multiply-adds stay on one thread */
};

/* A or B: element (o, k), where o is the row of A or the column of B. */
typedef struct {
    const void *data;
    Dtype dtype; /* DTYPE_F32, DTYPE_BF16 or, with k_last, DTYPE_E4M3 */
    int64_t ld;
    bool k_last; /* the element lies at o * ld + k, else at k * ld + o */
    ScaleLayout scale_layout;
    const float *scale;
    int64_t scale_ld;
} GemmOperand;

typedef struct {
    int64_t m, n, k;
    GemmOperand a, b;
    void *y; /* (m, n), DTYPE_F32 or DTYPE_BF16 */
    Dtype y_dtype;
    int64_t y_ld;
    bool accumulate; /* y += the complete sum */
} Gemm;

/* The product of `kind` over matrices as in ops.h; no shapes are checked. */
Gemm gemm_make(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate);

/* Rows [m0, m1) and columns [n0, n1) of the output, on this thread. */
void gemm_block(const Gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1);

/* The part of thread `thread` of `n_threads`, which together compute the whole output. */
void gemm_share(const Gemm *g, int thread, int n_threads);

/* c (m, n) = or += a b on small buffers of the caller: a(i, k) at i * a_row + k * a_k, b(k, j) at k * b_k + j, c(i, j)
 * at i * c_row + j. m is a multiple of 4 and n of GEMM_LANES. */
void gemm_local(int64_t m, int64_t n, int64_t k, const real *a, int64_t a_row, int64_t a_k, const real *b, int64_t b_k,
                real *c, int64_t c_row, bool add);

static inline int cpu_thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

static inline int cpu_n_threads(void) {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

#endif
