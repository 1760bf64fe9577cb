/* See step.h. */
#include "step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/clock.h"
#include "zscore.h"

int trainer_init(Trainer *t, const Config *c, Model *m, Loader *loader, char *err) {
    memset(t, 0, sizeof *t);
    t->config = c;
    t->model = m;
    t->loader = loader;
    t->length = run_length(c, 1);
    t->has_bias = c->model.topk_method == TOPK_NOAUX_TC;
    t->state.best_val = INFINITY;
    zscore_init(&t->state.loss_z, c->train.z_window);
    zscore_init(&t->state.norm_z, c->train.z_window);
    const ModelShape *s = &m->shape;
    t->load = (int32_t *)calloc((size_t)(shape_n_moe(s) * s->router.n_experts + 1), sizeof *t->load);
    t->bias = (float *)calloc((size_t)(shape_n_moe(s) * s->router.n_experts + 1), sizeof *t->bias);
    if (!t->load || !t->bias) return err_set(err, "no memory for the expert loads");
    return micro_batch_alloc(&t->counted, s->B, s->S, s->n_mtp, err);
}

void trainer_free(Trainer *t) {
    free(t->load);
    free(t->bias);
    micro_batch_free(&t->counted);
    memset(t, 0, sizeof *t);
}

void trainer_restore(Trainer *t) {
    const Device *d = t->model->device;
    op_copy_in(d, t->model->update, &t->state.update, sizeof t->state.update, STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
}

/* Targets of the global batch by depth. Without a document mask every position has one; with it, MTP depths have fewer,
 * and backward must know how many before it starts: so the windows are read twice. */
static int count_targets(Trainer *t, int64_t n_micro, int64_t *n_targets, char *err) {
    const ModelShape *s = &t->model->shape;
    for (int k = 0; k <= s->n_mtp; k++) n_targets[k] = t->config->data.document_mask ? 0 : n_micro * s->T;
    for (int64_t i = 0; i < n_micro && t->config->data.document_mask; i++) {
        if (loader_fill(t->loader, t->state.samples + i * s->B, &t->counted, err) != 0) return -1;
        for (int k = 0; k <= s->n_mtp; k++) n_targets[k] += t->counted.n_targets[k];
    }
    return 0;
}

static StepParams step_params(const Trainer *t, const int64_t *n_targets) {
    const Config *c = t->config;
    const RunState *state = &t->state;
    StepParams p;
    memset(&p, 0, sizeof p);
    p.step = state->step + 1;
    p.inv_tokens = n_targets[0] > 0 ? 1.0 / (double)n_targets[0] : 0;
    p.loss_scale[0] = 1;
    const int depths = t->model->shape.n_mtp;
    for (int k = 1; k <= depths; k++)
        p.loss_scale[k] = n_targets[k] > 0
                              ? mtp_weight_at(c, state->tokens) / depths * (double)n_targets[0] / (double)n_targets[k]
                              : 0;
    p.balance_scale = c->train.balance_alpha * (double)t->model->shape.S;
    p.lr = lr_at(c, &t->length, p.step, state->tokens);
    p.beta1 = c->train.beta1;
    p.beta2 = c->train.beta2;
    p.eps = c->train.eps;
    p.weight_decay = c->train.weight_decay;
    p.grad_clip = c->train.grad_clip;
    p.bias_speed = bias_speed_at(c, state->tokens);
    p.skip_loss_above = zscore_threshold(&state->loss_z, c->train.skip_if_z);
    p.skip_norm_above = zscore_threshold(&state->norm_z, c->train.skip_if_z);
    return p;
}

/* What the device has to say about the step. */
static StepStats fetch(Trainer *t) {
    Model *m = t->model;
    const Device *d = m->device;
    const int E = m->shape.router.n_experts;
    StepStats stats;
    op_synchronize(d, STREAM_COMPUTE);
    op_copy_out(d, &stats, m->stats, sizeof stats, STREAM_COPY);
    op_copy_out(d, &t->state.update, m->update, sizeof t->state.update, STREAM_COPY);
    int32_t *load = t->load;
    float *bias = t->bias;
    for (int b = 0; b < m->shape.n_blocks; b++) {
        const Block *block = &m->params.blocks[b];
        if (!block->counts.data) continue;
        op_copy_out(d, load, block->counts.data, (size_t)E * sizeof *load, STREAM_COPY);
        load += E;
        if (t->has_bias)
            op_copy_out(d, bias, block->weight[WEIGHT_ROUTER_BIAS].w.data, (size_t)E * sizeof *bias, STREAM_COPY);
        bias += E;
    }
    op_synchronize(d, STREAM_COPY);
    return stats;
}

static void fill_report(const Trainer *t, const StepParams *p, const StepStats *stats, const int64_t *n_targets,
                        int64_t sequences, StepReport *r) {
    const ModelShape *s = &t->model->shape;
    r->step = t->state.step;
    r->steps_total = t->length.steps;
    r->tokens = t->state.tokens;
    r->tokens_total = t->length.tokens;
    r->n_losses = 1 + s->n_mtp;
    for (int k = 0; k < r->n_losses; k++) r->loss[k] = n_targets[k] ? stats->loss_sum[k] / (double)n_targets[k] : 0;
    r->n_layers = shape_n_moe(s);
    r->n_experts = r->n_layers ? s->router.n_experts : 0;
    r->balance = r->n_layers ? stats->balance_sum / ((double)r->n_layers * (double)sequences) : 0;
    r->gnorm = stats->grad_norm;
    r->lr = p->lr;
    r->skip = stats->skip;
    r->load = r->n_layers ? t->load : NULL;
    r->bias = r->n_layers && t->has_bias ? t->bias : NULL;
    maxvio_of_layers(t->load, r->n_layers, r->n_experts, &r->maxvio, &r->maxvio_mean);
    r->tokens_in_step = sequences * s->S;
}

int train_step(Trainer *t, StepReport *r, char *err) {
    const double start = clock_s();
    Model *m = t->model;
    RANGE(m->device, "step");
    const ModelShape *s = &m->shape;
    const int64_t sequences = batch_at(t->config, t->state.tokens, 1), n_micro = sequences / s->B;
    int64_t n_targets[LOSSES_MAX] = {0};
    memset(r, 0, sizeof *r);
    if (count_targets(t, n_micro, n_targets, err) != 0) return -1;
    const StepParams params = step_params(t, n_targets);

    model_step_begin(m, &params);
    for (int64_t i = 0; i < n_micro; i++) {
        MicroBatch mb;
        if (loader_next(t->loader, t->state.samples + i * s->B, &mb, err) != 0) return -1;
        model_set_batch(m, s, &mb);
        model_forward(m, &m->train, FORWARD_TRAIN);
        model_backward(m, &m->train);
    }
    model_update(m);

    const StepStats stats = fetch(t);
    t->state.step++;
    t->state.samples += sequences;
    t->state.tokens += sequences * s->S;
    fill_report(t, &params, &stats, n_targets, sequences, r);
    r->loss_z = zscore_of(&t->state.loss_z, r->loss[0]);
    r->norm_z = zscore_of(&t->state.norm_z, r->gnorm);
    if (!r->skip) {
        zscore_push(&t->state.loss_z, r->loss[0]);
        zscore_push(&t->state.norm_z, r->gnorm);
    }
    const double seconds = clock_s() - start;
    t->state.wall_s += seconds;
    r->step_ms = seconds * 1e3;
    return 0;
}
