/* The end of a step: sums, the gate with its reasons to skip, AdamW, the router bias. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "op_test.h"

/* ---- sums -------------------------------------------------------------------------------------------------------- */

TEST(loss_sum_against_double) {
    static const int64_t sizes[] = {0, 1, 7, SUM_PARTIAL, SUM_PARTIAL + 1, 70 * SUM_PARTIAL + 13};
    for (int i = 0; i < 6; i++) {
        Tensor x = t_normal(T1(DTYPE_F32, sizes[i]), 2, 1);
        StepStats stats = {.loss_sum = {10, 20, 30}};
        long double sum = 20, magnitude = 1;
        for (int64_t k = 0; k < sizes[i]; k++) sum += t_get(x, k), magnitude += fabs(t_get(x, k));
        op_loss_sum(DEV, &stats, x, 1, STREAM_COMPUTE);
        EXPECT_NEAR(stats.loss_sum[1], sum, 1e-13L * magnitude);
        EXPECT(stats.loss_sum[0] == 10 && stats.loss_sum[2] == 30, "another depth was touched");
        t_free_all();
    }
}

/* Of any length, overlapping, with gaps, empty. What a partial is follows from its interval alone. */
static const Interval intervals[] = {
    {0, 1}, {5, 0}, {3, 2 * SUM_PARTIAL + 5}, {1, 7}, {SUM_PARTIAL, SUM_PARTIAL}, {9, 70 * SUM_PARTIAL}};
enum { INTERVALS = sizeof intervals / sizeof *intervals };

/* Up to 286,720 squares, one after the other in double. */
TEST(grad_squares_against_double) {
    Tensor x = t_normal(T1(DTYPE_F32, 71 * SUM_PARTIAL), 2, 1), partial = t_poison(T1(DTYPE_F64, INTERVALS));
    Tensor lone = T1(DTYPE_F64, 1);
    StepStats stats = {.grad_norm_sq = 5};
    long double total = 0;
    op_grad_squares(DEV, partial, x, intervals, STREAM_COMPUTE);
    for (int i = 0; i < INTERVALS; i++) {
        long double squares = 0;
        for (int64_t k = 0; k < intervals[i].n; k++)
            squares += t_get(x, intervals[i].first + k) * t_get(x, intervals[i].first + k);
        EXPECT_NEAR(t_get(partial, i), squares, 1e-12L * squares);
        op_grad_squares(DEV, lone, x, &intervals[i], STREAM_COMPUTE);
        EXPECT(t_get(lone, 0) == t_get(partial, i), "interval %d alone", i);
        total += squares;
    }
    op_grad_norm(DEV, &stats, partial, STREAM_COMPUTE);
    EXPECT_NEAR(stats.grad_norm_sq, total, 1e-12L * total);
    t_free_all();
}

/* 2^30 + 1 in float would lose the ones. */
TEST(grad_norm_is_summed_in_double) {
    Tensor x = t_fill(T1(DTYPE_F32, 3 * SUM_PARTIAL), 1), partial = T1(DTYPE_F64, 2);
    const Interval halves[2] = {{0, SUM_PARTIAL + 1}, {SUM_PARTIAL + 1, 2 * SUM_PARTIAL - 1}};
    t_set(x, 0, 32768);
    StepStats stats = {0};
    op_grad_squares(DEV, partial, x, halves, STREAM_COMPUTE);
    op_grad_norm(DEV, &stats, partial, STREAM_COMPUTE);
    EXPECT_NEAR(stats.grad_norm_sq, 1073741824.0 + 3 * SUM_PARTIAL - 1, 0);
}

typedef struct {
    Tensor x, partial, result;
} Sums;

static void sums(void *context) {
    Sums *s = (Sums *)context;
    StepStats stats = {0};
    op_loss_sum(DEV, &stats, s->x, 0, STREAM_COMPUTE);
    op_grad_squares(DEV, s->partial, s->x, intervals, STREAM_COMPUTE);
    op_grad_norm(DEV, &stats, s->partial, STREAM_COMPUTE);
    t_set(s->result, 0, stats.loss_sum[0]);
    t_set(s->result, 1, stats.grad_norm_sq);
}

