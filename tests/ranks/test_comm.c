/* The MPI twin against loops: every rank knows what every other rank put in, so it can compute what has to come out, to
 * the last bit and in rank order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/rng.h"
#include "kernels/comm/comm.h"
#include "tests/kernels/op_test.h"

static Device device;

static Comm *open_comm(int n_pp, int n_ep) {
    device = (Device){.ops = ops_cpu()};
    return comm_mpi(&device, mesh_make(job_rank(), job_world(), n_pp, n_ep));
}

/* The world's rank that is number `index` of this rank's group. */
static int member(const Mesh *m, Group g, int index) {
    for (int r = 0; r < m->world; r++) {
        const Mesh other = mesh_make(r, m->world, m->n_pp, m->n_ep);
        const bool same_pp = other.pp == m->pp, same_dp = other.dp == m->dp, same_ep = other.ep == m->ep;
        const bool is_in = g == GROUP_WORLD || (g == GROUP_EXPERT && same_pp && same_dp) ||
                           (g == GROUP_EXPERT_DATA && same_pp && same_ep) || (g == GROUP_DATA && same_pp) ||
                           (g == GROUP_PIPE && same_dp && same_ep) ||
                           (g == GROUP_EMBED && same_dp && same_ep && (other.pp == 0 || other.pp == other.n_pp - 1));
        if (is_in && other.rank_in[g] == index) return r;
    }
    return -1;
}

/* What rank r of the world puts in: normal numbers, after PERIOD the same again. */
static Tensor input_of(int r, Dtype dtype, int64_t n) {
    enum { PERIOD = 4999 };
    const int64_t part = n < PERIOD ? n : PERIOD, width = (int64_t)dtype_size(dtype);
    Tensor t = T1(dtype, n), head = tensor_rows(t, 0, part);
    if (dtype == DTYPE_F64)
        rng_normal_fill((double *)t.data, part, 100 + (uint64_t)r, RNG_INIT, 1, 0);
    else
        t_normal(head, dtype == DTYPE_I32 ? 1000 : 1, 100 + (uint64_t)r);
    for (int64_t i = PERIOD; i < n; i += PERIOD)
        memcpy((char *)t.data + i * width, t.data, (size_t)((n - i < PERIOD ? n - i : PERIOD) * width));
    return t;
}

static double value_of(Tensor t, int64_t i) {
    return t.dtype == DTYPE_F64 ? ((const double *)t.data)[i] : t_get(t, i);
}

static float bf16_rounded(float x) {
    Tensor t = T1(DTYPE_BF16, 1);
    t_set(t, 0, x);
    return (float)t_get(t, 0);
}

/* Element i of the sum over the group, each addition rounded as the dtype says. */
static double sum_of(Tensor *x, int size, int64_t i, Dtype dtype) {
    if (dtype == DTYPE_F64 || dtype == DTYPE_I32) {
        double sum = value_of(x[0], i);
        for (int r = 1; r < size; r++) sum += value_of(x[r], i);
        return sum;
    }
    real sum = (real)value_of(x[0], i);
    for (int r = 1; r < size; r++) sum += (real)value_of(x[r], i);
    return dtype == DTYPE_BF16 ? bf16_rounded((float)sum) : sum;
}

static bool is_in_group(const Mesh *m, Group g) {
    return g != GROUP_EMBED || m->pp == 0 || m->pp == m->n_pp - 1;
}

