/* Sampling one token, and generating text: the laws of temperature, top-k and top-p, and that a text depends on
 * nothing but weights, prompt and seed. */
#include "model/train/generate.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/rng.h"
#include "tests/model/model_test.h"

/* ---- one token --------------------------------------------------------------------------------------------------- */

enum { N_IDS = 8, N_DRAWS = 4096 };

static Sampling sampling(double temperature, int top_k, double top_p) {
    return (Sampling){.temperature = temperature, .top_k = top_k, .top_p = top_p};
}

static int32_t draw(const float *logits, int64_t n, Sampling s, double u) {
    int32_t order[64];
    int32_t id = sample_token(logits, n, &s, u, order);
    EXPECT(id >= 0 && id < n, "id %d of %lld", id, (long long)n);
    return id;
}

/* Draws with evenly spread u: each id owns one stretch of [0, 1), so its share is exact to one draw at either end. */
static void expect_shares(const float *logits, int64_t n, Sampling s, const double *want, const char *name) {
    int count[64] = {0};
    for (int i = 0; i < N_DRAWS; i++) count[draw(logits, n, s, (i + 0.5) / N_DRAWS)]++;
    for (int64_t id = 0; id < n; id++)
        EXPECT(fabs(count[id] - want[id] * N_DRAWS) <= 2, "%s: id %d was drawn %d times of %d, not %.1f", name, (int)id,
               count[id], N_DRAWS, want[id] * N_DRAWS);
}

static void softmax(double *p, const float *logits, int64_t n, double temperature, const bool *is_kept) {
    double largest = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, logits[i]);
    for (int64_t i = 0; i < n; i++) {
        p[i] = !is_kept || is_kept[i] ? exp((logits[i] - largest) / temperature) : 0;
        sum += p[i];
    }
    for (int64_t i = 0; i < n; i++) p[i] /= sum;
}

static const float plain_logits[N_IDS] = {0.5f, -1.0f, 2.0f, 1.5f, -3.0f, 1.5f, 0.0f, 1.0f};

TEST(sample_at_temperature_zero_is_the_likeliest) {
    static const double temperatures[] = {0, 1e-9, 1e-300};
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 50; k++) {
            EXPECT_EQ(draw(plain_logits, N_IDS, sampling(temperatures[i], 0, 1), k / 50.0), 2);
            EXPECT_EQ(draw(plain_logits, N_IDS, sampling(temperatures[i], 3, 0.9), k / 50.0), 2);
        }
    const float tied[] = {1, 3, 2, 3, 3};
    EXPECT_EQ(draw(tied, 5, sampling(0, 0, 1), 0.99), 1);
    EXPECT_EQ(draw(tied, 5, sampling(0.7, 1, 1), 0.99), 1);
    for (int k = 0; k < 50; k++) { /* almost zero: only among the tied */
        int32_t id = draw(tied, 5, sampling(1e-9, 0, 1), k / 50.0);
        EXPECT(id == 1 || id == 3 || id == 4, "id %d", id);
    }
}

TEST(sample_follows_the_softmax) {
    double p[N_IDS];
    static const double temperatures[] = {0.3, 1, 1.7, 100};
    for (int i = 0; i < 4; i++) {
        softmax(p, plain_logits, N_IDS, temperatures[i], NULL);
        expect_shares(plain_logits, N_IDS, sampling(temperatures[i], 0, 1), p, "softmax");
    }
}

/* The same with the program's own random numbers: chi-square of 7 degrees, whose 99.99th percentile is 29.9. */
TEST(sample_with_random_numbers_fits_by_chi_square) {
    double p[N_IDS], chi_square = 0;
    int count[N_IDS] = {0};
    softmax(p, plain_logits, N_IDS, 1, NULL);
    for (int i = 0; i < N_DRAWS; i++)
        count[draw(plain_logits, N_IDS, sampling(1, 0, 1), rng_uniform(5, RNG_SAMPLE, 0, (uint64_t)i))]++;
    for (int id = 0; id < N_IDS; id++) {
        double expected = p[id] * N_DRAWS;
        chi_square += (count[id] - expected) * (count[id] - expected) / expected;
    }
    EXPECT(chi_square < 29.9, "chi-square %g", chi_square);
}

