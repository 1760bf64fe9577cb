/* See config_table.h. Derived defaults and the rules between fields: what the ranges of single rows cannot say. Every
 * message names the user's own keys with their values, and what would be allowed. */
#include "config_table.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

enum { HEAD_WIDTH_MAX = 256 }; /* of the attention kernels */

PRINTF_LIKE(3, 4) static int refuse(Reader *r, const char *hint, const char *fmt, ...) {
    char what[ERR_LEN / 2];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    if (hint) hint_set(r->hint, "%s", hint);
    return err_set(r->err, "%s: %s", r->name, what);
}

/* ------------------------------------------------------------------------------------------------ derived defaults */

/* "configs/tiny.json" -> "tiny" */
static void name_from_path(char name[NAME_LEN], const char *path) {
    const char *slash = strrchr(path, '/'), *stem = slash ? slash + 1 : path, *dot = strrchr(stem, '.');
    int length = dot && dot > stem ? (int)(dot - stem) : (int)strlen(stem);
    snprintf(name, NAME_LEN, "%.*s", length < NAME_LEN ? length : NAME_LEN - 1, length ? stem : "run");
}

static int finish_rope(Reader *r, const ModelConfig *m, RopeConfig *rope) {
    rope->has_attention_factor = rope->attention_factor > 0;
    if (!rope->yarn) return 0;
    if (rope->original_max_position_embeddings == 0)
        return refuse(r, "YaRN needs the context length before stretching, for example 4096",
                      "model.rope_scaling.original_max_position_embeddings is missing");
    double original = (double)rope->original_max_position_embeddings;
    double stretch = (double)m->max_position_embeddings / original;
    if (rope->factor == 0) rope->factor = stretch;
    if (fabs(stretch - rope->factor) > 1e-9 * rope->factor)
        return refuse(r, "readers of the model derive one from the others, so they have to agree",
                      "model.max_position_embeddings = %lld must be rope_scaling.factor x "
                      "original_max_position_embeddings = %g x %g = %g",
                      (long long)m->max_position_embeddings, rope->factor, original, rope->factor * original);
    if (rope->factor < 1)
        return refuse(r, NULL,
                      "model.max_position_embeddings = %lld must be at least "
                      "rope_scaling.original_max_position_embeddings = %g",
                      (long long)m->max_position_embeddings, original);
    if (rope->beta_fast <= rope->beta_slow)
        return refuse(r, NULL, "model.rope_scaling.beta_fast = %g must be above beta_slow = %g", rope->beta_fast,
                      rope->beta_slow);
    return 0;
}

static int finish_lr(Reader *r, TrainConfig *t) {
    const Schedule *lr = &t->lr;
    bool unset = t->lr_final < 0;
    if (lr->n > 1) {
        double last = lr->value[lr->n - 1];
        if (!unset && t->lr_final != last)
            return refuse(r, "leave lr_final out, or set it to null",
                          "train.lr_final = %g, but train.lr is a list of points that ends with %g", t->lr_final, last);
        t->lr_final = last;
        if (t->lr_shape == SHAPE_WSD)
            return refuse(r, "a list of points is joined by constant, linear or cosine",
                          "train.lr_shape = \"wsd\" is for one train.lr, not for a list");
        return 0;
    }
    if (unset) t->lr_final = t->lr_shape == SHAPE_CONSTANT ? lr->value[0] : lr->value[0] / 10;
    if (t->lr_shape != SHAPE_CONSTANT && t->lr_final > lr->value[0])
        return refuse(r, "lower train.lr_final, or set it to null for a tenth of lr",
                      "train.lr_final = %g is above train.lr = %g", t->lr_final, lr->value[0]);
    return 0;
}

