/* The end of a step: sums, gate, AdamW, router bias. */
#include <math.h>
#include <string.h>

#include "tests/cuda/cuda_test.h"

static const StepParams params_ok = {.step = 1,
                                     .inv_tokens = 0.01,
                                     .loss_scale = {1, 0.3},
                                     .lr = 1e-2,
                                     .beta1 = 0.9,
                                     .beta2 = 0.95,
                                     .eps = 1e-8,
                                     .weight_decay = 0.1,
                                     .grad_clip = 1,
                                     .bias_speed = 0.001,
                                     .skip_loss_above = INFINITY,
                                     .skip_norm_above = INFINITY};
static const StepStats stats_ok = {.loss_sum = {300, 400}, .grad_norm_sq = 2500};

/* ---- sums -------------------------------------------------------------------------------------------------------- */

static void loss_sum(const Side *s) {
    op_loss_sum(s->device, s->stats, s->t[0], 1, STREAM_COMPUTE);
}

TEST(cuda_loss_sum) {
    static const int64_t sizes[] = {
        0, 1, 7, 1023, SUM_PARTIAL, SUM_PARTIAL + 1, 70 * SUM_PARTIAL + 13, 2300 * SUM_PARTIAL + 5};
    for (int i = 0; i < 8; i++) {
        for (int offset = 0; offset < 2; offset++) { /* a slice that begins between 16-byte addresses */
            Tensor x = t_normal(T1(DTYPE_F32, sizes[i] + offset), 2, 1);
            Case c = {.name = case_name("%d elements from %d", (int)sizes[i], offset),
                      .run = loss_sum,
                      .args = {{"x", tensor_rows(x, offset, sizes[i]), ARG_IN}},
                      .stats = {.loss_sum = {10, 20, 30}}};
            expect_case(&c);
            EXPECT(c.stats.loss_sum[0] == 10 && c.stats.loss_sum[2] == 30, "another depth was touched");
            t_free_all();
        }
    }
}

static void norm(const Side *s) {
    op_grad_squares(s->device, s->t[0], s->t[1], (const Interval *)s->t[2].data, STREAM_COMPUTE);
    op_grad_norm(s->device, s->stats, s->t[0], STREAM_COMPUTE);
}

/* Intervals of any length from any address; what a partial is follows from its interval alone, wherever it stands. */
TEST(cuda_grad_norm) {
    enum { N = 2300 };
    Tensor x = t_normal(T1(DTYPE_F32, 40 * SUM_PARTIAL), 2, 1), partial = T1(DTYPE_F64, N);
    Tensor list = T1(DTYPE_F64, 2 * N);
    Interval *interval = (Interval *)list.data;
    for (int i = 0; i < N; i++)
        interval[i] = (Interval){i % 1000 * 7, i % 3 == 2 ? 0 : i % 5 == 4 ? 36 * SUM_PARTIAL - i : i};
    interval[N - 1] = interval[N - 7];
    Case c = {.name = "norm of intervals",
              .run = norm,
              .args = {{"partial", partial, ARG_OUT}, {"g", x, ARG_IN}, {"intervals", list, ARG_IN}},
              .stats = {.grad_norm_sq = 5}};
    expect_case(&c);
    Tensor gpu_x = d_copy(x), gpu_list = d_copy(list), gpu_partial = d_copy(partial);
    op_grad_squares(GPU, gpu_partial, gpu_x, (const Interval *)gpu_list.data, STREAM_COMPUTE);
    Tensor got = d_read(gpu_partial);
    EXPECT(t_get(got, N - 1) == t_get(got, N - 7) && t_get(got, N - 1) > 0, "the same interval twice: %.17g and %.17g",
           t_get(got, N - 1), t_get(got, N - 7));
    d_free_all();
    t_free_all();
}

