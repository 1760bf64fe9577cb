/* See manifest.h: the reader. Every refusal names the file and, where it can, the line and the tensor. */
#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "manifest.h"
#include "manifest_state.h"

enum { MANIFEST_BYTES_MAX = 1 << 30, HASH_DIGITS = 16 };

typedef struct {
    const char *path;
    char *err;
} Reader;

PRINTF_LIKE(3, 4) static int damaged(const Reader *r, const cJSON *at, const char *fmt, ...) {
    char what[ERR_LEN / 2], line[24] = "";
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    if (at) snprintf(line, sizeof line, ":%d", json_line(at));
    err_set(r->err, "%s%s: %s", r->path, line, what);
    return CHECKPOINT_DAMAGED;
}

/* ---- single members: 0, or CHECKPOINT_DAMAGED -------------------------------------------------------------------- */

static int get_member(const Reader *r, const cJSON **item, const cJSON *parent, const char *key) {
    *item = cJSON_GetObjectItemCaseSensitive(parent, key);
    return *item ? 0 : damaged(r, parent, "\"%s\" is missing", key);
}

static int get_object(const Reader *r, const cJSON **item, const cJSON *parent, const char *key) {
    if (get_member(r, item, parent, key) != 0) return CHECKPOINT_DAMAGED;
    return cJSON_IsObject(*item) ? 0 : damaged(r, *item, "\"%s\" must be an object", key);
}

static int get_list(const Reader *r, const cJSON **item, const cJSON *parent, const char *key) {
    if (get_member(r, item, parent, key) != 0) return CHECKPOINT_DAMAGED;
    return cJSON_IsArray(*item) ? 0 : damaged(r, *item, "\"%s\" must be a list", key);
}

/* An integer from 0 to max. */
static int get_count(const Reader *r, int64_t *value, const cJSON *parent, const char *key, int64_t max) {
    const cJSON *item;
    if (get_member(r, &item, parent, key) != 0) return CHECKPOINT_DAMAGED;
    if (json_int64(item, value) == 0 && *value >= 0 && *value <= max) return 0;
    return damaged(r, item, "\"%s\" must be an integer from 0 to %lld", key, (long long)max);
}

static int get_hash(const Reader *r, uint64_t *value, const cJSON *parent, const char *key) {
    const cJSON *item;
    if (get_member(r, &item, parent, key) != 0) return CHECKPOINT_DAMAGED;
    if (!cJSON_IsString(item) || strlen(item->valuestring) != HASH_DIGITS ||
        strspn(item->valuestring, "0123456789abcdef") != HASH_DIGITS)
        return damaged(r, item, "\"%s\" must be a string of %d hexadecimal digits", key, HASH_DIGITS);
    *value = strtoull(item->valuestring, NULL, 16);
    return 0;
}

static int get_double(const Reader *r, double *value, const cJSON *item) {
    const char *word = cJSON_IsString(item) ? item->valuestring : "";
    if (strcmp(word, "inf") == 0)
        *value = INFINITY;
    else if (strcmp(word, "-inf") == 0)
        *value = -INFINITY;
    else if (strcmp(word, "nan") == 0)
        *value = NAN;
    else if (json_double(item, value) != 0)
        return damaged(r, item, "a number is expected, or \"inf\", \"-inf\", \"nan\"");
    return 0;
}

/* ---- the state --------------------------------------------------------------------------------------------------- */

static int get_window(const Reader *r, ZWindow *z, const cJSON *parent) {
    int64_t size, n, head;
    const cJSON *list, *item;
    if (get_count(r, &size, parent, "size", Z_WINDOW_MAX) != 0 || get_count(r, &n, parent, "n", size) != 0 ||
        get_count(r, &head, parent, "head", size > 0 ? size - 1 : 0) != 0 || get_list(r, &list, parent, "value") != 0)
        return CHECKPOINT_DAMAGED;
    if (cJSON_GetArraySize(list) != size) return damaged(r, list, "\"value\" must hold %lld numbers", (long long)size);
    z->size = (int)size;
    z->n = (int)n;
    z->head = (int)head;
    int i = 0;
    cJSON_ArrayForEach(item, list) {
        if (get_double(r, &z->value[i++], item) != 0) return CHECKPOINT_DAMAGED;
    }
    return 0;
}

