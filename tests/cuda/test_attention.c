/* Attention against the CPU: lengths around the blocks, documents of every kind, head widths of every path. */
#include <math.h>

#include "tests/cuda/cuda_test.h"

/* How tokens fall into documents. */
typedef enum {
    DOCS_ONE,
    DOCS_TWO,
    DOCS_OF_50,
    DOCS_OF_160,
    DOCS_OF_TWO_TOKENS,
    DOCS_WINDOW,
    DOCS_ANY,
    DOCS_COUNT
} Docs;

static int64_t doc_start_of(Docs docs, int64_t t) {
    switch (docs) {
    case DOCS_TWO: return t < 65 ? 0 : 65; /* one key past a block */
    case DOCS_OF_50: return t / 50 * 50;
    case DOCS_OF_160: return t / 160 * 160;
    case DOCS_OF_TWO_TOKENS: return t / 2 * 2;
    case DOCS_WINDOW: return t < 20 ? 0 : t - 20;
    case DOCS_ANY: return t * 7919 % (t + 1); /* not even ascending: the contract allows it */
    default: return 0;
    }
}

static void forward(const Side *s) {
    const AttentionShape *shape = (const AttentionShape *)s->context;
    op_attention_forward(s->device, s->t[0], s->t[1], s->t[2], s->t[3], s->t[4], s->t[5], *shape, STREAM_COMPUTE);
}

static void backward(const Side *s) {
    const AttentionShape *shape = (const AttentionShape *)s->context;
    const Tensor *t = s->t;
    op_attention_backward(s->device, t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], *shape,
                          STREAM_COMPUTE);
}

static Tensor rows_make(Dtype dtype, int64_t rows, int64_t cols, int64_t gap) {
    return gap ? t_slice(dtype, rows, cols, gap) : T2(dtype, rows, cols);
}

#define IN(t)                                                                                                          \
    { #t, t, ARG_IN }
#define OUT(t)                                                                                                         \
    { #t, t, ARG_OUT }

/* spread: standard deviation of q and k. */
static void expect_attention(int64_t T, int n_heads, int64_t nope, int64_t rope, int64_t value, Docs docs,
                             double spread, int64_t gap, Dtype dtype) {
    AttentionShape shape = {.n_heads = n_heads, .nope = nope, .rope = rope, .value = value, .rope_mscale = 1};
    shape.scale = 1 / sqrt((double)(nope + rope));
    const int64_t width_qk = n_heads * (nope + rope), width_v = n_heads * value;
    Tensor q = t_normal(rows_make(dtype, T, width_qk, gap), spread, 1);
    Tensor k = t_normal(rows_make(dtype, T, width_qk, gap), spread, 2);
    Tensor v = t_normal(rows_make(dtype, T, width_v, gap), 1, 3);
    Tensor d_o = t_normal(rows_make(dtype, T, width_v, gap), 1, 4);
    Tensor o = rows_make(dtype, T, width_v, gap), lse = T2(DTYPE_F32, T, n_heads), doc_start = T1(DTYPE_I32, T);
    for (int64_t t = 0; t < T; t++) t_set(doc_start, t, (double)doc_start_of(docs, t));
    const char *name = case_name("%s, T %d, %d heads of %d + %d, %d, documents %d, gap %d", dtype_name(dtype), (int)T,
                                 n_heads, (int)nope, (int)rope, (int)value, (int)docs, (int)gap);
    Case f = {.name = name,
              .run = forward,
              .context = &shape,
              .args = {OUT(o), OUT(lse), IN(q), IN(k), IN(v), IN(doc_start)}};
    expect_case(&f); /* leaves the CPU's o and lse */
    Tensor dq = rows_make(dtype, T, width_qk, gap), dk = rows_make(dtype, T, width_qk, gap);
    Tensor dv = rows_make(dtype, T, width_v, gap), delta = T2(DTYPE_F32, T, n_heads);
    Case b = {
        .name = name,
        .run = backward,
        .context = &shape,
        .args = {OUT(dq), OUT(dk), OUT(dv), OUT(delta), IN(d_o), IN(o), IN(q), IN(k), IN(v), IN(lse), IN(doc_start)},
        .f32_tolerance = CUDA_SUM_TOLERANCE};
    if (T > 1) expect_case(&b); /* one token alone has no gradient in q and k but rounding */
    t_free_all();
}

TEST(cuda_attention_lengths) {
    static const int64_t lengths[] = {1, 2, 7, 63, 64, 65, 127, 128, 129, 200, 257};
    for (int i = 0; i < 11; i++) {
        expect_attention(lengths[i], 2, 5, 2, 3, DOCS_ONE, 1.5, 0, DTYPE_F32);
        expect_attention(lengths[i], 3, 32, 16, 32, DOCS_ONE, 1.5, 0, DTYPE_BF16);
        expect_attention(lengths[i], 1, 128, 64, 128, DOCS_ONE, 1, 0, DTYPE_BF16);
    }
}

/* Every pair of padded widths, at its limit and below; widths that are no whole chunks; more heads than go together. */
TEST(cuda_attention_head_widths) {
    static const int64_t widths[][3] = {{64, 0, 64},    {8, 0, 8},     {32, 32, 40},   {96, 32, 128},  {64, 32, 96},
                                        {128, 64, 128}, {144, 32, 72}, {192, 64, 256}, {128, 64, 192}, {40, 8, 240},
                                        {5, 2, 3},      {50, 10, 33},  {190, 64, 255}, {1, 0, 1}};
    for (int i = 0; i < 14; i++) {
        const int64_t *w = widths[i];
        expect_attention(150, 2, w[0], w[1], w[2], DOCS_OF_50, 1, i % 2 * 16, DTYPE_BF16);
        expect_attention(70, 2, w[0], w[1], w[2], DOCS_ONE, 1, 0, DTYPE_F32);
    }
    expect_attention(140, 19, 16, 8, 16, DOCS_ONE, 1, 0, DTYPE_BF16);
}

TEST(cuda_attention_documents) {
    for (int docs = DOCS_ONE; docs < DOCS_COUNT; docs++) {
        expect_attention(203, 2, 12, 6, 10, (Docs)docs, 1.5, 10, DTYPE_F32);
        expect_attention(333, 2, 32, 16, 32, (Docs)docs, 1.5, 16, DTYPE_BF16);
        expect_attention(460, 2, 128, 64, 128, (Docs)docs, 1, 0, DTYPE_BF16);
    }
}

/* Scores of some dozens: the maximum moves, most probabilities vanish. */
TEST(cuda_attention_large_scores) {
    expect_attention(300, 2, 32, 16, 32, DOCS_OF_160, 5, 0, DTYPE_BF16);
    expect_attention(300, 2, 128, 64, 128, DOCS_ONE, 3, 0, DTYPE_BF16);
}

TEST(cuda_attention_large) {
    expect_attention(1100, 4, 128, 64, 128, DOCS_ONE, 1, 0, DTYPE_BF16);
    expect_attention(2048, 10, 128, 64, 128, DOCS_OF_160, 1, 0, DTYPE_BF16);
    expect_attention(2048, 2, 128, 64, 128, DOCS_ONE, 1, 0, DTYPE_BF16);
    expect_attention(600, 2, 128, 64, 128, DOCS_ONE, 1, 0, DTYPE_F32);
}
