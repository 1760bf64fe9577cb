/* The map of the experts' rows and what moves along it: the map must be the CPU's, bit for bit. */
#include "kernels/base/rng.h"
#include "tests/cuda/cuda_test.h"

typedef struct {
    int first_slot;
    bool accumulate;
} Move;

enum { ROW_TOKEN, ROW_WEIGHT, TOKEN_ROW, EXPERT_START, MAP_ARGS };

static MoeMap map_of(const Side *s) {
    const MoeMap map = {s->t[ROW_TOKEN], s->t[ROW_WEIGHT], s->t[TOKEN_ROW], s->t[EXPERT_START],
                        tensor_1d(&s->stats->overflow, DTYPE_F64, 1)};
    return map;
}

static void map_rows(const Side *s) {
    op_moe_map(s->device, map_of(s), s->t[4], s->t[5], s->t[6], ((const Move *)s->context)->first_slot, STREAM_COMPUTE);
}
static void gather(const Side *s) {
    op_gather_rows(s->device, s->t[4], tensor_none(), s->t[5], map_of(s), STREAM_COMPUTE);
}
static void reduce(const Side *s) {
    op_reduce_rows(s->device, s->t[4], s->t[5], map_of(s), ((const Move *)s->context)->accumulate, STREAM_COMPUTE);
}
static void unmap(const Side *s) {
    op_unmap_weights(s->device, s->t[4], s->t[5], map_of(s), STREAM_COMPUTE);
}

typedef struct {
    Arg map[MAP_ARGS];
    Tensor ids, weights, slot_of_expert;
    int first_slot;
    int64_t Tr, K, El, N;
} Rows;

/* Slots are a permutation of the E experts; El of them, from first_slot on, are local. */
static Rows rows_make(int64_t Tr, int64_t K, int64_t E, int64_t El, int first_slot) {
    const int64_t N = Tr * (K < El ? K : El) + (GROUP_ALIGN - 1) * El;
    Rows r = {.map = {{"row_token", T1(DTYPE_I32, N), ARG_OUT},
                      {"row_weight", T1(DTYPE_F32, N), ARG_OUT},
                      {"token_row", T2(DTYPE_I32, Tr, K), ARG_OUT},
                      {"expert_start", T1(DTYPE_I32, El + 1), ARG_OUT}},
              .ids = T2(DTYPE_I32, Tr, K),
              .weights = t_normal(T2(DTYPE_F32, Tr, K), 1, 1),
              .slot_of_expert = T1(DTYPE_I32, E),
              .first_slot = first_slot,
              .Tr = Tr,
              .K = K,
              .El = El,
              .N = N};
    for (int64_t e = 0; e < E; e++) t_set(r.slot_of_expert, e, (double)(E - 1 - e));
    for (int64_t t = 0; t < Tr; t++) { /* K distinct ids, with room between them */
        const uint64_t bits = rng_bits(7, RNG_TEST, 0, (uint64_t)t);
        const int64_t id = (int64_t)(bits % (uint64_t)E),
                      step = E / K > 1 ? 1 + (int64_t)((bits >> 32) % (uint64_t)(E / K)) : 1;
        for (int64_t k = 0; k < K; k++) t_set(r.ids, t * K + k, (double)((id + k * step) % E));
    }
    return r;
}

/* Afterwards the arguments of the map hold the CPU's. */
static void expect_map(Rows *r, const char *what) {
    const Move move = {r->first_slot, false};
    Case c = {.name = case_name("%s: Tr %d, K %d, El %d", what, (int)r->Tr, (int)r->K, (int)r->El),
              .run = map_rows,
              .context = &move,
              .args = {r->map[0],
                       r->map[1],
                       r->map[2],
                       r->map[3],
                       {"ids", r->ids, ARG_IN},
                       {"weights", r->weights, ARG_IN},
                       {"slot_of_expert", r->slot_of_expert, ARG_IN}},
              .f32_tolerance = 1e-30};
    expect_case(&c);
}

/* Gather, reduce (plain and accumulating) and unmap with the map of the CPU. */
static void expect_moves(Rows *r, const char *what, Dtype dtype, int64_t D, int64_t gap) {
    expect_map(r, what);
    const int64_t used = (int64_t)t_get(r->map[EXPERT_START].t, r->El);
    for (int i = 0; i < MAP_ARGS; i++) r->map[i].kind = ARG_IN;
    Tensor rows = T2(dtype, r->N, D), x = t_normal(t_slice(dtype, r->Tr, D, gap), 1, 2);
    Tensor drow_weight = t_poison(T1(DTYPE_F32, r->N));
    Case c = {.name = case_name("%s: %s, D %d, gap %d", what, dtype_name(dtype), (int)D, (int)gap),
              .run = gather,
              .args = {r->map[0], r->map[1], r->map[2], r->map[3], {"y", rows, ARG_OUT}, {"x", x, ARG_IN}},
              .f32_tolerance = 1e-30,
              .bf16_tolerance = 1e-30};
    expect_case(&c);

    t_normal(tensor_rows(rows, 0, used), 1, 3); /* rows past the last stay NaN: nobody may read them */
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        const Move move = {r->first_slot, accumulate};
        c.run = reduce, c.context = &move;
        c.f32_tolerance = CUDA_F32_TOLERANCE, c.bf16_tolerance = CUDA_BF16_TOLERANCE;
        c.args[4] = (Arg){"y", x, accumulate ? ARG_ADD : ARG_OUT};
        c.args[5] = (Arg){"x", rows, ARG_IN};
        expect_case(&c);
    }

    t_normal(tensor_rows(drow_weight, 0, used), 1, 4);
    c.run = unmap, c.f32_tolerance = 1e-30;
    c.args[4] = (Arg){"dweights", T2(DTYPE_F32, r->Tr, r->K), ARG_OUT};
    c.args[5] = (Arg){"drow_weight", drow_weight, ARG_IN};
    expect_case(&c);
}

