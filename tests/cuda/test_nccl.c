/* NCCL with one rank: every call gives the bits of comm_self, in the order of the streams, and from graphs too. The
 * kernels of an exchange are held against loops for ranks that are not here. */
#include <string.h>

#include "kernels/comm/a2a.h"
#include "kernels/comm/comm.h"
#include "tests/cuda/cuda_test.h"

enum { TIMEOUT_S = 60, LARGE = 3 << 20 }; /* more than is summed in rank order */

/* Both over the same device; NULL in a build without NCCL. */
typedef struct {
    Comm *nccl, *self;
} Pair;

static bool open_pair(Pair *p) {
    char version[64];
    if (!comm_nccl_version(version, sizeof version)[0]) return false;
    p->nccl = comm_nccl(GPU, mesh_make(job_rank(), job_world(), 1, 1), TIMEOUT_S);
    p->self = comm_self(GPU);
    EXPECT(strcmp(p->nccl->name, "nccl") == 0 && strstr(p->nccl->about, "NVLS off"), "%s", p->nccl->about);
    EXPECT(!p->nccl->needs_host && p->nccl->device_bytes >= 0, "%lld bytes", (long long)p->nccl->device_bytes);
    return true;
}

static void close_pair(Pair *p) {
    d_free_all();
    t_free_all();
    p->nccl->free(p->nccl);
    p->self->free(p->self);
}

TEST(nccl_collectives_have_the_bits_of_self) {
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    static const int64_t sizes[] = {1, 77, LARGE};
    Pair p;
    if (!open_pair(&p)) return;
    for (int i = 0; i < 9; i++) {
        const int64_t n = sizes[i % 3];
        Tensor host = t_normal(T1(dtypes[i / 3], n), 1000, (uint64_t)i), x = d_copy(host);
        for (int call = 0; call < 3; call++) {
            Tensor y[2];
            for (int k = 0; k < 2; k++) {
                Comm *c = k ? p.self : p.nccl;
                void (*const calls[])(Comm *, Tensor, Tensor, Group, Stream) = {c->all_reduce, c->reduce_scatter,
                                                                                c->all_gather};
                y[k] = d_copy(t_poison(T1(dtypes[i / 3], n)));
                calls[call](c, y[k], x, (Group)(i % GROUP_COUNT), STREAM_COMM);
                op_synchronize(GPU, STREAM_COMM); /* self orders nothing */
            }
            EXPECT(t_same_bits(d_read(y[0]), d_read(y[1])), "call %d, %s, %lld", call, dtype_name(dtypes[i / 3]),
                   (long long)n);
            void (*const in_place[])(Comm *, Tensor, Tensor, Group,
                                     Stream) = {p.nccl->all_reduce, p.nccl->reduce_scatter, p.nccl->all_gather};
            in_place[call](p.nccl, x, x, GROUP_DATA, STREAM_COMM);
            EXPECT(t_same_bits(d_read(x), host), "call %d in place", call);
        }
        p.nccl->broadcast(p.nccl, x, 0, GROUP_WORLD, STREAM_COMM);
        EXPECT(t_same_bits(d_read(x), host), "a broadcast to nobody");
        d_free_all();
        t_free_all();
    }
    close_pair(&p);
}

/* f64 is what losses and norms are: T1 knows no such tensor, so bytes are moved. */
TEST(nccl_sums_f64) {
    double values[6] = {0.1, -0.2, 1e300, 3, 1e-300, 0}, left[6] = {0};
    Pair p;
    if (!open_pair(&p)) return;
    Tensor x = tensor_1d(op_alloc(GPU, sizeof values), DTYPE_F64, 6);
    op_copy_in(GPU, x.data, values, sizeof values, STREAM_COMPUTE);
    p.nccl->all_reduce(p.nccl, x, x, GROUP_DATA, STREAM_COMM);
    op_copy_out(GPU, left, x.data, sizeof left, STREAM_COMPUTE);
    op_synchronize(GPU, STREAM_COMPUTE);
    EXPECT(memcmp(values, left, sizeof left) == 0, "%g became %g", values[0], left[0]);
    op_release(GPU, x.data);
    close_pair(&p);
}

