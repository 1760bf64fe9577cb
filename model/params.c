/* See params.h. The table comes first; everything else walks it. */
#include "params.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "kernels/base/ints.h"
#include "kernels/base/rng.h"
#include "params_parts.h"
#include "zero1.h"

/* ---- the table --------------------------------------------------------------------------------------------------- */

/* Extents in letters (tensor.h), resolved by dim_of. */
typedef enum {
    DIM_NONE, /* a vector */
    DIM_D,
    DIM_2D,
    DIM_V,
    DIM_DQ,
    DIM_DC,
    DIM_KV_A, /* Dc + Dr */
    DIM_QK,   /* H*Dqk */
    DIM_KV,   /* H*(Dn+Dv) */
    DIM_HV,   /* H*Dv */
    DIM_F_DENSE,
    DIM_F,
    DIM_F_SHARED,
    DIM_E
} Dim;

/* Which blocks have the tensor. */
typedef enum { AT_TOP, AT_BLOCK, AT_Q_LATENT, AT_Q_DIRECT, AT_DENSE, AT_MOE, AT_SHARED, AT_EXPERT, AT_MTP } Place;

typedef struct {
    const char *name; /* after "model.layers.{block}."; {expert} is "%d" */
    WeightId weight;
    Place place;
    Dim rows, cols;
    InitLaw init;
    bool decay;
    Optimizer optimizer;
} ParamRow;

/* Matrices decay, vectors do not (spec section 11 leaves the exemption open; this is the field's custom). Parts of one
 * weight stand in the order of their rows. */
