/* Tests of data/tokenizer.h, also against scripts/prepare_data.py. */
#include "data/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/utf8.h"
#include "kernels/base/file.h"
#include "kernels/base/rng.h"
#include "tests/test.h"

/* ---- tokenizer.json built by hand -------------------------------------------------------------------------------- */

/* The 256 bytes in GPT-2's alphabet with ids 0..255 as "key": id pairs; `out` has 8 KiB. */
static void byte_vocab(char *out) {
    int shifted = 0x100;
    for (int byte = 0; byte < 256; byte++) {
        bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
        char spelling[5] = "";
        size_t n = utf8_put(spelling, printable ? (uint32_t)byte : (uint32_t)shifted++);
        spelling[n] = 0;
        const char *escape = byte == '"' || byte == '\\' ? "\\" : "";
        out += sprintf(out, "%s\"%s%s\": %d", byte ? ", " : "", escape, spelling, byte);
    }
}

/* A whole file: the bytes, then more of the vocabulary, merges, added tokens and top-level fields, as JSON text. */
static char *make_json(const char *vocab, const char *merges, const char *added, const char *top) {
    char bytes[8192];
    byte_vocab(bytes);
    size_t room = sizeof bytes + strlen(vocab) + strlen(merges) + strlen(added) + strlen(top) + 128;
    char *json = malloc(room);
    int n = snprintf(
        json, room, "{\"added_tokens\": [%s], %s, \"model\": {\"type\": \"BPE\", \"vocab\": {%s%s}, \"merges\": [%s]}}",
        added, top, bytes, vocab, merges);
    CHECK(n > 0 && (size_t)n < room, "%d bytes", n);
    return json;
}

static const char gpt2_top[] = "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false}";

static Tokenizer *make_tokenizer(const char *vocab, const char *merges, const char *added) {
    char err[ERR_LEN] = "";
    Tokenizer *t = NULL;
    char *json = make_json(vocab, merges, added, gpt2_top);
    int rc = tokenizer_parse(&t, json, strlen(json), "made.json", err);
    free(json);
    REQUIRE(rc == 0, "%s", err);
    return t;
}

static bool ids_are(const Tokenizer *t, const char *text, bool match_added, const int32_t *want, int64_t n_want) {
    int32_t ids[256];
    int64_t n = tokenizer_encode(t, text, strlen(text), match_added, ids, 256);
    bool equal = n == n_want && memcmp(ids, want, (size_t)n * sizeof *ids) == 0;
    for (int64_t i = 0; !equal && i < n && i < 256; i++) printf("%s%d", i ? ", " : "got ", ids[i]);
    return equal;
}

#define EXPECT_IDS(t, text, match_added, ...)                                                                          \
    do {                                                                                                               \
        const int32_t want[] = {__VA_ARGS__};                                                                          \
        EXPECT(ids_are(t, text, match_added, want, (int64_t)(sizeof want / sizeof want[0])), "of \"%s\"", text);       \
    } while (0)

/* ids decode to exactly text[0..n). */
static bool decodes_to(const Tokenizer *t, const int32_t *ids, int64_t n_ids, const char *text, size_t n) {
    size_t at = 0;
    for (int64_t i = 0; i < n_ids; i++) {
        size_t length;
        const char *bytes = tokenizer_bytes(t, ids[i], &length);
        if (!bytes || length > n - at || memcmp(bytes, text + at, length) != 0) return false;
        at += length;
    }
    return at == n;
}

/* ---- merges ------------------------------------------------------------------------------------------------------ */

TEST(tokenizer_merges_by_rank_then_from_the_left) {
    Tokenizer *t = make_tokenizer(", \"ab\": 256, \"bc\": 257, \"abc\": 258, \"aa\": 259, \"\304\240a\": 260",
                                  "\"b c\", [\"a\", \"b\"], \"a bc\", \"a a\", \"\304\240 a\"", "");
    EXPECT_EQ(tokenizer_vocab_size(t), 261);
    EXPECT_EQ(tokenizer_document_token(t), -1);
    EXPECT_IDS(t, "abc", false, 258);
    EXPECT_IDS(t, "abab", false, 256, 256);
    EXPECT_IDS(t, "aaaaa", false, 259, 259, 'a');
    EXPECT_IDS(t, "a abc b", false, 'a', 32, 258, 32, 'b');
    EXPECT_IDS(t, "b ad", false, 'b', 260, 'd');
    EXPECT_EQ(tokenizer_encode(t, "", 0, true, NULL, 0), 0);
    tokenizer_free(t);
}

