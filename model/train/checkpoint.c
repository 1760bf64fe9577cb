/* See checkpoint.h: saving and loading. Finding and removing are in checkpoint_dir.c. */
#include "checkpoint.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_dir.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "manifest.h"

void checkpoint_info_free(CheckpointInfo *info) {
    free(info->config_json);
    memset(info, 0, sizeof *info);
}

static void *new_array(int64_t n, size_t width) {
    void *p = calloc((size_t)n + 1, width);
    CHECK(p, "no memory for %lld items of a checkpoint's list", (long long)n);
    return p;
}

static SafetensorsDtype file_dtype(Dtype dtype) {
    switch (dtype) {
    case DTYPE_F32: return SAFETENSORS_F32;
    case DTYPE_BF16: return SAFETENSORS_BF16;
    case DTYPE_E4M3: return SAFETENSORS_F8_E4M3;
    case DTYPE_I32: return SAFETENSORS_I32;
    case DTYPE_F64: return SAFETENSORS_F64;
    case DTYPE_NONE:
    case DTYPE_COUNT: break;
    }
    CHECK(false, "dtype %s is not saved", dtype_name(dtype));
    return SAFETENSORS_DTYPES;
}

static int64_t numel(const StateTensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

int64_t checkpoint_bytes(const StateTensor *tensors, int64_t n) {
    const int64_t state_and_config = 1 << 18, text_of_tensor = 512;
    int64_t bytes = state_and_config;
    for (int64_t i = 0; i < n; i++)
        bytes += tensors[i].extent * (int64_t)dtype_size(tensors[i].dtype) + text_of_tensor + 2 * TENSOR_NAME_LEN;
    return bytes;
}

/* ---- what goes where
 * ------------------------------------------------------------------------------------------------- */

/* One slice and where it comes from. */
typedef struct {
    const StateTensor *from;
    const ManifestTensor *tensor;
    ManifestSlice *slice;
} Piece;

static int compare_for_file(const void *a, const void *b) {
    const StateTensor *x = *(const StateTensor *const *)a, *y = *(const StateTensor *const *)b;
    const SafetensorsEntry ex = {.name = x->name, .dtype = file_dtype(x->dtype)};
    const SafetensorsEntry ey = {.name = y->name, .dtype = file_dtype(y->dtype)};
    return safetensors_compare(&ex, &ey);
}

static ManifestTensor tensor_of(const StateTensor *s, int64_t file_bytes_max) {
    ManifestTensor t = {.dtype = file_dtype(s->dtype), .ndim = s->ndim, .shape = {s->shape[0], s->shape[1]}};
    const int64_t width = safetensors_dtype_width(t.dtype), extent_max = file_bytes_max / width;
    CHECK(s->ndim >= 0 && s->ndim <= 2 && s->offset == 0 && s->extent == numel(s),
          "%s: one rank saves whole tensors, not "
          "%lld + %lld of %lld",
          s->name, (long long)s->offset, (long long)s->extent, (long long)numel(s));
    CHECK((int64_t)dtype_size(s->dtype) == width, "%s: %s is not stored as in files", s->name, dtype_name(s->dtype));
    CHECK(extent_max > 0, "%s: no file of at most %lld bytes can hold it", s->name, (long long)file_bytes_max);
    memcpy(t.name, s->name, sizeof t.name);
    t.n_slices = (s->extent + extent_max - 1) / extent_max;
    t.slices = (ManifestSlice *)new_array(t.n_slices, sizeof *t.slices);
    for (int64_t k = 0; k < t.n_slices; k++) {
        int64_t offset = k * extent_max, left = s->extent - offset;
        t.slices[k] = (ManifestSlice){.offset = offset, .extent = left < extent_max ? left : extent_max};
    }
    return t;
}

/* Deals the pieces out to files, in order; names the files. */
static void assign_files(Manifest *m, Piece *pieces, int64_t n_pieces, int64_t file_bytes_max) {
    const int rank = 0;
    int64_t used = 0;
    m->files = (ManifestFile *)new_array(n_pieces, sizeof *m->files);
    for (int64_t i = 0; i < n_pieces; i++) {
        int64_t bytes = pieces[i].slice->extent * safetensors_dtype_width(pieces[i].tensor->dtype);
        if (m->n_files == 0 || bytes > file_bytes_max - used) {
            char *name = m->files[m->n_files++].name;
            if (m->n_files == 1)
                snprintf(name, MANIFEST_FILE_LEN, "state_%05d.safetensors", rank);
            else
                snprintf(name, MANIFEST_FILE_LEN, "state_%05d_%03lld.safetensors", rank, (long long)m->n_files - 1);
            used = 0;
        }
        used += bytes;
        pieces[i].slice->file = m->n_files - 1;
    }
}

/* The manifest of these tensors, hashes and file sizes still 0, and its pieces in the order of the files. */
static Piece *plan(Manifest *m, int64_t *n_pieces, const StateTensor *tensors, int64_t n, int64_t file_bytes_max) {
    const StateTensor **order = (const StateTensor **)new_array(n, sizeof *order);
    for (int64_t i = 0; i < n; i++) order[i] = &tensors[i];
    qsort(order, (size_t)n, sizeof *order, compare_for_file);

    m->ranks = 1;
    m->n_tensors = n;
    m->tensors = (ManifestTensor *)new_array(n, sizeof *m->tensors);
    *n_pieces = 0;
    for (int64_t i = 0; i < n; i++) {
        CHECK(i == 0 || compare_for_file(&order[i - 1], &order[i]) != 0, "two tensors are named %s", order[i]->name);
        m->tensors[i] = tensor_of(order[i], file_bytes_max);
        *n_pieces += m->tensors[i].n_slices;
    }
    Piece *pieces = (Piece *)new_array(*n_pieces, sizeof *pieces), *next = pieces;
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < m->tensors[i].n_slices; k++)
            *next++ = (Piece){order[i], &m->tensors[i], &m->tensors[i].slices[k]};
    assign_files(m, pieces, *n_pieces, file_bytes_max);
    free(order);
    return pieces;
}

