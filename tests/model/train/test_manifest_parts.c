/* A checkpoint whose parts several ranks have written: here one process, rank after rank. */
#include "model/train/checkpoint_parts.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/file.h"
#include "tests/test.h"

enum { RANKS = 3, TENSORS = 3, MOST = 300 };

/* A matrix in three parts, a vector of rank 1 alone, moments of ranks 0 and 2. */
static const struct {
    const char *name;
    int ndim;
    int64_t shape[2], end[RANKS]; /* each rank's part begins where the one before ends */
} table[TENSORS] = {
    {"lm_head.weight", 2, {30, 10}, {70, 200, 300}},
    {"model.norm.weight", 1, {10, 0}, {0, 10, 10}},
    {"adam.m.lm_head.weight", 2, {30, 10}, {128, 128, 300}},
};

static float values[TENSORS][MOST];

/* The tensors of a rank; rank -1: all, whole. */
static int list_of(int rank, StateTensor *list, float (*data)[MOST]) {
    int n = 0;
    for (int i = 0; i < TENSORS; i++) {
        const int64_t first = rank > 0 ? table[i].end[rank - 1] : 0, end = table[i].end[rank < 0 ? RANKS - 1 : rank];
        if (first == end) continue;
        StateTensor *t = &list[n++];
        memset(t, 0, sizeof *t);
        snprintf(t->name, sizeof t->name, "%s", table[i].name);
        t->dtype = DTYPE_F32;
        t->ndim = table[i].ndim;
        memcpy(t->shape, table[i].shape, sizeof t->shape);
        t->offset = first;
        t->extent = end - first;
        t->data = data[i] + first;
    }
    return n;
}

static CheckpointInfo info_of(int64_t step) {
    CheckpointInfo info;
    memset(&info, 0, sizeof info);
    info.state.step = step;
    info.param_hash = 7;
    info.config_json = strdup("{}");
    return info;
}

/* What the ranks write in step 5, all slices behind one another; no file holds more than 400 bytes. */
static int64_t write_parts(const Device *d, ManifestPart *all) {
    char err[ERR_LEN] = "";
    int64_t n_all = 0;
    for (int i = 0; i < TENSORS; i++)
        for (int e = 0; e < MOST; e++) values[i][e] = (float)(1000 * i + e);
    for (int rank = RANKS - 1; rank >= 0; rank--) {
        StateTensor list[TENSORS];
        Manifest part;
        int64_t n;
        const int n_tensors = list_of(rank, list, values);
        const CheckpointSource source = checkpoint_source(d);
        REQUIRE(checkpoint_write_part(test_tmp_dir(), 5, rank, &source, list, n_tensors, 400, &part, err) == 0, "%s",
                err);
        ManifestPart *parts = manifest_parts(&part, &n);
        memcpy(all + n_all, parts, (size_t)n * sizeof *parts);
        n_all += n;
        free(parts);
        manifest_free(&part);
    }
    return n_all;
}

TEST(manifest_of_the_parts_of_all_ranks) {
    const Device d = {.ops = ops_cpu()};
    char err[ERR_LEN] = "", path[CHECKPOINT_PATH_LEN], name[CHECKPOINT_PATH_LEN + 64];
    static float loaded[TENSORS][MOST];
    ManifestPart all[64];
    Manifest m;
    int64_t bytes;
    const int64_t n = write_parts(&d, all);
    REQUIRE(manifest_join(&m, all, n, RANKS, err) == 0, "%s", err);
    EXPECT(m.ranks == RANKS && m.n_tensors == TENSORS, "%lld tensors", (long long)m.n_tensors);
    CheckpointInfo info = info_of(5);
    REQUIRE(checkpoint_commit(test_tmp_dir(), &info, &m, path, &bytes, err) == 0, "%s", err);
    manifest_free(&m);
    for (int rank = 0; rank < RANKS; rank++) {
        snprintf(name, sizeof name, "%s/state_%05d.safetensors", path, rank);
        EXPECT(path_exists(name), "%s", name);
    }
    StateTensor whole[TENSORS];
    const int n_whole = list_of(-1, whole, loaded);
    REQUIRE(checkpoint_load(path, &d, whole, n_whole, CHECKPOINT_ALL, NULL, err) == 0, "%s", err);
    for (int i = 0; i < TENSORS; i++)
        EXPECT(memcmp(loaded[i], values[i], (size_t)table[i].end[RANKS - 1] * sizeof(float)) == 0, "%s", table[i].name);
    checkpoint_info_free(&info);
}

/* What a rank has not written, or two have, is no checkpoint; nor is one whose file another host has. */
TEST(manifest_of_parts_that_do_not_fit) {
    const Device d = {.ops = ops_cpu()};
    char err[ERR_LEN], path[CHECKPOINT_PATH_LEN], name[CHECKPOINT_PATH_LEN + 64];
    ManifestPart all[64];
    Manifest m;
    int64_t bytes;
    const int64_t n = write_parts(&d, all);
    for (int64_t gone = 0; gone < n; gone++) {
        ManifestPart parts[64];
        memcpy(parts, all, sizeof all);
        parts[gone] = parts[n - 1];
        const bool is_lone = strcmp(all[gone].name, "model.norm.weight") == 0; /* then the tensor itself is missing */
        EXPECT(is_lone || manifest_join(&m, parts, n - 1, RANKS, err) == -1, "slice %lld is missing", (long long)gone);
        if (!is_lone) manifest_free(&m);
        memcpy(parts, all, sizeof all);
        parts[n] = parts[gone];
        EXPECT(manifest_join(&m, parts, n + 1, RANKS, err) == -1 && strstr(err, all[gone].name), "slice %lld twice: %s",
               (long long)gone, err);
        manifest_free(&m);
    }
    CheckpointInfo info = info_of(5);
    snprintf(name, sizeof name, "%s/step_00000005.tmp/state_00001.safetensors", test_tmp_dir());
    REQUIRE(unlink(name) == 0, "%s", name);
    REQUIRE(manifest_join(&m, all, n, RANKS, err) == 0, "%s", err);
    EXPECT(checkpoint_commit(test_tmp_dir(), &info, &m, path, &bytes, err) == -1 &&
               strstr(err, "state_00001.safetensors: is missing"),
           "%s", err);
    EXPECT(!path_exists(path), "%s", path);
    manifest_free(&m);
    checkpoint_info_free(&info);
}