static void check_reductions(Comm *c, Group g, Dtype dtype, int64_t n) {
    const int size = c->mesh.size[g], own = c->mesh.rank_in[g];
    Tensor x[16], y = t_poison(T1(DTYPE_F32, 1));
    const int64_t whole = n * size;
    for (int r = 0; r < size; r++) x[r] = input_of(member(&c->mesh, g, r), dtype, whole);
    y = T1(dtype, whole);
    c->all_reduce(c, y, x[own], g, STREAM_COMM);
    int64_t n_wrong = 0;
    double *want = (double *)malloc((size_t)whole * sizeof *want);
    for (int64_t i = 0; i < whole; i++) want[i] = sum_of(x, size, i, dtype);
    for (int64_t i = 0; i < whole; i++) n_wrong += value_of(y, i) != want[i];
    EXPECT(n_wrong == 0, "all_reduce, group %d, %s, %lld: %lld differ", (int)g, dtype_name(dtype), (long long)whole,
           (long long)n_wrong);

    Tensor part = T1(dtype, n);
    c->reduce_scatter(c, part, x[own], g, STREAM_COMM);
    for (int64_t i = 0; i < n; i++) n_wrong += value_of(part, i) != want[own * n + i];
    EXPECT(n_wrong == 0, "reduce_scatter, group %d, %s, %lld: %lld differ", (int)g, dtype_name(dtype), (long long)n,
           (long long)n_wrong);
    c->all_gather(c, y, part, g, STREAM_COMM);
    for (int64_t i = 0; i < whole; i++) n_wrong += value_of(y, i) != want[i];
    EXPECT(n_wrong == 0, "all_gather, group %d, %s, %lld: %lld differ", (int)g, dtype_name(dtype), (long long)n,
           (long long)n_wrong);
    c->all_reduce(c, x[own], x[own], g, STREAM_COMM);
    for (int64_t i = 0; i < whole; i++) n_wrong += value_of(x[own], i) != want[i];
    EXPECT(n_wrong == 0, "all_reduce in place");
    free(want);
}

/* In place: a rank's slice of the whole is where it lies already. */
static void check_gather_in_place(Comm *c, Group g) {
    const int size = c->mesh.size[g], own = c->mesh.rank_in[g];
    Tensor y = t_poison(T1(DTYPE_F32, 5 * (int64_t)size)), slice = tensor_rows(y, 5 * own, 5);
    memcpy(slice.data, input_of(c->mesh.rank, DTYPE_F32, 5).data, 5 * sizeof(real));
    c->all_gather(c, y, slice, g, STREAM_COMM);
    for (int r = 0; r < size; r++) {
        Tensor x = input_of(member(&c->mesh, g, r), DTYPE_F32, 5);
        for (int64_t i = 0; i < 5; i++) EXPECT(t_get(y, 5 * r + i) == t_get(x, i), "slice %d", r);
    }
}

static void check_copies(Comm *c, Group g, int64_t n) {
    const int size = c->mesh.size[g], own = c->mesh.rank_in[g];
    for (int root = 0; root < size; root++) {
        Tensor y = input_of(c->mesh.rank, DTYPE_F32, n);
        c->broadcast(c, y, root, g, STREAM_COMM);
        EXPECT(t_same_bits(y, input_of(member(&c->mesh, g, root), DTYPE_F32, n)), "broadcast from %d", root);
    }
    if (size == 1) return;
    /* Around the ring, the even ranks first. */
    const int to = (own + 1) % size, from = (own + size - 1) % size;
    Tensor x = input_of(c->mesh.rank, DTYPE_I32, n), y = t_poison(T1(DTYPE_I32, n));
    if (own % 2 == 0) c->send(c, x, to, g, STREAM_COMM);
    c->recv(c, y, from, g, STREAM_COMM);
    if (own % 2 == 1) c->send(c, x, to, g, STREAM_COMM);
    EXPECT(t_same_bits(y, input_of(member(&c->mesh, g, from), DTYPE_I32, n)), "received from %d", from);
}

TEST(mpi_sums_in_rank_order) {
    const int world = job_world();
    for (int n_pp = 1; n_pp <= 2; n_pp++)
        for (int n_ep = 1; n_ep <= world; n_ep++) {
            if (world % (n_pp * n_ep)) continue;
            Comm *c = open_comm(n_pp, n_ep);
            static const Dtype dtypes[] = {DTYPE_F32, DTYPE_F64, DTYPE_I32, DTYPE_BF16};
            for (int g = 0; g < GROUP_COUNT; g++) {
                if (!is_in_group(&c->mesh, (Group)g)) continue;
                for (int k = 0; k < 4; k++) check_reductions(c, (Group)g, dtypes[k], k == 0 ? 1 : 77);
                check_gather_in_place(c, (Group)g);
                check_copies(c, (Group)g, 33);
                t_free_all();
            }
            c->free(c);
        }
}

