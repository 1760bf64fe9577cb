/* See hf.h: the tokenizer's files. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "hf.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"

#define TOKENIZER_BYTES_MAX ((size_t)256 << 20)

/* What may lie beside a tokenizer.json and belongs to it. */
static const char *const companions[] = {"special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
                                         "vocab.json", "merges.txt"};
enum { N_COMPANIONS = sizeof companions / sizeof *companions };

static int copy_file(const char *from, const char *to, char *err) {
    char *data;
    size_t size;
    if (file_read_all(&data, &size, from, TOKENIZER_BYTES_MAX, err) != 0) return -1;
    int result = file_write_durable(to, data, size, err);
    free(data);
    return result;
}

/* The spelling of an added token, or NULL. Borrowed from the tree. */
static const char *added_token(const cJSON *tokenizer, int64_t id) {
    const cJSON *item;
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(tokenizer, "added_tokens")) {
        int64_t found;
        const cJSON *content = cJSON_GetObjectItemCaseSensitive(item, "content");
        if (cJSON_IsString(content) && json_int64(cJSON_GetObjectItemCaseSensitive(item, "id"), &found) == 0 &&
            found == id)
            return content->valuestring;
    }
    return NULL;
}

static void put(cJSON *object, const char *name, cJSON *value) {
    CHECK(value, "no memory for a tokenizer_config.json");
    cJSON_DeleteItemFromObjectCaseSensitive(object, name);
    cJSON_AddItemToObject(object, name, value);
}

static void put_token(cJSON *config, const char *name, const cJSON *tokenizer, const Config *c, int64_t id) {
    const char *text = added_token(tokenizer, id >= 0 ? id : c->data.document_token);
    if (text && !cJSON_HasObjectItem(config, name)) put(config, name, cJSON_CreateString(text));
}

/* Numbers are printed as they were written: 1000000000000000019884624838656 stays an integer. */
static void keep_spelling(cJSON *item) {
    if (cJSON_IsNumber(item) && *json_spelling(item)) item->type = cJSON_Raw;
    cJSON *child;
    cJSON_ArrayForEach(child, item) keep_spelling(child);
}

/* The file beside the tokenizer with another class, or one made anew. DeepSeek's own names a Llama class, with which
 * transformers 5 loses the spaces. */
static int write_config(const char *folder, const char *beside, const cJSON *tokenizer, const Config *c, char *err) {
    char hint[ERR_LEN], path[PATH_MAX];
    cJSON *config = path_exists(beside) ? json_load(beside, TOKENIZER_BYTES_MAX, err, hint) : cJSON_CreateObject();
    if (!config) return -1;
    keep_spelling(config);
    put(config, "tokenizer_class", cJSON_CreateString("PreTrainedTokenizerFast"));
    cJSON_DeleteItemFromObjectCaseSensitive(config, "auto_map");
    if (!cJSON_HasObjectItem(config, "model_max_length"))
        put(config, "model_max_length", cJSON_CreateNumber((double)c->model.max_position_embeddings));
    if (!cJSON_HasObjectItem(config, "clean_up_tokenization_spaces"))
        put(config, "clean_up_tokenization_spaces", cJSON_CreateFalse());
    put_token(config, "bos_token", tokenizer, c, c->model.bos_token_id);
    put_token(config, "eos_token", tokenizer, c, c->model.eos_token_id);
    char *text = cJSON_Print(config);
    CHECK(text, "no memory for a tokenizer_config.json");
    snprintf(path, sizeof path, "%s/tokenizer_config.json", folder);
    int result = file_write_durable(path, text, strlen(text), err);
    free(text);
    cJSON_Delete(config);
    return result;
}

int hf_tokenizer_write(const char *folder, const char *tokenizer, const Config *c, char *err) {
    char from[PATH_MAX], to[PATH_MAX], hint[ERR_LEN];
    const char *slash = strrchr(tokenizer, '/');
    const int folder_len = slash ? (int)(slash - tokenizer) + 1 : 0;
    cJSON *tree = json_load(tokenizer, TOKENIZER_BYTES_MAX, err, hint);
    if (!tree) return -1;
    snprintf(to, sizeof to, "%s/tokenizer.json", folder);
    int result = copy_file(tokenizer, to, err);
    snprintf(from, sizeof from, "%.*stokenizer_config.json", folder_len, tokenizer);
    if (result == 0) result = write_config(folder, from, tree, c, err);
    for (int i = 0; i < N_COMPANIONS && result == 0; i++) {
        snprintf(from, sizeof from, "%.*s%s", folder_len, tokenizer, companions[i]);
        snprintf(to, sizeof to, "%s/%s", folder, companions[i]);
        if (path_exists(from)) result = copy_file(from, to, err);
    }
    cJSON_Delete(tree);
    return result;
}
