/* Balancing without a loss: the bias that chooses experts, over whole steps of the model. (V3 2.1.2) The single op
 * is in tests/kernels/test_router.c and test_update.c; here is what others got wrong around it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_test.h"

static Tensor bias_of(const Model *m, int block) {
    return m->params.blocks[block].weight[WEIGHT_ROUTER_BIAS].w;
}

static const int32_t *counts_of(const Model *m, int block) {
    return (const int32_t *)m->params.blocks[block].counts.data;
}

static int64_t count_sum(const Model *m, int block) {
    int64_t sum = 0;
    for (int e = 0; e < m->shape.router.n_experts; e++) sum += counts_of(m, block)[e];
    return sum;
}

/* Every bias is the old one, further by exactly one step of gamma towards balance, by the counts of the whole step. */
static void expect_one_step(const Model *m, int block, Tensor before, double gamma) {
    const int E = m->shape.router.n_experts;
    const int64_t sum = count_sum(m, block);
    for (int e = 0; e < E; e++) {
        const int64_t missing = sum - counts_of(m, block)[e] * (int64_t)E;
        const real step = (real)gamma, want = (real)t_get(before, e) + (missing > 0 ? step : missing < 0 ? -step : 0);
        EXPECT(t_get(bias_of(m, block), e) == (double)want,
               "block %d, expert %d: bias %g after %g, count %d of mean %g", block, e, t_get(bias_of(m, block), e),
               t_get(before, e), counts_of(m, block)[e], (double)sum / E);
    }
}

/* The step of `whole`'s batch, cut into micro-batches of `split`'s size. */
static void accumulate(Fixture *split, const Fixture *whole) {
    Model *m = &split->model;
    const int64_t S = m->shape.S, B = m->shape.B, T = whole->model.shape.T;
    model_set_params(m, &split->params);
    model_zero(m);
    for (int64_t first = 0; first < T; first += B * S) {
        for (int k = 0; k <= m->shape.n_mtp; k++) {
            memcpy(split->batch.tokens + k * B * S, whole->batch.tokens + k * T + first, (size_t)(B * S) * 4);
            memcpy(split->batch.targets + k * B * S, whole->batch.targets + k * T + first, (size_t)(B * S) * 4);
        }
        model_set_batch(m, &m->shape, &split->batch);
        model_forward(m, &m->train, FORWARD_TRAIN);
        model_backward(m, &m->train);
    }
}

/* Towards experts 0 and 1 in every MoE block. */
static void skew(Model *m) {
    for (int b = m->shape.n_dense; b < m->shape.n_blocks; b++)
        for (int e = 0; e < 2; e++) t_set(bias_of(m, b), e, 0.4);
}

/* D1: eight sequences at once, or one after the other: one step of the bias from equal counts. */
TEST(router_bias_moves_once_a_step) {
    Fixture whole, split;
    fixture_open(&whole, (const char *const[]){"train.micro_batch_size=8", "train.global_batch_size=8", NULL});
    fixture_open(&split, (const char *const[]){"train.micro_batch_size=1", "train.global_batch_size=8", NULL});
    Model *a = &whole.model, *b = &split.model;
    skew(a), skew(b);
    Tensor before[8];
    for (int block = 1; block < a->shape.n_blocks; block++) before[block] = t_copy(bias_of(a, block));
    fixture_gradients(&whole);
    accumulate(&split, &whole);
    model_update(a);
    model_update(b);
    for (int block = 1; block < a->shape.n_blocks; block++) {
        EXPECT_EQ(count_sum(a, block), a->shape.T * a->shape.router.n_chosen);
        EXPECT(t_same_bits(a->params.blocks[block].counts, b->params.blocks[block].counts), "counts of block %d",
               block);
        EXPECT(t_same_bits(bias_of(a, block), bias_of(b, block)), "bias of block %d", block);
        expect_one_step(a, block, before[block], whole.params.bias_speed);
        EXPECT(t_get(bias_of(a, block), 0) < t_get(before[block], 0), "the favoured expert is not held back");
    }
    fixture_close(&whole);
    fixture_close(&split);
}

