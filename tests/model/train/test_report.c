/* report.md: what is in it, what is absent, and that no text breaks it. */
#include "model/train/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/train/zscore.h"
#include "tests/data/config_base.h"
#include "tests/test.h"

typedef struct {
    Config config;
    RunState state;
    ValReport val;
    ReportSample samples[2];
    ReportFacts facts;
} Case;

static void read_config(Config *c, const char *const *sets, int n_sets) {
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(config_parse(c, CONFIG_BASE, strlen(CONFIG_BASE), "some/c.json", sets, n_sets, err, hint) == 0, "%s (%s)",
            err, hint);
}

/* 40 of 100 steps in two hours, and nothing evaluated. */
static void make_case(Case *x, const char *const *sets, int n_sets) {
    memset(x, 0, sizeof *x);
    read_config(&x->config, sets, n_sets);
    x->state.step = 40;
    x->state.tokens = 40 * 8 * 32;
    x->state.wall_s = 7200;
    zscore_init(&x->state.loss_z, 16);
    for (int i = 0; i < 20; i++) zscore_push(&x->state.loss_z, 5 - 0.1 * i);
    x->facts = (ReportFacts){.config = &x->config,
                             .state = &x->state,
                             .steps_total = 100,
                             .tokens_total = 25600,
                             .count = {1940000, 520000, 930000},
                             .flops_per_token = 8.9e6,
                             .data = "1.31M tokens in 1 shard",
                             .device = "cpu",
                             .n_devices = 2,
                             .checkpoint = "",
                             .version = "train_moe 0.1.0 (commit 1a2b3c4)"};
}

#define EXPECT_HAS(text, part) EXPECT(strstr(text, part), "no '%s' in\n%s", part, text)
#define EXPECT_LACKS(text, part) EXPECT(!strstr(text, part), "'%s' in\n%s", part, text)

TEST(report_of_a_finished_run) {
    static Case x;
    make_case(&x, (const char *const[]){"run.price_per_gpu_hour=2.5", "run.name=tiny", "sample.temperature=0.5"}, 3);
    x.facts.is_finished = true;
    x.state.update.skipped_total = 3;
    x.val.step = 40;
    x.val.n_sets = 2;
    x.val.sets[0] = (ValSet){.name = "austen", .loss = 4.44, .bytes_per_token = 2.77, .comparison = "bigram 2.48"};
    x.val.sets[1] = (ValSet){.name = "code", .loss = 8};
    x.val.n_choices = 1;
    x.val.choices[0] = (ChoiceResult){.name = "hellaswag", .n_examples = 10042, .accuracy = 0.3121, .chance = 0.25};
    x.facts.val = x.facts.choice = &x.val;
    x.samples[0] = (ReportSample){"It is", " a truth\nuniversally"};
    x.facts.samples = x.samples;
    x.facts.n_samples = 1;
    x.facts.sample_step = 40;
    x.facts.checkpoint = "runs/tiny/step_00000040";
    char *text = report_text(&x.facts);
    static const char *const parts[] = {
        "# tiny\n\nFinished at step 40 of 100, ",
        "| model | 1.94M parameters + MTP 520K, 930K active; hidden 128, 2 layers, 8 experts top 2 + 1 shared from "
        "layer 2, "
        "vocabulary 257 |\n",
        "| data | 1.31M tokens in 1 shard |\n",
        "40 of 100 steps, 10.2K of 25.6K tokens, sequences of 32; peak lr 0.001, final 0.0001 |\n",
        "| skipped updates | 3 |\n",
        "| training loss | 3.1000 in the last step, 3.8500 on average over the last 16 (nats a token) |\n",
        "| austen | loss 4.4400, perplexity 84.77, 2.312 bits a byte (1.603 nats) after step 40; nats a byte of "
        "others: "
        "bigram 2.48 |\n",
        "| code | loss 8.0000, perplexity 2981 after step 40 |\n",
        "| hellaswag | 31.2 % of 10042 questions right after step 40, chance 25.0 % |\n",
        "| speed | 1.4 tokens/s on 2 x cpu, 12.7M model FLOP/s |\n",
        "| time | 2h00m of training steps = 2.00 h x 2 = 4.00 device hours |\n",
        "| cost | 10.00 at 2.5 an hour |\n",
        "| weights | runs/tiny/step_00000040 |\n",
        "\nAfter step 40, temperature 0.5.\n\n    It is a truth\n    universally\n",
        "\n    {\n      \"version\": 1,",
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) EXPECT_HAS(text, parts[i]);
    EXPECT_LACKS(text, "None were drawn");
    free(text);
}

/* J3: what was not evaluated is absent, and nothing needs it. */
TEST(report_without_evaluation_samples_and_price) {
    static Case x;
    make_case(&x, NULL, 0);
    char *text = report_text(&x.facts);
    EXPECT_HAS(text, "Stopped early and saved, at step 40 of 100");
    EXPECT_HAS(text, "| validation | none since the last start |\n");
    EXPECT_HAS(text, "None were drawn");
    EXPECT_HAS(text, "| weights | not saved |\n");
    EXPECT_LACKS(text, "| cost ");
    EXPECT_LACKS(text, "questions right");
    EXPECT_LACKS(text, "skipped updates");
    free(text);

    make_case(&x, NULL, 0); /* stopped before its first step */
    x.state.step = x.state.tokens = 0;
    x.state.wall_s = 0;
    zscore_init(&x.state.loss_z, 16);
    text = report_text(&x.facts);
    EXPECT_LACKS(text, "nan");
    EXPECT_LACKS(text, "inf");
    EXPECT_LACKS(text, "| training loss ");
    free(text);
}

TEST(report_is_not_broken_by_names_and_samples) {
    static Case x;
    make_case(&x, (const char *const[]){"run.name=a|b\n# c"}, 1);
    x.facts.data = "1 tokens: shards/x|y_*.bin <b>";
    x.samples[0] = (ReportSample){"```\n", "# head\n| a | b |\n\033[2J<script>"};
    x.samples[1] = (ReportSample){"", ""};
    x.facts.samples = x.samples;
    x.facts.n_samples = 2;
    char *text = report_text(&x.facts);
    EXPECT_HAS(text, "# a|b # c\n");
    EXPECT_HAS(text, "| data | 1 tokens: shards/x\\|y_*.bin \\<b> |\n");
    EXPECT_HAS(text, "\n    ```\n    # head\n    | a | b |\n     [2J<script>\n");
    EXPECT_LACKS(text, "\n<script>");
    free(text);
}
