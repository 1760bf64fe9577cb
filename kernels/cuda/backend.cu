/* As cpu/backend.c, but with a device: one context, four streams, memory of the GPU. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.cuh"
#include "cuda.h"

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

int cuda_device_count(void) {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

static void hint_set(char *hint, const char *text) {
    strncpy(hint, text, ERR_LEN - 1);
    hint[ERR_LEN - 1] = 0;
}

static int check_driver(CudaDevice *info, char *err, char *hint) {
    hint[0] = 0;
    if (cudaDriverGetVersion(&info->driver_version) != cudaSuccess || info->driver_version == 0) {
        hint_set(hint, "install NVIDIA's driver, or set run.device to \"cpu\"");
        return err_set(err, "no CUDA driver on this machine");
    }
    CUDA_CHECK(cudaRuntimeGetVersion(&info->runtime_version));
    if (info->driver_version / 1000 < info->runtime_version / 1000) {
        hint_set(hint, "a newer driver, or a build with an older CUDA toolkit (CUDA_HOME=...)");
        return err_set(err, "the driver supports CUDA %d.%d, this binary was built with CUDA %d.%d",
                       info->driver_version / 1000, info->driver_version % 1000 / 10, info->runtime_version / 1000,
                       info->runtime_version % 1000 / 10);
    }
    return 0;
}

__global__ void probe_kernel(int *out) {
    *out = 1;
}

/* Machine code for this GPU, or PTX that its driver can compile? */
static int check_image(const CudaDevice *info, char *err, char *hint) {
    int *flag;
    cudaError_t error = cudaMalloc(&flag, 256);
    if (error == cudaSuccess) {
        probe_kernel<<<1, 1>>>(flag);
        error = cudaGetLastError();
        if (error == cudaSuccess) error = cudaDeviceSynchronize();
        cudaFree(flag);
    }
    if (error == cudaSuccess) return 0;
    hint_set(hint, error == cudaErrorMemoryAllocation ? "another process holds the GPU's memory: see nvidia-smi"
                                                      : "rebuild with GPU_ARCHS naming this GPU's architecture");
    return err_set(err, "%s (sm_%d%d) cannot run this binary's kernels: %s", info->name, info->major, info->minor,
                   cudaGetErrorString(error));
}

int cuda_start(int device, CudaDevice *info, char *err, char *hint) {
    memset(info, 0, sizeof *info);
    if (check_driver(info, err, hint) != 0) return -1;
    int n = cuda_device_count();
    if (device < 0 || device >= n) {
        hint_set(hint, "CUDA_VISIBLE_DEVICES says which GPUs a process sees");
        return err_set(err, "GPU %d of %d", device, n);
    }
    cudaDeviceProp p;
    CUDA_CHECK(cudaSetDevice(device));
    CUDA_CHECK(cudaGetDeviceProperties(&p, device));
    snprintf(info->name, sizeof info->name, "%.200s", p.name);
    info->major = p.major;
    info->minor = p.minor;
    info->n_sms = p.multiProcessorCount;
    if (check_image(info, err, hint) != 0) return -1;
    size_t bytes_free, bytes_total;
    CUDA_CHECK(cudaMemGetInfo(&bytes_free, &bytes_total));
    info->bytes_free = (int64_t)bytes_free;
    info->bytes_total = (int64_t)bytes_total;
    info->cublaslt_version = cublasLtGetVersion();

    CudaContext *c = &context;
    c->device = device;
    c->n_sms = p.multiProcessorCount;
    for (int s = 0; s < STREAM_COUNT; s++) CUDA_CHECK(cudaStreamCreateWithFlags(&c->stream[s], cudaStreamNonBlocking));
    for (int e = 0; e < EVENTS_MAX; e++) CUDA_CHECK(cudaEventCreateWithFlags(&c->event[e], cudaEventDisableTiming));
    CUBLAS_CHECK(cublasLtCreate(&c->cublas));
    for (int s = 0; s < STREAM_COUNT; s++)
        if (s == STREAM_COMPUTE || s == STREAM_AUX) CUDA_CHECK(cudaMalloc(&c->gemm_workspace[s], GEMM_WORKSPACE_BYTES));
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
    return p;
}

static void cuda_release(void *p) {
    if (p) CUDA_CHECK(cudaFree(p));
}

static void cuda_copy_in(void *device, const void *host, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, cuda_stream(s)));
}

static void cuda_copy_out(void *host, const void *device, size_t bytes, Stream s) {
    CUDA_CHECK(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, cuda_stream(s)));
}

static void cuda_zero(Tensor y, Stream s) {
    CUDA_CHECK(cudaMemsetAsync(y.data, 0, tensor_bytes(y), cuda_stream(s)));
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

static void cuda_synchronize(Stream s) {
    CUDA_CHECK(cudaStreamSynchronize(cuda_stream(s)));
}

struct CUstream_st *cuda_compute_stream(void) {
    return cuda_stream(STREAM_COMPUTE);
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

struct CudaGraph {
    cudaGraphExec_t exec;
};

void cuda_graph_begin(void) {
    CUDA_CHECK(cudaStreamBeginCapture(cuda_stream(STREAM_COMPUTE), cudaStreamCaptureModeThreadLocal));
}

CudaGraph *cuda_graph_end(void) {
    CudaGraph *g = (CudaGraph *)calloc(1, sizeof *g);
    CHECK(g, "no memory for a graph");
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamEndCapture(cuda_stream(STREAM_COMPUTE), &graph));
    CUDA_CHECK(cudaGraphInstantiate(&g->exec, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    return g;
}

void cuda_graph_launch(CudaGraph *g) {
    CUDA_CHECK(cudaGraphLaunch(g->exec, cuda_stream(STREAM_COMPUTE)));
}

void cuda_graph_free(CudaGraph *g) {
    if (!g) return;
    CUDA_CHECK(cudaGraphExecDestroy(g->exec));
    free(g);
}

/* ---- table ------------------------------------------------------------------------------------------------------- */

const Ops *ops_cuda(void) {
    static const Ops ops = {
        .name = "cuda",
        .alloc = cuda_alloc,
        .release = cuda_release,
        .copy_in = cuda_copy_in,
        .copy_out = cuda_copy_out,
        .event_record = cuda_event_record,
        .event_wait = cuda_event_wait,
        .synchronize = cuda_synchronize,
        .zero = cuda_zero,
        .copy = cuda_copy,
        .embed_forward = cuda_embed_forward,
        .embed_backward = cuda_embed_backward,
        .residual_rmsnorm_forward = cuda_residual_rmsnorm_forward,
        .residual_rmsnorm_backward = cuda_residual_rmsnorm_backward,
        .gemm = cuda_gemm,
        .rope_split_forward = cuda_rope_split_forward,
        .rope_split_backward = cuda_rope_split_backward,
        .attention_forward = cuda_attention_forward,
        .attention_backward = cuda_attention_backward,
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
        .grad_norm = cuda_grad_norm,
        .update_gate = cuda_update_gate,
        .adamw_cast = cuda_adamw_cast,
    };
    return &ops;
}
