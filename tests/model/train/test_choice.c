/* Multiple choice: scores against hand-made likelihoods and against plain forwards; that nothing but the question
 * matters (J8: neither the micro-batch, nor what else is in it); what the scores say. */
#include "model/train/choice.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/rng.h"
#include "tests/data/shards.h"
#include "tests/model/model_test.h"

enum { EXAMPLES_MAX = 16, IDS_MAX = 1024 };

/* A file in memory, built question by question. */
typedef struct {
    ChoiceFile f;
    ChoiceExample examples[EXAMPLES_MAX];
    int32_t ids[IDS_MAX];
} Questions;

/* Ids are drawn from 1 .. vocab - 1. lengths: those of the choices, 0 at the end. */
static void ask(Questions *q, int label, int n_context, const int *lengths, int vocab) {
    ChoiceExample *x = &q->examples[q->f.n_examples++];
    q->f.examples = q->examples;
    q->f.ids = q->ids;
    x->label = label;
    x->n_context = n_context;
    x->first_id = q->f.n_ids;
    int n = n_context;
    for (x->n_choices = 0; lengths[x->n_choices]; x->n_choices++) n += x->length[x->n_choices] = lengths[x->n_choices];
    REQUIRE(q->f.n_ids + n <= IDS_MAX && q->f.n_examples <= EXAMPLES_MAX, "too many questions");
    for (int i = 0; i < n; i++, q->f.n_ids++)
        q->ids[q->f.n_ids] = 1 + (int32_t)(rng_bits(3, RNG_TEST, 0, (uint64_t)q->f.n_ids) % (uint64_t)(vocab - 1));
}

static void mixed_questions(Questions *q, int vocab) {
    memset(q, 0, sizeof *q);
    ask(q, 0, 1, (int[]){1, 1, 0}, vocab); /* the shortest there is */
    ask(q, 1, 3, (int[]){2, 5, 1, 0}, vocab);
    ask(q, 3, 7, (int[]){4, 4, 4, 4, 0}, vocab);
    ask(q, 2, 12, (int[]){1, 2, 5, 0}, vocab); /* 12 + 5 - 1: all of 16 positions */
    ask(q, 1, 2, (int[]){9, 3, 0}, vocab);
    ask(q, 0, 5, (int[]){1, 12, 0}, vocab);
}

static double *score(const Questions *q, Model *m) {
    double *nats = (double *)calloc((size_t)q->f.n_examples * CHOICES_MAX, sizeof *nats);
    choice_score(&q->f, m, nats, NULL, "test");
    return nats;
}

static double log_sum_exp(const float *x, int64_t n) {
    double largest = x[0], sum = 0;
    for (int64_t i = 1; i < n; i++) largest = fmax(largest, x[i]);
    for (int64_t i = 0; i < n; i++) sum += exp(x[i] - largest);
    return largest + log(sum);
}

/* ---- hand-made likelihoods --------------------------------------------------------------------------------------- */

enum { BIGRAM_VOCAB = 20 };
static float bigram[BIGRAM_VOCAB][BIGRAM_VOCAB]; /* logit of [next] after [id] */

/* Blocks add nothing, embeddings are unit vectors, so the head's columns are the logits after each id. */
static void make_bigram_model(Model *m) {
    const ModelShape *s = &m->shape;
    const double stretch = 100; /* the norm's eps vanishes beside it */
    for (int b = 0; b < s->n_blocks; b++) {
        static const WeightId outputs[] = {WEIGHT_O, WEIGHT_DOWN, WEIGHT_EXPERT_DOWN};
        for (int i = 0; i < 3; i++) {
            Tensor w = m->params.blocks[b].weight[outputs[i]].w;
            if (w.data) memset(w.data, 0, tensor_bytes(w));
        }
    }
    real *embed = (real *)m->params.top.weight[WEIGHT_EMBED].w.data,
         *head = (real *)m->params.top.weight[WEIGHT_HEAD].w.data;
    for (int id = 0; id < BIGRAM_VOCAB; id++) {
        for (int64_t d = 0; d < s->D; d++) embed[id * s->D + d] = d == id ? (real)stretch : 0;
        for (int next = 0; next < BIGRAM_VOCAB; next++) {
            bigram[id][next] = (float)(4 * rng_uniform(11, RNG_TEST, (uint64_t)id, (uint64_t)next));
            head[next * s->D + id] = (real)((double)bigram[id][next] / sqrt((double)s->D));
        }
    }
}