/* J7: 0 and anything from the vocabulary's size on are off; 1 is greedy; in between the k likeliest, ties to lower
 * ids. */
TEST(sample_top_k) {
    double p[N_IDS];
    softmax(p, plain_logits, N_IDS, 1, NULL);
    static const int off[] = {0, N_IDS, N_IDS + 1, 1 << 30};
    for (int i = 0; i < 4; i++) expect_shares(plain_logits, N_IDS, sampling(1, off[i], 1), p, "top_k off");
    for (int i = 0; i < 50; i++) EXPECT_EQ(draw(plain_logits, N_IDS, sampling(1, 1, 1), i / 50.0), 2);

    static const bool two[N_IDS] = {[2] = true, [3] = true}; /* 3 and 5 are equal: the lower id is kept */
    softmax(p, plain_logits, N_IDS, 1, two);
    expect_shares(plain_logits, N_IDS, sampling(1, 2, 1), p, "top_k 2");
    static const bool four[N_IDS] = {[2] = true, [3] = true, [5] = true, [7] = true};
    softmax(p, plain_logits, N_IDS, 0.6, four);
    expect_shares(plain_logits, N_IDS, sampling(0.6, 4, 1), p, "top_k 4");
}

TEST(sample_top_p) {
    float logits[6];
    static const double share[6] = {0.125, 0.5, 0.0625, 0.25, 0.03125, 0.03125};
    for (int i = 0; i < 6; i++) logits[i] = (float)log(share[i]);
    static const struct {
        double top_p;
        int n_kept;
    } cases[] = {{1e-12, 1}, {0.4, 1}, {0.6, 2}, {0.74, 2}, {0.8, 3}, {0.9, 4}, {0.95, 5}, {0.999, 6}, {1, 6}};
    static const int order[6] = {1, 3, 0, 2, 4, 5}; /* 4 and 5 are equal: 4 comes first */
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        bool is_kept[6] = {false};
        double p[6];
        for (int k = 0; k < cases[c].n_kept; k++) is_kept[order[k]] = true;
        softmax(p, logits, 6, 1, is_kept);
        expect_shares(logits, 6, sampling(1, 0, cases[c].top_p), p, "top_p");
    }
    for (int i = 0; i < 50; i++) EXPECT_EQ(draw(logits, 6, sampling(1, 0, 0), i / 50.0), 1); /* at least one */

    /* Of top_k's rest, top_p counts anew: 0.5 and 0.25 are two thirds and one third. */
    static const bool one[6] = {[1] = true};
    double p[6];
    softmax(p, logits, 6, 1, one);
    expect_shares(logits, 6, sampling(1, 2, 0.6), p, "top_k 2 and top_p 0.6");
}

/* X3: logits beyond exp's range, and none but tiny ones. */
TEST(sample_is_stable) {
    static const float sets[][4] = {{1000, 1000, 998, -1000}, {-1000, -1000, -1002, -3000}, {89, 89, 87, -89}};
    const double p = 1 / (2 + exp(-2)), want[4] = {p, p, 1 - 2 * p, 0};
    for (int i = 0; i < 3; i++) expect_shares(sets[i], 4, sampling(1, 0, 1), want, "large logits");
    for (int i = 0; i < 3; i++) expect_shares(sets[i], 4, sampling(1, 3, 0.9999), want, "large logits, cut");
    const float masked[4] = {-INFINITY, 1, -INFINITY, 1};
    static const double half[4] = {0, 0.5, 0, 0.5};
    expect_shares(masked, 4, sampling(1, 0, 1), half, "masked ids");
    /* The last u below 1 stays inside what was kept. */
    const double last = 1 - 0x1p-53;
    EXPECT_EQ(draw(sets[0], 4, sampling(1, 2, 1), last), 1);
    EXPECT(draw(plain_logits, N_IDS, sampling(1, 0, 0.5), last) != 4);
    EXPECT_EQ(draw(plain_logits, 1, sampling(1, 0, 1), last), 0);
}

