/* The CUDA backend, as the C side sees it. */
#ifndef TRAIN_MOE_CUDA_H
#define TRAIN_MOE_CUDA_H

#include "kernels/base/check.h"
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The device and what drives it. */
typedef struct {
    char name[256];
    int major, minor; /* compute capability */
    int n_sms;
    char pci_bus_id[32];
    int driver_version, runtime_version; /* 13000 = 13.0 */
    size_t cublaslt_version;
} CudaDevice;

/* "CUDA 13.0, cuBLASLt 13.1.0": what this binary was built with; into buf, returned. */
const char *cuda_built_for(char *buf, int64_t buf_len);

/* GPUs that can be used; 0 without a driver or a GPU, the reason in `why` (ERR_LEN, may be NULL). Never fails. */
int cuda_device_count(char *why);

/* "00000000:1b:00.0", the address of GPU `device` < cuda_device_count, into bus. Starts nothing. */
void cuda_bus_of(int device, char *bus, int bus_len);

/* Takes GPU `device`, loads cuBLASLt, makes the streams, events and its handle. Returns -1 with one line in err and a
 * hint (ERR_LEN each) where it cannot: cuda_explain_start. */
int cuda_start(int device, CudaDevice *info, char *err, char *hint);
void cuda_stop(void);

/* The GPU's memory as it is now, and this process's rows of the plan: measured when it was started, but for the kernels
 * of cuBLASLt and the graphs. After cuda_start. */
void cuda_memory(DeviceMemory *m);

/* The ops; after cuda_start. */
const Ops *ops_cuda(void);

/* What decides the bits of a dense GEMM: "sm_90, 132 SMs, cuBLASLt 13.1.0" into buf, returned. After cuda_start. */
const char *cuda_gemm_place(char *buf, int64_t buf_len);
/* GEMMs that ran or were prepared so far: those that the table knows, and those that go on as in the checkpoint. */
typedef struct {
    int total, known, resumed;
} GemmCount;
GemmCount cuda_gemm_count(void);
/* All ops do nothing, but gemm chooses the algorithm of the call: a model walked through once with these has all its
 * algorithms. */
const Ops *ops_cuda_prepare(void);
/* The rows of these GEMMs, one a line (gemm_table.h); the caller frees them. */
char *cuda_gemm_rows(void);
/* Such lines, from a checkpoint, go before the table from now on; those of another GPU or library are not used. Before
 * the first GEMM. Returns 0, or -1 with err: a line is no row. */
int cuda_gemm_resume(const char *rows, char *err);

/* A named range of a profiler's time line (NVTX) begins; NULL: the last one ends. Nothing but a test if no profiler is
 * attached. */
void cuda_range(const char *name);
/* Starts or stops what nsys --capture-range=cudaProfilerApi and ncu --profile-from-start off record. */
void cuda_profiler(bool on);

/* A stream as the runtime's cudaStream_t, for timers and for libraries. */
struct CUstream_st *cuda_stream_of(Stream s);

/* How often the host has stood still for the device since cuda_start: for a stream or all of them, and for an event
 * that had not passed. */
typedef struct {
    int64_t streams, events;
} CudaWaits;
CudaWaits cuda_waits(void);

/* ---- errors (errors.cu): from a number to words; these need no GPU --------------------------------------------- */

/* Why a GPU could not be started, in a line and a hint. error: a cudaError_t; gpu: what is known by then, at least
 * the versions. Returns -1. */
int cuda_explain_start(int error, const CudaDevice *gpu, char *err, char *hint);
/* What to do about an error in the middle of a run. */
const char *cuda_failure_hint(int error);
/* "the GPU failed at or before gemm, in step 12 of 900; last checkpoint ...: what". op may be NULL, about "". Returns
 * -1. */
int cuda_failure_text(const char *what, const char *op, const char *about, char *err);
/* Can this GPU and library compute in FP8 with scales of 128? Returns -1 with err and hint if not. */
int cuda_check_fp8(const CudaDevice *gpu, char *err, char *hint);
/* End the process with that line, exit 1: the checkpoints on the disk are whole. */
__attribute__((noreturn)) void cuda_failed(const char *file, int line, int error);
__attribute__((noreturn)) void cublas_failed(const char *file, int line, const char *status);

/* ---- libraries (cublaslt.cu) ---------------------------------------------------------------------------------- */

/* Finds cuBLASLt of the major version this was built with where the loader looks: LD_LIBRARY_PATH, the toolkit of the
 * build (the program's run path), the system. Once; later calls do nothing. Returns -1 with err and hint. */
int cublaslt_load(char *err, char *hint);
/* A shared library and n of its functions by name. Returns -1 with err (may be NULL). */
int cuda_load_library(void **library, const char *file, const char *const *names, void **functions, int n, char *err);

#ifdef __cplusplus
}
#endif
#endif
