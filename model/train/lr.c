/* See lr.h. */
#include "lr.h"

#include <math.h>

#include "kernels/base/check.h"

static const double pi = 3.14159265358979323846;

/* -------------------------------------------------------------------------------------------------------- batch */

int64_t batch_at(const Config *c, int64_t tokens, int64_t ranks) {
    int64_t unit = c->train.micro_batch_size * ranks;
    double sequences = schedule_at(&c->train.global_batch_size, c->train.global_batch_size_shape, tokens);
    int64_t multiples = (int64_t)floor(sequences / (double)unit + 0.5);
    return (multiples > 1 ? multiples : 1) * unit;
}

int batch_check(const Config *c, int64_t ranks, char *err, char *hint) {
    int64_t unit = c->train.micro_batch_size * ranks;
    for (int i = 0; i < c->train.global_batch_size.n; i++) {
        int64_t sequences = (int64_t)c->train.global_batch_size.value[i];
        int64_t below = sequences / unit * unit;
        if (sequences == below) continue;
        if (below > 0)
            err_set(hint, "the nearest are %lld and %lld", (long long)below, (long long)(below + unit));
        else
            err_set(hint, "the smallest is %lld", (long long)unit);
        return err_set(err,
                       "train.global_batch_size %lld is not a multiple of %lld = train.micro_batch_size %lld x %lld %s",
                       (long long)sequences, (long long)unit, (long long)c->train.micro_batch_size, (long long)ranks,
                       ranks == 1 ? "rank" : "ranks");
    }
    return 0;
}

/* -------------------------------------------------------------------------------------------------------- length */

/* a + n * b, at most INT64_MAX. All are >= 0. */
static int64_t add_product(int64_t a, int64_t n, int64_t b) {
    int64_t product, sum;
    return __builtin_mul_overflow(n, b, &product) || __builtin_add_overflow(a, product, &sum) ? INT64_MAX : sum;
}

static int64_t divide_up(int64_t a, int64_t b) {
    return a / b + (a % b != 0);
}

/* How many steps in a row, the one that starts after `tokens` included, have the batch of that step. Between two points
 * a schedule only rises or only falls, so the last of them is found by halving, and a walk over a whole run costs as
 * many rounds as there are batch sizes, not steps. */
static int64_t steps_with_batch(const Config *c, int64_t tokens, int64_t ranks, int64_t batch) {
    const Schedule *points = &c->train.global_batch_size;
    int next = 0;
    while (next < points->n && points->tokens[next] <= tokens) next++;
    if (next == points->n) return INT64_MAX;
    int64_t batch_tokens = batch * c->train.seq_len;
    int64_t same = 1, limit = divide_up(points->tokens[next] - tokens, batch_tokens);
    while (same < limit) {
        int64_t middle = limit - (limit - same) / 2;
        if (batch_at(c, tokens + (middle - 1) * batch_tokens, ranks) == batch)
            same = middle;
        else
            limit = middle - 1;
    }
    return same;
}

/* Tokens and number of the steps from the start on, until max_steps are done or max_tokens are reached. */
static int64_t walk(const Config *c, int64_t ranks, int64_t max_steps, int64_t max_tokens, int64_t *steps) {
    int64_t tokens = 0;
    *steps = 0;
    while (*steps < max_steps && tokens < max_tokens) {
        int64_t batch = batch_at(c, tokens, ranks), batch_tokens = batch * c->train.seq_len;
        int64_t n = steps_with_batch(c, tokens, ranks, batch);
        if (n > max_steps - *steps) n = max_steps - *steps;
        int64_t needed = divide_up(max_tokens - tokens, batch_tokens);
        if (n > needed) n = needed;
        tokens = add_product(tokens, n, batch_tokens);
        *steps += n;
    }
    return tokens;
}

RunLength run_length(const Config *c, int64_t ranks) {
    RunLength length = {0};
    int64_t max_steps = c->train.steps > 0 ? c->train.steps : INT64_MAX;
    int64_t max_tokens = c->train.tokens > 0 ? c->train.tokens : INT64_MAX;
    CHECK(max_steps < INT64_MAX || max_tokens < INT64_MAX, "a run without train.steps and train.tokens has no end");
    length.tokens = walk(c, ranks, max_steps, max_tokens, &length.steps);
    int64_t walked, warmup = c->train.lr_warmup_steps > 1 ? c->train.lr_warmup_steps : 1;
    length.tokens_at_peak = walk(c, ranks, warmup - 1, INT64_MAX, &walked);
    length.tokens_at_last = walk(c, ranks, length.steps - 1, INT64_MAX, &walked);
    return length;
}

/* -------------------------------------------------------------------------------------------------------- values */

/* Share of the way from `start` to `end`, in [0, 1]; 0 up to the start even where both are one place. */
static double progress(double position, double start, double end) {
    if (position <= start) return 0;
    return position >= end ? 1 : (position - start) / (end - start);
}

/* The rate behind the warm-up, for an lr that is one number. */
static double decayed_lr(const Config *c, const RunLength *length, int64_t step, int64_t tokens) {
    bool in_steps = c->train.steps > 0;
    double warmup = c->train.lr_warmup_steps > 1 ? (double)c->train.lr_warmup_steps : 1;
    double position = in_steps ? (double)step : (double)tokens;
    double start = in_steps ? warmup : (double)length->tokens_at_peak;
    double end = in_steps ? (double)length->steps : (double)length->tokens_at_last;
    double peak = c->train.lr.value[0], span = peak - c->train.lr_final;
    if (c->train.lr_shape == SHAPE_WSD) {
        double budget = in_steps ? (double)length->steps : (double)length->tokens;
        start = fmax(start, end - c->train.lr_decay_fraction * budget);
    }
    double p = progress(position, start, end);
    if (p == 0) return peak;
    switch (c->train.lr_shape) {
    case SHAPE_CONSTANT: return peak;
    case SHAPE_LINEAR: return c->train.lr_final + span * (1 - p);
    case SHAPE_COSINE: return c->train.lr_final + span * 0.5 * (1 + cos(pi * p));
    case SHAPE_WSD: return c->train.lr_final + span * (1 - sqrt(p));
    }
    CHECK(false, "lr_shape %d", (int)c->train.lr_shape);
    return 0;
}

double lr_at(const Config *c, const RunLength *length, int64_t step, int64_t tokens) {
    CHECK(step >= 1, "step %lld: updates count from 1", (long long)step);
    double lr =
        c->train.lr.n == 1 ? decayed_lr(c, length, step, tokens) : schedule_at(&c->train.lr, c->train.lr_shape, tokens);
    int64_t warmup = c->train.lr_warmup_steps;
    return step < warmup ? lr * (double)step / (double)warmup : lr;
}

double bias_speed_at(const Config *c, int64_t tokens) {
    if (c->model.topk_method != TOPK_NOAUX_TC) return 0; /* V2's gates choose by score alone */
    return schedule_at(&c->train.bias_update_speed, c->train.bias_update_speed_shape, tokens);
}

double mtp_weight_at(const Config *c, int64_t tokens) {
    return schedule_at(&c->train.mtp_loss_weight, c->train.mtp_loss_weight_shape, tokens);
}
