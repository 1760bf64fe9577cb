/* Ranks over MPI: the calls of comm.h where the host moves the bytes.
 *
 * MPI moves bytes here and never adds: its sums depend on the algorithm that it chooses for a size. A reduction is
 * pieces to their owners, the owner's sum in rank order, and the sums back to all: the same bits on every rank, on
 * every run, whatever the library does. Reductions go in blocks of elements, so that the buffers made at the start do;
 * tokens go to their experts in mpi_tokens.c. */
#include "checks.h"

#ifdef HAVE_MPI
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/ints.h"
#include "kernels/base/small_floats.h"
#include "mpi_parts.h"
#include "watch.h"

enum { TAG = 1 };

void mpi_done(int code, const char *what) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(code, text, &length);
    FAIL("another rank may have ended: look for its message", "%s between the ranks: %s", what, text);
}

/* ---- to the host and back ---------------------------------------------------------------------------------------- */

void mpi_begin(Comm *c, const char *name) {
    for (int s = 0; s < STREAM_COUNT; s++) op_synchronize(c->device, (Stream)s);
    watch_transfer(name);
}

void mpi_end(void) {
    watch_transfer(NULL);
}

static char *bytes_at(Tensor t, int64_t element) {
    return (char *)t.data + (size_t)element * dtype_size(t.dtype);
}

void mpi_to_host(Comm *c, void *host, Tensor x, int64_t first, int64_t n, Stream s) {
    op_copy_out(c->device, host, bytes_at(x, first), (size_t)n * dtype_size(x.dtype), s);
    op_synchronize(c->device, s);
}

void mpi_to_device(Comm *c, Tensor y, int64_t first, const void *host, int64_t n, Stream s) {
    op_copy_in(c->device, bytes_at(y, first), host, (size_t)n * dtype_size(y.dtype), s);
    op_synchronize(c->device, s);
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

#define SUM(type)                                                                                                      \
    do {                                                                                                               \
        const type *part = (const type *)parts;                                                                        \
        type *sum = (type *)out;                                                                                       \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            type x = part[i];                                                                                          \
            for (int r = 1; r < size; r++) x += part[r * n + i];                                                       \
            sum[i] = x;                                                                                                \
        }                                                                                                              \
    } while (0)

static void sum_bf16(uint16_t *out, const uint16_t *part, int64_t n, int size) {
    for (int64_t i = 0; i < n; i++) {
        float x = 0;
        for (int r = 0; r < size; r++) x += float_from_bf16(part[r * n + i]);
        out[i] = bf16_from_float(x);
    }
}

/* out (n) = parts[0] + parts[1] + ..., each of n elements. */
static void sum_parts(void *out, const void *parts, int64_t n, int size, Dtype dtype) {
    switch (dtype) {
    case DTYPE_F32: SUM(real); return;
    case DTYPE_F64: SUM(double); return;
    case DTYPE_I32: SUM(int32_t); return;
    case DTYPE_BF16: sum_bf16((uint16_t *)out, (const uint16_t *)parts, n, size); return;
    case DTYPE_NONE:
    case DTYPE_E4M3:
    case DTYPE_E5M6:
    case DTYPE_COUNT: break;
    }
    CHECK(false, "%s is not summed over ranks", dtype_name(dtype));
}

void mpi_exchange_and_sum(Mpi *m, void *sum, int64_t n, Dtype dtype, Group g) {
    const int size = m->comm.mesh.size[g], bytes = (int)(n * (int64_t)dtype_size(dtype));
    mpi_done(MPI_Alltoall(m->out, bytes, MPI_BYTE, m->in, bytes, MPI_BYTE, m->group[g]), "a sum");
    sum_parts(sum, m->in, n, size, dtype);
}

/* Elements of a piece, when `size` of them share a buffer. */
static int64_t piece_of(int size, Dtype dtype) {
    const int64_t n = BUFFER_BYTES / ((int64_t)size * (int64_t)dtype_size(dtype));
    CHECK(n > 0, "%d ranks do not share a buffer of %d bytes", size, BUFFER_BYTES);
    return n;
}

