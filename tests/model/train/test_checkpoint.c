/* Checkpoints: bits that come back, and what happens to a run whose saves are interrupted or damaged. */
#include "model/train/checkpoint.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "data/json.h"
#include "kernels/base/file.h"
#include "model/train/manifest.h"
#include "tests/test.h"

#include "checkpoint_test.h"

/* The newest checkpoint must be that of `step`, with its bits. */
static void expect_newest(int64_t step, const char *note_part) {
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN] = "";
    SavedState got = saved_make(step + 1), want = saved_make(step);
    saved_clear(&got);
    int result = checkpoint_load_newest(saved_run_dir(), &late_device, got.t, SAVED_TENSORS, CHECKPOINT_ALL, &got.info,
                                        path, note, err);
    EXPECT(result == 0, "load: %d %s", result, err);
    EXPECT(got.info.state.step == step, "step %lld was loaded", (long long)got.info.state.step);
    if (result == 0) saved_expect_same(&got, &want);
    EXPECT(note_part ? strstr(note, note_part) != NULL : !note[0], "note: %s", note);
    saved_free(&got);
    saved_free(&want);
}

static void flip_byte(const char *path, int64_t at) {
    FILE *f = fopen(path, "r+b");
    REQUIRE(f, "%s: cannot open", path);
    fseek(f, (long)at, SEEK_SET);
    int ch = fgetc(f);
    fseek(f, (long)at, SEEK_SET);
    fputc(ch ^ 0x10, f);
    fclose(f);
}

/* ---- round trips ------------------------------------------------------------------------------------------------- */

TEST(checkpoint_round_trip) {
    const int64_t limits[] = {CHECKPOINT_FILE_BYTES, 20000, 4096, 1001};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        SavedState want = saved_make(1000), got = saved_make(2);
        char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
        int64_t bytes = 0;
        saved_clear(&got);
        REQUIRE(checkpoint_save(saved_run_dir(), &late_device, want.t, SAVED_TENSORS, &want.info, limits[i], path,
                                &bytes, err) == 0,
                "%s", err);
        EXPECT(strcmp(path, saved_in_run("step_00001000")) == 0, "%s", path);
        EXPECT(bytes > 0 && bytes < checkpoint_bytes(want.t, SAVED_TENSORS), "%lld bytes, %lld estimated",
               (long long)bytes, (long long)checkpoint_bytes(want.t, SAVED_TENSORS));
        EXPECT(path_exists(saved_in_run("step_00001000/state_00000_001.safetensors")) ==
                   (limits[i] < CHECKPOINT_FILE_BYTES),
               "limit %lld", (long long)limits[i]);
        REQUIRE(checkpoint_load(path, &late_device, got.t, SAVED_TENSORS, CHECKPOINT_ALL, &got.info, err) == 0, "%s",
                err);
        saved_expect_same(&want, &got);
        saved_free(&got);
        saved_free(&want);
    }
    EXPECT(!path_exists(saved_in_run("step_00001000.old")) && !path_exists(saved_in_run("step_00001000.tmp")),
           "something is left");
}

TEST(checkpoint_bytes_on_disk) {
    SavedState s = saved_make(1);
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes, sum = 0;
    REQUIRE(checkpoint_save(saved_run_dir(), &late_device, s.t, SAVED_TENSORS, &s.info, 20000, path, &bytes, err) == 0,
            "%s", err);
    Manifest m;
    REQUIRE(manifest_read(&m, path, err) == 0, "%s", err);
    for (int64_t i = 0; i < m.n_files; i++) {
        char file[2048];
        snprintf(file, sizeof file, "%s/%s", path, m.files[i].name);
        SafetensorsFile f;
        EXPECT(safetensors_open(&f, file, err) == 0, "%s", err);
        EXPECT(f.data_bytes <= 20000, "%s holds %lld bytes", file, (long long)f.data_bytes);
        safetensors_close(&f);
        sum += file_size(file);
    }
    EXPECT_EQ(sum + file_size(saved_in_run("step_00000001/manifest.json")), bytes);
    EXPECT(m.n_files > 1, "%lld files", (long long)m.n_files);
    manifest_free(&m);
    saved_free(&s);
}

