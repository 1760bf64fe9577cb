/* See safetensors.h: the reader. Nothing in a header is believed before it has been held against the file's size. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "json.h"
#include "kernels/base/check.h"
#include "safetensors.h"

static int read_at(const SafetensorsFile *f, void *out, int64_t bytes, int64_t at, char *err) {
    char *p = (char *)out;
    while (bytes > 0) {
        ssize_t n = pread(f->fd, p, (size_t)bytes, (off_t)at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return err_set(err, "%s: cannot read: %s", f->path, strerror(errno));
        if (n == 0) return err_set(err, "%s: ends at byte %lld, though it was longer", f->path, (long long)at);
        p += n;
        at += n;
        bytes -= n;
    }
    return 0;
}

/* Reads the JSON behind the length, malloc'd; NULL with err if the file cannot hold what it promises. */
static char *read_header(SafetensorsFile *f, size_t *size, char *err) {
    struct stat st;
    uint64_t length;
    if (fstat(f->fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        err_set(err, "%s: not a plain file", f->path);
        return NULL;
    }
    if (st.st_size < (off_t)sizeof length) {
        err_set(err, "%s: %lld bytes, too short for a safetensors file", f->path, (long long)st.st_size);
        return NULL;
    }
    if (read_at(f, &length, sizeof length, 0, err) != 0) return NULL;
    if (length > SAFETENSORS_HEADER_MAX) {
        err_set(err, "%s: not a safetensors file, or damaged: a header of %llu bytes, at most %d are read", f->path,
                (unsigned long long)length, SAFETENSORS_HEADER_MAX);
        return NULL;
    }
    f->data_start = (int64_t)(sizeof length + length);
    f->data_bytes = (int64_t)st.st_size - f->data_start;
    if (f->data_bytes < 0) {
        err_set(err, "%s: cut off: %lld bytes, its header alone ends at %lld", f->path, (long long)st.st_size,
                (long long)f->data_start);
        return NULL;
    }
    char *text = (char *)malloc(length + 1);
    if (!text) {
        err_set(err, "%s: no memory for a header of %llu bytes", f->path, (unsigned long long)length);
        return NULL;
    }
    *size = (size_t)length;
    if (read_at(f, text, (int64_t)length, sizeof length, err) != 0) goto failed;
    size_t end = *size;
    while (end > 0 && text[end - 1] == ' ') end--;
    if (end == 0 || text[0] != '{' || text[end - 1] != '}') {
        err_set(err, "%s: not a safetensors file, or damaged: its header is not one {...} padded with spaces", f->path);
        goto failed;
    }
    return text;
failed:
    free(text);
    return NULL;
}

/* A count as the format spells it: digits only. */
static int get_count(int64_t *value, const cJSON *item) {
    const char *spelling = json_spelling(item);
    if (!*spelling || strspn(spelling, "0123456789") != strlen(spelling)) return -1;
    return json_int64(item, value);
}

static int get_shape(SafetensorsEntry *e, const cJSON *list, int64_t *bytes, const char *path, char *err) {
    if (!cJSON_IsArray(list)) return err_set(err, "%s: tensor %.200s: \"shape\" must be a list", path, e->name);
    *bytes = safetensors_dtype_width(e->dtype);
    bool overflow = false;
    const cJSON *item;
    cJSON_ArrayForEach(item, list) {
        int64_t extent;
        if (e->ndim == SAFETENSORS_DIMS_MAX)
            return err_set(err, "%s: tensor %.200s: more than %d dimensions", path, e->name, SAFETENSORS_DIMS_MAX);
        if (get_count(&extent, item) != 0)
            return err_set(err, "%s: tensor %.200s: an extent of \"shape\" is no count below 2^63", path, e->name);
        overflow |= __builtin_mul_overflow(*bytes, extent, bytes);
        e->shape[e->ndim++] = extent;
    }
    return overflow ? err_set(err, "%s: tensor %.200s: its shape overflows", path, e->name) : 0;
}

static int get_entry(SafetensorsEntry *e, const cJSON *item, const char *path, char *err) {
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(item, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    if (!cJSON_IsObject(item) || !dtype || !shape || !offsets || cJSON_GetArraySize(item) != 3)
        return err_set(err, "%s: tensor %.200s: not an object of \"dtype\", \"shape\" and \"data_offsets\"", path,
                       e->name);
    char found[80];
    int known = cJSON_IsString(dtype) ? safetensors_dtype_find(dtype->valuestring) : -1;
    if (known < 0)
        return err_set(err, "%s: tensor %.200s: unknown dtype, %s", path, e->name,
                       json_describe(dtype, found, sizeof found));
    e->dtype = (SafetensorsDtype)known;
    int64_t bytes = 0;
    if (get_shape(e, shape, &bytes, path, err) != 0) return -1;
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 || get_count(&e->begin, offsets->child) != 0 ||
        get_count(&e->end, offsets->child->next) != 0)
        return err_set(err, "%s: tensor %.200s: \"data_offsets\" is not a list of two counts", path, e->name);
    if (e->end < e->begin || e->end - e->begin != bytes)
        return err_set(err, "%s: tensor %.200s: bytes %lld to %lld, but its shape and dtype need %lld", path, e->name,
                       (long long)e->begin, (long long)e->end, (long long)bytes);
    return 0;
}

static int check_metadata(const cJSON *item, const char *path, char *err) {
    const cJSON *value;
    if (!cJSON_IsObject(item)) return err_set(err, "%s: \"__metadata__\" must be an object", path);
    cJSON_ArrayForEach(value, item) {
        if (!cJSON_IsString(value))
            return err_set(err, "%s: \"__metadata__\": \"%.100s\" must be a string", path, value->string);
    }
    return 0;
}

static int get_entries(SafetensorsFile *f, const cJSON *root, char *err) {
    f->entries = (SafetensorsEntry *)calloc((size_t)cJSON_GetArraySize(root) + 1, sizeof *f->entries);
    if (!f->entries) return err_set(err, "%s: no memory for its list of tensors", f->path);
    bool has_metadata = false;
    const cJSON *item;
    cJSON_ArrayForEach(item, root) {
        if (strcmp(item->string, "__metadata__") == 0 && !has_metadata) {
            has_metadata = true;
            if (check_metadata(item, f->path, err) != 0) return -1;
            continue;
        }
        SafetensorsEntry *e = &f->entries[f->n];
        e->name = strdup(item->string);
        if (!e->name) return err_set(err, "%s: no memory for its list of tensors", f->path);
        f->n++;
        if (get_entry(e, item, f->path, err) != 0) return -1;
    }
    return 0;
}

static int by_place(const void *a, const void *b) {
    const SafetensorsEntry *x = (const SafetensorsEntry *)a, *y = (const SafetensorsEntry *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const SafetensorsEntry *)a)->name, ((const SafetensorsEntry *)b)->name);
}

