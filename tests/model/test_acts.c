/* The activation table: does a row live as long as it is read, does its memory stay its own that long, is it made
 * again to the same bits, and does nothing read what was not written? */
#include "model/acts.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model/layer.h"
#include "model_test.h"

enum { IN_FORWARD = IN_ATTN | IN_EXPERTS, IN_BACKWARD = IN_EXPERTS_BACK | IN_ATTN_BACK | IN_WEIGHT_BACK };

static const char *const recompute_all = "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]";

/* Lies in another row's memory: on one expert rank what would be sent is where it would arrive. */
static bool is_shared(const ActRow *row, const ModelShape *s) {
    return s->R == 1 && row->same_as != ACT_COUNT;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

TEST(acts_table_is_consistent) {
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        REQUIRE(row->name && row->make, "row %d", id);
        /* What only forward needs: something else is kept instead. */
        const bool is_passing = row->recompute && !row->remake;
        EXPECT(is_passing || (row->remake != NULL) == (row->recompute != 0), "%s (%d): remake", row->name, id);
        EXPECT(row->recompute == 0 || row->life == LIFE_KEPT, "%s (%d): only kept rows are made again", row->name, id);
        EXPECT((row->phases & ~IN_ALL) == 0, "%s (%d): phases %d", row->name, id, row->phases);
        if (row->life == LIFE_SCRATCH)
            EXPECT(row->phases && row->last_reader == READER_NONE, "%s (%d): scratch without phases", row->name, id);
        else
            EXPECT(row->last_reader != READER_NONE, "%s (%d): nobody reads it", row->name, id);
        if (row->life == LIFE_GRADIENT) /* where its tiles wait, weight-backward has no need of it */
            EXPECT(row->last_reader == READER_WEIGHT && !(row->phases & ~(IN_EXPERTS_BACK | IN_ATTN_BACK)), "%s",
                   row->name);
        if (row->life == LIFE_KEPT) EXPECT((row->phases != 0) == (row->recompute != 0), "%s: phases", row->name);
        if (row->recompute && !is_passing) { /* in scratch, it must be there when its last reader comes */
            EXPECT(((row->phases & IN_WEIGHT_BACK) != 0) == (row->last_reader == READER_WEIGHT), "%s (%d)", row->name,
                   id);
            EXPECT(row->phases & IN_BACKWARD, "%s (%d): made again for nobody", row->name, id);
        }
        if (row->same_as == ACT_COUNT) continue;
        EXPECT(row->same_as < ACT_COUNT && act_row(row->same_as)->same_as == ACT_COUNT, "%s: same as %d", row->name,
               (int)row->same_as);
        EXPECT(act_row(row->same_as)->last_reader >= row->last_reader, "%s outlives what it lies in", row->name);
    }
}

TEST(acts_shared_rows_have_one_shape) {
    Fixture f;
    fixture_open(&f, NULL);
    const ModelShape *s = &f.model.shape;
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        if (row->same_as == ACT_COUNT) continue;
        Tensor a = row->make(s, true), b = act_row(row->same_as)->make(s, true);
        EXPECT(a.dtype == b.dtype && tensor_numel(a) == tensor_numel(b) && a.ld == b.ld, "%s", row->name);
        for (int block = s->n_dense; block < s->n_blocks; block++)
            EXPECT(f.model.train.blocks[block].t[id].data == f.model.train.blocks[block].t[row->same_as].data,
                   "%s of block %d has its own memory", row->name, block);
    }
    fixture_close(&f);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

enum { RANGES_MAX = 512, EVERY_BLOCK = -1 };

typedef struct {
    const char *name;
    uintptr_t start, end;
    int block;  /* or EVERY_BLOCK */
    int phases; /* in which it must not be touched by others */
    bool stays; /* from a block's forward to its backward: other blocks count too */
} Range;

typedef struct {
    Range range[RANGES_MAX];
    int n;
} Ranges;

static void add_range(Ranges *r, const char *name, Tensor t, int block, int phases, bool stays) {
    if (tensor_is_none(t) || tensor_numel(t) == 0 || phases == 0) return;
    REQUIRE(r->n < RANGES_MAX, "too many tensors");
    EXPECT(t.data, "%s of block %d has no memory", name, block);
    EXPECT(tensor_is_contiguous(t), "%s of block %d is strided", name, block);
    uintptr_t start = (uintptr_t)t.data;
    r->range[r->n++] = (Range){name, start, start + tensor_bytes(t), block, phases, stays};
}

