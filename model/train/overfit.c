/* The check before a long run: one micro-batch, trained on again and again, must be learnt by heart. A model that
 * cannot do that has something wrong in data, configuration or machine; one that can may still need better settings.
 * Nothing is written. See run.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "run.h"

/* Nats a token above what is possible that still count as learnt. */
static const double learnt_within = 0.1;

/* ---- what is possible -------------------------------------------------------------------------------------------- */

/* A target, and all that is seen before it as a hash. */
typedef struct {
    uint64_t seen;
    int32_t target;
} Question;

static int compare_questions(const void *a, const void *b) {
    const Question *x = (const Question *)a, *y = (const Question *)b;
    if (x->seen != y->seen) return x->seen < y->seen ? -1 : 1;
    return (x->target > y->target) - (x->target < y->target);
}

/* Two sequences that begin alike and go on differently cannot both be foretold: the mean entropy of the target given
 * everything visible, which no model can undercut. */
static double least_loss(const MicroBatch *mb) {
    Question *q = (Question *)malloc((size_t)(mb->n_tokens + 1) * sizeof *q);
    CHECK(q, "no memory for %lld targets", (long long)mb->n_tokens);
    int64_t n = 0;
    uint64_t seen = 0;
    for (int64_t t = 0; t < mb->n_tokens; t++) {
        if (mb->doc_start[t] == t) seen = 0;
        seen = hash_bytes(&mb->tokens[t], sizeof *mb->tokens, seen + 1);
        if (mb->targets[t] >= 0) q[n++] = (Question){seen, mb->targets[t]};
    }
    qsort(q, (size_t)n, sizeof *q, compare_questions);
    double sum = 0;
    for (int64_t first = 0, end; first < n; first = end) {
        for (end = first; end < n && q[end].seen == q[first].seen;) end++;
        for (int64_t i = first, next; i < end; i = next) {
            for (next = i; next < end && q[next].target == q[i].target;) next++;
            sum += (double)(next - i) * log((double)(end - first) / (double)(next - i));
        }
    }
    free(q);
    return n > 0 ? sum / (double)n : 0;
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

/* The configuration's model, data and peak rate; the schedules of a run of n steps over one micro-batch. */
static void shorten(Config *c, int64_t n) {
    TrainConfig *t = &c->train;
    for (int i = 1; i < t->lr.n; i++) t->lr.value[0] = fmax(t->lr.value[0], t->lr.value[i]);
    t->lr.n = 1;
    t->lr_final = 0;
    t->lr_shape = SHAPE_COSINE;
    t->lr_warmup_steps = n / 20 + 1;
    t->steps = n;
    t->tokens = 0;
    t->global_batch_size.n = 1;
    t->global_batch_size.value[0] = (double)t->micro_batch_size;
    t->skip_if_z = 0;
}

static int verdict(Run *r, double first, double last, double least) {
    const bool is_learnt = last - least <= learnt_within; /* false for NaN */
    char possible[64] = "";
    if (least >= 5e-5) snprintf(possible, sizeof possible, " (no model could do better than %.4f)", least);
    r->log.is_quiet = false; /* the one line that was asked for */
    log_banner(&r->log, "overfit", "loss %.4f -> %.4f in %lld steps%s: %s", first, last,
               (long long)r->trainer.length.steps, possible,
               is_learnt ? "learnt by heart, all is well"
                         : "not learnt by heart; try more steps or another train.lr, then suspect data and build");
    return is_learnt ? EXIT_DONE : EXIT_FAILED;
}

static void show(Run *r, const StepReport *report, double *first) {
    if (report->step == 1) *first = report->loss[0];
    log_step(&r->log, report);
}

int run_overfit(const Args *args, const Launch *launch) {
    Run r;
    char err[ERR_LEN], hint[ERR_LEN];
    LoaderSpec spec;
    MicroBatch mb;
    StepReport report;
    if (args->init_from || strcmp(args->resume, "auto") != 0)
        DIE("leave the other out",
            "--overfit starts from fresh weights: neither --init-from nor --resume goes with it");
    run_open_model(&r, args, launch, 0, true);
    log_init(&r.log, args->overfit / 20 + 1, args->quiet, stdout, stderr);
    if (loader_spec_train(&spec, &r.config, 1, err, hint) != 0 || loader_open(&r.loader, &spec, err, hint) != 0)
        DIE(hint[0] ? hint : NULL, "%s", err);
    shorten(&r.config, args->overfit);
    if (trainer_init(&r.trainer, &r.config, &r.model, r.loader, err) != 0) DIE(NULL, "%s", err);
    if (loader_next(r.loader, 0, &mb, err) != 0) DIE(NULL, "%s", err);
    const double least = least_loss(&mb);
    log_banner(&r.log, "overfit", "the first %lld sequences of %lld tokens alone, for %lld steps; writes nothing",
               (long long)mb.n_sequences, (long long)mb.seq_len, (long long)args->overfit);
    model_init_weights(&r.model);
    trainer_restore(&r.trainer);
    double first = 0;
    while (r.trainer.state.step < r.trainer.length.steps) {
        r.trainer.state.samples = 0;
        if (train_step(&r.trainer, err) != 0) DIE(NULL, "%s", err);
        while (train_report(&r.trainer, &report)) show(&r, &report, &first);
    }
    while (train_flush(&r.trainer, &report)) show(&r, &report, &first);
    const int exit_code = verdict(&r, first, report.loss[0], least);
    run_close(&r);
    return exit_code;
}
