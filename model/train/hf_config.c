/* See hf.h: config.json and generation_config.json out, the configuration of a run in.
 *
 * Every key that some reader looks at is written, also where its value is the default of one of them, because defaults
 * differ: transformers takes n_group 8 for an absent one, vLLM 1; vLLM takes softmax for an absent scoring_func. RoPE
 * is written as transformers 4 has it (rope_theta and rope_scaling), which version 5 and the servers read as well. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "hf.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"

/* ---- writing ----------------------------------------------------------------------------------------------------- */

static void put_raw(FILE *out, const char *key, const char *value) {
    fprintf(out, "%s\n  \"%s\": %s", ftell(out) > 1 ? "," : "", key, value);
}

static void put_int(FILE *out, const char *key, int64_t value) {
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    put_raw(out, key, text);
}

/* null where it is not given (-1). */
static void put_id(FILE *out, const char *key, int64_t id) {
    if (id < 0)
        put_raw(out, key, "null");
    else
        put_int(out, key, id);
}

/* A number that readers take as a float: 40.0, not 40. */
static void write_float(FILE *out, double value) {
    char *text = NULL;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    CHECK(f, "no memory for a number");
    json_write_double(f, value);
    CHECK(fclose(f) == 0 && text, "no memory for a number");
    fprintf(out, "%s%s", text, strpbrk(text, ".eE") ? "" : ".0");
    free(text);
}

static void put_float(FILE *out, const char *key, double value) {
    put_raw(out, key, "");
    write_float(out, value);
}

static void put_bool(FILE *out, const char *key, bool value) {
    put_raw(out, key, value ? "true" : "false");
}

static void write_scale(FILE *out, const char *key, double value) {
    if (value == 0) return; /* absent and 0 are the same to transformers, but not to vLLM */
    fprintf(out, ", \"%s\": ", key);
    write_float(out, value);
}

static void put_rope(FILE *out, const RopeConfig *rope) {
    put_float(out, "rope_theta", rope->theta);
    if (!rope->yarn) {
        put_raw(out, "rope_scaling", "null");
        return;
    }
    put_raw(out, "rope_scaling", "{\"type\": \"yarn\", \"rope_type\": \"yarn\", \"factor\": ");
    write_float(out, rope->factor);
    fprintf(out, ", \"original_max_position_embeddings\": %lld", (long long)rope->original_max_position_embeddings);
    write_scale(out, "beta_fast", rope->beta_fast);
    write_scale(out, "beta_slow", rope->beta_slow);
    write_scale(out, "mscale", rope->mscale);
    write_scale(out, "mscale_all_dim", rope->mscale_all_dim);
    if (rope->has_attention_factor) write_scale(out, "attention_factor", rope->attention_factor);
    fputc('}', out);
}

static void put_attention(FILE *out, const ModelConfig *m) {
    put_int(out, "num_attention_heads", m->num_attention_heads);
    put_int(out, "num_key_value_heads", m->num_attention_heads);
    put_id(out, "q_lora_rank", m->q_lora_rank > 0 ? m->q_lora_rank : -1);
    put_int(out, "kv_lora_rank", m->kv_lora_rank);
    put_int(out, "qk_nope_head_dim", m->qk_nope_head_dim);
    put_int(out, "qk_rope_head_dim", m->qk_rope_head_dim);
    put_int(out, "v_head_dim", m->v_head_dim);
    put_bool(out, "attention_bias", false);
    put_float(out, "attention_dropout", 0);
    put_int(out, "max_position_embeddings", m->max_position_embeddings);
    put_rope(out, &m->rope);
    put_bool(out, "rope_interleave", true);
}

static void put_experts(FILE *out, const Config *c) {
    static const char *const methods[] = {"\"noaux_tc\"", "\"group_limited_greedy\"", "\"greedy\""};
    const ModelConfig *m = &c->model;
    put_int(out, "first_k_dense_replace", m->first_k_dense_replace);
    put_int(out, "moe_layer_freq", 1);
    put_int(out, "n_routed_experts", m->n_routed_experts);
    put_int(out, "num_experts_per_tok", m->num_experts_per_tok);
    put_int(out, "n_shared_experts", m->n_shared_experts);
    put_int(out, "n_group", m->n_group);
    put_int(out, "topk_group", m->topk_group);
    put_raw(out, "topk_method", methods[m->topk_method]);
    put_raw(out, "scoring_func", m->scoring_func == SCORING_SIGMOID ? "\"sigmoid\"" : "\"softmax\"");
    put_bool(out, "norm_topk_prob", m->norm_topk_prob);
    put_float(out, "routed_scaling_factor", m->routed_scaling_factor);
    put_raw(out, "moe_router_dtype", "\"float32\"");
    put_float(out, "aux_loss_alpha", c->train.balance_alpha);
    put_bool(out, "seq_aux", true);
    put_int(out, "ep_size", 1);
}

/* Ends of a text, as servers know them: the document token where the model names none. */
static int64_t end_id(const Config *c, int64_t id) {
    return id >= 0 ? id : c->data.document_token;
}