TEST(choice_scores_of_a_bigram_model) {
    static Fixture f;
    fixture_open(&f, (const char *const[]){"model.vocab_size=20", "train.micro_batch_size=2", NULL});
    make_bigram_model(&f.model);
    static Questions q;
    mixed_questions(&q, BIGRAM_VOCAB);
    double *nats = score(&q, &f.model);
    for (int64_t e = 0; e < q.f.n_examples; e++) {
        const ChoiceExample *x = &q.examples[e];
        for (int c = 0; c < x->n_choices; c++) {
            int32_t before = choice_context(&q.f, e)[x->n_context - 1];
            double expected = 0;
            for (int i = 0; i < x->length[c]; i++) {
                const int32_t id = choice_ids(&q.f, e, c)[i];
                expected += log_sum_exp(bigram[before], BIGRAM_VOCAB) - (double)bigram[before][id];
                before = id;
            }
            EXPECT_NEAR(nats[e * CHOICES_MAX + c], expected, 1e-4 * x->length[c]);
        }
    }
    free(nats);
    fixture_close(&f);
}

/* ---- nothing else matters ---------------------------------------------------------------------------------------- */

/* The same by a forward of this one text from the start of a sequence. */
static double score_alone(Fixture *f, const ChoiceFile *file, int64_t e, int c) {
    Model *m = &f->model;
    const ModelShape *s = &m->shape;
    const ChoiceExample *x = &file->examples[e];
    int32_t window[64] = {0};
    float logits[64];
    double sum = 0;
    const int n = x->n_context + x->length[c];
    memcpy(window, choice_context(file, e), (size_t)x->n_context * 4);
    memcpy(window + x->n_context, choice_ids(file, e, c), (size_t)x->length[c] * 4);
    for (int64_t b = 0; b < s->B; b++) micro_batch_set(&f->batch, b, window, NO_DOCUMENT_MASK, s->S);
    model_set_batch(m, s, &f->batch);
    model_forward(m, &m->eval, FORWARD_HIDDEN);
    for (int t = x->n_context - 1; t + 1 < n; t++) {
        model_logits(m, &m->eval, t, logits);
        sum += log_sum_exp(logits, s->V) - (double)logits[window[t + 1]];
    }
    return sum;
}

TEST(choice_scores_do_not_depend_on_packing) {
    static const char *const shapes[][3] = {
        {"train.micro_batch_size=1", "train.global_batch_size=1", "train.seq_len=16"},
        {"train.micro_batch_size=2", "train.global_batch_size=2", "train.seq_len=16"},
        {"train.micro_batch_size=3", "train.global_batch_size=3", "train.seq_len=47"},
        {"train.micro_batch_size=1", "train.global_batch_size=1", "train.seq_len=64"}};
    static Questions q;
    mixed_questions(&q, 37);
    double *first = NULL;
    for (int i = 0; i < 4; i++) {
        static Fixture f;
        fixture_open(&f, (const char *const[]){shapes[i][0], shapes[i][1], shapes[i][2], "data.document_mask=true",
                                               "data.document_token=0", NULL});
        double *nats = score(&q, &f.model);
        double largest = 0, spread = 0;
        for (int64_t e = 0; e < q.f.n_examples; e++) {
            for (int c = 0; c < q.examples[e].n_choices; c++) {
                const double x = nats[e * CHOICES_MAX + c];
                const double expected = first ? first[e * CHOICES_MAX + c] : score_alone(&f, &q.f, e, c);
                EXPECT_NEAR(x, expected, 2e-5 * expected);
                largest = fmax(largest, x / q.examples[e].length[c]);
                spread = fmax(spread, fabs(x / q.examples[e].length[c] - log(37)));
            }
        }
        EXPECT(largest > 0 && spread > 0.3, "scores are hardly different from guessing: %g", spread);
        if (!first)
            first = nats;
        else
            free(nats);
        fixture_close(&f);
    }
    free(first);
}

TEST(choice_scores_of_one_question_alone) {
    static Fixture f;
    fixture_open(&f, NULL);
    static Questions q;
    mixed_questions(&q, 37);
    double *together = score(&q, &f.model);
    for (int64_t e = 0; e < q.f.n_examples; e++) {
        Questions one = q;
        one.f.examples = &one.examples[e];
        one.f.ids = one.ids;
        one.f.n_examples = 1;
        double *alone = score(&one, &f.model);
        for (int c = 0; c < q.examples[e].n_choices; c++)
            EXPECT_NEAR(alone[c], together[e * CHOICES_MAX + c], 2e-5 * alone[c]);
        free(alone);
    }
    free(together);
    fixture_close(&f);
}

/* A context that is too long loses its beginning, as much for each choice. */
TEST(choice_scores_of_a_long_context) {
    static Fixture f;
    fixture_open(&f, NULL); /* 16 positions */
    Questions q, cut;
    memset(&q, 0, sizeof q);
    ask(&q, 0, 40, (int[]){3, 5, 0}, 37);
    cut = q;
    cut.f.examples = cut.examples;
    cut.f.ids = cut.ids;
    cut.examples[0].first_id = 40 - 12; /* 12 + 5 - 1 = 16 */
    cut.examples[0].n_context = 12;
    double *nats = score(&q, &f.model), *expected = score(&cut, &f.model);
    for (int c = 0; c < 2; c++) EXPECT(nats[c] == expected[c] && nats[c] > 0, "%g, %g", nats[c], expected[c]);
    free(nats);
    free(expected);
    fixture_close(&f);
}

