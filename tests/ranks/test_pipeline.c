/* Stages on ranks of their own against the same model alone: losses, counts, biases and weights after each of a few
 * steps. What adds up in the same order gives the same bits. */
#include "model/parallel/pipeline.h"

#include <math.h>
#include <string.h>

#include "tests/model/model_test.h"

enum { STEPS = 2 };
#define TOLERANCE 2e-5

typedef struct {
    Fixture many, one;
    Pipeline *pipeline;
    int M; /* micro-batches of each rank that takes samples */
} Trial;

static void step_of_one(Trial *t, int step) {
    Fixture *f = &t->one;
    const int n = t->M * t->many.comm->mesh.n_data;
    f->params.inv_tokens = 1.0 / (double)(n * f->model.shape.T);
    model_set_params(&f->model, &f->params);
    model_zero(&f->model);
    for (int i = 0; i < n; i++) {
        fixture_batch(f, 0, 1 + (uint64_t)(step * n + i));
        model_set_batch(&f->model, &f->model.shape, &f->batch);
        model_forward(&f->model, &f->model.train, FORWARD_TRAIN);
        model_backward(&f->model, &f->model.train);
    }
    model_update(&f->model);
}

static void step_of_many(Trial *t, int step) {
    Fixture *f = &t->many;
    const Mesh *mesh = &f->comm->mesh;
    const int n = t->M * mesh->n_data;
    f->params.inv_tokens = 1.0 / (double)(n * f->model.shape.T);
    model_set_params(&f->model, &f->params);
    for (int i = 0; i < t->M; i++) {
        fixture_batch(f, 0, 1 + (uint64_t)(step * n + i * mesh->n_data + mesh->data));
        model_set_batch_at(&f->model, i, &f->model.shape, &f->batch);
    }
    model_zero(&f->model);
    pipeline_run(t->pipeline, t->M);
    model_update(&f->model);
}

static void compare(Trial *t, bool same_bits, const char *name) {
    const Model *many = &t->many.model, *one = &t->one.model;
    const StepStats *a = many->stats, *b = one->stats;
    for (int k = 0; k <= one->shape.n_mtp; k++)
        EXPECT(fabs(a->loss_sum[k] - b->loss_sum[k]) <= (same_bits ? 0 : TOLERANCE) * b->loss_sum[k],
               "%s: loss %d is %.17g, not %.17g", name, k, a->loss_sum[k], b->loss_sum[k]);
    EXPECT(fabs(a->balance_sum - b->balance_sum) <= TOLERANCE * b->balance_sum, "%s: balance", name);
    EXPECT(fabs(a->grad_norm - b->grad_norm) <= (same_bits ? 0 : TOLERANCE) * b->grad_norm, "%s: norm %.9g, not %.9g",
           name, a->grad_norm, b->grad_norm);
    EXPECT(t_same_bits(many->record.counts, one->record.counts), "%s: counts", name);
    EXPECT(t_same_bits(many->record.bias, one->record.bias), "%s: biases of all blocks on all ranks", name);
    for (int64_t i = 0; i < many->params.n_named; i++) { /* named alike; a rank has some */
        const NamedTensor *own = &many->params.named[i], *other = one->params.named;
        while (strcmp(other->name, own->name) != 0) other++;
        const Interval held = params_held(&many->params, own);
        for (int64_t e = held.first; e < held.first + held.n; e++) {
            const real x = ((const real *)many->params.master.data)[params_master_at(&many->params, own, e)];
            const real y = ((const real *)one->params.master.data)[params_master_at(&one->params, other, e)];
            /* Adam's steps are large where a gradient is nearly zero. */
            if (same_bits ? x == y : fabs(x - y) <= 2 * t->one.params.lr) continue;
            EXPECT(false, "%s: %s[%lld] is %.9g, not %.9g", name, own->name, (long long)e, (double)x, (double)y);
            return;
        }
    }
    if (same_bits)
        EXPECT(params_hash_of_job(&many->params, many->device) == params_hash(&one->params, one->device),
               "%s: the job's hash", name);
}

