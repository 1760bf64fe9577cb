/* As cpu/attention.c: a running maximum and sum forward, probabilities made again from lse backward, one group of
 * threads for whatever is written. No atomics: dq runs over keys, dk and dv over queries, each in ascending order.
 *
 * BF16 with heads of whole 16-byte chunks goes to attention_mma.cuh, in one of four pairs of padded widths. Here is
 * the rest, F32 and BF16 heads of other widths: one warp a row, one key or query at a time, by plain multiply-add. */
#include "attention_mma.cuh"

static const int HEAD_MAX = 256;

template <typename T> static Rows<T> rows_of(Tensor t) {
    Rows<T> r = {data_of<T>(t), t.ld};
    return r;
}

static Attention attention_make(Tensor q, Tensor doc_start, AttentionShape shape) {
    Attention a = {};
    a.width_qk = (int)(shape.nope + shape.rope), a.width_v = (int)shape.value;
    CHECK(a.width_qk <= HEAD_MAX && a.width_v <= HEAD_MAX, "head widths %d and %d exceed %d", a.width_qk, a.width_v,
          HEAD_MAX);
    CHECK(q.shape[0] * shape.n_heads < INT32_MAX / 32, "%lld tokens of %d heads", (long long)q.shape[0], shape.n_heads);
    a.n_tokens = (int)q.shape[0], a.n_heads = shape.n_heads;
    a.scale = (float)shape.scale;
    a.doc_start = data_of<int32_t>(doc_start);
    return a;
}

/* ---- one warp a row ---------------------------------------------------------------------------------------------- */

/* A lane holds every 32nd element of a row of a head. */
typedef struct {
    float x[HEAD_MAX / 32];
} Part;

template <typename T> __device__ inline Part part_load(const Rows<T> &m, int64_t row, int64_t col, int width) {
    Part p;
    const T *from = m.data + row * m.ld + col;
#pragma unroll
    for (int i = 0; i < HEAD_MAX / 32; i++) {
        const int d = i * 32 + threadIdx.x % 32;
        p.x[i] = d < width ? to_f32(from[d]) : 0;
    }
    return p;
}

template <typename T>
__device__ inline void part_store(const Rows<T> &m, int64_t row, int64_t col, int width, const Part &p) {
    T *to = m.data + row * m.ld + col;
#pragma unroll
    for (int i = 0; i < HEAD_MAX / 32; i++) {
        const int d = i * 32 + threadIdx.x % 32;
        if (d < width) to[d] = from_f32<T>(p.x[i]);
    }
}

__device__ inline float part_dot(const Part &a, const Part &b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < HEAD_MAX / 32; i++) sum = fmaf(a.x[i], b.x[i], sum);
    return warp_sum(sum);
}

__device__ inline void part_add(Part &a, float by, const Part &b) {
#pragma unroll
    for (int i = 0; i < HEAD_MAX / 32; i++) a.x[i] = fmaf(by, b.x[i], a.x[i]);
}

/* The row and head of a warp; false: there is none. */
__device__ inline bool warp_work(const Attention &a, int64_t *t, int *head) {
    const int i = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    *t = i / a.n_heads;
    *head = i % a.n_heads;
    return *t < a.n_tokens;
}

template <typename T>
__global__ void forward_rows_kernel(Attention a, Rows<T> o, Rows<float> lse, Rows<const T> q, Rows<const T> k,
                                    Rows<const T> v) {
    int64_t t;
    int head;
    if (!warp_work(a, &t, &head)) return;
    const int col_qk = head * a.width_qk, col_v = head * a.width_v;
    const Part query = part_load(q, t, col_qk, a.width_qk);
    Part out = {};
    float largest = -1e30f, sum = 0;
    for (int64_t key = a.doc_start[t]; key <= t; key++) {
        const float s = a.scale * part_dot(query, part_load(k, key, col_qk, a.width_qk)), top = fmaxf(largest, s);
        const float shrink = expf(largest - top), p = expf(s - top);
        largest = top;
        sum = sum * shrink + p;
#pragma unroll
        for (int i = 0; i < HEAD_MAX / 32; i++) out.x[i] *= shrink;
        part_add(out, p, part_load(v, key, col_v, a.width_v));
    }
#pragma unroll
    for (int i = 0; i < HEAD_MAX / 32; i++) out.x[i] /= sum;
    part_store(o, t, col_v, a.width_v, out);
    if (threadIdx.x % 32 == 0) lse.data[t * lse.ld + head] = largest + logf(sum);
}

