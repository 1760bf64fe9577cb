/* The model over ranks against the same model alone: every gradient, the losses, the counts and the router biases of a
 * step in which each rank has a micro-batch of its own. */
#include <math.h>
#include <string.h>

#include "kernels/base/file.h"
#include "tests/model/model_test.h"

/* Choices between equals fall either way by a last bit, so routing is compared first: seeds keep the gaps wide. */
#define TOLERANCE 2e-5

typedef enum { AS_IT_COMES, ALL_TO_RANK_0, NONE_TO_RANK_0 } Routing;

/* Pushes all tokens to, or away from, the first n experts. */
static void push(Model *m, int n, Routing routing) {
    for (int b = 0; b < m->shape.n_blocks && routing != AS_IT_COMES; b++) {
        Tensor bias = m->params.blocks[b].weight[WEIGHT_ROUTER_BIAS].w;
        for (int e = 0; e < n && bias.data; e++) t_set(bias, e, routing == ALL_TO_RANK_0 ? 10 : -10);
    }
}

static void begin(Fixture *f) {
    model_set_params(&f->model, &f->params);
    model_zero(&f->model);
}

static void micro_batch(Fixture *f, int64_t document_length, int seed) {
    fixture_batch(f, document_length, (uint64_t)seed);
    model_set_batch(&f->model, &f->model.shape, &f->batch);
    model_forward(&f->model, &f->model.train, FORWARD_TRAIN);
    model_backward(&f->model, &f->model.train);
}

static const NamedTensor *named(const Params *p, const char *name) {
    for (int64_t i = 0; i < p->n_named; i++)
        if (strcmp(p->named[i].name, name) == 0) return &p->named[i];
    return NULL;
}

/* max |a - b| over max |b|. */
static double distance(const real *a, const real *b, int64_t n) {
    double most = 1e-6, apart = 0;
    for (int64_t i = 0; i < n; i++) most = fmax(most, fabs(b[i]));
    for (int64_t i = 0; i < n; i++) apart = isfinite(a[i]) ? fmax(apart, fabs(a[i] - b[i])) : INFINITY;
    return apart / most;
}

/* Of what this rank has the sums of: its shards. */
static void compare_gradients(const Params *many, const Params *one, const char *name) {
    for (int64_t i = 0; i < many->n_named; i++) {
        const NamedTensor *t = &many->named[i], *other = named(one, t->name);
        const Interval owned = params_owned(many, t);
        REQUIRE(other && other->numel == t->numel && other->expert == t->expert, "%s is not in one rank's model",
                t->name);
        const double apart = distance((const real *)many->grad.data + t->offset + owned.first,
                                      (const real *)one->grad.data + other->offset + owned.first, owned.n);
        EXPECT(apart < TOLERANCE, "%s: gradient of %s is %.3g apart", name, t->name, apart);
    }
}

static void compare_step(Fixture *many, Fixture *one, const char *name) {
    const StepStats *a = many->model.stats, *b = one->model.stats;
    for (int k = 0; k <= many->model.shape.n_mtp; k++)
        EXPECT(fabs(a->loss_sum[k] - b->loss_sum[k]) < TOLERANCE * b->loss_sum[k], "%s: loss %d is %.9g, not %.9g",
               name, k, a->loss_sum[k], b->loss_sum[k]);
    EXPECT(fabs(a->balance_sum - b->balance_sum) <= TOLERANCE * b->balance_sum, "%s: balance", name);
    EXPECT(fabs(a->grad_norm - b->grad_norm) < TOLERANCE * b->grad_norm, "%s: norm %.9g, not %.9g", name, a->grad_norm,
           b->grad_norm);
    for (int block = 0; block < many->model.shape.n_blocks; block++) {
        const Block *x = &many->model.params.blocks[block], *y = &one->model.params.blocks[block];
        if (!x->counts.data) continue;
        EXPECT(t_same_bits(x->counts, y->counts), "%s: counts of block %d", name, block);
        EXPECT(t_same_bits(x->weight[WEIGHT_ROUTER_BIAS].w, y->weight[WEIGHT_ROUTER_BIAS].w), "%s: bias of block %d",
               name, block);
    }
}

