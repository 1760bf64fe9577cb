/* Rows of the experts: the map, gather, reduce and the way back of the weights' gradient. */
#include "kernels/base/rng.h"
#include "op_test.h"

typedef struct {
    MoeMap map;
    Tensor ids, weights, slot_of_expert;
    int first_slot;
    int64_t Tr, K, El, N;
} Rows;

static Rows rows_make(int64_t Tr, int64_t K, int64_t E, int64_t El, int first_slot) {
    const int64_t N = Tr * (K < El ? K : El) + (GROUP_ALIGN - 1) * El;
    Rows r = {.map = {t_poison(T1(DTYPE_I32, N)), t_poison(T1(DTYPE_F32, N)), t_poison(T2(DTYPE_I32, Tr, K)),
                      t_poison(T1(DTYPE_I32, El + 1)), tensor_none()},
              .ids = T2(DTYPE_I32, Tr, K),
              .weights = t_normal(T2(DTYPE_F32, Tr, K), 1, 1),
              .slot_of_expert = T1(DTYPE_I32, E),
              .first_slot = first_slot,
              .Tr = Tr,
              .K = K,
              .El = El,
              .N = N};
    for (int64_t e = 0; e < E; e++)
        t_set(r.slot_of_expert, e, (double)((e * 5 + 3) % E)); /* 5 divides no E used here */
    for (int64_t t = 0; t < Tr; t++) {
        int64_t id = (int64_t)(rng_bits(7, RNG_TEST, 0, (uint64_t)t) % (uint64_t)E); /* distinct: K consecutive ids */
        for (int64_t k = 0; k < K; k++) t_set(r.ids, t * K + k, (double)((id + k) % E));
    }
    return r;
}

static void map_rows(Rows *r) {
    op_moe_map(DEV, r->map, r->ids, r->weights, r->slot_of_expert, r->first_slot, STREAM_COMPUTE);
}

static int64_t start(const Rows *r, int64_t e) {
    return (int64_t)t_get(r->map.expert_start, e);
}

/* Walks experts, then tokens: what stands in the map must be exactly this walk. */
static void expect_map(Rows *r, const char *name) {
    map_rows(r);
    int64_t at = 0, n_mapped = 0, n_local = 0;
    for (int64_t e = 0; e < r->El; e++) {
        EXPECT(start(r, e) == at && at % GROUP_ALIGN == 0, "%s: expert %d starts at %d, not %d", name, (int)e,
               (int)start(r, e), (int)at);
        for (int64_t t = 0; t < r->Tr; t++) {
            for (int64_t k = 0; k < r->K; k++) {
                int64_t id = (int64_t)t_get(r->ids, t * r->K + k);
                if (id < 0 || (int64_t)t_get(r->slot_of_expert, id) != r->first_slot + e) continue;
                EXPECT(t_get(r->map.row_token, at) == (double)t, "%s: row %d", name, (int)at);
                EXPECT(t_get(r->map.row_weight, at) == t_get(r->weights, t * r->K + k), "%s: weight of row %d", name,
                       (int)at);
                EXPECT(t_get(r->map.token_row, t * r->K + k) == (double)at, "%s: token %d choice %d", name, (int)t,
                       (int)k);
                at++, n_local++;
            }
        }
        for (; at % GROUP_ALIGN != 0; at++)
            EXPECT(t_get(r->map.row_token, at) == -1 && t_get(r->map.row_weight, at) == 0, "%s: padding row %d", name,
                   (int)at);
    }
    EXPECT_EQ(start(r, r->El), at);
    for (int64_t i = 0; i < r->Tr * r->K; i++) n_mapped += t_get(r->map.token_row, i) != -1;
    EXPECT_EQ(n_mapped, n_local);
}

TEST(moe_map_shapes) {
    Rows r = rows_make(300, 3, 8, 8, 0);
    expect_map(&r, "all local");
    r = rows_make(300, 3, 8, 2, 4);
    expect_map(&r, "two of eight slots");
    r = rows_make(1, 1, 1, 1, 0);
    expect_map(&r, "one token, one expert");
    r = rows_make(5, 4, 8, 2, 6);
    for (int64_t i = 0; i < 8; i++) t_set(r.ids, i, -1); /* padding tokens */
    expect_map(&r, "padding tokens");
    r = rows_make(3, 2, 8, 4, 0);
    t_fill(r.ids, -1);
    expect_map(&r, "nothing");
    EXPECT_EQ(start(&r, 4), 0);
}

