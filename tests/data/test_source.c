/* data/source.c and data/sidecar.c: which windows the shards of a pattern give, and what is refused at the start. */
#include "data/source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "data/order.h"
#include "shards.h"
#include "tests/test.h"

static int open_pattern(SampleSource *s, const char *pattern, int64_t vocab_size, int64_t seq_len, int depth, char *err,
                        char *hint) {
    char path[TEST_PATH_LEN];
    err[0] = hint[0] = 0;
    return source_open(s, "data.train", test_path(path, pattern), vocab_size, seq_len, depth, err, hint);
}

static void expect_refused(const char *pattern, int64_t vocab_size, int64_t seq_len, int depth, const char *part,
                           const char *hint_part) {
    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    EXPECT(open_pattern(&s, pattern, vocab_size, seq_len, depth, err, hint) == -1, "accepted; expected '%s'", part);
    EXPECT(strstr(err, part), "no '%s' in '%s'", part, err);
    EXPECT(!hint_part || strstr(hint, hint_part), "no '%s' in the hint '%s'", hint_part, hint);
}

static int64_t samples_of(const char *pattern, int64_t seq_len, int depth) {
    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(open_pattern(&s, pattern, 60000, seq_len, depth, err, hint) == 0, "%s", err);
    int64_t n = s.n_samples;
    source_close(&s);
    return n;
}

