/* As cpu/backend.c, but with a device: one context, four streams, memory of the GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.cuh"
#include "cuda.h"

enum { BYTES_TO_START = 256 << 20 }; /* workspaces, the library, and something to compute with */

static CudaContext context;

CudaContext *cuda_context(void) {
    return &context;
}

/* ---- start ------------------------------------------------------------------------------------------------------- */

const char *cuda_built_for(char *buf, int64_t buf_len) {
    snprintf(buf, (size_t)buf_len, "CUDA %d.%d, cuBLASLt %d.%d.%d", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
             CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR, CUBLAS_VER_PATCH);
    return buf;
}

/* All code is loaded with the context, so that it is there when the plan measures it, and no step waits for it. The
 * driver reads this once, at the first call; what the user has set stays. */
static void load_code_at_start(void) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

/* The versions, and how many GPUs there are. */
static cudaError_t find_devices(CudaDevice *info, int *n) {
    *n = 0;
    load_code_at_start();
    if (cudaRuntimeGetVersion(&info->runtime_version) != cudaSuccess) info->runtime_version = CUDART_VERSION;
    cudaError_t error = cudaDriverGetVersion(&info->driver_version);
    if (error == cudaSuccess && info->driver_version == 0) error = cudaErrorInsufficientDriver;
    if (error == cudaSuccess) error = cudaGetDeviceCount(n);
    if (error == cudaSuccess && *n == 0) error = cudaErrorNoDevice;
    (void)cudaGetLastError(); /* an answer, not a failure */
    return error;
}

int cuda_device_count(char *why) {
    char hint[ERR_LEN];
    CudaDevice info;
    int n;
    memset(&info, 0, sizeof info);
    if (why) why[0] = 0;
    const cudaError_t error = find_devices(&info, &n);
    if (error == cudaSuccess) return n;
    if (why) cuda_explain_start((int)error, &info, why, hint);
    return 0;
}

void cuda_bus_of(int device, char *bus, int bus_len) {
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus, bus_len, device));
}

__global__ void probe_kernel(int *out) {
    *out = 1;
}

/* A context, some memory, and code for this GPU: machine code, or PTX that its driver can compile. */
static cudaError_t probe(int device) {
    int *flag;
    cudaError_t error = cudaSetDevice(device);
    if (error != cudaSuccess || (error = cudaMalloc(&flag, 256)) != cudaSuccess) return error;
    probe_kernel<<<1, 1>>>(flag);
    error = cudaGetLastError();
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    cudaFree(flag);
    return error;
}

/* The library's own start belongs to the plan, and comes with its first product; what it computes is nothing. */
static void first_gemms(const CudaContext *c) {
    enum { N = 256, APART = 1 << 20 };
    char *room = (char *)c->gemm_workspace[STREAM_AUX]; /* of the stream that does not compute here */
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16};
    for (Dtype t : dtypes)
        cuda_gemm(tensor_2d(room, t, N, N), tensor_2d(room + APART, t, N, N), tensor_2d(room + 2 * APART, t, N, N),
                  GEMM_FPROP, false, STREAM_COMPUTE);
    CUDA_CHECK(cudaStreamSynchronize(c->stream[STREAM_COMPUTE]));
    cuda_gemm_forget();
}

static void make_streams(CudaContext *c) {
    static const Stream with_gemm[] = {STREAM_COMPUTE, STREAM_AUX};
    for (int s = 0; s < STREAM_COUNT; s++) CUDA_CHECK(cudaStreamCreateWithFlags(&c->stream[s], cudaStreamNonBlocking));
    for (int e = 0; e < EVENTS_MAX; e++) CUDA_CHECK(cudaEventCreateWithFlags(&c->event[e], cudaEventDisableTiming));
    for (Stream s : with_gemm) CUDA_CHECK(cudaMalloc(&c->gemm_workspace[s], GEMM_WORKSPACE_BYTES));
    CUBLAS_CHECK(cublasLtCreate(&c->cublas));
    first_gemms(c);
    cuda_memory_library((int64_t)(sizeof with_gemm / sizeof *with_gemm) * GEMM_WORKSPACE_BYTES);
}

