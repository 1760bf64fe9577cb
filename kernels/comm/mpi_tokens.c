/* Tokens to their experts and back, over MPI: dispatch and combine of comm.h.
 *
 * An exchange knows its sizes from the ids that travel in front of the rows, and goes in blocks of tokens, so that the
 * buffers made at the start do. */
#include "checks.h"

#ifdef HAVE_MPI
#include <string.h>

#include "kernels/base/ints.h"
#include "mpi_parts.h"

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
    mpi_done(MPI_Alltoall(out, (int)bytes, MPI_BYTE, in, (int)bytes, MPI_BYTE, m->group[GROUP_EXPERT]),
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
            mpi_to_device(c, y, place_of(e, r) * e->K, m->in + r * n * (int64_t)sizeof(type), n, s);                   \
    } while (0)

static void send_plan(Comm *c, const Exchange *e, DispatchPlan plan, Tensor ids_of, Tensor weights, Stream s) {
    Mpi *m = mpi_of(c);
    const int64_t n = e->n * e->K;
    real *own_weights = (real *)m->block;
    int32_t *ids = (int32_t *)(own_weights + n);
    mpi_to_host(c, own_weights, weights, e->first * e->K, n, s);
    mpi_to_host(c, ids, ids_of, e->first * e->K, n, s);
    SPLIT(real, plan.weights, own_weights, 0);
    SPLIT(int32_t, plan.ids, ids, -1);
}

/* Tokens of source r that have an expert here. */
static void flags_of_plan(Comm *c, const Exchange *e, char *flags, Tensor plan_ids, Stream s) {
    const int32_t *ids = (const int32_t *)mpi_of(c)->block;
    memset(flags, 0, (size_t)(e->R * e->n));
    for (int r = 0; r < e->R; r++) {
        mpi_to_host(c, mpi_of(c)->block, plan_ids, place_of(e, r) * e->K, e->n * e->K, s);
        for (int64_t i = 0; i < e->n * e->K; i++)
            if (ids[i] >= 0) flags[r * e->n + i / e->K] = 1;
    }
}

/* Own tokens that have an expert on rank r. */
static void flags_of_ids(Comm *c, const Exchange *e, char *flags, Tensor own_ids, Stream s) {
    Mpi *m = mpi_of(c);
    const int32_t *ids = (const int32_t *)m->block;
    memset(flags, 0, (size_t)(e->R * e->n));
    mpi_to_host(c, m->block, own_ids, e->first * e->K, e->n * e->K, s);
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
    mpi_to_host(c, m->block, x, first * e->D, e->n * e->D, s);
}

static void rows_to_device(Comm *c, const Exchange *e, Tensor y, int64_t first, Stream s) {
    const Mpi *m = mpi_of(c);
    for (int64_t i = 0; i < e->n_tiles; i++)
        op_copy_in(c->device, y.scale + i * y.scale_ld + first, block_scales(m, e, i), (size_t)e->n * sizeof(float), s);
    mpi_to_device(c, y, first * e->D, m->block, e->n * e->D, s);
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
    mpi_done(MPI_Alltoallv(m->out, m->n_out, m->at_out, MPI_BYTE, m->in, m->n_in, m->at_in, MPI_BYTE,
                           m->group[GROUP_EXPERT]),
             "an exchange of tokens");
    for (int r = 0; r < e->R; r++) {
        unpack(m, m->in + m->at_in[r], e, m->received + r * e->n);
        rows_to_device(c, e, y, place_of(e, r), s);
    }
}

void mpi_dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights, Stream s) {
    Mpi *m = mpi_of(c);
    Exchange e = exchange_of(c, received, plan);
    check_sent(received, x, e.R * e.T * e.D, e.T * e.D);
    mpi_begin(c, "dispatch");
    mpi_to_host(c, m->slots, plan.slot_of_expert, 0, e.n_local * e.R, s);
    while (next_block(&e)) {
        if (!tensor_is_none(weights)) send_plan(c, &e, plan, ids, weights, s);
        flags_of_ids(c, &e, m->sent, ids, s);
        flags_of_plan(c, &e, m->received, plan.ids, s);
        count_rows(&e, m->sent, m->n_out, m->at_out);
        rows_to_host(c, &e, x, e.first, s);
        for (int r = 0; r < e.R; r++) pack(m->out + m->at_out[r], m, &e, m->sent + r * e.n);
        exchange_rows(c, &e, received, s);
    }
    mpi_end();
}

/* dw (T, K) of this block = sum over the ranks of what they have for it. */
static void combine_weights(Comm *c, const Exchange *e, Tensor dw, Tensor dweights, Stream s) {
    Mpi *m = mpi_of(c);
    const int64_t n = e->n * e->K, bytes = n * (int64_t)sizeof(real);
    for (int r = 0; r < e->R; r++) mpi_to_host(c, m->out + r * bytes, dweights, place_of(e, r) * e->K, n, s);
    mpi_exchange_and_sum(m, m->block, n, DTYPE_F32, GROUP_EXPERT);
    mpi_to_device(c, dw, e->first * e->K, m->block, n, s);
}

void mpi_combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s) {
    Mpi *m = mpi_of(c);
    Exchange e = exchange_of(c, rows, plan);
    check_flat(y, rows, e.R * e.T * e.D, e.R * e.T * e.D);
    mpi_begin(c, "combine");
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
    mpi_end();
}
#endif