/* Token 3 has no expert at all: what it holds where nobody computes is nothing. */
TEST(nccl_dispatch_and_combine_have_the_bits_of_self) {
    enum { T = 37, D = 24, K = 3, E = 8, LOST = 3 };
    Pair p;
    if (!open_pair(&p)) return;
    for (int i = 0; i < 2; i++) {
        const Dtype act = act_dtypes[i];
        Tensor rows = t_normal(T2(act, T, D), 1, 1), ids = T2(DTYPE_I32, T, K),
               weights = t_normal(T2(DTYPE_F32, T, K), 1, 2);
        Tensor slots = T1(DTYPE_I32, E);
        for (int64_t e = 0; e < E; e++) t_set(slots, e, (double)(E - 1 - e));
        for (int64_t at = 0; at < T * K; at++) {
            const bool is_used = at / K != LOST && at % 7 != 0;
            t_set(ids, at, is_used ? (double)((at * 5) % E) : -1);
            if (!is_used) t_set(weights, at, 0);
        }
        for (int64_t j = 0; j < D; j++) t_set(rows, LOST * D + j, 0);
        Tensor x = d_copy(rows), own_ids = d_copy(ids), own_weights = d_copy(weights), on_device = d_copy(slots);
        Tensor received[2], plane[2], dw[2];
        DispatchPlan plan[2];
        for (int k = 0; k < 2; k++) {
            Comm *c = k ? p.self : p.nccl;
            received[k] = d_copy(t_poison(T2(act, T, D)));
            plane[k] = d_copy(t_poison(T3(act, 1, T, D)));
            dw[k] = d_copy(t_poison(T2(DTYPE_F32, T, K)));
            plan[k] =
                (DispatchPlan){d_copy(t_poison(T2(DTYPE_I32, T, K))), d_copy(t_poison(T2(DTYPE_F32, T, K))), on_device};
            c->dispatch(c, received[k], plan[k], x, own_ids, own_weights, STREAM_COMM);
            op_synchronize(GPU, STREAM_COMM);
            c->combine(c, plane[k], tensor_none(), received[k], tensor_none(), plan[k], STREAM_COMM);
            op_synchronize(GPU, STREAM_COMM);
            EXPECT(t_same_bits(tensor_plane(d_read(plane[k]), 0), rows), "forward of %s", c->name);
            c->combine(c, plane[k], dw[k], received[k], plan[k].weights, plan[k], STREAM_COMM);
            op_synchronize(GPU, STREAM_COMM);
        }
        EXPECT(t_same_bits(d_read(received[0]), d_read(received[1])), "received");
        EXPECT(t_same_bits(d_read(plan[0].ids), d_read(plan[1].ids)), "ids of the plan");
        EXPECT(t_same_bits(d_read(plan[0].weights), d_read(plan[1].weights)), "weights of the plan");
        EXPECT(t_same_bits(d_read(plane[0]), d_read(plane[1])), "combined");
        EXPECT(t_same_bits(d_read(dw[0]), d_read(dw[1])), "gradients of the weights");
        /* Where it would arrive already, and backward's rows by the plan that stands. */
        p.nccl->dispatch(p.nccl, x, plan[0], x, own_ids, tensor_none(), STREAM_COMM);
        EXPECT(t_same_bits(d_read(x), rows), "in place");
        d_free_all();
        t_free_all();
    }
    close_pair(&p);
}

/* A slow copy on STREAM_COMPUTE, a sum of what it leaves, a copy of the sum: nobody waits but the streams. What is read
 * back (d_read) comes by STREAM_COMPUTE. */
static void chain(Comm *c, Tensor to, Tensor sum, Tensor first, Tensor from) {
    op_copy(GPU, first, from, STREAM_COMPUTE);
    c->all_reduce(c, sum, first, GROUP_DATA, STREAM_COMM);
    op_copy(GPU, to, sum, STREAM_COMPUTE);
}

TEST(nccl_runs_between_the_mathematics) {
    enum { N = 1 << 24, ROUNDS = 4 };
    Pair p;
    if (!open_pair(&p)) return;
    for (int small = 0; small < 2; small++) {
        const int64_t n = small ? 1000 : N;
        Tensor first = d_copy(T1(DTYPE_F32, n)), sum = d_copy(T1(DTYPE_F32, n)), to = d_copy(T1(DTYPE_F32, n));
        for (int round = 0; round < ROUNDS; round++) {
            Tensor host = t_fill(T1(DTYPE_F32, n), round + 1), from = d_copy(host);
            chain(p.nccl, to, sum, first, from);
            EXPECT(t_same_bits(d_read(to), host), "round %d", round);
        }
        /* Captured once, replayed over other numbers. */
        Tensor from = d_copy(T1(DTYPE_F32, n));
        op_graph_begin(GPU, STREAM_COMPUTE);
        chain(p.nccl, to, sum, first, from);
        Graph *graph = op_graph_end(GPU, STREAM_COMPUTE);
        for (int round = 0; round < ROUNDS; round++) {
            Tensor host = t_fill(T1(DTYPE_F32, n), 10 * round);
            op_copy_in(GPU, from.data, host.data, tensor_bytes(host), STREAM_COMPUTE);
            op_graph_launch(GPU, graph, STREAM_COMPUTE);
            EXPECT(t_same_bits(d_read(to), host), "replay %d", round);
        }
        op_graph_free(GPU, graph);
        d_free_all();
        t_free_all();
    }
    close_pair(&p);
}