int cuda_start(int device, CudaDevice *info, char *err, char *hint) {
    int n;
    memset(info, 0, sizeof *info);
    hint[0] = 0;
    cudaError_t error = find_devices(info, &n);
    if (error == cudaSuccess && (device < 0 || device >= n)) {
        snprintf(hint, ERR_LEN, "CUDA_VISIBLE_DEVICES says which GPUs a process sees");
        return err_set(err, "GPU %d of %d", device, n);
    }
    cudaDeviceProp p;
    if (error == cudaSuccess) error = cudaGetDeviceProperties(&p, device);
    if (error != cudaSuccess) return cuda_explain_start((int)error, info, err, hint);
    snprintf(info->name, sizeof info->name, "%.200s", p.name);
    info->major = p.major;
    info->minor = p.minor;
    info->n_sms = p.multiProcessorCount;
    CUDA_CHECK(cudaDeviceGetPCIBusId(info->pci_bus_id, sizeof info->pci_bus_id, device));
    cuda_memory_before(device);
    error = probe(device);
    if (error != cudaSuccess) return cuda_explain_start((int)error, info, err, hint);
    cuda_memory_context(device);
    DeviceMemory room;
    cuda_memory(&room);
    if (room.free < BYTES_TO_START) return cuda_explain_start((int)cudaErrorMemoryAllocation, info, err, hint);
    if (cublaslt_load(err, hint) != 0) return -1;
    info->cublaslt_version = cublasLtGetVersion();

    CudaContext *c = &context;
    c->device = device;
    c->n_sms = p.multiProcessorCount;
    make_streams(c);
    c->started = true;
    return 0;
}

void cuda_stop(void) {
    CudaContext *c = &context;
    if (!c->started) return;
    CUDA_CHECK(cudaDeviceSynchronize());
    cuda_gemm_forget();
    for (int s = 0; s < STREAM_COUNT; s++) {
        if (c->gemm_workspace[s]) CUDA_CHECK(cudaFree(c->gemm_workspace[s]));
        CUDA_CHECK(cudaStreamDestroy(c->stream[s]));
    }
    for (int e = 0; e < EVENTS_MAX; e++) CUDA_CHECK(cudaEventDestroy(c->event[e]));
    CUBLAS_CHECK(cublasLtDestroy(c->cublas));
    memset(c, 0, sizeof *c);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static void *cuda_alloc(size_t bytes) {
    void *p = NULL;
    if (bytes == 0) bytes = 256;
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        (void)cudaGetLastError(); /* an answer, not a failure */
        return NULL;
    }
    CUDA_CHECK(cudaMemset(p, 0, bytes));
    CUDA_CHECK(cudaDeviceSynchronize());
    context.waits.streams++;
    return p;
}

static void cuda_release(void *p) {
    if (p) CUDA_CHECK(cudaFree(p));
}

static void *cuda_host_alloc(size_t bytes) {
    void *p = NULL;
    if (cudaHostAlloc(&p, bytes ? bytes : 256, cudaHostAllocDefault) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    memset(p, 0, bytes);
    return p;
}

static void cuda_host_release(void *p) {
    if (p) CUDA_CHECK(cudaFreeHost(p));
}

static void cuda_copy_in(void *device, const void *host, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, cuda_stream(s)));
}

static void cuda_copy_out(void *host, const void *device, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda_stream(s)));
}

static void cuda_zero(Tensor y, Stream s) {
    if (tensor_bytes(y) > 0) CUDA_CHECK(cudaMemsetAsync(y.data, 0, tensor_bytes(y), cuda_stream(s)));
}

/* Rounds f32 to bf16 (nearest even), or widens. Rows of ld, columns of the last dimension. */
template <typename Y, typename X>
__global__ void cast_kernel(Y *y, int64_t y_ld, const X *x, int64_t x_ld, int64_t cols, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / cols, col = i % cols;
        y[row * y_ld + col] = from_f32<Y>(to_f32(x[row * x_ld + col]));
    }
}

static void cuda_copy(Tensor y, Tensor x, Stream s) {
    const int64_t n = tensor_numel(y);
    if (n == 0) return;
    if (x.scale_layout != SCALE_NONE) {
        cuda_dequantize(y, x, s);
        return;
    }
    const int64_t cols = y.ndim == 1 ? n : y.shape[y.ndim - 1];
    const int64_t y_ld = y.ndim == 1 ? n : y.ld, x_ld = y.ndim == 1 ? n : x.ld;
    if (y.dtype == x.dtype) {
        const size_t size = dtype_size(y.dtype);
        CUDA_CHECK(cudaMemcpy2DAsync(y.data, (size_t)y_ld * size, x.data, (size_t)x_ld * size, (size_t)cols * size,
                                     (size_t)(n / cols), cudaMemcpyDeviceToDevice, cuda_stream(s)));
        return;
    }
    const int64_t blocks = ceil_div(n, 256);
    const unsigned grid = (unsigned)(blocks < 65536 ? blocks : 65536);
    if (y.dtype == DTYPE_BF16)
        cast_kernel<<<grid, 256, 0, cuda_stream(s)>>>(data_of<bf16>(y), y_ld, data_of<float>(x), x_ld, cols, n);
    else
        cast_kernel<<<grid, 256, 0, cuda_stream(s)>>>(data_of<float>(y), y_ld, data_of<bf16>(x), x_ld, cols, n);
    LAUNCH_CHECK();
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

static void cuda_event_record(int event, Stream s) {
    CUDA_CHECK(cudaEventRecord(context.event[event], cuda_stream(s)));
}

static void cuda_event_wait(int event, Stream s) {
    CUDA_CHECK(cudaStreamWaitEvent(cuda_stream(s), context.event[event], 0));
}

/* A wait is one that has something to wait for. */
static void cuda_event_synchronize(int event) {
    const cudaError_t state = cudaEventQuery(context.event[event]);
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) CUDA_CHECK(state);
    (void)cudaGetLastError(); /* an answer, not a failure */
    context.waits.events++;
    CUDA_CHECK(cudaEventSynchronize(context.event[event]));
}

