/* Speed of the CUDA kernels: each row is an op at a realistic size. Those that move bytes: their bytes (every input
 * read once, every output written once) a second, and that as a share of a device-to-device copy measured in the
 * same run. Those that multiply: their FLOPs a second; grouped products beside cuBLASLt, which is called once for
 * each expert.
 *
 *     bench_cuda [--json] [PART...]        rows whose name contains a PART; JSON rows as in results.jsonl
 *
 * An op is captured ten times in a graph and the graph replayed; the figure is the median. The tensors of a row are
 * larger than the L2 cache, except where the row says so. Data is random: zeros run faster. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda.h"

enum { OPS_IN_GRAPH = 10, ROUNDS = 9, COPY_MB = 1024, TENSORS_MAX = 64 };

static Device device;
static void *memory[TENSORS_MAX];
static int n_memory;
static double copy_rate; /* bytes read and written, a second */
static bool as_json;
static char **parts;
static int n_parts;

#define S STREAM_COMPUTE

/* ---- data -------------------------------------------------------------------------------------------------------- */

/* Uniform in [-1, 1), or integers below `range`; a hash of the index. */
template <typename T> static __global__ void fill_kernel(T *x, int64_t n, float scale, uint32_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ seed;
        h ^= h >> 15, h *= 2246822519u, h ^= h >> 13, h *= 3266489917u, h ^= h >> 16;
        x[i] = from_f32<T>(((float)(h >> 8) * (2.0f / 16777216.0f) - 1) * scale);
    }
}
static __global__ void fill_ids_kernel(int32_t *x, int64_t n, int32_t range, uint32_t seed) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ seed;
        h ^= h >> 15, h *= 2246822519u, h ^= h >> 13;
        x[i] = (int32_t)(h % (uint32_t)range);
    }
}

static void *allocate(size_t bytes) {
    CHECK(n_memory < TENSORS_MAX, "more than %d tensors", TENSORS_MAX);
    void *p = op_alloc(&device, bytes);
    CHECK(p, "no device memory for %zu bytes", bytes);
    memory[n_memory++] = p;
    return p;
}
static void release_all(void) {
    while (n_memory > 0) op_release(&device, memory[--n_memory]);
}

static Tensor filled(Tensor t, float scale) {
    const int64_t n = tensor_numel(t);
    if (t.dtype == DTYPE_F32)
        fill_kernel<float><<<4096, 256, 0, cuda_stream(S)>>>((float *)t.data, n, scale, (uint32_t)n_memory);
    else
        fill_kernel<bf16><<<4096, 256, 0, cuda_stream(S)>>>((bf16 *)t.data, n, scale, (uint32_t)n_memory);
    LAUNCH_CHECK();
    return t;
}
static Tensor vector(Dtype dtype, int64_t n) {
    return filled(tensor_1d(allocate((size_t)n * dtype_size(dtype)), dtype, n), 1);
}
static Tensor matrix(Dtype dtype, int64_t rows, int64_t cols) {
    return filled(tensor_2d(allocate((size_t)(rows * cols) * dtype_size(dtype)), dtype, rows, cols), 1);
}
static Tensor planes(Dtype dtype, int64_t n, int64_t rows, int64_t cols) {
    return filled(tensor_3d(allocate((size_t)(n * rows * cols) * dtype_size(dtype)), dtype, n, rows, cols), 1);
}
/* FP8 of random numbers. */
static Tensor tiles_empty(Dtype dtype, int64_t rows, int64_t cols) {
    Tensor t = tensor_tiles(NULL, NULL, dtype, rows, cols);
    t.data = allocate(tensor_bytes(t));
    t.scale = (float *)allocate((size_t)tensor_n_scales(t) * sizeof(float));
    return t;
}
static Tensor tiles(int64_t rows, int64_t cols) {
    const Quantized q = {tiles_empty(DTYPE_E4M3, rows, cols), tensor_none()};
    op_quantize(&device, q, matrix(DTYPE_BF16, rows, cols), S);
    return q.rows;
}
static Tensor blocks_empty(int64_t n, int64_t rows, int64_t cols) {
    Tensor t = tensor_blocks(NULL, NULL, n, rows, cols);
    t.data = allocate(tensor_bytes(t));
    t.scale = (float *)allocate((size_t)tensor_n_scales(t) * sizeof(float));
    return t;
}
static Tensor blocks(int64_t n, int64_t rows, int64_t cols) {
    Tensor w = blocks_empty(n, rows, cols), wt = blocks_empty(n, cols, rows);
    op_quantize_weight(&device, w, wt, vector(DTYPE_F32, tensor_numel(w)), S);
    return w;
}
/* range 0: 0, 1, 2, ... */
static Tensor integers(int64_t n, int32_t range) {
    Tensor t = tensor_1d(allocate((size_t)n * 4), DTYPE_I32, n);
    int32_t *host = (int32_t *)malloc((size_t)n * 4);
    CHECK(host, "no memory");
    for (int64_t i = 0; i < n; i++) host[i] = (int32_t)i;
    if (range > 0)
        fill_ids_kernel<<<1024, 256, 0, cuda_stream(S)>>>((int32_t *)t.data, n, range, (uint32_t)n_memory);
    else
        op_copy_in(&device, t.data, host, (size_t)n * 4, S);
    op_synchronize(&device, S);
    free(host);
    return t;
}

