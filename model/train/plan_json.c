/* The plan as JSON: the members that plan_help.c lists. */
#include <stdio.h>

#include "data/json.h"
#include "plan.h"

/* ---- writing ----------------------------------------------------------------------------------------------------- */

static void key(FILE *out, const char *name, bool is_first) {
    fprintf(out, "%s\"%s\": ", is_first ? "" : ", ", name);
}

static void put_number(FILE *out, const char *name, double x, bool is_first) {
    key(out, name, is_first);
    json_write_double(out, x);
}

static void put_integer(FILE *out, const char *name, int64_t n, bool is_first) {
    key(out, name, is_first);
    fprintf(out, "%lld", (long long)n);
}

static void put_bool(FILE *out, const char *name, bool x, bool is_first) {
    key(out, name, is_first);
    fputs(x ? "true" : "false", out);
}

/* text NULL: null */
static void put_text(FILE *out, const char *name, const char *text, bool is_first) {
    key(out, name, is_first);
    if (text)
        json_write_string(out, text);
    else
        fputs("null", out);
}

static void put_known(FILE *out, const char *name, double x, bool is_known) {
    if (is_known)
        put_number(out, name, x, false);
    else
        put_text(out, name, NULL, false);
}

typedef enum { BY_PARAMS, BY_ACTIVE, BY_FLOPS } By;

static void put_part(FILE *out, const char *name, const PartCount *n, By by, bool is_first) {
    if (by == BY_FLOPS)
        put_number(out, name, n->flops, is_first);
    else
        put_integer(out, name, by == BY_PARAMS ? n->params : n->active, is_first);
}

static void put_parts(FILE *out, const ModelCount *c, By by, bool is_first) {
    key(out, "by_part", is_first);
    fputc('{', out);
    for (int i = 0; i < PART_MTP_PROJECTION; i++) {
        if (i == PART_ATTENTION_CORE && by != BY_FLOPS) continue;
        put_part(out, part_name((Part)i), &c->main[i], by, i == 0);
    }
    put_part(out, "mtp", &c->mtp_total, by, false);
    fputc('}', out);
}

static void put_counts(FILE *out, const Plan *p) {
    const ModelCount *c = &p->count;
    const double flops = c->main_total.flops + c->mtp_total.flops;
    fputs(",\n  \"parameters\": {", out);
    put_integer(out, "total", c->main_total.params, true);
    put_integer(out, "mtp", c->mtp_total.params, false);
    put_integer(out, "active_with_head", c->active_with_head, false);
    put_integer(out, "active_without_head", c->active_with_head - c->main[PART_HEAD].active, false);
    put_parts(out, c, BY_PARAMS, false);
    fputs("},\n  \"active\": {", out);
    put_parts(out, c, BY_ACTIVE, true);
    fputs("},\n  \"flops_per_token\": {", out);
    put_number(out, "total", flops, true);
    put_number(out, "forward", flops / 3, false);
    put_number(out, "backward", flops * 2 / 3, false);
    put_parts(out, c, BY_FLOPS, false);
    fputs("},\n  \"run\": {", out);
    const ModelShape *s = &p->run->model.shape;
    put_integer(out, "steps", p->length.steps, true);
    put_integer(out, "tokens", p->length.tokens, false);
    put_number(out, "flops", flops * (double)p->length.tokens, false);
    put_integer(out, "tokens_per_step", p->batch_first * s->S, false);
    put_integer(out, "tokens_per_step_at_end", p->batch_last * s->S, false);
    put_integer(out, "micro_batches_per_step", p->batch_last / (s->B * p->ranks), false);
    fputs("}", out);
}

static void put_sources(FILE *out, const Plan *p) {
    fputs(",\n  \"data\": [", out);
    for (int i = 0; i < p->n_sources; i++) {
        const PlanSource *s = &p->sources[i];
        fputs(i ? ",\n    {" : "\n    {", out);
        put_text(out, "name", s->label, true);
        put_text(out, "path", s->path, false);
        put_bool(out, "there", s->is_there, false);
        put_text(out, "problem", s->problem[0] ? s->problem : NULL, false);
        put_integer(out, "shards", s->n_shards, false);
        put_integer(out, "tokens", s->tokens, false);
        put_number(out, "asked", s->asked, false);
        put_known(out, "epochs", s->tokens > 0 ? s->asked / (double)s->tokens : 0, s->tokens > 0 && s->asked > 0);
        fputs("}", out);
    }
    fputs("]", out);
}

static void put_arena(FILE *out, const char *arena, const ArenaItem *items, int n, bool *is_first) {
    for (int i = 0; i < n; i++) {
        fputs(*is_first ? "\n    {" : ",\n    {", out);
        *is_first = false;
        put_text(out, "arena", arena, true);
        put_text(out, "name", items[i].name, false);
        put_integer(out, "bytes", (int64_t)items[i].bytes, false);
        fputs("}", out);
    }
}

