/* Learning rate, batch, bias speed and MTP weight over a run. Golden numbers by hand from the formulas in lr.h and from
 * DeepSeek-V3's own schedules (report 4.2). */
#include <math.h>
#include <string.h>

#include "kernels/base/rng.h"
#include "model/train/lr.h"
#include "tests/test.h"

static const int64_t billion = 1000000000, trillion = 1000000000000;

static Schedule number(double value) {
    return (Schedule){.n = 1, .value = {value}};
}

static void add_point(Schedule *s, int64_t tokens, double value) {
    s->tokens[s->n] = tokens;
    s->value[s->n++] = value;
}

/* 100 steps of 8 x 256 tokens, lr 1e-3 -> 1e-4, 10 steps of warm-up. */
static void small_config(Config *c, Shape shape) {
    memset(c, 0, sizeof *c);
    c->train.seq_len = 256;
    c->train.micro_batch_size = 8;
    c->train.global_batch_size = number(8);
    c->train.steps = 100;
    c->train.lr = number(1e-3);
    c->train.lr_final = 1e-4;
    c->train.lr_warmup_steps = 10;
    c->train.lr_shape = shape;
    c->train.lr_decay_fraction = 0.2;
}

static double lr_of_step(const Config *c, int64_t step) {
    RunLength length = run_length(c, 1);
    int64_t batch = batch_at(c, 0, 1);
    return lr_at(c, &length, step, (step - 1) * batch * c->train.seq_len);
}

/* The first step has lr/warmup, never 0; step == warmup has the whole rate, to the bit. */
TEST(lr_warm_up_starts_above_zero_and_peaks_at_its_last_step) {
    Config c;
    for (Shape shape = SHAPE_CONSTANT; shape <= SHAPE_WSD; shape++) {
        small_config(&c, shape);
        for (int step = 1; step <= 10; step++) EXPECT_NEAR(lr_of_step(&c, step), 1e-4 * step, 1e-18);
        EXPECT(lr_of_step(&c, 10) == 1e-3);
        EXPECT(shape == SHAPE_LINEAR || shape == SHAPE_COSINE ? lr_of_step(&c, 11) < 1e-3 : lr_of_step(&c, 11) == 1e-3);
        for (int warmup = 0; warmup <= 1; warmup++) {
            c.train.lr_warmup_steps = warmup;
            EXPECT(lr_of_step(&c, 1) == 1e-3, "warm-up of %d: %g", warmup, lr_of_step(&c, 1));
        }
    }
}

TEST(lr_shapes_at_hand_computed_steps) {
    Config c;
    small_config(&c, SHAPE_CONSTANT);
    EXPECT(lr_of_step(&c, 100) == 1e-3);
    small_config(&c, SHAPE_LINEAR);
    EXPECT_NEAR(lr_of_step(&c, 55), 5.5e-4, 1e-17);
    EXPECT_NEAR(lr_of_step(&c, 91), 1.9e-4, 1e-17);
    small_config(&c, SHAPE_COSINE);
    EXPECT_NEAR(lr_of_step(&c, 55), 5.5e-4, 1e-17);
    EXPECT_NEAR(lr_of_step(&c, 40), 1e-4 + 9e-4 * 0.75, 1e-17);
    small_config(&c, SHAPE_WSD);
    EXPECT(lr_of_step(&c, 80) == 1e-3);
    EXPECT_NEAR(lr_of_step(&c, 85), 5.5e-4, 1e-17);
    EXPECT_NEAR(lr_of_step(&c, 81), 1e-4 + 9e-4 * (1 - sqrt(0.05)), 1e-17);
    for (Shape shape = SHAPE_LINEAR; shape <= SHAPE_WSD; shape++) {
        small_config(&c, shape);
        EXPECT(lr_of_step(&c, 100) == 1e-4, "shape %d ends at %.17g", (int)shape, lr_of_step(&c, 100));
    }
}

