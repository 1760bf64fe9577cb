/* What the FP8 tensors of a block hold: all of them are counted, each in its own block, and nothing changes. */
#include "model/observe.h"

#include <math.h>
#include <string.h>

#include "model_test.h"

#define FP8_SETS FP8_WIDTHS, "model.q_lora_rank=128", "precision.compute=fp8", "log.fp8_every_steps=1"
static const char *const whole[] = {FP8_SETS, NULL};

static const TileStats *stats_of(const Fixture *f, int block, const char *name) {
    int found = -1;
    for (int i = 0; i < OBSERVED_COUNT; i++) {
        REQUIRE(observed_name(i), "tensor %d has no name", i);
        if (strcmp(observed_name(i), name) != 0) continue;
        EXPECT(found < 0, "%s twice", name);
        found = i;
    }
    REQUIRE(found >= 0, "no tensor %s", name);
    return &f->model.record.fp8[block * OBSERVED_COUNT + found];
}

/* The values of a tensor, as it has extents in this block: 0 for one that the block has not. */
static void expect_values(const Fixture *f, int block, const char *name, int64_t values) {
    const TileStats *s = stats_of(f, block, name);
    EXPECT(s->values == values, "block %d %s: %lld values, not %lld", block, name, (long long)s->values,
           (long long)values);
    EXPECT(s->nans == 0 && (values == 0) == (s->amax_bits == 0), "block %d %s: %lld NaN, amax %llx", block, name,
           (long long)s->nans, (unsigned long long)s->amax_bits);
}

static int64_t rows_in_use(const Fixture *f, int block) {
    const Tensor start = f->model.train.blocks[block].t[ACT_EXPERT_START];
    return start.data ? ((const int32_t *)start.data)[start.shape[0] - 1] : 0;
}

static void expect_block(const Fixture *f, int b) {
    const ModelShape *s = &f->model.shape;
    const Weight *w = f->model.params.blocks[b].weight;
    const bool is_moe = shape_block_is_moe(s, b);
    const int64_t mlp = is_moe ? s->F_shared : s->F_dense, N = rows_in_use(f, b), experts = is_moe ? s->n_local : 0;
    const int64_t qkv_a = s->kv_a_row + s->Dc + s->attention.rope;
    EXPECT(is_moe == (N > 0) && N % GROUP_ALIGN == 0, "block %d: %lld rows", b, (long long)N);
    const struct {
        const char *name;
        int64_t values;
    } rows[] = {{"xn", s->T * s->D},
                {"cq", s->T * s->Dq},
                {"ckv", s->T * s->Dc},
                {"o", s->T * s->v_width},
                {"u", s->T * s->D},
                {"xg", N * s->D},
                {"h", N * 2 * s->F},
                {"a", N * s->F},
                {"hs", s->T * 2 * mlp},
                {"as", s->T * mlp},
                {"dout", s->T * s->D},
                {"dyg", N * s->D},
                {"dh", N * 2 * s->F},
                {"dhs", s->T * 2 * mlp},
                {"dx1", s->T * s->D},
                {"dq", s->T * s->qk_width},
                {"dkv", s->T * s->kv_width},
                {"dqkv_a", s->T * qkv_a},
                {"w_qkv_a", tensor_numel(w[WEIGHT_QKV_A].w)},
                {"w_q_b", s->qk_width * s->Dq},
                {"w_kv_b", s->kv_width * s->Dc},
                {"w_o", s->D * s->v_width},
                {"w_gate_up", 2 * mlp * s->D},
                {"w_down", s->D * mlp},
                {"w_expert_gate_up", experts * 2 * s->F * s->D},
                {"w_expert_down", experts * s->D * s->F}};
    EXPECT_EQ(sizeof rows / sizeof *rows, OBSERVED_COUNT);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) expect_values(f, b, rows[i].name, rows[i].values);
}

