/* RoPE and the split into heads, forward and backward, in place and not. */
#include "tests/cuda/cuda_test.h"

static void forward(const Side *s) {
    op_rope_split_forward(s->device, s->t[0], s->t[1], s->t[2], s->t[3], s->t[4], s->t[5], s->t[6], s->t[7],
                          *(const AttentionShape *)s->context, STREAM_COMPUTE);
}

/* The same arguments are gradients here, and what was read is written. */
static void backward(const Side *s) {
    op_rope_split_backward(s->device, s->t[3], s->t[4], s->t[5], s->t[0], s->t[1], s->t[2], s->t[6], s->t[7],
                           *(const AttentionShape *)s->context, STREAM_COMPUTE);
}

static void expect_rope(Dtype dtype, int64_t T, AttentionShape a, bool in_place, int64_t gap) {
    const int64_t H = a.n_heads, Dqk = a.nope + a.rope;
    Tensor q = t_normal(t_slice(dtype, T, H * Dqk, gap), 1, 1),
           q_in = in_place ? q : t_normal(T2(dtype, T, H * Dqk), 1, 2);
    Tensor k = t_normal(t_slice(dtype, T, H * Dqk, gap), 1, 3), v = t_normal(t_slice(dtype, T, H * a.value, gap), 1, 4);
    Tensor kv = t_normal(t_slice(dtype, T, H * (a.nope + a.value), gap), 1, 5);
    Tensor k_pe = t_normal(t_slice(dtype, T, a.rope, 2 * gap + 6), 1, 6);
    Tensor position = T1(DTYPE_I32, T), inv_freq = T1(DTYPE_F32, a.rope / 2);
    for (int64_t t = 0; t < T; t++) t_set(position, t, t % 11 == 7 ? -1 : (double)(t * 37 % 4096));
    for (int64_t i = 0; i < a.rope / 2; i++) t_set(inv_freq, i, 1 / (1 + (double)(i * i)));
    const char *name = case_name("%s T %d, heads %d x (%d + %d, %d)%s, gap %d", dtype_name(dtype), (int)T, (int)H,
                                 (int)a.nope, (int)a.rope, (int)a.value, in_place ? ", in place" : "", (int)gap);
    Case b = {.name = name,
              .run = backward,
              .context = &a,
              .args = {{"dq", q, in_place ? ARG_ADD : ARG_IN},
                       {"dk", k, ARG_IN},
                       {"dv", v, ARG_IN},
                       {"dq_in", q_in, ARG_OUT},
                       {"dkv", kv, ARG_OUT},
                       {"dk_pe", k_pe, ARG_OUT},
                       {"position", position, ARG_IN},
                       {"inv_freq", inv_freq, ARG_IN}}};
    expect_case(&b); /* leaves what forward reads */
    Case f = b;
    f.run = forward;
    for (int i = 0; i < 3; i++) f.args[i].kind = ARG_OUT, f.args[3 + i].kind = ARG_IN;
    if (in_place) f.args[0].kind = ARG_ADD;
    expect_case(&f);
}

TEST(cuda_rope_awkward_shapes) {
    static const AttentionShape shapes[] = {
        {.n_heads = 1, .nope = 0, .rope = 2, .value = 1, .rope_mscale = 1},
        {.n_heads = 3, .nope = 5, .rope = 6, .value = 7, .rope_mscale = 1.25},
        {.n_heads = 2, .nope = 8, .rope = 0, .value = 16, .rope_mscale = 1},
        {.n_heads = 5, .nope = 16, .rope = 8, .value = 24, .rope_mscale = 0.75},
        {.n_heads = 4, .nope = 32, .rope = 16, .value = 32, .rope_mscale = 1},
        {.n_heads = 16, .nope = 12, .rope = 4, .value = 12, .rope_mscale = 1},
        {.n_heads = 70, .nope = 16, .rope = 16, .value = 8, .rope_mscale = 1}, /* dk_pe: groups of more than one head */
        {.n_heads = 3, .nope = 8, .rope = 520, .value = 8, .rope_mscale = 1.25}, /* more pairs than threads */
    };
    for (int i = 0; i < 32; i++) {
        const int64_t T = i % 4 < 2 ? 1 : 53;
        expect_rope(act_dtypes[i % 2], T, shapes[i / 4], false, 0);
        expect_rope(act_dtypes[i % 2], T, shapes[i / 4], true, 0);
        expect_rope(act_dtypes[i % 2], T, shapes[i / 4], false, 2);
        expect_rope(act_dtypes[i % 2], T, shapes[i / 4], true, 16);
        t_free_all();
    }
    expect_rope(DTYPE_BF16, 0, shapes[3], false, 0);
}

