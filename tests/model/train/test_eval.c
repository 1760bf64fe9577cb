/* Validation: the sum of token losses over the number of tokens, of the same text whatever the micro-batch. */
#include "model/train/eval.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/shard.h"
#include "kernels/base/rng.h"
#include "model/train/step.h"
#include "tests/data/shards.h"
#include "tests/model/model_test.h"

enum { S = 16, DEPTH = 1 };

/* Random ids 1..36, the document token 0 at the multiples of `length` (0: nowhere). */
static void write_ids(const char *name, int64_t n, int64_t length, uint64_t seed) {
    char path[TEST_PATH_LEN], err[ERR_LEN];
    int32_t *ids = (int32_t *)malloc((size_t)n * sizeof *ids);
    for (int64_t i = 0; i < n; i++)
        ids[i] = length && i % length == 0 ? 0 : 1 + (int32_t)(rng_bits(seed, RNG_TEST, 2, (uint64_t)i) % 36);
    REQUIRE(shard_write(test_path(path, name), ids, n, 0, err) == 0, "%s", err);
    free(ids);
}

/* "data.val=<the test's folder>/name" */
static const char *val_set(const char *name) {
    static char set[4][TEST_PATH_LEN + 16];
    static int next;
    char path[TEST_PATH_LEN];
    char *text = set[next++ % 4];
    snprintf(text, sizeof set[0], "data.val=%s", test_path(path, name));
    return text;
}

static void open_sets(EvalSets *e, const Fixture *f) {
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    REQUIRE(eval_open(e, &f->config, 1, err, hint) == 0, "%s (%s)", err, hint);
}

static ValReport run_sets(EvalSets *e, Fixture *f) {
    char err[ERR_LEN] = "";
    ValReport report = {0};
    REQUIRE(eval_run(e, &f->model, &report, NULL, err) == 0, "%s", err);
    return report;
}

static ValReport evaluate(const char *const *sets) {
    Fixture f;
    EvalSets e;
    fixture_open(&f, sets);
    open_sets(&e, &f);
    ValReport report = run_sets(&e, &f);
    eval_close(&e);
    fixture_close(&f);
    return report;
}

/* The sum of the losses of all targets of a validation set, by the logits of each position, in double. */
static double sum_by_logits(Fixture *f, Loader *loader, int64_t *n_targets) {
    Model *m = &f->model;
    const int64_t T = m->shape.T, V = m->shape.V;
    double sum = 0;
    float logits[64];
    *n_targets = 0;
    for (int64_t sample = 0; sample < loader_samples(loader); sample += m->shape.B) {
        char err[ERR_LEN];
        REQUIRE(loader_fill(loader, sample, &f->batch, err) == 0, "%s", err);
        model_set_batch(m, &m->eval.shape, &f->batch);
        model_forward(m, &m->eval, FORWARD_HIDDEN);
        for (int64_t t = 0; t < T; t++) {
            double total = 0;
            if (f->batch.targets[t] < 0) continue;
            model_logits(m, &m->eval, t, logits);
            for (int64_t i = 0; i < V; i++) total += exp(logits[i]);
            sum += log(total) - logits[f->batch.targets[t]];
            ++*n_targets;
        }
    }
    return sum;
}

/* J2, J5: seven samples of 16 and a rest; micro-batches that do and do not divide them; all tokens, or a number that
 * cuts a sequence. The tokens are the same, and so is the loss. */
TEST(eval_is_the_mean_of_all_tokens_for_any_micro_batch) {
    write_ids("val.bin", 7 * S + 1 + DEPTH + 9, 0, 1);
    static const char *const micro[] = {"train.micro_batch_size=1", "train.micro_batch_size=2",
                                        "train.micro_batch_size=3", "train.micro_batch_size=7",
                                        "train.micro_batch_size=8"};
    static const char *const batch[] = {"train.global_batch_size=8", "train.global_batch_size=8",
                                        "train.global_batch_size=3", "train.global_batch_size=7",
                                        "train.global_batch_size=8"};
    static const struct {
        const char *set;
        int64_t n_tokens;
    } lengths[] = {
        {"eval.tokens=0", 7 * S}, {"eval.tokens=100", 100}, {"eval.tokens=1", 1}, {"eval.tokens=1000", 7 * S}};
    for (int l = 0; l < 4; l++) {
        double want = 0;
        for (int i = 0; i < 5; i++) {
            Fixture f;
            EvalSets e;
            fixture_open(&f, (const char *const[]){val_set("val.bin"), micro[i], batch[i], lengths[l].set, NULL});
            open_sets(&e, &f);
            if (i == 0) {
                int64_t n;
                want = sum_by_logits(&f, e.loader[0], &n) / (double)lengths[l].n_tokens;
                EXPECT_EQ(n, lengths[l].n_tokens);
            }
            const ValReport report = run_sets(&e, &f);
            EXPECT_EQ(report.n_sets, 1);
            EXPECT_EQ(report.tokens_evaluated, lengths[l].n_tokens);
            EXPECT_NEAR(report.sets[0].loss, want, 1e-5);
            EXPECT(report.seconds >= 0, "%g s", report.seconds);
            eval_close(&e);
            fixture_close(&f);
        }
    }
}

