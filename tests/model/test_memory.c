/* The memory plan: sums, refusals and their hints, what recomputing saves and costs, the head's chunk. */
#include "model/memory.h"

#include <string.h>

#include "model_test.h"

enum { N_SETS_MAX = 8 };
#define MIB ((int64_t)1 << 20)

/* A plan of one of the shipped configurations on a device of `free` bytes, of which we hold `held`. */
typedef struct {
    Config config;
    Device device;
    Comm *comm;
    Model model;
} Plan;

static void plan_open(Plan *p, const char *path, const char *const *sets, int64_t total, int64_t free_bytes) {
    char err[ERR_LEN], hint[ERR_LEN];
    int n = 0;
    while (sets && sets[n]) n++;
    REQUIRE(n <= N_SETS_MAX && config_load(&p->config, path, sets, n, err, hint) == 0, "%s", err);
    memset(&p->device, 0, sizeof p->device);
    p->device.ops = ops_cpu();
    device_memory_expected(&p->device.memory);
    p->device.memory.total = total;
    p->device.memory.free = free_bytes;
    p->device.memory.held = 600 * MIB;
    p->comm = comm_self(&p->device);
    memset(&p->model, 0, sizeof p->model);
    model_plan(&p->model, &p->config, &p->device, p->comm);
}

static void plan_close(Plan *p) {
    model_free(&p->model);
    p->comm->free(p->comm);
}

static int64_t total_of(const char *const *sets) {
    Plan p;
    plan_open(&p, "configs/moe_150m.json", sets, 0, 0);
    const int64_t bytes = memory_total(&p.model);
    plan_close(&p);
    return bytes;
}

TEST(memory_total_has_arenas_and_rows) {
    Plan p;
    plan_open(&p, "configs/moe_150m.json", NULL, 0, 0);
    const Model *m = &p.model;
    int64_t rows = 0;
    for (int i = 0; i < MEMORY_ROWS; i++) {
        EXPECT(memory_row_name[i] && (memory_row(m, (MemoryRow)i) > 0) == (i != MEMORY_NCCL), "row %d",
               i); /* one GPU */
        rows += memory_row(m, (MemoryRow)i);
    }
    EXPECT_EQ(memory_rows(m), rows);
    EXPECT_EQ(memory_total(m), (int64_t)(m->keep.peak + m->slots.peak + m->scratch.peak) + rows);
    EXPECT(memory_fits(m), "unknown memory is enough");
    plan_close(&p);
}

static int64_t graphs_of(const char *const *sets, const RankPart *part, bool needs_host) {
    Plan p;
    plan_open(&p, "configs/moe_150m.json", sets, 0, 0);
    model_free(&p.model);
    memset(&p.model, 0, sizeof p.model);
    p.model.part = part;
    p.comm->needs_host = needs_host;
    model_plan(&p.model, &p.config, &p.device, p.comm);
    const int64_t bytes = memory_row(&p.model, MEMORY_GRAPHS);
    plan_close(&p);
    return bytes;
}

/* Two micro-batches of the whole model; all micro-batches of a pipeline; none where nothing is captured. */
TEST(memory_of_graphs_follows_what_they_hold) {
    enum { BLOCKS = 8, M = 16 };
    char err[ERR_LEN];
    ScheduleShape schedule;
    RankPart part;
    Plan p;
    plan_open(&p, "configs/moe_150m.json", NULL, 0, 0);
    REQUIRE(p.model.shape.n_blocks == BLOCKS && schedule_shape(&schedule, SCHEDULE_DUALPIPEV, 1, M, err, NULL) == 0 &&
                pipeline_part(&part, &schedule, 0, &p.model.shape, err) == 0,
            "%d blocks, %s", p.model.shape.n_blocks, err);
    plan_close(&p);
    EXPECT_EQ(graphs_of(NULL, NULL, false), device_memory_graphs(2 * BLOCKS, BLOCKS));
    EXPECT_EQ(graphs_of(NULL, &part, false), device_memory_graphs(M * BLOCKS, BLOCKS));
    EXPECT_EQ(graphs_of(NULL, &part, true), 0);
    EXPECT_EQ(graphs_of((const char *const[]){"run.graphs=false", NULL}, NULL, false), 0);
}

/* To the byte: what is free and what the process holds already. */
TEST(memory_fits_to_the_byte) {
    const int64_t need = total_of((const char *const[]){"memory.recompute=none", NULL}), held = 600 * MIB;
    for (int less = 0; less < 2; less++) {
        Plan p;
        plan_open(&p, "configs/moe_150m.json", (const char *const[]){"memory.recompute=none", NULL}, need + 100 * MIB,
                  need - held - less);
        EXPECT(memory_fits(&p.model) == !less, "%d byte less", less);
        plan_close(&p);
    }
}