/* As many updates as it takes to see that nothing of a step is left in the next. */
static void check_case(const ModelCase *k, int n_ep, Routing routing, bool is_placed) {
    enum { STEPS = 2 };
    const int world = job_world();
    Fixture many, one;
    fixture_open_ranks(&many, k->sets, n_ep);
    fixture_open(&one, k->sets);
    if (is_placed) fixture_place_experts(&many);
    EXPECT_EQ(many.model.shape.n_local * n_ep, one.model.shape.n_local);
    push(&many.model, one.model.shape.n_local / n_ep, routing);
    push(&one.model, one.model.shape.n_local / n_ep, routing);
    many.params.inv_tokens = one.params.inv_tokens = 1.0 / (double)(world * one.model.shape.T);
    many.params.lr = one.params.lr = 1e-4;
    for (int step = 0; step < STEPS; step++) {
        begin(&one);
        for (int r = 0; r < world; r++) micro_batch(&one, k->document_length, 1 + step * world + r);
        model_update(&one.model);
        begin(&many);
        micro_batch(&many, k->document_length, 1 + step * world + job_rank());
        model_update(&many.model);
        compare_step(&many, &one, k->name);
        compare_gradients(&many.model.params, &one.model.params, k->name);
    }
    /* An expert without a token has no gradient at all. */
    for (int64_t i = 0; i < one.model.params.n_named && routing == ALL_TO_RANK_0; i++) {
        const NamedTensor *t = &one.model.params.named[i];
        if (t->expert < one.model.shape.n_local / n_ep) continue;
        for (int64_t j = 0; j < t->numel; j++)
            EXPECT(((const real *)one.model.params.grad.data)[t->offset + j] == 0, "%s", t->name);
    }
    fixture_close(&many);
    fixture_close(&one);
    t_free_all();
}

TEST(ranks_have_the_gradients_of_one) {
    for (int n_ep = 1; n_ep <= job_world(); n_ep++) {
        if (job_world() % n_ep || 8 % n_ep) continue;
        for (int i = 0; i < n_model_cases; i++) check_case(&model_cases[i], n_ep, AS_IT_COMES, false);
    }
}

/* Also where ranks have other experts than those of their numbers, in each block otherwise. */
TEST(ranks_have_the_gradients_of_one_wherever_experts_lie) {
    for (int n_ep = 2; n_ep <= job_world(); n_ep++) {
        if (job_world() % n_ep || 8 % n_ep) continue;
        for (int i = 0; i < n_model_cases; i++)
            if (!strstr(model_cases[i].name, "dense")) check_case(&model_cases[i], n_ep, AS_IT_COMES, true);
    }
}

TEST(ranks_without_tokens_take_part) {
    for (int n_ep = 2; n_ep <= job_world() && n_ep <= 4; n_ep *= 2) { /* two experts a rank, as many as a token has */
        if (job_world() % n_ep) continue;
        check_case(&model_cases[0], n_ep, ALL_TO_RANK_0, false);
        check_case(&model_cases[1], n_ep, NONE_TO_RANK_0, false);
    }
}

/* What all ranks hold alike is equal to the last bit, and the job's hash is that of no rank alone. */
TEST(ranks_agree_on_their_weights) {
    for (int n_ep = 1; n_ep <= job_world(); n_ep *= 2) {
        if (job_world() % n_ep) continue;
        Fixture f, one;
        uint64_t all[16];
        fixture_open_ranks(&f, model_cases[0].sets, n_ep);
        fixture_open(&one, model_cases[0].sets);
        EXPECT(params_hash_of_job(&f.model.params, &f.device) == params_hash(&one.model.params, &one.device),
               "at the start, the hash of one rank");
        for (int step = 0; step < 3; step++) {
            begin(&f);
            micro_batch(&f, 0, 1 + step * job_world() + job_rank());
            model_update(&f.model);
        }
        const size_t shared = (size_t)f.model.params.experts * sizeof(real);
        const uint64_t own = hash_bytes(f.model.params.master.data, shared, 0);
        job_gather(all, &own, sizeof own);
        for (int r = 0; r < job_world(); r++) EXPECT(all[r] == all[0], "rank %d, ep %d", r, n_ep);
        fixture_close(&f);
        fixture_close(&one);
        t_free_all();
    }
}

