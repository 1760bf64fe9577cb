/* Generation against the training forward: logits at every position, whatever the prompt's length, the cache's state
 * before and the memory around it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model_test.h"

#ifdef REAL_IS_DOUBLE
static const double tolerance = 2e-7; /* logits come out as float */
#else
static const double tolerance = 1e-5;
#endif

enum { POSITIONS = 16, V_MAX = 64 };

typedef struct {
    float at[POSITIONS][V_MAX];
} Logits;

/* Logits of sequence 1 of the fixture's batch by a whole forward, each position. */
static void full(Fixture *f, Logits *l) {
    Model *m = &f->model;
    model_set_batch(m, &m->eval.shape, &f->batch);
    model_forward(m, &m->eval, FORWARD_HIDDEN);
    for (int64_t t = 0; t < POSITIONS; t++) model_logits(m, &m->eval, m->shape.S + t, l->at[t]);
}

/* The same from position n_prompt - 1 on: the prompt, then token by token. */
static void stepwise(Fixture *f, int64_t n_prompt, Logits *l) {
    const int32_t *ids = f->batch.tokens + f->model.shape.S;
    model_prefill(&f->model, ids, n_prompt, l->at[n_prompt - 1]);
    for (int64_t t = n_prompt; t < POSITIONS; t++) {
        EXPECT_EQ(f->model.n_cached, t);
        model_decode(&f->model, ids[t], l->at[t]);
    }
}

/* Largest difference from position n_prompt - 1 on, as a share of the largest logit. */
static double difference(const Fixture *f, const Logits *a, const Logits *b, int64_t n_prompt) {
    double largest = 0, off = 0;
    for (int64_t t = n_prompt - 1; t < POSITIONS; t++)
        for (int64_t i = 0; i < f->model.shape.V; i++) {
            largest = fmax(largest, fabs((double)b->at[t][i]));
            const double d = fabs((double)a->at[t][i] - (double)b->at[t][i]);
            off = d > off || isnan(d) ? d : off;
        }
    return off / largest;
}

static void open_case(Fixture *f, const char *const *sets, const char *more) {
    const char *all[10] = {NULL};
    int n = 0;
    while (sets[n]) all[n] = sets[n], n++;
    all[n] = more;
    fixture_open(f, all);
    REQUIRE(f->model.generate_len >= POSITIONS && f->model.shape.V <= V_MAX, "%lld positions",
            (long long)f->model.generate_len);
}

TEST(decode_equals_the_full_forward) {
    static const int64_t prompts[] = {1, 2, 7, 15, 16};
    for (int c = 0; c < n_model_cases; c++) {
        Fixture f;
        Logits want, got;
        open_case(&f, model_cases[c].sets, NULL);
        full(&f, &want);
        for (int i = 0; i < 5; i++) {
            memset(&got, 0xFF, sizeof got); /* NaN */
            stepwise(&f, prompts[i], &got);
            const double off = difference(&f, &got, &want, prompts[i]);
            EXPECT(off <= tolerance, "%s, prompt of %d: off by %g", model_cases[c].name, (int)prompts[i], off);
        }
        fixture_close(&f);
    }
}

/* In BF16 the two forms round at other places. */
TEST(decode_equals_the_full_forward_in_bf16) {
    for (int c = 0; c < 2; c++) {
        Fixture f;
        Logits want, got;
        open_case(&f, model_cases[c].sets, "precision.compute=bf16");
        full(&f, &want);
        stepwise(&f, 3, &got);
        const double off = difference(&f, &got, &want, 3);
        EXPECT(off > 0 && off <= 0.06, "%s: off by %g", model_cases[c].name, off);
        fixture_close(&f);
    }
}

/* Of FP8's widths; routing that no rounding changes. latent and part may be NULL. */
static void open_wide(Fixture *f, const char *compute, const char *latent, const char *part) {
    const char *sets[16] = {FP8_WIDTHS, compute};
    int n = 0;
    while (sets[n]) n++;
    if (latent) sets[n++] = latent;
    if (part) sets[n++] = part;
    fixture_open(f, sets);
    fixture_fix_routing(f);
}