TEST(memory_refusal_names_numbers_items_and_settings) {
    char err[ERR_LEN], hint[ERR_LEN];
    Plan p;
    plan_open(&p, "configs/moe_1b.json", (const char *const[]){"precision.moments=fp32", NULL}, 8192 * MIB, 7500 * MIB);
    REQUIRE(memory_check(&p.model, err, hint) == -1, "13 GiB fit into 8");
    EXPECT(strstr(err, "7.9 GiB of the device's 8.0 GiB") && strstr(err, "AdamW moments") && strstr(err, "GiB"), "%s",
           err);
    EXPECT(!strstr(err, "other processes") && !strstr(err, "\n"), "%s", err);
    EXPECT(strstr(hint, "train.micro_batch_size") && strstr(hint, "precision.moments to \"bf16\"") &&
               !strstr(hint, "memory.recompute") && !strstr(hint, "nvidia-smi"),
           "auto recomputes all already: %s", hint);
    plan_close(&p);
    plan_open(&p, "configs/moe_1b.json", (const char *const[]){"memory.recompute=[\"norms\"]", NULL}, 81920 * MIB,
              1024 * MIB);
    REQUIRE(memory_check(&p.model, err, hint) == -1, "13 GiB fit into 1");
    EXPECT(strstr(err, "other processes hold 78.4 GiB"), "%s", err);
    EXPECT(strstr(hint, "memory.recompute") && strstr(hint, "nvidia-smi") && !strstr(hint, "precision"), "%s", hint);
    plan_close(&p);
    plan_open(&p, "configs/moe_1b.json",
              (const char *const[]){"train.micro_batch_size=1", "memory.head_chunk_tokens=128", NULL}, 8192 * MIB,
              7500 * MIB);
    EXPECT(memory_check(&p.model, err, hint) == -1 && strstr(hint, "train.seq_len"), "%s", hint);
    plan_close(&p);
}

/* The host hands out pages when they are written: only what is sure to be written counts. */
TEST(memory_on_touch_counts_what_is_written) {
    char err[ERR_LEN], hint[ERR_LEN];
    Plan p;
    plan_open(&p, "configs/moe_150m.json", (const char *const[]){"memory.recompute=none", NULL}, 64 * MIB, 1);
    p.device.memory.on_touch = true;
    const Model *m = &p.model;
    const int64_t sum = (int64_t)(m->keep.peak + m->slots.peak);
    p.device.memory.total = sum;
    p.device.memory.free = sum - p.device.memory.held;
    EXPECT(memory_fits(m), "scratch and rows that may stay empty are not counted");
    p.device.memory.free = (int64_t)m->keep.peak - p.device.memory.held;
    EXPECT(!memory_fits(m), "the state alone is sure");
    REQUIRE(memory_check(m, err, hint) == -1, "refused");
    EXPECT(strstr(err, "needs at least") && !strstr(hint, "nvidia-smi"), "%s (%s)", err, hint);
    plan_close(&p);
}

/* "auto" takes the cheapest first, and no more than it needs. */
TEST(memory_auto_recomputes_what_it_must) {
    int64_t before = total_of((const char *const[]){"memory.recompute=none", NULL}) + MIB;
    int bits = 0;
    for (int i = 0; i <= RECOMPUTE_CHOICES; i++) {
        Plan p;
        plan_open(&p, "configs/moe_150m.json", NULL, before + 1024 * MIB, before - 1 - 600 * MIB);
        EXPECT_EQ(p.model.shape.recompute & ~RECOMPUTE_UNASKED, bits);
        EXPECT_EQ(p.config.memory.recompute, RECOMPUTE_AUTO);
        before = memory_total(&p.model);
        plan_close(&p);
        if (i < RECOMPUTE_CHOICES) bits |= recompute_choices[i].bit;
    }
    Plan p;
    plan_open(&p, "configs/moe_150m.json", NULL, 0, 0);
    EXPECT_EQ(p.model.shape.recompute & ~RECOMPUTE_UNASKED, 0);
    plan_close(&p);
}

/* A model that was planned with "auto" lays out in allocated memory what it counted, and computes the same bits. */
TEST(memory_auto_changes_no_bits) {
    static const char *const choices[] = {"memory.recompute=none",
                                          "memory.recompute=[\"norms\",\"swiglu\",\"up_projections\"]"};
    Tensor grad[2];
    for (int i = 0; i < 2; i++) {
        Fixture f;
        fixture_open(&f, (const char *const[]){choices[i], NULL});
        fixture_gradients(&f);
        grad[i] = t_copy(f.model.params.grad);
        fixture_close(&f);
    }
    EXPECT(t_same_bits(grad[0], grad[1]), "recomputing changes gradients");
}