/* The last number of heads of a small block, and the first of a large one. */
TEST(cuda_rope_few_and_many_heads) {
    for (int heads = 15; heads < 18; heads++) {
        const AttentionShape a = {.n_heads = heads, .nope = 128, .rope = 64, .value = 128, .rope_mscale = 1};
        for (int i = 0; i < 4; i++) {
            expect_rope(act_dtypes[i % 2], 5, a, i < 2, 0);
            t_free_all();
        }
    }
    const AttentionShape wide = {.n_heads = 7, .nope = 16, .rope = 264, .value = 8, .rope_mscale = 0.5};
    expect_rope(DTYPE_BF16, 5, wide, true, 0); /* few packs, and more pairs than the small block has threads */
}

TEST(cuda_rope_large) {
    const AttentionShape lite = {.n_heads = 16, .nope = 128, .rope = 64, .value = 128, .rope_mscale = 1},
                         v3 = {.n_heads = 128, .nope = 128, .rope = 64, .value = 128, .rope_mscale = 1};
    expect_rope(DTYPE_BF16, 500, lite, true, 0);
    t_free_all();
    expect_rope(DTYPE_BF16, 60, v3, false, 0);
    expect_rope(DTYPE_F32, 20, v3, true, 0);
}

static void rotate(const Side *s) {
    op_rope_forward(s->device, s->t[0], s->t[1], s->t[2], s->t[3], *(const AttentionShape *)s->context, STREAM_COMPUTE);
}

static void expect_rotation(Dtype dtype, int64_t T, int n_heads, int64_t nope, int64_t rope, bool in_place,
                            int64_t gap) {
    const AttentionShape a = {.n_heads = n_heads, .nope = nope, .rope = rope, .value = 1, .rope_mscale = 1.25};
    Tensor x = t_normal(t_slice(dtype, T, n_heads * (nope + rope), gap), 1, 1);
    Tensor y = in_place ? x : t_slice(dtype, T, n_heads * (nope + rope), gap + 8);
    Tensor position = T1(DTYPE_I32, T), inv_freq = T1(DTYPE_F32, rope / 2);
    for (int64_t t = 0; t < T; t++) t_set(position, t, t % 11 == 7 ? -1 : (double)(t * 37 % 4096));
    for (int64_t i = 0; i < rope / 2; i++) t_set(inv_freq, i, 1 / (1 + (double)(i * i)));
    Case c = {.name = case_name("rotation, %s T %d, heads %d x (%d + %d)%s, gap %d", dtype_name(dtype), (int)T, n_heads,
                                (int)nope, (int)rope, in_place ? ", in place" : "", (int)gap),
              .run = rotate,
              .context = &a,
              .args = {{"y", y, in_place ? ARG_ADD : ARG_OUT},
                       {"x", x, in_place ? ARG_ADD : ARG_IN},
                       {"position", position, ARG_IN},
                       {"inv_freq", inv_freq, ARG_IN}}};
    expect_case(&c);
    t_free_all();
}

TEST(cuda_rope_forward) {
    for (int i = 0; i < 8; i++) {
        const int64_t T = i & 1 ? 53 : 1, gap = i & 4 ? 16 : 0;
        expect_rotation(act_dtypes[i / 2 % 2], T, 1, 0, 64, false, gap);
        expect_rotation(act_dtypes[i / 2 % 2], T, 4, 32, 16, true, gap);
        expect_rotation(act_dtypes[i / 2 % 2], T, 3, 5, 6, false, 2);
        expect_rotation(act_dtypes[i / 2 % 2], T, 3, 5, 6, true, 2);
    }
}
