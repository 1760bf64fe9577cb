/* As cpu/gemm.c, but by cuBLASLt: f32 accumulation, f32 inputs without TF32, BF16 on tensor cores.
 *
 * cuBLASLt counts in columns: our row-major (rows, cols) is its column-major (cols, rows). So y = a b^T of ours is
 * y^T = b a^T of its: the operands change places, and each kind has its transposes.
 *
 * Descriptors and the algorithm of a shape are made once and kept: the first heuristic that needs no split reduction,
 * never a timing in the run. So equal shapes give equal bits, and a call is a look-up and a launch. */
#include <string.h>

#include "common.cuh"

typedef struct {
    int64_t m, n, k, lda, ldb, ldy;
    GemmKind kind;
    Dtype in, out;
    bool accumulate;
    int stream;
    int alignment; /* of the addresses, in bytes, at most 16: the library's kernels depend on it */
} GemmKey;

typedef struct {
    GemmKey key;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, y;
    cublasLtMatmulAlgo_t algo;
} GemmPlan;

enum { PLANS_MAX = 512 };
static struct {
    int n;
    GemmPlan plan[PLANS_MAX];
} plans;

void cuda_gemm_forget(void) {
    for (int i = 0; i < plans.n; i++) {
        GemmPlan *p = &plans.plan[i];
        cublasLtMatmulDescDestroy(p->op);
        cublasLtMatrixLayoutDestroy(p->a);
        cublasLtMatrixLayoutDestroy(p->b);
        cublasLtMatrixLayoutDestroy(p->y);
    }
    plans.n = 0;
}

static cudaDataType_t type_of(Dtype d) {
    return d == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F;
}

/* (rows, cols) of ours as the library's (cols, rows). */
static cublasLtMatrixLayout_t layout_of(Dtype d, int64_t rows, int64_t cols, int64_t ld) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type_of(d), (uint64_t)cols, (uint64_t)rows, ld));
    return layout;
}

/* The best-ranked algorithm that sums each output in one piece. */
static void choose_algorithm(GemmPlan *p) {
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const size_t workspace = GEMM_WORKSPACE_BYTES;
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE, alignment = (uint32_t)p->key.alignment;
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                      sizeof workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                                                      sizeof schemes));
    const cublasLtMatmulPreferenceAttributes_t addresses[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++)
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, addresses[i], &alignment, sizeof alignment));
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cuda_context()->cublas, p->op, p->a, p->b, p->y, p->y,
                                                           preference, 1, &result, &found);
    CHECK(status == CUBLAS_STATUS_SUCCESS && found == 1,
          "cuBLASLt knows no algorithm: kind %d, (%lld, %lld) over %lld, %s", (int)p->key.kind, (long long)p->key.m,
          (long long)p->key.n, (long long)p->key.k, dtype_name(p->key.in));
    p->algo = result.algo;
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
}

static GemmPlan *plan_make(const GemmKey *key, Tensor y, Tensor a, Tensor b) {
    CHECK(plans.n < PLANS_MAX, "more than %d GEMM shapes", PLANS_MAX);
    GemmPlan *p = &plans.plan[plans.n++];
    memset(p, 0, sizeof *p);
    p->key = *key;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    /* Its first operand is our b, its second our a. */
    const cublasOperation_t first = key->kind == GEMM_FPROP ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = key->kind == GEMM_WGRAD ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    p->a = layout_of(b.dtype, b.shape[0], b.shape[1], b.ld);
    p->b = layout_of(a.dtype, a.shape[0], a.shape[1], a.ld);
    p->y = layout_of(y.dtype, y.shape[0], y.shape[1], y.ld);
    choose_algorithm(p);
    return p;
}

static int alignment_of(Tensor a, Tensor b, Tensor y) {
    uintptr_t bits = (uintptr_t)a.data | (uintptr_t)b.data | (uintptr_t)y.data;
    int alignment = 16;
    while (bits % (uintptr_t)alignment) alignment /= 2;
    return alignment;
}

void cuda_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s) {
    CHECK(a.dtype == b.dtype, "gemm: %s by %s", dtype_name(a.dtype), dtype_name(b.dtype));
    const int64_t k = kind == GEMM_WGRAD ? a.shape[0] : a.shape[1];
    if (y.shape[0] == 0 || y.shape[1] == 0) return;
    GemmKey key;
    memset(&key, 0, sizeof key); /* compared as bytes */
    key.m = y.shape[0], key.n = y.shape[1], key.k = k;
    key.lda = a.ld, key.ldb = b.ld, key.ldy = y.ld;
    key.kind = kind, key.in = a.dtype, key.out = y.dtype;
    key.accumulate = accumulate;
    key.stream = (int)s;
    key.alignment = alignment_of(a, b, y);
    GemmPlan *p = NULL;
    for (int i = 0; i < plans.n && !p; i++)
        if (memcmp(&plans.plan[i].key, &key, sizeof key) == 0) p = &plans.plan[i];
    if (!p) p = plan_make(&key, y, a, b);
    const float alpha = 1, beta = accumulate ? 1 : 0;
    void *workspace = cuda_context()->gemm_workspace[s];
    CHECK(workspace, "gemm on stream %d, which has no workspace", (int)s);
    CUBLAS_CHECK(cublasLtMatmul(cuda_context()->cublas, p->op, &alpha, b.data, p->a, a.data, p->b, &beta, y.data, p->y,
                                y.data, p->y, &p->algo, workspace, GEMM_WORKSPACE_BYTES, cuda_stream(s)));
}
