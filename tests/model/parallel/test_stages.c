/* Layers to stages: the least maximum against all cuts, V3's own, models with dense stages, what a rank holds. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "model/parallel/stages.h"
#include "tests/test.h"

enum { LAYERS_MAX = 12 };

/* By trying all cuts: stages before the last have at least a layer. */
static double least_maximum(const double *layers, int first, int L, int n_stages, double last_flops) {
    double sum = 0, least = DBL_MAX;
    if (n_stages == 1) {
        for (int l = first; l < L; l++) sum += layers[l];
        return sum + last_flops;
    }
    for (int end = first + 1; end <= L; end++) {
        sum += layers[end - 1];
        least = fmin(least, fmax(sum, least_maximum(layers, end, L, n_stages - 1, last_flops)));
    }
    return least;
}

static double check_cut(const Stage *stages, int n_stages, const double *layers, int L, double last_flops) {
    double largest = 0;
    int at = 0;
    for (int i = 0; i < n_stages; i++) {
        double sum = i == n_stages - 1 ? last_flops : 0;
        EXPECT_EQ(stages[i].first, at);
        EXPECT(stages[i].end > at || i == n_stages - 1, "stage %d of %d is empty", i, n_stages);
        for (; at < stages[i].end; at++) sum += layers[at];
        EXPECT_NEAR(stages[i].flops, sum, 1e-9 * (sum + 1));
        largest = fmax(largest, sum);
    }
    EXPECT_EQ(at, L);
    return largest;
}

TEST(stages_have_the_least_maximum) {
    int n_cases = 0;
    for (int L = 1; L <= 9; L++)
        for (int n_stages = 1; n_stages <= L + 1; n_stages++)
            for (int seed = 0; seed < 6; seed++) {
                double layers[LAYERS_MAX], last = seed % 3 * 1.5;
                char err[ERR_LEN];
                Stage stages[LAYERS_MAX];
                for (int l = 0; l < L; l++)
                    layers[l] = seed == 0 ? 1 : 0.1 + (double)((l * 7919 + seed * 104729 + L * 31) % 97) / 40;
                REQUIRE(stages_balance(stages, n_stages, layers, L, last, err) == 0, "%s", err);
                const double got = check_cut(stages, n_stages, layers, L, last);
                EXPECT_NEAR(got, least_maximum(layers, 0, L, n_stages, last), 1e-9);
                n_cases++;
            }
    EXPECT_EQ(n_cases, 6 * (2 + 3 + 4 + 5 + 6 + 7 + 8 + 9 + 10));
}

static void expect_cut(int L, int n_stages, double last, const int *ends) {
    double layers[LAYERS_MAX];
    Stage stages[LAYERS_MAX];
    char err[ERR_LEN];
    for (int l = 0; l < L; l++) layers[l] = 1;
    REQUIRE(stages_balance(stages, n_stages, layers, L, last, err) == 0, "%s", err);
    for (int i = 0; i < n_stages; i++) EXPECT(stages[i].end == ends[i], "stage %d ends at %d", i, stages[i].end);
}

TEST(stages_of_equal_layers) {
    expect_cut(8, 4, 0, (const int[]){2, 4, 6, 8});
    expect_cut(10, 4, 0, (const int[]){3, 6, 8, 10}); /* the last stages have fewer */
    expect_cut(8, 4, 2, (const int[]){3, 6, 8, 8});   /* the head is as two layers: 3 3 2 2 is the flattest */
    expect_cut(9, 4, 3, (const int[]){3, 6, 9, 9});   /* a stage of its own for head and MTP */
    expect_cut(3, 4, 1, (const int[]){1, 2, 3, 3});
    double layers[] = {1, 1};
    Stage stages[4];
    char err[ERR_LEN];
    EXPECT(stages_balance(stages, 4, layers, 2, 0, err) == -1 && strstr(err, "2 layers are too few for 4 stages"), "%s",
           err);
}

static ModelShape shape_of(const char *path, const char *const *sets, int n_sets) {
    Config c;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(config_load(&c, path, sets, n_sets, err, hint) == 0, "%s", err);
    const Mesh mesh = mesh_make(0, 1, 1, 1);
    return shape_make(&c, &mesh, 0);
}

/* 61 layers, head and MTP over 16 stages: 15 of four layers, and the last with one layer, the head and the MTP block;
 * a head is 1.4 layers, MTP with its own head 2.5 of them. */
