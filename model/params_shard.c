/* See params.h: which part of every weight is this rank's. The cut itself is cut.h's. */
#include <stdlib.h>

#include "kernels/base/check.h"
#include "kernels/base/ints.h"
#include "params_parts.h"

enum { PART_ALIGN = 128 };

/* ---- the cut ----------------------------------------------------------------------------------------------------- */

/* A vector is one row. */
static void dims_of(const Weight *w, int64_t *planes, int64_t *rows, int64_t *cols) {
    const Tensor *t = &w->dw;
    *planes = t->ndim == 3 ? t->shape[0] : 1;
    *rows = t->ndim == 1 ? 1 : t->shape[t->ndim - 2];
    *cols = t->shape[t->ndim - 1];
}

static bool is_f32(const Weight *w) {
    return w->w.dtype == DTYPE_F32;
}

static void place(Params *p, Weight *w) {
    const Interval all = {0, w->numel};
    w->updated = p->shape.zero1 && w->optimizer == OPTIMIZER_ADAMW ? w->shard : all;
    w->master_at = p->n_master;
    w->moment_at = p->n_moments;
    p->n_master += round_up(is_f32(w) ? w->numel : w->updated.n, PART_ALIGN);
    p->n_moments += round_up(w->updated.n, PART_ALIGN);
}

static void cut(Params *p, Weight *w, Interval *shards, int64_t *load) {
    const ModelShape *s = &p->shape;
    int64_t planes, rows, cols;
    dims_of(w, &planes, &rows, &cols);
    cut_weight(shards, load, w->is_expert ? s->n_expert_data : s->n_data, planes, rows, cols);
    w->shards = shards;
    w->shard = shards[w->is_expert ? s->expert_data_rank : s->data_rank];
    place(p, w);
}

void params_cut(Params *p) {
    const ModelShape *s = &p->shape;
    const int64_t most = s->n_data; /* ranks of a group */
    int64_t *load = (int64_t *)calloc((size_t)most, sizeof *load);
    p->shards = (Interval *)calloc((size_t)((s->n_blocks + 1) * WEIGHT_COUNT * most), sizeof *p->shards);
    CHECK(load && p->shards, "no memory for the shards of %lld ranks", (long long)most);
    Interval *next = p->shards;
    for (int experts = 0; experts <= 1; experts++) {
        for (int64_t r = 0; r < most; r++) load[r] = 0;
        for (int block = -1; block < s->n_blocks; block++)
            for (int id = 0; id < WEIGHT_COUNT; id++) {
                Weight *w = &block_at(p, block)->weight[id];
                if (w->numel == 0 || w->is_expert != (experts == 1)) continue;
                cut(p, w, next, load);
                next += most;
            }
    }
    free(load);
}

/* Another stage has the embedding too, and counts and saves it. */
static bool is_copy(const Params *p, const Weight *w) {
    return p->shape.part.embedding_is_copy && w == &p->top.weight[WEIGHT_EMBED];
}

/* ---- parts of a weight ------------------------------------------------------------------------------------------- */

Tensor params_master(const Params *p, const Weight *w) {
    return tensor_rows(p->master, w->master_at + (is_f32(w) ? w->updated.first : 0), w->updated.n);
}

Tensor params_grad(const Params *p, const Weight *w) {
    return tensor_rows(p->grad, w->offset + w->updated.first, w->updated.n);
}

Tensor params_moment(Tensor arena, const Weight *w) {
    return tensor_rows(arena, w->moment_at, w->updated.n);
}

bool params_is_shared(const Weight *w) {
    return w->updated.n < w->numel;
}

/* Of FP8 weights in planes, a plane is whole blocks (config_rules.c), so any run of blocks is a matrix. */
Interval params_scales(const Weight *w, Interval elements) {
    const int64_t rows = w->w.shape[w->w.ndim - 2], cols = w->w.shape[w->w.ndim - 1];
    CHECK(w->w.ndim == 2 || rows % CUT_ROWS == 0, "planes of %lld rows in FP8", (long long)rows);
    const int64_t first = elements.first / cols / CUT_ROWS;
    return (Interval){first * w->w.scale_ld, ceil_div(elements.n / cols, CUT_ROWS) * w->w.scale_ld};
}