TEST(memory_saved_by_is_the_difference_of_plans) {
    static const char *const all = "memory.recompute=[\"norms\",\"swiglu\",\"up_projections\"]";
    static const char *const without[] = {"memory.recompute=[\"swiglu\",\"up_projections\"]",
                                          "memory.recompute=[\"norms\",\"up_projections\"]",
                                          "memory.recompute=[\"norms\",\"swiglu\"]"};
    char text[96];
    Plan p;
    plan_open(&p, "configs/moe_150m.json", (const char *const[]){all, NULL}, 0, 0);
    for (int i = 0; i < RECOMPUTE_CHOICES; i++) {
        const int64_t saved = memory_saved_by(&p.model, recompute_choices[i].bit);
        EXPECT_EQ(saved, total_of((const char *const[]){without[i], NULL}) - memory_total(&p.model));
        EXPECT(saved > 0, "%s saves nothing", recompute_choices[i].name);
    }
    EXPECT(strcmp(recompute_text(text, sizeof text, p.model.shape.recompute), "norms, swiglu, up_projections") == 0,
           "%s", text);
    EXPECT(strcmp(recompute_text(text, sizeof text, 0), "nothing") == 0, "%s", text);
    plan_close(&p);
}

/* By hand for the test model: D 24, latent 12, H 2, q 2*12, kv 2*14; one dense block of 20, three of experts 2*10 + 10.
 */
TEST(memory_recompute_flops_by_hand) {
    Fixture f;
    fixture_open(&f, NULL);
    EXPECT_NEAR(shape_recompute_flops(&f.model.shape, RECOMPUTE_NORMS), 4 * 4.0 * (2 * 24 + 12), 1e-9);
    EXPECT_NEAR(shape_recompute_flops(&f.model.shape, RECOMPUTE_UP_PROJECTIONS), 4 * 2.0 * (24 * 24 + 12 * 28), 1e-9);
    EXPECT_NEAR(shape_recompute_flops(&f.model.shape, RECOMPUTE_SWIGLU), 6.0 * (20 + 3 * 30), 1e-9);
    fixture_close(&f);
}

/* One choice, from the budget: whole multiples, never more than the micro-batch, and the configuration's word first. */
TEST(memory_head_chunk_follows_the_budget) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    const Mesh mesh = mesh_make(0, 1, 1, 1);
    REQUIRE(config_load(&c, "configs/deepseek_v3.json", NULL, 0, err, hint) == 0, "%s", err);
    c.train.micro_batch_size = 4; /* 16384 tokens, 129280 words in bf16 */
    EXPECT_EQ(shape_make(&c, &mesh, (int64_t)1 << 30).head_chunk, 4096);
    EXPECT_EQ(shape_make(&c, &mesh, (int64_t)1 << 27).head_chunk, 576); /* 519 fill it */
    EXPECT_EQ(shape_make(&c, &mesh, 0).head_chunk, 64);
    EXPECT_EQ(shape_make(&c, &mesh, (int64_t)1 << 40).head_chunk, 16384);
    c.memory.head_chunk_tokens = 100;
    EXPECT_EQ(shape_make(&c, &mesh, (int64_t)1 << 30).head_chunk, 100);
    c.memory.head_chunk_tokens = 0;
    ModelShape s = shape_make(&c, &mesh, (int64_t)1 << 30);
    EXPECT_EQ(shape_with_batch(s, 1, 512).head_chunk, 512);
    REQUIRE(config_load(&c, "configs/tiny.json", NULL, 0, err, hint) == 0, "%s", err);
    const int64_t width = (int64_t)dtype_size(DTYPE_F32) / 4;    /* 2 in the double build */
    EXPECT_EQ(shape_make(&c, &mesh, 0).head_chunk, 256 / width); /* 252 of 1040 words in f32 fill a MiB */
    Device d;
    memset(&d, 0, sizeof d);
    d.ops = ops_cpu();
    d.logits_bytes = width << 19;
    Comm *comm = comm_self(&d);
    Model m;
    memset(&m, 0, sizeof m);
    model_plan(&m, &c, &d, comm);
    EXPECT_EQ(m.shape.head_chunk, 128); /* the device's budget is the one that counts */
    EXPECT_EQ(m.train.logits.shape[0], 128);
    model_free(&m);
    comm->free(comm);
}
