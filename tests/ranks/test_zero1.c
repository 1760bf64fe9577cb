/* ZeRO-1: every rank updates its shards, and the model is, to the last bit, what it is without: one rank with as many
 * micro-batches where no experts travel, else the same ranks that all update everything. */
#include <math.h>
#include <string.h>

#include "model/zero1.h"
#include "tests/model/model_test.h"

enum { STEPS = 2, SETS_MAX = 20 };

/* Weights of several blocks, of fewer than ranks and of one; short last blocks, in planes too; a padded vocabulary. MTP
 * adds to one gradient twice in a micro-batch, in another order than two micro-batches do: none. */
#define WIDE                                                                                                           \
    "model.hidden_size=160", "model.intermediate_size=300", "model.vocab_size=330", "model.moe_intermediate_size=70",  \
        "model.kv_lora_rank=24", "model.num_nextn_predict_layers=0", "train.init_std=0.1"

typedef struct {
    const char *name;
    const char *sets[SETS_MAX];
} Case;

static const Case cases[] = {
    {"f32", {WIDE}},
    {"bf16", {WIDE, "precision.compute=bf16", "precision.moments=bf16"}},
    {"bf16, f32 moments, q latent", {WIDE, "precision.compute=bf16", "model.q_lora_rank=20"}},
    {"fp8", {FP8_WIDTHS, "model.num_nextn_predict_layers=0", "precision.compute=fp8"}},
    {"fp8, Dgrad in bf16",
     {FP8_WIDTHS, "model.num_nextn_predict_layers=0", "precision.compute=fp8", "precision.fp8.dgrad=bf16"}},
    {"small", {"model.num_nextn_predict_layers=0"}},
    {"dense", {WIDE, "model.first_k_dense_replace=3"}},
};
enum { N_CASES = sizeof cases / sizeof *cases };

static void open_with(Fixture *f, const char *const *sets, const char *more, int n_ep) {
    const char *all[SETS_MAX + 2] = {NULL};
    int n = 0;
    while (sets[n]) all[n] = sets[n], n++;
    all[n] = more;
    if (n_ep)
        fixture_open_ranks(f, all, n_ep);
    else
        fixture_open(f, all);
    f->params.lr = 1e-3;
}

static void begin(Fixture *f, int step) {
    f->params.step = step + 1;
    f->params.inv_tokens = 1.0 / (double)(job_world() * f->model.shape.T);
    model_set_params(&f->model, &f->params);
    model_zero(&f->model);
}

static void micro_batch(Fixture *f, int step, int rank) {
    fixture_batch(f, 0, (uint64_t)(1 + step * job_world() + rank));
    model_set_batch(&f->model, &f->model.shape, &f->batch);
    model_forward(&f->model, &f->model.train, FORWARD_TRAIN);
    model_backward(&f->model, &f->model.train);
}

static void step_of_ranks(Fixture *f, int step) {
    begin(f, step);
    micro_batch(f, step, job_rank());
    model_update(&f->model);
}

static void step_of_one(Fixture *f, int step) {
    begin(f, step);
    for (int r = 0; r < job_world(); r++) micro_batch(f, step, r);
    model_update(&f->model);
}

/* ---- one rank ---------------------------------------------------------------------------------------------------- */

static bool same(Tensor arena, int64_t at, Tensor other, int64_t other_at, int64_t n) {
    const int64_t width = (int64_t)dtype_size(arena.dtype);
    return n == 0 || memcmp((const char *)arena.data + at * width, (const char *)other.data + other_at * width,
                            (size_t)(n * width)) == 0;
}

static bool same_scales(Tensor a, Tensor b) {
    const int64_t n = tensor_n_scales(a);
    return n == 0 || memcmp(a.scale, b.scale, (size_t)n * sizeof *a.scale) == 0;
}

/* What ops read, all of it; masters and moments as far as this rank has them. */
static void compare(const Params *many, const Params *one, const char *name) {
    for (int64_t i = 0; i < many->n_named; i++) {
        const NamedTensor *t = &many->named[i], *u = &one->named[i];
        const Weight *w = params_weight(many, t), *v = params_weight(one, u);
        const Interval held = params_held(many, t), all = {0, w->numel}, moments = w->updated;
        REQUIRE(strcmp(t->name, u->name) == 0 && t->numel == u->numel && v->updated.n == all.n, "%s", t->name);
        EXPECT(same(w->w, 0, v->w, 0, w->numel), "%s: %s as ops read it", name, t->name);
        EXPECT(same(w->wide, 0, v->wide, 0, tensor_numel(w->wide)), "%s: %s wide", name, t->name);
        EXPECT(same(w->wt, 0, v->wt, 0, tensor_numel(w->wt)), "%s: %s transposed", name, t->name);
        EXPECT(same_scales(w->w, v->w) && same_scales(w->wt, v->wt), "%s: scales of %s", name, t->name);
        EXPECT(same(many->master, params_master_at(many, t, held.first), one->master,
                    params_master_at(one, u, held.first), held.n),
               "%s: master of %s", name, t->name);
        EXPECT(same(many->m, w->moment_at, one->m, v->moment_at + moments.first, moments.n), "%s: m of %s", name,
               t->name);
        EXPECT(same(many->v, w->moment_at, one->v, v->moment_at + moments.first, moments.n), "%s: v of %s", name,
               t->name);
    }
}