/* All tokens choose one expert (and one more each): worst case of the capacity; then exactly GROUP_ALIGN tokens. */
TEST(moe_map_skewed) {
    Rows r = rows_make(257, 1, 4, 4, 0);
    t_fill(r.ids, 2);
    expect_map(&r, "all to one");
    EXPECT_EQ(start(&r, 4), 384);
    r = rows_make(GROUP_ALIGN, 2, 4, 4, 0);
    for (int64_t t = 0; t < GROUP_ALIGN; t++) t_set(r.ids, 2 * t, 0), t_set(r.ids, 2 * t + 1, 3);
    expect_map(&r, "whole groups");
    EXPECT_EQ(start(&r, 4), 2 * GROUP_ALIGN);
}

static void limit_rows(Rows *r, int64_t N) {
    r->map.row_token.shape[0] = r->map.row_weight.shape[0] = N;
}

/* One row too few: an empty map, and the word for it, which stays; as many as are needed: the map, and no word. */
TEST(moe_map_overflow) {
    Rows r = rows_make(300, 3, 8, 4, 2);
    double overflow = 0;
    map_rows(&r);
    const int64_t needed = start(&r, 4);
    REQUIRE(needed > 0 && needed < r.N, "%d rows of %d", (int)needed, (int)r.N);
    r.map.overflow = tensor_1d(&overflow, DTYPE_F64, 1);
    for (int calls = 1; calls <= 2; calls++) {
        limit_rows(&r, needed - 1);
        map_rows(&r);
        EXPECT(overflow == calls, "%g after %d calls", overflow, calls);
        for (int64_t i = 0; i < r.Tr * r.K; i++) EXPECT(t_get(r.map.token_row, i) == -1, "token_row %d", (int)i);
        for (int64_t e = 0; e <= 4; e++) EXPECT_EQ(start(&r, e), 0);
    }
    limit_rows(&r, needed);
    expect_map(&r, "just enough rows");
    EXPECT(overflow == 2, "%g where the rows fit", overflow);
}

static void expect_moves(Dtype dtype, int64_t D, Rows *r) {
    Tensor x = t_normal(T2(dtype, r->Tr, D), 1, 2), rows = t_poison(T2(dtype, r->N, D));
    Tensor past = t_copy(rows);
    map_rows(r);
    op_gather_rows(DEV, rows, tensor_none(), x, r->map, STREAM_COMPUTE);
    const int64_t used = start(r, r->El);
    for (int64_t n = 0; n < used; n++) {
        int64_t token = (int64_t)t_get(r->map.row_token, n);
        for (int64_t j = 0; j < D; j++)
            EXPECT(t_get(rows, n * D + j) == (token < 0 ? 0 : t_get(x, token * D + j)), "row %d", (int)n);
    }
    EXPECT(t_same_bits(tensor_rows(rows, used, r->N - used), tensor_rows(past, used, r->N - used)),
           "rows past the last expert were written");

    t_normal(tensor_rows(rows, 0, used), 1, 3); /* the rest stays NaN: E4, nobody may read it */
    Tensor y = t_poison(t_slice(dtype, r->Tr, D, 4)), sum = t_normal(T2(dtype, r->Tr, D), 1, 4);
    double *want = t_doubles(x), *added = t_doubles(sum);
    for (int64_t i = 0; i < r->Tr * D; i++) {
        want[i] = 0;
        for (int64_t k = 0; k < r->K; k++) {
            int64_t row = (int64_t)t_get(r->map.token_row, i / D * r->K + k);
            if (row >= 0) want[i] += t_get(rows, row * D + i % D);
        }
        added[i] += want[i];
    }
    op_reduce_rows(DEV, y, rows, r->map, false, STREAM_COMPUTE);
    op_reduce_rows(DEV, sum, rows, r->map, true, STREAM_COMPUTE);
    double tolerance = dtype == DTYPE_BF16 ? BF16_TOLERANCE : OP_TOLERANCE;
    EXPECT(t_error(y, want) <= tolerance, "reduce off by %g", t_error(y, want));
    EXPECT(t_error(sum, added) <= tolerance, "accumulating reduce off by %g", t_error(sum, added));
    EXPECT(t_gap_is_intact(y, 4), "the gap was written");
}

