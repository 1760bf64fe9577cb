/* The gate. Beside results against double and finite differences, the mistakes that others made: the bias in the
 * weights, masked groups at 0 instead of -inf, scaling tied to normalisation, counted padding, an expert chosen twice.
 */
#include <math.h>

#include "kernels/base/rng.h"
#include "kernels/cpu/cpu.h"
#include "op_test.h"

typedef struct {
    RouterShape shape;
    Tensor ids, weights, scores, counts, seq_count, logits, bias, position;
    Tensor dlogits, dweights;
    StepStats stats;
    StepParams params;
} Router;

static Router router_make(RouterShape shape, int64_t T) {
    const int64_t E = shape.n_experts, K = shape.n_chosen, B = T / shape.seq_len;
    Router r = {.shape = shape,
                .ids = t_poison(T2(DTYPE_I32, T, K)),
                .weights = t_poison(T2(DTYPE_F32, T, K)),
                .scores = t_poison(T2(DTYPE_F32, T, E)),
                .counts = T1(DTYPE_I32, E),
                .seq_count = t_poison(T2(DTYPE_I32, B, E)),
                .logits = t_normal(T2(DTYPE_F32, T, E), 1, 1),
                .bias = t_normal(T1(DTYPE_F32, E), 0.2, 2),
                .position = T1(DTYPE_I32, T),
                .dlogits = t_poison(T2(DTYPE_F32, T, E)),
                .dweights = t_normal(T2(DTYPE_F32, T, K), 1, 3),
                .params = {.balance_scale = 0.7}};
    for (int64_t t = 0; t < T; t++) t_set(r.position, t, (double)(t % shape.seq_len));
    return r;
}

static void forward(Router *r) {
    op_router_forward(DEV, r->ids, r->weights, r->scores, r->counts, r->seq_count, &r->stats, r->logits, r->bias,
                      r->position, r->shape, STREAM_COMPUTE);
}

static void backward(Router *r) {
    op_router_backward(DEV, r->dlogits, r->dweights, r->ids, r->weights, r->scores, r->seq_count, r->position,
                       &r->params, r->shape, STREAM_COMPUTE);
}

static const RouterShape plain = {
    .n_experts = 8, .n_chosen = 3, .n_group = 1, .topk_group = 1, .normalize = true, .scale = 2.5, .seq_len = 6};
static const RouterShape grouped = {
    .n_experts = 16, .n_chosen = 4, .n_group = 4, .topk_group = 2, .normalize = true, .scale = 2.5, .seq_len = 5};
static const RouterShape v2 = {.n_experts = 12,
                               .n_chosen = 3,
                               .n_group = 3,
                               .topk_group = 2,
                               .score = ROUTER_SOFTMAX,
                               .group_score = GROUP_SCORE_MAX,
                               .normalize = false,
                               .scale = 16,
                               .seq_len = 4};
static const RouterShape wide = {.n_experts = 64,
                                 .n_chosen = 6,
                                 .n_group = 1,
                                 .topk_group = 1,
                                 .score = ROUTER_SOFTMAX,
                                 .normalize = true,
                                 .scale = 1,
                                 .seq_len = 7};
static const RouterShape *const shapes[] = {&plain, &grouped, &v2, &wide};

/* ---- a second gate, written by sorting ------------------------------------------------------------------------------
 */

/* Ranks of values in a stable descending order: rank[i] = how many stand before i. */
static void ranks(int *rank, const double *value, int n) {
    for (int i = 0; i < n; i++) {
        rank[i] = 0;
        for (int j = 0; j < n; j++) rank[i] += value[j] > value[i] || (value[j] == value[i] && j < i);
    }
}

/* is_chosen[i] for one token; the scores are the op's own, so that float and double choose alike. */
static void choose(bool *is_chosen, const double *score, Tensor bias, RouterShape s) {
    const int E = s.n_experts, size = E / s.n_group;
    double z[64], group[64];
    int rank[64], group_rank[64];
    for (int i = 0; i < E; i++)
        z[i] = tensor_is_none(bias) ? score[i] : (double)((real)score[i] + (real)t_get(bias, i));
    for (int g = 0; g < s.n_group; g++) {
        ranks(rank, z + g * size, size);
        group[g] = 0;
        for (int i = 0; i < size; i++)
            if (rank[i] < (s.group_score == GROUP_SCORE_TOP2 ? 2 : 1)) group[g] += z[g * size + i];
    }
    ranks(group_rank, group, s.n_group);
    for (int i = 0; i < E; i++)
        if (group_rank[i / size] >= s.topk_group) z[i] = -INFINITY;
    ranks(rank, z, E);
    for (int i = 0; i < E; i++) is_chosen[i] = rank[i] < s.n_chosen;
}