TEST(tokenizer_writes_no_more_than_asked) {
    Tokenizer *t = make_tokenizer("", "", "");
    int32_t ids[4] = {-7, -7, -7, -7};
    EXPECT_EQ(tokenizer_encode(t, "hello", 5, false, ids, 2), 5);
    EXPECT(ids[0] == 'h' && ids[1] == 'e' && ids[2] == -7, "got %d %d %d", ids[0], ids[1], ids[2]);
    tokenizer_free(t);
}

/* A megabyte without a border has to take n log n, not n^2: quadratic work would run into the test's time limit. */
TEST(tokenizer_takes_a_long_piece) {
    enum { LENGTH = 1 << 20 };
    Tokenizer *t =
        make_tokenizer(", \"aa\": 256, \"aaaa\": 257, \"aaaaaaaa\": 258", "\"a a\", \"aa aa\", \"aaaa aaaa\"", "");
    char *text = malloc(LENGTH);
    int32_t *ids = malloc(LENGTH * sizeof *ids);
    memset(text, 'a', LENGTH);
    EXPECT_EQ(tokenizer_encode(t, text, LENGTH, false, ids, LENGTH), LENGTH / 8);
    EXPECT_EQ(ids[LENGTH / 8 - 1], 258);
    free(text);
    free(ids);
    tokenizer_free(t);
}

TEST(tokenizer_matches_added_tokens_only_when_asked) {
    Tokenizer *t = make_tokenizer(", \"<a>\": 256", "",
                                  "{\"id\": 256, \"content\": \"<a>\", \"special\": false},"
                                  "{\"id\": 300, \"content\": \"<|document|>\", \"special\": true},"
                                  "{\"id\": 301, \"content\": \"<a><a>\", \"special\": true}");
    size_t n;
    EXPECT_EQ(tokenizer_vocab_size(t), 302);
    EXPECT_EQ(tokenizer_document_token(t), 300);
    EXPECT(tokenizer_is_special(t, 300) && !tokenizer_is_special(t, 256) && !tokenizer_is_special(t, 'a'), "special");
    EXPECT(!tokenizer_is_special(t, -1) && !tokenizer_is_special(t, 302), "special out of range");
    EXPECT(tokenizer_bytes(t, 299, &n) == NULL && n == 0, "299 is unused");
    EXPECT(tokenizer_bytes(t, 302, &n) == NULL && tokenizer_bytes(t, -1, &n) == NULL, "out of range");
    EXPECT_IDS(t, "x<a>y", true, 'x', 256, 'y');
    EXPECT_IDS(t, "<a><a><a>", true, 301, 256);
    EXPECT_IDS(t, "<|document|>b<|docu", true, 300, 'b', '<', '|', 'd', 'o', 'c', 'u');
    EXPECT_IDS(t, "<a>", false, '<', 'a', '>');
    tokenizer_free(t);
}

