/* The plan: sizes equal to what is written, choices that fit, forecasts beside measured steps, files of rates. */
#include "model/train/plan.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hf_test.h"
#include "kernels/base/file.h"

enum { SETS = 8 };

static void plan_of(Plan *p, Run *r, Args *args, const char *name, const char *gpu, const char *const *sets) {
    static const Launch launch = {0, 1, false};
    static char path[64];
    snprintf(path, sizeof path, "configs/%s.json", name);
    memset(args, 0, sizeof *args);
    args->config = path;
    args->gpu = gpu;
    for (int i = 0; sets && sets[i]; i++) args->sets[args->n_sets++] = sets[i];
    run_open_model(r, args, &launch, 0, false);
    plan_make(p, r);
}

/* Whole steps on one H200 at commits a4b2c8a (BF16, whose kernels' rates the table holds) and 668eee2 (FP8):
 * tests/bench/results.jsonl. */
TEST(plan_forecast_beside_measured_steps) {
    static const struct {
        const char *config;
        const char *sets[SETS];
        double measured;
    } steps[] = {
        {"moonlight_half", {"train.global_batch_size=8", "train.micro_batch_size=4", NULL}, 42488},
        {"v3_slice", {"train.global_batch_size=4", "train.micro_batch_size=2", NULL}, 23352},
        {"moonlight_half",
         {"train.global_batch_size=16", "train.micro_batch_size=4", "precision.compute=fp8", NULL},
         63961},
        {"v3_slice", {"train.global_batch_size=8", "train.micro_batch_size=2", "precision.compute=fp8", NULL}, 33668},
    };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        Plan p;
        Run r;
        Args args;
        plan_of(&p, &r, &args, steps[i].config, "h200", steps[i].sets);
        REQUIRE(p.gpu.fits && p.gpu.chosen == &p.gpu.configured && p.gpu.chosen->has_time, "%s", steps[i].config);
        EXPECT_NEAR(p.gpu.chosen->tokens_per_s / steps[i].measured, 1, 0.1);
        const StepTime *t = &p.gpu.chosen->time;
        EXPECT_NEAR(t->of.sum,
                    t->of.products + t->of.grouped + t->of.attention + t->of.gradients + t->of.traffic + t->of.launches,
                    1e-12);
        EXPECT(t->of.recompute == 0, "nothing is recomputed");
        /* the numbers that follow from it */
        const double flops = p.count.main_total.flops + p.count.mtp_total.flops;
        EXPECT_NEAR(p.gpu.model_tflops, 1e-12 * flops * p.gpu.chosen->tokens_per_s, 1e-6);
        EXPECT_NEAR(p.gpu.mfu, p.gpu.model_tflops / 989.5, 1e-9);
        EXPECT_NEAR(p.gpu.run_s, (double)p.length.steps * p.gpu.step_s, 1e-6 * p.gpu.run_s);
        EXPECT_NEAR(p.gpu.gpu_hours, p.gpu.run_s / 3600, 1e-9);
        run_close(&r);
    }
}

/* More copies of the model: the same step in parts. */
TEST(plan_world_divides_the_batch) {
    static const char *const sets[] = {"run.price_per_gpu_hour=2", "parallel.ep=1", NULL};
    static const Launch launch = {0, 1, false};
    Plan one, four;
    Run r, s;
    Args args;
    plan_of(&one, &r, &args, "moe_1b", "h200", sets);
    Args more = args;
    more.world = 4;
    run_open_model(&s, &more, &launch, 0, false);
    plan_make(&four, &s);
    EXPECT_EQ(four.mesh.n_dp, 4);
    EXPECT_EQ(four.ranks, 4);
    EXPECT_EQ(four.length.steps, one.length.steps);
    EXPECT_EQ(four.gpu.configured.bytes, one.gpu.configured.bytes);
    EXPECT_NEAR(four.gpu.step_s - four.gpu.chosen->time.update, (one.gpu.step_s - one.gpu.chosen->time.update) / 4,
                1e-9);
    EXPECT_NEAR(four.gpu.gpu_hours, four.gpu.run_s / 3600 * 4, 1e-9);
    EXPECT_NEAR(four.gpu.price, 2 * four.gpu.gpu_hours, 1e-9);
    EXPECT(four.n_notes == 0, "%s", four.notes[0]);
    run_close(&r);
    run_close(&s);
}