static StepParams *params_make(void) {
    StepParams params = {};
    params.inv_tokens = 1e-4, params.loss_scale[0] = 1, params.balance_scale = 0.1;
    params.lr = 1e-4, params.beta1 = 0.9, params.beta2 = 0.95, params.eps = 1e-8, params.weight_decay = 0.1;
    params.skip_loss_above = params.skip_norm_above = INFINITY;
    StepParams *p = (StepParams *)allocate(sizeof params);
    op_copy_in(&device, p, &params, sizeof params, S);
    op_synchronize(&device, S);
    return p;
}
static StepStats *stats_make(void) {
    StepStats stats = {};
    stats.grad_scale = 1e-3;
    StepStats *p = (StepStats *)allocate(sizeof stats);
    op_copy_in(&device, p, &stats, sizeof stats, S);
    op_synchronize(&device, S);
    return p;
}
static UpdateState *state_make(void) {
    UpdateState state = {};
    state.adam_t = 10;
    UpdateState *p = (UpdateState *)allocate(sizeof state);
    op_copy_in(&device, p, &state, sizeof state, S);
    op_synchronize(&device, S);
    return p;
}

/* ---- timing ------------------------------------------------------------------------------------------------------ */

static int by_value(const void *a, const void *b) {
    const float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Seconds of one call of `work`. */
template <typename Work> static double seconds_of(Work work) {
    work(); /* what is set up at the first call stays outside */
    op_synchronize(&device, S);
    op_graph_begin(&device, S);
    for (int i = 0; i < OPS_IN_GRAPH; i++) work();
    Graph *graph = op_graph_end(&device, S);
    op_graph_launch(&device, graph, S);
    cudaEvent_t start, end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    float ms[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        CUDA_CHECK(cudaEventRecord(start, cuda_stream(S)));
        op_graph_launch(&device, graph, S);
        CUDA_CHECK(cudaEventRecord(end, cuda_stream(S)));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&ms[i], start, end));
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    op_graph_free(&device, graph);
    qsort(ms, ROUNDS, sizeof *ms, by_value);
    return 1e-3 * (double)ms[ROUNDS / 2] / (double)OPS_IN_GRAPH;
}

static bool is_wanted(const char *name) {
    for (int i = 0; i < n_parts; i++)
        if (strstr(name, parts[i])) return true;
    return n_parts == 0;
}

/* gate: the share of the copy rate that is asked for; 0: none. Frees the row's tensors. */
template <typename Work> static void row(const char *name, double bytes, double gate, Work work) {
    const double s = seconds_of(work), share = bytes / s / copy_rate;
    if (as_json)
        printf("{\"bench\":\"%s\",\"value\":%.0f,\"unit\":\"GB/s\",\"us\":%.2f,\"peer\":\"copy\",\"peer_value\":%.0f,"
               "\"ratio\":%.3f}\n",
               name, 1e-9 * bytes / s, 1e6 * s, 1e-9 * copy_rate, share);
    else
        printf("%-58s %9.1f us %7.0f GB/s %6.1f %%  %s\n", name, 1e6 * s, 1e-9 * bytes / s, 100 * share,
               gate == 0       ? ""
               : share >= gate ? "ok"
                               : "BELOW ITS GATE");
    fflush(stdout);
    release_all();
}

/* The same for a row of products. peer_s: seconds of the peer, 0: none. */
static void row_flops(const char *name, double flops, double peer_s, double gate, double s) {
    const double rate = 1e-12 * flops / s, peer = peer_s > 0 ? 1e-12 * flops / peer_s : 0;
    if (as_json) {
        printf("{\"bench\":\"%s\",\"value\":%.1f,\"unit\":\"TFLOP/s\",\"us\":%.2f", name, rate, 1e6 * s);
        if (peer > 0) printf(",\"peer\":\"cublaslt\",\"peer_value\":%.1f,\"ratio\":%.3f", peer, rate / peer);
        printf("}\n");
    } else {
        printf("%-58s %9.1f us %7.0f TFLOP/s", name, 1e6 * s, rate);
        if (peer > 0)
            printf(" %6.1f %% of cuBLASLt's %.0f  %s", 100 * rate / peer, peer,
                   rate >= gate * peer ? "ok" : "BELOW ITS GATE");
        printf("\n");
    }
    fflush(stdout);
    release_all();
}

static const char *title(const char *fmt, ...) {
    static char text[128];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return text;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Four packs of 16 bytes a thread in flight. */
static __global__ void copy_kernel(int4 *to, const int4 *from, int64_t n) {
    const int64_t first = (int64_t)blockIdx.x * blockDim.x * 4 + threadIdx.x;
    int4 x[4];
    for (int i = 0; i < 4; i++)
        if (first + i * blockDim.x < n) x[i] = from[first + i * blockDim.x];
    for (int i = 0; i < 4; i++)
        if (first + i * blockDim.x < n) to[first + i * blockDim.x] = x[i];
}

/* The ceiling is the faster of the driver's copy and a kernel's. */
static void row_copy(void) {
    const size_t bytes = (size_t)COPY_MB << 20;
    void *from = allocate(bytes), *to = allocate(bytes);
    filled(tensor_1d(from, DTYPE_F32, (int64_t)bytes / 4), 1);
    const double s =
        seconds_of([=] { CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_stream(S))); });
    const int64_t n = (int64_t)bytes / 16;
    const double kernel_s = seconds_of([=] {
        copy_kernel<<<(unsigned)ceil_div(n, 1024), 256, 0, cuda_stream(S)>>>((int4 *)to, (const int4 *)from, n);
        LAUNCH_CHECK();
    });
    copy_rate = 2.0 * (double)bytes / (kernel_s < s ? kernel_s : s);
    if (!as_json)
        printf("copy, device to device: driver %.0f GB/s, kernel %.0f GB/s\n", 2e-9 * (double)bytes / s,
               2e-9 * (double)bytes / kernel_s);
    release_all();
}

