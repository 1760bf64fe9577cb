/* As cpu/embed.c, but a warp per row.
 *
 * Backward: equal ids add to one row in ascending order of the token, so somebody must know all tokens of an id. They
 * are put beside each other by counting, in four small launches:
 *
 *     arrive   a token is counted in the bucket of its id; the count before is its place among them, in any order
 *     reserve  the first to arrive in a bucket takes room for all of it
 *     place    the tokens go to the room of their bucket
 *     sort     within a bucket each is given its rank by (id, token); the first token of an id writes down its run
 *
 * Where buckets and runs lie depends on who comes first, what a run holds does not. Then the gradient, in parts of a
 * row: a warp adds up a part of a short run, a block that of a long one, its warps sharing out the tokens. So an id
 * that is a twentieth of the text is the work of as many blocks as its row has parts. */
#include "common.cuh"

enum {
    EMBED_WARPS = 4, /* of a block */
    SORT_THREADS = 128,
    BACKWARD_TOKENS = 1 << 15,  /* tokens sorted at once; more are added in pieces of this */
    BACKWARD_BUCKETS = 1 << 17, /* an id each up to this vocabulary; ids that share one only cost time */
    BACKWARD_WARPS = 16,
    BACKWARD_BLOCKS_PER_SM = 2,
    BACKWARD_WAVES = 4, /* of blocks: whoever had a long run leaves the short ones to others */
    SHORT_RUN = 32,     /* tokens of a run that one warp adds up, at most */
    SHORT_ROWS = 4,     /* rows on their way at once, of a short run */
    LONG_ROWS = 8       /* of a long one */
};

typedef struct {
    int32_t id, token;
} Occurrence;
typedef struct {
    int32_t start, n;
} Span;
typedef struct {
    int32_t id, start, n; /* its tokens are occurrence[start ...] */
} Run;

/* Of one call; calls on one stream follow each other. `count` is zero between them. */
typedef struct {
    int32_t count[BACKWARD_BUCKETS];
    Span bucket[BACKWARD_BUCKETS];
    int32_t arrival[BACKWARD_TOKENS];
    Occurrence arrived[BACKWARD_TOKENS], occurrence[BACKWARD_TOKENS];
    Run short_run[BACKWARD_TOKENS], long_run[BACKWARD_TOKENS / SHORT_RUN];
    int32_t n_placed, n_short, n_long;
} TokenSort;
static __device__ TokenSort token_sorts[STREAM_COUNT];
OP_SCRATCH(token_sorts);

template <typename T, int N>
static __global__ void __launch_bounds__(32 * EMBED_WARPS)
    forward_kernel(T *__restrict__ y, int64_t y_ld, const int32_t *__restrict__ ids, const T *__restrict__ w,
                   int64_t w_ld, int64_t n_tokens, int D) {
    const int64_t t = (int64_t)blockIdx.x * EMBED_WARPS + threadIdx.y;
    if (t < n_tokens)
        copy_row<N>(
            1, [=](int) { return y + t * y_ld; }, w + ids[t] * w_ld, D);
}

void cuda_embed_forward(Tensor y, Tensor ids, Tensor w, Stream s) {
    const int64_t n_tokens = ids.shape[0], D = y.shape[1], n_blocks = ceil_div(n_tokens, EMBED_WARPS);
    CHECK(w.dtype == y.dtype && D < COLUMNS_MAX && n_blocks < INT32_MAX, "embed_forward: %s to %s, %lld columns",
          dtype_name(w.dtype), dtype_name(y.dtype), (long long)D);
    if (n_tokens == 0) return;
    const bool packed = rows_are_packed(y) && rows_are_packed(w);
    ACT_SWITCH(y.dtype, T, {
        auto kernel = packed ? forward_kernel<T, Pack<T>::N> : forward_kernel<T, 1>;
        kernel<<<(unsigned)n_blocks, dim3(32, EMBED_WARPS), 0, cuda_stream(s)>>>(
            data_of<T>(y), y.ld, data_of<int32_t>(ids), data_of<T>(w), w.ld, n_tokens, (int)D);
    });
    LAUNCH_CHECK();
}

/* ---- backward: tokens by id -------------------------------------------------------------------------------------- */

__device__ static inline int bucket_of(int32_t id) {
    return id % BACKWARD_BUCKETS;
}

static __global__ void __launch_bounds__(SORT_THREADS) arrive_kernel(int stream, const int32_t *ids, int n_tokens) {
    let_next_kernel_come();
    TokenSort *s = &token_sorts[stream];
    const int t = blockIdx.x * SORT_THREADS + threadIdx.x;
    if (t == 0) s->n_placed = s->n_short = s->n_long = 0;
    if (t < n_tokens) s->arrival[t] = atomicAdd(&s->count[bucket_of(ids[t])], 1);
}

