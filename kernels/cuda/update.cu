/* As cpu/update.c, but a loss is summed in two launches: every block sums its share of the partials in f64, then one
 * block adds the blocks. How many blocks there are follows from the number of elements. */
#include "blocks.cuh"

enum {
    SUM_THREADS = 256,
    SUM_BLOCKS = 2048, /* at most */
    LAST_THREADS = 1024,
    ADAM_THREADS = 256,
    ADAM_BLOCKS_PER_SM = 4, /* all at once: see adamw_scalars */
    ADAM_PACKS = 2,         /* of each tensor, on their way at once */
    ADAM_BLOCK_PASSES = 2,  /* the same, of a block of 128 x 128 */
    BIAS_THREADS = 256
};

/* Between the launches of one sum; calls on one stream follow each other. */
static __device__ double block_sums[STREAM_COUNT][SUM_BLOCKS];
OP_SCRATCH(block_sums);

/* ---- sums -------------------------------------------------------------------------------------------------------- */

/* A thread's share of the sum over `count` elements. N: elements of an access, 4 or 1. */
template <int N, bool SQUARES> static __device__ inline double piece_sum(const float *__restrict__ x, int count) {
    enum { PACKS = SUM_PARTIAL / (SUM_THREADS * 4) }; /* on their way at once */
    double sum = 0;
    for (int at = threadIdx.x * N; at < count; at += SUM_THREADS * N * PACKS) {
        Pack<float, N> pack[PACKS];
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
            const int i = at + k * SUM_THREADS * N;
            if (i + N <= count)
                pack[k] = load_pack<N>(x + i);
            else
#pragma unroll
                for (int j = 0; j < N; j++) pack[k].x[j] = i + j < count ? x[i + j] : 0;
        }
#pragma unroll
        for (int k = 0; k < PACKS; k++) {
#pragma unroll
            for (int j = 0; j < N; j++) {
                const double value = (double)pack[k].x[j];
                sum += SQUARES ? value * value : value;
            }
        }
    }
    return sum;
}

/* Block b: partials b, b + gridDim.x, ... of SUM_PARTIAL elements. */
template <int N>
static __global__ void __launch_bounds__(SUM_THREADS) sum_kernel(int stream, const float *__restrict__ x, int64_t n) {
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t first = (int64_t)blockIdx.x * SUM_PARTIAL; first < n; first += (int64_t)gridDim.x * SUM_PARTIAL)
        sum += piece_sum<N, false>(x + first, (int)min(n - first, (int64_t)SUM_PARTIAL));
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) block_sums[stream][blockIdx.x] = sum;
}

