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
