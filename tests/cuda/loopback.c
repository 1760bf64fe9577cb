/* See loopback.h. */
#include "loopback.h"

#include <stdlib.h>

#include "kernels/base/check.h"
#include "kernels/comm/a2a.h"

typedef struct {
    Comm comm;     /* first, so that a Comm is one of these */
    void *mailbox; /* what was sent last */
} Loopback;

/* The mailbox as a tensor of this kind. */
static Tensor mailbox(Comm *c, Tensor x) {
    CHECK(tensor_is_contiguous(x) && tensor_bytes(x) <= LOOPBACK_BYTES, "a message of %zu bytes", tensor_bytes(x));
    x.data = ((Loopback *)c)->mailbox;
    return x;
}

static void copy(const Comm *c, Tensor y, Tensor x, Stream s) {
    if (y.data && x.data && y.data != x.data) op_copy(c->device, y, x, s);
}

static void loopback_all_reduce(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    (void)g;
    copy(c, y, x, s);
}

static void loopback_send(Comm *c, Tensor x, int to, Group g, Stream s) {
    (void)to, (void)g;
    copy(c, mailbox(c, x), x, s);
}

static void loopback_recv(Comm *c, Tensor y, int from, Group g, Stream s) {
    (void)from, (void)g;
    copy(c, y, mailbox(c, y), s);
}

/* Both halves of y = x. */
static void twice(const Comm *c, Tensor y, Tensor x, Stream s) {
    for (int r = 0; r < 2 && x.data; r++) copy(c, tensor_rows(y, r * x.shape[0], x.shape[0]), x, s);
}

static void loopback_dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights,
                              Stream s) {
    if (c->mesh.n_ep == 1) return; /* what is sent lies where it arrives */
    twice(c, received, x, s);
    if (tensor_is_none(weights)) return;
    twice(c, plan.ids, ids, s);
    twice(c, plan.weights, weights, s);
    a2a_keep_own(plan.ids, plan.weights, plan.slot_of_expert, c->mesh.ep, c->mesh.n_ep, s);
}

static void loopback_combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s) {
    if (c->mesh.n_ep == 1) return;
    a2a_zero_absent(rows, plan.ids, s);
    for (int r = 0; r < 2; r++) copy(c, tensor_plane(y, r), tensor_rows(rows, r * y.shape[1], y.shape[1]), s);
    if (!tensor_is_none(dw)) copy(c, dw, tensor_rows(dweights, 0, dw.shape[0]), s);
}

static void *loopback_alloc(Comm *c, const Device *d, size_t bytes) {
    (void)c;
    return op_alloc(d, bytes);
}

static void loopback_free(Comm *c) {
    op_release(c->device, ((Loopback *)c)->mailbox);
    free(c);
}

Comm *comm_loopback(const Device *d, Mesh mesh) {
    Loopback *l = (Loopback *)calloc(1, sizeof *l);
    CHECK(l && mesh.world == 2, "no memory for a Comm, or a mesh of %d ranks", mesh.world);
    Comm *c = &l->comm;
    c->name = "loopback";
    c->all_reduce = loopback_all_reduce;
    c->send = loopback_send;
    c->recv = loopback_recv;
    c->dispatch = loopback_dispatch;
    c->combine = loopback_combine;
    c->alloc_symmetric = loopback_alloc;
    c->free = loopback_free;
    c->device = d;
    c->mesh = mesh;
    l->mailbox = op_alloc(d, LOOPBACK_BYTES);
    CHECK(l->mailbox, "no device memory");
    return c;
}
