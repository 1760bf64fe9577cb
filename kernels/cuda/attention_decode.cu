/* As cpu/attention_decode.c, but a chunk of rows for one head is a block: its warps take the rows in turn for the
 * scores, then its threads take the columns for the sums. The other heads of a chunk find its rows in L2. */
#include "common.cuh"

enum { DECODE_THREADS = 256 };

typedef struct {
    float *partial;
    int64_t partial_ld, q_latent_ld, q_ld, cache_ld;
    int n_tokens, n_heads, n_rows, n_chunks; /* T, H, rows of the cache and their chunks */
    int width, nope, rope;                   /* Dc, Dn, Dr */
    float scale;
} Decode;

/* The rows that token t sees. */
__device__ inline int n_seen(const Decode &a, int t) {
    return a.n_rows - a.n_tokens + 1 + t;
}

__device__ inline float *partial_of(const Decode &a, int t, int head, int chunk) {
    return a.partial + (((int64_t)t * a.n_heads + head) * a.n_chunks + chunk) * a.partial_ld;
}

/* The query of a head, latent and rope part, waits in shared memory in the order of a row of the cache. */
extern __shared__ float decode_query[];

template <typename T>
__global__ void sum_chunk_kernel(Decode a, const T *__restrict__ q_latent, const T *__restrict__ q,
                                 const T *__restrict__ cache) {
    __shared__ float p[DECODE_CHUNK];
    const int chunk = blockIdx.x, head = blockIdx.y, t = blockIdx.z, Dc = a.width, width = Dc + a.rope;
    const int first = chunk * DECODE_CHUNK, left = n_seen(a, t) - first, n = left < DECODE_CHUNK ? left : DECODE_CHUNK;
    if (n <= 0) return;
    q_latent += t * a.q_latent_ld + (int64_t)head * Dc;
    q += t * a.q_ld + (int64_t)head * (a.nope + a.rope) + a.nope;
    cache += first * a.cache_ld;
    for (int d = threadIdx.x; d < width; d += DECODE_THREADS)
        decode_query[d] = d < Dc ? to_f32(q_latent[d]) : to_f32(q[d - Dc]);
    __syncthreads();
    for (int j = threadIdx.x / 32; j < n; j += DECODE_THREADS / 32) {
        const T *row = cache + j * a.cache_ld;
        float sum = 0;
        for (int d = threadIdx.x % 32; d < width; d += 32) sum = fmaf(decode_query[d], to_f32(row[d]), sum);
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) p[j] = a.scale * sum;
    }
    __syncthreads();
    float top = p[0], total = 0;
    for (int j = 1; j < n; j++) top = fmaxf(top, p[j]);
    __syncthreads();
    if (threadIdx.x < n) p[threadIdx.x] = expf(p[threadIdx.x] - top);
    __syncthreads();
    float *out = partial_of(a, t, head, chunk);
    for (int d = threadIdx.x; d < Dc; d += DECODE_THREADS) {
        float sum = 0;
        for (int j = 0; j < n; j++) sum = fmaf(p[j], to_f32(cache[j * a.cache_ld + d]), sum);
        out[d] = sum;
    }
    if (threadIdx.x > 0) return;
    for (int j = 0; j < n; j++) total += p[j];
    out[Dc] = top;
    out[Dc + 1] = total;
}

template <typename T> __global__ void combine_kernel(Decode a, T *o, int64_t o_ld) {
    const int head = blockIdx.x, t = blockIdx.y, Dc = a.width;
    const int n_chunks = (n_seen(a, t) + DECODE_CHUNK - 1) / DECODE_CHUNK;
    const float *part = partial_of(a, t, head, 0);
    float top = part[Dc], total = 0;
    for (int c = 1; c < n_chunks; c++) top = fmaxf(top, part[c * a.partial_ld + Dc]);
    for (int c = 0; c < n_chunks; c++)
        total = fmaf(expf(part[c * a.partial_ld + Dc] - top), part[c * a.partial_ld + Dc + 1], total);
    o += t * o_ld + (int64_t)head * Dc;
    for (int d = threadIdx.x; d < Dc; d += DECODE_THREADS) {
        float sum = 0;
        for (int c = 0; c < n_chunks; c++)
            sum = fmaf(expf(part[c * a.partial_ld + Dc] - top), part[c * a.partial_ld + d], sum);
        o[d] = from_f32<T>(sum / total);
    }
}

void cuda_attention_decode(Tensor o, Tensor partial, Tensor q_latent, Tensor q, Tensor cache, AttentionShape shape,
                           Stream s) {
    CHECK(q.dtype == cache.dtype && q_latent.dtype == cache.dtype && o.dtype == cache.dtype,
          "attention_decode: %s over %s", dtype_name(q.dtype), dtype_name(cache.dtype));
    CHECK(q.shape[0] < 65536 && shape.n_heads < 65536 && cache.shape[0] < INT32_MAX / 2 && cache.shape[1] <= 12288,
          "attention_decode: %lld tokens of %d heads over (%lld, %lld)", (long long)q.shape[0], shape.n_heads,
          (long long)cache.shape[0], (long long)cache.shape[1]);
    Decode a = {};
    a.partial = data_of<float>(partial), a.partial_ld = partial.ld;
    a.q_latent_ld = q_latent.ld, a.q_ld = q.ld, a.cache_ld = cache.ld;
    a.n_tokens = (int)q.shape[0], a.n_heads = shape.n_heads, a.n_rows = (int)cache.shape[0];
    a.n_chunks = (int)ceil_div(cache.shape[0], DECODE_CHUNK);
    a.width = (int)(cache.shape[1] - shape.rope), a.nope = (int)shape.nope, a.rope = (int)shape.rope;
    a.scale = (float)shape.scale;
    const dim3 chunks((unsigned)a.n_chunks, (unsigned)a.n_heads, (unsigned)a.n_tokens);
    const dim3 heads((unsigned)a.n_heads, (unsigned)a.n_tokens);
    const size_t query_bytes = (size_t)cache.shape[1] * sizeof(float);
    ACT_SWITCH(cache.dtype, T, {
        sum_chunk_kernel<T><<<chunks, DECODE_THREADS, query_bytes, cuda_stream(s)>>>(
            a, data_of<const T>(q_latent), data_of<const T>(q), data_of<const T>(cache));
        LAUNCH_CHECK();
        combine_kernel<T><<<heads, DECODE_THREADS, 0, cuda_stream(s)>>>(a, data_of<T>(o), o.ld);
    });
    LAUNCH_CHECK();
}