static void reference_scores(double *score, Tensor logits, int64_t t, RouterShape s) {
    double sum = 0;
    for (int i = 0; i < s.n_experts; i++) {
        double x = t_get(logits, t * s.n_experts + i);
        score[i] = s.score == ROUTER_SIGMOID ? 1 / (1 + exp(-x)) : exp(x);
        sum += score[i];
    }
    if (s.score == ROUTER_SOFTMAX)
        for (int i = 0; i < s.n_experts; i++) score[i] /= sum;
}

static void expect_forward(Router *r, const char *name) {
    const RouterShape s = r->shape;
    const int64_t T = r->logits.shape[0], E = s.n_experts, K = s.n_chosen, B = T / s.seq_len;
    double *scores = t_doubles(r->scores), *weights = t_doubles(r->weights), *counts = t_doubles(r->counts);
    double *seq_count = t_doubles(r->seq_count), balance = r->stats.balance_sum;
    for (int64_t i = 0; i < B * E; i++) seq_count[i] = 0;
    forward(r);
    for (int64_t b = 0; b < B; b++) {
        double share[64] = {0}, n_tokens = 0;
        for (int64_t t = b * s.seq_len; t < (b + 1) * s.seq_len; t++) {
            double *score = scores + t * E, own[64], sum = 0, all = 0;
            bool is_chosen[64];
            int rank[64], k = 0;
            reference_scores(score, r->logits, t, s);
            for (int i = 0; i < E; i++) own[i] = t_get(r->scores, t * E + i);
            choose(is_chosen, own, r->bias, s);
            ranks(rank, own, (int)E);
            for (int i = 0; i < E; i++) sum += is_chosen[i] ? score[i] : 0, all += score[i];
            bool is_padding = t_get(r->position, t) < 0;
            for (int i = 0; i < E; i++) {
                if (!is_chosen[i] || is_padding) continue;
                EXPECT(t_get(r->ids, t * K + k) == i, "%s: token %d choice %d is %g, not %d", name, (int)t, k,
                       t_get(r->ids, t * K + k), i);
                weights[t * K + k++] = s.scale * score[i] / (s.normalize ? sum : 1);
                counts[i]++;
            }
            for (; k < K; k++) {
                EXPECT(is_padding && t_get(r->ids, t * K + k) == -1, "%s: token %d choice %d", name, (int)t, k);
                weights[t * K + k] = 0;
            }
            for (int i = 0; i < E && !is_padding; i++) seq_count[b * E + i] += rank[i] < K, share[i] += score[i] / all;
            n_tokens += !is_padding;
        }
        for (int i = 0; i < E && n_tokens > 0; i++)
            balance += (double)E / ((double)K * n_tokens) * seq_count[b * E + i] * share[i] / n_tokens;
    }
    EXPECT(t_error(r->scores, scores) < OP_TOLERANCE, "%s: scores off by %g", name, t_error(r->scores, scores));
    EXPECT(t_error(r->weights, weights) < OP_TOLERANCE, "%s: weights off by %g", name, t_error(r->weights, weights));
    EXPECT(t_error(r->counts, counts) == 0, "%s: counts off by %g", name, t_error(r->counts, counts));
    EXPECT(t_error(r->seq_count, seq_count) == 0, "%s: seq_count off by %g", name, t_error(r->seq_count, seq_count));
    EXPECT_NEAR(r->stats.balance_sum, balance, OP_TOLERANCE * 10);
}

TEST(router_forward_against_double) {
    for (int i = 0; i < 4; i++) {
        Router r = router_make(*shapes[i], 20 / shapes[i]->seq_len * shapes[i]->seq_len);
        t_fill(r.counts, 100); /* added to */
        r.stats.balance_sum = 3;
        expect_forward(&r, "random");
        t_poison(r.ids), t_poison(r.weights), t_poison(r.scores), t_poison(r.seq_count);
        r.bias = tensor_none();
        expect_forward(&r, "without bias");
        r.counts = tensor_none();
        forward(&r);
    }
    RouterShape one = {.n_experts = 1, .n_chosen = 1, .n_group = 1, .topk_group = 1, .scale = 1, .seq_len = 1};
    Router r = router_make(one, 1);
    expect_forward(&r, "one expert, one token");
    one = (RouterShape){.n_experts = 4, .n_chosen = 4, .n_group = 4, .topk_group = 4, .scale = 1, .seq_len = 3};
    r = router_make(one, 3);
    expect_forward(&r, "all chosen, groups of one");
}