/* More than a buffer holds, with a remainder. */
TEST(mpi_cuts_what_is_larger_than_its_buffers) {
    Comm *c = open_comm(1, 1);
    check_reductions(c, GROUP_DATA, DTYPE_F32, 2200000 / job_world() + 1);
    check_copies(c, GROUP_WORLD, (9 << 20) / 4 + 3);
    t_free_all();
    c->free(c);
}

/* ---- tokens ------------------------------------------------------------------------------------------------------ */

typedef enum { SCATTERED, ALL_TO_FIRST, NONE_TO_LAST, NO_TOKENS_OF_RANK_0, ROUTINGS } Routing;

typedef struct {
    int64_t T, D, K, E;
    Dtype dtype;
    Routing routing;
} Case;

/* Slots are turned around, so that expert and slot differ. */
static int64_t slot_of(const Case *k, int64_t expert) {
    return k->E - 1 - expert;
}

/* The experts of token t of rank r of the group: ascending, distinct, a few unused. */
static int64_t id_of(const Case *k, int n_ep, int r, int64_t t, int64_t i) {
    const int64_t n_local = k->E / n_ep;
    if (k->routing == NO_TOKENS_OF_RANK_0 && r == 0) return -1;
    if ((t + r) % 5 == 4 && i == k->K - 1) return -1;
    /* choices lie in [first, first + n): K equal parts of it, one of each */
    int64_t first = 0, n = k->E;
    if (k->routing == ALL_TO_FIRST) first = k->E - n_local, n = n_local; /* slots 0 .. n_local - 1 */
    if (k->routing == NONE_TO_LAST) first = n_local, n = k->E - n_local;
    const int64_t part = n / k->K;
    return first + i * part + (int64_t)(mix64((uint64_t)(t * 31 + r * 7 + i)) % (uint64_t)part);
}

static double x_of(int r, int64_t t, int64_t j) {
    return (double)((r * 37 + t * 11 + j * 3) % 61 - 30);
}

static double weight_of(int r, int64_t t, int64_t i) {
    return (double)(1 + (r + 3 * t + 5 * i) % 16);
}

static Tensor plane_of_ones(const Case *k, int64_t rows) {
    return t_poison(T2(k->dtype, rows, k->D));
}

/* Has token t of rank r an expert on rank `at`? */
static bool goes_to(const Case *k, int n_ep, int r, int64_t t, int at) {
    for (int64_t i = 0; i < k->K; i++) {
        const int64_t id = id_of(k, n_ep, r, t, i);
        if (id >= 0 && slot_of(k, id) / (k->E / n_ep) == at) return true;
    }
    return false;
}

static void check_received(const Comm *c, const Case *k, Tensor received, double factor) {
    int64_t n_wrong = 0;
    for (int r = 0; r < c->mesh.n_ep; r++)
        for (int64_t t = 0; t < k->T; t++) {
            if (!goes_to(k, c->mesh.n_ep, r, t, c->mesh.ep)) continue;
            for (int64_t j = 0; j < k->D; j++)
                n_wrong += t_get(received, (r * k->T + t) * k->D + j) != factor * x_of(r, t, j);
        }
    EXPECT(n_wrong == 0, "routing %d: %lld received elements differ", (int)k->routing, (long long)n_wrong);
}

static void check_plan(const Comm *c, const Case *k, DispatchPlan plan) {
    int64_t n_wrong = 0;
    const int64_t n_local = k->E / c->mesh.n_ep;
    for (int r = 0; r < c->mesh.n_ep; r++)
        for (int64_t t = 0; t < k->T; t++)
            for (int64_t i = 0; i < k->K; i++) {
                const int64_t id = id_of(k, c->mesh.n_ep, r, t, i), at = (r * k->T + t) * k->K + i;
                const bool is_here = id >= 0 && slot_of(k, id) / n_local == c->mesh.ep;
                n_wrong += t_get(plan.ids, at) != (is_here ? (double)id : -1);
                n_wrong += t_get(plan.weights, at) != (is_here ? weight_of(r, t, i) : 0);
            }
    EXPECT(n_wrong == 0, "routing %d: %lld places of the plan differ", (int)k->routing, (long long)n_wrong);
}

/* A factor of rank r whose products with x_of fit the eight bits of a bf16. */
static int factor_of(int r) {
    return 2 + r % 7;
}