int config_finish(Reader *r) {
    Config *c = r->config;
    if (!c->run.name[0]) name_from_path(c->run.name, r->name);
    if (strchr(c->run.name, '/')) return refuse(r, NULL, "run.name = \"%s\" must not contain a slash", c->run.name);
    if (!c->run.dir[0]) snprintf(c->run.dir, sizeof c->run.dir, "runs/%s", c->run.name);
    if (c->model.num_key_value_heads == 0) c->model.num_key_value_heads = c->model.num_attention_heads;
    if (finish_rope(r, &c->model, &c->model.rope) != 0) return -1;
    return finish_lr(r, &c->train);
}

/* ----------------------------------------------------------------------------------------------------------- rules */

static int check_attention(Reader *r, const ModelConfig *m) {
    if (m->qk_nope_head_dim + m->qk_rope_head_dim > HEAD_WIDTH_MAX || m->v_head_dim > HEAD_WIDTH_MAX)
        return refuse(r, NULL,
                      "model.qk_nope_head_dim + qk_rope_head_dim = %lld and v_head_dim = %lld must be at most %d",
                      (long long)(m->qk_nope_head_dim + m->qk_rope_head_dim), (long long)m->v_head_dim, HEAD_WIDTH_MAX);
    if (m->qk_rope_head_dim % 2)
        return refuse(r, NULL, "model.qk_rope_head_dim = %lld must be even: it is rotated in pairs",
                      (long long)m->qk_rope_head_dim);
    if (m->num_key_value_heads != m->num_attention_heads)
        return refuse(r, "MLA has no grouped heads",
                      "model.num_key_value_heads = %d must equal model.num_attention_heads = %d",
                      m->num_key_value_heads, m->num_attention_heads);
    if (m->first_k_dense_replace > m->num_hidden_layers)
        return refuse(r, "as many as there are layers makes a dense model",
                      "model.first_k_dense_replace = %d must be at most model.num_hidden_layers = %d",
                      m->first_k_dense_replace, m->num_hidden_layers);
    if (m->bos_token_id >= m->vocab_size)
        return refuse(r, NULL, "model.bos_token_id = %lld must be below model.vocab_size = %lld",
                      (long long)m->bos_token_id, (long long)m->vocab_size);
    if (m->eos_token_id >= m->vocab_size)
        return refuse(r, NULL, "model.eos_token_id = %lld must be below model.vocab_size = %lld",
                      (long long)m->eos_token_id, (long long)m->vocab_size);
    return 0;
}

static int check_groups(Reader *r, const ModelConfig *m) {
    int n_experts = m->n_routed_experts, n_groups = m->n_group;
    if (n_experts % n_groups)
        return refuse(r, NULL, "model.n_routed_experts = %d must be a multiple of model.n_group = %d", n_experts,
                      n_groups);
    if (m->topk_group > n_groups)
        return refuse(r, NULL, "model.topk_group = %d must be at most model.n_group = %d", m->topk_group, n_groups);
    int group = n_experts / n_groups;
    if ((int64_t)m->topk_group * group < m->num_experts_per_tok)
        return refuse(r, "raise topk_group, or lower num_experts_per_tok or n_group",
                      "model.topk_group = %d groups of %d experts hold fewer than model.num_experts_per_tok = %d",
                      m->topk_group, group, m->num_experts_per_tok);
    if (m->topk_method == TOPK_NOAUX_TC && n_groups > 1 && group < 2)
        return refuse(r, "a group is scored by its two best experts",
                      "model.n_group = %d of model.n_routed_experts = %d leaves one expert a group; noaux_tc needs two",
                      n_groups, n_experts);
    if (m->topk_method == TOPK_GREEDY && n_groups > 1)
        return refuse(r, "use \"group_limited_greedy\" for groups",
                      "model.n_group = %d must be 1 with model.topk_method = \"greedy\"", n_groups);
    return 0;
}

