/* The whole model: gradients against finite differences in double, and what must not change a result. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model_test.h"

/* ---- gradients --------------------------------------------------------------------------------------------------- */

static double loss_of(void *context) {
    return fixture_loss((Fixture *)context);
}

static uint64_t routing_of(void *context) {
    return fixture_routing((Fixture *)context);
}

static Tensor view(Tensor flat, const NamedTensor *t) {
    return tensor_1d((char *)flat.data + (size_t)t->offset * dtype_size(flat.dtype), flat.dtype, t->numel);
}

static int64_t check_block(Fixture *f, const char *case_name, Block *b, int block, Tensor grad) {
    int64_t skipped = 0;
    for (int id = 0; id < WEIGHT_COUNT; id++) {
        const Weight *w = &b->weight[id];
        if (w->numel == 0 || w->optimizer == OPTIMIZER_NONE) continue;
        char name[128];
        snprintf(name, sizeof name, "%.60s: block %d weight %d", case_name, block, id);
        fd_check(name, tensor_rows(f->model.params.master, w->offset, w->numel), tensor_rows(grad, w->offset, w->numel),
                 loss_of, routing_of, f, 40, &skipped);
    }
    return skipped;
}

/* Every weight of every block: 40 elements each, spread over all experts and parts. */
static void check_gradients(const ModelCase *c) {
    Fixture f;
    fixture_open(&f, c->sets);
    if (c->document_length) fixture_batch(&f, c->document_length, 3);
    fixture_gradients(&f);
    Tensor grad = t_copy(f.model.params.grad);
    int64_t skipped = check_block(&f, c->name, &f.model.params.top, -1, grad);
    for (int b = 0; b < f.model.shape.n_blocks; b++)
        skipped += check_block(&f, c->name, &f.model.params.blocks[b], b, grad);
    printf("%s: %lld steps skipped because they changed the routing\n", c->name, (long long)skipped);
    fixture_close(&f);
}

TEST(model_gradients_direct_q) {
    check_gradients(&model_cases[0]);
}
TEST(model_gradients_q_latent_yarn_mtp2_documents) {
    check_gradients(&model_cases[1]);
}
TEST(model_gradients_softmax_gate) {
    check_gradients(&model_cases[2]);
}
TEST(model_gradients_all_dense) {
    check_gradients(&model_cases[3]);
}
TEST(model_gradients_recomputed) {
    check_gradients(&model_cases[4]);
}

/* For tests/test_float_against_double.sh: the gradients of every case, as doubles, into the file that the environment
 * names. Without it, that they are finite and not zero. */
TEST(model_gradients_dump) {
    const char *path = getenv("TRAIN_MOE_TEST_DUMP");
    FILE *out = path ? fopen(path, "wb") : NULL;
    REQUIRE(!path || out, "%s", path);
    for (int c = 0; c < n_model_cases; c++) {
        Fixture f;
        fixture_open(&f, model_cases[c].sets);
        if (model_cases[c].document_length) fixture_batch(&f, model_cases[c].document_length, 3);
        fixture_gradients(&f);
        for (int64_t i = 0; i < f.model.params.n_named; i++) {
            const NamedTensor *t = &f.model.params.named[i];
            double largest = 0;
            if (out) fprintf(out, "%d %s %lld\n", c, t->name, (long long)t->numel);
            for (int64_t k = 0; k < t->numel; k++) {
                double g = t_get(view(f.model.params.grad, t), k);
                if (fabs(g) > largest || !isfinite(g)) largest = fabs(g);
                if (out) fprintf(out, "%.17g\n", g);
            }
            if (t->optimizer == OPTIMIZER_ADAMW && t->expert < 0)
                EXPECT(isfinite(largest) && largest > 0, "%s: largest gradient %g", t->name, largest);
        }
        fixture_close(&f);
    }
    if (out) fclose(out);
}

/* ---- what must not change a result ------------------------------------------------------------------------------- */

static Tensor gradients_of(const char *const *sets, int64_t document_length) {
    Fixture f;
    fixture_open(&f, sets);
    if (document_length) fixture_batch(&f, document_length, 3);
    fixture_gradients(&f);
    Tensor grad = t_copy(f.model.params.grad);
    fixture_close(&f);
    return grad;
}

TEST(model_recompute_gives_equal_bits) {
    static const char *const choices[] = {"memory.recompute=[\"norms\"]", "memory.recompute=[\"up_projections\"]",
                                          "memory.recompute=[\"swiglu\"]",
                                          "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]"};
    for (int latent = 0; latent < 2; latent++) {
        const char *q = latent ? "model.q_lora_rank=10" : "model.q_lora_rank=null";
        Tensor kept = gradients_of((const char *const[]){q, "memory.recompute=none", NULL}, 0);
        for (int i = 0; i < 4; i++) {
            Tensor remade = gradients_of((const char *const[]){q, choices[i], NULL}, 0);
            EXPECT(t_same_bits(kept, remade), "%s, %s", q, choices[i]);
        }
    }
}