TEST(loss_sum_and_grad_norm_threads) {
    Sums s = {t_normal(T1(DTYPE_F32, 100 * SUM_PARTIAL + 5), 1, 1), T1(DTYPE_F64, INTERVALS), T1(DTYPE_F64, 2)};
    expect_same_bits("sums", sums, &s, &s.result, 1);
}

/* ---- gate -------------------------------------------------------------------------------------------------------- */

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
static const StepStats stats_ok = {.loss_sum = {300, 400}, .grad_norm_sq = 2500}; /* loss 3, norm 0.5 */

static void expect_gate(const char *name, StepStats stats, StepParams params, int want) {
    UpdateState state = {.adam_t = 5, .skipped_total = 3, .skipped_in_a_row = 2};
    op_update_gate(DEV, &stats, &state, &params, STREAM_COMPUTE);
    EXPECT(stats.skip == want, "%s: skip is %d, not %d", name, stats.skip, want);
    EXPECT_EQ(state.adam_t, want ? 5 : 6);
    EXPECT_EQ(state.skipped_total, want ? 4 : 3);
    EXPECT_EQ(state.skipped_in_a_row, want ? 3 : 0);
    EXPECT(!want || stats.grad_scale == 0, "%s: a skipped update scales gradients by %g", name, stats.grad_scale);
}

/* It stands until the host clears it, and counts as no skip: the step will be done again. */
TEST(update_gate_waits_for_room) {
    UpdateState state = {.adam_t = 5, .skipped_total = 3, .skipped_in_a_row = 2};
    StepStats s = stats_ok;
    s.overflow = 2;
    for (int i = 0; i < 3; i++) {
        op_update_gate(DEV, &s, &state, &params_ok, STREAM_COMPUTE);
        EXPECT(s.skip == SKIP_OVERFLOW && s.grad_scale == 0 && state.has_overflow == 1, "step %d: skip %d", i, s.skip);
        EXPECT(state.adam_t == 5 && state.skipped_total == 3 && state.skipped_in_a_row == 2, "step %d is counted", i);
        s = stats_ok; /* those behind it have room, and wait all the same */
    }
    state.has_overflow = 0;
    op_update_gate(DEV, &s, &state, &params_ok, STREAM_COMPUTE);
    EXPECT(s.skip == SKIP_NONE && state.adam_t == 6 && state.skipped_in_a_row == 0, "skip %d", s.skip);
}

TEST(update_gate_reasons) {
    StepStats s = stats_ok;
    StepParams p = params_ok;
    expect_gate("good", s, p, SKIP_NONE);
    s.loss_sum[2] = NAN;
    expect_gate("depth that does not count", s, p, SKIP_NONE);
    s.loss_sum[1] = INFINITY;
    expect_gate("MTP loss", s, p, SKIP_LOSS_NOT_FINITE);
    s = stats_ok, s.loss_sum[0] = NAN;
    expect_gate("loss", s, p, SKIP_LOSS_NOT_FINITE);
    s = stats_ok, s.grad_norm_sq = NAN;
    expect_gate("norm", s, p, SKIP_NORM_NOT_FINITE);
    s.grad_norm_sq = INFINITY;
    expect_gate("infinite norm", s, p, SKIP_NORM_NOT_FINITE);
    s.loss_sum[0] = -INFINITY;
    expect_gate("loss before norm", s, p, SKIP_LOSS_NOT_FINITE);
    p.inv_tokens = 0;
    expect_gate("no targets before all", s, p, SKIP_NO_TARGETS);

    s = stats_ok, p = params_ok, p.skip_loss_above = 2.9;
    expect_gate("loss spike", s, p, SKIP_LOSS_SPIKE);
    p.skip_loss_above = 3.1;
    expect_gate("below the bound", s, p, SKIP_NONE);
    p.skip_norm_above = 0.49;
    expect_gate("norm spike", s, p, SKIP_NORM_SPIKE);
    p.skip_loss_above = 2.9;
    expect_gate("loss spike before norm spike", s, p, SKIP_LOSS_SPIKE);
    s.grad_norm_sq = NAN;
    expect_gate("norm before spikes", s, p, SKIP_NORM_NOT_FINITE);
}