static int64_t distinct(Tensor ids, int64_t V) {
    const int64_t n = ids.shape[0];
    int32_t *host = (int32_t *)malloc((size_t)n * 4);
    bool *is_there = (bool *)calloc((size_t)V, 1);
    CHECK(host && is_there, "no memory");
    op_copy_out(&device, host, ids.data, (size_t)n * 4, S);
    op_synchronize(&device, S);
    int64_t n_distinct = 0;
    for (int64_t i = 0; i < n; i++) n_distinct += !is_there[host[i]], is_there[host[i]] = true;
    free(host);
    free(is_there);
    return n_distinct;
}

/* Uniform ids become those of a text: id i about as often as 1 / (i + 1), the first one 6 % of all. Returns how many
 * there are. */
static int64_t natural_ids(Tensor ids, int64_t V) {
    const int64_t n = ids.shape[0];
    int32_t *host = (int32_t *)malloc((size_t)n * 4);
    CHECK(host, "no memory");
    op_copy_out(&device, host, ids.data, (size_t)n * 4, S);
    op_synchronize(&device, S);
    for (int64_t i = 0; i < n; i++)
        host[i] = (int32_t)min((int64_t)(exp((host[i] + 0.5) / (double)V * log((double)V + 1)) - 1), V - 1);
    op_copy_in(&device, ids.data, host, (size_t)n * 4, S);
    op_synchronize(&device, S);
    free(host);
    return distinct(ids, V);
}

static void rows_embed(int64_t T, int64_t D, int64_t V) {
    const double act = 2.0 * (double)(T * D);
    const char *name = title("embed_forward/%dx%d", (int)T, (int)D);
    if (is_wanted(name)) {
        Tensor y = matrix(DTYPE_BF16, T, D), ids = integers(T, (int32_t)V), w = matrix(DTYPE_BF16, V, D);
        row(name, 2 * act, 0.85, [=] { op_embed_forward(&device, y, ids, w, S); });
    }
    for (int natural = 0; natural < 2; natural++) { /* dy is read, every row of dw that has a token read and written */
        name = title("embed_backward/%dx%d%s", (int)T, (int)D, natural ? "/natural" : "");
        if (!is_wanted(name)) continue;
        Tensor dw = matrix(DTYPE_F32, V, D), dy = matrix(DTYPE_BF16, T, D), ids = integers(T, (int32_t)V);
        const int64_t n_ids = natural ? natural_ids(ids, V) : distinct(ids, V);
        row(name, act + 8.0 * (double)(n_ids * D), 0.75, [=] { op_embed_backward(&device, dw, dy, ids, S); });
    }
}

static void rows_rmsnorm(int64_t T, int64_t D, int64_t J) {
    const double act = 2.0 * (double)(T * D);
    const char *name = title("rmsnorm_forward/%dx%d+%d", (int)T, (int)D, (int)J);
    if (is_wanted(name)) {
        Tensor r = matrix(DTYPE_BF16, T, D), y = matrix(DTYPE_BF16, T, D), rstd = vector(DTYPE_F32, T);
        Tensor x = matrix(DTYPE_BF16, T, D), branch = planes(DTYPE_BF16, J, T, D), w = vector(DTYPE_F32, D);
        row(name, (double)(3 + J) * act, 0.85,
            [=] { op_residual_rmsnorm_forward(&device, r, y, tensor_none(), rstd, x, branch, w, 1e-6, S); });
    }
    name = title("rmsnorm_backward/%dx%d+%d", (int)T, (int)D, (int)J);
    if (is_wanted(name)) {
        Tensor dx = matrix(DTYPE_BF16, T, D), dw = vector(DTYPE_F32, D), dy = planes(DTYPE_BF16, J, T, D);
        Tensor partial = matrix(DTYPE_F32, ceil_div(T, RMSNORM_PARTIAL_ROWS), D), dr = matrix(DTYPE_BF16, T, D);
        Tensor r = matrix(DTYPE_BF16, T, D), rstd = vector(DTYPE_F32, T), w = vector(DTYPE_F32, D);
        row(name, (double)(3 + J) * act, 0.85,
            [=] { op_residual_rmsnorm_backward(&device, dx, dw, partial, dy, dr, r, rstd, w, S); });
    }
}

static void rows_rope(int64_t T, int n_heads, bool in_place) {
    const AttentionShape a = {n_heads, 128, 64, 128, 0.07, 1};
    const double q = 2.0 * (double)(T * n_heads * 192), kv = 2.0 * (double)(T * n_heads * 256), v = kv / 2;
    const double q_bytes = in_place ? 2 * q / 3 : 2 * q; /* in place, only the rotated third moves */
    for (int backward = 0; backward < 2; backward++) {
        const char *name =
            title("rope_%s/%dx%d%s", backward ? "backward" : "forward", (int)T, n_heads, in_place ? "/in_place" : "");
        if (!is_wanted(name)) continue;
        Tensor q_in = matrix(DTYPE_BF16, T, n_heads * 192),
               q_out = in_place ? q_in : matrix(DTYPE_BF16, T, n_heads * 192);
        Tensor k = matrix(DTYPE_BF16, T, n_heads * 192), v_out = matrix(DTYPE_BF16, T, n_heads * 128);
        Tensor kv_in = matrix(DTYPE_BF16, T, n_heads * 256), k_pe = matrix(DTYPE_BF16, T, 64);
        Tensor position = integers(T, 0), inv_freq = vector(DTYPE_F32, 32);
        row(name, q_bytes + kv + q + v, 0.85, [=] {
            if (backward)
                op_rope_split_backward(&device, q_in, kv_in, k_pe, q_out, k, v_out, position, inv_freq, a, S);
            else
                op_rope_split_forward(&device, q_out, k, v_out, q_in, kv_in, k_pe, position, inv_freq, a, S);
        });
    }
}