/* ---- FP8 --------------------------------------------------------------------------------------------------------- */

/* Two tiles a row. */
#define FP8_WIDE FP8_WIDTHS, "model.hidden_size=256", "train.init_std=0.1", "precision.compute=fp8"

enum { SETS_MAX = 20 };

/* What a rank's own micro-batch gives: all but the experts. */
static void expect_same_gradients(const Params *many, const Params *one, const char *name) {
    for (int64_t i = 0; i < many->n_named; i++) {
        const NamedTensor *t = &many->named[i], *other = named(one, t->name);
        if (t->expert >= 0) continue;
        EXPECT(memcmp((const real *)many->grad.data + t->offset, (const real *)one->grad.data + other->offset,
                      (size_t)t->numel * sizeof(real)) == 0,
               "%s: gradient of %s", name, t->name);
    }
}

/* Of the experts here, from the tokens of all ranks. */
static void compare_experts(const Params *many, const Params *one, const char *name) {
    for (int64_t i = 0; i < many->n_named; i++) {
        const NamedTensor *t = &many->named[i], *other = named(one, t->name);
        if (t->expert < 0) continue;
        const double cosine = fixture_cosine(tensor_rows(many->grad, t->offset, t->numel),
                                             tensor_rows(one->grad, other->offset, other->numel));
        EXPECT(cosine > 1 - 1e-9, "%s: gradient of %s has cosine %.12g", name, t->name, cosine);
    }
}

/* Two experts a group and two a token, of one group: then its rows lie on one rank, and the planes of the others are
 * zeros. Tiles are made before they travel, so whatever a token computes is, to the last bit, what one rank computes.
 * An expert's gradient sums in another order, over tiles in which tokens of all ranks meet; as scales are powers of
 * two, that changes only what E4M3 has subnormal. */
TEST(fp8_tokens_on_other_ranks_compute_the_bits_of_one) {
    static const struct {
        const char *name;
        const char *sets[SETS_MAX];
        bool is_placed;
    } cases[] = {
        {"fp8", {FP8_WIDE, "model.topk_group=1"}, false},
        {"fp8, experts elsewhere", {FP8_WIDE, "model.topk_group=1"}, true},
        {"fp8, Dgrad in bf16", {FP8_WIDE, "model.topk_group=1", "precision.fp8.dgrad=bf16"}, false},
        {"fp8, Fprop in bf16", {FP8_WIDE, "model.topk_group=1", "precision.fp8.fprop=bf16"}, false},
        {"fp8, recomputed",
         {FP8_WIDE, "model.topk_group=1", "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]"},
         false},
    };
    const int world = job_world();
    for (size_t i = 0; i < sizeof cases / sizeof *cases && 8 % (2 * world) == 0; i++) {
        const char *name = cases[i].name;
        Fixture many, one;
        fixture_open_ranks(&many, cases[i].sets, world);
        fixture_open(&one, cases[i].sets);
        if (cases[i].is_placed) fixture_place_experts(&many);
        begin(&many);
        begin(&one);
        micro_batch(&many, 0, 1 + job_rank());
        micro_batch(&one, 0, 1 + job_rank());
        for (int k = 0; k <= many.model.shape.n_mtp; k++)
            EXPECT(many.model.stats->loss_sum[k] == one.model.stats->loss_sum[k], "%s: loss %d is %.17g, not %.17g",
                   name, k, many.model.stats->loss_sum[k], one.model.stats->loss_sum[k]);
        expect_same_gradients(&many.model.params, &one.model.params, name);
        begin(&one);
        for (int r = 0; r < world; r++) micro_batch(&one, 0, 1 + r);
        compare_experts(&many.model.params, &one.model.params, name);
        fixture_close(&many);
        fixture_close(&one);
        t_free_all();
    }
}