static int get_state(const Reader *r, RunState *state, const cJSON *root) {
    const cJSON *parent, *item;
    if (get_count(r, &state->step, root, "step", INT64_MAX) != 0 || get_object(r, &parent, root, "state") != 0)
        return CHECKPOINT_DAMAGED;
    for (int i = 0; i < n_state_fields; i++) {
        const char *name = state_fields[i].name;
        void *member = (char *)state + state_fields[i].offset;
        int result = 0;
        if (state_fields[i].is_late && !cJSON_GetObjectItemCaseSensitive(parent, name)) continue;
        switch (state_fields[i].kind) {
        case STATE_INT: result = get_count(r, (int64_t *)member, parent, name, INT64_MAX); break;
        case STATE_DOUBLE:
            result = get_member(r, &item, parent, name);
            if (result == 0) result = get_double(r, (double *)member, item);
            break;
        case STATE_WINDOW:
            result = get_object(r, &item, parent, name);
            if (result == 0) result = get_window(r, (ZWindow *)member, item);
            break;
        }
        if (result != 0) return result;
    }
    return 0;
}

/* ---- the configuration ------------------------------------------------------------------------------------------- */

/* The value as JSON again. Numbers keep their spelling: a tree of doubles would lose 64-bit seeds. */
static void write_value(FILE *out, const cJSON *value) {
    const char *separator = "";
    const cJSON *child;
    if (cJSON_IsString(value)) {
        json_write_string(out, value->valuestring);
    } else if (cJSON_IsNumber(value)) {
        fputs(json_spelling(value), out);
    } else if (cJSON_IsObject(value) || cJSON_IsArray(value)) {
        fputc(cJSON_IsObject(value) ? '{' : '[', out);
        cJSON_ArrayForEach(child, value) {
            fputs(separator, out);
            separator = ", ";
            if (cJSON_IsObject(value)) {
                json_write_string(out, child->string);
                fputs(": ", out);
            }
            write_value(out, child);
        }
        fputc(cJSON_IsObject(value) ? '}' : ']', out);
    } else {
        fputs(cJSON_IsTrue(value) ? "true" : cJSON_IsFalse(value) ? "false" : "null", out);
    }
}

static int get_config(const Reader *r, char **text, const cJSON *root) {
    const cJSON *config;
    size_t size;
    if (get_object(r, &config, root, "config") != 0) return CHECKPOINT_DAMAGED;
    FILE *out = open_memstream(text, &size);
    if (!out) return damaged(r, config, "no memory for the configuration");
    write_value(out, config);
    return fclose(out) == 0 && *text ? 0 : damaged(r, config, "no memory for the configuration");
}

/* ---- the device -------------------------------------------------------------------------------------------------- */

static int get_device(const Reader *r, CheckpointInfo *info, const cJSON *root) {
    const cJSON *device = cJSON_GetObjectItemCaseSensitive(root, "device"), *row;
    const cJSON *gemms = cJSON_GetObjectItemCaseSensitive(root, "gemms");
    if (device && !cJSON_IsString(device)) return damaged(r, device, "\"device\" must be a string");
    if (device && !(info->device = strdup(device->valuestring))) return damaged(r, device, "no memory for it");
    if (!gemms) return 0;
    if (!cJSON_IsArray(gemms)) return damaged(r, gemms, "\"gemms\" must be a list");
    size_t size;
    FILE *out = open_memstream(&info->gemms, &size);
    if (!out) return damaged(r, gemms, "no memory for it");
    int result = 0;
    cJSON_ArrayForEach(row, gemms) {
        if (!cJSON_IsString(row))
            result = damaged(r, row, "\"gemms\" must hold strings");
        else
            fprintf(out, "%s\n", row->valuestring);
    }
    return fclose(out) == 0 && info->gemms ? result : damaged(r, gemms, "no memory for it");
}

