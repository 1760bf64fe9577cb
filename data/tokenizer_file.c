/* Reading a tokenizer.json, see tokenizer.h. In this order: what could change the ids and is not supported; the
 * vocabulary, whose keys spell bytes in GPT-2's alphabet of 256 printable characters; the added tokens, spelt as they
 * are; the merges, whose ranks are their order. Every id, type and count is checked before it is used. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "json.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "tokenizer_parts.h"
#include "utf8.h"

enum { TOKENIZER_IDS_MAX = 1 << 22, ALPHABET_END = 0x144 };
static const size_t file_bytes_max = (size_t)1 << 28;

static const char gpt2_regex[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
#define DEEPSEEK_V3_WORDS                                                                                              \
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"                 \
    " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
static const char *const deepseek_v3_regex[3] = {"\\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                                                 DEEPSEEK_V3_WORDS};

static const char *const document_tokens[] = {"<|document|>",      "<|endoftext|>", "<｜begin▁of▁sentence｜>",
                                              "<|begin_of_text|>", "[BOS]",         "<s>"};

/* Spelling -> id, while the merges are read. The keys belong to the JSON tree. */
typedef struct {
    const char **keys;
    int32_t *ids;
    uint64_t n_places; /* a power of two */
} Spellings;

typedef struct {
    Tokenizer *t;
    const char *name;
    char *err;
    const cJSON *root, *model, *vocab, *merges, *added;
    Spellings spellings;
    int alphabet[ALPHABET_END]; /* code point -> byte, -1: not in the alphabet */
} Loader;

/* GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes, in order, for U+0100 and on. */
static void alphabet_fill(int alphabet[ALPHABET_END]) {
    int shifted = 0x100;
    for (int i = 0; i < ALPHABET_END; i++) alphabet[i] = -1;
    for (int byte = 0; byte < 256; byte++) {
        bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
        alphabet[printable ? byte : shifted++] = byte;
    }
}

/* The place of a spelling of n bytes, or the empty place (key NULL) where it belongs. */
static uint64_t spelling_place(const Spellings *s, const char *key, size_t n) {
    for (uint64_t at = hash_bytes(key, n, 0);; at++) {
        uint64_t i = at & (s->n_places - 1);
        if (!s->keys[i] || (strncmp(s->keys[i], key, n) == 0 && s->keys[i][n] == 0)) return i;
    }
}

/* The id of a spelling, -1 if it is not in the vocabulary. */
static int32_t spelling_id(const Spellings *s, const char *key, size_t n) {
    uint64_t place = spelling_place(s, key, n);
    return s->keys[place] ? s->ids[place] : -1;
}

static bool is_set(const cJSON *item) {
    if (!item || cJSON_IsNull(item) || cJSON_IsFalse(item)) return false;
    if (cJSON_IsString(item)) return item->valuestring[0] != 0;
    return !(cJSON_IsNumber(item) && item->valuedouble == 0);
}

static const char *type_of(const cJSON *item) {
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(item, "type");
    return cJSON_IsString(type) ? type->valuestring : "of no type";
}

static bool is_byte_level(const cJSON *item, bool use_regex) {
    const cJSON *regex = cJSON_GetObjectItemCaseSensitive(item, "use_regex");
    return strcmp(type_of(item), "ByteLevel") == 0 &&
           !is_set(cJSON_GetObjectItemCaseSensitive(item, "add_prefix_space")) &&
           (regex ? is_set(regex) : true) == use_regex;
}

static bool is_split(const cJSON *item, const char *regex) {
    const cJSON *pattern = cJSON_GetObjectItemCaseSensitive(item, "pattern");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(pattern, "Regex");
    const cJSON *behavior = cJSON_GetObjectItemCaseSensitive(item, "behavior");
    return strcmp(type_of(item), "Split") == 0 && cJSON_IsString(text) && strcmp(text->valuestring, regex) == 0 &&
           cJSON_IsString(behavior) && strcmp(behavior->valuestring, "Isolated") == 0 &&
           !is_set(cJSON_GetObjectItemCaseSensitive(item, "invert"));
}

