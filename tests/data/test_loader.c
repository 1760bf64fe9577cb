/* data/loader.c: the same data in any layout, from any position, with and without the thread. */
#include "data/loader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "data/shard.h"
#include "shards.h"
#include "tests/test.h"

enum { S = 8, DEPTH = 1, N_SAMPLES = 12 + 25 + 6 };

/* Three shards of 12, 25 and 6 samples; ids tell where they come from. */
static void write_shards(void) {
    test_write_shard("train_0.bin", 0, 100);
    test_write_shard("train_1.bin", 1000, 207);
    test_write_shard("train_2.bin", 3000, 50);
}

static LoaderSpec spec_of(const char *pattern, int64_t micro_batch) {
    LoaderSpec spec = {.vocab_size = 5000, .seq_len = S, .depth = DEPTH, .micro_batch = micro_batch, .seed = 1337};
    snprintf(spec.label, sizeof spec.label, "data.train");
    if (pattern) {
        spec.n_sources = 1;
        spec.sources[0].weight = 1;
        test_path(spec.sources[0].path, pattern);
    }
    spec.stride = micro_batch;
    spec.shuffle = true;
    spec.document_token = spec.eos_token_id = -1;
    return spec;
}

static Loader *open_spec(const LoaderSpec *spec) {
    Loader *l;
    char err[ERR_LEN] = "", hint[ERR_LEN];
    REQUIRE(loader_open(&l, spec, err, hint) == 0, "%s", err);
    return l;
}

static MicroBatch next(Loader *l, int64_t first_sample) {
    MicroBatch mb;
    char err[ERR_LEN] = "";
    REQUIRE(loader_next(l, first_sample, &mb, err) == 0, "%s", err);
    EXPECT_EQ(mb.first_sample, first_sample);
    return mb;
}

/* The first id of each of the samples [first, first + n), read in micro-batches of the loader's size. */
static void first_ids(int32_t *ids, Loader *l, int64_t first, int64_t n) {
    int64_t done = 0;
    while (done < n) {
        MicroBatch mb = next(l, first + done);
        for (int64_t b = 0; b < mb.n_sequences && done < n; b++) ids[done++] = mb.tokens[b * mb.seq_len];
    }
}

static bool equal_batches(const MicroBatch *a, const MicroBatch *b) {
    size_t T = (size_t)a->n_tokens, D = (size_t)a->depth + 1, id = sizeof *a->tokens;
    return a->n_tokens == b->n_tokens && a->depth == b->depth && memcmp(a->tokens, b->tokens, D * T * id) == 0 &&
           memcmp(a->targets, b->targets, D * T * id) == 0 && memcmp(a->position, b->position, T * id) == 0 &&
           memcmp(a->doc_start, b->doc_start, T * id) == 0 &&
           memcmp(a->n_targets, b->n_targets, D * sizeof a->n_targets[0]) == 0;
}

TEST(loader_gives_every_sample_once_an_epoch) {
    write_shards();
    LoaderSpec spec = spec_of("train_*.bin", 4);
    Loader *l = open_spec(&spec);
    EXPECT_EQ(loader_samples(l), N_SAMPLES);
    EXPECT_EQ(loader_tokens(l), 357);
    EXPECT_EQ(loader_n_shards(l), 3);
    const LoaderSource source = loader_source(l, 0, 2 * N_SAMPLES);
    EXPECT(source.warning[0] == 0, "%s", source.warning);
    EXPECT(source.n_shards == 3 && source.n_tokens == 357 && source.n_used == 2 * source.n_samples &&
           source.share == 1);
    int32_t ids[3 * N_SAMPLES];
    first_ids(ids, l, 0, 3 * N_SAMPLES);
    for (int epoch = 0; epoch < 3; epoch++) {
        char seen[4000] = {0};
        for (int i = 0; i < N_SAMPLES; i++) {
            int32_t id = ids[epoch * N_SAMPLES + i], base = id < 1000 ? 0 : id < 3000 ? 1000 : 3000;
            EXPECT((id - base) % S == 0, "a window starts at id %d", id);
            EXPECT(!seen[id], "epoch %d: window of id %d twice", epoch, id);
            seen[id] = 1;
        }
    }
    EXPECT(memcmp(ids, ids + N_SAMPLES, N_SAMPLES * sizeof *ids) != 0, "two epochs in the same order");
    loader_close(l);
}

