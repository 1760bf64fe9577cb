/* Speed of the CUDA kernels: each row is an op at a realistic size. Those that move bytes: their bytes (every input
 * read once, every output written once) a second, and that as a share of a device-to-device copy measured in the
 * same run. Those that multiply: their FLOPs a second; grouped products beside cuBLASLt, which is called once for
 * each expert, FP8 beside BF16.
 *
 *     bench_cuda [--json] [PART...]        rows whose name contains a PART; JSON rows as in results.jsonl
 *
 * An op is captured ten times in a graph and the graph replayed; the figure is the median. The tensors of a row are
 * larger than the L2 cache, except where the row says so. Data is random: zeros run faster. */
#include <stdarg.h>

#include "bench.cuh"
#include "measure.cuh"

enum { ROUNDS = 9, COPY_MB = 1024 };

Device device;
static double copy_rate; /* bytes read and written, a second */
static bool as_json;
static char **parts;
static int n_parts;

/* ---- timing ------------------------------------------------------------------------------------------------------ */

double seconds_of_graph(Graph *graph) {
    op_graph_launch(&device, graph, S);
    cudaEvent_t start, end;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    double ms[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        float elapsed;
        CUDA_CHECK(cudaEventRecord(start, cuda_stream(S)));
        op_graph_launch(&device, graph, S);
        CUDA_CHECK(cudaEventRecord(end, cuda_stream(S)));
        CUDA_CHECK(cudaEventSynchronize(end));
        CUDA_CHECK(cudaEventElapsedTime(&elapsed, start, end));
        ms[i] = elapsed;
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    op_graph_free(&device, graph);
    return 1e-3 * median(ms, ROUNDS) / (double)OPS_IN_GRAPH;
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

bool is_wanted(const char *name) {
    for (int i = 0; i < n_parts; i++)
        if (strstr(name, parts[i])) return true;
    return n_parts == 0;
}

const char *title(const char *fmt, ...) {
    static char text[128];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return text;
}

void row_bytes(const char *name, double bytes, double gate, double s) {
    const double share = bytes / s / copy_rate;
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

void row_flops(const char *name, double flops, double peer_s, double gate, double s) {
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

void row_share(const char *name, const char *of_what, double whole_s, double limit, double s) {
    const double share = s / whole_s;
    if (as_json)
        printf("{\"bench\":\"%s\",\"value\":%.2f,\"unit\":\"%% of %s\",\"us\":%.2f}\n", name, 100 * share, of_what,
               1e6 * s);
    else
        printf("%-58s %9.1f us %7.2f %% of %s  %s\n", name, 1e6 * s, 100 * share, of_what,
               share <= limit ? "ok" : "ABOVE ITS LIMIT");
    fflush(stdout);
    release_all();
}

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
    void *from = vector(DTYPE_F32, (int64_t)bytes / 4).data, *to = allocate(bytes);
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
    rows_linears();
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
