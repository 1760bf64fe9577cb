/* Forecasts of many GPUs: against DeepSeek's published figures, and against what must hold whatever the rates are. */
#include "model/train/cluster.h"

#include <math.h>
#include <string.h>

#include "kernels/base/file.h"
#include "model/memory.h"
#include "model/train/device.h"
#include "model/train/part.h"
#include "model/train/step_time.h"
#include "tests/test.h"

static const char *const none[] = {NULL};

static void config_of(Config *c, const char *name, const char *const *sets) {
    char path[64], err[ERR_LEN] = "", hint[ERR_LEN];
    int n = 0;
    snprintf(path, sizeof path, "configs/%s.json", name);
    while (sets[n]) n++;
    REQUIRE(config_load(c, path, (const char **)sets, n, err, hint) == 0, "%s", err);
}

static void rates_of(GpuRates *r, const char *name) {
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(rates_find(r, name, err, hint) == 0, "%s", err);
}

static int make(Cluster *c, const Config *config, int world, int ep, ScheduleKind kind, int64_t M, const GpuRates *r,
                char *err) {
    char hint[ERR_LEN];
    Device gpu;
    ScheduleShape shape;
    device_for_plan(&gpu, config, true);
    const Mesh mesh = mesh_make(0, world, config->parallel.pp, ep);
    REQUIRE(schedule_shape(&shape, kind, mesh.n_pp, M, err, hint) == 0, "%s", err);
    return cluster_make(c, config, &mesh, &shape, r, &gpu, err, hint);
}

/* The whole run of DeepSeek-V3: spec 7.1 and 9.2. */
static void make_v3(Cluster *c, Config *config, const char *gpu, ScheduleKind kind) {
    GpuRates r;
    char err[ERR_LEN];
    config_of(config, "deepseek_v3", none);
    rates_of(&r, gpu);
    REQUIRE(make(c, config, 2048, 64, kind, 120, &r, err) == 0, "%s", err);
}

/* ---- published figures ------------------------------------------------------------------------------------------- */

/* The profile's pair, whose kernels the rates come from, is put together again by the work and the overlap: 129 ms. A
 * whole step (ISCA 2025: 19.926 s, of which bubble 2.06) is not in the rates at all. */
TEST(cluster_deepseek_v3_on_h800) {
    Config config;
    Cluster c;
    make_v3(&c, &config, "h800", SCHEDULE_DUALPIPE);
    EXPECT_NEAR(c.times[4].pair, 0.129, 0.1 * 0.129);
    EXPECT_NEAR(c.step_s, 19.926, 0.15 * 19.926);
    EXPECT_NEAR(c.bubble_s, 2.06, 0.25 * 2.06);
    EXPECT_NEAR(c.tokens, 15360.0 * 4096, 0);
    EXPECT_NEAR(c.tokens_per_s * 2048 * c.step_s, c.tokens, 1);
    EXPECT_NEAR(c.hours_per_trillion * 3600 * c.tokens_per_s, 1e12, 1e3);
    EXPECT(c.hidden > 0.8 && c.hidden < 1, "%g of the exchange is hidden", c.hidden);
    EXPECT_EQ(c.n_nodes, 256);
    cluster_free(&c);
}

/* Spec 7.1: 1.30B routed and about 2.14B other parameters a GPU; four and 256 ranks share their optimizer. */
TEST(cluster_parameters_of_a_rank_of_v3) {
    Config config;
    Cluster c;
    Params params;
    make_v3(&c, &config, "h800", SCHEDULE_DUALPIPE);
    params_make(&params, &c.shape);
    PipeSchedule lists = schedule_make(c.schedule);
    const ClusterShape shape = {&c.shape, &params, &lists, c.stages, &c.mesh};
    double experts = 0, others = 0;
    for (int r = 0; r < 16; r++) {
        const RankParams p = rank_params(&shape, r);
        experts += p.experts / 16;
        others += p.others / 16;
        EXPECT(p.n_others == 256 && p.n_experts == 4, "%d, %d ranks", (int)p.n_others, (int)p.n_experts);
    }
    EXPECT_NEAR(experts, 1.30e9, 0.01e9);
    EXPECT_NEAR(others, 2.14e9, 0.1e9);
    schedule_free(&lists);
    params_free(&params);
    cluster_free(&c);
}

