/* Speed of the CPU backend's products: f32 GEMM beside OpenBLAS, then our kinds at the shapes of configs/tiny.json.
 *
 * Both libraries run in this process on the same threads, in turn, on the same matrices; the figure of each is the
 * median over the rounds. Before a turn comes a short sleep and one unmeasured call: OpenBLAS's idle threads keep a
 * core busy for a while after its last call, and would be measured with ours. One JSON row a measure. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* CPU sets */
#endif
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#ifdef HAVE_OPENBLAS
#include <cblas.h>
#undef I
#endif

#include "kernels/base/check.h"
#include "kernels/base/rng.h"
#include "kernels/cpu/cpu.h"

enum { ROUNDS = 15, SETTLE_US = 60000, T = 2048, SEQ_LEN = 256, D = 128, N_EXPERTS = 16, N_CHOSEN = 4 };

static const Device *device(void) {
    static Device cpu;
    cpu.ops = ops_cpu();
    return &cpu;
}

static int n_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

/* A matrix of normal numbers; lives until the process ends. */
static Tensor matrix(Dtype dtype, int64_t rows, int64_t cols) {
    Tensor t = tensor_2d(op_alloc(device(), (size_t)(rows * cols) * dtype_size(dtype)), dtype, rows, cols);
    CHECK(t.data, "no memory for %lld x %lld", (long long)rows, (long long)cols);
    if (dtype != DTYPE_F32) return t;
    for (int64_t i = 0; i < rows * cols; i++) ((real *)t.data)[i] = (real)rng_normal(1, RNG_TEST, 0, (uint64_t)i);
    return t;
}

typedef void (*Work)(void *context);

/* Seconds of one call, after a pause and one call that wakes the threads. */
static double time_of(Work work, void *context) {
    const struct timespec settle = {.tv_nsec = SETTLE_US * 1000L};
    nanosleep(&settle, NULL);
    work(context);
    int n_calls = 0;
    double start = now_s(), end = start;
    for (; n_calls < 3 || end - start < 0.004; n_calls++) {
        work(context);
        end = now_s();
    }
    return (end - start) / n_calls;
}

static void row_alone(const char *name, Work work, void *context, double flops) {
    double seconds[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) seconds[i] = time_of(work, context);
    double s = median(seconds, ROUNDS);
    printf("{\"name\":\"%s\",\"ours_gflops\":%.1f,\"ms\":%.3f,\"threads\":%d,\"isa\":\"%s\"}\n", name, 1e-9 * flops / s,
           1e3 * s, n_threads(), cpu_isa_name());
    fflush(stdout);
}

/* ---- GEMM ---- */

typedef struct {
    Tensor y, a, b;
    GemmKind kind;
} Product;

static void run_ours(void *context) {
    const Product *p = (const Product *)context;
    op_gemm(device(), p->y, p->a, p->b, p->kind, false, STREAM_COMPUTE);
}

static Product product_make(GemmKind kind, int64_t m, int64_t n, int64_t k) {
    Product p = {.kind = kind, .y = matrix(DTYPE_F32, m, n)};
    p.a = kind == GEMM_WGRAD ? matrix(DTYPE_F32, k, m) : matrix(DTYPE_F32, m, k);
    p.b = kind == GEMM_FPROP ? matrix(DTYPE_F32, n, k) : matrix(DTYPE_F32, k, n);
    return p;
}

#if defined(HAVE_OPENBLAS) && !defined(REAL_IS_DOUBLE)
static void run_peer(void *context) {
    const Product *p = (const Product *)context;
    bool by_tokens = p->kind == GEMM_WGRAD;
    int m = (int)p->y.shape[0], n = (int)p->y.shape[1], k = (int)p->a.shape[by_tokens ? 0 : 1];
    cblas_sgemm(CblasRowMajor, by_tokens ? CblasTrans : CblasNoTrans, p->kind == GEMM_FPROP ? CblasTrans : CblasNoTrans,
                m, n, k, 1, (const float *)p->a.data, (int)p->a.ld, (const float *)p->b.data, (int)p->b.ld, 0,
                (float *)p->y.data, (int)p->y.ld);
}

