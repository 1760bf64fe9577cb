/* The CPU backend: its table of ops, and memory and streams, which are simple here. Every op has returned when it is
 * done, so all streams are one, events mean nothing and a copy is a copy. */
#include <stdlib.h>

#include "cpu.h"
#include "cpu_ops.h"
#include "kernels/base/arena.h"
#include "kernels/base/check.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* calloc rather than aligned_alloc and a memset: fresh pages are zero already and take no memory until they are used,
 * which for the worst-case rows of the experts is often never. The start of the block stands before the aligned one. */
static void *cpu_alloc(size_t bytes) {
    if (bytes > SIZE_MAX / 2) return NULL;
    char *block = (char *)calloc(1, bytes + ARENA_ALIGN + sizeof(void *));
    if (!block) return NULL;
    size_t misaligned = (size_t)((uintptr_t)(block + sizeof(void *)) % ARENA_ALIGN);
    char *p = block + sizeof(void *) + (misaligned ? ARENA_ALIGN - misaligned : 0);
    memcpy(p - sizeof(void *), &block, sizeof(void *));
    return p;
}

static void cpu_release(void *p) {
    if (!p) return;
    void *block;
    memcpy(&block, (char *)p - sizeof(void *), sizeof(void *));
    free(block);
}

static void cpu_copy_in(void *device, const void *host, size_t bytes, Stream s) {
    (void)s;
    if (bytes > 0) memcpy(device, host, bytes);
}

static void cpu_copy_out(void *host, const void *device, size_t bytes, Stream s) {
    (void)s;
    if (bytes > 0) memcpy(host, device, bytes);
}

static void cpu_zero(Tensor y, Stream s) {
    (void)s;
    size_t bytes = tensor_bytes(y);
    if (bytes > 0) memset(y.data, 0, bytes);
}

static CPU_CLONES void copy_row(const Tensor *y, const Tensor *x, int64_t i) {
    const int64_t n = y->shape[y->ndim - 1];
    real x_buf[row_buf(*x)], y_buf[row_buf(*y)];
    const real *in = row_in(*x, i, x_buf);
    real *out = row_out(*y, i, y_buf);
    for (int64_t j = 0; j < n; j++) out[j] = in[j];
    row_done(*y, i, out);
}

/* A vector is one row; it is converted in pieces, so that the buffers stay small. */
static void cpu_copy(Tensor y, Tensor x, Stream s) {
    (void)s;
    if (tensor_numel(y) == 0) return;
    const int64_t n = y.shape[y.ndim - 1], n_rows = tensor_numel(y) / n;
    if (y.dtype == x.dtype) {
        const size_t size = dtype_size(y.dtype), y_step = (size_t)y.ld * size, x_step = (size_t)x.ld * size;
#pragma omp parallel for schedule(static) if (n_rows > 1)
        for (int64_t i = 0; i < n_rows; i++)
            memcpy((char *)y.data + (size_t)i * y_step, (const char *)x.data + (size_t)i * x_step, (size_t)n * size);
    } else if (y.ndim == 1) {
#pragma omp parallel for schedule(static)
        for (int64_t first = 0; first < n; first += SUM_PARTIAL) {
            const int64_t count = n - first < SUM_PARTIAL ? n - first : SUM_PARTIAL;
            const Tensor y_piece = tensor_rows(y, first, count), x_piece = tensor_rows(x, first, count);
            copy_row(&y_piece, &x_piece, 0);
        }
    } else {
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < n_rows; i++) copy_row(&y, &x, i);
    }
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

static void cpu_event_record(int event, Stream s) {
    (void)event, (void)s;
}

static void cpu_event_wait(int event, Stream s) {
    (void)event, (void)s;
}

static void cpu_event_synchronize(int event) {
    (void)event;
}

static void cpu_synchronize(Stream s) {
    (void)s;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

/* There are none: an op is a call, and a call costs little. What lay between begin and end has run. */
static void cpu_graph_begin(Stream s) {
    (void)s;
}

static Graph *cpu_graph_end(Stream s) {
    (void)s;
    return NULL;
}

static void cpu_graph_launch(Graph *g, Stream s) {
    (void)s;
    CHECK(false, "a graph on the CPU: %p", (void *)g);
}

static void cpu_graph_free(Graph *g) {
    CHECK(false, "a graph on the CPU: %p", (void *)g);
}

/* ---- table ------------------------------------------------------------------------------------------------------- */

const char *cpu_isa_name(void) {
#if !defined(__x86_64__)
#if defined(__aarch64__)
    return "aarch64";
#else
    return "baseline";
#endif
#elif defined(CPU_HAS_CLONES) && __GNUC__ >= 12
    return __builtin_cpu_supports("x86-64-v4") ? "AVX-512" : __builtin_cpu_supports("x86-64-v3") ? "AVX2" : "x86-64";
#elif defined(CPU_HAS_CLONES)
    return __builtin_cpu_supports("avx512f") ? "AVX-512" : __builtin_cpu_supports("fma") ? "AVX2" : "x86-64";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#else
    return "x86-64";
#endif
}

const Ops *ops_cpu(void) {
    static const Ops ops = {
        .name = "cpu",
        .alloc = cpu_alloc,
        .release = cpu_release,
        .host_alloc = cpu_alloc,
        .host_release = cpu_release,
        .copy_in = cpu_copy_in,
        .copy_out = cpu_copy_out,
        .event_record = cpu_event_record,
        .event_wait = cpu_event_wait,
        .event_synchronize = cpu_event_synchronize,
        .synchronize = cpu_synchronize,
        .graph_begin = cpu_graph_begin,
        .graph_end = cpu_graph_end,
        .graph_launch = cpu_graph_launch,
        .graph_free = cpu_graph_free,
        .zero = cpu_zero,
        .copy = cpu_copy,
        .quantize = cpu_quantize,
        .quantize_weight = cpu_quantize_weight,
        .transpose_weight = cpu_transpose_weight,
        .tile_stats = cpu_tile_stats,
        .embed_forward = cpu_embed_forward,
        .embed_backward = cpu_embed_backward,
        .residual_rmsnorm_forward = cpu_residual_rmsnorm_forward,
        .residual_rmsnorm_backward = cpu_residual_rmsnorm_backward,
        .gemm = cpu_gemm,
        .head_gemm = cpu_head_gemm,
        .rope_split_forward = cpu_rope_split_forward,
        .rope_split_backward = cpu_rope_split_backward,
        .rope_forward = cpu_rope_forward,
        .attention_forward = cpu_attention_forward,
        .attention_backward = cpu_attention_backward,
        .attention_decode = cpu_attention_decode,
        .router_forward = cpu_router_forward,
        .router_backward = cpu_router_backward,
        .bias_step = cpu_bias_step,
        .moe_map = cpu_moe_map,
        .gather_rows = cpu_gather_rows,
        .reduce_rows = cpu_reduce_rows,
        .unmap_weights = cpu_unmap_weights,
        .grouped_gemm = cpu_grouped_gemm,
        .grouped_wgrad = cpu_grouped_wgrad,
        .swiglu_forward = cpu_swiglu_forward,
        .swiglu_backward = cpu_swiglu_backward,
        .cross_entropy = cpu_cross_entropy,
        .loss_sum = cpu_loss_sum,
        .grad_squares = cpu_grad_squares,
        .grad_norm = cpu_grad_norm,
        .update_gate = cpu_update_gate,
        .adamw_cast = cpu_adamw_cast,
    };
    return &ops;
}
