/* See source.h. */
#include "source.h"

#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/file.h"
#include "kernels/base/rng.h"
#include "order.h"

/* Shards kept open per source. The rest is opened for each read, as a process may often have only 1,024 files. */
enum { SHARDS_OPEN_MAX = 32 };

/* Length of a name without ".zst". */
static size_t plain_length(const char *name) {
    const size_t length = strlen(name);
    return length > 4 && strcmp(name + length - 4, ".zst") == 0 ? length - 4 : length;
}

/* By name without ".zst", so that packing a shard moves no other. */
static int compare_names(const void *a, const void *b) {
    const char *x = *(char *const *)a, *y = *(char *const *)b;
    const size_t n = plain_length(x), m = plain_length(y);
    const int order = memcmp(x, y, n < m ? n : m);
    return order ? order : n != m ? (n > m) - (n < m) : strcmp(x, y);
}

/* For glob: a folder that is not there is no match, but one that may not be read is an error. */
static int is_fatal(const char *path, int error) {
    (void)path;
    return error != ENOENT && error != ENOTDIR;
}

/* Adds the files of a pattern. A name that exists is taken as it is, whatever characters it holds. */
static int find_files(glob_t *found, const char *label, const char *pattern, char *err, char *hint) {
    char quoted[2 * PATH_LEN];
    size_t n = 0;
    bool is_literal = path_exists(pattern);
    for (const char *p = pattern; *p; p++) {
        if (n + 3 > sizeof quoted) return err_set(err, "%s: path too long: '%s'", label, pattern);
        if (is_literal && strchr("*?[\\", *p)) quoted[n++] = '\\';
        quoted[n++] = *p;
    }
    quoted[n] = 0;
    int rc = glob(quoted, GLOB_NOSORT | (found->gl_pathc ? GLOB_APPEND : 0), is_fatal, found);
    if (rc == 0) return 0;
    if (rc != GLOB_NOMATCH) return err_set(err, "%s: cannot list '%s': %s", label, pattern, strerror(errno));
    char folder[PATH_LEN];
    if (pattern[0] != '/' && getcwd(folder, sizeof folder))
        err_set(hint, "the path starts at %s; scripts/prepare_data.py turns text into shards", folder);
    else
        err_set(hint, "scripts/prepare_data.py turns text into shards (--help shows how)");
    return err_set(err, "%s: no file matches '%s'", label, pattern);
}

int source_find(glob_t *found, const char *label, const char *const *patterns, int n, char *err, char *hint) {
    memset(found, 0, sizeof *found);
    for (int i = 0; i < n; i++)
        if (find_files(found, label, patterns[i], err, hint) != 0) {
            globfree(found);
            memset(found, 0, sizeof *found);
            return -1;
        }
    qsort(found->gl_pathv, found->gl_pathc, sizeof found->gl_pathv[0], compare_names);
    return 0;
}

static size_t folder_length(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) + 1 : 0;
}

/* Every folder's JSON must fit the model and agree with the first folder's. */
static int check_sidecars(SampleSource *s, char *err, char *hint) {
    for (int i = 0; i < s->n_shards; i++) {
        const char *path = s->shards[i].path;
        size_t length = folder_length(path);
        if (i > 0 && length == folder_length(s->shards[i - 1].path) && memcmp(path, s->shards[i - 1].path, length) == 0)
            continue;
        Sidecar here;
        if (sidecar_read(&here, path, err) != 0) return -1;
        if (i == 0) s->sidecar = here;
        if (here.found && here.vocab_size > s->vocab_size) {
            err_set(hint, "set model.vocab_size to %lld, or prepare the data with another tokenizer",
                    (long long)here.vocab_size);
            return err_set(err, "%s: the shards use a vocabulary of %lld, model.vocab_size is %lld", here.path,
                           (long long)here.vocab_size, (long long)s->vocab_size);
        }
        const Sidecar *first = &s->sidecar;
        if (here.found != first->found || here.vocab_size != first->vocab_size ||
            here.document_token != first->document_token) {
            err_set(hint, "shards of one source must come from one tokenizer");
            return err_set(err, "%s and %s differ: vocabulary %lld and %lld, document token %lld and %lld", first->path,
                           here.path, (long long)first->vocab_size, (long long)here.vocab_size,
                           (long long)first->document_token, (long long)here.document_token);
        }
    }
    return 0;
}

/* 16 bits cannot name all ids of a vocabulary above 65,536. That is right only where the JSON says that the data use
 * fewer; without it, the ids have most likely been cut when they were written. */