TEST(update_gate_norm_and_clip) {
    UpdateState state = {0};
    StepStats s = stats_ok;
    op_update_gate(DEV, &s, &state, &params_ok, STREAM_COMPUTE);
    EXPECT_NEAR(s.grad_norm, 0.5, 1e-15);
    EXPECT_NEAR(s.grad_scale, 0.01, 1e-17); /* below the bound: nothing is clipped */
    s = stats_ok, s.grad_norm_sq = 1e6;     /* norm 10, bound 1 */
    op_update_gate(DEV, &s, &state, &params_ok, STREAM_COMPUTE);
    EXPECT_NEAR(s.grad_norm, 10, 1e-13);
    EXPECT_NEAR(s.grad_scale, 0.001, 1e-17);
    StepParams off = params_ok;
    off.grad_clip = 0;
    s = stats_ok, s.grad_norm_sq = 1e6;
    op_update_gate(DEV, &s, &state, &off, STREAM_COMPUTE);
    EXPECT_NEAR(s.grad_scale, 0.01, 1e-17);
    off.inv_tokens = 0; /* E7: everything stays finite */
    s = (StepStats){0};
    op_update_gate(DEV, &s, &state, &off, STREAM_COMPUTE);
    EXPECT(s.grad_norm == 0 && s.grad_scale == 0, "norm %g, scale %g", s.grad_norm, s.grad_scale);
    EXPECT_EQ(state.adam_t, 3);
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

typedef struct {
    Tensor copy, master, m, v, grad;
    bool decay;
    StepParams params;
    StepStats stats;
    UpdateState state;
} Adam;

static Adam adam_make(Dtype moments, int64_t n, bool decay) {
    Adam a = {.copy = t_poison(T1(DTYPE_BF16, n)),
              .master = t_normal(T1(DTYPE_F32, n), 1, 1),
              .m = t_normal(T1(moments, n), 0.1, 2),
              .v = T1(moments, n),
              .grad = t_normal(T1(DTYPE_F32, n), 30, 3),
              .decay = decay,
              .params = params_ok,
              .stats = {.grad_scale = 0.004},
              .state = {.adam_t = 3}};
    for (int64_t i = 0; i < n; i++) t_set(a.v, i, 0.01 + fabs(t_get(a.m, i)));
    return a;
}

static void step(Adam *a) {
    op_adamw_cast(DEV, a->copy, tensor_none(), a->master, a->m, a->v, a->grad, a->decay, &a->params, &a->stats,
                  &a->state, STREAM_COMPUTE);
}

TEST(adamw_against_double) {
    static const int64_t sizes[] = {1, 5, SUM_PARTIAL, 2 * SUM_PARTIAL + 77};
    for (int i = 0; i < 16; i++) {
        Dtype moments = i % 2 ? DTYPE_BF16 : DTYPE_F32;
        double tolerance = i % 2 ? BF16_TOLERANCE : OP_TOLERANCE;
        const int64_t n = sizes[i / 4];
        Adam a = adam_make(moments, n, i / 2 % 2);
        double *w = t_doubles(a.master), *m = t_doubles(a.m), *v = t_doubles(a.v);
        for (int64_t k = 0; k < n; k++) {
            double g = t_get(a.grad, k) * 0.004, decay = a.decay ? 0.1 : 0;
            m[k] = 0.9 * m[k] + 0.1 * g;
            v[k] = 0.95 * v[k] + 0.05 * g * g;
            double mhat = m[k] / (1 - pow(0.9, 3)), vhat = v[k] / (1 - pow(0.95, 3));
            w[k] -= 1e-2 * (mhat / (sqrt(vhat) + 1e-8) + decay * w[k]);
        }
        step(&a);
        EXPECT(t_error(a.master, w) < OP_TOLERANCE, "%d elements: w off by %g", (int)n, t_error(a.master, w));
        EXPECT(t_error(a.m, m) <= tolerance && t_error(a.v, v) <= tolerance, "moments off by %g and %g",
               t_error(a.m, m), t_error(a.v, v));
        for (int64_t k = 0; k < n; k++)
            EXPECT(t_get(a.copy, k) == (double)bf16_to_real(real_to_bf16((real)t_get(a.master, k))), "copy %d", (int)k);
        Adam without = adam_make(moments, n, a.decay);
        without.copy = tensor_none();
        step(&without);
        EXPECT(t_same_bits(without.master, a.master) && t_same_bits(without.v, a.v), "the copy changes the update");
        t_free_all();
    }
}

/* A first step from zero moments moves a weight by lr, whatever its gradient's size; a zero gradient moves nothing. */
TEST(adamw_first_step) {
    Adam a = adam_make(DTYPE_F32, 4, false);
    t_fill(a.m, 0), t_fill(a.v, 0), t_fill(a.master, 1);
    static const double grad[4] = {1e-3, -1, 1e3, 0};
    for (int i = 0; i < 4; i++) t_set(a.grad, i, grad[i]);
    a.stats.grad_scale = 1, a.state.adam_t = 1;
    step(&a);
    EXPECT_NEAR(t_get(a.master, 0), 0.99, 2e-7);
    EXPECT_NEAR(t_get(a.master, 1), 1.01, 2e-7);
    EXPECT_NEAR(t_get(a.master, 2), 0.99, 2e-7);
    EXPECT_NEAR(t_get(a.master, 3), 1, 0);
}

/* A skipped update reads and writes nothing: neither weights, moments, copy nor router bias (E8). */
TEST(skipped_update_changes_nothing) {
    Adam a = adam_make(DTYPE_BF16, 100, true), before;
    t_poison(a.grad);
    a.stats.skip = SKIP_NORM_NOT_FINITE;
    before = a;
    before.copy = t_copy(a.copy), before.master = t_copy(a.master), before.m = t_copy(a.m), before.v = t_copy(a.v);
    step(&a);
    EXPECT(t_same_bits(a.master, before.master) && t_same_bits(a.m, before.m) && t_same_bits(a.v, before.v) &&
               t_same_bits(a.copy, before.copy),
           "a skipped update wrote something");
    Tensor bias = t_normal(T1(DTYPE_F32, 8), 1, 1), kept = t_copy(bias), counts = t_normal(T1(DTYPE_I32, 8), 50, 2);
    op_bias_step(DEV, bias, counts, &a.params, &a.stats, STREAM_COMPUTE);
    EXPECT(t_same_bits(bias, kept), "a skipped update moved the router bias");
}

static void step_from_start(void *context) {
    Adam *a = (Adam *)context, start = adam_make(a->m.dtype, a->master.shape[0], true);
    memcpy(a->master.data, start.master.data, tensor_bytes(a->master));
    memcpy(a->m.data, start.m.data, tensor_bytes(a->m));
    memcpy(a->v.data, start.v.data, tensor_bytes(a->v));
    step(a);
}

TEST(adamw_threads) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Adam a = adam_make(bf16 ? DTYPE_BF16 : DTYPE_F32, 10 * SUM_PARTIAL + 3, true);
        Tensor outputs[] = {a.master, a.m, a.v, a.copy};
        expect_same_bits("adamw", step_from_start, &a, outputs, 4);
    }
}

