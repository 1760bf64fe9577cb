/* Checkpoints: bits that come back, and what happens to a run whose saves are interrupted or damaged.
 *
 * The device of these tests is asynchronous as far as its contract allows: a copy happens when its stream is
 * synchronised, not before. */
#include "model/train/checkpoint.h"

#include <errno.h>
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
#include "kernels/base/rng.h"
#include "model/train/manifest.h"
#include "model/train/manifest_state.h"
#include "tests/test.h"

/* ---- a device that is late --------------------------------------------------------------------------------------- */

static struct {
    void *to;
    const void *from;
    size_t bytes;
    int n_synchronized, dies_at; /* the process is killed at this synchronisation; 0: never */
} late;

static void late_copy(void *to, const void *from, size_t bytes, Stream s) {
    CHECK(!late.to && s == STREAM_COPY, "two copies at once");
    late.to = to;
    late.from = from;
    late.bytes = bytes;
}

static void late_synchronize(Stream s) {
    (void)s;
    if (late.to) memcpy(late.to, late.from, late.bytes);
    late.to = NULL;
    if (++late.n_synchronized == late.dies_at) kill(getpid(), SIGKILL);
}

static const Ops late_ops = {
    .name = "late", .copy_in = late_copy, .copy_out = late_copy, .synchronize = late_synchronize};
static const Device device = {.ops = &late_ops};

/* ---- a small state ----------------------------------------------------------------------------------------------- */

enum { N_TENSORS = 8 };

typedef struct {
    StateTensor t[N_TENSORS];
    CheckpointInfo info;
} State;

static const struct {
    const char *name;
    Dtype dtype;
    int ndim;
    int64_t rows, cols;
} rows[N_TENSORS] = {
    {"model.norm.weight", DTYPE_F32, 1, 65, 1},
    {"model.embed_tokens.weight", DTYPE_F32, 2, 129, 33},
    {"model.layers.1.mlp.gate.e_score_correction_bias", DTYPE_F32, 1, 3, 1},
    {"lm_head.weight", DTYPE_F32, 2, 1, 1},
    {"adam.m.model.embed_tokens.weight", DTYPE_BF16, 2, 129, 33},
    {"adam.v.model.embed_tokens.weight", DTYPE_BF16, 2, 129, 33},
    {"adam.m.model.norm.weight", DTYPE_F32, 1, 65, 1},
    {"adam.v.model.norm.weight", DTYPE_BF16, 1, 65, 1},
};

#define CONFIG                                                                                                         \
    "{\"version\": 1, \"run\": {\"seed\": 18446744073709551615, \"name\": \"a \\\"b\\\"\"}, \"lr\": [3e-4, null, "     \
    "true]}"

/* Random bits (NaNs, denormals and all), other ones for another step. */
static State make_state(int64_t step) {
    State s;
    memset(&s, 0, sizeof s);
    for (int i = 0; i < N_TENSORS; i++) {
        StateTensor *t = &s.t[i];
        snprintf(t->name, sizeof t->name, "%s", rows[i].name);
        t->dtype = rows[i].dtype;
        t->ndim = rows[i].ndim;
        t->shape[0] = rows[i].rows;
        t->shape[1] = rows[i].ndim == 2 ? rows[i].cols : 0;
        t->extent = rows[i].rows * rows[i].cols;
        size_t bytes = (size_t)t->extent * dtype_size(t->dtype);
        t->data = malloc(bytes);
        for (size_t k = 0; k < bytes; k++)
            ((unsigned char *)t->data)[k] = (unsigned char)rng_bits((uint64_t)step, RNG_TEST, (uint64_t)i, k);
    }
    s.info.config_json = strdup(CONFIG);
    s.info.data_identity = 0xFEDCBA9876543210ull;
    s.info.param_hash = (uint64_t)step;
    RunState *r = &s.info.state;
    r->step = step;
    r->tokens = (1ll << 62) + step;
    r->samples = 9007199254740993; /* 2^53 + 1: no double holds it */
    r->update = (UpdateState){step > 3 ? step - 3 : 0, 3, 0, 0};
    r->best_val = INFINITY;
    r->best_step = step / 2;
    r->wall_s = 0.1 + 0.2;
    r->loss_z = (ZWindow){
        .size = 7, .n = 7, .head = 5, .value = {1.0 / 3, -0.0, 4.9e-324, 1.7976931348623157e308, 1e23, -5e-7}};
    r->norm_z = (ZWindow){.size = Z_WINDOW_MAX, .n = 2, .value = {0.1, M_PI}};
    r->pending = (PendingValues){1, 2.0 / 3, INFINITY};
    s.info.loads = loads_make(2, 3);
    for (int i = 0; i < 6; i++) s.info.loads.load[i] = (1ll << 53) - step * i;
    return s;
}

static void free_state(State *s) {
    for (int i = 0; i < N_TENSORS; i++) free(s->t[i].data);
    checkpoint_info_free(&s->info);
}

static void clear_state(State *s) {
    for (int i = 0; i < N_TENSORS; i++) memset(s->t[i].data, 0x5A, (size_t)s->t[i].extent * dtype_size(s->t[i].dtype));
    checkpoint_info_free(&s->info);
}