static const ParamRow table[] = {
    {"model.embed_tokens.weight", WEIGHT_EMBED, AT_TOP, DIM_V, DIM_D, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"model.norm.weight", WEIGHT_FINAL_NORM, AT_TOP, DIM_D, DIM_NONE, INIT_ONE, false, OPTIMIZER_ADAMW},
    {"lm_head.weight", WEIGHT_HEAD, AT_TOP, DIM_V, DIM_D, INIT_NORMAL, true, OPTIMIZER_ADAMW},

    {"enorm.weight", WEIGHT_ENORM, AT_MTP, DIM_D, DIM_NONE, INIT_ONE, false, OPTIMIZER_ADAMW},
    {"hnorm.weight", WEIGHT_HNORM, AT_MTP, DIM_D, DIM_NONE, INIT_ONE, false, OPTIMIZER_ADAMW},
    {"eh_proj.weight", WEIGHT_EH_PROJ, AT_MTP, DIM_D, DIM_2D, INIT_NORMAL, true, OPTIMIZER_ADAMW},

    {"input_layernorm.weight", WEIGHT_ATTN_NORM, AT_BLOCK, DIM_D, DIM_NONE, INIT_ONE, false, OPTIMIZER_ADAMW},
    {"self_attn.q_a_proj.weight", WEIGHT_QKV_A, AT_Q_LATENT, DIM_DQ, DIM_D, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"self_attn.kv_a_proj_with_mqa.weight", WEIGHT_QKV_A, AT_BLOCK, DIM_KV_A, DIM_D, INIT_NORMAL, true,
     OPTIMIZER_ADAMW},
    {"self_attn.q_a_layernorm.weight", WEIGHT_Q_NORM, AT_Q_LATENT, DIM_DQ, DIM_NONE, INIT_ONE, false, OPTIMIZER_ADAMW},
    {"self_attn.q_b_proj.weight", WEIGHT_Q_B, AT_Q_LATENT, DIM_QK, DIM_DQ, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"self_attn.q_proj.weight", WEIGHT_Q_B, AT_Q_DIRECT, DIM_QK, DIM_D, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"self_attn.kv_a_layernorm.weight", WEIGHT_KV_NORM, AT_BLOCK, DIM_DC, DIM_NONE, INIT_ONE, false, OPTIMIZER_ADAMW},
    {"self_attn.kv_b_proj.weight", WEIGHT_KV_B, AT_BLOCK, DIM_KV, DIM_DC, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"self_attn.o_proj.weight", WEIGHT_O, AT_BLOCK, DIM_D, DIM_HV, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"post_attention_layernorm.weight", WEIGHT_FFN_NORM, AT_BLOCK, DIM_D, DIM_NONE, INIT_ONE, false, OPTIMIZER_ADAMW},

    {"mlp.gate_proj.weight", WEIGHT_GATE_UP, AT_DENSE, DIM_F_DENSE, DIM_D, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"mlp.up_proj.weight", WEIGHT_GATE_UP, AT_DENSE, DIM_F_DENSE, DIM_D, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"mlp.down_proj.weight", WEIGHT_DOWN, AT_DENSE, DIM_D, DIM_F_DENSE, INIT_NORMAL, true, OPTIMIZER_ADAMW},

    {"mlp.gate.weight", WEIGHT_ROUTER, AT_MOE, DIM_E, DIM_D, INIT_NORMAL, true, OPTIMIZER_ADAMW},
    {"mlp.gate.e_score_correction_bias", WEIGHT_ROUTER_BIAS, AT_MOE, DIM_E, DIM_NONE, INIT_ZERO, false, OPTIMIZER_NONE},
    {"mlp.shared_experts.gate_proj.weight", WEIGHT_GATE_UP, AT_SHARED, DIM_F_SHARED, DIM_D, INIT_NORMAL, true,
     OPTIMIZER_ADAMW},
    {"mlp.shared_experts.up_proj.weight", WEIGHT_GATE_UP, AT_SHARED, DIM_F_SHARED, DIM_D, INIT_NORMAL, true,
     OPTIMIZER_ADAMW},
    {"mlp.shared_experts.down_proj.weight", WEIGHT_DOWN, AT_SHARED, DIM_D, DIM_F_SHARED, INIT_NORMAL, true,
     OPTIMIZER_ADAMW},
    {"mlp.experts.%d.gate_proj.weight", WEIGHT_EXPERT_GATE_UP, AT_EXPERT, DIM_F, DIM_D, INIT_NORMAL, true,
     OPTIMIZER_ADAMW},
    {"mlp.experts.%d.up_proj.weight", WEIGHT_EXPERT_GATE_UP, AT_EXPERT, DIM_F, DIM_D, INIT_NORMAL, true,
     OPTIMIZER_ADAMW},
    {"mlp.experts.%d.down_proj.weight", WEIGHT_EXPERT_DOWN, AT_EXPERT, DIM_D, DIM_F, INIT_NORMAL, true,
     OPTIMIZER_ADAMW},

    {"shared_head.norm.weight", WEIGHT_MTP_NORM, AT_MTP, DIM_D, DIM_NONE, INIT_ONE, false, OPTIMIZER_ADAMW},
};
enum { TABLE_ROWS = sizeof table / sizeof *table, WEIGHT_ALIGN = 128 };

static int64_t dim_of(const ModelShape *s, Dim dim) {
    switch (dim) {
    case DIM_NONE: return 1;
    case DIM_D: return s->D;
    case DIM_2D: return 2 * s->D;
    case DIM_V: return s->V;
    case DIM_DQ: return s->Dq;
    case DIM_DC: return s->Dc;
    case DIM_KV_A: return s->Dc + s->attention.rope;
    case DIM_QK: return s->qk_width;
    case DIM_KV: return s->kv_width;
    case DIM_HV: return s->v_width;
    case DIM_F_DENSE: return s->F_dense;
    case DIM_F: return s->F;
    case DIM_F_SHARED: return s->F_shared;
    case DIM_E: return s->router.n_experts;
    }
    return 0;
}

/* A rank has the blocks of its chunks, and of the top what these need. */
static bool is_held(const ModelShape *s, int block, WeightId weight) {
    if (block >= 0) return shape_chunk_of(s, block) >= 0;
    return weight == WEIGHT_EMBED ? s->part.embedding : shape_has_loss(s);
}

