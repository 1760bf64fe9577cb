/* As cpu/gemm.c, but by cuBLASLt: f32 accumulation, f32 inputs without TF32, BF16 on tensor cores.
 *
 * cuBLASLt counts in columns: our row-major (rows, cols) is its column-major (cols, rows). So y = a b^T of ours is
 * y^T = b a^T of its: the operands change places, and each kind has its transposes. In FP8 there is one form: the
 * scales come with the operands, so they are set on the descriptor before each call.
 *
 * Descriptors and the algorithm of a shape are made once and kept, so a call is a look-up and a launch. The algorithm
 * is the one that the checkpoint computed with, else the committed table's (gemm_table.h), else the first heuristic
 * that needs no split reduction; never a timing in the run. So equal shapes give equal bits. */
#include <stdlib.h>
#include <string.h>

#include "cuda.h"
#include "gemm.cuh"
#include "gemm_few_rows.cuh"
#include "kernels/rehearsal.h"

enum { PLANS_MAX = 512 };
static struct {
    GemmPlace place;
    bool is_open;
    GemmRows builtin, resumed;
    int n;
    GemmPlan plan[PLANS_MAX];
} gemms;

/* A strided batch. Only generation asks for it, so its algorithms are the heuristic's, and no checkpoint keeps them. */
typedef struct {
    GemmPlan plan;
    HeadSteps steps;
    int64_t b_step;
} HeadPlan;

enum { HEAD_PLANS_MAX = 64 };
static struct {
    int n;
    HeadPlan head[HEAD_PLANS_MAX];
} heads;

int gemm_n_plans(void) {
    return gemms.n;
}

GemmPlan *gemm_plan(int i) {
    return &gemms.plan[i];
}

static void plan_free(GemmPlan *p) {
    cublasLtMatmulDescDestroy(p->op);
    cublasLtMatrixLayoutDestroy(p->a);
    cublasLtMatrixLayoutDestroy(p->b);
    cublasLtMatrixLayoutDestroy(p->y);
}

void cuda_gemm_forget(void) {
    for (int i = 0; i < gemms.n; i++) plan_free(&gemms.plan[i]);
    for (int i = 0; i < heads.n; i++) plan_free(&heads.head[i].plan);
    heads.n = 0;
    gemm_rows_free(&gemms.builtin);
    gemm_rows_free(&gemms.resumed);
    gemms.n = 0;
    gemms.is_open = false;
}

static const GemmPlace *place(void) {
    if (gemms.is_open) return &gemms.place;
    const CudaContext *c = cuda_context();
    int major, minor;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, c->device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, c->device));
    gemms.place.arch = 10 * major + minor;
    gemms.place.n_sms = c->n_sms;
    gemms.place.library = (int64_t)cublasLtGetVersion();
    gemm_rows_builtin(&gemms.builtin);
    gemms.is_open = true;
    return &gemms.place;
}

/* ---- descriptors ------------------------------------------------------------------------------------------------- */

static cudaDataType_t type_of(Dtype d) {
    return d == DTYPE_BF16 ? CUDA_R_16BF : d == DTYPE_E4M3 ? CUDA_R_8F_E4M3 : CUDA_R_32F;
}

/* (rows, cols) of ours as the library's (cols, rows). */
static cublasLtMatrixLayout_t layout_of(Dtype d, int64_t rows, int64_t cols, int64_t ld) {
    cublasLtMatrixLayout_t layout;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, type_of(d), (uint64_t)cols, (uint64_t)rows, ld));
    return layout;
}

/* Names of CUDA 12.9 (CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, ...) for headers
 * that are older; cuda_check_fp8 asks the library itself. */
static const cublasLtMatmulDescAttributes_t A_SCALE_MODE = (cublasLtMatmulDescAttributes_t)31,
                                            B_SCALE_MODE = (cublasLtMatmulDescAttributes_t)32;
enum { SCALE_MODE_VEC128 = 4, SCALE_MODE_BLK128X128 = 5 };

static int32_t scale_mode_of(Tensor t) {
    return t.scale_layout == SCALE_BLOCK_128X128 ? SCALE_MODE_BLK128X128 : SCALE_MODE_VEC128;
}

static void set_scales(const GemmPlan *p, const float *a, const float *b) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &b, sizeof b));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &a, sizeof a));
}