static void rows_swiglu(int64_t M, int64_t F, bool weighted) {
    const double act = 2.0 * (double)(M * F);
    for (int backward = 0; backward < 2; backward++) {
        const char *name =
            title("swiglu_%s/%dx%d%s", backward ? "backward" : "forward", (int)M, (int)F, weighted ? "/weighted" : "");
        if (!is_wanted(name)) continue;
        Tensor h = matrix(DTYPE_BF16, M, 2 * F), y = matrix(DTYPE_BF16, M, F);
        Tensor weight = weighted ? vector(DTYPE_F32, M) : tensor_none();
        Tensor dweight = weighted ? vector(DTYPE_F32, M) : tensor_none();
        Tensor dh = backward ? matrix(DTYPE_BF16, M, 2 * F) : tensor_none();
        row(name, (backward ? 5 : 3) * act, 0.85, [=] {
            if (backward)
                op_swiglu_backward(&device, dh, quantized_none(), tensor_none(), dweight, y, h, weight, S);
            else
                op_swiglu_forward(&device, y, tensor_none(), tensor_none(), h, weight, S);
        });
    }
}

static void rows_router(int64_t T, RouterShape shape, const char *what) {
    const int64_t E = shape.n_experts, K = shape.n_chosen;
    for (int backward = 0; backward < 2; backward++) {
        const char *name = title("router_%s/%dx%d/%s (in L2)", backward ? "backward" : "forward", (int)T, (int)E, what);
        if (!is_wanted(name)) continue;
        Tensor logits = matrix(DTYPE_F32, T, E), scores = matrix(DTYPE_F32, T, E), weights = matrix(DTYPE_F32, T, K);
        Tensor ids = tensor_reshape2(integers(T * K, (int32_t)E), T, K), counts = integers(E, 1),
               position = integers(T, 0);
        Tensor seq_count = tensor_reshape2(integers(T / shape.seq_len * E, 9), T / shape.seq_len, E);
        Tensor bias = vector(DTYPE_F32, E), dweights = matrix(DTYPE_F32, T, K), dlogits = matrix(DTYPE_BF16, T, E);
        StepStats *stats = stats_make();
        const StepParams *params = params_make();
        row(name, (backward ? 6.0 : 8.0) * (double)(T * E), 0, [=] {
            if (backward)
                op_router_backward(&device, dlogits, dweights, ids, weights, scores, seq_count, position, params, shape,
                                   S);
            else
                op_router_forward(&device, ids, weights, scores, counts, seq_count, stats, logits, bias, position,
                                  shape, S);
        });
    }
}

/* K ids a token, spread over E experts, all local. */
static void rows_permute(int64_t T, int64_t D, int64_t K, int64_t E) {
    const int64_t N = T * K + (GROUP_ALIGN - 1) * E;
    const double act = 2.0 * (double)(T * D);
    static const char *const names[] = {"moe_map", "gather_rows", "reduce_rows", "unmap_weights"};
    for (int i = 0; i < 4; i++) {
        const char *name = title("%s/%dx%d/%d of %d", names[i], (int)T, (int)D, (int)K, (int)E);
        if (!is_wanted(name)) continue;
        MoeMap map = {integers(N, 1), vector(DTYPE_F32, N), tensor_reshape2(integers(T * K, 1), T, K),
                      integers(E + 1, 1), tensor_none()};
        Tensor ids = tensor_reshape2(integers(T * K, (int32_t)E), T, K), weights = matrix(DTYPE_F32, T, K);
        Tensor slots = integers(E, 0), x = matrix(DTYPE_BF16, T, D), rows = matrix(DTYPE_BF16, N, D);
        Tensor drow_weight = vector(DTYPE_F32, N), dweights = matrix(DTYPE_F32, T, K);
        op_moe_map(&device, map, ids, weights, slots, 0, S);
        if (i == 0)
            row(name, 12.0 * (double)(T * K) + 8.0 * (double)(T * K), 0,
                [=] { op_moe_map(&device, map, ids, weights, slots, 0, S); });
        else if (i == 1) /* each token is read once and comes from L2 then */
            row(name, (double)(K + 1) * act, 0.75, [=] { op_gather_rows(&device, rows, tensor_none(), x, map, S); });
        else if (i == 2)
            row(name, (double)(K + 1) * act, 0.75, [=] { op_reduce_rows(&device, x, rows, map, false, S); });
        else
            row(name, 12.0 * (double)(T * K), 0, [=] { op_unmap_weights(&device, dweights, drow_weight, map, S); });
    }
}

/* First rows of n_experts experts with rows[e % 8] rows each, times `rows_each` / 8 where the mean of `rows` is 8. */
static Tensor starts(int64_t n_experts, int64_t rows_each, const int *rows, int32_t *host) {
    for (int64_t e = 0; e < n_experts; e++) host[e + 1] = host[e] + (int32_t)(rows_each / 8 * rows[e % 8]);
    Tensor t = integers(n_experts + 1, 0);
    op_copy_in(&device, t.data, host, (size_t)(n_experts + 1) * 4, S);
    op_synchronize(&device, S);
    return t;
}