TEST(source_windows_of_a_shard) {
    test_write_shard("a.bin", 0, 101);
    const struct {
        int64_t seq_len;
        int depth;
        int64_t n;
    } cases[] = {{10, 0, 10}, {100, 0, 1}, {99, 1, 1}, {10, 1, 9}, {33, 1, 3}, {10, 4, 9}, {1, 0, 100}, {98, 2, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        EXPECT_EQ(samples_of("a.bin", cases[i].seq_len, cases[i].depth), cases[i].n);

    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(open_pattern(&s, "a.bin", 101, 33, 1, err, hint) == 0, "%s", err);
    int32_t window[35];
    EXPECT_EQ(source_window(&s), 35);
    for (int64_t i = 0; i < 3; i++) {
        REQUIRE(source_read(&s, window, i, err) == 0, "%s", err);
        for (int64_t t = 0; t < 35; t++) EXPECT_EQ(window[t], 33 * i + t);
    }
    source_close(&s);
}

/* Files are created in another order than their names'; capitals sort before small letters, 10 before 2, in any locale.
 */
TEST(source_sorts_files_by_name) {
    test_write_shard("t_2.bin", 3000, 21);
    test_write_shard("t_a.bin", 4000, 31);
    test_write_shard("t_10.bin", 2000, 11);
    test_write_shard("t_B.bin", 5000, 25);
    const int32_t first_ids[] = {2000, 3000, 3010, 5000, 5010, 4000, 4010, 4020};
    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(open_pattern(&s, "t_*.bin", 6000, 10, 0, err, hint) == 0, "%s", err);
    EXPECT_EQ(s.n_shards, 4);
    EXPECT_EQ(s.n_tokens, 88);
    REQUIRE(s.n_samples == 8, "%lld", (long long)s.n_samples);
    for (int64_t i = 0; i < 8; i++) {
        int32_t window[11];
        REQUIRE(source_read(&s, window, i, err) == 0, "%s", err);
        EXPECT_EQ(window[0], first_ids[i]);
        EXPECT_EQ(window[10], first_ids[i] + 10); /* no window crosses into another shard */
    }
    source_close(&s);
}

TEST(source_reads_more_shards_than_it_keeps_open) {
    char name[32], err[ERR_LEN], hint[ERR_LEN];
    for (int i = 0; i < 70; i++) {
        snprintf(name, sizeof name, "m_%03d.bin", i);
        test_write_shard(name, 10 * i, 5);
    }
    const struct rlimit few = {64, 64};
    REQUIRE(setrlimit(RLIMIT_NOFILE, &few) == 0);
    SampleSource s;
    REQUIRE(open_pattern(&s, "m_*.bin", 1000, 4, 0, err, hint) == 0, "%s", err);
    EXPECT_EQ(s.n_samples, 70);
    for (int64_t i = 69; i >= 0; i--) {
        int32_t window[5];
        REQUIRE(source_read(&s, window, i, err) == 0, "%s", err);
        EXPECT(window[0] == 10 * i && window[4] == 10 * i + 4, "sample %lld: %d", (long long)i, window[0]);
    }
    source_close(&s);
}

/* A validation shard with exactly B*T tokens once ended in a bare assertion: one token more is needed. */
TEST(source_too_short_says_what_is_needed) {
    test_write_shard("val_1.bin", 0, 256);
    expect_refused("val_1.bin", 1000, 256, 0, "val_1.bin holds 256 tokens, one sample needs 257", "at most 255");
    expect_refused("val_1.bin", 1000, 255, 1,
                   "holds 256 tokens, one sample needs 257 (train.seq_len 255 + 1 + "
                   "model.num_nextn_predict_layers 1)",
                   "train.seq_len to at most 254");
    EXPECT_EQ(samples_of("val_1.bin", 255, 0), 1);
    EXPECT_EQ(samples_of("val_1.bin", 254, 1), 1);
    test_write_shard("val_2.bin", 0, 200);
    expect_refused("val_*.bin", 1000, 256, 0, "val_1.bin holds 256 tokens", "at most 255");
    test_write_shard("one.bin", 0, 1);
    expect_refused("one.bin", 1000, 1, 0, "holds 1 tokens, one sample needs 2", "longer shard");

    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    test_write_shard("val_3.bin", 0, 1000);
    REQUIRE(open_pattern(&s, "val_*.bin", 1000, 256, 0, err, hint) == 0, "%s", err);
    EXPECT_EQ(s.n_samples, 3);
    EXPECT(strstr(s.warning, "2 of 3 shards") && strstr(s.warning, "val_2.bin holds 200"), "%s", s.warning);
    int32_t window[257];
    EXPECT(source_read(&s, window, 2, err) == 0 && window[0] == 512, "%s", err);
    source_close(&s);
}

TEST(source_refuses_what_is_no_source) {
    expect_refused("none_*.bin", 1000, 16, 0, "data.train: no file matches", "prepare_data.py");
    expect_refused("no/such/folder/*.bin", 1000, 16, 0, "no file matches", "prepare_data.py");
    test_write_shard("good_1.bin", 0, 100);
    test_write_text("good_2.bin", "not a shard");
    expect_refused("good_*.bin", 1000, 16, 0, "good_2.bin: not a token shard but, it seems, text", "prepare_data.py");
    const int32_t empty[256] = {20240520, 1, 0};
    test_write_bytes("good_2.bin", empty, sizeof empty);
    expect_refused("good_*.bin", 1000, 16, 0, "good_2.bin: a token shard without a single token", "failed preparation");
    test_write_text("good_2.bin.zst", "\x28\xB5\x2F\xFD");
    expect_refused("good_2.bin.zst", 1000, 16, 0, "good_2.bin.zst: a Zstandard file that ends, at byte 4", "again");
    expect_refused("", 1000, 16, 0, "is a folder", "*.bin");
    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    EXPECT(source_open(&s, "data.train", "no_such_*.bin", 10, 1, 0, err, hint) == -1 &&
               strstr(hint, "the path starts at /"),
           "%s", hint);
}

TEST(source_takes_a_literal_name_first) {
    test_write_shard("a[1].bin", 100, 50);
    test_write_shard("a1.bin", 200, 50);
    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    int32_t window[11];
    REQUIRE(open_pattern(&s, "a[1].bin", 1000, 10, 0, err, hint) == 0, "%s", err);
    EXPECT(s.n_shards == 1 && source_read(&s, window, 0, err) == 0 && window[0] == 100, "%d", window[0]);
    source_close(&s);
}

TEST(source_names_the_bad_id) {
    test_write_shard("a.bin", 0, 101);
    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    int32_t window[11];
    REQUIRE(open_pattern(&s, "a.bin", 95, 10, 0, err, hint) == 0, "%s", err);
    EXPECT(source_read(&s, window, 8, err) == 0, "%s", err);
    EXPECT(source_read(&s, window, 9, err) == -1, "id 95 was accepted");
    EXPECT(strstr(err, "a.bin: token 95 is id 95, outside the vocabulary of 95"), "%s", err);
    source_close(&s);
}

/* Equal vocabularies were once refused; less is fine, more is not. */
TEST(source_vocabulary_of_the_sidecar) {
    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN], path[TEST_PATH_LEN];
    test_write_shard("a.bin", 0, 101);
    test_write_text("data.json", "{\"version\": 1, \"tokenizer\": \"tokenizer.json\", \"vocab_size\": 1025, "
                                 "\"document_token\": 1024, \"bytes_per_token\": 2.77, \"train_tokens\": 101, "
                                 "\"val_tokens\": 100, \"val_bytes\": 250, \"documents\": 6, \"source\": [\"a.txt\"], "
                                 "\"ngram\": {\"bigram\": 2.45, \"3-gram\": 1.9}}");
    for (int64_t vocab_size = 1025; vocab_size <= 1026; vocab_size++) {
        REQUIRE(open_pattern(&s, "a.bin", vocab_size, 10, 0, err, hint) == 0, "%s", err);
        EXPECT(s.sidecar.found && s.sidecar.document_token == 1024 && s.sidecar.vocab_size == 1025);
        EXPECT(s.sidecar.documents == 6 && s.sidecar.train_tokens == 101 && s.sidecar.val_tokens == 100);
        EXPECT(s.sidecar.n_ngrams == 2 && strcmp(s.sidecar.ngrams[1].name, "3-gram") == 0);
        EXPECT_NEAR(s.sidecar.ngrams[1].nats_per_byte, 1.9, 0);
        EXPECT_NEAR(sidecar_val_bytes_per_token(&s.sidecar), 2.5, 0);
        EXPECT_EQ(s.sidecar.train_bytes, -1);
        EXPECT_NEAR(s.sidecar.bytes_per_token, 2.77, 0);
        char tokenizer[PATH_LEN];
        EXPECT(sidecar_tokenizer_path(tokenizer, sizeof tokenizer, &s.sidecar, err) == 0 &&
                   strcmp(tokenizer, test_path(path, "tokenizer.json")) == 0,
               "%s", tokenizer);
        source_close(&s);
    }
    expect_refused("a.bin", 1024, 10, 0, "vocabulary of 1025, model.vocab_size is 1024", "model.vocab_size to 1025");
}

TEST(source_sidecars_must_agree) {
    char path[TEST_PATH_LEN];
    mkdir(test_path(path, "x"), 0700);
    mkdir(test_path(path, "y"), 0700);
    test_write_shard("x/a.bin", 0, 101);
    test_write_shard("y/a.bin", 0, 101);
    test_write_text("x/data.json", "{\"version\": 1, \"vocab_size\": 257, \"document_token\": 256}");
    expect_refused("?/a.bin", 1000, 10, 0, "differ", "one tokenizer");
    test_write_text("y/data.json", "{\"version\": 1, \"vocab_size\": 1025, \"document_token\": 1024}");
    expect_refused("?/a.bin", 1025, 10, 0, "vocabulary 257 and 1025, document token 256 and 1024", "one tokenizer");
    test_write_text("y/data.json", "{\"version\": 1, \"vocab_size\": 257, \"document_token\": 256, \"//\": \"same\"}");
    EXPECT_EQ(samples_of("?/a.bin", 10, 0), 20);
}

TEST(source_sidecar_is_checked) {
    const char *bad[][2] = {
        {"{\"version\": 1, \"vocab_size\": 1025", "the text ends inside the object"},
        {"{\"version\": 1, \"vocab_size\": 1025} {}", "extra text after the end"},
        {"{\"version\": 1, \"vocab_size\": 1025, \"vocab_size\": 1026}", "\"vocab_size\" is given twice"},
        {"[1]", "not a JSON object"},
        {"{\"vocab_size\": 1025}", "\"version\" -1 found, 1 expected"},
        {"{\"version\": 2, \"vocab_size\": 1025}", "\"version\" 2 found, 1 expected"},
        {"{\"version\": 1}", "\"vocab_size\" is missing"},
        {"{\"version\": 1, \"vocab_size\": \"1025\"}", "\"vocab_size\" must be an integer"},
        {"{\"version\": 1, \"vocab_size\": 10.5}", "\"vocab_size\" must be an integer"},
        {"{\"version\": 1, \"vocab_size\": 1e999}", "\"vocab_size\" must be an integer"},
        {"{\"version\": 1, \"vocab_size\": 0}",
         "\"vocab_size\" must be an integer in [1, 2147483647], found the number 0"},
        {"{\"version\": 1, \"vocab_size\": null}", "\"vocab_size\" must be an integer"},
        {"{\"version\": 1, \"vocab_size\": 10, \"document_token\": 10}",
         "\"document_token\" must be an integer in [0, 9], found the number 10"},
        {"{\"version\": 1, \"vocab_size\": 10, \"document_token\": -1}",
         "\"document_token\" must be an integer in [0, 9], found the number -1"},
        {"{\"version\": 1, \"vocab_size\": 10, \"train_tokens\": 1e300}", "\"train_tokens\" must be an integer"},
        {"{\"version\": 1, \"vocab_size\": 10, \"bytes_per_token\": 0}", "\"bytes_per_token\" must be"},
        {"{\"version\": 1, \"vocab_size\": 10, \"tokenizer\": 5}", "\"tokenizer\" must be a string"},
        {"{\"version\": 1, \"vocab_size\": 10, \"ngram\": 5}", "\"ngram\" must be an object"},
        {"{\"version\": 1, \"vocab_size\": 10, \"ngram\": {\"bigram\": \"2\"}}", "\"bigram\" must be a number above 0"},
        {"{\"version\": 1, \"vocab_size\": 10, \"ngram\": {\"a name of some length\": 2}}", "long name"},
    };
    test_write_shard("a.bin", 0, 101);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        test_write_text("data.json", bad[i][0]);
        expect_refused("a.bin", 2000, 10, 0, bad[i][1], NULL);
        expect_refused("a.bin", 2000, 10, 0, "data.json", NULL);
    }
}