TEST(model_recompute_does_not_count_twice) {
    static const char *const all[] = {"memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]", NULL};
    for (int recompute = 0; recompute < 2; recompute++) {
        Fixture f;
        fixture_open(&f, recompute ? all : NULL);
        fixture_gradients(&f);
        for (int b = 1; b < f.model.shape.n_blocks; b++) {
            const int32_t *counts = (const int32_t *)f.model.params.blocks[b].counts.data;
            int64_t sum = 0;
            for (int e = 0; e < f.model.shape.router.n_experts; e++) sum += counts[e];
            EXPECT_EQ(sum, f.model.shape.T * f.model.shape.router.n_chosen);
        }
        fixture_close(&f);
    }
}

TEST(model_repeats_bit_for_bit) {
    Tensor first = gradients_of(model_cases[1].sets, 5), second = gradients_of(model_cases[1].sets, 5);
    EXPECT(t_same_bits(first, second));
}

/* Gradients and losses do not depend on how many logits exist at a time. */
TEST(model_head_chunks_agree) {
    Tensor whole = gradients_of((const char *const[]){"memory.head_chunk_tokens=32", NULL}, 0);
    Tensor parts = gradients_of((const char *const[]){"memory.head_chunk_tokens=5", NULL}, 0);
    EXPECT(t_error(parts, t_doubles(whole)) < OP_TOLERANCE, "%g", t_error(parts, t_doubles(whole)));
}

/* A micro-batch of two sequences against two of one: sums, counts and the bias after the update (case D1). */
TEST(model_micro_batches_split_the_step) {
    Fixture whole, split;
    fixture_open(&whole, NULL);
    fixture_open(&split, (const char *const[]){"train.micro_batch_size=1", NULL});
    fixture_gradients(&whole);
    model_update(&whole.model);

    Model *m = &split.model;
    const int64_t S = m->shape.S;
    model_set_params(m, &split.params);
    model_zero(m);
    m->step_params->inv_tokens = whole.params.inv_tokens;
    for (int b = 0; b < 2; b++) {
        for (int k = 0; k <= m->shape.n_mtp; k++) {
            memcpy(split.batch.tokens + k * S, whole.batch.tokens + k * 2 * S + b * S, (size_t)S * 4);
            memcpy(split.batch.targets + k * S, whole.batch.targets + k * 2 * S + b * S, (size_t)S * 4);
        }
        model_set_batch(m, &m->shape, &split.batch);
        model_forward(m, &m->train, FORWARD_TRAIN);
        model_backward(m, &m->train);
    }
    model_update(m);
    double error = t_error(m->params.grad, t_doubles(whole.model.params.grad));
    EXPECT(error < OP_TOLERANCE, "gradients differ by %g", error);
    EXPECT_NEAR(m->stats->loss_sum[0], whole.model.stats->loss_sum[0], 1e-4);
    EXPECT_NEAR(m->stats->balance_sum, whole.model.stats->balance_sum, 1e-4);
    for (int b = 1; b < m->shape.n_blocks; b++) {
        EXPECT(t_same_bits(m->params.blocks[b].counts, whole.model.params.blocks[b].counts), "counts of block %d", b);
        EXPECT(t_same_bits(m->params.blocks[b].weight[WEIGHT_ROUTER_BIAS].w,
                           whole.model.params.blocks[b].weight[WEIGHT_ROUTER_BIAS].w),
               "bias of block %d", b);
    }
    fixture_close(&whole);
    fixture_close(&split);
}

static void place_and_compare(const char *name, const char *const *sets, int64_t document_length) {
    Fixture in_order, placed;
    fixture_open(&in_order, sets);
    fixture_open(&placed, sets);
    if (shape_n_moe(&placed.model.shape) > 0) fixture_place_experts(&placed);
    Fixture *const both[] = {&in_order, &placed};
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 2; i++) {
            fixture_batch(both[i], document_length, 1 + (uint64_t)step);
            fixture_gradients(both[i]);
            model_update(&both[i]->model);
        }
        const StepStats *a = in_order.model.stats, *b = placed.model.stats;
        EXPECT(memcmp(a->loss_sum, b->loss_sum, sizeof a->loss_sum) == 0, "%s: loss %.17g, not %.17g", name,
               b->loss_sum[0], a->loss_sum[0]);
        EXPECT(a->grad_norm == b->grad_norm, "%s: norm %.17g, not %.17g", name, b->grad_norm, a->grad_norm);
        EXPECT(t_same_bits(in_order.model.record.counts, placed.model.record.counts), "%s: counts", name);
        EXPECT(params_hash(&in_order.model.params, &in_order.device) ==
                   params_hash(&placed.model.params, &placed.device),
               "%s: other weights after step %d", name, step + 1);
    }
    fixture_close(&in_order);
    fixture_close(&placed);
    t_free_all();
}