static __global__ void __launch_bounds__(SORT_THREADS) reserve_kernel(int stream, const int32_t *ids, int n_tokens) {
    let_next_kernel_come();
    wait_for_kernel_before();
    TokenSort *s = &token_sorts[stream];
    const int t = blockIdx.x * SORT_THREADS + threadIdx.x, lane = threadIdx.x % 32;
    const bool is_first = t < n_tokens && s->arrival[t] == 0;
    const int bucket = is_first ? bucket_of(ids[t]) : 0, n = is_first ? s->count[bucket] : 0;
    int sum = n;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
        if (lane >= offset) sum += other;
    }
    int start = 0;
    if (lane == 31 && sum > 0) start = atomicAdd(&s->n_placed, sum);
    start = __shfl_sync(0xFFFFFFFFu, start, 31) + sum - n;
    if (is_first) s->bucket[bucket] = {start, n};
}

static __global__ void __launch_bounds__(SORT_THREADS) place_kernel(int stream, const int32_t *ids, int n_tokens) {
    let_next_kernel_come();
    wait_for_kernel_before();
    TokenSort *s = &token_sorts[stream];
    const int t = blockIdx.x * SORT_THREADS + threadIdx.x;
    if (t >= n_tokens) return;
    const int bucket = bucket_of(ids[t]);
    s->arrived[s->bucket[bucket].start + s->arrival[t]] = {ids[t], t};
    s->count[bucket] = 0;
}

/* Of a bucket's tokens: those of lower ids, those of this id, and of these those before this token. */
typedef struct {
    int lower, equal, before;
} Ranks;

__device__ static inline void rank_count(Ranks *r, Occurrence other, int32_t id, int t) {
    r->lower += other.id < id;
    r->equal += other.id == id;
    r->before += other.id == id && other.token < t;
}

/* A thread looks through a short bucket, the warp together through the long ones of its lanes. */
__device__ static inline Ranks ranks_in(const Occurrence *arrived, Span bucket, int32_t id, int t) {
    const int lane = threadIdx.x % 32;
    const bool is_long = bucket.n > SHORT_RUN;
    Ranks mine = {0, 0, 0};
    for (int i = 0; !is_long && i < bucket.n; i++) rank_count(&mine, arrived[bucket.start + i], id, t);
    for (unsigned rest = __ballot_sync(0xFFFFFFFFu, is_long); rest; rest &= rest - 1) {
        const int of = __ffs(rest) - 1, start = __shfl_sync(0xFFFFFFFFu, bucket.start, of);
        const int n = __shfl_sync(0xFFFFFFFFu, bucket.n, of), its_id = __shfl_sync(0xFFFFFFFFu, id, of);
        Ranks part = {0, 0, 0};
#pragma unroll 4
        for (int i = lane; i < n; i += 32) rank_count(&part, arrived[start + i], its_id, t - lane + of);
        part = {__reduce_add_sync(0xFFFFFFFFu, part.lower), __reduce_add_sync(0xFFFFFFFFu, part.equal),
                __reduce_add_sync(0xFFFFFFFFu, part.before)};
        if (lane == of) mine = part;
    }
    return mine;
}

static __global__ void __launch_bounds__(SORT_THREADS) sort_kernel(int stream, const int32_t *ids, int n_tokens) {
    let_next_kernel_come();
    wait_for_kernel_before();
    TokenSort *s = &token_sorts[stream];
    const int t = blockIdx.x * SORT_THREADS + threadIdx.x;
    const int32_t id = t < n_tokens ? ids[t] : 0;
    const Span none = {0, 0}, bucket = t < n_tokens ? s->bucket[bucket_of(id)] : none;
    const Ranks rank = ranks_in(s->arrived, bucket, id, t);
    if (t >= n_tokens) return;
    const int start = bucket.start + rank.lower;
    s->occurrence[start + rank.before] = {id, t};
    if (rank.before > 0) return;
    const Run run = {id, start, rank.equal};
    if (rank.equal <= SHORT_RUN)
        s->short_run[atomicAdd(&s->n_short, 1)] = run;
    else
        s->long_run[atomicAdd(&s->n_long, 1)] = run;
}

/* ---- backward: rows ---------------------------------------------------------------------------------------------- */