static void write_model(FILE *out, const Config *c, HfDtype dtype) {
    const ModelConfig *m = &c->model;
    const bool is_v3 = m->topk_method == TOPK_NOAUX_TC;
    fputc('{', out);
    put_raw(out, "architectures", is_v3 ? "[\"DeepseekV3ForCausalLM\"]" : "[\"DeepseekV2ForCausalLM\"]");
    put_raw(out, "model_type", is_v3 ? "\"deepseek_v3\"" : "\"deepseek_v2\"");
    put_raw(out, "torch_dtype", dtype == HF_FP32 ? "\"float32\"" : "\"bfloat16\"");
    put_raw(out, "transformers_version", "\"4.33.1\""); /* whose form this is */
    put_int(out, "vocab_size", m->vocab_size);
    put_int(out, "hidden_size", m->hidden_size);
    put_int(out, "intermediate_size", m->intermediate_size);
    put_int(out, "moe_intermediate_size", m->moe_intermediate_size);
    put_int(out, "num_hidden_layers", m->num_hidden_layers);
    put_int(out, "num_nextn_predict_layers", m->num_nextn_predict_layers);
    put_attention(out, m);
    put_experts(out, c);
    put_raw(out, "hidden_act", "\"silu\"");
    put_float(out, "rms_norm_eps", m->rms_norm_eps);
    put_float(out, "initializer_range", c->train.init_std);
    put_bool(out, "tie_word_embeddings", false);
    put_bool(out, "use_cache", true);
    put_int(out, "pretraining_tp", 1);
    put_id(out, "bos_token_id", end_id(c, m->bos_token_id));
    put_id(out, "eos_token_id", end_id(c, m->eos_token_id));
    put_raw(out, "pad_token_id", "null");
    if (dtype == HF_FP8)
        put_raw(out, "quantization_config",
                "{\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", \"activation_scheme\": \"dynamic\", "
                "\"weight_block_size\": [128, 128]}");
    fputs("\n}\n", out);
}

/* No sampling keys: who generates without saying how gets the most likely token. */
static void write_generation(FILE *out, const Config *c) {
    fputc('{', out);
    put_bool(out, "_from_model_config", true);
    put_id(out, "bos_token_id", end_id(c, c->model.bos_token_id));
    put_id(out, "eos_token_id", end_id(c, c->model.eos_token_id));
    put_raw(out, "transformers_version", "\"4.33.1\"");
    fputs("\n}\n", out);
}

int hf_config_write(const char *folder, const Config *c, HfDtype dtype, char *err) {
    int result = 0;
    for (int i = 0; i < 2 && result == 0; i++) {
        char path[PATH_MAX], *text = NULL;
        size_t size;
        FILE *out = open_memstream(&text, &size);
        CHECK(out, "no memory for a config.json");
        if (i == 0)
            write_model(out, c, dtype);
        else
            write_generation(out, c);
        CHECK(fclose(out) == 0 && text, "no memory for a config.json");
        snprintf(path, sizeof path, "%s/%s", folder, i == 0 ? "config.json" : "generation_config.json");
        result = file_write_durable(path, text, size, err);
        free(text);
    }
    return result;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static int parse_run(Config *c, const char *model, const char *out, int64_t seq_len, const char *const *sets,
                     int n_sets, char *err, char *hint) {
    char *text = NULL, name[HF_PATH_LEN];
    size_t size, length = strlen(out);
    FILE *f = open_memstream(&text, &size);
    CHECK(f, "no memory for a configuration");
    while (length > 1 && out[length - 1] == '/') length--;
    snprintf(name, sizeof name, "%.*s", (int)length, out);
    const char *slash = strrchr(name, '/');
    fputs("{\"version\": 1, \"run\": {\"name\": ", f);
    json_write_string(f, slash && slash[1] ? slash + 1 : name);
    fputs(", \"dir\": ", f);
    json_write_string(f, name);
    fputs("}, \"model\": ", f);
    json_write_string(f, model);
    fprintf(f,
            ", \"data\": {\"train\": \"synthetic\"}, \"train\": {\"seq_len\": %lld, \"global_batch_size\": 16, "
            "\"steps\": 1000, \"lr\": 2e-5, \"lr_warmup_steps\": 20}}",
            (long long)seq_len);
    CHECK(fclose(f) == 0 && text, "no memory for a configuration");
    int result = config_parse(c, text, size, "import-hf", sets, n_sets, err, hint);
    free(text);
    return result;
}

int hf_import_config(Config *c, const char *dir, const char *out, const char *const *sets, int n_sets, char *err,
                     char *hint) {
    enum { SEQ_LEN_MAX = 4096 };
    char path[PATH_MAX], joined[PATH_MAX];
    if (!realpath(dir, path)) return err_set(err, "%s: no such folder", dir);
    if (snprintf(joined, sizeof joined, "%s/config.json", path) >= (int)sizeof joined || !path_exists(joined)) {
        snprintf(hint, ERR_LEN, "a Hugging Face folder holds config.json and model.safetensors or its index");
        return err_set(err, "%s: no config.json in it", dir);
    }
    if (parse_run(c, joined, out, 1, sets, n_sets, err, hint) != 0) return -1;
    const int64_t longest = c->model.max_position_embeddings;
    if (parse_run(c, joined, out, longest < SEQ_LEN_MAX ? longest : SEQ_LEN_MAX, sets, n_sets, err, hint) != 0)
        return -1;
    c->model.path[0] = 0; /* the new configuration holds the model itself */
    return 0;
}
