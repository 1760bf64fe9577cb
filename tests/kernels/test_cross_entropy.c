#include <math.h>

#include "op_test.h"

typedef struct {
    Tensor loss, logits, input, targets;
    int64_t vocab;
    StepParams params;
} Head;

static Head head_make(Dtype dtype, int64_t C, int64_t vocab, int64_t width) {
    Head h = {.loss = t_poison(T1(DTYPE_F32, C)),
              .logits = t_poison(T2(dtype, C, width)), /* the padded columns hold NaN: they must not matter */
              .input = t_normal(T2(dtype, C, vocab), 3, 1),
              .targets = T1(DTYPE_I32, C),
              .vocab = vocab,
              .params = {.loss_scale = {1, 0.15}}};
    for (int64_t c = 0; c < C; c++) t_set(h.targets, c, c % 4 == 2 ? -1 : (double)(c * 7 % vocab));
    t_set(h.targets, C - 1, (double)(vocab - 1));
    return h;
}

static void run(Head *h, int depth, bool want_gradient) {
    op_copy(DEV, tensor_cols(h->logits, 0, h->vocab), h->input, STREAM_COMPUTE);
    op_cross_entropy(DEV, h->loss, h->logits, h->targets, h->vocab, depth, want_gradient, &h->params, STREAM_COMPUTE);
}

static void expect_head(Head *h, int depth, double tolerance) {
    const int64_t C = h->input.shape[0], V = h->vocab, width = h->logits.shape[1];
    double *loss = t_doubles(h->loss), *gradient = t_doubles(h->logits);
    for (int64_t c = 0; c < C; c++) {
        int64_t target = (int64_t)t_get(h->targets, c);
        double largest = -INFINITY, sum = 0;
        for (int64_t j = 0; j < V; j++) largest = fmax(largest, t_get(h->input, c * V + j));
        for (int64_t j = 0; j < V; j++) sum += exp(t_get(h->input, c * V + j) - largest);
        loss[c] = target < 0 ? 0 : largest + log(sum) - t_get(h->input, c * V + target);
        for (int64_t j = 0; j < width; j++) {
            double p = j < V ? exp(t_get(h->input, c * V + j) - largest) / sum : 0;
            gradient[c * width + j] = target < 0 || j >= V ? 0 : h->params.loss_scale[depth] * (p - (j == target));
        }
    }
    run(h, depth, true);
    EXPECT(t_error(h->loss, loss) < OP_TOLERANCE, "%d of %d: loss off by %g", (int)V, (int)width,
           t_error(h->loss, loss));
    EXPECT(t_error(h->logits, gradient) <= tolerance, "%d of %d: gradient off by %g", (int)V, (int)width,
           t_error(h->logits, gradient));
    for (int64_t i = 0; i < C * width; i++)
        if (i % width >= V) EXPECT(t_get(h->logits, i) == 0, "padded column %d", (int)(i % width));
}

TEST(cross_entropy_against_double) {
    static const int64_t shapes[][3] = {{1, 1, 1}, {1, 2, 128}, {5, 17, 17}, {9, 257, 384}, {40, 1000, 1024}};
    for (int i = 0; i < 10; i++) {
        Dtype dtype = i % 2 ? DTYPE_BF16 : DTYPE_F32;
        Head h = head_make(dtype, shapes[i / 2][0], shapes[i / 2][1], shapes[i / 2][2]);
        for (int depth = 0; depth < 2; depth++) expect_head(&h, depth, i % 2 ? BF16_TOLERANCE : OP_TOLERANCE);
        t_free_all();
    }
}

TEST(cross_entropy_without_gradient_keeps_logits) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Head h = head_make(bf16 ? DTYPE_BF16 : DTYPE_F32, 7, 50, 64);
        run(&h, 0, false);
        EXPECT(t_same_bits(tensor_cols(h.logits, 0, 50), h.input), "the logits changed");
        Tensor loss = t_copy(h.loss);
        run(&h, 0, true);
        EXPECT(t_same_bits(loss, h.loss), "the loss depends on want_gradient");
        EXPECT(t_get(h.loss, 2) == 0, "no target, loss %g", t_get(h.loss, 2));
    }
}

/* Extremes: a sum of exponentials that would overflow, and a sure prediction. */
TEST(cross_entropy_extremes) {
    Head h = head_make(DTYPE_F32, 3, 4, 4);
    for (int64_t i = 0; i < 12; i++) t_set(h.input, i, i < 4 ? 1e4 : i < 8 ? -1e4 : i == 8 ? 200 : 0);
    for (int64_t c = 0; c < 3; c++) t_set(h.targets, c, c == 2 ? 0 : 1);
    run(&h, 0, true);
    EXPECT_NEAR(t_get(h.loss, 0), log(4), 1e-6);
    EXPECT_NEAR(t_get(h.loss, 1), log(4), 1e-6);
    EXPECT_NEAR(t_get(h.loss, 2), 0, 1e-30);
    EXPECT_NEAR(t_get(h.logits, 0), 0.25, 1e-6);
    EXPECT_NEAR(t_get(h.logits, 5), -0.75, 1e-6);
    EXPECT_NEAR(t_get(h.logits, 8), 0, 1e-30);

    t_set(h.input, 6, NAN); /* must come out as NaN, for the update to be skipped */
    run(&h, 0, true);
    EXPECT(isnan(t_get(h.loss, 1)) && isfinite(t_get(h.loss, 0)), "losses %g and %g", t_get(h.loss, 0),
           t_get(h.loss, 1));
}

/* The largest logit may stand anywhere, behind the last whole vector too: its exponential must not overflow. */
TEST(cross_entropy_largest_anywhere) {
    enum { WIDTH = 37 };
    Head h = head_make(DTYPE_F32, WIDTH, WIDTH, WIDTH);
    for (int64_t c = 0; c < WIDTH; c++) t_set(h.input, c * WIDTH + c, 1000), t_set(h.targets, c, (double)c);
    run(&h, 0, true);
    for (int64_t c = 0; c < WIDTH; c++) EXPECT_NEAR(t_get(h.loss, c), 0, 1e-30);
    EXPECT(t_is_finite(h.logits), "a gradient overflowed");
}

/* E7: a batch without any target. */
TEST(cross_entropy_without_targets) {
    Head h = head_make(DTYPE_F32, 6, 9, 16);
    t_fill(h.targets, -1), t_fill(h.input, NAN);
    run(&h, 0, true);
    for (int64_t c = 0; c < 6; c++) EXPECT(t_get(h.loss, c) == 0, "loss %d is %g", (int)c, t_get(h.loss, c));
    for (int64_t i = 0; i < 6 * 16; i++) EXPECT(t_get(h.logits, i) == 0, "gradient %d", (int)i);
}

static double total(void *context) {
    Head *h = (Head *)context;
    double sum = 0;
    run(h, 0, false);
    for (int64_t c = 0; c < h->loss.shape[0]; c++) sum += t_get(h->loss, c);
    return sum;
}

TEST(cross_entropy_gradient) {
    Head h = head_make(DTYPE_F32, 7, 19, 24);
    run(&h, 0, true);
    Tensor gradient = t_copy(tensor_cols(h.logits, 0, 19));
    fd_check("logits", h.input, gradient, total, NULL, &h, 200, NULL);
}

static void with_gradient(void *context) {
    run((Head *)context, 1, true);
}

TEST(cross_entropy_threads) {
    Head h = head_make(DTYPE_BF16, 61, 333, 384);
    Tensor outputs[] = {h.loss, h.logits};
    expect_same_bits("cross_entropy", with_gradient, &h, outputs, 2);
}
