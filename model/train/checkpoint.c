/* See checkpoint.h: saving. Loading is in checkpoint_load.c, finding and removing in checkpoint_dir.c. */
#include "checkpoint.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_dir.h"
#include "checkpoint_parts.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "kernels/base/ints.h"
#include "kernels/comm/watch.h"
#include "manifest.h"

void checkpoint_info_free(CheckpointInfo *info) {
    free(info->config_json);
    free(info->device);
    free(info->gemms);
    loads_free(&info->loads);
    memset(info, 0, sizeof *info);
}

void *checkpoint_array(int64_t n, size_t width) {
    void *p = calloc((size_t)n + 1, width);
    CHECK(p, "no memory for %lld items of a checkpoint's list", (long long)n);
    return p;
}

SafetensorsDtype checkpoint_dtype(Dtype dtype) {
    switch (dtype) {
    case DTYPE_F32: return SAFETENSORS_F32;
    case DTYPE_BF16: return SAFETENSORS_BF16;
    case DTYPE_E4M3: return SAFETENSORS_F8_E4M3;
    case DTYPE_I32: return SAFETENSORS_I32;
    case DTYPE_F64: return SAFETENSORS_F64;
    case DTYPE_NONE:
    case DTYPE_E5M6:
    case DTYPE_COUNT: break;
    }
    CHECK(false, "dtype %s is not saved", dtype_name(dtype));
    return SAFETENSORS_DTYPES;
}