static void describe_scales(const GemmPlan *p, Tensor a, Tensor b) {
    const int32_t first = scale_mode_of(b), second = scale_mode_of(a);
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->op, A_SCALE_MODE, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->op, B_SCALE_MODE, &second, sizeof second));
    set_scales(p, a.scale, b.scale);
}

static void describe(GemmPlan *p, Tensor y, Tensor a, Tensor b) {
    const bool fp8 = a.dtype == DTYPE_E4M3;
    const GemmKind kind = fp8 ? GEMM_FPROP : p->row.call.kind; /* FP8: every kind is y = a b^T as they lie */
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&p->op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    /* Its first operand is our b, its second our a. */
    const cublasOperation_t first = kind == GEMM_FPROP ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = kind == GEMM_WGRAD ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(p->op, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    p->a = layout_of(b.dtype, b.shape[0], b.shape[1], b.ld);
    p->b = layout_of(a.dtype, a.shape[0], a.shape[1], a.ld);
    p->y = layout_of(y.dtype, y.shape[0], y.shape[1], y.ld);
    if (fp8) describe_scales(p, a, b);
}

/* ---- the algorithm ----------------------------------------------------------------------------------------------- */

static int candidates_of(cublasLtMatmulAlgo_t *algos, int max, const GemmPlan *p, uint32_t schemes) {
    enum { CANDIDATES_MAX = 64 };
    cublasLtMatmulHeuristicResult_t result[CANDIDATES_MAX];
    cublasLtMatmulPreference_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const size_t workspace = GEMM_WORKSPACE_BYTES;
    const uint32_t alignment = (uint32_t)p->row.call.alignment;
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                      sizeof workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes,
                                                      sizeof schemes));
    const cublasLtMatmulPreferenceAttributes_t addresses[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    for (int i = 0; i < 4; i++)
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, addresses[i], &alignment, sizeof alignment));
    int found = 0;
    const int asked = max < CANDIDATES_MAX ? max : CANDIDATES_MAX;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(cuda_context()->cublas, p->op, p->a, p->b, p->y, p->y,
                                                           preference, asked, result, &found);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_SUCCESS) return 0;
    int n = 0;
    for (int i = 0; i < found; i++)
        if (result[i].state == CUBLAS_STATUS_SUCCESS) algos[n++] = result[i].algo;
    return n;
}

/* In one piece, or, where the library offers no such algorithm (small FP8 weight gradients over many tokens), in pieces
 * that it keeps in the workspace and adds in order. Never in place: that order would be chance. */