/* 16-bit ids for a vocabulary they cannot name are most likely cut ids, unless the JSON says otherwise. */
TEST(source_width_against_vocabulary) {
    test_write_shard("a.bin", 0, 101);
    test_write_shard("wide.bin", 65500, 101);
    EXPECT_EQ(samples_of("a.bin", 10, 0), 10);
    SampleSource s;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(open_pattern(&s, "a.bin", 65536, 10, 0, err, hint) == 0, "%s", err);
    source_close(&s);
    expect_refused("a.bin", 65537, 10, 0, "a.bin: 16-bit ids for a vocabulary of 65537", "32-bit ids");
    REQUIRE(open_pattern(&s, "wide.bin", 129280, 10, 0, err, hint) == 0, "%s", err);
    source_close(&s);
    test_write_text("data.json", "{\"version\": 1, \"vocab_size\": 50257}");
    REQUIRE(open_pattern(&s, "a.bin", 129280, 10, 0, err, hint) == 0, "%s", err);
    source_close(&s);
    test_write_text("data.json", "{\"version\": 1, \"vocab_size\": 129280}");
    expect_refused("a.bin", 129280, 10, 0, "a.bin: 16-bit ids for a vocabulary of 129280", "32-bit ids");
}

TEST(source_identity_follows_the_files) {
    char path[TEST_PATH_LEN], err[ERR_LEN], hint[ERR_LEN];
    uint64_t identity[6];
    for (int i = 0; i < 6; i++) { /* the sixth time nothing changes */
        mkdir(test_path(path, i == 1 ? "moved" : "here"), 0700);
        if (i <= 1) test_write_shard(i == 1 ? "moved/a.bin" : "here/a.bin", 0, 3000); /* the same in another folder */
        if (i == 2) test_write_shard("here/a.bin", 1, 3000);                          /* other ids */
        if (i == 3) test_write_shard("here/a.bin", 0, 3001);                          /* longer */
        if (i == 4) test_write_shard("here/b.bin", 0, 3000);                          /* one more file */
        SampleSource s;
        REQUIRE(open_pattern(&s, i == 1 ? "moved/*.bin" : "here/*.bin", 4000, 10, 0, err, hint) == 0, "%s", err);
        identity[i] = source_identity(&s);
        source_close(&s);
    }
    EXPECT(identity[0] == identity[1], "a moved folder is other data");
    EXPECT(identity[2] != identity[0] && identity[3] != identity[0] && identity[3] != identity[2]);
    EXPECT(identity[4] != identity[3], "an added file is not seen");
    EXPECT(identity[5] == identity[4], "not repeatable");
}

