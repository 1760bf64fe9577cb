/* The configuration: what is read, in which order of precedence, what comes back out, and that no text breaks it. */
#include "data/config.h"

#include <glob.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/config_table.h"
#include "kernels/base/rng.h"
#include "tests/data/config_base.h"
#include "tests/test.h"

/* Reads the base with sets; fails the test with the message if it is refused. */
static void read_base(Config *c, const char *const *sets, int n_sets) {
    char err[ERR_LEN], hint[ERR_LEN];
    int result = config_parse(c, CONFIG_BASE, strlen(CONFIG_BASE), "some/c.json", sets, n_sets, err, hint);
    REQUIRE(result == 0, "%s; %s", err, hint);
}

static void read_text(Config *c, const char *text, const char *name) {
    char err[ERR_LEN], hint[ERR_LEN];
    int result = config_parse(c, text, strlen(text), name, NULL, 0, err, hint);
    REQUIRE(result == 0, "%s; %s", err, hint);
}

/* The base with its first `find` replaced. malloc'd. */
static char *changed_base(const char *find, const char *replace) {
    const char *at = strstr(CONFIG_BASE, find);
    REQUIRE(at, "the base has no %s", find);
    char *text = (char *)malloc(sizeof CONFIG_BASE + strlen(replace));
    sprintf(text, "%.*s%s%s", (int)(at - CONFIG_BASE), CONFIG_BASE, replace, at + strlen(find));
    return text;
}

/* Where a value came from is not part of what it is. */
static void forget_origin(Config *c) {
    memset(c->path, 0, sizeof c->path);
    memset(c->overrides, 0, sizeof c->overrides);
    memset(c->ignored, 0, sizeof c->ignored);
    memset(c->model.path, 0, sizeof c->model.path);
    c->n_overrides = 0;
}

static void expect_round_trip(const Config *c) {
    static Config first, back;
    char changed[256], err[ERR_LEN], hint[ERR_LEN];
    char *text = config_to_json(c);
    int result = config_parse(&back, text, strlen(text), "back.json", NULL, 0, err, hint);
    EXPECT(result == 0, "%s; %s in\n%s", err, hint, text);
    if (result == 0) {
        EXPECT(config_compare(c, &back, changed, sizeof changed, err) == 0 && !changed[0], "%s %s", err, changed);
        char *again = config_to_json(&back);
        memcpy(&first, c, sizeof first);
        forget_origin(&first);
        forget_origin(&back);
        EXPECT(memcmp(&first, &back, sizeof first) == 0, "not the same after a round trip:\n%s", text);
        if (!c->model.path[0]) EXPECT(strcmp(text, again) == 0, "printed differently:\n%s\n%s", text, again);
        free(again);
    }
    free(text);
}

static void write_file(const char *path, const char *text) {
    FILE *f = fopen(path, "wb");
    REQUIRE(f, "%s", path);
    fputs(text, f);
    REQUIRE(fclose(f) == 0, "%s", path);
}

TEST(config_defaults_are_those_of_v3) {
    static Config c;
    read_base(&c, NULL, 0);
    EXPECT(strcmp(c.run.name, "c") == 0 && strcmp(c.run.dir, "runs/c") == 0, "%s %s", c.run.name, c.run.dir);
    EXPECT(c.run.graphs, "steps are not replayed from graphs");
    EXPECT(strcmp(c.path, "some/c.json") == 0 && c.version == 1, "%s", c.path);
    EXPECT(c.train.beta1 == 0.9 && c.train.beta2 == 0.95 && c.train.eps == 1e-8, "Adam");
    EXPECT(c.train.weight_decay == 0.1 && c.train.grad_clip == 1 && c.train.init_std == 0.006, "decay, clip, init");
    EXPECT(c.train.bias_update_speed.value[0] == 0.001 && c.train.balance_alpha == 1e-4, "balancing");
    EXPECT(c.train.mtp_loss_weight.n == 1 && c.train.mtp_loss_weight.value[0] == 0.3, "MTP");
    EXPECT(c.train.lr_final == 1e-3 / 10 && c.train.lr_shape == SHAPE_COSINE, "lr_final %g", c.train.lr_final);
    EXPECT(c.train.max_skipped_in_a_row == 10 && c.train.z_window == 128 && c.train.skip_if_z == 0, "skips");
    EXPECT(c.sample.tokens == 40 && c.sample.temperature == 0.7 && c.sample.top_k == 0 && c.sample.top_p == 1,
           "samples");
    EXPECT(c.checkpoint.keep_last == 2 && c.log.every_steps == 1 && c.eval.tokens == 0, "files");
    EXPECT(c.moe.capacity == 0 && c.parallel.ep == 0 && c.memory.recompute == RECOMPUTE_AUTO, "auto and worst");
    EXPECT(c.model.topk_method == TOPK_NOAUX_TC && c.model.scoring_func == SCORING_SIGMOID, "gate");
    EXPECT(c.model.bos_token_id == -1 && c.data.document_token == -1 && c.model.q_lora_rank == 0, "null");
    EXPECT(c.data.synthetic && c.data.n_train == 0 && c.data.n_val == 0 && c.data.shuffle, "data");
}