static void add_block(Ranges *r, const Acts *a, int block) {
    const ModelShape *s = &a->shape;
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        if (is_shared(row, s)) continue;
        int phases = row->phases;
        const Life life = act_life(row, s);
        const bool stays = a->training && life == LIFE_KEPT;
        if (life == LIFE_GRADIENT) phases = IN_BACKWARD;
        if (stays || (row->life == LIFE_KEPT && phases == 0)) phases = IN_ALL;
        if (!a->training) phases &= row->life == LIFE_GRADIENT ? 0 : IN_FORWARD;
        add_range(r, row->name, a->blocks[block].t[id], block, phases, stays);
    }
}

static void add_rest(Ranges *r, const Acts *a) {
    add_range(r, "branch", a->branch, EVERY_BLOCK, IN_ALL, true);
    add_range(r, "block input", a->x0, EVERY_BLOCK, IN_ALL, true);
    add_range(r, "logits", a->logits, EVERY_BLOCK, IN_ALL, true);
    add_range(r, "loss", a->loss, EVERY_BLOCK, IN_ALL, true);
    for (int i = 0; i < 2; i++) add_range(r, "dout", a->dout[i], EVERY_BLOCK, IN_ALL, true);
    add_range(r, "deh", a->deh, EVERY_BLOCK, IN_ALL, true);
    add_range(r, "demb", a->demb, EVERY_BLOCK, IN_ALL, true);
    add_range(r, "partial", a->partial, EVERY_BLOCK, IN_ALL, true);
    for (int k = 0; k <= a->shape.n_mtp; k++) {
        const Tensor list[] = {a->depth[k].x_final,  a->depth[k].hidden, a->depth[k].hidden_rstd, a->depth[k].emb,
                               a->depth[k].emb_rstd, a->depth[k].h_rstd, a->depth[k].eh,          a->depth[k].dhidden};
        for (size_t i = 0; i < sizeof list / sizeof *list; i++)
            add_range(r, "depth", list[i], EVERY_BLOCK, IN_ALL, true);
    }
}

static bool must_be_apart(const Range *a, const Range *b) {
    const bool same_block = a->block == b->block || a->block == EVERY_BLOCK || b->block == EVERY_BLOCK;
    return (a->phases & b->phases) != 0 && (same_block || (a->stays && b->stays));
}

static bool overlap(const Range *a, const Range *b) {
    return a->start < b->end && b->start < a->end;
}

/* Without backward, the residual stream of a block is read while the next one writes. */
static void check_residual(const Acts *a, int block) {
    static const ActId written[] = {ACT_X, ACT_XN, ACT_XN_RSTD};
    Ranges r = {.n = 0};
    add_range(&r, "residual", a->blocks[block - 1].t[ACT_X1], block - 1, IN_ATTN, true);
    for (int i = 0; i < 3; i++) add_range(&r, "norm", a->blocks[block].t[written[i]], block, IN_ATTN, true);
    for (int i = 1; i < r.n; i++)
        EXPECT(!overlap(&r.range[0], &r.range[i]), "block %d overwrites its input with tensor %d", block, i);
}

