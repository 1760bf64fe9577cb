/* Targets: readers of JSON. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/config.h"
#include "data/json.h"
#include "data/sidecar.h"
#include "data/tokenizer.h"
#include "data/utf8.h"
#include "kernels/base/file.h"
#include "model/train/manifest.h"
#include "model/train/manifest_state.h"
#include "tests/data/config_base.h"
#include "tests/fuzz/fuzz.h"

static void seed_text(const char *text) {
    fuzz_seed(text, strlen(text));
}

/* ---- JSON -------------------------------------------------------------------------------------------------------- */

static void walk(const cJSON *item) {
    char buf[96];
    int64_t integer;
    double number;
    FUZZ_EXPECT(json_line(item) >= 1, "line %d", json_line(item));
    json_describe(item, buf, sizeof buf);
    if (cJSON_IsNumber(item)) FUZZ_EXPECT(json_spelling(item)[0], "a number without a spelling");
    if (json_int64(item, &integer) == 0 && json_double(item, &number) == 0)
        FUZZ_EXPECT((double)integer == number, "%s is %lld and %g", json_spelling(item), (long long)integer, number);
    const cJSON *child;
    cJSON_ArrayForEach(child, item) walk(child);
}

int fuzz_json(const uint8_t *data, size_t size) {
    char err[ERR_LEN], hint[ERR_LEN], key[JSON_PATH_LEN];
    cJSON *root = json_parse((const char *)data, size, "x.json", err, hint, key);
    if (root)
        walk(root);
    else
        fuzz_expect_error(err, hint);
    cJSON_Delete(root);
    return 0;
}

void seeds_json(void) {
    seed_text("[1, -0.5e3, \"a\\u00e9\\n\", {\"a\": [], \"//\": null, \"//\": true, \"b\": {\"c\": 1e308}}]");
    seed_text("\xEF\xBB\xBF{\"x\": 18446744073709551615, \"y\": \"\\ud83d\\ude00 \xC3\xA9\"}\n");
    seed_text("7");
}

/* ---- the configuration ------------------------------------------------------------------------------------------- */

enum { SETS_MAX = 8 };

/* What is written has to be read back to the same. */
static void check_config(const Config *c) {
    static Config again;
    char err[ERR_LEN], hint[ERR_LEN], changed[1024];
    char *text = config_to_json(c);
    const int read = config_parse(&again, text, strlen(text), "x.json", NULL, 0, err, hint);
    FUZZ_EXPECT(read == 0, "not read back: %s\n%s", err, text);
    FUZZ_EXPECT(config_compare(c, &again, changed, sizeof changed, err) == 0, "%s", err);
    FUZZ_EXPECT(!changed[0], "changed: %s", changed);
    free(text);
}

/* The text, and behind a zero byte "--set" arguments, each ended by a zero byte. */
int fuzz_config(const uint8_t *data, size_t size) {
    static Config c;
    static char copy[FUZZ_BYTES_MAX + 1];
    const char *sets[SETS_MAX];
    char err[ERR_LEN], hint[ERR_LEN];
    memcpy(copy, data, size);
    copy[size] = 0;
    const size_t text_size = strnlen(copy, size);
    int n_sets = 0;
    for (size_t at = text_size + 1; at < size && n_sets < SETS_MAX; at += strlen(copy + at) + 1)
        sets[n_sets++] = copy + at;
    if (config_parse(&c, copy, text_size, "x.json", sets, n_sets, err, hint) == 0)
        check_config(&c);
    else
        fuzz_expect_error(err, hint);
    return 0;
}

void seeds_config(void) {
    static const char sets[] = CONFIG_BASE "\0train.lr=[[0, 1e-3], [1e6, 1e-4]]\0data.val=[{\"name\": \"a\", "
                                           "\"path\": \"b\"}]\0model.rope_scaling.rope_type=yarn\0train.tokens=1e9";
    seed_text(CONFIG_BASE);
    fuzz_seed(sets, sizeof sets);
    seed_text("{\"version\": 1, \"model\": \"configs\", \"data\": {\"train\": \"a\"}}");
    fuzz_seed_file("configs/tiny.json");
    fuzz_seed_file("configs/deepseek_v3.json");
    fuzz_seed_file("configs/v2_lite.json");
    fuzz_seed_file("configs/moonlight_16b.json");
    static Config c;
    char err[ERR_LEN], hint[ERR_LEN];
    CHECK(config_load(&c, "configs/v2_lite.json", NULL, 0, err, hint) == 0, "%s", err);
    char *text = config_to_json(&c);
    seed_text(text);
    free(text);
}