/* The order must not depend on the micro-batch, nor the arrays on the way they were read. */
TEST(loader_order_is_independent_of_micro_batch) {
    write_shards();
    LoaderSpec spec = spec_of("train_*.bin", 1), wide_spec = spec_of("train_*.bin", 8);
    Loader *l = open_spec(&spec), *wide = open_spec(&wide_spec);
    for (int64_t first = 0; first < 96; first += 8) {
        MicroBatch whole = next(wide, first);
        for (int64_t b = 0; b < 8; b++) {
            MicroBatch one = next(l, first + b);
            for (int k = 0; k <= DEPTH; k++) {
                EXPECT(memcmp(whole.tokens + k * 8 * S + b * S, one.tokens + k * S, S * sizeof(int32_t)) == 0);
                EXPECT(memcmp(whole.targets + k * 8 * S + b * S, one.targets + k * S, S * sizeof(int32_t)) == 0);
            }
        }
        EXPECT_EQ(whole.n_targets[0], 8 * S);
        EXPECT_EQ(whole.n_targets[1], 8 * S);
    }
    loader_close(l);
    loader_close(wide);
}

TEST(loader_thread_equals_direct_reading) {
    write_shards();
    LoaderSpec spec = spec_of("train_*.bin", 3);
    spec.stride = 6;
    spec.document_mask = true;
    spec.document_token = 1033;
    Loader *l = open_spec(&spec);
    MicroBatch direct;
    char err[ERR_LEN] = "";
    REQUIRE(micro_batch_alloc(&direct, 3, S, DEPTH, err) == 0, "%s", err);
    /* In the foreseen order, then against it, far away, twice the same, and in order again. */
    const int64_t at[] = {0, 6, 12, 18, 9, 3, 1000000007, 1000000007, 5, 11, 17, 16, 17, 23};
    for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
        MicroBatch mb = next(l, at[i]);
        REQUIRE(loader_fill(l, at[i], &direct, err) == 0, "%s", err);
        EXPECT(equal_batches(&mb, &direct), "micro-batch at %lld", (long long)at[i]);
    }
    micro_batch_free(&direct);
    loader_close(l);
}

/* A loader that starts at any position gives what an unbroken one gives: across the end of an epoch, with gradient
 * accumulation, with other micro-batches. */
TEST(loader_resumes_anywhere) {
    write_shards();
    enum { N = 3 * N_SAMPLES };
    int32_t unbroken[N], resumed[N];
    LoaderSpec spec = spec_of("train_*.bin", 4);
    Loader *l = open_spec(&spec);
    first_ids(unbroken, l, 0, N);
    loader_close(l);
    const int64_t starts[] = {1, 7, N_SAMPLES - 1, N_SAMPLES, N_SAMPLES + 1, 2 * N_SAMPLES, N - 1};
    for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++) {
        LoaderSpec other = spec_of("train_*.bin", 1 + (int64_t)i);
        l = open_spec(&other);
        int64_t n = N - starts[i];
        first_ids(resumed, l, starts[i], n);
        EXPECT(memcmp(resumed, unbroken + starts[i], (size_t)n * sizeof *resumed) == 0, "from %lld",
               (long long)starts[i]);
        loader_close(l);
    }
}

/* Ranks once shuffled the file list differently: some files were read by two, others by none. */
TEST(loader_ranks_partition_the_epoch) {
    write_shards();
    LoaderSpec spec = spec_of("train_*.bin", 1);
    spec.stride = 2;
    Loader *ranks[2] = {open_spec(&spec), open_spec(&spec)};
    char seen[4000] = {0};
    int n = 0;
    for (int64_t i = 0; i < N_SAMPLES; i++) {
        MicroBatch mb = next(ranks[i % 2], i);
        n += !seen[mb.tokens[0]];
        seen[mb.tokens[0]] = 1;
    }
    EXPECT_EQ(n, N_SAMPLES);
    EXPECT(loader_identity(ranks[0]) == loader_identity(ranks[1]));
    loader_close(ranks[0]);
    loader_close(ranks[1]);
}