/* Every pair of tensors that are needed at one time; and that memory is shared at all. */
static void check_layout(const Acts *a, const Arena *slots, const Arena *scratch, const char *name) {
    static Ranges r;
    r.n = 0;
    for (int b = 0; b < a->shape.n_blocks; b++) add_block(&r, a, b);
    add_rest(&r, a);
    int n_shared = 0;
    for (int i = 0; i < r.n; i++) {
        const Range *x = &r.range[i];
        const uintptr_t in_slots = x->start - (uintptr_t)slots->base, in_scratch = x->start - (uintptr_t)scratch->base;
        const size_t size = x->end - x->start;
        EXPECT((in_slots < slots->size && in_slots + size <= slots->size) ||
                   (in_scratch < scratch->size && in_scratch + size <= scratch->size),
               "%s: %s of block %d is outside the arenas", name, x->name, x->block);
        EXPECT(x->start % ARENA_ALIGN == 0, "%s: %s is not aligned", name, x->name);
        for (int k = 0; k < i; k++) {
            if (!overlap(x, &r.range[k])) continue;
            EXPECT(!must_be_apart(x, &r.range[k]), "%s: %s of block %d lies on %s of block %d", name, x->name, x->block,
                   r.range[k].name, r.range[k].block);
            n_shared++;
        }
    }
    EXPECT(n_shared > 0, "%s: no memory is shared", name);
    for (int b = 1; b < a->shape.L && !a->training; b++) check_residual(a, b);
    const int n = a->shape.n_blocks; /* the last two are of one kind */
    const ActId xn = act_input_id(&a->shape, ACT_XN);
    EXPECT((a->blocks[n - 1].t[xn].data == a->blocks[n - 2].t[xn].data) ==
               (!a->training || act_is_remade(act_row(xn), &a->shape)),
           "%s: forward alone keeps nothing", name);
}

/* Lays out one Acts on memory of its own, as the model does: counting, then pointing. */
static void check_layout_of(const ModelShape *shape, bool training, const char *name) {
    Acts a;
    memset(&a, 0, sizeof a);
    Arena slots = arena_make("slots", NULL, 0), scratch = arena_make("scratch", NULL, 0);
    acts_layout(&a, shape, training, &slots, &scratch);
    slots = arena_make("slots", op_alloc(DEV, slots.peak), slots.peak);
    scratch = arena_make("scratch", op_alloc(DEV, scratch.peak), scratch.peak);
    acts_layout(&a, shape, training, &slots, &scratch);
    check_layout(&a, &slots, &scratch, name);
    op_release(DEV, slots.base);
    op_release(DEV, scratch.base);
    acts_free(&a);
}

TEST(acts_needed_together_lie_apart) {
    for (int c = 0; c < n_model_cases; c++) {
        Fixture f;
        fixture_open(&f, model_cases[c].sets);
        const Model *m = &f.model;
        check_layout(&m->train, &m->slots, &m->scratch, model_cases[c].name);
        check_layout(&m->eval, &m->slots, &m->scratch, model_cases[c].name);
        check_layout(&m->generate, &m->slots, &m->scratch, model_cases[c].name);
        check_layout(&m->decode, &m->slots, &m->scratch, model_cases[c].name);
        const char *cache = (const char *)m->cache.data, *end = cache + tensor_bytes(m->cache);
        EXPECT(cache >= m->slots.base && end <= m->slots.base + m->slots.size, "%s: cache", model_cases[c].name);
        for (int k = 0; k < 2; k++) { /* what a forward carries lies behind the cache */
            const Acts *a = k ? &m->decode : &m->generate;
            EXPECT((const char *)a->depth[0].hidden.data >= end, "%s: the cache overlaps", model_cases[c].name);
        }
        if (shape_n_moe(&m->shape) > 0) { /* two and four expert ranks: more rows exist */
            for (int n_ep = 2; n_ep <= 4; n_ep *= 2) {
                const Mesh mesh = mesh_make(1, n_ep, 1, n_ep);
                ModelShape shape = shape_make(&f.config, &mesh, 0);
                check_layout_of(&shape, true, "training on several expert ranks");
                check_layout_of(&shape, false, "evaluation on several expert ranks");
                shape.recompute = RECOMPUTE_NORMS | RECOMPUTE_UP_PROJECTIONS | RECOMPUTE_SWIGLU;
                check_layout_of(&shape, true, "recomputation on several expert ranks");
            }
        }
        fixture_close(&f);
    }
}

#ifndef REAL_IS_DOUBLE
/* FP8, whole and without one of its parts: which rows wait for their weight's gradient follows. */
static const char *const parts_of_fp8[] = {"precision.fp8.wgrad=fp8", "precision.fp8.wgrad=bf16",
                                           "precision.fp8.dgrad=bf16", "precision.fp8.fprop=bf16",
                                           "precision.fp8.swiglu_input=bf16"};
enum { N_PARTS = sizeof parts_of_fp8 / sizeof *parts_of_fp8 };

