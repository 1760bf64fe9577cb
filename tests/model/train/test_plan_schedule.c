/* What train_moe plan says of the pipeline, and what it refuses. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/file.h"
#include "model/train/plan_schedule.h"
#include "tests/test.h"

typedef struct {
    const char *config;
    Args args;
    int64_t ranks;
} Call;

static void plan_into(FILE *out, const Call *call) {
    static Config c;
    char err[ERR_LEN], hint[ERR_LEN];
    Logger l;
    REQUIRE(config_load(&c, call->config, call->args.sets, call->args.n_sets, err, hint) == 0, "%s", err);
    const Mesh mesh = mesh_make(0, 1, 1, 1);
    const ModelShape shape = shape_make(&c, &mesh, 0);
    log_init(&l, 1, false, out, out);
    const PipelinePlan p = plan_schedule_make(&c, &shape, &call->args, call->ranks);
    plan_schedule_print(&p, &l);
}

/* malloc'd */
static char *said(Call call) {
    static char *text;
    static size_t size;
    FILE *out = open_memstream(&text, &size);
    REQUIRE(out != NULL);
    plan_into(out, &call);
    fclose(out);
    return text;
}

static const char *line_with(const char *text, const char *part) {
    static char line[512];
    const char *at = strstr(text, part);
    if (!at) return "(no such line)";
    while (at > text && at[-1] != '\n') at--;
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at, "\n"), at);
    return line;
}

/* The numbers of a row of the table. */
typedef struct {
    double formula, simulated, step, idle, as_cut, activations, waiting;
    int copies;
} Row;

static Row row_of(const char *text, const char *name, const char *formula) {
    Row r;
    memset(&r, 0, sizeof r);
    char start[64], as_cut[32] = "";
    snprintf(start, sizeof start, " %-12s %s", name, formula);
    const char *at = strstr(text, start);
    REQUIRE(at != NULL, "no row %s %s in\n%s", name, formula, text);
    const int n = sscanf(at + strlen(start), "%lf %lf %lf %lf %% %31s %lf %lf %d", &r.formula, &r.simulated, &r.step,
                         &r.idle, as_cut, &r.activations, &r.waiting, &r.copies);
    EXPECT_EQ(n, 8);
    r.as_cut = strcmp(as_cut, "-") == 0 ? 0 : atof(as_cut);
    return r;
}

TEST(plan_schedule_of_deepseek_v3) {
    /* 2,048 GPUs: 128 pipelines of 16, 120 micro-batches each at the end of the ramp. */
    Call call = {.config = "configs/deepseek_v3.json", .ranks = 128};
    char *text = said(call);
    /* F and I wait for all exchange; in B weight-backward covers a part, in F&B all is covered. */
    EXPECT(strstr(text, "pp 16, 120 micro-batches; F 2, I 2, W 1, B 2.125, F&B 3; F and I wait"), "%s", text);
    const Row dual = row_of(text, "dualpipe", "(P/2-1)(F&B+2F-B-W)"), plain = row_of(text, "1f1b", "(P-1)(F+B)");
    const Row zb = row_of(text, "zb1p", "(P-1)(F+I-W)"), v = row_of(text, "dualpipev", "(P-1)(F&B+2F-B-W)");
    EXPECT(dual.formula == 27.125 && dual.simulated == 27.125 && dual.activations == 17 && dual.copies == 2);
    EXPECT(dual.step == 413.25, "%g", dual.step); /* rank 7: 103 pairs, 17 F, 9 B, 8 I, 8 W, and the bubble */
    EXPECT(plain.formula == 15 * 4.125 && plain.simulated == plain.formula && plain.step == 135 * 4.125);
    EXPECT(zb.formula == 45 && zb.simulated == 45 && zb.step == 120 * 5 + 45 && zb.waiting == 16);
    EXPECT(v.formula == 29.0625 && v.simulated == v.formula && v.activations == 16.5 && v.copies == 1);
    EXPECT(dual.as_cut > dual.step && dual.as_cut < 1.3 * dual.step, "%g", dual.as_cut);
    EXPECT(strstr(text, "schedule interleaved needs a multiple of 16 micro-batches, not 120"));
    EXPECT(strstr(text, "* dualpipe "), "the configuration's own");
    EXPECT(strstr(text, "ranks 0 and 15: embedding, layers 0-3 (3 dense)"));
    EXPECT(strstr(text, "ranks 7 and 8: layers 28-31"));
    EXPECT(strstr(text, "ranks 0 and 15: layer 60, head, 1 MTP"));
    EXPECT(strstr(text, "embedding (MTP shares it) on ranks 0 and 15: gradients are summed over them"));
    free(text);
}

