/* Export: what is written reads back to the same bits, with the names, shapes, files and keys that readers expect. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hf_test.h"
#include "kernels/base/file.h"
#include "kernels/base/small_floats.h"

/* ---- export ------------------------------------------------------------------------------------------------------ */

/* V2's gate has no bias: one that is not zero is not dropped in silence. */
static void expect_bias_refused(Fixture *f) {
    char err[ERR_LEN], hint[ERR_LEN];
    HfReport report;
    const HfExport x = hf_export_of(f, HF_BF16, HF_SHARD_BYTES);
    EXPECT(hf_export(&x, hf_folder_of("v2"), &report, err, hint) == -1 &&
               strstr(err, "model.layers.1.mlp.gate.e_score_correction_bias is not zero"),
           "%s", err);
    for (int b = 0; b < f->model.shape.n_blocks; b++) {
        const Tensor bias = f->model.params.blocks[b].weight[WEIGHT_ROUTER_BIAS].w;
        if (bias.data) memset(bias.data, 0, tensor_bytes(bias));
    }
}

TEST(hf_round_trip_is_bitwise) {
    static const HfDtype dtypes[] = {HF_BF16, HF_FP32};
    for (int i = 0; i < n_model_cases; i++)
        for (int k = 0; k < 2; k++)
            for (int shards = 0; shards < 2; shards++) {
                Fixture f;
                char name[64];
                fixture_open(&f, model_cases[i].sets);
                if (f.config.model.topk_method != TOPK_NOAUX_TC) expect_bias_refused(&f);
                snprintf(name, sizeof name, "%d_%s_%d", i, hf_dtype_name(dtypes[k]), shards);
                const char *out = hf_folder_of(name);
                HfReport report = hf_export_to(&f, out, dtypes[k], shards ? 4000 : HF_SHARD_BYTES);
                EXPECT(shards ? report.n_files > 5 : report.n_files == 1, "%lld files", (long long)report.n_files);
                hf_expect_weights(&f, out, dtypes[k], name);
                fixture_close(&f);
            }
}

/* Exactly the names that the released models have, with their dtypes; MTP's copies are the bits of the originals. */
TEST(hf_names_dtypes_and_copies) {
    Fixture f;
    Bag b;
    fixture_open(&f, (const char *const[]){"model.q_lora_rank=10", NULL});
    const char *out = hf_folder_of("out");
    HfReport report = hf_export_to(&f, out, HF_BF16, HF_SHARD_BYTES);
    bag_read(&b, hf_file_in(out, "model.safetensors"));
    EXPECT_EQ(b.n, f.model.params.n_named + 2);
    EXPECT_EQ(report.n_tensors, b.n);
    for (int64_t i = 0; i < b.n; i++) {
        const bool is_bias = strstr(b.entry[i].name, "e_score_correction_bias") != NULL;
        EXPECT(b.entry[i].dtype == (is_bias ? SAFETENSORS_F32 : SAFETENSORS_BF16), "%s", b.entry[i].name);
    }
    const struct {
        const char *name;
        int64_t rows, cols;
    } some[] = {
        {"model.embed_tokens.weight", 37, 24},
        {"model.norm.weight", 24, 0},
        {"lm_head.weight", 37, 24},
        {"model.layers.0.mlp.gate_proj.weight", 20, 24},
        {"model.layers.1.self_attn.q_a_proj.weight", 10, 24},
        {"model.layers.1.self_attn.q_b_proj.weight", 24, 10},
        {"model.layers.1.self_attn.kv_a_proj_with_mqa.weight", 16, 24},
        {"model.layers.1.self_attn.kv_b_proj.weight", 28, 12},
        {"model.layers.1.self_attn.o_proj.weight", 24, 12},
        {"model.layers.2.mlp.experts.7.down_proj.weight", 24, 10},
        {"model.layers.2.mlp.shared_experts.up_proj.weight", 10, 24},
        {"model.layers.2.mlp.gate.weight", 8, 24},
        {"model.layers.2.mlp.gate.e_score_correction_bias", 8, 0},
        {"model.layers.3.enorm.weight", 24, 0},
        {"model.layers.3.eh_proj.weight", 24, 48},
        {"model.layers.3.embed_tokens.weight", 37, 24},
        {"model.layers.3.shared_head.norm.weight", 24, 0},
        {"model.layers.3.shared_head.head.weight", 37, 24},
    };
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        const SafetensorsEntry *e = &b.entry[bag_find(&b, some[i].name)];
        EXPECT(e->ndim == (some[i].cols ? 2 : 1) && e->shape[0] == some[i].rows &&
                   (e->ndim < 2 || e->shape[1] == some[i].cols),
               "%s is %lld x %lld", e->name, (long long)e->shape[0], (long long)e->shape[1]);
    }
    EXPECT(memcmp(b.data[bag_find(&b, "model.layers.3.embed_tokens.weight")],
                  b.data[bag_find(&b, "model.embed_tokens.weight")], 37 * 24 * 2) == 0,
           "the copy of the embedding");
    EXPECT(memcmp(b.data[bag_find(&b, "model.layers.3.shared_head.head.weight")],
                  b.data[bag_find(&b, "lm_head.weight")], 37 * 24 * 2) == 0,
           "the copy of the head");
    const Tensor bias = f.model.params.blocks[2].weight[WEIGHT_ROUTER_BIAS].w;
    EXPECT(memcmp(b.data[bag_find(&b, "model.layers.2.mlp.gate.e_score_correction_bias")], bias.data, 32) == 0,
           "the trained bias");
    EXPECT(strstr(report.note, "model.layers.3"), "%s", report.note);
    fixture_close(&f);
    free_bags();
}

