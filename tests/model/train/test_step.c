/* One optimizer step: where it stands in the data, what it reports, what it may depend on and what not. */
#include "model/train/step.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/shard.h"
#include "kernels/base/rng.h"
#include "model/train/zscore.h"
#include "tests/data/shards.h"
#include "tests/model/model_test.h"
#include "tests/model/train/replay.h"

typedef struct {
    Fixture f;
    Loader *loader;
    Trainer trainer;
} TrainingRun;

/* The fixture's model over its configuration's data, at the beginning. */
static TrainingRun *run_open(const char *const *sets) {
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    TrainingRun *r = (TrainingRun *)calloc(1, sizeof *r);
    LoaderSpec spec;
    fixture_open(&r->f, sets);
    REQUIRE(loader_spec_train(&spec, &r->f.config, 1, err, hint) == 0, "%s", err);
    REQUIRE(loader_open(&r->loader, &spec, err, hint) == 0, "%s (%s)", err, hint);
    REQUIRE(trainer_init(&r->trainer, &r->f.config, &r->f.model, r->loader, err) == 0, "%s", err);
    trainer_restore(&r->trainer);
    return r;
}

static void run_end(TrainingRun *r) {
    trainer_free(&r->trainer);
    loader_close(r->loader);
    fixture_close(&r->f);
    free(r);
}

static StepReport step(TrainingRun *r) {
    StepReport report;
    char err[ERR_LEN] = "";
    REQUIRE(train_step(&r->trainer, err) == 0, "%s", err);
    REQUIRE(train_flush(&r->trainer, &report), "no report");
    return report;
}

static uint64_t hash_of(const TrainingRun *r) {
    return params_hash(&r->f.model.params, &r->f.device);
}

/* "data.train=" and a shard of documents: each is the document token 0 and ids drawn from 1..36, `length` in all. With
 * `repeat`, all documents are the same. */
static const char *document_shard(int64_t n_documents, int64_t length, bool repeat) {
    static char set[TEST_PATH_LEN + 16];
    char path[TEST_PATH_LEN], err[ERR_LEN];
    const int64_t n = n_documents * length;
    int32_t *ids = (int32_t *)malloc((size_t)n * sizeof *ids);
    for (int64_t i = 0; i < n; i++) {
        const int64_t key = repeat ? i % length : i;
        ids[i] = i % length == 0 ? 0 : 1 + (int32_t)(rng_bits(5, RNG_TEST, 1, (uint64_t)key) % 36);
    }
    REQUIRE(shard_write(test_path(path, "train.bin"), ids, n, 0, err) == 0, "%s", err);
    free(ids);
    snprintf(set, sizeof set, "data.train=%s", path);
    return set;
}

/* ---- where a run stands ------------------------------------------------------------------------------------------ */

/* G9: the position counts samples, not steps or micro-batches; accumulation 4, then 2 after the jump. */
TEST(step_moves_by_consumed_samples) {
    TrainingRun *r = run_open(
        (const char *const[]){"train.global_batch_size=[[0,8],[256,8],[256,4]]", "train.micro_batch_size=2", NULL});
    static const int64_t samples[] = {8, 16, 20, 24};
    const RunState *state = &r->trainer.state;
    for (int i = 0; i < 4; i++) {
        StepReport report = step(r);
        EXPECT_EQ(state->step, i + 1);
        EXPECT_EQ(state->samples, samples[i]);
        EXPECT_EQ(state->tokens, samples[i] * 16);
        EXPECT_EQ(report.step, i + 1);
        EXPECT_EQ(report.steps_total, 10);
        EXPECT_EQ(report.tokens, samples[i] * 16);
        EXPECT_EQ(report.tokens_in_step, (i < 2 ? 8 : 4) * 16);
        EXPECT_EQ(report.tokens_total, (2 * 8 + 8 * 4) * 16);
        EXPECT(report.step_ms > 0 && state->wall_s > 0, "%g ms", report.step_ms);
        EXPECT_EQ(report.skip, SKIP_NONE);
    }
    run_end(r);
}

/* What a checkpoint holds, put into a fresh run. */
static void restore(TrainingRun *to, const TrainingRun *from) {
    int64_t n, n_to;
    StateTensor *a = params_state(&from->f.model.params, &n), *b = params_state(&to->f.model.params, &n_to);
    REQUIRE(n == n_to, "%lld tensors, %lld", (long long)n, (long long)n_to);
    for (int64_t i = 0; i < n; i++) memcpy(b[i].data, a[i].data, (size_t)a[i].extent * dtype_size(a[i].dtype));
    params_cast(&to->f.model.params, &to->f.device);
    to->trainer.state = from->trainer.state;
    trainer_restore(&to->trainer);
    free(a);
    free(b);
}