static void put_memory(FILE *out, const Plan *p) {
    const Model *m = &p->run->model;
    const ArenaItem scratch = {"shared by all blocks", m->scratch.peak};
    bool is_first = true;
    fputs(",\n  \"memory\": {", out);
    put_integer(out, "device_bytes", p->device_bytes, true);
    put_integer(out, "host_bytes", p->host_bytes, false);
    fputs(", \"items\": [", out);
    put_arena(out, "state", m->keep.items, m->keep.n_items, &is_first);
    put_arena(out, "activations", m->slots.items, m->slots.n_items, &is_first);
    put_arena(out, "scratch", &scratch, 1, &is_first);
    for (int i = 0; i < MEMORY_ROWS; i++) {
        const ArenaItem row = {memory_row_name[i], (size_t)memory_row(m, (MemoryRow)i)};
        if (row.bytes > 0) put_arena(out, "device", &row, 1, &is_first);
    }
    fputs("], \"host_items\": [", out);
    for (int i = 0; i < PLAN_HOST_ITEMS; i++) {
        fputs(i ? ",\n    {" : "\n    {", out);
        put_text(out, "name", p->host[i].name, true);
        put_integer(out, "bytes", p->host[i].bytes, false);
        fputs("}", out);
    }
    fputs("]},\n  \"files\": {", out);
    put_integer(out, "checkpoint_bytes", p->checkpoint_bytes, true);
    put_integer(out, "hf_bf16_bytes", p->hf_bytes[HF_BF16], false);
    put_integer(out, "hf_fp8_bytes", p->hf_bytes[HF_FP8], false);
    put_integer(out, "hf_fp32_bytes", p->hf_bytes[HF_FP32], false);
    fputs("}", out);
}

static void put_choice(FILE *out, const PlanChoice *c) {
    char names[80];
    plan_recompute_text(names, sizeof names, c->recompute);
    key(out, "recompute", true);
    fputs(c->recompute ? names : "[]", out);
    put_integer(out, "micro_batch", c->micro_batch, false);
    put_integer(out, "bytes", c->bytes, false);
    put_known(out, "tokens_per_second", c->tokens_per_s, c->has_time);
    put_known(out, "recompute_seconds", c->time.of.recompute, c->has_time);
}

static void put_gpu(FILE *out, const Plan *p) {
    const PlanGpu *g = &p->gpu;
    const bool has_time = g->chosen && g->chosen->has_time;
    put_text(out, "name", g->rates.name, true);
    put_text(out, "source", g->rates.source, false);
    put_bool(out, "measured", g->rates.measured, false);
    put_integer(out, "memory_bytes", g->bytes, false);
    put_bool(out, "fits", g->fits, false);
    put_integer(out, "needs_bytes", g->configured.bytes, false);
    fputs(", \"choices\": [", out);
    for (int i = 0; i < PLAN_RECOMPUTES; i++) {
        fputs(i ? ",\n    {" : "\n    {", out);
        put_choice(out, &g->choices[i]);
        fputs("}", out);
    }
    fputs("]", out);
    put_text(out, "set", g->sets, false);
    put_known(out, "step_seconds", g->step_s, has_time);
    put_known(out, "tokens_per_second", has_time ? g->chosen->tokens_per_s : 0, has_time);
    put_known(out, "model_tflops", g->model_tflops, has_time);
    put_known(out, "mfu", g->mfu, has_time && g->mfu > 0);
    put_known(out, "days", g->run_s / 86400, has_time);
    put_known(out, "gpu_hours", g->gpu_hours, has_time);
    put_known(out, "price", g->price, has_time && g->price > 0);
}

static void put_stages(FILE *out, const Cluster *c) {
    fputs(", \"stages\": [", out);
    for (int i = 0; i < c->schedule.n_stages; i++) {
        const StageTimes *t = &c->times[i];
        fputs(i ? ",\n    {" : "\n    {", out);
        put_integer(out, "first_layer", c->stages[i].first, true);
        put_integer(out, "layers", c->stages[i].end - c->stages[i].first, false);
        put_number(out, "forward_seconds", t->forward, false);
        put_number(out, "backward_seconds", t->backward, false);
        put_number(out, "backward_input_seconds", t->backward_input, false);
        put_number(out, "backward_weight_seconds", t->backward_weight, false);
        put_known(out, "pair_seconds", t->pair, t->pair > 0);
        fputs("}", out);
    }
    fputs("]", out);
}

