/* Saves beside the run: what they hold, whom they hold up, and what becomes of those that fail.
 *
 * The device of these tests copies on STREAM_COPY as late as events allow. */
#include "model/train/saver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/file.h"
#include "model/memory.h"
#include "model/train/run.h"
#include "tests/test.h"

/* ---- a device that copies late ----------------------------------------------------------------------------------- */

enum { COPIES_MAX = 16 };
static struct {
    const Ops *cpu;
    int n, n_at_batches; /* copies under way; when the micro-batches were through */
    struct {
        void *to;
        const void *from;
        size_t bytes;
    } copy[COPIES_MAX];
} late;

static void arrive(void) {
    for (int i = 0; i < late.n; i++) memcpy(late.copy[i].to, late.copy[i].from, late.copy[i].bytes);
    late.n = 0;
}

static void late_copy_out(void *to, const void *from, size_t bytes, Stream s) {
    if (s != STREAM_COPY) {
        late.cpu->copy_out(to, from, bytes, s);
        return;
    }
    REQUIRE(late.n < COPIES_MAX, "more than %d copies at once", COPIES_MAX);
    late.copy[late.n].to = to;
    late.copy[late.n].from = from;
    late.copy[late.n++].bytes = bytes;
}

static void late_synchronize(Stream s) {
    if (s == STREAM_COPY) arrive();
}

static void late_event_record(int event, Stream s) {
    EXPECT(event != EVENT_SAVE_COPIED || s == STREAM_COPY);
    if (event == EVENT_SAVE_BATCHES) late.n_at_batches = late.n;
}

static void late_event_wait(int event, Stream s) {
    if (event == EVENT_SAVE_COPIED && s == STREAM_COMPUTE) arrive();
}

static void late_event_synchronize(int event) {
    if (event == EVENT_SAVE_COPIED) arrive();
}

/* ---- runs -------------------------------------------------------------------------------------------------------- */

enum { RUNS_MAX = 8 };

/* The smallest model's run in a folder of its own, up to its first step. `sets` end with NULL. */
static void open_run(Run *r, const char *name, const char *const *sets) {
    static char dir[RUNS_MAX][1024];
    static char *argv[RUNS_MAX][5 + SETS_MAX];
    static Args args[RUNS_MAX];
    static int n;
    const Launch launch = {0, 1, false};
    REQUIRE(n < RUNS_MAX, "more than %d runs in a test", RUNS_MAX);
    const int k = n++;
    int argc = 0;
    snprintf(dir[k], sizeof dir[k], "run.dir=%s/%s", test_tmp_dir(), name);
    char *const fixed[] = {"train_moe", "--config", "configs/bytes_debug.json", dir[k], "--quiet"};
    for (int i = 0; i < 5; i++) argv[k][argc++] = fixed[i];
    for (int i = 0; sets[i]; i++) argv[k][argc++] = (char *)(uintptr_t)sets[i];
    args[k] = cli_parse(argc, argv[k]);
    run_open_model(r, &args[k], &launch, 0, true);
    run_open_training(r);
}

static void make_late(Run *r) {
    static Ops ops;
    late.cpu = r->device.ops;
    ops = *late.cpu;
    ops.copy_out = late_copy_out;
    ops.synchronize = late_synchronize;
    ops.event_record = late_event_record;
    ops.event_wait = late_event_wait;
    ops.event_synchronize = late_event_synchronize;
    r->device.ops = &ops;
    r->device.is_asynchronous = true;
}

static void step(Run *r) {
    char err[ERR_LEN] = "";
    StepReport report;
    REQUIRE(train_step(&r->trainer, err) == 0, "%s", err);
    saver_copied(&r->saver, true);
    REQUIRE(train_flush(&r->trainer, &report), "no report");
}

static uint64_t hash_of(const Run *r) {
    return params_hash(&r->model.params, &r->device);
}

static uint64_t saved_hash(const char *checkpoint) {
    char err[ERR_LEN] = "";
    CheckpointInfo info;
    REQUIRE(checkpoint_peek(checkpoint, &info, err) == 0, "%s", err);
    const uint64_t hash = info.param_hash;
    checkpoint_info_free(&info);
    return hash;
}

static void expect_same_state(const char *a, const char *b) {
    char path[2][PATH_MAX], err[ERR_LEN] = "", *text[2];
    size_t size[2];
    for (int i = 0; i < 2; i++) {
        snprintf(path[i], sizeof path[i], "%s/state_00000.safetensors", i ? b : a);
        REQUIRE(file_read_all(&text[i], &size[i], path[i], (size_t)1 << 30, err) == 0, "%s", err);
    }
    EXPECT(size[0] == size[1] && memcmp(text[0], text[1], size[0]) == 0, "%s and %s differ", path[0], path[1]);
    free(text[0]);
    free(text[1]);
}

