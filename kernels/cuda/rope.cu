/* As cpu/rope.c, but a block per token. A token's angles are computed once and wait in shared memory; meanwhile the
 * first packs of 16 bytes of every thread are on their way, each of them wholly inside one part of one head. Where
 * widths or addresses do not allow packs, single elements: then the thread of an even element writes both of its pair,
 * because q may be rotated in place. */
#include "common.cuh"

enum {
    ROPE_THREADS = 256, /* at most */
    ROPE_FEW_THREADS = 128,
    FORWARD_PACKS = 4, /* on their way at once */
    BACKWARD_PACKS = 3
};

typedef struct {
    void *q, *k, *v, *q_in, *kv, *k_pe; /* or their gradients; q_in may be q */
    int64_t q_ld, k_ld, v_ld, q_in_ld, kv_ld, k_pe_ld;
    const int32_t *position;
    const float *inv_freq;
    int n_heads, Dn, Dr, Dv;
    float mscale;
} Heads;

/* Shared memory of a block: cosines and sines of the Dr/2 pairs; then, forward, the Dr elements of the rotated k_pe,
 * backward, sums of dk_pe over some heads. */
extern __shared__ int4 rope_shared[];

/* direction 1 rotates, -1 rotates back. The angle is a product of floats, as on the CPU. */
__device__ static inline void angles(float *cosine, float *sine, const Heads &a, int64_t t, float direction) {
    const float at = a.position[t] < 0 ? 0 : (float)a.position[t];
    for (int i = threadIdx.x; i < a.Dr / 2; i += blockDim.x) {
        float sin_i, cos_i;
        sincosf(at * a.inv_freq[i], &sin_i, &cos_i);
        cosine[i] = cos_i * a.mscale;
        sine[i] = sin_i * a.mscale * direction;
    }
}

/* The pairs of a pack that begins at pair `i`. */
template <typename T, int N>
__device__ static inline Pack<T, N> rotated(const Pack<T, N> &x, const float *cosine, const float *sine, int i) {
    float y[N];
    unpack(y, x);
#pragma unroll
    for (int j = 0; j + 1 < N; j += 2) {
        const float even = y[j], odd = y[j + 1], c = cosine[i + j / 2], s = sine[i + j / 2];
        y[j] = even * c - odd * s;
        y[j + 1] = even * s + odd * c;
    }
    return pack_of<T>(y);
}

/* y[i] and y[i + 1], of one pair; y may be x. */
template <typename T, typename X> __device__ static inline void rotate_pair(T *y, const X *x, float c, float s) {
    const float even = to_f32(x[0]), odd = to_f32(x[1]);
    y[0] = from_f32<T>(even * c - odd * s);
    y[1] = from_f32<T>(even * s + odd * c);
}

/* P packs of one thread on their way: number p = threadIdx.x + k * blockDim.x of a row. */
template <typename T, int N, int P> struct Batch { Pack<T, N> pack[P]; };
template <typename T, int N, int P, typename From>
__device__ static inline void load_batch(Batch<T, N, P> *batch, int first, int n, From from) {
#pragma unroll
    for (int k = 0; k < P; k++)
        if (first + k * (int)blockDim.x < n) batch->pack[k] = load_pack<N>(from(first + k * blockDim.x));
}
/* to(p, pack from(p)) for all packs of a row; the first of them are in the batch. */
template <typename T, int N, int P, typename From, typename To>
__device__ static inline void move_packs(Batch<T, N, P> *batch, int n, From from, To to) {
    for (int first = threadIdx.x; first < n; first += blockDim.x * P) {
        if (first > (int)threadIdx.x) load_batch(batch, first, n, from);
#pragma unroll
        for (int k = 0; k < P; k++)
            if (first + k * (int)blockDim.x < n) to(first + k * blockDim.x, batch->pack[k]);
    }
}

/* The packs of a query row: all of it, or, in place, only the rotated parts. */
typedef struct {
    int n, per_head, skipped, Dn, Dqk;
} QueryPacks;

template <int N> __device__ static inline QueryPacks query_packs(const Heads &a, bool in_place) {
    const int per_head = (in_place ? a.Dr : a.Dn + a.Dr) / N;
    return {a.n_heads * per_head, per_head, in_place ? a.Dn : 0, a.Dn, a.Dn + a.Dr};
}
/* Where pack p begins in its head. */
template <int N> __device__ static inline int in_head(const QueryPacks &q, int p) {
    return q.skipped + p % q.per_head * N;
}
template <int N> __device__ static inline int in_row(const QueryPacks &q, int p) {
    return p / q.per_head * q.Dqk + in_head<N>(q, p);
}