static void mpi_all_reduce(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    Mpi *m = mpi_of(c);
    const int size = c->mesh.size[g];
    const int64_t n = tensor_numel(x), width = (int64_t)dtype_size(x.dtype), most = piece_of(size, x.dtype) * size;
    check_flat(y, x, n, n);
    mpi_begin(c, "all_reduce");
    for (int64_t at = 0; at < n; at += most) {
        const int64_t part = min_i64(most, n - at), piece = ceil_div(part, size);
        mpi_to_host(c, m->out, x, at, part, s);
        memset(m->out + part * width, 0, (size_t)((piece * size - part) * width));
        mpi_exchange_and_sum(m, m->block, piece, x.dtype, g);
        const int bytes = (int)(piece * width);
        mpi_done(MPI_Allgather(m->block, bytes, MPI_BYTE, m->in, bytes, MPI_BYTE, m->group[g]), "a sum");
        mpi_to_device(c, y, at, m->in, part, s);
    }
    mpi_end();
}

static void mpi_reduce_scatter(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    Mpi *m = mpi_of(c);
    const int size = c->mesh.size[g];
    const int64_t n = tensor_numel(y), width = (int64_t)dtype_size(x.dtype), most = piece_of(size, x.dtype);
    check_flat(y, x, n, n * size);
    mpi_begin(c, "reduce_scatter");
    for (int64_t at = 0; at < n; at += most) {
        const int64_t piece = min_i64(most, n - at);
        for (int r = 0; r < size; r++) mpi_to_host(c, m->out + r * piece * width, x, r * n + at, piece, s);
        mpi_exchange_and_sum(m, m->block, piece, x.dtype, g);
        mpi_to_device(c, y, at, m->block, piece, s);
    }
    mpi_end();
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

static void mpi_all_gather(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    Mpi *m = mpi_of(c);
    const int size = c->mesh.size[g];
    const int64_t n = tensor_numel(x), width = (int64_t)dtype_size(x.dtype), most = piece_of(size, x.dtype);
    check_flat(y, x, n * size, n);
    mpi_begin(c, "all_gather");
    for (int64_t at = 0; at < n; at += most) {
        const int64_t piece = min_i64(most, n - at);
        const int bytes = (int)(piece * width);
        mpi_to_host(c, m->block, x, at, piece, s);
        mpi_done(MPI_Allgather(m->block, bytes, MPI_BYTE, m->in, bytes, MPI_BYTE, m->group[g]), "a gather");
        for (int r = 0; r < size; r++) mpi_to_device(c, y, r * n + at, m->in + (int64_t)r * bytes, piece, s);
    }
    mpi_end();
}

typedef enum { BROADCAST, SEND, RECV } Move;

/* One tensor between this rank and `peer`, a buffer at a time. */
static void move(Comm *c, Tensor t, int peer, Group g, Stream s, Move move_kind, const char *name) {
    Mpi *m = mpi_of(c);
    const int64_t n = tensor_numel(t), most = piece_of(1, t.dtype);
    check_peer(c, t, peer, g, name);
    const bool is_source = move_kind == SEND || (move_kind == BROADCAST && c->mesh.rank_in[g] == peer);
    mpi_begin(c, name);
    for (int64_t at = 0; at < n; at += most) {
        const int64_t part = min_i64(most, n - at);
        const int bytes = (int)(part * (int64_t)dtype_size(t.dtype));
        if (is_source) mpi_to_host(c, m->block, t, at, part, s);
        if (move_kind == BROADCAST)
            mpi_done(MPI_Bcast(m->block, bytes, MPI_BYTE, peer, m->group[g]), name);
        else if (move_kind == SEND)
            mpi_done(MPI_Send(m->block, bytes, MPI_BYTE, peer, TAG, m->group[g]), name);
        else
            mpi_done(MPI_Recv(m->block, bytes, MPI_BYTE, peer, TAG, m->group[g], MPI_STATUS_IGNORE), name);
        if (!is_source) mpi_to_device(c, t, at, m->block, part, s);
    }
    mpi_end();
}

static void mpi_broadcast(Comm *c, Tensor y, int root, Group g, Stream s) {
    move(c, y, root, g, s, BROADCAST, "broadcast");
}

static void mpi_send(Comm *c, Tensor x, int to, Group g, Stream s) {
    move(c, x, to, g, s, SEND, "send");
}

static void mpi_recv(Comm *c, Tensor y, int from, Group g, Stream s) {
    move(c, y, from, g, s, RECV, "recv");
}

/* ---- the mesh ---------------------------------------------------------------------------------------------------- */

static void *mpi_alloc_symmetric(Comm *c, const Device *d, size_t bytes) {
    (void)c;
    return op_alloc(d, bytes);
}

static void mpi_free(Comm *c) {
    Mpi *m = mpi_of(c);
    for (int g = 0; g < GROUP_COUNT; g++)
        if (m->group[g] != MPI_COMM_NULL) MPI_Comm_free(&m->group[g]);
    op_host_release(m->comm.device, m->out);
    op_host_release(m->comm.device, m->in);
    op_host_release(m->comm.device, m->block);
    free(m->sent);
    free(m->received);
    free(m->n_out);
    free(m->slots);
    free(m);
}

static void *buffer(size_t bytes) {
    void *p = calloc(1, bytes);
    CHECK(p, "no memory for a buffer of %zu bytes", bytes);
    return p;
}

/* What copies to and from the device reach at full speed. */
static char *pinned(const Device *d) {
    char *p = (char *)op_host_alloc(d, BUFFER_BYTES);
    CHECK(p, "no memory for a buffer of %d bytes", BUFFER_BYTES);
    return p;
}

static void open_groups(Mpi *m) {
    const Mesh *mesh = &m->comm.mesh;
    for (int g = 0; g < GROUP_COUNT; g++) {
        const int number = mesh_group_number(mesh, (Group)g), color = number < 0 ? MPI_UNDEFINED : number;
        mpi_done(MPI_Comm_split(MPI_COMM_WORLD, color, mesh->rank_in[g], &m->group[g]), "cutting the mesh");
        if (number < 0) continue;
        int size, rank;
        MPI_Comm_size(m->group[g], &size);
        MPI_Comm_rank(m->group[g], &rank);
        CHECK(size == mesh->size[g] && rank == mesh->rank_in[g], "group %d: rank %d of %d is %d of %d", g, rank, size,
              mesh->rank_in[g], mesh->size[g]);
    }
}

Comm *comm_mpi(const Device *d, Mesh mesh) {
    const int n_ep = mesh.n_ep;
    Mpi *m = (Mpi *)buffer(sizeof *m);
    Comm *c = &m->comm;
    c->name = "mpi";
    c->all_reduce = mpi_all_reduce;
    c->reduce_scatter = mpi_reduce_scatter;
    c->all_gather = mpi_all_gather;
    c->broadcast = mpi_broadcast;
    c->send = mpi_send;
    c->recv = mpi_recv;
    c->dispatch = mpi_dispatch;
    c->combine = mpi_combine;
    c->alloc_symmetric = mpi_alloc_symmetric;
    c->free = mpi_free;
    c->device = d;
    c->needs_host = true;
    snprintf(c->about, sizeof c->about, "MPI%s",
             d->is_asynchronous ? " through pinned memory, without CUDA graphs" : "");
    c->mesh = mesh;
    if (n_ep == 1) { /* all experts are here: what would be sent lies where it would arrive */
        Comm *self = comm_self(d);
        c->dispatch = self->dispatch;
        c->combine = self->combine;
        self->free(self);
    }
    m->out = pinned(d);
    m->in = pinned(d);
    m->block = pinned(d);
    m->sent = (char *)buffer(FLAGS);
    m->received = (char *)buffer(FLAGS);
    m->n_out = (int *)buffer(4 * (size_t)n_ep * sizeof(int));
    m->at_out = m->n_out + n_ep;
    m->n_in = m->at_out + n_ep;
    m->at_in = m->n_in + n_ep;
    m->slots = (int32_t *)buffer(SLOTS_MAX * sizeof *m->slots);
    open_groups(m);
    return c;
}

#else
Comm *comm_mpi(const Device *d, Mesh mesh) {
    (void)d, (void)mesh;
    CHECK(false, "a mesh of ranks in a binary without MPI");
    return NULL;
}
#endif