static bool row_applies(const ParamRow *row, const ModelShape *s, int block) {
    if (!is_held(s, block, row->weight)) return false;
    if (block < 0) return row->place == AT_TOP;
    const bool moe = shape_block_is_moe(s, block);
    switch (row->place) {
    case AT_TOP: return false;
    case AT_BLOCK: return true;
    case AT_Q_LATENT: return s->Dq > 0;
    case AT_Q_DIRECT: return s->Dq == 0;
    case AT_DENSE: return !moe;
    case AT_MOE:
    case AT_EXPERT: return moe;
    case AT_SHARED: return moe && s->F_shared > 0;
    case AT_MTP: return block >= s->L;
    }
    return false;
}

/* ---- the list ---------------------------------------------------------------------------------------------------- */

bool weight_is_block_linear(WeightId id) {
    switch (id) {
    case WEIGHT_QKV_A:
    case WEIGHT_Q_B:
    case WEIGHT_KV_B:
    case WEIGHT_O:
    case WEIGHT_GATE_UP:
    case WEIGHT_DOWN:
    case WEIGHT_EXPERT_GATE_UP:
    case WEIGHT_EXPERT_DOWN: return true;
    default: return false;
    }
}

static bool is_expert_weight(WeightId id) {
    return id == WEIGHT_EXPERT_GATE_UP || id == WEIGHT_EXPERT_DOWN;
}

/* The extents of a weight (of one expert's plane) and a row of its parts, stacked at aligned rows; NULL: the block has
 * none. */
static const ParamRow *extents_of(const ModelShape *s, int block, WeightId id, int64_t *rows, int64_t *cols) {
    const ParamRow *any = NULL;
    *rows = *cols = 0;
    for (int i = 0; i < TABLE_ROWS; i++) {
        const ParamRow *row = &table[i];
        if (row->weight != id || !row_applies(row, s, block)) continue;
        CHECK(!any || (any->decay == row->decay && any->cols == row->cols), "parts of %s differ", row->name);
        any = row;
        *rows = row->cols == DIM_NONE ? dim_of(s, row->rows) : round_up(*rows, s->row_align) + dim_of(s, row->rows);
        *cols = dim_of(s, row->cols);
    }
    if (any && any->rows == DIM_V) *rows = s->V_padded;
    return any;
}

/* Gives a weight its shape, experts as planes. */
static void weight_make(Params *p, int block, WeightId id) {
    const ModelShape *s = &p->shape;
    int64_t rows, cols;
    const ParamRow *any = extents_of(s, block, id, &rows, &cols);
    if (!any) return;
    Weight *w = &block_at(p, block)->weight[id];
    const int64_t planes = any->place == AT_EXPERT ? s->n_local : 0;
    w->dw = planes                  ? tensor_3d(NULL, DTYPE_F32, planes, rows, cols)
            : any->cols == DIM_NONE ? tensor_1d(NULL, DTYPE_F32, rows)
                                    : tensor_2d(NULL, DTYPE_F32, rows, cols);
    w->w = w->dw;
    if (any->cols != DIM_NONE) w->w.dtype = s->act;
    const bool fprop = s->fp8_parts.fprop, dgrad = s->fp8_parts.dgrad;
    if ((fprop || dgrad) && weight_is_block_linear(id)) {
        if (!fprop || !dgrad) w->wide = w->w;
        w->w = tensor_blocks(NULL, NULL, planes, rows, cols);
        w->wt = tensor_blocks(NULL, NULL, planes, cols, rows);
    }
    w->decay = any->decay;
    w->optimizer = any->optimizer;
    w->is_expert = planes > 0;
    w->offset = p->numel;
    w->numel = tensor_numel(w->w);
    p->numel += round_up(w->numel, WEIGHT_ALIGN);
}

