/* See loader.h.
 *
 * Two buffers: one lent to the caller, one the thread fills. The thread never ends the process and never prints: it
 * leaves its result and error text beside the buffer, and the caller gets them with the micro-batch it asked for. */
#include "loader.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "order.h"
#include "source.h"

/* NONE -> (caller) WANTED -> (thread) READING -> READY -> (caller) NONE. The spare buffer, `first` and `result` belong
 * to the thread while READING, else to the caller. */
typedef enum { READ_NONE, READ_WANTED, READ_READING, READ_READY } ReadState;

struct Loader {
    LoaderSpec spec;
    SampleSource source;
    SampleOrder order;
    int64_t document_token; /* -1 = not known */
    int64_t n_pass_tokens;  /* one pass: positions that are scored */
    int64_t n_pass_samples;
    MicroBatch buffers[2];
    int spare; /* index of the buffer that is not lent */

    bool has_thread;
    pthread_t thread;
    pthread_mutex_t lock; /* guards all below */
    pthread_cond_t changed;
    bool is_closing;
    ReadState state;
    int64_t first; /* of the read */
    int result;
    char err[ERR_LEN];
};

static void spec_common(LoaderSpec *spec, const Config *c, const Source *source, int64_t n_ranks) {
    memset(spec, 0, sizeof *spec);
    if (source) snprintf(spec->path, sizeof spec->path, "%s", source->path);
    spec->vocab_size = c->model.vocab_size;
    spec->seq_len = c->train.seq_len;
    spec->depth = c->model.num_nextn_predict_layers;
    spec->micro_batch = c->train.micro_batch_size;
    spec->stride = c->train.micro_batch_size * n_ranks;
    spec->seed = c->run.seed;
    spec->document_mask = c->data.document_mask;
    spec->document_token = c->data.document_token;
    spec->eos_token_id = c->model.eos_token_id;
}

int loader_spec_train(LoaderSpec *spec, const Config *c, int64_t n_ranks, char *err, char *hint) {
    const DataConfig *d = &c->data;
    if (hint) hint[0] = 0;
    if (!d->synthetic && d->n_train == 0) {
        err_set(hint, "give it a file, a pattern such as \"shards/name/train_*.bin\", or \"synthetic\"");
        return err_set(err, "data.train: no source is named");
    }
    if (!d->synthetic && d->n_train > 1) {
        err_set(hint, "name one source with one pattern");
        return err_set(err, "data.train: %d sources named, one is read by this version", d->n_train);
    }
    spec_common(spec, c, d->synthetic ? NULL : &d->train[0], n_ranks);
    snprintf(spec->label, sizeof spec->label, "data.train");
    spec->shuffle = d->shuffle;
    spec->n_skip = d->n_skip;
    memcpy(spec->skip, d->skip, sizeof spec->skip);
    return 0;
}

void loader_spec_val(LoaderSpec *spec, const Config *c, int index, int64_t n_ranks) {
    CHECK(index >= 0 && index < c->data.n_val, "validation set %d of %d", index, c->data.n_val);
    const Source *source = &c->data.val[index];
    spec_common(spec, c, source, n_ranks);
    snprintf(spec->label, sizeof spec->label, "data.val '%s'", source->name);
    spec->one_pass = true;
    spec->max_tokens = c->eval.tokens;
}

/* The configuration's token, else the JSON's, else the model's end of text. */
static int resolve_document_token(Loader *l, char *err, char *hint) {
    const LoaderSpec *spec = &l->spec;
    l->document_token = spec->document_token;
    if (l->document_token < 0) l->document_token = l->source.sidecar.document_token;
    if (l->document_token < 0) l->document_token = spec->eos_token_id;
    if (!spec->document_mask) return 0;
    if (l->document_token < 0) {
        err_set(hint, "set data.document_token to the id that begins each document, or data.document_mask to false");
        return err_set(err, "data.document_mask: no document token is known");
    }
    if (l->document_token >= spec->vocab_size) {
        err_set(hint, "set data.document_token to the id that begins each document");
        return err_set(err, "data.document_mask: document token %lld is outside the vocabulary of %lld",
                       (long long)l->document_token, (long long)spec->vocab_size);
    }
    return 0;
}

static int open_parts(Loader *l, char *err, char *hint) {
    const LoaderSpec *spec = &l->spec;
    if (spec->path[0] == 0)
        source_open_synthetic(&l->source, spec->seed, spec->vocab_size, spec->seq_len, spec->depth);
    else if (source_open(&l->source, spec->label, spec->path, spec->vocab_size, spec->seq_len, spec->depth, err,
                         hint) != 0)
        return -1;
    if (resolve_document_token(l, err, hint) != 0) return -1;
    if (sample_order_init(&l->order, spec->seed, l->source.n_samples, spec->shuffle, spec->skip, spec->n_skip, err) !=
        0)
        return -1;
    if (spec->one_pass) {
        CHECK(!l->source.synthetic && spec->n_skip == 0, "one pass over an endless or skipping source");
        l->n_pass_tokens = l->source.n_samples * spec->seq_len;
        if (spec->max_tokens > 0 && spec->max_tokens < l->n_pass_tokens) l->n_pass_tokens = spec->max_tokens;
        l->n_pass_samples = (l->n_pass_tokens + spec->seq_len - 1) / spec->seq_len;
    }
    for (int i = 0; i < 2; i++)
        if (micro_batch_alloc(&l->buffers[i], spec->micro_batch, spec->seq_len, spec->depth, err) != 0) return -1;
    return 0;
}

