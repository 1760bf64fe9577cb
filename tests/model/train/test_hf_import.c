/* Import: what other writers make is taken, what does not fit is refused by name, and a folder becomes a run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hf_test.h"
#include "kernels/base/file.h"
#include "model/train/checkpoint.h"

/* ---- import: what is accepted ------------------------------------------------------------------------------------ */

/* One folder, changed by each case. */
static Fixture f;
static Bag bag;
static const char *dir;

static void begin(const char *const *sets, HfDtype dtype) {
    fixture_open(&f, sets);
    dir = hf_folder_of("hf");
    hf_export_to(&f, dir, dtype, HF_SHARD_BYTES);
    bag_read(&bag, hf_file_in(dir, "model.safetensors"));
}

static void finish(void) {
    free_bags();
    fixture_close(&f);
}

static int open_now(HfWeights **w, char *note, char *err, char *hint) {
    return hf_open(w, dir, &f.model.params, &f.config.model, note, err, hint);
}

/* gate_up_proj (E, 2F, D) and down_proj (E, D, F) of a layer in place of its experts, data and scales alike. */
static void stack_experts(int layer, const char *tail, const char *stacked_tail) {
    static const char *const parts[] = {"gate_proj", "up_proj", "down_proj"};
    const int E = f.config.model.n_routed_experts;
    for (int down = 0; down < 2; down++) {
        char name[256], *data = NULL;
        int64_t bytes = 0, shape[3] = {E, 0, 0};
        SafetensorsDtype dtype = SAFETENSORS_F32;
        for (int e = 0; e < E; e++)
            for (int part = down ? 2 : 0; part < (down ? 3 : 2); part++) {
                snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.%s", layer, e, parts[part], tail);
                const int64_t i = bag_find(&bag, name), n = bag.entry[i].end - bag.entry[i].begin;
                data = (char *)realloc(data, (size_t)(bytes + n));
                memcpy(data + bytes, bag.data[i], (size_t)n);
                bytes += n;
                dtype = bag.entry[i].dtype;
                shape[1] = bag.entry[i].shape[0] * (down ? 1 : 2);
                shape[2] = bag.entry[i].shape[1];
                bag_drop(&bag, i);
            }
        snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%s%s", layer, down ? "down_proj" : "gate_up_proj",
                 stacked_tail);
        bag_add(&bag, name, dtype, 3, shape, data);
        free(data);
    }
}

TEST(hf_import_takes_stacked_experts_and_old_keys) {
    const int64_t two = 2;
    begin((const char *const[]){"model.n_routed_experts=8", NULL}, HF_FP32);
    for (int layer = 1; layer < 4; layer++) stack_experts(layer, "weight", "");
    bag_add(&bag, "model.layers.0.self_attn.rotary_emb.inv_freq", SAFETENSORS_F32, 1, &two, NULL);
    bag_write(&bag, hf_file_in(dir, "model.safetensors"));
    hf_expect_weights(&f, dir, HF_FP32, "stacked");
    finish();
}

/* Experts of 128 rows: then the blocks of gate and up are those of the stack, and FP8 is the same bits as unstacked. */
TEST(hf_import_takes_stacked_fp8) {
    char err[ERR_LEN], hint[ERR_LEN], note[HF_NOTE_LEN];
    begin((const char *const[]){"model.moe_intermediate_size=128", "model.num_nextn_predict_layers=0",
                                "model.hidden_size=150", NULL},
          HF_FP8);
    HfWeights *before, *after;
    REQUIRE(open_now(&before, note, err, hint) == 0, "%s", err);
    for (int layer = 1; layer < 3; layer++) {
        stack_experts(layer, "weight", "");
        stack_experts(layer, "weight_scale_inv", "_scale_inv");
    }
    dir = hf_folder_of("stacked");
    REQUIRE(dir_make(dir, err) == 0, "%s", err);
    bag_write(&bag, hf_file_in(dir, "model.safetensors"));
    REQUIRE(open_now(&after, note, err, hint) == 0, "%s", err);
    for (int64_t i = 0; i < f.model.params.n_named; i++) {
        const int64_t n = f.model.params.named[i].numel;
        float *x = (float *)malloc((size_t)n * 4), *y = (float *)malloc((size_t)n * 4);
        REQUIRE(hf_read(before, i, 0, n, x, err) == 0 && hf_read(after, i, 0, n, y, err) == 0, "%s", err);
        EXPECT(memcmp(x, y, (size_t)n * 4) == 0, "%s", f.model.params.named[i].name);
        free(x);
        free(y);
    }
    hf_close(before);
    hf_close(after);
    finish();
}

