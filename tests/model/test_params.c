/* The parameter table: counts of published models, layout, init, hash, what a checkpoint sees. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model_test.h"

/* A published model's counts come from its configuration alone; nothing is allocated but the lists. */
static ParamCount count_of(const char *path) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    Params p;
    REQUIRE(config_load(&c, path, NULL, 0, err, hint) == 0, "%s", err);
    Mesh mesh = mesh_make(0, 1, 1, 1);
    c.train.micro_batch_size = 1;
    c.train.seq_len = 64;
    ModelShape shape = shape_make(&c, &mesh, 0);
    params_make(&p, &shape);
    ParamCount count = params_count(&p);
    params_free(&p);
    return count;
}

TEST(params_golden_counts) {
    ParamCount v3 = count_of("configs/deepseek_v3.json");
    EXPECT_NEAR((double)v3.total / 1e9, 671.026, 0.001);
    EXPECT_NEAR((double)v3.mtp / 1e9, 11.61, 0.01);
    EXPECT_NEAR((double)v3.active / 1e9, 36.63, 0.01);
    EXPECT_EQ(count_of("configs/moonlight_16b.json").total, 15960108544);
    EXPECT_NEAR((double)count_of("configs/moonlight_16b.json").active / 1e9, 2.58, 0.005);
    EXPECT_NEAR((double)count_of("configs/v2_lite.json").total / 1e9, 15.706, 0.001);
}

/* FLOPs of a token at V3's training length: 6 per weight of a GEMM and the causal core, by hand (spec 9.2). */
TEST(params_golden_flops) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    const char *const sets[] = {"train.seq_len=4096"};
    REQUIRE(config_load(&c, "configs/deepseek_v3.json", sets, 1, err, hint) == 0, "%s", err);
    Mesh mesh = mesh_make(0, 1, 1, 1);
    c.train.micro_batch_size = 1;
    ModelShape with = shape_make(&c, &mesh, 0);
    EXPECT_NEAR(shape_flops_per_token(&with) / 1e9, 260.7, 0.2);
    c.model.num_nextn_predict_layers = 0;
    ModelShape without = shape_make(&c, &mesh, 0);
    EXPECT_NEAR(shape_flops_per_token(&without) / 1e9, 250.5, 0.2);
}

/* What is counted is what a token passes: not experts it does not choose, not positions that the model could have but
 * the training sequence has not. */
TEST(params_flops_count_what_runs) {
    Config c;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(config_load(&c, "configs/moonlight_16b.json", NULL, 0, err, hint) == 0, "%s", err);
    Mesh mesh = mesh_make(0, 1, 1, 1);
    ModelShape s = shape_make(&c, &mesh, 0);
    const double flops = shape_flops_per_token(&s);
    EXPECT_NEAR(flops / 1e9, 17.17, 0.01);
    c.model.max_position_embeddings *= 4;
    c.model.n_routed_experts *= 2;
    s = shape_make(&c, &mesh, 0);
    const double router = 6.0 * 2048 * 64 * 26; /* its 64 new rows in 26 layers */
    EXPECT_NEAR(shape_flops_per_token(&s), flops + router, 1);
    c.train.seq_len /= 2;
    s = shape_make(&c, &mesh, 0);
    EXPECT(shape_flops_per_token(&s) < flops, "shorter sequences, fewer pairs");
}

/* K7, K8: configs/tiny.json, every product by hand. Of 16 experts a token passes 4 and the shared one. */
TEST(params_flops_of_tiny_by_hand) {
    const double attention = 4 * 48 * 128 + (64 + 16) * 128 + 4 * (32 + 32) * 64 + 128 * 4 * 32;
    const double core = 3 * 2 * 4 * (48 + 32) * 128.5; /* three times over, 4 heads, 128.5 pairs a query on average */
    const double dense = 6 * (attention + 3 * 128 * 384) + core;
    const double moe = 6 * (attention + 128 * 16 + (4 + 1) * 3 * 128 * 64) + core;
    const double head = 6 * 128 * 1025, mtp = moe + head + 6 * 256 * 128;
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    REQUIRE(config_load(&c, "configs/tiny.json", NULL, 0, err, hint) == 0, "%s", err);
    Mesh mesh = mesh_make(0, 1, 1, 1);
    const ModelShape with = shape_make(&c, &mesh, 0);
    EXPECT_NEAR(shape_flops_per_token(&with), dense + 3 * moe + head + mtp, 0.5);
    c.model.num_nextn_predict_layers = 0;
    const ModelShape without = shape_make(&c, &mesh, 0);
    EXPECT_NEAR(shape_flops_per_token(&with) - shape_flops_per_token(&without), mtp, 0.5);
}