/* 2^30 and three thousand ones: exact in f64 alone. */
TEST(cuda_grad_norm_is_summed_in_double) {
    Tensor x = t_fill(T1(DTYPE_F32, 3 * SUM_PARTIAL), 1), list = T1(DTYPE_F64, 2), partial = T1(DTYPE_F64, 1);
    const Interval all = {0, 3 * SUM_PARTIAL};
    memcpy(list.data, &all, sizeof all);
    t_set(x, 0, 32768);
    StepStats stats = {0};
    Tensor gpu_x = d_copy(x), gpu_list = d_copy(list), gpu_partial = d_copy(partial);
    Tensor gpu_stats = d_copy(tensor_1d(&stats, DTYPE_I32, sizeof stats / 4));
    op_grad_squares(GPU, gpu_partial, gpu_x, (const Interval *)gpu_list.data, STREAM_COMPUTE);
    op_grad_norm(GPU, (StepStats *)gpu_stats.data, gpu_partial, STREAM_COMPUTE);
    op_copy_out(GPU, &stats, gpu_stats.data, sizeof stats, STREAM_COMPUTE);
    op_synchronize(GPU, STREAM_COMPUTE);
    EXPECT_NEAR(stats.grad_norm_sq, 1073741824.0 + 3 * SUM_PARTIAL - 1, 0);
}

/* ---- gate -------------------------------------------------------------------------------------------------------- */

static void gate(const Side *s) {
    op_update_gate(s->device, s->stats, s->state, s->params, STREAM_COMPUTE);
}

static void expect_gate(const char *name, StepStats stats, StepParams params, int want) {
    Case c = {.name = name,
              .run = gate,
              .params = params,
              .stats = stats,
              .state = {.adam_t = 5, .skipped_total = 3, .skipped_in_a_row = 2}};
    expect_case(&c);
    EXPECT(c.stats.skip == want, "%s: skip is %d, not %d", name, c.stats.skip, want);
}