static __global__ void __launch_bounds__(LAST_THREADS) last_sum_kernel(int stream, double *total, int n_blocks) {
    __shared__ double shared[32];
    double sum = 0;
    for (int i = threadIdx.x; i < n_blocks; i += LAST_THREADS) sum += block_sums[stream][i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *total += sum;
}

void cuda_loss_sum(StepStats *stats, Tensor loss, int depth, Stream s) {
    const int64_t n = loss.shape[0];
    if (n == 0) return;
    const int n_blocks = (int)min(ceil_div(n, SUM_PARTIAL), (int64_t)SUM_BLOCKS);
    auto kernel = is_aligned(loss.data) ? sum_kernel<4> : sum_kernel<1>;
    kernel<<<n_blocks, SUM_THREADS, 0, cuda_stream(s)>>>((int)s, data_of<float>(loss), n);
    LAUNCH_CHECK();
    last_sum_kernel<<<1, LAST_THREADS, 0, cuda_stream(s)>>>((int)s, &stats->loss_sum[depth], n_blocks);
    LAUNCH_CHECK();
}

/* A block a interval. */
static __global__ void __launch_bounds__(SUM_THREADS)
    grad_squares_kernel(double *__restrict__ partial, const float *__restrict__ g,
                        const Interval *__restrict__ intervals) {
    __shared__ double shared[32];
    const Interval interval = intervals[blockIdx.x];
    const float *x = g + interval.first;
    const bool packed = (uintptr_t)x % 16 == 0;
    double sum = 0;
    for (int64_t at = 0; at < interval.n; at += SUM_PARTIAL) {
        const int count = (int)min(interval.n - at, (int64_t)SUM_PARTIAL);
        sum += packed ? piece_sum<4, true>(x + at, count) : piece_sum<1, true>(x + at, count);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

void cuda_grad_squares(Tensor partial, Tensor g, const Interval *intervals, Stream s) {
    const int64_t n = partial.shape[0];
    if (n == 0) return;
    CHECK(n <= INT32_MAX, "%lld intervals", (long long)n);
    grad_squares_kernel<<<(unsigned)n, SUM_THREADS, 0, cuda_stream(s)>>>(data_of<double>(partial), data_of<float>(g),
                                                                         intervals);
    LAUNCH_CHECK();
}

static __global__ void __launch_bounds__(LAST_THREADS)
    grad_norm_kernel(StepStats *stats, const double *__restrict__ partial, int64_t n) {
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += LAST_THREADS) sum += partial[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) stats->grad_norm_sq = sum;
}

void cuda_grad_norm(StepStats *stats, Tensor partial, Stream s) {
    grad_norm_kernel<<<1, LAST_THREADS, 0, cuda_stream(s)>>>(stats, data_of<double>(partial), partial.shape[0]);
    LAUNCH_CHECK();
}

/* ---- gate -------------------------------------------------------------------------------------------------------- */

__device__ static int32_t skip_reason(const StepStats *stats, const UpdateState *state, const StepParams *params) {
    if (state->has_overflow) return SKIP_OVERFLOW;
    if (params->inv_tokens == 0) return SKIP_NO_TARGETS;
    for (int depth = 0; depth < LOSSES_MAX; depth++)
        if (params->loss_scale[depth] != 0 && !isfinite(stats->loss_sum[depth])) return SKIP_LOSS_NOT_FINITE;
    if (!isfinite(stats->grad_norm)) return SKIP_NORM_NOT_FINITE;
    if (stats->loss_sum[0] * params->inv_tokens > params->skip_loss_above) return SKIP_LOSS_SPIKE;
    if (stats->grad_norm > params->skip_norm_above) return SKIP_NORM_SPIKE;
    return SKIP_NONE;
}

static __global__ void update_gate_kernel(StepStats *stats, UpdateState *state, const StepParams *params) {
    const double norm = params->inv_tokens == 0 ? 0 : sqrt(stats->grad_norm_sq) * params->inv_tokens;
    const bool is_clipped = params->grad_clip > 0 && norm > params->grad_clip;
    stats->grad_norm = norm;
    if (stats->overflow > 0) state->has_overflow = 1;
    stats->skip = skip_reason(stats, state, params);
    stats->grad_scale = stats->skip ? 0 : params->inv_tokens * (is_clipped ? params->grad_clip / norm : 1);
    if (stats->skip == SKIP_OVERFLOW) return; /* not the last word on this step */
    if (stats->skip) {
        state->skipped_total++;
        state->skipped_in_a_row++;
    } else {
        state->skipped_in_a_row = 0;
        state->adam_t++;
    }
}

void cuda_update_gate(StepStats *stats, UpdateState *state, const StepParams *params, Stream s) {
    update_gate_kernel<<<1, 1, 0, cuda_stream(s)>>>(stats, state, params);
    LAUNCH_CHECK();
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

typedef struct {
    float lr, beta1, beta2, eps, decay, grad_scale;
    float m_correction, v_correction; /* 1 / (1 - beta^t) */
} AdamW;

/* The moments of this step are used as computed and rounded when stored. Writes w, m, v. */
template <typename M, int N>
__device__ static inline void adamw_pack(float (&w)[N], float (&m)[N], float (&v)[N], const float (&g)[N],
                                         const AdamW &a) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float gi = g[i] * a.grad_scale;
        m[i] = a.beta1 * m[i] + (1 - a.beta1) * gi;
        v[i] = a.beta2 * v[i] + (1 - a.beta2) * (gi * gi);
        const float root = sqrtf(v[i] * a.v_correction);
        w[i] -= a.lr * (m[i] * a.m_correction / (root + a.eps) + a.decay * w[i]);
    }
}

/* The double powers cost as much as a thousand elements, so one thread makes each, and a block stays for many
 * elements. */
__device__ static inline void adamw_scalars(AdamW *a, bool decay, const StepParams *params, const StepStats *stats,
                                            const UpdateState *state) {
    const double t = (double)state->adam_t;
    if (threadIdx.x == 0) {
        a->lr = (float)params->lr;
        a->beta1 = (float)params->beta1;
        a->beta2 = (float)params->beta2;
        a->eps = (float)params->eps;
        a->decay = decay ? (float)params->weight_decay : 0;
        a->grad_scale = (float)stats->grad_scale;
    }
    if (threadIdx.x == 32) a->m_correction = (float)(1 / (1 - pow(params->beta1, t)));
    if (threadIdx.x == 64) a->v_correction = (float)(1 / (1 - pow(params->beta2, t)));
    __syncthreads();
}

template <typename M, int N>
static __global__ void __launch_bounds__(ADAM_THREADS, ADAM_BLOCKS_PER_SM)
    adamw_kernel(bf16 *__restrict__ copy, float *__restrict__ master, M *__restrict__ m, M *__restrict__ v,
                 const float *__restrict__ grad, int64_t n, bool decay, const StepParams *params,
                 const StepStats *stats, const UpdateState *state) {
    __shared__ AdamW shared;
    if (stats->skip) return;
    adamw_scalars(&shared, decay, params, stats, state);
    const AdamW a = shared;
    const int64_t tile = (int64_t)ADAM_THREADS * N * ADAM_PACKS, stride = gridDim.x * tile;
    for (int64_t first = blockIdx.x * tile + threadIdx.x * N; first < n; first += stride) {
        Pack<float, N> g[ADAM_PACKS], w[ADAM_PACKS];
        Pack<M, N> m_pack[ADAM_PACKS], v_pack[ADAM_PACKS];
#pragma unroll
        for (int k = 0; k < ADAM_PACKS; k++) {
            const int64_t i = first + k * ADAM_THREADS * N;
            if (i + N > n) continue;
            g[k] = load_pack<N>(grad + i);
            w[k] = load_pack<N>(master + i);
            m_pack[k] = load_pack<N>(m + i);
            v_pack[k] = load_pack<N>(v + i);
        }
#pragma unroll
        for (int k = 0; k < ADAM_PACKS; k++) {
            const int64_t i = first + k * ADAM_THREADS * N;
            if (i + N > n) {
                for (int64_t j = i; j < n; j++) { /* the last, part of a pack */
                    float wj[1] = {master[j]}, mj[1] = {to_f32(m[j])}, vj[1] = {to_f32(v[j])}, gj[1] = {grad[j]};
                    adamw_pack<M>(wj, mj, vj, gj, a);
                    master[j] = wj[0];
                    m[j] = from_f32<M>(mj[0]);
                    v[j] = from_f32<M>(vj[0]);
                    if (copy) copy[j] = from_f32<bf16>(wj[0]);
                }
                break;
            }
            float mk[N], vk[N];
            unpack(mk, m_pack[k]);
            unpack(vk, v_pack[k]);
            adamw_pack<M>(w[k].x, mk, vk, g[k].x, a);
            store_pack(master + i, w[k]);
            store_pack(m + i, pack_of<M>(mk));
            store_pack(v + i, pack_of<M>(vk));
            if (copy) store_pack(copy + i, pack_of<bf16>(w[k].x));
        }
    }
}

/* A block of 128 x 128 of a weight that FP8 reads: updated, then quantised as it leaves. */
template <typename M>
static __global__ void __launch_bounds__(SQUARE_THREADS, 2)
    adamw_blocks_kernel(WeightBlocks blocks, float *__restrict__ master, M *__restrict__ m, M *__restrict__ v,
                        const float *__restrict__ grad, bool decay, const StepParams *params, const StepStats *stats,
                        const UpdateState *state) {
    __shared__ AdamW shared;
    __shared__ BlockBytes bytes;
    if (stats->skip) return;
    adamw_scalars(&shared, decay, params, stats, state);
    const AdamW a = shared;
    for (int64_t index = blockIdx.x; index < blocks.n; index += gridDim.x) {
        const WeightBlock at = weight_block(blocks, (int)index);
        float w[BLOCK_PASSES][4];
#pragma unroll
        for (int first = 0; first < BLOCK_PASSES; first += ADAM_BLOCK_PASSES) {
            Pack<float, 4> g[ADAM_BLOCK_PASSES], w_pack[ADAM_BLOCK_PASSES];
            Pack<M, 4> m_pack[ADAM_BLOCK_PASSES], v_pack[ADAM_BLOCK_PASSES];
#pragma unroll
            for (int k = 0; k < ADAM_BLOCK_PASSES; k++) {
                const int r = block_row(first + k), c = block_col();
                const int64_t i = at.offset + (int64_t)r * blocks.I + c;
                if (r >= at.n_rows || c >= at.n_cols) continue;
                g[k] = load_pack<4>(grad + i);
                w_pack[k] = load_pack<4>(master + i);
                m_pack[k] = load_pack<4>(m + i);
                v_pack[k] = load_pack<4>(v + i);
            }
#pragma unroll
            for (int k = 0; k < ADAM_BLOCK_PASSES; k++) {
                const int r = block_row(first + k), c = block_col();
                const int64_t i = at.offset + (int64_t)r * blocks.I + c;
                const bool has = r < at.n_rows && c < at.n_cols;
                float mk[4], vk[4];
                if (has) {
                    unpack(mk, m_pack[k]);
                    unpack(vk, v_pack[k]);
                    adamw_pack<M>(w_pack[k].x, mk, vk, g[k].x, a);
                    store_pack(master + i, w_pack[k]);
                    store_pack(m + i, pack_of<M>(mk));
                    store_pack(v + i, pack_of<M>(vk));
                }
#pragma unroll
                for (int j = 0; j < 4; j++) w[first + k][j] = has ? w_pack[k].x[j] : 0;
            }
        }
        weight_block_store(blocks, at, w, &bytes);
        __syncthreads();
    }
}

static void adamw_blocks(Tensor copy, Tensor copy_t, Tensor master, Tensor m, Tensor v, Tensor grad, bool decay,
                         const StepParams *params, const StepStats *stats, const UpdateState *state, Stream s) {
    const WeightBlocks blocks = weight_blocks(copy, copy_t);
    const unsigned grid = grid_for(blocks.n, 2 * 8); /* the double powers are made once a block of threads */
    ACT_SWITCH(m.dtype, M, {
        adamw_blocks_kernel<M>
            <<<grid, SQUARE_THREADS, 0, cuda_stream(s)>>>(blocks, data_of<float>(master), data_of<M>(m), data_of<M>(v),
                                                          data_of<float>(grad), decay, params, stats, state);
    });
    LAUNCH_CHECK();
}

void cuda_adamw_cast(Tensor copy, Tensor copy_t, Tensor master, Tensor m, Tensor v, Tensor grad, bool decay,
                     const StepParams *params, const StepStats *stats, const UpdateState *state, Stream s) {
    const int64_t n = master.shape[0];
    if (n == 0) return;
    if (copy.dtype == DTYPE_E4M3) {
        adamw_blocks(copy, copy_t, master, m, v, grad, decay, params, stats, state, s);
        return;
    }
    const uintptr_t addresses =
        (uintptr_t)copy.data | (uintptr_t)master.data | (uintptr_t)m.data | (uintptr_t)v.data | (uintptr_t)grad.data;
    const bool packed = addresses % 16 == 0;
    const unsigned grid = grid_for(ceil_div(n, ADAM_THREADS * ADAM_PACKS * (packed ? 4 : 1)), ADAM_BLOCKS_PER_SM);
    ACT_SWITCH(m.dtype, M, {
        auto kernel = packed ? adamw_kernel<M, 4> : adamw_kernel<M, 1>;
        kernel<<<grid, ADAM_THREADS, 0, cuda_stream(s)>>>(data_of<bf16>(copy), data_of<float>(master), data_of<M>(m),
                                                          data_of<M>(v), data_of<float>(grad), n, decay, params, stats,
                                                          state);
    });
    LAUNCH_CHECK();
}

/* ---- router bias ------------------------------------------------------------------------------------------------- */

/* One block. The sign of mean(counts) - counts[i] in integers: exact. */
static __global__ void __launch_bounds__(BIAS_THREADS)
    bias_step_kernel(float *bias, const int32_t *count, int64_t E, const StepParams *params, const StepStats *stats) {
    __shared__ long long shared[32];
    if (stats->skip) return;
    const float speed = (float)params->bias_speed;
    long long total = 0;
    for (int64_t i = threadIdx.x; i < E; i += BIAS_THREADS) total += count[i];
    total = block_sum(total, shared);
    for (int64_t i = threadIdx.x; i < E; i += BIAS_THREADS) {
        const long long missing = total - count[i] * E;
        bias[i] += missing > 0 ? speed : missing < 0 ? -speed : 0;
    }
}

void cuda_bias_step(Tensor bias, Tensor counts, const StepParams *params, const StepStats *stats, Stream s) {
    if (bias.shape[0] == 0) return;
    bias_step_kernel<<<1, BIAS_THREADS, 0, cuda_stream(s)>>>(data_of<float>(bias), data_of<int32_t>(counts),
                                                             bias.shape[0], params, stats);
    LAUNCH_CHECK();
}