/* Integers above 2^31 and 2^53 arrive exactly (cJSON#14, #87, #151). */
TEST(config_integers_are_exact) {
    static Config c;
    const char *sets[] = {"train.tokens=14800000000000", "run.seed=18446744073709551615"};
    read_base(&c, sets, 2);
    EXPECT_EQ(c.train.tokens, 14800000000000);
    EXPECT(c.run.seed == UINT64_MAX, "%llu", (unsigned long long)c.run.seed);
    const char *more[] = {"train.tokens=100e9", "run.seed=9007199254740993", "train.seq_len=0.32e2"};
    read_base(&c, more, 3);
    EXPECT_EQ(c.train.tokens, 100000000000);
    EXPECT_EQ(c.train.seq_len, 32);
    EXPECT(c.run.seed == 9007199254740993u, "%llu", (unsigned long long)c.run.seed);
}

/* A byte order mark is no error (cJSON#290); neither are comment keys, also repeated ones. */
TEST(config_accepts_mark_and_comments) {
    static Config c;
    char *text = changed_base("{\n  \"version\"", "\xEF\xBB\xBF{\n  \"//\": \"a\", \"//\": {\"b\": 1},\n  \"version\"");
    read_text(&c, text, "c.json");
    free(text);
    text = changed_base("\"seed\": 7", "\"//\": 1, \"seed\": 7, \"//\": 2");
    read_text(&c, text, "c.json");
    EXPECT(c.run.seed == 7, "seed");
    free(text);
}

TEST(config_sets_win_over_the_file) {
    static Config c;
    const char *sets[] = {
        "train.lr=5e-4",      "run.dir=2024",          "train.lr=3e-4",       "model.hidden_size=64",
        "run.name=\"a b\"",   "data.train=x/*.bin",    "model.q_lora_rank=8", "sample.prompts=[\"It is\"]",
        "train.tokens=51200", "memory.recompute=none", "moe.capacity=2",      "parallel.ep=4"};
    read_base(&c, sets, sizeof sets / sizeof *sets);
    EXPECT(c.train.lr.value[0] == 3e-4, "the later one wins: %g", c.train.lr.value[0]);
    EXPECT(strcmp(c.run.dir, "2024") == 0 && strcmp(c.run.name, "a b") == 0, "%s %s", c.run.dir, c.run.name);
    EXPECT(c.model.hidden_size == 64 && c.model.q_lora_rank == 8, "model");
    EXPECT(c.data.n_train == 1 && strcmp(c.data.train[0].path, "x/*.bin") == 0 && !c.data.synthetic, "data");
    EXPECT(strcmp(c.data.train[0].name, "train") == 0 && c.data.train[0].weight == 1, "%s", c.data.train[0].name);
    EXPECT(c.train.tokens == 51200 && c.train.steps == 0, "--set of tokens drops the file's steps");
    EXPECT(c.memory.recompute == 0 && c.moe.capacity == 2 && c.parallel.ep == 4, "unions");
    EXPECT(c.n_overrides == 11, "%d: %s", c.n_overrides, c.overrides);
    EXPECT(strncmp(c.overrides, "train.lr, run.dir, model.hidden_size, ", 38) == 0, "%s", c.overrides);
}