/* rows_each: a multiple of 8 * GROUP_ALIGN. Ragged: 0.75 to 1.25 of it. */
static void rows_grouped(int64_t n_experts, int64_t rows_each, int64_t out, int64_t in, bool ragged) {
    static const int equal[8] = {8, 8, 8, 8, 8, 8, 8, 8}, varied[8] = {6, 10, 7, 8, 9, 8, 6, 10};
    static const char *const kinds[] = {"fprop", "dgrad", "wgrad"};
    const int64_t N = n_experts * rows_each;
    int32_t host[257] = {};
    for (int kind = 0; kind < 3; kind++) {
        const char *name = title("grouped_bf16_%s/%dx%dx%dx%d%s", kinds[kind], (int)n_experts, (int)rows_each, (int)out,
                                 (int)in, ragged ? "/ragged" : "");
        if (!is_wanted(name)) continue;
        Tensor start = starts(n_experts, rows_each, ragged ? varied : equal, host);
        Tensor x = matrix(DTYPE_BF16, N, in), y = matrix(DTYPE_BF16, N, out);
        Tensor w = planes(kind == GEMM_WGRAD ? DTYPE_F32 : DTYPE_BF16, n_experts, out, in);
        const auto ours = [=] {
            if (kind == GEMM_WGRAD)
                op_grouped_wgrad(&device, w, y, x, start, S);
            else
                op_grouped_gemm(&device, kind == GEMM_FPROP ? y : x, kind == GEMM_FPROP ? x : y, w, start,
                                (GemmKind)kind, S);
        };
        const auto peer = [=, &host] {
            for (int64_t e = 0; e < n_experts; e++) {
                const int64_t first = host[e], n = host[e + 1] - first;
                const Tensor xe = tensor_rows(x, first, n), ye = tensor_rows(y, first, n), we = tensor_plane(w, e);
                if (kind == GEMM_FPROP) op_gemm(&device, ye, xe, we, GEMM_FPROP, false, S);
                if (kind == GEMM_DGRAD) op_gemm(&device, xe, ye, we, GEMM_DGRAD, false, S);
                if (kind == GEMM_WGRAD) op_gemm(&device, we, ye, xe, GEMM_WGRAD, true, S);
            }
        };
        const double peer_s = seconds_of(peer);
        row_flops(name, 2.0 * (double)N * (double)out * (double)in, peer_s, 0.6, seconds_of(ours));
    }
}

/* ---- FP8 --------------------------------------------------------------------------------------------------------- */

static void rows_quantize(int64_t M, int64_t C) {
    static const char *const names[] = {"rows", "both", "rows_e5m6", "from_tiles", "from_e5m6"};
    static const double bytes[] = {3, 4, 3.5, 2, 2.5}, gates[] = {0.85, 0.8, 0.85, 0.8, 0.8};
    for (int i = 0; i < 5; i++) {
        const char *name = title("quantize_%s/%dx%d", names[i], (int)M, (int)C);
        if (!is_wanted(name)) continue;
        const Tensor x = i == 3 ? tiles(M, C) : i == 4 ? tiles_empty(DTYPE_E5M6, M, C) : matrix(DTYPE_BF16, M, C);
        if (i == 4) op_quantize(&device, (Quantized){x, tensor_none()}, matrix(DTYPE_BF16, M, C), S);
        const Quantized q = {i < 3 ? tiles_empty(i == 2 ? DTYPE_E5M6 : DTYPE_E4M3, M, C) : tensor_none(),
                             i == 1 || i > 2 ? tiles_empty(DTYPE_E4M3, C, M) : tensor_none()};
        row(name, bytes[i] * (double)(M * C), gates[i], [=] { op_quantize(&device, q, x, S); });
    }
}

static void rows_weight(int64_t n, int64_t O, int64_t I) {
    const int64_t numel = (n ? n : 1) * O * I; /* n 0: a matrix */
    const char *name =
        n ? title("quantize_weight/%dx%dx%d", (int)n, (int)O, (int)I) : title("quantize_weight/%dx%d", (int)O, (int)I);
    if (is_wanted(name)) {
        Tensor w = blocks_empty(n, O, I), wt = blocks_empty(n, I, O), master = vector(DTYPE_F32, numel);
        row(name, 6 * (double)numel, 0.8, [=] { op_quantize_weight(&device, w, wt, master, S); });
    }
    name = title("transpose_weight/%dx%dx%d", (int)(n ? n : 1), (int)O, (int)I);
    if (is_wanted(name)) {
        Tensor w = blocks_empty(n, O, I), wt = blocks_empty(n, I, O);
        row(name, 2 * (double)numel, 0.8, [=] { op_transpose_weight(&device, wt, w, S); });
    }
    for (int bf16_moments = 0; bf16_moments < 2; bf16_moments++) {
        const Dtype moments = bf16_moments ? DTYPE_BF16 : DTYPE_F32;
        name = n ? title("adamw_fp8/%dx%dx%d/%s moments", (int)n, (int)O, (int)I, dtype_name(moments))
                 : title("adamw_fp8/%dx%d/%s moments", (int)O, (int)I, dtype_name(moments));
        if (!is_wanted(name)) continue;
        Tensor w = blocks_empty(n, O, I), wt = blocks_empty(n, I, O), master = vector(DTYPE_F32, numel);
        Tensor grad = vector(DTYPE_F32, numel), m = vector(moments, numel), v = vector(moments, numel);
        op_zero(&device, v, S); /* a negative v would make NaN */
        const StepParams *params = params_make();
        const StepStats *stats = stats_make();
        const UpdateState *state = state_make();
        row(name, (14.0 + 4.0 * (double)dtype_size(moments)) * (double)numel, 0.8,
            [=] { op_adamw_cast(&device, w, wt, master, m, v, grad, true, params, stats, state, S); });
    }
}