static const char *const beside[] = {"checkpoint.every_steps=2", "train.steps=9", "precision.compute=bf16",
                                     "precision.moments=bf16", NULL};

/* ---- what is saved ----------------------------------------------------------------------------------------------- */

/* The next step is queued while the copies are under way; its update waits for them, and what is written is the state
 * before it. */
TEST(saver_copies_under_the_next_step) {
    const char *const waits[] = {"checkpoint.background=false", "train.steps=9", "precision.compute=bf16",
                                 "precision.moments=bf16", NULL};
    char expected[CHECKPOINT_PATH_LEN];
    Run r, w;
    open_run(&w, "waits", waits);
    open_run(&r, "beside", beside);
    EXPECT(!w.saver.memory && strstr(w.saver_note, "saved at the end"), "%s", w.saver_note);
    REQUIRE(r.saver.memory, "%s", r.saver_note);
    make_late(&r);
    for (int i = 0; i < 3; i++) step(&r), step(&w);
    const uint64_t hash = hash_of(&r);
    run_save(&w, false);
    EXPECT(w.saved_step == 3 && w.saver.stage == SAVER_IDLE, "step %lld is saved", (long long)w.saved_step);
    run_save(&r, false);
    EXPECT(r.saver.stage == SAVER_COPYING && late.n == SAVER_COPIES && r.saved_step == -1, "%d copies", late.n);
    step(&r);
    step(&w);
    EXPECT_EQ(late.n_at_batches, SAVER_COPIES);
    EXPECT(hash_of(&r) != hash && hash_of(&r) == hash_of(&w), "the step after differs");
    run_saved(&r, true);
    EXPECT(r.saved_step == 3 && r.saver.stage == SAVER_IDLE && saved_hash(r.last_checkpoint) == hash, "%s",
           r.last_checkpoint);
    snprintf(expected, sizeof expected, "%s", w.last_checkpoint);
    EXPECT(saved_hash(expected) == hash, "%s", expected);
    expect_same_state(r.last_checkpoint, expected);
    /* What this test is worth: an update that does not wait spoils the copy. */
    const uint64_t before = hash_of(&r);
    run_save(&r, false);
    r.trainer.is_copied = false;
    step(&r);
    run_saved(&r, true);
    EXPECT(r.saved_step == 4 && saved_hash(r.last_checkpoint) != before, "the update has waited all the same");
    run_close(&r);
    run_close(&w);
}

/* On a device whose ops are done when they return, the copy is as well. */
TEST(saver_on_a_cpu_writes_at_once) {
    Run r;
    open_run(&r, "run", beside);
    step(&r);
    const uint64_t hash = hash_of(&r);
    run_save(&r, false);
    EXPECT(r.saver.stage == SAVER_WRITING || r.saved_step == 1, "stage %d", (int)r.saver.stage);
    EXPECT(!r.trainer.is_copied, "the update would wait for nothing");
    step(&r);
    run_saved(&r, true);
    EXPECT(r.saved_step == 1 && saved_hash(r.last_checkpoint) == hash, "%s", r.last_checkpoint);
    EXPECT(!saver_end(&r.saver, true, &(SaveResult){0}), "it ended twice");
    run_close(&r);
}

/* The last save of a run: nothing is queued behind it, and the run waits. */
TEST(saver_waits_for_the_last) {
    Run r;
    open_run(&r, "run", beside);
    make_late(&r);
    step(&r);
    const uint64_t hash = hash_of(&r);
    run_save(&r, true);
    EXPECT(r.saved_step == 1 && late.n == 0 && saved_hash(r.last_checkpoint) == hash, "%s", r.last_checkpoint);
    run_close(&r);
}

/* One at a time, and the run says what it waits for. What is left when a run is closed is written to its end. */
TEST(saver_writes_one_after_the_other) {
    char path[PATH_MAX], err[ERR_LEN], *text;
    size_t size;
    Run r;
    open_run(&r, "run", beside);
    make_late(&r);
    step(&r);
    run_save(&r, false);
    step(&r);
    /* The thread may be done by now; a copy that is under way is not. */
    run_saved(&r, true);
    run_save(&r, false);
    const uint64_t hash = hash_of(&r);
    run_save(&r, false);
    EXPECT(r.saved_step == 2 && r.saver.stage == SAVER_COPYING, "step %lld is saved", (long long)r.saved_step);
    step(&r);
    run_close(&r);
    snprintf(path, sizeof path, "%s/run/log.jsonl", test_tmp_dir());
    REQUIRE(file_read_all(&text, &size, path, (size_t)1 << 30, err) == 0, "%s", err);
    EXPECT(strstr(text, "the save of step 2 was still being written: the run waited"), "%s", text);
    free(text);
    snprintf(path, sizeof path, "%s/run/step_00000002", test_tmp_dir());
    EXPECT(saved_hash(path) == hash, "the second save of step 2");
}