TEST(params_named_tensors_do_not_overlap) {
    for (int i = 0; i < n_model_cases; i++) {
        Fixture f;
        fixture_open(&f, model_cases[i].sets);
        const Params *p = &f.model.params;
        char *used = (char *)calloc((size_t)p->numel, 1);
        for (int64_t k = 0; k < p->n_named; k++) {
            REQUIRE(p->named[k].offset >= 0 && p->named[k].offset + p->named[k].numel <= p->numel, "%s",
                    p->named[k].name);
            for (int64_t e = 0; e < p->named[k].numel; e++) {
                EXPECT(!used[p->named[k].offset + e], "%s overlaps at %lld", p->named[k].name, (long long)e);
                used[p->named[k].offset + e] = 1;
            }
            for (int64_t j = 0; j < k; j++)
                EXPECT(p->named[j].id != p->named[k].id && strcmp(p->named[j].name, p->named[k].name) != 0, "%s twice",
                       p->named[k].name);
        }
        /* What no name covers is padding, and stays zero through an update. */
        fixture_gradients(&f);
        model_update(&f.model);
        for (int64_t e = 0; e < p->numel; e++)
            if (!used[e]) EXPECT(((const real *)p->master.data)[e] == 0, "padding element %lld", (long long)e);
        free(used);
        fixture_close(&f);
    }
}

TEST(params_init_is_normal_and_the_same_for_any_neighbour) {
    Fixture f, other;
    fixture_open(&f, NULL);
    fixture_open(&other, (const char *const[]){"model.num_nextn_predict_layers=0", "model.num_hidden_layers=2", NULL});
    params_init(&f.model.params, &f.device, 7, 0.02);
    params_init(&other.model.params, &other.device, 7, 0.02);
    double sum = 0, squares = 0;
    int64_t n = 0, equal = 0;
    for (int64_t i = 0; i < f.model.params.n_named; i++) {
        const NamedTensor *t = &f.model.params.named[i];
        const real *x = (const real *)f.model.params.master.data + t->offset;
        for (int64_t e = 0; e < t->numel; e++) {
            if (t->init == INIT_ONE) EXPECT(x[e] == 1, "%s", t->name);
            if (t->init == INIT_NORMAL) sum += x[e], squares += x[e] * x[e], n++;
        }
        for (int64_t k = 0; k < other.model.params.n_named; k++) {
            const NamedTensor *u = &other.model.params.named[k];
            if (strcmp(t->name, u->name) != 0) continue;
            equal++;
            EXPECT(memcmp(x, (const real *)other.model.params.master.data + u->offset, (size_t)t->numel * sizeof *x) ==
                       0,
                   "%s depends on other tensors", t->name);
        }
    }
    EXPECT_EQ(equal, other.model.params.n_named);
    EXPECT_NEAR(sum / (double)n, 0, 4 * 0.02 / sqrt((double)n));
    EXPECT_NEAR(sqrt(squares / (double)n), 0.02, 0.02 * 4 / sqrt(2 * (double)n));
    fixture_close(&f);
    fixture_close(&other);
}

TEST(params_hash_sees_every_element) {
    Fixture f;
    fixture_open(&f, NULL);
    const Params *p = &f.model.params;
    const uint64_t before = params_hash(p, &f.device);
    EXPECT(before == params_hash(p, &f.device));
    for (int64_t i = 0; i < p->n_named; i += 7) {
        real *x = (real *)p->master.data + p->named[i].offset + p->named[i].numel - 1;
        real kept = *x;
        *x = nextafterf((float)kept, 10);
        EXPECT(params_hash(p, &f.device) != before, "%s", p->named[i].name);
        *x = kept;
    }
    real *x = (real *)p->master.data + p->named[0].offset;
    real swap = x[0];
    x[0] = x[1], x[1] = swap;
    EXPECT(params_hash(p, &f.device) != before, "two swapped elements");
    fixture_close(&f);
}