/* ---- saving
 * ---------------------------------------------------------------------------------------------------------- */

static SafetensorsEntry entry_of(const Piece *p) {
    const ManifestTensor *t = p->tensor;
    SafetensorsEntry e = {.name = t->name, .dtype = t->dtype, .ndim = 1, .shape = {p->slice->extent}};
    if (t->n_slices > 1) return e;
    e.ndim = t->ndim;
    for (int i = 0; i < t->ndim; i++) e.shape[i] = t->shape[i];
    return e;
}

/* Device -> block -> file, a block of MANIFEST_HASH_BLOCK bytes at a time. */
static int write_piece(SafetensorsWriter *w, const Device *d, const Piece *p, void *block, char *err) {
    const int64_t width = safetensors_dtype_width(p->tensor->dtype), bytes = p->slice->extent * width;
    const char *from = (const char *)p->from->data + p->slice->offset * width;
    for (int64_t at = 0; at < bytes; at += MANIFEST_HASH_BLOCK) {
        int64_t n = bytes - at < MANIFEST_HASH_BLOCK ? bytes - at : MANIFEST_HASH_BLOCK;
        op_copy_out(d, block, from + at, (size_t)n, STREAM_COPY);
        op_synchronize(d, STREAM_COPY);
        p->slice->hash = manifest_hash_block(p->slice->hash, block, n);
        if (safetensors_append(w, block, n, err) != 0) return -1;
    }
    return 0;
}

/* Writes the file that the first of the pieces belongs to; *n_written of them are in it. */
static int write_file(const char *folder, ManifestFile *file, const Device *d, const Piece *pieces, int64_t n_pieces,
                      int64_t *n_written, void *block, char *err) {
    char path[PATH_MAX];
    SafetensorsWriter w;
    int64_t n = 0;
    while (n < n_pieces && pieces[n].slice->file == pieces[0].slice->file) n++;
    SafetensorsEntry *entries = (SafetensorsEntry *)new_array(n, sizeof *entries);
    for (int64_t i = 0; i < n; i++) entries[i] = entry_of(&pieces[i]);
    snprintf(path, sizeof path, "%s/%s", folder, file->name);
    int result = safetensors_create(&w, path, entries, n, err);
    free(entries);
    for (int64_t i = 0; i < n && result == 0; i++) result = write_piece(&w, d, &pieces[i], block, err);
    if (result == 0) result = safetensors_finish(&w, err);
    file->bytes = w.data_start + w.data_bytes;
    *n_written = n;
    return result;
}

static int write_folder(const char *folder, const Device *d, Manifest *m, const Piece *pieces, int64_t n_pieces,
                        char *err) {
    void *block = malloc(MANIFEST_HASH_BLOCK);
    if (!block) return err_set(err, "%s: no memory for a block of %d bytes", folder, MANIFEST_HASH_BLOCK);
    int result = 0;
    int64_t done = 0, n;
    for (int64_t f = 0; f < m->n_files && result == 0; f++) {
        result = write_file(folder, &m->files[f], d, pieces + done, n_pieces - done, &n, block, err);
        done += n;
    }
    free(block);
    if (result == 0) result = manifest_write(m, folder, err);
    return result == 0 ? file_sync(folder, err) : result;
}

static int64_t folder_bytes(const Manifest *m, const char *folder) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/manifest.json", folder);
    int64_t bytes = file_size(path);
    for (int64_t f = 0; f < m->n_files; f++) bytes += m->files[f].bytes;
    return bytes;
}