TEST(hf_shards_and_their_index) {
    enum { LIMIT = 3000 };
    Fixture f;
    fixture_open(&f, NULL);
    const char *out = hf_folder_of("out");
    HfReport report = hf_export_to(&f, out, HF_BF16, LIMIT);
    cJSON *index = hf_json_of(out, "model.safetensors.index.json");
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(index, "weight_map"), *item;
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(index, "metadata");
    int64_t total = 0, n = 0, told = 0;
    for (int64_t k = 0; k < report.n_files; k++) {
        char name[64], err[ERR_LEN];
        SafetensorsFile file;
        snprintf(name, sizeof name, "model-%05lld-of-%05lld.safetensors", (long long)k + 1, (long long)report.n_files);
        REQUIRE(safetensors_open(&file, hf_file_in(out, name), err) == 0, "%s", err);
        EXPECT(file.data_bytes <= LIMIT || file.n == 1, "%s: %lld bytes of %lld tensors", name,
               (long long)file.data_bytes, (long long)file.n);
        EXPECT(file.data_start % 8 == 0, "the header ends at %lld", (long long)file.data_start);
        total += file.data_bytes;
        n += file.n;
        for (int64_t i = 0; i < file.n; i++) {
            const cJSON *place = cJSON_GetObjectItemCaseSensitive(map, file.entries[i].name);
            EXPECT(cJSON_IsString(place) && strcmp(place->valuestring, name) == 0, "%s in %s", file.entries[i].name,
                   name);
        }
        safetensors_close(&file);
    }
    EXPECT_EQ(cJSON_GetArraySize(map), n);
    EXPECT(json_int64(cJSON_GetObjectItemCaseSensitive(metadata, "total_size"), &told) == 0 && told == total &&
               report.bytes == total,
           "total_size %lld, %lld written", (long long)told, (long long)total);
    cJSON_ArrayForEach(item, map) EXPECT(cJSON_IsString(item), "%s", item->string);
    EXPECT(!path_exists(hf_file_in(out, "model.safetensors")), "both forms");
    cJSON_Delete(index);
    fixture_close(&f);
}

