/* As cpu/rope.c, but a block per token. A token's angles are computed once and wait in shared memory; then every
 * thread moves packs of 16 bytes, each of them wholly inside one part of one head. Where widths or addresses do not
 * allow that, single elements: then the thread of an even element writes both of its pair, because q may be rotated
 * in place. */
#include "common.cuh"

enum { ROPE_THREADS = 256, ROPE_PACKS = 4 /* on their way at once */ };

typedef struct {
    void *q, *k, *v, *q_in, *kv, *k_pe; /* or their gradients; q_in may be q */
    int64_t q_ld, k_ld, v_ld, q_in_ld, kv_ld, k_pe_ld;
    const int32_t *position;
    const float *inv_freq;
    int n_heads, Dn, Dr, Dv;
    float mscale;
} Heads;

/* Shared memory of a block: cosines and sines of the Dr/2 pairs, then the Dr elements of the rotated k_pe. */
extern __shared__ int4 rope_shared[];

/* direction 1 rotates, -1 rotates back. The angle is a product of floats, as on the CPU. */
__device__ static inline void angles(float *cosine, float *sine, const Heads &a, int64_t t, float direction) {
    const float at = a.position[t] < 0 ? 0 : (float)a.position[t];
    for (int i = threadIdx.x; i < a.Dr / 2; i += ROPE_THREADS) {
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
template <typename T> __device__ static inline void rotate_pair(T *y, const T *x, float c, float s) {
    const float even = to_f32(x[0]), odd = to_f32(x[1]);
    y[0] = from_f32<T>(even * c - odd * s);
    y[1] = from_f32<T>(even * s + odd * c);
}

/* The heads of one query row, copied and rotated; in place, nothing is copied. */
template <typename T, int N>
__device__ static inline void move_q(T *y, const T *x, const float *cosine, const float *sine, const Heads &a) {
    const int Dqk = a.Dn + a.Dr;
    if constexpr (N == 1) {
        for (int i = threadIdx.x; i < a.n_heads * Dqk; i += ROPE_THREADS) {
            const int at = i % Dqk - a.Dn;
            if (at < 0)
                y[i] = x[i];
            else if (at % 2 == 0)
                rotate_pair(y + i, x + i, cosine[at / 2], sine[at / 2]);
        }
    } else {
        const bool in_place = y == x;
        const int per_head = (in_place ? a.Dr : Dqk) / N, skipped = in_place ? a.Dn : 0, n = a.n_heads * per_head;
        for (int first = threadIdx.x; first < n; first += ROPE_THREADS * ROPE_PACKS) {
            Pack<T, N> pack[ROPE_PACKS];
            int at[ROPE_PACKS], i[ROPE_PACKS]; /* in the head, in the row */
#pragma unroll
            for (int k = 0; k < ROPE_PACKS; k++) {
                const int p = first + k * ROPE_THREADS, head = p / per_head;
                at[k] = skipped + (p - head * per_head) * N;
                i[k] = head * Dqk + at[k];
                if (p < n) pack[k] = load_pack<N>(x + i[k]);
            }
#pragma unroll
            for (int k = 0; k < ROPE_PACKS; k++) {
                if (first + k * ROPE_THREADS >= n) break;
                if (at[k] >= a.Dn) pack[k] = rotated(pack[k], cosine, sine, (at[k] - a.Dn) / 2);
                store_pack(y + i[k], pack[k]);
            }
        }
    }
}

/* k = [k_nope; rotated k_pe] and v from kv. */
template <typename T, int N>
__device__ static inline void split_kv(T *__restrict__ k, T *__restrict__ v, const T *__restrict__ kv, const T *k_pe,
                                       const Heads &a) {
    const int n_nope = a.n_heads * a.Dn / N, n_rope = a.n_heads * a.Dr / N, n_v = a.n_heads * a.Dv / N;
    const int Dqk = a.Dn + a.Dr, Dkv = a.Dn + a.Dv, kv_per_head = Dkv / N, n_kv = n_nope + n_v;
    for (int first = threadIdx.x; first < n_kv; first += ROPE_THREADS * ROPE_PACKS) {
        Pack<T, N> pack[ROPE_PACKS];
#pragma unroll
        for (int j = 0; j < ROPE_PACKS; j++) {
            const int p = first + j * ROPE_THREADS;
            if (p < n_kv) pack[j] = load_pack<N>(kv + p * N);
        }
#pragma unroll
        for (int j = 0; j < ROPE_PACKS; j++) {
            const int p = first + j * ROPE_THREADS, head = p / kv_per_head, at = (p - head * kv_per_head) * N;
            if (p >= n_kv) break;
            store_pack(at < a.Dn ? k + head * Dqk + at : v + head * a.Dv + at - a.Dn, pack[j]);
        }
    }
    for (int p = threadIdx.x; p < n_rope; p += ROPE_THREADS) {
        const int head = p / (a.Dr / N), at = (p - head * (a.Dr / N)) * N;
        store_pack(k + head * Dqk + a.Dn + at, load_pack<N>(k_pe + at));
    }
}

template <typename T, int N> static __global__ void __launch_bounds__(ROPE_THREADS) forward_kernel(Heads a) {
    const int64_t t = blockIdx.x;
    float *cosine = (float *)rope_shared, *sine = cosine + a.Dr / 2;
    T *k_pe = (T *)(rope_shared + (a.Dr + 3) / 4); /* 16-byte aligned */
    angles(cosine, sine, a, t, 1);
    __syncthreads();
    const T *k_pe_in = (const T *)a.k_pe + t * a.k_pe_ld;
    for (int i = threadIdx.x; i < a.Dr / 2; i += ROPE_THREADS)
        rotate_pair(k_pe + 2 * i, k_pe_in + 2 * i, cosine[i], sine[i]);
    __syncthreads();
    move_q<T, N>((T *)a.q + t * a.q_ld, (const T *)a.q_in + t * a.q_in_ld, cosine, sine, a);
    split_kv<T, N>((T *)a.k + t * a.k_ld, (T *)a.v + t * a.v_ld, (const T *)a.kv + t * a.kv_ld, k_pe, a);
}

/* dkv from the heads of dk and dv. */
template <typename T, int N>
__device__ static inline void join_kv(T *__restrict__ dkv, const T *__restrict__ dk, const T *__restrict__ dv,
                                      const Heads &a) {
    const int Dqk = a.Dn + a.Dr, kv_per_head = (a.Dn + a.Dv) / N, n_kv = a.n_heads * kv_per_head;
    for (int first = threadIdx.x; first < n_kv; first += ROPE_THREADS * ROPE_PACKS) {
        Pack<T, N> pack[ROPE_PACKS];
#pragma unroll
        for (int j = 0; j < ROPE_PACKS; j++) {
            const int p = first + j * ROPE_THREADS, head = p / kv_per_head, at = (p - head * kv_per_head) * N;
            if (p < n_kv) pack[j] = load_pack<N>(at < a.Dn ? dk + head * Dqk + at : dv + head * a.Dv + at - a.Dn);
        }
#pragma unroll
        for (int j = 0; j < ROPE_PACKS; j++) {
            const int p = first + j * ROPE_THREADS;
            if (p < n_kv) store_pack(dkv + p * N, pack[j]);
        }
    }
}

/* dk_pe: a thread a pair, the heads in ascending order. */
template <typename T>
__device__ static inline void sum_k_pe(T *__restrict__ dk_pe, const T *__restrict__ dk, const float *cosine,
                                       const float *sine, const Heads &a) {
    const int Dqk = a.Dn + a.Dr;
    for (int i = threadIdx.x; i < a.Dr / 2; i += ROPE_THREADS) {
        float even = 0, odd = 0;
        const T *in = dk + a.Dn + 2 * i;
#pragma unroll 8
        for (int h = 0; h < a.n_heads; h++) even += to_f32(in[h * Dqk]), odd += to_f32(in[h * Dqk + 1]);
        dk_pe[2 * i] = from_f32<T>(even * cosine[i] - odd * sine[i]);
        dk_pe[2 * i + 1] = from_f32<T>(even * sine[i] + odd * cosine[i]);
    }
}

template <typename T, int N> static __global__ void __launch_bounds__(ROPE_THREADS) backward_kernel(Heads a) {
    const int64_t t = blockIdx.x;
    float *cosine = (float *)rope_shared, *sine = cosine + a.Dr / 2;
    const T *dk = (const T *)a.k + t * a.k_ld;
    angles(cosine, sine, a, t, -1);
    __syncthreads();
    sum_k_pe((T *)a.k_pe + t * a.k_pe_ld, dk, cosine, sine, a);
    move_q<T, N>((T *)a.q_in + t * a.q_in_ld, (const T *)a.q + t * a.q_ld, cosine, sine, a);
    join_kv<T, N>((T *)a.kv + t * a.kv_ld, dk, (const T *)a.v + t * a.v_ld, a);
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

static size_t rope_shared_bytes(AttentionShape shape, Dtype dtype) {
    return (size_t)(shape.rope + 3) / 4 * 16 + (size_t)shape.rope * dtype_size(dtype);
}

void cuda_rope_split_forward(Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe, Tensor position,
                             Tensor inv_freq, AttentionShape shape, Stream s) {
    const Heads a = heads_of(q, k, v, q_in, kv, k_pe, position, inv_freq, shape);
    const int64_t n_tokens = q.shape[0];
    if (n_tokens == 0) return;
    const bool packed = heads_are_packed(q, k, v, q_in, kv, shape);
    ACT_SWITCH(q.dtype, T, {
        auto kernel = packed ? forward_kernel<T, Pack<T>::N> : forward_kernel<T, 1>;
        kernel<<<(unsigned)n_tokens, ROPE_THREADS, rope_shared_bytes(shape, q.dtype), cuda_stream(s)>>>(a);
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
        kernel<<<(unsigned)n_tokens, ROPE_THREADS, rope_shared_bytes(shape, dq.dtype), cuda_stream(s)>>>(a);
    });
    LAUNCH_CHECK();
}
