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

#include "kernels/base/clock.h"
#include "kernels/base/file.h"
#include "kernels/base/rng.h"
#include "mix.h"
#include "order.h"
#include "source.h"

/* NONE -> (caller) WANTED -> (thread) READING -> READY -> (caller) NONE. The spare buffer, `first` and `result` belong
 * to the thread while READING, else to the caller. */
typedef enum { READ_NONE, READ_WANTED, READ_READING, READ_READY } ReadState;

struct Loader {
    LoaderSpec spec;
    int n_sources;
    SampleSource sources[SOURCES_MAX];
    SampleOrder orders[SOURCES_MAX]; /* data.skip is that of [0] */
    Mix mix;
    const Sidecar *sidecar; /* of the first source that has one, else of the first */
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
    double waited_s; /* of the caller's thread */
};

static void spec_common(LoaderSpec *spec, const Config *c, const Source *sources, int n_sources, int64_t n_ranks) {
    memset(spec, 0, sizeof *spec);
    spec->n_sources = n_sources;
    memcpy(spec->sources, sources, (size_t)n_sources * sizeof *sources);
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
    spec_common(spec, c, d->train, d->synthetic ? 0 : d->n_train, n_ranks);
    snprintf(spec->label, sizeof spec->label, "data.train");
    spec->shuffle = d->shuffle;
    spec->n_skip = d->n_skip;
    memcpy(spec->skip, d->skip, sizeof spec->skip);
    return 0;
}

void loader_spec_val(LoaderSpec *spec, const Config *c, int index, int64_t n_ranks) {
    CHECK(index >= 0 && index < c->data.n_val, "validation set %d of %d", index, c->data.n_val);
    const Source *source = &c->data.val[index];
    spec_common(spec, c, source, 1, n_ranks);
    snprintf(spec->label, sizeof spec->label, "data.val '%s'", source->name);
    spec->one_pass = true;
    spec->max_tokens = c->eval.tokens;
}