/* D2: what is computed again is not counted again. */
TEST(router_bias_is_the_same_with_recomputation) {
    static const char *const choices[] = {"memory.recompute=none", "memory.recompute=[\"norms\"]",
                                          "memory.recompute=[\"up_projections\"]", "memory.recompute=[\"swiglu\"]",
                                          "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]"};
    Tensor bias[8], counts[8];
    for (int c = 0; c < 5; c++) {
        Fixture f;
        fixture_open(&f, (const char *const[]){choices[c], NULL});
        const Model *m = &f.model;
        fixture_gradients(&f);
        model_update(&f.model);
        for (int b = 1; b < m->shape.n_blocks; b++) {
            EXPECT_EQ(count_sum(m, b), m->shape.T * m->shape.router.n_chosen);
            if (c == 0) bias[b] = t_copy(bias_of(m, b)), counts[b] = t_copy(m->params.blocks[b].counts);
            EXPECT(t_same_bits(counts[b], m->params.blocks[b].counts), "%s: counts of block %d", choices[c], b);
            EXPECT(t_same_bits(bias[b], bias_of(m, b)), "%s: bias of block %d", choices[c], b);
        }
        fixture_close(&f);
    }
}

/* D4, D5: a block without a router in front stops nobody behind it; MTP's block is a block like the others; counts
 * start anew in every step. At speed 0 nothing moves, but all is counted. */
TEST(router_bias_of_every_block_moves) {
    Fixture f;
    fixture_open(&f, model_cases[1].sets); /* one dense block, two main MoE blocks, two of MTP */
    Model *m = &f.model;
    EXPECT(m->shape.n_dense == 1 && m->shape.n_mtp == 2 && m->shape.n_blocks == 5 && !m->params.blocks[0].counts.data);
    for (int step = 0; step < 4; step++) {
        Tensor before[8];
        for (int b = 1; b < m->shape.n_blocks; b++) before[b] = t_copy(bias_of(m, b));
        f.params.bias_speed = step == 3 ? 0 : 0.01;
        fixture_batch(&f, 0, 20 + (uint64_t)step);
        fixture_gradients(&f);
        model_update(m);
        for (int b = 1; b < m->shape.n_blocks; b++) {
            EXPECT_EQ(count_sum(m, b), m->shape.T * m->shape.router.n_chosen);
            expect_one_step(m, b, before[b], f.params.bias_speed);
            EXPECT(t_same_bits(before[b], bias_of(m, b)) == (step == 3), "block %d in step %d", b, step);
        }
    }
    fixture_close(&f);
}

/* Evaluation and generation route, but are not counted. */
TEST(router_bias_counts_training_alone) {
    Fixture f;
    fixture_open(&f, NULL);
    Model *m = &f.model;
    fixture_gradients(&f);
    Tensor counts = t_copy(m->params.blocks[1].counts);
    model_forward(m, &m->eval, FORWARD_EVAL);
    model_forward(m, &m->eval, FORWARD_HIDDEN);
    EXPECT(t_same_bits(counts, m->params.blocks[1].counts), "evaluation was counted");
    fixture_close(&f);
}

/* What the last forward of a block chose: the weights are those of the unbiased scores, by hand. */
static void expect_unbiased_weights(const Fixture *f, int block) {
    const RouterShape *r = &f->model.shape.router;
    const Tensor *t = f->model.train.blocks[block].t, w = f->model.params.blocks[block].weight[WEIGHT_ROUTER].w;
    const int64_t D = f->model.shape.D;
    for (int64_t token = 0; token < f->model.shape.T; token++) {
        double sum = 0, score[8];
        for (int k = 0; k < r->n_chosen; k++) {
            const int64_t id = (int64_t)t_get(t[ACT_IDS], token * r->n_chosen + k);
            double logit = 0; /* scratch by now, so once more */
            for (int64_t i = 0; i < D; i++) logit += t_get(t[ACT_U], token * D + i) * t_get(w, id * D + i);
            score[k] = 1 / (1 + exp(-logit));
            EXPECT_NEAR(t_get(t[ACT_SCORES], token * r->n_experts + id), score[k], 1e-6);
            sum += score[k];
        }
        for (int k = 0; k < r->n_chosen; k++)
            EXPECT_NEAR(t_get(t[ACT_WEIGHTS], token * r->n_chosen + k), r->scale * score[k] / sum, 1e-6);
    }
}