TEST(loader_skips_ranges) {
    write_shards();
    enum { N = 60 };
    int32_t all[N], kept[N];
    LoaderSpec spec = spec_of("train_*.bin", 4);
    Loader *l = open_spec(&spec);
    first_ids(all, l, 0, N);
    loader_close(l);
    spec.n_skip = 2;
    spec.skip[0][0] = 50, spec.skip[0][1] = 55;
    spec.skip[1][0] = 7, spec.skip[1][1] = 10;
    l = open_spec(&spec);
    first_ids(kept, l, 0, N - 8);
    int n = 0;
    for (int number = 0; number < N; number++) {
        if ((number >= 7 && number < 10) || (number >= 50 && number < 55)) continue;
        EXPECT_EQ(loader_sample_number(l, n), number);
        EXPECT(kept[n] == all[number], "consumed sample %d", n);
        n++;
    }
    loader_close(l);
    spec.skip[0][1] = 49;
    char err[ERR_LEN] = "", hint[ERR_LEN];
    EXPECT(loader_open(&l, &spec, err, hint) == -1 && strstr(err, "data.skip") && l == NULL, "%s", err);
}

static void add_source(LoaderSpec *spec, const char *name, const char *pattern, double weight) {
    Source *s = &spec->sources[spec->n_sources++];
    snprintf(s->name, sizeof s->name, "%s", name);
    test_path(s->path, pattern);
    s->weight = weight;
}

static int source_of(int32_t id) {
    return id < 1000 ? 0 : id < 3000 ? 1 : 2;
}

/* Of each source every sample once an epoch of its own, all in their shares, and the same from any position. */
TEST(loader_mixes_sources_by_weight) {
    write_shards();
    enum { N = 600 };
    static int32_t ids[N], resumed[N];
    const int sizes[3] = {12, 25, 6};
    const double shares[3] = {0.5, 0.125, 0.375};
    LoaderSpec spec = spec_of(NULL, 4);
    add_source(&spec, "a", "train_0.bin", 4);
    add_source(&spec, "b", "train_1.bin", 1);
    add_source(&spec, "c", "train_2.bin", 3);
    Loader *l = open_spec(&spec);
    EXPECT(loader_n_sources(l) == 3 && loader_n_shards(l) == 3);
    EXPECT_EQ(loader_tokens(l), 357);
    EXPECT_EQ(loader_samples(l), N_SAMPLES);
    first_ids(ids, l, 0, N);
    int n[3] = {0}, seen[3][25] = {{0}};
    for (int i = 0; i < N; i++) {
        const int k = source_of(ids[i]), sample = (ids[i] - (int[]){0, 1000, 3000}[k]) / S;
        EXPECT(seen[k][sample] == n[k] / sizes[k], "source %d: sample %d of epoch %d", k, sample, n[k] / sizes[k]);
        seen[k][sample]++;
        n[k]++;
        for (int j = 0; j < 3; j++) EXPECT_NEAR(n[j], shares[j] * (i + 1), 2);
        for (int j = 0; j < 3; j++) EXPECT_EQ(loader_source(l, j, i + 1).n_used, n[j]);
    }
    const LoaderSource c = loader_source(l, 2, N);
    EXPECT(strcmp(c.name, "c") == 0 && c.share == 0.375 && c.n_samples == 6 && c.n_tokens == 50 && c.n_used == 225);
    loader_close(l);
    const int64_t starts[] = {1, 13, 100, 377};
    for (int i = 0; i < 4; i++) {
        spec.micro_batch = 1 + i;
        l = open_spec(&spec);
        first_ids(resumed, l, starts[i], N - starts[i]);
        EXPECT(memcmp(resumed, ids + starts[i], (size_t)(N - starts[i]) * sizeof *ids) == 0, "from %d", i);
        loader_close(l);
    }
    /* Skipped ranges count for no source. */
    spec.n_skip = 2;
    spec.skip[0][0] = 10, spec.skip[0][1] = 18;
    spec.skip[1][0] = 300, spec.skip[1][1] = 301;
    l = open_spec(&spec);
    first_ids(resumed, l, 0, 400);
    EXPECT(memcmp(resumed, ids, 10 * sizeof *ids) == 0 && memcmp(resumed + 10, ids + 18, 282 * sizeof *ids) == 0 &&
           memcmp(resumed + 292, ids + 301, 108 * sizeof *ids) == 0);
    int used[3] = {0};
    for (int i = 0; i < 400; i++) used[source_of(resumed[i])]++;
    for (int k = 0; k < 3; k++) EXPECT_EQ(loader_source(l, k, 400).n_used, used[k]);
    loader_close(l);
}

