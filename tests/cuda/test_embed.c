/* The embedding and its gradient, above all where many tokens have one id. */
#include "kernels/base/rng.h"
#include "tests/cuda/cuda_test.h"

static void forward(const Side *s) {
    op_embed_forward(s->device, s->t[0], s->t[1], s->t[2], STREAM_COMPUTE);
}

static void backward(const Side *s) {
    op_embed_backward(s->device, s->t[0], s->t[1], s->t[2], STREAM_COMPUTE);
}

/* Ids with many repetitions: half of them from the first eighth of the vocabulary. */
static Tensor ids_make(int64_t T, int64_t V) {
    Tensor ids = T1(DTYPE_I32, T);
    for (int64_t t = 0; t < T; t++) {
        const uint64_t bits = rng_bits(3, RNG_TEST, 0, (uint64_t)t), range = (uint64_t)(bits & 1 ? V : (V + 7) / 8);
        t_set(ids, t, (double)((bits >> 1) % range));
    }
    return ids;
}

static void expect_embed(Dtype dtype, Tensor ids, int64_t D, int64_t V, int64_t gap) {
    const int64_t T = ids.shape[0];
    Tensor w = t_normal(T2(dtype, V, D), 1, 1), y = t_slice(dtype, T, D, gap),
           dy = t_normal(t_slice(dtype, T, D, gap), 1, 2);
    Tensor dw = t_normal(T2(DTYPE_F32, V, D), 1, 3);
    const char *name = case_name("%s T %d, D %d, V %d, gap %d", dtype_name(dtype), (int)T, (int)D, (int)V, (int)gap);
    Case f = {.name = name,
              .run = forward,
              .args = {{"y", y, ARG_OUT}, {"ids", ids, ARG_IN}, {"w", w, ARG_IN}},
              .f32_tolerance = 1e-30,
              .bf16_tolerance = 1e-30};
    expect_case(&f);
    Case b = {.name = name,
              .run = backward,
              .args = {{"dw", dw, ARG_ADD}, {"dy", dy, ARG_IN}, {"ids", ids, ARG_IN}},
              .f32_tolerance = CUDA_SUM_TOLERANCE};
    expect_case(&b);
}

TEST(cuda_embed_awkward_shapes) {
    static const int64_t shapes[][4] = {{0, 8, 4, 0},    {1, 1, 1, 0},     {3, 7, 2, 0},       {100, 33, 50, 2},
                                        {257, 64, 9, 8}, {500, 520, 3, 0}, {1000, 128, 64, 16}};
    for (int i = 0; i < 14; i++) {
        const int64_t *n = shapes[i / 2];
        expect_embed(act_dtypes[i % 2], ids_make(n[0], n[2]), n[1], n[2], n[3]);
        t_free_all();
    }
}

/* Runs of every length around what one warp adds up, and one id for all. */
TEST(cuda_embed_runs_of_one_id) {
    for (int d = 0; d < 2; d++) {
        expect_embed(act_dtypes[d], t_fill(T1(DTYPE_I32, 333), 2), 72, 5, 0);
        Tensor ids = T1(DTYPE_I32, 40 * 41 / 2);
        int64_t at = 0;
        for (int id = 0; id < 40; id++)
            for (int i = 0; i <= id; i++) t_set(ids, at++, id);
        expect_embed(act_dtypes[d], ids, 136, 40, 0);
        t_free_all();
    }
}

/* A vocabulary of more ids than are counted at once, whose ids are equal but for a large power of two. Few columns,
 * because the table has them all. */
TEST(cuda_embed_large_vocabulary) {
    const int64_t V = (1 << 18) + 6;
    Tensor ids = T1(DTYPE_I32, 300);
    for (int64_t t = 0; t < 300; t++) t_set(ids, t, (double)((t * 7 % 3 << 17) + t % 5));
    for (int d = 0; d < 2; d++) expect_embed(act_dtypes[d], ids, 3, V, 0);
}

TEST(cuda_embed_large) {
    expect_embed(DTYPE_BF16, ids_make(4096, 1000), 2048, 1000, 0);
    t_free_all();
    expect_embed(DTYPE_BF16, ids_make(1100, 100), 7168, 100, 0);
    t_free_all();
    expect_embed(DTYPE_BF16, t_fill(T1(DTYPE_I32, 3000), 1), 2048, 2, 0); /* one id is the work of many blocks */
    t_free_all();
    expect_embed(DTYPE_F32, ids_make((1 << 15) + 77, 300), 8, 300, 0); /* more than are sorted at once */
}