/* Spec 7.4: at most four nodes, 7,392 bytes a token and node out, with 64 of ids and weights, and 14,336 back; the same
 * for gradients, with 32 of weights on the way back. */
TEST(cluster_exchange_of_v3) {
    static const double bytes[TRAVELS] = {7392 + 64, 14336, 7392, 14336 + 32};
    Config config;
    Cluster c;
    make_v3(&c, &config, "h800", SCHEDULE_DUALPIPE);
    const Exchange *x = &c.exchange;
    double ib = 0;
    EXPECT(x->nodes > 3.5 && x->nodes < 4 && x->ranks > 7 && x->ranks < 8, "%g ranks, %g nodes", x->ranks, x->nodes);
    for (int i = 0; i < TRAVELS; i++) {
        EXPECT_NEAR(x->bytes[i].ib / (4096 * x->nodes * 7 / 8), bytes[i], 1e-6);
        EXPECT_NEAR(x->bytes[i].nvlink / (4096 * x->ranks * 7 / 8), bytes[i], 1e-6);
        ib += x->bytes[i].ib;
    }
    /* every micro-batch passes 58 + 1 MoE layers, forward and backward, over the 16 ranks of the pipeline */
    EXPECT_NEAR(c.experts.ib / (120.0 * 59 / 16 * ib), 1, 1e-9);
    EXPECT_NEAR(c.stage_to_stage.ib, 2.0 * 15 * 120 / 16 * 4096 * 7168 * 2, 1);
    EXPECT_NEAR(c.stage_to_stage.nvlink, 0, 0);
    cluster_free(&c);
}

/* Rows travel as the GEMMs that read them want them: tokens for Fprop and Wgrad, gradients for Dgrad and Wgrad. */
TEST(cluster_exchange_of_parts_of_fp8) {
    static const struct {
        const char *part;
        bool tokens_wide, gradients_wide;
    } cases[] = {{"precision.fp8.swiglu_input=bf16", false, false},
                 {"precision.fp8.fprop=bf16", true, false},
                 {"precision.fp8.dgrad=bf16", false, true},
                 {"precision.fp8.wgrad=bf16", true, true},
                 {"precision.compute=bf16", true, true}};
    Config config;
    GpuRates r;
    rates_of(&r, "h800");
    for (int i = 0; i < 5; i++) {
        config_of(&config, "deepseek_v3", (const char *const[]){cases[i].part, NULL});
        const Mesh mesh = mesh_make(0, 2048, 16, 64);
        const ModelShape s = shape_make(&config, &mesh, 1 << 28);
        const Exchange x = exchange_of(&s, &r);
        const double rows = 4096 * x.nodes * 7 / 8;
        EXPECT_NEAR(x.bytes[TOKENS_OUT].ib / rows, (cases[i].tokens_wide ? 14336 : 7392) + 64, 1e-6);
        EXPECT_NEAR(x.bytes[GRADIENTS_OUT].ib / rows, cases[i].gradients_wide ? 14336 : 7392, 1e-6);
        EXPECT_NEAR(x.bytes[SUMS_BACK].ib / rows, 14336, 1e-6);
    }
}

/* ---- links ------------------------------------------------------------------------------------------------------- */

