/* Where the rows of the activation table lie. See acts.h.
 *
 * Kept rows, and gradients that wait, lie in slots: as many copies, one behind the other, as micro-batches are under
 * way. Everything else is scratch, laid out once for each kind of block. */
#include <stdlib.h>
#include <string.h>

#include "acts.h"
#include "kernels/base/check.h"
#include "kernels/base/ints.h"
#include "layer.h"

enum {
    IN_FORWARD = IN_ATTN | IN_EXPERTS,
    IN_BACK = IN_EXPERTS_BACK | IN_ATTN_BACK | IN_WEIGHT_BACK,
};

static Tensor act_2d(const ModelShape *s, int64_t rows, int64_t cols) {
    return tensor_2d(NULL, s->act, rows, cols);
}

static Tensor per_token(const ModelShape *s) {
    return tensor_1d(NULL, DTYPE_F32, s->T);
}

/* ---- slots and scratch ------------------------------------------------------------------------------------------- */

/* Lies in another row's memory: what would be sent is where it would arrive. */
static bool is_alias(const ActRow *row, const ModelShape *s) {
    return s->R == 1 && row->same_as != ACT_COUNT;
}

static SlotKind slot_kind(const ActRow *row) {
    if (row->life == LIFE_GRADIENT) return SLOT_GRADIENT;
    return row->last_reader == READER_INPUT ? SLOT_INPUT : SLOT_WEIGHT;
}

/* Gradients have slots: some weight-backwards wait. */
static bool has_ring(const ModelShape *s) {
    return s->part.chunk[0].n_slots[SLOT_GRADIENT] > 0;
}

/* Weight-backward reads the gradient of a block's output itself, not its tiles. */
static bool dout_waits(const ModelShape *s) {
    return has_ring(s) && !s->fp8_parts.wgrad;
}

/* Does the row lie in slots of its micro-batch? Else in scratch. */
static bool is_in_slots(const ActRow *row, const ModelShape *s, bool training) {
    if (!training || is_alias(row, s)) return false;
    const Life life = act_life(row, s);
    return life == LIFE_KEPT || (life == LIFE_GRADIENT && has_ring(s));
}

static size_t stride_of(size_t bytes) {
    return (size_t)round_up((int64_t)bytes, ARENA_ALIGN);
}

static size_t scale_bytes(Tensor t) {
    return (size_t)tensor_n_scales(t) * sizeof(float);
}

/* n copies, one behind the other; t is the first. */
static void place(Tensor *t, int n, Arena *arena, const char *name) {
    const size_t more = (size_t)(n - 1), bytes = tensor_bytes(*t), scales = scale_bytes(*t);
    t->data = arena_alloc(arena, more * stride_of(bytes) + bytes, name);
    if (scales) t->scale = (float *)arena_alloc(arena, more * stride_of(scales) + scales, name);
}

/* From one copy to another, `by` copies further. */
static void move_by(Tensor *t, int by) {
    if (!t->data || by == 0) return;
    t->data = (char *)t->data + by * (ptrdiff_t)stride_of(tensor_bytes(*t));
    if (t->scale) t->scale = (float *)((char *)t->scale + by * (ptrdiff_t)stride_of(scale_bytes(*t)));
}

/* The phases in which a row of the scratch is needed. (A kept row without any: evaluation keeps it nowhere.) */
static int phases_of(const ActRow *row, const ModelShape *s) {
    return act_life(row, s) == LIFE_GRADIENT ? IN_BACK : row->phases ? row->phases : IN_FORWARD | IN_BACK;
}

static bool spans_phases(int phases) {
    return (phases & (phases - 1)) != 0;
}

/* Scratch of all blocks is the same memory: laid out once for each kind of block, for those of `phases`. A row that
 * lives in one phase shares its place with the rows of the other phases; one that spans phases comes first, and is
 * shared with nobody. */