TEST(config_set_makes_sections_and_objects) {
    static Config c;
    const char *sets[] = {"eval.tokens=5", "model.rope_scaling.type=1"};
    char err[ERR_LEN], hint[ERR_LEN];
    read_base(&c, sets, 1);
    EXPECT_EQ(c.eval.tokens, 5);
    EXPECT(config_parse(&c, CONFIG_BASE, strlen(CONFIG_BASE), "c.json", sets, 2, err, hint) == -1, "type is no row");
    EXPECT(strstr(hint, "rope_type"), "%s", hint);
    const char *yarn[] = {"model.rope_scaling.rope_type=yarn",
                          "model.rope_scaling.original_max_position_embeddings=16"};
    read_base(&c, yarn, 2);
    EXPECT(c.model.rope.yarn && c.model.rope.factor == 4, "factor %g", c.model.rope.factor);
    static Config into_text;
    const char *wrong[] = {"model.rope_scaling=5", "model.rope_scaling.factor=2"};
    EXPECT(config_parse(&into_text, CONFIG_BASE, strlen(CONFIG_BASE), "c.json", wrong, 2, err, hint) == -1, "into 5");
    EXPECT(strstr(err, "is no object"), "%s", err);
}

TEST(config_reads_lists) {
    static Config c;
    const char *sets[] = {
        "data.train=[{\"name\": \"web\", \"path\": \"w\", \"weight\": 0.85}, {\"name\": \"code\", \"path\": \"c\"}]",
        "data.val=v_*.bin",
        "eval.choice=[{\"name\": \"hellaswag\", \"path\": \"h.bin\"}, {\"name\": \"mmlu\", \"path\": \"m.bin\"}]",
        "data.skip=[[0, 8], [100, 101]]",
        "memory.recompute=[\"swiglu\", \"norms\"]",
        "train.lr=[[0, 1e-3], [5000, 1e-3], [5000, 1e-4]]",
        "train.global_batch_size=[[0, 4], [1e4, 16]]",
        "model.eos_token_id=[3, 4]",
    };
    read_base(&c, sets, sizeof sets / sizeof *sets);
    EXPECT(c.data.n_train == 2 && c.data.train[0].weight == 0.85 && c.data.train[1].weight == 1, "sources");
    EXPECT(c.data.n_val == 1 && strcmp(c.data.val[0].name, "val") == 0, "%s", c.data.val[0].name);
    EXPECT(c.eval.n_choice == 2 && strcmp(c.eval.choice[1].name, "mmlu") == 0, "%s", c.eval.choice[1].name);
    expect_round_trip(&c);
    EXPECT(c.data.n_skip == 2 && c.data.skip[1][0] == 100 && c.data.skip[1][1] == 101, "skips");
    EXPECT(c.memory.recompute == (RECOMPUTE_SWIGLU | RECOMPUTE_NORMS), "%d", c.memory.recompute);
    EXPECT(c.train.lr.n == 3 && c.train.lr.tokens[2] == 5000 && c.train.lr_final == 1e-4, "lr");
    EXPECT(c.train.global_batch_size.n == 2 && c.train.global_batch_size.tokens[1] == 10000, "batch");
    EXPECT_EQ(c.model.eos_token_id, 3);
}

