/* See choice.h. */
#include "choice.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"

/* Ids at the beginning of the context that do not fit, with the longest choice, into S positions. The last id of a
 * choice takes none. */
static int64_t left_out(const ChoiceExample *x, int64_t S) {
    int64_t longest = 0;
    for (int c = 0; c < x->n_choices; c++) longest = x->length[c] > longest ? x->length[c] : longest;
    const int64_t n = x->n_context + longest - 1 - S;
    return n > 0 ? n : 0;
}

int choice_open(ChoiceSets *c, const Config *config, char *err, char *hint) {
    memset(c, 0, sizeof *c);
    for (int i = 0; i < config->eval.n_choice; i++) {
        const Source *source = &config->eval.choice[i];
        ChoiceFile *f = &c->file[i];
        if (choice_file_open(f, source->path, config->model.vocab_size, err, hint) != 0) {
            choice_close(c);
            return -1;
        }
        c->n = i + 1;
        snprintf(c->name[i], sizeof c->name[i], "%s", source->name);
        for (int64_t e = 0; e < f->n_examples; e++) {
            c->n_cut[i] += left_out(&f->examples[e], config->train.seq_len) > 0;
            for (int k = 0; k < f->examples[e].n_choices; k++) {
                const int32_t length = f->examples[e].length[k];
                if (length <= config->train.seq_len) continue;
                err_set(hint, "raise train.seq_len, or leave the example out");
                err_set(err, "%s: example %lld: a choice of %d ids does not fit train.seq_len = %lld", source->path,
                        (long long)e, length, (long long)config->train.seq_len);
                choice_close(c);
                return -1;
            }
        }
    }
    return 0;
}

