/* See manifest.h: the parts of several ranks, and the manifest of all. */
#include <stdlib.h>
#include <string.h>

#include "checkpoint_parts.h"
#include "kernels/base/check.h"
#include "manifest.h"

ManifestPart *manifest_parts(const Manifest *m, int64_t *n) {
    *n = 0;
    for (int64_t i = 0; i < m->n_tensors; i++) *n += m->tensors[i].n_slices;
    ManifestPart *parts = (ManifestPart *)checkpoint_array(*n, sizeof *parts), *next = parts;
    for (int64_t i = 0; i < m->n_tensors; i++) {
        const ManifestTensor *t = &m->tensors[i];
        for (int64_t k = 0; k < t->n_slices; k++, next++) {
            *next = (ManifestPart){.slice = t->slices[k], .file = m->files[t->slices[k].file]};
            next->dtype = t->dtype;
            next->ndim = t->ndim;
            memcpy(next->shape, t->shape, sizeof next->shape);
            memcpy(next->name, t->name, sizeof next->name);
        }
    }
    return parts;
}

static int compare_parts(const void *a, const void *b) {
    const ManifestPart *x = (const ManifestPart *)a, *y = (const ManifestPart *)b;
    const int by_name = strcmp(x->name, y->name);
    return by_name != 0 ? by_name : (x->slice.offset > y->slice.offset) - (x->slice.offset < y->slice.offset);
}

static int compare_files(const void *a, const void *b) {
    return strcmp(((const ManifestFile *)a)->name, ((const ManifestFile *)b)->name);
}

/* Each file once, by name. */
static void list_files(Manifest *m, const ManifestPart *parts, int64_t n) {
    ManifestFile *all = (ManifestFile *)checkpoint_array(n, sizeof *all);
    for (int64_t i = 0; i < n; i++) all[i] = parts[i].file;
    qsort(all, (size_t)n, sizeof *all, compare_files);
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || compare_files(&all[m->n_files - 1], &all[i]) != 0) all[m->n_files++] = all[i];
    m->files = all;
}

/* The tensor of parts[0 .. n), which are sorted and have its name. */
static int join(const Manifest *m, ManifestTensor *t, const ManifestPart *parts, int64_t n, char *err) {
    int64_t at = 0;
    *t = (ManifestTensor){.dtype = parts->dtype, .ndim = parts->ndim, .n_slices = n};
    memcpy(t->shape, parts->shape, sizeof t->shape);
    memcpy(t->name, parts->name, sizeof t->name);
    t->slices = (ManifestSlice *)checkpoint_array(n, sizeof *t->slices);
    for (int64_t k = 0; k < n; k++) {
        const ManifestFile *file =
            (const ManifestFile *)bsearch(&parts[k].file, m->files, (size_t)m->n_files, sizeof *file, compare_files);
        t->slices[k] = parts[k].slice;
        t->slices[k].file = file - m->files;
        if (t->slices[k].offset != at)
            return err_set(err, "%s: the ranks have not written each element once: %lld is followed by %lld", t->name,
                           (long long)at, (long long)t->slices[k].offset);
        at += t->slices[k].extent;
    }
    if (at == manifest_numel(t)) return 0;
    return err_set(err, "%s: the ranks have written %lld of %lld elements", t->name, (long long)at,
                   (long long)manifest_numel(t));
}

int manifest_join(Manifest *m, ManifestPart *parts, int64_t n, int64_t ranks, char *err) {
    int result = 0;
    memset(m, 0, sizeof *m);
    m->ranks = ranks;
    m->tensors = (ManifestTensor *)checkpoint_array(n, sizeof *m->tensors);
    list_files(m, parts, n);
    qsort(parts, (size_t)n, sizeof *parts, compare_parts);
    for (int64_t i = 0, end; i < n && result == 0; i = end) {
        for (end = i; end < n && strcmp(parts[end].name, parts[i].name) == 0;) end++;
        result = join(m, &m->tensors[m->n_tensors++], &parts[i], end - i, err);
    }
    return result;
}