/* ---- what goes wrong --------------------------------------------------------------------------------------------- */

/* A run in step 2 with step 1 saved, and a file where the next save wants its folder. */
static void open_blocked(Run *r, char blocked[PATH_MAX]) {
    open_run(r, "run", beside);
    step(r);
    run_save(r, true);
    step(r);
    snprintf(blocked, PATH_MAX, "%s/run/step_00000002.tmp", test_tmp_dir());
    FILE *f = fopen(blocked, "w");
    REQUIRE(f && fclose(f) == 0, "%s", blocked);
}

/* A save that fails in the background is a warning; the one before it stays, the next one works. */
TEST(saver_survives_a_save_that_fails) {
    char blocked[PATH_MAX];
    Run r;
    open_blocked(&r, blocked);
    run_save(&r, false);
    run_saved(&r, true);
    EXPECT(r.saved_step == 1 && strstr(r.last_checkpoint, "step_00000001"), "%s", r.last_checkpoint);
    step(&r);
    REQUIRE(unlink(blocked) == 0, "%s", blocked);
    run_save(&r, false);
    run_saved(&r, true);
    EXPECT(r.saved_step == 3 && strstr(r.last_checkpoint, "step_00000003"), "%s", r.last_checkpoint);
    run_close(&r);
}

static void save_the_last(void *arg) {
    run_save((Run *)arg, true);
}

TEST(saver_last_save_that_fails_ends_the_run) {
    char blocked[PATH_MAX];
    Run r;
    open_blocked(&r, blocked);
    EXPECT(expect_exit(EXIT_FAILED, "the last save failed: ", save_the_last, &r));
    EXPECT(expect_exit(EXIT_FAILED, "run/step_00000001; make room and give the same command again", save_the_last, &r));
    run_close(&r);
}

/* Without room for a copy the run waits, says why, and saves the same. */
TEST(saver_without_room_waits) {
    char note[SAVER_NOTE_LEN];
    Run r, w;
    Saver s;
    open_run(&r, "beside", beside);
    open_run(&w, "waits", beside);
    const int64_t bytes = saver_bytes(&w.config, &w.model.params);
    const Params *p = &w.model.params;
    EXPECT_EQ(bytes, (int64_t)p->numel * (4 + 2 + 2));
    REQUIRE(w.device.memory.on_touch, "not a CPU");
    w.device.memory.total = w.device.memory.free = memory_total(&w.model) + bytes / 2;
    saver_close(&w.saver);
    saver_open(&w.saver, &w.config, &w.model, &w.log.file, note);
    EXPECT(!w.saver.memory && strstr(note, "the run waits for saves: a copy takes ") && strstr(note, "are left"), "%s",
           note);
    w.device.memory.free = memory_total(&w.model) + bytes * 9 / 8;
    saver_open(&s, &w.config, &w.model, NULL, note);
    EXPECT(s.memory && strstr(note, "saved beside the run, from a copy of "), "%s", note);
    saver_close(&s);
    step(&r);
    step(&w);
    run_save(&r, false);
    run_save(&w, false);
    EXPECT(w.saved_step == 1 && w.saver.stage == SAVER_IDLE, "it did not wait");
    run_saved(&r, true);
    expect_same_state(r.last_checkpoint, w.last_checkpoint);
    run_close(&r);
    run_close(&w);
}

/* Memory for a copy is taken where saves come on the way, and only there. */
TEST(saver_bytes_follow_the_configuration) {
    static const struct {
        const char *set;
        bool has_copy;
        const char *note;
    } cases[] = {{"checkpoint.every_steps=3", true, "saved beside the run"},
                 {"checkpoint.every_minutes=1", true, "saved beside the run"},
                 {"checkpoint.every_steps=0", false, "saved at the end"}};
    for (int i = 0; i < 3; i++) {
        for (int background = 0; background < 2; background++) {
            const char *const sets[] = {cases[i].set, background ? "train.steps=2" : "checkpoint.background=false",
                                        NULL};
            const bool has_copy = cases[i].has_copy && background;
            Run r;
            open_run(&r, "run", sets);
            EXPECT((saver_bytes(&r.config, &r.model.params) > 0) == has_copy && (r.saver.memory != NULL) == has_copy,
                   "%s, %d", cases[i].set, background);
            EXPECT(strstr(r.saver_note, background || !cases[i].has_copy ? cases[i].note : "the run waits for saves"),
                   "%s, %d: %s", cases[i].set, background, r.saver_note);
            run_close(&r);
        }
    }
}
