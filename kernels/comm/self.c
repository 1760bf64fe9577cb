/* A mesh of one: every call of comm.h, as the copies that remain when there is nobody to talk to. */
#include <stdlib.h>

#include "checks.h"

static void self_all_reduce(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    (void)g;
    copy_alone(c, y, x, s);
}

static void self_broadcast(Comm *c, Tensor y, int root, Group g, Stream s) {
    (void)c, (void)y, (void)g, (void)s;
    CHECK(root == 0, "broadcast from rank %d of a mesh of one", root);
}

static void self_send_or_recv(Comm *c, Tensor x, int peer, Group g, Stream s) {
    (void)c, (void)x, (void)g, (void)s;
    CHECK(false, "send to or receive from rank %d on a mesh of one", peer);
}

static void self_dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights, Stream s) {
    copy_alone(c, received, x, s);
    copy_alone(c, plan.ids, ids, s);
    copy_alone(c, plan.weights, weights, s);
}

static void self_combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s) {
    (void)plan;
    CHECK(y.ndim == 3 && y.shape[0] == 1, "combine on a mesh of one writes one plane");
    copy_alone(c, tensor_plane(y, 0), rows, s);
    copy_alone(c, dw, dweights, s);
}

static void *self_alloc_symmetric(Comm *c, const Device *d, size_t bytes) {
    (void)c;
    return op_alloc(d, bytes);
}

static void self_free(Comm *c) {
    free(c);
}

/* ---- nothing at all ---------------------------------------------------------------------------------------------- */

static void silent_sum_or_gather(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    (void)c, (void)y, (void)x, (void)g, (void)s;
}

static void silent_move(Comm *c, Tensor x, int peer, Group g, Stream s) {
    (void)c, (void)x, (void)peer, (void)g, (void)s;
}

static void silent_dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights,
                            Stream s) {
    (void)c, (void)received, (void)plan, (void)x, (void)ids, (void)weights, (void)s;
}

static void silent_combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s) {
    (void)c, (void)y, (void)dw, (void)rows, (void)dweights, (void)plan, (void)s;
}

Comm comm_silent(const Comm *c, const Device *d) {
    Comm silent = *c;
    silent.name = "silent";
    silent.all_reduce = silent.reduce_scatter = silent.all_gather = silent_sum_or_gather;
    silent.broadcast = silent.send = silent.recv = silent_move;
    silent.dispatch = silent_dispatch;
    silent.combine = silent_combine;
    silent.device = d;
    return silent;
}

/* ------------------------------------------------------------------------------------------------------------------ */

Comm *comm_self(const Device *d) {
    Comm *c = (Comm *)calloc(1, sizeof *c);
    CHECK(c, "no memory for a Comm");
    c->name = "self";
    c->all_reduce = self_all_reduce;
    c->reduce_scatter = self_all_reduce;
    c->all_gather = self_all_reduce;
    c->broadcast = self_broadcast;
    c->send = self_send_or_recv;
    c->recv = self_send_or_recv;
    c->dispatch = self_dispatch;
    c->combine = self_combine;
    c->alloc_symmetric = self_alloc_symmetric;
    c->free = self_free;
    c->mesh = mesh_make(0, 1, 1, 1);
    c->device = d;
    return c;
}