static void expect_same(const State *a, const State *b) {
    for (int i = 0; i < N_TENSORS; i++)
        EXPECT(memcmp(a->t[i].data, b->t[i].data, (size_t)a->t[i].extent * dtype_size(a->t[i].dtype)) == 0,
               "%s differs", a->t[i].name);
    EXPECT(memcmp(&a->info.state, &b->info.state, sizeof(RunState)) == 0, "the state differs");
    EXPECT(a->info.loads.n_layers == b->info.loads.n_layers && a->info.loads.n_experts == b->info.loads.n_experts &&
               memcmp(a->info.loads.load, b->info.loads.load, 6 * sizeof(int64_t)) == 0,
           "the experts' loads differ");
    EXPECT(a->info.data_identity == b->info.data_identity && a->info.param_hash == b->info.param_hash, "hashes differ");
}

static const char *run_dir(void) {
    static char dir[512];
    snprintf(dir, sizeof dir, "%s/run", test_tmp_dir());
    return dir;
}

static const char *in_run(const char *name) {
    static char path[4][1024];
    static int k;
    k = (k + 1) % 4;
    snprintf(path[k], sizeof path[k], "%s/%s", run_dir(), name);
    return path[k];
}

static void save_step(int64_t step) {
    State s = make_state(step);
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes;
    REQUIRE(checkpoint_save(run_dir(), &device, s.t, N_TENSORS, &s.info, CHECKPOINT_FILE_BYTES, path, &bytes, err) == 0,
            "%s", err);
    free_state(&s);
}

/* The newest checkpoint must be that of `step`, with its bits. */
static void expect_newest(int64_t step, const char *note_part) {
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN] = "";
    State got = make_state(step + 1), want = make_state(step);
    clear_state(&got);
    int result =
        checkpoint_load_newest(run_dir(), &device, got.t, N_TENSORS, CHECKPOINT_ALL, &got.info, path, note, err);
    EXPECT(result == 0, "load: %d %s", result, err);
    EXPECT(got.info.state.step == step, "step %lld was loaded", (long long)got.info.state.step);
    if (result == 0) expect_same(&got, &want);
    EXPECT(note_part ? strstr(note, note_part) != NULL : !note[0], "note: %s", note);
    free_state(&got);
    free_state(&want);
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

/* Replaces the manifest of a step by an edited text with a right hash. */
static void rewrite_manifest(const char *folder, const char *text, size_t size) {
    char path[2048];
    snprintf(path, sizeof path, "%s/manifest.json", folder);
    char *whole = (char *)malloc(size + MANIFEST_TAIL_LEN + 1);
    memcpy(whole, text, size);
    snprintf(whole + size, MANIFEST_TAIL_LEN + 1, MANIFEST_TAIL_FORMAT, (unsigned long long)hash_bytes(text, size, 0));
    FILE *f = fopen(path, "wb");
    REQUIRE(f && fwrite(whole, 1, size + MANIFEST_TAIL_LEN, f) == size + MANIFEST_TAIL_LEN, "%s", path);
    fclose(f);
    free(whole);
}

/* The text of a manifest up to its hash; malloc'd. */
static void read_manifest_body(const char *folder, char **text, size_t *size) {
    char path[2048], err[ERR_LEN];
    snprintf(path, sizeof path, "%s/manifest.json", folder);
    REQUIRE(file_read_all(text, size, path, 1 << 24, err) == 0, "%s", err);
    *size -= MANIFEST_TAIL_LEN;
    (*text)[*size] = 0;
}

/* ---- round trips ------------------------------------------------------------------------------------------------- */

TEST(checkpoint_round_trip) {
    const int64_t limits[] = {CHECKPOINT_FILE_BYTES, 20000, 4096, 1001};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        State want = make_state(1000), got = make_state(2);
        char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
        int64_t bytes = 0;
        clear_state(&got);
        REQUIRE(checkpoint_save(run_dir(), &device, want.t, N_TENSORS, &want.info, limits[i], path, &bytes, err) == 0,
                "%s", err);
        EXPECT(strcmp(path, in_run("step_00001000")) == 0, "%s", path);
        EXPECT(bytes > 0 && bytes < checkpoint_bytes(want.t, N_TENSORS), "%lld bytes, %lld estimated", (long long)bytes,
               (long long)checkpoint_bytes(want.t, N_TENSORS));
        EXPECT(path_exists(in_run("step_00001000/state_00000_001.safetensors")) == (limits[i] < CHECKPOINT_FILE_BYTES),
               "limit %lld", (long long)limits[i]);
        REQUIRE(checkpoint_load(path, &device, got.t, N_TENSORS, CHECKPOINT_ALL, &got.info, err) == 0, "%s", err);
        expect_same(&want, &got);
        free_state(&got);
        free_state(&want);
    }
    EXPECT(!path_exists(in_run("step_00001000.old")) && !path_exists(in_run("step_00001000.tmp")), "something is left");
}

TEST(checkpoint_bytes_on_disk) {
    State s = make_state(1);
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes, sum = 0;
    REQUIRE(checkpoint_save(run_dir(), &device, s.t, N_TENSORS, &s.info, 20000, path, &bytes, err) == 0, "%s", err);
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
    EXPECT_EQ(sum + file_size(in_run("step_00000001/manifest.json")), bytes);
    EXPECT(m.n_files > 1, "%lld files", (long long)m.n_files);
    manifest_free(&m);
    free_state(&s);
}