TEST(source_finds_shared_shards) {
    SampleSource a, b;
    char err[ERR_LEN], hint[ERR_LEN];
    test_write_shard("train_0.bin", 0, 300);
    test_write_shard("train_1.bin", 1000, 300);
    test_write_shard("val_0.bin", 2000, 300);
    REQUIRE(open_pattern(&a, "train_*.bin", 4000, 10, 0, err, hint) == 0, "%s", err);
    REQUIRE(open_pattern(&b, "val_*.bin", 4000, 10, 0, err, hint) == 0, "%s", err);
    EXPECT(source_shared_shard(&a, &b) == NULL);
    source_close(&b);
    REQUIRE(open_pattern(&b, "*_1.bin", 4000, 10, 0, err, hint) == 0, "%s", err);
    EXPECT(source_shared_shard(&a, &b) && strstr(source_shared_shard(&a, &b), "train_1.bin"));
    source_close(&b);
    test_write_shard("val_9.bin", 1000, 300); /* a copy under another name */
    REQUIRE(open_pattern(&b, "val_*.bin", 4000, 10, 0, err, hint) == 0, "%s", err);
    EXPECT(source_shared_shard(&b, &a) && strstr(source_shared_shard(&b, &a), "val_9.bin"));
    source_close(&b);
    source_close(&a);
}