/* Every choice is what the run would allocate with these settings, fits, and cannot be larger. */
TEST(plan_choices_are_the_largest_that_fit) {
    Plan p;
    Run r;
    Args args;
    plan_of(&p, &r, &args, "moe_1b", "rtx4090", NULL);
    for (int bits = 0; bits < PLAN_RECOMPUTES; bits++) {
        const PlanChoice *c = &p.gpu.choices[bits];
        EXPECT_EQ(c->recompute, bits);
        REQUIRE(c->micro_batch >= 1 && 256 % c->micro_batch == 0, "%lld", (long long)c->micro_batch);
        for (int twice = 0; twice < 2; twice++) {
            Config config = r.config;
            config.memory.recompute = bits;
            config.train.micro_batch_size = c->micro_batch << twice;
            Model m;
            memset(&m, 0, sizeof m);
            model_plan(&m, &config, &r.device, r.comm);
            const int64_t bytes = memory_total(&m);
            if (twice)
                EXPECT(bytes > p.gpu.bytes, "twice the micro-batch fits too");
            else
                EXPECT(bytes == c->bytes && bytes <= p.gpu.bytes, "%lld of %lld", (long long)bytes,
                       (long long)c->bytes);
            model_free(&m);
        }
        if (bits) EXPECT(c->time.of.recompute > 0, "recomputing costs time");
        EXPECT(p.gpu.best->tokens_per_s >= c->tokens_per_s, "best is the fastest");
    }
    run_close(&r);
}

/* A configuration that does not fit gets settings that do; moments are given up last. */
TEST(plan_settings_for_a_refused_configuration) {
    static const char *const large[] = {"train.micro_batch_size=64", NULL};
    static const char *const moments[] = {"precision.moments=fp32", "model.num_hidden_layers=16", NULL};
    Plan p;
    Run r;
    Args args;
    plan_of(&p, &r, &args, "moe_1b", "rtx4090", large);
    EXPECT(!p.gpu.fits && p.gpu.chosen == p.gpu.best && strstr(p.gpu.sets, "--set train.micro_batch_size="), "%s",
           p.gpu.sets);
    EXPECT(!strstr(p.gpu.sets, "moments"), "%s", p.gpu.sets);
    run_close(&r);
    plan_of(&p, &r, &args, "moe_1b", "rtx4090", moments);
    EXPECT(!p.gpu.fits && strstr(p.gpu.sets, "--set precision.moments=bf16"), "%s", p.gpu.sets);
    run_close(&r);
    plan_of(&p, &r, &args, "moonlight_16b", "rtx4090", NULL);
    EXPECT(!p.gpu.fits && !p.gpu.best && !p.gpu.chosen && !p.gpu.sets[0], "nothing fits: %s", p.gpu.sets);
    run_close(&r);
}

/* No forecast where there is no rate: f32 on a GPU. FP8 takes its own rates where there are any. */
TEST(plan_time_by_precision) {
    static const char *const bf16[] = {"precision.compute=bf16", NULL};
    Plan p, q;
    Run r, s;
    Args args, more;
    plan_of(&p, &r, &args, "tiny", "h200", NULL);
    EXPECT(p.gpu.fits && !p.gpu.chosen->has_time, "f32");
    run_close(&r);
    plan_of(&p, &r, &args, "tiny_fp8", "h200", NULL);
    plan_of(&q, &s, &more, "tiny_fp8", "h200", bf16);
    EXPECT(p.gpu.chosen->time.of.grouped < q.gpu.chosen->time.of.grouped, "FP8 is faster");
    EXPECT_NEAR(p.gpu.chosen->time.of.attention, q.gpu.chosen->time.of.attention, 0);
    EXPECT(q.n_notes == 0 && p.n_notes == 0, "%d, %d notes", q.n_notes, p.n_notes);
    run_close(&r);
    run_close(&s);
    plan_of(&p, &r, &args, "tiny_fp8", "a100-80", NULL);
    plan_of(&q, &s, &more, "tiny_fp8", "a100-80", bf16);
    EXPECT_NEAR(p.gpu.chosen->time.of.grouped, q.gpu.chosen->time.of.grouped, 0);
    EXPECT(strstr(p.notes[0], "has no FP8"), "%s", p.notes[0]);
    run_close(&r);
    run_close(&s);
}

/* What a checkpoint and an export would take is what they take. */
TEST(plan_sizes_of_files) {
    static const char *const sets[] = {"model.num_nextn_predict_layers=2", NULL};
    for (int dtype = 0; dtype < HF_DTYPES; dtype++) {
        Fixture f;
        fixture_open(&f, sets);
        const HfExport x = {.config = &f.config, .params = &f.model.params, .dtype = (HfDtype)dtype};
        const HfReport report = hf_export_to(&f, hf_folder_of(hf_dtype_name((HfDtype)dtype)), (HfDtype)dtype, 4000);
        EXPECT_EQ(hf_export_bytes(&x), report.bytes);
        Model m;
        memset(&m, 0, sizeof m);
        model_plan(&m, &f.config, &f.device, f.comm);
        int64_t n, n_planned;
        StateTensor *real_ones = params_state(&f.model.params, &n), *planned = params_state(&m.params, &n_planned);
        EXPECT_EQ(n_planned, n);
        EXPECT_EQ(checkpoint_bytes(planned, n), checkpoint_bytes(real_ones, n));
        EXPECT(planned[0].data == NULL, "a plan points nowhere");
        free(real_ones);
        free(planned);
        model_free(&m);
        fixture_close(&f);
    }
}

