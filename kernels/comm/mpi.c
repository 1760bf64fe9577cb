/* Ranks over MPI: the calls of comm.h where the host moves the bytes.
 *
 * MPI moves bytes here and never adds: its sums depend on the algorithm that it chooses for a size. A reduction is
 * pieces to their owners, the owner's sum in rank order, and the sums back to all: the same bits on every rank, on
 * every run, whatever the library does. Exchanges of tokens know their sizes from the ids that travel in front of
 * the rows, and go in blocks of tokens, as reductions go in blocks of elements, so that the buffers made at the
 * start do. */
#include "checks.h"

#ifdef HAVE_MPI
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/ints.h"
#include "kernels/base/small_floats.h"
#include "watch.h"

enum {
    BUFFER_BYTES = 8 << 20,
    TOKEN_BYTES_MIN = 16, /* counted for a token, so that flags of all tokens of a block are few */
    FLAGS = BUFFER_BYTES / TOKEN_BYTES_MIN,
    SLOTS_MAX = 1 << 16,
    TAG = 1
};

typedef struct {
    Comm comm; /* first, so that a Comm is one of these */
    MPI_Comm group[GROUP_COUNT];
    char *out, *in, *block;             /* BUFFER_BYTES each: to send, received, one block of a tensor */
    char *sent, *received;              /* FLAGS each: (R, tokens of a block), 1 = the row travels */
    int *n_out, *at_out, *n_in, *at_in; /* bytes of an exchange by rank, and where they start */
    int32_t *slots;                     /* SLOTS_MAX: the host's copy of slot_of_expert */
} Mpi;

static Mpi *mpi_of(Comm *c) {
    return (Mpi *)c;
}

static void done(int code, const char *what) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(code, text, &length);
    FAIL("another rank may have ended: look for its message", "%s between the ranks: %s", what, text);
}

/* ---- to the host and back ---------------------------------------------------------------------------------------- */

/* Whatever was launched before may be what is sent: the host waits for all of it, and what it launches behind the call
 * finds all there. The wait for its own device is no wait for others. */
static void begin(Comm *c, const char *name) {
    for (int s = 0; s < STREAM_COUNT; s++) op_synchronize(c->device, (Stream)s);
    watch_transfer(name);
}

static void end(void) {
    watch_transfer(NULL);
}

static char *bytes_at(Tensor t, int64_t element) {
    return (char *)t.data + (size_t)element * dtype_size(t.dtype);
}

static void to_host(Comm *c, void *host, Tensor x, int64_t first, int64_t n, Stream s) {
    op_copy_out(c->device, host, bytes_at(x, first), (size_t)n * dtype_size(x.dtype), s);
    op_synchronize(c->device, s);
}