/* ---- the mistakes of others -------------------------------------------------------------------------------------- */

/* D8: the second half is padding; T = E in one of the trials. Poisoned logits of padding must reach nothing. */
TEST(router_padding_counts_nowhere) {
    for (int trial = 0; trial < 2; trial++) {
        RouterShape s = plain;
        s.seq_len = trial ? s.n_experts : 12;
        Router r = router_make(s, 2 * s.seq_len);
        for (int64_t t = 0; t < 2 * s.seq_len; t++)
            if (t % s.seq_len >= s.seq_len / 2 || t >= s.seq_len + 1) t_set(r.position, t, -1);
        expect_forward(&r, "padding");
        int64_t real_tokens = s.seq_len / 2 + 1, total = 0;
        for (int i = 0; i < s.n_experts; i++) total += (int64_t)t_get(r.counts, i);
        EXPECT_EQ(total, real_tokens * s.n_chosen);
        backward(&r);
        Router other = router_make(s, 2 * s.seq_len);
        other.position = r.position;
        for (int64_t t = 0; t < 2 * s.seq_len; t++)
            for (int i = 0; i < s.n_experts && t_get(r.position, t) < 0; i++)
                t_set(other.logits, t * s.n_experts + i, i == 0 ? NAN : 50);
        forward(&other);
        backward(&other);
        EXPECT(t_same_bits(r.counts, other.counts) && t_same_bits(r.seq_count, other.seq_count), "counts differ");
        EXPECT(t_same_bits(r.ids, other.ids) && t_same_bits(r.weights, other.weights), "choices differ");
        EXPECT(r.stats.balance_sum == other.stats.balance_sum, "balance differs");
        EXPECT(t_same_bits(r.dlogits, other.dlogits), "gradients differ");
        for (int64_t t = 0; t < 2 * s.seq_len; t++)
            for (int i = 0; i < s.n_experts && t_get(r.position, t) < 0; i++)
                EXPECT(t_get(r.dlogits, t * s.n_experts + i) == 0, "padding token %d has a gradient", (int)t);
    }
}

TEST(router_of_padding_alone) {
    Router r = router_make(plain, 6);
    t_fill(r.position, -1);
    expect_forward(&r, "all padding");
    EXPECT(r.stats.balance_sum == 0, "balance is %g", r.stats.balance_sum);
    backward(&r);
    for (int64_t i = 0; i < tensor_numel(r.dlogits); i++) EXPECT(t_get(r.dlogits, i) == 0, "gradient %d", (int)i);
}

/* D9: a bias that swaps the choice; the weights are those of the unbiased scores, by hand. */
TEST(router_weights_are_unbiased) {
    RouterShape s = {
        .n_experts = 4, .n_chosen = 2, .n_group = 1, .topk_group = 1, .normalize = true, .scale = 2.5, .seq_len = 1};
    Router r = router_make(s, 1);
    static const double p[4] = {0.8, 0.6, 0.4, 0.2};
    for (int i = 0; i < 4; i++) t_set(r.logits, i, log(p[i] / (1 - p[i]))), t_set(r.bias, i, i == 3 ? 0.5 : 0);
    forward(&r);
    EXPECT(t_get(r.ids, 0) == 0 && t_get(r.ids, 1) == 3, "chose %g and %g", t_get(r.ids, 0), t_get(r.ids, 1));
    EXPECT_NEAR(t_get(r.weights, 0), 2.5 * 0.8, 1e-6);
    EXPECT_NEAR(t_get(r.weights, 1), 2.5 * 0.2, 1e-6);
    for (int i = 0; i < 4; i++) /* seq_count does not know the bias */
        EXPECT_EQ(t_get(r.seq_count, i), i < 2);
}