/* The slices of a tensor serve any rank's part of it. */
TEST(checkpoint_load_of_a_part) {
    State s = make_state(5);
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes;
    REQUIRE(checkpoint_save(run_dir(), &device, s.t, N_TENSORS, &s.info, 1000, path, &bytes, err) == 0, "%s", err);
    const int64_t parts[][2] = {{0, 4257}, {0, 1}, {4256, 1}, {249, 2}, {250, 250}, {100, 3000}, {4257, 0}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        StateTensor t = s.t[1];
        float part[4257 + 2];
        t.offset = parts[i][0];
        t.extent = parts[i][1];
        t.data = part + 1;
        part[0] = part[1 + t.extent] = 42;
        REQUIRE(checkpoint_load(path, &device, &t, 1, CHECKPOINT_WEIGHTS, NULL, err) == 0, "%s", err);
        EXPECT(memcmp(part + 1, (const float *)s.t[1].data + t.offset, (size_t)t.extent * 4) == 0, "part %zu", i);
        EXPECT(part[0] == 42 && part[1 + t.extent] == 42, "part %zu: written outside", i);
    }
    free_state(&s);
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
    REQUIRE(checkpoint_save(run_dir(), &device, &t, 1, &info, CHECKPOINT_FILE_BYTES, path, &saved, err) == 0, "%s",
            err);
    t.data = got;
    REQUIRE(checkpoint_load(path, &device, &t, 1, CHECKPOINT_ALL, NULL, err) == 0, "%s", err);
    EXPECT(memcmp(want, got, bytes) == 0, "bits differ");
    t.offset = t.extent - 5; /* a part that the first block does not touch */
    t.extent = 5;
    memset(got, 0, bytes);
    REQUIRE(checkpoint_load(path, &device, &t, 1, CHECKPOINT_ALL, NULL, err) == 0, "%s", err);
    EXPECT(memcmp(want + t.offset, got, 20) == 0 && got[5] == 0, "the last elements differ");
    flip_byte(in_run("step_00000001/state_00000.safetensors"), (int64_t)bytes);
    EXPECT_EQ(checkpoint_load(path, &device, &t, 1, CHECKPOINT_ALL, NULL, err), CHECKPOINT_DAMAGED);
    EXPECT(strstr(err, "state_00000.safetensors: w: hash"), "%s", err);
    checkpoint_info_free(&info);
    free(want);
    free(got);
}

TEST(checkpoint_keeps_config_and_numbers) {
    State s = make_state(7);
    CheckpointInfo info;
    char err[ERR_LEN] = "", hint[ERR_LEN];
    s.info.state.best_val = -INFINITY;
    s.info.state.loss_z = (ZWindow){0};
    char path[CHECKPOINT_PATH_LEN];
    int64_t bytes;
    REQUIRE(checkpoint_save(run_dir(), &device, s.t, N_TENSORS, &s.info, CHECKPOINT_FILE_BYTES, path, &bytes, err) == 0,
            "%s", err);
    REQUIRE(checkpoint_peek(path, &info, err) == 0, "%s", err);
    EXPECT(memcmp(&info.state, &s.info.state, sizeof info.state) == 0, "the state differs");
    EXPECT(strcmp(info.config_json, CONFIG) == 0, "%s", info.config_json);
    cJSON *config = json_parse(info.config_json, strlen(info.config_json), "config", err, hint, NULL);
    EXPECT(config, "%s", err);
    cJSON_Delete(config);
    checkpoint_info_free(&info);
    free_state(&s);
}

/* ---- interrupted and damaged ------------------------------------------------------------------------------------- */

/* kill -9 at every block of a save, with one older checkpoint to keep (G1, G2). */
TEST(checkpoint_killed_while_saving) {
    save_step(100);
    int killed = 0;
    for (int block = 1; block < 100; block++) {
        pid_t pid = fork();
        REQUIRE(pid >= 0, "fork");
        if (pid == 0) {
            late.n_synchronized = 0;
            late.dies_at = block;
            save_step(200);
            _exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        if (!WIFSIGNALED(status)) break;
        killed++;
        EXPECT(path_exists(in_run("step_00000200.tmp")), "no unfinished folder");
        expect_newest(100, "step_00000200.tmp: an unfinished save");
    }
    EXPECT(killed == N_TENSORS, "killed %d times", killed);
    EXPECT(!path_exists(in_run("step_00000200.tmp")), "the unfinished folder is still there");
    expect_newest(200, NULL);
}

TEST(checkpoint_unfinished_folder_is_removed) {
    char err[ERR_LEN];
    REQUIRE(dir_make(in_run("step_00000050.tmp"), err) == 0, "%s", err);
    REQUIRE(dir_make(in_run("step_00000060.tmp"), err) == 0, "%s", err);
    REQUIRE(dir_make(in_run("step_00000040.old"), err) == 0, "%s", err);
    REQUIRE(file_write_durable(in_run("step_00000050.tmp/state_00000.safetensors"), "half", 4, err) == 0, "%s", err);
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN];
    EXPECT_EQ(checkpoint_find(run_dir(), -1, path, note, err), 1);
    EXPECT(strstr(note, "step_00000050.tmp: an unfinished save"), "%s", note);
    save_step(60);
    EXPECT(!path_exists(in_run("step_00000050.tmp")) && !path_exists(in_run("step_00000060.tmp")),
           "unfinished ones stay");
    EXPECT(!path_exists(in_run("step_00000040.old")), "what a save replaced stays");
    expect_newest(60, NULL);
}