/* ---- router bias ------------------------------------------------------------------------------------------------- */

TEST(bias_step_by_sign) {
    static const int counts_list[4] = {10, 30, 20, 20}; /* mean 20 */
    Tensor bias = t_fill(T1(DTYPE_F32, 4), 0.5), counts = t_ids(counts_list, 4);
    StepStats stats = {0};
    op_bias_step(DEV, bias, counts, &params_ok, &stats, STREAM_COMPUTE);
    static const double want[4] = {0.501, 0.499, 0.5, 0.5};
    for (int i = 0; i < 4; i++) EXPECT_NEAR(t_get(bias, i), want[i], 1e-7);

    /* Counts beyond the integers of a float, one off the mean; then no tokens at all. */
    for (int i = 0; i < 4; i++) t_set(counts, i, 500000001 - (i == 0) + (i == 1)), t_set(bias, i, 0);
    op_bias_step(DEV, bias, counts, &params_ok, &stats, STREAM_COMPUTE);
    static const double sign[4] = {1, -1, 0, 0};
    for (int i = 0; i < 4; i++) EXPECT_NEAR(t_get(bias, i), 0.001 * sign[i], 1e-9);
    t_fill(counts, 0), t_fill(bias, 0);
    op_bias_step(DEV, bias, counts, &params_ok, &stats, STREAM_COMPUTE);
    for (int i = 0; i < 4; i++) EXPECT_NEAR(t_get(bias, i), 0, 0);
}