/* sum += columns of n <= 32 rows of dy, in order; lane i of the warp, which calls it together, has the i-th token. */
template <int ROWS, typename T, int N>
__device__ static inline void add_rows(float (&sum)[N], int tokens, int n, const T *__restrict__ dy, int64_t dy_ld,
                                       bool has) {
    for (int first = 0; first < n; first += ROWS) {
        Pack<T, N> row[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const int64_t token = __shfl_sync(0xFFFFFFFFu, tokens, first + k);
            if (has && first + k < n) row[k] = load_pack<N>(dy + token * dy_ld);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            if (has && first + k < n) add_pack(sum, row[k]);
    }
}

/* This lane's token of those [first, first + 32) of a run. */
__device__ static inline int token_of_lane(const TokenSort *s, const Run &run, int first, int last) {
    const int i = first + (int)threadIdx.x;
    return i < last ? s->occurrence[run.start + i].token : 0;
}

/* dw += sum. */
template <int N> __device__ static inline void add_to(float *dw, const Pack<float, N> &before, const float (&sum)[N]) {
    Pack<float, N> total;
#pragma unroll
    for (int i = 0; i < N; i++) total.x[i] = before.x[i] + sum[i];
    store_pack(dw, total);
}

/* A row is cut into parts of 32 * N columns. Work: (run, part), the long runs a block each, then the short ones a warp
 * each. */
template <typename T, int N>
static __global__ void __launch_bounds__(32 * BACKWARD_WARPS, BACKWARD_BLOCKS_PER_SM)
    backward_kernel(int stream, float *__restrict__ dw, int64_t dw_ld, const T *__restrict__ dy, int64_t dy_ld, int D,
                    int n_parts) {
    wait_for_kernel_before();
    __shared__ Pack<float, N> sums[BACKWARD_WARPS][32];
    const TokenSort *s = &token_sorts[stream];
    const int lane = threadIdx.x, warp = threadIdx.y;
    const int n_long = s->n_long * n_parts, n_short = s->n_short * n_parts;
    for (int i = blockIdx.x; i < n_long; i += gridDim.x) {
        const Run run = s->long_run[i / n_parts];
        const int c = (i % n_parts * 32 + lane) * N;
        const int share = (run.n + BACKWARD_WARPS - 1) / BACKWARD_WARPS, first = min(warp * share, run.n);
        const int last = min(first + share, run.n);
        Pack<float, N> sum = {};
        for (int at = first; at < last; at += 32)
            add_rows<LONG_ROWS>(sum.x, token_of_lane(s, run, at, last), min(last - at, 32), dy + c, dy_ld, c < D);
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && c < D) {
            for (int w = 1; w < BACKWARD_WARPS; w++) add_pack(sum.x, sums[w][lane]);
            float *out = dw + run.id * dw_ld + c;
            add_to(out, load_pack<N>(out), sum.x);
        }
        __syncthreads();
    }
    const int step = gridDim.x * BACKWARD_WARPS;
    int i = blockIdx.x * BACKWARD_WARPS + warp, tokens = 0;
    Run next = {};
    if (i < n_short) next = s->short_run[i / n_parts], tokens = token_of_lane(s, next, 0, next.n);
    for (; i < n_short; i += step) { /* the next run and its tokens come while this one's rows do */
        const Run run = next;
        const int c = (i % n_parts * 32 + lane) * N, own_tokens = tokens;
        const bool has = c < D;
        float *out = dw + run.id * dw_ld + c, sum[N] = {};
        Pack<float, N> before = {};
        if (has) before = load_pack<N>(out);
        if (i + step < n_short) next = s->short_run[(i + step) / n_parts];
        add_rows<SHORT_ROWS>(sum, own_tokens, min(run.n, (int)SHORT_ROWS), dy + c, dy_ld, has);
        tokens = token_of_lane(s, next, 0, next.n);
        if (run.n > SHORT_ROWS) {
            const int rest = __shfl_down_sync(0xFFFFFFFFu, own_tokens, SHORT_ROWS);
            add_rows<SHORT_ROWS>(sum, rest, run.n - SHORT_ROWS, dy + c, dy_ld, has);
        }
        if (has) add_to(out, before, sum);
    }
}

/* dy: rows of at most BACKWARD_TOKENS tokens. */
template <typename T, int N> static void backward(Tensor dw, Tensor dy, const int32_t *ids, Stream s) {
    const int n_tokens = (int)dy.shape[0], D = (int)dy.shape[1], n_parts = (int)ceil_div(D, 32 * N);
    const unsigned n_blocks = (unsigned)ceil_div(n_tokens, SORT_THREADS);
    arrive_kernel<<<n_blocks, SORT_THREADS, 0, cuda_stream(s)>>>((int)s, ids, n_tokens);
    LAUNCH_CHECK();
    for (auto kernel : {reserve_kernel, place_kernel, sort_kernel})
        launch_behind(kernel, n_blocks, SORT_THREADS, 0, cuda_stream(s), (int)s, ids, n_tokens);
    const int64_t most = (int64_t)n_tokens * n_parts;
    launch_behind(backward_kernel<T, N>,
                  grid_for(ceil_div(most, BACKWARD_WARPS), BACKWARD_WAVES * BACKWARD_BLOCKS_PER_SM),
                  dim3(32, BACKWARD_WARPS), 0, cuda_stream(s), (int)s, data_of<float>(dw), dw.ld, data_of<T>(dy), dy.ld,
                  D, n_parts);
}

void cuda_embed_backward(Tensor dw, Tensor dy, Tensor ids, Stream s) {
    const int64_t n_tokens = ids.shape[0], D = dy.shape[1];
    CHECK(D < 1 << 20, "embed_backward: %lld columns", (long long)D); /* tokens of a piece x parts are an int */
    if (D == 0) return;
    const bool packed = rows_are_packed(dw) && rows_are_packed(dy);
    for (int64_t first = 0; first < n_tokens; first += BACKWARD_TOKENS) {
        const Tensor rows = tensor_rows(dy, first, min(n_tokens - first, (int64_t)BACKWARD_TOKENS));
        const int32_t *piece = data_of<int32_t>(ids) + first;
        ACT_SWITCH(dy.dtype, T, {
            if (packed)
                backward<T, Pack<T>::N>(dw, rows, piece, s);
            else
                backward<T, 1>(dw, rows, piece, s);
        });
    }
}
