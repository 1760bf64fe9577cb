/* Tensor cores by mma.sync (sm_80 and later), for the grouped GEMM and attention: the instructions, and tiles in
 * shared memory that they read without bank conflicts.
 *
 * One mma multiplies A (16 x 16) by B (16 x 8) in BF16 and adds to 16 x 8 floats, spread over a warp. With g = lane
 * / 4 and t = lane % 4, a lane holds of the floats: d[0..1] = row g, columns 2t and 2t+1; d[2..3] = the same of row
 * g + 8.
 *
 * A tile lies in shared memory row by row, COLS a multiple of 64. Its 16-byte chunks change places within each 128
 * bytes: chunk c of row r is stored as chunk c ^ (r % 8). So the eight rows that one ldmatrix phase reads at the
 * same c fall into eight different groups of banks, as do the eight chunks that eight lanes write of one row. */
#ifndef TRAIN_MOE_MMA_CUH
#define TRAIN_MOE_MMA_CUH

#include "common.cuh"

/* ---- instructions ------------------------------------------------------------------------------------------------ */

__device__ inline void store_shared_16(uint32_t to, int4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

__device__ inline void store_shared_4(uint32_t to, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}

/* Four 8 x 8 matrices of BF16; lane 8i + j passes the address of row j of matrix i. Lane l receives of matrix i, in
 * r[i], row l / 4, columns 2 (l % 4) and the next; transposed: column l / 4, those rows. */
__device__ inline void ldmatrix(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ inline void ldmatrix_trans(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

/* d += a b. */
__device__ inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* A barrier of n_threads threads (whole warps), by name 1 to 15; __syncthreads is 0. */
__device__ inline void barrier_sync(int name, int n_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(n_threads) : "memory");
}

/* threadIdx.x, read again at each call. What a loop computes from it is computed in every turn, and holds no
 * registers in between; the compiler would move it out of the loop otherwise. */
__device__ inline int thread_again() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* ---- registers --------------------------------------------------------------------------------------------------- */

/* Two floats rounded to BF16, `low` in the lower half: as two neighbours lie in memory. */
__device__ inline uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ inline float bf16_low(uint32_t pair) {
    return __uint_as_float(pair << 16);
}
__device__ inline float bf16_high(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000u);
}

/* Transposes the 4 x 4 words of four neighbouring lanes: word i of lane t becomes word t of lane i. Turns the
 * columns 2t, 2t+1 of four matrices into all eight columns of one. */
__device__ inline void quad_transpose(uint32_t (&v)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    for (int i = 0; i < 4; i += 2) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? v[i] : v[i + 1], 1);
        if (odd)
            v[i] = other;
        else
            v[i + 1] = other;
    }
    for (int i = 0; i < 2; i++) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, upper ? v[i] : v[i + 2], 2);
        if (upper)
            v[i] = other;
        else
            v[i + 2] = other;
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Byte at which chunk `chunk` of row `row` lies in a tile of COLS columns. */
template <int COLS> __device__ inline uint32_t tile_offset(int row, int chunk) {
    return (uint32_t)(row * COLS * 2 + (chunk ^ (row & 7)) * 16);
}

/* Eight elements, the first n of them read and the rest zero, as they lie in memory. */
__device__ inline int4 chunk_read(const bf16 *from, int n) {
    uint32_t x[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < n) x[i / 2] |= (uint32_t)__bfloat16_as_ushort(from[i]) << (i % 2 * 16);
    return make_int4((int)x[0], (int)x[1], (int)x[2], (int)x[3]);
}

/* Copies a tile of ROWS x COLS into shared memory by the block's THREADS threads, of which this is `thread`. src is
 * its first element; elements past n_rows rows or n_cols columns (which may be negative) are zero and not read.
 * PACKED: src and ld are multiples of 16 bytes and the copy runs in the background (to be committed); else the tile
 * is there after the next barrier. */
template <int ROWS, int COLS, int THREADS, bool PACKED>
__device__ inline void tile_load(uint32_t tile, const bf16 *src, int64_t ld, int n_rows, int n_cols, int thread) {
    static const int STEP = THREADS / 8;
    static_assert(COLS % 64 == 0 && STEP % 8 == 0 && ROWS % STEP == 0, "shape of a tile");
    const int first = thread / 8, chunk = thread % 8;
    const bf16 *from = src + first * ld + chunk * 8;
    const uint32_t to = tile + tile_offset<COLS>(first, chunk);
    int n[COLS / 64];
#pragma unroll
    for (int c = 0; c < COLS / 64; c++) n[c] = max(0, min(8, n_cols - c * 64 - chunk * 8));
#pragma unroll(PACKED ? ROWS / STEP : 1)
    for (int i = 0; i < ROWS; i += STEP) {
        const bool exists = first + i < n_rows;
#pragma unroll
        for (int c = 0; c < COLS / 64; c++) {
            const uint32_t at = to + i * COLS * 2 + c * 128;
            if (PACKED)
                cp_async_16(at, from + c * 64, exists ? 2 * n[c] : 0);
            else
                store_shared_16(at, chunk_read(from + c * 64, exists ? n[c] : 0));
        }
        from += STEP * ld;
    }
}

/* Where a lane's rows lie for the ldmatrix of 16 x 16 elements of a tile. The four matrices are taken rows first or
 * columns first:
 *     operand A, rows of the tile are rows of A (m)      ldmatrix         rows first
 *     operand A, rows of the tile are its columns (k)    ldmatrix_trans   columns first
 *     operand B, rows of the tile are its columns (n)    ldmatrix         columns first    two B of 8 columns:
 *     operand B, rows of the tile are rows of B (k)      ldmatrix_trans   rows first       {r[0], r[1]}, {r[2], r[3]}
 * Made once for the warp's corner, then at(row, chunk) for 16 x 16 elements further on: row a multiple of 8, and the
 * bits of chunk below 8 apart from those of the corner's, so that the exchange of chunks is one xor with a constant. */
template <int COLS> struct Fragment {
    uint32_t base, turn;

    __device__ static Fragment rows_first(uint32_t tile, int row, int chunk, int lane) {
        return corner(tile, row + lane % 16, chunk + lane / 16);
    }
    __device__ static Fragment columns_first(uint32_t tile, int row, int chunk, int lane) {
        return corner(tile, row + lane % 8 + lane / 16 * 8, chunk + lane / 8 % 2);
    }
    __device__ static Fragment corner(uint32_t tile, int row, int chunk) {
        Fragment f;
        f.base = tile + (uint32_t)(row * COLS * 2 + chunk / 8 * 128);
        f.turn = (uint32_t)((chunk % 8 ^ (row & 7)) * 16);
        return f;
    }
    __device__ uint32_t at(int row, int chunk) const {
        return base + (uint32_t)(row * COLS * 2 + chunk / 8 * 128) + ((uint32_t)(chunk % 8 * 16) ^ turn);
    }
};

#endif
