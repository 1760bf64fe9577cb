/* Steps on the GPU: queued without the host waiting, replayed from graphs to the same bits. */
#include "model/train/step.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "loopback.h"
#include "model/train/saver.h"
#include "tests/model/model_test.h"

enum { STEPS = 12 };

/* What a run of STEPS steps left. */
typedef struct {
    double loss[STEPS + 1], gnorm[STEPS + 1];
    uint64_t hash;
    CudaWaits waits; /* in the steps behind the first two */
} Left;

/* A save beside the next step, as run_due has it. */
typedef struct {
    Saver saver;
    uint64_t expected; /* hash of what it has to hold */
    int n_saved;
} Saving;

static void open_saving(Saving *s, const Fixture *f) {
    char note[SAVER_NOTE_LEN];
    memset(s, 0, sizeof *s);
    saver_open(&s->saver, &f->config, &f->model, NULL, note);
    EXPECT((s->saver.memory != NULL) == (f->config.checkpoint.every_steps > 0), "%s", note);
}

static void begin_save(Saving *s, Trainer *t) {
    const CheckpointInfo info = {.state = t->state, .config_json = strdup("{}")};
    s->expected = params_hash(&t->model->params, t->model->device);
    saver_begin(&s->saver, &info);
    t->is_copied = saver_is_copying(&s->saver);
    EXPECT(t->is_copied, "a copy that is done at once");
}

static void end_save(Saving *s) {
    SaveResult result;
    saver_copied(&s->saver, true);
    if (!saver_end(&s->saver, true, &result)) return;
    s->n_saved++;
    EXPECT(!result.failed && result.hash == s->expected, "step %lld: %s", (long long)result.step, result.err);
}

/* Two stages of this rank; stages whose neighbour is made up; half of the experts. */
static void open_both_stages(Fixture *f, const char *const *sets) {
    fixture_open_stage(f, sets, ops_cuda(), mesh_make(0, 1, 1, 1), NULL, SCHEDULE_DUALPIPEV, 3);
}

static void open_outer_stages(Fixture *f, const char *const *sets) {
    fixture_open_stage(f, sets, ops_cuda(), mesh_make(0, 2, 2, 1), comm_loopback, SCHEDULE_DUALPIPEV, 4);
}

static void open_half_of_experts(Fixture *f, const char *const *sets) {
    fixture_open_stage(f, sets, ops_cuda(), mesh_make(0, 2, 1, 2), comm_loopback, SCHEDULE_PAIRED, 3);
}

static void open_whole(Fixture *f, const char *const *sets) {
    fixture_open_on(f, sets, ops_cuda());
}

static bool is_captured(const Trainer *t, int part) {
    return t->config->run.graphs && (part == STEP_UPDATE || (part == STEP_PIPELINE) == (t->pipeline != NULL));
}

/* `is_late` false takes every report right behind its step: the host waits for each. */
static Left train_as(void (*open)(Fixture *f, const char *const *sets), const char *const *sets, bool is_late) {
    char err[ERR_LEN], hint[ERR_LEN];
    Fixture f;
    LoaderSpec spec;
    Loader *loader;
    Trainer t;
    StepReport report;
    Left left;
    memset(&left, 0, sizeof left);
    open(&f, sets);
    f.device.is_asynchronous = true;
    const int n_data = f.comm->mesh.n_data;
    REQUIRE(loader_spec_train(&spec, &f.config, n_data, err, hint) == 0 && loader_open(&loader, &spec, err, hint) == 0,
            "%s", err);
    REQUIRE(trainer_init(&t, &f.config, &f.model, loader, err) == 0, "%s", err);
    trainer_restore(&t);
    Saving saving;
    open_saving(&saving, &f);
    const int64_t every = f.config.checkpoint.every_steps;
    CudaWaits before = cuda_waits();
    for (int i = 1; i <= STEPS; i++) {
        if (i == 3) before = cuda_waits();
        REQUIRE(train_step(&t, err) == 0, "%s", err);
        const CudaWaits now = cuda_waits();
        while (is_late && i < STEPS ? train_report(&t, &report) : train_flush(&t, &report)) {
            left.loss[report.step] = report.loss[0];
            left.gnorm[report.step] = report.gnorm;
            EXPECT(report.skip == SKIP_NONE && report.step == (is_late && i < STEPS ? i - 1 : t.reported), "step %lld",
                   (long long)report.step);
        }
        if (every > 0) end_save(&saving);
        if (every > 0 && i % every == 0) begin_save(&saving, &t);
        if (i == STEPS) left.waits = (CudaWaits){now.streams - before.streams, now.events - before.events};
    }
    for (int part = 0; part < STEP_PARTS; part++)
        EXPECT((t.graph[part] != NULL) == is_captured(&t, part), "part %d", part);
    EXPECT_EQ(t.reported, STEPS);
    EXPECT_EQ(t.state.update.adam_t, STEPS);
    left.hash = params_hash(&f.model.params, &f.device);
    EXPECT_EQ(saving.n_saved, every > 0 ? (STEPS - 1) / every : 0);
    saver_close(&saving.saver);
    trainer_free(&t);
    loader_close(loader);
    fixture_close(&f);
    return left;
}

