/* The small JSON beside the shards: "data.json" in their folder, written by scripts/prepare_data.py. Floor 1.
 *
 *     {"version": 1, "tokenizer": "tokenizer.json", "vocab_size": 1025, "document_token": 1024, "documents": 6,
 *      "train_documents": 6, "val_documents": 6, "bytes_per_token": 2.77, "train_tokens": 1310720, "train_bytes":
 *      3630694, "val_tokens": 149000, "val_bytes": 412730, "ngram": {"bigram": 2.45, "3-gram": 1.9, "4-gram": 1.5}}
 *
 * It says what the ids mean, and what n-grams of bytes reach on the validation text (nats a byte). Other members are
 * let be. Shards without it are trained on as well; then the configuration has to say it. */
#ifndef TRAIN_MOE_SIDECAR_H
#define TRAIN_MOE_SIDECAR_H

#include <stdbool.h>
#include <stdint.h>

#include "config.h"

enum { NGRAMS_MAX = 8, NGRAM_NAME_LEN = 16 };

typedef struct {
    char name[NGRAM_NAME_LEN];
    double nats_per_byte;
} Ngram;

typedef struct {
    bool found;
    char path[PATH_LEN];      /* of the JSON itself */
    char tokenizer[PATH_LEN]; /* as written: a file name relative to the folder, or a built-in name; "" = not said */
    int64_t vocab_size;
    int64_t document_token;                                   /* -1 = not said */
    double bytes_per_token;                                   /* 0 = not said */
    int64_t train_tokens, val_tokens, train_bytes, val_bytes; /* -1 = not said */
    int64_t documents, train_documents, val_documents;        /* of few documents each has a part in both */
    int n_ngrams;
    Ngram ngrams[NGRAMS_MAX]; /* as written */
} Sidecar;

/* Reads the JSON in the folder of `shard_path`. Returns 0; without such a file `found` is false. Returns -1 with err if
 * it is there but broken: no JSON, another version, a value of the wrong type or out of its range. */
int sidecar_read(Sidecar *s, const char *shard_path, char *err);

/* Bytes of text per token of the validation part, else of all; 0 = not known. Turns nats a token into nats a byte. */
double sidecar_val_bytes_per_token(const Sidecar *s);

/* The tokenizer's file as a path that can be opened: the written name, in the JSON's folder unless it is absolute.
 * Returns -1 with err if it does not fit buf. */
int sidecar_tokenizer_path(char *buf, int64_t buf_len, const Sidecar *s, char *err);

#endif