/* The slices of a tensor serve any rank's part of it. */
TEST(checkpoint_load_of_a_part) {
    SavedState s = saved_make(5);
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes;
    REQUIRE(checkpoint_save(saved_run_dir(), &late_device, s.t, SAVED_TENSORS, &s.info, 1000, path, &bytes, err) == 0,
            "%s", err);
    const int64_t parts[][2] = {{0, 4257}, {0, 1}, {4256, 1}, {249, 2}, {250, 250}, {100, 3000}, {4257, 0}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        StateTensor t = s.t[1];
        float part[4257 + 2];
        t.offset = parts[i][0];
        t.extent = parts[i][1];
        t.data = part + 1;
        part[0] = part[1 + t.extent] = 42;
        REQUIRE(checkpoint_load(path, &late_device, &t, 1, CHECKPOINT_WEIGHTS, NULL, err) == 0, "%s", err);
        EXPECT(memcmp(part + 1, (const float *)s.t[1].data + t.offset, (size_t)t.extent * 4) == 0, "part %zu", i);
        EXPECT(part[0] == 42 && part[1 + t.extent] == 42, "part %zu: written outside", i);
    }
    saved_free(&s);
}

TEST(checkpoint_of_large_tensors) {
    StateTensor t = {.name = "w", .dtype = DTYPE_F32, .ndim = 2, .shape = {1500, 1001}, .extent = 1500 * 1001};
    const size_t bytes = (size_t)t.extent * 4; /* more than one block of the hash */
    uint32_t *want = (uint32_t *)malloc(bytes), *got = (uint32_t *)calloc(1, bytes);
    CheckpointInfo info = {.state.step = 1, .config_json = strdup("{}")};
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t saved;
    for (int64_t i = 0; i < t.extent; i++) want[i] = (uint32_t)i * 2654435761u;
    t.data = want;
    REQUIRE(checkpoint_save(saved_run_dir(), &late_device, &t, 1, &info, CHECKPOINT_FILE_BYTES, path, &saved, err) == 0,
            "%s", err);
    t.data = got;
    REQUIRE(checkpoint_load(path, &late_device, &t, 1, CHECKPOINT_ALL, NULL, err) == 0, "%s", err);
    EXPECT(memcmp(want, got, bytes) == 0, "bits differ");
    t.offset = t.extent - 5; /* a part that the first block does not touch */
    t.extent = 5;
    memset(got, 0, bytes);
    REQUIRE(checkpoint_load(path, &late_device, &t, 1, CHECKPOINT_ALL, NULL, err) == 0, "%s", err);
    EXPECT(memcmp(want + t.offset, got, 20) == 0 && got[5] == 0, "the last elements differ");
    flip_byte(saved_in_run("step_00000001/state_00000.safetensors"), (int64_t)bytes);
    EXPECT_EQ(checkpoint_load(path, &late_device, &t, 1, CHECKPOINT_ALL, NULL, err), CHECKPOINT_DAMAGED);
    EXPECT(strstr(err, "state_00000.safetensors: w: hash"), "%s", err);
    checkpoint_info_free(&info);
    free(want);
    free(got);
}

TEST(checkpoint_keeps_config_and_numbers) {
    SavedState s = saved_make(7);
    CheckpointInfo info;
    char err[ERR_LEN] = "", hint[ERR_LEN];
    s.info.state.best_val = -INFINITY;
    s.info.state.loss_z = (ZWindow){0};
    char path[CHECKPOINT_PATH_LEN];
    int64_t bytes;
    REQUIRE(checkpoint_save(saved_run_dir(), &late_device, s.t, SAVED_TENSORS, &s.info, CHECKPOINT_FILE_BYTES, path,
                            &bytes, err) == 0,
            "%s", err);
    REQUIRE(checkpoint_peek(path, &info, err) == 0, "%s", err);
    EXPECT(memcmp(&info.state, &s.info.state, sizeof info.state) == 0, "the state differs");
    EXPECT(strcmp(info.config_json, SAVED_CONFIG) == 0, "%s", info.config_json);
    cJSON *config = json_parse(info.config_json, strlen(info.config_json), "config", err, hint, NULL);
    EXPECT(config, "%s", err);
    cJSON_Delete(config);
    checkpoint_info_free(&info);
    saved_free(&s);
}

