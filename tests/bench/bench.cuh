/* What the families of rows in bench_*.cu share: random tensors, timing, a printed row. See bench_cuda.cu. */
#ifndef TRAIN_MOE_BENCH_CUH
#define TRAIN_MOE_BENCH_CUH

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/cuda.h"

#define S STREAM_COMPUTE

extern Device device;

/* ---- data (bench_data.cu): lives until release_all --------------------------------------------------------------- */

void *allocate(size_t bytes);
void release_all(void);

/* The host's bytes on the device. */
void *copied(const void *host, size_t bytes);

/* Uniform in [-1, 1). */
Tensor vector(Dtype dtype, int64_t n);
Tensor matrix(Dtype dtype, int64_t rows, int64_t cols);
Tensor planes(Dtype dtype, int64_t n, int64_t rows, int64_t cols);
/* Integers below `range`; range 0: 0, 1, 2, ... */
Tensor integers(int64_t n, int32_t range);
/* FP8: zeros, or of such random numbers. n 0: a matrix. */
Tensor tiles_empty(Dtype dtype, int64_t rows, int64_t cols);
Tensor tiles(int64_t rows, int64_t cols);
Tensor blocks_empty(int64_t n, int64_t rows, int64_t cols);
Tensor blocks(int64_t n, int64_t rows, int64_t cols);

StepParams *params_make(void);
StepStats *stats_make(void);
UpdateState *state_make(void);

/* K ids a token, spread over E experts, all local: mapped. */
typedef struct {
    MoeMap map;
    Tensor ids, weights, slots; /* what op_moe_map reads */
    int64_t n_rows;
} Routing;
Routing routing_make(int64_t T, int64_t K, int64_t E);

/* ---- timing and rows (bench_cuda.cu) ----------------------------------------------------------------------------- */

enum { OPS_IN_GRAPH = 10 };

/* Is a row of this name asked for? */
bool is_wanted(const char *name);
/* As printf; stands until the next call. */
const char *title(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Seconds of one of the OPS_IN_GRAPH calls in the graph, which is freed. */
double seconds_of_graph(Graph *graph);

/* Seconds of one call of `work`. */
template <typename Work> static double seconds_of(Work work) {
    work(); /* what is set up at the first call stays outside */
    op_synchronize(&device, S);
    op_graph_begin(&device, S);
    for (int i = 0; i < OPS_IN_GRAPH; i++) work();
    return seconds_of_graph(op_graph_end(&device, S));
}

/* Each prints a row and frees the tensors that are there. s: seconds. */

/* gate: the share of the copy rate that is asked for; 0: none. */
void row_bytes(const char *name, double bytes, double gate, double s);
template <typename Work> static void row(const char *name, double bytes, double gate, Work work) {
    row_bytes(name, bytes, gate, seconds_of(work));
}
/* peer_s: seconds of the peer, cuBLASLt; 0: none. gate: how many times as fast. */
void row_flops(const char *name, double flops, double peer_s, double gate, double s);
/* A part of whole_s, and the largest share it may have. */
void row_share(const char *name, const char *of_what, double whole_s, double limit, double s);

/* ---- the families ------------------------------------------------------------------------------------------------ */

/* bench_rows.cu: ops that move bytes. D wide, T tokens, V ids */
void rows_embed(int64_t T, int64_t D, int64_t V);
void rows_rmsnorm(int64_t T, int64_t D, int64_t J);
void rows_rope(int64_t T, int n_heads, bool in_place);
void rows_swiglu(int64_t M, int64_t F, bool weighted);
void rows_router(int64_t T, RouterShape shape, const char *what);
void rows_permute(int64_t T, int64_t D, int64_t K, int64_t E);
void rows_cross_entropy(int64_t C, int64_t V);
void rows_update(int64_t n);
/* AdamW with its copies of the weights: BF16, or blocks and those of the transpose. */
void row_adamw(const char *name, Tensor copy, Tensor copy_t, Dtype moments);

/* bench_casts.cu: to FP8, alone or fused */
void rows_quantize(int64_t M, int64_t C);
void rows_weight(int64_t n, int64_t O, int64_t I);
void rows_norm_fp8(int64_t T, int64_t D, int64_t J);
void rows_swiglu_fp8(int64_t M, int64_t F, bool weighted);
void rows_gather_fp8(int64_t T, int64_t D, int64_t K, int64_t E);

/* bench_gemm.cu */
void rows_gemm_fp8(int64_t T, int64_t out, int64_t in, double gate);
/* rows_each: a multiple of 8 * GROUP_ALIGN. Ragged: 0.75 to 1.25 of it. */
void rows_grouped(int64_t n_experts, int64_t rows_each, int64_t out, int64_t in, bool ragged);
void rows_grouped_fp8(int64_t n_experts, int64_t rows_each, int64_t out, int64_t in, bool ragged);

/* bench_linears.cu */
void rows_linears(void);

/* bench_attention.cu */
void rows_attention(int n_heads, int64_t n_seqs, int64_t seq_len);

#endif