/* Slots are a matter of memory: on one rank no number depends on which expert lies where. */
TEST(model_experts_may_lie_anywhere) {
    static const char *const fp8[] = {FP8_WIDTHS, "precision.compute=fp8", NULL};
    static const char *const bf16[] = {"precision.compute=bf16", NULL};
    for (int i = 0; i < n_model_cases; i++)
        place_and_compare(model_cases[i].name, model_cases[i].sets, model_cases[i].document_length);
    place_and_compare("bf16", bf16, 0);
    place_and_compare("fp8", fp8, 0);
}

/* MTP of weight zero trains the main model to the same bits as no MTP (case F7). */
TEST(model_mtp_of_weight_zero_changes_nothing) {
    Fixture with, without;
    fixture_open(&with, NULL);
    fixture_open(&without, (const char *const[]){"model.num_nextn_predict_layers=0", NULL});
    with.params.loss_scale[1] = 0;
    with.params.grad_clip = without.params.grad_clip = 0;
    with.params.balance_scale = without.params.balance_scale = 0;
    for (int step = 0; step < 3; step++) {
        fixture_batch(&with, 0, 10 + (uint64_t)step);
        memcpy(without.batch.tokens, with.batch.tokens, (size_t)with.model.shape.T * 4);
        memcpy(without.batch.targets, with.batch.targets, (size_t)with.model.shape.T * 4);
        fixture_gradients(&with);
        fixture_gradients(&without);
        model_update(&with.model);
        model_update(&without.model);
    }
    int64_t compared = 0;
    for (int64_t i = 0; i < without.model.params.n_named; i++) {
        const NamedTensor *a = &without.model.params.named[i];
        for (int64_t k = 0; k < with.model.params.n_named; k++) {
            const NamedTensor *b = &with.model.params.named[k];
            if (strcmp(a->name, b->name) != 0) continue;
            EXPECT(t_same_bits(view(without.model.params.master, a), view(with.model.params.master, b)), "%s", a->name);
            compared++;
        }
    }
    EXPECT_EQ(compared, without.model.params.n_named);
    fixture_close(&with);
    fixture_close(&without);
}

/* Later tokens do not reach earlier losses; other documents do not reach at all under the mask. */
TEST(model_is_causal_and_masks_documents) {
    Fixture f;
    fixture_open(&f, model_cases[1].sets);
    fixture_batch(&f, 5, 3);
    fixture_loss(&f);
    const int64_t T = f.model.shape.T, changed = 7; /* in the second document of sequence 0: its start is at 5 */
    REQUIRE(f.batch.doc_start[changed] == 5, "document at %d", f.batch.doc_start[changed]);
    Tensor before = t_copy(f.model.train.depth[0].hidden);
    f.batch.tokens[changed] = f.batch.tokens[changed] % 36 + 1;
    fixture_loss(&f);
    Tensor after = f.model.train.depth[0].hidden;
    for (int64_t t = 0; t < T; t++) {
        const bool may_see = t >= changed && f.batch.doc_start[t] <= changed && t < f.model.shape.S;
        const bool same = t_same_bits(tensor_rows(before, t, 1), tensor_rows(after, t, 1));
        EXPECT(same == !may_see, "token %lld %s", (long long)t, same ? "did not change" : "changed");
    }
    fixture_close(&f);
}

/* A padding sequence is routed nowhere, counted nowhere, and leaves losses and gradients of the others alone (D8). */
TEST(model_padding_changes_nothing) {
    Fixture padded, alone;
    fixture_open(&padded, NULL);
    fixture_open(&alone, (const char *const[]){"train.micro_batch_size=1", NULL});
    const int64_t S = alone.model.shape.S;
    for (int k = 0; k <= alone.model.shape.n_mtp; k++) {
        memcpy(alone.batch.tokens + k * S, padded.batch.tokens + k * 2 * S, (size_t)S * 4);
        memcpy(alone.batch.targets + k * S, padded.batch.targets + k * 2 * S, (size_t)S * 4);
    }
    micro_batch_pad(&padded.batch, 1);
    fixture_gradients(&padded);
    fixture_gradients(&alone);
    double error = t_error(padded.model.params.grad, t_doubles(alone.model.params.grad));
    EXPECT(error < OP_TOLERANCE, "gradients differ by %g", error);
    EXPECT_NEAR(padded.model.stats->loss_sum[0], alone.model.stats->loss_sum[0], 1e-4);
    EXPECT_NEAR(padded.model.stats->balance_sum, alone.model.stats->balance_sum, 1e-5);
    for (int b = 1; b < alone.model.shape.n_blocks; b++)
        EXPECT(t_same_bits(padded.model.params.blocks[b].counts, alone.model.params.blocks[b].counts));
    fixture_close(&padded);
    fixture_close(&alone);
}