static void cuda_synchronize(Stream s) {
    context.waits.streams++;
    CUDA_CHECK(cudaStreamSynchronize(cuda_stream(s)));
}

CudaWaits cuda_waits(void) {
    return context.waits;
}

struct CUstream_st *cuda_stream_of(Stream s) {
    return cuda_stream(s);
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

struct Graph {
    cudaGraphExec_t exec;
};

/* Thread-local: what the loader's thread does meanwhile is no part of it. */
static void cuda_graph_begin(Stream s) {
    CUDA_CHECK(cudaStreamBeginCapture(cuda_stream(s), cudaStreamCaptureModeThreadLocal));
}

static Graph *cuda_graph_end(Stream s) {
    Graph *g = (Graph *)calloc(1, sizeof *g);
    CHECK(g, "no memory for a graph");
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamEndCapture(cuda_stream(s), &graph));
    CUDA_CHECK(cudaGraphInstantiate(&g->exec, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return g;
}

static void cuda_graph_launch(Graph *g, Stream s) {
    CUDA_CHECK(cudaGraphLaunch(g->exec, cuda_stream(s)));
}

static void cuda_graph_free(Graph *g) {
    CUDA_CHECK(cudaGraphExecDestroy(g->exec));
    free(g);
}

/* ---- table ------------------------------------------------------------------------------------------------------- */

const Ops *ops_cuda(void) {
    static const Ops ops = {
        .name = "cuda",
        .alloc = cuda_alloc,
        .release = cuda_release,
        .host_alloc = cuda_host_alloc,
        .host_release = cuda_host_release,
        .copy_in = cuda_copy_in,
        .copy_out = cuda_copy_out,
        .event_record = cuda_event_record,
        .event_wait = cuda_event_wait,
        .event_synchronize = cuda_event_synchronize,
        .synchronize = cuda_synchronize,
        .graph_begin = cuda_graph_begin,
        .graph_end = cuda_graph_end,
        .graph_launch = cuda_graph_launch,
        .graph_free = cuda_graph_free,
        .zero = cuda_zero,
        .copy = cuda_copy,
        .quantize = cuda_quantize,
        .quantize_weight = cuda_quantize_weight,
        .transpose_weight = cuda_transpose_weight,
        .tile_stats = cuda_tile_stats,
        .embed_forward = cuda_embed_forward,
        .embed_backward = cuda_embed_backward,
        .residual_rmsnorm_forward = cuda_residual_rmsnorm_forward,
        .residual_rmsnorm_backward = cuda_residual_rmsnorm_backward,
        .gemm = cuda_gemm,
        .head_gemm = cuda_head_gemm,
        .rope_split_forward = cuda_rope_split_forward,
        .rope_split_backward = cuda_rope_split_backward,
        .rope_forward = cuda_rope_forward,
        .attention_forward = cuda_attention_forward,
        .attention_backward = cuda_attention_backward,
        .attention_decode = cuda_attention_decode,
        .router_forward = cuda_router_forward,
        .router_backward = cuda_router_backward,
        .bias_step = cuda_bias_step,
        .moe_map = cuda_moe_map,
        .gather_rows = cuda_gather_rows,
        .reduce_rows = cuda_reduce_rows,
        .unmap_weights = cuda_unmap_weights,
        .grouped_gemm = cuda_grouped_gemm,
        .grouped_wgrad = cuda_grouped_wgrad,
        .swiglu_forward = cuda_swiglu_forward,
        .swiglu_backward = cuda_swiglu_backward,
        .cross_entropy = cuda_cross_entropy,
        .loss_sum = cuda_loss_sum,
        .grad_squares = cuda_grad_squares,
        .grad_norm = cuda_grad_norm,
        .update_gate = cuda_update_gate,
        .adamw_cast = cuda_adamw_cast,
    };
    return &ops;
}
