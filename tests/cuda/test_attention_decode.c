/* Attention over a cache of latents against the CPU: chunks and their edges, several tokens, widths of V3. */
#include <math.h>

#include "tests/cuda/cuda_test.h"

static void decode(const Side *s) {
    op_attention_decode(s->device, s->t[0], s->t[1], s->t[2], s->t[3], s->t[4], *(const AttentionShape *)s->context,
                        STREAM_COMPUTE);
}

static void expect_decode(Dtype dtype, int64_t T, int64_t n_rows, int n_heads, int64_t width, int64_t nope,
                          int64_t rope, int64_t gap) {
    AttentionShape shape = {.n_heads = n_heads, .nope = nope, .rope = rope, .value = 8, .rope_mscale = 1};
    shape.scale = 1 / sqrt((double)(nope + rope));
    const int64_t n_chunks = (n_rows + DECODE_CHUNK - 1) / DECODE_CHUNK;
    Tensor o = t_slice(dtype, T, n_heads * width, gap);
    Tensor partial = T2(DTYPE_F32, T * n_heads * n_chunks, width + 2);
    Tensor q_latent = t_normal(t_slice(dtype, T, n_heads * width, gap), 0.5, 1);
    Tensor q = t_normal(t_slice(dtype, T, n_heads * (nope + rope), gap), 1.5, 2);
    Tensor cache = t_normal(t_slice(dtype, n_rows, width + rope, gap), 1, 3);
    Case c = {.name = case_name("%s, %d tokens of %d heads over %d rows of %d + %d, gap %d", dtype_name(dtype), (int)T,
                                n_heads, (int)n_rows, (int)width, (int)rope, (int)gap),
              .run = decode,
              .context = &shape,
              .args = {{"o", o, ARG_OUT},
                       {"partial", partial, ARG_SCRATCH},
                       {"q_latent", q_latent, ARG_IN},
                       {"q", q, ARG_IN},
                       {"cache", cache, ARG_IN}},
              .f32_tolerance = CUDA_SUM_TOLERANCE};
    expect_case(&c);
    t_free_all();
}

TEST(cuda_attention_decode_shapes) {
    static const int64_t lengths[] = {1, 2, 63, 64, 65, 128, 500};
    for (int i = 0; i < 7; i++)
        for (int d = 0; d < 2; d++) {
            expect_decode(act_dtypes[d], 1, lengths[i], 2, 12, 8, 4, 0);
            expect_decode(act_dtypes[d], 1, lengths[i], 4, 64, 32, 16, 10);
            expect_decode(act_dtypes[d], 1, lengths[i], 3, 33, 5, 0, 1);
        }
    for (int d = 0; d < 2; d++) {
        expect_decode(act_dtypes[d], 3, 66, 2, 12, 8, 4, 6);
        expect_decode(act_dtypes[d], 70, 130, 2, 9, 4, 2, 0);
        expect_decode(act_dtypes[d], 1, 1500, 16, 512, 128, 64, 0);
    }
    expect_decode(DTYPE_BF16, 1, 4096, 128, 512, 128, 64, 0);
}