TEST(cuda_update_gate) {
    StepStats s = stats_ok;
    StepParams p = params_ok;
    expect_gate("good", s, p, SKIP_NONE);
    s.grad_norm_sq = 1e6;
    expect_gate("clipped", s, p, SKIP_NONE);
    p.grad_clip = 0;
    expect_gate("not clipped", s, p, SKIP_NONE);
    s = stats_ok, s.loss_sum[2] = NAN;
    expect_gate("depth that does not count", s, p, SKIP_NONE);
    s.loss_sum[1] = INFINITY;
    expect_gate("MTP loss", s, p, SKIP_LOSS_NOT_FINITE);
    s = stats_ok, s.grad_norm_sq = NAN;
    expect_gate("norm", s, p, SKIP_NORM_NOT_FINITE);
    s.grad_norm_sq = INFINITY;
    expect_gate("infinite norm", s, p, SKIP_NORM_NOT_FINITE);
    p.inv_tokens = 0;
    expect_gate("no targets", s, p, SKIP_NO_TARGETS);
    s = stats_ok, p = params_ok, p.skip_loss_above = 2.9;
    expect_gate("loss spike", s, p, SKIP_LOSS_SPIKE);
    p.skip_loss_above = 3.1, p.skip_norm_above = 0.49;
    expect_gate("norm spike", s, p, SKIP_NORM_SPIKE);
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

static void adamw(const Side *s) {
    op_adamw_cast(s->device, s->t[0], tensor_none(), s->t[1], s->t[2], s->t[3], s->t[4], *(const bool *)s->context,
                  s->params, s->stats, s->state, STREAM_COMPUTE);
}

static void expect_adamw(Dtype moments, int64_t n, int64_t offset, bool has_copy, bool decay, int skip) {
    const int64_t whole = n + offset;
    Tensor v = t_normal(T1(moments, whole), 0.1, 2), grad = t_normal(T1(DTYPE_F32, whole), 30, 3);
    for (int64_t i = 0; i < whole; i++) t_set(v, i, 0.01 + fabs(t_get(v, i)));
    Tensor copy = has_copy ? tensor_rows(t_normal(T1(DTYPE_BF16, whole), 1, 4), offset, n) : tensor_none();
    Case c = {.name = case_name("%s, %d elements from %d, copy %d, decay %d, skip %d", dtype_name(moments), (int)n,
                                (int)offset, has_copy, decay, skip),
              .run = adamw,
              .context = &decay,
              .args = {{"copy", copy, skip ? ARG_ADD : ARG_OUT},
                       {"master", tensor_rows(t_normal(T1(DTYPE_F32, whole), 1, 1), offset, n), ARG_ADD},
                       {"m", tensor_rows(t_normal(T1(moments, whole), 0.1, 2), offset, n), ARG_ADD},
                       {"v", tensor_rows(v, offset, n), ARG_ADD},
                       {"grad", tensor_rows(skip ? t_poison(grad) : grad, offset, n), ARG_IN}},
              .by_element = "v",
              .params = params_ok,
              .stats = {.grad_scale = 0.004, .skip = skip},
              .state = {.adam_t = 3}};
    expect_case(&c);
    t_free_all();
}

TEST(cuda_adamw) {
    static const int64_t sizes[] = {0, 1, 5, 2048, 2051, 2 * SUM_PARTIAL + 77};
    for (int i = 0; i < 12; i++) {
        for (int variant = 0; variant < 4; variant++) {
            expect_adamw(act_dtypes[i % 2], sizes[i / 2], 0, variant & 1, variant / 2, SKIP_NONE);
            expect_adamw(act_dtypes[i % 2], sizes[i / 2], 3, variant & 1, variant / 2, SKIP_NONE);
        }
    }
    expect_adamw(DTYPE_BF16, 3000000, 0, true, true, SKIP_NONE);
}

/* Not even a NaN among the gradients is seen. */
TEST(cuda_skipped_update_changes_nothing) {
    expect_adamw(DTYPE_BF16, 3000, 0, true, true, SKIP_NORM_NOT_FINITE);
    expect_adamw(DTYPE_F32, 3000, 1, true, true, SKIP_LOSS_SPIKE);
}

/* A later step, where 1 - beta^t is nearly one, and the first. */
TEST(cuda_adamw_bias_correction) {
    static const int64_t steps[] = {1, 2, 1000, 1000000};
    for (int i = 0; i < 4; i++) {
        const bool decay = true;
        const int64_t n = 1000;
        Case c = {.name = case_name("t %d", (int)steps[i]),
                  .run = adamw,
                  .context = &decay,
                  .args = {{"copy", T1(DTYPE_BF16, n), ARG_OUT},
                           {"master", t_normal(T1(DTYPE_F32, n), 1e-3, 1), ARG_ADD},
                           {"m", T1(DTYPE_F32, n), ARG_ADD},
                           {"v", T1(DTYPE_F32, n), ARG_ADD},
                           {"grad", t_normal(T1(DTYPE_F32, n), 30, 3), ARG_IN}},
                  .params = params_ok,
                  .stats = {.grad_scale = 0.004},
                  .state = {.adam_t = steps[i]}};
        c.params.beta2 = 0.999;
        expect_case(&c);
    }
}

/* ---- router bias ------------------------------------------------------------------------------------------------- */

static void bias_step(const Side *s) {
    op_bias_step(s->device, s->t[0], s->t[1], s->params, s->stats, STREAM_COMPUTE);
}

TEST(cuda_bias_step) {
    static const int64_t sizes[] = {1, 3, 64, 256, 1000};
    for (int i = 0; i < 10; i++) {
        const int64_t E = sizes[i / 2];
        Tensor counts = T1(DTYPE_I32, E);
        for (int64_t e = 0; e < E; e++) t_set(counts, e, e % 5 == 4 ? 2000000000 : 1999999999 + (double)(e % 2));
        Case c = {.name = case_name("%d experts%s", (int)E, i % 2 ? ", skipped" : ""),
                  .run = bias_step,
                  .args = {{"bias", t_normal(T1(DTYPE_F32, E), 0.1, 1), ARG_ADD}, {"counts", counts, ARG_IN}},
                  .params = params_ok,
                  .stats = {.skip = i % 2 ? SKIP_LOSS_SPIKE : SKIP_NONE},
                  .f32_tolerance = 1e-30};
        expect_case(&c);
        t_free_all();
    }
}
