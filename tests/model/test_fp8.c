/* The model in FP8: near BF16, equal to itself, and the rows of the table keep what backward reads. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model_test.h"

static const char *const bf16[] = {FP8_WIDTHS, "precision.compute=bf16", NULL};
static const char *const fp8[] = {FP8_WIDTHS, "precision.compute=fp8", NULL};
static const char *const fp8_latent[] = {FP8_WIDTHS, "model.q_lora_rank=128", "precision.compute=fp8", NULL};
static const char *const fp8_remade[] = {FP8_WIDTHS, "model.q_lora_rank=128", "precision.compute=fp8",
                                         "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]", NULL};

/* Every weight's gradient points where BF16's does. */
TEST(fp8_gradients_are_near_bf16) {
    Fixture a, b;
    fixture_open(&a, bf16);
    fixture_open(&b, fp8);
    fixture_fix_routing(&a);
    fixture_fix_routing(&b);
    fixture_gradients(&a);
    fixture_gradients(&b);
    const double loss_a = fixture_loss(&a), loss_b = fixture_loss(&b);
    EXPECT(fabs(loss_a - loss_b) < 2e-3 * loss_a, "losses %g and %g", loss_a, loss_b);
    EXPECT(loss_a != loss_b, "FP8 changed nothing");
    double worst = 1;
    for (int64_t i = 0; i < a.model.params.n_named; i++) {
        const NamedTensor *t = &a.model.params.named[i];
        if (t->optimizer == OPTIMIZER_NONE) continue;
        const Weight *wa = fixture_weight(&a, t), *wb = fixture_weight(&b, t);
        const double c = fixture_cosine(tensor_rows(a.model.params.grad, wa->offset, wa->numel),
                                        tensor_rows(b.model.params.grad, wb->offset, wb->numel));
        if (c < worst) worst = c;
        EXPECT(c > 0.94, "%s: cosine %g", t->name, c);
    }
    printf("worst cosine %g\n", worst);
    fixture_close(&a);
    fixture_close(&b);
}

/* Equal from run to run, and with everything made again. */
TEST(fp8_is_repeatable) {
    Fixture a, b;
    fixture_open(&a, fp8_latent);
    fixture_open(&b, fp8_remade);
    fixture_gradients(&a);
    Tensor first = t_copy(a.model.params.grad);
    fixture_gradients(&a);
    EXPECT(t_same_bits(first, a.model.params.grad), "twice");
    fixture_gradients(&b);
    EXPECT(t_same_bits(first, b.model.params.grad), "recomputed");
    fixture_close(&a);
    fixture_close(&b);
}

/* ---- the parts, one by one --------------------------------------------------------------------------------------- */

#define FP8_OR(fprop, dgrad, wgrad, swiglu_input, attention_output)                                                    \
    {                                                                                                                  \
        FP8_WIDTHS, "model.q_lora_rank=128", "precision.compute=fp8", "precision.fp8.fprop=" fprop,                    \
            "precision.fp8.dgrad=" dgrad, "precision.fp8.wgrad=" wgrad, "precision.fp8.swiglu_input=" swiglu_input,    \
            "precision.fp8.attention_output=" attention_output, NULL                                                   \
    }

static const char *const bf16_latent[] = {FP8_WIDTHS, "model.q_lora_rank=128", "precision.compute=bf16", NULL};
static const char *const no_part[] = FP8_OR("bf16", "bf16", "bf16", "bf16", "bf16");

/* Twice, the second time over memory in which E4M3 is NaN and all else huge: nothing reads what was not written. */
static void open_with_gradients(Fixture *f, const char *const *sets) {
    fixture_open(f, sets);
    fixture_fix_routing(f);
    fixture_gradients(f);
    Model *m = &f->model;
    const Tensor first = t_copy(m->params.grad);
    memset(m->slots.base, 0x7F, m->slots.size);
    memset(m->scratch.base, 0x7F, m->scratch.size);
    fixture_gradients(f);
    EXPECT(t_same_bits(first, m->params.grad), "gradients depend on what memory held");
}

/* How many named tensors have other gradients in b than in a: of block Linears, of the rest. */
static void count_changed(const Fixture *a, const Fixture *b, int *linears, int *others) {
    const Params *pa = &a->model.params, *pb = &b->model.params;
    *linears = *others = 0;
    for (int64_t i = 0; i < pa->n_named; i++) {
        const NamedTensor *ta = &pa->named[i], *tb = &pb->named[i];
        if (t_same_bits(tensor_rows(pa->grad, ta->offset, ta->numel), tensor_rows(pb->grad, tb->offset, tb->numel)))
            continue;
        *(ta->block >= 0 && weight_is_block_linear(ta->weight) ? linears : others) += 1;
    }
}

/* What changes against `base` when these parts are in FP8. */
static void expect_changes(const char *name, const char *const *base, const char *const *sets, bool loss, bool linears,
                           bool others) {
    Fixture a, b;
    int n_linears, n_others;
    open_with_gradients(&a, base);
    open_with_gradients(&b, sets);
    count_changed(&a, &b, &n_linears, &n_others);
    EXPECT((fixture_loss(&a) != fixture_loss(&b)) == loss, "%s: loss", name);
    EXPECT((n_linears > 0) == linears, "%s: gradients of %d Linears", name, n_linears);
    EXPECT((n_others > 0) == others, "%s: gradients of %d other weights", name, n_others);
    fixture_close(&a);
    fixture_close(&b);
}

TEST(fp8_without_its_parts_is_bf16) {
    expect_changes("none", bf16_latent, no_part, false, false, false);
}

/* Wgrad ends in the weights of Linears; what backward finds of the forward pass changes no loss. */
TEST(fp8_parts_change_what_they_touch) {
    static const char *const fprop[] = FP8_OR("fp8", "bf16", "bf16", "bf16", "bf16");
    static const char *const dgrad[] = FP8_OR("bf16", "fp8", "bf16", "bf16", "bf16");
    static const char *const wgrad[] = FP8_OR("bf16", "bf16", "fp8", "bf16", "bf16");
    static const char *const swiglu[] = FP8_OR("bf16", "bf16", "bf16", "fp8", "bf16");
    static const char *const attention[] = FP8_OR("bf16", "bf16", "bf16", "bf16", "e5m6");
    expect_changes("fprop", no_part, fprop, true, true, true);
    expect_changes("dgrad", no_part, dgrad, false, true, true);
    expect_changes("wgrad", no_part, wgrad, false, true, false);
    expect_changes("swiglu_input", no_part, swiglu, false, true, true);
    expect_changes("attention_output", no_part, attention, false, true, true);
}

/* The whole recipe without one part: it runs, and forward is that of its Fprop. */
TEST(fp8_parts_can_be_left_out) {
    static const char *const without[][20] = {
        FP8_OR("bf16", "fp8", "fp8", "fp8", "e5m6"), FP8_OR("fp8", "bf16", "fp8", "fp8", "e5m6"),
        FP8_OR("fp8", "fp8", "bf16", "fp8", "e5m6"), FP8_OR("fp8", "fp8", "fp8", "bf16", "e5m6"),
        FP8_OR("fp8", "fp8", "fp8", "fp8", "bf16"),
    };
    for (size_t i = 0; i < sizeof without / sizeof *without; i++) {
        char name[32];
        snprintf(name, sizeof name, "without %zu", i);
        expect_changes(name, fp8_latent, without[i], i == 0, true, i != 2);
    }
}
