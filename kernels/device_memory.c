/* See device_memory.h. */
#include "device_memory.h"

#include <string.h>

const char *const memory_row_name[MEMORY_ROWS] = {
    "driver and context", "op scratch", "GEMM workspace", "cuBLASLt", "GEMM kernels", "CUDA graphs", "NCCL",
};

int64_t device_memory_graphs(int64_t n_passes, int64_t n_blocks) {
    /* On the same GPU, pipelines of 4 and 16 micro-batches, of 7 and 8 blocks, held 2.1 to 3.3 KiB a launch; a block of
     * the smaller model was 60 launches, of the larger one 67, its update 15. */
    enum { LAUNCH_BYTES = 3 << 10, PASS_LAUNCHES = 64, UPDATE_LAUNCHES = 16 };
    return LAUNCH_BYTES * (PASS_LAUNCHES * n_passes + UPDATE_LAUNCHES * n_blocks);
}

void device_memory_expected(DeviceMemory *m) {
    /* As an H200 with CUDA 13.0 and cuBLASLt 13.1 said, whole modules loaded at the start; the last is what a first
     * step adds. tests/cuda/test_memory.c prints beside them what the GPU at hand takes. */
    static const int mib[MEMORY_ROWS] = {
        [MEMORY_CONTEXT] = 533,      [MEMORY_OP_SCRATCH] = 15,   [MEMORY_GEMM_WORKSPACE] = 64,
        [MEMORY_GEMM_LIBRARY] = 402, [MEMORY_GEMM_KERNELS] = 18,
    };
    memset(m, 0, sizeof *m);
    for (int i = 0; i < MEMORY_ROWS; i++) m->row[i] = (int64_t)mib[i] << 20;
}