static void put_rank_memory(FILE *out, const Cluster *c) {
    const Arena *items = &c->memory[c->fullest].items;
    bool is_first = true;
    put_bool(out, "fits", c->memory[c->fullest].bytes <= c->capacity, false);
    put_integer(out, "memory_bytes", c->capacity, false);
    fputs(", \"ranks\": [", out);
    for (int r = 0; r < c->schedule.P; r++) {
        fputs(r ? ", {" : "{", out);
        put_integer(out, "bytes", c->memory[r].bytes, true);
        fputs("}", out);
    }
    fputs("]", out);
    put_integer(out, "fullest_rank", c->fullest, false);
    fputs(", \"items\": [", out);
    put_arena(out, "rank", items->items, items->n_items, &is_first);
    fputs("]", out);
}

static void put_links(FILE *out, const Cluster *c) {
    const LinkBytes *const rows[] = {&c->experts, &c->stage_to_stage, &c->optimizer};
    static const char *const names[] = {"experts", "stages", "optimizer"};
    fputs(", \"links\": {", out);
    for (int i = 0; i < 3; i++) {
        key(out, names[i], i == 0);
        fputs("{", out);
        put_number(out, "nvlink_bytes", rows[i]->nvlink, true);
        put_number(out, "ib_bytes", rows[i]->ib, false);
        fputs("}", out);
    }
    fputs("}", out);
}

static void put_cluster(FILE *out, const Plan *p) {
    const Cluster *c = &p->cluster;
    const double price = p->run->config.run.price_per_gpu_hour;
    put_text(out, "name", c->rates.name, true);
    put_text(out, "source", c->rates.source, false);
    put_integer(out, "nodes", c->n_nodes, false);
    put_text(out, "schedule", schedule_name(c->schedule.kind), false);
    put_integer(out, "micro_batches", c->schedule.M, false);
    put_rank_memory(out, c);
    put_stages(out, c);
    put_links(out, c);
    put_number(out, "step_seconds", c->step_s, false);
    put_number(out, "pipeline_seconds", c->pipeline_s, false);
    put_number(out, "bubble_seconds", c->bubble_s, false);
    put_number(out, "update_seconds", c->update_s, false);
    put_number(out, "exchange_seconds", c->exchange_s, false);
    put_known(out, "exchange_hidden", c->hidden, c->exchange_s > 0);
    put_number(out, "tokens_per_step", c->tokens, false);
    put_number(out, "tokens_per_second", c->tokens_per_s, false);
    put_number(out, "model_tflops", c->model_tflops, false);
    put_known(out, "mfu", c->mfu, c->mfu > 0);
    put_number(out, "gpu_hours_per_trillion_tokens", c->hours_per_trillion, false);
    put_known(out, "price_per_trillion_tokens", price * c->hours_per_trillion, price > 0);
}

static void put_balance(FILE *out, const char *name, RankBalance b) {
    key(out, name, false);
    fputs("{", out);
    put_number(out, "mean", b.mean, true);
    put_number(out, "worst", b.worst, false);
    fputs("}", out);
}

static void put_experts(FILE *out, const Plan *p) {
    if (!p->has_experts) {
        fputs("null", out);
        return;
    }
    fputs("{", out);
    put_text(out, "checkpoint", p->experts_of, true);
    put_balance(out, "consecutive", p->consecutive);
    put_balance(out, "balanced", p->balanced);
    fputs("}", out);
}

void plan_json(const Plan *p, FILE *out) {
    fputs("{\n  ", out);
    put_integer(out, "version", 1, true);
    put_text(out, "config", p->run->config.path, false);
    put_text(out, "name", p->run->config.run.name, false);
    put_counts(out, p);
    put_sources(out, p);
    put_memory(out, p);
    fputs(",\n  \"world\": {", out);
    put_integer(out, "gpus", p->world, true);
    put_integer(out, "pp", p->mesh.n_pp, false);
    put_integer(out, "dp", p->mesh.n_dp, false);
    put_integer(out, "ep", p->mesh.n_ep, false);
    fputs("},\n  \"experts\": ", out);
    put_experts(out, p);
    fputs(",\n  \"not_yet\": [", out);
    for (int i = 0; i < p->n_notes; i++) {
        fputs(i ? ", " : "", out);
        json_write_string(out, p->notes[i]);
    }
    fputs("],\n  \"gpu\": ", out);
    if (p->has_gpu) {
        fputs("{", out);
        put_gpu(out, p);
        fputs("}", out);
    } else {
        fputs("null", out);
    }
    fputs(",\n  \"cluster\": ", out);
    if (p->has_cluster) {
        fputs("{", out);
        put_cluster(out, p);
        fputs("}", out);
    } else {
        fputs("null", out);
    }
    fputs("\n}\n", out);
}