TEST(hf_import_takes_f16) {
    char err[ERR_LEN], hint[ERR_LEN], note[HF_NOTE_LEN];
    static const uint16_t halves[24] = {0x3C00, 0xBC00, 0x0001, 0x7BFF, 0x3555};
    const int64_t D = 24;
    float x[24];
    begin(NULL, HF_FP32);
    bag_drop(&bag, bag_find(&bag, "model.norm.weight"));
    bag_add(&bag, "model.norm.weight", SAFETENSORS_F16, 1, &D, halves);
    bag_write(&bag, hf_file_in(dir, "model.safetensors"));
    HfWeights *w;
    REQUIRE(open_now(&w, note, err, hint) == 0, "%s", err);
    for (int64_t i = 0; i < f.model.params.n_named; i++)
        if (strcmp(f.model.params.named[i].name, "model.norm.weight") == 0)
            REQUIRE(hf_read(w, i, 0, 24, x, err) == 0, "%s", err);
    EXPECT(x[0] == 1 && x[1] == -1 && x[2] == 0x1p-24f && x[3] == 65504 && x[5] == 0, "%g %g %g", (double)x[0],
           (double)x[2], (double)x[3]);
    hf_close(w);
    finish();
}

TEST(hf_import_says_what_it_leaves_out) {
    char err[ERR_LEN], hint[ERR_LEN], note[HF_NOTE_LEN];
    HfWeights *w;
    begin(NULL, HF_BF16);
    bag.data[bag_find(&bag, "model.layers.3.shared_head.head.weight")][11] ^= 1;
    bag_write(&bag, hf_file_in(dir, "model.safetensors"));
    REQUIRE(open_now(&w, note, err, hint) == 0, "%s", err);
    EXPECT(strstr(note, "model.layers.3.shared_head.head.weight, which is not equal to lm_head.weight\n") &&
               !strstr(note, "embed_tokens"),
           "%s", note);
    hf_close(w);

    /* Without MTP in the configuration its layer stays outside. */
    Fixture without;
    fixture_open(&without, (const char *const[]){"model.num_nextn_predict_layers=0", NULL});
    REQUIRE(hf_open(&w, dir, &without.model.params, &without.config.model, note, err, hint) == 0, "%s", err);
    EXPECT(strstr(note, "tensors of layers 3 and after"), "%s", note);
    hf_close(w);
    fixture_close(&without);
    finish();
}

TEST(hf_load_fills_the_masters) {
    char err[ERR_LEN], hint[ERR_LEN], note[HF_NOTE_LEN];
    begin(NULL, HF_FP32);
    Fixture other;
    HfWeights *w;
    fixture_open(&other, (const char *const[]){"run.seed=8", NULL});
    const uint64_t hash = params_hash(&f.model.params, &f.device);
    EXPECT(params_hash(&other.model.params, &other.device) != hash, "different before");
    REQUIRE(hf_open(&w, dir, &other.model.params, &other.config.model, note, err, hint) == 0, "%s", err);
    REQUIRE(hf_load(w, &other.model.params, &other.device, NULL, err) == 0, "%s", err);
    EXPECT(params_hash(&other.model.params, &other.device) == hash, "the same after");
    hf_close(w);
    fixture_close(&other);
    finish();
}

/* ---- import: what is refused ------------------------------------------------------------------------------------- */