/* A warm-up as long as the run or longer, and runs of one step: no division by zero, the rate only rises. */
TEST(lr_of_runs_that_end_inside_the_warm_up) {
    Config c;
    for (Shape shape = SHAPE_CONSTANT; shape <= SHAPE_WSD; shape++)
        for (int warmup = 99; warmup <= 400; warmup += 301) {
            small_config(&c, shape);
            c.train.lr_warmup_steps = warmup;
            for (int step = 1; step <= 99; step++) EXPECT_NEAR(lr_of_step(&c, step), 1e-3 * step / warmup, 1e-17);
            c.train.steps = 1;
            c.train.lr_warmup_steps = warmup == 99 ? 1 : 0;
            EXPECT(lr_of_step(&c, 1) == 1e-3);
        }
}

/* A budget in tokens gives the rates of the same budget in steps; the last step, which overshoots, has lr_final. */
TEST(lr_of_a_token_budget_equals_that_of_steps) {
    Config in_steps, in_tokens;
    for (Shape shape = SHAPE_CONSTANT; shape <= SHAPE_WSD; shape++) {
        small_config(&in_steps, shape);
        in_tokens = in_steps;
        in_tokens.train.steps = 0;
        in_tokens.train.tokens = 100 * 2048;
        for (int step = 1; step <= 100; step++)
            EXPECT_NEAR(lr_of_step(&in_tokens, step), lr_of_step(&in_steps, step), 1e-17);
        in_tokens.train.tokens = 99 * 2048 + 1;
        EXPECT_EQ(run_length(&in_tokens, 1).steps, 100);
        EXPECT_EQ(run_length(&in_tokens, 1).tokens, 100 * 2048);
        EXPECT(lr_of_step(&in_tokens, 100) == (shape == SHAPE_CONSTANT ? 1e-3 : 1e-4));
    }
}

/* -------------------------------------------------------------------------------------------------------- V3 */

/* The learning rate of the report: 2000 steps up to 2.2e-4, flat until 10T, cosine to 2.2e-5 over 4.3T, flat for 333B,
 * 7.3e-6 for the last 167B. Batch 3072 -> 15360 over 469B. Bias speed 0.001, 0 for the last 500B. MTP 0.3, 0.1 from
 * 10T. */
static void v3_config(Config *c) {
    memset(c, 0, sizeof *c);
    c->train.seq_len = 4096;
    c->train.micro_batch_size = 1;
    c->train.tokens = 14800 * billion;
    c->train.lr_shape = SHAPE_COSINE;
    c->train.lr_warmup_steps = 2000;
    add_point(&c->train.lr, 10 * trillion, 2.2e-4);
    add_point(&c->train.lr, 14300 * billion, 2.2e-5);
    add_point(&c->train.lr, 14633 * billion, 2.2e-5);
    add_point(&c->train.lr, 14633 * billion, 7.3e-6);
    c->train.global_batch_size_shape = SHAPE_LINEAR;
    add_point(&c->train.global_batch_size, 0, 3072);
    add_point(&c->train.global_batch_size, 469 * billion, 15360);
    add_point(&c->train.bias_update_speed, 0, 0.001);
    add_point(&c->train.bias_update_speed, 14300 * billion, 0);
    add_point(&c->train.mtp_loss_weight, 0, 0.3);
    add_point(&c->train.mtp_loss_weight, 10 * trillion, 0.1);
}

TEST(lr_of_deepseek_v3) {
    Config c;
    v3_config(&c);
    RunLength length = run_length(&c, 1);
    EXPECT_NEAR(lr_at(&c, &length, 1, 0), 1.1e-7, 1e-20);
    EXPECT_NEAR(lr_at(&c, &length, 1000, 15 * billion), 1.1e-4, 1e-18);
    EXPECT(lr_at(&c, &length, 2000, 30 * billion) == 2.2e-4);
    EXPECT(lr_at(&c, &length, 160000, 10 * trillion) == 2.2e-4);
    EXPECT_NEAR(lr_at(&c, &length, 180000, 11075 * billion), 1.9100357133746821e-4, 1e-17);
    EXPECT_NEAR(lr_at(&c, &length, 200000, 12150 * billion), 1.21e-4, 1e-17);
    EXPECT(lr_at(&c, &length, 230000, 14300 * billion) == 2.2e-5);
    EXPECT(lr_at(&c, &length, 235000, 14633 * billion - 1) == 2.2e-5);
    EXPECT(lr_at(&c, &length, 240000, 14633 * billion) == 7.3e-6);
    EXPECT(lr_at(&c, &length, length.steps, length.tokens_at_last) == 7.3e-6);
}