static void expect_same_step(const StepReport *got, const StepReport *want) {
    EXPECT(got->step == want->step && got->tokens == want->tokens, "step %lld", (long long)got->step);
    for (int k = 0; k < want->n_losses; k++)
        EXPECT(got->loss[k] == want->loss[k], "loss %d of step %lld: %.17g, not %.17g", k, (long long)got->step,
               got->loss[k], want->loss[k]);
    EXPECT(got->gnorm == want->gnorm && got->lr == want->lr && got->balance == want->balance, "step %lld",
           (long long)got->step);
    EXPECT(got->loss_z == want->loss_z && got->norm_z == want->norm_z, "z-scores of step %lld", (long long)got->step);
    EXPECT(got->maxvio == want->maxvio, "MaxVio of step %lld", (long long)got->step);
}

/* G8, G9: 25 steps, stopped after 5 and after 12. Losses, norms, rates, scores and weights to the bit. */
static void check_resume(const char *const *sets) {
    TrainingRun *whole = run_open(sets), *part = run_open(sets);
    for (int i = 0; i < 25; i++) {
        if (i == 5 || i == 12) {
            TrainingRun *next = run_open(sets);
            restore(next, part);
            run_end(part);
            part = next;
        }
        const StepReport want = step(whole), got = step(part);
        expect_same_step(&got, &want);
    }
    EXPECT(hash_of(part) == hash_of(whole), "the weights differ");
    EXPECT(memcmp(&part->trainer.state.loss_z, &whole->trainer.state.loss_z, sizeof(ZWindow)) == 0,
           "the z window differs");
    EXPECT_EQ(part->trainer.state.update.adam_t, 25);
    EXPECT_EQ(part->trainer.state.samples, whole->trainer.state.samples);
    run_end(part);
    run_end(whole);
}

/* Data for seven steps, so that there are three epochs and a half, and both stops lie inside one. */
TEST(step_resumes_to_the_bit) {
    const char *shard = document_shard(65, 7, false);
    check_resume((const char *const[]){shard, "train.global_batch_size=4", "train.micro_batch_size=1", "train.steps=25",
                                       "train.lr_warmup_steps=8", "data.document_mask=true", "train.z_window=8", NULL});
}

TEST(step_resumes_bf16_to_the_bit) {
    check_resume((const char *const[]){"train.global_batch_size=[[0,4],[640,8]]", "train.micro_batch_size=2",
                                       "train.steps=25", "precision.compute=bf16", "precision.moments=bf16",
                                       "train.lr_shape=wsd", NULL});
}

/* A shard that shrank under the run: nothing moves, and the step is the same once the file is whole again. */
TEST(step_that_cannot_read_moves_nothing) {
    const char *sets[] = {document_shard(40, 7, false), "train.global_batch_size=4", "train.micro_batch_size=1", NULL};
    char path[TEST_PATH_LEN], err[ERR_LEN] = "", content[4096];
    TrainingRun *whole = run_open(sets), *cut = run_open(sets);
    step(whole);
    step(cut);
    const RunState before = cut->trainer.state;
    const uint64_t hash = hash_of(cut);
    FILE *shard = fopen(test_path(path, "train.bin"), "rb");
    REQUIRE(shard, "%s", path);
    const size_t size = fread(content, 1, sizeof content, shard);
    fclose(shard);
    REQUIRE(truncate(path, SHARD_HEADER_BYTES + 40) == 0, "cannot cut %s", path);
    EXPECT_EQ(train_step(&cut->trainer, err), -1);
    EXPECT(strstr(err, "train.bin"), "%s", err);
    EXPECT(memcmp(&before, &cut->trainer.state, sizeof before) == 0 && hash_of(cut) == hash, "the run moved");
    EXPECT(memcmp(&before.update, cut->f.model.update, sizeof before.update) == 0, "the device's state moved");
    shard = fopen(path, "r+b");
    REQUIRE(shard && fwrite(content, 1, size, shard) == size && fclose(shard) == 0, "cannot mend %s", path);
    const StepReport want = step(whole), got = step(cut);
    expect_same_step(&got, &want);
    EXPECT(hash_of(whole) == hash_of(cut), "the weights differ");
    run_end(whole);
    run_end(cut);
}

/* ---- when it is reported ----------------------------------------------------------------------------------------- */