static int check_widths(const SampleSource *s, char *err, char *hint) {
    int64_t vocab_size = s->sidecar.found ? s->sidecar.vocab_size : s->vocab_size;
    for (int i = 0; i < s->n_shards; i++) {
        if (s->shards[i].width == 4 || vocab_size <= UINT16_MAX + 1) continue;
        err_set(hint, "write the shards again with 32-bit ids (magic 20240801), or say the vocabulary in a data.json "
                      "beside them");
        return err_set(err, "%s: 16-bit ids for a vocabulary of %lld", s->shards[i].path, (long long)vocab_size);
    }
    return 0;
}

/* Fills first_sample and n_samples. */
static int count_samples(SampleSource *s, char *err, char *hint) {
    int n_short = 0;
    const Shard *longest = &s->shards[0], *shortest = &s->shards[0];
    for (int i = 0; i < s->n_shards; i++) {
        const Shard *shard = &s->shards[i];
        int64_t usable = shard->n_tokens - 1 - s->depth;
        int64_t n = usable > 0 ? usable / s->seq_len : 0;
        n_short += n == 0;
        if (shard->n_tokens > longest->n_tokens) longest = shard;
        if (shard->n_tokens < shortest->n_tokens) shortest = shard;
        s->first_sample[i + 1] = s->first_sample[i] + n;
        s->n_tokens += shard->n_tokens;
    }
    s->n_samples = s->first_sample[s->n_shards];
    long long window = (long long)source_window(s);
    if (s->n_samples == 0) {
        int64_t largest = longest->n_tokens - 1 - s->depth;
        if (largest > 0)
            err_set(hint, "lower train.seq_len to at most %lld, or give a longer shard", (long long)largest);
        else
            err_set(hint, "give a longer shard");
        return err_set(err,
                       "%s: %s holds %lld tokens, one sample needs %lld (train.seq_len %lld + 1 + "
                       "model.num_nextn_predict_layers %d)%s",
                       s->label, longest->path, (long long)longest->n_tokens, window, (long long)s->seq_len, s->depth,
                       s->n_shards > 1 ? ", and no other shard is longer" : "");
    }
    if (n_short > 0)
        err_set(s->warning,
                "%s: %d of %d shards are shorter than one sample (%lld tokens) and give nothing: %s holds %lld",
                s->label, n_short, s->n_shards, window, shortest->path, (long long)shortest->n_tokens);
    return 0;
}

static bool is_packed_name(const char *path, const char *plain) {
    const size_t length = plain_length(path);
    return path[length] && strlen(plain) == length && memcmp(path, plain, length) == 0;
}

static void warn_of_unpacking(SampleSource *s) {
    int64_t bytes;
    const int n = zst_pool_unpacked(s->pool, &bytes);
    if (n == 0) return;
    const size_t used = strlen(s->warning);
    snprintf(s->warning + used, sizeof s->warning - used,
             "%s%s: %d of %d shards are packed in frames too large to enter, and were unpacked to a temporary file of "
             "%.3g MB; scripts/prepare_data.py --pack packs them in small ones",
             used ? "; " : "", s->label, n, s->n_shards, 1e-6 * (double)bytes);
}

static int open_shards(SampleSource *s, const glob_t *found, char *err, char *hint) {
    if (found->gl_pathc > INT32_MAX / 2) return err_set(err, "%s: too many files", s->label);
    s->shards = (Shard *)calloc(found->gl_pathc, sizeof *s->shards);
    s->pool = zst_pool_new();
    s->first_sample = (int64_t *)calloc(found->gl_pathc + 1, sizeof *s->first_sample);
    if (!s->shards || !s->first_sample) return err_set(err, "%s: no memory for the list of shards", s->label);
    for (size_t i = 0; i < found->gl_pathc; i++) {
        const char *path = found->gl_pathv[i];
        if (i > 0 && is_packed_name(path, found->gl_pathv[i - 1])) {
            err_set(hint, "narrow the pattern, or remove one of the two");
            return err_set(err, "%s: %s and %s hold the same tokens", s->label, found->gl_pathv[i - 1], path);
        }
        if (shard_open(&s->shards[i], path, i < SHARDS_OPEN_MAX, s->pool, err, hint) != 0) return -1;
        s->n_shards++;
    }
    return 0;
}