static void damage(const char *what) {
    char err[ERR_LEN];
    const char *state = in_run("step_00000200/state_00000.safetensors"),
               *manifest = in_run("step_00000200/manifest.json");
    if (strcmp(what, "one byte short") == 0) REQUIRE(truncate(state, file_size(state) - 1) == 0, "truncate");
    if (strcmp(what, "no tensors") == 0) REQUIRE(unlink(state) == 0, "unlink");
    if (strcmp(what, "no manifest") == 0) REQUIRE(unlink(manifest) == 0, "unlink");
    if (strcmp(what, "short manifest") == 0) REQUIRE(truncate(manifest, file_size(manifest) - 1) == 0, "truncate");
    if (strcmp(what, "empty manifest") == 0) REQUIRE(truncate(manifest, 0) == 0, "truncate");
    if (strcmp(what, "flipped tensor") == 0) flip_byte(state, file_size(state) - 1);
    if (strcmp(what, "flipped header") == 0) flip_byte(state, 10);
    if (strcmp(what, "flipped manifest") == 0) flip_byte(manifest, 40);
    if (strcmp(what, "a file") == 0)
        REQUIRE(dir_remove(in_run("step_00000200"), err) == 0 &&
                    file_write_durable(in_run("step_00000200"), "x", 1, err) == 0,
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
        save_step(100);
        save_step(200);
        damage(cases[i].what);
        REQUIRE(checkpoint_find(run_dir(), -1, path, note, err) == 0, "%s: %s", cases[i].what, err);
        EXPECT(strcmp(path, in_run(cases[i].found ? "step_00000200" : "step_00000100")) == 0, "%s: %s", cases[i].what,
               path);
        expect_newest(100, cases[i].part);
        EXPECT_EQ(checkpoint_find(run_dir(), 200, path, note, err), cases[i].found ? 0 : -1);
        if (!cases[i].found) EXPECT(strstr(err, cases[i].part), "%s: %s", cases[i].what, err);

        State s = make_state(1);
        EXPECT(checkpoint_load(in_run("step_00000200"), &device, s.t, N_TENSORS, CHECKPOINT_ALL, NULL, err) ==
                   CHECKPOINT_DAMAGED,
               "%s: loaded", cases[i].what);
        EXPECT(strstr(err, cases[i].part), "%s: %s", cases[i].what, err);
        free_state(&s);

        save_step(200); /* a run that went on from 100 gets there again */
        expect_newest(200, NULL);
        REQUIRE(dir_remove(run_dir(), err) == 0, "%s", err);
    }
}

TEST(checkpoint_all_damaged) {
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN];
    State s = make_state(1);
    save_step(100);
    save_step(200);
    REQUIRE(unlink(in_run("step_00000100/state_00000.safetensors")) == 0, "unlink");
    flip_byte(in_run("step_00000200/state_00000.safetensors"), 3000);
    EXPECT_EQ(checkpoint_load_newest(run_dir(), &device, s.t, N_TENSORS, CHECKPOINT_ALL, NULL, path, note, err), -1);
    EXPECT(strstr(err, "every checkpoint is damaged: step_00000200/state_00000.safetensors: ") &&
               strstr(err, "; step_00000100/state_00000.safetensors: is missing"),
           "%s", err);
    REQUIRE(unlink(in_run("step_00000200/manifest.json")) == 0, "unlink");
    EXPECT_EQ(checkpoint_find(run_dir(), -1, path, note, err), -1);
    EXPECT(strstr(err, "every checkpoint is damaged: step_00000200: "), "%s", err);
    free_state(&s);
}

/* A disk that fills up (G16): the older checkpoint stays, the unfinished one goes. */
TEST(checkpoint_save_fails) {
    State s = make_state(200);
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes;
    save_step(100);
    signal(SIGXFSZ, SIG_IGN);
    for (rlim_t limit = 1000; limit <= 100000; limit *= 10) {
        const struct rlimit file_bytes = {limit, RLIM_INFINITY};
        REQUIRE(setrlimit(RLIMIT_FSIZE, &file_bytes) == 0, "no limit");
        int result =
            checkpoint_save(run_dir(), &device, s.t, N_TENSORS, &s.info, CHECKPOINT_FILE_BYTES, path, &bytes, err);
        EXPECT_EQ(result, limit < 100000 ? -1 : 0);
        if (result == 0) continue;
        EXPECT(strstr(err, "step_00000200.tmp/state_00000.safetensors: cannot write: File too large"), "%s", err);
        EXPECT(!path_exists(in_run("step_00000200.tmp")), "the unfinished folder is still there");
        expect_newest(100, NULL);
    }
    expect_newest(200, NULL);
    free_state(&s);
}

/* ---- finding ----------------------------------------------------------------------------------------------------- */

TEST(checkpoint_find_by_number) {
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN];
    EXPECT_EQ(checkpoint_find(run_dir(), -1, path, note, err), 1);
    EXPECT_EQ(checkpoint_find(run_dir(), 5, path, note, err), -1);
    EXPECT(strstr(err, "no checkpoint of step 5; there is none at all"), "%s", err);
    save_step(9900);
    save_step(900);
    save_step(123456789);
    save_step(10000);
    REQUIRE(dir_make(in_run("step_999999999x"), err) == 0, "%s", err);
    REQUIRE(dir_make(in_run("step_0099999999"), err) == 0, "%s", err);
    REQUIRE(dir_make(in_run("step_-0000001"), err) == 0, "%s", err);
    expect_newest(123456789, NULL);
    REQUIRE(checkpoint_find(run_dir(), 9900, path, note, err) == 0, "%s", err);
    EXPECT(strcmp(path, in_run("step_00009900")) == 0, "%s", path);
    EXPECT_EQ(checkpoint_find(run_dir(), 901, path, note, err), -1);
    EXPECT(strstr(err, "no checkpoint of step 901; there are 123456789, 10000, 9900, 900"), "%s", err);
    REQUIRE(rename(in_run("step_00000900"), in_run("step_200000000")) == 0, "rename");
    expect_newest(123456789, "step_200000000: holds step 900");
}