static void row_gemm(const char *name, GemmKind kind, int64_t m, int64_t n, int64_t k) {
    Product p = product_make(kind, m, n, k);
    double ours[ROUNDS], peer[ROUNDS], ratio[ROUNDS];
    openblas_set_num_threads(n_threads());
    for (int i = 0; i < ROUNDS; i++) {
        ours[i] = time_of(run_ours, &p);
        peer[i] = time_of(run_peer, &p);
        ratio[i] = peer[i] / ours[i];
    }
    double flops = 2e-9 * (double)(m * n * k);
    printf("{\"name\":\"%s_vs_openblas\",\"ratio\":%.2f,\"ours_gflops\":%.1f,\"peer_gflops\":%.1f,\"threads\":%d,"
           "\"isa\":\"%s\"}\n",
           name, median(ratio, ROUNDS), flops / median(ours, ROUNDS), flops / median(peer, ROUNDS), n_threads(),
           cpu_isa_name());
    fflush(stdout);
}
#else
static void row_gemm(const char *name, GemmKind kind, int64_t m, int64_t n, int64_t k) {
    Product p = product_make(kind, m, n, k);
    row_alone(name, run_ours, &p, 2.0 * (double)(m * n * k));
}
#endif

/* ---- experts ---- */

typedef struct {
    Tensor y, x, w, start;
    GemmKind kind;
} Grouped;

static void run_grouped(void *context) {
    const Grouped *g = (const Grouped *)context;
    if (g->kind == GEMM_WGRAD)
        op_grouped_wgrad(device(), g->w, g->y, g->x, g->start, STREAM_COMPUTE);
    else
        op_grouped_gemm(device(), g->y, g->x, g->w, g->start, g->kind, STREAM_COMPUTE);
}

/* 16 experts with 4, 5, 4, 3, ... blocks of rows: T * N_CHOSEN rows in all. */
static void row_grouped(const char *name, GemmKind kind, int64_t out, int64_t in) {
    const int64_t n_rows = T * N_CHOSEN;
    bool is_dgrad = kind == GEMM_DGRAD;
    Grouped g = {.kind = kind, .y = matrix(DTYPE_F32, n_rows, is_dgrad ? in : out)};
    g.x = matrix(DTYPE_F32, n_rows, is_dgrad ? out : in);
    g.w = matrix(DTYPE_F32, N_EXPERTS * out, in);
    g.w = tensor_3d(g.w.data, DTYPE_F32, N_EXPERTS, out, in);
    Tensor start = matrix(DTYPE_I32, 1, N_EXPERTS + 1);
    g.start = tensor_1d(start.data, DTYPE_I32, N_EXPERTS + 1);
    int32_t *first = (int32_t *)g.start.data;
    static const int blocks[] = {4, 5, 4, 3};
    for (int e = 0; e < N_EXPERTS; e++) first[e + 1] = first[e] + GROUP_ALIGN * blocks[e % 4];
    row_alone(name, run_grouped, &g, 2.0 * (double)(n_rows * out * in));
}

/* ---- attention ---- */

typedef struct {
    Tensor o, lse, q, k, v, doc_start, d_o, dq, dk, dv, delta;
    AttentionShape shape;
} Heads;

static void run_attention_forward(void *context) {
    const Heads *h = (const Heads *)context;
    op_attention_forward(device(), h->o, h->lse, h->q, h->k, h->v, h->doc_start, h->shape, STREAM_COMPUTE);
}

static void run_attention_backward(void *context) {
    const Heads *h = (const Heads *)context;
    op_attention_backward(device(), h->dq, h->dk, h->dv, h->delta, h->d_o, h->o, h->q, h->k, h->v, h->lse, h->doc_start,
                          h->shape, STREAM_COMPUTE);
}