static Left train(const char *const *sets, bool is_late) {
    return train_as(open_whole, sets, is_late);
}

static void start_gpu(void) {
    char err[ERR_LEN], hint[ERR_LEN];
    CudaDevice info;
    REQUIRE(cuda_start(0, &info, err, hint) == 0, "%s (%s)", err, hint);
}

static void expect_equal(const Left *a, const Left *b, const char *what) {
    for (int i = 1; i <= STEPS; i++)
        EXPECT(a->loss[i] == b->loss[i] && a->gnorm[i] == b->gnorm[i], "%s: step %d: loss %.17g and %.17g", what, i,
               a->loss[i], b->loss[i]);
    EXPECT(a->hash == b->hash, "%s: the weights differ", what);
}

/* Three micro-batches a step, a schedule of everything that changes from step to step. */
TEST(cuda_step_from_graphs_is_the_same) {
    static const char *const precisions[][2] = {{"precision.compute=fp32", "precision.moments=fp32"},
                                                {"precision.compute=bf16", "precision.moments=bf16"},
                                                {"precision.compute=fp8", "precision.moments=bf16"}};
    start_gpu();
    for (int i = 0; i < 3; i++) {
        const char *sets[] = {precisions[i][0],
                              precisions[i][1],
                              "train.global_batch_size=6",
                              "train.steps=12",
                              "train.lr_warmup_steps=6",
                              "train.mtp_loss_weight=[[0,0.3],[400,0.3],[400,0.1]]",
                              "train.bias_update_speed=[[0,0.01],[600,0.01],[600,0]]",
                              "run.graphs=false",
                              FP8_WIDTHS,
                              NULL};
        if (i < 2) sets[8] = NULL;
        const Left eager = train(sets, true), waited = train(sets, false);
        sets[7] = "run.graphs=true";
        const Left replayed = train(sets, true);
        expect_equal(&waited, &eager, "a step late and at once");
        expect_equal(&replayed, &eager, "graphs and op by op");
        EXPECT(i == 2 || eager.loss[STEPS] < eager.loss[1], "loss %g after %g", eager.loss[STEPS], eager.loss[1]);
    }
}

/* Two stages of one rank, a forward beside a backward: the list of a step as a graph. */
TEST(cuda_pipeline_from_graphs_is_the_same) {
    start_gpu();
    for (int i = 0; i < 2; i++) {
        const char *sets[] = {"parallel.schedule=dualpipev",
                              "train.global_batch_size=6",
                              "train.steps=12",
                              i ? "precision.compute=fp8" : "precision.compute=bf16",
                              "precision.moments=bf16",
                              "run.graphs=false",
                              FP8_WIDTHS,
                              NULL};
        const Left whole = train(sets, true), eager = train_as(open_both_stages, sets, true);
        sets[5] = "run.graphs=true";
        const Left replayed = train_as(open_both_stages, sets, true);
        expect_equal(&eager, &whole, "a pipeline and the whole model");
        expect_equal(&replayed, &eager, "a pipeline, graphs and op by op");
        EXPECT_EQ(replayed.waits.streams, 0);
        EXPECT(replayed.waits.events <= STEPS - 3, "%lld waits for events", (long long)replayed.waits.events);
    }
}