TEST(tokenizer_gives_random_bytes_back) {
    enum { LENGTH = 4096 };
    Tokenizer *t = make_tokenizer(", \"th\": 256, \"the\": 257, \"\303\202\302\243\": 258",
                                  "\"t h\", \"th e\", \"\303\202 \302\243\"", "");
    char text[LENGTH];
    int32_t ids[LENGTH];
    for (uint64_t round = 0; round < 50; round++) {
        for (uint64_t i = 0; i < LENGTH; i++) {
            uint64_t bits = rng_bits(11, RNG_TEST, round, i);
            text[i] = bits & 256 ? "the \302\243 '\n"[bits % 8] : (char)bits;
        }
        int64_t n = tokenizer_encode(t, text, LENGTH, round & 1, ids, LENGTH);
        EXPECT(n <= LENGTH && decodes_to(t, ids, n, text, LENGTH), "round %llu", (unsigned long long)round);
    }
    tokenizer_free(t);
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

TEST(tokenizer_refuses_broken_files) {
    static const struct {
        const char *vocab, *merges, *added, *top, *message;
    } cases[] = {
        {", \"xx\": 5", "", "", gpt2_top, "two tokens have the id 5"},
        {", \"xx\": -1", "", "", gpt2_top, "not an integer"},
        {", \"xx\": 1.5", "", "", gpt2_top, "not an integer"},
        {", \"xx\": 1e300", "", "", gpt2_top, "not an integer"},
        {", \"xx\": 4194304", "", "", gpt2_top, "not an integer"},
        {", \"xx\": \"7\"", "", "", gpt2_top, "not an integer"},
        {", \"xx\": null", "", "", gpt2_top, "not an integer"},
        {", \"a\": 256", "", "", gpt2_top, "is given twice"},
        {", \"\": 256", "", "", gpt2_top, "empty"},
        {"", "\"a b\"", "", gpt2_top, "not in the vocabulary"},
        {", \"ab\": 256", "\"ab\"", "", gpt2_top, "neither"},
        {", \"ab\": 256", "[\"a\"]", "", gpt2_top, "neither"},
        {", \"ab\": 256", "[\"a\", 3]", "", gpt2_top, "neither"},
        {", \"ab\": 256", "7", "", gpt2_top, "neither"},
        {", \"ab\": 256", "\"a b\", \"a b\"", "", gpt2_top, "merge 1 stands there twice"},
        {"", "", "{\"id\": 300}", gpt2_top, "no \"content\""},
        {"", "", "{\"content\": \"x\"}", gpt2_top, "not an integer"},
        {"", "", "{\"id\": 97, \"content\": \"<s>\"}", gpt2_top, "two tokens have the id 97"},
        {"", "", "{\"id\": 300, \"content\": \"x\"}, {\"id\": 300, \"content\": \"y\"}", gpt2_top, "the id 300"},
        {"", "", "{\"id\": 300, \"content\": \"x\", \"lstrip\": true}", gpt2_top, "\"lstrip\" of added token"},
        {"", "", "{\"id\": 188, \"content\": \"\u00bc\"}", gpt2_top, "spells other bytes in the vocabulary (id 188)"},
        {"", "", "7", gpt2_top, "no \"content\""},
        {"", "", "", "\"pre_tokenizer\": null", "pre_tokenizer (of no type)"},
        {"", "", "", "\"x\": 1", "pre_tokenizer (none)"},
        {"", "", "", "\"pre_tokenizer\": {\"type\": \"Metaspace\"}", "pre_tokenizer (Metaspace)"},
        {"", "", "", "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": true}", "(ByteLevel)"},
        {"", "", "", "\"pre_tokenizer\": {\"type\": \"ByteLevel\", \"use_regex\": false}", "(ByteLevel)"},
        {"", "", "", "\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": 3}", "(Sequence)"},
        {"", "", "", "\"normalizer\": {\"type\": \"NFC\"}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}", "(NFC)"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char err[ERR_LEN] = "";
        Tokenizer *t;
        char *json = make_json(cases[i].vocab, cases[i].merges, cases[i].added, cases[i].top);
        EXPECT(tokenizer_parse(&t, json, strlen(json), "f.json", err) == -1 && !t, "case %zu was taken", i);
        EXPECT(strstr(err, cases[i].message) && strncmp(err, "f.json:", 7) == 0 && !strchr(err, '\n'),
               "case %zu says \"%s\"", i, err);
        free(json);
    }
    static const char *const texts[][2] = {
        {"", "the file is empty"},
        {"{", "the text ends inside the object"},
        {"{} {}", "extra text after the end"},
        {"{\"a\": 1, \"a\": 2}", "\"a\" is given twice"},
        {"[]", "not a BPE tokenizer.json"},
        {"3", "not a BPE tokenizer.json"},
        {"{\"model\": {\"vocab\": [], \"merges\": []}}", "not a BPE tokenizer.json"},
        {"{\"model\": {\"vocab\": {}, \"merges\": {}}}", "not a BPE tokenizer.json"},
        {"{\"added_tokens\": {}, \"model\": {\"vocab\": {}, \"merges\": []}}", "\"added_tokens\" is not a list"},
        {"{\"pre_tokenizer\": {\"type\": \"ByteLevel\"}, \"model\": {\"vocab\": {}, \"merges\": []}}", "is empty"},
        {"{\"pre_tokenizer\": {\"type\": \"ByteLevel\"}, \"model\": {\"vocab\": {\"a\": 0}, \"merges\": []}}",
         "no token for the byte 0x00"},
        {"{\"model\": {\"type\": \"WordPiece\", \"vocab\": {}, \"merges\": []}}", "WordPiece"},
        {"{\"model\": {\"byte_fallback\": true, \"vocab\": {}, \"merges\": []}}", "\"byte_fallback\""},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        char err[ERR_LEN] = "";
        Tokenizer *t;
        EXPECT(tokenizer_parse(&t, texts[i][0], strlen(texts[i][0]), "f", err) == -1 && !t, "text %zu was taken", i);
        EXPECT(strstr(err, texts[i][1]) && !strchr(err, '\n'), "text %zu says \"%s\"", i, err);
    }
    char err[ERR_LEN] = "";
    Tokenizer *t;
    EXPECT(tokenizer_load(&t, test_tmp_dir(), err) == -1 && strstr(err, "/tokenizer.json"), "says \"%s\"", err);
    EXPECT(tokenizer_load(&t, "no/such/file.json", err) == -1 && strstr(err, "no/such/file.json"), "says \"%s\"", err);
}

/* Cut or damaged anywhere, a file is refused, or read as something that still encodes. */
TEST(tokenizer_survives_damaged_files) {
    char *json = make_json(", \"ab\": 256, \"abc\": 257", "\"a b\", \"ab c\"",
                           "{\"id\": 258, \"content\": \"<|document|>\", \"special\": true}", gpt2_top);
    size_t size = strlen(json);
    int n_refused = 0;
    for (uint64_t round = 0; round < 3000; round++) {
        char *damaged = malloc(size + 1);
        memcpy(damaged, json, size + 1);
        size_t length = round % 3 == 0 ? rng_bits(3, RNG_TEST, round, 0) % size : size;
        for (uint64_t k = 1; round % 3 != 0 && k <= round % 4 + 1; k++) {
            uint64_t bits = rng_bits(3, RNG_TEST, round, k);
            damaged[bits % size] = "\"{}[],:0a9\\-e \377"[(bits >> 40) % 15];
        }
        char err[ERR_LEN] = "";
        Tokenizer *t;
        if (tokenizer_parse(&t, damaged, length, "f", err) == 0) {
            int32_t ids[16];
            int64_t n = tokenizer_encode(t, "abc <|document|>", 16, true, ids, 16);
            EXPECT(n > 0 && n <= 16, "round %llu: %lld ids", (unsigned long long)round, (long long)n);
            tokenizer_free(t);
        } else {
            n_refused++;
            EXPECT(err[0] != 0 && !t, "round %llu: refused without a word", (unsigned long long)round);
        }
        free(damaged);
    }
    EXPECT(n_refused > 1000, "only %d of 3000 were refused", n_refused);
    free(json);
}

/* ---- against scripts/prepare_data.py ----------------------------------------------------------------------------- */

/* Two documents, written with a form feed between them: words, all kinds of characters, and bytes that are no UTF-8. */
static char *mixed_text(size_t *n_text, size_t *first_len) {
    static const char *const parts[] = {"the ",
                                        "of ",
                                        "and",
                                        " a",
                                        "don't",
                                        "I'm",
                                        "we'll ",
                                        "x",
                                        "42",
                                        " 1813",
                                        "\303\251t\303\251",
                                        "\320\226",
                                        "\344\270\255\346\226\207",
                                        "\343\203\273",
                                        "\302\243",
                                        "\302\275",
                                        "\302\240",
                                        "\343\200\200",
                                        "e\314\201",
                                        "\360\237\221\215",
                                        "\342\200\215",
                                        "\342\200\234",
                                        "\n",
                                        "\n\n",
                                        "\r\n",
                                        "\t",
                                        "  ",
                                        "   ",
                                        "!",
                                        "?!",
                                        "--",
                                        "_",
                                        "#",
                                        "<|document|>",
                                        "\001",
                                        "\177",
                                        "\377",
                                        "\303",
                                        "\342\202",
                                        "\355\240\200",
                                        "\302\205",
                                        "\034",
                                        "'",
                                        "\xF0\x90\xB5\x80",
                                        "\xEA\x9F\x8B"};
    enum { N_PARTS = sizeof parts / sizeof parts[0], DRAWS = 12000 };
    char *text = malloc(DRAWS * 16);
    size_t n = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        if (i == DRAWS / 3) {
            *first_len = n;
            text[n++] = '\f';
        }
        uint64_t draw = rng_bits(5, RNG_TEST, 0, i);
        const char *part = parts[draw & 1 ? draw / 2 % 12 : draw / 2 % N_PARTS];
        memcpy(text + n, part, strlen(part));
        n += strlen(part);
    }
    *n_text = n;
    return text;
}

/* Runs the script on the mixed text and compares its shard with what the library makes of text and tokenizer.json. */
static void compare_with_script(const char *kind, int32_t document_token) {
    size_t n, first_len = 0, size;
    char *text = mixed_text(&n, &first_len), path[600], command[2000], err[ERR_LEN] = "", *shard;
    snprintf(path, sizeof path, "%s/mixed.txt", test_tmp_dir());
    REQUIRE(file_write_durable(path, text, n, err) == 0, "%s", err);
    snprintf(command, sizeof command, "python3 scripts/prepare_data.py --tokenizer %s --val 0 --out %s/%s %s 2>&1",
             kind, test_tmp_dir(), kind, path);
    REQUIRE(system(command) == 0, "%s", command);
    snprintf(path, sizeof path, "%s/%s", test_tmp_dir(), kind);
    Tokenizer *t;
    REQUIRE(tokenizer_load(&t, path, err) == 0, "%s", err);
    EXPECT_EQ(tokenizer_document_token(t), document_token);
    EXPECT_EQ(tokenizer_vocab_size(t), document_token + 1);
    snprintf(path, sizeof path, "%s/%s/train_000.bin", test_tmp_dir(), kind);
    REQUIRE(file_read_all(&shard, &size, path, 1 << 24, err) == 0, "%s", err);
    int32_t header[256];
    memcpy(header, shard, sizeof header);
    EXPECT(header[0] == 20240520 && header[1] == 1, "magic %d version %d", header[0], header[1]);
    REQUIRE(size == sizeof header + 2 * (size_t)header[2], "%d tokens in %zu bytes", header[2], size);

    int32_t *ids = malloc((n + 2) * sizeof *ids);
    ids[0] = document_token;
    int64_t n_ids = 1 + tokenizer_encode(t, text, first_len, false, ids + 1, (int64_t)n);
    ids[n_ids++] = document_token;
    const char *second = text + first_len + 1;
    size_t second_len = n - first_len - 1;
    /* The line end behind a form feed belongs to the form feed. */
    if (second[0] == '\n') {
        second++;
        second_len--;
    }
    int64_t n_second = tokenizer_encode(t, second, second_len, false, ids + n_ids, (int64_t)n + 2 - n_ids);
    EXPECT(decodes_to(t, ids + n_ids, n_second, second, second_len), "the second document decodes to itself");
    n_ids += n_second;
    REQUIRE(n_ids == header[2], "%lld ids here, %d in the shard", (long long)n_ids, header[2]);
    for (int64_t i = 0; i < n_ids; i++) {
        uint16_t id;
        memcpy(&id, shard + sizeof header + 2 * i, sizeof id);
        REQUIRE(id == ids[i], "token %lld is %d here, %d in the shard", (long long)i, ids[i], id);
    }
    free(ids);
    free(text);
    free(shard);
    tokenizer_free(t);
}

TEST(tokenizer_agrees_with_prepare_data_learnt) {
    compare_with_script("train:700", 700);
}

TEST(tokenizer_agrees_with_prepare_data_bytes) {
    compare_with_script("bytes", 256);
}
