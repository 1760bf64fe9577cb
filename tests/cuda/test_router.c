/* The gate, forward and backward. Choices must be the CPU's: scores of the two backends differ in the last bit, so
 * random logits leave a distance, and ties are made of equal logits. */
#include <math.h>

#include "kernels/base/rng.h"
#include "tests/cuda/cuda_test.h"

static void forward(const Side *s) {
    op_router_forward(s->device, s->t[0], s->t[1], s->t[2], s->t[3], s->t[4], s->stats, s->t[5], s->t[6], s->t[7],
                      *(const RouterShape *)s->context, STREAM_COMPUTE);
}

static void backward(const Side *s) {
    op_router_backward(s->device, s->t[0], s->t[1], s->t[2], s->t[3], s->t[4], s->t[5], s->t[6], s->params,
                       *(const RouterShape *)s->context, STREAM_COMPUTE);
}

static const RouterShape v3 = {
    .n_experts = 256, .n_chosen = 8, .n_group = 8, .topk_group = 4, .normalize = true, .scale = 2.5, .seq_len = 100};
static const RouterShape lite = {.n_experts = 64,
                                 .n_chosen = 6,
                                 .n_group = 1,
                                 .topk_group = 1,
                                 .score = ROUTER_SOFTMAX,
                                 .normalize = false,
                                 .scale = 1,
                                 .seq_len = 70};
static const RouterShape v2 = {.n_experts = 160,
                               .n_chosen = 6,
                               .n_group = 8,
                               .topk_group = 3,
                               .score = ROUTER_SOFTMAX,
                               .group_score = GROUP_SCORE_MAX,
                               .normalize = false,
                               .scale = 16,
                               .seq_len = 33};
static const RouterShape odd = {
    .n_experts = 45, .n_chosen = 7, .n_group = 9, .topk_group = 2, .normalize = true, .scale = 1.5, .seq_len = 17};
static const RouterShape singles = {
    .n_experts = 12, .n_chosen = 5, .n_group = 12, .topk_group = 6, .normalize = true, .scale = 1, .seq_len = 1};
static const RouterShape many = {
    .n_experts = 600, .n_chosen = 40, .n_group = 4, .topk_group = 3, .normalize = true, .scale = 3, .seq_len = 64};
static const RouterShape one = {
    .n_experts = 1, .n_chosen = 1, .n_group = 1, .topk_group = 1, .normalize = true, .scale = 1, .seq_len = 5};
static const RouterShape all = {
    .n_experts = 33, .n_chosen = 33, .n_group = 1, .topk_group = 1, .normalize = true, .scale = 1, .seq_len = 9};

typedef enum { LOGITS_NORMAL, LOGITS_TIED, LOGITS_EQUAL, LOGITS_UNDERFLOW } Logits;
typedef enum { NO_PADDING, SOME_PADDING, ALL_PADDING } Padding;

static Tensor logits_make(Logits kind, int64_t T, int64_t E, int64_t gap) {
    Tensor logits = t_normal(t_slice(DTYPE_F32, T, E, gap), 1, 1);
    for (int64_t i = 0; i < T * E && kind != LOGITS_NORMAL; i++)
        t_set(logits, i, kind == LOGITS_TIED ? floor(2 * t_get(logits, i)) / 2 : kind == LOGITS_EQUAL ? 0.25 : -300);
    return logits;
}

static bool is_padding(int64_t t, int64_t S, Padding padding) {
    return padding == ALL_PADDING || (padding == SOME_PADDING && (t / S % 3 == 1 || t % S > S * 3 / 4));
}

