/* What all phases share: rows of the activation table, kept or made again. See layer.h, acts.h. */
#include "layer.h"

#include <string.h>

/* A row is made again once per backward, and only where the table put it into scratch. */
Tensor act(Layer *l, ActId id) {
    const ActRow *row = act_row(id);
    const bool is_remade = row->recompute == -1 || (row->recompute & l->shape->recompute) != 0;
    if (is_remade && !l->a->remade[id]) {
        l->a->remade[id] = true;
        row->remake(l);
    }
    return l->a->t[id];
}

Tensor act_rows(Layer *l, ActId id) {
    return act(l, act_rows_id(l->shape, id));
}

Tensor act_columns(Layer *l, ActId id) {
    return act(l, act_columns_id(l->shape, id));
}

Tensor gradient_rows(Layer *l, ActId id) {
    const ActId rows = act_rows_id(l->shape, id);
    if (rows == id) return l->a->t[id];
    const Quantized q = {l->a->t[rows], l->a->t[act_columns_id(l->shape, id)]};
    op_quantize(l->device, q, l->a->t[id], STREAM_COMPUTE);
    return q.rows;
}

Tensor weight_dgrad(const Weight *w) {
    return w->w.dtype == DTYPE_E4M3 ? w->wt : w->w;
}

void layer_backward_begin(Layer *l) {
    memset(l->a->remade, 0, sizeof l->a->remade);
}
