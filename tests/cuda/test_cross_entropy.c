/* Cross entropy and its gradient in place. */
#include <math.h>

#include "tests/cuda/cuda_test.h"

typedef struct {
    int64_t vocab;
    int depth;
    bool want_gradient;
} Loss;

static void run(const Side *s) {
    const Loss *l = (const Loss *)s->context;
    op_cross_entropy(s->device, s->t[0], s->t[1], s->t[2], l->vocab, l->depth, l->want_gradient, s->params,
                     STREAM_COMPUTE);
}

static Tensor targets_make(int64_t rows, int64_t vocab) {
    Tensor targets = T1(DTYPE_I32, rows);
    for (int64_t c = 0; c < rows; c++) /* first, last, in between, none */
        t_set(targets, c,
              c % 5 == 0   ? (double)(vocab - 1)
              : c % 5 == 1 ? 0
              : c % 5 == 2 ? -1
                           : (double)(c * 7919 % vocab));
    return targets;
}

static void expect_loss_of(const char *what, Tensor logits, Tensor targets, Loss l) {
    Case c = {.name =
                  case_name("%s %s (%d, %d of %d), depth %d, %s", what, dtype_name(logits.dtype), (int)logits.shape[0],
                            (int)l.vocab, (int)logits.shape[1], l.depth, l.want_gradient ? "gradient" : "loss"),
              .run = run,
              .context = &l,
              .args = {{"loss", T1(DTYPE_F32, logits.shape[0]), ARG_OUT},
                       {"logits", logits, l.want_gradient ? ARG_ADD : ARG_IN},
                       {"targets", targets, ARG_IN}},
              .by_element = "logits",
              .params = {.loss_scale = {1, 0.3, 0.1}},
              .f32_tolerance = CUDA_SUM_TOLERANCE};
    expect_case(&c);
}

static void expect_loss(Dtype dtype, int64_t rows, int64_t vocab, int64_t width, int64_t gap) {
    for (int variant = 0; variant < 2; variant++) {
        const Loss l = {vocab, variant, variant == 0};
        Tensor logits = t_normal(t_slice(dtype, rows, width, gap), 3, 1);
        expect_loss_of("normal", logits, targets_make(rows, vocab), l);
        t_free_all();
    }
}

TEST(cuda_cross_entropy_awkward_shapes) {
    static const int64_t shapes[][4] = {{0, 8, 8, 0},      {1, 1, 1, 0},         {5, 1, 128, 0},
                                        {7, 33, 33, 0},    {11, 100, 128, 0},    {20, 257, 384, 2},
                                        {9, 256, 256, 16}, {300, 1000, 1024, 0}, {6, 8193, 8320, 8}};
    for (int i = 0; i < 18; i++) {
        const int64_t *n = shapes[i / 2];
        expect_loss(act_dtypes[i % 2], n[0], n[1], n[2], n[3]);
    }
}

TEST(cuda_cross_entropy_large_vocabularies) {
    expect_loss(DTYPE_BF16, 7, 129280, 129280, 0);
    expect_loss(DTYPE_BF16, 5, 163839, 163840, 0);
    expect_loss(DTYPE_F32, 3, 129280, 129280, 0);
    expect_loss(DTYPE_F32, 3, 50257, 50304, 2);
    expect_loss(DTYPE_BF16, 3, 163841, 163848, 8); /* a pack more than shared memory and six packs a thread hold */
    expect_loss(DTYPE_BF16, 2, 200001, 200064, 0);
}

/* More rows than blocks: a block takes several, with rows of padding among them. */
TEST(cuda_cross_entropy_many_rows) {
    expect_loss(DTYPE_BF16, 700, 12000, 12032, 0);
}

/* Runs of padding between rows: the next row of a block is there already or must be fetched. In
 * the end rows wider than what waits in shared memory. */
TEST(cuda_cross_entropy_padding_between_rows) {
    for (int d = 0; d < 2; d++) {
        const int64_t rows = 900, vocab = d ? 4093 : 1000;
        Tensor logits = t_normal(T2(act_dtypes[d], rows, d ? 4096 : 1008), 3, 1), targets = targets_make(rows, vocab);
        for (int64_t c = 0; c < rows; c++)
            if (c / 140 % 3 == 1) t_set(targets, c, -1);
        const Loss l = {vocab, 0, true};
        expect_loss_of("padding", logits, targets, l);
        t_free_all();
    }
    expect_loss(DTYPE_F32, 140, 65000, 65024, 0);
}

/* Huge logits, -inf before and behind the first finite one, NaN in one row alone, NaN in padded columns. */
TEST(cuda_cross_entropy_special_logits) {
    for (int d = 0; d < 2; d++) {
        const int64_t rows = 6, vocab = 300, width = 304;
        Tensor logits = t_normal(T2(act_dtypes[d], rows, width), 3, 1), targets = t_fill(T1(DTYPE_I32, rows), 5);
        for (int64_t i = 0; i < vocab; i++) {
            t_set(logits, i, 1e4 + (double)(i % 3));
            if (i != 290) t_set(logits, width + i, -INFINITY);
            if (i < 280) t_set(logits, 2 * width + i, i == 5 ? 1 : -INFINITY);
        }
        t_set(logits, 3 * width + 17, NAN);
        for (int64_t c = 0; c < rows; c++)
            for (int64_t i = vocab; i < width; i++) t_set(logits, c * width + i, NAN);
        const Loss l = {vocab, 0, true};
        expect_loss_of("special", logits, targets, l);
    }
}