/* ---- rates ------------------------------------------------------------------------------------------------------- */

static const char *const members =
    "\"name\": \"mine\", \"source\": \"a bench\", \"measured\": true, \"memory_gib\": 10, \"peak_bf16\": 100, "
    "\"gemm_bf16\": 80, \"grouped_bf16\": 60, \"attention_forward\": 50, \"attention_backward\": 40, \"hbm\": 1000, "
    "\"op_us\": 5";

static int rates_of(GpuRates *r, const char *text, char *err) {
    char path[512], hint[ERR_LEN];
    snprintf(path, sizeof path, "%s/rates.json", test_tmp_dir());
    REQUIRE(file_write_durable(path, text, strlen(text), err) == 0, "%s", err);
    return rates_find(r, path, err, hint);
}

TEST(rates_of_a_file) {
    char text[1024], err[ERR_LEN] = "";
    GpuRates r;
    snprintf(text, sizeof text, "{\"version\": 1, \"//\": \"no FP8\", %s, \"peak_fp8\": null}", members);
    REQUIRE(rates_of(&r, text, err) == 0, "%s", err);
    EXPECT(strcmp(r.name, "mine") == 0 && strcmp(r.source, "a bench") == 0 && r.measured, "%s", r.name);
    EXPECT_NEAR(r.attention_backward, 40, 0);
    EXPECT_NEAR(r.peak_fp8, 0, 0);
    snprintf(text, sizeof text, "{\"version\": 1, %s, \"peak_fp8\": 200, \"gemm_fp8\": 150, \"grouped_fp8\": 120}",
             members);
    REQUIRE(rates_of(&r, text, err) == 0, "%s", err);
    EXPECT_NEAR(r.grouped_fp8, 120, 0);
}

TEST(rates_that_are_wrong) {
    static const struct {
        const char *more, *says;
    } wrong[] = {
        {"\"version\": 2", "version must be 1"},
        {"\"version\": 1, \"gemm\": 3", "gemm is no member"},
        {"\"version\": 1, \"peak_fp8\": 10", "go together"},
        {"\"version\": 1, \"peak_fp8\": 10, \"gemm_fp8\": 20, \"grouped_fp8\": 5", "above the peak"},
        {"\"version\": 1, \"peak_fp8\": \"10\"", "peak_fp8 must be a number"},
        {"\"version\": 1, \"peak_fp8\": -1", "peak_fp8 must be a number"},
        {"\"//\": 1", "version is missing"},
    };
    GpuRates r;
    char text[1024], err[ERR_LEN];
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        snprintf(text, sizeof text, "{%s, %s}", wrong[i].more, members);
        EXPECT(rates_of(&r, text, err) == -1 && strstr(err, wrong[i].says), "%s: %s", wrong[i].more, err);
    }
    EXPECT(rates_of(&r, "[]", err) == -1 && strstr(err, "JSON object"), "%s", err);
    EXPECT(rates_of(&r, "{\"version\": 1}", err) == -1 && strstr(err, "name is missing"), "%s", err);
    /* each number but FP8's is needed */
    for (const char *at = strchr(members, '1') - strlen("\"memory_gib\": "); at; at = strstr(at + 1, ", \"")) {
        const char *from = *at == ',' ? at + 2 : at, *end = strchr(from, ',');
        snprintf(text, sizeof text, "{\"version\": 1, %.*s%s}", (int)(from - members - (end ? 0 : 2)), members,
                 end ? end + 2 : "");
        EXPECT(rates_of(&r, text, err) == -1 && strstr(err, "is missing"), "%s: %s", text, err);
    }
}

/* Every known GPU by itself: no rate above its peak, FP8 all or nothing. */
TEST(rates_of_the_table) {
    int n = 0;
    for (; rates_known(n); n++) {
        GpuRates r;
        char err[ERR_LEN], hint[ERR_LEN];
        REQUIRE(rates_find(&r, rates_known(n), err, hint) == 0, "%s", err);
        EXPECT(r.name[0] && r.source[0] && r.memory_gib > 1, "%s", r.name);
        EXPECT(r.gemm_bf16 < r.peak_bf16 && r.grouped_bf16 < r.peak_bf16 && r.attention_forward < r.peak_bf16 &&
                   r.attention_backward < r.peak_bf16,
               "%s", r.name);
        EXPECT(r.gemm_fp8 <= r.peak_fp8 && r.grouped_fp8 <= r.peak_fp8, "%s", r.name);
        EXPECT(r.measured == (n == 0), "%s", r.name);
        EXPECT(r.measured == (strncmp(r.source, "measured", 8) == 0), "%s says what it is: %s", r.name, r.source);
    }
    EXPECT_EQ(n, 5);
    GpuRates r;
    char err[ERR_LEN], hint[ERR_LEN];
    EXPECT(rates_find(&r, "h1000", err, hint) == -1 && strstr(err, "h1000") && strstr(hint, "h200"), "%s", err);
}