int checkpoint_save(const char *run_dir, const Device *d, const StateTensor *tensors, int64_t n,
                    const CheckpointInfo *info, int64_t file_bytes_max, char *path, int64_t *bytes, char *err) {
    char unfinished[CHECKPOINT_PATH_LEN];
    const int64_t step = info->state.step;
    if (checkpoint_dir_path(path, run_dir, step, "", err) != 0 ||
        checkpoint_dir_path(unfinished, run_dir, step, ".tmp", err) != 0)
        return -1;
    checkpoint_dir_remove(run_dir, ".tmp");
    if (dir_make(unfinished, err) != 0) return -1;

    Manifest m = {.info = *info};
    int64_t n_pieces;
    Piece *pieces = plan(&m, &n_pieces, tensors, n, file_bytes_max);
    int result = write_folder(unfinished, d, &m, pieces, n_pieces, err);
    if (result == 0) *bytes = folder_bytes(&m, unfinished);
    if (result == 0) result = checkpoint_dir_commit(unfinished, run_dir, step, err);
    if (result != 0) dir_remove(unfinished, NULL);
    free(pieces);
    m.info.config_json = NULL; /* the caller's */
    manifest_free(&m);
    return result;
}

/* ---- loading
 * --------------------------------------------------------------------------------------------------------- */

int checkpoint_peek(const char *path, CheckpointInfo *info, char *err) {
    Manifest m;
    memset(info, 0, sizeof *info);
    int result = manifest_read(&m, path, err);
    if (result != 0) return result;
    *info = m.info;
    m.info.config_json = NULL;
    manifest_free(&m);
    return 0;
}

static bool is_wanted(const StateTensor *t, CheckpointPart part) {
    return part == CHECKPOINT_ALL || strncmp(t->name, "adam.", 5) != 0;
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
    if (saved->dtype != file_dtype(t->dtype))
        return err_set(err, "%s: %s is %s in this checkpoint, %s in this run, and is not converted%s", path, t->name,
                       safetensors_dtype_name(saved->dtype), safetensors_dtype_name(file_dtype(t->dtype)),
                       strncmp(t->name, "adam.", 5) == 0 ? " (precision.moments)" : "");
    CHECK(t->offset >= 0 && t->extent >= 0 && t->extent <= numel(t) - t->offset, "%s: part %lld + %lld of %lld",
          t->name, (long long)t->offset, (long long)t->extent, (long long)numel(t));
    return 0;
}

static int check_all_fit(const Manifest *m, const StateTensor *tensors, int64_t n, CheckpointPart part,
                         const char *path, char *err) {
    bool *used = (bool *)new_array(m->n_tensors, sizeof *used);
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
    if (!e || e->dtype != file_dtype(t->dtype) || e->end - e->begin != bytes) {
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

/* `files` are opened when they are first needed. */
static int load_tensor(const Manifest *m, SafetensorsFile *files, const char *folder, const Device *d,
                       const StateTensor *t, void *block, char *err) {
    const ManifestTensor *saved = manifest_find(m, t->name);
    for (int64_t k = 0; k < saved->n_slices; k++) {
        const ManifestSlice *s = &saved->slices[k];
        if (s->offset >= t->offset + t->extent || s->offset + s->extent <= t->offset) continue;
        SafetensorsFile *f = &files[s->file];
        if (!f->path) {
            char path[PATH_MAX];
            snprintf(path, sizeof path, "%s/%s", folder, m->files[s->file].name);
            if (safetensors_open(f, path, err) != 0) return CHECKPOINT_DAMAGED;
        }
        int result = load_slice(f, d, t, s, block, err);
        if (result != 0) return result;
    }
    return 0;
}

int checkpoint_load(const char *path, const Device *d, const StateTensor *tensors, int64_t n, CheckpointPart part,
                    CheckpointInfo *info, char *err) {
    Manifest m;
    if (info) memset(info, 0, sizeof *info);
    int result = manifest_read(&m, path, err);
    if (result != 0) return result;
    SafetensorsFile *files = (SafetensorsFile *)new_array(m.n_files, sizeof *files);
    void *block = new_array(MANIFEST_HASH_BLOCK, 1);
    result = manifest_check_files(&m, path, err);
    if (result == 0) result = check_all_fit(&m, tensors, n, part, path, err);
    for (int64_t i = 0; i < n && result == 0; i++)
        if (is_wanted(&tensors[i], part)) result = load_tensor(&m, files, path, d, &tensors[i], block, err);
    if (result == 0 && info) {
        *info = m.info;
        m.info.config_json = NULL;
    }
    for (int64_t f = 0; f < m.n_files; f++)
        if (files[f].path) safetensors_close(&files[f]);
    free(block);
    free(files);
    manifest_free(&m);
    return result;
}
