/* As cpu/cross_entropy.c, but a block per row, in two passes: the largest logit and the sum of exponentials together
 * (each thread rescales its sum when its largest grows), then the gradient. As much of the row as fits waits in
 * shared memory between the passes, and what is left of it in registers, so that device memory is read once. While the
 * gradient is written, the block's next row takes the place of this one, pack by pack. Without a gradient blocks are
 * small, and those of an SM are at different places of their rows. */
#include <float.h>

#include "common.cuh"

enum {
    XENT_THREADS = 1024,     /* at most, for a gradient */
    XENT_LOSS_THREADS = 128, /* at most, for the loss alone */
    XENT_PACKS = 2,          /* on their way at once */
    XENT_LAG = 3,            /* copies of a thread on their way, behind which the next row is added up */
    XENT_HELD = 6            /* packs of a thread in registers */
};

/* The largest logit of what a thread has seen, and the sum of exp(x - largest). No logit yet: -FLT_MAX, so that a
 * row that begins with -inf subtracts no infinities. */
typedef struct {
    float largest, sum;
} Softmax;

template <typename T> __device__ static inline Softmax merge(Softmax a, Softmax b) {
    const float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * exp_for<T>(a.largest - largest) + b.sum * exp_for<T>(b.largest - largest)};
}

/* Every thread gets the row's; a fixed tree. `shared` has 32 elements. */
template <typename T> __device__ static inline Softmax block_merge(Softmax a, Softmax *shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n_warps = blockDim.x / 32;
    for (int round = 0; round < 2; round++) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const Softmax other = {__shfl_xor_sync(0xFFFFFFFFu, a.largest, offset),
                                   __shfl_xor_sync(0xFFFFFFFFu, a.sum, offset)};
            /* In the order of the lanes, so that both partners get the same bits. */
            a = lane & offset ? merge<T>(other, a) : merge<T>(a, other);
        }
        if (round > 0) break;
        __syncthreads();
        if (lane == 0) shared[warp] = a;
        __syncthreads();
        a = lane < n_warps ? shared[lane] : Softmax{-FLT_MAX, 0};
    }
    return a;
}

/* The columns of a pack that are no tokens become `fill`. */
template <int N> __device__ static inline void mask(float (&x)[N], int first, int vocab, float fill) {
    if (first + N <= vocab) return;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (first + i >= vocab) x[i] = fill;
}

template <typename T, int N> __device__ static inline Softmax add_logits(Softmax a, const float (&x)[N]) {
    float largest = a.largest;
#pragma unroll
    for (int i = 0; i < N; i++) largest = fmaxf(largest, x[i]);
    if (largest > a.largest) a.sum *= exp_for<T>(a.largest - largest);
#pragma unroll
    for (int i = 0; i < N; i++) a.sum += exp_for<T>(x[i] - largest);
    a.largest = largest;
    return a;
}

template <typename T, int N> __device__ static inline void store_zeros(T *row, int first, int width) {
    const float zero[N] = {0};
    for (int c = first + threadIdx.x * N; c < width; c += blockDim.x * N) store_pack(row + c, pack_of<T>(zero));
}

/* The first `kept` columns of a row are copied to shared memory: each thread copies the packs that it will use. */
template <typename T, int N> __device__ static inline void keep_row(Pack<T, N> *keep, const T *row, int kept) {
    if constexpr (Pack<T, N>::BYTES == 16)
        for (int c = threadIdx.x * N; c < kept; c += blockDim.x * N) cp_async_16(keep + c / N, row + c);
    cp_async_commit();
}

template <typename T, int N>
__device__ static inline Softmax add_pack_of_logits(Softmax a, const Pack<T, N> &pack, int c, int vocab) {
    float x[N];
    unpack(x, pack);
    mask(x, c, vocab, -INFINITY);
    return add_logits<T>(a, x);
}

/* The packs of one thread that begin at column kept + threadIdx.x * N. */
template <typename T, int N, int HELD>
__device__ static inline void hold_row(Pack<T, N> (&held)[HELD], const T *row, int vocab, int kept) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const int c = kept + (k * blockDim.x + threadIdx.x) * N;
        if (c < vocab) held[k] = load_pack<N>(row + c);
    }
}

template <typename T, int N, int HELD>
__device__ static inline Softmax add_held(Softmax a, const Pack<T, N> (&held)[HELD], int kept, int vocab) {
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const int c = kept + (k * blockDim.x + threadIdx.x) * N;
        if (c < vocab) a = add_pack_of_logits(a, held[k], c, vocab);
    }
    return a;
}