/* J8: a document has the same losses alone as behind another one in the same sequence; nothing is scored twice. Each
 * shard goes on with a document token, so that the end of its text is a target. */
TEST(eval_scores_a_document_alone_and_packed_alike) {
    enum { SHORT = 6, LONG = 10 };
    int32_t packed[SHORT + LONG + 2], alone_short[SHORT + 2] = {0}, alone_long[LONG + 2] = {0};
    for (int i = 0; i < SHORT + LONG; i++) packed[i] = i == 0 || i == SHORT ? 0 : 1 + i * 7 % 36;
    packed[SHORT + LONG] = 0, packed[SHORT + LONG + 1] = 5;
    memcpy(alone_short, packed, sizeof *packed * (SHORT + 2));
    memcpy(alone_long, packed + SHORT, sizeof *packed * (LONG + 2));
    const struct {
        const char *name, *seq_len;
        const int32_t *ids;
        int64_t n;
    } shards[] = {{"packed.bin", "train.seq_len=16", packed, SHORT + LONG + 2},
                  {"short.bin", "train.seq_len=6", alone_short, SHORT + 2},
                  {"long.bin", "train.seq_len=10", alone_long, LONG + 2}};
    double sum[3];
    for (int i = 0; i < 3; i++) {
        char path[TEST_PATH_LEN], err[ERR_LEN];
        REQUIRE(shard_write(test_path(path, shards[i].name), shards[i].ids, shards[i].n, 0, err) == 0, "%s", err);
        const ValReport report = evaluate(
            (const char *const[]){val_set(shards[i].name), shards[i].seq_len, "data.document_mask=true", NULL});
        EXPECT_EQ(report.tokens_evaluated, shards[i].n - 2);
        sum[i] = report.sets[0].loss * (double)report.tokens_evaluated;
    }
    EXPECT_NEAR(sum[0], sum[1] + sum[2], 1e-4);
}

/* J1: a set is the files it names, in the order of their names, whatever else lies beside them. */
TEST(eval_reads_the_files_it_names) {
    write_ids("val_1.bin", 5 * S + 2, 0, 1);
    write_ids("val_0.bin", 3 * S + 2, 0, 2);
    const ValReport before = evaluate((const char *const[]){val_set("val_*.bin"), "eval.tokens=100", NULL});
    write_ids("train_0.bin", 9 * S, 0, 3);
    write_ids("train_1.bin", 9 * S, 0, 4);
    char train[TEST_PATH_LEN + 16], path[TEST_PATH_LEN];
    snprintf(train, sizeof train, "data.train=%s", test_path(path, "train_*.bin"));
    const ValReport after = evaluate((const char *const[]){val_set("val_*.bin"), "eval.tokens=100", train, NULL});
    EXPECT(before.sets[0].loss == after.sets[0].loss && after.tokens_evaluated == 100, "%g, %g", before.sets[0].loss,
           after.sets[0].loss);
    const ValReport first = evaluate((const char *const[]){val_set("val_0.bin"), NULL});
    const ValReport cut = evaluate((const char *const[]){val_set("val_*.bin"), "eval.tokens=48", NULL});
    EXPECT_NEAR(cut.sets[0].loss, first.sets[0].loss, 1e-6);
}

/* Several named sets, each with its own mean; what the JSON beside the shards says of bytes and n-grams. */
TEST(eval_of_several_named_sets) {
    write_ids("a.bin", 3 * S + 2, 0, 1);
    write_ids("b.bin", 6 * S + 2, 0, 2);
    test_write_text("data.json", "{\"version\":1,\"tokenizer\":\"bytes\",\"vocab_size\":37,\"document_token\":0,"
                                 "\"bytes_per_token\":2.5,\"ngram\":{\"bigram\":2.48,\"3-gram\":1.914}}");
    char path[2][TEST_PATH_LEN], set[3 * TEST_PATH_LEN];
    snprintf(set, sizeof set, "data.val=[{\"name\":\"first\",\"path\":\"%s\"},{\"name\":\"second\",\"path\":\"%s\"}]",
             test_path(path[0], "a.bin"), test_path(path[1], "b.bin"));
    Fixture f;
    EvalSets e;
    fixture_open(&f, (const char *const[]){set, NULL});
    open_sets(&e, &f);
    EXPECT_EQ(e.n, 2);
    const ValReport report = run_sets(&e, &f);
    EXPECT_EQ(report.n_sets, 2);
    EXPECT_EQ(report.tokens_evaluated, 9 * S);
    for (int i = 0; i < 2; i++) {
        int64_t n;
        const double sum = sum_by_logits(&f, e.loader[i], &n);
        EXPECT_EQ(n, (i == 0 ? 3 : 6) * S);
        EXPECT_NEAR(report.sets[i].loss, sum / (double)n, 1e-5);
        EXPECT(strcmp(report.sets[i].name, i == 0 ? "first" : "second") == 0, "%s", report.sets[i].name);
        EXPECT_NEAR(report.sets[i].bytes_per_token, 2.5, 1e-12);
        EXPECT(report.sets[i].comparison && strcmp(report.sets[i].comparison, "bigram 2.48, 3-gram 1.91") == 0, "%s",
               report.sets[i].comparison ? report.sets[i].comparison : "no ladder");
    }
    eval_close(&e);
    fixture_close(&f);
}

