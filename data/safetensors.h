/* safetensors: Hugging Face's file of named tensors, written as a stream and read with suspicion. Floor 1.
 *
 *     u64 N, little-endian | N bytes of JSON, padded with spaces | the tensors' bytes, one after the other
 *     {"__metadata__": {"format": "pt"}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
 *
 * Offsets count from the end of the JSON. Every byte behind it belongs to exactly one tensor: the first begins at 0,
 * each begins where the one before ends, and the last ends with the file. So files cannot share memory between names
 * and cannot pad, and a reader that checks all this never reads past an end. Wider dtypes come first, then names
 * ascend: with that order (the reference writer's) every tensor is aligned to its elements. */
#ifndef TRAIN_MOE_SAFETENSORS_H
#define TRAIN_MOE_SAFETENSORS_H

#include <stdbool.h>
#include <stdint.h>

enum { SAFETENSORS_DIMS_MAX = 8, SAFETENSORS_HEADER_MAX = 100000000 };

/* In the order in which a file holds them. */
typedef enum {
    SAFETENSORS_U64,
    SAFETENSORS_I64,
    SAFETENSORS_F64,
    SAFETENSORS_F32,
    SAFETENSORS_U32,
    SAFETENSORS_I32,
    SAFETENSORS_BF16,
    SAFETENSORS_F16,
    SAFETENSORS_U16,
    SAFETENSORS_I16,
    SAFETENSORS_F8_E8M0,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_I8,
    SAFETENSORS_U8,
    SAFETENSORS_BOOL,
    SAFETENSORS_DTYPES
} SafetensorsDtype;

/* "F32", "BF16", ... */
const char *safetensors_dtype_name(SafetensorsDtype dtype);
/* The dtype of a name, or -1. */
int safetensors_dtype_find(const char *name);
int64_t safetensors_dtype_width(SafetensorsDtype dtype); /* bytes of an element */

typedef struct {
    const char *name; /* of a file that was opened: owned by the file */
    SafetensorsDtype dtype;
    int ndim; /* 0 = a scalar */
    int64_t shape[SAFETENSORS_DIMS_MAX];
    int64_t begin, end; /* bytes, from the end of the header; filled in by create and open */
} SafetensorsEntry;

/* The order of two tensors in a file: < 0, 0 (the same dtype and name) or > 0. */
int safetensors_compare(const SafetensorsEntry *a, const SafetensorsEntry *b);

/* ---- writing ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *path; /* borrowed */
    int fd;
    int64_t data_start, data_bytes; /* bytes of the header with its length, and behind it */
    int64_t written;                /* of data_bytes */
} SafetensorsWriter;

/* Makes the file and writes its header. The entries must ascend by safetensors_compare (CHECK); their begin and end are
 * filled in. Then append every tensor's bytes in that order, in pieces of any size, and finish: it checks that all is
 * there (CHECK) and makes the file durable. All return 0, or -1 with err; the file is then removed and the writer
 * closed, so a failed writer needs nothing more. A writer that is not finished for another reason is abandoned: closed,
 * its file removed; after a failure or a finish that does nothing. */
int safetensors_create(SafetensorsWriter *w, const char *path, SafetensorsEntry *entries, int64_t n, char *err);
int safetensors_append(SafetensorsWriter *w, const void *data, int64_t bytes, char *err);
int safetensors_finish(SafetensorsWriter *w, char *err);
void safetensors_abandon(SafetensorsWriter *w);

/* ---- reading ----------------------------------------------------------------------------------------------------- */

typedef struct {
    char *path;
    int fd;
    int64_t data_start, data_bytes;
    int64_t n;
    SafetensorsEntry *entries; /* sorted by name */
} SafetensorsFile;

/* Opens a file and checks all of its header against its size. Returns 0, or -1 with err, which names the file and,
 * where there is one, the tensor: a header that is too long, cut off, not JSON or not padded with spaces; an unknown
 * dtype; a name given twice; a shape that is no list of counts or overflows; offsets that leave a hole, overlap, do not
 * fit shape and dtype or do not end with the file. */
int safetensors_open(SafetensorsFile *f, const char *path, char *err);
void safetensors_close(SafetensorsFile *f);

/* The tensor of this name, or NULL. Borrowed from f. */
const SafetensorsEntry *safetensors_find(const SafetensorsFile *f, const char *name);

/* out = `bytes` bytes of tensor `e`, from its byte `offset` on; the range must lie inside it (CHECK). Returns -1 with
 * err when the file cannot be read or has shrunk. Changes nothing in f, so threads may share it. */
int safetensors_read(const SafetensorsFile *f, const SafetensorsEntry *e, void *out, int64_t offset, int64_t bytes,
                     char *err);

#endif
