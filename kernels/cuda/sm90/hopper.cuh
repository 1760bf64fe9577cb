/* Hopper's own instructions, each by its name: barriers in shared memory, copies by the tensor memory accelerator
 * (TMA), products of a warpgroup (wgmma). Only files of this folder include it; they are compiled for compute_90a
 * alone. */
#ifndef TRAIN_MOE_HOPPER_CUH
#define TRAIN_MOE_HOPPER_CUH

#include <cuda.h>

#include "kernels/cuda/common.cuh"

__device__ inline uint32_t smem_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- barriers ---------------------------------------------------------------------------------------------------- */

/* A phase of an mbarrier is over when `count` threads have arrived and all announced bytes have landed. */
__device__ inline void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
__device__ inline void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ inline void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Waits until the phase of this parity is over. */
__device__ inline void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile("{\n"
                 " .reg .pred done;\n"
                 "again:\n"
                 " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 " @!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

/* The box at (x, y) of a matrix, x along its rows; what lies outside arrives as zero. */
__device__ inline void tma_load_2d(uint32_t to, const CUtensorMap *map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
/* Consecutive bytes, a multiple of 16, from and to addresses that are. */
__device__ inline void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
/* y[i] += x[i] for consecutive f32, a multiple of 16 bytes, x in shared memory: one addition an element, by the memory
 * itself. What other instructions wrote to x is visible behind bulk_fence. Belongs to the thread's open group. */
__device__ inline void bulk_add(float *y, uint32_t x, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(y), "r"(x),
                 "r"(bytes)
                 : "memory");
}
__device__ inline void bulk_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ inline void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until this thread's groups have read their sources; until they are complete. */
__device__ inline void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ inline void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
__device__ inline void tma_prefetch(const CUtensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* ---- products of a warpgroup ------------------------------------------------------------------------------------- */

/* Where an operand lies: rows of 128 bytes, swizzled by 128 as TMA writes them, from an address that is a multiple of
 * 1024; eight rows are 1024 bytes. The next 32 bytes of each row: the descriptor + 2. */
__device__ inline uint64_t wgmma_operand(uint32_t address) {
    return (uint64_t)(address >> 4 & 0x3FFF) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
__device__ inline void wgmma_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Until at most N groups are under way. */
template <int N> __device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving reads of the sums over a wait. */
template <int N> __device__ inline void wgmma_touch(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* d (64, 128) = or += a (64, 32) b (128, 32)^T, E4M3 by E4M3. A thread holds, of each 8 columns j, rows
 * warp * 16 + lane / 4 (d[4 j], d[4 j + 1]) and 8 further down, columns 8 j + lane % 4 * 2 and the next. */
__device__ inline void wgmma_e4m3_64x128(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                 "%64, %65, p, 1, 1;\n"
                 "}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                   "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                   "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]),
                   "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
                   "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
                   "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]),
                   "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]),
                   "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]),
                   "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
                 : "l"(a), "l"(b), "r"(accumulate));
}

/* Registers that a warpgroup takes or gives back; all its threads say the same. */
template <int N> __device__ inline void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ inline void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- on the host ------------------------------------------------------------------------------------------------- */

/* A matrix of bytes (rows, cols) of `ld`, in boxes of box_rows rows of 128 bytes, swizzled by 128 (sm90/tma.cu). */
CUtensorMap tma_map_bytes(const void *data, int64_t rows, int64_t cols, int64_t ld, int box_rows);

#endif