/* FLOPs as the model counts them: the causal half, backward without the second product for the scores. */
static void row_attention(void) {
    Heads h = {.shape = {.n_heads = 4, .nope = 32, .rope = 16, .value = 32, .scale = 0.144, .rope_mscale = 1}};
    const int64_t qk = 4 * 48, v = 4 * 32;
    Tensor *wide[] = {&h.q, &h.k, &h.dq, &h.dk}, *narrow[] = {&h.v, &h.o, &h.d_o, &h.dv},
           *per_head[] = {&h.lse, &h.delta};
    for (int i = 0; i < 4; i++) {
        *wide[i] = matrix(DTYPE_F32, T, qk);
        *narrow[i] = matrix(DTYPE_F32, T, v);
    }
    for (int i = 0; i < 2; i++) *per_head[i] = matrix(DTYPE_F32, T, 4);
    Tensor start = matrix(DTYPE_I32, 1, T);
    h.doc_start = tensor_1d(start.data, DTYPE_I32, T);
    for (int64_t t = 0; t < T; t++) ((int32_t *)h.doc_start.data)[t] = (int32_t)(t / SEQ_LEN * SEQ_LEN);
    const double pairs = (double)T * (SEQ_LEN + 1) / 2;
    row_alone("cpu_attention_forward_tiny", run_attention_forward, &h, 2 * pairs * (double)(qk + v));
    row_alone("cpu_attention_backward_tiny", run_attention_backward, &h, 4 * pairs * (double)(qk + v));
}

/* Starts the program again with OpenMP threads that soon sleep when they wait. Threads that spin for long hold the core
 * that the peer's threads, or the machine's other work, would need: then each parallel region lasts a slice of the
 * scheduler. OpenMP reads its environment before main. */
static void start_with_short_spins(char **argv) {
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "20000", 1);
    execv("/proc/self/exe", argv);
}

/* Gives each of our threads a core of its own; without it the system may let two of them share one for many rounds. The
 * peer's threads exist by now and stay free, but for the calling one. */
static void pin_threads(void) {
#ifdef _OPENMP
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < n_threads()) return;
#pragma omp parallel
    {
        cpu_set_t own;
        CPU_ZERO(&own);
        for (int cpu = 0, n_before = 0; cpu < CPU_SETSIZE; cpu++) {
            if (!CPU_ISSET(cpu, &allowed)) continue;
            if (n_before++ == omp_get_thread_num()) CPU_SET(cpu, &own);
        }
        sched_setaffinity(0, sizeof own, &own);
    }
#endif
}

int main(int argc, char **argv) {
    (void)argc;
    start_with_short_spins(argv);
#if defined(HAVE_OPENBLAS) && !defined(REAL_IS_DOUBLE)
    Product first = product_make(GEMM_FPROP, 512, 512, 512);
    run_peer(&first); /* starts the peer's threads */
#endif
    pin_threads();
    row_gemm("cpu_gemm_f32_768", GEMM_FPROP, 768, 768, 768);
    row_gemm("cpu_gemm_f32_768_dgrad", GEMM_DGRAD, 768, 768, 768);
    row_gemm("cpu_gemm_f32_768_wgrad", GEMM_WGRAD, 768, 768, 768);
    row_gemm("cpu_gemm_f32_tiny_fprop", GEMM_FPROP, T, 192, D);
    row_gemm("cpu_gemm_f32_tiny_dgrad", GEMM_DGRAD, T, D, 192);
    row_gemm("cpu_gemm_f32_tiny_wgrad", GEMM_WGRAD, 192, D, T);
    row_gemm("cpu_gemm_f32_tiny_router", GEMM_FPROP, T, N_EXPERTS, D);
    row_grouped("cpu_grouped_gemm_tiny_fprop", GEMM_FPROP, 256, D);
    row_grouped("cpu_grouped_gemm_tiny_dgrad", GEMM_DGRAD, 256, D);
    row_grouped("cpu_grouped_wgrad_tiny", GEMM_WGRAD, 256, D);
    row_attention();
    return 0;
}