int64_t checkpoint_numel(const StateTensor *t) {
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

/* ---- what goes where --------------------------------------------------------------------------------------------- */

/* One slice and where it comes from. */
typedef struct {
    const StateTensor *from;
    const ManifestTensor *tensor;
    ManifestSlice *slice;
} Piece;

static int compare_for_file(const void *a, const void *b) {
    const StateTensor *x = *(const StateTensor *const *)a, *y = *(const StateTensor *const *)b;
    const SafetensorsEntry ex = {.name = x->name, .dtype = checkpoint_dtype(x->dtype)};
    const SafetensorsEntry ey = {.name = y->name, .dtype = checkpoint_dtype(y->dtype)};
    return safetensors_compare(&ex, &ey);
}

static ManifestTensor tensor_of(const StateTensor *s, int64_t file_bytes_max) {
    ManifestTensor t = {.dtype = checkpoint_dtype(s->dtype), .ndim = s->ndim, .shape = {s->shape[0], s->shape[1]}};
    const int64_t width = safetensors_dtype_width(t.dtype), extent_max = file_bytes_max / width;
    CHECK(s->ndim >= 0 && s->ndim <= 2 && s->offset >= 0 && s->extent >= 0 &&
              s->extent <= checkpoint_numel(s) - s->offset,
          "%s: part %lld + %lld of %lld", s->name, (long long)s->offset, (long long)s->extent,
          (long long)checkpoint_numel(s));
    CHECK((int64_t)dtype_size(s->dtype) == width, "%s: %s is not stored as in files", s->name, dtype_name(s->dtype));
    CHECK(extent_max > 0, "%s: no file of at most %lld bytes can hold it", s->name, (long long)file_bytes_max);
    memcpy(t.name, s->name, sizeof t.name);
    t.n_slices = (s->extent + extent_max - 1) / extent_max;
    t.slices = (ManifestSlice *)checkpoint_array(t.n_slices, sizeof *t.slices);
    for (int64_t k = 0; k < t.n_slices; k++) {
        const int64_t done = k * extent_max;
        t.slices[k] = (ManifestSlice){.offset = s->offset + done, .extent = min_i64(s->extent - done, extent_max)};
    }
    return t;
}

/* Deals the pieces out to files, in order; names the files. */
static void assign_files(Manifest *m, int rank, Piece *pieces, int64_t n_pieces, int64_t file_bytes_max) {
    int64_t used = 0;
    m->files = (ManifestFile *)checkpoint_array(n_pieces, sizeof *m->files);
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
static Piece *plan(Manifest *m, int64_t *n_pieces, int rank, const StateTensor *tensors, int64_t n,
                   int64_t file_bytes_max) {
    const StateTensor **order = (const StateTensor **)checkpoint_array(n, sizeof *order);
    for (int64_t i = 0; i < n; i++) order[i] = &tensors[i];
    qsort(order, (size_t)n, sizeof *order, compare_for_file);

    m->ranks = 1;
    m->n_tensors = n;
    m->tensors = (ManifestTensor *)checkpoint_array(n, sizeof *m->tensors);
    *n_pieces = 0;
    for (int64_t i = 0; i < n; i++) {
        CHECK(i == 0 || compare_for_file(&order[i - 1], &order[i]) != 0, "two tensors are named %s", order[i]->name);
        m->tensors[i] = tensor_of(order[i], file_bytes_max);
        *n_pieces += m->tensors[i].n_slices;
    }
    Piece *pieces = (Piece *)checkpoint_array(*n_pieces, sizeof *pieces), *next = pieces;
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < m->tensors[i].n_slices; k++)
            *next++ = (Piece){order[i], &m->tensors[i], &m->tensors[i].slices[k]};
    assign_files(m, rank, pieces, *n_pieces, file_bytes_max);
    free(order);
    return pieces;
}

/* ---- saving ------------------------------------------------------------------------------------------------------ */

static SafetensorsEntry entry_of(const Piece *p) {
    const ManifestTensor *t = p->tensor;
    SafetensorsEntry e = {.name = t->name, .dtype = t->dtype, .ndim = 1, .shape = {p->slice->extent}};
    if (p->slice->extent < manifest_numel(t)) return e;
    e.ndim = t->ndim;
    for (int i = 0; i < t->ndim; i++) e.shape[i] = t->shape[i];
    return e;
}

static int read_from_device(void *arg, const StateTensor *t, int64_t at, void *out, int64_t n, char *err) {
    const Device *d = (const Device *)arg;
    (void)err;
    op_copy_out(d, out, (const char *)t->data + at, (size_t)n, STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
    return 0;
}

/* Source -> block -> file, a block of MANIFEST_HASH_BLOCK bytes at a time. */
static int write_piece(SafetensorsWriter *w, const CheckpointSource *source, const Piece *p, void *block, char *err) {
    const int64_t width = safetensors_dtype_width(p->tensor->dtype), bytes = p->slice->extent * width;
    const int64_t from = (p->slice->offset - p->from->offset) * width;
    for (int64_t at = 0; at < bytes; at += MANIFEST_HASH_BLOCK) {
        const int64_t n = min_i64(bytes - at, MANIFEST_HASH_BLOCK);
        watch_beat(); /* ranks that have written theirs may wait for this one */
        if (source->read(source->arg, p->from, from + at, block, n, err) != 0) return -1;
        p->slice->hash = manifest_hash_block(p->slice->hash, block, n);
        if (safetensors_append(w, block, n, err) != 0) return -1;
    }
    return 0;
}

/* Writes the file that the first of the pieces belongs to; *n_written of them are in it. */
static int write_file(const char *folder, ManifestFile *file, const CheckpointSource *source, const Piece *pieces,
                      int64_t n_pieces, int64_t *n_written, void *block, char *err) {
    char path[PATH_MAX];
    SafetensorsWriter w;
    int64_t n = 0;
    while (n < n_pieces && pieces[n].slice->file == pieces[0].slice->file) n++;
    SafetensorsEntry *entries = (SafetensorsEntry *)checkpoint_array(n, sizeof *entries);
    for (int64_t i = 0; i < n; i++) entries[i] = entry_of(&pieces[i]);
    snprintf(path, sizeof path, "%s/%s", folder, file->name);
    int result = safetensors_create(&w, path, entries, n, err);
    free(entries);
    for (int64_t i = 0; i < n && result == 0; i++) result = write_piece(&w, source, &pieces[i], block, err);
    if (result == 0) result = safetensors_finish(&w, err);
    if (result != 0) safetensors_abandon(&w);
    file->bytes = w.data_start + w.data_bytes;
    *n_written = n;
    return result;
}

static int write_files(const char *folder, const CheckpointSource *source, Manifest *m, const Piece *pieces,
                       int64_t n_pieces, char *err) {
    void *block = malloc(MANIFEST_HASH_BLOCK);
    if (!block) return err_set(err, "%s: no memory for a block of %d bytes", folder, MANIFEST_HASH_BLOCK);
    int result = 0;
    int64_t done = 0, n;
    for (int64_t f = 0; f < m->n_files && result == 0; f++) {
        result = write_file(folder, &m->files[f], source, pieces + done, n_pieces - done, &n, block, err);
        done += n;
    }
    free(block);
    return result;
}

static int64_t folder_bytes(const Manifest *m, const char *folder) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/manifest.json", folder);
    int64_t bytes = file_size(path);
    for (int64_t f = 0; f < m->n_files; f++) bytes += m->files[f].bytes;
    return bytes;
}

void checkpoint_clean(const char *run_dir) {
    checkpoint_dir_remove(run_dir, ".tmp");
}

int checkpoint_write_part(const char *run_dir, int64_t step, int rank, const CheckpointSource *source,
                          const StateTensor *tensors, int64_t n, int64_t file_bytes_max, Manifest *part, char *err) {
    char folder[CHECKPOINT_PATH_LEN];
    memset(part, 0, sizeof *part);
    if (checkpoint_dir_path(folder, run_dir, step, ".tmp", err) != 0 || dir_make(folder, err) != 0) return -1;
    int64_t n_pieces;
    Piece *pieces = plan(part, &n_pieces, rank, tensors, n, file_bytes_max);
    const int result = write_files(folder, source, part, pieces, n_pieces, err);
    free(pieces);
    return result;
}

int checkpoint_commit(const char *run_dir, const CheckpointInfo *info, Manifest *m, char *path, int64_t *bytes,
                      char *err) {
    char folder[CHECKPOINT_PATH_LEN];
    const int64_t step = info->state.step;
    if (checkpoint_dir_path(path, run_dir, step, "", err) != 0 ||
        checkpoint_dir_path(folder, run_dir, step, ".tmp", err) != 0)
        return -1;
    m->info = *info;
    int result = manifest_write(m, folder, err);
    memset(&m->info, 0, sizeof m->info); /* the caller's */
    if (result == 0) result = file_sync(folder, err);
    if (result == 0 && manifest_check_files(m, folder, err) != 0) result = -1;
    if (result == 0) *bytes = folder_bytes(m, folder);
    if (result == 0) result = checkpoint_dir_commit(folder, run_dir, step, err);
    return result;
}

static void check_whole(const StateTensor *tensors, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        CHECK(tensors[i].extent == checkpoint_numel(&tensors[i]), "%s: one rank saves whole tensors, not %lld of %lld",
              tensors[i].name, (long long)tensors[i].extent, (long long)checkpoint_numel(&tensors[i]));
}

int checkpoint_save_from(const char *run_dir, const CheckpointSource *source, const StateTensor *tensors, int64_t n,
                         const CheckpointInfo *info, int64_t file_bytes_max, char *path, int64_t *bytes, char *err) {
    Manifest m;
    check_whole(tensors, n);
    checkpoint_clean(run_dir);
    int result = checkpoint_write_part(run_dir, info->state.step, 0, source, tensors, n, file_bytes_max, &m, err);
    if (result == 0) result = checkpoint_commit(run_dir, info, &m, path, bytes, err);
    if (result != 0) checkpoint_clean(run_dir);
    manifest_free(&m);
    return result;
}

CheckpointSource checkpoint_source(const Device *d) {
    return (CheckpointSource){read_from_device, (void *)(uintptr_t)d};
}

int checkpoint_save(const char *run_dir, const Device *d, const StateTensor *tensors, int64_t n,
                    const CheckpointInfo *info, int64_t file_bytes_max, char *path, int64_t *bytes, char *err) {
    const CheckpointSource source = checkpoint_source(d);
    return checkpoint_save_from(run_dir, &source, tensors, n, info, file_bytes_max, path, bytes, err);
}
