/* moe.capacity over ranks: a router that sends every token to rank 0 overflows its rows; the steps are taken back and
 * trained again with more room. In the end the weights, and every report, are those of a run with rows for the worst
 * case, bit for bit; also where the host learns of it a step late, with another step queued behind. */
#include <stdlib.h>
#include <string.h>

#include "model/train/step.h"
#include "tests/model/model_test.h"

enum { STEPS = 6, FROM = 3 }; /* the first step in which all tokens go to rank 0 */

typedef struct {
    Fixture f;
    Loader *loader;
    Trainer trainer;
    StepReport report[STEPS + 1]; /* by step */
    int n_replays;
    int64_t replayed; /* the last such step */
} CapacityRun;

/* 256 tokens a rank with two experts each: on average 512 rows, which the padding of four experts does not double. */
static void run_open(CapacityRun *r, const char *capacity, bool is_late) {
    const char *sets[] = {capacity,
                          "train.seq_len=64",
                          "train.micro_batch_size=4",
                          "train.global_batch_size=16",
                          "train.steps=6",
                          "train.skip_if_z=50",
                          "train.z_window=8",
                          "train.bias_update_speed=0",
                          NULL};
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    LoaderSpec spec;
    memset(r, 0, sizeof *r);
    fixture_open_ranks(&r->f, sets, job_world());
    r->f.device.is_asynchronous = is_late;
    REQUIRE(loader_spec_train(&spec, &r->f.config, job_world(), err, hint) == 0, "%s", err);
    REQUIRE(loader_open(&r->loader, &spec, err, hint) == 0, "%s (%s)", err, hint);
    REQUIRE(trainer_init(&r->trainer, &r->f.config, &r->f.model, r->loader, err) == 0, "%s", err);
    trainer_restore(&r->trainer);
    fixture_fix_routing(&r->f); /* one expert of each of two ranks */
}

static void run_end(CapacityRun *r) {
    trainer_free(&r->trainer);
    loader_close(r->loader);
    fixture_close(&r->f);
}

static void send_all_to_rank_0(Model *m) {
    for (int b = 0; b < m->shape.n_blocks; b++) {
        Tensor bias = m->params.blocks[b].weight[WEIGHT_ROUTER_BIAS].w;
        for (int e = 0; e < m->shape.n_local && bias.data; e++) t_set(bias, e, 10);
    }
}

static void take_reports(CapacityRun *r, bool all) {
    StepReport report;
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    while (all ? train_flush(&r->trainer, &report) : train_report(&r->trainer, &report)) {
        if (report.skip != SKIP_OVERFLOW) {
            report.load = NULL, report.bias = NULL; /* borrowed */
            r->report[report.step] = report;
            continue;
        }
        EXPECT_EQ(r->trainer.state.step, report.step - 1);
        EXPECT_EQ(r->trainer.state.update.has_overflow, 0);
        trainer_forget_graphs(&r->trainer);
        REQUIRE(model_set_capacity(&r->f.model, 2 * r->f.model.shape.capacity, err, hint) == 0, "%s", err);
        r->n_replays++;
        r->replayed = report.step;
    }
}

static void run_steps(CapacityRun *r) {
    char err[ERR_LEN] = "";
    while (r->trainer.state.step < STEPS) {
        if (r->trainer.state.step == FROM - 1) send_all_to_rank_0(&r->f.model);
        REQUIRE(train_step(&r->trainer, err) == 0, "%s", err);
        take_reports(r, r->trainer.state.step == FROM - 1 || r->trainer.state.step == STEPS);
    }
}

static void expect_same_run(const CapacityRun *got, const CapacityRun *want) {
    for (int i = 1; i <= STEPS; i++) {
        const StepReport *a = &got->report[i], *b = &want->report[i];
        EXPECT(a->step == i && b->step == i && a->skip == b->skip, "step %d: skip %d, not %d", i, a->skip, b->skip);
        EXPECT(memcmp(a->loss, b->loss, sizeof a->loss) == 0 && a->gnorm == b->gnorm, "step %d: loss %.17g, not %.17g",
               i, a->loss[0], b->loss[0]);
        EXPECT(a->loss_z == b->loss_z && a->norm_z == b->norm_z, "step %d: z %g, not %g", i, a->loss_z, b->loss_z);
        EXPECT(a->tokens == b->tokens && a->lr == b->lr, "step %d: another place in the data", i);
    }
    EXPECT(params_hash_of_job(&got->f.model.params, &got->f.device) ==
               params_hash_of_job(&want->f.model.params, &want->f.device),
           "the weights differ");
    const ExpertLoads *x = &got->trainer.loads, *y = &want->trainer.loads;
    EXPECT(memcmp(x->load, y->load, (size_t)(x->n_layers * x->n_experts) * sizeof *x->load) == 0,
           "steps trained again are counted twice");
    const RunState *a = &got->trainer.state, *b = &want->trainer.state;
    EXPECT(a->samples == b->samples && memcmp(&a->update, &b->update, sizeof a->update) == 0 &&
               memcmp(&a->loss_z, &b->loss_z, sizeof a->loss_z) == 0,
           "the state differs");
}

TEST(capacity_replays_to_the_bit) {
    if (job_world() != 2 && job_world() != 4) return;
    static CapacityRun small, worst; /* reports are large */
    for (int late = 0; late <= 1; late++) {
        run_open(&small, "moe.capacity=1", late);
        run_open(&worst, "moe.capacity=worst", late);
        EXPECT(small.f.model.shape.N < worst.f.model.shape.N, "%lld rows, worst %lld", (long long)small.f.model.shape.N,
               (long long)worst.f.model.shape.N);
        run_steps(&worst);
        run_steps(&small);
        EXPECT_EQ(worst.n_replays, 0);
        EXPECT(small.n_replays >= 1 && small.n_replays <= 2, "%d replays", small.n_replays);
        EXPECT(job_world() > 2 || small.replayed == FROM, "step %lld was trained again", (long long)small.replayed);
        EXPECT(small.f.model.shape.N <= worst.f.model.shape.N, "%lld rows", (long long)small.f.model.shape.N);
        expect_same_run(&small, &worst);
        run_end(&small);
        run_end(&worst);
        t_free_all();
    }
}