/* ---- interrupted and damaged ------------------------------------------------------------------------------------- */

/* kill -9 at every block of a save, with one older checkpoint to keep (G1, G2). */
TEST(checkpoint_killed_while_saving) {
    saved_step(100);
    int killed = 0;
    for (int block = 1; block < 100; block++) {
        pid_t pid = fork();
        REQUIRE(pid >= 0, "fork");
        if (pid == 0) {
            late_dies_after(block);
            saved_step(200);
            _exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        if (!WIFSIGNALED(status)) break;
        killed++;
        EXPECT(path_exists(saved_in_run("step_00000200.tmp")), "no unfinished folder");
        expect_newest(100, "step_00000200.tmp: an unfinished save");
    }
    EXPECT(killed == SAVED_TENSORS, "killed %d times", killed);
    EXPECT(!path_exists(saved_in_run("step_00000200.tmp")), "the unfinished folder is still there");
    expect_newest(200, NULL);
}

TEST(checkpoint_unfinished_folder_is_removed) {
    char err[ERR_LEN];
    REQUIRE(dir_make(saved_in_run("step_00000050.tmp"), err) == 0, "%s", err);
    REQUIRE(dir_make(saved_in_run("step_00000060.tmp"), err) == 0, "%s", err);
    REQUIRE(dir_make(saved_in_run("step_00000040.old"), err) == 0, "%s", err);
    REQUIRE(file_write_durable(saved_in_run("step_00000050.tmp/state_00000.safetensors"), "half", 4, err) == 0, "%s",
            err);
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN];
    EXPECT_EQ(checkpoint_find(saved_run_dir(), -1, path, note, err), 1);
    EXPECT(strstr(note, "step_00000050.tmp: an unfinished save"), "%s", note);
    saved_step(60);
    EXPECT(!path_exists(saved_in_run("step_00000050.tmp")) && !path_exists(saved_in_run("step_00000060.tmp")),
           "unfinished ones stay");
    EXPECT(!path_exists(saved_in_run("step_00000040.old")), "what a save replaced stays");
    expect_newest(60, NULL);
}

static void damage(const char *what) {
    char err[ERR_LEN];
    const char *state = saved_in_run("step_00000200/state_00000.safetensors"),
               *manifest = saved_in_run("step_00000200/manifest.json");
    if (strcmp(what, "one byte short") == 0) REQUIRE(truncate(state, file_size(state) - 1) == 0, "truncate");
    if (strcmp(what, "no tensors") == 0) REQUIRE(unlink(state) == 0, "unlink");
    if (strcmp(what, "no manifest") == 0) REQUIRE(unlink(manifest) == 0, "unlink");
    if (strcmp(what, "short manifest") == 0) REQUIRE(truncate(manifest, file_size(manifest) - 1) == 0, "truncate");
    if (strcmp(what, "empty manifest") == 0) REQUIRE(truncate(manifest, 0) == 0, "truncate");
    if (strcmp(what, "flipped tensor") == 0) flip_byte(state, file_size(state) - 1);
    if (strcmp(what, "flipped header") == 0) flip_byte(state, 10);
    if (strcmp(what, "flipped manifest") == 0) flip_byte(manifest, 40);
    if (strcmp(what, "a file") == 0)
        REQUIRE(dir_remove(saved_in_run("step_00000200"), err) == 0 &&
                    file_write_durable(saved_in_run("step_00000200"), "x", 1, err) == 0,
                "%s", err);
}