template <typename T, int N, int P>
__device__ static inline void load_q(Batch<T, N, P> *batch, const T *x, const QueryPacks &q) {
    if constexpr (N > 1) load_batch(batch, threadIdx.x, q.n, [=](int p) { return x + in_row<N>(q, p); });
}
/* The heads of one query row, copied and rotated; in place, nothing is copied. */
template <typename T, int N, int P>
__device__ static inline void move_q(Batch<T, N, P> *batch, T *y, const T *x, const QueryPacks &q, const float *cosine,
                                     const float *sine, const Heads &a) {
    if constexpr (N == 1) {
        for (int i = threadIdx.x; i < a.n_heads * q.Dqk; i += blockDim.x) {
            const int at = i % q.Dqk - a.Dn;
            if (at < 0)
                y[i] = x[i];
            else if (at % 2 == 0)
                rotate_pair(y + i, x + i, cosine[at / 2], sine[at / 2]);
        }
    } else {
        move_packs(
            batch, q.n, [=](int p) { return x + in_row<N>(q, p); },
            [=](int p, const Pack<T, N> &pack) {
                const int pair = (in_head<N>(q, p) - q.Dn) / 2;
                store_pack(y + in_row<N>(q, p), in_head<N>(q, p) < q.Dn ? pack : rotated(pack, cosine, sine, pair));
            });
    }
}

/* The packs of a row of kv, and the same elements as parts of k and v. */
template <int N> __device__ static inline int kv_packs(const Heads &a) {
    return a.n_heads * (a.Dn + a.Dv) / N;
}
template <int N, typename T> __device__ static inline T *of_k_or_v(T *k, T *v, const Heads &a, int p) {
    const int per_head = (a.Dn + a.Dv) / N, head = p / per_head, at = p % per_head * N;
    return at < a.Dn ? k + head * (a.Dn + a.Dr) + at : v + head * a.Dv + at - a.Dn;
}

/* q and k = [k_nope; rotated k_pe], v from kv. */
template <typename T, int N> static __global__ void __launch_bounds__(ROPE_THREADS) forward_kernel(Heads a) {
    const int64_t t = blockIdx.x;
    float *cosine = (float *)rope_shared, *sine = cosine + a.Dr / 2;
    T *k_pe = (T *)(rope_shared + (a.Dr + 3) / 4); /* 16-byte aligned */
    T *q = (T *)a.q + t * a.q_ld, *k = (T *)a.k + t * a.k_ld, *v = (T *)a.v + t * a.v_ld;
    const T *q_in = (const T *)a.q_in + t * a.q_in_ld, *kv = (const T *)a.kv + t * a.kv_ld;
    const T *k_pe_in = (const T *)a.k_pe + t * a.k_pe_ld;
    const auto from_kv = [=](int p) { return kv + p * N; };
    const QueryPacks q_packs = query_packs<N>(a, q == q_in);
    Batch<T, N, FORWARD_PACKS> q_batch, kv_batch;
    load_q(&q_batch, q_in, q_packs);
    load_batch(&kv_batch, threadIdx.x, kv_packs<N>(a), from_kv);
    angles(cosine, sine, a, t, 1);
    for (int i = threadIdx.x; i < a.Dr / 2; i += blockDim.x) /* the thread's own angles */
        rotate_pair(k_pe + 2 * i, k_pe_in + 2 * i, cosine[i], sine[i]);
    move_packs(&kv_batch, kv_packs<N>(a), from_kv,
               [&](int p, const Pack<T, N> &pack) { store_pack(of_k_or_v<N>(k, v, a, p), pack); });
    __syncthreads();
    move_q(&q_batch, q, q_in, q_packs, cosine, sine, a);
    const int per_head = a.Dr / N;
    for (int p = threadIdx.x; p < a.n_heads * per_head; p += blockDim.x)
        store_pack(k + p / per_head * (a.Dn + a.Dr) + a.Dn + p % per_head * N, load_pack<N>(k_pe + p % per_head * N));
}

/* dk_pe: the sum over the heads, in `n_groups` sums of consecutive heads, which are then added in order. A thread reads
 * a pack of every head of a group; sum is (n_groups, Dr). */
