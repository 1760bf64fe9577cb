/* See sidecar.h. */
#include "sidecar.h"

#include <stdio.h>
#include <string.h>

#include "json.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"

enum { SIDECAR_BYTES_MAX = 1 << 20 };

/* path = folder of `file`, then name. */
static int path_beside(char *path, int64_t path_len, const char *file, const char *name, char *err) {
    const char *slash = strrchr(file, '/');
    int folder_len = slash ? (int)(slash - file) + 1 : 0;
    if (snprintf(path, (size_t)path_len, "%.*s%s", folder_len, file, name) >= path_len)
        return err_set(err, "%s: path too long", file);
    return 0;
}

/* An integer member in [min, max]; absent: *value stays. */
static int get_integer(int64_t *value, const cJSON *root, const char *key, int64_t min, int64_t max, const char *path,
                       char *err) {
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(root, key);
    char found[96];
    int64_t x;
    if (!item) return 0;
    if (json_int64(item, &x) != 0 || x < min || x > max)
        return err_set(err, "%s: \"%s\" must be an integer in [%lld, %lld], found %s", path, key, (long long)min,
                       (long long)max, json_describe(item, found, sizeof found));
    *value = x;
    return 0;
}

/* *value = a number above 0. */
static int get_positive(double *value, const cJSON *item) {
    return json_double(item, value) == 0 && *value > 0 ? 0 : -1;
}

static int get_ngrams(Sidecar *s, const cJSON *root, char *err) {
    const cJSON *ladder = cJSON_GetObjectItemCaseSensitive(root, "ngram"), *item;
    if (!ladder) return 0;
    if (!cJSON_IsObject(ladder)) return err_set(err, "%s: \"ngram\" must be an object", s->path);
    cJSON_ArrayForEach(item, ladder) {
        double nats;
        if (get_positive(&nats, item) != 0)
            return err_set(err, "%s: \"ngram\": \"%.100s\" must be a number above 0", s->path, item->string);
        if (s->n_ngrams == NGRAMS_MAX || strlen(item->string) >= NGRAM_NAME_LEN)
            return err_set(err, "%s: \"ngram\": more than %d members, or a long name", s->path, NGRAMS_MAX);
        Ngram *ngram = &s->ngrams[s->n_ngrams++];
        strcpy(ngram->name, item->string);
        ngram->nats_per_byte = nats;
    }
    return 0;
}

static int get_members(Sidecar *s, const cJSON *root, char *err) {
    const int64_t count_max = (int64_t)1 << 52;
    int64_t version = -1;
    if (!cJSON_IsObject(root)) return err_set(err, "%s: not a JSON object", s->path);
    if (get_integer(&version, root, "version", 0, INT32_MAX, s->path, err) != 0) return -1;
    if (version != 1) return err_set(err, "%s: \"version\" %lld found, 1 expected", s->path, (long long)version);
    if (get_integer(&s->vocab_size, root, "vocab_size", 1, INT32_MAX, s->path, err) != 0) return -1;
    if (s->vocab_size == 0) return err_set(err, "%s: \"vocab_size\" is missing", s->path);
    if (get_integer(&s->document_token, root, "document_token", 0, s->vocab_size - 1, s->path, err) != 0 ||
        get_integer(&s->train_tokens, root, "train_tokens", 0, count_max, s->path, err) != 0 ||
        get_integer(&s->val_tokens, root, "val_tokens", 0, count_max, s->path, err) != 0 ||
        get_integer(&s->train_bytes, root, "train_bytes", 0, count_max, s->path, err) != 0 ||
        get_integer(&s->val_bytes, root, "val_bytes", 0, count_max, s->path, err) != 0 ||
        get_integer(&s->documents, root, "documents", 0, count_max, s->path, err) != 0 ||
        get_integer(&s->train_documents, root, "train_documents", 0, count_max, s->path, err) != 0 ||
        get_integer(&s->val_documents, root, "val_documents", 0, count_max, s->path, err) != 0)
        return -1;
    const cJSON *ratio = cJSON_GetObjectItemCaseSensitive(root, "bytes_per_token");
    if (ratio && get_positive(&s->bytes_per_token, ratio) != 0)
        return err_set(err, "%s: \"bytes_per_token\" must be a number above 0", s->path);
    const cJSON *tokenizer = cJSON_GetObjectItemCaseSensitive(root, "tokenizer");
    if (tokenizer) {
        if (!cJSON_IsString(tokenizer)) return err_set(err, "%s: \"tokenizer\" must be a string", s->path);
        if (strlen(tokenizer->valuestring) >= sizeof s->tokenizer)
            return err_set(err, "%s: \"tokenizer\" is too long", s->path);
        strcpy(s->tokenizer, tokenizer->valuestring);
    }
    return get_ngrams(s, root, err);
}

int sidecar_read(Sidecar *s, const char *shard_path, char *err) {
    memset(s, 0, sizeof *s);
    s->document_token = s->train_tokens = s->val_tokens = s->train_bytes = s->val_bytes = -1;
    s->documents = s->train_documents = s->val_documents = -1;
    if (path_beside(s->path, sizeof s->path, shard_path, "data.json", err) != 0) return -1;
    if (!path_exists(s->path)) return 0;
    char hint[ERR_LEN];
    cJSON *root = json_load(s->path, SIDECAR_BYTES_MAX, err, hint);
    if (!root) return -1;
    const int result = get_members(s, root, err);
    cJSON_Delete(root);
    s->found = result == 0;
    return result;
}

double sidecar_val_bytes_per_token(const Sidecar *s) {
    return s->val_bytes > 0 && s->val_tokens > 0 ? (double)s->val_bytes / (double)s->val_tokens : s->bytes_per_token;
}

int sidecar_tokenizer_path(char *buf, int64_t buf_len, const Sidecar *s, char *err) {
    if (s->tokenizer[0] != '/') return path_beside(buf, buf_len, s->path, s->tokenizer, err);
    if (snprintf(buf, (size_t)buf_len, "%s", s->tokenizer) >= buf_len)
        return err_set(err, "%s: path too long", s->tokenizer);
    return 0;
}