TEST(checkpoint_damaged_is_passed_over) {
    static const struct {
        const char *what, *part;
        bool found; /* sizes are right: only a load finds it */
    } cases[] = {
        {"one byte short", "step_00000200/state_00000.safetensors: 35473 bytes, 35474 were written", false},
        {"no tensors", "step_00000200/state_00000.safetensors: is missing", false},
        {"no manifest", "step_00000200: not a whole checkpoint: it holds no manifest.json", false},
        {"short manifest", "step_00000200/manifest.json: cut off or edited", false},
        {"empty manifest", "step_00000200/manifest.json: the file is empty", false},
        {"flipped tensor", "step_00000200/state_00000.safetensors: adam.v.model.norm.weight: hash", true},
        {"flipped header", "step_00000200/state_00000.safetensors", true},
        {"flipped manifest", "step_00000200/manifest.json: its hash does not match", false},
        {"a file", "step_00000200: not a whole checkpoint", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN];
        saved_step(100);
        saved_step(200);
        damage(cases[i].what);
        REQUIRE(checkpoint_find(saved_run_dir(), -1, path, note, err) == 0, "%s: %s", cases[i].what, err);
        EXPECT(strcmp(path, saved_in_run(cases[i].found ? "step_00000200" : "step_00000100")) == 0, "%s: %s",
               cases[i].what, path);
        expect_newest(100, cases[i].part);
        EXPECT_EQ(checkpoint_find(saved_run_dir(), 200, path, note, err), cases[i].found ? 0 : -1);
        if (!cases[i].found) EXPECT(strstr(err, cases[i].part), "%s: %s", cases[i].what, err);

        SavedState s = saved_make(1);
        EXPECT(checkpoint_load(saved_in_run("step_00000200"), &late_device, s.t, SAVED_TENSORS, CHECKPOINT_ALL, NULL,
                               err) == CHECKPOINT_DAMAGED,
               "%s: loaded", cases[i].what);
        EXPECT(strstr(err, cases[i].part), "%s: %s", cases[i].what, err);
        saved_free(&s);

        saved_step(200); /* a run that went on from 100 gets there again */
        expect_newest(200, NULL);
        REQUIRE(dir_remove(saved_run_dir(), err) == 0, "%s", err);
    }
}

TEST(checkpoint_all_damaged) {
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN];
    SavedState s = saved_make(1);
    saved_step(100);
    saved_step(200);
    REQUIRE(unlink(saved_in_run("step_00000100/state_00000.safetensors")) == 0, "unlink");
    flip_byte(saved_in_run("step_00000200/state_00000.safetensors"), 3000);
    EXPECT_EQ(checkpoint_load_newest(saved_run_dir(), &late_device, s.t, SAVED_TENSORS, CHECKPOINT_ALL, NULL, path,
                                     note, err),
              -1);
    EXPECT(strstr(err, "every checkpoint is damaged: step_00000200/state_00000.safetensors: ") &&
               strstr(err, "; step_00000100/state_00000.safetensors: is missing"),
           "%s", err);
    REQUIRE(unlink(saved_in_run("step_00000200/manifest.json")) == 0, "unlink");
    EXPECT_EQ(checkpoint_find(saved_run_dir(), -1, path, note, err), -1);
    EXPECT(strstr(err, "every checkpoint is damaged: step_00000200: "), "%s", err);
    saved_free(&s);
}

/* A disk that fills up (G16): the older checkpoint stays, the unfinished one goes. */
TEST(checkpoint_save_fails) {
    SavedState s = saved_make(200);
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes;
    saved_step(100);
    signal(SIGXFSZ, SIG_IGN);
    for (rlim_t limit = 1000; limit <= 100000; limit *= 10) {
        const struct rlimit file_bytes = {limit, RLIM_INFINITY};
        REQUIRE(setrlimit(RLIMIT_FSIZE, &file_bytes) == 0, "no limit");
        int result = checkpoint_save(saved_run_dir(), &late_device, s.t, SAVED_TENSORS, &s.info, CHECKPOINT_FILE_BYTES,
                                     path, &bytes, err);
        EXPECT_EQ(result, limit < 100000 ? -1 : 0);
        if (result == 0) continue;
        EXPECT(strstr(err, "step_00000200.tmp/state_00000.safetensors: cannot write: File too large"), "%s", err);
        EXPECT(!path_exists(saved_in_run("step_00000200.tmp")), "the unfinished folder is still there");
        expect_newest(100, NULL);
    }
    expect_newest(200, NULL);
    saved_free(&s);
}

/* ---- finding ----------------------------------------------------------------------------------------------------- */

