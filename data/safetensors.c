/* See safetensors.h: the writer. The reader is in safetensors_read.c. */
#include "safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "json.h"
#include "kernels/base/check.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensors are written as they lie in memory");

enum { HEADER_ALIGN = 8 };

static const struct {
    const char *name;
    int64_t width;
} dtypes[SAFETENSORS_DTYPES] = {
    [SAFETENSORS_U64] = {"U64", 8},         [SAFETENSORS_I64] = {"I64", 8},
    [SAFETENSORS_F64] = {"F64", 8},         [SAFETENSORS_F32] = {"F32", 4},
    [SAFETENSORS_U32] = {"U32", 4},         [SAFETENSORS_I32] = {"I32", 4},
    [SAFETENSORS_BF16] = {"BF16", 2},       [SAFETENSORS_F16] = {"F16", 2},
    [SAFETENSORS_U16] = {"U16", 2},         [SAFETENSORS_I16] = {"I16", 2},
    [SAFETENSORS_F8_E8M0] = {"F8_E8M0", 1}, [SAFETENSORS_F8_E4M3] = {"F8_E4M3", 1},
    [SAFETENSORS_F8_E5M2] = {"F8_E5M2", 1}, [SAFETENSORS_I8] = {"I8", 1},
    [SAFETENSORS_U8] = {"U8", 1},           [SAFETENSORS_BOOL] = {"BOOL", 1},
};

const char *safetensors_dtype_name(SafetensorsDtype dtype) {
    CHECK(dtype >= 0 && dtype < SAFETENSORS_DTYPES, "safetensors dtype %d", (int)dtype);
    return dtypes[dtype].name;
}

int safetensors_dtype_find(const char *name) {
    for (int i = 0; i < SAFETENSORS_DTYPES; i++)
        if (strcmp(dtypes[i].name, name) == 0) return i;
    return -1;
}

int64_t safetensors_dtype_width(SafetensorsDtype dtype) {
    CHECK(dtype >= 0 && dtype < SAFETENSORS_DTYPES, "safetensors dtype %d", (int)dtype);
    return dtypes[dtype].width;
}

int safetensors_compare(const SafetensorsEntry *a, const SafetensorsEntry *b) {
    return a->dtype != b->dtype ? (a->dtype > b->dtype) - (a->dtype < b->dtype) : strcmp(a->name, b->name);
}

/* Gives the entries their places; returns the bytes of all. */
static int64_t lay_out(SafetensorsEntry *entries, int64_t n) {
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        SafetensorsEntry *e = &entries[i];
        CHECK(i == 0 || safetensors_compare(e - 1, e) < 0, "safetensors: %s after %s", e->name, e[-1].name);
        CHECK(e->ndim >= 0 && e->ndim <= SAFETENSORS_DIMS_MAX, "safetensors: %s has %d dims", e->name, e->ndim);
        int64_t bytes = safetensors_dtype_width(e->dtype);
        for (int k = 0; k < e->ndim; k++)
            CHECK(e->shape[k] >= 0 && !__builtin_mul_overflow(bytes, e->shape[k], &bytes),
                  "safetensors: %s has extent %lld in dim %d", e->name, (long long)e->shape[k], k);
        e->begin = at;
        CHECK(!__builtin_add_overflow(at, bytes, &at), "safetensors: %s does not fit a file", e->name);
        e->end = at;
    }
    return at;
}

/* The length field, the JSON and its padding, malloc'd. */
static char *header_text(const SafetensorsEntry *entries, int64_t n, size_t *size) {
    char *text = NULL;
    const uint64_t unknown = 0;
    FILE *out = open_memstream(&text, size);
    CHECK(out, "safetensors: no memory for a header");
    fwrite(&unknown, 1, sizeof unknown, out);
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", out);
    for (int64_t i = 0; i < n; i++) {
        const SafetensorsEntry *e = &entries[i];
        fputc(',', out);
        json_write_string(out, e->name);
        fprintf(out, ":{\"dtype\":\"%s\",\"shape\":[", dtypes[e->dtype].name);
        for (int k = 0; k < e->ndim; k++) fprintf(out, "%s%lld", k ? "," : "", (long long)e->shape[k]);
        fprintf(out, "],\"data_offsets\":[%lld,%lld]}", (long long)e->begin, (long long)e->end);
    }
    fputc('}', out);
    for (long at = ftell(out); at % HEADER_ALIGN != 0; at++) fputc(' ', out);
    CHECK(fclose(out) == 0 && text, "safetensors: no memory for a header");
    const uint64_t length = *size - sizeof length;
    memcpy(text, &length, sizeof length);
    return text;
}

/* Ends a writer that failed with errno; returns -1. */
static int give_up(SafetensorsWriter *w, int error, char *err) {
    if (w->fd >= 0) close(w->fd);
    w->fd = -1;
    unlink(w->path);
    return err_set(err, "%s: cannot write: %s", w->path, strerror(error));
}

static int write_all(SafetensorsWriter *w, const char *data, size_t bytes, char *err) {
    while (bytes > 0) {
        ssize_t n = write(w->fd, data, bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return give_up(w, n < 0 ? errno : ENOSPC, err);
        data += n;
        bytes -= (size_t)n;
    }
    return 0;
}

int safetensors_create(SafetensorsWriter *w, const char *path, SafetensorsEntry *entries, int64_t n, char *err) {
    *w = (SafetensorsWriter){.path = path, .data_bytes = lay_out(entries, n)};
    size_t size;
    char *text = header_text(entries, n, &size);
    int result;
    w->data_start = (int64_t)size;
    w->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (w->fd < 0)
        result = err_set(err, "%s: cannot create: %s", path, strerror(errno));
    else if (size - sizeof(uint64_t) > SAFETENSORS_HEADER_MAX)
        result = give_up(w, EFBIG, err);
    else
        result = write_all(w, text, size, err);
    free(text);
    return result;
}

int safetensors_append(SafetensorsWriter *w, const void *data, int64_t bytes, char *err) {
    CHECK(w->fd >= 0 && bytes >= 0 && bytes <= w->data_bytes - w->written,
          "%s: %lld bytes more, %lld of %lld are written", w->path, (long long)bytes, (long long)w->written,
          (long long)w->data_bytes);
    w->written += bytes;
    return write_all(w, (const char *)data, (size_t)bytes, err);
}

int safetensors_finish(SafetensorsWriter *w, char *err) {
    CHECK(w->fd >= 0 && w->written == w->data_bytes, "%s: finished after %lld of %lld bytes", w->path,
          (long long)w->written, (long long)w->data_bytes);
    if (fsync(w->fd) != 0) return give_up(w, errno, err);
    int rc = close(w->fd);
    w->fd = -1;
    return rc == 0 ? 0 : give_up(w, errno, err);
}

void safetensors_abandon(SafetensorsWriter *w) {
    if (w->fd < 0) return;
    close(w->fd);
    w->fd = -1;
    unlink(w->path);
}
