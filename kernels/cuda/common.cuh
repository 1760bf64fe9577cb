/* What the CUDA ops share: errors, streams, element types, sums in a fixed order. See cpu/cpu.h for its twin.
 *
 * Kernels are templates over the element type T of activations and weights (float or __nv_bfloat16) and compute in
 * float. An op picks T with ACT_SWITCH. Sums never depend on the grid: a row is summed by one warp or one block in a
 * fixed butterfly, and partial sums of many rows have a number that follows from the shape. */
#ifndef TRAIN_MOE_COMMON_CUH
#define TRAIN_MOE_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "cublaslt.h"
#include "cuda.h"
#include "cuda_ops.h"
#include "kernels/base/check.h"
#include "kernels/base/ints.h"
#include "kernels/ops.h"

/* ---- errors ------------------------------------------------------------------------------------------------------ */

/* A call that fails ends the run in one line with exit 1 (errors.cu): the device is at fault, or we are, and only the
 * number tells. */
#define CUDA_CHECK(call)                                                                                               \
    do {                                                                                                               \
        cudaError_t cuda_error = (call);                                                                               \
        if (cuda_error != cudaSuccess) cuda_failed(__FILE__, __LINE__, (int)cuda_error);                               \
    } while (0)
#define CUBLAS_CHECK(call)                                                                                             \
    do {                                                                                                               \
        cublasStatus_t cublas_status = (call);                                                                         \
        if (cublas_status != CUBLAS_STATUS_SUCCESS)                                                                    \
            cublas_failed(__FILE__, __LINE__, cublasLtGetStatusString(cublas_status));                                 \
    } while (0)
/* Behind every launch: a wrong configuration is found here, not at the next synchronize. */
#define LAUNCH_CHECK() CUDA_CHECK(cudaGetLastError())

/* ---- the backend's one context (backend.cu) ---------------------------------------------------------------------- */

enum { GEMM_WORKSPACE_BYTES = 32 << 20 };

typedef struct {
    bool started;
    int device, n_sms;
    cudaStream_t stream[STREAM_COUNT];
    cudaEvent_t event[EVENTS_MAX];
    cublasLtHandle_t cublas;
    void *gemm_workspace[STREAM_COUNT];
    CudaWaits waits;
} CudaContext;

CudaContext *cuda_context(void);
static inline cudaStream_t cuda_stream(Stream s) {
    return cuda_context()->stream[s];
}

/* ---- memory beside the arenas (memory.cu) ------------------------------------------------------------------------ */

/* Puts a static __device__ array of a file into the memory plan. */
#define OP_SCRATCH(array) __attribute__((unused)) static const size_t array##_bytes = cuda_count_scratch(sizeof array)
size_t cuda_count_scratch(size_t bytes);
/* In cuda_start: before there is a context; behind it; behind the library's first use, with `workspace` bytes
 * allocated for it. */
void cuda_memory_before(int device);
void cuda_memory_context(int device);
void cuda_memory_library(int64_t workspace);

/* ---- elements ---------------------------------------------------------------------------------------------------- */

typedef __nv_bfloat16 bf16;

__host__ __device__ inline float to_f32(float x) {
    return x;
}
__host__ __device__ inline float to_f32(bf16 x) {
    return __bfloat162float(x);
}
template <typename T> __host__ __device__ inline T from_f32(float x);
template <> __host__ __device__ inline float from_f32<float>(float x) {
    return x;
}
template <> __host__ __device__ inline bf16 from_f32<bf16>(float x) {
    return __float2bfloat16_rn(x);
}

/* N elements, loaded and stored at once: 16 bytes if not said otherwise, in several accesses if more. N = 1 serves rows
 * of any width and alignment; else the address must be a multiple of the pack's size, or of 16. */