/* ---- judging ----------------------------------------------------------------------------------------------------- */

TEST(choice_is_judged_by_the_mean_over_ids) {
    Questions q;
    memset(&q, 0, sizeof q);
    ask(&q, 0, 1, (int[]){4, 1, 0}, 9);
    ask(&q, 1, 1, (int[]){1, 1, 1, 1, 0}, 9);
    ask(&q, 1, 1, (int[]){2, 2, 0}, 9);
    double nats[3 * CHOICES_MAX] = {0};
    nats[0] = 8; /* 2 an id; by sum the other would win */
    nats[1] = 3;
    memcpy(nats + CHOICES_MAX, (double[]){5, 1, 1, 2}, 4 * sizeof *nats); /* a tie: the first of the two */
    memcpy(nats + 2 * CHOICES_MAX, (double[]){1, 2}, 2 * sizeof *nats);   /* wrong */
    ChoiceResult r;
    choice_judge(&q.f, nats, &r);
    EXPECT_EQ(r.n_examples, 3);
    EXPECT_NEAR(r.accuracy, 2.0 / 3, 1e-12);
    EXPECT_NEAR(r.accuracy_by_sum, 1.0 / 3, 1e-12);
    EXPECT_NEAR(r.label_nats, (2.0 + 1 + 1) / 3, 1e-12);
    EXPECT_NEAR(r.chance, (0.5 + 0.25 + 0.5) / 3, 1e-12);
}

/* ---- from a configuration ---------------------------------------------------------------------------------------- */

/* One question: context of n ids, choices of 2 and `longest` ids. */
static const char *write_question(char path[TEST_PATH_LEN], const char *name, int n_context, int longest) {
    uint16_t file[512 + 256] = {0};
    const int32_t header[3] = {20240522, 1, 1};
    memcpy(file, header, sizeof header);
    int n = 512;
    file[n++] = UINT16_MAX;
    file[n++] = (uint16_t)(2 * (6 + n_context + 3 + 1 + longest));
    n++; /* index 0 */
    file[n++] = 1;
    file[n++] = 2;
    file[n++] = (uint16_t)n_context;
    for (int i = 0; i < n_context; i++) file[n++] = (uint16_t)(1 + i % 30);
    file[n++] = 2;
    n += 2;
    file[n++] = (uint16_t)longest;
    n += longest;
    test_write_bytes(name, file, (size_t)n * 2);
    return test_path(path, name);
}

TEST(choice_sets_of_a_configuration) {
    static Fixture f;
    char err[ERR_LEN] = "", hint[ERR_LEN] = "", paths[2][TEST_PATH_LEN], set[3 * TEST_PATH_LEN];
    snprintf(set, sizeof set, "eval.choice=[{\"name\":\"short\",\"path\":\"%s\"},{\"name\":\"long\",\"path\":\"%s\"}]",
             write_question(paths[0], "short.bin", 4, 3), write_question(paths[1], "long.bin", 20, 16));
    fixture_open(&f, (const char *const[]){set, NULL});
    static ChoiceSets sets;
    REQUIRE(choice_open(&sets, &f.config, err, hint) == 0, "%s (%s)", err, hint);
    EXPECT(sets.n == 2 && sets.n_cut[0] == 0 && sets.n_cut[1] == 1, "%d sets, %lld cut", sets.n,
           (long long)sets.n_cut[1]);
    static ValReport report;
    choice_run(&sets, &f.model, &report, NULL);
    EXPECT_EQ(report.n_choices, 2);
    EXPECT(strcmp(report.choices[1].name, "long") == 0 && report.choices[1].n_examples == 1 && report.seconds > 0,
           "report");
    EXPECT(report.choices[0].accuracy == 0 || report.choices[0].accuracy == 1, "%g", report.choices[0].accuracy);
    EXPECT(report.choices[0].chance == 0.5 && report.choices[0].label_nats > 0, "%g", report.choices[0].label_nats);
    choice_close(&sets);

    write_question(paths[1], "long.bin", 20, 17);
    EXPECT(choice_open(&sets, &f.config, err, hint) == -1, "a choice longer than a sequence was taken");
    EXPECT(strstr(err, "long.bin: example 0: a choice of 17 ids does not fit train.seq_len = 16") &&
               strstr(hint, "train.seq_len"),
           "%s (%s)", err, hint);
    EXPECT_EQ(sets.n, 0);
    fixture_close(&f);
}