static void named_add(Params *p, int block, const ParamRow *row, int64_t first_row, int local_expert) {
    const ModelShape *s = &p->shape;
    const Weight *w = &block_at(p, block)->weight[row->weight];
    NamedTensor *t = &p->named[p->n_named++];
    memset(t, 0, sizeof *t);
    t->block = block;
    t->weight = row->weight;
    t->init = row->init;
    t->optimizer = row->optimizer;
    t->expert = local_expert < 0 ? -1 : params_expert(p, block, local_expert);
    t->ndim = row->cols == DIM_NONE ? 1 : 2;
    t->shape[0] = dim_of(s, row->rows);
    t->shape[1] = t->ndim == 2 ? dim_of(s, row->cols) : 0;
    t->numel = t->shape[0] * (t->ndim == 2 ? t->shape[1] : 1);
    t->offset = w->offset;
    if (t->ndim == 2) t->offset += first_row * t->shape[1];
    if (local_expert >= 0) t->offset += local_expert * w->w.shape[1] * w->w.shape[2];
    char tail[TENSOR_NAME_LEN - 32];
    if (row->place == AT_EXPERT)
        snprintf(tail, sizeof tail, row->name, t->expert);
    else
        snprintf(tail, sizeof tail, "%s", row->name);
    if (block < 0)
        snprintf(t->name, sizeof t->name, "%s", tail);
    else
        snprintf(t->name, sizeof t->name, "model.layers.%d.%s", block, tail);
    t->id = hash_bytes(t->name, strlen(t->name), 0) >> 8; /* rng steps have 56 bits */
}

/* A partial of the norm for each block of the weights of the whole model, in the order of the table, whichever ranks
 * hold them: numbers that depended on the ranks would give the norm other bits. */
static void number_partials(Params *p) {
    ModelShape whole = p->shape;
    const ModelShape *s = &whole;
    whole.part = shape_whole(s->L);
    for (int block = -1; block < s->n_blocks; block++)
        for (int id = 0; id < WEIGHT_COUNT; id++) {
            int64_t rows, cols;
            const ParamRow *any = extents_of(s, block, (WeightId)id, &rows, &cols);
            if (!any || any->optimizer == OPTIMIZER_NONE) continue;
            const int64_t blocks = cut_blocks(1, any->cols == DIM_NONE ? 1 : rows);
            block_at(p, block)->weight[id].first_partial = p->n_partials;
            p->n_partials += any->place == AT_EXPERT ? s->router.n_experts * blocks : blocks;
        }
}

/* Named tensors of a block, expert by expert. */
static void named_add_block(Params *p, int block) {
    const ModelShape *s = &p->shape;
    for (int i = 0; i < TABLE_ROWS; i++) {
        const ParamRow *row = &table[i];
        if (!row_applies(row, s, block)) continue;
        int64_t first_row = 0;
        for (int j = 0; j < i; j++)
            if (table[j].weight == row->weight && row_applies(&table[j], s, block))
                first_row = round_up(first_row + dim_of(s, table[j].rows), s->row_align);
        if (row->place != AT_EXPERT) named_add(p, block, row, first_row, -1);
        for (int e = 0; row->place == AT_EXPERT && e < s->n_local; e++) named_add(p, block, row, first_row, e);
    }
}

static void named_make(Params *p) {
    p->n_named = 0;
    for (int block = -1; block < p->shape.n_blocks; block++) named_add_block(p, block);
}

void params_make(Params *p, const ModelShape *shape) {
    memset(p, 0, sizeof *p);
    p->shape = *shape;
    p->blocks = (Block *)calloc((size_t)shape->n_blocks, sizeof *p->blocks);
    int64_t per_block = TABLE_ROWS + 3 * (int64_t)shape->n_local;
    p->named = (NamedTensor *)calloc((size_t)(per_block * (shape->n_blocks + 1)), sizeof *p->named);
    const int64_t n_moe = shape_n_moe(shape), E = shape->router.n_experts;
    p->expert_of_slot = (int32_t *)calloc((size_t)(n_moe * E + 1), sizeof *p->expert_of_slot);
    CHECK(p->blocks && p->named && p->expert_of_slot, "no memory for the parameter list of %d blocks", shape->n_blocks);
    for (int64_t i = 0; i < n_moe * E; i++) p->expert_of_slot[i] = (int32_t)(i % E);
    for (int experts = 0; experts <= 1; experts++) {
        if (experts) p->experts = p->numel;
        for (int block = -1; block < shape->n_blocks; block++)
            for (int id = 0; id < WEIGHT_COUNT; id++)
                if (is_expert_weight((WeightId)id) == (experts == 1)) weight_make(p, block, (WeightId)id);
    }
    named_make(p);
    number_partials(p);
    params_cut(p);
}