static void rows_norm_fp8(int64_t T, int64_t D, int64_t J) {
    const char *name = title("rmsnorm_fp8_forward/%dx%d+%d", (int)T, (int)D, (int)J);
    if (!is_wanted(name)) return;
    Tensor r = matrix(DTYPE_BF16, T, D), q = tiles_empty(DTYPE_E4M3, T, D), rstd = vector(DTYPE_F32, T);
    Tensor x = matrix(DTYPE_BF16, T, D), branch = planes(DTYPE_BF16, J, T, D), w = vector(DTYPE_F32, D);
    row(name, (2.0 * (double)(2 + J) + 1) * (double)(T * D), 0.85,
        [=] { op_residual_rmsnorm_forward(&device, r, tensor_none(), q, rstd, x, branch, w, 1e-6, S); });
}

static void rows_swiglu_fp8(int64_t M, int64_t F, bool weighted) {
    for (int backward = 0; backward < 2; backward++) {
        const char *name = title("swiglu_fp8_%s/%dx%d%s", backward ? "backward" : "forward", (int)M, (int)F,
                                 weighted ? "/weighted" : "");
        if (!is_wanted(name)) continue;
        const Tensor none = tensor_none(), h = backward ? tiles(M, 2 * F) : matrix(DTYPE_BF16, M, 2 * F);
        const Tensor weight = weighted ? vector(DTYPE_F32, M) : none, dweight = weighted ? vector(DTYPE_F32, M) : none;
        if (backward) {
            const Tensor dy = matrix(DTYPE_BF16, M, F), y_columns = tiles_empty(DTYPE_E4M3, F, M);
            const Quantized dh = {tiles_empty(DTYPE_E4M3, M, 2 * F), tiles_empty(DTYPE_E4M3, 2 * F, M)};
            row(name, 9.0 * (double)(M * F), 0.8,
                [=] { op_swiglu_backward(&device, none, dh, y_columns, dweight, dy, h, weight, S); });
        } else {
            const Tensor y = tiles_empty(DTYPE_E4M3, M, F), h_rows = tiles_empty(DTYPE_E4M3, M, 2 * F);
            row(name, 7.0 * (double)(M * F), 0.85, [=] { op_swiglu_forward(&device, none, y, h_rows, h, weight, S); });
        }
    }
}

/* Rows: each token is read once and comes from L2 then. Columns: likewise. */
static void rows_gather_fp8(int64_t T, int64_t D, int64_t K, int64_t E) {
    const int64_t N = round_up(T * K + (GROUP_ALIGN - 1) * E, GROUP_ALIGN);
    for (int columns = 0; columns < 2; columns++) {
        const char *name =
            title("gather_%s_fp8/%dx%d/%d of %d", columns ? "columns" : "rows", (int)T, (int)D, (int)K, (int)E);
        if (!is_wanted(name)) continue;
        MoeMap map = {integers(N, 1), vector(DTYPE_F32, N), tensor_reshape2(integers(T * K, 1), T, K),
                      integers(E + 1, 1), tensor_none()};
        const Tensor ids = tensor_reshape2(integers(T * K, (int32_t)E), T, K), weights = matrix(DTYPE_F32, T, K);
        const Tensor slots = integers(E, 0), x = tiles(T, D), none = tensor_none();
        const Tensor y = columns ? none : tiles_empty(DTYPE_E4M3, N, D);
        const Tensor yt = columns ? tiles_empty(DTYPE_E4M3, D, N) : none;
        op_moe_map(&device, map, ids, weights, slots, 0, S);
        row(name, (double)(K + 1) * (double)(T * D), 0.75, [=] { op_gather_rows(&device, y, yt, x, map, S); });
    }
}

/* y (M, N) over K terms; the peer: the same in BF16. gate: how much faster. */
static void rows_gemm_fp8(int64_t T, int64_t out, int64_t in, double gate) {
    static const char *const kinds[] = {"fprop", "dgrad", "wgrad"};
    for (int kind = 0; kind < 3; kind++) {
        const char *name = title("gemm_fp8_%s/%dx%dx%d", kinds[kind], (int)T, (int)out, (int)in);
        if (!is_wanted(name)) continue;
        const bool is_wgrad = kind == GEMM_WGRAD;
        const int64_t M = is_wgrad ? out : T, N = kind == GEMM_FPROP ? out : in, K = is_wgrad ? T : kind ? out : in;
        const Tensor y = matrix(is_wgrad ? DTYPE_F32 : DTYPE_BF16, M, N), a = tiles(M, K);
        const Tensor b = is_wgrad ? tiles(N, K) : blocks(0, N, K);
        const Tensor a_wide = is_wgrad ? matrix(DTYPE_BF16, K, M) : matrix(DTYPE_BF16, M, K);
        const Tensor b_wide = kind == GEMM_FPROP ? matrix(DTYPE_BF16, N, K) : matrix(DTYPE_BF16, K, N);
        const double wide = seconds_of([=] { op_gemm(&device, y, a_wide, b_wide, (GemmKind)kind, is_wgrad, S); });
        const double s = seconds_of([=] { op_gemm(&device, y, a, b, (GemmKind)kind, is_wgrad, S); });
        row_flops(name, 2.0 * (double)T * (double)out * (double)in, wide, gate, s);
    }
}

