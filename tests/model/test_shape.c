/* Numbers derived from a configuration: YaRN's golden values, the memory of a plan. */
#include <math.h>
#include <string.h>

#include "model_test.h"

/* V3: corr 10.47 and 22.51, so frequencies up to 10 are kept and those from 23 on divided by 40 (spec 2.2). */
TEST(shape_yarn_of_v3) {
    RopeConfig rope = {true, 10000, 40, 32, 1, 1, 1, false, 0, 4096};
    double f[32], plain[32];
    shape_inv_freq(f, &rope, 64);
    rope.yarn = false;
    shape_inv_freq(plain, &rope, 64);
    for (int i = 0; i < 32; i++) {
        EXPECT_NEAR(plain[i], pow(10000, -2.0 * i / 64), 1e-15);
        if (i <= 10) EXPECT_NEAR(f[i], plain[i], 1e-15);
        if (i >= 23) EXPECT_NEAR(f[i], plain[i] / 40, 1e-15);
        if (i > 10 && i < 23) {
            double ramp = (i - 10) / 13.0;
            EXPECT_NEAR(f[i], plain[i] / 40 * ramp + plain[i] * (1 - ramp), 1e-15);
        }
    }
}

static ModelShape shape_of(const char *path) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    REQUIRE(config_load(&c, path, NULL, 0, err, hint) == 0, "%s", err);
    Mesh mesh = mesh_make(0, 1, 1, 1);
    c.train.micro_batch_size = 1;
    c.train.seq_len = 64;
    return shape_make(&c, &mesh, 0);
}

TEST(shape_softmax_scale) {
    char err[ERR_LEN], hint[ERR_LEN];
    const char *const sets[] = {
        "model.rope_scaling={\"type\":\"yarn\",\"factor\":40.0,\"beta_fast\":32.0,\"beta_slow\":1.0,"
        "\"mscale\":1.0,\"mscale_all_dim\":1.0,\"original_max_position_embeddings\":4096}",
        "model.max_position_embeddings=163840"};
    Config c;
    REQUIRE(config_load(&c, "configs/deepseek_v3.json", sets, 2, err, hint) == 0, "%s", err);
    Mesh mesh = mesh_make(0, 1, 1, 1);
    ModelShape s = shape_make(&c, &mesh, 0);
    EXPECT_NEAR(s.attention.scale, 0.1352338, 1e-6);
    EXPECT_NEAR(s.attention.rope_mscale, 1, 1e-12);
    EXPECT_NEAR(shape_of("configs/moonlight_16b.json").attention.scale, 0.0721688, 1e-6);
}

/* Parts of fused weights start at rows that FP8's blocks allow, where FP8 is asked for. */
TEST(shape_fp8_aligns_fused_parts) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    REQUIRE(config_load(&c, "configs/deepseek_v3.json", NULL, 0, err, hint) == 0, "%s", err);
    c.precision.compute = COMPUTE_FP8;
    Mesh mesh = mesh_make(0, 1, 1, 1);
    ModelShape s = shape_make(&c, &mesh, 0);
    EXPECT_EQ(s.row_align, 128);
    EXPECT_EQ(s.kv_a_row, 1536);
    EXPECT_EQ(s.V_padded % 128, 0);
}

/* The plan counts what the run allocates, to the byte: the layout function run twice. */
TEST(shape_plan_equals_allocation) {
    for (int i = 0; i < n_model_cases; i++) {
        Fixture f;
        fixture_open(&f, model_cases[i].sets);
        Model plan;
        memset(&plan, 0, sizeof plan);
        model_plan(&plan, &f.config, &f.device, f.comm);
        EXPECT_EQ(plan.keep.peak, f.model.keep.size);
        EXPECT_EQ(plan.slots.peak, f.model.slots.size);
        EXPECT_EQ(plan.scratch.peak, f.model.scratch.size);
        EXPECT_EQ(f.model.keep.used, f.model.keep.size);
        EXPECT(plan.keep.base == NULL && plan.slots.base == NULL, "a plan allocates nothing");
        params_free(&plan.params);
        acts_free(&plan.train);
        acts_free(&plan.eval);
        acts_free(&plan.generate);
        acts_free(&plan.decode);
        fixture_close(&f);
    }
}