TEST(checkpoint_find_by_number) {
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN];
    EXPECT_EQ(checkpoint_find(saved_run_dir(), -1, path, note, err), 1);
    EXPECT_EQ(checkpoint_find(saved_run_dir(), 5, path, note, err), -1);
    EXPECT(strstr(err, "no checkpoint of step 5; there is none at all"), "%s", err);
    saved_step(9900);
    saved_step(900);
    saved_step(123456789);
    saved_step(10000);
    REQUIRE(dir_make(saved_in_run("step_999999999x"), err) == 0, "%s", err);
    REQUIRE(dir_make(saved_in_run("step_0099999999"), err) == 0, "%s", err);
    REQUIRE(dir_make(saved_in_run("step_-0000001"), err) == 0, "%s", err);
    expect_newest(123456789, NULL);
    REQUIRE(checkpoint_find(saved_run_dir(), 9900, path, note, err) == 0, "%s", err);
    EXPECT(strcmp(path, saved_in_run("step_00009900")) == 0, "%s", path);
    EXPECT_EQ(checkpoint_find(saved_run_dir(), 901, path, note, err), -1);
    EXPECT(strstr(err, "no checkpoint of step 901; there are 123456789, 10000, 9900, 900"), "%s", err);
    REQUIRE(rename(saved_in_run("step_00000900"), saved_in_run("step_200000000")) == 0, "rename");
    expect_newest(123456789, "step_200000000: holds step 900");
}

/* What a user may name instead of a checkpoint (G17). */
TEST(checkpoint_load_of_what_is_none) {
    SavedState s = saved_make(1);
    CheckpointInfo info;
    char err[ERR_LEN];
    saved_step(100);
    EXPECT_EQ(
        checkpoint_load(saved_in_run("step_00000099"), &late_device, s.t, SAVED_TENSORS, CHECKPOINT_ALL, NULL, err),
        -1);
    EXPECT(strstr(err, "step_00000099: there is no such checkpoint"), "%s", err);
    REQUIRE(dir_make(saved_in_run("empty"), err) == 0, "%s", err);
    EXPECT(checkpoint_load(saved_in_run("empty"), &late_device, s.t, SAVED_TENSORS, CHECKPOINT_ALL, NULL, err) != 0,
           "empty");
    EXPECT(strstr(err, "empty: not a whole checkpoint: it holds no manifest.json"), "%s", err);
    EXPECT(checkpoint_peek(saved_run_dir(), &info, err) != 0 && !info.config_json, "the run's folder");
    EXPECT(checkpoint_load(saved_in_run("step_00000100/manifest.json"), &late_device, s.t, 1, CHECKPOINT_ALL, NULL,
                           err) != 0,
           "file");
    saved_free(&s);
}

TEST(checkpoint_of_a_newer_format) {
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN];
    const char *newer = "{\"format\": 2, \"parts\": []}\n";
    SavedState s = saved_make(1);
    saved_step(100);
    saved_step(200);
    REQUIRE(file_write_durable(saved_in_run("step_00000200/manifest.json"), newer, strlen(newer), err) == 0, "%s", err);
    EXPECT_EQ(checkpoint_find(saved_run_dir(), -1, path, note, err), -1);
    EXPECT(strstr(err, "step_00000200/manifest.json: written by a newer train_moe, format 2"), "%s", err);
    EXPECT_EQ(checkpoint_load_newest(saved_run_dir(), &late_device, s.t, SAVED_TENSORS, CHECKPOINT_ALL, NULL, path,
                                     note, err),
              -1);
    EXPECT(strstr(err, "newer train_moe"), "%s", err);
    saved_free(&s);
}

/* ---- what does not fit ------------------------------------------------------------------------------------------- */