/* D9: fixed scores, and a bias that brings another expert in. Block 1 has the same input both times. */
TEST(router_bias_chooses_and_does_not_weigh) {
    Fixture f;
    fixture_open(&f, (const char *const[]){"model.n_group=1", "model.topk_group=1", NULL});
    Model *m = &f.model;
    const Tensor *t = m->train.blocks[1].t;
    t_fill(bias_of(m, 1), 0);
    fixture_loss(&f);
    Tensor scores = t_copy(t[ACT_SCORES]), ids = t_copy(t[ACT_IDS]);
    expect_unbiased_weights(&f, 1);
    t_set(bias_of(m, 1), 6, 5);
    fixture_loss(&f);
    EXPECT(t_same_bits(scores, t[ACT_SCORES]), "the bias reached the scores");
    EXPECT(!t_same_bits(ids, t[ACT_IDS]), "the bias chose nobody");
    for (int64_t token = 0; token < m->shape.T; token++)
        EXPECT(t_get(t[ACT_IDS], 2 * token) == 6 || t_get(t[ACT_IDS], 2 * token + 1) == 6, "token %d", (int)token);
    expect_unbiased_weights(&f, 1);

    /* A bias that changes no choice changes nothing at all. */
    const double with = fixture_loss(&f);
    t_set(bias_of(m, 1), 6, 4);
    EXPECT(fixture_loss(&f) == with, "a bias of 4 instead of 5 changed the loss");
    fixture_close(&f);
}

/* No gradient, no moments, no decay: the optimizer leaves it alone. */
TEST(router_bias_is_not_trained) {
    Fixture f;
    fixture_open(&f, NULL);
    Model *m = &f.model;
    f.params.bias_speed = 0;
    f.params.weight_decay = 0.9;
    for (int step = 0; step < 3; step++) {
        Tensor before = t_copy(bias_of(m, 1));
        fixture_gradients(&f);
        model_update(m);
        EXPECT(t_same_bits(before, bias_of(m, 1)), "step %d moved it", step);
        for (int b = 1; b < m->shape.n_blocks; b++) {
            const Weight *w = &m->params.blocks[b].weight[WEIGHT_ROUTER_BIAS];
            EXPECT(w->optimizer == OPTIMIZER_NONE && !w->decay, "block %d", b);
            for (int64_t i = 0; i < w->numel; i++)
                EXPECT(t_get(m->params.grad, w->offset + i) == 0 && t_get(m->params.m, w->offset + i) == 0 &&
                           t_get(m->params.v, w->offset + i) == 0,
                       "block %d, expert %d", b, (int)i);
        }
    }
    fixture_close(&f);
}