/* D10: every allowed expert far below zero; an excluded group at 0 would win. */
TEST(router_excluded_groups_stay_out) {
    RouterShape s = {
        .n_experts = 8, .n_chosen = 3, .n_group = 4, .topk_group = 2, .normalize = true, .scale = 1, .seq_len = 1};
    Router r = router_make(s, 1);
    for (int i = 0; i < 8; i++) t_set(r.bias, i, i / 2 == 1 || i / 2 == 2 ? -5 : -9);
    forward(&r);
    for (int k = 0; k < 3; k++) {
        double id = t_get(r.ids, k);
        EXPECT(id >= 2 && id < 6 && (k == 0 || id > t_get(r.ids, k - 1)), "choice %d is %g", k, id);
    }
    /* One strong expert in a weak group does not save it: the sum of the two best counts. */
    for (int i = 0; i < 8; i++) t_set(r.logits, i, 0), t_set(r.bias, i, i == 7 ? 1 : i / 2 == 3 ? -9 : 0.1 * (i / 2));
    forward(&r);
    EXPECT(t_get(r.ids, 0) >= 2 && t_get(r.ids, 2) < 6, "group 3 was used");
    r.shape.group_score = GROUP_SCORE_MAX;
    forward(&r);
    EXPECT(t_get(r.ids, 2) == 7, "with the maximum as score, group 3 is used");
}

/* D12: normalisation and scale are independent. */
TEST(router_scale_and_normalisation) {
    for (int i = 0; i < 4; i++) {
        RouterShape s = plain;
        s.normalize = i % 2, s.scale = i / 2 ? 2.5 : 1;
        Router r = router_make(s, 6);
        expect_forward(&r, "combination");
        for (int64_t t = 0; t < 6 && s.normalize; t++)
            EXPECT_NEAR(t_get(r.weights, 3 * t) + t_get(r.weights, 3 * t + 1) + t_get(r.weights, 3 * t + 2), s.scale,
                        1e-6);
    }
}

/* D16: ties, almost ties, and scores of which one is finite. */
TEST(router_ties_and_infinities) {
    RouterShape s = plain;
    s.seq_len = 1;
    Router r = router_make(s, 1);
    t_fill(r.logits, 0.3), t_fill(r.bias, 0);
    forward(&r);
    for (int k = 0; k < 3; k++) EXPECT_EQ(t_get(r.ids, k), k);

    for (int i = 0; i < 8; i++) t_set(r.bias, i, -0.2 + (i >= 5 ? 1.2e-7 : 0)); /* one or two last places of a float */
    forward(&r);
    for (int k = 0; k < 3; k++) EXPECT_EQ(t_get(r.ids, k), 5 + k);

    for (int i = 0; i < 8; i++) t_set(r.bias, i, i == 6 ? 0 : -INFINITY);
    forward(&r);
    static const int want[3] = {0, 1, 6};
    for (int k = 0; k < 3; k++) EXPECT_EQ(t_get(r.ids, k), want[k]);

    t_fill(r.logits, NAN); /* still distinct experts that exist: the loss will be NaN, and the update skipped */
    forward(&r);
    for (int k = 0; k < 3; k++)
        EXPECT(t_get(r.ids, k) >= 0 && t_get(r.ids, k) < 8 && (k == 0 || t_get(r.ids, k) > t_get(r.ids, k - 1)),
               "choice %d is %g", k, t_get(r.ids, k));

    t_fill(r.logits, -300); /* all scores underflow */
    t_fill(r.bias, 0);
    forward(&r);
    backward(&r);
    EXPECT(t_is_finite(r.weights) && t_is_finite(r.dlogits), "scores of zero give NaN");
}

TEST(router_all_tokens_to_one_group) {
    Router r = router_make(grouped, 10);
    for (int i = 0; i < 16; i++) t_set(r.bias, i, i / 4 == 2 ? 10 : 0);
    r.shape.topk_group = 1;
    expect_forward(&r, "skewed");
    for (int i = 0; i < 16; i++) EXPECT_EQ(t_get(r.counts, i), i / 4 == 2 ? 10 : 0);
}

TEST(router_balance_of_uniform_is_one) {
    RouterShape s = {.n_experts = 4, .n_chosen = 1, .n_group = 1, .topk_group = 1, .scale = 1, .seq_len = 4};
    Router r = router_make(s, 8);
    for (int64_t i = 0; i < 32; i++) t_set(r.logits, i, i / 4 % 4 == i % 4 ? 2 : -1);
    forward(&r);
    EXPECT_NEAR(r.stats.balance_sum, 2, 1e-6);
}

/* ---- gradient ---------------------------------------------------------------------------------------------------- */

static double loss(void *context) {
    Router *r = (Router *)context;
    r->stats.balance_sum = 0;
    forward(r);
    return t_dot_normal(r->weights, 3) + r->params.balance_scale * r->stats.balance_sum;
}