TEST(lr_batch_and_weights_of_deepseek_v3) {
    Config c;
    char err[ERR_LEN], hint[ERR_LEN];
    v3_config(&c);
    EXPECT_EQ(batch_check(&c, 128, err, hint), 0);
    EXPECT_EQ(batch_at(&c, 0, 128), 3072);
    EXPECT_EQ(batch_at(&c, 100 * billion, 1), 5692);   /* 5692.07 */
    EXPECT_EQ(batch_at(&c, 100 * billion, 128), 5632); /* 44.47 times 128 */
    EXPECT_EQ(batch_at(&c, 234500000000, 128), 9216);
    EXPECT_EQ(batch_at(&c, 469 * billion, 128), 15360);
    EXPECT_EQ(batch_at(&c, 14 * trillion, 128), 15360);
    EXPECT(bias_speed_at(&c, 0) == 0.001);
    EXPECT(bias_speed_at(&c, 14300 * billion - 1) == 0.001);
    EXPECT(bias_speed_at(&c, 14300 * billion) == 0);
    c.model.topk_method = TOPK_GREEDY; /* V2's gate has no bias to move */
    EXPECT(bias_speed_at(&c, 0) == 0);
    c.model.topk_method = TOPK_NOAUX_TC;
    EXPECT(mtp_weight_at(&c, 10 * trillion - 1) == 0.3);
    EXPECT(mtp_weight_at(&c, 10 * trillion) == 0.1);
}

/* Steps under the ramp: integral of dt / (4096 b(t)) = 469e9 / (4096 * 12288) * ln 5; behind it (14.8T - 469B) / 62.9M.
 */
TEST(lr_length_of_deepseek_v3) {
    Config c;
    v3_config(&c);
    RunLength length = run_length(&c, 1);
    double ramp = 469e9 / (4096.0 * 12288) * log(5), flat = (14800e9 - 469e9) / (15360.0 * 4096);
    EXPECT_NEAR((double)length.steps, ramp + flat, 3);
    EXPECT(length.tokens >= c.train.tokens && length.tokens - c.train.tokens < 15360 * 4096);
    EXPECT(length.tokens_at_last < c.train.tokens);
}

/* -------------------------------------------------------------------------------------------------------- length */

/* Step by step, as the training loop goes. */
static RunLength length_by_steps(const Config *c, int64_t ranks) {
    RunLength length = {0};
    int64_t warmup = c->train.lr_warmup_steps > 1 ? c->train.lr_warmup_steps : 1;
    for (int64_t step = 1, tokens = 0;; step++) {
        if (step == warmup) length.tokens_at_peak = tokens;
        bool is_over = c->train.steps > 0 ? step > c->train.steps : tokens >= c->train.tokens;
        if (is_over && length.steps == 0) {
            length.steps = step - 1;
            length.tokens = tokens;
        }
        if (is_over && step >= warmup) return length;
        if (!is_over) length.tokens_at_last = tokens;
        tokens += batch_at(c, tokens, ranks) * c->train.seq_len;
    }
}

/* 0 .. n - 1, the next of a trial. */
static int64_t draw(uint64_t trial, uint64_t *n_drawn, int64_t n) {
    return (int64_t)(rng_bits(7, RNG_TEST, trial, (*n_drawn)++) % (uint64_t)n);
}

/* The walk in strides against the walk in steps: ramps up and down, jumps, points inside a step, budgets of both kinds.
 */