/* The configuration's token, else the JSON's, else the model's end of text. */
static int resolve_document_token(Loader *l, char *err, char *hint) {
    const LoaderSpec *spec = &l->spec;
    l->document_token = spec->document_token;
    if (l->document_token < 0) l->document_token = l->sidecar->document_token;
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

/* Tokens of all sources must mean the same. Shards without a JSON say nothing of theirs. */
static int check_sidecars(Loader *l, char *err, char *hint) {
    l->sidecar = &l->sources[0].sidecar;
    for (int k = 0; k < l->n_sources; k++) {
        const Sidecar *first = l->sidecar, *here = &l->sources[k].sidecar;
        if (!here->found) continue;
        if (!first->found) l->sidecar = first = here;
        if (here->vocab_size == first->vocab_size && here->document_token == first->document_token) continue;
        err_set(hint, "the sources of a run must come from one tokenizer");
        return err_set(err, "%s and %s differ: vocabulary %lld and %lld, document token %lld and %lld", first->path,
                       here->path, (long long)first->vocab_size, (long long)here->vocab_size,
                       (long long)first->document_token, (long long)here->document_token);
    }
    return 0;
}

static int open_sources(Loader *l, char *err, char *hint) {
    const LoaderSpec *spec = &l->spec;
    double weights[SOURCES_MAX] = {1};
    if (spec->n_sources == 0) {
        source_open_synthetic(&l->sources[0], spec->seed, spec->vocab_size, spec->seq_len, spec->depth);
        l->n_sources = 1;
    }
    for (int k = 0; k < spec->n_sources; k++) {
        const Source *s = &spec->sources[k];
        char label[LABEL_LEN];
        snprintf(label, sizeof label, spec->n_sources > 1 ? "data.train '%s'" : "%s",
                 spec->n_sources > 1 ? s->name : spec->label);
        if (source_open(&l->sources[k], label, s->path, spec->vocab_size, spec->seq_len, spec->depth, err, hint) != 0)
            return -1;
        l->n_sources = k + 1;
        weights[k] = s->weight;
    }
    mix_init(&l->mix, weights, l->n_sources);
    /* Each source has its own permutations; the first, those of a run with it alone. */
    for (int k = 0; k < l->n_sources; k++)
        if (sample_order_init(&l->orders[k], k ? mix64(spec->seed + (uint64_t)k) : spec->seed, l->sources[k].n_samples,
                              spec->shuffle, spec->skip, spec->n_skip, err) != 0)
            return -1;
    return check_sidecars(l, err, hint);
}

static int open_parts(Loader *l, char *err, char *hint) {
    const LoaderSpec *spec = &l->spec;
    if (open_sources(l, err, hint) != 0 || resolve_document_token(l, err, hint) != 0) return -1;
    if (spec->one_pass) {
        CHECK(spec->n_sources == 1 && spec->n_skip == 0, "one pass over an endless, mixed or skipping source");
        l->n_pass_tokens = l->sources[0].n_samples * spec->seq_len;
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
    for (int k = 0; k < l->n_sources; k++) source_close(&l->sources[k]);
    pthread_cond_destroy(&l->changed);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

/* The source of a consumed sample, and its number there. */
static const SampleSource *find_sample(const Loader *l, int64_t consumed, int64_t *index) {
    int64_t local;
    const int k = mix_at(&l->mix, sample_order_number(&l->orders[0], consumed), &local);
    *index = sample_order_index(&l->orders[k], local, NULL);
    return &l->sources[k];
}

int loader_fill(const Loader *l, int64_t first_sample, MicroBatch *mb, char *err) {
    const LoaderSpec *spec = &l->spec;
    CHECK(mb->n_sequences == spec->micro_batch && mb->seq_len == spec->seq_len && mb->depth == spec->depth,
          "micro-batch %lld x %lld, depth %d", (long long)mb->n_sequences, (long long)mb->seq_len, mb->depth);
    int32_t *window = (int32_t *)malloc((size_t)source_window(&l->sources[0]) * sizeof *window);
    if (!window) return err_set(err, "%s: no memory for a sample", spec->label);
    const int64_t document_token = spec->document_mask ? l->document_token : NO_DOCUMENT_MASK;
    const int64_t n_left = l->n_pass_samples - first_sample;
    const int64_t n = spec->one_pass && n_left < spec->micro_batch ? (n_left > 0 ? n_left : 0) : spec->micro_batch;
    int64_t index;
    int result = 0;
    mb->first_sample = first_sample;
    for (int64_t b = 0; b < n; b++) { /* the disk may fetch them all at once */
        const SampleSource *source = find_sample(l, first_sample + b, &index);
        source_will_read(source, index);
    }
    for (int64_t b = 0; b < n && result == 0; b++) {
        const int64_t scored = l->n_pass_tokens - (first_sample + b) * spec->seq_len;
        const SampleSource *source = find_sample(l, first_sample + b, &index);
        result = source_read(source, window, index, err);
        if (result == 0)
            micro_batch_set(mb, b, window, document_token,
                            spec->one_pass && scored < spec->seq_len ? scored : spec->seq_len);
    }
    for (int64_t b = n; b < spec->micro_batch; b++) micro_batch_pad(mb, b);
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
    const double start = clock_s();
    pthread_mutex_lock(&l->lock);
    if (l->state == READ_NONE || l->first != first_sample) {
        while (l->state == READ_READING) pthread_cond_wait(&l->changed, &l->lock);
        want(l, first_sample);
    }
    while (l->state != READ_READY) pthread_cond_wait(&l->changed, &l->lock);
    l->waited_s += clock_s() - start;
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

double loader_waited_s(const Loader *l) {
    return l->waited_s;
}

int64_t loader_samples(const Loader *l) {
    if (l->spec.one_pass) return l->n_pass_samples;
    int64_t n = 0;
    if (l->spec.n_sources == 0) return SAMPLES_ENDLESS;
    for (int k = 0; k < l->n_sources; k++) n += l->sources[k].n_samples;
    return n;
}

int64_t loader_tokens(const Loader *l) {
    if (l->spec.one_pass) return l->n_pass_tokens;
    int64_t n = 0;
    for (int k = 0; k < l->n_sources; k++) n += l->sources[k].n_tokens;
    return n;
}

int loader_n_shards(const Loader *l) {
    int n = 0;
    for (int k = 0; k < l->n_sources; k++) n += l->sources[k].n_shards;
    return n;
}

uint64_t loader_identity(const Loader *l) {
    uint64_t hash = source_identity(&l->sources[0]);
    for (int k = 0; l->n_sources > 1 && k < l->n_sources; k++) {
        const uint64_t facts[2] = {source_identity(&l->sources[k]), l->mix.share[k]};
        hash = hash_bytes(facts, sizeof facts, hash);
    }
    return hash;
}

int64_t loader_document_token(const Loader *l) {
    return l->document_token;
}

const Sidecar *loader_sidecar(const Loader *l) {
    return l->sidecar;
}

int loader_n_sources(const Loader *l) {
    return l->n_sources;
}

/* Those of source k among the sample numbers below `number`. */
static int64_t count_below(const Loader *l, int k, int64_t number) {
    int64_t counts[SOURCES_MAX];
    mix_counts(&l->mix, number, counts);
    return counts[k];
}

LoaderSource loader_source(const Loader *l, int k, int64_t consumed) {
    CHECK(k >= 0 && k < l->n_sources, "source %d of %d", k, l->n_sources);
    const SampleSource *source = &l->sources[k];
    const SampleOrder *order = &l->orders[0];
    LoaderSource s = {l->spec.sources[k].name, source->warning,   1, source->n_shards,
                      source->n_tokens,        source->n_samples, 0};
    double weights = 0;
    for (int i = 0; i < l->spec.n_sources; i++) weights += l->spec.sources[i].weight;
    if (weights > 0) s.share = l->spec.sources[k].weight / weights;
    const int64_t number = sample_order_number(order, consumed);
    s.n_used = count_below(l, k, number);
    for (int i = 0; i < order->n_skip && order->skip[i][0] < number; i++)
        s.n_used -= count_below(l, k, order->skip[i][1]) - count_below(l, k, order->skip[i][0]);
    return s;
}

int64_t loader_sample_number(const Loader *l, int64_t consumed) {
    return sample_order_number(&l->orders[0], consumed);
}

const char *loader_shared_shard(const Loader *a, const Loader *b) {
    const char *shared = NULL;
    for (int k = 0; k < a->n_sources && !shared; k++)
        for (int i = 0; i < b->n_sources && !shared; i++) shared = source_shared_shard(&a->sources[k], &b->sources[i]);
    return shared;
}