/* A device behind its host reports each step while the next one runs, in order; train_flush asks for the last as well.
 * Whatever is asked for when, steps and weights and what a checkpoint would hold are the same. */
TEST(step_reports_late_and_computes_the_same) {
    enum { STEPS = 25 };
    const char *sets[] = {
        document_shard(65, 7, false), "train.global_batch_size=4", "train.micro_batch_size=1", "train.steps=25",
        "data.document_mask=true",    "train.z_window=8",          "train.skip_if_z=0.9",      NULL};
    StepReport want[STEPS + 1], got;
    TrainingRun *now = run_open(sets), *late = run_open(sets);
    late->f.device.is_asynchronous = true;
    int64_t n_reports = 0, n_skipped = 0;
    for (int i = 1; i <= STEPS; i++) {
        char err[ERR_LEN] = "";
        REQUIRE(train_step(&now->trainer, err) == 0 && train_step(&late->trainer, err) == 0, "%s", err);
        REQUIRE(train_report(&now->trainer, &want[i]) && want[i].step == i, "step %d is not reported", i);
        EXPECT(!train_report(&now->trainer, &got), "step %d is reported twice", i);
        const bool all = i == 7 || i == 8 || i == 20 || i == STEPS;
        while (all ? train_flush(&late->trainer, &got) : train_report(&late->trainer, &got)) {
            REQUIRE(got.step == ++n_reports, "report of step %lld, not %lld", (long long)got.step,
                    (long long)n_reports);
            expect_same_step(&got, &want[n_reports]);
            EXPECT(got.skip == want[n_reports].skip && got.step_ms > 0);
            n_skipped += got.skip != SKIP_NONE;
        }
        REQUIRE(n_reports == (all ? i : i - 1), "%lld reports after step %d", (long long)n_reports, i);
        if (!all) continue;
        RunState a = now->trainer.state, b = late->trainer.state;
        a.wall_s = b.wall_s = 0;
        EXPECT(memcmp(&a, &b, sizeof a) == 0, "the states after step %d differ", i);
        EXPECT(hash_of(now) == hash_of(late), "the weights after step %d differ", i);
    }
    EXPECT(n_skipped > 0 && n_skipped < STEPS - 6, "%lld of %d updates skipped: no test of thresholds",
           (long long)n_skipped, STEPS);
    run_end(now);
    run_end(late);
}

/* The loads and biases of a report are those of its own step though the next one has been queued. */
TEST(step_report_keeps_its_own_record) {
    TrainingRun *now = run_open(NULL), *late = run_open(NULL);
    late->f.device.is_asynchronous = true;
    int32_t load[3 * 8];
    float bias[3 * 8];
    for (int i = 1; i <= 4; i++) {
        char err[ERR_LEN] = "";
        StepReport report;
        REQUIRE(train_step(&late->trainer, err) == 0, "%s", err);
        if (i > 1) {
            REQUIRE(train_report(&late->trainer, &report) && report.step == i - 1);
            EXPECT(memcmp(report.load, load, sizeof load) == 0, "other loads than step %d had", i - 1);
            EXPECT(memcmp(report.bias, bias, sizeof bias) == 0, "other biases than step %d left", i - 1);
        }
        report = step(now);
        memcpy(load, report.load, sizeof load);
        memcpy(bias, report.bias, sizeof bias);
    }
    run_end(now);
    run_end(late);
}

static void queue_three(void *arg) {
    char err[ERR_LEN];
    for (int i = 0; i < 3; i++) train_step(&((TrainingRun *)arg)->trainer, err);
}