/* ---- data.json beside the shards --------------------------------------------------------------------------------- */

int fuzz_sidecar(const uint8_t *data, size_t size) {
    char err[ERR_LEN] = "", path[PATH_LEN];
    Sidecar s;
    if (sidecar_read(&s, fuzz_file("data.json", data, size), err) != 0) {
        fuzz_expect_error(err, NULL);
        return 0;
    }
    const double bytes_per_token = sidecar_val_bytes_per_token(&s);
    FUZZ_EXPECT(s.found && s.vocab_size > 0 && s.document_token < s.vocab_size, "vocabulary %lld, document token %lld",
                (long long)s.vocab_size, (long long)s.document_token);
    FUZZ_EXPECT(isfinite(bytes_per_token) && bytes_per_token >= 0, "%g bytes a token", bytes_per_token);
    if (sidecar_tokenizer_path(path, sizeof path, &s, err) != 0) fuzz_expect_error(err, NULL);
    return 0;
}

void seeds_sidecar(void) {
    seed_text("{\"version\": 1, \"tokenizer\": \"tokenizer.json\", \"vocab_size\": 1025, \"document_token\": 1024, "
              "\"documents\": 6, \"bytes_per_token\": 2.77, \"train_tokens\": 1310720, \"train_bytes\": 3630694, "
              "\"val_tokens\": 149000, \"val_bytes\": 412730, \"ngram\": {\"bigram\": 2.45, \"3-gram\": 1.9}}\n");
    seed_text("{\"version\": 1, \"vocab_size\": 256}");
}

/* ---- tokenizer.json ---------------------------------------------------------------------------------------------- */

/* Any bytes decode to themselves, added tokens matched or not. */
static void check_tokenizer(const Tokenizer *t, const char *text, size_t n, bool match_added) {
    int32_t ids[256];
    const int64_t n_ids = tokenizer_encode(t, text, n, match_added, ids, 256);
    size_t at = 0;
    FUZZ_EXPECT(n_ids <= (int64_t)n && n <= 256, "%lld ids of %zu bytes", (long long)n_ids, n);
    for (int64_t i = 0; i < n_ids; i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(t, ids[i], &length);
        FUZZ_EXPECT(bytes && length <= n - at && memcmp(bytes, text + at, length) == 0, "id %d at byte %zu", ids[i],
                    at);
        at += length;
    }
    FUZZ_EXPECT(at == n, "%zu bytes of %zu", at, n);
}

int fuzz_tokenizer(const uint8_t *data, size_t size) {
    static const char text[] = "abc ab\tabab  'll <|document|>\n\xC3\xA9\xFF\x00 12345 \xE4\xB8\xAD\xC4\xA0";
    char err[ERR_LEN] = "";
    Tokenizer *t;
    if (tokenizer_parse(&t, (const char *)data, size, "tokenizer.json", err) != 0) {
        fuzz_expect_error(err, NULL);
        return 0;
    }
    FUZZ_EXPECT(tokenizer_document_token(t) < tokenizer_vocab_size(t), "document token");
    check_tokenizer(t, text, sizeof text, false);
    check_tokenizer(t, text, sizeof text, true);
    check_tokenizer(t, (const char *)data + size / 2, size - size / 2 < 256 ? size - size / 2 : 256, true);
    tokenizer_free(t);
    return 0;
}

static void seed_tokenizer(const char *merges, const char *pre_tokenizer) {
    char *text;
    size_t size;
    int shifted = 0x100;
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "no memory");
    fputs("{\"added_tokens\": [{\"id\": 261, \"content\": \"<|document|>\", \"special\": true}, {\"id\": 262, "
          "\"content\": \"ab\\t\"}], \"model\": {\"type\": \"BPE\", \"vocab\": {",
          out);
    for (int byte = 0; byte < 256; byte++) { /* GPT-2's alphabet, as in data/tokenizer_file.c */
        const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
        char spelling[5] = "";
        spelling[utf8_put(spelling, (uint32_t)(printable ? byte : shifted++))] = 0;
        json_write_string(out, spelling);
        fprintf(out, ": %d, ", byte);
    }
    fprintf(out, "\"ab\": 256, \"abab\": 257, \"Ġa\": 258}, \"merges\": [%s]}, \"pre_tokenizer\": %s}\n", merges,
            pre_tokenizer);
    CHECK(fclose(out) == 0, "no memory");
    fuzz_seed(text, size);
    free(text);
}