/* The peer: cuBLASLt in FP8, called once for each expert, with the same rows of activations again and again. */
static void rows_grouped_fp8(int64_t n_experts, int64_t rows_each, int64_t out, int64_t in, bool ragged) {
    static const int equal[8] = {8, 8, 8, 8, 8, 8, 8, 8}, varied[8] = {6, 10, 7, 8, 9, 8, 6, 10};
    static const char *const kinds[] = {"fprop", "dgrad", "wgrad"};
    const int64_t N = n_experts * rows_each;
    int32_t host[257] = {};
    for (int kind = 0; kind < 3; kind++) {
        const char *name = title("grouped_fp8_%s/%dx%dx%dx%d%s", kinds[kind], (int)n_experts, (int)rows_each, (int)out,
                                 (int)in, ragged ? "/ragged" : "");
        if (!is_wanted(name)) continue;
        const bool is_wgrad = kind == GEMM_WGRAD;
        const Tensor start = starts(n_experts, rows_each, ragged ? varied : equal, host);
        const int64_t to = kind == GEMM_DGRAD ? in : out, from = kind == GEMM_DGRAD ? out : in;
        const Tensor y = is_wgrad ? planes(DTYPE_F32, n_experts, out, in) : matrix(DTYPE_BF16, N, to);
        const Tensor a = is_wgrad ? tiles(out, N) : tiles(N, from),
                     b = is_wgrad ? tiles(in, N) : blocks(n_experts, to, from);
        const Tensor a_one = is_wgrad ? tiles(out, rows_each) : tiles(rows_each, from);
        const Tensor b_one = is_wgrad ? tiles(in, rows_each) : tensor_none();
        const auto ours = [=] {
            if (is_wgrad)
                op_grouped_wgrad(&device, y, a, b, start, S);
            else
                op_grouped_gemm(&device, y, a, b, start, (GemmKind)kind, S);
        };
        const auto peer = [=] {
            for (int64_t e = 0; e < n_experts; e++)
                op_gemm(&device, is_wgrad ? tensor_plane(y, e) : tensor_rows(y, e * rows_each, rows_each), a_one,
                        is_wgrad ? b_one : tensor_plane(b, e), (GemmKind)kind, is_wgrad, S);
        };
        const double peer_s = seconds_of(peer);
        row_flops(name, 2.0 * (double)N * (double)out * (double)in, peer_s, 0.6, seconds_of(ours));
    }
}

/* Causal, n_seqs sequences of seq_len tokens, heads of 128 + 64 and 128. FLOPs: half of the square; backward without
 * the second product for the scores. */
static void rows_attention(int n_heads, int64_t n_seqs, int64_t seq_len) {
    const AttentionShape a = {n_heads, 128, 64, 128, 0.0722, 1};
    const int64_t T = n_seqs * seq_len, qk = n_heads * 192, v = n_heads * 128;
    const double square = (double)n_seqs * n_heads * (double)seq_len * (double)seq_len;
    for (int backward = 0; backward < 2; backward++) {
        const char *kind = backward ? "backward" : "forward";
        const char *name = n_seqs == 1 ? title("attention_%s/%dx%d", kind, n_heads, (int)seq_len)
                                       : title("attention_%s/%dx%dx%d", kind, n_heads, (int)n_seqs, (int)seq_len);
        if (!is_wanted(name)) continue;
        Tensor q = matrix(DTYPE_BF16, T, qk), k = matrix(DTYPE_BF16, T, qk), val = matrix(DTYPE_BF16, T, v);
        Tensor o = matrix(DTYPE_BF16, T, v), d_o = matrix(DTYPE_BF16, T, v), dq = matrix(DTYPE_BF16, T, qk);
        Tensor dk = matrix(DTYPE_BF16, T, qk), dv = matrix(DTYPE_BF16, T, v), doc_start = integers(T, 0);
        Tensor lse = matrix(DTYPE_F32, T, n_heads), delta = matrix(DTYPE_F32, T, n_heads);
        int32_t *host = (int32_t *)malloc((size_t)T * 4);
        CHECK(host, "no memory");
        for (int64_t t = 0; t < T; t++) host[t] = (int32_t)(t / seq_len * seq_len);
        op_copy_in(&device, doc_start.data, host, (size_t)T * 4, S);
        op_synchronize(&device, S);
        free(host);
        op_attention_forward(&device, o, lse, q, k, val, doc_start, a, S); /* backward needs its lse */
        const double s = seconds_of([=] {
            if (backward)
                op_attention_backward(&device, dq, dk, dv, delta, d_o, o, q, k, val, lse, doc_start, a, S);
            else
                op_attention_forward(&device, o, lse, q, k, val, doc_start, a, S);
        });
        row_flops(name, square * (backward ? 3 * 192 + 2 * 128 : 192 + 128), 0, 0, s);
    }
}

static void rows_cross_entropy(int64_t C, int64_t V) {
    for (int gradient = 0; gradient < 2; gradient++) {
        const char *name = title("cross_entropy%s/%dx%d", gradient ? "" : "_loss", (int)C, (int)V);
        if (!is_wanted(name)) continue;
        Tensor loss = vector(DTYPE_F32, C), logits = matrix(DTYPE_BF16, C, V), targets = integers(C, (int32_t)V);
        const StepParams *params = params_make();
        row(name, (gradient ? 4.0 : 2.0) * (double)(C * V), 0.85,
            [=] { op_cross_entropy(&device, loss, logits, targets, V, 0, gradient, params, S); });
    }
}