TEST(params_state_lists_everything_once) {
    Fixture f;
    fixture_open(&f, NULL);
    int64_t n, moments = 0, biases = 0;
    StateTensor *list = params_state(&f.model.params, &n);
    for (int64_t i = 0; i < n; i++) {
        if (strncmp(list[i].name, "adam.", 5) == 0) moments++;
        if (strstr(list[i].name, "e_score_correction_bias")) biases++;
        EXPECT_EQ(list[i].offset, 0);
        EXPECT_EQ(list[i].extent, list[i].shape[0] * (list[i].ndim == 2 ? list[i].shape[1] : 1));
        for (int64_t k = 0; k < i; k++) EXPECT(strcmp(list[i].name, list[k].name) != 0, "%s twice", list[i].name);
    }
    EXPECT_EQ(biases, shape_n_moe(&f.model.shape));
    EXPECT_EQ(moments, 2 * (f.model.params.n_named - biases));
    free(list);
    fixture_close(&f);
}

/* A placement that differs from block to block. */
static void place(Params *p) {
    const int E = p->shape.router.n_experts, n = shape_n_moe(&p->shape) * E;
    int32_t *expert_of_slot = (int32_t *)calloc((size_t)n, sizeof *expert_of_slot);
    for (int i = 0; i < n; i++) expert_of_slot[i] = E - 1 - (i + i / E) % E;
    params_place(p, expert_of_slot);
    free(expert_of_slot);
}

static void check_ranks(bool is_placed) {
    enum { N_EP = 4, N_DP = 2 };
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    REQUIRE(config_load(&c, "configs/bytes_debug.json", NULL, 0, err, hint) == 0, "%s", err);
    Params one, part[N_EP * N_DP];
    Mesh mesh[N_EP * N_DP], alone = mesh_make(0, 1, 1, 1);
    ModelShape shape = shape_make(&c, &alone, 0);
    params_make(&one, &shape);
    for (int r = 0; r < N_EP * N_DP; r++) {
        mesh[r] = mesh_make(r, N_EP * N_DP, 1, N_EP);
        shape = shape_make(&c, &mesh[r], 0);
        EXPECT_EQ(shape.first_slot, r % N_EP * shape.n_local);
        params_make(&part[r], &shape);
        if (is_placed) place(&part[r]);
        EXPECT_EQ(params_count(&part[r]).total, params_count(&one).total);
    }
    for (int64_t i = 0; i < one.n_named; i++) {
        const NamedTensor *t = &one.named[i];
        int n_holders = 0;
        int64_t n_owned = 0;
        uint64_t sum_owned = 0; /* of the elements' numbers */
        for (int r = 0; r < N_EP * N_DP; r++)
            for (int64_t j = 0; j < part[r].n_named; j++) {
                const NamedTensor *other = &part[r].named[j];
                if (strcmp(t->name, other->name) != 0) continue;
                const Interval owned = params_owned(&part[r], other);
                n_holders++;
                n_owned += owned.n;
                for (int64_t e = owned.first; e < owned.first + owned.n; e++) sum_owned += (uint64_t)e;
                EXPECT(t->id == other->id && t->numel == other->numel && t->expert == other->expert, "%s", t->name);
                EXPECT((other->offset >= part[r].experts) == (other->expert >= 0), "%s lies among others", t->name);
            }
        EXPECT_EQ(n_holders, t->expert >= 0 ? N_DP : N_DP * N_EP);
        EXPECT_EQ(n_owned, t->numel);
        EXPECT(sum_owned == (uint64_t)t->numel * (uint64_t)(t->numel - 1) / 2, "%s: some twice, some never", t->name);
    }
    for (int r = 0; r < N_EP * N_DP; r++) params_free(&part[r]);
    params_free(&one);
}

/* The experts of all ranks together are those of one; what they share has one owner, element by element; the flat
 * arenas have experts last. */
TEST(params_of_ranks_are_those_of_one) {
    check_ranks(false);
}