void seeds_tokenizer(void) {
    seed_tokenizer("\"a b\", \"ab ab\", \"Ġ a\"", "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}");
    seed_tokenizer(
        "[\"a\", \"b\"], [\"Ġ\", \"a\"]",
        "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"pattern\": {\"Regex\": "
        "\"'s|'t|'re|'ve|'m|'ll|'d| ?\\\\p{L}+| ?\\\\p{N}+| ?[^\\\\s\\\\p{L}\\\\p{N}]+|\\\\s+(?!\\\\S)|\\\\s+\"}, "
        "\"behavior\": \"Isolated\"}, {\"type\": \"ByteLevel\", \"use_regex\": false}]}");
}

/* ---- manifest.json of a checkpoint ------------------------------------------------------------------------------- */

static void read_manifest(const void *data, size_t size) {
    char err[ERR_LEN] = "";
    Manifest m, again;
    fuzz_file(MANIFEST_NAME, data, size);
    if (manifest_read(&m, fuzz_folder(), err) != 0) {
        fuzz_expect_error(err, NULL);
        return;
    }
    for (int64_t i = 0; i < m.n_tensors; i++) {
        const ManifestTensor *t = &m.tensors[i];
        int64_t covered = 0;
        for (int64_t k = 0; k < t->n_slices; k++) {
            const ManifestSlice *s = &t->slices[k];
            FUZZ_EXPECT(s->offset == covered && s->file >= 0 && s->file < m.n_files, "%s", t->name);
            covered += s->extent;
        }
        FUZZ_EXPECT(covered == manifest_numel(t), "%s: %lld elements", t->name, (long long)covered);
        FUZZ_EXPECT(manifest_find(&m, t->name) == t, "%s is not found", t->name);
    }
    if (manifest_check_files(&m, fuzz_folder(), err) != 0) fuzz_expect_error(err, NULL);
    FUZZ_EXPECT(manifest_write(&m, fuzz_folder(), err) == 0, "%s", err);
    FUZZ_EXPECT(manifest_read(&again, fuzz_folder(), err) == 0, "%s", err);
    manifest_free(&again);
    manifest_free(&m);
}

/* As it stands, and with the right hash at its end. */
int fuzz_manifest(const uint8_t *data, size_t size) {
    static char mended[FUZZ_BYTES_MAX + MANIFEST_TAIL_LEN + 1];
    const size_t key_len = sizeof MANIFEST_TAIL_KEY - 1;
    size_t body = size;
    read_manifest(data, size);
    for (size_t i = 0; i + key_len <= size; i++)
        if (memcmp(data + i, MANIFEST_TAIL_KEY, key_len) == 0) body = i;
    memcpy(mended, data, body);
    sprintf(mended + body, MANIFEST_TAIL_FORMAT, (unsigned long long)hash_bytes(data, body, 0));
    read_manifest(mended, body + MANIFEST_TAIL_LEN);
    return 0;
}

static void seed_manifest(Manifest *m) {
    char path[128], err[ERR_LEN];
    CHECK(manifest_write(m, fuzz_folder(), err) == 0, "%s", err);
    snprintf(path, sizeof path, "%s/" MANIFEST_NAME, fuzz_folder());
    fuzz_seed_file(path);
}

void seeds_manifest(void) {
    ManifestSlice halves[] = {{0, 40, 0, 1}, {40, 24, 1, 2}}, whole = {0, 64, 1, 3};
    ManifestTensor tensors[] = {
        {"model.norm.weight", SAFETENSORS_F32, 1, {64, 0}, 2, halves},
        {"adam.m.model.norm.weight", SAFETENSORS_BF16, 2, {8, 8}, 1, &whole},
    };
    ManifestFile files[] = {{"state_00000.safetensors", 4096}, {"state_00001.safetensors", 0}};
    Manifest m = {.ranks = 1, .n_files = 2, .n_tensors = 2, .files = files, .tensors = tensors};
    char config[] = "{\"version\": 1, \"run\": {\"seed\": 18446744073709551615}, \"x\": [1.5, true, null, \"a\"]}";
    m.info.config_json = config;
    m.info.state.step = 1000;
    m.info.state.best_val = INFINITY;
    m.info.state.loss_z = (ZWindow){.size = 4, .n = 3, .head = 0, .value = {1.5, NAN, -2}};
    int64_t load[] = {3, 0, 1ll << 40, 7};
    m.info.loads = (ExpertLoads){2, 2, load};
    seed_manifest(&m);
    m.info.loads = (ExpertLoads){0};
    m.n_files = m.n_tensors = 0;
    seed_manifest(&m);
}