/* A pasted config.json: the keys of transformers 4 and 5, named and ignored where training has no use for them. */
TEST(config_takes_both_forms_of_rope) {
    static const char *const forms[] = {
        "\"rope_theta\": 10000.0,\n    \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, "
        "\"original_max_position_embeddings\": 16, \"beta_fast\": 32, \"beta_slow\": 1, \"mscale\": 1.0, "
        "\"mscale_all_dim\": 1.0}",
        "\"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": 10000.0, \"factor\": 4.0, "
        "\"original_max_position_embeddings\": 16, \"beta_fast\": 32.0, \"beta_slow\": 1.0, \"mscale\": 1.0, "
        "\"mscale_all_dim\": 1.0, \"type\": \"yarn\", \"partial_rotary_factor\": 1.0}",
    };
    static Config c[2], plain;
    const char *old_form = "\"rope_theta\": 10000.0,\n    \"rope_scaling\": null";
    for (int i = 0; i < 2; i++) {
        char *text = changed_base(old_form, forms[i]);
        read_text(&c[i], text, "c.json");
        free(text);
        const RopeConfig *r = &c[i].model.rope;
        EXPECT(r->yarn && r->theta == 1e4 && r->factor == 4 && r->mscale == 1 && r->mscale_all_dim == 1, "form %d", i);
        EXPECT(r->original_max_position_embeddings == 16 && !r->has_attention_factor, "form %d", i);
    }
    EXPECT(memcmp(&c[0], &c[1], sizeof c[0]) == 0, "the two forms differ");

    char *text = changed_base(old_form, "\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 5e4}");
    read_text(&plain, text, "c.json");
    EXPECT(!plain.model.rope.yarn && plain.model.rope.theta == 5e4 && plain.model.rope.factor == 1, "default");
    free(text);
    text = changed_base("\"rope_scaling\": null", "\"rope_scaling\": null, \"rope_parameters\": null");
    read_text(&plain, text, "c.json");
    free(text);
    text = changed_base("\"rope_scaling\": null", "\"rope_scaling\": {\"type\": \"yarn\", \"attention_factor\": 1.5, "
                                                  "\"original_max_position_embeddings\": 64}");
    read_text(&plain, text, "c.json");
    EXPECT(plain.model.rope.has_attention_factor && plain.model.rope.attention_factor == 1.5, "attention_factor");
    free(text);
}

TEST(config_names_what_it_ignores) {
    static Config c;
    char *text =
        changed_base("\"model_type\"", "\"architectures\": [\"DeepseekV3ForCausalLM\"], \"torch_dtype\": \"bfloat16\", "
                                       "\"initializer_range\": 0.02, \"quantization_config\": {\"a\": [1]}, "
                                       "\"attention_bias\": false, \"tie_word_embeddings\": false, "
                                       "\"attention_dropout\": 0.0, \"hidden_act\": \"silu\", \"model_type\"");
    read_text(&c, text, "c.json");
    EXPECT(strcmp(c.ignored, "architectures, torch_dtype, initializer_range, quantization_config") == 0, "%s",
           c.ignored);
    free(text);
}

/* "model" by path: from the configuration's folder, a file or its folder; messages then name the model's file. */
TEST(config_model_by_path) {
    static Config c, inline_model;
    char path[512], err[ERR_LEN], hint[ERR_LEN];
    const char *dir = test_tmp_dir(), *start = strstr(CONFIG_BASE, "\"model\": {"),
               *end = strstr(CONFIG_BASE, "},\n  \"data\"");
    char *model = strndup(start + 9, (size_t)(end + 1 - start - 9));
    snprintf(path, sizeof path, "%s/config.json", dir);
    write_file(path, model);
    char *text = (char *)malloc(sizeof CONFIG_BASE);
    static const char *const spellings[] = {"config.json", "."};
    for (int i = 0; i < 2; i++) {
        sprintf(text, "%.*s\"model\": \"%s\"%s", (int)(start - CONFIG_BASE), CONFIG_BASE, spellings[i], end + 1);
        snprintf(path, sizeof path, "%s/c.json", dir);
        write_file(path, text);
        REQUIRE(config_load(&c, path, NULL, 0, err, hint) == 0, "%s", err);
        EXPECT(strstr(c.model.path, "config.json") && strstr(c.model.path, dir), "%s", c.model.path);
        read_base(&inline_model, NULL, 0);
        expect_round_trip(&c);
        memset(c.model.path, 0, sizeof c.model.path);
        EXPECT(memcmp(&c.model, &inline_model.model, sizeof c.model) == 0, "the models differ");
    }
    const char *sets[] = {"model.hidden_size=64"};
    REQUIRE(config_load(&c, path, sets, 1, err, hint) == 0, "%s", err);
    EXPECT_EQ(c.model.hidden_size, 64);

    char model_path[512], set[600];
    snprintf(model_path, sizeof model_path, "%s/other.json", dir);
    write_file(model_path, "{\n \"hidden_size\": \"x\"}");
    snprintf(set, sizeof set, "model=%s", model_path);
    const char *other = set;
    EXPECT(config_load(&c, path, &other, 1, err, hint) == -1, "accepted");
    EXPECT(strstr(err, "other.json:2: model.hidden_size must be an integer"), "%s", err);
    write_file(model_path, "[]");
    EXPECT(config_load(&c, path, &other, 1, err, hint) == -1 && strstr(err, "must be an object"), "%s", err);
    write_file(model_path, "{");
    EXPECT(config_load(&c, path, &other, 1, err, hint) == -1 && strstr(err, "other.json:1:2"), "%s", err);
    free(model);
    free(text);
}

