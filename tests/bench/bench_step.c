/* A whole training step on the GPU, and where its time goes, op by op.
 *
 *     bench_step CONFIG [section.field=value]...
 *
 * parallel.schedule=dualpipev drives the model through the pipeline's executor, as two stages on one rank;
 * parallel.comm=nccl puts NCCL under it.
 *
 * Ten steps are timed as they run, through train_step and the loader as in a run. Ten more run under CUPTI: how long
 * the GPU stood still, and how often the host did. Then three run op by op with an event in front of every op (the
 * device's watcher): the time from one event to the next on the compute stream is the op's. Events cost a little, so
 * the table's sum is not the step. */
#ifdef HAVE_CUDA
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/cuda/cuda.h"
#include "model/memory.h"
#include "model/train/device.h"
#include "model/train/part.h"
#include "model/train/ranks.h"
#include "model/train/step.h"
#include "tests/bench/gpu_trace.h"

enum { STEPS_WARM = 3, STEPS_TIMED = 10, STEPS_WATCHED = 3, MARKS_MAX = 200000, NAMES_MAX = 128 };

typedef struct {
    int n;
    const char *op[MARKS_MAX];
    char shape[MARKS_MAX][40];
    cudaEvent_t event[MARKS_MAX];
} Marks;

static void mark(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                 int n_reads) {
    Marks *m = (Marks *)watcher;
    if (s != STREAM_COMPUTE) return;
    CHECK(m->n < MARKS_MAX, "more than %d ops", MARKS_MAX);
    m->op[m->n] = op;
    m->shape[m->n][0] = 0;
    if (strstr(op, "gemm") || strstr(op, "wgrad"))
        snprintf(m->shape[m->n], sizeof m->shape[0], "%lldx%lldx%lld over %lld", (long long)writes[0].shape[0],
                 (long long)writes[0].shape[1], (long long)writes[0].shape[2], (long long)reads[0].shape[0]);
    (void)n_writes, (void)n_reads;
    CHECK(cudaEventCreate(&m->event[m->n]) == cudaSuccess, "no event");
    CHECK(cudaEventRecord(m->event[m->n], cuda_stream_of(STREAM_COMPUTE)) == cudaSuccess, "event not recorded");
    m->n++;
}

typedef struct {
    const char *op, *shape;
    int calls;
    double ms;
} Row;

static int by_time(const void *a, const void *b) {
    double x = ((const Row *)a)->ms, y = ((const Row *)b)->ms;
    return x < y ? 1 : (x > y ? -1 : 0);
}

static void print_table(const Marks *m) {
    static Row rows[NAMES_MAX];
    int n = 0;
    double total = 0;
    for (int i = 0; i + 1 < m->n; i++) {
        float ms;
        CHECK(cudaEventElapsedTime(&ms, m->event[i], m->event[i + 1]) == cudaSuccess, "events are not done");
        int k = 0;
        while (k < n && (strcmp(rows[k].op, m->op[i]) != 0 || strcmp(rows[k].shape, m->shape[i]) != 0)) k++;
        CHECK(k < NAMES_MAX, "more than %d kinds of op", NAMES_MAX);
        if (k == n) rows[n++] = (Row){m->op[i], m->shape[i], 0, 0};
        rows[k].calls++;
        rows[k].ms += ms;
        total += ms;
    }
    qsort(rows, (size_t)n, sizeof *rows, by_time);
    printf("%-28s %-32s %7s %9s %7s\n", "op", "output over rows", "calls", "ms/step", "share");
    for (int k = 0; k < n; k++)
        printf("%-28s %-32s %7d %9.2f %6.1f%%\n", rows[k].op, rows[k].shape, rows[k].calls / STEPS_WATCHED,
               rows[k].ms / STEPS_WATCHED, 100 * rows[k].ms / total);
    printf("%-28s %-32s %7d %9.2f\n", "all", "", m->n / STEPS_WATCHED, total / STEPS_WATCHED);
}