TEST(lr_length_equals_counting_every_step) {
    for (uint64_t trial = 0; trial < 300; trial++) {
        uint64_t n_drawn = 0;
        Config c;
        memset(&c, 0, sizeof c);
        c.train.seq_len = 1 + draw(trial, &n_drawn, 40);
        c.train.micro_batch_size = 1 + draw(trial, &n_drawn, 3);
        int64_t ranks = 1 + draw(trial, &n_drawn, 3), unit = ranks * c.train.micro_batch_size;
        int64_t place = trial % 2 ? draw(trial, &n_drawn, 500) : 0;
        int n_points = 1 + (int)draw(trial, &n_drawn, 5);
        for (int i = 0; i < n_points; i++) {
            add_point(&c.train.global_batch_size, place, (double)(unit * (1 + draw(trial, &n_drawn, 30))));
            bool is_jump = draw(trial, &n_drawn, 4) == 0;
            place += is_jump ? 0 : draw(trial, &n_drawn, 50000);
        }
        c.train.global_batch_size_shape = (Shape)draw(trial, &n_drawn, 3);
        c.train.lr_warmup_steps = trial % 3 ? draw(trial, &n_drawn, 60) : 0;
        int64_t budget = 1 + draw(trial, &n_drawn, trial % 5 ? 5000 : 20);
        if (draw(trial, &n_drawn, 2))
            c.train.steps = budget;
        else
            c.train.tokens = 20 * budget;
        RunLength strides = run_length(&c, ranks), steps = length_by_steps(&c, ranks);
        EXPECT(memcmp(&strides, &steps, sizeof steps) == 0,
               "trial %d: %lld steps %lld tokens peak %lld last %lld, counted %lld %lld %lld %lld", (int)trial,
               (long long)strides.steps, (long long)strides.tokens, (long long)strides.tokens_at_peak,
               (long long)strides.tokens_at_last, (long long)steps.steps, (long long)steps.tokens,
               (long long)steps.tokens_at_peak, (long long)steps.tokens_at_last);
    }
}

/* The largest numbers the configuration takes: instant, and no overflow. */
TEST(lr_length_of_enormous_budgets) {
    Config c;
    small_config(&c, SHAPE_COSINE);
    c.train.steps = trillion;
    c.train.seq_len = c.train.micro_batch_size = 1 << 24;
    c.train.global_batch_size = number(1 << 24);
    RunLength length = run_length(&c, 1);
    EXPECT(length.tokens == INT64_MAX);
    EXPECT(isfinite(lr_at(&c, &length, trillion / 2, INT64_MAX)));
    c.train.steps = 0;
    c.train.tokens = 1000000 * trillion;
    c.train.seq_len = c.train.micro_batch_size = 1;
    c.train.global_batch_size = (Schedule){0};
    add_point(&c.train.global_batch_size, 0, 1);
    add_point(&c.train.global_batch_size, 500000 * trillion, 2000);
    c.train.global_batch_size_shape = SHAPE_LINEAR;
    length = run_length(&c, 1);
    EXPECT_NEAR((double)length.steps / (500000e12 / 1999 * log(2000) + 500000e12 / 2000), 1, 0.015);
}

TEST(lr_batch_points_must_divide) {
    Config c;
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    small_config(&c, SHAPE_COSINE);
    EXPECT_EQ(batch_check(&c, 1, err, hint), 0);
    EXPECT_EQ(batch_check(&c, 3, err, hint), -1);
    EXPECT(strstr(err, "train.global_batch_size 8 ") && strstr(err, "24") && strstr(err, "3 ranks"), "%s", err);
    EXPECT(strstr(hint, "24"), "%s", hint);
    add_point(&c.train.global_batch_size, 1000, 20);
    EXPECT_EQ(batch_check(&c, 1, err, hint), -1);
    EXPECT(strstr(err, "size 20 ") && strstr(hint, "16 and 24"), "%s / %s", err, hint);
}
