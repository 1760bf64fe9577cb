/* A model walked through once with ops that compute nothing. See model.h. */
#include <stdlib.h>

#include "kernels/base/check.h"
#include "passage.h"

/* Positions and ids are not looked at: only the extents count. */
static void set_batch(Model *m, const ModelShape *s) {
    char err[ERR_LEN];
    MicroBatch mb;
    CHECK(micro_batch_alloc(&mb, s->B, s->S, s->n_mtp, err) == 0, "%s", err);
    model_set_batch(m, s, &mb);
    micro_batch_free(&mb);
}

/* A micro-batch through a chunk; what would come from or go to other stages is any tensor of its shape. */
static Passage lone_passage(Model *m, Acts *a, int chunk, ForwardMode mode) {
    Passage p = passage_of(m, a, chunk, mode);
    p.in = p.out = a->x0;
    p.dout = p.dx = a->dout[1];
    return p;
}

static void chunk(Model *m, int chunk) {
    Acts *ahead = m->shape.part.pairs ? &m->beside : &m->train;
    Passage forward = lone_passage(m, ahead, chunk, FORWARD_TRAIN);
    Passage backward = lone_passage(m, &m->train, chunk, FORWARD_TRAIN);
    Passage eval = lone_passage(m, &m->eval, chunk, FORWARD_EVAL);
    set_batch(m, &m->train.shape);
    passage_forward(&forward);
    passage_backward(&backward);
    set_batch(m, &m->eval.shape);
    passage_forward(&eval);
}

static void generation(Model *m) {
    set_batch(m, &m->generate.shape);
    for (int c = 0; c < m->shape.part.n_chunks; c++) {
        Passage prompt = lone_passage(m, &m->generate, c, FORWARD_HIDDEN);
        passage_forward(&prompt);
    }
    if (!shape_has_loss(&m->shape)) return;
    float *logits = (float *)malloc((size_t)m->shape.V * sizeof *logits);
    CHECK(logits, "no memory for %lld logits", (long long)m->shape.V);
    model_logits(m, &m->generate, 0, logits);
    free(logits);
}

void model_rehearse(Model *m, const Ops *ops) {
    const Device *device = m->device;
    Comm *comm = m->comm;
    const Device rehearsal = {.ops = ops, .logits_bytes = device->logits_bytes};
    Comm silent = comm_silent(comm, &rehearsal); /* what is not computed is not sent */
    m->device = &rehearsal;
    m->comm = &silent;
    for (int c = 0; c < m->shape.part.n_chunks; c++) chunk(m, c);
    generation(m);
    m->device = device;
    m->comm = comm;
}