Tensor params_rows(const Weight *w, Tensor whole) {
    return tensor_rows(weight_flat(whole), w->updated.first, w->updated.n);
}

Tensor params_blocks(const Weight *w) {
    const int64_t cols = w->w.shape[w->w.ndim - 1];
    return tensor_blocks((char *)w->w.data + w->updated.first, w->w.scale + params_scales(w, w->updated).first, 0,
                         w->updated.n / cols, cols);
}

/* ---- parts of a named tensor ------------------------------------------------------------------------------------- */

const Block *params_block(const Params *p, int block) {
    return block < 0 ? &p->top : &p->blocks[block];
}

const Weight *params_weight(const Params *p, const NamedTensor *t) {
    return &params_block(p, t->block)->weight[t->weight];
}

int64_t params_begin(const Params *p, const NamedTensor *t) {
    return t->offset - params_weight(p, t)->offset;
}

Interval params_interval(const Params *p, const NamedTensor *t, Interval part_of_weight) {
    const Interval whole = {0, t->numel};
    part_of_weight.first -= params_begin(p, t);
    return interval_overlap(part_of_weight, whole);
}

Interval params_held(const Params *p, const NamedTensor *t) {
    const Weight *w = params_weight(p, t);
    const Interval whole = {0, t->numel};
    return is_f32(w) ? whole : params_interval(p, t, w->updated);
}

Interval params_owned(const Params *p, const NamedTensor *t) {
    if (is_copy(p, params_weight(p, t))) return (Interval){0, 0};
    return params_interval(p, t, params_weight(p, t)->shard);
}

int64_t params_master_at(const Params *p, const NamedTensor *t, int64_t e) {
    const Weight *w = params_weight(p, t);
    return w->master_at + params_begin(p, t) + e - (is_f32(w) ? 0 : w->updated.first);
}

/* ---- tables on the device ---------------------------------------------------------------------------------------- */

int params_expert(const Params *p, int block, int64_t local) {
    const ModelShape *s = &p->shape;
    return p->expert_of_slot[(int64_t)(block - s->n_dense) * s->router.n_experts + s->first_slot + local];
}

/* The norm's partial sums of a weight. */
static void weight_intervals(const Params *p, int block, const Weight *w, Interval *intervals) {
    int64_t planes, rows, cols;
    dims_of(w, &planes, &rows, &cols);
    const int64_t per_plane = cut_blocks(1, rows);
    for (int64_t i = 0; i < planes * per_plane; i++) {
        const int64_t plane = w->is_expert ? params_expert(p, block, i / per_plane) : 0;
        const Interval part = interval_overlap(cut_block(planes, rows, cols, i), w->shard);
        if (part.n == 0) continue;
        intervals[w->first_partial + plane * per_plane + i % per_plane] = (Interval){w->offset + part.first, part.n};
    }
}

static void write_intervals(const Params *p, const Device *d) {
    Interval *intervals = (Interval *)calloc((size_t)p->n_partials, sizeof *intervals);
    CHECK(intervals, "no memory for the blocks of %lld partial sums", (long long)p->n_partials);
    for (int block = -1; block < p->shape.n_blocks; block++)
        for (int id = 0; id < WEIGHT_COUNT; id++) {
            const Weight *w = &params_block(p, block)->weight[id];
            if (w->numel > 0 && w->optimizer == OPTIMIZER_ADAMW && !is_copy(p, w))
                weight_intervals(p, block, w, intervals);
        }
    op_copy_in(d, p->partial_intervals, intervals, (size_t)p->n_partials * sizeof *intervals, STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
    free(intervals);
}

static void write_slots(const Params *p, const Device *d) {
    const int64_t E = p->shape.router.n_experts, n = tensor_numel(p->slot_of_expert);
    int32_t *slots = (int32_t *)calloc((size_t)n + 1, sizeof *slots);
    CHECK(slots, "no memory for the slots of %lld experts", (long long)n);
    for (int64_t i = 0; i < n; i++) slots[i / E * E + p->expert_of_slot[i]] = (int32_t)(i % E);
    op_copy_in(d, p->slot_of_expert.data, slots, (size_t)n * sizeof *slots, STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
    free(slots);
}

void params_write_tables(const Params *p, const Device *d) {
    write_intervals(p, d);
    write_slots(p, d);
}