void params_make_whole(Params *p, const ModelShape *shape) {
    ModelShape whole = *shape;
    whole.part = shape_whole(shape->L);
    whole.R = whole.n_data = whole.n_expert_data = 1;
    whole.data_rank = whole.expert_data_rank = whole.first_slot = 0;
    whole.n_local = whole.router.n_experts;
    params_make(p, &whole);
}

void params_place(Params *p, const int32_t *expert_of_slot) {
    const size_t n = (size_t)shape_n_moe(&p->shape) * (size_t)p->shape.router.n_experts;
    memcpy(p->expert_of_slot, expert_of_slot, n * sizeof *expert_of_slot);
    named_make(p);
}

void params_free(Params *p) {
    free(p->blocks);
    free(p->named);
    free(p->expert_of_slot);
    free(p->shards);
    memset(p, 0, sizeof *p);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static Tensor flat(Arena *a, Dtype dtype, int64_t n, const char *name) {
    return tensor_1d(arena_alloc(a, (size_t)n * dtype_size(dtype), name), dtype, n);
}

/* The copy that ops read, if it is not the master itself. */
static void place_copy(Tensor *w, Arena *keep) {
    const char *name = w->dtype == DTYPE_E4M3 ? "weights (FP8, both ways)" : "weights (bf16 copy)";
    w->data = arena_alloc(keep, tensor_bytes(*w), name);
    if (tensor_n_scales(*w)) w->scale = (float *)arena_alloc(keep, (size_t)tensor_n_scales(*w) * sizeof(float), name);
}

static void point(Tensor *view, Tensor flat_arena, int64_t offset) {
    view->data = flat_arena.data ? (char *)flat_arena.data + (size_t)offset * dtype_size(flat_arena.dtype) : NULL;
}

void params_layout(Params *p, Arena *keep) {
    const ModelShape *s = &p->shape;
    p->master = flat(keep, DTYPE_F32, p->n_master, "weights (f32 master)");
    p->grad = flat(keep, DTYPE_F32, p->numel, "gradients (f32)");
    p->m = flat(keep, s->moment, p->n_moments, "AdamW moments");
    p->v = flat(keep, s->moment, p->n_moments, "AdamW moments");
    p->partials = flat(keep, DTYPE_F64, p->n_partials, "gradient norm");
    p->partial_intervals = (Interval *)arena_alloc(keep, (size_t)p->n_partials * sizeof(Interval), "gradient norm");
    const int64_t n_moe = shape_n_moe(s), E = s->router.n_experts;
    p->slot_of_expert =
        tensor_2d(arena_alloc(keep, (size_t)(n_moe * E) * dtype_size(DTYPE_I32), "step"), DTYPE_I32, n_moe, E);
    const int64_t bucket = zero1_bucket_numel(p);
    if (bucket > 0) p->bucket = flat(keep, DTYPE_F32, bucket, "ZeRO-1 bucket");
    for (int block = -1; block < s->n_blocks; block++) {
        Block *b = block_at(p, block);
        if (block >= 0 && shape_block_is_moe(s, block))
            b->slot_of_expert = tensor_plane(p->slot_of_expert, block - s->n_dense);
        for (int id = 0; id < WEIGHT_COUNT; id++) {
            Weight *w = &b->weight[id];
            if (w->numel == 0) continue;
            point(&w->dw, p->grad, w->offset);
            if (w->w.dtype == DTYPE_F32)
                point(&w->w, p->master, w->master_at);
            else
                place_copy(&w->w, keep);
            if (!tensor_is_none(w->wt)) place_copy(&w->wt, keep);
            if (!tensor_is_none(w->wide)) place_copy(&w->wide, keep);
        }
    }
}

/* ---- walks ------------------------------------------------------------------------------------------------------- */

enum { WALK_CHUNK = 1 << 18 };

static void init_chunk(real *out, const NamedTensor *t, int64_t first, int64_t n, uint64_t seed, double init_std) {
    double normal[256];
    for (int64_t i = 0; i < n; i += 256) {
        int64_t part = n - i < 256 ? n - i : 256;
        if (t->init == INIT_NORMAL) rng_normal_fill(normal, part, seed, RNG_INIT, t->id, (uint64_t)(first + i));
        for (int64_t j = 0; j < part; j++) {
            double x = t->init == INIT_NORMAL ? normal[j] * init_std : (t->init == INIT_ONE ? 1 : 0);
            out[i + j] = (real)(float)x; /* equal numbers in the float and the double build */
        }
    }
}

static void init_tensor(const Params *p, const Device *d, const NamedTensor *t, uint64_t seed, double init_std,
                        real *chunk) {
    const Interval held = params_held(p, t);
    const int64_t begin = held.first / 2 * 2, end = held.first + held.n; /* pairs of normals stay whole */
    for (int64_t first = begin; first < end; first += WALK_CHUNK) {
        const int64_t n = min_i64(end - first, WALK_CHUNK), part = (n + 63) / 64 * 2;
        const int64_t before = max_i64(held.first - first, 0); /* not held */
#pragma omp parallel for schedule(static)
        for (int64_t at = 0; at < n; at += part)
            init_chunk(chunk + at, t, first + at, min_i64(n - at, part), seed, init_std);
        op_copy_in(d, (real *)p->master.data + params_master_at(p, t, first + before), chunk + before,
                   (size_t)(n - before) * sizeof(real), STREAM_COPY);
        op_synchronize(d, STREAM_COPY);
    }
}

void params_init(const Params *p, const Device *d, uint64_t seed, double init_std) {
    op_zero(d, p->master, STREAM_COMPUTE);
    op_zero(d, p->grad, STREAM_COMPUTE);
    op_zero(d, p->m, STREAM_COMPUTE);
    op_zero(d, p->v, STREAM_COMPUTE);
    op_synchronize(d, STREAM_COMPUTE);
    real *chunk = (real *)malloc(WALK_CHUNK * sizeof(real));
    CHECK(chunk, "no memory for a chunk of the initial weights");
    for (int64_t i = 0; i < p->n_named; i++) init_tensor(p, d, &p->named[i], seed, init_std, chunk);
    free(chunk);
}

Tensor weight_flat(Tensor w) {
    return tensor_1d(w.data, w.dtype, tensor_numel(w));
}

void params_cast(const Params *p, const Device *d) {
    for (int block = -1; block < p->shape.n_blocks; block++) {
        const Block *b = params_block(p, block);
        for (int id = 0; id < WEIGHT_COUNT; id++) {
            const Weight *w = &b->weight[id];
            if (w->numel == 0) continue;
            const Tensor master = params_master(p, w);
            if (w->w.dtype == DTYPE_BF16) op_copy(d, params_rows(w, w->w), master, STREAM_COMPUTE);
            if (!tensor_is_none(w->wide)) op_copy(d, params_rows(w, w->wide), master, STREAM_COMPUTE);
            if (w->w.dtype != DTYPE_E4M3) continue;
            if (params_is_shared(w))
                op_quantize_weight(d, params_blocks(w), tensor_none(), master, STREAM_COMPUTE);
            else
                op_quantize_weight(d, w->w, w->wt, master, STREAM_COMPUTE);
        }
    }
    op_synchronize(d, STREAM_COMPUTE);
}

/* The elements `part` of t, from element `at` of an arena on; none: no item. */
static void state_add(StateTensor *list, int64_t *n, const NamedTensor *t, const char *prefix, Interval part,
                      Tensor arena, int64_t at) {
    if (part.n == 0) return;
    StateTensor *out = &list[(*n)++];
    memset(out, 0, sizeof *out);
    CHECK(snprintf(out->name, sizeof out->name, "%s%s", prefix, t->name) < (int)sizeof out->name, "name too long: %s",
          t->name);
    out->dtype = arena.dtype;
    out->ndim = t->ndim;
    memcpy(out->shape, t->shape, sizeof out->shape);
    out->offset = part.first;
    out->extent = part.n;
    out->data = arena.data ? (char *)arena.data + (size_t)at * dtype_size(arena.dtype) : NULL;
}

/* Of what this rank holds, or of what it saves. */
static StateTensor *list_state(const Params *p, bool saved, int64_t *n) {
    StateTensor *list = (StateTensor *)malloc((size_t)p->n_named * 3 * sizeof *list);
    CHECK(list, "no memory for the list of %lld tensors", (long long)p->n_named * 3);
    *n = 0;
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        const Weight *w = params_weight(p, t);
        const Interval master = saved ? params_owned(p, t) : params_held(p, t);
        const Interval moments = saved ? master : params_interval(p, t, w->updated);
        const int64_t moments_at = w->moment_at + params_begin(p, t) + moments.first - w->updated.first;
        state_add(list, n, t, "", master, p->master, params_master_at(p, t, master.first));
        if (t->optimizer == OPTIMIZER_NONE) continue;
        state_add(list, n, t, "adam.m.", moments, p->m, moments_at);
        state_add(list, n, t, "adam.v.", moments, p->v, moments_at);
    }
    return list;
}

