/* The loader: micro-batches by their place in the data, read ahead by a thread. Floor 1.
 *
 * The only position is the count of consumed samples, and the caller keeps it: any micro-batch can be asked for at any
 * time, so a resume, a skipped update or a replay needs no rewinding here. Which source a sample number belongs to says
 * mix.h, how the samples of a source are ordered order.h, what a sample is source.h, what a micro-batch holds batch.h.
 *
 *   training    endless: several sources by their weights, of each epoch after epoch, shuffled unless told otherwise
 *   validation  one pass in file order, at most max_tokens. Behind the end come padding sequences, so that the targets
 *               of all micro-batches are exactly the evaluated tokens, whatever their size. It has its own loader and
 *               is asked for from sample 0 on each time, so training never notices. */
#ifndef TRAIN_MOE_LOADER_H
#define TRAIN_MOE_LOADER_H

#include <stdbool.h>
#include <stdint.h>

#include "batch.h"
#include "config.h"
#include "kernels/base/check.h"
#include "sidecar.h"

typedef struct {
    char label[NAME_LEN + 16]; /* for messages */
    int n_sources;             /* 0 = synthetic */
    Source sources[SOURCES_MAX];
    int64_t vocab_size, seq_len;
    int depth;           /* MTP layers */
    int64_t micro_batch; /* sequences of a micro-batch */
    int64_t stride;      /* samples from one micro-batch of this rank to its next: what the thread reads ahead */
    uint64_t seed;
    bool shuffle;
    int n_skip; /* ranges of sample numbers that are stepped over, order.h */
    int64_t skip[SKIP_RANGES_MAX][2];
    bool document_mask;
    int64_t document_token; /* -1 = what the JSON beside the shards says, else eos_token_id */
    int64_t eos_token_id;   /* -1 = not given */
    bool one_pass;          /* validation, of one source */
    int64_t max_tokens;     /* of the pass; 0 = all */
} LoaderSpec;

/* The loader of data.train, for one of n_ranks ranks that each take micro_batch_size samples in turn. Returns -1 with
 * err and hint if there is no source. */
int loader_spec_train(LoaderSpec *spec, const Config *c, int64_t n_ranks, char *err, char *hint);
/* The loader of data.val[index] over eval.tokens. */
void loader_spec_val(LoaderSpec *spec, const Config *c, int index, int64_t n_ranks);

typedef struct Loader Loader;

/* Opens the sources and makes the buffers; the thread starts with the first loader_next. Returns 0 and a loader for
 * loader_close, or -1 with one line in err and what to do in hint (both ERR_LEN): what source_open refuses,
 * sources that differ in vocabulary or document token, bad data.skip ranges, a document mask without a document token
 * below vocab_size. */
int loader_open(Loader **loader, const LoaderSpec *spec, char *err, char *hint);
void loader_close(Loader *l); /* NULL is fine */

/* *out = the micro-batch of the consumed samples first_sample .. first_sample + micro_batch - 1, borrowed until the
 * next call; behind it the thread reads the one at first_sample + stride. Returns -1 with err, also for what the thread
 * met while reading ahead, once that micro-batch is asked for. A failed call may be repeated. From one thread only. */
int loader_next(Loader *l, int64_t first_sample, MicroBatch *out, char *err);

/* The same into the caller's micro-batch (allocated with the loader's sizes), here and now, without the thread. */
int loader_fill(const Loader *l, int64_t first_sample, MicroBatch *mb, char *err);

/* Seconds that loader_next has waited for data since the loader was opened. */
double loader_waited_s(const Loader *l);

int64_t loader_samples(const Loader *l);   /* of an epoch of all sources or a pass; INT64_MAX = endless (synthetic) */
int64_t loader_tokens(const Loader *l);    /* training: in the shards; one pass: targets of depth 0; 0 if synthetic */
int loader_n_shards(const Loader *l);      /* 0 if synthetic */
uint64_t loader_identity(const Loader *l); /* source_identity; of several sources, of all with their weights */
int64_t loader_document_token(const Loader *l); /* as resolved; -1 = not known */
const Sidecar *loader_sidecar(const Loader *l); /* the first there is; its `found` is false where there is none */

/* One of the sources. */
typedef struct {
    const char *name;    /* borrowed, as is the warning */
    const char *warning; /* one line for the user, or "" */
    double share;        /* of the samples: its weight over all */
    int n_shards;
    int64_t n_tokens, n_samples;
    int64_t n_used; /* how many of the first `consumed` samples were its; over n_samples: its epochs */
} LoaderSource;
int loader_n_sources(const Loader *l); /* 1 if synthetic */
LoaderSource loader_source(const Loader *l, int k, int64_t consumed);

/* The sample number of consumed sample c: c, further by the data.skip ranges before it. */
int64_t loader_sample_number(const Loader *l, int64_t consumed);
/* A shard of `a` that `b` holds too (source_shared_shard), or NULL. */
const char *loader_shared_shard(const Loader *a, const Loader *b);

#endif