template <int N> __device__ static inline int k_pe_groups(const Heads &a) {
    return a.Dr == 0 ? 0 : min(max((int)blockDim.x * N / a.Dr, 1), a.n_heads);
}
template <typename T, int N>
__device__ static inline void sum_groups(float *sum, const T *__restrict__ dk, const Heads &a) {
    const int n_packs = a.Dr / N, n_groups = k_pe_groups<N>(a), share = (a.n_heads + n_groups - 1) / max(n_groups, 1);
    for (int j = threadIdx.x; j < n_groups * n_packs; j += blockDim.x) {
        const int first = j / n_packs * share, last = min(first + share, a.n_heads);
        const T *in = dk + a.Dn + j % n_packs * N;
        Pack<float, N> total = {};
#pragma unroll 4
        for (int h = first; h < last; h++) add_pack(total.x, load_pack<N>(in + h * (a.Dn + a.Dr)));
        *(Pack<float, N> *)(sum + j * N) = total;
    }
}
template <typename T, int N>
__device__ static inline void store_k_pe(T *__restrict__ dk_pe, const float *sum, const float *cosine,
                                         const float *sine, const Heads &a) {
    const int n_groups = k_pe_groups<N>(a);
    for (int i = threadIdx.x; i < a.Dr / 2; i += blockDim.x) {
        float pair[2] = {0};
#pragma unroll 4
        for (int g = 0; g < n_groups; g++) add_pack(pair, *(const Pack<float, 2> *)(sum + g * a.Dr + 2 * i));
        rotate_pair(dk_pe + 2 * i, pair, cosine[i], sine[i]);
    }
}

/* dq_in from dq, dkv from the heads of dk and dv, dk_pe. */
template <typename T, int N> static __global__ void __launch_bounds__(ROPE_THREADS, 4) backward_kernel(Heads a) {
    const int64_t t = blockIdx.x;
    float *cosine = (float *)rope_shared, *sine = cosine + a.Dr / 2;
    float *sum = (float *)(rope_shared + (a.Dr + 3) / 4);
    const T *dq = (const T *)a.q + t * a.q_ld, *dk = (const T *)a.k + t * a.k_ld, *dv = (const T *)a.v + t * a.v_ld;
    T *dq_in = (T *)a.q_in + t * a.q_in_ld, *dkv = (T *)a.kv + t * a.kv_ld;
    const auto from_heads = [&](int p) { return of_k_or_v<N>(dk, dv, a, p); };
    const QueryPacks q_packs = query_packs<N>(a, dq_in == dq);
    Batch<T, N, BACKWARD_PACKS> q_batch, kv_batch;
    load_q(&q_batch, dq, q_packs);
    load_batch(&kv_batch, threadIdx.x, kv_packs<N>(a), from_heads);
    sum_groups<T, N>(sum, dk, a);
    angles(cosine, sine, a, t, -1);
    move_packs(&kv_batch, kv_packs<N>(a), from_heads,
               [=](int p, const Pack<T, N> &pack) { store_pack(dkv + p * N, pack); });
    __syncthreads();
    store_k_pe<T, N>((T *)a.k_pe + t * a.k_pe_ld, sum, cosine, sine, a);
    move_q(&q_batch, dq_in, dq, q_packs, cosine, sine, a);
}

static Heads heads_of(Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe, Tensor position,
                      Tensor inv_freq, AttentionShape shape) {
    const int64_t widest = shape.nope + shape.rope + shape.value;
    CHECK(shape.n_heads * widest < COLUMNS_MAX && shape.rope <= 4096, "rope_split: %d heads of %lld", shape.n_heads,
          (long long)widest);
    const Dtype act = q.dtype;
    CHECK(k.dtype == act && v.dtype == act && q_in.dtype == act && kv.dtype == act && k_pe.dtype == act,
          "rope_split: more than one dtype");
    const Heads a = {q.data,
                     k.data,
                     v.data,
                     q_in.data,
                     kv.data,
                     k_pe.data,
                     q.ld,
                     k.ld,
                     v.ld,
                     q_in.ld,
                     kv.ld,
                     k_pe.ld,
                     data_of<int32_t>(position),
                     data_of<float>(inv_freq),
                     shape.n_heads,
                     (int)shape.nope,
                     (int)shape.rope,
                     (int)shape.value,
                     (float)shape.rope_mscale};
    return a;
}

/* Every part of a head begins and ends at 16 bytes, in all tensors but k_pe, which is read by pairs. */
static bool heads_are_packed(Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, AttentionShape shape) {
    const int64_t N = 16 / (int64_t)dtype_size(q.dtype);
    return shape.nope % N == 0 && shape.rope % N == 0 && shape.value % N == 0 && rows_are_packed(q) &&
           rows_are_packed(k) && rows_are_packed(v) && rows_are_packed(q_in) && rows_are_packed(kv);
}