TEST(config_load_names_a_missing_file) {
    static Config c;
    char err[ERR_LEN], hint[ERR_LEN], name[PATH_LEN + 10];
    EXPECT(config_load(&c, "no/such.json", NULL, 0, err, hint) == -1, "read");
    EXPECT(strstr(err, "no/such.json") && strstr(hint, "configs/"), "%s; %s", err, hint);
    memset(name, 'a', sizeof name);
    name[sizeof name - 1] = 0;
    EXPECT(config_parse(&c, CONFIG_BASE, strlen(CONFIG_BASE), name, NULL, 0, err, hint) == -1, "long path");
    EXPECT(strstr(err, "the path is too long"), "%s", err);
}

/* All dense layers: what belongs to experts alone is not held against the user. */
TEST(config_dense_model_ignores_expert_rules) {
    static Config c;
    const char *sets[] = {"model.first_k_dense_replace=2", "model.num_experts_per_tok=9", "model.n_group=3"};
    read_base(&c, sets, 3);
    EXPECT_EQ(c.model.first_k_dense_replace, 2);
}

/* --- what comes out -------------------------------------------------------------------------------------------- */

TEST(config_files_load_and_round_trip) {
    glob_t files;
    static Config c;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(glob("configs/*.json", 0, NULL, &files) == 0, "no configs/*.json here");
    EXPECT(files.gl_pathc >= 10, "%zu files", files.gl_pathc);
    for (size_t i = 0; i < files.gl_pathc; i++) {
        int result = config_load(&c, files.gl_pathv[i], NULL, 0, err, hint);
        EXPECT(result == 0, "%s; %s", err, hint);
        if (result != 0) continue;
        expect_round_trip(&c);
        const char *stem = strrchr(files.gl_pathv[i], '/') + 1;
        EXPECT(strncmp(stem, c.run.name, strlen(c.run.name)) == 0, "%s is named %s", stem, c.run.name);
    }
    globfree(&files);
}

/* Every field set to the value it has: nothing changes, and the list of overrides is cut, not overrun. */
TEST(config_sets_of_all_fields) {
    static Config c, base;
    static char texts[256][512];
    const char *sets[256];
    int n = 0;
    read_base(&base, NULL, 0);
    for (int i = 0; i < config_n_fields && n < 256; i++) {
        const Field *f = &config_fields[i];
        if (!section_is_top(f->section) || f->size == 0) continue;
        char *value = field_text(f, &base);
        if (strcmp(f->name, "tokens") != 0 || strcmp(f->section, "train") != 0) {
            snprintf(texts[n], sizeof texts[n], "%s.%s=%s", f->section, f->name, value);
            sets[n] = texts[n];
            n++;
        }
        free(value);
    }
    EXPECT(n > 80, "%d fields", n);
    read_base(&c, sets, n);
    EXPECT_EQ(c.n_overrides, n);
    EXPECT(strlen(c.overrides) > 900 && strcmp(c.overrides + strlen(c.overrides) - 5, ", ...") == 0, "%s", c.overrides);
    forget_origin(&c);
    forget_origin(&base);
    EXPECT(memcmp(&c, &base, sizeof c) == 0, "something changed");
}

TEST(config_round_trip_of_every_kind) {
    static Config c;
    const char *sets[] = {
        "data.train=[{\"name\": \"w\\\"eb\", \"path\": \"w\\n\", \"weight\": 0.1}]",
        "data.val=[{\"name\": \"v\", \"path\": \"p\"}]",
        "eval.choice=\"h.bin\"",
        "data.skip=[[0, 8], [100, 101]]",
        "memory.recompute=[\"swiglu\", \"up_projections\"]",
        "train.lr=[[0, 0.1], [5000, 0.3], [5000, 1e-300]]",
        "train.global_batch_size=[[0, 4], [1e4, 16]]",
        "train.tokens=14800000000001",
        "run.seed=18446744073709551615",
        "model.rope_scaling={\"type\": \"yarn\", \"original_max_position_embeddings\": 16, \"mscale\": 0.707}",
        "sample.prompts=[\"a\\tb\\u00e9\", \"\"]",
        "moe.capacity=1.1",
        "parallel.ep=2",
        "precision.compute=fp8",
        "data.document_token=0",
        "model.bos_token_id=0",
    };
    read_base(&c, sets, sizeof sets / sizeof *sets);
    expect_round_trip(&c);
}