/* delta[t, h] = sum of d_o * o over the head's columns: eight lanes a head, PACK elements at a time. */
template <typename T, int PACK>
__global__ void delta_kernel(Attention a, Rows<float> delta, Rows<const T> d_o, Rows<const T> o) {
    const int i = (int)(blockIdx.x * (blockDim.x / 8) + threadIdx.x / 8), head = i % a.n_heads;
    const int64_t t = i / a.n_heads;
    const bool is_valid = t < a.n_tokens;
    float sum = 0;
    if (is_valid) {
        const T *x = d_o.data + t * d_o.ld + head * a.width_v, *y = o.data + t * o.ld + head * a.width_v;
        for (int d = threadIdx.x % 8 * PACK; d < a.width_v; d += 8 * PACK) {
            const Pack<T, PACK> p = load_pack<PACK>(x + d), r = load_pack<PACK>(y + d);
#pragma unroll
            for (int c = 0; c < PACK; c++) sum += to_f32(p.x[c]) * to_f32(r.x[c]);
        }
    }
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    if (is_valid && threadIdx.x % 8 == 0) delta.data[t * delta.ld + head] = sum;
}

template <typename T>
__global__ void backward_queries_rows_kernel(Attention a, Rows<T> dq, Rows<const T> d_o, Rows<const T> q,
                                             Rows<const T> k, Rows<const T> v, Rows<const float> lse,
                                             Rows<const float> delta) {
    int64_t t;
    int head;
    if (!warp_work(a, &t, &head)) return;
    const int col_qk = head * a.width_qk, col_v = head * a.width_v;
    const Part query = part_load(q, t, col_qk, a.width_qk), gradient = part_load(d_o, t, col_v, a.width_v);
    const float lse_t = lse.data[t * lse.ld + head], delta_t = delta.data[t * delta.ld + head];
    Part sum = {};
    for (int64_t key = a.doc_start[t]; key <= t; key++) {
        const Part k_row = part_load(k, key, col_qk, a.width_qk);
        const float p = expf(a.scale * part_dot(query, k_row) - lse_t);
        const float dp = part_dot(gradient, part_load(v, key, col_v, a.width_v));
        part_add(sum, a.scale * p * (dp - delta_t), k_row);
    }
    part_store(dq, t, col_qk, a.width_qk, sum);
}