static void expect_refused(const char *what, const char *hint_part) {
    char err[ERR_LEN], hint[ERR_LEN], note[HF_NOTE_LEN];
    HfWeights *w = NULL;
    EXPECT(open_now(&w, note, err, hint) == -1 && !w, "accepted, but: %s", what);
    EXPECT(strstr(err, what) && !strchr(err, '\n'), "\"%s\", expected: %s", err, what);
    if (hint_part) EXPECT(strstr(hint, hint_part), "\"%s\", expected: %s", hint, hint_part);
    hf_close(w);
}

/* Writes the changed bag, expects the refusal, and takes the bag from a copy again. */
static Bag kept;

static void refused(const char *what, const char *hint_part) {
    bag_write(&bag, hf_file_in(dir, "model.safetensors"));
    expect_refused(what, hint_part);
    bag = kept;
}

TEST(hf_import_refuses_tensors_that_do_not_fit) {
    const int64_t shape[3] = {24, 25, 1}, one = 1;
    begin(NULL, HF_BF16);
    kept = bag;

    bag_drop(&bag, bag_find(&bag, "model.layers.1.mlp.experts.3.up_proj.weight"));
    refused("missing tensor model.layers.1.mlp.experts.3.up_proj.weight", NULL);
    bag_drop(&bag, bag_find(&bag, "model.layers.2.mlp.gate.e_score_correction_bias"));
    bag_drop(&bag, bag_find(&bag, "model.layers.1.mlp.gate.e_score_correction_bias"));
    refused("missing tensor model.layers.1.mlp.gate.e_score_correction_bias (and 1 more)", NULL);
    bag_drop_prefix(&bag, "model.layers.3.");
    refused("missing tensor model.layers.3.", "num_nextn_predict_layers=0");
    bag_add(&bag, "model.layers.1.mlp.gate_proj.weight", SAFETENSORS_F32, 1, &one, NULL);
    bag_add(&bag, "model.extra", SAFETENSORS_F32, 1, &one, NULL);
    refused("unknown tensor model.extra (and 1 more)", NULL);
    bag_add(&bag, "model.layers.1.self_attn.q_proj.bias", SAFETENSORS_BF16, 1, &one, NULL);
    refused("unknown tensor model.layers.1.self_attn.q_proj.bias", NULL);

    bag_drop(&bag, bag_find(&bag, "model.layers.0.self_attn.o_proj.weight"));
    bag_add(&bag, "model.layers.0.self_attn.o_proj.weight", SAFETENSORS_BF16, 2, shape, NULL);
    refused("model.layers.0.self_attn.o_proj.weight is 24 x 25, but the configuration makes it 24 x 12", NULL);
    bag_drop(&bag, bag_find(&bag, "model.norm.weight"));
    bag_add(&bag, "model.norm.weight", SAFETENSORS_BF16, 0, shape, NULL);
    refused("model.norm.weight is one number, but the configuration makes it 24", NULL);
    bag_drop(&bag, bag_find(&bag, "model.norm.weight"));
    bag_add(&bag, "model.norm.weight", SAFETENSORS_I32, 1, shape, NULL);
    refused("model.norm.weight is I32, which is not read here; BF16, F32 and F16 are", NULL);
    bag_drop(&bag, bag_find(&bag, "model.norm.weight"));
    bag_add(&bag, "model.norm.weight", SAFETENSORS_F8_E4M3, 1, shape, NULL);
    refused("model.norm.weight is F8_E4M3, which is not read here", NULL);

    const int64_t stack[3] = {8, 20, 24}, wrong_stack[3] = {8, 10, 24};
    bag_add(&bag, "model.layers.1.mlp.experts.gate_up_proj", SAFETENSORS_BF16, 3, stack, NULL);
    refused("is given twice", NULL);
    bag_add(&bag, "model.layers.1.mlp.experts.gate_up_proj", SAFETENSORS_BF16, 3, wrong_stack, NULL);
    refused("gate_up_proj is 8 x 10 x 24, but the configuration makes it 8 x 20 x 24", NULL);
    bag_add(&bag, "model.layers.0.mlp.experts.gate_up_proj", SAFETENSORS_BF16, 3, stack, NULL);
    refused("the configuration has no model.layers.0.mlp.experts.0.gate_proj.weight", NULL);
    finish();
}

