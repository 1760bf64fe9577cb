/* The CUDA backend, as the C side sees it. */
#ifndef TRAIN_MOE_CUDA_H
#define TRAIN_MOE_CUDA_H

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The device and what drives it. */
typedef struct {
    char name[256];
    int major, minor; /* compute capability */
    int n_sms;
    int64_t bytes_total, bytes_free;
    int driver_version, runtime_version; /* 13000 = 13.0 */
    size_t cublaslt_version;
} CudaDevice;

/* "CUDA 13.0, cuBLASLt 13.1.0": what this binary was built with; into buf, returned. */
const char *cuda_built_for(char *buf, int64_t buf_len);

/* GPUs that can be used; 0 without a driver or a GPU. Never fails. */
int cuda_device_count(void);

/* Takes GPU `device`, makes the streams, events and the cuBLASLt handle. Returns -1 with one line in err and a hint
 * (ERR_LEN each): no driver, a driver older than the toolkit (both numbers), no GPU, no machine code for this one. */
int cuda_start(int device, CudaDevice *info, char *err, char *hint);
void cuda_stop(void);

/* The ops; after cuda_start. */
const Ops *ops_cuda(void);

/* STREAM_COMPUTE as the runtime's cudaStream_t, for timers. */
struct CUstream_st *cuda_compute_stream(void);

/* One stretch of launches as a graph: everything launched on all streams between begin and end is captured, not run.
 * Returns the graph; cuda_graph_launch replays it on STREAM_COMPUTE. */
typedef struct CudaGraph CudaGraph;
void cuda_graph_begin(void);
CudaGraph *cuda_graph_end(void);
void cuda_graph_launch(CudaGraph *g);
void cuda_graph_free(CudaGraph *g);

#ifdef __cplusplus
}
#endif
#endif