/* A token's experts on two ranks: each rank's sum is rounded to BF16 before the sums are added, once more than on one
 * rank, and what is near the middle of two E4M3 numbers then falls the other way. The bound is that of FP8 against BF16
 * (model/test_fp8.c). */
TEST(fp8_ranks_have_the_loss_of_one) {
    static const char *const sets[] = {FP8_WIDTHS, "precision.compute=fp8", "model.n_group=1", "model.topk_group=1",
                                       NULL};
    for (int n_ep = 2; n_ep <= job_world(); n_ep++) {
        if (job_world() % n_ep || 8 % n_ep) continue;
        Fixture many, one;
        fixture_open_ranks(&many, sets, n_ep);
        fixture_open(&one, sets);
        fixture_fix_routing(&many);
        fixture_fix_routing(&one);
        begin(&many);
        begin(&one);
        micro_batch(&many, 0, 1 + job_rank());
        micro_batch(&one, 0, 1 + job_rank());
        const double a = many.model.stats->loss_sum[0], b = one.model.stats->loss_sum[0];
        EXPECT(fabs(a - b) < 2e-3 * b, "ep %d: loss %.9g, not %.9g", n_ep, a, b);
        EXPECT(a != b, "ep %d: no token has experts on two ranks", n_ep);
        fixture_close(&many);
        fixture_close(&one);
        t_free_all();
    }
}

/* This rank's gradients of a micro-batch; whether expert rows are kept instead of received tokens; whether they fit. */
static Tensor gradients_with_rows(const char *const *sets, bool *keeps_rows, bool *fits) {
    Fixture f;
    fixture_open_ranks(&f, sets, job_world());
    begin(&f);
    micro_batch(&f, 0, 50 + job_rank());
    const Tensor grad = t_copy(f.model.params.grad);
    *keeps_rows = (f.model.shape.recompute & RECOMPUTE_RECEIVED) != 0;
    *fits = f.model.stats->overflow == 0;
    fixture_close(&f);
    return grad;
}

/* Where expert rows are fewer than the tokens received, they are kept and the tokens are not: the same bits. Padding
 * rows of two experts and 3.5 times the average of one choice are fewer than the tokens of four ranks. */
TEST(few_expert_rows_are_kept_instead_of_tokens) {
    static const char *const precisions[] = {"precision.compute=fp32", "precision.compute=bf16",
                                             "precision.compute=fp8"};
    if (job_world() != 4) return;
    for (size_t i = 0; i < sizeof precisions / sizeof *precisions; i++) {
        const char *sets[] = {FP8_WIDTHS,
                              "model.num_experts_per_tok=1",
                              "model.norm_topk_prob=false",
                              "model.n_group=1",
                              "model.topk_group=1",
                              "train.micro_batch_size=16",
                              "train.global_batch_size=64",
                              precisions[i],
                              "moe.capacity=\"worst\"",
                              NULL};
        bool keeps_rows, fits;
        const Tensor all = gradients_with_rows(sets, &keeps_rows, &fits);
        EXPECT(!keeps_rows && fits, "%s: rows for the worst case are not few", precisions[i]);
        sets[sizeof sets / sizeof *sets - 2] = "moe.capacity=3.5";
        const Tensor few = gradients_with_rows(sets, &keeps_rows, &fits);
        EXPECT(keeps_rows && fits, "%s: kept %d, fits %d", precisions[i], keeps_rows, fits);
        EXPECT(t_same_bits(all, few), "%s: other gradients", precisions[i]);
    }
}