/* What a checkpoint is compared by: which data, in which order, with which weights; not what only their ratio is. */
TEST(loader_identity_of_several_sources) {
    write_shards();
    uint64_t identity[5];
    for (int i = 0; i < 5; i++) {
        LoaderSpec spec = spec_of(NULL, 4);
        add_source(&spec, "a", i == 2 ? "train_1.bin" : "train_0.bin", i == 3 ? 8 : 4);
        add_source(&spec, "b", i == 2 ? "train_0.bin" : "train_1.bin", i == 1 || i == 3 ? 2 : 1);
        if (i == 4) add_source(&spec, "c", "train_2.bin", 1);
        Loader *l = open_spec(&spec);
        identity[i] = loader_identity(l);
        loader_close(l);
    }
    EXPECT(identity[1] != identity[0] && identity[2] != identity[0] && identity[4] != identity[0]);
    EXPECT(identity[3] == identity[0], "8:2 is another mixture than 4:1");
}

TEST(loader_sources_must_share_a_tokenizer) {
    char path[TEST_PATH_LEN], err[ERR_LEN] = "", hint[ERR_LEN] = "";
    mkdir(test_path(path, "x"), 0700);
    mkdir(test_path(path, "y"), 0700);
    mkdir(test_path(path, "z"), 0700);
    test_write_shard("x/a.bin", 0, 100);
    test_write_shard("y/a.bin", 0, 100);
    test_write_shard("z/a.bin", 0, 100);
    test_write_text("y/data.json", "{\"version\": 1, \"vocab_size\": 257, \"document_token\": 256}");
    test_write_text("z/data.json", "{\"version\": 1, \"vocab_size\": 300, \"document_token\": 256}");
    LoaderSpec spec = spec_of(NULL, 4);
    add_source(&spec, "x", "x/a.bin", 1);
    add_source(&spec, "y", "y/a.bin", 1);
    Loader *l = open_spec(&spec);
    EXPECT(loader_document_token(l) == 256 && loader_sidecar(l)->found, "%lld", (long long)loader_document_token(l));
    loader_close(l);
    add_source(&spec, "z", "z/a.bin", 1);
    EXPECT(loader_open(&l, &spec, err, hint) == -1 && strstr(err, "differ: vocabulary 257 and 300") && hint[0], "%s",
           err);
    test_path(spec.sources[2].path, "none.bin");
    EXPECT(loader_open(&l, &spec, err, hint) == -1 && strstr(err, "data.train 'z': no file matches"), "%s", err);
}

/* What loader_next waits for is counted: a first read all of it, one that was read ahead next to nothing. */
TEST(loader_counts_waiting) {
    write_shards();
    LoaderSpec spec = spec_of("train_*.bin", 4);
    Loader *l = open_spec(&spec);
    EXPECT(loader_waited_s(l) == 0, "%g", loader_waited_s(l));
    next(l, 0);
    const double first = loader_waited_s(l);
    EXPECT(first > 0, "%g", first);
    usleep(300000);
    next(l, 4);
    EXPECT(loader_waited_s(l) - first < 0.15, "waited %g s for what had been read", loader_waited_s(l) - first);
    loader_close(l);
}

/* Cases of topic (c) in one: a shard of nothing but document tokens, and documents without a token, train as they
 * are. */
TEST(loader_takes_empty_documents) {
    char path[TEST_PATH_LEN], err[ERR_LEN] = "";
    int32_t ids[101];
    for (int i = 0; i < 101; i++) ids[i] = 7;
    REQUIRE(shard_write(test_path(path, "only.bin"), ids, 101, 0, err) == 0, "%s", err);
    LoaderSpec spec = spec_of("only.bin", 2);
    spec.document_mask = true;
    spec.document_token = 7;
    Loader *l = open_spec(&spec);
    for (int64_t i = 0; i < 12; i += 2) {
        MicroBatch mb = next(l, i);
        EXPECT_EQ(mb.n_targets[0], 2 * S); /* each learns that the document ends */
        EXPECT_EQ(mb.n_targets[1], 0);
        for (int64_t t = 0; t < mb.n_tokens; t++) EXPECT(mb.position[t] == 0 && mb.doc_start[t] == t);
    }
    loader_close(l);
}

