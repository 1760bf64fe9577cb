/* Token shards: llm.c's files of token ids, read and written. Floor 1.
 *
 * A shard is a header of 256 little-endian int32 and then the ids, nothing behind them:
 *     [0] magic 20240520, [1] version 1, [2] number of tokens    ids as uint16
 *     [0] magic 20240801, [1] version 7, [2] number of tokens    ids as uint32
 * The header is checked against the file's size when the shard is opened, every id against the vocabulary when it is
 * read, so that no id without a row in the embedding ever reaches a kernel. All offsets are 64-bit.
 *
 * A shard may be packed by Zstandard (.bin.zst; what tells is the content, not the name): the same bytes, the same
 * tokens. zst.h says which way of packing is read at what cost. */
#ifndef TRAIN_MOE_SHARD_H
#define TRAIN_MOE_SHARD_H

#include <stdbool.h>
#include <stdint.h>

#include "zst.h"

enum { SHARD_HEADER_BYTES = 1024, SHARD_TOKENS_MAX = INT32_MAX };

typedef struct {
    char *path; /* owned */
    int fd;     /* -1: opened anew for every read */
    int width;  /* bytes of an id, 2 or 4 */
    int64_t n_tokens;
    int64_t n_bytes;      /* of header and ids, unpacked */
    int64_t n_file_bytes; /* of the file: fewer if it is packed */
    uint64_t head_hash;   /* of the first 4 KiB, unpacked: the header and the first ids */
    ZstFile *packed;      /* NULL if it is not packed */
    uint64_t device, inode;
} Shard;

/* Opens `path` and checks its header; with `keep_open` the file stays open, else each read opens it (a corpus may have
 * more shards than a process may have files). `pool` outlives the shard and is for packed ones. Returns 0, or -1 with
 * the file and what it seems to be in err, and what to do about it in hint (both ERR_LEN); the shard then needs no
 * closing. A shard without tokens is refused. */
int shard_open(Shard *s, const char *path, bool keep_open, ZstPool *pool, char *err, char *hint);
void shard_close(Shard *s);

/* ids[0..n) = the tokens first .. first + n of the shard; the range must lie inside it. Returns -1 with err if the file
 * cannot be read, is damaged or has shrunk, or if an id is not below vocab_size: file, token, byte (unpacked), id and
 * vocabulary are named. Changes nothing in the shard, so threads may share it. */
int shard_read(const Shard *s, int32_t *ids, int64_t first, int64_t n, int64_t vocab_size, char *err);

/* Tells the system that these tokens will be read soon; returns at once. For packed shards nothing is done. */
void shard_will_read(const Shard *s, int64_t first, int64_t n);

/* Writes a shard durably (file.h). width 2 or 4; 0 takes 2 if every id fits, else 4. Returns -1 with err on a negative
 * id, an id above 65535 with width 2, more than SHARD_TOKENS_MAX tokens, or a failing disk. */
int shard_write(const char *path, const int32_t *ids, int64_t n, int width, char *err);

#endif