/* Only the real vocabulary: what lies behind it in memory is not looked at. */
TEST(sample_ignores_padding_of_the_vocabulary) {
    float logits[N_IDS + 3];
    memcpy(logits, plain_logits, sizeof plain_logits);
    logits[N_IDS] = 1e9f, logits[N_IDS + 1] = INFINITY, logits[N_IDS + 2] = NAN;
    double p[N_IDS];
    softmax(p, plain_logits, N_IDS, 1, NULL);
    expect_shares(logits, N_IDS, sampling(1, 0, 1), p, "all");
    expect_shares(logits, N_IDS, sampling(1, N_IDS + 1, 1), p, "top_k above the vocabulary");
    EXPECT_EQ(draw(logits, N_IDS, sampling(0, 0, 1), 0), 2);
}

/* ---- a text ------------------------------------------------------------------------------------------------------ */

enum { PROMPT = 3, TEXT = 12 };
static const int32_t prompt[PROMPT] = {5, 17, 2};

/* The fixture's model with another number of positions for generation. */
static void reopen(Fixture *f, int64_t generate_len) {
    char err[ERR_LEN];
    model_free(&f->model);
    f->model.generate_len = generate_len;
    REQUIRE(model_init(&f->model, &f->config, &f->device, f->comm, err) == 0, "%s", err);
    model_init_weights(&f->model);
    EXPECT_EQ(f->model.generate.shape.S, generate_len);
}

static int64_t generate_into(Fixture *f, int32_t *ids, int64_t n_new, Sampling s) {
    memcpy(ids, prompt, sizeof prompt);
    return generate(&f->model, ids, PROMPT, n_new, &s, NULL, NULL);
}

/* The same text by the evaluation's forward: a whole micro-batch for every token. */
static void generate_stepwise(Fixture *f, int32_t *ids, int64_t n_new, Sampling s) {
    Model *m = &f->model;
    const int64_t S = m->shape.S, V = m->shape.V;
    float logits[64];
    int32_t order[64];
    memcpy(ids, prompt, sizeof prompt);
    for (int64_t i = 0; i < n_new; i++) {
        const int64_t n = PROMPT + i;
        for (int64_t t = 0; t < S; t++)
            f->batch.tokens[S + t] = t < n ? ids[t] : 36 - (int32_t)(t % 37); /* sequence 1 */
        model_set_batch(m, &m->eval.shape, &f->batch);
        model_forward(m, &m->eval, FORWARD_EVAL);
        model_logits(m, &m->eval, S + n - 1, logits);
        ids[n] = sample_token(logits, V, &s, rng_uniform(s.seed, RNG_SAMPLE, s.step, (uint64_t)i), order);
    }
}

TEST(generate_equals_full_forwards_of_any_length) {
    static const int64_t lengths[] = {PROMPT + TEXT, 16, 17, 40, 64};
    static const Sampling ways[] = {{.temperature = 0, .top_p = 1},
                                    {.temperature = 1, .top_p = 1, .seed = 3, .step = 9},
                                    {.temperature = 1.5, .top_k = 9, .top_p = 0.9, .seed = 4}};
    for (int q = 0; q < 2; q++) {
        Fixture f;
        fixture_open(&f, q ? model_cases[1].sets : NULL); /* with documents configured: a text is one document */
        for (int w = 0; w < 3; w++) {
            int32_t want[PROMPT + TEXT], ids[PROMPT + TEXT];
            reopen(&f, 16);
            generate_stepwise(&f, want, TEXT, ways[w]);
            for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
                reopen(&f, lengths[i]);
                EXPECT_EQ(generate_into(&f, ids, TEXT, ways[w]), TEXT);
                EXPECT(memcmp(ids, want, sizeof ids) == 0, "way %d, %lld positions", w, (long long)lengths[i]);
            }
        }
        fixture_close(&f);
    }
}

/* A trained model has large logits and clear routing; its texts are equal all the same, in FP8 the likeliest ones. */
static void expect_trained_texts(const char *const *sets, int n_ways) {
    Fixture f;
    fixture_open(&f, sets);
    memcpy(f.batch.tokens, prompt, sizeof prompt);
    for (int step = 1; step <= 60; step++) { /* the batch by heart */
        f.params.step = step;
        fixture_gradients(&f);
        model_update(&f.model);
    }
    EXPECT(f.model.stats->loss_sum[0] / (double)f.model.shape.T < 1, "loss %g", f.model.stats->loss_sum[0]);
    for (int w = 0; w < n_ways; w++) {
        const Sampling s = {.temperature = w, .top_p = 1, .seed = 3};
        int32_t want[PROMPT + TEXT], ids[PROMPT + TEXT];
        generate_stepwise(&f, want, TEXT, s);
        EXPECT_EQ(generate_into(&f, ids, TEXT, s), TEXT);
        EXPECT(memcmp(ids, want, sizeof ids) == 0, "temperature %d: another text", w);
    }
    fixture_close(&f);
}