static void check_case(const Case *k, const char *zero1, bool in_small_pieces) {
    Fixture many, one;
    open_with(&many, k->sets, zero1, 1);
    open_with(&one, k->sets, NULL, 0);
    Tensor *bucket = &many.model.params.bucket;
    if (in_small_pieces) *bucket = tensor_rows(*bucket, 0, (job_world() + 1) * 3 * ARENA_ALIGN / (int64_t)sizeof(real));
    for (int step = 0; step < STEPS; step++) {
        step_of_ranks(&many, step);
        step_of_one(&one, step);
        EXPECT(many.model.stats->grad_norm == one.model.stats->grad_norm, "%s: norm %.17g, not %.17g", k->name,
               many.model.stats->grad_norm, one.model.stats->grad_norm);
        EXPECT(many.model.stats->grad_norm > one.params.grad_clip, "%s: nothing is clipped", k->name);
        compare(&many.model.params, &one.model.params, k->name);
    }
    fixture_close(&many);
    fixture_close(&one);
    t_free_all();
}

TEST(zero1_is_one_rank_bit_for_bit) {
    for (int i = 0; i < N_CASES; i++) check_case(&cases[i], "parallel.zero1=true", false);
}

TEST(zero1_in_small_pieces_is_the_same) {
    check_case(&cases[0], "parallel.zero1=true", true);
    check_case(&cases[1], "parallel.zero1=true", true);
}

TEST(ranks_without_zero1_are_one_rank_bit_for_bit) {
    check_case(&cases[0], "parallel.zero1=false", false);
    check_case(&cases[1], "parallel.zero1=false", false);
}

/* ---- any layout -------------------------------------------------------------------------------------------------- */

static uint64_t hash_after(const char *const *sets, const char *zero1, int n_ep, bool is_placed, double *norm) {
    Fixture f;
    open_with(&f, sets, zero1, n_ep);
    if (is_placed) fixture_place_experts(&f);
    for (int step = 0; step < STEPS; step++) step_of_ranks(&f, step);
    const uint64_t hash = params_hash_of_job(&f.model.params, &f.device);
    *norm = f.model.stats->grad_norm;
    fixture_close(&f);
    t_free_all();
    return hash;
}

static void compare_hashes(const char *name, const char *const *sets, int n_ep, bool is_placed) {
    double with, without;
    const uint64_t hash = hash_after(sets, "parallel.zero1=true", n_ep, is_placed, &with);
    EXPECT(hash == hash_after(sets, "parallel.zero1=false", n_ep, is_placed, &without), "%s, ep %d", name, n_ep);
    EXPECT(with == without, "%s, ep %d: norm %.17g, not %.17g", name, n_ep, with, without);
}

TEST(zero1_changes_no_bit_whatever_the_layout) {
    for (int n_ep = 1; n_ep <= job_world(); n_ep++) {
        if (job_world() % n_ep || 8 % n_ep) continue;
        for (int i = 0; i < n_model_cases; i++) compare_hashes(model_cases[i].name, model_cases[i].sets, n_ep, false);
        for (int i = 0; i < N_CASES && n_ep > 1; i++)
            if (strncmp(cases[i].name, "fp8", 3) == 0) compare_hashes(cases[i].name, cases[i].sets, n_ep, false);
        if (n_ep > 1) compare_hashes("experts elsewhere", model_cases[0].sets, n_ep, true);
    }
}

/* The last rank's gradients are not finite: all ranks skip, and nothing changes. */
TEST(zero1_ranks_skip_together) {
    Fixture f;
    open_with(&f, cases[1].sets, "parallel.zero1=true", 1);
    step_of_ranks(&f, 0);
    const uint64_t before = params_hash_of_job(&f.model.params, &f.device);
    begin(&f, 1);
    micro_batch(&f, 1, job_rank());
    if (job_rank() == job_world() - 1) ((real *)f.model.params.top.weight[WEIGHT_FINAL_NORM].dw.data)[3] = (real)NAN;
    model_update(&f.model);
    EXPECT_EQ(f.model.stats->skip, SKIP_NORM_NOT_FINITE);
    EXPECT(params_hash_of_job(&f.model.params, &f.device) == before, "weights moved");
    fixture_close(&f);
    t_free_all();
}
