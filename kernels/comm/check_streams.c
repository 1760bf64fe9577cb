/* See check_streams.h. */
#include "check_streams.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"

/* The last write to some bytes, or a stream's last read of them. */
typedef struct {
    const char *op;
    Stream stream;
    int64_t time; /* of its stream */
    uintptr_t start, end;
    bool is_write;
} Access;

typedef struct {
    int64_t seen[STREAM_COUNT];
} Clock;

typedef struct {
    Comm comm; /* first, so that a Comm is one of these */
    Comm *inner;
    Device *device;
    bool is_inside; /* of a transfer, whose own copies and waits are its affair */
    Clock stream[STREAM_COUNT], event[EVENTS_MAX];
    Access *access;
    int64_t n, room;
} Checker;

static const char *const stream_names[STREAM_COUNT] = {"compute", "aux", "comm", "copy"};

static Checker *checker_of(Comm *c) {
    return (Checker *)c;
}

/* ---- clocks ------------------------------------------------------------------------------------------------------ */

static void see(Clock *later, const Clock *earlier) {
    for (int s = 0; s < STREAM_COUNT; s++)
        if (earlier->seen[s] > later->seen[s]) later->seen[s] = earlier->seen[s];
}

/* The host has waited: what it launches from now on comes later, on any stream. */
static void all_see(Checker *k, const Clock *earlier) {
    for (int s = 0; s < STREAM_COUNT; s++) see(&k->stream[s], earlier);
}

/* ---- accesses ---------------------------------------------------------------------------------------------------- */

static void add(Checker *k, Access a) {
    if (k->n == k->room) {
        k->room = 2 * k->room + 1024;
        k->access = (Access *)realloc(k->access, (size_t)k->room * sizeof *k->access);
        CHECK(k->access, "no memory for %lld accesses", (long long)k->room);
    }
    k->access[k->n++] = a;
}

/* Is the earlier one told by the later: all its bytes are written anew, or read again on its stream? */
static bool is_covered(const Access *earlier, const Access *later) {
    if (earlier->start < later->start || earlier->end > later->end) return false;
    return later->is_write || (!earlier->is_write && earlier->stream == later->stream);
}

static void access_bytes(Checker *k, Access a) {
    int64_t kept = 0;
    for (int64_t i = 0; i < k->n; i++) {
        const Access *earlier = &k->access[i];
        if (earlier->start < a.end && a.start < earlier->end) {
            CHECK((!earlier->is_write && !a.is_write) || k->stream[a.stream].seen[earlier->stream] >= earlier->time,
                  "a race: %s on the %s stream %s what %s on the %s stream %s, and no event orders them", a.op,
                  stream_names[a.stream], a.is_write ? "writes" : "reads", earlier->op, stream_names[earlier->stream],
                  earlier->is_write ? "writes" : "reads");
            if (is_covered(earlier, &a)) continue;
        }
        k->access[kept++] = k->access[i];
    }
    k->n = kept;
    add(k, a);
}

/* From its first byte to its last: of a strided view also what lies between its rows. */
static void access_tensor(Checker *k, const char *op, Stream s, Tensor t, bool is_write) {
    if (!t.data || tensor_numel(t) == 0) return;
    const int64_t rows = tensor_numel(t) / t.shape[t.ndim - 1];
    const uintptr_t start = (uintptr_t)t.data;
    const size_t skipped = (size_t)((rows - 1) * (t.ld - t.shape[t.ndim - 1])) * dtype_size(t.dtype);
    const size_t bytes = tensor_is_contiguous(t) ? tensor_bytes(t) : tensor_bytes(t) + skipped;
    access_bytes(k, (Access){op, s, k->stream[s].seen[s], start, start + bytes, is_write});
    if (!t.scale) return;
    const uintptr_t scale = (uintptr_t)t.scale;
    access_bytes(
        k, (Access){op, s, k->stream[s].seen[s], scale, scale + (size_t)tensor_n_scales(t) * sizeof(float), is_write});
}

static void access_all(Checker *k, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                       int n_reads) {
    k->stream[s].seen[s]++;
    for (int i = 0; i < n_reads; i++) access_tensor(k, op, s, reads[i], false);
    for (int i = 0; i < n_writes; i++) access_tensor(k, op, s, writes[i], true);
}

/* Events come with their number where others have their writes. (kernels/ops.c) */
static void watch_op(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                     int n_reads) {
    Checker *k = (Checker *)watcher;
    if (k->is_inside) return;
    if (strcmp(op, "event_record") == 0)
        k->event[n_writes] = k->stream[s];
    else if (strcmp(op, "event_wait") == 0)
        see(&k->stream[s], &k->event[n_writes]);
    else if (strcmp(op, "event_synchronize") == 0)
        all_see(k, &k->event[n_writes]);
    else if (strcmp(op, "synchronize") == 0)
        all_see(k, &k->stream[s]);
    else
        access_all(k, op, s, writes, n_writes, reads, n_reads);
}

