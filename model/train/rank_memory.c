/* See rank_memory.h. */
#include "rank_memory.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/ints.h"
#include "model/acts.h"

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

/* What ops read, where it is not the f32 master itself. */
static void add_copies(void *arg, const Weight *w) {
    RankMemory *m = (RankMemory *)arg;
    const char *name = w->w.dtype == DTYPE_E4M3 ? "weights (FP8, both ways)" : "weights (bf16 copy)";
    if (w->w.dtype != DTYPE_F32) arena_alloc(&m->items, bytes_of(w->w), name);
    if (!tensor_is_none(w->wt)) arena_alloc(&m->items, bytes_of(w->wt), name);
}

static void add_state(RankMemory *m, const ClusterShape *c, int rank) {
    const RankParams p = rank_params(c, rank);
    const double shard = p.others / (double)p.n_others + p.experts / (double)p.n_experts;
    arena_alloc(&m->items, (size_t)(4 * (p.others + p.experts)), "gradients (f32)");
    arena_alloc(&m->items, (size_t)(4 * shard), "weights (f32 master), a shard");
    arena_alloc(&m->items, (size_t)(2 * (double)dtype_size(c->shape->moment) * shard), "AdamW moments, a shard");
    each_weight(c, rank, add_copies, m);
}

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* Micro-batches for which a row is there: until its last reader. */
static int64_t n_held(const ActRow *row, const ModelShape *s, int live, int pending) {
    if (s->R == 1 && row->same_as != ACT_COUNT) return 0; /* lies in that row's memory */
    if (row->life == LIFE_GRADIENT) return pending;       /* none waits: scratch */
    if (row->life != LIFE_KEPT || row->recompute == -1 || (row->recompute & s->recompute) != 0) return 0;
    return row->last_reader == READER_WEIGHT ? live + pending : live;
}

static void add_block(RankMemory *m, const ModelShape *s, bool is_moe, int live, int pending) {
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        const int64_t n = n_held(row, s, live, pending);
        const Tensor t = row->make(s, is_moe);
        if (n > 0 && !tensor_is_none(t) && tensor_numel(t) > 0)
            arena_alloc(&m->items, (size_t)n * bytes_of(t), row->name);
    }
}

/* (T, D) tensors around the blocks of a stage: its input; behind the last stage hidden states, twice, and their
 * gradient, and for MTP the embedding and twice that for its projection. */
static void add_around(RankMemory *m, const ModelShape *s, bool has_loss, int live) {
    const size_t hidden = (size_t)(s->T * s->D) * dtype_size(s->act) * (size_t)live;
    arena_alloc(&m->items, hidden, "block input");
    if (has_loss) arena_alloc(&m->items, 3 * hidden * (size_t)(1 + s->n_mtp), "final hidden");
    if (has_loss && s->n_mtp) arena_alloc(&m->items, 3 * hidden * (size_t)s->n_mtp, "MTP input");
}

static void add_activations(RankMemory *m, const ClusterShape *c, int rank) {
    const ScheduleShape *shape = &c->schedule->shape;
    const SchedulePeak peak = schedule_peak(c->schedule, rank, NULL);
    for (int chunk = 0; chunk < shape->n_chunks; chunk++) {
        const int stage = schedule_stage(shape, rank, chunk), live = peak.live_of[chunk];
        for (int i = 0; i < stage_n_blocks(c, stage); i++)
            add_block(m, c->shape, shape_block_is_moe(c->shape, stage_block(c, stage, i)), live,
                      peak.pending_of[chunk]);
        add_around(m, c->shape, stage == shape->n_stages - 1, live);
    }
}

/* Scratch of a model of one block of each kind. */
static int64_t scratch_bytes(const ModelShape *s, bool training) {
    ModelShape few = *s;
    Arena slots = arena_make("slots", NULL, 0), scratch = arena_make("scratch", NULL, 0);
    Acts acts;
    const bool has_both = s->n_dense > 0 && shape_n_moe(s) > 0;
    memset(&acts, 0, sizeof acts);
    few.L = has_both ? 2 : 1;
    few.n_blocks = few.L + few.n_mtp;
    few.n_dense = shape_n_moe(s) == 0 ? few.n_blocks : has_both;
    acts_layout(&acts, &few, training, &slots, &scratch);
    acts_free(&acts);
    return (int64_t)scratch.peak;
}

RankMemory rank_memory(const ClusterShape *c, int rank, const DeviceMemory *device) {
    RankMemory m;
    memset(&m, 0, sizeof m);
    m.items = arena_make("rank", NULL, 0);
    add_state(&m, c, rank);
    add_activations(&m, c, rank);
    arena_alloc(&m.items, (size_t)scratch_bytes(c->shape, true), "scratch");
    const ScheduleKind kind = c->schedule->shape.kind;
    if (kind == SCHEDULE_DUALPIPE || kind == SCHEDULE_DUALPIPEV || kind == SCHEDULE_PAIRED)
        arena_alloc(&m.items, (size_t)scratch_bytes(c->shape, false), "scratch of the forward of a pair");
    int64_t rows = 0;
    for (int i = 0; i < MEMORY_ROWS; i++) rows += device->row[i];
    if (rows > 0) arena_alloc(&m.items, (size_t)rows, "driver and libraries");
    m.bytes = (int64_t)m.items.peak;
    return m;
}