/* f(c, pack of the row at c) for this thread's columns of [begin, end). */
template <typename T, int N, typename F>
__device__ static inline void each_pack(const T *row, int begin, int end, F f) {
    for (int first = begin + threadIdx.x * N; first < end; first += blockDim.x * N * XENT_PACKS) {
        Pack<T, N> pack[XENT_PACKS];
#pragma unroll
        for (int k = 0; k < XENT_PACKS; k++) {
            const int c = first + k * blockDim.x * N;
            if (c < end) pack[k] = load_pack<N>(row + c);
        }
#pragma unroll
        for (int k = 0; k < XENT_PACKS; k++) {
            const int c = first + k * blockDim.x * N;
            if (c < end) f(c, pack[k]);
        }
    }
}
template <typename T, int N> __device__ static inline Softmax add_rest(Softmax a, const T *row, int begin, int vocab) {
    each_pack<T, N>(row, begin, vocab,
                    [&](int c, const Pack<T, N> &pack) { a = add_pack_of_logits(a, pack, c, vocab); });
    return a;
}

/* Of one thread's columns: the first `kept` from shared memory, those after them from registers, the others from the
 * row. */
template <typename T, int N, int HELD>
__device__ static inline Softmax read_row(const T *row, int vocab, int kept, const Pack<T, N> *keep,
                                          const Pack<T, N> (&held)[HELD]) {
    Softmax a = {-FLT_MAX, 0};
    for (int c = threadIdx.x * N; c < kept; c += blockDim.x * N) a = add_pack_of_logits(a, keep[c / N], c, vocab);
    a = add_held<T, N>(a, held, kept, vocab);
    return add_rest<T, N>(a, row, kept + HELD * blockDim.x * N, vocab);
}

/* What turns logits into gradients: factor * exp(x - largest), less `scale` at the target. */
typedef struct {
    float largest, factor, scale;
    int target, vocab;
} Gradient;

template <typename T, int N>
__device__ static inline void store_gradient(T *row, const Pack<T, N> &pack, int c, const Gradient &g) {
    float x[N];
    unpack(x, pack);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = exp_for<T>(x[i] - g.largest) * g.factor;
    mask(x, c, g.vocab, 0);
    if (g.target >= c && g.target < c + N) {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] -= c + i == g.target ? g.scale : 0;
    }
    store_pack(row + c, pack_of<T>(x));
}

template <typename T, int N> __device__ static inline void store_rest(T *row, int begin, int end, const Gradient &g) {
    each_pack<T, N>(row, begin, end, [&](int c, const Pack<T, N> &pack) { store_gradient(row, pack, c, g); });
}

/* Columns [0, end) of a row. next: the row that takes its place, or NULL; its logits are added up as they arrive,
 * XENT_LAG copies of a thread behind those that were asked for, and this is returned. */
template <typename T, int N, int HELD>
__device__ static inline Softmax write_gradient(T *row, int end, int kept, Pack<T, N> *keep, Pack<T, N> (&held)[HELD],
                                                const T *next, const Gradient &g) {
    const int step = blockDim.x * N, own = threadIdx.x * N;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const int c = kept + k * step + own;
        if (c < end) store_gradient(row, held[k], c, g);
    }
    if (next) hold_row(held, next, g.vocab, kept);
    Softmax a = {-FLT_MAX, 0};
    const auto add_kept = [&](int c) {
        if (c >= 0 && c < kept) a = add_pack_of_logits(a, keep[c / N], c, g.vocab);
    };
    for (int c = own; c - own < kept; c += step) {
        if (c < kept) {
            store_gradient(row, keep[c / N], c, g); /* has read the pack before the next one is asked for */
            if constexpr (Pack<T, N>::BYTES == 16)
                if (next) cp_async_16(keep + c / N, next + c);
        }
        cp_async_commit();
        if (!next) continue;
        cp_async_wait<XENT_LAG>();
        add_kept(c - XENT_LAG * step);
    }
    store_rest<T, N>(row, kept + HELD * step, end, g);
    if (!next) return a;
    cp_async_wait<0>();
    const int n_steps = (kept + step - 1) / step;
    for (int i = max(n_steps - XENT_LAG, 0); i < n_steps; i++) add_kept(i * step + own);
    a = add_held<T, N>(a, held, kept, g.vocab);
    return add_rest<T, N>(a, next, kept + HELD * step, g.vocab);
}