/* ---- the experts' loads ------------------------------------------------------------------------------------------ */

static int get_loads(const Reader *r, ExpertLoads *l, const cJSON *root) {
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(root, "expert_load"), *layer, *item;
    if (!list) return 0;
    const int n_layers = cJSON_GetArraySize(list), n_experts = cJSON_GetArraySize(cJSON_GetArrayItem(list, 0));
    if (!cJSON_IsArray(list) || n_experts == 0) return damaged(r, list, "\"expert_load\" must hold lists of numbers");
    *l = loads_make(n_layers, n_experts);
    int64_t *next = l->load;
    cJSON_ArrayForEach(layer, list) {
        if (!cJSON_IsArray(layer) || cJSON_GetArraySize(layer) != n_experts)
            return damaged(r, layer, "\"expert_load\" must hold lists of %d numbers", n_experts);
        cJSON_ArrayForEach(item, layer) {
            if (json_int64(item, next) != 0 || *next < 0 || *next > LOADS_MAX)
                return damaged(r, item, "the load of an expert must be an integer from 0 to %lld",
                               (long long)LOADS_MAX);
            next++;
        }
    }
    return 0;
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

static int compare_files(const void *a, const void *b) {
    return strcmp(((const ManifestFile *)a)->name, ((const ManifestFile *)b)->name);
}

static int get_files(const Reader *r, Manifest *m, const cJSON *root) {
    const cJSON *parent, *item;
    if (get_object(r, &parent, root, "files") != 0) return CHECKPOINT_DAMAGED;
    m->files = (ManifestFile *)calloc((size_t)cJSON_GetArraySize(parent) + 1, sizeof *m->files);
    if (!m->files) return damaged(r, parent, "no memory for the list of files");
    cJSON_ArrayForEach(item, parent) {
        ManifestFile *f = &m->files[m->n_files++];
        size_t length = strlen(item->string);
        if (length == 0 || length >= sizeof f->name || item->string[0] == '.' || strchr(item->string, '/'))
            return damaged(r, item, "\"%.100s\" is no name of a file in this folder", item->string);
        strcpy(f->name, item->string);
        if (json_int64(item, &f->bytes) != 0 || f->bytes < 0)
            return damaged(r, item, "the size of %s must be a count of bytes", f->name);
    }
    qsort(m->files, (size_t)m->n_files, sizeof *m->files, compare_files);
    return 0;
}

int manifest_check_files(const Manifest *m, const char *folder, char *err) {
    for (int64_t i = 0; i < m->n_files; i++) {
        char path[PATH_MAX];
        const Reader r = {path, err};
        snprintf(path, sizeof path, "%s/%s", folder, m->files[i].name);
        int64_t found = file_size(path), wanted = m->files[i].bytes;
        if (found < 0) return damaged(&r, NULL, "is missing");
        if (found != wanted)
            return damaged(&r, NULL, "%lld bytes, %lld were written", (long long)found, (long long)wanted);
    }
    return 0;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static int compare_slices(const void *a, const void *b) {
    const ManifestSlice *x = (const ManifestSlice *)a, *y = (const ManifestSlice *)b;
    return (x->offset > y->offset) - (x->offset < y->offset);
}

static int compare_tensors(const void *a, const void *b) {
    return strcmp(((const ManifestTensor *)a)->name, ((const ManifestTensor *)b)->name);
}

static int get_slice(const Reader *r, const Manifest *m, ManifestSlice *s, const cJSON *item) {
    const cJSON *file;
    if (!cJSON_IsObject(item)) return damaged(r, item, "a slice must be an object");
    if (get_count(r, &s->offset, item, "offset", INT64_MAX) != 0 ||
        get_count(r, &s->extent, item, "extent", INT64_MAX) != 0 || get_hash(r, &s->hash, item, "hash") != 0 ||
        get_member(r, &file, item, "file") != 0)
        return CHECKPOINT_DAMAGED;
    ManifestFile key = {"", 0};
    if (!cJSON_IsString(file) || strlen(file->valuestring) >= sizeof key.name)
        return damaged(r, file, "\"file\" must be a string, one of \"files\"");
    strcpy(key.name, file->valuestring);
    const ManifestFile *known =
        (const ManifestFile *)bsearch(&key, m->files, (size_t)m->n_files, sizeof key, compare_files);
    if (!known) return damaged(r, file, "\"%s\" is not one of \"files\"", key.name);
    s->file = known - m->files;
    return 0;
}

/* dtype and shape; *numel, whose bytes are below 2^63. */
static int get_shape(const Reader *r, ManifestTensor *t, int64_t *numel, const cJSON *item) {
    const cJSON *dtype, *shape, *extent;
    if (get_member(r, &dtype, item, "dtype") != 0 || get_list(r, &shape, item, "shape") != 0) return CHECKPOINT_DAMAGED;
    int known = cJSON_IsString(dtype) ? safetensors_dtype_find(dtype->valuestring) : -1;
    if (known < 0) return damaged(r, dtype, "%s: unknown dtype", t->name);
    t->dtype = (SafetensorsDtype)known;
    if (cJSON_GetArraySize(shape) > 2) return damaged(r, shape, "%s: more than 2 dimensions", t->name);
    int64_t bytes = safetensors_dtype_width(t->dtype);
    *numel = 1;
    cJSON_ArrayForEach(extent, shape) {
        int64_t *value = &t->shape[t->ndim++];
        if (json_int64(extent, value) != 0 || *value < 0 || __builtin_mul_overflow(bytes, *value, &bytes))
            return damaged(r, extent, "%s: no usable shape", t->name);
        *numel *= *value;
    }
    return 0;
}

static int get_tensor(const Reader *r, const Manifest *m, ManifestTensor *t, const cJSON *item) {
    const cJSON *list, *slice;
    int64_t numel = 0, at = 0;
    if (strlen(item->string) >= sizeof t->name) return damaged(r, item, "%.100s...: name too long", item->string);
    strcpy(t->name, item->string);
    if (!cJSON_IsObject(item)) return damaged(r, item, "%s: must be an object", t->name);
    if (get_shape(r, t, &numel, item) != 0 || get_list(r, &list, item, "slices") != 0) return CHECKPOINT_DAMAGED;
    t->slices = (ManifestSlice *)calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *t->slices);
    if (!t->slices) return damaged(r, item, "%s: no memory for its slices", t->name);
    cJSON_ArrayForEach(slice, list) {
        if (get_slice(r, m, &t->slices[t->n_slices++], slice) != 0) return CHECKPOINT_DAMAGED;
    }
    qsort(t->slices, (size_t)t->n_slices, sizeof *t->slices, compare_slices);
    for (int64_t i = 0; i < t->n_slices; i++) {
        const ManifestSlice *s = &t->slices[i];
        if (s->offset != at || s->extent == 0 || s->extent > numel - at)
            return damaged(r, item, "%s: its slices do not cover it once", t->name);
        at += s->extent;
    }
    return at == numel
               ? 0
               : damaged(r, item, "%s: its slices end at %lld of %lld", t->name, (long long)at, (long long)numel);
}

static int get_tensors(const Reader *r, Manifest *m, const cJSON *root) {
    const cJSON *parent, *item;
    if (get_object(r, &parent, root, "tensors") != 0) return CHECKPOINT_DAMAGED;
    m->tensors = (ManifestTensor *)calloc((size_t)cJSON_GetArraySize(parent) + 1, sizeof *m->tensors);
    if (!m->tensors) return damaged(r, parent, "no memory for the list of tensors");
    cJSON_ArrayForEach(item, parent) {
        if (get_tensor(r, m, &m->tensors[m->n_tensors++], item) != 0) return CHECKPOINT_DAMAGED;
    }
    qsort(m->tensors, (size_t)m->n_tensors, sizeof *m->tensors, compare_tensors);
    for (int64_t i = 1; i < m->n_tensors; i++)
        if (compare_tensors(&m->tensors[i - 1], &m->tensors[i]) == 0)
            return damaged(r, parent, "%s: given twice", m->tensors[i].name);
    return 0;
}

const ManifestTensor *manifest_find(const Manifest *m, const char *name) {
    ManifestTensor key = {.ndim = 0};
    if (m->n_tensors == 0 || strlen(name) >= sizeof key.name) return NULL;
    strcpy(key.name, name);
    return (const ManifestTensor *)bsearch(&key, m->tensors, (size_t)m->n_tensors, sizeof key, compare_tensors);
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

/* A text that ends in our spelling of its hash must have it. One without may come from a newer format. */
static int check_hash(const Reader *r, const char *text, size_t size, bool *has_hash) {
    char expected[MANIFEST_TAIL_LEN + 1];
    const size_t body = size - MANIFEST_TAIL_LEN, key_len = sizeof MANIFEST_TAIL_KEY - 1;
    *has_hash = size > MANIFEST_TAIL_LEN && memcmp(text + body, MANIFEST_TAIL_KEY, key_len) == 0;
    if (!*has_hash) return 0;
    snprintf(expected, sizeof expected, MANIFEST_TAIL_FORMAT, (unsigned long long)hash_bytes(text, body, 0));
    return memcmp(text + body, expected, MANIFEST_TAIL_LEN) == 0 ? 0
                                                                 : damaged(r, NULL, "its hash does not match its text");
}

static int get_manifest(const Reader *r, Manifest *m, const cJSON *root, bool has_hash) {
    int64_t format;
    if (!cJSON_IsObject(root)) return damaged(r, NULL, "not a JSON object");
    if (get_count(r, &format, root, "format", INT64_MAX) != 0) return CHECKPOINT_DAMAGED;
    if (format > MANIFEST_FORMAT)
        return err_set(r->err, "%s: written by a newer train_moe, format %lld; this one reads %d", r->path,
                       (long long)format, MANIFEST_FORMAT);
    if (format != MANIFEST_FORMAT) return damaged(r, root, "\"format\" %lld, there is none", (long long)format);
    if (!has_hash) return damaged(r, NULL, "cut off or edited: it does not end with its hash");
    if (get_count(r, &m->ranks, root, "ranks", INT32_MAX) != 0 ||
        get_hash(r, &m->info.data_identity, root, "data_identity") != 0 ||
        get_hash(r, &m->info.param_hash, root, "param_hash") != 0 || get_state(r, &m->info.state, root) != 0 ||
        get_device(r, &m->info, root) != 0 || get_loads(r, &m->info.loads, root) != 0 ||
        get_config(r, &m->info.config_json, root) != 0 || get_files(r, m, root) != 0 || get_tensors(r, m, root) != 0)
        return CHECKPOINT_DAMAGED;
    return 0;
}

int manifest_read(Manifest *m, const char *folder, char *err) {
    char path[PATH_MAX], hint[ERR_LEN], *text;
    size_t size;
    bool has_hash;
    const Reader r = {path, err};
    memset(m, 0, sizeof *m);
    if (snprintf(path, sizeof path, "%s/" MANIFEST_NAME, folder) >= (int)sizeof path)
        return err_set(err, "%s: path too long", folder);
    if (!path_exists(folder)) return err_set(err, "%s: there is no such checkpoint", folder);
    if (!path_exists(path)) {
        err_set(err, "%s: not a whole checkpoint: it holds no " MANIFEST_NAME, folder);
        return CHECKPOINT_DAMAGED;
    }
    if (file_read_all(&text, &size, path, MANIFEST_BYTES_MAX, err) != 0) return CHECKPOINT_DAMAGED;
    int result = check_hash(&r, text, size, &has_hash);
    if (result == 0) {
        cJSON *root = json_parse(text, size, path, err, hint, NULL);
        result = root ? get_manifest(&r, m, root, has_hash) : CHECKPOINT_DAMAGED;
        cJSON_Delete(root);
    }
    free(text);
    if (result != 0) manifest_free(m);
    return result;
}
