/* A source of samples: the shards a pattern names, or synthetic ids. Floor 1.
 *
 * A sample is a window of seq_len + 1 + depth ids (depth = number of MTP layers): the inputs, the target of the last
 * one, and as many further ids as the deepest MTP layer looks ahead. The windows of a shard of n tokens start at 0,
 * seq_len, 2 seq_len, ...: floor((n - 1 - depth) / seq_len) samples, neighbours sharing their 1 + depth border ids. A
 * window never crosses into another shard. Samples are numbered through the shards in the order of their names. */
#ifndef TRAIN_MOE_SOURCE_H
#define TRAIN_MOE_SOURCE_H

#include <glob.h>
#include <stdbool.h>
#include <stdint.h>

#include "config.h"
#include "kernels/base/check.h"
#include "shard.h"
#include "sidecar.h"

enum { LABEL_LEN = NAME_LEN + 16 };

typedef struct {
    char label[LABEL_LEN]; /* for messages: "data.train", "data.val 'austen'" */
    int64_t vocab_size, seq_len;
    int depth;
    bool synthetic;
    uint64_t seed; /* of the synthetic ids */
    int n_shards;
    ZstPool *pool;         /* of the packed shards; NULL if synthetic */
    Shard *shards;         /* sorted by path, bytewise: the same order on every machine and in every locale */
    int64_t *first_sample; /* n_shards + 1 numbers: of each shard, and the total */
    int64_t n_samples;     /* >= 1; SAMPLES_ENDLESS if synthetic */
    int64_t n_tokens;      /* of all shards; 0 if synthetic */
    Sidecar sidecar;       /* of the first shard's folder */
    char warning[ERR_LEN]; /* one line, or "" */
} SampleSource;

/* *found = the files of the patterns (a file that is there, or a glob each), sorted as a source sorts them, for
 * globfree. Returns -1 with err and hint if one matches nothing. */
int source_find(glob_t *found, const char *label, const char *const *patterns, int n, char *err, char *hint);

/* Opens and checks every shard that `pattern` (a file or a glob) matches, and the JSON beside them. Refused, with one
 * line in err and what to do in hint: no match, anything shard_open refuses, ids of 16 bits for a larger vocabulary,
 * shards made for a larger vocabulary or with different tokenizers, no shard long enough for one sample. Single shards
 * that are too short, and packed ones that had to be unpacked (zst.h), only make a warning. On failure nothing needs
 * closing. */
int source_open(SampleSource *s, const char *label, const char *pattern, int64_t vocab_size, int64_t seq_len, int depth,
                char *err, char *hint);

/* Ids drawn uniformly below vocab_size; sample i is a pure function of (seed, i). Cannot fail, holds no memory. */
void source_open_synthetic(SampleSource *s, uint64_t seed, int64_t vocab_size, int64_t seq_len, int depth);

void source_close(SampleSource *s);

/* Ids of a window: seq_len + 1 + depth. */
int64_t source_window(const SampleSource *s);

/* window[0..source_window) = the ids of sample `index`, all below vocab_size. A pure function of (source, index);
 * threads may share the source. Returns -1 with err as shard_read does. */
int source_read(const SampleSource *s, int32_t *window, int64_t index, char *err);

/* Tells the system that the sample will be read soon. */
void source_will_read(const SampleSource *s, int64_t index);

/* A hash of which data these are: name (without folders and .zst), size and first 4 KiB (both unpacked) of every shard,
 * in order. Equal hashes at a resume mean that sample numbers mean what they meant; packing a shard changes nothing. */
uint64_t source_identity(const SampleSource *s);

/* The path of the first shard of `a` that is also in `b`, as the same file or as a copy (equal size and first 4 KiB),
 * or NULL: validation data must not be trained on. */
const char *source_shared_shard(const SampleSource *a, const SampleSource *b);

#endif