int loader_open(Loader **loader, const LoaderSpec *spec, char *err, char *hint) {
    if (hint) hint[0] = 0;
    *loader = NULL;
    Loader *l = (Loader *)calloc(1, sizeof *l);
    if (!l) return err_set(err, "%s: no memory", spec->label);
    l->spec = *spec;
    CHECK(pthread_mutex_init(&l->lock, NULL) == 0 && pthread_cond_init(&l->changed, NULL) == 0, "no lock");
    if (open_parts(l, err, hint) != 0) {
        loader_close(l);
        return -1;
    }
    *loader = l;
    return 0;
}

void loader_close(Loader *l) {
    if (!l) return;
    if (l->has_thread) {
        pthread_mutex_lock(&l->lock);
        l->is_closing = true;
        pthread_cond_broadcast(&l->changed);
        pthread_mutex_unlock(&l->lock);
        pthread_join(l->thread, NULL);
    }
    for (int i = 0; i < 2; i++) micro_batch_free(&l->buffers[i]);
    source_close(&l->source);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

int loader_fill(const Loader *l, int64_t first_sample, MicroBatch *mb, char *err) {
    const LoaderSpec *spec = &l->spec;
    CHECK(mb->n_sequences == spec->micro_batch && mb->seq_len == spec->seq_len && mb->depth == spec->depth,
          "micro-batch %lld x %lld, depth %d", (long long)mb->n_sequences, (long long)mb->seq_len, mb->depth);
    int32_t *window = (int32_t *)malloc((size_t)source_window(&l->source) * sizeof *window);
    if (!window) return err_set(err, "%s: no memory for a sample", spec->label);
    int64_t document_token = spec->document_mask ? l->document_token : NO_DOCUMENT_MASK;
    int result = 0;
    mb->first_sample = first_sample;
    for (int64_t b = 0; b < spec->micro_batch && result == 0; b++) {
        int64_t consumed = first_sample + b, n_scored = spec->seq_len;
        if (spec->one_pass && consumed >= l->n_pass_samples) {
            micro_batch_pad(mb, b);
            continue;
        }
        int64_t n_left = l->n_pass_tokens - consumed * spec->seq_len;
        if (spec->one_pass && n_left < n_scored) n_scored = n_left;
        int64_t number = sample_order_number(&l->order, consumed);
        result = source_read(&l->source, window, sample_order_index(&l->order, number, NULL), err);
        if (result == 0) micro_batch_set(mb, b, window, document_token, n_scored);
    }
    free(window);
    micro_batch_count(mb);
    return result;
}

static void *read_ahead(void *arg) {
    Loader *l = (Loader *)arg;
    pthread_mutex_lock(&l->lock);
    while (!l->is_closing) {
        if (l->state != READ_WANTED) {
            pthread_cond_wait(&l->changed, &l->lock);
            continue;
        }
        l->state = READ_READING;
        MicroBatch *mb = &l->buffers[l->spare];
        int64_t first = l->first;
        pthread_mutex_unlock(&l->lock);
        char err[ERR_LEN] = "";
        int result = loader_fill(l, first, mb, err);
        pthread_mutex_lock(&l->lock);
        l->result = result;
        memcpy(l->err, err, sizeof err);
        l->state = READ_READY;
        pthread_cond_broadcast(&l->changed);
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

/* Signals are for the main thread, which knows what to do with them. */
static int start_thread(Loader *l, char *err) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&l->thread, NULL, read_ahead, l);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) return err_set(err, "%s: cannot start the reading thread: %s", l->spec.label, strerror(rc));
    l->has_thread = true;
    return 0;
}

static void want(Loader *l, int64_t first_sample) {
    l->first = first_sample;
    l->state = READ_WANTED;
    pthread_cond_broadcast(&l->changed);
}

int loader_next(Loader *l, int64_t first_sample, MicroBatch *out, char *err) {
    CHECK(first_sample >= 0, "sample %lld", (long long)first_sample);
    if (!l->has_thread && start_thread(l, err) != 0) return -1;
    pthread_mutex_lock(&l->lock);
    if (l->state == READ_NONE || l->first != first_sample) {
        while (l->state == READ_READING) pthread_cond_wait(&l->changed, &l->lock);
        want(l, first_sample);
    }
    while (l->state != READ_READY) pthread_cond_wait(&l->changed, &l->lock);
    l->state = READ_NONE;
    int result = l->result;
    if (result == 0) {
        *out = l->buffers[l->spare];
        l->spare = 1 - l->spare;
        int64_t next = first_sample + l->spec.stride;
        if (!l->spec.one_pass || next < l->n_pass_samples) want(l, next);
    } else {
        err_set(err, "%s", l->err);
    }
    pthread_mutex_unlock(&l->lock);
    return result;
}

int64_t loader_samples(const Loader *l) {
    return l->spec.one_pass ? l->n_pass_samples : l->source.n_samples;
}

int64_t loader_tokens(const Loader *l) {
    return l->spec.one_pass ? l->n_pass_tokens : l->source.n_tokens;
}

int loader_n_shards(const Loader *l) {
    return l->source.n_shards;
}

uint64_t loader_identity(const Loader *l) {
    return source_identity(&l->source);
}

int64_t loader_document_token(const Loader *l) {
    return l->document_token;
}

const Sidecar *loader_sidecar(const Loader *l) {
    return &l->source.sidecar;
}

const char *loader_warning(const Loader *l) {
    return l->source.warning;
}

int64_t loader_sample_number(const Loader *l, int64_t consumed) {
    return sample_order_number(&l->order, consumed);
}

const char *loader_shared_shard(const Loader *a, const Loader *b) {
    return source_shared_shard(&a->source, &b->source);
}