/* Sides that are no multiples of 128: scales of ceil / 128, values within the rounding of E4M3, only the Linears. */
TEST(hf_fp8_blocks) {
    Fixture f;
    char err[ERR_LEN], hint[ERR_LEN], note[HF_NOTE_LEN];
    fixture_open(&f, (const char *const[]){"model.hidden_size=200", "model.kv_lora_rank=130", "model.q_lora_rank=72",
                                           "model.moe_intermediate_size=136", "model.n_shared_experts=2", NULL});
    const Params *p = &f.model.params;
    const char *out = hf_folder_of("out");
    hf_export_to(&f, out, HF_FP8, 100000);
    HfWeights *w;
    REQUIRE(hf_open(&w, out, p, &f.config.model, note, err, hint) == 0, "%s", err);
    int n_fp8 = 0;
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        const float *master = (const float *)p->master.data + t->offset;
        float *x = (float *)malloc((size_t)t->numel * sizeof *x);
        REQUIRE(hf_read(w, i, 0, t->numel, x, err) == 0, "%s", err);
        const bool is_plain =
            t->block < 0 || t->ndim == 1 || strstr(t->name, "eh_proj") || strstr(t->name, "mlp.gate.");
        EXPECT(weight_is_block_linear(t->weight) == !is_plain, "%s", t->name);
        n_fp8 += !is_plain;
        float scale[64];
        if (!is_plain) e4m3_block_scales(scale, master, t->shape[0], t->shape[1]);
        for (int64_t k = 0; k < t->numel; k++) {
            if (is_plain) {
                EXPECT(x[k] == hf_stored(master[k], t, HF_BF16), "%s at %lld", t->name, (long long)k);
                continue;
            }
            const int64_t row = k / t->shape[1] / 128, col = k % t->shape[1] / 128;
            const double s = (double)scale[row * ((t->shape[1] + 127) / 128) + col];
            const double bound = fmax(fabs((double)master[k]) / 16, s / 1024) * (1 + 1e-6);
            EXPECT(fabs((double)x[k] - (double)master[k]) <= bound, "%s at %lld: %g became %g", t->name, (long long)k,
                   (double)master[k], (double)x[k]);
        }
        free(x);
    }
    EXPECT(n_fp8 > 50, "%d matrices", n_fp8);
    hf_close(w);

    const struct {
        const char *name;
        int64_t rows, cols;
    } scales[] = {{"model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv", 2, 2}, /* 134 x 200 */
                  {"model.layers.2.mlp.experts.5.up_proj.weight_scale_inv", 2, 2},        /* 136 x 200 */
                  {"model.layers.3.mlp.shared_experts.down_proj.weight_scale_inv", 2, 3}, /* 200 x 272 */
                  {"model.layers.0.self_attn.q_a_proj.weight_scale_inv", 1, 2}};          /* 72 x 200 */
    cJSON *index = hf_json_of(out, "model.safetensors.index.json"), *config = hf_json_of(out, "config.json");
    const cJSON *map = cJSON_GetObjectItemCaseSensitive(index, "weight_map");
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        SafetensorsFile file;
        const cJSON *place = cJSON_GetObjectItemCaseSensitive(map, scales[i].name);
        REQUIRE(place, "no %s", scales[i].name);
        REQUIRE(safetensors_open(&file, hf_file_in(out, place->valuestring), err) == 0, "%s", err);
        const SafetensorsEntry *e = safetensors_find(&file, scales[i].name);
        EXPECT(e->dtype == SAFETENSORS_F32 && e->ndim == 2 && e->shape[0] == scales[i].rows &&
                   e->shape[1] == scales[i].cols,
               "%s is %lld x %lld", e->name, (long long)e->shape[0], (long long)e->shape[1]);
        safetensors_close(&file);
    }
    EXPECT(!cJSON_GetObjectItemCaseSensitive(map, "model.layers.3.eh_proj.weight_scale_inv"), "eh_proj stays BF16");
    const cJSON *q = cJSON_GetObjectItemCaseSensitive(config, "quantization_config");
    EXPECT(cJSON_IsObject(q) && cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(q, "weight_block_size")) == 2,
           "config");
    cJSON_Delete(index);
    cJSON_Delete(config);
    fixture_close(&f);
}