TEST(plan_schedule_options_go_before_the_configuration) {
    Call call = {.config = "configs/tiny.json", .ranks = 1};
    char *text = said(call);
    EXPECT(strcmp(text, "") == 0, "one rank, nothing asked:\n%s", text);
    free(text);

    call.args.pp = 4, call.args.micro_batches = 24;
    text = said(call);
    EXPECT(strstr(text, "pp 4, 24 micro-batches; F 1, I 1, W 1, B 2, F&B 3"), "%s", text);
    EXPECT(!strstr(text, "exchange"), "one expert rank");
    EXPECT(strstr(text, "schedule paired is for one pipeline rank, not for 4; schedules for more: 1f1b"), "%s", text);
    EXPECT(!strstr(text, "\nstages "), "none is chosen");
    const Row interleaved = row_of(text, "interleaved", "(P-1)(F+B)");
    EXPECT(interleaved.formula == 4.5 && interleaved.step == 24 * 3 + 4.5 && interleaved.as_cut == 0,
           "four layers make no eight stages:\n%s", text);
    free(text);

    call.args.schedule = "zb1p";
    text = said(call);
    EXPECT(strstr(text, "* zb1p ") && strstr(text, "of zb1p by FLOPs"), "%s", text);
    EXPECT(strstr(line_with(text, "embedding (MTP"), "on ranks 0 and 3"), "%s", line_with(text, "embedding (MTP"));
    free(text);

    /* The batch decides, if no option does: 8 sequences of a step, one a micro-batch. */
    Call batch = {.config = "configs/tiny.json", .ranks = 2};
    batch.args.sets[0] = "train.micro_batch_size=1";
    batch.args.n_sets = 1;
    batch.args.pp = 2;
    text = said(batch);
    EXPECT(strstr(text, "pp 2, 4 micro-batches;"), "%s", text);
    free(text);
}

TEST(plan_schedule_draws) {
    char path[512], err[ERR_LEN], *data;
    size_t size;
    Call call = {.config = "configs/tiny.json", .ranks = 1};
    call.args.pp = 2, call.args.micro_batches = 4, call.args.schedule = "dualpipe", call.args.draw = path;
    snprintf(path, sizeof path, "%s/schedule.svg", test_tmp_dir());
    char *text = said(call);
    EXPECT(strstr(text, "schedule.svg: dualpipe: pp 2, 4 micro-batches; bubble (P/2-1)(F&B+2F-B-W) = 0, step 12"), "%s",
           text);
    free(text);
    REQUIRE(file_read_all(&data, &size, path, 1 << 20, err) == 0, "%s", err);
    EXPECT(strncmp(data, "<svg ", 5) == 0 && strstr(data, "F&amp;B+2F-B-W") && strstr(data, "</svg>"));
    free(data);

    snprintf(path, sizeof path, "%s/schedule.txt", test_tmp_dir());
    free(said(call));
    REQUIRE(file_read_all(&data, &size, path, 1 << 20, err) == 0, "%s", err);
    EXPECT(strncmp(data, "rank 0 F0 f2 F1 b2--- f3&B0--- b3--- I1 W1 \nrank 1 ", 51) == 0, "%s", data);
    free(data);
}

static void plan_out(void *arg) {
    plan_into(stderr, (const Call *)arg);
}

TEST(plan_schedule_refuses) {
    static const struct {
        const char *schedule, *draw;
        int64_t pp, micro_batches;
        const char *part;
    } cases[] = {
        {"gpipes", NULL, 2, 8, "--schedule gpipes: there is no such schedule"},
        {"dualpipe", NULL, 3, 12, "error: schedule dualpipe needs an even number of ranks, not 3"},
        {"dualpipe", NULL, 4, 6, "hint:  a larger train.global_batch_size"},
        {NULL, "x.svg", 4, 8, "hint:  schedules for more: 1f1b"},
        {"1f1b", "x.png", 2, 8, "--draw x.png: a drawing is a .svg or a .txt"},
        {"1f1b", "x.svg", 2, 60000, "240000 steps are too many for a drawing"},
        {"1f1b", "/no/such/folder/x.svg", 2, 8, "/no/such/folder"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Call call = {.config = "configs/tiny.json", .ranks = 1};
        call.args.schedule = cases[i].schedule;
        call.args.draw = cases[i].draw;
        call.args.pp = cases[i].pp;
        call.args.micro_batches = cases[i].micro_batches;
        EXPECT(expect_exit(EXIT_USER, cases[i].part, plan_out, &call), "case %zu", i);
    }
    EXPECT(access("x.svg", F_OK) != 0, "a drawing was left");
}