TEST(acts_needed_together_lie_apart_in_fp8) {
    for (int part = 0; part < N_PARTS; part++) {
        Fixture f;
        fixture_open(&f, (const char *const[]){FP8_WIDTHS, "precision.compute=fp8", parts_of_fp8[part], NULL});
        for (int n_ep = 1; n_ep <= 4; n_ep *= 2) {
            const Mesh mesh = mesh_make(0, n_ep, 1, n_ep);
            ModelShape shape = shape_make(&f.config, &mesh, 0);
            check_layout_of(&shape, true, parts_of_fp8[part]);
            shape.recompute |= RECOMPUTE_NORMS | RECOMPUTE_UP_PROJECTIONS | RECOMPUTE_SWIGLU;
            check_layout_of(&shape, true, parts_of_fp8[part]);
            check_layout_of(&shape, false, parts_of_fp8[part]);
        }
        fixture_close(&f);
    }
}
#endif

/* ---- nothing reads what was not written (cases E3, E4, E6) ------------------------------------------------------- */

/* Words that are NaN as f32, as double, as two bf16, and far outside as an index. */
static void poison_arena(Arena *a) {
    for (size_t i = 0; i + 4 <= a->size; i += 4) memcpy(a->base + i, &(uint32_t){0x7FFF7FFF}, 4);
}

static void poison_model(Model *m) {
    poison_arena(&m->slots);
    poison_arena(&m->scratch);
}

TEST(acts_poisoned_memory_changes_nothing) {
    for (int c = 0; c < n_model_cases; c++) {
        Fixture f;
        fixture_open(&f, model_cases[c].sets);
        Model *m = &f.model;
        if (model_cases[c].document_length) fixture_batch(&f, model_cases[c].document_length, 3);
        for (int padded = 0; padded < 2; padded++) {
            if (padded) micro_batch_pad(&f.batch, 1);
            fixture_gradients(&f);
            Tensor grad = t_copy(m->params.grad);
            const StepStats stats = *m->stats;
            EXPECT(t_is_finite(grad), "%s: gradients are not finite", model_cases[c].name);
            for (int repeat = 0; repeat < 2; repeat++) { /* the second time over what a backward left */
                if (repeat == 0) poison_model(m);
                fixture_gradients(&f);
                EXPECT(t_same_bits(grad, m->params.grad), "%s: gradients, repeat %d", model_cases[c].name, repeat);
                EXPECT(memcmp(&stats, m->stats, sizeof stats) == 0, "%s: statistics", model_cases[c].name);
            }
        }
        fixture_close(&f);
    }
}

TEST(acts_poisoned_memory_changes_no_evaluation) {
    for (int c = 0; c < n_model_cases; c++) {
        Fixture f;
        fixture_open(&f, model_cases[c].sets);
        Model *m = &f.model;
        StepStats first;
        Tensor hidden = tensor_none();
        for (int repeat = 0; repeat < 3; repeat++) {
            memset(m->eval_stats, 0, sizeof *m->eval_stats);
            model_set_batch(m, &m->eval.shape, &f.batch);
            model_forward(m, &m->eval, FORWARD_EVAL);
            if (repeat == 0) {
                first = *m->eval_stats;
                hidden = t_copy(m->eval.depth[0].hidden);
            }
            EXPECT(memcmp(&first, m->eval_stats, sizeof first) == 0 && first.loss_sum[0] > 0, "%s, repeat %d",
                   model_cases[c].name, repeat);
            EXPECT(t_same_bits(hidden, m->eval.depth[0].hidden), "%s, repeat %d", model_cases[c].name, repeat);
            poison_model(m);
            if (repeat == 1) fixture_gradients(&f); /* training over the same memory */
        }
        fixture_close(&f);
    }
}