template <typename T>
__global__ void backward_keys_rows_kernel(Attention a, Rows<T> dk, Rows<T> dv, Rows<const T> d_o, Rows<const T> q,
                                          Rows<const T> k, Rows<const T> v, Rows<const float> lse,
                                          Rows<const float> delta) {
    int64_t key;
    int head;
    if (!warp_work(a, &key, &head)) return;
    const int col_qk = head * a.width_qk, col_v = head * a.width_v;
    const Part k_row = part_load(k, key, col_qk, a.width_qk), v_row = part_load(v, key, col_v, a.width_v);
    Part sum_k = {}, sum_v = {};
    for (int64_t t = key; t < a.n_tokens; t++) {
        if (a.doc_start[t] > key) continue;
        const Part query = part_load(q, t, col_qk, a.width_qk), gradient = part_load(d_o, t, col_v, a.width_v);
        const float p = expf(a.scale * part_dot(query, k_row) - lse.data[t * lse.ld + head]);
        const float dp = part_dot(gradient, v_row);
        part_add(sum_v, p, gradient);
        part_add(sum_k, a.scale * p * (dp - delta.data[t * delta.ld + head]), query);
    }
    part_store(dk, key, col_qk, a.width_qk, sum_k);
    part_store(dv, key, col_v, a.width_v, sum_v);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* Rows of every head begin at multiples of 16 bytes and are whole chunks. */
static bool is_chunked(const Attention &a, const Tensor *t, int n) {
    for (int i = 0; i < n; i++)
        if (t[i].dtype != DTYPE_BF16 || (uintptr_t)t[i].data % 16 != 0 || t[i].ld % 8 != 0) return false;
    return a.width_qk % 8 == 0 && a.width_v % 8 == 0;
}

static unsigned blocks_of(const Attention &a, int per_block) {
    return (unsigned)ceil_div((int64_t)a.n_tokens * a.n_heads, per_block);
}

/* False: this GPU has too little shared memory. */
template <int DQK, int DV, int MT>
static bool launch_forward(const Attention &a, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                           cudaStream_t stream) {
    typedef Forward<DQK, DV, MT> F;
    static bool allowed;
    if ((size_t)F::BYTES > shared_limit()) return false;
    if (!allowed) allow_shared(attention_forward_kernel<DQK, DV, MT>, F::BYTES);
    allowed = true;
    const unsigned grid = (unsigned)(ceil_div(a.n_tokens, F::ROWS) * a.n_heads);
    attention_forward_kernel<DQK, DV, MT>
        <<<grid, F::THREADS, F::BYTES, stream>>>(a, rows_of<bf16>(o), rows_of<float>(lse), rows_of<const bf16>(q),
                                                 rows_of<const bf16>(k), rows_of<const bf16>(v));
    LAUNCH_CHECK();
    return true;
}

/* The smallest pair of padded widths. */
static bool forward_by_mma(const Attention &a, Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v,
                           cudaStream_t stream) {
    if (a.width_qk <= 64 && a.width_v <= 64) return launch_forward<64, 64, 2>(a, o, lse, q, k, v, stream);
    if (a.width_qk <= 128 && a.width_v <= 128) return launch_forward<128, 128, 2>(a, o, lse, q, k, v, stream);
    if (a.width_qk <= 192 && a.width_v <= 128) return launch_forward<192, 128, 2>(a, o, lse, q, k, v, stream);
    return launch_forward<256, 256, 1>(a, o, lse, q, k, v, stream);
}

void cuda_attention_forward(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor doc_start, AttentionShape shape,
                            Stream s) {
    const Attention a = attention_make(q, doc_start, shape);
    const Tensor tensors[] = {o, q, k, v};
    if (a.n_tokens == 0) return;
    if (is_chunked(a, tensors, 4) && forward_by_mma(a, o, lse, q, k, v, cuda_stream(s))) return;
    const unsigned grid = blocks_of(a, 8);
    ACT_SWITCH(q.dtype, T,
               forward_rows_kernel<T>
               <<<grid, 256, 0, cuda_stream(s)>>>(a, rows_of<T>(o), rows_of<float>(lse), rows_of<const T>(q),
                                                  rows_of<const T>(k), rows_of<const T>(v)));
    LAUNCH_CHECK();
}

template <int DQK, int DV, int WM, int WN, bool KEYS>
static bool launch_backward(const Attention &a, Tensor d1, Tensor d2, Tensor x1, Tensor x2, Tensor y1, Tensor y2,
                            Tensor lse, Tensor delta, cudaStream_t stream) {
    typedef Backward<DQK, DV, WM, WN, KEYS> B;
    static bool allowed;
    const int n_stages = B::bytes(2) <= shared_limit() ? 2 : 1;
    if (B::bytes(n_stages) > shared_limit()) return false;
    if (!allowed) allow_shared(attention_backward_kernel<DQK, DV, WM, WN, KEYS>, B::bytes(n_stages));
    allowed = true;
    const unsigned grid = (unsigned)(ceil_div(a.n_tokens, B::ROWS) * a.n_heads);
    attention_backward_kernel<DQK, DV, WM, WN, KEYS><<<grid, B::THREADS, B::bytes(n_stages), stream>>>(
        a, rows_of<bf16>(d1), rows_of<bf16>(d2), rows_of<const bf16>(x1), rows_of<const bf16>(x2),
        rows_of<const bf16>(y1), rows_of<const bf16>(y2), rows_of<const float>(lse), rows_of<const float>(delta),
        n_stages);
    LAUNCH_CHECK();
    return true;
}

template <bool KEYS>
static bool backward_by_mma(const Attention &a, Tensor d1, Tensor d2, Tensor x1, Tensor x2, Tensor y1, Tensor y2,
                            Tensor lse, Tensor delta, cudaStream_t stream) {
    if (a.width_qk <= 64 && a.width_v <= 64)
        return launch_backward<64, 64, 4, 2, KEYS>(a, d1, d2, x1, x2, y1, y2, lse, delta, stream);
    if (a.width_qk <= 128 && a.width_v <= 128)
        return launch_backward<128, 128, 4, 2, KEYS>(a, d1, d2, x1, x2, y1, y2, lse, delta, stream);
    if (a.width_qk <= 192 && a.width_v <= 128)
        return launch_backward<192, 128, 4, 2, KEYS>(a, d1, d2, x1, x2, y1, y2, lse, delta, stream);
    return launch_backward<256, 256, 2, 4, KEYS>(a, d1, d2, x1, x2, y1, y2, lse, delta, stream);
}

template <typename T>
static void launch_delta(const Attention &a, Tensor delta, Tensor d_o, Tensor o, bool is_packed, cudaStream_t stream) {
    const unsigned grid = blocks_of(a, 256 / 8);
    const Rows<float> to = rows_of<float>(delta);
    if (is_packed)
        delta_kernel<T, Pack<T>::N><<<grid, 256, 0, stream>>>(a, to, rows_of<const T>(d_o), rows_of<const T>(o));
    else
        delta_kernel<T, 1><<<grid, 256, 0, stream>>>(a, to, rows_of<const T>(d_o), rows_of<const T>(o));
    LAUNCH_CHECK();
}

template <typename T>
static void backward_by_rows(const Attention &a, Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor q,
                             Tensor k, Tensor v, Tensor lse, cudaStream_t stream) {
    const unsigned grid = blocks_of(a, 8);
    const Rows<const T> g = rows_of<const T>(d_o), q_rows = rows_of<const T>(q), k_rows = rows_of<const T>(k);
    const Rows<const T> v_rows = rows_of<const T>(v);
    const Rows<const float> lse_rows = rows_of<const float>(lse), delta_rows = rows_of<const float>(delta);
    backward_queries_rows_kernel<T>
        <<<grid, 256, 0, stream>>>(a, rows_of<T>(dq), g, q_rows, k_rows, v_rows, lse_rows, delta_rows);
    LAUNCH_CHECK();
    backward_keys_rows_kernel<T>
        <<<grid, 256, 0, stream>>>(a, rows_of<T>(dk), rows_of<T>(dv), g, q_rows, k_rows, v_rows, lse_rows, delta_rows);
    LAUNCH_CHECK();
}

void cuda_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor o, Tensor q, Tensor k,
                             Tensor v, Tensor lse, Tensor doc_start, AttentionShape shape, Stream s) {
    const Attention a = attention_make(q, doc_start, shape);
    const Tensor tensors[] = {dq, dk, dv, d_o, o, q, k, v};
    cudaStream_t stream = cuda_stream(s);
    if (a.n_tokens == 0) return;
    const bool chunked = is_chunked(a, tensors, 8);
    ACT_SWITCH(q.dtype, T, launch_delta<T>(a, delta, d_o, o, chunked, stream));
    if (chunked && backward_by_mma<false>(a, dq, tensor_none(), q, d_o, k, v, lse, delta, stream) &&
        backward_by_mma<true>(a, dk, dv, k, v, q, d_o, lse, delta, stream))
        return;
    ACT_SWITCH(q.dtype, T, backward_by_rows<T>(a, dq, dk, dv, delta, d_o, q, k, v, lse, stream));
}