/* One pass over `max_tokens`; returns the sum of (1 + target) over depth 0 and its number of targets. */
static int64_t sum_of_pass(int64_t micro_batch, int64_t max_tokens, int64_t *n_targets, int64_t *n_padded) {
    LoaderSpec spec = spec_of("train_*.bin", micro_batch);
    spec.shuffle = false;
    spec.one_pass = true;
    spec.max_tokens = max_tokens;
    Loader *l = open_spec(&spec);
    int64_t sum = 0, counted = 0;
    *n_targets = *n_padded = 0;
    for (int64_t first = 0; first < loader_samples(l); first += micro_batch) {
        MicroBatch mb = next(l, first);
        *n_targets += mb.n_targets[0];
        for (int64_t t = 0; t < mb.n_tokens; t++) {
            sum += mb.targets[t] >= 0 ? 1 + mb.targets[t] : 0;
            counted += mb.targets[t] >= 0;
            *n_padded += mb.position[t] < 0;
            EXPECT(mb.position[t] >= 0 ||
                   (mb.targets[t] == -1 && mb.targets[mb.n_tokens + t] == -1 && mb.tokens[t] == 0));
        }
    }
    EXPECT_EQ(counted, *n_targets);
    EXPECT_EQ(loader_tokens(l), *n_targets);
    loader_close(l);
    return sum;
}

/* The evaluated tokens are the same whatever the micro-batch, exactly as many as asked for, or all. */
TEST(loader_validation_is_independent_of_micro_batch) {
    write_shards();
    const int64_t sizes[] = {1, 2, 3, 8, 40, 64}, budgets[] = {0, 1, 8, 100, 333, 344, 345, 100000};
    for (size_t i = 0; i < sizeof budgets / sizeof budgets[0]; i++) {
        int64_t n_expected = budgets[i] == 0 || budgets[i] > N_SAMPLES * S ? N_SAMPLES * S : budgets[i];
        int64_t expected = 0;
        for (int64_t t = 0; t < n_expected; t++) /* target ids: the shards from their second id on */
            expected += 1 + 1 + (t < 12 * S ? t : t < 37 * S ? 1000 + t - 12 * S : 3000 + t - 37 * S);
        for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
            int64_t n_targets, n_padded, n_samples = (n_expected + S - 1) / S;
            EXPECT_EQ(sum_of_pass(sizes[k], budgets[i], &n_targets, &n_padded), expected);
            EXPECT_EQ(n_targets, n_expected);
            EXPECT_EQ(n_padded, ((n_samples + sizes[k] - 1) / sizes[k] * sizes[k] - n_samples) * S);
        }
    }
}

/* What the thread meets ahead of time is told when that micro-batch is asked for, and not before; it never ends the
 * process, and the loader goes on. */
TEST(loader_posts_errors_of_the_thread) {
    char path[TEST_PATH_LEN], err[ERR_LEN] = "";
    int32_t ids[101];
    for (int i = 0; i < 101; i++) ids[i] = i == 55 ? 5000 : 1;
    REQUIRE(shard_write(test_path(path, "bad.bin"), ids, 101, 0, err) == 0, "%s", err);
    LoaderSpec spec = spec_of("bad.bin", 2);
    spec.shuffle = false;
    Loader *l = open_spec(&spec);
    MicroBatch mb;
    for (int round = 0; round < 3; round++) {
        next(l, 2);
        next(l, 4); /* the thread is now at 6, which holds samples 6 and 7: ids 48..65 */
        err[0] = 0;
        EXPECT(loader_next(l, 6, &mb, err) == -1, "the bad id was not seen");
        EXPECT(strstr(err, "bad.bin: token 55 is id 5000, outside the vocabulary of 5000"), "%s", err);
        EXPECT(loader_next(l, 6, &mb, err) == -1, "the bad id was seen only once");
        next(l, 8);
    }
    loader_close(l);
}