TEST(step_is_not_queued_over_reports_that_nobody_took) {
    TrainingRun *r = run_open(NULL);
    EXPECT(expect_exit(128 + SIGABRT, "reports were taken up to 0 only", queue_three, r));
    run_end(r);
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

static const StepPart whole[] = {STEP_FIRST, STEP_NEXT, STEP_UPDATE};
enum { WHOLE_PARTS = sizeof whole / sizeof *whole };

/* Two micro-batches a step: the first step runs op by op, the second is captured in the order of the parts, the others
 * are replayed. Same bits as without. */
TEST(step_replays_what_it_ran) {
    const char *sets[] = {"train.global_batch_size=4", "train.micro_batch_size=2", NULL, NULL};
    TrainingRun *plain = run_open(sets);
    for (int with = 1; with >= 0; with--) {
        sets[2] = with ? "run.graphs=true" : "run.graphs=false";
        TrainingRun *r = run_open(sets);
        replay_open(&r->trainer, &r->f.device, whole);
        for (int i = 1; i <= 5; i++) {
            const StepReport got = step(r);
            if (with) {
                const StepReport want = step(plain);
                expect_same_step(&got, &want);
                EXPECT_EQ(replay_count().n_launched, 3 * (i - 1));
            }
            EXPECT_EQ(replay_count().n_captured, with && i >= 2 ? WHOLE_PARTS : 0);
        }
        if (with) EXPECT(hash_of(r) == hash_of(plain), "the weights differ");
        replay_close();
        run_end(r);
    }
    run_end(plain);
}

/* FP8 tensors are counted in the first micro-batch of every third step, op by op while others are replayed: same bits,
 * and only those steps have counts, also where reports come late. */
TEST(step_counts_fp8_and_computes_the_same) {
    const char *sets[] = {FP8_WIDTHS,
                          "precision.compute=fp8",
                          "train.global_batch_size=4",
                          "train.steps=12",
                          "run.graphs=true",
                          "log.fp8_every_steps=0",
                          NULL};
    enum { STEPS = 7, TOKENS = 2 * 64 };
    TrainingRun *plain = run_open(sets);
    sets[sizeof sets / sizeof *sets - 2] = "log.fp8_every_steps=3";
    TrainingRun *r = run_open(sets);
    r->f.device.is_asynchronous = true;
    replay_open(&r->trainer, &r->f.device, whole);
    int n_counted = 0;
    for (int i = 1; i <= STEPS; i++) {
        char err[ERR_LEN] = "";
        StepReport got;
        const int launched = replay_count().n_launched;
        REQUIRE(train_step(&r->trainer, err) == 0, "%s", err);
        EXPECT_EQ(replay_count().n_launched - launched, i == 1 ? 0 : i % 3 == 0 ? 2 : 3);
        while (i < STEPS ? train_report(&r->trainer, &got) : train_flush(&r->trainer, &got)) {
            const StepReport want = step(plain);
            expect_same_step(&got, &want);
            EXPECT(!want.fp8 && (got.fp8 != NULL) == (got.step % 3 == 0), "step %lld", (long long)got.step);
            n_counted += got.fp8 != NULL;
            for (int b = 0; got.fp8 && b < got.n_blocks; b++)
                EXPECT(got.fp8[b * OBSERVED_COUNT].values == TOKENS * 128, "block %d: %lld values", b,
                       (long long)got.fp8[b * OBSERVED_COUNT].values);
        }
    }
    EXPECT_EQ(n_counted, 2);
    EXPECT_EQ(replay_count().n_captured, WHOLE_PARTS);
    EXPECT(hash_of(r) == hash_of(plain), "the weights differ");
    replay_close();
    run_end(r);
    run_end(plain);
}

static void count_ops(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                      int n_reads) {
    (void)op, (void)s, (void)writes, (void)n_writes, (void)reads, (void)n_reads;
    ++*(int *)watcher;
}

/* Who watches the ops of a device sees every one of them, in every step. */
TEST(step_is_not_replayed_under_a_watcher) {
    TrainingRun *r = run_open(NULL);
    int n = 0, first = 0;
    replay_open(&r->trainer, &r->f.device, whole);
    r->f.device.watch = count_ops;
    r->f.device.watcher = &n;
    for (int i = 0; i < 3; i++) {
        n = 0;
        step(r);
        if (i == 0) first = n;
        EXPECT(n == first && n > 100, "%d ops in the first step, %d in step %d", first, n, i + 1);
    }
    EXPECT_EQ(replay_count().n_captured, 0);
    replay_close();
    run_end(r);
}

/* ---- what is reported -------------------------------------------------------------------------------------------- */

static double norm_of(Tensor t) {
    double sum = 0;
    for (int64_t i = 0; i < tensor_numel(t); i++) sum += t_get(t, i) * t_get(t, i);
    return sqrt(sum);
}

/* K4, K5: losses are those of all tokens of the step before its update, however it is accumulated. */
TEST(step_reports_the_mean_of_all_tokens) {
    static const char *const micro[] = {"train.micro_batch_size=8", "train.micro_batch_size=2",
                                        "train.micro_batch_size=1"};
    StepReport first = {0};
    for (int i = 0; i < 3; i++) {
        TrainingRun *r = run_open((const char *const[]){"train.global_batch_size=8", micro[i], NULL});
        Model *m = &r->f.model;
        char err[ERR_LEN];
        memset(m->eval_stats, 0, sizeof *m->eval_stats);
        for (int64_t sample = 0; sample < 8; sample += m->shape.B) {
            REQUIRE(loader_fill(r->loader, sample, &r->f.batch, err) == 0, "%s", err);
            model_set_batch(m, &m->eval.shape, &r->f.batch);
            model_forward(m, &m->eval, FORWARD_EVAL);
        }
        const StepReport report = step(r);
        if (i == 0) first = report;
        EXPECT_EQ(report.n_losses, 2);
        for (int k = 0; k < 2; k++) {
            EXPECT_NEAR(report.loss[k], m->eval_stats->loss_sum[k] / (8 * 16), 1e-6);
            EXPECT_NEAR(report.loss[k], first.loss[k], 1e-5);
        }
        EXPECT_NEAR(report.balance, m->eval_stats->balance_sum / (3 * 8), 1e-6);
        EXPECT_NEAR(report.gnorm, norm_of(m->params.grad) / (8 * 16), 1e-5 * report.gnorm);
        EXPECT_NEAR(report.gnorm, first.gnorm, 1e-4 * first.gnorm);
        run_end(r);
    }
}

/* A model that knows nothing has the loss of guessing, with any accumulation. */
TEST(step_of_a_new_model_has_the_loss_of_guessing) {
    static const char *const batch[] = {"train.global_batch_size=1", "train.global_batch_size=2",
                                        "train.global_batch_size=8"};
    for (int i = 0; i < 3; i++) {
        TrainingRun *r = run_open((const char *const[]){batch[i], "train.micro_batch_size=1", NULL});
        params_init(&r->f.model.params, &r->f.device, 7, 0.002);
        model_cast(&r->f.model);
        const StepReport report = step(r);
        for (int k = 0; k < 2; k++) EXPECT_NEAR(report.loss[k], log(37), 0.01);
        run_end(r);
    }
}

TEST(step_reports_every_choice_of_an_expert) {
    TrainingRun *r = run_open((const char *const[]){"train.global_batch_size=8", "train.micro_batch_size=2", NULL});
    ExpertLoads counted = loads_make(3, 8);
    for (int i = 0; i < 3; i++) {
        const StepReport report = step(r);
        EXPECT(report.n_layers == 3 && report.n_experts == 8, "%d layers, %d experts", report.n_layers,
               report.n_experts);
        double worst = 0, sum_of_layers = 0;
        for (int layer = 0; layer < report.n_layers; layer++) {
            int64_t sum = 0, largest = 0;
            for (int e = 0; e < 8; e++) {
                const int32_t load = report.load[layer * 8 + e];
                sum += load;
                if (load > largest) largest = load;
            }
            EXPECT_EQ(sum, report.tokens_in_step * 2);
            const double violation = (double)largest * 8 / (double)sum - 1;
            worst = fmax(worst, violation);
            sum_of_layers += violation;
        }
        EXPECT(report.bias && fabs((double)report.bias[0]) > 0, "no router biases");
        for (int e = 0; e < 8; e++) /* those of the first MoE block, after this step */
            EXPECT(report.bias[e] == ((const real *)r->f.model.params.blocks[1].weight[WEIGHT_ROUTER_BIAS].w.data)[e],
                   "bias %d", e);
        EXPECT_NEAR(report.maxvio, worst, 1e-12);
        EXPECT_NEAR(report.maxvio_mean, sum_of_layers / 3, 1e-12);
        loads_add(&counted, report.load);
        EXPECT(memcmp(counted.load, r->trainer.loads.load, 3 * 8 * sizeof *counted.load) == 0, "loads of step %d", i);
    }
    loads_free(&counted);
    run_end(r);
    r = run_open((const char *const[]){"model.first_k_dense_replace=3", NULL});
    const StepReport report = step(r);
    EXPECT(report.n_layers == 0 && report.n_experts == 0 && !report.load && report.balance == 0 && report.maxvio == 0);
    run_end(r);
}

/* K2: with both betas 0, an update moves each weight by the rate, up or down. The rate of the log is the one used. */
TEST(step_logs_the_rate_it_used) {
    static const char *const shapes[] = {"train.lr_shape=cosine", "train.lr_shape=linear", "train.lr_shape=wsd",
                                         "train.lr_shape=constant"};
    for (int i = 0; i < 4; i++) {
        TrainingRun *r = run_open((const char *const[]){shapes[i], "train.beta1=0", "train.beta2=0", "train.eps=1e-20",
                                                        "train.weight_decay=0", "train.lr_warmup_steps=3",
                                                        "train.lr_decay_fraction=0.5", NULL});
        Tensor w = r->f.model.params.top.weight[WEIGHT_FINAL_NORM].w;
        for (int s = 1; s <= 10; s++) {
            Tensor before = t_copy(w);
            const StepReport report = step(r);
            for (int64_t k = 0; k < tensor_numel(w); k++)
                EXPECT_NEAR(fabs(t_get(w, k) - t_get(before, k)), report.lr, 3e-7);
            if (s <= 3) EXPECT_NEAR(report.lr, 1e-2 * s / 3, 1e-15);
            if (s == 10) EXPECT_NEAR(report.lr, i == 3 ? 1e-2 : 1e-3, 1e-15);
            EXPECT(report.lr > 0, "step %d", s);
        }
        run_end(r);
    }
}

/* ---- what a step is given ---------------------------------------------------------------------------------------- */

TEST(step_follows_the_schedules_of_tokens) {
    TrainingRun *r = run_open((const char *const[]){"train.mtp_loss_weight=[[0,0.3],[64,0.3],[64,0.1]]",
                                                    "train.bias_update_speed=[[0,0.01],[96,0.01],[96,0]]",
                                                    "train.lr=[[0,1e-3],[128,5e-3]]", "train.lr_shape=linear", NULL});
    const StepParams *p = r->f.model.step_params; /* on this device, memory like any other */
    for (int s = 1; s <= 6; s++) {
        const int64_t tokens = r->trainer.state.tokens; /* before the step: 32 a step */
        const StepReport report = step(r);
        EXPECT_EQ(tokens, 32 * (s - 1));
        EXPECT_EQ(p->step, s);
        EXPECT_NEAR(p->loss_scale[1], tokens < 64 ? 0.3 : 0.1, 1e-15);
        EXPECT_NEAR(p->bias_speed, tokens < 96 ? 0.01 : 0, 1e-15);
        EXPECT_NEAR(p->lr, 1e-3 + 4e-3 * fmin(1, (double)tokens / 128), 1e-15);
        EXPECT(p->lr == report.lr && p->inv_tokens == 1.0 / 32 && p->loss_scale[0] == 1);
        EXPECT_NEAR(p->balance_scale, 0.05 * 16, 1e-15);
    }
    run_end(r);
}

/* F2, F4: documents of four. Depth 1 loses a quarter of its targets and depth 2 a half, in each of the four
 * micro-batches; each depth is a mean over what it has. Without the mask nothing is lost. */
TEST(step_scales_each_depth_by_its_own_targets) {
    const char *shard = document_shard(60, 4, false);
    for (int masked = 0; masked < 2; masked++) {
        TrainingRun *r = run_open((const char *const[]){
            shard, "model.num_nextn_predict_layers=2", "train.micro_batch_size=1", "train.global_batch_size=4",
            masked ? "data.document_mask=true" : "data.document_mask=false", NULL});
        static const double n_targets[2][3] = {{64, 64, 64}, {64, 48, 32}};
        const Model *m = &r->f.model;
        for (int s = 0; s < 2; s++) {
            const StepReport report = step(r);
            EXPECT_NEAR(m->step_params->inv_tokens, 1.0 / 64, 1e-18);
            for (int k = 1; k <= 2; k++)
                EXPECT_NEAR(m->step_params->loss_scale[k], 0.3 / 2 * 64 / n_targets[masked][k], 1e-15);
            for (int k = 0; k <= 2; k++)
                EXPECT_NEAR(report.loss[k], m->stats->loss_sum[k] / n_targets[masked][k], 1e-12);
        }
        /* The last micro-batch's losses of depth 2: none where a document starts one or two tokens on. */
        for (int64_t t = 0; t < 16; t++)
            EXPECT((t_get(m->train.loss, t) == 0) == (masked && t % 4 >= 2), "token %d: loss %g", (int)t,
                   t_get(m->train.loss, t));
        run_end(r);
    }
}

/* Gradients of the mean loss (1 / targets applied) of one step over copies of one document of eight tokens. */
static Tensor mean_gradient(const char *shard, const char *const *layout, const char *mtp_weight, double *loss) {
    TrainingRun *r = run_open((const char *const[]){shard, layout[0], layout[1], layout[2], mtp_weight,
                                                    "data.document_mask=true", "model.num_nextn_predict_layers=2",
                                                    "train.balance_alpha=0", "train.lr=0", NULL});
    const StepReport report = step(r);
    memcpy(loss, report.loss, sizeof report.loss);
    Tensor grad = t_copy(r->f.model.params.grad);
    for (int64_t i = 0; i < tensor_numel(grad); i++) t_set(grad, i, t_get(grad, i) / (double)report.tokens_in_step);
    run_end(r);
    return grad;
}

static double norm_of_difference(Tensor a, Tensor b) {
    double sum = 0;
    for (int64_t i = 0; i < tensor_numel(a); i++) sum += (t_get(a, i) - t_get(b, i)) * (t_get(a, i) - t_get(b, i));
    return sqrt(sum);
}

/* F1, F2: under the mask, copies of one document are the same computation however they are laid out. So the
 * gradient, and MTP's share of it, must not depend on sequence length, batch or accumulation; and it is proportional
 * to its weight. */
TEST(step_mtp_gradient_does_not_depend_on_the_layout) {
    static const char *const layouts[][3] = {
        {"train.seq_len=8", "train.global_batch_size=1", "train.micro_batch_size=1"},
        {"train.seq_len=8", "train.global_batch_size=4", "train.micro_batch_size=1"},
        {"train.seq_len=8", "train.global_batch_size=4", "train.micro_batch_size=4"},
        {"train.seq_len=16", "train.global_batch_size=2", "train.micro_batch_size=1"},
        {"train.seq_len=32", "train.global_batch_size=1", "train.micro_batch_size=1"},
        {"train.seq_len=32", "train.global_batch_size=4", "train.micro_batch_size=2"},
    };
    const char *shard = document_shard(40, 8, true);
    Tensor first = tensor_none();
    double first_loss[LOSSES_MAX] = {0}, first_ratio = 0;
    for (int i = 0; i < 6; i++) {
        double loss[LOSSES_MAX], unused[LOSSES_MAX];
        Tensor with = mean_gradient(shard, layouts[i], "train.mtp_loss_weight=0.3", loss);
        Tensor without = mean_gradient(shard, layouts[i], "train.mtp_loss_weight=0", unused);
        Tensor twice = mean_gradient(shard, layouts[i], "train.mtp_loss_weight=0.6", unused);
        const double main_norm = norm_of(without), mtp_norm = norm_of_difference(with, without);
        if (i == 0) first = with, memcpy(first_loss, loss, sizeof loss), first_ratio = mtp_norm / main_norm;
        EXPECT(t_error(with, t_doubles(first)) < 1e-4, "layout %d: gradients differ by %g", i,
               t_error(with, t_doubles(first)));
        EXPECT_NEAR(mtp_norm / main_norm, first_ratio, 1e-4 * first_ratio);
        EXPECT_NEAR(norm_of_difference(twice, without), 2 * mtp_norm, 1e-4 * mtp_norm);
        for (int k = 0; k <= 2; k++) EXPECT_NEAR(loss[k], first_loss[k], 1e-5);
    }
    EXPECT(first_ratio > 0.01, "MTP has no share of the gradient: %g", first_ratio);
}

/* ---- skipped updates --------------------------------------------------------------------------------------------- */

/* A full window of values around `mean`. */
static void fill_window(ZWindow *w, double mean) {
    zscore_init(w, 16);
    for (int i = 0; i < 16; i++) zscore_push(w, mean * (i % 2 ? 1.01 : 0.99));
}

TEST(step_skips_spikes_and_goes_on) {
    TrainingRun *r = run_open((const char *const[]){"train.skip_if_z=3", "train.z_window=16", NULL});
    RunState *state = &r->trainer.state;
    const StepReport usual = step(r);
    const uint64_t hash = hash_of(r);
    static const int reasons[] = {SKIP_LOSS_SPIKE, SKIP_NORM_SPIKE};
    for (int i = 0; i < 2; i++) {
        fill_window(&state->loss_z, i == 0 ? usual.loss[0] / 3 : usual.loss[0] * 3);
        fill_window(&state->norm_z, i == 1 ? usual.gnorm / 100 : usual.gnorm * 100);
        state->pending.is_set = 0;
        const ZWindow loss_window = state->loss_z, norm_window = state->norm_z;
        const StepReport report = step(r);
        EXPECT_EQ(report.skip, reasons[i]);
        EXPECT((i == 0 ? report.loss_z : report.norm_z) > 3, "z-scores %g and %g", report.loss_z, report.norm_z);
        EXPECT(isfinite(report.loss[0]) && report.gnorm > 0 && report.lr > 0, "the report stays true");
        EXPECT(hash_of(r) == hash, "a skipped update changed weights or biases");
        EXPECT(memcmp(&loss_window, &state->loss_z, sizeof loss_window) == 0 &&
                   memcmp(&norm_window, &state->norm_z, sizeof norm_window) == 0,
               "the spike entered the windows");
        EXPECT(!state->pending.is_set, "the spike waits to enter the windows");
        EXPECT_EQ(state->step, i + 2);
        EXPECT_EQ(state->samples, 2 * (i + 2));
        EXPECT_EQ(state->update.adam_t, 1);
        EXPECT_EQ(state->update.skipped_total, i + 1);
        EXPECT_EQ(state->update.skipped_in_a_row, i + 1);
    }
    /* The same values without a reason: above and below the threshold are both fine when the window says so. */
    fill_window(&state->loss_z, usual.loss[0] * 3);
    fill_window(&state->norm_z, usual.gnorm * 100);
    const StepReport report = step(r);
    EXPECT(report.skip == SKIP_NONE && report.loss_z < -3, "skip %d, z-score %g", report.skip, report.loss_z);
    EXPECT(hash_of(r) != hash, "the update did nothing");
    EXPECT(state->update.adam_t == 2 && state->update.skipped_in_a_row == 0 && state->update.skipped_total == 2);
    EXPECT(state->pending.is_set && state->pending.loss == report.loss[0] && state->pending.norm == report.gnorm);
    EXPECT(state->loss_z.value[0] != report.loss[0], "the step entered before the next one's thresholds were made");
    step(r);
    EXPECT(state->loss_z.value[0] == report.loss[0] && state->norm_z.value[0] == report.gnorm,
           "the step did not enter");
    run_end(r);
}

/* The thresholds of a step are made of the steps up to the last but one: the last may still be running. */
TEST(step_thresholds_do_not_know_the_last_step) {
    TrainingRun *r =
        run_open((const char *const[]){"train.skip_if_z=1000", "train.z_window=8", "train.steps=20", NULL});
    ZWindow loss_z, norm_z;
    zscore_init(&loss_z, 8);
    zscore_init(&norm_z, 8);
    StepReport last = {0};
    for (int i = 1; i <= 20; i++) {
        const StepReport report = step(r);
        const StepParams *p = r->f.model.step_params;
        EXPECT(p->skip_loss_above == zscore_threshold(&loss_z, 1000), "step %d: %.17g", i, p->skip_loss_above);
        EXPECT(p->skip_norm_above == zscore_threshold(&norm_z, 1000), "step %d: %.17g", i, p->skip_norm_above);
        EXPECT(isfinite(p->skip_loss_above) == (i >= 10), "step %d: %g", i, p->skip_loss_above);
        if (i > 1) zscore_push(&loss_z, last.loss[0]), zscore_push(&norm_z, last.gnorm);
        EXPECT(report.loss_z == zscore_of(&loss_z, report.loss[0]) && report.norm_z == zscore_of(&norm_z, report.gnorm),
               "the scores of step %d do not stand against all steps before it", i);
        last = report;
    }
    run_end(r);
}

TEST(step_without_the_option_skips_no_spike) {
    TrainingRun *r = run_open((const char *const[]){"train.z_window=16", NULL});
    fill_window(&r->trainer.state.loss_z, 1e-3);
    fill_window(&r->trainer.state.norm_z, 1e-6);
    const StepReport report = step(r);
    EXPECT(report.skip == SKIP_NONE && report.loss_z > 100 && report.norm_z > 100, "skip %d, z %g", report.skip,
           report.loss_z);
    run_end(r);
}

/* E8, E9: a weight that is not finite; every step is skipped and counted. */
TEST(step_counts_skips_in_a_row) {
    TrainingRun *r = run_open(NULL);
    ((real *)r->f.model.params.top.weight[WEIGHT_FINAL_NORM].w.data)[0] = (real)NAN;
    for (int i = 1; i <= 4; i++) {
        const StepReport report = step(r);
        EXPECT_EQ(report.skip, SKIP_LOSS_NOT_FINITE);
        EXPECT_EQ(r->trainer.state.update.skipped_in_a_row, i);
        EXPECT(r->trainer.state.loss_z.n == 0 && report.loss_z == 0, "NaN entered the window");
    }
    EXPECT_EQ(r->trainer.state.update.adam_t, 0);
    EXPECT_EQ(r->trainer.state.samples, 8);
    EXPECT(!loads_are_known(&r->trainer.loads, 3, 8), "the loads of what NaN has routed are counted");
    run_end(r);
}