/* Names the choice, biased and unbiased: a step that changes it has no derivative. */
static uint64_t signature(void *context) {
    Router *r = (Router *)context;
    uint64_t hash = 0;
    for (int64_t i = 0; i < tensor_numel(r->ids); i++) hash = mix64(hash + (uint64_t)(t_get(r->ids, i) + 2));
    for (int64_t i = 0; i < tensor_numel(r->seq_count); i++) hash = mix64(hash + (uint64_t)t_get(r->seq_count, i));
    return hash;
}

TEST(router_gradient) {
    for (int i = 0; i < 8; i++) {
        Router r = router_make(*shapes[i / 2], 2 * shapes[i / 2]->seq_len);
        if (i % 2) t_set(r.position, 1, -1), t_set(r.position, r.shape.seq_len, -1);
        if (i % 4 == 1) r.shape.normalize = !r.shape.normalize;
        /* Padding tokens have weight 0 and choice -1; dweights of theirs must not matter. */
        forward(&r);
        backward(&r);
        int64_t n_skipped = 0;
        fd_check("router logits", r.logits, r.dlogits, loss, signature, &r, 200, &n_skipped);
        EXPECT(n_skipped < 20, "%lld steps changed the choice", (long long)n_skipped);
    }
}

/* The float build against the formulas in double; the gradient through the bias is none by construction of the op. */
TEST(router_backward_against_double) {
    for (int i = 0; i < 8; i++) {
        const RouterShape s = *shapes[i / 2];
        const int64_t T = 2 * s.seq_len, E = s.n_experts, K = s.n_chosen;
        Router r = router_make(s, T);
        t_set(r.position, 2, -1);
        r.dlogits = t_poison(T2(i % 2 ? DTYPE_BF16 : DTYPE_F32, T, E));
        forward(&r);
        backward(&r);
        double *want = t_doubles(r.logits);
        for (int64_t t = 0; t < T; t++) {
            double score[64], ds[64] = {0}, sigma = 0, all = 0, mean = 0, along = 0;
            double n_tokens = (double)s.seq_len - (t < s.seq_len);
            reference_scores(score, r.logits, t, s);
            const int64_t b = t / s.seq_len;
            for (int e = 0; e < E; e++) all += score[e];
            for (int e = 0; e < E; e++) mean += t_get(r.seq_count, b * E + e) * score[e] / all;
            for (int e = 0; e < E; e++)
                ds[e] =
                    0.7 * (double)E / ((double)K * n_tokens * n_tokens) * (t_get(r.seq_count, b * E + e) - mean) / all;
            for (int64_t k = 0; k < K && t != 2; k++) sigma += score[(int)t_get(r.ids, t * K + k)];
            for (int64_t k = 0; k < K && t != 2; k++) {
                for (int64_t j = 0; j < K; j++) { /* dw_j / ds_k */
                    double sj = score[(int)t_get(r.ids, t * K + j)], same = j == k;
                    double slope = s.normalize ? same / sigma - sj / (sigma * sigma) : same;
                    ds[(int)t_get(r.ids, t * K + k)] += s.scale * t_get(r.dweights, t * K + j) * slope;
                }
            }
            for (int e = 0; e < E; e++) along += ds[e] * score[e];
            for (int e = 0; e < E; e++)
                want[t * E + e] = t == 2                      ? 0
                                  : s.score == ROUTER_SIGMOID ? ds[e] * score[e] * (1 - score[e])
                                                              : score[e] * (ds[e] - along);
        }
        EXPECT(t_error(r.dlogits, want) < (i % 2 ? BF16_TOLERANCE : OP_TOLERANCE), "shape %d: off by %g", i / 2,
               t_error(r.dlogits, want));
    }
}

static void both(void *context) {
    Router *r = (Router *)context;
    t_fill(r->counts, 0);
    r->stats.balance_sum = 0;
    forward(r);
    backward(r);
    t_set(r->weights, 0, t_get(r->weights, 0) + r->stats.balance_sum); /* part of the comparison */
}

TEST(router_threads) {
    RouterShape s = grouped;
    s.seq_len = 50;
    Router r = router_make(s, 200);
    for (int64_t t = 30; t < 40; t++) t_set(r.position, t, -1);
    Tensor outputs[] = {r.ids, r.weights, r.scores, r.counts, r.seq_count, r.dlogits};
    expect_same_bits("router", both, &r, outputs, 6);
}