/* kept: columns that wait in shared memory, a multiple of a step of the block or all; 0 without a gradient. */
template <typename T, int N, bool GRADIENT>
static __global__ void __launch_bounds__(GRADIENT ? XENT_THREADS : XENT_LOSS_THREADS, 1)
    cross_entropy_kernel(float *loss, T *logits, int64_t ld, const int32_t *targets, int64_t n_rows, int width,
                         int vocab, int kept, int depth, const StepParams *params) {
    extern __shared__ int4 kept_row[];
    __shared__ Softmax shared[32];
    Pack<T, N> *keep = (Pack<T, N> *)kept_row;
    Pack<T, N> held[GRADIENT ? XENT_HELD : 1];
    const float scale = GRADIENT ? (float)params->loss_scale[depth] : 0;
    const int vocab_end = (vocab + N - 1) / N * N; /* the row's width is a multiple of N */
    bool is_kept = false;
    Softmax mine = {-FLT_MAX, 0};
    for (int64_t c = blockIdx.x; c < n_rows; c += gridDim.x) {
        T *row = logits + c * ld;
        const int target = targets[c];
        if (target < 0) {
            if (GRADIENT) store_zeros<T, N>(row, 0, width);
            if (threadIdx.x == 0) loss[c] = 0;
            continue;
        }
        if (!is_kept) {
            keep_row(keep, row, kept);
            hold_row(held, row, vocab, kept);
            cp_async_wait<0>();
            mine = read_row(row, vocab, kept, keep, held);
        }
        const bool has_next = kept > 0 && c + gridDim.x < n_rows && targets[c + gridDim.x] >= 0;
        const float at_target = to_f32(row[target]);
        const Softmax a = block_merge<T>(mine, shared);
        if (threadIdx.x == 0) loss[c] = logf(a.sum) - (at_target - a.largest);
        if (!GRADIENT) continue;
        const Gradient g = {a.largest, scale / a.sum, scale, target, vocab};
        mine = write_gradient(row, vocab_end, kept, keep, held, has_next ? row + gridDim.x * ld : NULL, g);
        store_zeros<T, N>(row, vocab_end, width);
        is_kept = has_next;
    }
}

template <typename T, int N, bool GRADIENT>
static void cross_entropy(Tensor loss, Tensor logits, Tensor targets, int vocab, int depth, const StepParams *params,
                          Stream s) {
    const int64_t n_rows = logits.shape[0], columns = ceil_div(vocab, N) * N;
    const int64_t most = GRADIENT ? XENT_THREADS : XENT_LOSS_THREADS;
    const int64_t threads = min(32 * ceil_div(columns, 32 * N), most);
    int kept = 0;
    if (GRADIENT && Pack<T, N>::BYTES == 16) {
        const int64_t room = ((int64_t)shared_limit() - 1024) / (int64_t)sizeof(T) / (threads * N) * (threads * N);
        kept = (int)min(columns, room);
    }
    const size_t bytes = (size_t)kept * sizeof(T);
    static bool allowed;
    if (!allowed) allow_all_shared(cross_entropy_kernel<T, N, GRADIENT>);
    allowed = true;
    static struct {
        int64_t threads;
        size_t bytes;
        int per_sm;
    } asked; /* once for a shape, not at each launch */
    if (asked.threads != threads || asked.bytes != bytes)
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&asked.per_sm, cross_entropy_kernel<T, N, GRADIENT>,
                                                                 (int)threads, bytes));
    asked.threads = threads, asked.bytes = bytes;
    cross_entropy_kernel<T, N, GRADIENT>
        <<<grid_for(n_rows, max(asked.per_sm, 1)), (unsigned)threads, bytes, cuda_stream(s)>>>(
            data_of<float>(loss), data_of<T>(logits), logits.ld, data_of<int32_t>(targets), n_rows,
            (int)logits.shape[1], vocab, kept, depth, params);
    LAUNCH_CHECK();
}

void cuda_cross_entropy(Tensor loss, Tensor logits, Tensor targets, int64_t vocab, int depth, bool want_gradient,
                        const StepParams *params, Stream s) {
    CHECK(logits.shape[1] < COLUMNS_MAX, "cross_entropy: %lld columns", (long long)logits.shape[1]);
    if (logits.shape[0] == 0) return;
    ACT_SWITCH(logits.dtype, T, {
        const bool packed = rows_are_packed(logits);
        auto f = packed ? cross_entropy<T, Pack<T>::N, false> : cross_entropy<T, 1, false>;
        if (want_gradient) f = packed ? cross_entropy<T, Pack<T>::N, true> : cross_entropy<T, 1, true>;
        f(loss, logits, targets, (int)vocab, depth, params, s);
    });
}