/* ---- config.json ------------------------------------------------------------------------------------------------- */

/* All that DeepSeek's own file has (but auto_map), and what transformers declares beside it. */
TEST(hf_config_has_every_key) {
    static const char *const keys[] = {"architectures",
                                       "attention_bias",
                                       "attention_dropout",
                                       "aux_loss_alpha",
                                       "bos_token_id",
                                       "eos_token_id",
                                       "ep_size",
                                       "first_k_dense_replace",
                                       "hidden_act",
                                       "hidden_size",
                                       "initializer_range",
                                       "intermediate_size",
                                       "kv_lora_rank",
                                       "max_position_embeddings",
                                       "model_type",
                                       "moe_intermediate_size",
                                       "moe_layer_freq",
                                       "moe_router_dtype",
                                       "n_group",
                                       "n_routed_experts",
                                       "n_shared_experts",
                                       "norm_topk_prob",
                                       "num_attention_heads",
                                       "num_experts_per_tok",
                                       "num_hidden_layers",
                                       "num_key_value_heads",
                                       "num_nextn_predict_layers",
                                       "pad_token_id",
                                       "pretraining_tp",
                                       "q_lora_rank",
                                       "qk_nope_head_dim",
                                       "qk_rope_head_dim",
                                       "rms_norm_eps",
                                       "rope_interleave",
                                       "rope_scaling",
                                       "rope_theta",
                                       "routed_scaling_factor",
                                       "scoring_func",
                                       "seq_aux",
                                       "tie_word_embeddings",
                                       "topk_group",
                                       "topk_method",
                                       "torch_dtype",
                                       "transformers_version",
                                       "use_cache",
                                       "v_head_dim",
                                       "vocab_size"};
    Fixture f;
    char err[ERR_LEN];
    fixture_open(&f, NULL);
    const char *out = hf_folder_of("out");
    REQUIRE(dir_make(out, err) == 0 && hf_config_write(out, &f.config, HF_BF16, err) == 0, "%s", err);
    cJSON *config = hf_json_of(out, "config.json"), *generation = hf_json_of(out, "generation_config.json");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        EXPECT(cJSON_GetObjectItemCaseSensitive(config, keys[i]), "no %s", keys[i]);
    EXPECT_EQ(cJSON_GetArraySize(config), sizeof keys / sizeof *keys);
    EXPECT(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(config, "q_lora_rank")), "a direct q is null, not 0");
    EXPECT(!cJSON_HasObjectItem(generation, "temperature"), "greedy unless asked");
    EXPECT(cJSON_HasObjectItem(generation, "eos_token_id"), "servers stop at it");
    cJSON_Delete(config);
    cJSON_Delete(generation);
    fixture_close(&f);
}

/* Read back as the model of a run, it is the same architecture; so is the form that transformers 5 writes. */
TEST(hf_config_reads_back) {
    for (int i = 0; i < n_model_cases; i++) {
        Fixture f;
        char err[ERR_LEN], hint[ERR_LEN], changed[ERR_LEN];
        Config theirs;
        fixture_open(&f, model_cases[i].sets);
        const char *out = hf_folder_of("out");
        REQUIRE(dir_make(out, err) == 0 && hf_config_write(out, &f.config, HF_FP8, err) == 0, "%s", err);
        REQUIRE(hf_import_config(&theirs, out, "runs/new/", NULL, 0, err, hint) == 0, "%s: %s", model_cases[i].name,
                err);
        EXPECT(strcmp(theirs.run.dir, "runs/new") == 0 && strcmp(theirs.run.name, "new") == 0, "%s", theirs.run.dir);
        EXPECT_EQ(theirs.train.seq_len, 64);
        const ModelConfig model = theirs.model;
        theirs = f.config;
        theirs.model = model;
        EXPECT(config_compare(&f.config, &theirs, changed, sizeof changed, err) == 0, "%s: %s", model_cases[i].name,
               err);

        cJSON *root = hf_json_of(out, "config.json"), *scaling = cJSON_DetachItemFromObject(root, "rope_scaling");
        cJSON *rope = cJSON_IsObject(scaling) ? scaling : cJSON_CreateObject();
        if (rope != scaling) {
            cJSON_Delete(scaling);
            cJSON_AddStringToObject(rope, "rope_type", "default");
        }
        cJSON_AddItemToObject(rope, "rope_theta", cJSON_DetachItemFromObject(root, "rope_theta"));
        cJSON_AddItemToObject(root, "rope_parameters", rope);
        char *text = cJSON_Print(root);
        REQUIRE(file_write_durable(hf_file_in(out, "config.json"), text, strlen(text), err) == 0, "%s", err);
        REQUIRE(hf_import_config(&theirs, out, "runs/new", NULL, 0, err, hint) == 0, "%s: %s", model_cases[i].name,
                err);
        const ModelConfig five = theirs.model;
        theirs = f.config;
        theirs.model = five;
        EXPECT(config_compare(&f.config, &theirs, changed, sizeof changed, err) == 0, "%s: %s", model_cases[i].name,
               err);
        free(text);
        cJSON_Delete(root);
        fixture_close(&f);
    }
}

