/* See checkpoint.h: loading. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "checkpoint_parts.h"
#include "kernels/base/check.h"
#include "manifest.h"

int checkpoint_peek(const char *path, CheckpointInfo *info, char *err) {
    Manifest m;
    memset(info, 0, sizeof *info);
    int result = manifest_read(&m, path, err);
    if (result != 0) return result;
    *info = m.info;
    memset(&m.info, 0, sizeof m.info); /* what it points to is the caller's now */
    manifest_free(&m);
    return 0;
}

static bool is_wanted(const StateTensor *t, CheckpointPart part) {
    return part != CHECKPOINT_WEIGHTS || strncmp(t->name, "adam.", 5) != 0;
}

static const char *shape_text(char buf[48], int ndim, const int64_t *shape) {
    const long long rows = ndim > 0 ? shape[0] : 0, cols = ndim > 1 ? shape[1] : 0;
    snprintf(buf, 48, ndim == 0 ? "()" : ndim == 1 ? "(%lld)" : "(%lld, %lld)", rows, cols);
    return buf;
}

static int check_fit(const ManifestTensor *saved, const StateTensor *t, const char *path, char *err) {
    char before[48], now[48];
    if (!saved) return err_set(err, "%s: %s is not in this checkpoint, but in this run", path, t->name);
    bool same = saved->ndim == t->ndim;
    for (int i = 0; i < t->ndim && same; i++) same = saved->shape[i] == t->shape[i];
    if (!same)
        return err_set(err, "%s: %s is %s in this checkpoint, %s in this run", path, t->name,
                       shape_text(before, saved->ndim, saved->shape), shape_text(now, t->ndim, t->shape));
    if (saved->dtype != checkpoint_dtype(t->dtype))
        return err_set(err, "%s: %s is %s in this checkpoint, %s in this run, and is not converted%s", path, t->name,
                       safetensors_dtype_name(saved->dtype), safetensors_dtype_name(checkpoint_dtype(t->dtype)),
                       strncmp(t->name, "adam.", 5) == 0 ? " (precision.moments)" : "");
    CHECK(t->offset >= 0 && t->extent >= 0 && t->extent <= checkpoint_numel(t) - t->offset,
          "%s: part %lld + %lld of %lld", t->name, (long long)t->offset, (long long)t->extent,
          (long long)checkpoint_numel(t));
    return 0;
}

static int check_all_fit(const Manifest *m, const StateTensor *tensors, int64_t n, CheckpointPart part,
                         const char *path, char *err) {
    bool *used = (bool *)checkpoint_array(m->n_tensors, sizeof *used);
    int result = 0;
    for (int64_t i = 0; i < n && result == 0; i++) {
        if (!is_wanted(&tensors[i], part)) continue;
        const ManifestTensor *saved = manifest_find(m, tensors[i].name);
        result = check_fit(saved, &tensors[i], path, err);
        if (saved) used[saved - m->tensors] = true;
    }
    for (int64_t i = 0; i < m->n_tensors && result == 0 && part == CHECKPOINT_ALL; i++)
        if (!used[i])
            result = err_set(err, "%s: %s is in this checkpoint, but not in this run", path, m->tensors[i].name);
    free(used);
    return result;
}

/* Reads a whole slice, since its hash is over all of it; what the tensor asks for goes to the device. */
static int load_slice(const SafetensorsFile *f, const Device *d, const StateTensor *t, const ManifestSlice *s,
                      void *block, char *err) {
    const int64_t width = (int64_t)dtype_size(t->dtype), bytes = s->extent * width;
    const int64_t wanted_begin = (t->offset - s->offset) * width, wanted_end = wanted_begin + t->extent * width;
    const SafetensorsEntry *e = safetensors_find(f, t->name);
    uint64_t hash = 0;
    if (!e || e->dtype != checkpoint_dtype(t->dtype) || e->end - e->begin != bytes) {
        err_set(err, "%s: does not hold the part of %s that manifest.json names", f->path, t->name);
        return CHECKPOINT_DAMAGED;
    }
    for (int64_t at = 0; at < bytes; at += MANIFEST_HASH_BLOCK) {
        int64_t n = bytes - at < MANIFEST_HASH_BLOCK ? bytes - at : MANIFEST_HASH_BLOCK;
        if (safetensors_read(f, e, block, at, n, err) != 0) return CHECKPOINT_DAMAGED;
        hash = manifest_hash_block(hash, block, n);
        int64_t begin = at > wanted_begin ? at : wanted_begin, end = at + n < wanted_end ? at + n : wanted_end;
        if (begin >= end) continue;
        op_copy_in(d, (char *)t->data + (begin - wanted_begin), (const char *)block + (begin - at),
                   (size_t)(end - begin), STREAM_COPY);
        op_synchronize(d, STREAM_COPY);
    }
    if (hash == s->hash) return 0;
    err_set(err, "%s: %s: hash %016llx, %016llx was saved", f->path, t->name, (unsigned long long)hash,
            (unsigned long long)s->hash);
    return CHECKPOINT_DAMAGED;
}

