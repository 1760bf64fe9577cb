/* Tensors of random numbers, and what a step passes along. See bench.cuh. */
#include <math.h>

#include "bench.cuh"
#include "measure.cuh"

enum { TENSORS_MAX = 256 };

static void *memory[TENSORS_MAX];
static int n_memory;

void *allocate(size_t bytes) {
    CHECK(n_memory < TENSORS_MAX, "more than %d tensors", TENSORS_MAX);
    void *p = op_alloc(&device, bytes);
    CHECK(p, "no device memory for %zu bytes", bytes);
    memory[n_memory++] = p;
    return p;
}

void release_all(void) {
    while (n_memory > 0) op_release(&device, memory[--n_memory]);
}

void *copied(const void *host, size_t bytes) {
    void *p = allocate(bytes);
    op_copy_in(&device, p, host, bytes, S);
    op_synchronize(&device, S);
    return p;
}

/* ---- act and f32 ------------------------------------------------------------------------------------------------- */

static Tensor filled(Tensor t) {
    t.data = allocate(tensor_bytes(t));
    const int64_t n = tensor_numel(t);
    const uint32_t seed = (uint32_t)n_memory;
    if (t.dtype == DTYPE_F32)
        fill_kernel<<<4096, 256, 0, cuda_stream(S)>>>((float *)t.data, n, seed);
    else
        fill_kernel<<<4096, 256, 0, cuda_stream(S)>>>((bf16 *)t.data, n, seed);
    LAUNCH_CHECK();
    return t;
}

Tensor vector(Dtype dtype, int64_t n) {
    return filled(tensor_1d(NULL, dtype, n));
}

Tensor matrix(Dtype dtype, int64_t rows, int64_t cols) {
    return filled(tensor_2d(NULL, dtype, rows, cols));
}

Tensor planes(Dtype dtype, int64_t n, int64_t rows, int64_t cols) {
    return filled(tensor_3d(NULL, dtype, n, rows, cols));
}

/* ---- FP8 --------------------------------------------------------------------------------------------------------- */

static Tensor with_memory(Tensor t) {
    t.data = allocate(tensor_bytes(t));
    t.scale = (float *)allocate((size_t)tensor_n_scales(t) * sizeof(float));
    return t;
}

Tensor tiles_empty(Dtype dtype, int64_t rows, int64_t cols) {
    return with_memory(tensor_tiles(NULL, NULL, dtype, rows, cols));
}

Tensor tiles(int64_t rows, int64_t cols) {
    const Quantized q = {tiles_empty(DTYPE_E4M3, rows, cols), tensor_none()};
    op_quantize(&device, q, matrix(DTYPE_BF16, rows, cols), S);
    return q.rows;
}

Tensor blocks_empty(int64_t n, int64_t rows, int64_t cols) {
    return with_memory(tensor_blocks(NULL, NULL, n, rows, cols));
}

Tensor blocks(int64_t n, int64_t rows, int64_t cols) {
    Tensor w = blocks_empty(n, rows, cols);
    op_quantize_weight(&device, w, tensor_none(), vector(DTYPE_F32, tensor_numel(w)), S);
    return w;
}

/* ---- integers and structs ---------------------------------------------------------------------------------------- */

Tensor integers(int64_t n, int32_t range) {
    int32_t *host = (int32_t *)malloc((size_t)n * 4);
    CHECK(host, "no memory");
    for (int64_t i = 0; i < n; i++)
        host[i] = (int32_t)(range > 0 ? hash_of(i, (uint32_t)n_memory) % (uint32_t)range : i);
    void *data = copied(host, (size_t)n * 4);
    free(host);
    return tensor_1d(data, DTYPE_I32, n);
}

Routing routing_make(int64_t T, int64_t K, int64_t E) {
    const int64_t N = round_up(T * K + (GROUP_ALIGN - 1) * E, GROUP_ALIGN);
    Routing r;
    r.n_rows = N;
    r.map = {integers(N, 1), vector(DTYPE_F32, N), tensor_reshape2(integers(T * K, 1), T, K), integers(E + 1, 1),
             tensor_none()};
    r.ids = tensor_reshape2(integers(T * K, (int32_t)E), T, K);
    r.weights = matrix(DTYPE_F32, T, K);
    r.slots = integers(E, 0);
    op_moe_map(&device, r.map, r.ids, r.weights, r.slots, 0, S);
    return r;
}

StepParams *params_make(void) {
    StepParams params = {};
    params.inv_tokens = 1e-4, params.loss_scale[0] = 1, params.balance_scale = 0.1;
    params.lr = 1e-4, params.beta1 = 0.9, params.beta2 = 0.95, params.eps = 1e-8, params.weight_decay = 0.1;
    params.skip_loss_above = params.skip_norm_above = INFINITY;
    return (StepParams *)copied(&params, sizeof params);
}

StepStats *stats_make(void) {
    StepStats stats = {};
    stats.grad_scale = 1e-3;
    return (StepStats *)copied(&stats, sizeof stats);
}

UpdateState *state_make(void) {
    UpdateState state = {};
    state.adam_t = 10;
    return (UpdateState *)copied(&state, sizeof state);
}
