/* The optimizer step: sums over the ranks, norm of all gradients, the gate, AdamW over every weight, the router
 * biases. (V3 4.2, 2.1.2)
 *
 * A rank updates its shards of the weights (cut.h, zero1.h). Nothing is decided on the host: the gate leaves the scale
 * of the gradients, or the word that this update is skipped, on the device, and every later op reads it there. */
#include <stddef.h>

#include "model.h"
#include "zero1.h"

/* Behind those of a step's staging and of saves (model/train/saver.h). */
enum { EVENT_UPDATE = EVENTS_MAX / 2 - 1 };

/* What is on stream `next` from here on runs behind what is on `before` so far. */
static void behind(const Model *m, Stream next, Stream before) {
    if (m->comm->mesh.world == 1) return; /* there is nothing on STREAM_COMM */
    op_event_record(m->device, EVENT_UPDATE, before);
    op_event_wait(m->device, EVENT_UPDATE, next);
}

/* A weight's rows of this rank, and what the next forward reads of them, if it is not the master itself. In FP8 the
 * transpose of a weight whose rows several ranks update waits for all of them. */
static void weight_update(Model *m, const Weight *w) {
    const Params *p = &m->params;
    const bool in_blocks = w->w.dtype == DTYPE_E4M3, is_whole = in_blocks && !params_is_shared(w);
    const Tensor copy = is_whole ? w->w : w->w.dtype == DTYPE_BF16 ? params_rows(w, w->w) : tensor_none();
    const Tensor master = params_master(p, w);
    op_adamw_cast(m->device, copy, is_whole ? w->wt : tensor_none(), master, params_moment(p->m, w),
                  params_moment(p->v, w), params_grad(p, w), w->decay, m->step_params, m->stats, m->update,
                  STREAM_COMPUTE);
    if (in_blocks && !is_whole) op_quantize_weight(m->device, params_blocks(w), tensor_none(), master, STREAM_COMPUTE);
    if (!tensor_is_none(w->wide)) op_copy(m->device, params_rows(w, w->wide), master, STREAM_COMPUTE);
}

static void block_update(Model *m, const Block *b) {
    for (int id = 0; id < WEIGHT_COUNT; id++) {
        const Weight *w = &b->weight[id];
        if (w->updated.n > 0 && w->optimizer == OPTIMIZER_ADAMW) weight_update(m, w);
    }
}

/* The router biases of all blocks, also into the record: there from the ranks that have them. */
static void biases_update(Model *m) {
    const ModelShape *s = &m->shape;
    const Comm *c = m->comm;
    const bool is_shared = c->mesh.size[GROUP_PIPE] > 1;
    if (shape_n_moe(s) == 0) return;
    if (is_shared) op_zero(m->device, m->record.bias, STREAM_COMPUTE);
    for (int b = 0, i = 0; b < s->n_blocks; b++) {
        if (!shape_block_is_moe(s, b)) continue;
        const Tensor record = tensor_plane(m->record.bias, i++),
                     bias = m->params.blocks[b].weight[WEIGHT_ROUTER_BIAS].w;
        if (shape_chunk_of(s, b) < 0) continue;
        op_bias_step(m->device, bias, m->params.blocks[b].counts, m->step_params, m->stats, STREAM_COMPUTE);
        if (!s->part.is_copy) op_copy(m->device, record, bias, STREAM_COMPUTE);
    }
    if (!is_shared) return;
    behind(m, STREAM_COMM, STREAM_COMPUTE);
    c->all_reduce(m->comm, m->record.bias, m->record.bias, GROUP_PIPE, STREAM_COMM);
    behind(m, STREAM_COMPUTE, STREAM_COMM);
}

_Static_assert(offsetof(StepStats, overflow) == (LOSSES_MAX + 1) * sizeof(double), "balance, overflow behind losses");

Tensor model_sums(StepStats *stats) {
    return tensor_1d(stats->loss_sum, DTYPE_F64, LOSSES_MAX + 2);
}

/* Sums over the ranks: gradients over those that hold the same weights, in the order in which backward ends with them;
 * the embedding first over the two stages that have it; counts and statistics over all. Then the norm: each rank
 * squares its own shards, so that adding the ranks' partials, which are zero where another rank's stand, changes no
 * bit. */
static void reduce(Model *m) {
    Comm *c = m->comm;
    const Params *p = &m->params;
    const Tensor sums = model_sums(m->stats);
    const Weight *embedding = &p->top.weight[WEIGHT_EMBED];
    behind(m, STREAM_COMM, STREAM_COMPUTE);
    if (m->shape.part.shares_embedding)
        c->all_reduce(c, weight_flat(embedding->dw), weight_flat(embedding->dw), GROUP_EMBED, STREAM_COMM);
    for (int b = m->shape.n_blocks - 1; b >= -1; b--) zero1_reduce(p, c, b);
    c->all_reduce(c, sums, sums, GROUP_WORLD, STREAM_COMM);
    if (shape_n_moe(&m->shape) > 0) c->all_reduce(c, m->record.counts, m->record.counts, GROUP_WORLD, STREAM_COMM);
    behind(m, STREAM_COMPUTE, STREAM_COMM);
    op_grad_squares(m->device, p->partials, p->grad, p->partial_intervals, STREAM_COMPUTE);
    behind(m, STREAM_COMM, STREAM_COMPUTE);
    c->all_reduce(c, p->partials, p->partials, GROUP_WORLD, STREAM_COMM);
    behind(m, STREAM_COMPUTE, STREAM_COMM);
    op_grad_norm(m->device, m->stats, p->partials, STREAM_COMPUTE);
}

/* What the others have updated, in the order in which forward reads it. */
static void gather(Model *m) {
    behind(m, STREAM_COMM, STREAM_COMPUTE);
    for (int b = -1; b < m->shape.n_blocks; b++) zero1_gather(&m->params, m->comm, b);
    behind(m, STREAM_COMPUTE, STREAM_COMM);
    for (int b = 0; b < m->shape.n_blocks && m->shape.fp8; b++)
        for (int id = 0; id < WEIGHT_COUNT; id++) {
            const Weight *w = &m->params.blocks[b].weight[id];
            if (!tensor_is_none(w->wt) && params_is_shared(w))
                op_transpose_weight(m->device, w->wt, w->w, STREAM_COMPUTE);
        }
}

void model_cast(Model *m) {
    params_cast(&m->params, m->device);
    gather(m);
    op_synchronize(m->device, STREAM_COMPUTE);
}

void model_update(Model *m) {
    RANGE(m->device, "update");
    reduce(m);
    op_update_gate(m->device, m->stats, m->update, m->step_params, STREAM_COMPUTE);
    block_update(m, &m->params.top);
    for (int b = 0; b < m->shape.n_blocks; b++) block_update(m, &m->params.blocks[b]);
    biases_update(m);
    gather(m);
}