/* Resume (Megatron-LM#2616): what the user writes now wins and is listed; what contradicts the weights is refused. */
TEST(config_compare_on_resume) {
    static Config saved, now;
    char changed[256], err[ERR_LEN];
    read_base(&saved, NULL, 0);
    const char *allowed[] = {"train.lr=5e-4", "run.dir=elsewhere", "train.steps=200"};
    read_base(&now, allowed, 3);
    EXPECT(config_compare(&saved, &now, changed, sizeof changed, err) == 0, "%s", err);
    EXPECT(strcmp(changed, "run.dir \"runs/c\" -> \"elsewhere\"; train.steps 100 -> 200; train.lr 0.001 -> 0.0005; "
                           "train.lr_final 0.0001 -> 5e-05") == 0,
           "%s", changed);
    char small[40];
    EXPECT(config_compare(&saved, &now, small, sizeof small, err) == 0, "%s", err);
    EXPECT(strcmp(small + strlen(small) - 3, "...") == 0 && strlen(small) < sizeof small, "%s", small);

    static const char *const refused[][2] = {
        {"model.hidden_size=64", "model.hidden_size is 128 in the saved run, but 64 in the configuration"},
        {"model.rope_theta=5", "model.rope_theta is 10000 in the saved run, but 5"},
        {"model.q_lora_rank=8", "model.q_lora_rank is null in the saved run, but 8"},
        {"data.train=other/*.bin",
         "data.train is \"synthetic\" in the saved run, but [{\"name\": \"train\", \"path\": \"other/*.bin\""},
        {"train.seq_len=16", "train.seq_len is 32"},
        {"run.seed=8", "run.seed is 7"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        read_base(&now, &refused[i][0], 1);
        EXPECT(config_compare(&saved, &now, changed, sizeof changed, err) == -1, "%s", refused[i][0]);
        EXPECT(strstr(err, refused[i][1]), "%s", err);
    }
}

/* A corpus may move, or be packed; that it is the same, its identity tells (source.h). Names and weights may not. */
TEST(config_compare_of_sources) {
    static Config saved, now;
    char changed[512], err[ERR_LEN];
    const char *const was = "data.train=[{\"name\": \"a\", \"path\": \"x/*.bin\", \"weight\": 3}, "
                            "{\"name\": \"b\", \"path\": \"y/*.bin\"}]";
    static const struct {
        const char *set;
        int result;
    } cases[] = {
        {"data.train=[{\"name\": \"a\", \"path\": \"z/*\", \"weight\": 3}, {\"name\": \"b\", \"path\": \"y/*.bin\"}]",
         0},
        {"data.train=[{\"name\": \"a\", \"path\": \"x/*.bin\", \"weight\": 2}, {\"name\": \"b\", \"path\": "
         "\"y/*.bin\"}]",
         -1},
        {"data.train=[{\"name\": \"a\", \"path\": \"x/*.bin\", \"weight\": 3}, {\"name\": \"c\", \"path\": "
         "\"y/*.bin\"}]",
         -1},
        {"data.train=[{\"name\": \"a\", \"path\": \"x/*.bin\", \"weight\": 3}]", -1},
        {"data.train=synthetic", -1},
    };
    read_base(&saved, &was, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        read_base(&now, &cases[i].set, 1);
        EXPECT(config_compare(&saved, &now, changed, sizeof changed, err) == cases[i].result, "%s", cases[i].set);
        if (cases[i].result == 0) EXPECT(strstr(changed, "data.train") && strstr(changed, "z/*"), "%s", changed);
        if (cases[i].result != 0) EXPECT(strstr(err, "data.train is "), "%s", err);
    }
}

static int help_rows(const char *word, char **text) {
    size_t size;
    FILE *out = open_memstream(text, &size);
    int n = config_help(out, word);
    fclose(out);
    return n;
}

TEST(config_help_finds_rows) {
    static const struct {
        const char *word;
        int least, most;
        const char *part;
    } cases[] = {
        {NULL, 100, 500, "train.lr "},
        {"train", 20, 60, "train.global_batch_size"},
        {"train.lr", 1, 1, "takes      a number in [0, 1e+09] or a list of [tokens, value]\n  default    none"},
        {"model.hidden_size", 1, 1, "on resume  must be the same (architecture)"},
        {"model.attention_bias", 1, 1, "allowed    [false]"},
        {"model.torch_dtype", 1, 1, "may stay"},
        {"run.stop_after_minutes", 1, 1, "unit       minutes"},
        {"model", 40, 100, "ignored: architectures"},
        {"warm", 1, 5, "train.lr_warmup_steps"},
        {"YARN", 1, 3, "model.rope_scaling"},
        {"zebra", 0, 0, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *text = NULL;
        int n = help_rows(cases[i].word, &text);
        EXPECT(n >= cases[i].least && n <= cases[i].most, "%s: %d rows", cases[i].word, n);
        EXPECT(strstr(text, cases[i].part), "%s:\n%s", cases[i].word, text);
        free(text);
    }
    char *text = NULL;
    help_rows("train", &text);
    EXPECT(!strstr(text, "data.train") && !strstr(text, "model."), "only the section:\n%s", text);
    free(text);
}

TEST(config_schedule_at) {
    const Schedule one = {1, {0}, {7}};
    EXPECT(schedule_at(&one, SHAPE_WSD, 123) == 7, "a number is the same everywhere");
    const Schedule s = {4, {100, 200, 200, 300}, {1, 3, 10, 20}};
    static const struct {
        int64_t tokens;
        double constant, linear, cosine;
    } points[] = {
        {0, 1, 1, 1},           {100, 1, 1, 1},    {150, 1, 2, 2},
        {199, 1, 2.98, 2.9995}, {200, 10, 10, 10}, {225, 10, 12.5, 11.4645},
        {250, 10, 15, 15},      {300, 20, 20, 20}, {INT64_MAX, 20, 20, 20},
    };
    for (size_t i = 0; i < sizeof points / sizeof *points; i++) {
        EXPECT_NEAR(schedule_at(&s, SHAPE_CONSTANT, points[i].tokens), points[i].constant, 1e-12);
        EXPECT_NEAR(schedule_at(&s, SHAPE_LINEAR, points[i].tokens), points[i].linear, 1e-9);
        EXPECT_NEAR(schedule_at(&s, SHAPE_COSINE, points[i].tokens), points[i].cosine, 1e-4);
    }
}

/* V3's own schedules (report, section 4.2), as configs/deepseek_v3.json says them. */
TEST(config_says_the_schedules_of_v3) {
    static Config c;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(config_load(&c, "configs/deepseek_v3.json", NULL, 0, err, hint) == 0, "%s", err);
    const TrainConfig *t = &c.train;
    EXPECT_NEAR(schedule_at(&t->lr, t->lr_shape, 9000000000000), 2.2e-4, 1e-18);
    EXPECT_NEAR(schedule_at(&t->lr, t->lr_shape, 12150000000000), 1.21e-4, 1e-12);
    EXPECT_NEAR(schedule_at(&t->lr, t->lr_shape, 14400000000000), 2.2e-5, 1e-18);
    EXPECT_NEAR(schedule_at(&t->lr, t->lr_shape, 14700000000000), 7.3e-6, 1e-18);
    EXPECT_NEAR(schedule_at(&t->global_batch_size, t->global_batch_size_shape, 0), 3072, 0);
    EXPECT_NEAR(schedule_at(&t->global_batch_size, t->global_batch_size_shape, 500000000000), 15360, 0);
    EXPECT_NEAR(schedule_at(&t->bias_update_speed, t->bias_update_speed_shape, 14299999999999), 0.001, 0);
    EXPECT_NEAR(schedule_at(&t->bias_update_speed, t->bias_update_speed_shape, 14300000000000), 0, 0);
    EXPECT_NEAR(schedule_at(&t->mtp_loss_weight, t->mtp_loss_weight_shape, 10000000000000), 0.1, 0);
}

/* --- no text breaks it ----------------------------------------------------------------------------------------- */

/* Replaces, removes, doubles or inserts at a random place, one to four times. */
static size_t mutate(char *text, size_t size, size_t size_max, uint64_t number) {
    static const char *const pieces[] = {"null", "-1",      "1e999", "\"\"",  "{}",   "[]",
                                         ",",    "}",       "]",     "\\u",   "0.5",  "true",
                                         "//",   "[[0,1]]", "\xFF",  "\"a\"", "1e30", "99999999999"};
    uint64_t n_changes = 1 + rng_bits(11, RNG_TEST, number, 0) % 4;
    for (uint64_t k = 0; k < n_changes; k++) {
        uint64_t bits = rng_bits(11, RNG_TEST, number, 2 * k + 1), more = rng_bits(11, RNG_TEST, number, 2 * k + 2);
        size_t at = (size_t)(bits >> 8) % size, length = 1 + (size_t)(more >> 8) % 12;
        if (at + length >= size) length = 1;
        const char *piece = pieces[(more >> 32) % (sizeof pieces / sizeof *pieces)];
        size_t piece_length = strlen(piece);
        if (bits % 4 == 0) {
            text[at] = (char)(more & 0xFF);
        } else if (bits % 4 == 1 && size > length + 1) {
            memmove(text + at, text + at + length, size - at - length);
            size -= length;
        } else if (bits % 4 == 2 && size + length < size_max) {
            memmove(text + at + length, text + at, size - at);
            size += length;
        } else if (size + piece_length < size_max) {
            memmove(text + at + piece_length, text + at, size - at);
            memcpy(text + at, piece, piece_length);
            size += piece_length;
        }
    }
    return size;
}

TEST(config_survives_mutations) {
    static Config c;
    static char source[16384];
    char err[ERR_LEN], hint[ERR_LEN];
    FILE *f = fopen("configs/tiny.json", "rb");
    REQUIRE(f, "configs/tiny.json");
    size_t size = fread(source, 1, sizeof source, f);
    fclose(f);
    REQUIRE(size > 0 && size < sizeof source, "%zu bytes", size);
    int n_accepted = 0;
    for (uint64_t i = 0; i < 2000; i++) {
        char *text = (char *)malloc(size + 256);
        memcpy(text, source, size);
        size_t mutated = mutate(text, size, size + 256, i);
        char *exact = (char *)malloc(mutated);
        memcpy(exact, text, mutated);
        int result = config_parse(&c, exact, mutated, "m.json", NULL, 0, err, hint);
        EXPECT(result == 0 ? !err[0] : strncmp(err, "m.json", 6) == 0, "mutation %llu: %s", (unsigned long long)i, err);
        EXPECT(strlen(err) < ERR_LEN && strlen(hint) < ERR_LEN, "length");
        if (result == 0) expect_round_trip(&c);
        n_accepted += result == 0;
        free(exact);
        free(text);
    }
    EXPECT(n_accepted > 20 && n_accepted < 1500, "%d of 2000 mutations still parse", n_accepted);
}

TEST(config_first_difference_names_the_field) {
    static const char *const sets[][2] = {{"train.lr=0.5", "train.lr is "},
                                          {"model.hidden_size=64", "model.hidden_size is "},
                                          {"run.dir=elsewhere", "run.dir is "}};
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        Config first, here;
        char err[ERR_LEN], hint[ERR_LEN], text[256] = "untouched";
        REQUIRE(config_load(&first, "configs/bytes_debug.json", NULL, 0, err, hint) == 0, "%s", err);
        REQUIRE(config_load(&here, "configs/bytes_debug.json", sets[i], 1, err, hint) == 0, "%s", err);
        config_first_difference(&first, &first, text, sizeof text);
        EXPECT(strcmp(text, "untouched") == 0, "%s", text);
        config_first_difference(&first, &here, text, sizeof text);
        EXPECT(strncmp(text, sets[i][1], strlen(sets[i][1])) == 0, "%s", text);
    }
}