static int read_pretokenizer(Loader *l) {
    const cJSON *pre = cJSON_GetObjectItemCaseSensitive(l->root, "pre_tokenizer");
    const cJSON *parts = cJSON_GetObjectItemCaseSensitive(pre, "pretokenizers");
    int n = strcmp(type_of(pre), "Sequence") == 0 ? cJSON_GetArraySize(parts) : 0;
    const cJSON *last = n > 0 ? cJSON_GetArrayItem(parts, n - 1) : NULL;
    bool deepseek = n == 4 && is_byte_level(last, false);
    for (int i = 0; deepseek && i < 3; i++) deepseek = is_split(cJSON_GetArrayItem(parts, i), deepseek_v3_regex[i]);
    bool gpt2 = is_byte_level(pre, true) ||
                (n == 2 && is_byte_level(last, false) && is_split(cJSON_GetArrayItem(parts, 0), gpt2_regex));
    l->t->pattern = deepseek ? PRETOKENIZE_DEEPSEEK_V3 : PRETOKENIZE_GPT2;
    if (gpt2 || deepseek) return 0;
    return err_set(l->err, "%s: the pre_tokenizer (%s) is neither GPT-2's nor DeepSeek-V3's, no other is supported",
                   l->name, pre ? type_of(pre) : "none");
}

static int refuse_unsupported(Loader *l) {
    static const char *const fields[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback",
                                         "ignore_merges"};
    const cJSON *normalizer = cJSON_GetObjectItemCaseSensitive(l->root, "normalizer");
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(normalizer, "normalizers");
    bool empty_list = cJSON_IsArray(list) && cJSON_GetArraySize(list) == 0;
    if (is_set(normalizer) && !empty_list)
        return err_set(l->err, "%s: a normalizer (%s) is not supported", l->name, type_of(normalizer));
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(l->model, "type");
    if (type && strcmp(type_of(l->model), "BPE") != 0)
        return err_set(l->err, "%s: a model %s is not supported, only byte-level BPE is", l->name, type_of(l->model));
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        if (is_set(cJSON_GetObjectItemCaseSensitive(l->model, fields[i])))
            return err_set(l->err, "%s: \"%s\" of the model is not supported", l->name, fields[i]);
    return read_pretokenizer(l);
}

/* *id = a token id in a JSON number. */
static int read_id(const Loader *l, const cJSON *item, const char *token, int32_t *id) {
    double x = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(x >= 0 && x < TOKENIZER_IDS_MAX && x == floor(x)))
        return err_set(l->err, "%s: the id of token \"%.60s\" is not an integer from 0 to %d", l->name, token,
                       TOKENIZER_IDS_MAX - 1);
    *id = (int32_t)x;
    return 0;
}

/* The first walk over all tokens: their types, and the largest id. */
static int count_ids(Loader *l) {
    int32_t id = 0, id_max = -1;
    const cJSON *item;
    cJSON_ArrayForEach(item, l->vocab) {
        if (read_id(l, item, item->string, &id) != 0) return -1;
        if (id > id_max) id_max = id;
    }
    cJSON_ArrayForEach(item, l->added) {
        const cJSON *content = cJSON_GetObjectItemCaseSensitive(item, "content");
        if (!cJSON_IsString(content) || content->valuestring[0] == 0)
            return err_set(l->err, "%s: an added token has no \"content\"", l->name);
        if (read_id(l, cJSON_GetObjectItemCaseSensitive(item, "id"), content->valuestring, &id) != 0) return -1;
        if (id > id_max) id_max = id;
        l->t->n_added++;
    }
    l->t->vocab_size = id_max + 1;
    return 0;
}

/* Copies what a vocabulary key spells to the pool; a key with a character outside the alphabet spells itself, and the
 * result is false. */
static bool token_spell(Loader *l, Token *token, const char *key, bool literal) {
    Tokenizer *t = l->t;
    size_t length = strlen(key), n = 0;
    char *out = t->pool + t->pool_used;
    for (size_t at = 0; !literal && at < length;) {
        uint32_t c;
        at += utf8_next(key + at, length - at, &c);
        literal = c >= ALPHABET_END || l->alphabet[c] < 0;
        if (!literal) out[n++] = (char)l->alphabet[c];
    }
    if (literal) {
        memcpy(out, key, length);
        n = length;
    }
    token->bytes = out;
    token->n = n;
    t->pool_used += n;
    return !literal;
}

