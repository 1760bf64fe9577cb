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

void layer_backward_begin(Layer *l) {
    memset(l->a->remade, 0, sizeof l->a->remade);
}
