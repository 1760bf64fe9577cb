/* A model walked through once with ops that compute nothing. See model.h. */
#include <stdlib.h>

#include "kernels/base/check.h"
#include "model.h"

/* Positions and ids are not looked at: only the extents count. */
static void set_batch(Model *m, const ModelShape *s) {
    char err[ERR_LEN];
    MicroBatch mb;
    CHECK(micro_batch_alloc(&mb, s->B, s->S, s->n_mtp, err) == 0, "%s", err);
    model_set_batch(m, s, &mb);
    micro_batch_free(&mb);
}

void model_rehearse(Model *m, const Ops *ops) {
    const Device *device = m->device;
    Comm *comm = m->comm;
    const Device rehearsal = {.ops = ops, .logits_bytes = device->logits_bytes};
    Comm silent = comm_silent(comm, &rehearsal); /* what is not computed is not sent */
    m->device = &rehearsal;
    m->comm = &silent;

    set_batch(m, &m->train.shape);
    model_forward(m, &m->train, FORWARD_TRAIN);
    model_backward(m, &m->train);
    set_batch(m, &m->eval.shape);
    model_forward(m, &m->eval, FORWARD_EVAL);
    set_batch(m, &m->generate.shape);
    model_forward(m, &m->generate, FORWARD_HIDDEN);
    float *logits = (float *)malloc((size_t)m->shape.V * sizeof *logits);
    CHECK(logits, "no memory for %lld logits", (long long)m->shape.V);
    model_logits(m, &m->generate, 0, logits);
    free(logits);

    m->device = device;
    m->comm = comm;
}