/* What a user may name instead of a checkpoint (G17). */
TEST(checkpoint_load_of_what_is_none) {
    State s = make_state(1);
    CheckpointInfo info;
    char err[ERR_LEN];
    save_step(100);
    EXPECT_EQ(checkpoint_load(in_run("step_00000099"), &device, s.t, N_TENSORS, CHECKPOINT_ALL, NULL, err), -1);
    EXPECT(strstr(err, "step_00000099: there is no such checkpoint"), "%s", err);
    REQUIRE(dir_make(in_run("empty"), err) == 0, "%s", err);
    EXPECT(checkpoint_load(in_run("empty"), &device, s.t, N_TENSORS, CHECKPOINT_ALL, NULL, err) != 0, "empty");
    EXPECT(strstr(err, "empty: not a whole checkpoint: it holds no manifest.json"), "%s", err);
    EXPECT(checkpoint_peek(run_dir(), &info, err) != 0 && !info.config_json, "the run's folder");
    EXPECT(checkpoint_load(in_run("step_00000100/manifest.json"), &device, s.t, 1, CHECKPOINT_ALL, NULL, err) != 0,
           "file");
    free_state(&s);
}

TEST(checkpoint_of_a_newer_format) {
    char path[CHECKPOINT_PATH_LEN], note[ERR_LEN], err[ERR_LEN];
    const char *newer = "{\"format\": 2, \"parts\": []}\n";
    State s = make_state(1);
    save_step(100);
    save_step(200);
    REQUIRE(file_write_durable(in_run("step_00000200/manifest.json"), newer, strlen(newer), err) == 0, "%s", err);
    EXPECT_EQ(checkpoint_find(run_dir(), -1, path, note, err), -1);
    EXPECT(strstr(err, "step_00000200/manifest.json: written by a newer train_moe, format 2"), "%s", err);
    EXPECT_EQ(checkpoint_load_newest(run_dir(), &device, s.t, N_TENSORS, CHECKPOINT_ALL, NULL, path, note, err), -1);
    EXPECT(strstr(err, "newer train_moe"), "%s", err);
    free_state(&s);
}

/* ---- what does not fit ------------------------------------------------------------------------------------------- */

TEST(checkpoint_that_does_not_fit) {
    State s = make_state(1);
    char err[ERR_LEN], path[CHECKPOINT_PATH_LEN], note[ERR_LEN];
    save_step(100);
    snprintf(path, sizeof path, "%s", in_run("step_00000100"));
    for (int i = 0; i < 5; i++) {
        StateTensor t[N_TENSORS];
        int n = N_TENSORS;
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
        EXPECT_EQ(checkpoint_load(path, &device, t, n, CHECKPOINT_ALL, NULL, err), -1);
        EXPECT(strstr(err, parts[i]), "%s", err);
        EXPECT_EQ(checkpoint_load_newest(run_dir(), &device, t, n, CHECKPOINT_ALL, NULL, path, note, err), -1);
        EXPECT(strstr(err, parts[i]), "%s", err);
    }
    free_state(&s);
}

TEST(checkpoint_weights_only) {
    State saved = make_state(100), s = make_state(1), untouched = make_state(1);
    char err[ERR_LEN] = "";
    save_step(100);
    s.t[6].dtype = DTYPE_BF16; /* moments may differ: they are not asked for */
    REQUIRE(checkpoint_load(in_run("step_00000100"), &device, s.t, N_TENSORS, CHECKPOINT_WEIGHTS, NULL, err) == 0, "%s",
            err);
    for (int i = 0; i < N_TENSORS; i++) {
        const State *want = strncmp(s.t[i].name, "adam.", 5) == 0 ? &untouched : &saved;
        EXPECT(memcmp(s.t[i].data, want->t[i].data, (size_t)want->t[i].extent * dtype_size(want->t[i].dtype)) == 0,
               "%s", s.t[i].name);
    }
    REQUIRE(checkpoint_load(in_run("step_00000100"), &device, s.t + 1, 3, CHECKPOINT_WEIGHTS, NULL, err) == 0, "%s",
            err);
    strcpy(s.t[0].name, "model.norm2.weight");
    EXPECT_EQ(checkpoint_load(in_run("step_00000100"), &device, s.t, N_TENSORS, CHECKPOINT_WEIGHTS, NULL, err), -1);
    EXPECT(strstr(err, "model.norm2.weight is not in this checkpoint"), "%s", err);
    free_state(&saved);
    free_state(&s);
    free_state(&untouched);
}

/* ---- history ----------------------------------------------------------------------------------------------------- */

