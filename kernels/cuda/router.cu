/* As cpu/router.c, but a warp per token; lane l holds experts l, l + 32, ... The k largest are found one after the
 * other by two reductions over the warp: the largest value, then the lowest index that has it. Ids come out in
 * ascending order because the chosen are marked, and the marks are counted in the order of the experts.
 *
 * A block takes tokens of one sequence, so that counts are added up in shared memory first. Since
 *
 *     sum_i f_i P_i = E / (K n^2) sum_t (sum_i count_i s_i / sum_i s_i)
 *
 * the balance loss needs no table of shares: once the counts of the sequence are complete, a second launch sums one
 * number per token. */
#include "common.cuh"

enum {
    ROUTER_WARPS = 8,
    ROUTER_THREADS = 32 * ROUTER_WARPS,
    ROUTER_TOKENS = 32,         /* of one sequence, in a block */
    ROUTER_LANE_EXPERTS = 32,   /* experts of a lane, at most */
    BALANCE_PARTIALS = 1 << 16, /* blocks, at most */
    BALANCE_WARPS = 32
};
#define WEIGHT_SUM_MIN 1e-20f /* added to sums of scores that are divided by; all scores may have underflowed */
#define ALL_LANES 0xFFFFFFFFu

/* Between the launches of one router_forward; calls on one stream follow each other. */
static __device__ double balance_partials[STREAM_COUNT][BALANCE_PARTIALS];
OP_SCRATCH(balance_partials);

/* What both directions read: rows of a block, and how a token's experts lie in the lanes. */
typedef struct {
    RouterShape shape;
    int blocks_per_sequence;
    int64_t scores_ld, seq_count_ld, ids_ld, weights_ld;
    const int32_t *position;
} Router;

/* ---- top k ------------------------------------------------------------------------------------------------------- */

