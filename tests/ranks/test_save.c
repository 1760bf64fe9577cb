/* Saves by several ranks, on a device that runs behind the host: the copy is taken under the next step, each rank
 * writes its part, and all of them learn the same of it at the same time. */
#include <stdlib.h>
#include <string.h>

#include "kernels/base/file.h"
#include "model/train/saver.h"
#include "model/train/step.h"
#include "tests/model/model_test.h"

typedef struct {
    Fixture f;
    Loader *loader;
    Trainer trainer;
    Saver saver;
} SavingRun;

static void run_open(SavingRun *r, const char *background) {
    const char *sets[] = {background, "train.steps=9", "train.global_batch_size=16", "checkpoint.every_steps=1", NULL};
    char err[ERR_LEN] = "", hint[ERR_LEN] = "", note[SAVER_NOTE_LEN];
    LoaderSpec spec;
    memset(r, 0, sizeof *r);
    fixture_open_ranks(&r->f, sets, 8 % job_world() == 0 ? job_world() : 1);
    r->f.device.is_asynchronous = true;
    snprintf(r->f.config.run.dir, sizeof r->f.config.run.dir, "/tmp/train_moe_save_XXXXXX");
    REQUIRE(job_rank() > 0 || mkdtemp(r->f.config.run.dir), "%s", r->f.config.run.dir);
    job_spread(r->f.config.run.dir, sizeof r->f.config.run.dir);
    REQUIRE(loader_spec_train(&spec, &r->f.config, job_world(), err, hint) == 0, "%s", err);
    REQUIRE(loader_open(&r->loader, &spec, err, hint) == 0, "%s (%s)", err, hint);
    REQUIRE(trainer_init(&r->trainer, &r->f.config, &r->f.model, r->loader, err) == 0, "%s", err);
    trainer_restore(&r->trainer);
    saver_open(&r->saver, &r->f.config, &r->f.model, NULL, note);
    EXPECT((r->saver.memory != NULL) == r->f.config.checkpoint.background, "%s", note);
}

static void run_end(SavingRun *r) {
    saver_close(&r->saver);
    EXPECT(job_rank() > 0 || dir_remove(r->f.config.run.dir, NULL) == 0, "%s is left", r->f.config.run.dir);
    trainer_free(&r->trainer);
    loader_close(r->loader);
    fixture_close(&r->f);
    t_free_all();
}

static void step(SavingRun *r) {
    char err[ERR_LEN] = "";
    StepReport report;
    REQUIRE(train_step(&r->trainer, err) == 0, "%s", err);
    saver_copied(&r->saver, true);
    REQUIRE(train_flush(&r->trainer, &report) && report.skip == SKIP_NONE, "skip %d", report.skip);
}

static uint64_t hash_of(const SavingRun *r) {
    return params_hash_of_job(&r->f.model.params, &r->f.device);
}

static void begin(SavingRun *r) {
    const CheckpointInfo info = {.state = r->trainer.state, .config_json = strdup("{}")};
    saver_begin(&r->saver, &info);
    r->trainer.is_copied = saver_is_copying(&r->saver);
}

/* Has every rank the same bytes? */
static bool is_agreed(const void *own, size_t bytes) {
    uint64_t all[64], hash = hash_bytes(own, bytes, 0);
    job_gather(all, &hash, sizeof hash);
    for (int r = 1; r < job_world(); r++)
        if (all[r] != all[0]) return false;
    return true;
}

static void expect_saved(const SavingRun *r, const SaveResult *result, int64_t at, uint64_t hash) {
    char err[ERR_LEN] = "";
    CheckpointInfo info;
    EXPECT(!result->failed && result->step == at && result->hash == hash, "step %lld: %s", (long long)result->step,
           result->err);
    EXPECT(is_agreed(result->path, strlen(result->path)), "%s", result->path);
    REQUIRE(checkpoint_peek(result->path, &info, err) == 0, "%s", err);
    EXPECT(info.param_hash == hash && info.state.step == at, "%s", result->path);
    checkpoint_info_free(&info);
    StateTensor *list;
    int64_t n;
    list = params_state(&r->f.model.params, &n);
    REQUIRE(checkpoint_load(result->path, &r->f.device, list, n, CHECKPOINT_SHARE, NULL, err) == 0, "%s", err);
    EXPECT(hash_of(r) == hash, "what was loaded is not what was saved");
    free(list);
}

TEST(ranks_save_under_the_next_steps) {
    SavingRun r;
    SaveResult result;
    run_open(&r, "checkpoint.background=true");
    step(&r);
    const uint64_t hash = hash_of(&r);
    begin(&r);
    EXPECT_EQ(r.saver.stage, SAVER_COPYING);
    EXPECT(r.trainer.is_copied && !saver_end(&r.saver, false, &result), "the update does not wait for the copy");
    step(&r);
    EXPECT(hash_of(&r) != hash, "the step has moved nothing");
    while (!saver_end(&r.saver, false, &result)) {
        SaverStage stage = r.saver.stage;
        EXPECT(is_agreed(&stage, sizeof stage), "stage %d", (int)stage);
    }
    EXPECT(r.saver.stage == SAVER_IDLE && result.on_disk_s >= 0, "stage %d", (int)r.saver.stage);
    expect_saved(&r, &result, 1, hash);
    run_end(&r);
}

TEST(ranks_wait_for_a_save_without_a_copy) {
    SavingRun r;
    SaveResult result;
    run_open(&r, "checkpoint.background=false");
    step(&r);
    begin(&r);
    EXPECT(r.saver.stage == SAVER_WRITTEN && saver_end(&r.saver, false, &result), "stage %d", (int)r.saver.stage);
    EXPECT(result.on_disk_s < 0, "%g s on the way", result.on_disk_s);
    expect_saved(&r, &result, 1, hash_of(&r));
    run_end(&r);
}

/* Where the last rank wants to write its file there is a folder. */
TEST(ranks_hear_of_one_that_cannot_write) {
    const int last = job_world() - 1;
    char err[ERR_LEN], folder[PATH_LEN + 32], blocked[PATH_LEN + 80], who[32];
    for (int background = 0; background <= 1; background++) {
        SavingRun r;
        SaveResult result;
        run_open(&r, background ? "checkpoint.background=true" : "checkpoint.background=false");
        step(&r);
        snprintf(folder, sizeof folder, "%s/step_00000001.tmp", r.f.config.run.dir);
        snprintf(blocked, sizeof blocked, "%s/state_%05d.safetensors", folder, last);
        REQUIRE(job_rank() < last || dir_make(blocked, err) == 0, "%s", err);
        begin(&r);
        REQUIRE(saver_end(&r.saver, true, &result), "it goes on");
        snprintf(who, sizeof who, "rank %d on ", last);
        EXPECT(result.failed && is_agreed(result.err, strlen(result.err)) && strstr(result.err, who) == result.err &&
                   strstr(result.err, "state_"),
               "%s", result.err);
        EXPECT(!path_exists(folder), "%s is left", folder);
        step(&r);
        const uint64_t hash = hash_of(&r);
        begin(&r);
        REQUIRE(saver_end(&r.saver, true, &result), "it goes on");
        expect_saved(&r, &result, 2, hash);
        run_end(&r);
    }
}