StateTensor *params_state(const Params *p, int64_t *n) {
    return list_state(p, false, n);
}

StateTensor *params_saved(const Params *p, int64_t *n) {
    return list_state(p, true, n);
}

uint64_t params_hash_part(const NamedTensor *t, int64_t first, const float *x, int64_t n) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &x[i], 4);
        sum += mix64(mix64(t->id + (uint64_t)(first + i) * 0x9E3779B97F4A7C15ull) ^ bits);
    }
    return sum;
}

static uint64_t hash_chunk(const NamedTensor *t, int64_t first, const real *x, int64_t n) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const float f = (float)x[i];
        sum += params_hash_part(t, first + i, &f, 1);
    }
    return sum;
}

/* Of what this rank owns; else of all that it holds. */
static uint64_t hash_of(const Params *p, const Device *d, bool of_owned) {
    real *chunk = (real *)malloc(WALK_CHUNK * sizeof(real));
    CHECK(chunk, "no memory for a chunk of the weights");
    op_synchronize(d, STREAM_COMPUTE);
    uint64_t sum = 0;
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        const Interval part = of_owned ? params_owned(p, t) : params_held(p, t);
        for (int64_t first = part.first; first < part.first + part.n; first += WALK_CHUNK) {
            const int64_t n = min_i64(part.first + part.n - first, WALK_CHUNK);
            op_copy_out(d, chunk, (const real *)p->master.data + params_master_at(p, t, first),
                        (size_t)n * sizeof(real), STREAM_COPY);
            op_synchronize(d, STREAM_COPY);
            sum += hash_chunk(t, first, chunk, n);
        }
    }
    free(chunk);
    return sum;
}