/* Few heads do not keep a large block busy: more tokens at once, each with all its loads on their way. */
static unsigned threads_for(AttentionShape shape, Dtype act) {
    const int64_t packs = shape.n_heads * (shape.nope + shape.value) * (int64_t)dtype_size(act) / 16;
    return packs <= ROPE_FEW_THREADS * FORWARD_PACKS ? ROPE_FEW_THREADS : ROPE_THREADS;
}

/* Angles, then k_pe or sums of at most ROPE_THREADS packs: see rope_shared. */
static size_t rope_shared_bytes(AttentionShape shape, bool backward) {
    const size_t sums = sizeof(float) * (size_t)max(shape.rope, (int64_t)ROPE_THREADS * 8);
    return (size_t)(shape.rope + 3) / 4 * 16 + (backward ? sums : (size_t)shape.rope * sizeof(float));
}

void cuda_rope_split_forward(Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe, Tensor position,
                             Tensor inv_freq, AttentionShape shape, Stream s) {
    const Heads a = heads_of(q, k, v, q_in, kv, k_pe, position, inv_freq, shape);
    const int64_t n_tokens = q.shape[0];
    if (n_tokens == 0) return;
    const bool packed = heads_are_packed(q, k, v, q_in, kv, shape);
    ACT_SWITCH(q.dtype, T, {
        auto kernel = packed ? forward_kernel<T, Pack<T>::N> : forward_kernel<T, 1>;
        kernel<<<(unsigned)n_tokens, threads_for(shape, q.dtype), rope_shared_bytes(shape, false), cuda_stream(s)>>>(a);
    });
    LAUNCH_CHECK();
}

/* The members of a are gradients: q, k and v are read, q_in, kv and k_pe written. */
void cuda_rope_split_backward(Tensor dq_in, Tensor dkv, Tensor dk_pe, Tensor dq, Tensor dk, Tensor dv, Tensor position,
                              Tensor inv_freq, AttentionShape shape, Stream s) {
    const Heads a = heads_of(dq, dk, dv, dq_in, dkv, dk_pe, position, inv_freq, shape);
    const int64_t n_tokens = dq.shape[0];
    if (n_tokens == 0) return;
    const bool packed = heads_are_packed(dq, dk, dv, dq_in, dkv, shape);
    ACT_SWITCH(dq.dtype, T, {
        auto kernel = packed ? backward_kernel<T, Pack<T>::N> : backward_kernel<T, 1>;
        kernel<<<(unsigned)n_tokens, threads_for(shape, dq.dtype), rope_shared_bytes(shape, true), cuda_stream(s)>>>(a);
    });
    LAUNCH_CHECK();
}

template <typename T, int N> static __global__ void __launch_bounds__(ROPE_THREADS) rotate_kernel(Heads a) {
    const int64_t t = blockIdx.x;
    float *cosine = (float *)rope_shared, *sine = cosine + a.Dr / 2;
    T *y = (T *)a.q + t * a.q_ld;
    const T *x = (const T *)a.q_in + t * a.q_in_ld;
    const QueryPacks packs = query_packs<N>(a, y == x);
    Batch<T, N, FORWARD_PACKS> batch;
    load_q(&batch, x, packs);
    angles(cosine, sine, a, t, 1);
    __syncthreads();
    move_q(&batch, y, x, packs, cosine, sine, a);
}

void cuda_rope_forward(Tensor y, Tensor x, Tensor position, Tensor inv_freq, AttentionShape shape, Stream s) {
    CHECK(y.dtype == x.dtype && shape.n_heads * (shape.nope + shape.rope) < COLUMNS_MAX && shape.rope <= 4096,
          "rope_forward: %d heads of %lld + %lld, %s", shape.n_heads, (long long)shape.nope, (long long)shape.rope,
          dtype_name(x.dtype));
    if (x.shape[0] == 0) return;
    Heads a = {};
    a.q = y.data, a.q_ld = y.ld;
    a.q_in = x.data, a.q_in_ld = x.ld;
    a.position = data_of<int32_t>(position), a.inv_freq = data_of<float>(inv_freq);
    a.n_heads = shape.n_heads, a.Dn = (int)shape.nope, a.Dr = (int)shape.rope;
    a.mscale = (float)shape.rope_mscale;
    const int64_t N = 16 / (int64_t)dtype_size(x.dtype);
    const bool packed = shape.nope % N == 0 && shape.rope % N == 0 && rows_are_packed(y) && rows_are_packed(x);
    ACT_SWITCH(x.dtype, T, {
        auto kernel = packed ? rotate_kernel<T, Pack<T>::N> : rotate_kernel<T, 1>;
        kernel<<<(unsigned)x.shape[0], ROPE_THREADS, rope_shared_bytes(shape, false), cuda_stream(s)>>>(a);
    });
    LAUNCH_CHECK();
}
