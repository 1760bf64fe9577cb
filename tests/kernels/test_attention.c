#include <math.h>
#include <string.h>

#include "op_test.h"

enum { GAP = 10 };

/* How the tokens of a case fall into documents. */
typedef enum { DOCS_ONE, DOCS_TWO, DOCS_OF_50, DOCS_OF_ONE_TOKEN, DOCS_WINDOW, DOCS_ANY, DOCS_COUNT } Docs;

typedef struct {
    int64_t n_tokens;
    AttentionShape shape;
    Tensor q, k, v, doc_start, o, lse;
    Tensor d_o, dq, dk, dv, delta;
} Case;

static int64_t doc_start_of(Docs docs, int64_t t) {
    switch (docs) {
    case DOCS_TWO: return t < 65 ? 0 : 65; /* one key past a block */
    case DOCS_OF_50: return t / 50 * 50;
    case DOCS_OF_ONE_TOKEN: return t;
    case DOCS_WINDOW: return t < 20 ? 0 : t - 20;
    case DOCS_ANY: return t * 7919 % (t + 1); /* not even ascending: the contract allows it */
    default: return 0;
    }
}

static Case case_make(int64_t n_tokens, int n_heads, int64_t nope, int64_t rope, int64_t value, Docs docs,
                      Dtype dtype) {
    Case c = {.n_tokens = n_tokens};
    c.shape = (AttentionShape){.n_heads = n_heads, .nope = nope, .rope = rope, .value = value, .rope_mscale = 1};
    c.shape.scale = 1 / sqrt((double)(nope + rope));
    const int64_t width_qk = n_heads * (nope + rope), width_v = n_heads * value;
    Tensor *wide[] = {&c.q, &c.k, &c.dq, &c.dk}, *narrow[] = {&c.v, &c.o, &c.d_o, &c.dv};
    for (int i = 0; i < 4; i++) {
        *wide[i] = t_slice(dtype, n_tokens, width_qk, GAP);
        *narrow[i] = t_slice(dtype, n_tokens, width_v, GAP);
    }
    t_normal(c.q, 1.5, 31);
    t_normal(c.k, 1.5, 32);
    t_normal(c.v, 1, 33);
    t_normal(c.d_o, 1, 34);
    c.lse = T2(DTYPE_F32, n_tokens, n_heads);
    c.delta = T2(DTYPE_F32, n_tokens, n_heads);
    c.doc_start = T1(DTYPE_I32, n_tokens);
    for (int64_t t = 0; t < n_tokens; t++) t_set(c.doc_start, t, (double)doc_start_of(docs, t));
    return c;
}

static void run_forward(void *context) {
    const Case *c = (const Case *)context;
    op_attention_forward(DEV, c->o, c->lse, c->q, c->k, c->v, c->doc_start, c->shape, STREAM_COMPUTE);
}

static void run_backward(void *context) {
    const Case *c = (const Case *)context;
    op_attention_backward(DEV, c->dq, c->dk, c->dv, c->delta, c->d_o, c->o, c->q, c->k, c->v, c->lse, c->doc_start,
                          c->shape, STREAM_COMPUTE);
}

/* The formulas in double, one query and head at a time. The gradient uses o as it was stored, as the op does. */
typedef struct {
    double *o, *lse, *dq, *dk, *dv;
} Want;

static double dot(Tensor x, int64_t i, Tensor y, int64_t j, int64_t col, int64_t width) {
    double sum = 0;
    for (int64_t d = col; d < col + width; d++) sum += t_get(x, i * x.shape[1] + d) * t_get(y, j * y.shape[1] + d);
    return sum;
}

static void want_of_query(const Case *c, Want want, int64_t t, int64_t h, bool gradient) {
    const int64_t qk = c->shape.nope + c->shape.rope, vw = c->shape.value;
    const int64_t ld_qk = c->q.shape[1], ld_v = c->v.shape[1], first = (int64_t)t_get(c->doc_start, t);
    double p[1024], largest = -INFINITY, sum = 0;
    REQUIRE(t - first < 1024, "case too long for its reference");
    for (int64_t j = first; j <= t; j++) {
        p[j - first] = c->shape.scale * dot(c->q, t, c->k, j, h * qk, qk);
        largest = fmax(largest, p[j - first]);
    }
    for (int64_t j = first; j <= t; j++) sum += exp(p[j - first] - largest);
    double lse = largest + log(sum), delta = gradient ? dot(c->d_o, t, c->o, t, h * vw, vw) : 0;
    want.lse[t * c->shape.n_heads + h] = lse;
    for (int64_t j = first; j <= t; j++) {
        double pj = exp(p[j - first] - lse);
        for (int64_t d = h * vw; d < (h + 1) * vw; d++) {
            if (!gradient) want.o[t * ld_v + d] += pj * t_get(c->v, j * ld_v + d);
            if (gradient) want.dv[j * ld_v + d] += pj * t_get(c->d_o, t * ld_v + d);
        }
        if (!gradient) continue;
        double ds = c->shape.scale * pj * (dot(c->d_o, t, c->v, j, h * vw, vw) - delta);
        for (int64_t d = h * qk; d < (h + 1) * qk; d++) {
            want.dq[t * ld_qk + d] += ds * t_get(c->k, j * ld_qk + d);
            want.dk[j * ld_qk + d] += ds * t_get(c->q, t * ld_qk + d);
        }
    }
}

