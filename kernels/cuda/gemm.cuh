/* The dense GEMMs' plans, for gemm.cu and for the program that times algorithms (tests/bench/tune_gemm.cu). */
#ifndef TRAIN_MOE_GEMM_CUH
#define TRAIN_MOE_GEMM_CUH

#include "common.cuh"
#include "gemm_table.h"

/* A GEMM that was asked for: descriptors, and the algorithm it runs with. */
typedef struct {
    GemmRow row;
    bool is_resumed; /* the algorithm is a checkpoint's */
    bool is_known;   /* the committed table has a row; without either it is the first heuristic */
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, y; /* the library's operands: a is our b, b our a */
    cublasLtMatmulAlgo_t algo;
} GemmPlan;

/* The plans so far, in the order in which they were first asked for. */
int gemm_n_plans(void);
GemmPlan *gemm_plan(int i);

/* The heuristic's algorithms that sum each output in one piece, best-ranked first; at most `max`. Returns how many. */
int gemm_candidates(cublasLtMatmulAlgo_t *algos, int max, const GemmPlan *p);
/* Gives the plan this algorithm, and fills its row. */
void gemm_plan_use(GemmPlan *p, const cublasLtMatmulAlgo_t *algo);
/* y = a b, or y += a b, with operands as in ops.h's formulas, of the plan's shapes. Uses their memory and scales. */
void gemm_plan_run(const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, Tensor y, Tensor a, Tensor b, Stream s);

#endif
