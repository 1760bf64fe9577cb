#include "tests/cuda/cuda_test.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"

enum { RUNS = 3, GUARD = 512, GUARD_BYTE = 0xA5, BLOCKS_MAX = 512 };

const Dtype act_dtypes[2] = {DTYPE_F32, DTYPE_BF16};

const Device *cuda_test_device(void) {
    static Device device;
    if (device.ops) return &device;
    CudaDevice info;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(cuda_start(0, &info, err, hint) == 0, "%s (%s)", err, hint);
    device.ops = ops_cuda();
    ops_check_complete(device.ops);
    return &device;
}

const char *case_name(const char *fmt, ...) {
    char *text = malloc(256);
    REQUIRE(text != NULL, "no memory");
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, 256, fmt, args);
    va_end(args);
    return text;
}

/* ---- device memory ----------------------------------------------------------------------------------------------- */

/* A tensor's bytes from its first element to its last, gaps included, between two guards. */
typedef struct {
    char *block, *data; /* on the device */
    size_t bytes, block_bytes;
} Span;

static Span spans[BLOCKS_MAX];
static int n_spans;

static int64_t n_rows_of(Tensor t) {
    return t.ndim <= 1 ? (t.ndim == 1) : tensor_numel(t) / (t.shape[t.ndim - 1] > 0 ? t.shape[t.ndim - 1] : 1);
}

static size_t span_bytes(Tensor t) {
    if (tensor_numel(t) == 0) return 0;
    const int64_t width = t.shape[t.ndim - 1];
    return (size_t)((t.ndim == 1 ? 0 : (n_rows_of(t) - 1) * t.ld) + width) * dtype_size(t.dtype);
}

static Span span_new(const void *host, size_t bytes) {
    REQUIRE(n_spans < BLOCKS_MAX, "more than %d device tensors: call d_free_all()", BLOCKS_MAX);
    const size_t offset = (uintptr_t)host % 256;
    Span s = {.bytes = bytes, .block_bytes = 2 * GUARD + 256 + bytes};
    s.block = op_alloc(GPU, s.block_bytes);
    REQUIRE(s.block != NULL, "no device memory for %zu bytes", bytes);
    s.data = s.block + GUARD + offset;
    spans[n_spans++] = s;
    return s;
}

/* The guards, and the host's bytes between them. */
static void span_write(const Span *s, const void *host) {
    char *image = malloc(s->block_bytes);
    REQUIRE(image != NULL, "no memory");
    memset(image, GUARD_BYTE, s->block_bytes);
    if (s->bytes > 0) memcpy(image + (s->data - s->block), host, s->bytes);
    op_copy_in(GPU, s->block, image, s->block_bytes, STREAM_COMPUTE);
    op_synchronize(GPU, STREAM_COMPUTE);
    free(image);
}

/* The bytes of the span; false if a guard has changed. */
static bool span_read(const Span *s, void *host) {
    unsigned char *image = malloc(s->block_bytes);
    REQUIRE(image != NULL, "no memory");
    op_copy_out(GPU, image, s->block, s->block_bytes, STREAM_COMPUTE);
    op_synchronize(GPU, STREAM_COMPUTE);
    const size_t first = (size_t)(s->data - s->block), end = first + s->bytes;
    if (s->bytes > 0) memcpy(host, image + first, s->bytes);
    bool is_intact = true;
    for (size_t i = 0; i < s->block_bytes; i++)
        if (i < first || i >= end) is_intact = is_intact && image[i] == GUARD_BYTE;
    free(image);
    return is_intact;
}

void d_free_all(void) {
    while (n_spans > 0) op_release(GPU, spans[--n_spans].block);
}

Tensor d_copy(Tensor host) {
    const Span s = span_new(host.data, span_bytes(host));
    span_write(&s, host.data);
    host.data = s.data;
    return host;
}

