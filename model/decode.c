/* Generation: a prompt in one forward, then one position at a time over a cache of latents. See model.h.
 *
 * What attention needs of a past position is its normed kv latent and its rotated k_pe, Dc + Dr numbers a layer
 * whatever the number of heads. A prompt goes through the training mathematics, which leave them; a new token goes
 * through the absorbed form (layer_attn_decode), which never makes keys and values again. All other phases of a layer
 * are those of training, with T = 1.
 *
 * FP8 is the same: a row's tiles depend on that row alone. The cache holds the latents that W_UKV multiplies, already
 * rounded to E4M3 (which BF16 holds exactly), and the heads multiply by what W_UKV's blocks mean. */
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/ints.h"
#include "model.h"

enum { PROMPT_STEP = 64 }; /* lengths of a prompt's forward: few shapes for the GEMMs to know */

void decode_layout(Model *m, int64_t n_prompt, Arena *slots, Arena *scratch) {
    const ModelShape *s = &m->shape;
    const int64_t n = m->generate_len, width = s->Dc + s->attention.rope, K = s->router.n_chosen;
    m->cache = tensor_3d(NULL, s->act, s->L, n, width);
    m->cache.data = arena_alloc(slots, tensor_bytes(m->cache), "latent kv cache");
    m->shown_block = s->n_dense < s->L ? (s->n_dense + s->L) / 2 : -1;
    m->shown_ids = m->shown_weights = tensor_none();
    if (m->shown_block >= 0) {
        m->shown_ids = tensor_2d(arena_alloc(slots, (size_t)(n * K) * 4, "shown routing"), DTYPE_I32, n, K);
        m->shown_weights =
            tensor_2d(arena_alloc(slots, (size_t)(n * K) * sizeof(real), "shown routing"), DTYPE_F32, n, K);
    }
    /* A prompt and the next token never run at the same time. */
    const size_t slots_mark = arena_mark(slots), scratch_mark = arena_mark(scratch);
    ModelShape any = *s;
    any.capacity = 0; /* all ranks may run the same text, and nobody replays it: rows for the worst routing */
    ModelShape next = shape_with_batch(any, 1, 1);
    next.cache_len = n;
    acts_layout(&m->decode, &next, false, slots, scratch);
    arena_release(slots, slots_mark);
    arena_release(scratch, scratch_mark);
    const ModelShape prompt = shape_with_batch(any, 1, n_prompt);
    acts_layout(&m->generate, &prompt, false, slots, scratch);
}

Tensor decode_cache(const Model *m, const Acts *a, int block, ForwardMode mode) {
    if (mode != FORWARD_PREFILL && mode != FORWARD_DECODE) return tensor_none();
    return tensor_rows(tensor_plane(m->cache, block), 0, a->shape.T + (mode == FORWARD_DECODE ? m->n_cached : 0));
}

void decode_keep_routing(Model *m, const Layer *l, int block, ForwardMode mode) {
    if ((mode != FORWARD_PREFILL && mode != FORWARD_DECODE) || block != m->shown_block) return;
    const int64_t first = mode == FORWARD_DECODE ? m->n_cached : 0, T = l->shape->T;
    op_copy(m->device, tensor_rows(m->shown_ids, first, T), l->a->t[ACT_IDS], STREAM_COMPUTE);
    op_copy(m->device, tensor_rows(m->shown_weights, first, T), l->a->t[ACT_WEIGHTS], STREAM_COMPUTE);
}

/* Forward of ids[0..n) from position `first` on; the batch is as long as the activations. */
static void forward(Model *m, Acts *a, const int32_t *ids, int64_t n, int64_t first, ForwardMode mode) {
    const ModelShape *s = &a->shape;
    char err[ERR_LEN];
    MicroBatch mb;
    int32_t *window = (int32_t *)calloc((size_t)(s->S + 1 + s->n_mtp), sizeof *window);
    CHECK(window && micro_batch_alloc(&mb, 1, s->S, s->n_mtp, err) == 0, "no memory for a sequence of %lld",
          (long long)s->S);
    memcpy(window, ids, (size_t)n * sizeof *window);
    micro_batch_set(&mb, 0, window, NO_DOCUMENT_MASK, 0);
    for (int64_t t = 0; t < s->S; t++) mb.position[t] += (int32_t)first;
    model_set_batch(m, s, &mb);
    model_forward(m, a, mode);
    micro_batch_free(&mb);
    free(window);
}

void model_prefill(Model *m, const int32_t *ids, int64_t n, float *logits) {
    CHECK(n > 0 && n <= m->generate_len, "a prompt of %lld tokens in %lld positions", (long long)n,
          (long long)m->generate_len);
    /* Shorter than planned, in the same memory: what stands behind the prompt would be computed for nothing. */
    const int64_t padded = min_i64(round_up(n, PROMPT_STEP), m->generate_len);
    if (padded != m->generate.shape.S) {
        const int shown_block = m->shown_block;
        Arena slots = arena_make("generation slots", m->slots.base, m->slots.size);
        Arena scratch = arena_make("generation scratch", m->scratch.base, m->scratch.size);
        decode_layout(m, padded, &slots, &scratch);
        m->shown_block = shown_block;
    }
    forward(m, &m->generate, ids, n, 0, FORWARD_PREFILL);
    m->n_cached = n;
    model_logits(m, &m->generate, n - 1, logits);
}

void model_decode(Model *m, int32_t id, float *logits) {
    CHECK(m->n_cached > 0 && m->n_cached < m->generate_len, "position %lld of %lld", (long long)m->n_cached,
          (long long)m->generate_len);
    forward(m, &m->decode, &id, 1, m->n_cached, FORWARD_DECODE);
    m->n_cached++;
    model_logits(m, &m->decode, 0, logits);
}

int model_top_expert(Model *m, int64_t position) {
    if (m->shown_block < 0) return -1;
    CHECK(position >= 0 && position < m->n_cached, "position %lld of %lld", (long long)position,
          (long long)m->n_cached);
    const int64_t K = m->shape.router.n_chosen;
    int32_t ids[K];
    real weights[K];
    op_copy_out(m->device, ids, tensor_rows(m->shown_ids, position, 1).data, sizeof ids, STREAM_COMPUTE);
    op_copy_out(m->device, weights, tensor_rows(m->shown_weights, position, 1).data, sizeof weights, STREAM_COMPUTE);
    op_synchronize(m->device, STREAM_COMPUTE);
    int64_t best = 0;
    for (int64_t k = 1; k < K; k++)
        if (weights[k] > weights[best]) best = k;
    return ids[best];
}