TEST(generate_equals_full_forwards_when_trained) {
    static const char *const fp8[] = {FP8_WIDTHS, "precision.compute=fp8", NULL};
    expect_trained_texts(model_cases[1].sets, 2);
    expect_trained_texts(fp8, 1);
}

typedef struct {
    int n;
    int32_t id[64];
} Emitted;

static void collect(void *arg, int32_t id) {
    Emitted *e = (Emitted *)arg;
    e->id[e->n++] = id;
}

TEST(generate_depends_on_seed_and_step_alone) {
    Fixture f;
    fixture_open(&f, NULL);
    int32_t first[PROMPT + TEXT], ids[PROMPT + TEXT];
    Sampling s = {.temperature = 2, .top_p = 1, .seed = 1, .step = 1};
    generate_into(&f, first, TEXT, s);
    fixture_gradients(&f); /* training over the same memory in between */
    generate_into(&f, ids, TEXT, s);
    EXPECT(memcmp(ids, first, sizeof ids) == 0, "the same seed gave another text");
    s.step = 2;
    generate_into(&f, ids, TEXT, s);
    EXPECT(memcmp(ids, first, sizeof ids) != 0, "another step gave the same text");
    s.step = 1, s.seed = 2;
    generate_into(&f, ids, TEXT, s);
    EXPECT(memcmp(ids, first, sizeof ids) != 0, "another seed gave the same text");
    fixture_close(&f);
}

TEST(generate_stops_and_emits) {
    Fixture f;
    fixture_open(&f, NULL);
    int32_t ids[PROMPT + TEXT], again[PROMPT + TEXT];
    Sampling s = {.temperature = 1, .top_p = 1, .seed = 1};
    generate_into(&f, ids, TEXT, s);
    int stop = 4;
    sampling_stop_at(&s, 36 - ids[PROMPT + stop]); /* of several, any ends the text */
    sampling_stop_at(&s, ids[PROMPT + stop]);
    sampling_stop_at(&s, -1);
    for (int i = 0; i < stop; i++)
        if (ids[PROMPT + i] == s.stop[0] || ids[PROMPT + i] == s.stop[s.n_stops - 1]) stop = i;
    Emitted emitted = {0};
    memcpy(again, prompt, sizeof prompt);
    EXPECT_EQ(generate(&f.model, again, PROMPT, TEXT, &s, collect, &emitted), stop + 1);
    EXPECT_EQ(emitted.n, stop + 1);
    EXPECT(memcmp(again, ids, sizeof *ids * (size_t)(PROMPT + stop + 1)) == 0, "the text before the stop changed");
    EXPECT(memcmp(emitted.id, ids + PROMPT, sizeof *ids * (size_t)(stop + 1)) == 0, "other ids were emitted");
    EXPECT_EQ(generate(&f.model, again, PROMPT, 0, &s, collect, &emitted), 0);
    /* The last token needs no position of its own: 3 + 14 tokens in 16 positions. */
    int32_t full[17];
    memcpy(full, prompt, sizeof prompt);
    s.n_stops = 0;
    EXPECT_EQ(generate(&f.model, full, PROMPT, 14, &s, NULL, NULL), 14);
    fixture_close(&f);
}

static void generate_too_much(void *arg) {
    int32_t ids[64] = {1, 2, 3};
    const Sampling s = {.temperature = 0, .top_p = 1};
    generate(&((Fixture *)arg)->model, ids, PROMPT, 15, &s, NULL, NULL);
}
static void generate_from_nothing(void *arg) {
    int32_t ids[64];
    const Sampling s = {.temperature = 0, .top_p = 1};
    generate(&((Fixture *)arg)->model, ids, 0, 2, &s, NULL, NULL);
}