uint64_t params_hash(const Params *p, const Device *d) {
    return hash_of(p, d, false);
}

uint64_t params_hash_saved(const Params *p, const Device *d) {
    return hash_of(p, d, true);
}

uint64_t params_hash_of_job(const Params *p, const Device *d) {
    uint64_t sum = params_hash_saved(p, d);
    job_sum(&sum, 1);
    return sum;
}

uint64_t params_hash_copy(const Params *p, const void *master) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        const Interval part = params_owned(p, t);
        sum += hash_chunk(t, part.first, (const real *)master + params_master_at(p, t, part.first), part.n);
    }
    return sum;
}

ParamCount params_count(const Params *p) {
    const RouterShape *r = &p->shape.router;
    ParamCount c = {0, 0, 0};
    int64_t experts = 0;
    Params whole;
    params_make_whole(&whole, &p->shape);
    for (int64_t i = 0; i < whole.n_named; i++) {
        const NamedTensor *t = &whole.named[i];
        if (t->optimizer == OPTIMIZER_NONE) continue;
        if (t->block >= p->shape.L) {
            c.mtp += t->numel;
            continue;
        }
        c.total += t->numel;
        if (t->expert >= 0)
            experts += t->numel;
        else if (t->weight != WEIGHT_EMBED)
            c.active += t->numel;
    }
    params_free(&whole);
    c.active += r->n_experts ? experts / r->n_experts * r->n_chosen : 0;
    return c;
}