static void rows_update(int64_t n) {
    const char *name = title("grad_norm/%dM", (int)(n >> 20));
    if (is_wanted(name)) {
        const int64_t block = 128 * 2048, n_blocks = n / block;
        Tensor g = vector(DTYPE_F32, n);
        Tensor partial = tensor_1d(allocate((size_t)n_blocks * sizeof(double)), DTYPE_F64, n_blocks);
        Interval *intervals = (Interval *)allocate((size_t)n_blocks * sizeof *intervals);
        for (int64_t i = 0; i < n_blocks; i++) {
            const Interval interval = {i * block, block};
            op_copy_in(&device, intervals + i, &interval, sizeof interval, S);
            op_synchronize(&device, S);
        }
        StepStats *stats = stats_make();
        row(name, 4.0 * (double)n, 0.85, [=] {
            op_grad_squares(&device, partial, g, intervals, S);
            op_grad_norm(&device, stats, partial, S);
        });
    }
    for (int bf16_moments = 0; bf16_moments < 2; bf16_moments++) {
        const Dtype moments = bf16_moments ? DTYPE_BF16 : DTYPE_F32;
        name = title("adamw_cast/%dM/%s moments", (int)(n >> 20), dtype_name(moments));
        if (!is_wanted(name)) continue;
        Tensor copy = vector(DTYPE_BF16, n), master = vector(DTYPE_F32, n), grad = vector(DTYPE_F32, n);
        Tensor m = vector(moments, n), v = vector(moments, n);
        op_zero(&device, v, S); /* a negative v would make NaN */
        const StepParams *params = params_make();
        const StepStats *stats = stats_make();
        const UpdateState *state = state_make();
        row(name, (12.0 + 4.0 * (double)dtype_size(moments) + 2.0) * (double)n, 0.80,
            [=] { op_adamw_cast(&device, copy, tensor_none(), master, m, v, grad, true, params, stats, state, S); });
    }
}

int main(int argc, char **argv) {
    CudaDevice info;
    char err[ERR_LEN], hint[ERR_LEN];
    if (cuda_start(0, &info, err, hint) != 0) DIE(hint, "%s", err);
    device.ops = ops_cuda();
    if (argc > 1 && strcmp(argv[1], "--json") == 0) as_json = true, argv++, argc--;
    parts = argv + 1, n_parts = argc - 1;
    if (!as_json) printf("%s, %d SMs\n", info.name, info.n_sms);
    row_copy();

    rows_embed(16384, 2048, 102400);
    rows_embed(8192, 7168, 129280);
    rows_rmsnorm(16384, 2048, 1);
    rows_rmsnorm(16384, 2048, 2);
    rows_rmsnorm(8192, 2048, 3);
    rows_rmsnorm(8192, 7168, 1);
    rows_rmsnorm(8192, 7168, 3);
    rows_rope(16384, 16, true);
    rows_rope(4096, 128, true);
    rows_rope(4096, 128, false);
    rows_swiglu(98304, 1408, true);
    rows_swiglu(65536, 2048, true);
    rows_swiglu(8192, 18432, false);
    const RouterShape v3 = {256, 8, 8, 4, ROUTER_SIGMOID, GROUP_SCORE_TOP2, true, 2.5, 4096};
    const RouterShape lite = {64, 6, 1, 1, ROUTER_SOFTMAX, GROUP_SCORE_TOP2, false, 1, 4096};
    rows_router(16384, v3, "v3");
    rows_router(16384, lite, "v2_lite");
    rows_permute(16384, 2048, 6, 64);
    rows_permute(8192, 7168, 8, 16);
    rows_cross_entropy(8192, 129280);
    rows_cross_entropy(4096, 163840);
    rows_update(256 << 20);
    rows_grouped(64, 1024, 2816, 2048, false); /* V2-Lite, Moonlight: gate and up, down */
    rows_grouped(64, 2048, 2816, 2048, true);
    rows_grouped(64, 1024, 2048, 1408, false);
    rows_grouped(16, 4096, 4096, 7168, false); /* V3 */
    rows_grouped(16, 4096, 7168, 2048, false);
    rows_quantize(16384, 2048);
    rows_quantize(8192, 7168);
    rows_quantize(16384, 16384);
    rows_weight(0, 24576, 7168);
    rows_weight(64, 2816, 2048);
    rows_norm_fp8(16384, 2048, 2);
    rows_norm_fp8(8192, 7168, 1);
    rows_swiglu_fp8(98304, 1408, true);
    rows_swiglu_fp8(65536, 2048, true);
    rows_swiglu_fp8(8192, 18432, false);
    rows_gather_fp8(16384, 2048, 6, 64);
    rows_gather_fp8(8192, 7168, 8, 16);
    rows_gemm_fp8(8192, 36864, 7168, 1.35); /* V3: dense gate and up, down, output, latents */
    rows_gemm_fp8(8192, 7168, 18432, 1.35);
    rows_gemm_fp8(8192, 7168, 16384, 1.35);
    rows_gemm_fp8(8192, 2112, 7168, 1.35);
    rows_gemm_fp8(16384, 5632, 2048, 1.2); /* hidden 2048: shared gate and up, output, keys and values */
    rows_gemm_fp8(16384, 2048, 2048, 1.2);
    rows_gemm_fp8(16384, 4096, 512, 1.2);
    rows_grouped_fp8(64, 1024, 2816, 2048, false);
    rows_grouped_fp8(64, 2048, 2816, 2048, true);
    rows_grouped_fp8(64, 1024, 2048, 1408, false);
    rows_grouped_fp8(16, 4096, 4096, 7168, false);
    rows_grouped_fp8(16, 4096, 7168, 2048, false);
    rows_attention(128, 1, 4096);
    rows_attention(16, 8, 4096);
    rows_attention(128, 1, 8192);
    cuda_stop();
    return 0;
}