Tensor d_read(Tensor device) {
    Tensor host = device, y = t_zeros(device.dtype, device.ndim, device.shape[0], device.ndim > 1 ? device.shape[1] : 1,
                                      device.ndim > 2 ? device.shape[2] : 1);
    const size_t bytes = span_bytes(device);
    char *image = malloc(bytes + 1);
    REQUIRE(image != NULL, "no memory");
    op_copy_out(GPU, image, device.data, bytes, STREAM_COMPUTE);
    op_synchronize(GPU, STREAM_COMPUTE);
    host.data = image;
    host.n_rows = NULL;
    for (int64_t i = 0; i < tensor_numel(host); i++) t_set(y, i, t_get(host, i));
    free(image);
    return y;
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

/* An argument on the device, and what it looked like. */
typedef struct {
    Span span;
    int same_as;  /* an earlier argument with the same memory, or itself */
    char *before; /* the host's bytes before the op */
    char *after;  /* the device's bytes after the last run */
    char *first;  /* and after the first run */
} Place;

static int n_args(const Case *c) {
    int n = 0;
    while (n < ARGS_MAX && c->args[n].name) n++;
    return n;
}

static char *bytes_copy(const void *p, size_t n) {
    char *copy = malloc(n + 1);
    REQUIRE(copy != NULL, "no memory");
    if (n > 0) memcpy(copy, p, n);
    return copy;
}

static void *device_struct(const void *host, size_t bytes) {
    const Span s = span_new(NULL, bytes);
    span_write(&s, host);
    return s.data;
}

static void read_struct(void *host, const void *device, size_t bytes) {
    op_copy_out(GPU, host, device, bytes, STREAM_COMPUTE);
    op_synchronize(GPU, STREAM_COMPUTE);
}

/* Poisons the outputs on the host, then keeps the bytes of every argument and gives it memory on the device. */
static void place_args(Place *place, const Case *c, int n) {
    for (int i = 0; i < n; i++) {
        const Arg *a = &c->args[i];
        place[i] = (Place){.same_as = i};
        for (int j = i - 1; j >= 0 && a->t.data; j--)
            if (c->args[j].t.data == a->t.data) place[i].same_as = place[j].same_as;
        if (place[i].same_as != i) {
            REQUIRE(span_bytes(a->t) <= place[place[i].same_as].span.bytes, "%s: %s is longer than what it shares",
                    c->name, a->name);
            place[i].span = place[place[i].same_as].span;
            continue;
        }
        if (a->kind == ARG_OUT || a->kind == ARG_SCRATCH) t_poison(a->t);
        place[i].before = bytes_copy(a->t.data, span_bytes(a->t));
        place[i].span = span_new(a->t.data, span_bytes(a->t));
        place[i].after = bytes_copy(place[i].before, place[i].span.bytes);
    }
}

/* One run on the device from the same start; `is_captured`: replayed from a graph. */
static void run_on_device(const Case *c, Side *side, Place *place, int n, bool is_captured) {
    for (int i = 0; i < n; i++)
        if (place[i].same_as == i) span_write(&place[i].span, place[i].before);
    op_copy_in(GPU, side->stats, &c->stats, sizeof c->stats, STREAM_COMPUTE);
    op_copy_in(GPU, side->state, &c->state, sizeof c->state, STREAM_COMPUTE);
    op_synchronize(GPU, STREAM_COMPUTE);
    if (is_captured) {
        op_graph_begin(GPU, STREAM_COMPUTE);
        c->run(side);
        Graph *graph = op_graph_end(GPU, STREAM_COMPUTE);
        op_graph_launch(GPU, graph, STREAM_COMPUTE);
        op_synchronize(GPU, STREAM_COMPUTE);
        op_graph_free(GPU, graph);
    } else {
        c->run(side);
        op_synchronize(GPU, STREAM_COMPUTE);
    }
    for (int i = 0; i < n; i++) {
        if (place[i].same_as != i) continue;
        EXPECT(span_read(&place[i].span, place[i].after), "%s: memory around %s was written", c->name, c->args[i].name);
        if (c->args[i].kind == ARG_IN)
            EXPECT(memcmp(place[i].after, place[i].before, place[i].span.bytes) == 0, "%s: input %s was written",
                   c->name, c->args[i].name);
    }
}

/* The bytes between the rows are as they were. */
static void expect_gaps(const Case *c, const Arg *a, const Place *p) {
    if (a->t.ndim < 2 || a->t.ld == a->t.shape[a->t.ndim - 1]) return;
    const size_t size = dtype_size(a->t.dtype), width = (size_t)a->t.shape[a->t.ndim - 1] * size;
    const size_t gap = (size_t)a->t.ld * size - width;
    for (int64_t r = 0; r + 1 < n_rows_of(a->t); r++) {
        const size_t at = (size_t)(r * a->t.ld) * size + width;
        if (memcmp(p->after + at, p->before + at, gap) == 0) continue;
        EXPECT(false, "%s: the gap behind row %lld of %s was written", c->name, (long long)r, a->name);
        return;
    }
}

/* The device's result against the CPU's, which stands in the argument itself. */
static void expect_values(const Case *c, const Arg *a, const Place *p) {
    Tensor gpu = a->t;
    gpu.data = p->after;
    const double f32 = c->f32_tolerance > 0 ? c->f32_tolerance : CUDA_F32_TOLERANCE;
    const double bf16 = c->bf16_tolerance > 0 ? c->bf16_tolerance : CUDA_BF16_TOLERANCE;
    const double tolerance = a->t.dtype == DTYPE_I32 ? 0 : a->t.dtype == DTYPE_BF16 ? bf16 : f32;
    const int64_t n = tensor_numel(a->t);
    const bool by_element = c->by_element && strcmp(c->by_element, a->name) == 0;
    double largest = 1e-30, worst = 0, worst_got = 0, worst_want = 0;
    int64_t worst_at = -1;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(t_get(a->t, i))) largest = fmax(largest, fabs(t_get(a->t, i)));
    for (int64_t i = 0; i < n; i++) {
        const double want = t_get(a->t, i), got = t_get(gpu, i);
        const double scale = by_element ? fabs(want) + 1e-3 * largest : largest;
        double off = (isnan(want) && isnan(got)) || want == got ? 0 : fabs(got - want) / scale;
        if (isnan(off)) off = INFINITY;
        if (off > worst) worst = off, worst_at = i, worst_got = got, worst_want = want;
    }
    EXPECT(worst <= tolerance, "%s: %s off by %.3g (bound %.3g): element %lld of %lld is %.9g, not %.9g", c->name,
           a->name, worst, tolerance, (long long)worst_at, (long long)n, worst_got, worst_want);
}

