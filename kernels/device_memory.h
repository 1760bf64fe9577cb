/* Memory of a device, and what of it goes to others than the arenas. Floor 1.
 *
 * On a GPU the driver, its context, the library and the graphs take memory too. Those rows are a part of the memory
 * plan, which is exact: what can be computed is, what only the device can tell is measured when it is opened, and what
 * comes later (graphs, the kernels that cuBLASLt loads for a shape) is estimated. A plan without a device takes the
 * expected values for all of them. A CPU has no such rows. */
#ifndef TRAIN_MOE_DEVICE_MEMORY_H
#define TRAIN_MOE_DEVICE_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    MEMORY_CONTEXT,        /* driver, context, code of the kernels */
    MEMORY_OP_SCRATCH,     /* static arrays of the kernels */
    MEMORY_GEMM_WORKSPACE, /* of each stream that runs GEMMs */
    MEMORY_GEMM_LIBRARY,   /* cuBLASLt itself: its handle, its first product */
    MEMORY_GEMM_KERNELS,   /* what cuBLASLt loads with the first GEMM of a kind; estimated */
    MEMORY_GRAPHS,         /* captured steps; estimated from the model (model/memory.h): 0 among a device's own */
    MEMORY_NCCL,           /* its buffers and code; with ranks on GPUs of their own */
    MEMORY_ROWS
} MemoryRow;

extern const char *const memory_row_name[MEMORY_ROWS];

typedef struct {
    int64_t total, free; /* bytes of the device, and what nobody has; total 0: not known */
    int64_t held;        /* what this process has already: with `free`, the room for the whole plan */
    int64_t row[MEMORY_ROWS];
    bool is_measured; /* else the rows are the expected ones */
    bool on_touch;    /* pages are taken when they are first written (CPU): a plan that is larger may fit */
} DeviceMemory;

/* What captured steps take: n_passes times forward and backward of a block, and an update of n_blocks. Estimated. */
int64_t device_memory_graphs(int64_t n_passes, int64_t n_blocks);

/* A GPU that is not here: rows as expected, total and free 0. */
void device_memory_expected(DeviceMemory *m);

#ifdef __cplusplus
}
#endif
#endif
