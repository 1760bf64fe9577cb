#include "hf_test.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/file.h"
#include "kernels/base/small_floats.h"

int hf_read_master(void *arg, const NamedTensor *t, float *out, char *err) {
    const Params *p = (const Params *)arg;
    (void)err;
    memcpy(out, (const float *)p->master.data + t->offset, (size_t)t->numel * sizeof *out);
    return 0;
}

HfExport hf_export_of(Fixture *f, HfDtype dtype, int64_t shard_bytes_max) {
    return (HfExport){.config = &f->config,
                      .params = &f->model.params,
                      .dtype = dtype,
                      .shard_bytes_max = shard_bytes_max,
                      .read = hf_read_master,
                      .arg = &f->model.params};
}

/* "tmp/name" of this test; a static buffer each for a few names. */
const char *hf_folder_of(const char *name) {
    static char paths[8][PATH_MAX];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, PATH_MAX, "%s/%s", test_tmp_dir(), name);
    return path;
}

const char *hf_file_in(const char *folder, const char *name) {
    static char paths[4][PATH_MAX];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, PATH_MAX, "%s/%s", folder, name);
    return path;
}

HfReport hf_export_to(Fixture *f, const char *out, HfDtype dtype, int64_t shard_bytes_max) {
    char err[ERR_LEN], hint[ERR_LEN];
    HfReport report;
    const HfExport x = hf_export_of(f, dtype, shard_bytes_max);
    REQUIRE(hf_export(&x, out, &report, err, hint) == 0, "%s", err);
    return report;
}

cJSON *hf_json_of(const char *folder, const char *name) {
    char err[ERR_LEN] = "", hint[ERR_LEN];
    cJSON *root = json_load(hf_file_in(folder, name), 1 << 24, err, hint);
    REQUIRE(root, "%s", err);
    return root;
}

/* What the master becomes in a file. */
float hf_stored(float x, const NamedTensor *t, HfDtype dtype) {
    return dtype == HF_FP32 || t->weight == WEIGHT_ROUTER_BIAS ? x : float_from_bf16(bf16_from_float(x));
}

/* Every element of the folder, read in odd pieces, is what the masters become. */
void hf_expect_weights(Fixture *f, const char *folder, HfDtype dtype, const char *what) {
    char err[ERR_LEN], hint[ERR_LEN], note[HF_NOTE_LEN];
    const Params *p = &f->model.params;
    HfWeights *w;
    REQUIRE(hf_open(&w, folder, p, &f->config.model, note, err, hint) == 0, "%s: %s", what, err);
    EXPECT(note[0] == 0, "%s: %s", what, note);
    const bool no_bias = f->config.model.topk_method != TOPK_NOAUX_TC;
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        const float *master = (const float *)p->master.data + t->offset;
        int64_t wrong = 0;
        for (int64_t first = 0; first < t->numel; first += 101) {
            float x[101];
            const int64_t n = t->numel - first < 101 ? t->numel - first : 101;
            REQUIRE(hf_read(w, i, first, n, x, err) == 0, "%s", err);
            for (int64_t k = 0; k < n; k++) {
                const float y = no_bias && t->weight == WEIGHT_ROUTER_BIAS ? 0 : hf_stored(master[first + k], t, dtype);
                wrong += memcmp(&x[k], &y, 4) != 0;
            }
        }
        EXPECT(wrong == 0, "%s: %s: %lld of %lld elements differ", what, t->name, (long long)wrong,
               (long long)t->numel);
    }
    hf_close(w);
}

/* Bags are copied and cut, so what they point to is freed in one go. */
static void *owned[4096];
static int n_owned;

static void *keep(void *p) {
    REQUIRE(p && n_owned < 4096, "no memory");
    return owned[n_owned++] = p;
}

void free_bags(void) {
    while (n_owned > 0) free(owned[--n_owned]);
}

void bag_read(Bag *b, const char *path) {
    char err[ERR_LEN];
    SafetensorsFile f;
    REQUIRE(safetensors_open(&f, path, err) == 0, "%s", err);
    REQUIRE(f.n < 500, "%lld tensors", (long long)f.n);
    b->n = f.n;
    for (int64_t i = 0; i < f.n; i++) {
        b->entry[i] = f.entries[i];
        b->entry[i].name = (char *)keep(strdup(f.entries[i].name));
        const int64_t bytes = f.entries[i].end - f.entries[i].begin;
        b->data[i] = (char *)keep(malloc((size_t)bytes + 1));
        REQUIRE(safetensors_read(&f, &f.entries[i], b->data[i], 0, bytes, err) == 0, "%s", err);
    }
    safetensors_close(&f);
}

int64_t bag_find(const Bag *b, const char *name) {
    for (int64_t i = 0; i < b->n; i++)
        if (strcmp(b->entry[i].name, name) == 0) return i;
    REQUIRE(false, "no %s", name);
    return -1;
}

void bag_drop(Bag *b, int64_t i) {
    b->n--;
    b->entry[i] = b->entry[b->n];
    b->data[i] = b->data[b->n];
}

/* Drops all whose names begin so. */
void bag_drop_prefix(Bag *b, const char *prefix) {
    for (int64_t i = b->n - 1; i >= 0; i--)
        if (strncmp(b->entry[i].name, prefix, strlen(prefix)) == 0) bag_drop(b, i);
}

void bag_add(Bag *b, const char *name, SafetensorsDtype dtype, int ndim, const int64_t *shape, const void *data) {
    SafetensorsEntry *e = &b->entry[b->n];
    int64_t bytes = safetensors_dtype_width(dtype);
    *e = (SafetensorsEntry){.name = (char *)keep(strdup(name)), .dtype = dtype, .ndim = ndim};
    for (int i = 0; i < ndim; i++) bytes *= e->shape[i] = shape[i];
    b->data[b->n] = (char *)keep(calloc((size_t)bytes + 1, 1));
    if (data) memcpy(b->data[b->n], data, (size_t)bytes);
    b->n++;
}

static const Bag *sorting;

static int by_place(const void *a, const void *b) {
    return safetensors_compare(&sorting->entry[*(const int64_t *)a], &sorting->entry[*(const int64_t *)b]);
}

void bag_write(const Bag *b, const char *path) {
    char err[ERR_LEN];
    int64_t order[512];
    SafetensorsEntry entries[512];
    SafetensorsWriter w;
    for (int64_t i = 0; i < b->n; i++) order[i] = i;
    sorting = b;
    qsort(order, (size_t)b->n, sizeof *order, by_place);
    for (int64_t i = 0; i < b->n; i++) entries[i] = b->entry[order[i]];
    REQUIRE(safetensors_create(&w, path, entries, b->n, err) == 0, "%s", err);
    for (int64_t i = 0; i < b->n; i++)
        REQUIRE(safetensors_append(&w, b->data[order[i]], entries[i].end - entries[i].begin, err) == 0, "%s", err);
    REQUIRE(safetensors_finish(&w, err) == 0, "%s", err);
}