TEST(model_bf16_is_near_fp32) {
    Fixture exact, rounded;
    fixture_open(&exact, NULL);
    fixture_open(&rounded, (const char *const[]){"precision.compute=bf16", NULL});
    fixture_gradients(&exact);
    fixture_gradients(&rounded);
    const double n = (double)exact.model.shape.T;
    EXPECT_NEAR(rounded.model.stats->loss_sum[0] / n, exact.model.stats->loss_sum[0] / n, 0.05);
    /* Routing of single tokens may flip, so gradients are compared as a whole: their angle. */
    double dot = 0, aa = 0, bb = 0;
    for (int64_t i = 0; i < exact.model.params.numel; i++) {
        double a = t_get(exact.model.params.grad, i), b = t_get(rounded.model.params.grad, i);
        dot += a * b, aa += a * a, bb += b * b;
    }
    EXPECT(dot / sqrt(aa * bb) > 0.99, "cosine %g", dot / sqrt(aa * bb));
    fixture_close(&exact);
    fixture_close(&rounded);
}

/* ---- training ---------------------------------------------------------------------------------------------------- */

static double overfit(const char *const *sets, int steps) {
    Fixture f;
    fixture_open(&f, sets);
    params_init(&f.model.params, &f.device, 7, 0.05);
    model_cast(&f.model);
    f.params.weight_decay = 0;
    double loss = 0;
    for (int step = 0; step < steps; step++) {
        f.params.step = step + 1;
        f.params.lr = 1e-2;
        fixture_gradients(&f);
        model_update(&f.model);
        loss = f.model.stats->loss_sum[0] / (double)f.model.shape.T;
    }
    fixture_close(&f);
    return loss;
}

TEST(model_overfits_one_batch) {
    double fp32 = overfit(NULL, 120), bf16 = overfit((const char *const[]){"precision.compute=bf16", NULL}, 120);
    EXPECT(fp32 < 0.05, "fp32 ends at %g", fp32);
    EXPECT(bf16 < 0.05, "bf16 ends at %g", bf16);
}

/* A step that is not finite leaves weights, moments, t and biases alone, and is counted (cases E8, E9). */
TEST(model_skips_what_is_not_finite) {
    Fixture f;
    fixture_open(&f, NULL);
    fixture_gradients(&f);
    model_update(&f.model);
    Tensor master = t_copy(f.model.params.master), m = t_copy(f.model.params.m);
    Tensor bias = t_copy(f.model.params.blocks[1].weight[WEIGHT_ROUTER_BIAS].w);
    fixture_gradients(&f);
    ((real *)f.model.params.grad.data)[5] = (real)NAN;
    model_update(&f.model);
    EXPECT_EQ(f.model.stats->skip, SKIP_NORM_NOT_FINITE);
    EXPECT(t_same_bits(master, f.model.params.master) && t_same_bits(m, f.model.params.m));
    EXPECT(t_same_bits(bias, f.model.params.blocks[1].weight[WEIGHT_ROUTER_BIAS].w));
    EXPECT_EQ(f.model.update->adam_t, 1);
    EXPECT_EQ(f.model.update->skipped_total, 1);
    fixture_gradients(&f);
    model_update(&f.model);
    EXPECT_EQ(f.model.update->adam_t, 2);
    EXPECT_EQ(f.model.update->skipped_in_a_row, 0);
    fixture_close(&f);
}

/* A step without any target: zero loss, zero gradient, no update (case E7). */
TEST(model_step_without_targets) {
    Fixture f;
    fixture_open(&f, NULL);
    for (int64_t i = 0; i < f.model.shape.T * 2; i++) f.batch.targets[i] = -1;
    f.params.inv_tokens = 0;
    f.params.balance_scale = 0;
    Tensor master = t_copy(f.model.params.master);
    fixture_gradients(&f);
    EXPECT(t_error(f.model.params.grad, t_doubles(t_zeros(DTYPE_F32, 1, f.model.params.numel, 1, 1))) == 0);
    model_update(&f.model);
    EXPECT_EQ(f.model.stats->skip, SKIP_NO_TARGETS);
    EXPECT_NEAR(f.model.stats->loss_sum[0], 0, 0);
    EXPECT(t_same_bits(master, f.model.params.master));
    fixture_close(&f);
}