TEST(checkpoint_that_does_not_fit) {
    SavedState s = saved_make(1);
    char err[ERR_LEN], path[CHECKPOINT_PATH_LEN], note[ERR_LEN];
    saved_step(100);
    snprintf(path, sizeof path, "%s", saved_in_run("step_00000100"));
    for (int i = 0; i < 5; i++) {
        StateTensor t[SAVED_TENSORS];
        int n = SAVED_TENSORS;
        memcpy(t, s.t, sizeof t);
        static const char *const parts[] = {
            "model.embed_tokens.weight is (129, 33) in this checkpoint, (33, 129) in this run",
            "adam.m.model.norm.weight is F32 in this checkpoint, BF16 in this run, and is not converted (prec",
            "model.layers.9 is not in this checkpoint, but in this run",
            "adam.v.model.norm.weight is in this checkpoint, but not in this run",
            "model.norm.weight is (65) in this checkpoint, (5, 13) in this run",
        };
        if (i == 0) t[1].shape[0] = 33, t[1].shape[1] = 129;
        if (i == 1) t[6].dtype = DTYPE_BF16;
        if (i == 2) strcpy(t[7].name, "model.layers.9");
        if (i == 3) n--;
        if (i == 4) t[0].ndim = 2, t[0].shape[0] = 5, t[0].shape[1] = 13;
        EXPECT_EQ(checkpoint_load(path, &late_device, t, n, CHECKPOINT_ALL, NULL, err), -1);
        EXPECT(strstr(err, parts[i]), "%s", err);
        EXPECT_EQ(checkpoint_load_newest(saved_run_dir(), &late_device, t, n, CHECKPOINT_ALL, NULL, path, note, err),
                  -1);
        EXPECT(strstr(err, parts[i]), "%s", err);
    }
    saved_free(&s);
}

TEST(checkpoint_weights_only) {
    SavedState saved = saved_make(100), s = saved_make(1), untouched = saved_make(1);
    char err[ERR_LEN] = "";
    saved_step(100);
    s.t[6].dtype = DTYPE_BF16; /* moments may differ: they are not asked for */
    REQUIRE(checkpoint_load(saved_in_run("step_00000100"), &late_device, s.t, SAVED_TENSORS, CHECKPOINT_WEIGHTS, NULL,
                            err) == 0,
            "%s", err);
    for (int i = 0; i < SAVED_TENSORS; i++) {
        const SavedState *want = strncmp(s.t[i].name, "adam.", 5) == 0 ? &untouched : &saved;
        EXPECT(memcmp(s.t[i].data, want->t[i].data, (size_t)want->t[i].extent * dtype_size(want->t[i].dtype)) == 0,
               "%s", s.t[i].name);
    }
    REQUIRE(checkpoint_load(saved_in_run("step_00000100"), &late_device, s.t + 1, 3, CHECKPOINT_WEIGHTS, NULL, err) ==
                0,
            "%s", err);
    strcpy(s.t[0].name, "model.norm2.weight");
    EXPECT_EQ(
        checkpoint_load(saved_in_run("step_00000100"), &late_device, s.t, SAVED_TENSORS, CHECKPOINT_WEIGHTS, NULL, err),
        -1);
    EXPECT(strstr(err, "model.norm2.weight is not in this checkpoint"), "%s", err);
    saved_free(&saved);
    saved_free(&s);
    saved_free(&untouched);
}

/* ---- history ----------------------------------------------------------------------------------------------------- */

/* The steps in the run's folder, as text. */
static const char *steps_there(const int64_t *steps, int n) {
    static char text[256];
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        char name[40];
        snprintf(name, sizeof name, "step_%08lld", (long long)steps[i]);
        if (path_exists(saved_in_run(name))) snprintf(text + strlen(text), 32, " %lld", (long long)steps[i]);
    }
    return text;
}

TEST(checkpoint_prune_rules) {
    static const struct {
        int keep_last;
        int64_t every, saved, best;
        const char *left;
    } cases[] = {
        {2, 0, 10100, 0, " 10000 10100"}, /* by number, not by name (G3) */
        {1, 0, 10100, 0, " 10100"},       /* exactly one (G4) */
        {0, 0, 10100, 0, " 900 1000 9900 10000 10100"},
        {0, 1000, 10100, 0, " 900 1000 9900 10000 10100"},
        {9, 0, 10100, 0, " 900 1000 9900 10000 10100"},
        {1, 1000, 10100, 0, " 1000 10000 10100"}, /* milestones stay beside the newest (G6) */
        {2, 1000, 10100, 0, " 1000 10000 10100"},
        {1, 0, 9900, 0, " 9900 10100"},         /* what was just saved stays, whatever else is there */
        {2, 0, 10100, 900, " 900 10000 10100"}, /* the best one stays beside the newest (G6) */
        {1, 0, 10100, 10100, " 10100"},         /* also where both are one (G4) */
        {1, 0, 10100, 5000, " 10100"},          /* the best one is not there */
    };
    const int64_t steps[] = {900, 1000, 9900, 10000, 10100};
    char err[ERR_LEN] = "";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int k = 0; k < 5; k++) saved_step(steps[k]);
        const CheckpointKeep keep = {cases[i].keep_last, cases[i].every, cases[i].saved, cases[i].best};
        EXPECT(checkpoint_prune(saved_run_dir(), &keep, err) == 0, "%s", err);
        EXPECT(strcmp(steps_there(steps, 5), cases[i].left) == 0, "case %zu: left%s", i, steps_there(steps, 5));
        REQUIRE(dir_remove(saved_run_dir(), err) == 0, "%s", err);
    }
    EXPECT_EQ(checkpoint_prune(saved_run_dir(), &(CheckpointKeep){.last = 1, .saved_step = 1}, err), 0);
}