/* In FP8 such a rounding moves some E4M3 numbers by a whole step: logits are off by less than FP8 differs from BF16. A
 * prompt alone has the bits of a longer text's beginning. */
TEST(decode_equals_the_full_forward_in_fp8) {
    static const char *const latents[] = {NULL, "model.q_lora_rank=128"};
    static const char *const parts[] = {NULL, "precision.fp8.dgrad=bf16", "precision.fp8.wgrad=bf16"};
    for (int l = 0; l < 2; l++) {
        Fixture f;
        Logits bf16, want, got;
        open_wide(&f, "precision.compute=bf16", latents[l], NULL);
        full(&f, &bf16);
        fixture_close(&f);
        for (int p = 0; p < 3; p++) {
            open_wide(&f, "precision.compute=fp8", latents[l], parts[p]);
            full(&f, &want);
            stepwise(&f, POSITIONS, &got);
            EXPECT(difference(&f, &got, &want, POSITIONS) == 0, "case %d, %d: a prompt has other bits", l, p);
            stepwise(&f, 3, &got);
            const double off = difference(&f, &got, &want, 3), of_format = difference(&f, &bf16, &want, 3);
            EXPECT(off > 0 && off < 0.75 * of_format, "case %d, %d: off by %g; the format by %g", l, p, off, of_format);
            fixture_close(&f);
        }
    }
}

/* A text leaves nothing that the next one could meet, and training over the same memory ends it only. */
TEST(decode_depends_on_its_text_alone) {
    Fixture f;
    Logits first, again;
    open_case(&f, model_cases[1].sets, NULL);
    stepwise(&f, 4, &first);
    int32_t others[POSITIONS];
    for (int i = 0; i < POSITIONS; i++) others[i] = 36 - i;
    model_prefill(&f.model, others, POSITIONS, again.at[0]);
    stepwise(&f, 4, &again);
    EXPECT(difference(&f, &again, &first, 4) == 0, "after a longer text: other logits");
    for (size_t i = 0; i + 4 <= f.model.slots.size; i += 4) memcpy(f.model.slots.base + i, &(uint32_t){0x7FFF7FFF}, 4);
    for (size_t i = 0; i + 4 <= f.model.scratch.size; i += 4)
        memcpy(f.model.scratch.base + i, &(uint32_t){0x7FFF7FFF}, 4);
    stepwise(&f, 4, &again);
    EXPECT(difference(&f, &again, &first, 4) == 0, "over poisoned memory: other logits");
    fixture_close(&f);
}

/* The expert shown is the one of the largest weight in the routing of the same position. */
TEST(decode_shows_the_first_expert) {
    Fixture f;
    Logits l;
    fixture_open(&f, NULL);
    Model *m = &f.model;
    EXPECT_EQ(m->shown_block, 2);
    const int64_t K = m->shape.router.n_chosen;
    for (int block = 1; block < 3; block++) {
        model_set_batch(m, &m->shape, &f.batch);
        model_forward(m, &m->train, FORWARD_TRAIN); /* keeps every layer's routing */
        int want[POSITIONS];
        for (int64_t t = 0; t < POSITIONS; t++) {
            const Tensor ids = m->train.blocks[block].t[ACT_IDS], weights = m->train.blocks[block].t[ACT_WEIGHTS];
            int64_t best = (POSITIONS + t) * K;
            for (int64_t k = best + 1; k < (POSITIONS + t + 1) * K; k++)
                if (t_get(weights, k) > t_get(weights, best)) best = k;
            want[t] = (int)t_get(ids, best);
        }
        m->shown_block = block;
        stepwise(&f, 5, &l);
        for (int64_t t = 0; t < POSITIONS; t++)
            EXPECT(model_top_expert(m, t) == want[t], "block %d, position %d: %d, not %d", block, (int)t,
                   model_top_expert(m, t), want[t]);
    }
    fixture_close(&f);
    fixture_open(&f, (const char *const[]){"model.first_k_dense_replace=3", NULL});
    EXPECT_EQ(f.model.shown_block, -1);
    stepwise(&f, 5, &l);
    EXPECT_EQ(model_top_expert(&f.model, 0), -1);
    fixture_close(&f);
}
