/* The walk of grouped products: tiles of all experts, found on the device from their prefix sums. Shared by
 * grouped_gemm.cu and sm90/. */
#ifndef TRAIN_MOE_GROUPED_CUH
#define TRAIN_MOE_GROUPED_CUH

#include "common.cuh"

static const int BAND = 8;

/* y[e] (m, n) = a[e] b[e], or += for weight gradients. Row counts of the experts are in start; fixed extents: n, and
 * k for products of rows, m for weight gradients. */
typedef struct {
    void *y;
    const void *a, *b;
    int64_t y_ld, a_ld, b_ld;
    int64_t plane; /* elements of one expert's matrix: w or dw */
    const int32_t *start;
    int n_experts, m, n, k;
} Grouped;

/* The FP8 products (sm90/grouped_gemm_fp8.cu): grouped_gemm's, whose w is w^T for DGRAD, and grouped_wgrad's. */
void grouped_gemm_fp8(Tensor y, Tensor x, Tensor w, Tensor expert_start, cudaStream_t stream);
void grouped_wgrad_fp8(Tensor dw, Tensor dy, Tensor x, Tensor expert_start, cudaStream_t stream);

/* ---- the walk ---------------------------------------------------------------------------------------------------- */

typedef struct {
    int at; /* among the tiles of all experts */
    int expert;
    int row0, n_rows; /* the expert's rows */
    int m0, n0;       /* corner of the tile in y[e]; for products of rows m0 counts from row0 */
} Tile;

/* Tiles of an expert go in bands of BAND row tiles, down the rows first: the blocks that run together then share a few
 * row tiles of a and of b, which stay in L2. */
template <int TM, int TN> __device__ void tile_place(Tile *t, int i, int tiles_m, int tiles_n) {
    const int band = i / (BAND * tiles_n), within = i - band * BAND * tiles_n;
    const int height = min(BAND, tiles_m - band * BAND);
    t->m0 = (band * BAND + within % height) * TM;
    t->n0 = within / height * TN;
}

/* Finds the first tile with work at t->at or a whole number of grids further on; false: there is none. */
template <GemmKind KIND, int TM, int TN> __device__ bool tile_seek(Tile *t, const Grouped &g, const int32_t *start) {
    const int tiles_n = (g.n + TN - 1) / TN;
    if (KIND != GEMM_WGRAD) {
        if (t->at >= start[g.n_experts] / TM * tiles_n) return false;
        while (t->at >= start[t->expert + 1] / TM * tiles_n) t->expert++;
        t->row0 = start[t->expert];
        t->n_rows = start[t->expert + 1] - t->row0;
        tile_place<TM, TN>(t, t->at - t->row0 / TM * tiles_n, t->n_rows / TM, tiles_n);
        return true;
    }
    const int tiles_m = (g.m + TM - 1) / TM, per_expert = tiles_m * tiles_n;
    for (; t->at < g.n_experts * per_expert; t->at += (int)gridDim.x) {
        t->expert = t->at / per_expert;
        t->row0 = start[t->expert];
        t->n_rows = start[t->expert + 1] - t->row0;
        if (t->n_rows == 0) continue;
        tile_place<TM, TN>(t, t->at - t->expert * per_expert, tiles_m, tiles_n);
        return true;
    }
    return false;
}

/* The prefix sums, read by every tile, into shared memory. */
__device__ inline void start_load(int32_t *to, const Grouped &g) {
    for (int e = threadIdx.x; e <= g.n_experts; e += blockDim.x) to[e] = g.start[e];
    __syncthreads();
}

#endif