/* ---- what an exchange among several ranks computes --------------------------------------------------------------- */

TEST(a2a_keeps_what_is_meant_for_a_rank) {
    enum { N_EP = 4, N = 1000, K = 3, E = 12 };
    Tensor ids = T2(DTYPE_I32, N, K), weights = t_normal(T2(DTYPE_F32, N, K), 1, 1), slots = T1(DTYPE_I32, E);
    for (int64_t e = 0; e < E; e++) t_set(slots, e, (double)((e * 5 + 2) % E));
    for (int64_t i = 0; i < N * K; i++) t_set(ids, i, (double)(i * 7 % (E + 1)) - 1);
    for (int ep = 0; ep < N_EP; ep++) {
        Tensor kept_ids = d_copy(ids), kept_weights = d_copy(weights);
        a2a_keep_own(kept_ids, kept_weights, d_copy(slots), ep, N_EP, STREAM_COMPUTE);
        Tensor got_ids = d_read(kept_ids), got_weights = d_read(kept_weights);
        int64_t n_wrong = 0, n_kept = 0;
        for (int64_t i = 0; i < N * K; i++) {
            const int64_t id = (int64_t)t_get(ids, i);
            const bool is_here = id >= 0 && (int64_t)t_get(slots, id) / (E / N_EP) == ep;
            n_wrong += t_get(got_ids, i) != (is_here ? (double)id : -1);
            n_wrong += t_get(got_weights, i) != (is_here ? t_get(weights, i) : 0);
            n_kept += is_here;
        }
        EXPECT(n_wrong == 0 && n_kept > 0, "rank %d: %lld differ", ep, (long long)n_wrong);
    }
    d_free_all();
    t_free_all();
}

TEST(a2a_zeroes_rows_that_nobody_sent) {
    enum { N = 203, K = 2 };
    for (int i = 0; i < 4; i++) {
        const int64_t D = i < 2 ? 7 : 512;
        Tensor rows = t_normal(T2(act_dtypes[i % 2], N, D), 1, 1), ids = T2(DTYPE_I32, N, K);
        for (int64_t t = 0; t < N * K; t++) t_set(ids, t, t % 3 == 0 || t % 5 == 0 ? 4 : -1);
        Tensor on_device = d_copy(rows);
        a2a_zero_absent(on_device, d_copy(ids), STREAM_COMPUTE);
        for (int64_t t = 0; t < N; t++)
            for (int64_t j = 0; j < D && t_get(ids, t * K) < 0 && t_get(ids, t * K + 1) < 0; j++)
                t_set(rows, t * D + j, 0);
        EXPECT(t_same_bits(d_read(on_device), rows), "case %d", i);
    }
    d_free_all();
    t_free_all();
}

/* Large, small and negative parts, so that another order gives other bits. */
TEST(a2a_sums_in_rank_order) {
    enum { N = 4097, RANKS = 5 };
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    for (int k = 0; k < 3; k++) {
        Tensor parts = t_normal(T2(dtypes[k], RANKS, N), 1000, 3), want = T1(dtypes[k], N);
        for (int64_t i = 0; i < N; i++) {
            float sum = (float)t_get(parts, i);
            for (int r = 1; r < RANKS; r++) sum += (float)t_get(parts, r * N + i);
            t_set(want, i, (double)sum);
        }
        Tensor y = d_copy(t_poison(T1(dtypes[k], N)));
        a2a_sum_in_order(y, d_copy(parts).data, RANKS, STREAM_COMPUTE);
        EXPECT(t_same_bits(d_read(y), want), "%s", dtype_name(dtypes[k]));
    }
    d_free_all();
    t_free_all();
}