/* G9 of the evaluation, and more: it gives the same number each time, and training does not notice it at all. */
TEST(eval_and_training_do_not_notice_each_other) {
    write_ids("val.bin", 5 * S + 2, 0, 1);
    uint64_t hash[2];
    double loss[2];
    for (int with_eval = 0; with_eval < 2; with_eval++) {
        Fixture f;
        EvalSets e;
        Loader *loader;
        LoaderSpec spec;
        Trainer trainer;
        StepReport report;
        char err[ERR_LEN], hint[ERR_LEN];
        fixture_open(&f, (const char *const[]){val_set("val.bin"), "train.global_batch_size=4", NULL});
        open_sets(&e, &f);
        REQUIRE(loader_spec_train(&spec, &f.config, 1, err, hint) == 0 && loader_open(&loader, &spec, err, hint) == 0,
                "%s", err);
        REQUIRE(trainer_init(&trainer, &f.config, &f.model, loader, err) == 0, "%s", err);
        for (int step = 0; step < 4; step++) {
            REQUIRE(train_step(&trainer, err) == 0 && train_flush(&trainer, &report), "%s", err);
            if (!with_eval) continue;
            const RunState before = trainer.state;
            const StepStats stats = *f.model.stats;
            const ValReport first = run_sets(&e, &f), second = run_sets(&e, &f);
            EXPECT(first.sets[0].loss == second.sets[0].loss, "%.17g and %.17g", first.sets[0].loss,
                   second.sets[0].loss);
            EXPECT(memcmp(&before, &trainer.state, sizeof before) == 0, "evaluation moved the run");
            EXPECT(memcmp(&stats, f.model.stats, sizeof stats) == 0, "evaluation changed the step's statistics");
        }
        hash[with_eval] = params_hash(&f.model.params, &f.device);
        loss[with_eval] = report.loss[0];
        trainer_free(&trainer);
        loader_close(loader);
        eval_close(&e);
        fixture_close(&f);
    }
    EXPECT(hash[0] == hash[1] && loss[0] == loss[1], "loss %.17g without, %.17g with", loss[0], loss[1]);
}

/* J3: no set at all is no error. */
TEST(eval_of_nothing) {
    const ValReport report = evaluate(NULL);
    EXPECT(report.n_sets == 0 && report.tokens_evaluated == 0, "%d sets", report.n_sets);
}

TEST(eval_refuses_what_it_cannot_read) {
    Fixture f;
    EvalSets e;
    char err[ERR_LEN] = "", hint[ERR_LEN] = "", path[2][TEST_PATH_LEN], set[3 * TEST_PATH_LEN];
    write_ids("good.bin", 5 * S + 2, 0, 1);
    write_ids("tiny.bin", S, 0, 1);
    static const char *const bad[] = {"absent.bin", "tiny.bin"};
    for (int i = 0; i < 2; i++) {
        snprintf(set, sizeof set, "data.val=[{\"name\":\"good\",\"path\":\"%s\"},{\"name\":\"bad\",\"path\":\"%s\"}]",
                 test_path(path[0], "good.bin"), test_path(path[1], bad[i]));
        fixture_open(&f, (const char *const[]){set, NULL});
        EXPECT_EQ(eval_open(&e, &f.config, 1, err, hint), -1);
        EXPECT(strstr(err, bad[i]) && strstr(err, "bad"), "%s", err);
        EXPECT_EQ(e.n, 0);
        fixture_close(&f);
    }
}

/* An id that the model does not have is found when it is read, not in a kernel. */
TEST(eval_refuses_ids_outside_the_vocabulary) {
    Fixture f;
    EvalSets e;
    ValReport report = {0};
    char err[ERR_LEN] = "";
    test_write_shard("val.bin", 0, 5 * S + 2); /* 0, 1, 2, ... beyond 36 */
    fixture_open(&f, (const char *const[]){val_set("val.bin"), NULL});
    open_sets(&e, &f);
    EXPECT_EQ(eval_run(&e, &f.model, &report, NULL, err), -1);
    EXPECT(strstr(err, "val.bin") && strstr(err, "37"), "%s", err);
    eval_close(&e);
    fixture_close(&f);
}