/* The steps in the run's folder, as text. */
static const char *steps_there(const int64_t *steps, int n) {
    static char text[256];
    text[0] = 0;
    for (int i = 0; i < n; i++) {
        char name[40];
        snprintf(name, sizeof name, "step_%08lld", (long long)steps[i]);
        if (path_exists(in_run(name))) snprintf(text + strlen(text), 32, " %lld", (long long)steps[i]);
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
        for (int k = 0; k < 5; k++) save_step(steps[k]);
        const CheckpointKeep keep = {cases[i].keep_last, cases[i].every, cases[i].saved, cases[i].best};
        EXPECT(checkpoint_prune(run_dir(), &keep, err) == 0, "%s", err);
        EXPECT(strcmp(steps_there(steps, 5), cases[i].left) == 0, "case %zu: left%s", i, steps_there(steps, 5));
        REQUIRE(dir_remove(run_dir(), err) == 0, "%s", err);
    }
    EXPECT_EQ(checkpoint_prune(run_dir(), &(CheckpointKeep){.last = 1, .saved_step = 1}, err), 0);
}

/* A damaged checkpoint does not count as one that is kept. */
TEST(checkpoint_prune_counts_whole_ones) {
    const int64_t steps[] = {100, 200, 300, 400};
    char err[ERR_LEN] = "";
    for (int k = 0; k < 4; k++) save_step(steps[k]);
    REQUIRE(unlink(in_run("step_00000300/manifest.json")) == 0, "unlink");
    EXPECT(checkpoint_prune(run_dir(), &(CheckpointKeep){.last = 2, .saved_step = 400}, err) == 0, "%s", err);
    EXPECT(strcmp(steps_there(steps, 4), " 200 300 400") == 0, "left%s", steps_there(steps, 4));
}

TEST(checkpoint_set_aside) {
    const int64_t steps[] = {100, 200, 300};
    char note[ERR_LEN], err[ERR_LEN] = "";
    for (int round = 0; round < 2; round++) {
        for (int k = 0; k < 3; k++) save_step(steps[k]);
        EXPECT(checkpoint_set_aside_after(run_dir(), 100, note, err) == 0, "%s", err);
        EXPECT(strcmp(note, "step_00000300; step_00000200") == 0, "%s", note);
        expect_newest(100, NULL);
    }
    EXPECT(path_exists(in_run("step_00000300.aside/manifest.json")), "not there");
    EXPECT(path_exists(in_run("step_00000300.aside2/manifest.json")), "not there");
    EXPECT(checkpoint_set_aside_after(run_dir(), 100, note, err) == 0 && !note[0], "%s", note);
    EXPECT(checkpoint_prune(run_dir(), &(CheckpointKeep){.last = 1, .saved_step = 100}, err) == 0, "%s", err);
    EXPECT(path_exists(in_run("step_00000200.aside/manifest.json")), "pruned");
}

TEST(checkpoint_room_on_disk) {
    char path[1024], err[ERR_LEN] = "";
    EXPECT(checkpoint_can_write(in_run("a/b"), 1 << 20, err) == 0, "%s", err);
    EXPECT(path_exists(in_run("a/b")), "the folder was not made");
    EXPECT_EQ(rmdir(in_run("a/b")), 0); /* and nothing is left in it */
    EXPECT_EQ(checkpoint_can_write(run_dir(), INT64_MAX, err), -1);
    EXPECT(strstr(err, " free, a checkpoint needs 8589934592.0 GiB"), "%s", err);
    REQUIRE(file_write_durable(in_run("plain"), "x", 1, err) == 0, "%s", err);
    snprintf(path, sizeof path, "%s/below", in_run("plain"));
    EXPECT_EQ(checkpoint_can_write(path, 1, err), -1);
    EXPECT(strstr(err, "plain"), "%s", err);
    State s = make_state(1);
    int64_t bytes;
    EXPECT_EQ(
        checkpoint_save(in_run("plain"), &device, s.t, N_TENSORS, &s.info, CHECKPOINT_FILE_BYTES, path, &bytes, err),
        -1);
    EXPECT(strstr(err, "plain"), "%s", err);
    free_state(&s);
}

/* ---- manifests --------------------------------------------------------------------------------------------------- */

/* One edit of a good manifest, hashed again, and what the refusal must say. */
/* What computed it comes back as it was given, or not at all. */
TEST(checkpoint_device_and_gemms) {
    static const char *const gemms[] = {NULL, "", "a row\n", "one \"row\"\nanother\n"};
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes;
    for (int i = 0; i < 4; i++) {
        State s = make_state(100);
        CheckpointInfo info;
        s.info.device = i ? strdup("sm_90, 132 SMs, cuBLASLt 13.1.0") : NULL;
        s.info.gemms = gemms[i] ? strdup(gemms[i]) : NULL;
        REQUIRE(
            checkpoint_save(run_dir(), &device, s.t, N_TENSORS, &s.info, CHECKPOINT_FILE_BYTES, path, &bytes, err) == 0,
            "%s", err);
        REQUIRE(checkpoint_peek(path, &info, err) == 0, "%s", err);
        EXPECT(i ? info.device && strcmp(info.device, s.info.device) == 0 : !info.device, "case %d: %s", i,
               info.device ? info.device : "none");
        EXPECT(gemms[i] ? info.gemms && strcmp(info.gemms, gemms[i]) == 0 : !info.gemms, "case %d: %s", i,
               info.gemms ? info.gemms : "none");
        checkpoint_info_free(&info);
        free_state(&s);
    }
}