TEST(hf_import_refuses_scales_that_do_not_fit) {
    const int64_t shape[2] = {2, 1};
    begin(NULL, HF_FP8);
    kept = bag;
    bag_drop(&bag, bag_find(&bag, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"));
    refused("model.layers.1.mlp.experts.3.up_proj.weight is F8_E4M3, but there is no "
            "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv",
            NULL);
    bag_drop(&bag, bag_find(&bag, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"));
    bag_add(&bag, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", SAFETENSORS_F32, 2, shape, NULL);
    refused("model.layers.1.mlp.experts.3.up_proj.weight_scale_inv is 2 x 1, but the configuration makes it 1 x 1",
            NULL);
    bag_add(&bag, "model.norm.weight_scale_inv", SAFETENSORS_F32, 2, shape, NULL);
    refused("model.norm.weight_scale_inv does not belong to an F8_E4M3 matrix", NULL);

    static const struct {
        const char *config, *what;
    } cases[] = {
        {"{\"quantization_config\": {\"quant_method\": \"awq\"}}", "quant_method is not \"fp8\""},
        {"{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [64, 128]}}",
         "is not [128, 128]"},
        {"{\"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128]}}", "is not [128, 128]"},
        {"{\"quantization_config\": {}}", "quant_method is not \"fp8\""},
        {"[1", "config.json"},
    };
    bag_write(&bag, hf_file_in(dir, "model.safetensors"));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char err[ERR_LEN];
        REQUIRE(file_write_durable(hf_file_in(dir, "config.json"), cases[i].config, strlen(cases[i].config), err) == 0,
                "%s", err);
        expect_refused(cases[i].what, NULL);
    }
    finish();
}

static void write_index(const char *text) {
    char err[ERR_LEN];
    REQUIRE(file_write_durable(hf_file_in(dir, "model.safetensors.index.json"), text, strlen(text), err) == 0, "%s",
            err);
}

TEST(hf_import_refuses_broken_folders) {
    char err[ERR_LEN];
    fixture_open(&f, NULL);
    dir = hf_folder_of("sharded");
    hf_export_to(&f, dir, HF_BF16, 20000);
    char *index, *changed = NULL;
    size_t size;
    REQUIRE(file_read_all(&index, &size, hf_file_in(dir, "model.safetensors.index.json"), 1 << 20, err) == 0, "%s",
            err);
    REQUIRE(strstr(index, "model-00002-of-"), "one file only");

    /* a tensor that its file does not hold; one that the index does not name */
    changed = strdup(index);
    memcpy(strstr(changed, "lm_head.weight"), "lm_hexd", 7);
    write_index(changed);
    expect_refused("lm_hexd.weight is not in model-0000", NULL);
    char *line = strstr(index, "    \"model.norm.weight\""), *end = strchr(line, '\n') + 1;
    snprintf(changed, size + 1, "%.*s%s", (int)(line - index), index, end);
    write_index(changed);
    expect_refused("model.norm.weight is in this file, but not in model.safetensors.index.json", NULL);
    /* no map, no file, a path out of the folder, no JSON */
    write_index("{\"metadata\": {}}");
    expect_refused("no \"weight_map\"", NULL);
    write_index("{\"weight_map\": {\"lm_head.weight\": \"model-00009.safetensors\"}}");
    expect_refused("model-00009.safetensors: cannot open", NULL);
    write_index("{\"weight_map\": {\"lm_head.weight\": \"../x.safetensors\"}}");
    expect_refused("lm_head.weight is not placed in a file of this folder", NULL);
    write_index("{\"weight_map\": {\"lm_head.weight\": 3}}");
    expect_refused("lm_head.weight is not placed in a file of this folder", NULL);
    write_index("{\"weight_map\": ");
    expect_refused("model.safetensors.index.json:1", NULL);
    write_index(index);
    hf_expect_weights(&f, dir, HF_BF16, "mended");

    /* a file that is cut off, and none at all */
    cJSON *root = hf_json_of(dir, "model.safetensors.index.json");
    const char *first = cJSON_GetObjectItemCaseSensitive(root, "weight_map")->child->valuestring;
    REQUIRE(truncate(hf_file_in(dir, first), file_size(hf_file_in(dir, first)) - 1) == 0, "truncate");
    expect_refused("cut off", NULL);
    cJSON_Delete(root);
    EXPECT(hf_is_folder(dir), "it has an index");
    dir = hf_folder_of("empty");
    REQUIRE(dir_make(dir, err) == 0, "%s", err);
    EXPECT(!hf_is_folder(dir), "nothing in it");
    expect_refused("neither model.safetensors nor model.safetensors.index.json in it", "save_pretrained");
    free(changed);
    free(index);
    finish();
}

/* ---- a run out of a folder --------------------------------------------------------------------------------------- */

TEST(hf_import_makes_a_run) {
    char err[ERR_LEN], hint[ERR_LEN], note[ERR_LEN], path[CHECKPOINT_PATH_LEN];
    Config c, again;
    HfReport report;
    CheckpointInfo info;
    begin((const char *const[]){"model.q_lora_rank=10", NULL}, HF_FP32);
    const char *out = hf_folder_of("run"), *const sets[] = {"train.lr=0.5", "train.steps=7", "train.lr_warmup_steps=0"};
    REQUIRE(hf_import(dir, out, sets, 3, NULL, &c, &report, err, hint) == 0, "%s", err);
    REQUIRE(config_load(&again, hf_file_in(out, "config.json"), NULL, 0, err, hint) == 0, "%s", err);
    EXPECT(again.train.lr.value[0] == 0.5 && again.train.steps == 7 && again.model.q_lora_rank == 10 &&
               !again.model.path[0] && strcmp(again.run.dir, out) == 0,
           "config.json of the run");

    REQUIRE(checkpoint_find(out, -1, path, note, err) == 0 && note[0] == 0, "%s", err);
    Fixture other;
    int64_t n;
    fixture_open(&other, (const char *const[]){"model.q_lora_rank=10", "run.seed=8", NULL});
    StateTensor *tensors = params_state(&other.model.params, &n);
    REQUIRE(checkpoint_load(path, &other.device, tensors, n, CHECKPOINT_WEIGHTS, &info, err) == 0, "%s", err);
    const uint64_t hash = params_hash(&f.model.params, &f.device);
    EXPECT(params_hash(&other.model.params, &other.device) == hash, "the same weights");
    EXPECT(info.param_hash == hash && info.data_identity == 0 && info.state.step == 0,
           "what the checkpoint says of itself");
    checkpoint_info_free(&info);
    EXPECT(checkpoint_load(path, &other.device, tensors, n, CHECKPOINT_ALL, NULL, err) == -1 && strstr(err, "adam."),
           "no moments: %s", err);
    free(tensors);

    EXPECT(hf_import(dir, out, NULL, 0, NULL, &c, &report, err, hint) == -1 && strstr(err, "is not empty"), "%s", err);
    const char *fresh = hf_folder_of("fresh"), *unfinished = hf_folder_of("fresh.unfinished");
    EXPECT(hf_import(hf_folder_of("nowhere"), fresh, NULL, 0, NULL, &c, &report, err, hint) == -1 &&
               strstr(err, "no such folder"),
           "%s", err);
    EXPECT(hf_import(out, fresh, NULL, 0, NULL, &c, &report, err, hint) == -1,
           "a run's folder is no Hugging Face folder");
    const char *const wrong[] = {"train.lr=many"};
    EXPECT(hf_import(dir, fresh, wrong, 1, NULL, &c, &report, err, hint) == -1 && strstr(err, "train.lr"), "%s", err);
    EXPECT(!path_exists(fresh) && !path_exists(unfinished), "something is left");
    fixture_close(&other);
    finish();
}