/* Rank `at` sends factor_of(at) times the token back, and at + 1 for each of its weights. */
static void check_combine(Comm *c, const Case *k, Tensor received, DispatchPlan plan) {
    const int R = c->mesh.n_ep;
    Tensor dweights = T2(DTYPE_F32, R * k->T, k->K), dw = t_poison(T2(DTYPE_F32, k->T, k->K));
    for (int64_t i = 0; i < R * k->T * k->K; i++) t_set(dweights, i, t_get(plan.ids, i) >= 0 ? c->mesh.ep + 1 : 0);
    for (int r = 0; r < R; r++)
        for (int64_t t = 0; t < k->T; t++) {
            if (!goes_to(k, R, r, t, c->mesh.ep)) continue;
            for (int64_t j = 0; j < k->D; j++)
                t_set(received, (r * k->T + t) * k->D + j, factor_of(c->mesh.ep) * x_of(r, t, j));
        }
    Tensor y = t_poison(T3(k->dtype, R, k->T, k->D)), forward = t_poison(T3(k->dtype, R, k->T, k->D));
    c->combine(c, forward, tensor_none(), received, tensor_none(), plan, STREAM_COMM);
    c->combine(c, y, dw, received, dweights, plan, STREAM_COMM);
    EXPECT(t_same_bits(y, forward), "with and without weights");
    int64_t n_wrong = 0, n_wrong_weights = 0;
    for (int at = 0; at < R; at++)
        for (int64_t t = 0; t < k->T; t++) {
            const bool is_there = goes_to(k, R, c->mesh.ep, t, at);
            for (int64_t j = 0; j < k->D; j++)
                n_wrong +=
                    t_get(y, (at * k->T + t) * k->D + j) != (is_there ? factor_of(at) * x_of(c->mesh.ep, t, j) : 0);
        }
    for (int64_t t = 0; t < k->T; t++)
        for (int64_t i = 0; i < k->K; i++) {
            const int64_t id = id_of(k, R, c->mesh.ep, t, i);
            n_wrong_weights += t_get(dw, t * k->K + i) != (id < 0 ? 0 : (double)(slot_of(k, id) / (k->E / R) + 1));
        }
    EXPECT(n_wrong == 0, "routing %d: %lld combined elements differ", (int)k->routing, (long long)n_wrong);
    EXPECT(n_wrong_weights == 0, "routing %d: %lld weights differ", (int)k->routing, (long long)n_wrong_weights);
}

static void check_exchange(Comm *c, const Case *k) {
    const int R = c->mesh.n_ep;
    Tensor x = T2(k->dtype, k->T, k->D), ids = T2(DTYPE_I32, k->T, k->K), weights = T2(DTYPE_F32, k->T, k->K);
    Tensor slots = T1(DTYPE_I32, k->E), received = plane_of_ones(k, R * k->T);
    for (int64_t e = 0; e < k->E; e++) t_set(slots, e, (double)slot_of(k, e));
    for (int64_t t = 0; t < k->T; t++) {
        for (int64_t j = 0; j < k->D; j++) t_set(x, t * k->D + j, x_of(c->mesh.ep, t, j));
        for (int64_t i = 0; i < k->K; i++) {
            t_set(ids, t * k->K + i, (double)id_of(k, R, c->mesh.ep, t, i));
            t_set(weights, t * k->K + i, weight_of(c->mesh.ep, t, i));
        }
    }
    DispatchPlan plan = {t_poison(T2(DTYPE_I32, R * k->T, k->K)), t_poison(T2(DTYPE_F32, R * k->T, k->K)), slots};
    c->dispatch(c, received, plan, x, ids, weights, STREAM_COMM);
    check_plan(c, k, plan);
    check_received(c, k, received, 1);
    check_combine(c, k, received, plan);
    /* Backward: other rows by the plan that stands. */
    for (int64_t i = 0; i < k->T * k->D; i++) t_set(x, i, 4 * t_get(x, i));
    t_poison(received);
    c->dispatch(c, received, plan, x, ids, tensor_none(), STREAM_COMM);
    check_plan(c, k, plan);
    check_received(c, k, received, 4);
    t_free_all();
}