/* Recomputing moves rows out of the slots. */
TEST(shape_recompute_saves_memory) {
    static const char *const choices[] = {"memory.recompute=none", "memory.recompute=[\"norms\"]",
                                          "memory.recompute=[\"norms\",\"up_projections\"]",
                                          "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]"};
    size_t before = SIZE_MAX;
    for (int i = 0; i < 4; i++) {
        Fixture f;
        fixture_open(&f, (const char *const[]){choices[i], NULL});
        EXPECT(f.model.slots.size < before, "%s: %zu bytes, before %zu", choices[i], f.model.slots.size, before);
        before = f.model.slots.size;
        fixture_close(&f);
    }
}

/* Rows of a rank: its share of all, times the capacity, and padding; never more than the worst case. Generation keeps
 * the worst. */
TEST(shape_capacity_of_expert_rows) {
    static const struct {
        const char *capacity;
        int64_t rows; /* T = 32, K = 2, El = 2 of 4 ranks */
    } cases[] = {{"moe.capacity=1", 64},
                 {"moe.capacity=1.6", 103},
                 {"moe.capacity=4", 256},
                 {"moe.capacity=9", 256},
                 {"moe.capacity=worst", 256}};
    for (int i = 0; i < 5; i++) {
        Fixture f;
        fixture_open(&f, (const char *const[]){cases[i].capacity, NULL});
        const Mesh alone = f.comm->mesh, ranks = mesh_make(0, 4, 1, 4);
        const ModelShape s = shape_make(&f.config, &ranks, 0), one = shape_make(&f.config, &alone, 0);
        EXPECT_EQ(s.N, cases[i].rows + 127 * 2);
        EXPECT_EQ(one.N, 32 * 2 + 127 * 8);
        EXPECT_EQ(f.model.generate.shape.N, f.model.generate.shape.T * 2 + 127 * 8);
        fixture_close(&f);
    }
}

/* Activations laid out again: larger, of their own size, and the same forward. */
TEST(shape_capacity_grows_the_activations) {
    Fixture f;
    char err[ERR_LEN], hint[ERR_LEN];
    fixture_open(&f, (const char *const[]){"moe.capacity=1", NULL});
    model_set_params(&f.model, &f.params);
    model_set_batch(&f.model, &f.model.shape, &f.batch);
    model_zero(&f.model);
    model_forward(&f.model, &f.model.train, FORWARD_TRAIN);
    const double loss = f.model.stats->loss_sum[0];
    const void *weights = f.model.keep.base;
    REQUIRE(model_set_capacity(&f.model, 2, err, hint) == 0, "%s", err);
    EXPECT(f.model.shape.capacity == 2 && f.model.keep.base == weights, "capacity %g", f.model.shape.capacity);
    EXPECT(f.model.slots.size == f.model.slots.peak && f.model.scratch.size == f.model.scratch.peak, "arenas");
    model_zero(&f.model);
    model_forward(&f.model, &f.model.train, FORWARD_TRAIN);
    EXPECT(f.model.stats->loss_sum[0] == loss && loss > 0, "loss %.17g, not %.17g", f.model.stats->loss_sum[0], loss);
    f.device.memory.total = f.device.memory.free = 1 << 20; /* a device on which nothing more fits */
    const void *slots = f.model.slots.base;
    EXPECT(model_set_capacity(&f.model, 4, err, hint) == -1 && strstr(err, "memory plan") && hint[0], "%s", err);
    EXPECT(f.model.slots.base == slots && f.model.shape.capacity == 2, "a refusal changed the model");
    fixture_close(&f);
}