void choice_close(ChoiceSets *c) {
    for (int i = 0; i < c->n; i++) choice_file_close(&c->file[i]);
    memset(c, 0, sizeof *c);
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* Where the losses of one choice will be: n rows of the micro-batch from `first`. */
typedef struct {
    int64_t first, n;
    double *nats;
} Span;

typedef struct {
    Model *m;
    MicroBatch mb;
    int64_t b, used;   /* the sequence that is being filled, and its positions in use */
    int64_t n_flushed; /* micro-batches that are full: the ranks take them in turn */
    int64_t n_spans;
    Span *spans; /* one a token at most */
    real *loss;
} Packer;

static void packer_open(Packer *p, Model *m) {
    const ModelShape *s = &m->eval.shape;
    char err[ERR_LEN];
    memset(p, 0, sizeof *p);
    p->m = m;
    CHECK(micro_batch_alloc(&p->mb, s->B, s->S, s->n_mtp, err) == 0, "%s", err);
    p->spans = (Span *)malloc((size_t)s->T * sizeof *p->spans);
    p->loss = (real *)malloc((size_t)s->T * sizeof *p->loss);
    CHECK(p->spans && p->loss, "no memory for %lld losses", (long long)s->T);
    for (int64_t b = 0; b < s->B; b++) micro_batch_pad(&p->mb, b);
}

static void packer_close(Packer *p) {
    micro_batch_free(&p->mb);
    free(p->spans);
    free(p->loss);
}

/* The head runs by itself: MTP is left out, and of its losses only depth 0's would remain otherwise. */
static void packer_forward(Packer *p) {
    Model *m = p->m;
    const Device *d = m->device;
    micro_batch_count(&p->mb);
    model_set_batch(m, &m->eval.shape, &p->mb);
    model_forward(m, &m->eval, FORWARD_HIDDEN);
    if (!model_has_output(m)) return;
    head_forward(m, &m->eval, 0, FORWARD_EVAL);
    op_synchronize(d, STREAM_COMPUTE);
    op_copy_out(d, p->loss, m->eval.loss.data, (size_t)m->eval.shape.T * sizeof *p->loss, STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
    for (int64_t i = 0; i < p->n_spans; i++) {
        const Span *span = &p->spans[i];
        for (int64_t t = 0; t < span->n; t++) *span->nats += (double)p->loss[span->first + t];
    }
}

/* The rest of the micro-batch is padding already. */
static void packer_flush(Packer *p) {
    const Mesh *mesh = &p->m->comm->mesh;
    if (p->n_spans == 0) return;
    if (p->n_flushed++ % mesh->n_data == mesh->data) packer_forward(p);
    for (int64_t b = 0; b < p->m->eval.shape.B; b++) micro_batch_pad(&p->mb, b);
    p->n_spans = p->b = p->used = 0;
}

/* Every rank goes forward as often as the others, since they may hold its experts: in the last round with padding. */
static void packer_end(Packer *p) {
    const Mesh *mesh = &p->m->comm->mesh;
    packer_flush(p);
    const int64_t in_last_round = p->n_flushed % mesh->n_data;
    if (in_last_round > 0 && mesh->data >= in_last_round) packer_forward(p);
}

/* Adds context + choice. The last id is predicted but read by nobody, so it takes no position. */
static void packer_add(Packer *p, const int32_t *context, int64_t n_context, const int32_t *choice, int64_t n_choice,
                       double *nats) {
    const ModelShape *s = &p->m->eval.shape;
    const int64_t n = n_context + n_choice - 1, T = s->T;
    if (p->used + n > s->S) {
        p->b++;
        p->used = 0;
    }
    if (p->b == s->B) packer_flush(p);
    const int64_t first = p->b * s->S + p->used;
    MicroBatch *mb = &p->mb;
    for (int64_t t = 0; t < n; t++) {
        const int64_t next = t + 1 - n_context; /* in the choice */
        mb->tokens[first + t] = t < n_context ? context[t] : choice[t - n_context];
        mb->targets[first + t] = next >= 0 ? choice[next] : -1;
        mb->position[first + t] = (int32_t)t;
        mb->doc_start[first + t] = (int32_t)first;
    }
    for (int k = 1; k <= mb->depth; k++) /* of no consequence, but valid ids */
        memcpy(mb->tokens + k * T + first, mb->tokens + first, (size_t)n * sizeof *mb->tokens);
    p->spans[p->n_spans++] = (Span){first + n_context - 1, n_choice, nats};
    p->used += n;
}

/* A score is one rank's, bit for bit; on all others it is zero. */
static void share_scores(const Model *m, double *nats, int64_t n) {
    if (m->comm->mesh.world == 1) return;
    uint64_t *words = (uint64_t *)malloc((size_t)n * sizeof *words);
    CHECK(words && n <= INT32_MAX, "no memory for %lld scores", (long long)n);
    memcpy(words, nats, (size_t)n * sizeof *words);
    job_sum(words, (int)n);
    memcpy(nats, words, (size_t)n * sizeof *words);
    free(words);
}

void choice_score(const ChoiceFile *f, Model *m, double *nats, Logger *logger, const char *name) {
    const int64_t n = f->n_examples * CHOICES_MAX;
    Packer p;
    packer_open(&p, m);
    memset(nats, 0, (size_t)n * sizeof *nats);
    for (int64_t e = 0; e < f->n_examples; e++) {
        const ChoiceExample *x = &f->examples[e];
        const int64_t skip = left_out(x, m->eval.shape.S); /* the same context for all choices */
        for (int c = 0; c < x->n_choices; c++)
            packer_add(&p, choice_context(f, e) + skip, x->n_context - skip, choice_ids(f, e, c), x->length[c],
                       &nats[e * CHOICES_MAX + c]);
        if (logger) log_progress(logger, name, e, f->n_examples);
    }
    packer_end(&p);
    packer_close(&p);
    share_scores(m, nats, n);
}

/* ---- judging ----------------------------------------------------------------------------------------------------- */

void choice_judge(const ChoiceFile *f, const double *nats, ChoiceResult *r) {
    int64_t right = 0, right_by_sum = 0;
    r->n_examples = f->n_examples;
    r->chance = r->label_nats = 0;
    for (int64_t e = 0; e < f->n_examples; e++) {
        const ChoiceExample *x = &f->examples[e];
        const double *sum = &nats[e * CHOICES_MAX];
        int best = 0, best_by_sum = 0;
        for (int c = 1; c < x->n_choices; c++) {
            if (sum[c] / x->length[c] < sum[best] / x->length[best]) best = c;
            if (sum[c] < sum[best_by_sum]) best_by_sum = c;
        }
        right += best == x->label;
        right_by_sum += best_by_sum == x->label;
        r->chance += 1.0 / x->n_choices / (double)f->n_examples;
        r->label_nats += sum[x->label] / x->length[x->label] / (double)f->n_examples;
    }
    r->accuracy = (double)right / (double)f->n_examples;
    r->accuracy_by_sum = (double)right_by_sum / (double)f->n_examples;
}

/* Maps of expert rows that did not fit since eval_stats was zeroed, on any rank. */
static double overflows(Model *m) {
    const Tensor overflow = tensor_1d(&m->eval_stats->overflow, DTYPE_F64, 1);
    double n;
    m->comm->all_reduce(m->comm, overflow, overflow, GROUP_WORLD, STREAM_COMM);
    op_synchronize(m->device, STREAM_COMM);
    op_copy_out(m->device, &n, overflow.data, sizeof n, STREAM_COPY);
    op_synchronize(m->device, STREAM_COPY);
    return n;
}

void choice_run(const ChoiceSets *c, Model *m, ValReport *report, Logger *logger) {
    const double start = clock_s();
    op_zero(m->device, tensor_1d(m->eval_stats, DTYPE_E4M3, (int64_t)sizeof *m->eval_stats), STREAM_COMPUTE);
    report->n_choices = c->n;
    for (int i = 0; i < c->n; i++) {
        const ChoiceFile *f = &c->file[i];
        ChoiceResult *r = &report->choices[i];
        double *nats = (double *)malloc((size_t)f->n_examples * CHOICES_MAX * sizeof *nats);
        CHECK(nats, "no memory for the scores of %lld examples", (long long)f->n_examples);
        choice_score(f, m, nats, logger, c->name[i]);
        choice_judge(f, nats, r);
        snprintf(r->name, sizeof r->name, "%s", c->name[i]);
        free(nats);
    }
    report->overflow += overflows(m);
    report->seconds += clock_s() - start;
}
