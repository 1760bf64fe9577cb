/* What check_data.c (reading) and check_data_print.c (what is said of it) share. */
#ifndef TRAIN_MOE_TRAIN_CHECK_DATA_H
#define TRAIN_MOE_TRAIN_CHECK_DATA_H

#include "bar.h"
#include "data/documents.h"
#include "data/source.h"
#include "run.h"

enum { EXCERPT_TOKENS = 80, SPLITS = 2 };

/* One row of the table. */
typedef struct {
    char *name; /* "shards/austen/train_" */
    int split;  /* 0 train_*, 1 val_*, -1 neither */
    int n_shards;
    int64_t n_tokens, n_documents, n_text, n_bytes, n_file_bytes;
} CheckSeries;

/* The folder at hand: what its data.json says, and what was found of it. */
typedef struct {
    char path[PATH_LEN]; /* "shards/austen/", or "" */
    Sidecar sidecar;
    int64_t vocab_size;   /* INT32_MAX: not known */
    bool is_text;         /* the tokenizer is that of these shards */
    int n_shards[SPLITS]; /* whole ones */
    int64_t n_tokens[SPLITS], n_text[SPLITS], n_documents[SPLITS];
} CheckFolder;

typedef struct {
    const Args *args;
    glob_t files;
    ZstPool *pool;
    CheckFolder folder;
    CheckSeries *series; /* as many as files at most */
    int n_series;
    Documents documents;
    int64_t series_first; /* documents before this series */
    Tokenizer *tokenizer; /* NULL: none */
    char tokenizer_path[PATH_LEN];
    int32_t text_bytes_room;
    int32_t *text_bytes; /* of each id; NULL without a tokenizer */
    uint8_t *is_used;    /* ids below used_room */
    int64_t used_room, n_used;
    int64_t largest_id, n_tokens;
    int32_t excerpt[EXCERPT_TOKENS];
    int n_excerpt;
    int n_damaged;
    Bar bar;
} CheckData;

/* All that was found, on stdout, the summary last; with --quiet that alone. */
void check_data_print(CheckData *c, double seconds);

#endif