TEST(stages_of_deepseek_v3) {
    const ModelShape s = shape_of("configs/deepseek_v3.json", NULL, 0);
    Stage stages[16];
    double scale[16], total = 0;
    char err[ERR_LEN];
    REQUIRE(stages_of_model(stages, 16, &s, err) == 0, "%s", err);
    for (int i = 0; i < 15; i++) EXPECT(stages[i].first == 4 * i && stages[i].end == 4 * i + 4, "stage %d", i);
    EXPECT(stages[15].first == 60 && stages[15].end == 61);
    EXPECT_NEAR(stages_scale(scale, stages, 16), scale[15], 0);
    EXPECT_NEAR(scale[15], 1.213, 0.001);
    for (int i = 0; i < 16; i++) total += stages[i].flops;
    EXPECT_NEAR(total, shape_flops_per_token(&s), 1e-9 * total);
    /* Without MTP and its head: 62 layers' worth goes 4, 4, ..., the head beside fewer. */
    const char *sets[] = {"model.num_nextn_predict_layers=0"};
    const ModelShape plain = shape_of("configs/deepseek_v3.json", sets, 1);
    REQUIRE(stages_of_model(stages, 16, &plain, err) == 0, "%s", err);
    EXPECT(stages[15].end - stages[15].first < 4 && stages[0].end == 4, "the head is in the last stage");
}

/* Stages with dense layers only, and a model without experts. */
TEST(stages_may_be_dense) {
    const char *half[] = {"model.num_hidden_layers=16", "model.first_k_dense_replace=8"};
    const char *all[] = {"model.num_hidden_layers=16", "model.first_k_dense_replace=16"};
    Stage stages[4];
    char err[ERR_LEN];
    for (int i = 0; i < 2; i++) {
        const ModelShape s = shape_of("configs/tiny.json", i ? all : half, 2);
        REQUIRE(stages_of_model(stages, 4, &s, err) == 0, "%s", err);
        EXPECT(!shape_block_is_moe(&s, stages[0].end - 1), "the first stage of half a dense model");
        EXPECT_EQ(shape_block_is_moe(&s, stages[3].first), i == 0);
        EXPECT_EQ(stages[3].end, 16);
    }
}

/* A large vocabulary on a small model: the head may be a stage of its own. */
TEST(stages_may_be_a_head) {
    const char *sets[] = {"model.vocab_size=129280", "model.num_nextn_predict_layers=0"};
    const ModelShape s = shape_of("configs/tiny.json", sets, 2);
    Stage stages[3];
    char err[ERR_LEN];
    REQUIRE(stages_of_model(stages, 3, &s, err) == 0, "%s", err);
    EXPECT(stages[2].first == 4 && stages[2].end == 4 && stages[1].end == 4 && stages[0].end == 2);
    EXPECT(stages[2].flops > stages[0].flops);
    EXPECT(stages_of_model(stages, 6, &s, err) == -1, "four layers on six stages");
}

TEST(stages_say_what_a_rank_holds) {
    static const struct {
        ScheduleKind kind;
        int P, rank, n_mtp;
        RankTop top;
    } cases[] = {
        {SCHEDULE_PAIRED, 1, 0, 1, {true, true, true}},
        {SCHEDULE_1F1B, 4, 0, 1, {true, false, true}},
        {SCHEDULE_1F1B, 4, 1, 1, {false, false, false}},
        {SCHEDULE_1F1B, 4, 3, 1, {false, true, true}}, /* a copy for MTP */
        {SCHEDULE_1F1B, 4, 3, 0, {false, true, false}},
        {SCHEDULE_INTERLEAVED, 4, 0, 1, {true, false, true}},
        {SCHEDULE_INTERLEAVED, 4, 3, 1, {false, true, true}},
        {SCHEDULE_DUALPIPE, 4, 0, 1, {true, true, true}}, /* both ends hold both, as in V3 */
        {SCHEDULE_DUALPIPE, 4, 3, 1, {true, true, true}},
        {SCHEDULE_DUALPIPE, 4, 1, 1, {false, false, false}},
        {SCHEDULE_DUALPIPEV, 4, 0, 1, {true, true, true}},
        {SCHEDULE_DUALPIPEV, 4, 3, 1, {false, false, false}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ScheduleShape s;
        REQUIRE(schedule_shape(&s, cases[i].kind, cases[i].P, 2 * cases[i].P, NULL, NULL) == 0);
        const RankTop top = stages_rank_top(&s, cases[i].rank, cases[i].n_mtp), *e = &cases[i].top;
        EXPECT(top.embeds == e->embeds && top.has_loss == e->has_loss && top.embedding == e->embedding, "case %zu", i);
    }
}