static void scratch_layout(BlockActs *kind, const ModelShape *s, bool is_moe, bool training, int phases,
                           Arena *scratch) {
    const size_t start = arena_mark(scratch);
    int needed[ACT_COUNT]; /* phases, of a row of this scratch */
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        kind->t[id] = row->make(s, is_moe);
        needed[id] = phases_of(row, s);
        if (tensor_is_none(kind->t[id]) || tensor_numel(kind->t[id]) == 0 || is_alias(row, s) ||
            is_in_slots(row, s, training) || (needed[id] & phases) == 0)
            needed[id] = 0;
        if (spans_phases(needed[id])) place(&kind->t[id], 1, scratch, row->name);
    }
    const size_t shared = arena_mark(scratch);
    size_t end = shared;
    for (int phase = IN_ATTN; phase <= IN_WEIGHT_BACK; phase *= 2) {
        for (int id = 0; id < ACT_COUNT; id++)
            if (needed[id] == phase) place(&kind->t[id], 1, scratch, act_row((ActId)id)->name);
        if (arena_mark(scratch) > end) end = arena_mark(scratch);
        arena_release(scratch, shared);
    }
    arena_release(scratch, start);
    if (end > scratch->peak) scratch->peak = end;
}

/* Both kinds of blocks over the same scratch. */
static void kinds_layout(BlockActs kind[2], const Acts *a, int phases, Arena *scratch) {
    memset(kind, 0, 2 * sizeof *kind);
    scratch_layout(&kind[0], &a->shape, false, a->training, phases, scratch);
    if (shape_n_moe(&a->shape) > 0) scratch_layout(&kind[1], &a->shape, true, a->training, phases, scratch);
}

static void point_aliases(BlockActs *b, const ModelShape *s) {
    for (int id = 0; id < ACT_COUNT; id++) {
        if (!is_alias(act_row((ActId)id), s)) continue;
        const Tensor *same = &b->t[act_input_id(s, act_row((ActId)id)->same_as)];
        b->t[id].data = same->data;
        b->t[id].scale = same->scale;
    }
}

static void block_layout(Acts *a, int block, const BlockActs *kind, Arena *slots) {
    const ModelShape *s = &a->shape;
    const int *n = s->part.chunk[shape_chunk_of(s, block)].n_slots;
    BlockActs *b = &a->blocks[block];
    memset(b, 0, sizeof *b);
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        b->t[id] = kind->t[id];
        if (tensor_is_none(b->t[id]) || tensor_numel(b->t[id]) == 0 || !is_in_slots(row, s, a->training)) continue;
        place(&b->t[id], n[slot_kind(row)], slots, row->name);
    }
    point_aliases(b, s);
    if (!a->training) return;
    b->dout = a->dout[0];
    if (dout_waits(s)) place(&b->dout, n[SLOT_GRADIENT], slots, "gradient of block output");
}

static Tensor held(Arena *arena, Tensor t, int n, const char *name) {
    place(&t, n, arena, name);
    return t;
}

static Tensor carried(Arena *arena, Tensor t, const char *name) {
    return held(arena, t, 1, name);
}

/* What the last stage keeps around the blocks of a depth, of n micro-batches. */
static void depth_layout(Acts *a, int depth, int n, Arena *slots) {
    const ModelShape *s = &a->shape;
    const Tensor hidden = act_2d(s, s->T, s->D), rstd = per_token(s);
    a->depth[depth].x_final = held(slots, hidden, n, "final hidden");
    a->depth[depth].hidden = held(slots, hidden, n, "final hidden");
    a->depth[depth].hidden_rstd = held(slots, rstd, n, "norms' rstd");
    if (a->training) a->depth[depth].dhidden = held(slots, hidden, n, "final hidden");
    if (depth == 0) return;
    a->depth[depth].emb = held(slots, hidden, n, "MTP input");
    a->depth[depth].emb_rstd = held(slots, rstd, n, "norms' rstd");
    a->depth[depth].h_rstd = held(slots, rstd, n, "norms' rstd");
    a->depth[depth].eh = held(slots, act_2d(s, s->T, 2 * s->D), n, "MTP input");
}

/* What every forward has beside its rows. */
static void forward_layout(Acts *a, Arena *scratch) {
    const ModelShape *s = &a->shape;
    const int planes = layer_branch_planes(s, shape_n_moe(s) > 0);
    a->branch = carried(scratch, tensor_3d(NULL, s->act, planes, s->T, s->D), "branch rows");
    a->x0 = carried(scratch, act_2d(s, s->T, s->D), "block input");
}

/* Those of an earlier pass, or new ones. */
static BlockActs *blocks_of(const Acts *a, int n) {
    BlockActs *blocks = a->blocks ? a->blocks : (BlockActs *)calloc((size_t)n, sizeof *blocks);
    CHECK(blocks, "no memory for the activation list of %d blocks", n);
    return blocks;
}

