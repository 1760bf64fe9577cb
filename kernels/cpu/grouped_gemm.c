/* The products of the routed experts: one GEMM for each local expert, over its own rows. The row counts lie in
 * expert_start, so threads share the work there is: by rows for outputs of rows, by the elements of each expert's
 * matrix for weight gradients, whose rows are what is summed. */
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/gemm_core.h"

static bool row_is_zero(Tensor x, int64_t row) {
    const size_t bytes = (size_t)x.shape[1] * dtype_size(x.dtype);
    const char *p = (const char *)x.data + (size_t)(row * x.ld) * dtype_size(x.dtype);
    return bytes == 0 || (p[0] == 0 && memcmp(p, p + 1, bytes - 1) == 0);
}

/* Rows [r0, r1) of one expert. Behind its tokens come rows of zeros up to the next multiple of GROUP_ALIGN; with few
 * tokens, as in generation, that is nearly all of them. Their product is zero, too. */
static void expert_rows(Tensor y, Tensor x, Tensor w, GemmKind kind, int64_t r0, int64_t r1) {
    int64_t end = r1;
    while (end > r0 && row_is_zero(x, end - 1)) end--;
    const size_t size = dtype_size(y.dtype), width = (size_t)y.shape[1] * size;
    for (int64_t r = end; r < r1; r++) memset((char *)y.data + (size_t)(r * y.ld) * size, 0, width);
    const Gemm g = gemm_make(tensor_rows(y, r0, end - r0), tensor_rows(x, r0, end - r0), w, kind, false);
    gemm_block(&g, 0, g.m, 0, g.n);
}

/* The part of one thread: an even share of all rows in use. Most threads meet few experts, and pack only their weights.
 */
static void grouped_gemm_share(Tensor y, Tensor x, Tensor w, const int32_t *start, GemmKind kind, int thread,
                               int n_threads) {
    const int64_t n_experts = w.shape[0], in_use = start[n_experts], align = 4;
    const int64_t first = in_use * thread / n_threads / align * align;
    const int64_t last = thread + 1 == n_threads ? in_use : in_use * (thread + 1) / n_threads / align * align;
    for (int64_t e = 0; e < n_experts; e++) {
        int64_t r0 = start[e] > first ? start[e] : first, r1 = start[e + 1] < last ? start[e + 1] : last;
        if (r0 < r1) expert_rows(y, x, tensor_plane(w, e), kind, r0, r1);
    }
}

void cpu_grouped_gemm(Tensor y, Tensor x, Tensor w, Tensor expert_start, GemmKind kind, Stream s) {
    (void)s;
    const int32_t *start = (const int32_t *)expert_start.data;
#pragma omp parallel if (start[w.shape[0]] * w.shape[1] * w.shape[2] >= GEMM_SERIAL)
    grouped_gemm_share(y, x, w, start, kind, cpu_thread(), cpu_n_threads());
}

void cpu_grouped_wgrad(Tensor dw, Tensor dy, Tensor x, Tensor expert_start, Stream s) {
    (void)s;
    const int32_t *start = (const int32_t *)expert_start.data;
    const int64_t n_experts = dw.shape[0];
#pragma omp parallel if (start[n_experts] * dw.shape[1] * dw.shape[2] >= GEMM_SERIAL)
    for (int64_t e = 0; e < n_experts; e++) {
        int64_t r0 = start[e], n_rows = start[e + 1] - r0;
        if (n_rows == 0) continue;
        const bool fp8 = dy.dtype == DTYPE_E4M3; /* transposed: the expert's rows are columns */
        const Tensor a = fp8 ? tensor_cols(dy, r0, n_rows) : tensor_rows(dy, r0, n_rows);
        const Tensor b = fp8 ? tensor_cols(x, r0, n_rows) : tensor_rows(x, r0, n_rows);
        const Gemm g = gemm_make(tensor_plane(dw, e), a, b, GEMM_WGRAD, true);
        gemm_share(&g, cpu_thread(), cpu_n_threads());
    }
}
