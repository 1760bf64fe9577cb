/* Steps of a pipeline that are replayed, under the rules of a capture: whatever the schedule and the mesh, they leave
 * the bits of steps that run op by op. */
#include <stdio.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "tests/model/model_test.h"
#include "tests/model/train/replay.h"

/* The first step runs op by op, the second is captured; the fourth has other micro-batches and is captured anew. */
enum { STEPS = 6, FIRST_LONGER = 4, LAYERS = 7, FP8_EVERY = 3 };
static const StepPart parts[] = {STEP_PIPELINE, STEP_UPDATE, STEP_PIPELINE};

typedef struct {
    ScheduleKind kind;
    int n_pp, n_ep, M, M_longer;
} Layout;

typedef struct {
    Fixture f;
    Loader *loader;
    Trainer trainer;
} ReplayedRun;

typedef struct {
    double loss[STEPS + 1][LOSSES_MAX], gnorm[STEPS + 1], evaluated[STEPS + 1];
    int counted[STEPS + 1]; /* had counts of FP8 tensors */
    uint64_t hash;
} Left;

static void run_open(ReplayedRun *r, const char *const *more, const Layout *l) {
    enum { SETS = 24 };
    const char *sets[SETS] = {"train.micro_batch_size=2", "model.first_k_dense_replace=4", "train.steps=6"};
    const int n_data = job_world() / l->n_pp, B = 2 * l->M * n_data, longer = 2 * l->M_longer * n_data;
    char err[ERR_LEN] = "", hint[ERR_LEN] = "", layers[48], batch[96], pp[32], schedule[48];
    const int seq_len = more ? 64 : 16, jump = (FIRST_LONGER - 1) * B * seq_len;
    int n = 3;
    snprintf(layers, sizeof layers, "model.num_hidden_layers=%d", LAYERS);
    snprintf(batch, sizeof batch, "train.global_batch_size=[[0,%d],[%d,%d],[%d,%d]]", B, jump, B, jump, longer);
    snprintf(pp, sizeof pp, "parallel.pp=%d", l->n_pp);
    snprintf(schedule, sizeof schedule, "parallel.schedule=%s", schedule_name(l->kind));
    sets[n++] = layers, sets[n++] = batch, sets[n++] = pp, sets[n++] = schedule;
    for (; more && *more; more++) {
        REQUIRE(n + 1 < SETS, "more than %d settings", SETS);
        sets[n++] = *more;
    }
    memset(r, 0, sizeof *r);
    fixture_open_stage(&r->f, sets, ops_cpu(), mesh_make(job_rank(), job_world(), l->n_pp, l->n_ep), comm_mpi, l->kind,
                       l->M_longer);
    LoaderSpec spec;
    REQUIRE(loader_spec_train(&spec, &r->f.config, n_data, err, hint) == 0, "%s", err);
    REQUIRE(loader_open(&r->loader, &spec, err, hint) == 0, "%s (%s)", err, hint);
    REQUIRE(trainer_init(&r->trainer, &r->f.config, &r->f.model, r->loader, err) == 0, "%s", err);
    trainer_restore(&r->trainer);
}

static void run_end(ReplayedRun *r) {
    trainer_free(&r->trainer);
    loader_close(r->loader);
    fixture_close(&r->f);
}

/* Between two steps, op by op: it uses the events that a capture has used. */
static double evaluate(ReplayedRun *r) {
    Model *m = &r->f.model;
    memset(m->eval_stats, 0, sizeof *m->eval_stats);
    fixture_batch(&r->f, 0, 99);
    model_set_batch(m, &m->eval.shape, &r->f.batch);
    model_forward(m, &m->eval, FORWARD_EVAL);
    return m->eval_stats->loss_sum[0];
}

static void expect_counts(int step, bool is_fp8) {
    const int n_counting = is_fp8 ? STEPS / FP8_EVERY : 0;
    const ReplayCount n = replay_count();
    if (step == 1) EXPECT(n.n_captured == 0 && n.n_launched == 0, "the first step is no graph");
    if (step == 2)
        EXPECT(n.n_captured == 2 && n.n_launched == 2, "%d captured, %d launched", n.n_captured, n.n_launched);
    if (step == STEPS)
        EXPECT(n.n_captured == 3 && n.n_launched == 2 * (STEPS - 1) - n_counting, "%d captured, %d launched",
               n.n_captured, n.n_launched);
}

static Left train(const char *const *more, const Layout *l, bool is_replayed) {
    static ReplayedRun run; /* reports are large */
    char err[ERR_LEN] = "";
    StepReport report;
    Left left;
    memset(&left, 0, sizeof left);
    run_open(&run, more, l);
    if (is_replayed) replay_open(&run.trainer, &run.f.device, parts);
    for (int i = 1; i <= STEPS; i++) {
        REQUIRE(train_step(&run.trainer, err) == 0, "%s", err);
        REQUIRE(train_flush(&run.trainer, &report) && report.skip == SKIP_NONE, "step %d", i);
        memcpy(left.loss[i], report.loss, sizeof left.loss[i]);
        left.gnorm[i] = report.gnorm;
        left.counted[i] = report.fp8 != NULL;
        left.evaluated[i] = evaluate(&run);
        if (is_replayed) expect_counts(i, more != NULL);
    }
    left.hash = params_hash_of_job(&run.f.model.params, &run.f.device);
    if (is_replayed) replay_close();
    run_end(&run);
    t_free_all();
    return left;
}

static void check(const char *const *more, Layout l) {
    if (job_world() % (l.n_pp * l.n_ep)) return;
    const Left eager = train(more, &l, false), replayed = train(more, &l, true);
    EXPECT(eager.loss[STEPS][0] > 0 && memcmp(&eager, &replayed, sizeof eager) == 0,
           "%s, pp %d x ep %d: loss %.17g, not %.17g", schedule_name(l.kind), l.n_pp, l.n_ep, replayed.loss[STEPS][0],
           eager.loss[STEPS][0]);
}

TEST(replayed_pipelines_are_the_same) {
    static const ScheduleKind kinds[] = {SCHEDULE_1F1B, SCHEDULE_ZB1P, SCHEDULE_DUALPIPE, SCHEDULE_DUALPIPEV};
    for (int n_pp = 2; n_pp <= job_world() && n_pp <= 4; n_pp *= 2)
        for (int k = 0; k < (int)(sizeof kinds / sizeof *kinds); k++)
            check(NULL, (Layout){kinds[k], n_pp, job_world() / n_pp, 2 * n_pp, 2 * n_pp + 2});
}

/* One stage: a forward beside a backward, tokens going to the experts of other ranks. And two stages of one rank. */
TEST(replayed_pairs_are_the_same) {
    check(NULL, (Layout){SCHEDULE_PAIRED, 1, 2, 3, 4});
    check(NULL, (Layout){SCHEDULE_DUALPIPEV, 1, 1, 3, 4});
}

/* The step that counts is no graph. */
TEST(replayed_pipelines_count_fp8) {
    static const char *const fp8[] = {FP8_WIDTHS, "precision.compute=fp8", "log.fp8_every_steps=3", NULL};
    if (job_world() == 2) check(fp8, (Layout){SCHEDULE_DUALPIPEV, 2, 1, 4, 5});
}