TEST(gather_and_reduce_rows) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Dtype dtype = bf16 ? DTYPE_BF16 : DTYPE_F32;
        Rows r = rows_make(90, 3, 8, 8, 0);
        expect_moves(dtype, 33, &r);
        r = rows_make(90, 3, 8, 2, 3);
        for (int64_t i = 0; i < 30; i++) t_set(r.ids, i, -1);
        expect_moves(dtype, 7, &r);
        r = rows_make(1, 1, 1, 1, 0);
        expect_moves(dtype, 1, &r);
        r = rows_make(40, 2, 8, 8, 0); /* experts 1 to 6 empty */
        for (int64_t t = 0; t < 40; t++) t_set(r.ids, 2 * t, 0), t_set(r.ids, 2 * t + 1, 7);
        expect_moves(dtype, 16, &r);
        t_free_all();
    }
}

TEST(unmap_weights_of_rows) {
    Rows r = rows_make(50, 3, 8, 3, 2);
    map_rows(&r);
    Tensor drow = t_poison(T1(DTYPE_F32, r.N)), dweights = t_poison(T2(DTYPE_F32, 50, 3));
    t_normal(tensor_rows(drow, 0, start(&r, 3)), 1, 5);
    op_unmap_weights(DEV, dweights, drow, r.map, STREAM_COMPUTE);
    int64_t n_absent = 0;
    for (int64_t i = 0; i < 150; i++) {
        int64_t row = (int64_t)t_get(r.map.token_row, i);
        EXPECT(t_get(dweights, i) == (row < 0 ? 0 : t_get(drow, row)), "choice %d", (int)i);
        n_absent += row < 0;
    }
    EXPECT(n_absent > 0 && n_absent < 150, "%d choices are not local", (int)n_absent);
}

typedef struct {
    Rows r;
    Tensor x, rows, y, dweights, dx;
} Moves;

static double loss(void *context) {
    Moves *m = (Moves *)context;
    op_gather_rows(DEV, m->rows, tensor_none(), m->x, m->r.map, STREAM_COMPUTE);
    return t_dot_normal(tensor_rows(m->rows, 0, start(&m->r, m->r.El)), 8);
}

static void all(void *context) {
    Moves *m = (Moves *)context;
    map_rows(&m->r);
    op_zero(DEV, m->rows, STREAM_COMPUTE);
    op_gather_rows(DEV, m->rows, tensor_none(), m->x, m->r.map, STREAM_COMPUTE);
    op_reduce_rows(DEV, m->y, m->rows, m->r.map, false, STREAM_COMPUTE);
    op_unmap_weights(DEV, m->dweights, m->r.map.row_weight, m->r.map, STREAM_COMPUTE);
}

/* The reduce is the gradient of the gather. */
TEST(permute_gradient_and_threads) {
    Moves m = {.r = rows_make(60, 2, 8, 3, 1), .y = T2(DTYPE_F32, 60, 9), .dweights = T2(DTYPE_F32, 60, 2)};
    m.x = t_normal(T2(DTYPE_F32, 60, 9), 1, 1), m.rows = T2(DTYPE_F32, m.r.N, 9), m.dx = T2(DTYPE_F32, 60, 9);
    map_rows(&m.r);
    Tensor drows = T2(DTYPE_F32, m.r.N, 9);
    t_normal(tensor_rows(drows, 0, start(&m.r, 3)), 1, 8);
    op_reduce_rows(DEV, m.dx, drows, m.r.map, false, STREAM_COMPUTE);
    fd_check("gather x", m.x, m.dx, loss, NULL, &m, 200, NULL);
    Tensor outputs[] = {m.r.map.token_row, m.r.map.expert_start, m.rows, m.y, m.dweights};
    expect_same_bits("permute", all, &m, outputs, 5);
}
