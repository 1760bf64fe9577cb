/* See checkpoint_test.h. */
#include "checkpoint_test.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/file.h"
#include "kernels/base/rng.h"
#include "model/train/manifest_state.h"
#include "tests/test.h"

/* ---- a device that is late --------------------------------------------------------------------------------------- */

static struct {
    void *to;
    const void *from;
    size_t bytes;
    int n_left; /* synchronisations until the process is killed; 0: never */
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
    if (late.n_left > 0 && --late.n_left == 0) kill(getpid(), SIGKILL);
}

static const Ops late_ops = {
    .name = "late", .copy_in = late_copy, .copy_out = late_copy, .synchronize = late_synchronize};
const Device late_device = {.ops = &late_ops};

void late_dies_after(int n_synchronizations) {
    late.n_left = n_synchronizations;
}

/* ---- a small state ----------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    Dtype dtype;
    int ndim;
    int64_t rows, cols;
} rows[SAVED_TENSORS] = {
    {"model.norm.weight", DTYPE_F32, 1, 65, 1},
    {"model.embed_tokens.weight", DTYPE_F32, 2, 129, 33},
    {"model.layers.1.mlp.gate.e_score_correction_bias", DTYPE_F32, 1, 3, 1},
    {"lm_head.weight", DTYPE_F32, 2, 1, 1},
    {"adam.m.model.embed_tokens.weight", DTYPE_BF16, 2, 129, 33},
    {"adam.v.model.embed_tokens.weight", DTYPE_BF16, 2, 129, 33},
    {"adam.m.model.norm.weight", DTYPE_F32, 1, 65, 1},
    {"adam.v.model.norm.weight", DTYPE_BF16, 1, 65, 1},
};

SavedState saved_make(int64_t step) {
    SavedState s;
    memset(&s, 0, sizeof s);
    for (int i = 0; i < SAVED_TENSORS; i++) {
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
    s.info.config_json = strdup(SAVED_CONFIG);
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

void saved_free(SavedState *s) {
    for (int i = 0; i < SAVED_TENSORS; i++) free(s->t[i].data);
    checkpoint_info_free(&s->info);
}

void saved_clear(SavedState *s) {
    for (int i = 0; i < SAVED_TENSORS; i++)
        memset(s->t[i].data, 0x5A, (size_t)s->t[i].extent * dtype_size(s->t[i].dtype));
    checkpoint_info_free(&s->info);
}

void saved_expect_same(const SavedState *a, const SavedState *b) {
    for (int i = 0; i < SAVED_TENSORS; i++)
        EXPECT(memcmp(a->t[i].data, b->t[i].data, (size_t)a->t[i].extent * dtype_size(a->t[i].dtype)) == 0,
               "%s differs", a->t[i].name);
    EXPECT(memcmp(&a->info.state, &b->info.state, sizeof(RunState)) == 0, "the state differs");
    EXPECT(a->info.loads.n_layers == b->info.loads.n_layers && a->info.loads.n_experts == b->info.loads.n_experts &&
               memcmp(a->info.loads.load, b->info.loads.load, 6 * sizeof(int64_t)) == 0,
           "the experts' loads differ");
    EXPECT(a->info.data_identity == b->info.data_identity && a->info.param_hash == b->info.param_hash, "hashes differ");
}

const char *saved_run_dir(void) {
    static char dir[512];
    snprintf(dir, sizeof dir, "%s/run", test_tmp_dir());
    return dir;
}

const char *saved_in_run(const char *name) {
    static char path[4][1024];
    static int k;
    k = (k + 1) % 4;
    snprintf(path[k], sizeof path[k], "%s/%s", saved_run_dir(), name);
    return path[k];
}

void saved_step(int64_t step) {
    SavedState s = saved_make(step);
    char path[CHECKPOINT_PATH_LEN], err[ERR_LEN] = "";
    int64_t bytes;
    REQUIRE(checkpoint_save(saved_run_dir(), &late_device, s.t, SAVED_TENSORS, &s.info, CHECKPOINT_FILE_BYTES, path,
                            &bytes, err) == 0,
            "%s", err);
    saved_free(&s);
}

void saved_rewrite_manifest(const char *folder, const char *text, size_t size) {
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

void saved_read_manifest(const char *folder, char **text, size_t *size) {
    char path[2048], err[ERR_LEN];
    snprintf(path, sizeof path, "%s/manifest.json", folder);
    REQUIRE(file_read_all(text, size, path, 1 << 24, err) == 0, "%s", err);
    *size -= MANIFEST_TAIL_LEN;
    (*text)[*size] = 0;
}
