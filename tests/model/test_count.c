/* Parameters and FLOPs by part: sums, hand-made vectors, and what must not change them. */
#include <string.h>

#include "model/count.h"
#include "model_test.h"

static const char *const ladder[] = {"bytes_debug",   "tiny",    "tiny_fp8",   "moe_150m",
                                     "moe_1b",        "moe_3b",  "v3_slice",   "moonlight_half",
                                     "moonlight_16b", "v2_lite", "deepseek_v3"};
enum { N_LADDER = sizeof ladder / sizeof *ladder };

static ModelCount count_with(const char *name, const char *const *sets, int n_sets, ParamCount *plain, double *flops) {
    char err[ERR_LEN], hint[ERR_LEN], path[64];
    Config c;
    Params p;
    snprintf(path, sizeof path, "configs/%s.json", name);
    REQUIRE(config_load(&c, path, sets, n_sets, err, hint) == 0, "%s", err);
    const Mesh mesh = mesh_make(0, 1, 1, 1);
    const ModelShape shape = shape_make(&c, &mesh, 0);
    params_make(&p, &shape);
    const ModelCount count = count_model(&p);
    if (plain) *plain = params_count(&p);
    if (flops) *flops = shape_flops_per_token(&shape);
    params_free(&p);
    return count;
}

static double total_flops(const ModelCount *c) {
    return c->main_total.flops + c->mtp_total.flops;
}

/* Two ways to the same numbers: the walk over the table, and the formulas of params_count and shape.c. */
TEST(count_parts_add_up) {
    for (int i = 0; i < N_LADDER; i++) {
        ParamCount plain;
        double flops;
        const ModelCount c = count_with(ladder[i], NULL, 0, &plain, &flops);
        int64_t sum = 0;
        for (int part = 0; part < PART_COUNT; part++) sum += c.main[part].params;
        EXPECT(sum == c.main_total.params, "%s", ladder[i]);
        EXPECT_EQ(c.main_total.params, plain.total);
        EXPECT_EQ(c.mtp_total.params, plain.mtp);
        EXPECT_EQ(c.active_with_head, plain.active);
        EXPECT_NEAR(total_flops(&c) / flops, 1, 1e-12);
    }
}

/* Published: V3 671B with 37B active and an MTP module of 11.5B; V2-Lite 15.7B; Moonlight's index counts its elements.
 */
TEST(count_golden) {
    const ModelCount v3 = count_with("deepseek_v3", NULL, 0, NULL, NULL);
    EXPECT_NEAR((double)v3.main_total.params / 1e9, 671.026, 0.0005);
    EXPECT_NEAR((double)v3.mtp_total.params / 1e9, 11.61, 0.005);
    EXPECT_NEAR((double)v3.active_with_head / 1e9, 36.63, 0.005);
    EXPECT_NEAR((double)v3.main_total.active / 1e9, 37.55, 0.005);
    EXPECT_EQ(count_with("moonlight_16b", NULL, 0, NULL, NULL).main_total.params, 15960108544);
    EXPECT_NEAR((double)count_with("v2_lite", NULL, 0, NULL, NULL).main_total.params / 1e9, 15.706, 0.0005);
}

/* GFLOPs a token at 4,096 tokens, as Megatron counts Moonlight (its published TFLOP/s over tokens/s is 17.16). */
TEST(count_golden_flops) {
    const ModelCount moonlight = count_with("moonlight_16b", NULL, 0, NULL, NULL);
    EXPECT_NEAR(total_flops(&moonlight) / 1e9, 17.17, 0.005);
    EXPECT_NEAR(moonlight.main[PART_ATTENTION_CORE].flops / total_flops(&moonlight), 0.099, 0.0005);
    EXPECT_NEAR(moonlight.main[PART_ROUTED].flops / total_flops(&moonlight), 0.47, 0.005);
    EXPECT_NEAR(moonlight.main[PART_HEAD].flops / total_flops(&moonlight), 0.117, 0.0005);
}