/* Floats in the order of unsigned integers, from 1 (NaN) up; 0 is kept for what must not be chosen. */
__device__ static inline unsigned key_of(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f); /* -0 becomes 0 */
    if (isnan(x)) return 1;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ static inline float value_of(unsigned key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

/* The lowest index of the largest key in the warp, lane l having indices l, l + 32, ...; the key is set to 0, so
 * that the next call finds the next. */
template <int L> __device__ static inline int take_largest(unsigned (&key)[L], unsigned *taken) {
    unsigned best = key[0];
    int index = 0;
#pragma unroll
    for (int i = 1; i < L; i++)
        if (key[i] > best) best = key[i], index = i;
    *taken = __reduce_max_sync(ALL_LANES, best);
    index = (int)__reduce_min_sync(ALL_LANES, best == *taken ? (unsigned)(index * 32 + threadIdx.x) : 0xFFFFFFFFu);
#pragma unroll
    for (int i = 0; i < L; i++)
        if (index == i * 32 + (int)threadIdx.x) key[i] = 0;
    return index;
}

/* The keys of each lane in descending order, equal ones by ascending i; digit j of the result, of 4 bits, is the i of
 * the j-th. Neighbours change places, in L rounds: no key passes an equal one. */
template <int L> __device__ static inline unsigned sort_lane(unsigned (&key)[L]) {
    unsigned at[L], order = 0;
#pragma unroll
    for (int i = 0; i < L; i++) at[i] = i;
#pragma unroll
    for (int round = 0; round < L; round++) {
#pragma unroll
        for (int i = round % 2; i + 1 < L; i += 2) {
            const bool swap = key[i] < key[i + 1];
            const unsigned key_i = key[i], at_i = at[i];
            key[i] = swap ? key[i + 1] : key_i, key[i + 1] = swap ? key_i : key[i + 1];
            at[i] = swap ? at[i + 1] : at_i, at[i + 1] = swap ? at_i : at[i + 1];
        }
    }
#pragma unroll
    for (int i = 0; i < L; i++) order |= at[i] << 4 * i;
    return order;
}

/* Bit i of the result: expert i * 32 + lane is one of the k with the largest keys. Uses the keys up. */
template <int L> __device__ static inline unsigned top_k(unsigned (&key)[L], int k) {
    unsigned chosen = 0, taken;
    if constexpr (L <= 8) { /* every lane shows its largest; who is taken from shows the next */
        unsigned order = sort_lane(key);
        for (int n = 0; n < k; n++) {
            taken = __reduce_max_sync(ALL_LANES, key[0]);
            const unsigned have = __ballot_sync(ALL_LANES, key[0] == taken);
            bool mine = key[0] == taken;
            if (have & (have - 1)) { /* a tie, seen by the whole warp */
                const unsigned index = (order & 15) * 32 + threadIdx.x;
                mine = index == __reduce_min_sync(ALL_LANES, mine ? index : 0xFFFFFFFFu);
            }
            if (mine) {
                chosen |= 1u << (order & 15);
                order >>= 4;
#pragma unroll
                for (int i = 0; i + 1 < L; i++) key[i] = key[i + 1];
                key[L - 1] = 0;
            }
        }
    } else {
        for (int n = 0; n < k; n++) {
            const int index = take_largest(key, &taken);
            if (index % 32 == (int)threadIdx.x) chosen |= 1u << index / 32;
        }
    }
    return chosen;
}

/* The same for groups of 32: lane i ranks group i among all. */
template <int L> __device__ static inline void allow_rows(unsigned (&key)[L], RouterShape shape) {
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < L; i++) {
        const unsigned first = __reduce_max_sync(ALL_LANES, key[i]);
        unsigned score = first;
        if (shape.group_score == GROUP_SCORE_TOP2) {
            const bool is_first = key[i] == first;
            const unsigned have = __ballot_sync(ALL_LANES, is_first), other = is_first ? 0 : key[i];
            const unsigned second = have & (have - 1) ? first : __reduce_max_sync(ALL_LANES, other);
            score = key_of(value_of(first) + value_of(second));
        } else {
            score = key_of(value_of(first));
        }
        if (i < shape.n_group && i == (int)threadIdx.x) mine = score;
    }
    int rank = 0;
#pragma unroll
    for (int i = 0; i < L; i++) {
        const unsigned other = __shfl_sync(ALL_LANES, mine, i);
        rank += other > mine || (other == mine && i < (int)threadIdx.x);
    }
    const unsigned allowed = __ballot_sync(ALL_LANES, (int)threadIdx.x < shape.n_group && rank < shape.topk_group);
#pragma unroll
    for (int i = 0; i < L; i++)
        if (!(allowed >> i & 1)) key[i] = 0;
}

/* Keys of the experts outside the topk_group best groups become 0. */
template <int L> __device__ static inline void allow_groups(unsigned (&key)[L], RouterShape shape) {
    const int size = shape.n_experts / shape.n_group;
    if (size == 32) { /* V3: the lanes' i-th experts are group i */
        allow_rows(key, shape);
        return;
    }
    const bool two = shape.group_score == GROUP_SCORE_TOP2 && size > 1;
    unsigned group_key[L]; /* of group i * 32 + lane */
    int group[L];
#pragma unroll
    for (int i = 0; i < L; i++) group[i] = (i * 32 + (int)threadIdx.x) / size, group_key[i] = 0;
    for (int g = 0; g < shape.n_group; g++) {
        unsigned own[L], first, second = 0;
#pragma unroll
        for (int i = 0; i < L; i++) own[i] = group[i] == g ? key[i] : 0;
        take_largest(own, &first);
        if (two) take_largest(own, &second);
        const unsigned score = key_of(value_of(first) + (two ? value_of(second) : 0));
#pragma unroll
        for (int i = 0; i < L; i++)
            if (g == i * 32 + (int)threadIdx.x) group_key[i] = score;
    }
    unsigned allowed = 0, taken;
    for (int n = 0; n < shape.topk_group; n++) {
        const int best = take_largest(group_key, &taken);
#pragma unroll
        for (int i = 0; i < L; i++)
            if (group[i] == best) allowed |= 1u << i;
    }
#pragma unroll
    for (int i = 0; i < L; i++)
        if (!(allowed >> i & 1)) key[i] = 0;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

template <int L> __device__ static inline void load_row(float (&x)[L], const float *row, int n) {
#pragma unroll
    for (int i = 0; i < L; i++) x[i] = i * 32 + (int)threadIdx.x < n ? row[i * 32 + threadIdx.x] : 0;
}

/* Past the last expert: 0. */
template <int L> __device__ static inline void score_row(float (&score)[L], int n, RouterScore kind) {
    float largest = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < L; i++) {
        const bool is_expert = i * 32 + (int)threadIdx.x < n;
        if (kind == ROUTER_SIGMOID)
            score[i] = is_expert ? 1.0f / (1.0f + expf(-score[i])) : 0;
        else if (is_expert)
            largest = fmaxf(largest, score[i]);
    }
    if (kind == ROUTER_SIGMOID) return;
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < L; i++) {
        score[i] = i * 32 + (int)threadIdx.x < n ? expf(score[i] - largest) : 0;
        sum += score[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < L; i++) score[i] /= sum;
}