int gemm_candidates(cublasLtMatmulAlgo_t *algos, int max, const GemmPlan *p) {
    const int n = candidates_of(algos, max, p, CUBLASLT_REDUCTION_SCHEME_NONE);
    return n > 0 ? n : candidates_of(algos, max, p, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
}

static int32_t attribute_of(const cublasLtMatmulAlgo_t *algo, GemmAttribute which) {
    static const struct {
        cublasLtMatmulAlgoConfigAttributes_t id;
        size_t size;
    } attributes[GEMM_ATTRIBUTES] = {{CUBLASLT_ALGO_CONFIG_ID, 4},
                                     {CUBLASLT_ALGO_CONFIG_TILE_ID, 4},
                                     {CUBLASLT_ALGO_CONFIG_STAGES_ID, 4},
                                     {CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4},
                                     {CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, 4},
                                     {CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, 4},
                                     {CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, 4},
                                     {CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, 2},
                                     {CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2}};
    uint32_t wide = 0;
    uint16_t narrow = 0;
    size_t written;
    const size_t size = attributes[which].size;
    void *value = size == 2 ? (void *)&narrow : (void *)&wide;
    if (cublasLtMatmulAlgoConfigGetAttribute(algo, attributes[which].id, value, size, &written) !=
        CUBLAS_STATUS_SUCCESS)
        return -1;
    return size == 2 ? narrow : (int32_t)wide;
}

void gemm_plan_use(GemmPlan *p, const cublasLtMatmulAlgo_t *algo) {
    static_assert(sizeof algo->data == sizeof p->row.word, "an algorithm is 64 bytes");
    p->algo = *algo;
    memcpy(p->row.word, algo->data, sizeof algo->data);
    for (int i = 0; i < GEMM_ATTRIBUTES; i++) p->row.attribute[i] = attribute_of(algo, (GemmAttribute)i);
}

/* The library may refuse what a row says: a damaged row, or one for other layouts. */
static bool use_row(GemmPlan *p, const GemmRows *rows) {
    const GemmRow *row = gemm_rows_find(rows, place(), &p->row.call);
    if (!row) return false;
    cublasLtMatmulAlgo_t algo;
    cublasLtMatmulHeuristicResult_t result;
    memcpy(algo.data, row->word, sizeof algo.data);
    if (cublasLtMatmulAlgoCheck(cuda_context()->cublas, p->op, p->a, p->b, p->y, p->y, &algo, &result) !=
            CUBLAS_STATUS_SUCCESS ||
        result.workspaceSize > GEMM_WORKSPACE_BYTES ||
        attribute_of(&algo, GEMM_REDUCTION) == CUBLASLT_REDUCTION_SCHEME_INPLACE)
        return false;
    gemm_plan_use(p, &algo);
    return true;
}

static GemmPlan *plan_make(const GemmCall *call, Tensor y, Tensor a, Tensor b) {
    CHECK(gemms.n < PLANS_MAX, "more than %d GEMM shapes", PLANS_MAX);
    GemmPlan *p = &gemms.plan[gemms.n++];
    memset(p, 0, sizeof *p);
    p->row.place = *place();
    p->row.call = *call;
    describe(p, y, a, b);
    p->is_known = use_row(p, &gemms.builtin);
    p->is_resumed = use_row(p, &gemms.resumed);
    if (p->is_known || p->is_resumed) return p;
    cublasLtMatmulAlgo_t first;
    char text[128];
    CHECK(gemm_candidates(&first, 1, p) == 1, "cuBLASLt knows no algorithm for %s",
          gemm_call_text(text, sizeof text, call));
    gemm_plan_use(p, &first);
    return p;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static int alignment_of(Tensor a, Tensor b, Tensor y) {
    uintptr_t bits = (uintptr_t)a.data | (uintptr_t)b.data | (uintptr_t)y.data;
    int alignment = 16;
    while (bits % (uintptr_t)alignment) alignment /= 2;
    return alignment;
}

static GemmCall call_of(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate) {
    CHECK(a.dtype == b.dtype, "gemm: %s by %s", dtype_name(a.dtype), dtype_name(b.dtype));
    GemmCall call;
    call.kind = kind;
    call.m = y.shape[0], call.n = y.shape[1], call.k = a.shape[kind == GEMM_WGRAD && a.dtype != DTYPE_E4M3 ? 0 : 1];
    call.lda = a.ld, call.ldb = b.ld, call.ldy = y.ld;
    call.in = a.dtype, call.out = y.dtype;
    call.accumulate = accumulate;
    call.alignment = alignment_of(a, b, y);
    call.sms = cuda_context()->n_sms;
    return call;
}

/* NULL: nothing to compute. */
static const GemmPlan *plan_of(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate) {
    if (y.shape[0] == 0 || y.shape[1] == 0) return NULL;
    const GemmCall call = call_of(y, a, b, kind, accumulate);
    for (int i = 0; i < gemms.n; i++)
        if (gemm_call_equal(&gemms.plan[i].row.call, &call)) return &gemms.plan[i];
    return plan_make(&call, y, a, b);
}

void gemm_plan_run(const GemmPlan *p, const cublasLtMatmulAlgo_t *algo, Tensor y, Tensor a, Tensor b, Stream s) {
    const float alpha = 1, beta = p->row.call.accumulate ? 1 : 0;
    void *workspace = cuda_context()->gemm_workspace[s];
    CHECK(workspace, "gemm on stream %d, which has no workspace", (int)s);
    if (a.dtype == DTYPE_E4M3) set_scales(p, a.scale, b.scale);
    CUBLAS_CHECK(cublasLtMatmul(cuda_context()->cublas, p->op, &alpha, b.data, p->a, a.data, p->b, &beta, y.data, p->y,
                                y.data, p->y, algo, workspace, GEMM_WORKSPACE_BYTES, cuda_stream(s)));
}

/* In FP8 the library takes whole eights of rows. */
static bool has_few_rows(Tensor y, Tensor b) {
    return b.scale_layout == SCALE_BLOCK_128X128 && y.shape[0] % 8 != 0;
}

void cuda_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s) {
    if (has_few_rows(y, b)) {
        gemm_few_rows(y, a, b, accumulate, cuda_stream(s));
        return;
    }
    const GemmPlan *p = plan_of(y, a, b, kind, accumulate);
    if (p) gemm_plan_run(p, &p->algo, y, a, b, s);
}

void cuda_gemm_prepare(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s) {
    (void)s;
    if (!has_few_rows(y, b)) (void)plan_of(y, a, b, kind, accumulate);
}

/* ---- heads ------------------------------------------------------------------------------------------------------- */

static void set_batch(cublasLtMatrixLayout_t layout, int32_t n, int64_t step) {
    CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n));
    CUBLAS_CHECK(
        cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step, sizeof step));
}