static void init_source(SampleSource *s, const char *label, int64_t vocab_size, int64_t seq_len, int depth) {
    CHECK(vocab_size >= 1 && seq_len >= 1 && depth >= 0, "vocabulary %lld, seq_len %lld, depth %d",
          (long long)vocab_size, (long long)seq_len, depth);
    memset(s, 0, sizeof *s);
    snprintf(s->label, sizeof s->label, "%s", label);
    s->vocab_size = vocab_size;
    s->seq_len = seq_len;
    s->depth = depth;
    s->sidecar.document_token = -1;
}

int source_open(SampleSource *s, const char *label, const char *pattern, int64_t vocab_size, int64_t seq_len, int depth,
                char *err, char *hint) {
    init_source(s, label, vocab_size, seq_len, depth);
    if (hint) hint[0] = 0;
    glob_t found;
    int result = source_find(&found, s->label, &pattern, 1, err, hint);
    if (result == 0) result = open_shards(s, &found, err, hint);
    globfree(&found);
    if (result == 0) result = check_sidecars(s, err, hint);
    if (result == 0) result = check_widths(s, err, hint);
    if (result == 0) result = count_samples(s, err, hint);
    if (result == 0) warn_of_unpacking(s);
    if (result != 0) source_close(s);
    return result;
}

void source_open_synthetic(SampleSource *s, uint64_t seed, int64_t vocab_size, int64_t seq_len, int depth) {
    init_source(s, "data.train", vocab_size, seq_len, depth);
    s->synthetic = true;
    s->seed = seed;
    s->n_samples = SAMPLES_ENDLESS;
}

void source_close(SampleSource *s) {
    for (int i = 0; i < s->n_shards; i++) shard_close(&s->shards[i]);
    zst_pool_free(s->pool);
    free(s->shards);
    free(s->first_sample);
    memset(s, 0, sizeof *s);
}

int64_t source_window(const SampleSource *s) {
    return s->seq_len + 1 + s->depth;
}

static void read_synthetic(const SampleSource *s, int32_t *window, int64_t index) {
    for (int64_t t = 0; t < source_window(s); t++) {
        uint64_t bits = rng_bits(s->seed, RNG_SYNTHETIC, (uint64_t)index, (uint64_t)t) >> 32;
        window[t] = (int32_t)(bits * (uint64_t)s->vocab_size >> 32);
    }
}

/* The shard of a sample, and its first token there. */
static const Shard *find_sample(const SampleSource *s, int64_t index, int64_t *first) {
    CHECK(index >= 0 && index < s->n_samples, "sample %lld of %lld", (long long)index, (long long)s->n_samples);
    int low = 0, high = s->n_shards; /* first_sample[low] <= index < first_sample[high] */
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (s->first_sample[middle] <= index)
            low = middle;
        else
            high = middle;
    }
    *first = (index - s->first_sample[low]) * s->seq_len;
    return &s->shards[low];
}

int source_read(const SampleSource *s, int32_t *window, int64_t index, char *err) {
    if (s->synthetic) {
        read_synthetic(s, window, index);
        return 0;
    }
    int64_t first;
    const Shard *shard = find_sample(s, index, &first);
    return shard_read(shard, window, first, source_window(s), s->vocab_size, err);
}

void source_will_read(const SampleSource *s, int64_t index) {
    if (s->synthetic) return;
    int64_t first;
    const Shard *shard = find_sample(s, index, &first);
    shard_will_read(shard, first, source_window(s));
}

uint64_t source_identity(const SampleSource *s) {
    if (s->synthetic) return hash_bytes("synthetic", 9, 0);
    uint64_t hash = (uint64_t)s->n_shards;
    for (int i = 0; i < s->n_shards; i++) {
        const Shard *shard = &s->shards[i];
        const char *name = shard->path + folder_length(shard->path);
        hash = hash_bytes(name, plain_length(name), hash);
        const uint64_t facts[2] = {(uint64_t)shard->n_bytes, shard->head_hash};
        hash = hash_bytes(facts, sizeof facts, hash);
    }
    return hash;
}

const char *source_shared_shard(const SampleSource *a, const SampleSource *b) {
    for (int i = 0; i < a->n_shards; i++) {
        for (int j = 0; j < b->n_shards; j++) {
            const Shard *x = &a->shards[i], *y = &b->shards[j];
            bool same_file = x->device == y->device && x->inode == y->inode;
            if (same_file || (x->n_bytes == y->n_bytes && x->head_hash == y->head_hash)) return x->path;
        }
    }
    return NULL;
}