/* Tokens for the first and the last expert alone: the groups between are empty (E4), and their gradient is zero. */
TEST(acts_poisoned_memory_with_empty_experts) {
    Fixture f;
    fixture_open(&f, (const char *const[]){"model.n_group=1", "model.topk_group=1", NULL});
    Model *m = &f.model;
    const int E = m->shape.router.n_experts;
    for (int b = m->shape.n_dense; b < m->shape.n_blocks; b++)
        for (int e = 0; e < E; e++)
            t_set(m->params.blocks[b].weight[WEIGHT_ROUTER_BIAS].w, e, e == 0 || e == E - 1 ? 10 : 0);
    fixture_gradients(&f);
    Tensor grad = t_copy(m->params.grad);
    poison_model(m);
    fixture_gradients(&f);
    EXPECT(t_same_bits(grad, m->params.grad), "gradients depend on what memory held");
    for (int b = m->shape.n_dense; b < m->shape.n_blocks; b++) {
        for (int e = 0; e < E; e++) {
            const bool is_used = e == 0 || e == E - 1;
            Tensor dw = tensor_plane(m->params.blocks[b].weight[WEIGHT_EXPERT_DOWN].dw, e);
            double largest = 0;
            for (int64_t i = 0; i < tensor_numel(dw); i++)
                if (t_get(dw, i) > largest) largest = t_get(dw, i);
            EXPECT((largest > 0) == is_used, "block %d, expert %d: gradient %g", b, e, largest);
            EXPECT_EQ(((const int32_t *)m->params.blocks[b].counts.data)[e], is_used ? m->shape.T : 0);
        }
    }
    fixture_close(&f);
}

/* ---- one block, phase by phase ----------------------------------------------------------------------------------- */

static Layer layer_of(Fixture *f, int block) {
    Model *m = &f->model;
    return (Layer){.device = m->device,
                   .comm = m->comm,
                   .shape = &m->train.shape,
                   .w = &m->params.blocks[block],
                   .a = &m->train.blocks[block],
                   .batch = m->batch,
                   .inv_freq = m->inv_freq,
                   .params = m->step_params,
                   .stats = m->stats,
                   .dout = m->train.dout[0],
                   .is_moe = shape_block_is_moe(&m->shape, block),
                   .keeps = true};
}

static bool is_there(const Layer *l, int id) {
    return l->a->t[id].data && tensor_numel(l->a->t[id]) > 0 && !is_shared(act_row((ActId)id), l->shape);
}

static void poison_all(const Layer *l) {
    for (int id = 0; id < ACT_COUNT; id++)
        if (is_there(l, id)) t_poison(l->a->t[id]);
}

/* After `phase`: what the table says is read no more, neither in a later phase of this pass nor, if kept, by a later
 * reader. `pass` is IN_FORWARD or IN_BACKWARD. */
static void poison_dead(const Layer *l, int phase, int pass) {
    const int later = pass & ~((phase << 1) - 1);
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        if (!is_there(l, id)) continue;
        bool is_dead = (row->phases & phase) && !(row->phases & later);
        const Life life = act_life(row, l->shape);
        if (life == LIFE_GRADIENT) is_dead = false;
        if (life == LIFE_KEPT) is_dead = phase == IN_ATTN_BACK && row->last_reader == READER_INPUT;
        if (is_dead) t_poison(l->a->t[id]);
    }
}

/* Between a block's forward and its backward other blocks use the scratch. */
static void poison_scratch(const Layer *l) {
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        if (is_there(l, id) && act_life(row, l->shape) != LIFE_KEPT) t_poison(l->a->t[id]);
    }
}

static void forward(Layer *l, Tensor x, Tensor branch, bool poison) {
    if (poison) poison_all(l), t_poison(branch);
    layer_attn_forward(l, x, tensor_none());
    if (poison) poison_dead(l, IN_ATTN, IN_FORWARD);
    layer_dispatch_forward(l);
    layer_experts_forward(l, branch);
    if (poison) poison_dead(l, IN_EXPERTS, IN_FORWARD);
    layer_combine_forward(l, branch);
}

static void backward(Layer *l, Tensor dx, bool poison) {
    layer_backward_begin(l);
    layer_combine_backward(l);
    layer_experts_backward_input(l);
    layer_dispatch_backward(l);
    if (poison) poison_dead(l, IN_EXPERTS_BACK, IN_BACKWARD);
    layer_attn_backward_input(l, dx);
    if (poison) poison_dead(l, IN_ATTN_BACK, IN_BACKWARD);
    layer_experts_backward_weight(l);
    layer_attn_backward_weight(l);
}

/* The bits that matter of a block's forward and backward: its two outputs, dx, and the gradients of all its weights. */
typedef struct {
    Tensor x1, branch, dx, grad;
} Results;