static int check_router(Reader *r, const ModelConfig *m) {
    /* All layers dense: then MTP's block is dense too (model/shape.c), and nothing is routed. */
    if (m->first_k_dense_replace == m->num_hidden_layers) return 0;
    if (m->num_experts_per_tok > m->n_routed_experts)
        return refuse(r, NULL, "model.num_experts_per_tok = %d must be at most model.n_routed_experts = %d",
                      m->num_experts_per_tok, m->n_routed_experts);
    if (check_groups(r, m) != 0) return -1;
    if ((m->scoring_func == SCORING_SIGMOID) != (m->topk_method == TOPK_NOAUX_TC))
        return refuse(r, "sigmoid goes with noaux_tc (V3); softmax with greedy or group_limited_greedy (V2)",
                      "model.scoring_func = \"%s\" does not go with model.topk_method = \"%s\"",
                      m->scoring_func == SCORING_SIGMOID ? "sigmoid" : "softmax",
                      m->topk_method == TOPK_NOAUX_TC ? "noaux_tc"
                      : m->topk_method == TOPK_GREEDY ? "greedy"
                                                      : "group_limited_greedy");
    if (m->norm_topk_prob && m->num_experts_per_tok == 1)
        return refuse(r, "set norm_topk_prob to false, or num_experts_per_tok to 2 or more",
                      "model.norm_topk_prob = true with model.num_experts_per_tok = 1: the one weight is always 1, so "
                      "the router cannot learn");
    return 0;
}

static int check_batch(Reader *r, const Config *c) {
    const TrainConfig *t = &c->train;
    if (t->seq_len > c->model.max_position_embeddings)
        return refuse(r, NULL, "train.seq_len = %lld must be at most model.max_position_embeddings = %lld",
                      (long long)t->seq_len, (long long)c->model.max_position_embeddings);
    if ((double)t->seq_len * (double)t->micro_batch_size > INT32_MAX)
        return refuse(r, NULL, "train.micro_batch_size = %lld x train.seq_len = %lld must be at most %d tokens",
                      (long long)t->micro_batch_size, (long long)t->seq_len, INT32_MAX);
    for (int i = 0; i < t->global_batch_size.n; i++) {
        int64_t batch = (int64_t)t->global_batch_size.value[i];
        if (batch % t->micro_batch_size)
            return refuse(r, NULL, "train.global_batch_size = %lld must be a multiple of train.micro_batch_size = %lld",
                          (long long)batch, (long long)t->micro_batch_size);
    }
    return 0;
}

static int check_length(Reader *r, const TrainConfig *t) {
    if (t->steps > 0 && t->tokens > 0)
        return refuse(r, "leave one of them out", "train.steps = %lld and train.tokens = %lld are both given",
                      (long long)t->steps, (long long)t->tokens);
    if (t->steps == 0 && t->tokens == 0)
        return refuse(r, "give one of the two, for example \"steps\": 1000", "train.steps or train.tokens is missing");
    double tokens_a_step = t->global_batch_size.value[0] * (double)t->seq_len, steps = (double)t->steps;
    if (t->tokens > 0) {
        if ((double)t->tokens < tokens_a_step)
            return refuse(r, NULL, "train.tokens = %lld is less than one step: global_batch_size x seq_len = %.0f",
                          (long long)t->tokens, tokens_a_step);
        steps = t->global_batch_size.n > 1 ? INFINITY : ceil((double)t->tokens / tokens_a_step);
    }
    if ((double)t->lr_warmup_steps > steps)
        return refuse(r, "shorten the warm-up or lengthen the run",
                      "train.lr_warmup_steps = %lld is more than the run's %.0f steps", (long long)t->lr_warmup_steps,
                      steps);
    return 0;
}

/* FP8 scales cover 128 numbers, so every extent that a block Linear sums over in forward, and for its weight, is a
 * multiple of 128. */