TEST(hf_config_ids_fall_back_on_the_document_token) {
    Fixture f;
    char err[ERR_LEN];
    int64_t id;
    fixture_open(&f, (const char *const[]){"model.bos_token_id=null", "model.eos_token_id=null", NULL});
    const char *out = hf_folder_of("out");
    REQUIRE(dir_make(out, err) == 0 && hf_config_write(out, &f.config, HF_BF16, err) == 0, "%s", err);
    cJSON *config = hf_json_of(out, "config.json");
    EXPECT(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(config, "eos_token_id")), "nothing is known");
    cJSON_Delete(config);
    f.config.data.document_token = 5;
    REQUIRE(hf_config_write(out, &f.config, HF_BF16, err) == 0, "%s", err);
    config = hf_json_of(out, "config.json");
    EXPECT(json_int64(cJSON_GetObjectItemCaseSensitive(config, "eos_token_id"), &id) == 0 && id == 5,
           "the document token");
    cJSON_Delete(config);
    fixture_close(&f);
}

/* ---- the folder -------------------------------------------------------------------------------------------------- */

static int read_broken(void *arg, const NamedTensor *t, float *out, char *err) {
    hf_read_master(arg, t, out, err);
    if (strcmp(t->name, "model.layers.1.self_attn.o_proj.weight") == 0) out[7] = NAN;
    return 0;
}

static int read_nothing(void *arg, const NamedTensor *t, float *out, char *err) {
    (void)arg;
    (void)out;
    return strcmp(t->name, "lm_head.weight") == 0 ? err_set(err, "the disk is gone") : 0;
}

TEST(hf_export_leaves_a_whole_folder_or_none) {
    Fixture f;
    HfReport report;
    char err[ERR_LEN], hint[ERR_LEN];
    fixture_open(&f, NULL);
    const char *out = hf_folder_of("deep/er/out"), *unfinished = hf_folder_of("deep/er/out.unfinished");
    HfExport x = hf_export_of(&f, HF_BF16, 3000);

    x.read = read_broken;
    EXPECT(hf_export(&x, out, &report, err, hint) == -1 &&
               strstr(err, "model.layers.1.self_attn.o_proj.weight: element 7 is nan"),
           "%s", err);
    x.read = read_nothing;
    EXPECT(hf_export(&x, out, &report, err, hint) == -1 && strstr(err, "the disk is gone"), "%s", err);
    EXPECT(!path_exists(out) && !path_exists(unfinished), "something is left");

    /* What a killed export left goes; an empty folder is taken; a filled one is not touched. */
    REQUIRE(dir_make(unfinished, err) == 0 && dir_make(out, err) == 0, "%s", err);
    REQUIRE(file_write_durable(hf_file_in(unfinished, "model.safetensors"), "x", 1, err) == 0, "%s", err);
    x.read = hf_read_master;
    EXPECT(hf_export(&x, hf_file_in(out, ""), &report, err, hint) == 0, "%s", err);
    EXPECT(!path_exists(unfinished) && path_exists(hf_file_in(out, "config.json")) &&
               !path_exists(hf_file_in(out, "model.safetensors")),
           "the new folder");
    EXPECT(hf_export(&x, out, &report, err, hint) == -1 && strstr(err, "is not empty") && hint[0], "%s", err);
    EXPECT(hf_export(&x, hf_file_in(out, "config.json"), &report, err, hint) == -1 && strstr(err, "is a file"), "%s",
           err);
    EXPECT(hf_export(&x, "", &report, err, hint) == -1, "an empty name");
    fixture_close(&f);
}