static void to_device(Comm *c, Tensor y, int64_t first, const void *host, int64_t n, Stream s) {
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

/* Rank r's piece of n elements of m->out comes to it from everybody and is summed into `sum`. */
static void exchange_and_sum(Mpi *m, void *sum, int64_t n, Dtype dtype, Group g) {
    const int size = m->comm.mesh.size[g], bytes = (int)(n * (int64_t)dtype_size(dtype));
    done(MPI_Alltoall(m->out, bytes, MPI_BYTE, m->in, bytes, MPI_BYTE, m->group[g]), "a sum");
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
    begin(c, "all_reduce");
    for (int64_t at = 0; at < n; at += most) {
        const int64_t part = min_i64(most, n - at), piece = ceil_div(part, size);
        to_host(c, m->out, x, at, part, s);
        memset(m->out + part * width, 0, (size_t)((piece * size - part) * width));
        exchange_and_sum(m, m->block, piece, x.dtype, g);
        const int bytes = (int)(piece * width);
        done(MPI_Allgather(m->block, bytes, MPI_BYTE, m->in, bytes, MPI_BYTE, m->group[g]), "a sum");
        to_device(c, y, at, m->in, part, s);
    }
    end();
}

static void mpi_reduce_scatter(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    Mpi *m = mpi_of(c);
    const int size = c->mesh.size[g];
    const int64_t n = tensor_numel(y), width = (int64_t)dtype_size(x.dtype), most = piece_of(size, x.dtype);
    check_flat(y, x, n, n * size);
    begin(c, "reduce_scatter");
    for (int64_t at = 0; at < n; at += most) {
        const int64_t piece = min_i64(most, n - at);
        for (int r = 0; r < size; r++) to_host(c, m->out + r * piece * width, x, r * n + at, piece, s);
        exchange_and_sum(m, m->block, piece, x.dtype, g);
        to_device(c, y, at, m->block, piece, s);
    }
    end();
}

/* ---- copies ------------------------------------------------------------------------------------------------------ */

static void mpi_all_gather(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    Mpi *m = mpi_of(c);
    const int size = c->mesh.size[g];
    const int64_t n = tensor_numel(x), width = (int64_t)dtype_size(x.dtype), most = piece_of(size, x.dtype);
    check_flat(y, x, n * size, n);
    begin(c, "all_gather");
    for (int64_t at = 0; at < n; at += most) {
        const int64_t piece = min_i64(most, n - at);
        const int bytes = (int)(piece * width);
        to_host(c, m->block, x, at, piece, s);
        done(MPI_Allgather(m->block, bytes, MPI_BYTE, m->in, bytes, MPI_BYTE, m->group[g]), "a gather");
        for (int r = 0; r < size; r++) to_device(c, y, r * n + at, m->in + (int64_t)r * bytes, piece, s);
    }
    end();
}

typedef enum { BROADCAST, SEND, RECV } Move;

/* One tensor between this rank and `peer`, a buffer at a time. */
static void move(Comm *c, Tensor t, int peer, Group g, Stream s, Move move_kind, const char *name) {
    Mpi *m = mpi_of(c);
    const int64_t n = tensor_numel(t), most = piece_of(1, t.dtype);
    check_peer(c, t, peer, g, name);
    const bool is_source = move_kind == SEND || (move_kind == BROADCAST && c->mesh.rank_in[g] == peer);
    begin(c, name);
    for (int64_t at = 0; at < n; at += most) {
        const int64_t part = min_i64(most, n - at);
        const int bytes = (int)(part * (int64_t)dtype_size(t.dtype));
        if (is_source) to_host(c, m->block, t, at, part, s);
        if (move_kind == BROADCAST)
            done(MPI_Bcast(m->block, bytes, MPI_BYTE, peer, m->group[g]), name);
        else if (move_kind == SEND)
            done(MPI_Send(m->block, bytes, MPI_BYTE, peer, TAG, m->group[g]), name);
        else
            done(MPI_Recv(m->block, bytes, MPI_BYTE, peer, TAG, m->group[g], MPI_STATUS_IGNORE), name);
        if (!is_source) to_device(c, t, at, m->block, part, s);
    }
    end();
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

/* ---- tokens to their experts and back ---------------------------------------------------------------------------- */

/* Tokens [first, first + n) of all ranks travel together, from and to rows place_of(r) .. of the (R*T) tensors. */
typedef struct {
    int R;
    int64_t T, D, K, n_local;
    int64_t row;            /* bytes of a token, without its scales */
    int64_t n_tiles;        /* scales of a token: 0 but for tiles */
    int64_t packed;         /* bytes of a token on its way, scales behind the row */
    int64_t first, n, most; /* this block; tokens of a whole one */
} Exchange;

static int64_t place_of(const Exchange *e, int r) {
    return r * e->T + e->first;
}

/* Of T own tokens; rows and plan_ids are the tensors that hold R*T of them. */
static Exchange exchange_of(const Comm *c, Tensor rows, DispatchPlan plan) {
    Exchange e;
    memset(&e, 0, sizeof e);
    check_tokens(c, rows, plan);
    const int64_t n_experts = tensor_numel(plan.slot_of_expert);
    e.R = c->mesh.n_ep;
    e.T = rows.shape[0] / e.R;
    e.D = rows.shape[1];
    e.K = plan.ids.shape[1];
    e.n_local = n_experts / e.R;
    e.row = e.D * (int64_t)dtype_size(rows.dtype);
    e.n_tiles = rows.scale ? ceil_div(e.D, SCALE_TILE) : 0;
    e.packed = e.row + e.n_tiles * (int64_t)sizeof(float);
    CHECK(n_experts <= SLOTS_MAX, "%lld experts", (long long)n_experts);
    const int64_t ids_and_weights = e.K * TOKEN_BYTES_MIN,
                  widest = e.packed > ids_and_weights ? e.packed : ids_and_weights;
    e.most = BUFFER_BYTES / (e.R * widest);
    CHECK(e.most > 0, "%lld bytes of a token for each of %d ranks: more than %d", (long long)widest, e.R, BUFFER_BYTES);
    return e;
}

/* The next block; false behind the last. */
static bool next_block(Exchange *e) {
    e->first += e->n;
    e->n = min_i64(e->most, e->T - e->first);
    return e->n > 0;
}

static void all_to_all(Mpi *m, const void *out, void *in, int64_t bytes) {
    done(MPI_Alltoall(out, (int)bytes, MPI_BYTE, in, (int)bytes, MPI_BYTE, m->group[GROUP_EXPERT]),
         "an exchange of tokens");
}

/* A block of this rank's ids or weights (n, K) to everybody: each rank gets what is meant for its experts, `absent`
 * elsewhere, and writes R blocks of it into y (R*T, K). */
#define SPLIT(type, y, own, absent)                                                                                    \
    do {                                                                                                               \
        const type *value = (const type *)(own);                                                                       \
        type *out = (type *)m->out;                                                                                    \
        for (int r = 0; r < e->R; r++)                                                                                 \
            for (int64_t i = 0; i < n; i++)                                                                            \
                out[r * n + i] = ids[i] >= 0 && m->slots[ids[i]] / e->n_local == r ? value[i] : (absent);              \
        all_to_all(m, m->out, m->in, n *(int64_t)sizeof(type));                                                        \
        for (int r = 0; r < e->R; r++)                                                                                 \
            to_device(c, y, place_of(e, r) * e->K, m->in + r * n * (int64_t)sizeof(type), n, s);                       \
    } while (0)

static void send_plan(Comm *c, const Exchange *e, DispatchPlan plan, Tensor ids_of, Tensor weights, Stream s) {
    Mpi *m = mpi_of(c);
    const int64_t n = e->n * e->K;
    real *own_weights = (real *)m->block;
    int32_t *ids = (int32_t *)(own_weights + n);
    to_host(c, own_weights, weights, e->first * e->K, n, s);
    to_host(c, ids, ids_of, e->first * e->K, n, s);
    SPLIT(real, plan.weights, own_weights, 0);
    SPLIT(int32_t, plan.ids, ids, -1);
}

/* Tokens of source r that have an expert here. */
static void flags_of_plan(Comm *c, const Exchange *e, char *flags, Tensor plan_ids, Stream s) {
    const int32_t *ids = (const int32_t *)mpi_of(c)->block;
    memset(flags, 0, (size_t)(e->R * e->n));
    for (int r = 0; r < e->R; r++) {
        to_host(c, mpi_of(c)->block, plan_ids, place_of(e, r) * e->K, e->n * e->K, s);
        for (int64_t i = 0; i < e->n * e->K; i++)
            if (ids[i] >= 0) flags[r * e->n + i / e->K] = 1;
    }
}

/* Own tokens that have an expert on rank r. */
static void flags_of_ids(Comm *c, const Exchange *e, char *flags, Tensor own_ids, Stream s) {
    Mpi *m = mpi_of(c);
    const int32_t *ids = (const int32_t *)m->block;
    memset(flags, 0, (size_t)(e->R * e->n));
    to_host(c, m->block, own_ids, e->first * e->K, e->n * e->K, s);
    for (int64_t i = 0; i < e->n * e->K; i++)
        if (ids[i] >= 0) flags[m->slots[ids[i]] / e->n_local * e->n + i / e->K] = 1;
}

/* Bytes of the flagged rows by rank, and where they start. */
static void count_rows(const Exchange *e, const char *flags, int *n, int *at) {
    int sum = 0;
    for (int r = 0; r < e->R; r++) {
        int n_rows = 0;
        for (int64_t t = 0; t < e->n; t++) n_rows += flags[r * e->n + t];
        at[r] = sum;
        n[r] = n_rows * (int)e->packed;
        sum += n[r];
    }
}

/* Scales of column i of tiles in m->block: behind the rows, laid out as in the tensor. */
static float *block_scales(const Mpi *m, const Exchange *e, int64_t i) {
    return (float *)(m->block + round_up(e->n * e->row, (int64_t)sizeof(float))) + i * e->n;
}

/* Rows [first, first + n) of x, and their scales, to m->block. */
static void rows_to_host(Comm *c, const Exchange *e, Tensor x, int64_t first, Stream s) {
    const Mpi *m = mpi_of(c);
    for (int64_t i = 0; i < e->n_tiles; i++)
        op_copy_out(c->device, block_scales(m, e, i), x.scale + i * x.scale_ld + first, (size_t)e->n * sizeof(float),
                    s);
    to_host(c, m->block, x, first * e->D, e->n * e->D, s);
}

static void rows_to_device(Comm *c, const Exchange *e, Tensor y, int64_t first, Stream s) {
    const Mpi *m = mpi_of(c);
    for (int64_t i = 0; i < e->n_tiles; i++)
        op_copy_in(c->device, y.scale + i * y.scale_ld + first, block_scales(m, e, i), (size_t)e->n * sizeof(float), s);
    to_device(c, y, first * e->D, m->block, e->n * e->D, s);
}

/* The flagged rows of m->block, one behind the other, the scales of each behind it. */
static void pack(char *to, const Mpi *m, const Exchange *e, const char *flags) {
    for (int64_t t = 0; t < e->n; t++) {
        if (!flags[t]) continue;
        memcpy(to, m->block + t * e->row, (size_t)e->row);
        for (int64_t i = 0; i < e->n_tiles; i++)
            memcpy(to + e->row + i * (int64_t)sizeof(float), block_scales(m, e, i) + t, sizeof(float));
        to += e->packed;
    }
}

/* The way back: rows without a flag are zero. */
static void unpack(const Mpi *m, const char *from, const Exchange *e, const char *flags) {
    memset(m->block, 0, (size_t)((const char *)block_scales(m, e, e->n_tiles) - m->block));
    for (int64_t t = 0; t < e->n; t++) {
        if (!flags[t]) continue;
        memcpy(m->block + t * e->row, from, (size_t)e->row);
        for (int64_t i = 0; i < e->n_tiles; i++)
            memcpy(block_scales(m, e, i) + t, from + e->row + i * (int64_t)sizeof(float), sizeof(float));
        from += e->packed;
    }
}

/* What was packed goes to its ranks; what comes lies in the blocks of y (R*T, D). */
static void exchange_rows(Comm *c, const Exchange *e, Tensor y, Stream s) {
    Mpi *m = mpi_of(c);
    count_rows(e, m->received, m->n_in, m->at_in);
    done(MPI_Alltoallv(m->out, m->n_out, m->at_out, MPI_BYTE, m->in, m->n_in, m->at_in, MPI_BYTE,
                       m->group[GROUP_EXPERT]),
         "an exchange of tokens");
    for (int r = 0; r < e->R; r++) {
        unpack(m, m->in + m->at_in[r], e, m->received + r * e->n);
        rows_to_device(c, e, y, place_of(e, r), s);
    }
}

static void mpi_dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights, Stream s) {
    Mpi *m = mpi_of(c);
    Exchange e = exchange_of(c, received, plan);
    check_sent(received, x, e.R * e.T * e.D, e.T * e.D);
    begin(c, "dispatch");
    to_host(c, m->slots, plan.slot_of_expert, 0, e.n_local * e.R, s);
    while (next_block(&e)) {
        if (!tensor_is_none(weights)) send_plan(c, &e, plan, ids, weights, s);
        flags_of_ids(c, &e, m->sent, ids, s);
        flags_of_plan(c, &e, m->received, plan.ids, s);
        count_rows(&e, m->sent, m->n_out, m->at_out);
        rows_to_host(c, &e, x, e.first, s);
        for (int r = 0; r < e.R; r++) pack(m->out + m->at_out[r], m, &e, m->sent + r * e.n);
        exchange_rows(c, &e, received, s);
    }
    end();
}

/* dw (T, K) of this block = sum over the ranks of what they have for it. */
static void combine_weights(Comm *c, const Exchange *e, Tensor dw, Tensor dweights, Stream s) {
    Mpi *m = mpi_of(c);
    const int64_t n = e->n * e->K, bytes = n * (int64_t)sizeof(real);
    for (int r = 0; r < e->R; r++) to_host(c, m->out + r * bytes, dweights, place_of(e, r) * e->K, n, s);
    exchange_and_sum(m, m->block, n, DTYPE_F32, GROUP_EXPERT);
    to_device(c, dw, e->first * e->K, m->block, n, s);
}

static void mpi_combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s) {
    Mpi *m = mpi_of(c);
    Exchange e = exchange_of(c, rows, plan);
    check_flat(y, rows, e.R * e.T * e.D, e.R * e.T * e.D);
    begin(c, "combine");
    while (next_block(&e)) {
        flags_of_plan(c, &e, m->sent, plan.ids, s);
        all_to_all(m, m->sent, m->received, e.n);
        count_rows(&e, m->sent, m->n_out, m->at_out);
        for (int r = 0; r < e.R; r++) {
            rows_to_host(c, &e, rows, place_of(&e, r), s);
            pack(m->out + m->at_out[r], m, &e, m->sent + r * e.n);
        }
        exchange_rows(c, &e, y, s);
        if (!tensor_is_none(dweights)) combine_weights(c, &e, dw, dweights, s);
    }
    end();
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
        done(MPI_Comm_split(MPI_COMM_WORLD, color, mesh->rank_in[g], &m->group[g]), "cutting the mesh");
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