/* Bits of the chosen experts. */
template <int L>
__device__ static inline unsigned choose_row(const float (&score)[L], const float (&bias)[L], RouterShape shape) {
    unsigned key[L];
#pragma unroll
    for (int i = 0; i < L; i++) key[i] = i * 32 + (int)threadIdx.x < shape.n_experts ? key_of(score[i] + bias[i]) : 0;
    if (shape.topk_group < shape.n_group) allow_groups(key, shape);
    return top_k(key, shape.n_chosen);
}

template <int L>
__device__ static inline void write_chosen(int32_t *ids, float *weights, unsigned chosen, const float (&score)[L],
                                           RouterShape shape) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < L; i++)
        if (chosen >> i & 1) sum += score[i];
    sum = warp_sum(sum);
    const float factor = shape.normalize ? (float)shape.scale / (sum + WEIGHT_SUM_MIN) : (float)shape.scale;
    int before = 0;
#pragma unroll
    for (int i = 0; i < L; i++) {
        const bool is_chosen = chosen >> i & 1;
        const unsigned all = __ballot_sync(ALL_LANES, is_chosen);
        const int k = before + __popc(all & ((1u << threadIdx.x) - 1));
        if (is_chosen) ids[k] = i * 32 + threadIdx.x, weights[k] = score[i] * factor;
        before += __popc(all);
    }
}

/* The tokens [*first, *last) of this block; returns its sequence. */
__device__ static inline int64_t tokens_of_block(const Router &a, int64_t *first, int64_t *last) {
    const int64_t b = blockIdx.x / a.blocks_per_sequence, part = blockIdx.x % a.blocks_per_sequence;
    *first = b * a.shape.seq_len + part * ROUTER_TOKENS;
    *last = min(*first + ROUTER_TOKENS, (b + 1) * a.shape.seq_len);
    return b;
}

template <int L>
static __global__ void __launch_bounds__(ROUTER_THREADS, L <= 8 ? 4 : 1)
    forward_kernel(Router a, int32_t *__restrict__ ids, float *__restrict__ weights, float *__restrict__ scores,
                   int32_t *counts, int32_t *seq_count, const float *__restrict__ logits, int64_t logits_ld,
                   const float *__restrict__ biases) {
    __shared__ int count[32 * L], best_count[32 * L]; /* chosen with the bias and groups; without */
    const RouterShape shape = a.shape;
    const int lane = threadIdx.x, thread = threadIdx.y * 32 + lane, E = shape.n_experts;
    for (int i = thread; i < E; i += ROUTER_THREADS) count[i] = 0, best_count[i] = 0;
    float bias[L];
#pragma unroll
    for (int i = 0; i < L; i++) bias[i] = biases && i * 32 + lane < E ? biases[i * 32 + lane] : 0;
    __syncthreads();
    int64_t first, last;
    const int64_t b = tokens_of_block(a, &first, &last);
    for (int64_t t = first + threadIdx.y; t < last; t += ROUTER_WARPS) {
        float score[L];
        load_row(score, logits + t * logits_ld, E);
        score_row(score, E, shape.score);
#pragma unroll
        for (int i = 0; i < L; i++)
            if (i * 32 + lane < E) scores[t * a.scores_ld + i * 32 + lane] = score[i];
        int32_t *id = ids + t * a.ids_ld;
        float *weight = weights + t * a.weights_ld;
        if (a.position[t] < 0) {
            for (int k = lane; k < shape.n_chosen; k += 32) id[k] = -1, weight[k] = 0;
            continue;
        }
        const unsigned chosen = choose_row(score, bias, shape);
        write_chosen(id, weight, chosen, score, shape);
        unsigned key[L];
#pragma unroll
        for (int i = 0; i < L; i++) key[i] = i * 32 + lane < E ? key_of(score[i]) : 0;
        const unsigned best = top_k(key, shape.n_chosen);
#pragma unroll
        for (int i = 0; i < L; i++) {
            if (chosen >> i & 1) atomicAdd(&count[i * 32 + lane], 1);
            if (best >> i & 1) atomicAdd(&best_count[i * 32 + lane], 1);
        }
    }
    __syncthreads();
    for (int i = thread; i < E; i += ROUTER_THREADS) { /* integers: in any order */
        if (counts && count[i]) atomicAdd(&counts[i], count[i]);
        if (best_count[i]) atomicAdd(&seq_count[b * a.seq_count_ld + i], best_count[i]);
    }
}