static void expect_near(const char *name, const char *field, double got, double want) {
    const bool is_same = got == want || (isnan(got) && isnan(want));
    EXPECT(is_same || fabs(got - want) <= 1e-6 * fmax(fabs(want), 1e-3), "%s: %s is %.12g, not %.12g", name, field, got,
           want);
}

static void expect_structs(const Case *c, const StepStats *got, const UpdateState *state) {
    for (int i = 0; i < LOSSES_MAX; i++) expect_near(c->name, "loss_sum", got->loss_sum[i], c->stats.loss_sum[i]);
    expect_near(c->name, "balance_sum", got->balance_sum, c->stats.balance_sum);
    expect_near(c->name, "overflow", got->overflow, c->stats.overflow);
    expect_near(c->name, "grad_norm_sq", got->grad_norm_sq, c->stats.grad_norm_sq);
    expect_near(c->name, "grad_norm", got->grad_norm, c->stats.grad_norm);
    expect_near(c->name, "grad_scale", got->grad_scale, c->stats.grad_scale);
    EXPECT_EQ(got->skip, c->stats.skip);
    EXPECT(memcmp(state, &c->state, sizeof *state) == 0, "%s: the state is t %lld, skipped %lld", c->name,
           (long long)state->adam_t, (long long)state->skipped_total);
}

void expect_case(Case *c) {
    const int n = n_args(c), first_span = n_spans;
    Place place[ARGS_MAX];
    Side gpu = {.device = GPU, .context = c->context}, cpu = {.device = CPU, .context = c->context};
    place_args(place, c, n);
    for (int i = 0; i < n; i++) {
        cpu.t[i] = gpu.t[i] = c->args[i].t;
        if (!tensor_is_none(c->args[i].t)) gpu.t[i].data = place[i].span.data;
    }
    gpu.params = device_struct(&c->params, sizeof c->params);
    gpu.stats = device_struct(&c->stats, sizeof c->stats);
    gpu.state = device_struct(&c->state, sizeof c->state);

    StepStats stats[RUNS];
    UpdateState state[RUNS];
    for (int run = 0; run < RUNS; run++) {
        run_on_device(c, &gpu, place, n, run == RUNS - 1);
        read_struct(&stats[run], gpu.stats, sizeof stats[run]);
        read_struct(&state[run], gpu.state, sizeof state[run]);
        EXPECT(memcmp(&stats[run], &stats[0], sizeof stats[0]) == 0, "%s: run %d has other stats", c->name, run);
        for (int i = 0; i < n; i++) {
            if (place[i].same_as != i) continue;
            if (run == 0) place[i].first = bytes_copy(place[i].after, place[i].span.bytes);
            EXPECT(memcmp(place[i].after, place[i].first, place[i].span.bytes) == 0, "%s: run %d has other bits in %s",
                   c->name, run, c->args[i].name);
        }
    }

    cpu.params = &c->params, cpu.stats = &c->stats, cpu.state = &c->state;
    c->run(&cpu);
    for (int i = 0; i < n; i++) {
        if (place[i].same_as != i) continue;
        if (c->args[i].kind != ARG_IN) {
            if (c->args[i].kind != ARG_SCRATCH) expect_values(c, &c->args[i], &place[i]);
            expect_gaps(c, &c->args[i], &place[i]);
        }
        free(place[i].before), free(place[i].after), free(place[i].first);
    }
    expect_structs(c, &stats[0], &state[0]);
    while (n_spans > first_span) op_release(GPU, spans[--n_spans].block);
}