/* Even a built-in data set once produced ids outside a vocabulary of 100. */
TEST(source_synthetic_ids) {
    SampleSource s, other;
    source_open_synthetic(&s, 7, 100, 999, 1);
    source_open_synthetic(&other, 8, 100, 999, 1);
    EXPECT(s.n_samples == SAMPLES_ENDLESS && source_window(&s) == 1001);
    int32_t window[1001], again[1001], next[1001], other_seed[1001];
    int counts[100] = {0};
    for (int64_t i = 0; i < 20; i++) {
        REQUIRE(source_read(&s, window, i, NULL) == 0);
        for (int t = 0; t < 1001; t++) {
            REQUIRE(window[t] >= 0 && window[t] < 100, "id %d", window[t]);
            counts[window[t]]++;
        }
    }
    for (int id = 0; id < 100; id++) EXPECT(counts[id] > 130 && counts[id] < 270, "id %d: %d of 20020", id, counts[id]);
    EXPECT(source_read(&s, window, 5, NULL) == 0 && source_read(&s, again, 5, NULL) == 0 &&
           source_read(&s, next, 6, NULL) == 0 && source_read(&other, other_seed, 5, NULL) == 0);
    EXPECT(memcmp(window, again, sizeof window) == 0, "not a pure function");
    EXPECT(memcmp(window, next, sizeof window) != 0 && memcmp(window, other_seed, sizeof window) != 0);
    source_close(&s);
    source_close(&other);
}