TEST(params_of_ranks_are_those_of_one_wherever_experts_lie) {
    check_ranks(true);
}

/* Local experts are those of the rank's slots, the slots of all ranks lead to all experts, and what the device reads
 * leads back. */
TEST(params_place_goes_both_ways) {
    enum { N_EP = 4 };
    static const char *const sets[] = {"model.topk_group=1", NULL};
    Fixture f;
    fixture_open(&f, sets);
    const ModelShape *s = &f.model.shape;
    const int E = s->router.n_experts;
    fixture_place_experts(&f);
    const Params *one = &f.model.params;
    int n_moved = 0;
    for (int r = 0; r < N_EP; r++) {
        const Mesh mesh = mesh_make(r, N_EP, 1, N_EP);
        const ModelShape shape = shape_make(&f.config, &mesh, 0);
        Params p;
        params_make(&p, &shape);
        params_place(&p, one->expert_of_slot);
        for (int64_t i = 0; i < p.n_named; i++) {
            const NamedTensor *t = &p.named[i];
            if (t->expert < 0) continue;
            const Weight *w = params_weight(&p, t);
            const int64_t local = params_begin(&p, t) / (w->dw.shape[1] * w->dw.shape[2]);
            const Tensor slots = one->blocks[t->block].slot_of_expert;
            EXPECT(t_get(slots, t->expert) == (double)(shape.first_slot + local), "%s in slot %lld of rank %d", t->name,
                   (long long)local, r);
            n_moved += t->expert != shape.first_slot + local;
        }
        params_free(&p);
    }
    EXPECT_EQ(n_moved, 3 * E * shape_n_moe(s));
    fixture_close(&f);
}

static int64_t state_bytes(const Config *c, const Mesh *mesh, int64_t *master, int64_t *moments, int64_t *bucket) {
    Params p;
    Arena keep = arena_make("state", NULL, 0);
    const ModelShape shape = shape_make(c, mesh, 0);
    params_make(&p, &shape);
    params_layout(&p, &keep);
    *master = (int64_t)tensor_bytes(p.master), *moments = (int64_t)(tensor_bytes(p.m) + tensor_bytes(p.v));
    *bucket = (int64_t)tensor_bytes(p.bucket);
    params_free(&p);
    return (int64_t)keep.peak;
}

/* Four ranks with ZeRO-1 hold a quarter of the moments each and, where ops read BF16, of the masters; without it, all.
 */
TEST(params_state_shrinks_with_the_ranks) {
    static const char *const precisions[] = {"precision.compute=\"bf16\"", "precision.compute=\"fp32\""};
    for (int bf16 = 1; bf16 >= 0; bf16--) {
        char err[ERR_LEN], hint[ERR_LEN];
        int64_t master[2], moments[2], bucket[2], none[3], total[3];
        Config c;
        const char *sets[] = {precisions[1 - bf16]};
        REQUIRE(config_load(&c, "configs/moe_150m.json", sets, 1, err, hint) == 0, "%s", err);
        const Mesh one = mesh_make(0, 1, 1, 1), four = mesh_make(3, 4, 1, 1);
        total[0] = state_bytes(&c, &one, &master[0], &moments[0], &bucket[0]);
        total[1] = state_bytes(&c, &four, &master[1], &moments[1], &bucket[1]);
        c.parallel.zero1 = false;
        total[2] = state_bytes(&c, &four, &none[0], &none[1], &none[2]);
        const double slack = 0.01 * (double)moments[0];
        EXPECT_NEAR((double)moments[1], (double)moments[0] / 4, slack);
        EXPECT_NEAR((double)master[1], (double)master[0] / (bf16 ? 4 : 1), slack);
        EXPECT(bucket[0] == 0 && bucket[1] > 0 && bucket[1] <= 64 << 20 && none[2] == 0, "buckets of %lld, %lld, %lld",
               (long long)bucket[0], (long long)bucket[1], (long long)none[2]);
        EXPECT(master[0] == none[0] && moments[0] == none[1] && total[0] == total[2], "without ZeRO-1 as alone");
        EXPECT(total[1] < total[0] - moments[0] / 2, "%lld of %lld bytes", (long long)total[1], (long long)total[0]);
    }
}
