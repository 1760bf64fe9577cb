/* See rank_memory.h. */
#include "rank_memory.h"

#include <string.h>

#include "kernels/base/check.h"
#include "model/memory.h"
#include "model/parallel/pipeline.h"

int stage_n_blocks(const ClusterShape *c, int stage) {
    const bool is_last = stage == c->schedule->shape.n_stages - 1;
    return c->stages[stage].end - c->stages[stage].first + (is_last ? c->shape->n_mtp : 0);
}

int stage_block(const ClusterShape *c, int stage, int i) {
    const int n_main = c->stages[stage].end - c->stages[stage].first;
    return i < n_main ? c->stages[stage].first + i : c->shape->L + i - n_main;
}

/* ---- state ------------------------------------------------------------------------------------------------------- */

/* Calls what(arg, weight) for every weight that the rank holds. */
static void each_weight(const ClusterShape *c, int rank, void (*what)(void *arg, const Weight *w), void *arg) {
    const ScheduleShape *s = &c->schedule->shape;
    const RankTop top = stages_rank_top(s, rank, c->shape->n_mtp);
    for (int id = 0; id < WEIGHT_COUNT; id++)
        if (c->params->top.weight[id].numel > 0 && (id == WEIGHT_EMBED ? top.embedding : top.has_loss))
            what(arg, &c->params->top.weight[id]);
    for (int chunk = 0; chunk < s->n_chunks; chunk++) {
        const int stage = schedule_stage(s, rank, chunk);
        for (int i = 0; i < stage_n_blocks(c, stage); i++)
            for (int id = 0; id < WEIGHT_COUNT; id++) {
                const Weight *w = &c->params->blocks[stage_block(c, stage, i)].weight[id];
                if (w->numel > 0) what(arg, w);
            }
    }
}

static size_t bytes_of(Tensor t) {
    return tensor_bytes(t) + (size_t)tensor_n_scales(t) * sizeof(float);
}

static void add_params(void *arg, const Weight *w) {
    RankParams *p = (RankParams *)arg;
    *(w->is_expert ? &p->experts : &p->others) += (double)w->numel;
    *(w->is_expert ? &p->experts_bytes : &p->others_bytes) += (double)bytes_of(w->w);
}

RankParams rank_params(const ClusterShape *c, int rank) {
    const int copies = schedule_copies(c->schedule->shape.kind);
    const int64_t n_dp = c->mesh->n_dp;
    RankParams p = {.n_others = n_dp * c->mesh->n_ep * copies, .n_experts = n_dp * copies};
    each_weight(c, rank, add_params, &p);
    return p;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* The first of its data and expert ranks. */
static Mesh mesh_of(const ClusterShape *c, int rank) {
    const Mesh *m = c->mesh;
    const Mesh mesh = mesh_make(rank * m->n_dp * m->n_ep, m->world, m->n_pp, m->n_ep);
    return schedule_copies(c->schedule->shape.kind) > 1 ? mesh_mirrored(mesh) : mesh;
}

static void add_items(Arena *items, const Arena *from) {
    for (int i = 0; i < from->n_items; i++) arena_alloc(items, from->items[i].bytes, from->items[i].name);
}

RankMemory rank_memory(const ClusterShape *c, int rank, const Config *config, const Device *device) {
    const ScheduleShape *schedule = &c->schedule->shape;
    Config own = *config;
    Comm who = {.mesh = mesh_of(c, rank)};
    RankPart part;
    Model model;
    char err[ERR_LEN];
    own.memory.recompute = c->shape->recompute & ~RECOMPUTE_UNASKED;
    memset(&model, 0, sizeof model);
    if (schedule->P > 1 || schedule->kind != SCHEDULE_1F1B) { /* one after the other is no pipeline (part.h) */
        CHECK(pipeline_part(&part, schedule, rank, c->shape, err) == 0, "%s", err);
        model.part = &part;
    }
    model_plan(&model, &own, device, &who);
    RankMemory m = {.bytes = memory_total(&model), .items = arena_make("rank", NULL, 0)};
    add_items(&m.items, &model.keep);
    add_items(&m.items, &model.slots);
    arena_alloc(&m.items, model.scratch.peak, "scratch");
    if (memory_rows(&model) > 0) arena_alloc(&m.items, (size_t)memory_rows(&model), "driver and libraries");
    model_free(&model);
    return m;
}
