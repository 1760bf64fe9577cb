/* What this process takes of the GPU beside its arenas, for the memory plan. See cuda.h.
 *
 * The runtime cannot look at a device without making a context on it, and then it tells only what all processes hold
 * together. So the driver's management library (NVML), where there is one, is asked before and after: the difference is
 * our context, and what stood there before is the others'. Without it, the context is taken to be the expected one when
 * much more is in use, and what is in use when not. */
#include <string.h>

#include "common.cuh"
#include "cuda.h"
#include "kernels/gpu_health.h"

static size_t op_scratch;

size_t cuda_count_scratch(size_t bytes) {
    op_scratch += bytes;
    return bytes;
}

static struct {
    bool is_known;  /* of this process; a second start finds its context there */
    int64_t before; /* NVML's bytes in use without us; -1: not known */
    int64_t others; /* bytes of other processes when we came */
    int64_t row[MEMORY_ROWS];
} memory;

/* Bytes in use on the device by everybody, or -1. */
static int64_t nvml_used(int device) {
    char bus[32];
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess) {
        (void)cudaGetLastError();
        return -1;
    }
    if (gpu_health_open(GPU_HEALTH_LIBRARY, bus) != 0) return -1;
    const int64_t used = gpu_health_memory_used();
    gpu_health_close();
    return used;
}

/* ---- the rows ---------------------------------------------------------------------------------------------------- */

/* In use on the device by everybody, as the runtime counts. */
static int64_t runtime_used(void) {
    size_t bytes_free, bytes_total;
    CUDA_CHECK(cudaMemGetInfo(&bytes_free, &bytes_total));
    return (int64_t)(bytes_total - bytes_free);
}

void cuda_memory_before(int device) {
    if (!memory.is_known) memory.before = nvml_used(device);
}

void cuda_memory_context(int device) {
    if (memory.is_known) return;
    DeviceMemory expected;
    device_memory_expected(&expected);
    memcpy(memory.row, expected.row, sizeof memory.row);
    const int64_t used = runtime_used(), after = memory.before < 0 ? -1 : nvml_used(device);
    const int64_t usual = expected.row[MEMORY_CONTEXT] + (int64_t)op_scratch;
    const int64_t ours = after > memory.before ? after - memory.before : used > 2 * usual ? usual : used;
    memory.others = max_i64(0, used - ours);
    memory.row[MEMORY_OP_SCRATCH] = (int64_t)op_scratch;
    memory.row[MEMORY_CONTEXT] = max_i64(0, ours - (int64_t)op_scratch);
}

void cuda_memory_library(int64_t workspace) {
    memory.row[MEMORY_GEMM_WORKSPACE] = workspace;
    if (memory.is_known) return;
    const int64_t before = memory.others + memory.row[MEMORY_CONTEXT] + memory.row[MEMORY_OP_SCRATCH];
    memory.row[MEMORY_GEMM_LIBRARY] = max_i64(0, runtime_used() - before - workspace);
    memory.is_known = true;
}

void cuda_memory(DeviceMemory *m) {
    size_t bytes_free, bytes_total;
    CUDA_CHECK(cudaMemGetInfo(&bytes_free, &bytes_total));
    memset(m, 0, sizeof *m);
    memcpy(m->row, memory.row, sizeof m->row);
    m->total = (int64_t)bytes_total;
    m->free = (int64_t)bytes_free;
    m->held = max_i64(0, m->total - m->free - memory.others);
    m->is_measured = true;
}