static void check(const char *const *sets, ScheduleKind kind, int n_pp, int n_ep, int M, const char *what) {
    char name[96];
    Trial t = {.M = M};
    fixture_open_pipeline(&t.many, sets, n_pp, n_ep, kind, M);
    fixture_open(&t.one, sets);
    t.pipeline = pipeline_open(&t.many.model, kind);
    const Mesh *mesh = &t.many.comm->mesh;
    snprintf(name, sizeof name, "%s, %s, pp %d x dp %d x ep %d", what, schedule_name(kind), n_pp, mesh->n_dp, n_ep);
    /* In order, unless sums of several ranks, of both directions or of two depths meet. */
    const bool same_bits = mesh->n_data == 1 && !mesh->is_mirrored && t.one.model.shape.n_mtp == 0;
    t.many.params.lr = t.one.params.lr = 1e-4;
    for (int step = 0; step < STEPS; step++) {
        step_of_one(&t, step);
        step_of_many(&t, step);
        compare(&t, same_bits, name);
    }
    pipeline_close(t.pipeline);
    fixture_close(&t.many);
    fixture_close(&t.one);
    t_free_all();
}

/* Every way to cut the job with a pipeline, with every schedule that takes it; with MTP where all ranks are stages. Two
 * stages of four have no experts. */
TEST(pipelines_train_as_one_rank) {
    static const char *const deep[] = {"model.num_hidden_layers=9", "model.first_k_dense_replace=5",
                                       "model.num_nextn_predict_layers=0", NULL};
    static const char *const mtp[] = {"model.num_hidden_layers=7", "model.num_nextn_predict_layers=2", NULL};
    const int world = job_world();
    for (int n_pp = 2; n_pp <= world; n_pp++)
        for (int n_ep = 1; n_pp * n_ep <= world; n_ep++) {
            if (world % (n_pp * n_ep) || 8 % n_ep) continue;
            for (int kind = SCHEDULE_GPIPE; kind < SCHEDULE_COUNT; kind++) {
                ScheduleShape shape;
                if (schedule_shape(&shape, (ScheduleKind)kind, n_pp, 2 * n_pp, NULL, NULL) != 0) continue;
                check(deep, (ScheduleKind)kind, n_pp, n_ep, 2 * n_pp, "dense stages");
                if (n_pp == world) check(mtp, (ScheduleKind)kind, n_pp, n_ep, 2 * n_pp, "MTP");
            }
        }
}

/* One stage, whose forwards run beside backwards. */
TEST(pairs_train_as_one_rank) {
    for (int n_ep = 1; n_ep <= job_world(); n_ep *= 2)
        if (job_world() % n_ep == 0) check(NULL, SCHEDULE_PAIRED, 1, n_ep, 3, "pairs");
}

/* FP8 on all ranks as stages: what waits for weight-backward is tiles, or the wide gradients where Wgrad is BF16's. */
TEST(pipelines_in_fp8_train_as_one_rank) {
    static const char *const wgrad[] = {"precision.fp8.wgrad=fp8", "precision.fp8.wgrad=bf16"};
    const int world = job_world();
    for (int i = 0; i < 2; i++) {
        const char *sets[] = {FP8_WIDTHS,
                              "model.num_hidden_layers=5",
                              "model.num_nextn_predict_layers=0",
                              "precision.compute=fp8",
                              wgrad[i],
                              NULL};
        check(sets, SCHEDULE_ZB1P, world, 1, world + 1, wgrad[i]);
    }
}

/* Gradients of tokens travel back while their experts' weights take theirs: where experts have few rows, and heads are
 * wide, what is still sent must not lie under what is made for those. */
TEST(pairs_in_fp8_of_few_rows_train_as_one_rank) {
    static const char *const sets[] = {FP8_WIDTHS,
                                       "precision.compute=fp8",
                                       "model.num_nextn_predict_layers=0",
                                       "model.num_experts_per_tok=1",
                                       "model.norm_topk_prob=false",
                                       "model.num_attention_heads=8",
                                       "model.num_key_value_heads=8",
                                       "model.v_head_dim=160",
                                       "train.micro_batch_size=4",
                                       "train.global_batch_size=4",
                                       NULL};
    if (job_world() == 2) check(sets, SCHEDULE_PAIRED, 1, 2, 2, "few rows");
}