/* Transfers on a stream of their own, beside the mathematics: of a stage, and of tokens. */
TEST(cuda_transfers_from_graphs_are_the_same) {
    static const struct {
        void (*open)(Fixture *f, const char *const *sets);
        const char *schedule, *pp, *batch;
    } cases[] = {{open_outer_stages, "parallel.schedule=dualpipev", "parallel.pp=2", "train.global_batch_size=8"},
                 {open_half_of_experts, "parallel.schedule=paired", "parallel.pp=1", "train.global_batch_size=12"}};
    start_gpu();
    for (int i = 0; i < 2; i++) {
        const char *sets[] = {cases[i].schedule,
                              cases[i].pp,
                              cases[i].batch,
                              "parallel.zero1=false",
                              "model.num_hidden_layers=5",
                              "train.steps=12",
                              "precision.compute=bf16",
                              "run.graphs=false",
                              FP8_WIDTHS,
                              NULL};
        const Left eager = train_as(cases[i].open, sets, true);
        sets[7] = "run.graphs=true";
        const Left replayed = train_as(cases[i].open, sets, true);
        expect_equal(&replayed, &eager, cases[i].schedule);
        EXPECT_EQ(replayed.waits.streams, 0);
        EXPECT(replayed.hash != 0 && replayed.gnorm[STEPS] > 0, "nothing was trained");
    }
}

/* FP8 tensors are counted op by op in every fourth step, the others are replayed: no bit changes, nobody waits. */
TEST(cuda_step_counts_fp8_and_is_the_same) {
    const char *sets[] = {FP8_WIDTHS,
                          "precision.compute=fp8",
                          "train.global_batch_size=6",
                          "train.steps=12",
                          "run.graphs=true",
                          "log.fp8_every_steps=0",
                          NULL};
    start_gpu();
    const Left plain = train(sets, true);
    sets[sizeof sets / sizeof *sets - 2] = "log.fp8_every_steps=4";
    const Left counted = train(sets, true);
    expect_equal(&counted, &plain, "with counts and without");
    EXPECT_EQ(counted.waits.streams, 0);
    EXPECT(counted.waits.events <= STEPS - 3, "%lld waits for events", (long long)counted.waits.events);
}

/* A save copies the weights while the next step's micro-batches run: it holds the bits before that step, and no step
 * notices it. */
TEST(cuda_saves_beside_the_steps) {
    char dir[PATH_MAX];
    snprintf(dir, sizeof dir, "run.dir=%s", test_tmp_dir());
    start_gpu();
    for (int with = 0; with < 2; with++) {
        const char *sets[] = {with ? "run.graphs=true" : "run.graphs=false",
                              dir,
                              "train.global_batch_size=6",
                              "train.steps=12",
                              "precision.compute=bf16",
                              "precision.moments=bf16",
                              "checkpoint.every_steps=0",
                              NULL};
        const Left alone = train(sets, false);
        sets[6] = "checkpoint.every_steps=3";
        const Left saved = train(sets, false);
        expect_equal(&saved, &alone, "with saves and without");
    }
}

/* Between steps the host waits for nothing but the record of the step before, once a step. */
TEST(cuda_step_never_waits) {
    start_gpu();
    for (int with = 0; with < 2; with++) {
        const char *sets[] = {with ? "run.graphs=true" : "run.graphs=false", "train.global_batch_size=6",
                              "train.steps=12", NULL};
        const Left left = train(sets, true);
        EXPECT_EQ(left.waits.streams, 0);
        EXPECT(left.waits.events <= STEPS - 3, "%lld waits for events in %d steps", (long long)left.waits.events,
               STEPS - 2);
    }
}

/* What the rings of a step stand on. */
TEST(cuda_events_and_pinned_memory) {
    start_gpu();
    const Device d = {.ops = ops_cuda()};
    enum { N = 1 << 20 };
    int32_t *host = (int32_t *)op_host_alloc(&d, N * sizeof *host),
            *back = (int32_t *)op_host_alloc(&d, N * sizeof *back);
    void *device = op_alloc(&d, N * sizeof *host);
    REQUIRE(host && back && device, "no memory");
    EXPECT((uintptr_t)host % ARENA_ALIGN == 0 && host[0] == 0 && host[N - 1] == 0);
    op_event_synchronize(&d, 3); /* nothing was recorded */
    for (int round = 1; round <= 3; round++) {
        for (int i = 0; i < N; i++) host[i] = round * i;
        op_copy_in(&d, device, host, N * sizeof *host, STREAM_COMPUTE);
        op_copy_out(&d, back, device, N * sizeof *host, STREAM_COMPUTE);
        op_event_record(&d, 3, STREAM_COMPUTE);
        op_event_synchronize(&d, 3);
        EXPECT(memcmp(host, back, N * sizeof *host) == 0, "round %d", round);
    }
    EXPECT(op_host_alloc(&d, (size_t)1 << 50) == NULL, "a petabyte was found");
    op_release(&d, device);
    op_host_release(&d, host);
    op_host_release(&d, back);
    op_host_release(&d, NULL);
}