TEST(loader_synthetic) {
    LoaderSpec spec = spec_of(NULL, 4);
    spec.vocab_size = 100;
    Loader *l = open_spec(&spec);
    EXPECT(loader_samples(l) == INT64_MAX && loader_n_shards(l) == 0 && loader_tokens(l) == 0);
    int32_t ids[S * 4], again[S * 4];
    memcpy(ids, next(l, 400).tokens, sizeof ids);
    next(l, 0);
    memcpy(again, next(l, 400).tokens, sizeof again);
    EXPECT(memcmp(ids, again, sizeof ids) == 0);
    for (int t = 0; t < S * 4; t++) EXPECT(ids[t] >= 0 && ids[t] < 100, "id %d", ids[t]);
    loader_close(l);
}

TEST(loader_document_token_comes_from_config_json_or_eos) {
    write_shards();
    LoaderSpec spec = spec_of("train_0.bin", 1);
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    Loader *l;
    spec.document_mask = true;
    EXPECT(loader_open(&l, &spec, err, hint) == -1 && strstr(err, "no document token") && hint[0], "%s", err);
    spec.eos_token_id = 5;
    l = open_spec(&spec);
    EXPECT_EQ(loader_document_token(l), 5);
    loader_close(l);
    test_write_text("data.json", "{\"version\": 1, \"vocab_size\": 5000, \"document_token\": 4}");
    l = open_spec(&spec);
    EXPECT(loader_document_token(l) == 4 && loader_sidecar(l)->found);
    loader_close(l);
    spec.document_token = 3;
    spec.shuffle = false;
    l = open_spec(&spec);
    EXPECT_EQ(loader_document_token(l), 3);
    MicroBatch mb = next(l, 0); /* ids 0 .. 8: the document starts at 3 */
    EXPECT(mb.position[2] == 2 && mb.position[3] == 0 && mb.doc_start[7] == 3 && mb.targets[S + 2] == -1);
    EXPECT_EQ(mb.n_targets[0], S);
    EXPECT_EQ(mb.n_targets[1], S - 1);
    loader_close(l);
    spec.document_token = 5000;
    EXPECT(loader_open(&l, &spec, err, hint) == -1 && strstr(err, "5000 is outside the vocabulary of 5000"), "%s", err);
}

TEST(loader_specs_of_a_config) {
    static Config c;
    LoaderSpec spec;
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    c.model.vocab_size = 1025;
    c.model.num_nextn_predict_layers = 1;
    c.model.eos_token_id = 1024;
    c.train.seq_len = 256;
    c.train.micro_batch_size = 8;
    c.eval.tokens = 65536;
    c.run.seed = 7;
    c.data.shuffle = true;
    c.data.document_token = -1;
    c.data.n_val = 1;
    snprintf(c.data.val[0].name, sizeof c.data.val[0].name, "austen");
    snprintf(c.data.val[0].path, sizeof c.data.val[0].path, "val_*.bin");
    EXPECT(loader_spec_train(&spec, &c, 1, err, hint) == -1 && strstr(err, "no source") && hint[0], "%s", err);
    c.data.n_train = 2;
    c.data.train[1].weight = 0.25;
    EXPECT(loader_spec_train(&spec, &c, 1, err, hint) == 0 && spec.n_sources == 2 && spec.sources[1].weight == 0.25);
    c.data.n_train = 1;
    snprintf(c.data.train[0].path, sizeof c.data.train[0].path, "train_*.bin");
    c.data.n_skip = 1;
    c.data.skip[0][1] = 9;
    EXPECT_EQ(loader_spec_train(&spec, &c, 4, err, hint), 0);
    EXPECT(spec.n_sources == 1 && strcmp(spec.sources[0].path, "train_*.bin") == 0 && spec.stride == 32 &&
           spec.micro_batch == 8 && spec.shuffle);
    EXPECT(spec.n_skip == 1 && spec.skip[0][1] == 9 && spec.seed == 7 && spec.depth == 1 && !spec.one_pass);
    loader_spec_val(&spec, &c, 0, 1);
    EXPECT(strcmp(spec.label, "data.val 'austen'") == 0 && strcmp(spec.sources[0].path, "val_*.bin") == 0 &&
           spec.one_pass);
    EXPECT(!spec.shuffle && spec.n_skip == 0 && spec.max_tokens == 65536 && spec.eos_token_id == 1024);
    c.data.synthetic = true;
    EXPECT(loader_spec_train(&spec, &c, 1, err, hint) == 0 && spec.n_sources == 0);
}