/* Relative to the largest element, but at least to 1: where every query sees one key, the gradient is zero but for
 * rounding. */
static double gradient_error(Tensor t, const double *want) {
    double largest = 0;
    for (int64_t i = 0; i < tensor_numel(t); i++) largest = fmax(largest, fabs(want[i]));
    return t_error(t, want) * fmin(1, fmax(largest, 1e-30));
}

static void check_case(Case c, const char *name) {
    const int64_t n_qk = c.n_tokens * c.q.shape[1], n_v = c.n_tokens * c.v.shape[1];
    Tensor zero = T3(DTYPE_F32, 1, 1, 2 * n_qk + 2 * n_v + tensor_numel(c.lse));
    Want want = {.o = t_doubles(zero)};
    want.dv = want.o + n_v;
    want.dq = want.dv + n_v;
    want.dk = want.dq + n_qk;
    want.lse = want.dk + n_qk;
    const double tolerance = c.o.dtype == DTYPE_BF16 ? BF16_TOLERANCE : 2 * OP_TOLERANCE;
    for (int gradient = 0; gradient < 2; gradient++) {
        for (int64_t t = 0; t < c.n_tokens; t++)
            for (int64_t h = 0; h < c.shape.n_heads; h++) want_of_query(&c, want, t, h, gradient);
        if (gradient) {
            t_poison(c.dq), t_poison(c.dk), t_poison(c.dv), t_poison(c.delta);
            run_backward(&c);
        } else {
            t_poison(c.o), t_poison(c.lse);
            run_forward(&c);
            EXPECT(t_error(c.o, want.o) <= tolerance, "%s: o off by %.3g", name, t_error(c.o, want.o));
            EXPECT(t_error(c.lse, want.lse) <= OP_TOLERANCE, "%s: lse off by %.3g", name, t_error(c.lse, want.lse));
        }
    }
    EXPECT(gradient_error(c.dq, want.dq) <= tolerance, "%s: dq off by %.3g", name, gradient_error(c.dq, want.dq));
    EXPECT(gradient_error(c.dk, want.dk) <= tolerance, "%s: dk off by %.3g", name, gradient_error(c.dk, want.dk));
    EXPECT(gradient_error(c.dv, want.dv) <= tolerance, "%s: dv off by %.3g", name, gradient_error(c.dv, want.dv));
    EXPECT(t_gap_is_intact(c.o, GAP) && t_gap_is_intact(c.dq, GAP) && t_gap_is_intact(c.dk, GAP) &&
               t_gap_is_intact(c.dv, GAP),
           "%s: wrote outside its columns", name);
    t_free_all();
}

TEST(attention_of_odd_lengths) {
    static const int64_t lengths[] = {1, 7, 33, 64, 65, 129, 200};
    for (int i = 0; i < 7; i++) check_case(case_make(lengths[i], 2, 5, 2, 3, DOCS_ONE, DTYPE_F32), "heads of 7 and 3");
}

TEST(attention_of_head_widths) {
    check_case(case_make(100, 1, 1, 0, 1, DOCS_ONE, DTYPE_F32), "heads of 1 and 1");
    check_case(case_make(130, 3, 32, 16, 32, DOCS_ONE, DTYPE_F32), "heads of 48 and 32");
    check_case(case_make(130, 2, 128, 64, 128, DOCS_OF_50, DTYPE_F32), "heads of 192 and 128");
    check_case(case_make(66, 1, 192, 64, 256, DOCS_ONE, DTYPE_F32), "heads of 256 and 256");
}

TEST(attention_within_documents) {
    for (int docs = DOCS_ONE; docs < DOCS_COUNT; docs++)
        check_case(case_make(203, 2, 12, 6, 10, (Docs)docs, DTYPE_F32), "documents");
}

TEST(attention_with_bf16) {
    for (int docs = DOCS_ONE; docs < DOCS_COUNT; docs++)
        check_case(case_make(150, 2, 32, 16, 32, (Docs)docs, DTYPE_BF16), "bf16");
}