TEST(mpi_tokens_travel_to_their_experts_and_back) {
    const int world = job_world();
    for (int n_ep = 2; n_ep <= world; n_ep++) {
        if (world % n_ep) continue;
        Comm *c = open_comm(1, n_ep);
        for (int routing = 0; routing < ROUTINGS; routing++) {
            const Case f32 = {13, 7, 2, 4 * n_ep, DTYPE_F32, (Routing)routing};
            const Case bf16 = {6, 16, 3, 6 * n_ep, DTYPE_BF16, (Routing)routing};
            check_exchange(c, &f32);
            check_exchange(c, &bf16);
        }
        /* Several blocks of tokens, and a last one that is short. */
        const Case large = {300, 4000, 2, 2 * n_ep, DTYPE_F32, SCATTERED};
        check_exchange(c, &large);
        c->free(c);
    }
}

/* ---- tiles of tokens: bytes and scales as they are, NaN or not --------------------------------------------------- */

static uint32_t bits_of(int r, int64_t t, int64_t j) {
    return (uint32_t)mix64(((uint64_t)r << 48) + ((uint64_t)t << 24) + (uint64_t)j);
}

/* Tiles over bytes and scales of no sense, with room for the scales of a few rows more. */
static Tensor tiles_of(int64_t rows, int64_t cols, int64_t more) {
    const int64_t n_scales = (cols + SCALE_TILE - 1) / SCALE_TILE * (rows + more);
    Tensor t =
        tensor_tiles(T2(DTYPE_E4M3, rows, cols).data, (float *)T1(DTYPE_I32, n_scales).data, DTYPE_E4M3, rows, cols);
    t.scale_ld = rows + more;
    memset(t.data, 0x5A, (size_t)(rows * cols));
    memset(t.scale, 0x5A, (size_t)n_scales * sizeof(float));
    return t;
}

static uint32_t scale_bits(Tensor t, int64_t row, int64_t i) {
    uint32_t bits;
    memcpy(&bits, t.scale + i * t.scale_ld + row, sizeof bits);
    return bits;
}

static void check_received_tiles(const Comm *c, const Case *k, Tensor received, uint32_t flip) {
    const uint8_t *bytes = (const uint8_t *)received.data;
    int64_t n_bytes = 0, n_scales = 0;
    for (int r = 0; r < c->mesh.n_ep; r++)
        for (int64_t t = 0; t < k->T; t++) {
            if (!goes_to(k, c->mesh.n_ep, r, t, c->mesh.ep)) continue;
            const int64_t row = r * k->T + t;
            for (int64_t j = 0; j < k->D; j++) n_bytes += bytes[row * k->D + j] != (uint8_t)(bits_of(r, t, j) ^ flip);
            for (int64_t i = 0; i * SCALE_TILE < k->D; i++)
                n_scales += scale_bits(received, row, i) != (bits_of(r, t, -1 - i) ^ flip);
        }
    EXPECT(n_bytes == 0 && n_scales == 0, "routing %d: %lld received bytes and %lld scales differ", (int)k->routing,
           (long long)n_bytes, (long long)n_scales);
}

static void fill_tiles(const Comm *c, const Case *k, Tensor x, uint32_t flip) {
    for (int64_t t = 0; t < k->T; t++) {
        for (int64_t j = 0; j < k->D; j++)
            ((uint8_t *)x.data)[t * k->D + j] = (uint8_t)(bits_of(c->mesh.ep, t, j) ^ flip);
        for (int64_t i = 0; i * SCALE_TILE < k->D; i++) {
            const uint32_t bits = bits_of(c->mesh.ep, t, -1 - i) ^ flip;
            memcpy(x.scale + i * x.scale_ld + t, &bits, sizeof bits);
        }
    }
}

