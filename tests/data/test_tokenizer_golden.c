/* Texts and their ids by the libraries that GPT-2's and DeepSeek-V3's tokenizers come from: both ways, 20 pairs each.
 * scripts/make_golden_tokenizers.py wrote the files. */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/tokenizer.h"
#include "kernels/base/file.h"
#include "tests/test.h"

enum { IDS_MAX = 256 };

static void expect_pair(const Tokenizer *t, const cJSON *pair, const char *name) {
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(pair, "text"));
    const cJSON *list = cJSON_GetObjectItem(pair, "ids");
    const int n_want = cJSON_GetArraySize(list);
    int32_t want[IDS_MAX], ids[IDS_MAX];
    REQUIRE(text && n_want > 0 && n_want <= IDS_MAX, "%s: a pair of %d ids", name, n_want);
    for (int i = 0; i < n_want; i++) want[i] = cJSON_GetArrayItem(list, i)->valueint;

    const int64_t n = tokenizer_encode(t, text, strlen(text), true, ids, IDS_MAX);
    EXPECT_EQ(n, n_want);
    for (int i = 0; i < n && i < n_want; i++)
        if (ids[i] != want[i]) {
            EXPECT(false, "%s: id %d of \"%s\" is %d, not %d", name, i, text, ids[i], want[i]);
            break;
        }
    char decoded[2048];
    size_t at = 0;
    for (int i = 0; i < n_want; i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(t, want[i], &length);
        REQUIRE(bytes && at + length <= sizeof decoded, "%s: id %d has no bytes", name, want[i]);
        memcpy(decoded + at, bytes, length);
        at += length;
    }
    EXPECT(at == strlen(text) && memcmp(decoded, text, at) == 0, "%s: the ids of \"%s\" decode to \"%.*s\"", name, text,
           (int)at, decoded);
}

static void expect_golden(const char *name, int32_t document_token, const char *special) {
    char path[256], err[ERR_LEN] = "", *file;
    size_t size;
    snprintf(path, sizeof path, "tests/golden/tokenizer_%s.json", name);
    REQUIRE(file_read_all(&file, &size, path, 1 << 20, err) == 0, "%s", err);
    cJSON *root = cJSON_ParseWithLength(file, size);
    REQUIRE(root, "%s is not JSON", path);
    char *json = cJSON_PrintUnformatted(cJSON_GetObjectItem(root, "tokenizer"));
    Tokenizer *t;
    REQUIRE(json && tokenizer_parse(&t, json, strlen(json), path, err) == 0, "%s", err);
    EXPECT_EQ(tokenizer_document_token(t), document_token);
    const cJSON *pairs = cJSON_GetObjectItem(root, "pairs"), *pair;
    EXPECT_EQ(cJSON_GetArraySize(pairs), 20);
    cJSON_ArrayForEach(pair, pairs) expect_pair(t, pair, name);

    /* Asked not to, nothing is special: the spelling is text, and still decodes to itself. */
    int32_t ids[IDS_MAX];
    EXPECT_EQ(tokenizer_encode(t, special, strlen(special), true, ids, IDS_MAX), 1);
    EXPECT(ids[0] == document_token && tokenizer_is_special(t, ids[0]), "%s: \"%s\" is %d", name, special, ids[0]);
    EXPECT(tokenizer_encode(t, special, strlen(special), false, ids, IDS_MAX) > 3, "%s: \"%s\" as text", name, special);
    tokenizer_free(t);
    free(json);
    cJSON_Delete(root);
    free(file);
}

TEST(tokenizer_golden_gpt2) {
    expect_golden("gpt2", 50256, "<|endoftext|>");
}

TEST(tokenizer_golden_deepseek_v3) {
    expect_golden("deepseek_v3", 0, "<\uff5cbegin\u2581of\u2581sentence\uff5c>");
}
