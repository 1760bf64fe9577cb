/* Attention of new tokens over a cache of latents. All heads read the same rows, so a row is fetched once for all of
 * them. The rows are cut into chunks of DECODE_CHUNK: one work item is a chunk for one token, with its own softmax,
 * and combining the chunks of a head is the step from many maxima to one. So a single token keeps all threads busy, and
 * the order of sums follows from the number of rows alone. */
#include "kernels/base/ints.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/cpu_ops.h"

typedef struct {
    Tensor partial, q_latent, q, cache;
    AttentionShape shape;
    int64_t n_tokens, n_chunks, width; /* T, chunks of the cache, Dc */
} Decode;

/* The rows that token t sees. */
static int64_t n_seen(const Decode *a, int64_t t) {
    return a->cache.shape[0] - a->n_tokens + 1 + t;
}

static real *partial_of(const Decode *a, int64_t t, int64_t head, int64_t chunk) {
    return (real *)a->partial.data + ((t * a->shape.n_heads + head) * a->n_chunks + chunk) * a->partial.ld;
}

static inline real dot(const real *a, const real *b, int64_t n) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* p: scores of n rows, which become exp(score - top). Returns top; *sum is theirs. */
static inline real softmax(real *p, int64_t n, real *sum) {
    real top = p[0];
    for (int64_t j = 1; j < n; j++) top = p[j] > top ? p[j] : top;
    *sum = 0;
    for (int64_t j = 0; j < n; j++) {
        p[j] = exp_real(p[j] - top);
        *sum += p[j];
    }
    return top;
}

static CPU_CLONES void sum_chunk(const Decode *a, int64_t t, int64_t chunk) {
    const int64_t H = a->shape.n_heads, Dc = a->width, Dr = a->shape.rope, Dqk = a->shape.nope + Dr;
    const int64_t first = chunk * DECODE_CHUNK, n = min_i64(DECODE_CHUNK, n_seen(a, t) - first);
    if (n <= 0) return;
    real latent_buf[row_buf(a->q_latent)], q_buf[row_buf(a->q)], row_buffer[row_buf(a->cache)], p[H * DECODE_CHUNK];
    const real *latent = row_in(a->q_latent, t, latent_buf), *q = row_in(a->q, t, q_buf);
    for (int64_t j = 0; j < n; j++) {
        const real *row = row_in(a->cache, first + j, row_buffer);
        for (int64_t h = 0; h < H; h++)
            p[h * DECODE_CHUNK + j] =
                (real)a->shape.scale * (dot(latent + h * Dc, row, Dc) + dot(q + h * Dqk + a->shape.nope, row + Dc, Dr));
    }
    for (int64_t h = 0; h < H; h++) {
        real *out = partial_of(a, t, h, chunk);
        out[Dc] = softmax(p + h * DECODE_CHUNK, n, &out[Dc + 1]);
        for (int64_t d = 0; d < Dc; d++) out[d] = 0;
    }
    for (int64_t j = 0; j < n; j++) {
        const real *row = row_in(a->cache, first + j, row_buffer);
        for (int64_t h = 0; h < H; h++) {
            real *out = partial_of(a, t, h, chunk), weight = p[h * DECODE_CHUNK + j];
            for (int64_t d = 0; d < Dc; d++) out[d] += weight * row[d];
        }
    }
}

/* One token's heads: their chunks, weighted by exp(top of the chunk - top of all). */
static CPU_CLONES void combine(const Decode *a, Tensor o, int64_t t) {
    const int64_t Dc = a->width, n_chunks = ceil_div(n_seen(a, t), DECODE_CHUNK);
    real o_buf[row_buf(o)];
    real *out = row_out(o, t, o_buf);
    for (int64_t h = 0; h < a->shape.n_heads; h++, out += Dc) {
        real top = partial_of(a, t, h, 0)[Dc], total = 0;
        for (int64_t c = 1; c < n_chunks; c++) top = fmax(top, partial_of(a, t, h, c)[Dc]);
        for (int64_t d = 0; d < Dc; d++) out[d] = 0;
        for (int64_t c = 0; c < n_chunks; c++) {
            const real *part = partial_of(a, t, h, c), weight = exp_real(part[Dc] - top);
            total += weight * part[Dc + 1];
            for (int64_t d = 0; d < Dc; d++) out[d] += weight * part[d];
        }
        for (int64_t d = 0; d < Dc; d++) out[d] /= total;
    }
    row_done(o, t, row_out(o, t, o_buf));
}

void cpu_attention_decode(Tensor o, Tensor partial, Tensor q_latent, Tensor q, Tensor cache, AttentionShape shape,
                          Stream s) {
    (void)s;
    const int64_t T = q.shape[0], n_chunks = ceil_div(cache.shape[0], DECODE_CHUNK);
    const Decode a = {partial, q_latent, q, cache, shape, T, n_chunks, cache.shape[1] - shape.rope};
#pragma omp parallel for schedule(static) if (T * n_chunks > 1)
    for (int64_t i = 0; i < T * n_chunks; i++) sum_chunk(&a, i / n_chunks, i % n_chunks);
#pragma omp parallel for schedule(static) if (T > 1)
    for (int64_t t = 0; t < T; t++) combine(&a, o, t);
}
