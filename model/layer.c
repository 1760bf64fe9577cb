/* What all phases share: rows of the activation table, kept or made again. See layer.h, acts.h. */
#include "layer.h"

#include <string.h>

/* A row is made again once per backward, and only where the table put it into scratch. */
Tensor act(Layer *l, ActId id) {
    const ActRow *row = act_row(id);
    if (act_is_remade(row, l->shape) && !l->a->remade[id]) {
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

void layer_quantize(Layer *l, Quantized q, Tensor x) {
    if (tensor_is_none(q.rows) && tensor_is_none(q.columns)) return;
    op_quantize(l->device, q, x, STREAM_COMPUTE);
}

Tensor gradient_rows(Layer *l, ActId id) {
    layer_quantize(l, act_tiles(l->a, id), l->a->t[id]);
    return l->a->t[act_rows_id(l->shape, id)];
}

Tensor weight_fprop(const Layer *l, WeightId id) {
    const Weight *w = &l->w->weight[id];
    return w->w.dtype == DTYPE_E4M3 && !l->shape->fp8_parts.fprop ? w->wide : w->w;
}

Tensor weight_dgrad(const Layer *l, WeightId id) {
    const Weight *w = &l->w->weight[id];
    if (w->w.dtype != DTYPE_E4M3) return w->w;
    return l->shape->fp8_parts.dgrad ? w->wt : w->wide;
}

void layer_backward_begin(Layer *l) {
    memset(l->a->remade, 0, sizeof l->a->remade);
    layer_quantize(l, (Quantized){l->a->t[ACT_DOUT_Q], l->a->t[ACT_DOUT_T]}, l->dout);
}