static Results run_block(Fixture *f, int block, bool poison) {
    Model *m = &f->model;
    Layer l = layer_of(f, block);
    const ModelShape *s = &m->shape;
    const int planes = layer_branch_planes(s, l.is_moe);
    Tensor branch = tensor_3d(m->train.branch.data, s->act, planes, s->T, s->D), x = t_normal(t_copy(l.dout), 1, 50);
    Tensor dx = m->train.dout[1];
    model_set_params(m, &f->params);
    model_zero(m);
    model_set_batch(m, &m->shape, &f->batch);
    forward(&l, x, branch, poison);
    Results r = {.x1 = t_copy(l.a->t[ACT_X1]), .branch = t_copy(branch)};
    if (poison) poison_scratch(&l), t_poison(branch);
    t_normal(l.dout, 1, 51);
    backward(&l, dx, poison);
    r.dx = t_copy(dx);
    r.grad = t_copy(m->params.grad);
    return r;
}

static void check_phases(const char *const *sets, const char *name) {
    Fixture f;
    fixture_open(&f, sets);
    for (int block = 0; block < 2; block++) {
        const Results plain = run_block(&f, block, false), poisoned = run_block(&f, block, true);
        EXPECT(t_is_finite(plain.grad) && t_is_finite(plain.dx), "%s: not finite", name);
        EXPECT(t_same_bits(plain.x1, poisoned.x1), "%s, block %d: residual", name, block);
        EXPECT(t_same_bits(plain.branch, poisoned.branch), "%s, block %d: branch", name, block);
        EXPECT(t_same_bits(plain.dx, poisoned.dx), "%s, block %d: dx", name, block);
        EXPECT(t_same_bits(plain.grad, poisoned.grad), "%s, block %d: weight gradients", name, block);
    }
    fixture_close(&f);
}

/* Each row is spoilt as soon as the table says that nobody needs it any more. Block 0 is dense, block 1 is not. */
TEST(acts_phases_and_last_readers_are_true) {
    static const char *const latents[] = {"model.q_lora_rank=null", "model.q_lora_rank=10"};
    static const char *const choices[] = {"memory.recompute=none", "memory.recompute=[\"norms\"]",
                                          "memory.recompute=[\"up_projections\"]", "memory.recompute=[\"swiglu\"]",
                                          "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]"};
    for (int q = 0; q < 2; q++)
        for (int c = 0; c < 5; c++) {
            check_phases((const char *const[]){latents[q], choices[c], NULL}, choices[c]);
            t_free_all();
        }
}

#ifndef REAL_IS_DOUBLE
TEST(acts_phases_and_last_readers_are_true_in_fp8) {
    static const char *const choices[] = {"memory.recompute=none", recompute_all};
    for (int part = 0; part < N_PARTS; part++)
        for (int c = 0; c < 2; c++) {
            check_phases((const char *const[]){FP8_WIDTHS, "model.q_lora_rank=128", "precision.compute=fp8",
                                               parts_of_fp8[part], choices[c], NULL},
                         parts_of_fp8[part]);
            t_free_all();
        }
}

/* Of what waits from input-backward on, the wide gradients are the largest; where Wgrad multiplies tiles, none do. */
TEST(acts_wait_as_tiles) {
    for (int part = 0; part < N_PARTS; part++) {
        Fixture f;
        fixture_open(&f, (const char *const[]){FP8_WIDTHS, "precision.compute=fp8", parts_of_fp8[part], NULL});
        const ModelShape s = f.model.shape;
        for (int id = 0; id < ACT_COUNT; id++) {
            const ActRow *row = act_row((ActId)id);
            const Tensor t = row->make(&s, true);
            if (act_life(row, &s) != LIFE_GRADIENT || tensor_is_none(t) || id == ACT_DLOGITS) continue;
            EXPECT((t.dtype == DTYPE_E4M3) == s.fp8_parts.wgrad, "%s: %s (%d)", parts_of_fp8[part], row->name, id);
        }
        fixture_close(&f);
    }
}
#endif

/* ---- who touches what, and when ---------------------------------------------------------------------------------- */

typedef struct {
    Layer layer;
    int phase;
    int touched[ACT_COUNT]; /* phases */
} Touches;