TEST(cluster_exchange_stays_where_it_can) {
    static const struct {
        int ep;
        double ranks, nodes; /* at most */
        bool has_ib;
    } cases[] = {{1, 0, 0, false}, {2, 2, 1, false}, {8, 8, 1, false}, {16, 8, 2, true}, {64, 8, 8, true}};
    Config config;
    GpuRates r;
    rates_of(&r, "h200");
    config_of(&config, "moonlight_16b", none);
    for (int i = 0; i < 5; i++) {
        const Mesh mesh = mesh_make(0, 64, 1, cases[i].ep);
        const ModelShape s = shape_make(&config, &mesh, 1 << 28);
        const Exchange x = exchange_of(&s, &r);
        EXPECT(x.ranks <= cases[i].ranks && x.nodes <= cases[i].nodes, "ep %d: %g ranks, %g nodes", cases[i].ep,
               x.ranks, x.nodes);
        for (int k = 0; k < TRAVELS; k++) {
            EXPECT((x.bytes[k].ib > 0) == cases[i].has_ib && (x.seconds[k] > 0) == (cases[i].ep > 1), "ep %d",
                   cases[i].ep);
            EXPECT(x.seconds[k] >= x.bytes[k].nvlink / (1e9 * r.nvlink) - 1e-12, "ep %d", cases[i].ep);
        }
    }
}

TEST(cluster_links_of_a_group) {
    const LinkBytes alone = link_bytes_of_group(100, 1, 8), node = link_bytes_of_group(100, 8, 8),
                    two = link_bytes_of_group(100, 16, 8), apart = link_bytes_of_group(100, 4, 1);
    EXPECT(alone.nvlink == 0 && alone.ib == 0, "alone");
    EXPECT(node.nvlink == 87.5 && node.ib == 0, "%g, %g", node.nvlink, node.ib);
    EXPECT(two.nvlink == 87.5 && two.ib == 6.25, "%g, %g", two.nvlink, two.ib);
    EXPECT(apart.nvlink == 0 && apart.ib == 75, "%g, %g", apart.nvlink, apart.ib);
}

/* ---- what must hold ---------------------------------------------------------------------------------------------- */

/* One stage, one expert rank: micro-batches one after the other take what the forecast of one GPU says. */
TEST(cluster_of_copies_takes_the_step_of_one) {
    Config config;
    Cluster c;
    GpuRates r;
    StepTime one;
    char err[ERR_LEN];
    rates_of(&r, "h200");
    config_of(&config, "moe_3b", none);
    REQUIRE(make(&c, &config, 4, 1, SCHEDULE_1F1B, 5, &r, err) == 0, "%s", err);
    Params params;
    params_make(&params, &c.shape);
    const ModelCount count = count_model(&params);
    REQUIRE(step_time(&one, &c.shape, &count, config.precision.compute, &r), "no time");
    EXPECT_NEAR(c.pipeline_s / (5 * one.of.sum), 1, 1e-9);
    EXPECT(c.bubble_s == 0 && c.exchange_s == 0 && c.hidden == 0, "bubble %g", c.bubble_s);
    EXPECT(c.optimizer.nvlink > 0 && c.optimizer.ib == 0 && c.update_s > 0, "one node");
    params_free(&params);
    cluster_free(&c);
}

/* More of the exchange is hidden in pairs; a better link never costs; 1F1B waits longer. */
TEST(cluster_schedules_and_rates_compare) {
    Config config;
    Cluster dual, plain, fast;
    GpuRates r;
    char err[ERR_LEN];
    make_v3(&dual, &config, "h800", SCHEDULE_DUALPIPE);
    make_v3(&plain, &config, "h800", SCHEDULE_1F1B);
    EXPECT(dual.step_s < plain.step_s && dual.bubble_s < plain.bubble_s && dual.hidden > plain.hidden,
           "%g s, 1f1b %g s", dual.step_s, plain.step_s);
    EXPECT(plain.times[3].pair == 0 && plain.memory[0].bytes != dual.memory[0].bytes, "1f1b has no pairs");
    rates_of(&r, "h800");
    r.ib *= 2;
    REQUIRE(make(&fast, &config, 2048, 64, SCHEDULE_DUALPIPE, 120, &r, err) == 0, "%s", err);
    EXPECT(fast.step_s < dual.step_s && fast.exchange_s < dual.exchange_s, "%g s", fast.step_s);
    cluster_free(&dual);
    cluster_free(&plain);
    cluster_free(&fast);
}

/* What each rank of a pipeline would allocate: the model with the part that the run gives it. Where Wgrad multiplies
 * tiles, the wide gradients do not wait. */