TEST(checkpoint_malformed_manifests) {
    static const struct {
        const char *from, *to, *part;
    } edits[] = {
        {"\"format\": 1", "\"format\": 0", "\"format\" 0, there is none"},
        {"\"format\": 1", "\"format\": \"1\"", "\"format\" must be an integer"},
        {"\"step\": 100", "\"step\": -1", "\"step\" must be an integer from 0"},
        {"\"step\": 100", "\"step\": 1.5", "\"step\" must be"},
        {"\"step\": 100", "\"stop\": 100", "\"step\" is missing"},
        {"\"tokens\": ", "\"tokens\": 9", "\"tokens\" must be an integer from 0 to 9223372036854775807"},
        {"\"samples\": ", "\"samples\": -1, \"x\": ", "\"samples\" must be an integer from 0"},
        {"\"best_val\": \"inf\"", "\"best_val\": \"Inf\"", "a number is expected"},
        {"\"best_val\": \"inf\"", "\"best_val\": 1e999", "a number is expected"},
        {"\"best_val\": \"inf\"", "\"best_val\": null", "a number is expected"},
        {"\"size\": 7", "\"size\": 1025", "\"size\" must be an integer from 0 to 1024"},
        {"\"size\": 7", "\"size\": 8", "\"value\" must hold 8 numbers"},
        {"\"n\": 7", "\"n\": 8", "\"n\" must be an integer from 0 to 7"},
        {"\"head\": 5", "\"head\": 7", "\"head\" must be an integer from 0 to 6"},
        {"\"pending\": 1", "\"pending\": 1.5", "\"pending\" must be an integer"},
        {"\"pending_norm\": \"inf\"", "\"pending_norm\": true", "a number is expected"},
        {"\"value\": [", "\"value\": [0, ", "\"value\" must hold 7 numbers"},
        {"\"config\": {", "\"config\": 1, \"x\": {", "\"config\" must be an object"},
        {"\"param_hash\": \"0", "\"param_hash\": \"G", "16 hexadecimal digits"},
        {"\"param_hash\": \"0", "\"param_hash\": \"", "16 hexadecimal digits"},
        {"\"files\": {", "\"files\": {\"../x\": 1, ", "\"../x\" is no name of a file in this folder"},
        {"\"files\": {", "\"files\": {\"/etc/x\": 1, ", "no name of a file"},
        {"\"files\": {", "\"files\": {\"\": 1, ", "no name of a file"},
        {"\"files\": {", "\"files\": {\"..\": 1, ", "no name of a file"},
        {"\"files\": {", "\"files\": {\"x\": -1, ", "the size of x must be a count"},
        {"\"tensors\": {", "\"tensors\": {\"x\": 1, ", "x: must be an object"},
        {"\"tensors\": {", "\"tensors\": {\"x\": {\"dtype\": \"F32\", \"shape\": [1], \"slices\": []}, ",
         "x: its slices end at 0 of 1"},
        {"\"tensors\": {", "\"tensors\": {\"x\": {\"dtype\": \"F33\", \"shape\": [1], \"slices\": []}, ",
         "x: unknown dtype"},
        {"\"tensors\": {", "\"tensors\": {\"x\": {\"dtype\": \"F32\", \"shape\": [1, 1, 1], \"slices\": []}, ",
         "x: more than 2 dimensions"},
        {"\"tensors\": {",
         "\"tensors\": {\"x\": {\"dtype\": \"F32\", \"shape\": [4294967296, 4294967296], \"slices\": []}, ",
         "x: no usable shape"},
        {"\"tensors\": {",
         "\"tensors\": {\"//\": {\"dtype\": \"F32\", \"shape\": [0], \"slices\": []}, "
         "\"//\": {\"dtype\": \"F32\", \"shape\": [0], \"slices\": []}, ",
         "//: given twice"},
        {"\"offset\": 0, \"extent\": 4257", "\"offset\": 1, \"extent\": 4256", "its slices do not cover it once"},
        {"\"offset\": 0, \"extent\": 4257", "\"offset\": 0, \"extent\": 4258", "its slices do not cover it once"},
        {"\"offset\": 0, \"extent\": 4257", "\"offset\": 0, \"extent\": 4256", "its slices end at 4256 of 4257"},
        {"\"offset\": 0, \"extent\": 4257", "\"offset\": 0, \"extent\": 0", "its slices do not cover it once"},
        {"\"config\": {", "\"device\": 1, \"config\": {", "\"device\" must be a string"},
        {"\"config\": {", "\"gemms\": {}, \"config\": {", "\"gemms\" must be a list"},
        {"\"config\": {", "\"gemms\": [\"\", 1], \"config\": {", "\"gemms\" must hold strings"},
        {"\"expert_load\": [", "\"expert_load\": 1, \"x\": [", "must hold lists of numbers"},
        {"\"expert_load\": [", "\"expert_load\": [1, ", "must hold lists of numbers"},
        {"\"expert_load\": [", "\"expert_load\": [[1, 2], ", "must hold lists of 2 numbers"},
        {"\"expert_load\": [\n    [", "\"expert_load\": [[-1, 2, 3], [",
         "must be an integer from 0 to 9007199254740992"},
        {"\"expert_load\": [\n    [", "\"expert_load\": [[9007199254740993, 2, 3], [",
         "must be an integer from 0 to 9"},
        {"\"expert_load\": [\n    [", "\"expert_load\": [[0.5, 2, 3], [",
         "must be an integer from 0 to 9007199254740992"},
        {"\"file\": \"state", "\"file\": \"stale", "is not one of \"files\""},
        {"\"slices\": [{", "\"slices\": [1, {", "a slice must be an object"},
        {"\"slices\": [", "\"slices\": 1, \"x\": [", "\"slices\" must be a list"},
        {"\"dtype\": \"F32\"", "\"dtype\": \"F32\", \"dtype\": \"F32\"", "key \"dtype\" is given twice"},
        {"}", "", "the text ends inside the object"},
    };
    char err[ERR_LEN], folder[1024];
    CheckpointInfo info;
    size_t size;
    save_step(100);
    snprintf(folder, sizeof folder, "%s", in_run("step_00000100"));
    char *body;
    read_manifest_body(folder, &body, &size);
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        char *edited = (char *)malloc(size + 200), *at = strstr(body, edits[i].from);
        REQUIRE(at, "the manifest has no %s", edits[i].from);
        int n = sprintf(edited, "%.*s%s%s", (int)(at - body), body, edits[i].to, at + strlen(edits[i].from));
        rewrite_manifest(folder, edited, (size_t)n);
        err[0] = 0;
        EXPECT(checkpoint_peek(folder, &info, err) == CHECKPOINT_DAMAGED, "accepted: %s", edits[i].to);
        EXPECT(strstr(err, edits[i].part) && strstr(err, "manifest.json"), "%s: %s", edits[i].to, err);
        free(edited);
    }
    rewrite_manifest(folder, body, size);
    EXPECT(checkpoint_peek(folder, &info, err) == 0, "the unedited text: %s", err);
    checkpoint_info_free(&info);
    free(body);
}