/* Forward, then backward by the plan that stands; scales between those of the rows stay what they were. */
static void check_tiles(Comm *c, const Case *k) {
    enum { MORE = 3 };
    const int R = c->mesh.n_ep;
    Tensor x = tiles_of(k->T, k->D, MORE), received = tiles_of(R * k->T, k->D, MORE);
    Tensor ids = T2(DTYPE_I32, k->T, k->K), weights = T2(DTYPE_F32, k->T, k->K), slots = T1(DTYPE_I32, k->E);
    for (int64_t e = 0; e < k->E; e++) t_set(slots, e, (double)slot_of(k, e));
    for (int64_t i = 0; i < k->T * k->K; i++) {
        t_set(ids, i, (double)id_of(k, R, c->mesh.ep, i / k->K, i % k->K));
        t_set(weights, i, weight_of(c->mesh.ep, i / k->K, i % k->K));
    }
    DispatchPlan plan = {t_poison(T2(DTYPE_I32, R * k->T, k->K)), t_poison(T2(DTYPE_F32, R * k->T, k->K)), slots};
    fill_tiles(c, k, x, 0);
    c->dispatch(c, received, plan, x, ids, weights, STREAM_COMM);
    check_plan(c, k, plan);
    check_received_tiles(c, k, received, 0);
    fill_tiles(c, k, x, 0xA7B3C5D9);
    c->dispatch(c, received, plan, x, ids, tensor_none(), STREAM_COMM);
    check_plan(c, k, plan);
    check_received_tiles(c, k, received, 0xA7B3C5D9);
    for (int64_t i = 0; i * SCALE_TILE < k->D; i++)
        for (int64_t row = R * k->T; row < received.scale_ld; row++)
            EXPECT(scale_bits(received, row, i) == 0x5A5A5A5A, "a scale of nobody");
    t_free_all();
}

TEST(mpi_tiles_travel_with_their_scales) {
    const int world = job_world();
    for (int n_ep = 2; n_ep <= world; n_ep++) {
        if (world % n_ep) continue;
        Comm *c = open_comm(1, n_ep);
        for (int routing = 0; routing < ROUTINGS; routing++) {
            const Case whole = {13, 256, 2, 4 * n_ep, DTYPE_E4M3, (Routing)routing};
            const Case part = {7, 131, 3, 6 * n_ep, DTYPE_E4M3, (Routing)routing}; /* no whole words of bytes either */
            check_tiles(c, &whole);
            check_tiles(c, &part);
        }
        const Case one = {1, 1, 1, n_ep, DTYPE_E4M3, SCATTERED};
        check_tiles(c, &one);
        /* Several blocks of tokens, and a last one that is short. */
        const Case large = {600, 7168, 2, 2 * n_ep, DTYPE_E4M3, SCATTERED};
        check_tiles(c, &large);
        c->free(c);
    }
}

TEST(mpi_symmetric_memory_is_zeroed) {
    Comm *c = open_comm(1, 1);
    unsigned char *p = (unsigned char *)c->alloc_symmetric(c, &device, 1000);
    for (int i = 0; i < 1000; i++) EXPECT(p[i] == 0, "byte %d", i);
    op_release(&device, p);
    c->free(c);
}

/* ---- agreement --------------------------------------------------------------------------------------------------- */

TEST(job_ranks_agree) {
    const int rank = job_rank(), world = job_world();
    int all[16] = {0}, own = rank * rank + 1;
    job_gather(all, &own, sizeof own);
    for (int r = 0; r < world; r++) EXPECT_EQ(all[r], r * r + 1);
    uint64_t sums[2] = {(uint64_t)rank, ~(uint64_t)0};
    job_sum(sums, 2);
    EXPECT(sums[0] == (uint64_t)(world * (world - 1) / 2) && sums[1] == (uint64_t)0 - (uint64_t)world);
    int64_t word = rank == 0 ? 77 : rank;
    job_spread(&word, sizeof word);
    EXPECT_EQ(word, 77);
    char text[32] = "";
    EXPECT_EQ(job_first_text(text, sizeof text), -1);
    if (rank > 0) snprintf(text, sizeof text, "rank %d speaks", rank);
    EXPECT_EQ(job_first_text(text, sizeof text), 1);
    EXPECT(strcmp(text, "rank 1 speaks") == 0, "%s", text);
    if (rank == 1) job_send(0, &own, sizeof own);
    if (rank == 0) job_recv(1, &own, sizeof own);
    if (rank == 0) EXPECT_EQ(own, 2);
    const int here = job_ranks_here(), rank_here = job_rank_here();
    EXPECT(here >= 1 && here <= world && rank_here >= 0 && rank_here < here, "%d of %d here", rank_here, here);
    job_gather(all, &rank_here, sizeof rank_here);
    for (int r = 0; r < world && here == world; r++) EXPECT_EQ(all[r], r);
}
