/* See step.h. */
#include "step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/comm/watch.h"
#include "part.h"
#include "ranks.h"
#include "saver.h"
#include "zscore.h"

/* Positions without tokens: all sequences run from their first token to their last. */
static void set_positions(MicroBatch *mb, int n_mtp) {
    int32_t *window = (int32_t *)calloc((size_t)(mb->seq_len + 1 + n_mtp), sizeof *window);
    CHECK(window, "no memory for a sequence of %lld", (long long)mb->seq_len);
    for (int64_t b = 0; b < mb->n_sequences; b++) micro_batch_set(mb, b, window, NO_DOCUMENT_MASK, 0);
    free(window);
}

int trainer_init(Trainer *t, const Config *c, Model *m, Loader *loader, char *err) {
    memset(t, 0, sizeof *t);
    t->config = c;
    t->model = m;
    t->loader = loader;
    t->batch_unit = part_batch_unit(c, m->comm->mesh.n_data);
    t->length = run_length(c, t->batch_unit);
    t->has_bias = c->model.topk_method == TOPK_NOAUX_TC;
    t->state.best_val = INFINITY;
    t->loads = loads_make(shape_n_moe(&m->shape), m->shape.router.n_experts);
    zscore_init(&t->state.loss_z, c->train.z_window);
    zscore_init(&t->state.norm_z, c->train.z_window);
    if (micro_batch_alloc(&t->counted, m->shape.B, m->shape.S, m->shape.n_mtp, err) != 0) return -1;
    const RankPart *part = &m->shape.part;
    t->reads_tokens = c->data.document_mask || part->embedding || shape_has_loss(&m->shape);
    if (!t->reads_tokens) set_positions(&t->counted, m->shape.n_mtp);
    if (m->part) t->pipeline = pipeline_open(m, part_schedule(c));
    return 0;
}

static void forget_graph(Trainer *t, StepPart part) {
    if (t->graph[part]) op_graph_free(t->model->device, t->graph[part]);
    t->graph[part] = NULL;
}

void trainer_forget_graphs(Trainer *t) {
    for (int part = 0; part < STEP_PARTS; part++) {
        forget_graph(t, (StepPart)part);
        t->has_run[part] = false;
    }
}

void trainer_free(Trainer *t) {
    trainer_forget_graphs(t);
    micro_batch_free(&t->counted);
    pipeline_close(t->pipeline);
    loads_free(&t->loads);
    memset(t, 0, sizeof *t);
}