/* configs/tiny.json by hand: D 128, 4 heads of 32 + 16 and 32, latent 64, S 256. */
TEST(count_tiny_by_hand) {
    const int64_t attention = 128 * 4 * 48 + 128 * (64 + 16) + 64 * 4 * (32 + 32) + 4 * 32 * 128;
    const int64_t dense = 3 * 128 * 384, expert = 3 * 128 * 64, router = 128 * 16, head = 1025 * 128;
    const double core = 3 * 2.0 * 4 * (32 + 16 + 32) * 257 / 2;
    const ModelCount c = count_with("tiny", NULL, 0, NULL, NULL);
    EXPECT_EQ(attention, 67584);
    EXPECT_EQ(c.main[PART_EMBEDDING].params, head);
    EXPECT_EQ(c.main[PART_ATTENTION].params, 4 * attention);
    EXPECT_EQ(c.main[PART_DENSE_MLP].params, dense);
    EXPECT_EQ(c.main[PART_ROUTED].params, 3 * 16 * expert);
    EXPECT_EQ(c.main[PART_ROUTED].active, 3 * 4 * expert);
    EXPECT_EQ(c.main[PART_SHARED].params, 3 * expert);
    EXPECT_EQ(c.main[PART_ROUTER].params, 3 * router);
    EXPECT_EQ(c.main[PART_NORMS].params, 4 * (128 + 64 + 128) + 128);
    EXPECT_EQ(c.mtp_total.params, attention + router + 17 * expert + 2 * 128 * 128 + (128 + 64 + 128) + 3 * 128);
    /* 6 a weight: four of sixteen experts, not all; the embedding is looked up, not multiplied with */
    EXPECT_NEAR(c.main_total.flops, 6.0 * (4 * attention + dense + 3 * (router + 5 * expert) + head) + 4 * core, 0.5);
    /* an MTP depth: its block with its attention core, the projection of 2 D, and the head once more */
    EXPECT_NEAR(c.mtp_total.flops, 6.0 * (attention + router + 5 * expert + 2 * 128 * 128 + head) + core, 0.5);
    EXPECT_NEAR(total_flops(&c), 8915136, 0.5);
}

/* The quick start with MTP off, one and two deep: each depth adds the same, and the main model stays. */
TEST(count_mtp_on_and_off) {
    static const char *const depths[] = {"model.num_nextn_predict_layers=0", "model.num_nextn_predict_layers=1",
                                         "model.num_nextn_predict_layers=2"};
    const ModelCount none = count_with("tiny", depths, 1, NULL, NULL),
                     one = count_with("tiny", depths + 1, 1, NULL, NULL),
                     two = count_with("tiny", depths + 2, 1, NULL, NULL);
    EXPECT_NEAR(total_flops(&one) - total_flops(&none), 2385600, 0.5);
    EXPECT_NEAR(total_flops(&two) - total_flops(&one), 2385600, 0.5);
    EXPECT_EQ(one.main_total.params, none.main_total.params);
    EXPECT_EQ(two.mtp_total.params, 2 * one.mtp_total.params);
    EXPECT_NEAR(one.mtp[PART_HEAD].flops, one.main[PART_HEAD].flops, 0);
}

/* The training length decides, not the longest context; more experts at the same top k cost the router's rows alone;
 * packed documents count as one sequence, with and without their mask. */
TEST(count_flops_of_what_is_trained) {
    static const char *const sets[] = {"model.max_position_embeddings=4096", "model.n_routed_experts=32",
                                       "data.document_mask=true", "train.seq_len=128"};
    const ModelCount c = count_with("tiny", NULL, 0, NULL, NULL);
    const ModelCount longer = count_with("tiny", sets, 1, NULL, NULL),
                     wider = count_with("tiny", sets + 1, 1, NULL, NULL);
    const ModelCount masked = count_with("tiny", sets + 2, 1, NULL, NULL),
                     shorter = count_with("tiny", sets + 3, 1, NULL, NULL);
    EXPECT_NEAR(total_flops(&longer), total_flops(&c), 0);
    EXPECT_NEAR(total_flops(&wider) - total_flops(&c), 6.0 * 4 * 128 * 16, 0.5);
    EXPECT_EQ(wider.main[PART_ROUTED].active, c.main[PART_ROUTED].active);
    EXPECT_NEAR(total_flops(&masked), total_flops(&c), 0);
    EXPECT_NEAR(shorter.main[PART_ATTENTION_CORE].flops / c.main[PART_ATTENTION_CORE].flops, 129.0 / 257, 1e-12);
}

/* Dense models have no experts to divide by. */
TEST(count_dense_model) {
    static const char *const sets[] = {"model.first_k_dense_replace=4"};
    ParamCount plain;
    double flops;
    const ModelCount c = count_with("tiny", sets, 1, &plain, &flops);
    EXPECT_EQ(c.main[PART_ROUTED].params, 0);
    EXPECT_EQ(c.main_total.active, plain.total);
    EXPECT_NEAR(total_flops(&c), flops, 0.5);
}
