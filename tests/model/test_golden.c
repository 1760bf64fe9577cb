/* The whole model against other implementations: logits, losses, the gradient of every parameter, ten AdamW steps.
 *
 * Cases "transformers" are Hugging Face's DeepseekV3ForCausalLM in f32; the others come from the f64 model in
 * scripts/make_golden.py, which agrees with transformers and has the MTP loss, the balance loss and the document mask.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "golden.h"

/* What may differ. Gradients are relative to the largest of their tensor, norms to themselves. The files hold logits
 * and gradients in f32. */
typedef struct {
    double logits, gradients, losses, grad_norm;
} Bounds;

static Bounds bounds_of(const Golden *g) {
#ifdef REAL_IS_DOUBLE
    return g->is_f64 ? (Bounds){1e-6, 2e-7, 1e-11, 1e-11} : (Bounds){1e-5, 1e-5, 5e-6, 1e-5};
#else
    (void)g;
    return (Bounds){1e-4, 1e-4, 1e-5, 1e-4};
#endif
}

/* ---- one step ---------------------------------------------------------------------------------------------------- */

static double check_logits(Golden *g) {
    Model *m = &g->f.model;
    const ModelShape *s = &m->shape;
    double *want = golden_tensor(g, "logits", s->T, s->V), worst = 0;
    float *row = (float *)malloc((size_t)s->V * sizeof *row);
    REQUIRE(row, "no memory for %lld logits", (long long)s->V);
    for (int64_t t = 0; t < s->T; t++) {
        model_logits(m, &m->train, t, row);
        for (int64_t i = 0; i < s->V; i++) {
            const double error = fabs((double)row[i] - want[t * s->V + i]);
            if (!(error <= worst)) worst = error;
        }
    }
    EXPECT(worst < bounds_of(g).logits, "%s: logits differ by %.3g", g->name, worst);
    free(row);
    free(want);
    return worst;
}

/* Sums of the model against the means of the golden file. */
static double check_losses(Golden *g, int step) {
    const Model *m = &g->f.model;
    const double bound = bounds_of(g).losses;
    double worst = 0;
    for (int k = 0; k <= m->shape.n_mtp; k++) {
        const double loss = m->stats->loss_sum[k] / (double)g->f.batch.n_targets[k];
        const double want = golden_number(g, "losses", step, k);
        const double error = fabs(loss - want);
        EXPECT(error < bound, "%s: step %d, loss of depth %d is %.9g, golden %.9g (off by %.3g)", g->name, step, k,
               loss, want, loss - want);
        if (!(error <= worst)) worst = error;
    }
    const double balance = m->stats->balance_sum / (double)m->shape.B, want = golden_number(g, "balance", step, -1);
    EXPECT(fabs(balance - want) < bound, "%s: step %d, balance is %.9g, golden %.9g (off by %.3g)", g->name, step,
           balance, want, balance - want);
    return worst;
}

/* The largest difference relative to the largest golden gradient. A tensor without a gradient (an expert nobody chose)
 * must have exactly none. */
static double gradient_error(const Golden *g, const NamedTensor *t) {
    char name[TENSOR_NAME_LEN + 8];
    snprintf(name, sizeof name, "grad.%s", t->name);
    double *want = golden_tensor(g, name, t->shape[0], t->ndim == 2 ? t->shape[1] : 0), largest = 0, worst = 0;
    Tensor got = tensor_rows(g->f.model.params.grad, t->offset, t->numel);
    for (int64_t k = 0; k < t->numel; k++) {
        const double error = fabs(t_get(got, k) * g->f.params.inv_tokens - want[k]);
        if (!(error <= worst)) worst = error;
        if (fabs(want[k]) > largest) largest = fabs(want[k]);
    }
    free(want);
    if (largest > 0) return worst / largest;
    return worst == 0 ? 0 : INFINITY;
}

static double check_gradients(Golden *g) {
    const Params *p = &g->f.model.params;
    double worst = 0;
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        if (t->optimizer == OPTIMIZER_NONE) continue;
        const double error = gradient_error(g, t);
        EXPECT(error < bounds_of(g).gradients, "%s: gradient of %s differs by %.3g of its largest", g->name, t->name,
               error);
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

static void check_first_step(const char *name) {
    Golden g;
    golden_open(&g, name);
    golden_batch(&g, 0);
    Model *m = &g.f.model;
    model_set_params(m, &g.f.params);
    model_zero(m);
    model_set_batch(m, &m->shape, &g.f.batch);
    model_forward(m, &m->train, FORWARD_TRAIN);
    const double logits = check_logits(&g), losses = check_losses(&g, 0);
    model_backward(m, &m->train);
    const double gradients = check_gradients(&g);
    printf("%s: logits %.2g, losses %.2g, gradients %.2g\n", name, logits, losses, gradients);
    golden_close(&g);
}

/* ---- ten steps --------------------------------------------------------------------------------------------------- */

static void check_training(const char *name) {
    Golden g;
    golden_open(&g, name);
    double worst = 0;
    const int steps = golden_steps(&g);
    EXPECT_EQ(steps, 10);
    for (int step = 0; step < steps; step++) {
        golden_batch(&g, step);
        fixture_gradients(&g.f);
        const double error = check_losses(&g, step);
        if (error > worst) worst = error;
        model_update(&g.f.model);
        const double norm = g.f.model.stats->grad_norm, want = golden_number(&g, "grad_norm", step, -1);
        EXPECT(fabs(norm - want) < bounds_of(&g).grad_norm * want, "%s: step %d, gradient norm is %.9g, golden %.9g",
               name, step, norm, want);
    }
    EXPECT(golden_number(&g, "losses", steps - 1, 0) < 0.8 * golden_number(&g, "losses", 0, 0),
           "%s: a golden run that learns nothing proves little", name);
    printf("%s: losses of %d steps %.2g\n", name, steps, worst);
    golden_close(&g);
}

#define GOLDEN(NAME)                                                                                                   \
    TEST(golden_##NAME) {                                                                                              \
        check_first_step(#NAME);                                                                                       \
    }                                                                                                                  \
    TEST(golden_##NAME##_ten_steps) {                                                                                  \
        check_training(#NAME);                                                                                         \
    }

/* transformers */
GOLDEN(direct_q)
GOLDEN(q_lora_groups_negative_bias)
GOLDEN(q_lora_yarn)
GOLDEN(direct_q_yarn_mscales)
/* the f64 model of scripts/make_golden.py */
GOLDEN(mtp)
GOLDEN(mtp2_documents)
GOLDEN(balance)
GOLDEN(mtp_balance_documents)