TEST(cuda_moe_map_shapes) {
    static const struct {
        int64_t Tr, K, E, El;
        int first_slot;
    } shapes[] = {{0, 2, 4, 4, 0},  {1, 1, 1, 1, 0},         {300, 3, 8, 8, 0},     {301, 3, 8, 2, 4},
                  {5, 4, 8, 2, 6},  {1000, 6, 64, 64, 0},    {999, 8, 256, 256, 0}, {777, 8, 256, 32, 96},
                  {64, 2, 2, 1, 1}, {130, 40, 1024, 1024, 0}};
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
        Rows r = rows_make(shapes[i].Tr, shapes[i].K, shapes[i].E, shapes[i].El, shapes[i].first_slot);
        expect_map(&r, "all tokens");
        for (int64_t t = 0; t < r.Tr; t += 3) /* padding tokens */
            for (int64_t k = 0; k < r.K; k++) t_set(r.ids, t * r.K + k, -1);
        expect_map(&r, "with padding");
        t_fill(r.ids, -1);
        expect_map(&r, "nothing");
        t_free_all();
    }
}

/* All to one expert; whole groups of GROUP_ALIGN; columns of wider matrices. */
TEST(cuda_moe_map_skewed) {
    Rows r = rows_make(257, 1, 4, 4, 0);
    t_fill(r.ids, 2);
    expect_map(&r, "all to one");
    r = rows_make(GROUP_ALIGN, 2, 4, 4, 0);
    for (int64_t t = 0; t < GROUP_ALIGN; t++) t_set(r.ids, 2 * t, 0), t_set(r.ids, 2 * t + 1, 3);
    expect_map(&r, "whole groups");
    r = rows_make(700, 3, 16, 4, 8);
    Tensor ids = t_slice(DTYPE_I32, 700, 3, 2), weights = t_slice(DTYPE_F32, 700, 3, 4);
    for (int64_t i = 0; i < 2100; i++) t_set(ids, i, t_get(r.ids, i)), t_set(weights, i, t_get(r.weights, i));
    r.ids = ids, r.weights = weights, r.map[TOKEN_ROW].t = t_slice(DTYPE_I32, 700, 3, 6);
    expect_map(&r, "strided");
}

/* One row too few, whatever the number of blocks: an empty map, and the word for it. Enough rows, and no word. */
TEST(cuda_moe_map_overflow) {
    static const int64_t shapes[][4] = {{300, 3, 8, 4}, {5000, 8, 256, 32}, {9000, 6, 600, 300}};
    for (int i = 0; i < 3; i++) {
        Rows r = rows_make(shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], 2);
        expect_map(&r, "the worst case fits");
        const int64_t needed = (int64_t)t_get(r.map[EXPERT_START].t, r.El);
        for (int short_of = 1; short_of >= 0; short_of--) {
            r.map[ROW_TOKEN].t = T1(DTYPE_I32, needed - short_of);
            r.map[ROW_WEIGHT].t = T1(DTYPE_F32, needed - short_of);
            expect_map(&r, short_of ? "one row too few" : "just enough rows");
            EXPECT_EQ((int64_t)t_get(r.map[EXPERT_START].t, r.El), short_of ? 0 : needed);
        }
        t_free_all();
    }
}

TEST(cuda_moe_map_large) {
    Rows r = rows_make(16384, 8, 256, 256, 0); /* pieces longer than the shortest */
    expect_map(&r, "V3");
    t_free_all();
    r = rows_make(16384, 6, 64, 64, 0);
    expect_map(&r, "V2 lite");
}

TEST(cuda_gather_reduce_unmap) {
    static const int64_t widths[][2] = {{1, 0}, {7, 2}, {16, 16}, {33, 0}, {264, 8}};
    for (int i = 0; i < 10; i++) {
        const Dtype dtype = act_dtypes[i % 2];
        const int64_t D = widths[i / 2][0], gap = widths[i / 2][1];
        Rows r = rows_make(90, 3, 8, 8, 0);
        expect_moves(&r, "all local", dtype, D, gap);
        r = rows_make(91, 11, 32, 8, 8);
        for (int64_t t = 0; t < 330; t++) t_set(r.ids, t, -1);
        expect_moves(&r, "some", dtype, D, gap);
        r = rows_make(1, 1, 1, 1, 0);
        expect_moves(&r, "one", dtype, D, gap);
        r = rows_make(40, 2, 8, 8, 0);
        for (int64_t t = 0; t < 40; t++) t_set(r.ids, 2 * t, 0), t_set(r.ids, 2 * t + 1, 7);
        expect_moves(&r, "empty experts", dtype, D, gap);
        r = rows_make(10, 2, 8, 4, 0);
        t_fill(r.ids, -1);
        expect_moves(&r, "nothing", dtype, D, gap);
        t_free_all();
    }
}

TEST(cuda_gather_reduce_large) {
    Rows r = rows_make(1000, 6, 64, 64, 0);
    expect_moves(&r, "V2 lite", DTYPE_BF16, 2048, 0);
    t_free_all();
    r = rows_make(300, 8, 256, 32, 64);
    expect_moves(&r, "V3, a rank", DTYPE_BF16, 7168, 0);
}
