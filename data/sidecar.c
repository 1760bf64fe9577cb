/* See sidecar.h. */
#include "sidecar.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/file.h"

enum { SIDECAR_BYTES_MAX = 1 << 20 };

static const double exact_integer_max = 9007199254740992.0; /* 2^53: JSON numbers arrive as doubles */

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
    if (!item) return 0;
    double x = item->valuedouble;
    if (!cJSON_IsNumber(item) || !isfinite(x) || x != floor(x))
        return err_set(err, "%s: \"%s\" must be an integer", path, key);
    if (fabs(x) >= exact_integer_max || (int64_t)x < min || (int64_t)x > max)
        return err_set(err, "%s: \"%s\" is %.17g, outside %lld..%lld", path, key, x, (long long)min, (long long)max);
    *value = (int64_t)x;
    return 0;
}

static bool is_positive(const cJSON *item) {
    return cJSON_IsNumber(item) && isfinite(item->valuedouble) && item->valuedouble > 0;
}

static int get_ngrams(Sidecar *s, const cJSON *root, char *err) {
    const cJSON *ladder = cJSON_GetObjectItemCaseSensitive(root, "ngram"), *item;
    if (!ladder) return 0;
    if (!cJSON_IsObject(ladder)) return err_set(err, "%s: \"ngram\" must be an object", s->path);
    cJSON_ArrayForEach(item, ladder) {
        if (!is_positive(item)) return err_set(err, "%s: \"ngram\": \"%s\" must be above 0", s->path, item->string);
        if (s->n_ngrams == NGRAMS_MAX || strlen(item->string) >= NGRAM_NAME_LEN)
            return err_set(err, "%s: \"ngram\": more than %d members, or a long name", s->path, NGRAMS_MAX);
        Ngram *ngram = &s->ngrams[s->n_ngrams++];
        strcpy(ngram->name, item->string);
        ngram->nats_per_byte = item->valuedouble;
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
    if (ratio) {
        if (!is_positive(ratio)) return err_set(err, "%s: \"bytes_per_token\" must be a number above 0", s->path);
        s->bytes_per_token = ratio->valuedouble;
    }
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
    char *text;
    size_t size;
    if (file_read_all(&text, &size, s->path, SIDECAR_BYTES_MAX, err) != 0) return -1;
    const char *end = NULL;
    int result;
    /* The zero byte behind the text counts, so that anything after the object is an error. */
    cJSON *root = cJSON_ParseWithLengthOpts(text, size + 1, &end, 1);
    if (!root)
        result = err_set(err, "%s: not valid JSON near byte %lld", s->path, end ? (long long)(end - text) : 0LL);
    else
        result = get_members(s, root, err);
    cJSON_Delete(root);
    free(text);
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