/* A damaged checkpoint does not count as one that is kept. */
TEST(checkpoint_prune_counts_whole_ones) {
    const int64_t steps[] = {100, 200, 300, 400};
    char err[ERR_LEN] = "";
    for (int k = 0; k < 4; k++) saved_step(steps[k]);
    REQUIRE(unlink(saved_in_run("step_00000300/manifest.json")) == 0, "unlink");
    EXPECT(checkpoint_prune(saved_run_dir(), &(CheckpointKeep){.last = 2, .saved_step = 400}, err) == 0, "%s", err);
    EXPECT(strcmp(steps_there(steps, 4), " 200 300 400") == 0, "left%s", steps_there(steps, 4));
}

TEST(checkpoint_set_aside) {
    const int64_t steps[] = {100, 200, 300};
    char note[ERR_LEN], err[ERR_LEN] = "";
    for (int round = 0; round < 2; round++) {
        for (int k = 0; k < 3; k++) saved_step(steps[k]);
        EXPECT(checkpoint_set_aside_after(saved_run_dir(), 100, note, err) == 0, "%s", err);
        EXPECT(strcmp(note, "step_00000300; step_00000200") == 0, "%s", note);
        expect_newest(100, NULL);
    }
    EXPECT(path_exists(saved_in_run("step_00000300.aside/manifest.json")), "not there");
    EXPECT(path_exists(saved_in_run("step_00000300.aside2/manifest.json")), "not there");
    EXPECT(checkpoint_set_aside_after(saved_run_dir(), 100, note, err) == 0 && !note[0], "%s", note);
    EXPECT(checkpoint_prune(saved_run_dir(), &(CheckpointKeep){.last = 1, .saved_step = 100}, err) == 0, "%s", err);
    EXPECT(path_exists(saved_in_run("step_00000200.aside/manifest.json")), "pruned");
}

TEST(checkpoint_room_on_disk) {
    char path[1024], err[ERR_LEN] = "";
    EXPECT(checkpoint_can_write(saved_in_run("a/b"), 1 << 20, err) == 0, "%s", err);
    EXPECT(path_exists(saved_in_run("a/b")), "the folder was not made");
    EXPECT_EQ(rmdir(saved_in_run("a/b")), 0); /* and nothing is left in it */
    EXPECT_EQ(checkpoint_can_write(saved_run_dir(), INT64_MAX, err), -1);
    EXPECT(strstr(err, " free, a checkpoint needs 8589934592.0 GiB"), "%s", err);
    REQUIRE(file_write_durable(saved_in_run("plain"), "x", 1, err) == 0, "%s", err);
    snprintf(path, sizeof path, "%s/below", saved_in_run("plain"));
    EXPECT_EQ(checkpoint_can_write(path, 1, err), -1);
    EXPECT(strstr(err, "plain"), "%s", err);
    SavedState s = saved_make(1);
    int64_t bytes;
    EXPECT_EQ(checkpoint_save(saved_in_run("plain"), &late_device, s.t, SAVED_TENSORS, &s.info, CHECKPOINT_FILE_BYTES,
                              path, &bytes, err),
              -1);
    EXPECT(strstr(err, "plain"), "%s", err);
    saved_free(&s);
}