/* D17, D5: what a checkpoint is given are the live values of every MoE block, MTP's included, and they come back. */
TEST(router_bias_is_in_the_state) {
    Fixture trained, resumed;
    fixture_open(&trained, NULL);
    fixture_open(&resumed, NULL);
    for (int step = 0; step < 5; step++) {
        fixture_batch(&trained, 0, 30 + (uint64_t)step);
        fixture_gradients(&trained);
        model_update(&trained.model);
    }
    int64_t n, n_resumed;
    int n_biases = 0;
    StateTensor *from = params_state(&trained.model.params, &n), *to = params_state(&resumed.model.params, &n_resumed);
    REQUIRE(n == n_resumed, "%lld tensors, %lld", (long long)n, (long long)n_resumed);
    for (int64_t i = 0; i < n; i++) {
        EXPECT(strcmp(from[i].name, to[i].name) == 0, "%s, %s", from[i].name, to[i].name);
        if (strstr(from[i].name, "e_score_correction_bias")) {
            int block = -1;
            EXPECT(sscanf(from[i].name, "model.layers.%d.mlp.gate.", &block) == 1, "%s", from[i].name);
            REQUIRE(block >= 1 && block < trained.model.shape.n_blocks, "%s", from[i].name);
            EXPECT(from[i].dtype == DTYPE_F32 && from[i].data == bias_of(&trained.model, block).data, "%s",
                   from[i].name);
            EXPECT(!t_same_bits(bias_of(&trained.model, block), bias_of(&resumed.model, block)), "block %d", block);
            n_biases++;
        }
        memcpy(to[i].data, from[i].data, (size_t)from[i].extent * dtype_size(from[i].dtype));
    }
    EXPECT_EQ(n_biases, 3);
    params_cast(&resumed.model.params, &resumed.device);
    *resumed.model.update = *trained.model.update;
    Fixture *both[] = {&trained, &resumed};
    for (int i = 0; i < 2; i++) {
        fixture_batch(both[i], 0, 40);
        fixture_gradients(both[i]);
        model_update(&both[i]->model);
    }
    for (int b = 1; b < trained.model.shape.n_blocks; b++)
        EXPECT(t_same_bits(bias_of(&trained.model, b), bias_of(&resumed.model, b)), "block %d", b);
    uint64_t hash = params_hash(&trained.model.params, &trained.device);
    EXPECT(hash == params_hash(&resumed.model.params, &resumed.device), "the step after it differs");
    t_set(bias_of(&resumed.model, 3), 0, t_get(bias_of(&resumed.model, 3), 0) + 1);
    EXPECT(hash != params_hash(&resumed.model.params, &resumed.device), "the hash does not see MTP's bias");
    free(from);
    free(to);
    fixture_close(&trained);
    fixture_close(&resumed);
}

/* D13: every token to one expert, twenty steps. */
TEST(router_all_tokens_to_one_expert) {
    Fixture f;
    fixture_open(&f, (const char *const[]){"model.num_experts_per_tok=1", "model.norm_topk_prob=false",
                                           "model.n_group=1", "model.topk_group=1", NULL});
    Model *m = &f.model;
    const int E = m->shape.router.n_experts;
    for (int b = 1; b < m->shape.n_blocks; b++) t_fill(bias_of(m, b), 0), t_set(bias_of(m, b), 5, 100);
    double first = 0, loss = 0;
    for (int step = 0; step < 20; step++) {
        fixture_gradients(&f);
        for (int b = 1; b < m->shape.n_blocks; b++) {
            EXPECT_EQ(counts_of(m, b)[5], m->shape.T);
            for (int e = 0; e < E; e++) {
                Tensor dw = tensor_plane(m->params.blocks[b].weight[WEIGHT_EXPERT_GATE_UP].dw, e);
                double largest = 0;
                for (int64_t i = 0; i < tensor_numel(dw); i++) largest = fmax(largest, fabs(t_get(dw, i)));
                EXPECT((largest > 0) == (e == 5), "step %d, block %d, expert %d: gradient %g", step, b, e, largest);
            }
        }
        model_update(m);
        EXPECT_EQ(m->stats->skip, SKIP_NONE);
        loss = m->stats->loss_sum[0];
        if (step == 0) first = loss;
    }
    EXPECT(isfinite(loss) && loss < first, "loss %g after %g", loss, first);
    fixture_close(&f);
}

/* And it does what it is for: from a skewed start, weights held still, the load evens out. */
TEST(router_bias_evens_the_load) {
    Fixture f;
    fixture_open(&f, (const char *const[]){"model.n_group=1", "model.topk_group=1", NULL});
    Model *m = &f.model;
    const int E = m->shape.router.n_experts;
    f.params.lr = 0;
    f.params.bias_speed = 0.01;
    skew(m);
    double first[8] = {0}, mean = (double)(m->shape.T * m->shape.router.n_chosen) / E;
    for (int step = 0; step < 100; step++) {
        fixture_gradients(&f);
        for (int b = 1; b < m->shape.n_blocks; b++) {
            double largest = 0;
            for (int e = 0; e < E; e++) largest = fmax(largest, counts_of(m, b)[e]);
            if (step == 0) first[b] = largest / mean - 1;
            if (step == 99)
                EXPECT(largest / mean - 1 < 0.5 * first[b], "block %d: MaxVio %g after %g", b, largest / mean - 1,
                       first[b]);
        }
        model_update(m);
    }
    fixture_close(&f);
}