TEST(hf_tokenizer_comes_along) {
    Fixture f;
    char err[ERR_LEN];
    fixture_open(&f, NULL);
    const char *from = hf_folder_of("from"), *out = hf_folder_of("out"), *bare = hf_folder_of("bare"),
               *plain = hf_folder_of("plain");
    static const char tokenizer[] =
        "{\"added_tokens\": [{\"id\": 3, \"content\": \"<x>\"}, {\"id\": 0, \"content\": \"<|doc|>\"}]}";
    static const char config[] =
        "{\"tokenizer_class\": \"LlamaTokenizerFast\", \"auto_map\": {}, \"bos_token\": \"<b>\", "
        "\"model_max_length\": 1000000000000000019884624838656, \"chat_template\": \"{{ x }}\"}";
    REQUIRE(dir_make(from, err) == 0 && dir_make(out, err) == 0 && dir_make(bare, err) == 0 &&
                dir_make(plain, err) == 0,
            "%s", err);
    REQUIRE(file_write_durable(hf_file_in(from, "tokenizer.json"), tokenizer, strlen(tokenizer), err) == 0, "%s", err);
    REQUIRE(hf_tokenizer_write(plain, hf_file_in(from, "tokenizer.json"), &f.config, err) == 0, "%s", err);
    REQUIRE(file_write_durable(hf_file_in(from, "tokenizer_config.json"), config, strlen(config), err) == 0, "%s", err);
    REQUIRE(file_write_durable(hf_file_in(from, "chat_template.jinja"), "{{ y }}", 7, err) == 0, "%s", err);
    REQUIRE(hf_tokenizer_write(out, hf_file_in(from, "tokenizer.json"), &f.config, err) == 0, "%s", err);

    char *text;
    size_t size;
    REQUIRE(file_read_all(&text, &size, hf_file_in(out, "tokenizer.json"), 1 << 20, err) == 0, "%s", err);
    EXPECT(strcmp(text, tokenizer) == 0, "%s", text);
    free(text);
    REQUIRE(file_read_all(&text, &size, hf_file_in(out, "tokenizer_config.json"), 1 << 20, err) == 0, "%s", err);
    EXPECT(strstr(text, "\"PreTrainedTokenizerFast\"") && !strstr(text, "auto_map") && strstr(text, "{{ x }}"), "%s",
           text);
    EXPECT(strstr(text, "1000000000000000019884624838656"), "%s", text);
    EXPECT(strstr(text, "\"<b>\"") && strstr(text, "\"<|doc|>\""), "its own bos, the model's eos: %s", text);
    free(text);
    EXPECT(path_exists(hf_file_in(out, "chat_template.jinja")) &&
               !path_exists(hf_file_in(plain, "chat_template.jinja")),
           "companions");
    REQUIRE(file_read_all(&text, &size, hf_file_in(plain, "tokenizer_config.json"), 1 << 20, err) == 0, "%s", err);
    EXPECT(strstr(text, "\"PreTrainedTokenizerFast\"") && strstr(text, "\"<|doc|>\"") && strstr(text, "64"), "%s",
           text);
    free(text);
    EXPECT(hf_tokenizer_write(bare, hf_file_in(from, "missing.json"), &f.config, err) == -1 &&
               strstr(err, "missing.json"),
           "%s", err);
    fixture_close(&f);
}