/* sum_i count_i s_i / sum_i s_i of every token; the block's sum goes to its place in balance_partials. */
template <int L>
static __global__ void __launch_bounds__(ROUTER_THREADS)
    balance_kernel(Router a, int stream, const float *__restrict__ scores, const int32_t *__restrict__ seq_count) {
    __shared__ double shared[ROUTER_WARPS];
    const int lane = threadIdx.x, E = a.shape.n_experts;
    int64_t first, last;
    const int32_t *row = seq_count + tokens_of_block(a, &first, &last) * a.seq_count_ld;
    float count[L];
#pragma unroll
    for (int i = 0; i < L; i++) count[i] = i * 32 + lane < E ? (float)row[i * 32 + lane] : 0;
    double total = 0;
    for (int64_t t = first + threadIdx.y; t < last; t += ROUTER_WARPS) {
        if (a.position[t] < 0) continue;
        float score[L], sum = 0, weighted = 0;
        load_row(score, scores + t * a.scores_ld, E);
#pragma unroll
        for (int i = 0; i < L; i++) sum += score[i], weighted += count[i] * score[i];
        total += (double)warp_sum(weighted) / (double)(warp_sum(sum) + WEIGHT_SUM_MIN);
    }
    if (lane == 0) shared[threadIdx.y] = total;
    __syncthreads();
    if (lane > 0 || threadIdx.y > 0) return;
    for (int i = 1; i < ROUTER_WARPS; i++) total += shared[i];
    balance_partials[stream][blockIdx.x] = total;
}

/* One block; warp w adds the blocks of sequence w, and w + BALANCE_WARPS, ... */
static __global__ void __launch_bounds__(32 * BALANCE_WARPS)
    balance_sum_kernel(Router a, int stream, StepStats *stats, const int32_t *__restrict__ seq_count, int64_t B) {
    __shared__ double shared[BALANCE_WARPS];
    const double E = a.shape.n_experts, K = a.shape.n_chosen;
    double sum = 0;
    for (int64_t b = threadIdx.y; b < B; b += BALANCE_WARPS) {
        const double *partial = balance_partials[stream] + b * a.blocks_per_sequence;
        long long n_choices = 0; /* every token of the sequence was counted K times */
        double total = 0;
        for (int i = threadIdx.x; i < a.shape.n_experts; i += 32) n_choices += seq_count[b * a.seq_count_ld + i];
        for (int i = threadIdx.x; i < a.blocks_per_sequence; i += 32) total += partial[i];
        const double n_tokens = (double)warp_sum(n_choices) / K;
        total = warp_sum(total);
        if (n_tokens > 0) sum += total * E / (K * n_tokens * n_tokens);
    }
    if (threadIdx.x == 0) shared[threadIdx.y] = sum;
    __syncthreads();
    if (threadIdx.x > 0 || threadIdx.y > 0) return;
    for (int i = 1; i < BALANCE_WARPS; i++) sum += shared[i];
    stats->balance_sum += sum;
}