struct CheckpointReader {
    char path[CHECKPOINT_PATH_LEN];
    Manifest m;
    SafetensorsFile *files; /* opened when they are first needed */
    void *block;            /* MANIFEST_HASH_BLOCK bytes */
};

int checkpoint_open(CheckpointReader **reader, const char *path, const StateTensor *tensors, int64_t n,
                    CheckpointPart part, CheckpointInfo *info, char *err) {
    Manifest m;
    *reader = NULL;
    if (info) memset(info, 0, sizeof *info);
    if (strlen(path) >= CHECKPOINT_PATH_LEN) return err_set(err, "%.200s...: the path is too long", path);
    int result = manifest_read(&m, path, err);
    if (result != 0) return result;
    CheckpointReader *r = *reader = (CheckpointReader *)checkpoint_array(1, sizeof *r);
    snprintf(r->path, sizeof r->path, "%s", path);
    r->m = m;
    r->files = (SafetensorsFile *)checkpoint_array(m.n_files, sizeof *r->files);
    r->block = checkpoint_array(MANIFEST_HASH_BLOCK, 1);
    result = manifest_check_files(&r->m, path, err);
    if (result == 0) result = check_all_fit(&r->m, tensors, n, part, path, err);
    if (result != 0) {
        checkpoint_close(r);
        *reader = NULL;
    } else if (info) {
        *info = r->m.info;
        memset(&r->m.info, 0, sizeof r->m.info);
    }
    return result;
}

int checkpoint_read(CheckpointReader *r, const Device *d, const StateTensor *t, char *err) {
    const ManifestTensor *saved = manifest_find(&r->m, t->name);
    CHECK(saved, "%s: %s was not asked for when it was opened", r->path, t->name);
    for (int64_t k = 0; k < saved->n_slices; k++) {
        const ManifestSlice *s = &saved->slices[k];
        if (s->offset >= t->offset + t->extent || s->offset + s->extent <= t->offset) continue;
        SafetensorsFile *f = &r->files[s->file];
        if (!f->path) {
            char path[PATH_MAX];
            snprintf(path, sizeof path, "%s/%s", r->path, r->m.files[s->file].name);
            if (safetensors_open(f, path, err) != 0) return CHECKPOINT_DAMAGED;
        }
        int result = load_slice(f, d, t, s, r->block, err);
        if (result != 0) return result;
    }
    return 0;
}

void checkpoint_close(CheckpointReader *r) {
    if (!r) return;
    for (int64_t f = 0; f < r->m.n_files; f++)
        if (r->files[f].path) safetensors_close(&r->files[f]);
    free(r->block);
    free(r->files);
    manifest_free(&r->m);
    free(r);
}

int checkpoint_load(const char *path, const Device *d, const StateTensor *tensors, int64_t n, CheckpointPart part,
                    CheckpointInfo *info, char *err) {
    CheckpointReader *r;
    int result = checkpoint_open(&r, path, tensors, n, part, info, err);
    if (result != 0) return result;
    for (int64_t i = 0; i < n && result == 0; i++)
        if (is_wanted(&tensors[i], part)) result = checkpoint_read(r, d, &tensors[i], err);
    checkpoint_close(r);
    if (result != 0 && info) checkpoint_info_free(info);
    return result;
}
