/* A weight's blocks of 128 x 128 on their way to E4M3, as they lie and transposed: what quantize_weight and
 * AdamW share.
 *
 * A thread holds four columns of every eighth row, 64 numbers, so the block is read once: first for its scale, then for
 * its bytes. The transpose goes through shared memory in words of four bytes. */
#ifndef TRAIN_MOE_BLOCKS_CUH
#define TRAIN_MOE_BLOCKS_CUH

#include "tiles.cuh"

enum { BLOCK_PASSES = 16, BLOCK_WARPS = SQUARE_THREADS / 32, BLOCK_LD = TILE / 4 + 1 /* words */ };

/* All blocks of a weight (.., O, I) and of its transpose. */
typedef struct {
    uint8_t *data, *data_t;
    float *scale, *scale_t;
    int64_t scale_ld, scale_ld_t; /* of a row of blocks */
    int64_t O, I;
    int down, across; /* blocks of a plane */
    int64_t n;        /* of all planes */
} WeightBlocks;

static inline WeightBlocks weight_blocks(Tensor w, Tensor wt) {
    const int64_t planes = w.ndim == 3 ? w.shape[0] : 1, O = w.shape[w.ndim - 2], I = w.shape[w.ndim - 1];
    CHECK(O % 16 == 0 && I % 16 == 0, "weight of %lld x %lld: FP8 takes multiples of 16", (long long)O, (long long)I);
    WeightBlocks b = {(uint8_t *)w.data,      (uint8_t *)wt.data,     w.scale, wt.scale, w.scale_ld, wt.scale_ld, O, I,
                      (int)ceil_div(O, TILE), (int)ceil_div(I, TILE), 0};
    b.n = planes * b.down * b.across;
    CHECK(b.n <= INT32_MAX, "%lld blocks", (long long)b.n);
    return b;
}

typedef struct {
    int64_t plane;
    int row, col;       /* of blocks */
    int n_rows, n_cols; /* elements that exist */
    int64_t offset;     /* of the first, in the weight */
} WeightBlock;

__device__ inline WeightBlock weight_block(const WeightBlocks &w, int index) {
    WeightBlock b;
    b.plane = index / (w.down * w.across);
    b.row = index / w.across % w.down;
    b.col = index % w.across;
    b.n_rows = (int)min(w.O - (int64_t)b.row * TILE, (int64_t)TILE);
    b.n_cols = (int)min(w.I - (int64_t)b.col * TILE, (int64_t)TILE);
    b.offset = b.plane * w.O * w.I + (int64_t)b.row * TILE * w.I + (int64_t)b.col * TILE;
    return b;
}

/* The row of a pass, and the four columns. */
__device__ inline int block_row(int pass) {
    return pass * BLOCK_WARPS + threadIdx.x / 32;
}
__device__ inline int block_col() {
    return threadIdx.x % 32 * 4;
}

typedef struct {
    uint32_t word[TILE][BLOCK_LD];
    uint32_t amax[BLOCK_WARPS];
} BlockBytes;

/* Rows a, b, c, d of four bytes each to columns. */
__device__ inline void transpose_bytes(uint32_t (&y)[4], uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
    const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
    y[0] = __byte_perm(ab_low, cd_low, 0x5410);
    y[1] = __byte_perm(ab_low, cd_low, 0x7632);
    y[2] = __byte_perm(ab_high, cd_high, 0x5410);
    y[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

/* The block's bytes and its scale into the transpose, once all threads have written theirs. */
__device__ inline void weight_block_transpose(const WeightBlocks &w, const WeightBlock &at, const BlockBytes *bytes,
                                              float scale) {
    /* Sixteen rows of four columns. */
    const int group = threadIdx.x / 32 * 16, c = block_col();
    uint8_t *out_t = w.data_t + at.plane * w.O * w.I + (int64_t)at.col * TILE * w.O + (int64_t)at.row * TILE;
    uint32_t column[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t four[4];
        const int r = group + 4 * i;
        transpose_bytes(four, bytes->word[r][c / 4], bytes->word[r + 1][c / 4], bytes->word[r + 2][c / 4],
                        bytes->word[r + 3][c / 4]);
#pragma unroll
        for (int k = 0; k < 4; k++) column[k][i] = four[k];
    }
    if (group < at.n_rows && c < at.n_cols)
#pragma unroll
        for (int k = 0; k < 4; k++)
            *(uint4 *)(out_t + (int64_t)(c + k) * w.O + group) =
                make_uint4(column[k][0], column[k][1], column[k][2], column[k][3]);
    if (threadIdx.x == 0) w.scale_t[(at.plane * w.across + at.col) * w.scale_ld_t + at.row] = scale;
}

/* x / scale, with the bits of a division: the quotient from the nearest inverse, less what its remainder says it is off
 * (Markstein). The sign of zero stays. Exact where the remainder does not underflow: scale >= REMAINDER_SCALE, if E4M3
 * is what counts. */
#define REMAINDER_SCALE 0x1p-90f
__device__ inline float divide(float x, float scale, float inverse) {
    const float quotient = x * inverse;
    return fmaf(fmaf(quotient, scale, -x), -inverse, quotient);
}

/* Numbers that do not exist are zero in x, which is lost; there may be no transpose. All threads call it. */
__device__ inline void weight_block_store(const WeightBlocks &w, const WeightBlock &at, float (&x)[BLOCK_PASSES][4],
                                          BlockBytes *bytes) {
    uint32_t most = 0;
#pragma unroll
    for (int pass = 0; pass < BLOCK_PASSES; pass++)
#pragma unroll
        for (int i = 0; i < 4; i++) most = max(most, __float_as_uint(x[pass][i]) & 0x7FFFFFFFu);
    most = __reduce_max_sync(0xFFFFFFFFu, most);
    if (threadIdx.x % 32 == 0) bytes->amax[threadIdx.x / 32] = most;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BLOCK_WARPS; i++) most = max(most, bytes->amax[i]);

    const float nearest = __fdiv_rn(__uint_as_float(most), 448.0f);
    const float scale = !(nearest < __uint_as_float(0x7F800000u)) ? __uint_as_float(0x7FC00000u)
                        : nearest >= 0x1p-126f                    ? nearest
                                                                  : 1.0f;
    float divisor = scale;
    if (scale < REMAINDER_SCALE) {
        divisor *= 0x1p64f;
#pragma unroll
        for (int pass = 0; pass < BLOCK_PASSES; pass++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[pass][i] *= 0x1p64f;
    }
    const float inverse = __frcp_rn(divisor);
    uint8_t *out = w.data + at.offset;
    const int c = block_col();
#pragma unroll
    for (int pass = 0; pass < BLOCK_PASSES; pass++) {
        const int r = block_row(pass);
        const uint32_t four = e4m3x4(divide(x[pass][0], divisor, inverse), divide(x[pass][1], divisor, inverse),
                                     divide(x[pass][2], divisor, inverse), divide(x[pass][3], divisor, inverse));
        bytes->word[r][c / 4] = four;
        if (r < at.n_rows && c < at.n_cols) *(uint32_t *)(out + (int64_t)r * w.I + c) = four;
    }
    if (threadIdx.x == 0) w.scale[(at.plane * w.down + at.row) * w.scale_ld + at.col] = scale;
    if (!w.data_t) return;
    __syncthreads();
    weight_block_transpose(w, at, bytes, scale);
}

#endif
