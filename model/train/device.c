/* See device.h. The one place that knows which backends were built in. */
#include "device.h"

#include <stdio.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/host_memory.h"
#include "kernels/cpu/cpu.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef HAVE_CUDA
#include "kernels/cuda/cuda.h"
#endif

/* Logits that fill a GPU. */
#define GPU_LOGITS_BYTES ((int64_t)1 << 30)

static int threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static void use_host_memory(DeviceMemory *m) {
    host_memory("", &m->total, &m->free);
    m->is_measured = true;
    m->on_touch = true;
}

static void open_cpu(Device *d, const Config *c, char *text) {
    if (c->precision.compute == COMPUTE_FP8)
        DIE("set precision.compute to \"bf16\" or \"fp32\"",
            "precision.compute is fp8, which the CPU backend does not have");
#ifdef _OPENMP
    if (c->run.threads > 0) omp_set_num_threads(c->run.threads);
#endif
    d->ops = ops_cpu();
    use_host_memory(&d->memory);
    snprintf(text, DEVICE_TEXT_LEN, "cpu, %d thread%s, %s", threads(), threads() > 1 ? "s" : "", cpu_isa_name());
}

#ifdef HAVE_CUDA
const char *device_built_for(char *text) {
    return cuda_built_for(text, DEVICE_TEXT_LEN);
}

static void open_cuda(Device *d, const Config *c, char *text) {
    char err[ERR_LEN], hint[ERR_LEN];
    CudaDevice gpu;
    if (cuda_start(0, &gpu, err, hint) != 0) DIE(hint, "%s", err);
    if (c->precision.compute == COMPUTE_FP8) {
        if (cuda_check_fp8(&gpu, err, hint) != 0) DIE(hint, "%s", err);
        DIE("set precision.compute to \"bf16\"", "precision.compute is fp8, which this version does not have yet");
    }
    d->ops = ops_cuda();
    d->logits_bytes = GPU_LOGITS_BYTES;
    cuda_memory(&d->memory);
    snprintf(text, DEVICE_TEXT_LEN,
             "%.64s (sm_%d%d, %d SMs, %.0f of %.0f GiB free), driver for CUDA %d.%d, cuBLASLt %zu", gpu.name, gpu.major,
             gpu.minor, gpu.n_sms, (double)d->memory.free / (1 << 30), (double)d->memory.total / (1 << 30),
             gpu.driver_version / 1000, gpu.driver_version % 1000 / 10, gpu.cublaslt_version);
}

/* run.device "auto": a GPU that is there but cannot be used is an error, no GPU is a fact. `why` gets it. */
static bool wants_cuda(const Config *c, char *why) {
    if (c->run.device != DEVICE_AUTO) return c->run.device == DEVICE_CUDA;
    return cuda_device_count(why) > 0;
}

static void close_cuda(void) {
    cuda_stop();
}
#else
const char *device_built_for(char *text) {
    snprintf(text, DEVICE_TEXT_LEN, "CPU only");
    return text;
}

static void open_cuda(Device *d, const Config *c, char *text) {
    (void)d, (void)c, (void)text;
    DIE("set run.device to \"auto\" or \"cpu\", or build with nvcc: make CUDA_HOME=...",
        "run.device is cuda, but this binary has no CUDA backend");
}

static bool wants_cuda(const Config *c, char *why) {
    why[0] = 0;
    return c->run.device == DEVICE_CUDA;
}

static void close_cuda(void) {
}
#endif

void device_open(Device *d, const Config *c, char *text) {
    char why[ERR_LEN] = "";
    memset(d, 0, sizeof *d);
    if (wants_cuda(c, why))
        open_cuda(d, c, text);
    else
        open_cpu(d, c, text);
    if (why[0]) {
        const size_t used = strlen(text);
        snprintf(text + used, DEVICE_TEXT_LEN - used, "; no GPU: %.250s", why);
    }
    ops_check_complete(d->ops);
}

void device_close(Device *d) {
    if (d->ops && d->ops != ops_cpu()) close_cuda();
    d->ops = NULL;
}

void device_for_plan(Device *d, const Config *c, bool is_gpu) {
    char why[ERR_LEN];
    memset(d, 0, sizeof *d);
    d->ops = ops_cpu(); /* only asked for nothing */
    if (!is_gpu && !wants_cuda(c, why)) {
        use_host_memory(&d->memory);
        return;
    }
    device_memory_expected(&d->memory);
    d->logits_bytes = GPU_LOGITS_BYTES;
}