/* ---- transfers --------------------------------------------------------------------------------------------------- */

#define N_OF(tensors) (int)(sizeof(tensors) / sizeof(Tensor))

static void begin(Checker *k, const char *name, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                  int n_reads) {
    k->inner->is_ordered_by_caller = k->comm.is_ordered_by_caller;
    if (!k->comm.is_ordered_by_caller) see(&k->stream[s], &k->stream[STREAM_COMPUTE]);
    access_all(k, name, s, writes, n_writes, reads, n_reads);
    k->is_inside = true;
}

static void end(Checker *k, Stream s) {
    k->is_inside = false;
    if (!k->comm.is_ordered_by_caller) see(&k->stream[STREAM_COMPUTE], &k->stream[s]);
}

#define FORWARD(name, s, writes, reads, call)                                                                          \
    do {                                                                                                               \
        Checker *k = checker_of(c);                                                                                    \
        begin(k, name, s, writes, N_OF(writes), reads, N_OF(reads));                                                   \
        k->inner->call;                                                                                                \
        end(k, s);                                                                                                     \
    } while (0)

static void checked_all_reduce(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    const Tensor writes[] = {y}, reads[] = {x};
    FORWARD("all_reduce", s, writes, reads, all_reduce(k->inner, y, x, g, s));
}

static void checked_reduce_scatter(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    const Tensor writes[] = {y}, reads[] = {x};
    FORWARD("reduce_scatter", s, writes, reads, reduce_scatter(k->inner, y, x, g, s));
}

static void checked_all_gather(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    const Tensor writes[] = {y}, reads[] = {x};
    FORWARD("all_gather", s, writes, reads, all_gather(k->inner, y, x, g, s));
}

static void checked_broadcast(Comm *c, Tensor y, int root, Group g, Stream s) {
    const Tensor writes[] = {y}, reads[] = {tensor_none()};
    FORWARD("broadcast", s, writes, reads, broadcast(k->inner, y, root, g, s));
}

static void checked_send(Comm *c, Tensor x, int to, Group g, Stream s) {
    const Tensor writes[] = {tensor_none()}, reads[] = {x};
    FORWARD("send", s, writes, reads, send(k->inner, x, to, g, s));
}

static void checked_recv(Comm *c, Tensor y, int from, Group g, Stream s) {
    const Tensor writes[] = {y}, reads[] = {tensor_none()};
    FORWARD("recv", s, writes, reads, recv(k->inner, y, from, g, s));
}

/* On one expert rank what is sent lies where it arrives, and nothing is done. */
static void checked_dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights,
                             Stream s) {
    const bool makes_plan = !tensor_is_none(weights), travels = c->mesh.n_ep > 1;
    const Tensor none = tensor_none();
    const Tensor writes[] = {travels ? received : none, travels && makes_plan ? plan.ids : none,
                             travels && makes_plan ? plan.weights : none};
    const Tensor reads[] = {travels ? x : none, travels ? ids : none, travels ? weights : none,
                            travels ? plan.slot_of_expert : none, travels && !makes_plan ? plan.ids : none};
    FORWARD("dispatch", s, writes, reads, dispatch(k->inner, received, plan, x, ids, weights, s));
}

static void checked_combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s) {
    const bool travels = c->mesh.n_ep > 1;
    const Tensor none = tensor_none();
    const Tensor writes[] = {travels ? y : none, travels ? dw : none};
    const Tensor reads[] = {travels ? rows : none, travels ? dweights : none, travels ? plan.ids : none};
    FORWARD("combine", s, writes, reads, combine(k->inner, y, dw, rows, dweights, plan, s));
}

static void *checked_alloc_symmetric(Comm *c, const Device *d, size_t bytes) {
    Comm *inner = checker_of(c)->inner;
    return inner->alloc_symmetric(inner, d, bytes);
}

static void checked_free(Comm *c) {
    Checker *k = checker_of(c);
    k->device->watch = NULL;
    k->inner->free(k->inner);
    free(k->access);
    free(k);
}

Comm *check_streams(Device *d, Comm *inner) {
    Checker *k = (Checker *)calloc(1, sizeof *k);
    CHECK(k && !d->watch, "no memory for the clocks of the streams, or they are watched already");
    k->comm = *inner;
    k->comm.all_reduce = checked_all_reduce;
    k->comm.reduce_scatter = checked_reduce_scatter;
    k->comm.all_gather = checked_all_gather;
    k->comm.broadcast = checked_broadcast;
    k->comm.send = checked_send;
    k->comm.recv = checked_recv;
    k->comm.dispatch = checked_dispatch;
    k->comm.combine = checked_combine;
    k->comm.alloc_symmetric = checked_alloc_symmetric;
    k->comm.free = checked_free;
    k->inner = inner;
    k->device = d;
    d->watch = watch_op;
    d->watcher = k;
    return &k->comm;
}