/* Scores of a few hundred: exp() of them would overflow; only their differences count. */
TEST(attention_of_large_scores) {
    Case c = case_make(140, 1, 16, 0, 8, DOCS_OF_50, DTYPE_F32);
    t_normal(c.q, 20, 35);
    t_normal(c.k, 20, 36);
    run_forward(&c);
    run_backward(&c);
    EXPECT(t_is_finite(c.o) && t_is_finite(c.lse) && t_is_finite(c.dq) && t_is_finite(c.dk) && t_is_finite(c.dv),
           "overflow");
    for (int64_t t = 0; t < 140; t++) {
        double largest = -INFINITY;
        for (int64_t j = t / 50 * 50; j <= t; j++) largest = fmax(largest, c.shape.scale * dot(c.q, t, c.k, j, 0, 16));
        EXPECT(t_get(c.lse, t) >= largest - 1e-3 && t_get(c.lse, t) <= largest + log(51) + 1e-3, "lse of %lld",
               (long long)t);
    }
}

/* What comes later, or belongs to another document, changes no bit of a token. */
TEST(attention_does_not_see_the_future) {
    Case c = case_make(160, 2, 8, 4, 6, DOCS_OF_50, DTYPE_F32);
    run_forward(&c);
    Tensor o = t_copy(c.o);
    for (int64_t t = 0; t < 160; t++)
        for (int64_t d = 0; d < 24; d++)
            if (t < 100 || t >= 120) t_set(c.k, t * 24 + d, 50);
    run_forward(&c);
    EXPECT(t_same_bits(tensor_rows(o, 100, 20), tensor_rows(c.o, 100, 20)), "rows 100 to 119 see beyond themselves");
    EXPECT(!t_same_bits(tensor_rows(o, 120, 20), tensor_rows(c.o, 120, 20)), "rows after them do not see the change");
}

/* A sequence that starts at a block gives the same bits wherever it lies in the micro-batch. */
TEST(attention_bits_do_not_depend_on_place) {
    Case c = case_make(192, 2, 8, 4, 6, DOCS_ONE, DTYPE_F32);
    for (int64_t t = 0; t < 192; t++) t_set(c.doc_start, t, t < 64 ? 0 : 64);
    run_forward(&c);
    run_backward(&c);
    Case part = case_make(128, 2, 8, 4, 6, DOCS_ONE, DTYPE_F32);
    part.q = tensor_rows(c.q, 64, 128);
    part.k = tensor_rows(c.k, 64, 128);
    part.v = tensor_rows(c.v, 64, 128);
    part.d_o = tensor_rows(c.d_o, 64, 128);
    run_forward(&part);
    run_backward(&part);
    EXPECT(t_same_bits(part.o, tensor_rows(c.o, 64, 128)) && t_same_bits(part.dq, tensor_rows(c.dq, 64, 128)) &&
               t_same_bits(part.dk, tensor_rows(c.dk, 64, 128)) && t_same_bits(part.dv, tensor_rows(c.dv, 64, 128)),
           "the second sequence has other bits alone");
}

TEST(attention_bits_do_not_depend_on_threads) {
    for (int docs = DOCS_ONE; docs < DOCS_COUNT; docs++) {
        Case c = case_make(260, 3, 20, 4, 18, (Docs)docs, DTYPE_F32);
        Tensor forward[] = {c.o, c.lse}, backward[] = {c.dq, c.dk, c.dv, c.delta};
        expect_same_bits("attention_forward", run_forward, &c, forward, 2);
        expect_same_bits("attention_backward", run_backward, &c, backward, 4);
        t_free_all();
    }
}

static double loss_of_case(void *context) {
    run_forward(context);
    return t_dot_normal(((Case *)context)->o, 34);
}

TEST(attention_gradients) {
    for (int docs = DOCS_ONE; docs < DOCS_COUNT; docs++) {
        if (docs == DOCS_OF_ONE_TOKEN) continue; /* no gradient in q and k */
        Case c = case_make(docs == DOCS_ONE ? 20 : 90, 2, 4, 2, 3, (Docs)docs, DTYPE_F32);
        run_forward(&c);
        t_poison(c.dq), t_poison(c.dk), t_poison(c.dv);
        run_backward(&c);
        fd_check("q", c.q, c.dq, loss_of_case, NULL, &c, 150, NULL);
        fd_check("k", c.k, c.dk, loss_of_case, NULL, &c, 150, NULL);
        fd_check("v", c.v, c.dv, loss_of_case, NULL, &c, 150, NULL);
        t_free_all();
    }
}