static void touch(Touches *seen, const char *op, const Tensor *list, int n) {
    for (int i = 0; i < n; i++) {
        for (int id = 0; id < ACT_COUNT; id++) {
            if (!list[i].data || !is_there(&seen->layer, id)) continue;
            const char *start = (const char *)seen->layer.a->t[id].data, *at = (const char *)list[i].data;
            if (at < start || at >= start + tensor_bytes(seen->layer.a->t[id])) continue;
            const ActRow *row = act_row((ActId)id);
            int allowed = row->phases;
            const Life life = act_life(row, seen->layer.shape);
            if (life == LIFE_GRADIENT) allowed = IN_BACKWARD;
            if (life == LIFE_KEPT) allowed = row->last_reader == READER_INPUT ? IN_ALL & ~IN_WEIGHT_BACK : IN_ALL;
            EXPECT(allowed & seen->phase, "%s touches %s (%d) in phase %d, not in %d", op, row->name, id, seen->phase,
                   allowed);
            seen->touched[id] |= seen->phase;
        }
    }
}

static void watch_rows(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                       int n_reads) {
    (void)s;
    touch((Touches *)watcher, op, writes, n_writes);
    touch((Touches *)watcher, op, reads, n_reads);
}

/* A block whose rows all have memory of their own, so that an address names its row. */
static void spread(BlockActs *own, const BlockActs *from, const ModelShape *s) {
    *own = *from;
    for (int id = 0; id < ACT_COUNT; id++)
        if (from->t[id].data && tensor_numel(from->t[id]) > 0) own->t[id].data = t_copy(from->t[id]).data;
    for (int id = 0; id < ACT_COUNT; id++)
        if (is_shared(act_row((ActId)id), s)) own->t[id].data = own->t[act_row((ActId)id)->same_as].data;
}

static void check_touches(Fixture *f, int block, int *touched) {
    static BlockActs own;
    Model *m = &f->model;
    Touches seen = {.layer = layer_of(f, block)};
    const Device watched = {.ops = f->device.ops, .watch = watch_rows, .watcher = &seen};
    Layer *l = &seen.layer;
    const ModelShape *s = l->shape;
    spread(&own, l->a, s);
    l->a = &own;
    Tensor x = t_normal(t_copy(l->dout), 1, 50), dx = m->train.dout[1];
    Tensor branch = tensor_3d(m->train.branch.data, s->act, layer_branch_planes(s, l->is_moe), s->T, s->D);
    model_set_params(m, &f->params);
    model_zero(m);
    model_set_batch(m, &m->shape, &f->batch);
    l->device = &watched;
    seen.phase = IN_ATTN;
    layer_attn_forward(l, x, tensor_none());
    seen.phase = IN_EXPERTS;
    layer_dispatch_forward(l);
    layer_experts_forward(l, branch);
    layer_combine_forward(l, branch);
    seen.phase = IN_EXPERTS_BACK;
    t_normal(l->dout, 1, 51);
    layer_backward_begin(l);
    layer_combine_backward(l);
    layer_experts_backward_input(l);
    layer_dispatch_backward(l);
    seen.phase = IN_ATTN_BACK;
    layer_attn_backward_input(l, dx);
    seen.phase = IN_WEIGHT_BACK;
    layer_experts_backward_weight(l);
    layer_attn_backward_weight(l);
    for (int id = 0; id < ACT_COUNT; id++) touched[id] |= seen.touched[id];
}

/* Nothing is touched outside its phases, and no row takes memory before its first use or behind its last. */
TEST(acts_are_touched_in_their_phases) {
    static const char *const latents[] = {"model.q_lora_rank=null", "model.q_lora_rank=10"};
    static const char *const choices[] = {"memory.recompute=none", recompute_all};
    int touched[ACT_COUNT] = {0};
    bool exists[ACT_COUNT] = {false};
    for (int i = 0; i < 4; i++) {
        Fixture f;
        fixture_open(&f, (const char *const[]){latents[i % 2], choices[i / 2], NULL});
        for (int block = 0; block < 2; block++) {
            check_touches(&f, block, touched);
            const Layer l = layer_of(&f, block);
            for (int id = 0; id < ACT_COUNT; id++) exists[id] |= is_there(&l, id);
        }
        fixture_close(&f);
        t_free_all();
    }
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        if (!exists[id]) continue;
        EXPECT(touched[id], "nobody touches %s (%d)", row->name, id);
        const int phases = row->life == LIFE_GRADIENT ? IN_WEIGHT_BACK : row->phases;
        const int first = phases & -phases, last = phases ? 1 << (31 - __builtin_clz((unsigned)phases)) : 0;
        EXPECT((touched[id] & first) == first && (touched[id] & last) == last,
               "%s (%d) is declared for phases %d and touched in %d", row->name, id, phases, touched[id]);
    }
}

