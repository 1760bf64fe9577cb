/* For profilers, and nothing to a run without one. NVTX comes as headers with the toolkit: a call looks once for the
 * profiler's library, which the profiler names in the environment, and from then on tests a pointer. */
#include <cuda_profiler_api.h>
#include <nvtx3/nvToolsExt.h>

#include "common.cuh"
#include "cuda.h"

void cuda_range(const char *name) {
    if (name)
        nvtxRangePushA(name);
    else
        nvtxRangePop();
}

void cuda_profiler(bool on) {
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(on ? cudaProfilerStart() : cudaProfilerStop());
}