static const GemmPlan *head_plan_of(const GemmCall *call, HeadSteps steps, Tensor y, Tensor a, Tensor b) {
    const int64_t b_step = steps.b_rows * b.ld;
    for (int i = 0; i < heads.n; i++) {
        const HeadPlan *h = &heads.head[i];
        if (gemm_call_equal(&h->plan.row.call, call) && h->steps.n_heads == steps.n_heads &&
            h->steps.y_cols == steps.y_cols && h->steps.a_cols == steps.a_cols && h->b_step == b_step)
            return &h->plan;
    }
    CHECK(heads.n < HEAD_PLANS_MAX, "more than %d GEMM shapes of heads", HEAD_PLANS_MAX);
    HeadPlan *h = &heads.head[heads.n++];
    memset(h, 0, sizeof *h);
    h->steps = steps;
    h->b_step = b_step;
    h->plan.row.call = *call;
    describe(&h->plan, y, a, b);
    set_batch(h->plan.a, steps.n_heads, b_step);
    set_batch(h->plan.b, steps.n_heads, steps.a_cols);
    set_batch(h->plan.y, steps.n_heads, steps.y_cols);
    char text[128];
    CHECK(gemm_candidates(&h->plan.algo, 1, &h->plan) == 1, "cuBLASLt knows no algorithm for %d heads of %s",
          steps.n_heads, gemm_call_text(text, sizeof text, call));
    return &h->plan;
}

void cuda_head_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, HeadSteps steps, Stream s) {
    if (y.shape[0] == 0 || y.shape[1] == 0) return;
    const int64_t in = (int64_t)dtype_size(a.dtype), out = (int64_t)dtype_size(y.dtype);
    GemmCall call = call_of(y, a, b, kind, false);
    while ((steps.a_cols * in | steps.b_rows * b.ld * in | steps.y_cols * out) % call.alignment) call.alignment /= 2;
    const GemmPlan *p = head_plan_of(&call, steps, y, a, b);
    gemm_plan_run(p, &p->algo, y, a, b, s);
}

/* ---- for banner and checkpoint ----------------------------------------------------------------------------------- */

const char *cuda_gemm_place(char *buf, int64_t buf_len) {
    return gemm_place_text(buf, buf_len, place());
}

const Ops *ops_cuda_prepare(void) {
    static Ops ops;
    ops = ops_rehearsal(cuda_gemm_prepare);
    return &ops;
}

GemmCount cuda_gemm_count(void) {
    GemmCount count = {gemms.n, 0, 0};
    for (int i = 0; i < gemms.n; i++) {
        count.known += gemms.plan[i].is_known;
        count.resumed += gemms.plan[i].is_resumed;
    }
    return count;
}

char *cuda_gemm_rows(void) {
    char *text = (char *)malloc((size_t)gemms.n * GEMM_ROW_LEN + 1), *end = text;
    CHECK(text, "no memory for %d rows of the GEMM table", gemms.n);
    *text = 0;
    for (int i = 0; i < gemms.n; i++) {
        gemm_row_text(end, &gemms.plan[i].row);
        end += strlen(end);
        *end++ = '\n';
        *end = 0;
    }
    return text;
}

int cuda_gemm_resume(const char *rows, char *err) {
    CHECK(gemms.n == 0, "%d GEMMs have run before the checkpoint's algorithms came", gemms.n);
    gemm_rows_free(&gemms.resumed);
    return gemm_rows_parse(&gemms.resumed, rows, err);
}
