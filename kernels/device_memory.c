/* See device_memory.h. */
#include "device_memory.h"

#include <string.h>

const char *const memory_row_name[MEMORY_ROWS] = {
    "driver and context", "op scratch", "GEMM workspace", "cuBLASLt", "GEMM kernels", "CUDA graphs", "NCCL",
};

void device_memory_expected(DeviceMemory *m) {
    /* As an H200 with CUDA 13.0 and cuBLASLt 13.1 said, whole modules loaded at the start; the last two are what a
     * step adds. tests/cuda/test_memory.c prints beside them what the GPU at hand takes. */
    static const int mib[MEMORY_ROWS] = {
        [MEMORY_CONTEXT] = 533,      [MEMORY_OP_SCRATCH] = 15,  [MEMORY_GEMM_WORKSPACE] = 64,
        [MEMORY_GEMM_LIBRARY] = 402, [MEMORY_GEMM_KERNELS] = 4, [MEMORY_GRAPHS] = 18,
    };
    memset(m, 0, sizeof *m);
    for (int i = 0; i < MEMORY_ROWS; i++) m->row[i] = (int64_t)mib[i] << 20;
}