/* Checkpoints from before there were loads load, and nothing is known then. */
TEST(checkpoint_without_loads) {
    char err[ERR_LEN], folder[1024], *body;
    CheckpointInfo info;
    size_t size;
    save_step(100);
    snprintf(folder, sizeof folder, "%s", in_run("step_00000100"));
    read_manifest_body(folder, &body, &size);
    char *first = strstr(body, "\"expert_load\""), *end = first ? strstr(first, "\"config\"") : NULL;
    REQUIRE(end, "nothing to take away");
    memset(first, ' ', (size_t)(end - first));
    rewrite_manifest(folder, body, size);
    REQUIRE(checkpoint_peek(folder, &info, err) == 0, "%s", err);
    EXPECT(info.loads.n_layers == 0 && !loads_are_known(&info.loads, 2, 3), "%d layers", info.loads.n_layers);
    checkpoint_info_free(&info);
    free(body);
}

/* Checkpoints from before RunState had pending values load, and nothing waits then. */
TEST(checkpoint_without_pending_values) {
    char err[ERR_LEN], folder[1024], *body;
    CheckpointInfo info;
    size_t size;
    save_step(100);
    snprintf(folder, sizeof folder, "%s", in_run("step_00000100"));
    read_manifest_body(folder, &body, &size);
    REQUIRE(checkpoint_peek(folder, &info, err) == 0, "%s", err);
    const RunState saved = info.state;
    checkpoint_info_free(&info);
    char *first = strstr(body, ",\n    \"pending\""), *end = first ? strstr(first, "\n  }") : NULL; /* the last ones */
    REQUIRE(end, "nothing to take away");
    memset(first, ' ', (size_t)(end - first));
    rewrite_manifest(folder, body, size);
    REQUIRE(checkpoint_peek(folder, &info, err) == 0, "%s", err);
    EXPECT(!info.state.pending.is_set && info.state.pending.loss == 0 && info.state.pending.norm == 0);
    info.state.pending = saved.pending;
    EXPECT(saved.pending.is_set && memcmp(&info.state, &saved, sizeof saved) == 0, "the rest of the state differs");
    checkpoint_info_free(&info);
    free(body);
}

/* Damage behind a right hash: whatever is accepted loads or is refused, without touching memory it should not. */
TEST(checkpoint_random_manifests) {
    char err[ERR_LEN], folder[1024];
    size_t size;
    int loaded = 0, refused = 0;
    State s = make_state(1);
    save_step(100);
    snprintf(folder, sizeof folder, "%s", in_run("step_00000100"));
    char *body;
    read_manifest_body(folder, &body, &size);
    char *mutant = (char *)malloc(size);
    size_t tensors_at = (size_t)(strstr(body, "\"config\"") - body);
    for (uint64_t trial = 0; trial < 500; trial++) {
        memcpy(mutant, body, size);
        int n_changes = 1 + (int)(rng_bits(1, RNG_TEST, trial, 0) % 3);
        for (int k = 0; k < n_changes; k++) {
            /* Half of the changes in what follows the long lists of numbers. */
            uint64_t at = rng_bits(2, RNG_TEST, trial, (uint64_t)k), how = rng_bits(3, RNG_TEST, trial, (uint64_t)k);
            at = at % 2 ? tensors_at + (at >> 1) % (size - tensors_at) : (at >> 1) % size;
            const char *likely = "0123456789[]{}\",:- ";
            mutant[at] = how % 2 ? likely[(how >> 8) % strlen(likely)] : (char)(mutant[at] ^ (1 << (how >> 8) % 8));
        }
        rewrite_manifest(folder, mutant, size);
        CheckpointInfo info;
        err[0] = 0;
        int result = checkpoint_load(folder, &device, s.t, N_TENSORS, CHECKPOINT_ALL, &info, err);
        EXPECT(result == 0 || err[0], "refused without a word");
        *(result == 0 ? &loaded : &refused) += 1;
        checkpoint_info_free(&info);
    }
    EXPECT(refused > 200 && loaded > 0, "%d refused, %d loaded", refused, loaded);
    free(mutant);
    free(body);
    free_state(&s);
}