/* Every byte of the data belongs to exactly one tensor. Leaves the entries sorted by name. */
static int check_places(SafetensorsFile *f, char *err) {
    int64_t at = 0;
    qsort(f->entries, (size_t)f->n, sizeof *f->entries, by_place);
    for (int64_t i = 0; i < f->n; i++) {
        const SafetensorsEntry *e = &f->entries[i];
        if (e->begin != at)
            return err_set(err, "%s: tensor %.200s: begins at byte %lld, %s %lld where %.200s ends", f->path, e->name,
                           (long long)e->begin, e->begin < at ? "overlapping: before" : "leaving a hole: behind",
                           (long long)at, i ? e[-1].name : "the header");
        at = e->end;
        if (at > f->data_bytes)
            return err_set(err, "%s: cut off: tensor %.200s ends at byte %lld of the data, %lld are there", f->path,
                           e->name, (long long)at, (long long)f->data_bytes);
    }
    if (at != f->data_bytes)
        return err_set(err, "%s: %lld bytes of data, but its tensors end at %lld", f->path, (long long)f->data_bytes,
                       (long long)at);
    qsort(f->entries, (size_t)f->n, sizeof *f->entries, by_name);
    for (int64_t i = 1; i < f->n; i++)
        if (by_name(&f->entries[i - 1], &f->entries[i]) == 0)
            return err_set(err, "%s: tensor %.200s: given twice", f->path, f->entries[i].name);
    return 0;
}

int safetensors_open(SafetensorsFile *f, const char *path, char *err) {
    memset(f, 0, sizeof *f);
    char *text = NULL, hint[ERR_LEN], reason[ERR_LEN];
    size_t size;
    cJSON *root = NULL;
    int result = -1;
    f->path = strdup(path);
    f->fd = f->path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (f->fd < 0) {
        err_set(err, "%s: cannot open: %s", path, strerror(errno));
        goto done;
    }
    text = read_header(f, &size, err);
    if (!text) goto done;
    root = json_parse(text, size, path, reason, hint, NULL);
    if (!root) {
        err_set(err, "%s (in the header of a safetensors file)", reason);
        goto done;
    }
    if (get_entries(f, root, err) == 0 && check_places(f, err) == 0) result = 0;
done:
    cJSON_Delete(root);
    free(text);
    if (result != 0) safetensors_close(f);
    return result;
}

void safetensors_close(SafetensorsFile *f) {
    if (f->path && f->fd >= 0) close(f->fd);
    for (int64_t i = 0; i < f->n; i++) free((void *)(uintptr_t)f->entries[i].name);
    free(f->entries);
    free(f->path);
    memset(f, 0, sizeof *f);
    f->fd = -1;
}

const SafetensorsEntry *safetensors_find(const SafetensorsFile *f, const char *name) {
    SafetensorsEntry key = {.name = name};
    return f->n ? (const SafetensorsEntry *)bsearch(&key, f->entries, (size_t)f->n, sizeof key, by_name) : NULL;
}

int safetensors_read(const SafetensorsFile *f, const SafetensorsEntry *e, void *out, int64_t offset, int64_t bytes,
                     char *err) {
    CHECK(offset >= 0 && bytes >= 0 && bytes <= e->end - e->begin - offset, "%s: %s: bytes %lld + %lld of %lld",
          f->path, e->name, (long long)offset, (long long)bytes, (long long)(e->end - e->begin));
    return read_at(f, out, bytes, f->data_start + e->begin + offset, err);
}