/* ---- remaking ---------------------------------------------------------------------------------------------------- */

static void count_op(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                     int n_reads) {
    (void)op, (void)s, (void)writes, (void)n_writes, (void)reads, (void)n_reads;
    ++*(int *)watcher;
}

/* Each row alone, from kept rows only: poisoned, asked for, and compared with what forward wrote. */
static void check_remakes(Fixture *f, int block, int *n_checked) {
    Layer l = layer_of(f, block);
    Model *m = &f->model;
    const ModelShape *s = &m->shape;
    Tensor x = t_normal(t_copy(l.dout), 1, 50), written[ACT_COUNT];
    model_set_params(m, &f->params);
    model_zero(m);
    model_set_batch(m, &m->shape, &f->batch);
    poison_all(&l);
    Tensor branch = tensor_3d(m->train.branch.data, s->act, layer_branch_planes(s, l.is_moe), s->T, s->D);
    forward(&l, x, branch, false);
    for (int id = 0; id < ACT_COUNT; id++)
        if (is_there(&l, id)) written[id] = t_copy(l.a->t[id]);
    for (int id = 0; id < ACT_COUNT; id++) {
        const ActRow *row = act_row((ActId)id);
        if (!is_there(&l, id) || row->life != LIFE_KEPT || id == ACT_DYG) continue;
        int n_ops = 0;
        poison_scratch(&l);
        layer_backward_begin(&l);
        const Device watched = {.ops = f->device.ops, .watch = count_op, .watcher = &n_ops};
        l.device = &watched;
        Tensor made = act(&l, (ActId)id);
        EXPECT(made.data == l.a->t[id].data && t_same_bits(made, written[id]), "block %d: %s (%d) differs", block,
               row->name, id);
        EXPECT((n_ops > 0) == act_is_remade(row, s), "block %d: %s (%d) took %d ops", block, row->name, id, n_ops);
        const int n_first = n_ops;
        act(&l, (ActId)id);
        EXPECT(n_ops == n_first, "block %d: %s (%d) was made twice", block, row->name, id);
        *n_checked += act_is_remade(row, s);
    }
}

TEST(acts_are_remade_to_the_same_bits) {
    static const char *const choices[] = {"memory.recompute=none", recompute_all};
    for (int c = 0; c < 2; c++) {
        Fixture f;
        fixture_open(&f, (const char *const[]){choices[c], "model.q_lora_rank=10", NULL});
        int n_checked = 0;
        for (int block = 0; block < 2; block++) check_remakes(&f, block, &n_checked);
        /* xg always; else xn, cq, ckv, q, k, v, u, as of both blocks, a and xg of the second. */
        EXPECT_EQ(n_checked, c ? 18 : 1);
        fixture_close(&f);
    }
}

/* The gradient of the experts' outputs: the block's gradient in the order of the rows, zero in padding. */
TEST(acts_remade_gradient_rows) {
    Fixture f;
    fixture_open(&f, NULL);
    fixture_gradients(&f);
    Layer l = layer_of(&f, 1);
    const int64_t D = l.shape->D;
    t_normal(l.dout, 1, 51);
    layer_backward_begin(&l);
    Tensor dyg = act(&l, ACT_DYG);
    const int64_t n = (int64_t)t_get(l.a->t[ACT_EXPERT_START], l.shape->n_local);
    int64_t n_real = 0;
    for (int64_t row = 0; row < n; row++) {
        const int64_t token = (int64_t)t_get(l.a->t[ACT_ROW_TOKEN], row);
        n_real += token >= 0;
        for (int64_t i = 0; i < D; i++)
            EXPECT(t_get(dyg, row * D + i) == (token < 0 ? 0 : t_get(l.dout, token * D + i)), "row %d", (int)row);
    }
    EXPECT_EQ(n_real, l.shape->T * l.shape->router.n_chosen);
    fixture_close(&f);
}