TEST(generate_refuses_what_does_not_fit) {
    Fixture f;
    fixture_open(&f, NULL);
    EXPECT(expect_exit(128 + SIGABRT, "3 + 15 tokens in 16 positions", generate_too_much, &f));
    EXPECT(expect_exit(128 + SIGABRT, "0 + 2 tokens", generate_from_nothing, &f));
    fixture_close(&f);
}

/* 37 ids, 48 rows in memory: rows that would win if anybody looked at them. */
TEST(generate_uses_the_real_vocabulary) {
    Fixture f;
    fixture_open(&f, NULL);
    const ModelShape *s = &f.model.shape;
    REQUIRE(s->V == 37 && s->V_padded == 48, "V %lld of %lld", (long long)s->V, (long long)s->V_padded);
    Tensor head = f.model.params.top.weight[WEIGHT_HEAD].w;
    int32_t first[PROMPT + TEXT], ids[PROMPT + TEXT];
    generate_into(&f, first, TEXT, sampling(0, 0, 1));
    for (int64_t i = s->V * s->D; i < s->V_padded * s->D; i++) t_set(head, i, i % 2 ? 1e4 : -1e4);
    generate_into(&f, ids, TEXT, sampling(0, 0, 1));
    EXPECT(memcmp(ids, first, sizeof ids) == 0, "padding changed a greedy text");
    generate_into(&f, ids, TEXT, sampling(100, 0, 1));
    for (int i = 0; i < TEXT; i++) EXPECT(ids[PROMPT + i] < s->V, "id %d", ids[PROMPT + i]);
    fixture_close(&f);
}

/* ---- prompts and texts ------------------------------------------------------------------------------------------- */

/* 0..255 are bytes, 256 the document token, 257 "ab": the quick start's tokenizer in small. */
static Tokenizer *small_tokenizer(void) {
    static char json[16384];
    size_t n = (size_t)sprintf(json, "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":256,\"content\":\"<|document|>\","
                                     "\"special\":true}],\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"ByteLevel\","
                                     "\"add_prefix_space\":false,\"use_regex\":true},\"model\":{\"type\":\"BPE\","
                                     "\"vocab\":{");
    int extra = 256;
    for (int b = 0; b < 256; b++) {
        const bool is_own = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        n += (size_t)sprintf(json + n, "\"\\u%04x\":%d,", is_own ? b : extra++, b);
    }
    sprintf(json + n, "\"ab\":257},\"merges\":[\"a b\"]}}");
    char err[ERR_LEN];
    Tokenizer *t;
    REQUIRE(tokenizer_parse(&t, json, strlen(json), "test", err) == 0, "%s", err);
    return t;
}

TEST(generate_prompts_become_ids) {
    Tokenizer *t = small_tokenizer();
    char err[ERR_LEN] = "";
    int32_t ids[8];
    EXPECT_EQ(prompt_ids(t, 256, "cab", ids, 8, err), 3);
    EXPECT(ids[0] == 256 && ids[1] == 'c' && ids[2] == 257, "%d %d %d", ids[0], ids[1], ids[2]);
    EXPECT_EQ(prompt_ids(t, -1, "cab", ids, 8, err), 2);
    EXPECT(ids[0] == 'c' && ids[1] == 257, "%d %d", ids[0], ids[1]);
    EXPECT_EQ(prompt_ids(t, 256, "", ids, 8, err), 1);
    EXPECT_EQ(prompt_ids(t, 256, "cab", ids, 3, err), 3);
    EXPECT_EQ(prompt_ids(t, 256, "cab", ids, 2, err), -1);
    EXPECT(strstr(err, "3 tokens, at most 2 fit"), "%s", err);
    EXPECT_EQ(prompt_ids(t, -1, "", ids, 8, err), -1);
    EXPECT(strstr(err, "document token"), "%s", err);
    tokenizer_free(t);
}

TEST(generate_ids_become_text) {
    Tokenizer *t = small_tokenizer();
    static const int32_t ids[] = {256, 'x', 257, 256, 0xC3, 0xA9, 9999, '\n'};
    char *text = text_of(t, ids, 8);
    EXPECT(strcmp(text, "xab\xC3\xA9\n") == 0, "%s", text);
    free(text);
    text = text_of(t, ids, 0);
    EXPECT(text[0] == 0, "%s", text);
    free(text);
    tokenizer_free(t);
}