/* Queued as in a run, each reported while the next one runs; the last one is waited for. */
static void steps(Trainer *t, int n) {
    char err[ERR_LEN];
    StepReport report;
    for (int i = 0; i < n; i++) {
        CHECK(train_step(t, err) == 0, "%s", err);
        train_report(t, &report);
    }
    while (train_flush(t, &report)) continue;
}

static void print_trace(Trainer *t) {
    if (!gpu_trace_start()) return;
    for (int part = 0; part < STEP_PARTS; part++) {
        op_graph_free(t->model->device, t->graph[part]);
        t->graph[part] = NULL; /* captured again under the trace */
    }
    steps(t, STEPS_WARM);
    gpu_trace_clear();
    const double start = clock_s();
    steps(t, STEPS_TIMED);
    const double ms = 1e3 * (clock_s() - start) / STEPS_TIMED;
    const GpuTrace g = gpu_trace_stop();
    printf("host_syncs %.1f per step, gpu_idle %.2f %%  (%.1f waits for an event, %.1f allocations, %.0f kernels and "
           "copies a step; %.1f ms a step under the trace)\n",
           (double)g.n_syncs / STEPS_TIMED, 100 * (1 - g.busy_s / g.span_s), (double)g.n_event_waits / STEPS_TIMED,
           (double)g.n_memory / STEPS_TIMED, (double)g.n_work / STEPS_TIMED, ms);
}

int main(int argc, char **argv) {
    static Marks marks;
    char err[ERR_LEN], hint[ERR_LEN], text[DEVICE_TEXT_LEN];
    Config c;
    Device d;
    Model m;
    Loader *loader;
    LoaderSpec spec;
    Trainer t;
    RankPart part;
    if (argc < 2) DIE("bench_step configs/moonlight_half.json train.micro_batch_size=4", "no config");
    if (config_load(&c, argv[1], (const char *const *)argv + 2, argc - 2, err, hint) != 0) DIE(hint, "%s", err);
    device_open(&d, &c, text);
    const Launch alone = {.rank = 0, .world = 1};
    Comm *comm = ranks_open(&d, &c, &alone);
    memset(&m, 0, sizeof m);
    if (part_is_pipelined(&c, &comm->mesh)) {
        part = part_make(&c, &comm->mesh, d.logits_bytes);
        m.part = &part;
    }
    CHECK(model_init(&m, &c, &d, comm, err) == 0, "%s", err);
    model_init_weights(&m);
    CHECK(loader_spec_train(&spec, &c, 1, err, hint) == 0 && loader_open(&loader, &spec, err, hint) == 0, "%s", err);
    CHECK(trainer_init(&t, &c, &m, loader, err) == 0, "%s", err);

    steps(&t, STEPS_WARM);
    const int64_t before = t.state.tokens;
    const double start = clock_s();
    steps(&t, STEPS_TIMED);
    const double spent = clock_s() - start;
    const double rate = (double)(t.state.tokens - before) / spent;
    DeviceMemory memory;
    cuda_memory(&memory);
    printf("%s: %.1f tokens/s, %.1f TFLOP/s, %.1f ms a step of %lld tokens, %.3f GiB used of %.3f planned; %s\n",
           c.run.name, rate, rate * shape_flops_per_token(&m.shape) * 1e-12, 1e3 * spent / STEPS_TIMED,
           (long long)((t.state.tokens - before) / STEPS_TIMED), (double)memory.held / (1 << 30),
           (double)memory_total(&m) / (1 << 30), text);
    print_trace(&t);
    d.watch = mark;
    d.watcher = &marks;
    steps(&t, STEPS_WATCHED);
    print_table(&marks);
    return 0;
}
#else
#include <stdio.h>
int main(void) {
    printf("bench_step: this build has no CUDA\n");
    return 0;
}
#endif