/* Every tensor of every block, dense, with experts and MTP's, by its extents; the gradients' bits are those of a step
 * that nobody observes. */
TEST(observe_counts_all_and_changes_nothing) {
    Fixture f;
    fixture_open(&f, whole);
    fixture_gradients(&f);
    const Tensor plain = t_copy(f.model.params.grad);
    const size_t bytes = record_fp8_bytes(&f.model.shape);
    EXPECT_EQ(bytes, f.model.shape.n_blocks * OBSERVED_COUNT * sizeof(TileStats));
    memset(f.model.record.fp8, 0x55, bytes); /* what an earlier step left */
    f.model.observes = true;
    fixture_gradients(&f);
    EXPECT(t_same_bits(plain, f.model.params.grad), "other gradients");
    for (int b = 0; b < f.model.shape.n_blocks; b++) expect_block(&f, b);
    fixture_close(&f);
}

/* The largest master of each weight, exactly: its block's scale is that number / 448. */
TEST(observe_finds_the_largest_weight) {
    Fixture f;
    fixture_open(&f, whole);
    f.model.observes = true;
    fixture_gradients(&f);
    for (int b = 0; b < f.model.shape.n_blocks; b++) {
        const Weight *w = &f.model.params.blocks[b].weight[WEIGHT_O];
        const TileStats *s = stats_of(&f, b, "w_o");
        const uint32_t bits = (uint32_t)s->amax_bits;
        double want = 0;
        float amax;
        memcpy(&amax, &bits, sizeof amax);
        for (int64_t i = 0; i < w->numel; i++)
            want = fmax(want, fabs(t_get(tensor_rows(f.model.params.master, w->offset, w->numel), i)));
        EXPECT_NEAR((double)amax, want, 1e-6 * want);
    }
    fixture_close(&f);
}

/* One NaN in a weight of block 2: its record says so, and what comes before has none. */
TEST(observe_finds_nan_where_it_is) {
    Fixture f;
    fixture_open(&f, whole);
    const Weight *w = &f.model.params.blocks[2].weight[WEIGHT_DOWN];
    t_set(tensor_rows(f.model.params.master, w->offset, w->numel), 5, NAN);
    params_cast(&f.model.params, &f.device);
    f.model.observes = true;
    fixture_gradients(&f);
    EXPECT(stats_of(&f, 2, "w_down")->nans > 0 && stats_of(&f, 2, "as")->nans == 0);
    EXPECT(stats_of(&f, 2, "w_gate_up")->nans == 0 && stats_of(&f, 1, "w_down")->nans == 0);
    EXPECT(stats_of(&f, 3, "xn")->nans == f.model.shape.T * f.model.shape.D, "the next block reads NaN");
    fixture_close(&f);
}

/* What is taken back to BF16 is not there; without the row, or without FP8, nothing is, and no memory for it. */
TEST(observe_counts_what_the_precision_has) {
    Fixture f;
    fixture_open(&f,
                 (const char *const[]){FP8_SETS, "precision.fp8.dgrad=bf16", "precision.fp8.swiglu_input=bf16", NULL});
    f.model.observes = true;
    fixture_gradients(&f);
    EXPECT(stats_of(&f, 1, "xg")->values > 0 && stats_of(&f, 1, "w_o")->values > 0);
    EXPECT(stats_of(&f, 1, "dyg")->values == 0 && stats_of(&f, 1, "h")->values == 0);
    fixture_close(&f);
    const char *const others[][2] = {{"precision.compute=bf16", "log.fp8_every_steps=1"},
                                     {"precision.compute=fp8", "log.fp8_every_steps=0"}};
    for (int i = 0; i < 2; i++) {
        fixture_open(&f, (const char *const[]){FP8_WIDTHS, others[i][0], others[i][1], NULL});
        EXPECT(!f.model.record.fp8 && record_fp8_bytes(&f.model.shape) == 0);
        fixture_close(&f);
    }
}