template <typename T, int N_ = 16 / (int)sizeof(T)> struct Pack {
    static const int N = N_;
    static const int BYTES = N_ * (int)sizeof(T);
    alignas(BYTES < 16 ? BYTES : 16) T x[N_];
};
template <int N, typename T> __device__ inline Pack<T, N> load_pack(const T *p) {
    Pack<T, N> v;
    if constexpr (Pack<T, N>::BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < Pack<T, N>::BYTES / 16; i++)
            reinterpret_cast<int4 *>(v.x)[i] = reinterpret_cast<const int4 *>(p)[i];
    } else if constexpr (Pack<T, N>::BYTES == 8) {
        *reinterpret_cast<int2 *>(v.x) = *reinterpret_cast<const int2 *>(p);
    } else if constexpr (Pack<T, N>::BYTES == 4) {
        *reinterpret_cast<int *>(v.x) = *reinterpret_cast<const int *>(p);
    } else {
        static_assert(N == 1, "no access of this size");
        v.x[0] = p[0];
    }
    return v;
}
/* To device memory. In PTX, because the compiler splits the copy of an int4 into four stores in some loops. */
template <typename T, int N> __device__ inline void store_pack(T *p, const Pack<T, N> &v) {
    const int *word = reinterpret_cast<const int *>(v.x);
    if constexpr (Pack<T, N>::BYTES % 16 == 0) {
#pragma unroll
        for (int i = 0; i < Pack<T, N>::BYTES / 4; i += 4)
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"((char *)p + 4 * i), "r"(word[i]),
                         "r"(word[i + 1]), "r"(word[i + 2]), "r"(word[i + 3])
                         : "memory");
    } else if constexpr (Pack<T, N>::BYTES == 8) {
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(word[0]), "r"(word[1]) : "memory");
    } else if constexpr (Pack<T, N>::BYTES == 4) {
        *reinterpret_cast<int *>(p) = word[0];
    } else {
        static_assert(N == 1, "no access of this size");
        p[0] = v.x[0];
    }
}
template <typename T> __device__ inline Pack<T> load_pack(const T *p) {
    return load_pack<Pack<T>::N>(p);
}
/* Two bf16 at a time, by words: read as elements, each would take a register of its own. */
template <typename T, int N> __device__ inline void unpack(float (&y)[N], const Pack<T, N> &v) {
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        const unsigned *word = reinterpret_cast<const unsigned *>(v.x);
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            y[2 * i] = __uint_as_float(word[i] << 16);
            y[2 * i + 1] = __uint_as_float(word[i] & 0xFFFF0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) y[i] = to_f32(v.x[i]);
    }
}
/* sum += v. */
template <typename T, int N> __device__ inline void add_pack(float (&sum)[N], const Pack<T, N> &v) {
    float x[N];
    unpack(x, v);
#pragma unroll
    for (int i = 0; i < N; i++) sum[i] += x[i];
}
/* Rounds. */
template <typename T, int N> __device__ inline Pack<T, N> pack_of(const float (&x)[N]) {
    Pack<T, N> v;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
        unsigned *word = reinterpret_cast<unsigned *>(v.x);
#pragma unroll
        for (int i = 0; i < N / 2; i++)
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word[i]) : "f"(x[2 * i + 1]), "f"(x[2 * i]));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) v.x[i] = from_f32<T>(x[i]);
    }
    return v;
}
/* One warp copies the row x of D columns to the `n` rows to(0), to(1), ...; NULL: to none. The row is read once,
 * ROW_PACKS packs of a lane on their way at once. */
enum { ROW_PACKS = 8 };
template <int N, typename T, typename To> __device__ inline void copy_row(int n, To to, const T *x, int D) {
    const int step = 32 * N, lane = threadIdx.x % 32;
    for (int first = lane * N; first < D; first += step * ROW_PACKS) {
        Pack<T, N> pack[ROW_PACKS];
#pragma unroll
        for (int k = 0; k < ROW_PACKS; k++)
            if (first + step * k < D) pack[k] = load_pack<N>(x + first + step * k);
        for (int i = 0; i < n; i++) {
            T *y = to(i);
            if (!y) continue;
#pragma unroll
            for (int k = 0; k < ROW_PACKS; k++)
                if (first + step * k < D) store_pack(y + first + step * k, pack[k]);
        }
    }
}
/* May rows of this tensor be read in packs of 16 bytes? Decided on the host, from the shape alone. */
static inline bool rows_are_packed(Tensor t) {
    const int64_t per_pack = 16 / (int64_t)dtype_size(t.dtype);
    return ((uintptr_t)t.data & 15) == 0 && t.ld % per_pack == 0 && t.shape[t.ndim - 1] % per_pack == 0;
}
static inline bool is_aligned(const void *p) {
    return ((uintptr_t)p & 15) == 0;
}

