/* See eval.h. */
#include "eval.h"
#include "kernels/base/clock.h"
#include "kernels/comm/watch.h"

#include <stdio.h>
#include <string.h>

static void describe(EvalSets *e, int i, const Sidecar *sidecar) {
    e->bytes_per_token[i] = sidecar->found ? sidecar_val_bytes_per_token(sidecar) : 0;
    size_t used = 0;
    for (int k = 0; k < sidecar->n_ngrams && used < sizeof e->ladder[i]; k++)
        used += (size_t)snprintf(e->ladder[i] + used, sizeof e->ladder[i] - used, "%s%s %.2f", k ? ", " : "",
                                 sidecar->ngrams[k].name, sidecar->ngrams[k].nats_per_byte);
}

int eval_open(EvalSets *e, const Config *c, int64_t n_ranks, char *err, char *hint) {
    memset(e, 0, sizeof *e);
    for (int i = 0; i < c->data.n_val; i++) {
        LoaderSpec spec;
        loader_spec_val(&spec, c, i, n_ranks);
        if (loader_open(&e->loader[i], &spec, err, hint) != 0) {
            eval_close(e);
            return -1;
        }
        e->n = i + 1;
        snprintf(e->name[i], sizeof e->name[i], "%s", c->data.val[i].name);
        describe(e, i, loader_sidecar(e->loader[i]));
    }
    return 0;
}

void eval_close(EvalSets *e) {
    for (int i = 0; i < e->n; i++) loader_close(e->loader[i]);
    memset(e, 0, sizeof *e);
}

/* Adds the set's token losses to eval_stats on the device; *targets is their number. Every rank goes through as many
 * micro-batches as the others, since they may hold its experts; behind the end of the set these are padding. The stages
 * of a pipeline read the same ones. */
static int run_set(EvalSets *e, int i, Model *m, int64_t *targets, Logger *logger, char *err) {
    const Mesh *mesh = &m->comm->mesh;
    const int64_t samples = loader_samples(e->loader[i]), B = m->eval.shape.B, n_ranks = mesh->n_data;
    const Tensor sums = model_sums(m->eval_stats);
    uint64_t sum = 0;
    for (int64_t round = 0; round < samples; round += B * n_ranks) {
        const int64_t first = round + mesh->data * B;
        MicroBatch mb;
        if (loader_next(e->loader[i], first, &mb, err) != 0) return -1;
        model_set_batch(m, &m->eval.shape, &mb);
        model_forward(m, &m->eval, FORWARD_EVAL);
        if (mesh->pp == 0) sum += (uint64_t)mb.n_targets[0];
        watch_phase("validation", first / B);
        if (logger) log_progress(logger, e->name[i], first, samples);
    }
    m->comm->all_reduce(m->comm, sums, sums, GROUP_WORLD, STREAM_COMM);
    job_sum(&sum, 1);
    *targets = (int64_t)sum;
    return 0;
}

int eval_run(EvalSets *e, Model *m, ValReport *report, Logger *logger, char *err) {
    const double start = clock_s();
    report->n_sets = e->n;
    report->tokens_evaluated = 0;
    for (int i = 0; i < e->n; i++) {
        StepStats stats;
        int64_t targets;
        op_zero(m->device, tensor_1d(m->eval_stats, DTYPE_E4M3, (int64_t)sizeof stats), STREAM_COMPUTE);
        if (run_set(e, i, m, &targets, logger, err) != 0) return -1;
        op_synchronize(m->device, STREAM_COMPUTE);
        op_copy_out(m->device, &stats, m->eval_stats, sizeof stats, STREAM_COPY);
        op_synchronize(m->device, STREAM_COPY);
        ValSet *set = &report->sets[i];
        snprintf(set->name, sizeof set->name, "%s", e->name[i]);
        set->loss = targets > 0 ? stats.loss_sum[0] / (double)targets : 0;
        set->bytes_per_token = e->bytes_per_token[i];
        set->comparison = e->ladder[i][0] ? e->ladder[i] : NULL;
        report->tokens_evaluated += targets;
        report->overflow += stats.overflow;
    }
    report->seconds = clock_s() - start;
    return 0;
}