static void expect_router(const char *name, RouterShape r, int64_t B, Logits kind, Padding padding, bool has_bias,
                          int64_t gap) {
    const int64_t T = B * r.seq_len, E = r.n_experts, K = r.n_chosen;
    Tensor ids = t_slice(DTYPE_I32, T, K, gap), weights = t_slice(DTYPE_F32, T, K, gap);
    Tensor scores = t_slice(DTYPE_F32, T, E, gap), seq_count = t_slice(DTYPE_I32, B, E, gap);
    Tensor position = T1(DTYPE_I32, T), bias = has_bias ? T1(DTYPE_F32, E) : tensor_none();
    for (int64_t t = 0; t < T; t++)
        t_set(position, t, is_padding(t, r.seq_len, padding) ? -1 : (double)(t % r.seq_len));
    for (int64_t i = 0; has_bias && i < E; i++) /* of few values, so that ties stay ties */
        t_set(bias, i, 0.125 * (double)(rng_bits(5, RNG_TEST, 0, (uint64_t)i) % 4));
    name = case_name("%s: B %d, logits %d, padding %d, bias %d, gap %d", name, (int)B, (int)kind, (int)padding,
                     has_bias, (int)gap);
    Case f = {.name = name,
              .run = forward,
              .context = &r,
              .args = {{"ids", ids, ARG_OUT},
                       {"weights", weights, ARG_OUT},
                       {"scores", scores, ARG_OUT},
                       {"counts", has_bias ? t_fill(T1(DTYPE_I32, E), 3) : tensor_none(), ARG_ADD},
                       {"seq_count", seq_count, ARG_OUT},
                       {"logits", logits_make(kind, T, E, gap), ARG_IN},
                       {"bias", bias, ARG_IN},
                       {"position", position, ARG_IN}},
              .stats = {.balance_sum = 2, .loss_sum = {7}}};
    expect_case(&f);
    if (padding == ALL_PADDING) EXPECT(f.stats.balance_sum == 2, "%s: padding was counted", name);

    for (int d = 0; d < 2; d++) { /* with the CPU's choice and scores */
        Case b = {.name = name,
                  .run = backward,
                  .context = &r,
                  .args = {{"dlogits", t_slice(act_dtypes[d], T, E, gap), ARG_OUT},
                           {"dweights", t_normal(t_slice(DTYPE_F32, T, K, gap), 1, 2), ARG_IN},
                           {"ids", ids, ARG_IN},
                           {"weights", weights, ARG_IN},
                           {"scores", scores, ARG_IN},
                           {"seq_count", seq_count, ARG_IN},
                           {"position", position, ARG_IN}},
                  .params = {.balance_scale = 0.7}};
        expect_case(&b);
    }
    t_free_all();
}

static const struct {
    const char *name;
    const RouterShape *shape;
    int64_t B;
} shapes[] = {{"v3", &v3, 3},     {"lite", &lite, 4}, {"v2", &v2, 5},  {"odd", &odd, 6}, {"singles", &singles, 40},
              {"many", &many, 2}, {"one", &one, 2},   {"all", &all, 3}};

TEST(cuda_router_shapes) {
    for (int i = 0; i < 8; i++) {
        expect_router(shapes[i].name, *shapes[i].shape, shapes[i].B, LOGITS_NORMAL, NO_PADDING, true, 0);
        expect_router(shapes[i].name, *shapes[i].shape, shapes[i].B, LOGITS_NORMAL, SOME_PADDING, false, 2);
        expect_router(shapes[i].name, *shapes[i].shape, 1, LOGITS_NORMAL, ALL_PADDING, true, 0);
    }
}

TEST(cuda_router_ties_go_to_the_lower_expert) {
    for (int i = 0; i < 8; i++) {
        expect_router(shapes[i].name, *shapes[i].shape, shapes[i].B, LOGITS_TIED, NO_PADDING, false, 0);
        expect_router(shapes[i].name, *shapes[i].shape, shapes[i].B, LOGITS_EQUAL, SOME_PADDING, false, 0);
        expect_router(shapes[i].name, *shapes[i].shape, shapes[i].B, LOGITS_EQUAL, NO_PADDING, true, 0);
    }
    expect_router("v3", v3, 2, LOGITS_UNDERFLOW, NO_PADDING, false, 0); /* all scores are zero */
}

TEST(cuda_router_large) {
    RouterShape r = v3;
    r.seq_len = 1024;
    expect_router("v3", r, 2, LOGITS_NORMAL, SOME_PADDING, true, 0);
    r = lite, r.seq_len = 4096;
    expect_router("lite", r, 1, LOGITS_NORMAL, NO_PADDING, true, 0);
}