/* Runs the block with T = the element type of `dtype`. */
#define ACT_SWITCH(dtype_, T, ...)                                                                                     \
    do {                                                                                                               \
        if ((dtype_) == DTYPE_F32) {                                                                                   \
            typedef float T;                                                                                           \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            CHECK((dtype_) == DTYPE_BF16, "dtype %d", (int)(dtype_));                                                  \
            typedef bf16 T;                                                                                            \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)

template <typename T> static inline T *data_of(Tensor t) {
    return (T *)t.data;
}

/* Rows that hold something: *n_rows where routing decides, else rows. Device side. */
__device__ inline int64_t rows_in_use(const int32_t *n_rows, int64_t rows) {
    return n_rows ? (int64_t)*n_rows : rows;
}

/* ---- shared memory ----------------------------------------------------------------------------------------------- */

/* The address of shared memory as the instructions below take it. */
__device__ inline uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes from global to shared memory in the background, both at multiples of 16. A thread that waits for its own
 * copies reads them without a barrier. */
__device__ inline void cp_async_16(void *to, const void *from) {
    const uint32_t at = shared_address(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
/* Of tiles: the first `bytes` are read, the rest is zero; the neighbours come into L2. */
__device__ inline void cp_async_16(uint32_t to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/* The same for 4 bytes: read, or zero. */
__device__ inline void cp_async_4(uint32_t to, const void *from, bool is_read) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(is_read ? 4 : 0) : "memory");
}
/* Ends a group of copies of this thread. */
__device__ inline void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits until at most N groups of this thread are under way. A barrier makes them visible to the others. */
template <int N> __device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ inline void cp_async_wait(int n) {
    if (n <= 0)
        cp_async_wait<0>();
    else if (n == 1)
        cp_async_wait<1>();
    else if (n == 2)
        cp_async_wait<2>();
    else
        cp_async_wait<3>();
}

/* Bytes of shared memory that a block may ask for on this GPU. */
static inline size_t shared_limit() {
    static int bytes;
    if (bytes == 0)
        CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, cuda_context()->device));
    return (size_t)bytes;
}
/* Raises a kernel's limit of dynamic shared memory. Once per kernel is enough; more is harmless. */
template <typename Kernel> static inline void allow_shared(Kernel kernel, size_t bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}
/* To all that its static arrays leave: for a kernel that asks for different sizes. A limit set anew at each launch
 * could fall below what a captured launch of the same kernel asks for. */
template <typename Kernel> static inline void allow_all_shared(Kernel kernel) {
    cudaFuncAttributes of;
    CUDA_CHECK(cudaFuncGetAttributes(&of, kernel));
    allow_shared(kernel, shared_limit() - of.sharedSizeBytes);
}

/* ---- functions of one number ------------------------------------------------------------------------------------- */

/* 2^x, 2 ulp, results below 2^-126 become 0. */
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* As exact as the stored results of type T can show: a bf16 keeps 8 bits. */
template <typename T> __device__ inline float exp_for(float x) {
    if constexpr (sizeof(T) == 4)
        return expf(x);
    else
        return exp2_fast(x * 1.44269504f);
}
template <typename T> __device__ inline float sigmoid_for(float x) {
    if constexpr (sizeof(T) == 4)
        return 1.0f / (1.0f + expf(-x));
    else
        return __fdividef(1.0f, 1.0f + exp2_fast(x * -1.44269504f));
}

/* ---- sums in a fixed order --------------------------------------------------------------------------------------- */

template <typename S> __device__ inline S warp_sum(S x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
    return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
    return x;
}

/* Over a block of whole warps; `shared` has 32 elements; every thread gets the sum. */
template <typename S> __device__ inline S block_sum(S x, S *shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = lane < n_warps ? shared[lane] : S(0);
    return warp_sum(x);
}

/* The sum of x over the lanes up to this one. */
__device__ inline int warp_sum_upto(int x) {
    const int lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, x, offset);
        if (lane >= offset) x += other;
    }
    return x;
}

/* The sum of x over the threads of the block before this one; *total over all. `shared` has an int a warp. */
__device__ inline int block_sum_before(int x, int *total, int *shared) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int n_warps = blockDim.x * blockDim.y / 32;
    const int sum = warp_sum_upto(x);
    __syncthreads();
    if (lane == 31) shared[warp] = sum;
    __syncthreads();
    int before = 0;
    *total = 0;
    for (int i = 0; i < n_warps; i++) {
        if (i < warp) before += shared[i];
        *total += shared[i];
    }
    return before + sum - x;
}

/* Columns of a row are counted in 32 bits, and some past the end may be named; the host CHECKs the width. */
enum { COLUMNS_MAX = 1 << 30 };

/* ---- launches ---------------------------------------------------------------------------------------------------- */
/* Blocks of a loop over work that is shared out in strides: as many as there are pieces, at most so many per SM.
 * Only for kernels whose result does not depend on who computes what. */
static inline unsigned grid_for(int64_t pieces, int per_sm) {
    const int64_t most = (int64_t)cuda_context()->n_sms * per_sm;
    return (unsigned)(pieces < 1 ? 1 : pieces < most ? pieces : most);
}

/* A kernel that follows another of the same op may be launched while that one ends (Hopper's programmatic dependent
 * launch): it begins with wait_for_kernel_before, and the one before lets it come with let_next_kernel_come. */
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ inline void let_next_kernel_come() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
static inline bool launches_overlap() {
    static int major;
    if (major == 0)
        CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda_context()->device));
    return major >= 9;
}
template <typename... Params, typename... Args>
static inline void launch_behind(void (*kernel)(Params...), unsigned grid, dim3 block, size_t shared,
                                 cudaStream_t stream, Args... args) {
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid), config.blockDim = block, config.dynamicSmemBytes = shared, config.stream = stream;
    config.attrs = &overlap, config.numAttrs = launches_overlap();
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Params(args)...));
}

#endif