void trainer_restore(Trainer *t) {
    const Device *d = t->model->device;
    op_copy_in(d, t->model->update, &t->state.update, sizeof t->state.update, STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
    t->reported = t->state.step;
}

/* ---- queueing a step --------------------------------------------------------------------------------------------- */

/* Sample of this rank's i-th micro-batch of the step: the ranks take them in turn. */
static int64_t first_sample(const Trainer *t, int64_t i) {
    const Mesh *mesh = &t->model->comm->mesh;
    return t->state.samples + (i * mesh->n_data + mesh->data) * t->model->shape.B;
}

/* Targets of the global batch by depth, n_micro micro-batches of every rank. Without a document mask every position has
 * one; with it, MTP depths have fewer, and backward must know how many before it starts: so the windows are read twice.
 * Of a pipeline the first stage counts. */
static int count_targets(Trainer *t, int64_t n_micro, int64_t *n_targets, char *err) {
    const ModelShape *s = &t->model->shape;
    const Mesh *mesh = &t->model->comm->mesh;
    const bool counts = t->config->data.document_mask && mesh->pp == 0;
    uint64_t counted[LOSSES_MAX] = {0};
    for (int k = 0; k <= s->n_mtp; k++)
        n_targets[k] = t->config->data.document_mask ? 0 : n_micro * mesh->n_data * s->T;
    for (int64_t i = 0; i < n_micro && counts; i++) {
        if (loader_fill(t->loader, first_sample(t, i), &t->counted, err) != 0) return -1;
        for (int k = 0; k <= s->n_mtp; k++) counted[k] += (uint64_t)t->counted.n_targets[k];
    }
    if (!t->config->data.document_mask) return 0;
    job_sum(counted, 1 + s->n_mtp);
    for (int k = 0; k <= s->n_mtp; k++) n_targets[k] = (int64_t)counted[k];
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

/* i: the micro-batch, for who watches. */
static void queue(Trainer *t, StepPart part, int64_t i) {
    Model *m = t->model;
    if (part == STEP_UPDATE) {
        model_update(m);
        return;
    }
    if (part != STEP_NEXT) model_zero(m);
    if (part == STEP_PIPELINE) {
        pipeline_run(t->pipeline, (int)t->n_piped);
        return;
    }
    watch_phase("forward", i);
    model_forward(m, &m->train, FORWARD_TRAIN);
    watch_phase("backward", i);
    model_backward(m, &m->train);
}

/* Is what FP8 tensors hold counted in this step? In its first micro-batch: one is enough to see them by. (A pipeline
 * counts all.) */
static bool counts_fp8(const Trainer *t, int64_t step) {
    return t->model->shape.counts_fp8 && step % t->config->log.fp8_every_steps == 0;
}

/* As it is the first time, then captured and from then on replayed. Who watches the ops sees them all; those that count
 * FP8 tensors are in no graph. */
static void run_part(Trainer *t, StepPart part, int64_t i) {
    static const char *const phase[STEP_PARTS] = {"replay", "replay", "pipeline", "update"};
    const Device *d = t->model->device;
    watch_phase(phase[part], i);
    t->model->observes = (part == STEP_FIRST || part == STEP_PIPELINE) && counts_fp8(t, t->state.step + 1);
    if (!t->config->run.graphs || t->model->comm->needs_host || d->watch || !t->has_run[part] || t->model->observes) {
        queue(t, part, i);
        t->has_run[part] = true;
        return;
    }
    if (!t->graph[part]) {
        op_graph_begin(d, STREAM_COMPUTE);
        queue(t, part, i);
        t->graph[part] = op_graph_end(d, STREAM_COMPUTE);
        if (!t->graph[part]) return; /* a backend without graphs has run it */
    }
    op_graph_launch(d, t->graph[part], STREAM_COMPUTE);
}

static void push_pending(RunState *state) {
    if (state->pending.is_set) {
        zscore_push(&state->loss_z, state->pending.loss);
        zscore_push(&state->norm_z, state->pending.norm);
    }
    memset(&state->pending, 0, sizeof state->pending);
}

/* The step was queued: what is known of it now, the rest when its record is there. */
static void set_in_flight(Trainer *t, const StepParams *p, const int64_t *n_targets, int64_t sequences,
                          double started_s, double data_wait_s) {
    const ModelShape *s = &t->model->shape;
    StepInFlight *f = &t->in_flight[t->state.step % STAGING_RECORDS];
    memset(&f->report, 0, sizeof f->report);
    memcpy(f->n_targets, n_targets, sizeof f->n_targets);
    f->sequences = sequences;
    f->started_s = started_s;
    StepReport *r = &f->report;
    r->step = t->state.step;
    r->steps_total = t->length.steps;
    r->tokens = t->state.tokens;
    r->tokens_total = t->length.tokens;
    r->tokens_in_step = sequences * s->S;
    r->n_losses = 1 + s->n_mtp;
    r->n_blocks = s->n_blocks;
    r->n_layers = shape_n_moe(s);
    r->n_experts = r->n_layers ? s->router.n_experts : 0;
    r->lr = p->lr;
    r->data_wait_ms = 1e3 * data_wait_s;
}

/* Micro-batch i of the step to the device, as number `at` there. */
static int set_batch(Trainer *t, int64_t i, int at, char *err) {
    Model *m = t->model;
    MicroBatch mb = t->counted;
    watch_phase("data", i);
    if (t->reads_tokens && loader_next(t->loader, first_sample(t, i), &mb, err) != 0) return -1;
    model_set_batch_at(m, at, &m->shape, &mb);
    return 0;
}

static int run_micro_batches(Trainer *t, int64_t n_micro, char *err) {
    for (int64_t i = 0; i < n_micro; i++) {
        if (set_batch(t, i, 0, err) != 0) return -1;
        run_part(t, i == 0 ? STEP_FIRST : STEP_NEXT, i);
    }
    return 0;
}

/* All tokens of the step first: a few bytes, read by several stages at several times. */
static int run_pipeline(Trainer *t, int64_t n_micro, char *err) {
    for (int64_t i = 0; i < n_micro; i++)
        if (set_batch(t, i, (int)i, err) != 0) return -1;
    if (n_micro != t->n_piped) forget_graph(t, STEP_PIPELINE);
    t->n_piped = n_micro;
    run_part(t, STEP_PIPELINE, -1);
    return 0;
}

int train_step(Trainer *t, char *err) {
    const double start = clock_s(), waited = loader_waited_s(t->loader);
    Model *m = t->model;
    RANGE(m->device, "step");
    const ModelShape *s = &m->shape;
    RunState *state = &t->state;
    const int64_t sequences = batch_at(t->config, state->tokens, t->batch_unit);
    const int64_t n_micro = sequences / (s->B * m->comm->mesh.n_data);
    int64_t n_targets[LOSSES_MAX] = {0};
    CHECK(state->step - t->reported < STAGING_RECORDS, "step %lld, but reports were taken up to %lld only",
          (long long)state->step + 1, (long long)t->reported);
    if (count_targets(t, n_micro, n_targets, err) != 0) return -1;
    const double counted = clock_s() - start;
    const StepParams params = step_params(t, n_targets);
    t->in_flight[(state->step + 1) % STAGING_RECORDS].before = *state;

    watch_step(state->step + 1);
    watch_waited_s(); /* from here on */
    model_set_params(m, &params);
    if ((t->pipeline ? run_pipeline : run_micro_batches)(t, n_micro, err) != 0) return -1;
    /* Weights, moments and biases change in this part only: a save copies them on STREAM_COPY while the micro-batches
     * run, and this part alone waits for it. */
    if (t->is_copied) {
        op_event_record(m->device, EVENT_SAVE_BATCHES, STREAM_COMPUTE);
        op_event_wait(m->device, EVENT_SAVE_COPIED, STREAM_COMPUTE);
        t->is_copied = false;
    }
    run_part(t, STEP_UPDATE, -1);

    state->step++;
    state->samples += sequences;
    state->tokens += sequences * s->S;
    staging_fetch(&m->staging, &m->record, state->step);
    set_in_flight(t, &params, n_targets, sequences, start, counted + loader_waited_s(t->loader) - waited);
    push_pending(state);
    return 0;
}

/* ---- its report -------------------------------------------------------------------------------------------------- */

static void fill_report(const StepInFlight *f, const StepRecord *record, bool has_bias, StepReport *r) {
    const StepStats *stats = record->stats;
    *r = f->report;
    for (int k = 0; k < r->n_losses; k++)
        r->loss[k] = f->n_targets[k] ? stats->loss_sum[k] / (double)f->n_targets[k] : 0;
    r->balance = r->n_layers ? stats->balance_sum / ((double)r->n_layers * (double)f->sequences) : 0;
    r->gnorm = stats->grad_norm;
    r->skip = stats->skip;
    r->load = r->n_layers ? (const int32_t *)record->counts.data : NULL;
    r->bias = r->n_layers && has_bias ? (const float *)record->bias.data : NULL;
    maxvio_of_layers(r->load, r->n_layers, r->n_experts, &r->maxvio, &r->maxvio_mean);
}

/* What the ranks of an expert group had to do in this step. */
static void report_ranks(StepReport *r, const Model *m) {
    r->n_expert_ranks = r->n_layers ? m->shape.R : 1;
    if (r->n_expert_ranks == 1) return;
    ExpertLoads step = loads_make(r->n_layers, r->n_experts);
    loads_add(&step, r->load);
    const RankBalance b = loads_balance(&step, m->params.expert_of_slot, m->shape.R);
    r->rank_load = b.worst;
    r->rank_load_mean = b.mean;
    loads_free(&step);
}

/* Now; returns its seconds: from where the last one ended, or from its own beginning if that was later. */
static double end_of_step(Trainer *t, const StepInFlight *f) {
    const double from = f->started_s > t->done_s ? f->started_s : t->done_s;
    t->done_s = clock_s();
    return t->done_s - from;
}

/* Back to where the step began; what was queued behind it changed as little. The device may update again. */
static void take_back(Trainer *t, const StepInFlight *f) {
    const double wall_s = t->state.wall_s;
    op_synchronize(t->model->device, STREAM_COMPUTE);
    t->state = f->before;
    t->state.wall_s = wall_s;
    trainer_restore(t);
}

bool train_flush(Trainer *t, StepReport *r) {
    RunState *state = &t->state;
    if (t->reported == state->step) return false;
    t->reported++;
    const StepInFlight *f = &t->in_flight[t->reported % STAGING_RECORDS];
    const StepRecord *record = staging_record(&t->model->staging, t->reported);
    fill_report(f, record, t->has_bias, r);
    report_ranks(r, t->model);
    if (counts_fp8(t, r->step)) r->fp8 = record->fp8;
    state->update = *record->update;
    r->loss_z = zscore_of(&state->loss_z, r->loss[0]);
    r->norm_z = zscore_of(&state->norm_z, r->gnorm);
    if (!r->skip && r->load) loads_add(&t->loads, r->load);
    if (!r->skip) state->pending = (PendingValues){1, r->loss[0], r->gnorm};
    if (t->reported < state->step) {
        RunState *before = &t->in_flight[(t->reported + 1) % STAGING_RECORDS].before;
        before->update = state->update;
        before->pending = state->pending;
        push_pending(state); /* the next step has its thresholds */
    }
    const double seconds = end_of_step(t, f);
    state->wall_s += seconds;
    r->step_ms = seconds * 1e3;
    ranks_times(&r->ranks, (seconds - watch_waited_s()) * 1e3);
    if (r->skip == SKIP_OVERFLOW) take_back(t, f);
    return true;
}

bool train_report(Trainer *t, StepReport *r) {
    const int64_t behind = t->model->device->is_asynchronous ? 1 : 0;
    return t->state.step - t->reported > behind && train_flush(t, r);
}