static int read_vocab(Loader *l) {
    Tokenizer *t = l->t;
    for (int i = 0; i < 256; i++) t->byte_ids[i] = -1;
    const cJSON *item;
    cJSON_ArrayForEach(item, l->vocab) {
        int32_t id = (int32_t)item->valuedouble;
        Token *token = &t->tokens[id];
        if (token->bytes) return err_set(l->err, "%s: two tokens have the id %d", l->name, id);
        if (item->string[0] == 0) return err_set(l->err, "%s: the token of id %d is empty", l->name, id);
        uint64_t place = spelling_place(&l->spellings, item->string, strlen(item->string));
        if (l->spellings.keys[place])
            return err_set(l->err, "%s: token \"%.60s\" stands there twice", l->name, item->string);
        l->spellings.keys[place] = item->string;
        l->spellings.ids[place] = id;
        bool in_alphabet = token_spell(l, token, item->string, false);
        if (in_alphabet && token->n == 1) t->byte_ids[(unsigned char)token->bytes[0]] = id;
    }
    for (int i = 0; i < 256; i++)
        if (t->byte_ids[i] < 0)
            return err_set(l->err, "%s: no token for the byte 0x%02x, so no byte-level BPE", l->name, i);
    return 0;
}

static int compare_added(const void *a, const void *b) {
    const AddedToken *x = a, *y = b;
    if (x->n != y->n) return x->n < y->n ? 1 : -1;
    return (x->id > y->id) - (x->id < y->id);
}

static int read_added(Loader *l) {
    static const char *const fields[] = {"lstrip", "rstrip", "single_word"};
    Tokenizer *t = l->t;
    int32_t n = 0;
    const cJSON *item;
    cJSON_ArrayForEach(item, l->added) {
        const char *content = cJSON_GetObjectItemCaseSensitive(item, "content")->valuestring;
        int32_t id = (int32_t)cJSON_GetObjectItemCaseSensitive(item, "id")->valuedouble;
        Token *token = &t->tokens[id];
        int32_t same = spelling_id(&l->spellings, content, strlen(content));
        if (token->added || (token->bytes && same != id))
            return err_set(l->err, "%s: two tokens have the id %d", l->name, id);
        for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
            if (is_set(cJSON_GetObjectItemCaseSensitive(item, fields[i])))
                return err_set(l->err, "%s: \"%s\" of added token \"%.60s\" is not supported", l->name, fields[i],
                               content);
        const Token in_vocab = *token;
        token_spell(l, token, content, true);
        /* Else the bytes that the vocabulary's token stands for would come back as this text. */
        if (in_vocab.bytes && (in_vocab.n != token->n || memcmp(in_vocab.bytes, token->bytes, token->n) != 0))
            return err_set(l->err, "%s: added token \"%.60s\" spells other bytes in the vocabulary (id %d)", l->name,
                           content, id);
        token->added = true;
        token->special = is_set(cJSON_GetObjectItemCaseSensitive(item, "special"));
        t->added[n++] = (AddedToken){id, token->n};
        t->added_starts[(unsigned char)content[0]] = true;
    }
    qsort(t->added, (size_t)n, sizeof *t->added, compare_added);
    return 0;
}

/* The two spellings of a merge, "left right" or ["left", "right"]. */
static bool merge_parts(const cJSON *item, const char *part[2], size_t part_len[2]) {
    if (cJSON_IsString(item)) {
        const char *space = strchr(item->valuestring, ' ');
        if (!space) return false;
        part[0] = item->valuestring;
        part_len[0] = (size_t)(space - item->valuestring);
        part[1] = space + 1;
        part_len[1] = strlen(space + 1);
        return true;
    }
    if (!cJSON_IsArray(item) || cJSON_GetArraySize(item) != 2) return false;
    for (int i = 0; i < 2; i++) {
        const cJSON *text = cJSON_GetArrayItem(item, i);
        if (!cJSON_IsString(text)) return false;
        part[i] = text->valuestring;
        part_len[i] = strlen(text->valuestring);
    }
    return true;
}

static int read_merges(Loader *l, char *joined) {
    int32_t rank = 0;
    const cJSON *item;
    bpe_init(&l->t->merges, cJSON_GetArraySize(l->merges));
    cJSON_ArrayForEach(item, l->merges) {
        const char *part[2];
        size_t n[2];
        if (!merge_parts(item, part, n))
            return err_set(l->err, "%s: merge %d is neither \"a b\" nor [\"a\", \"b\"]", l->name, rank);
        memcpy(joined, part[0], n[0]);
        memcpy(joined + n[0], part[1], n[1]);
        int32_t left = spelling_id(&l->spellings, part[0], n[0]), right = spelling_id(&l->spellings, part[1], n[1]);
        int32_t merged = spelling_id(&l->spellings, joined, n[0] + n[1]);
        if (left < 0 || right < 0 || merged < 0)
            return err_set(l->err, "%s: merge %d (\"%.40s\" and \"%.40s\") names a token that is not in the vocabulary",
                           l->name, rank, part[0], part[1]);
        if (!bpe_add(&l->t->merges, left, right, rank, merged))
            return err_set(l->err, "%s: merge %d stands there twice", l->name, rank);
        rank++;
    }
    return 0;
}