/* Runs the block with L = experts of a lane. */
#define LANE_EXPERTS_SWITCH(n_experts_, L, ...)                                                                        \
    do {                                                                                                               \
        const int experts_ = (n_experts_);                                                                             \
        if (experts_ <= 32) {                                                                                          \
            enum { L = 1 };                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else if (experts_ <= 64) {                                                                                   \
            enum { L = 2 };                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else if (experts_ <= 128) {                                                                                  \
            enum { L = 4 };                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else if (experts_ <= 256) {                                                                                  \
            enum { L = 8 };                                                                                            \
            __VA_ARGS__;                                                                                               \
        } else {                                                                                                       \
            CHECK(experts_ <= 32 * ROUTER_LANE_EXPERTS, "router: %d experts", experts_);                               \
            enum { L = ROUTER_LANE_EXPERTS };                                                                          \
            __VA_ARGS__;                                                                                               \
        }                                                                                                              \
    } while (0)

static Router router_of(Tensor scores, Tensor seq_count, Tensor ids, Tensor weights, Tensor position,
                        RouterShape shape) {
    const Router a = {shape,
                      (int)ceil_div(shape.seq_len, ROUTER_TOKENS),
                      scores.ld,
                      seq_count.ld,
                      ids.ld,
                      weights.ld,
                      data_of<int32_t>(position)};
    return a;
}

void cuda_router_forward(Tensor ids, Tensor weights, Tensor scores, Tensor counts, Tensor seq_count, StepStats *stats,
                         Tensor logits, Tensor bias, Tensor position, RouterShape shape, Stream s) {
    const Router a = router_of(scores, seq_count, ids, weights, position, shape);
    const int64_t B = seq_count.shape[0], n_blocks = B * a.blocks_per_sequence;
    if (B == 0) return;
    CHECK(n_blocks <= BALANCE_PARTIALS, "router: %lld sequences of %lld tokens", (long long)B,
          (long long)shape.seq_len);
    const size_t int_bytes = sizeof(int32_t);
    CUDA_CHECK(cudaMemset2DAsync(seq_count.data, (size_t)seq_count.ld * int_bytes, 0,
                                 (size_t)shape.n_experts * int_bytes, (size_t)B, cuda_stream(s)));
    const unsigned grid = (unsigned)n_blocks;
    const dim3 block(32, ROUTER_WARPS);
    LANE_EXPERTS_SWITCH(shape.n_experts, L, {
        forward_kernel<L><<<grid, block, 0, cuda_stream(s)>>>(
            a, data_of<int32_t>(ids), data_of<float>(weights), data_of<float>(scores), data_of<int32_t>(counts),
            data_of<int32_t>(seq_count), data_of<float>(logits), logits.ld, data_of<float>(bias));
        LAUNCH_CHECK();
        balance_kernel<L>
            <<<grid, block, 0, cuda_stream(s)>>>(a, (int)s, data_of<float>(scores), data_of<int32_t>(seq_count));
        LAUNCH_CHECK();
    });
    balance_sum_kernel<<<1, dim3(32, BALANCE_WARPS), 0, cuda_stream(s)>>>(a, (int)s, stats, data_of<int32_t>(seq_count),
                                                                          B);
    LAUNCH_CHECK();
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* ds of the chosen, added to ds: 32 choices at a time, lane k holding one. */
template <int L>
__device__ static inline void add_chosen(float (&ds)[L], const Router &a, const int32_t *id, const float *weight,
                                         const float *dweight, const float *score) {
    const int lane = threadIdx.x, K = a.shape.n_chosen;
    float chosen_sum = 0, dot = 0;
    for (int k = lane; k < K; k += 32) chosen_sum += score[id[k]], dot += dweight[k] * weight[k];
    chosen_sum = warp_sum(chosen_sum) + WEIGHT_SUM_MIN;
    dot = warp_sum(dot);
    for (int first = 0; first < K; first += 32) {
        const int n = min(K - first, 32), my_id = lane < n ? id[first + lane] : 0;
        const float scaled = (float)a.shape.scale * (lane < n ? dweight[first + lane] : 0);
        const float mine = a.shape.normalize ? (scaled - dot) / chosen_sum : scaled;
        for (int k = 0; k < n; k++) {
            const int expert = __shfl_sync(ALL_LANES, my_id, k);
            const float value = __shfl_sync(ALL_LANES, mine, k);
#pragma unroll
            for (int i = 0; i < L; i++)
                if (expert == i * 32 + lane) ds[i] += value;
        }
    }
}

template <typename T, int L>
static __global__ void __launch_bounds__(ROUTER_THREADS)
    backward_kernel(Router a, T *__restrict__ dlogits, int64_t dlogits_ld, const float *__restrict__ dweights,
                    int64_t dweights_ld, const int32_t *__restrict__ ids, const float *__restrict__ weights,
                    const float *__restrict__ scores, const int32_t *__restrict__ seq_count,
                    const StepParams *__restrict__ params) {
    const int lane = threadIdx.x, E = a.shape.n_experts;
    int64_t first, last;
    const int32_t *row = seq_count + tokens_of_block(a, &first, &last) * a.seq_count_ld;
    float count[L], n_choices = 0; /* every token of the sequence was counted K times */
#pragma unroll
    for (int i = 0; i < L; i++) {
        count[i] = i * 32 + lane < E ? (float)row[i * 32 + lane] : 0;
        n_choices += count[i];
    }
    const double n_tokens = (double)warp_sum((double)n_choices) / a.shape.n_chosen;
    const float balance_factor = (float)(params->balance_scale * E / (a.shape.n_chosen * n_tokens * n_tokens));
    for (int64_t t = first + threadIdx.y; t < last; t += ROUTER_WARPS) {
        T *dlogit = dlogits + t * dlogits_ld;
        if (a.position[t] < 0) {
            for (int i = lane; i < E; i += 32) dlogit[i] = from_f32<T>(0);
            continue;
        }
        float score[L], ds[L], sum = 0, mean_count = 0, along = 0;
        load_row(score, scores + t * a.scores_ld, E);
#pragma unroll
        for (int i = 0; i < L; i++) sum += score[i], mean_count += count[i] * score[i];
        sum = warp_sum(sum) + WEIGHT_SUM_MIN;
        mean_count = warp_sum(mean_count) / sum;
#pragma unroll
        for (int i = 0; i < L; i++) ds[i] = balance_factor * (count[i] - mean_count) / sum;
        add_chosen(ds, a, ids + t * a.ids_ld, weights + t * a.weights_ld, dweights + t * dweights_ld,
                   scores + t * a.scores_ld);
        if (a.shape.score == ROUTER_SOFTMAX) {
#pragma unroll
            for (int i = 0; i < L; i++) along += ds[i] * score[i];
            along = warp_sum(along);
        }
#pragma unroll
        for (int i = 0; i < L; i++) {
            const float rest = a.shape.score == ROUTER_SIGMOID ? ds[i] * (1 - score[i]) : ds[i] - along;
            if (i * 32 + lane < E) dlogit[i * 32 + lane] = from_f32<T>(rest * score[i]);
        }
    }
}

void cuda_router_backward(Tensor dlogits, Tensor dweights, Tensor ids, Tensor weights, Tensor scores, Tensor seq_count,
                          Tensor position, const StepParams *params, RouterShape shape, Stream s) {
    const Router a = router_of(scores, seq_count, ids, weights, position, shape);
    const int64_t n_blocks = seq_count.shape[0] * a.blocks_per_sequence;
    if (n_blocks == 0) return;
    CHECK(n_blocks < INT32_MAX, "router: %lld blocks", (long long)n_blocks);
    ACT_SWITCH(dlogits.dtype, T, {
        LANE_EXPERTS_SWITCH(shape.n_experts, L, {
            backward_kernel<T, L><<<(unsigned)n_blocks, dim3(32, ROUTER_WARPS), 0, cuda_stream(s)>>>(
                a, data_of<T>(dlogits), dlogits.ld, data_of<float>(dweights), dweights.ld, data_of<int32_t>(ids),
                data_of<float>(weights), data_of<float>(scores), data_of<int32_t>(seq_count), params);
        });
    });
    LAUNCH_CHECK();
}