static int check_fp8_widths(Reader *r, const Config *c) {
    const ModelConfig *m = &c->model;
    if (c->precision.compute != COMPUTE_FP8) return 0;
    bool has_dense = m->first_k_dense_replace > 0;
    bool has_routed = m->first_k_dense_replace < m->num_hidden_layers || m->num_nextn_predict_layers > 0;
    const struct {
        const char *name;
        int64_t width;
    } widths[] = {
        {"hidden_size", m->hidden_size},
        {"q_lora_rank", m->q_lora_rank},
        {"kv_lora_rank", m->kv_lora_rank},
        {"num_attention_heads x v_head_dim", m->num_attention_heads * m->v_head_dim},
        {"intermediate_size", has_dense ? m->intermediate_size : 0},
        {"moe_intermediate_size", has_routed ? m->moe_intermediate_size : 0},
    };
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        if (widths[i].width % 128)
            return refuse(r, "FP8 scales cover 128 columns; or use precision.compute = \"bf16\"",
                          "model.%s = %lld must be a multiple of 128 with precision.compute = \"fp8\"", widths[i].name,
                          (long long)widths[i].width);
    const struct {
        const char *name;
        int64_t width;
    } sixteens[] = {
        {"qk_rope_head_dim", m->qk_rope_head_dim},
        {"num_attention_heads x (qk_nope_head_dim + qk_rope_head_dim)",
         m->num_attention_heads * (m->qk_nope_head_dim + m->qk_rope_head_dim)},
        {"num_attention_heads x (qk_nope_head_dim + v_head_dim)",
         m->num_attention_heads * (m->qk_nope_head_dim + m->v_head_dim)},
    };
    for (size_t i = 0; i < sizeof sixteens / sizeof *sixteens; i++)
        if (sixteens[i].width % 16)
            return refuse(r, "FP8 products take 16 numbers at a time; or use precision.compute = \"bf16\"",
                          "model.%s = %lld must be a multiple of 16 with precision.compute = \"fp8\"", sixteens[i].name,
                          (long long)sixteens[i].width);
    const int64_t tokens = c->train.micro_batch_size * c->train.seq_len;
    if (tokens % 128)
        return refuse(
            r, "FP8 scales cover 128 tokens; or use precision.compute = \"bf16\"",
            "train.micro_batch_size x seq_len = %lld must be a multiple of 128 with precision.compute = \"fp8\"",
            (long long)tokens);
    return 0;
}

static int check_rest(Reader *r, const Config *c) {
    if (c->data.document_token >= c->model.vocab_size)
        return refuse(r, NULL, "data.document_token = %lld must be below model.vocab_size = %lld",
                      (long long)c->data.document_token, (long long)c->model.vocab_size);
    if (c->sample.every_steps > 0 && c->sample.n_prompts == 0)
        return refuse(r, "for example \"prompts\": [\"Once upon a time\"]",
                      "sample.every_steps = %lld, but sample.prompts is empty", (long long)c->sample.every_steps);
    if (c->eval.choice_every_steps > 0 && c->eval.n_choice == 0)
        return refuse(r, "for example \"choice\": [{\"name\": \"hellaswag\", \"path\": \"hellaswag_val.bin\"}]",
                      "eval.choice_every_steps = %lld, but eval.choice is empty",
                      (long long)c->eval.choice_every_steps);
    if (c->parallel.pp > c->model.num_hidden_layers)
        return refuse(r, NULL, "parallel.pp = %d must be at most model.num_hidden_layers = %d", c->parallel.pp,
                      c->model.num_hidden_layers);
    if (c->parallel.ep > 0 && c->model.n_routed_experts % c->parallel.ep)
        return refuse(r, "\"auto\" takes the largest that fits",
                      "parallel.ep = %d must divide model.n_routed_experts = %d", c->parallel.ep,
                      c->model.n_routed_experts);
    return 0;
}

int config_check_rules(Reader *r) {
    const Config *c = r->config;
    if (check_attention(r, &c->model) != 0 || check_router(r, &c->model) != 0) return -1;
    if (check_batch(r, c) != 0 || check_length(r, &c->train) != 0) return -1;
    return check_fp8_widths(r, c) != 0 ? -1 : check_rest(r, c);
}