void acts_layout(Acts *a, const ModelShape *shape, bool training, Arena *slots, Arena *scratch) {
    BlockActs *blocks = blocks_of(a, shape->n_blocks);
    memset(a, 0, sizeof *a);
    a->shape = *shape;
    a->training = training;
    a->blocks = blocks;
    const ModelShape *s = &a->shape;
    const bool has_loss = shape_has_loss(s);

    const bool is_beside = training && s->part.pairs; /* forwards have scratch of their own: acts_layout_beside */
    if (!is_beside) forward_layout(a, scratch);
    if (has_loss) a->logits = carried(scratch, act_2d(s, s->head_chunk, s->V_padded), "logits chunk");
    if (has_loss) a->loss = carried(scratch, per_token(s), "token losses");
    if (training) {
        for (int i = 0; i < 2; i++) a->dout[i] = carried(scratch, act_2d(s, s->T, s->D), "gradient of block output");
        a->partial = carried(scratch, act_row(ACT_PARTIAL)->make(s, false), "partial sums");
        if (s->n_mtp > 0 && has_loss) {
            a->deh = carried(scratch, act_2d(s, s->T, 2 * s->D), "gradient of MTP input");
            a->demb = carried(scratch, act_2d(s, s->T, s->D), "gradient of MTP input");
        }
    }
    for (int c = 0; c < s->part.n_chunks; c++) {
        const Chunk *chunk = &s->part.chunk[c];
        const int n = training ? chunk->n_slots[SLOT_INPUT] : 1;
        for (int depth = 0; depth <= s->n_mtp && chunk->has_loss; depth++) depth_layout(a, depth, n, slots);
    }

    BlockActs kind[2];
    kinds_layout(kind, a, !training ? IN_FORWARD : s->part.pairs ? IN_BACK : IN_ALL, scratch);
    for (int block = 0; block < s->n_blocks; block++)
        if (shape_chunk_of(s, block) >= 0) block_layout(a, block, &kind[shape_block_is_moe(s, block)], slots);
}

void acts_layout_beside(Acts *beside, const Acts *a, Arena *scratch) {
    const ModelShape *s = &a->shape;
    BlockActs *blocks = blocks_of(beside, s->n_blocks), kind[2];
    *beside = *a;
    beside->blocks = blocks;
    arena_alloc(scratch, scratch->peak - arena_mark(scratch), "scratch of backward");
    forward_layout(beside, scratch);
    kinds_layout(kind, beside, IN_FORWARD, scratch);
    for (int block = 0; block < s->n_blocks; block++) {
        BlockActs *b = &beside->blocks[block];
        *b = a->blocks[block];
        if (shape_chunk_of(s, block) < 0) continue;
        for (int id = 0; id < ACT_COUNT; id++)
            if (!is_in_slots(act_row((ActId)id), s, true)) b->t[id] = kind[shape_block_is_moe(s, block)].t[id];
        point_aliases(b, s);
    }
}

static void point_depths(Acts *a, int slot) {
    const int by = slot - a->depth_slot;
    a->depth_slot = slot;
    for (int k = 0; k <= a->shape.n_mtp; k++) {
        Tensor *held[] = {&a->depth[k].x_final, &a->depth[k].hidden,   &a->depth[k].hidden_rstd, &a->depth[k].dhidden,
                          &a->depth[k].emb,     &a->depth[k].emb_rstd, &a->depth[k].h_rstd,      &a->depth[k].eh};
        for (size_t i = 0; i < sizeof held / sizeof *held; i++) move_by(held[i], by);
    }
}

void acts_point(Acts *a, int chunk, const int slot[SLOT_KINDS]) {
    const ModelShape *s = &a->shape;
    for (int i = 0; i < shape_chunk_blocks(s, chunk); i++) {
        BlockActs *b = &a->blocks[shape_chunk_block(s, chunk, i)];
        for (int id = 0; id < ACT_COUNT; id++) {
            const SlotKind kind = slot_kind(act_row((ActId)id));
            if (is_in_slots(act_row((ActId)id), s, a->training)) move_by(&b->t[id], slot[kind] - b->slot[kind]);
        }
        if (dout_waits(s)) move_by(&b->dout, slot[SLOT_GRADIENT] - b->slot[SLOT_GRADIENT]);
        memcpy(b->slot, slot, sizeof b->slot);
        memset(b->remade, 0, sizeof b->remade);
        point_aliases(b, s);
    }
    if (s->part.chunk[chunk].has_loss) point_depths(a, slot[SLOT_INPUT]);
}

void acts_free(Acts *a) {
    free(a->blocks);
    memset(a, 0, sizeof *a);
}