TEST(cluster_memory_of_a_rank_is_its_models) {
    static const char *const sets[][5] = {
        {"train.global_batch_size=1024", "parallel.pp=4", "precision.compute=bf16"},
        {"train.global_batch_size=1024", "parallel.pp=4", "parallel.schedule=zb1p"},
        {"train.global_batch_size=1024", "parallel.pp=4", "parallel.schedule=zb1p", "precision.fp8.wgrad=bf16"},
        {"train.global_batch_size=1024", "parallel.pp=1", "parallel.schedule=1f1b"},
        {"train.global_batch_size=1024", "parallel.pp=1", "parallel.schedule=paired"},
    };
    enum { N_EP = 64, N_DP = 2, N = sizeof sets / sizeof *sets };
    int64_t fullest[N];
    for (int i = 0; i < N; i++) {
        Config config;
        Cluster c;
        GpuRates r;
        Device gpu;
        char err[ERR_LEN];
        rates_of(&r, "h200");
        config_of(&config, "deepseek_v3", sets[i]);
        const int P = config.parallel.pp, world = P * N_EP * N_DP;
        const int64_t M = (int64_t)config.train.global_batch_size.value[0] / (N_EP * N_DP);
        const ScheduleKind kind = part_schedule(&config);
        REQUIRE(make(&c, &config, world, N_EP, kind, M, &r, err) == 0, "%s", err);
        device_for_plan(&gpu, &config, true);
        for (int rank = 0; rank < P; rank++) {
            Model m = {0};
            Comm comm = {.mesh = mesh_make(rank * N_EP * N_DP, world, P, N_EP)};
            if (schedule_copies(kind) > 1) comm.mesh = mesh_mirrored(comm.mesh);
            const RankPart part = part_make(&config, &comm.mesh, gpu.logits_bytes);
            if (part_is_pipelined(&config, &comm.mesh)) m.part = &part;
            model_plan(&m, &config, &gpu, &comm);
            EXPECT_EQ(c.memory[rank].bytes, memory_total(&m));
            int64_t sum = 0;
            for (int k = 0; k < c.memory[rank].items.n_items; k++) sum += (int64_t)c.memory[rank].items.items[k].bytes;
            EXPECT(sum <= c.memory[rank].bytes && sum > c.memory[rank].bytes * 0.999, "items of %lld bytes",
                   (long long)sum);
            model_free(&m);
        }
        fullest[i] = c.memory[c.fullest].bytes;
        cluster_free(&c);
    }
    EXPECT(fullest[3] < fullest[4], "%lld bytes, a forward beside a backward %lld", (long long)fullest[3],
           (long long)fullest[4]);
    EXPECT(fullest[1] < fullest[2], "FP8: %lld bytes, with Wgrad in BF16 %lld", (long long)fullest[1],
           (long long)fullest[2]);
}

TEST(cluster_refuses) {
    static const char *const f32[] = {"precision.compute=fp32", NULL};
    static const char *const deep[] = {"parallel.pp=16", NULL};
    Config config;
    Cluster c;
    GpuRates r;
    char err[ERR_LEN];
    rates_of(&r, "h200");
    config_of(&config, "moe_3b", none);
    r.ib = 0;
    EXPECT(make(&c, &config, 16, 1, SCHEDULE_1F1B, 4, &r, err) == -1 && strstr(err, "do not say ib"), "%s", err);
    EXPECT(make(&c, &config, 8, 1, SCHEDULE_1F1B, 4, &r, err) == 0, "%s", err);
    cluster_free(&c);
    r.nvlink = 0;
    EXPECT(make(&c, &config, 8, 1, SCHEDULE_1F1B, 4, &r, err) == -1 && strstr(err, "do not say nvlink"), "%s", err);
    rates_of(&r, "h200");
    config_of(&config, "moe_3b", f32);
    EXPECT(make(&c, &config, 8, 1, SCHEDULE_1F1B, 4, &r, err) == -1 && strstr(err, "fp32"), "%s", err);
    config_of(&config, "moe_3b", deep);
    EXPECT(make(&c, &config, 16, 1, SCHEDULE_DUALPIPEV, 64, &r, err) == -1 && strstr(err, "too few"), "%s", err);
}
