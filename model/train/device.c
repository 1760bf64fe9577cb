/* See device.h. The one place that knows which backends were built in. */
#include "device.h"

#include <stdio.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu.h"

#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef HAVE_CUDA
#include "kernels/cuda/cuda.h"
#endif

static int threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static void open_cpu(Device *d, const Config *c, char *text) {
    if (c->precision.compute == COMPUTE_FP8)
        DIE("set precision.compute to \"bf16\" or \"fp32\"",
            "precision.compute is fp8, which the CPU backend does not have");
#ifdef _OPENMP
    if (c->run.threads > 0) omp_set_num_threads(c->run.threads);
#endif
    d->ops = ops_cpu();
    snprintf(text, DEVICE_TEXT_LEN, "cpu, %d thread%s, %s", threads(), threads() > 1 ? "s" : "", cpu_isa_name());
}

#ifdef HAVE_CUDA
const char *device_built_for(char *text) {
    return cuda_built_for(text, DEVICE_TEXT_LEN);
}

static void open_cuda(Device *d, const Config *c, char *text) {
    char err[ERR_LEN], hint[ERR_LEN];
    CudaDevice gpu;
    if (cuda_start(0, &gpu, err, hint) != 0) DIE(hint[0] ? hint : "set run.device to \"cpu\"", "%s", err);
    if (c->precision.compute == COMPUTE_FP8)
        DIE("set precision.compute to \"bf16\"", "precision.compute is fp8, which this version does not have yet");
    d->ops = ops_cuda();
    d->logits_bytes = (int64_t)1 << 30;
    snprintf(text, DEVICE_TEXT_LEN,
             "%.64s (sm_%d%d, %d SMs, %.0f of %.0f GiB free), driver for CUDA %d.%d, cuBLASLt %zu", gpu.name, gpu.major,
             gpu.minor, gpu.n_sms, (double)gpu.bytes_free / (1 << 30), (double)gpu.bytes_total / (1 << 30),
             gpu.driver_version / 1000, gpu.driver_version % 1000 / 10, gpu.cublaslt_version);
}

void device_open(Device *d, const Config *c, char *text) {
    memset(d, 0, sizeof *d);
    if (c->run.device == DEVICE_CUDA || (c->run.device == DEVICE_AUTO && cuda_device_count() > 0))
        open_cuda(d, c, text);
    else
        open_cpu(d, c, text);
    ops_check_complete(d->ops);
}

void device_close(Device *d) {
    if (d->ops && d->ops != ops_cpu()) cuda_stop();
    d->ops = NULL;
}
#else
const char *device_built_for(char *text) {
    snprintf(text, DEVICE_TEXT_LEN, "CPU only");
    return text;
}

void device_open(Device *d, const Config *c, char *text) {
    memset(d, 0, sizeof *d);
    if (c->run.device == DEVICE_CUDA)
        DIE("set run.device to \"auto\" or \"cpu\", or build with nvcc: make CUDA_HOME=...",
            "run.device is cuda, but this binary has no CUDA backend");
    open_cpu(d, c, text);
    ops_check_complete(d->ops);
}

void device_close(Device *d) {
    d->ops = NULL;
}
#endif
