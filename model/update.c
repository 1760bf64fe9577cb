/* The optimizer step: sums over the ranks, norm of all gradients, the gate, AdamW over every weight, the router
 * biases. (V3 4.2, 2.1.2)
 *
 * Nothing here is decided on the host: the gate leaves the scale of the gradients, or the word that this update is
 * skipped, on the device, and every later op reads it there. */
#include <stddef.h>

#include "model.h"

static Tensor flat_slice(Tensor flat, const Weight *w) {
    return tensor_rows(flat, w->offset, w->numel);
}

/* What the next forward reads, if it is not the master itself. */
static Tensor copy_of(const Weight *w) {
    if (w->w.dtype == DTYPE_F32) return tensor_none();
    return w->w.dtype == DTYPE_BF16 ? weight_flat(w->w) : w->w;
}

/* `record`: the block's row of biases in the step's record, where it has experts. */
static void block_update(Model *m, const Block *b, Tensor record) {
    const Params *p = &m->params;
    for (int id = 0; id < WEIGHT_COUNT; id++) {
        const Weight *w = &b->weight[id];
        if (w->numel == 0 || w->optimizer != OPTIMIZER_ADAMW) continue;
        op_adamw_cast(m->device, copy_of(w), w->wt, flat_slice(p->master, w), flat_slice(p->m, w), flat_slice(p->v, w),
                      flat_slice(p->grad, w), w->decay, m->step_params, m->stats, m->update, STREAM_COMPUTE);
        if (!tensor_is_none(w->wide))
            op_copy(m->device, weight_flat(w->wide), flat_slice(p->master, w), STREAM_COMPUTE);
    }
    if (tensor_is_none(record)) return;
    op_bias_step(m->device, b->weight[WEIGHT_ROUTER_BIAS].w, b->counts, m->step_params, m->stats, STREAM_COMPUTE);
    op_copy(m->device, record, b->weight[WEIGHT_ROUTER_BIAS].w, STREAM_COMPUTE);
}

/* Sums over the ranks: gradients over those that hold the same weights, counts and losses over all. The squares of the
 * experts' gradients come together before those of the weights that every rank has, and counts once. */
_Static_assert(offsetof(StepStats, balance_sum) == LOSSES_MAX * sizeof(double), "the balance lies behind the losses");

static void reduce(Model *m) {
    Comm *c = m->comm;
    const Params *p = &m->params;
    const Tensor others = tensor_rows(p->grad, 0, p->experts);
    const Tensor experts = tensor_rows(p->grad, p->experts, p->numel - p->experts);
    const Tensor losses = tensor_1d(m->stats->loss_sum, DTYPE_F64, LOSSES_MAX + 1); /* and the balance behind them */
    const Tensor norm_sq = tensor_1d(&m->stats->grad_norm_sq, DTYPE_F64, 1);
    c->all_reduce(c, others, others, GROUP_DATA, STREAM_COMM);
    c->all_reduce(c, experts, experts, GROUP_EXPERT_DATA, STREAM_COMM);
    c->all_reduce(c, losses, losses, GROUP_DATA, STREAM_COMM);
    for (int b = 0; b < m->shape.n_blocks; b++)
        if (p->blocks[b].counts.data)
            c->all_reduce(c, p->blocks[b].counts, p->blocks[b].counts, GROUP_DATA, STREAM_COMM);
    if (p->numel > p->experts) op_grad_norm(m->device, m->stats, experts, STREAM_COMPUTE);
    c->all_reduce(c, norm_sq, norm_sq, GROUP_EXPERT, STREAM_COMM);
    op_grad_norm(m->device, m->stats, others, STREAM_COMPUTE);
}

void model_update(Model *m) {
    RANGE(m->device, "update");
    reduce(m);
    op_update_gate(m->device, m->stats, m->update, m->step_params, STREAM_COMPUTE);
    block_update(m, &m->params.top, tensor_none());
    for (int b = 0, i = 0; b < m->shape.n_blocks; b++)
        block_update(m, &m->params.blocks[b],
                     shape_block_is_moe(&m->shape, b) ? tensor_plane(m->record.bias, i++) : tensor_none());
}