static int load_tree(Loader *l, size_t size) {
    Tokenizer *t = l->t;
    l->model = cJSON_GetObjectItemCaseSensitive(l->root, "model");
    l->vocab = cJSON_GetObjectItemCaseSensitive(l->model, "vocab");
    l->merges = cJSON_GetObjectItemCaseSensitive(l->model, "merges");
    l->added = cJSON_GetObjectItemCaseSensitive(l->root, "added_tokens");
    if (!cJSON_IsObject(l->vocab) || !cJSON_IsArray(l->merges))
        return err_set(l->err, "%s: no \"model\" with \"vocab\" and \"merges\": not a BPE tokenizer.json", l->name);
    if (l->added && !cJSON_IsArray(l->added)) return err_set(l->err, "%s: \"added_tokens\" is not a list", l->name);
    if (refuse_unsupported(l) != 0 || count_ids(l) != 0) return -1;
    if (t->vocab_size == 0) return err_set(l->err, "%s: the vocabulary is empty", l->name);
    l->spellings.n_places = 1024;
    while (l->spellings.n_places < 2 * (uint64_t)cJSON_GetArraySize(l->vocab)) l->spellings.n_places *= 2;
    l->spellings.keys = calloc(l->spellings.n_places, sizeof *l->spellings.keys);
    l->spellings.ids = calloc(l->spellings.n_places, sizeof *l->spellings.ids);
    t->tokens = calloc((size_t)t->vocab_size, sizeof *t->tokens);
    t->added = calloc((size_t)t->n_added + 1, sizeof *t->added);
    /* No spelling is longer in memory than in the file. */
    t->pool = malloc(size + 1);
    char *joined = malloc(size + 1);
    int result = -1;
    if (!l->spellings.keys || !l->spellings.ids || !t->tokens || !t->added || !t->pool || !joined)
        err_set(l->err, "%s: no memory for %d tokens", l->name, t->vocab_size);
    else if (read_vocab(l) == 0 && read_added(l) == 0)
        result = read_merges(l, joined);
    free(joined);
    return result;
}

static int32_t find_document_token(const Tokenizer *t) {
    for (size_t i = 0; i < sizeof document_tokens / sizeof document_tokens[0]; i++) {
        for (int32_t k = 0; k < t->n_added; k++) {
            AddedToken added = t->added[k];
            if (added.n == strlen(document_tokens[i]) &&
                memcmp(t->tokens[added.id].bytes, document_tokens[i], added.n) == 0)
                return added.id;
        }
    }
    return -1;
}

int tokenizer_parse(Tokenizer **t, const char *json, size_t size, const char *name, char *err) {
    *t = NULL;
    char hint[ERR_LEN];
    cJSON *root = json_parse(json, size, name, err, hint, NULL);
    if (!root) return -1;
    Tokenizer *made = calloc(1, sizeof *made);
    CHECK(made, "no memory for a tokenizer");
    Loader l = {.t = made, .name = name, .err = err, .root = root};
    alphabet_fill(l.alphabet);
    int result = load_tree(&l, size);
    free(l.spellings.keys);
    free(l.spellings.ids);
    cJSON_Delete(root);
    if (result != 0) {
        tokenizer_free(made);
        return result;
    }
    made->document_token = find_document_token(made);
    *t = made;
    return 0;
}

int tokenizer_load(Tokenizer **t, const char *path, char *err) {
    char file[PATH_MAX];
    struct stat st;
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    *t = NULL;
    if (snprintf(file, sizeof file, "%s%s", path, folder ? "/tokenizer.json" : "") >= (int)sizeof file)
        return err_set(err, "%s: path too long", path);
    char *json;
    size_t size;
    if (file_read_all(&json, &size, file, file_bytes_max, err) != 0) return -1;
    int result = tokenizer_parse(t, json, size, file, err);
    free(json);
    return result;
}
