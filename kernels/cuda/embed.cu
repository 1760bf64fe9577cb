/* As cpu/embed.c, but a warp per row.
 *
 * Backward: equal ids add to one row in ascending order of the token, so somebody must know all tokens of an id. They
 * are put beside each other by counting, in three small launches:
 *
 *     arrive   a token is counted by its id; the count before is its place among those of the id, in any order
 *     reserve  the first to arrive takes room for all tokens of the id, its run
 *     place    the tokens go to the room of their run
 *
 * Where a run lies and the order in it depend on who comes first, what it holds does not; whoever adds it up takes the
 * tokens in ascending order. Then the gradient, in parts of a row: a warp adds up a part of a short run, a block that
 * of a long one, its warps sharing out the tokens. So an id that is a twentieth of the text is the work of as many
 * blocks as its row has parts, and these are the first blocks of the grid. */
#include "common.cuh"

enum {
    EMBED_WARPS = 4, /* of a block */
    SORT_THREADS = 128,
    BACKWARD_TOKENS = 1 << 15, /* of one pass; more are added in pieces of this */
    BACKWARD_IDS = 1 << 18,    /* of one pass; a larger vocabulary takes several */
    BACKWARD_WARPS = 8,
    BACKWARD_THREADS = 32 * BACKWARD_WARPS,
    BACKWARD_BLOCKS_PER_SM = 4,
    BACKWARD_WAVES = 4, /* of blocks with short runs: an SM that had a long one leaves them to others */
    SHORT_RUN = 32,     /* tokens of a run that one warp adds up, at most */
    SHORT_ROWS = 4,     /* rows on their way at once, of a short run */
    LONG_ROWS = 8,      /* of a long one, for each warp */
    LONG_TOKENS = 4096, /* of a long run, in order in shared memory */
    TOKEN_WORDS = BACKWARD_TOKENS / 32,
    THREAD_WORDS = TOKEN_WORDS / BACKWARD_THREADS
};

typedef struct {
    int32_t id, start, n; /* its tokens are token[start ...], in any order */
} Run;

/* Of one pass; passes on one stream follow each other. `count` is zero between them. */
typedef struct {
    int32_t count[BACKWARD_IDS], start[BACKWARD_IDS];
    int32_t arrival[BACKWARD_TOKENS], token[BACKWARD_TOKENS];
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

/* The ids of a pass are [first, first + BACKWARD_IDS); those of other tokens are out of its range. */
typedef struct {
    const int32_t *ids;
    int32_t first;
    int n_tokens, stream;
} Pass;

__device__ static inline int id_in_pass(const Pass &a, int t) {
    const int id = t < a.n_tokens ? a.ids[t] - a.first : -1;
    return id < BACKWARD_IDS ? id : -1;
}

static __global__ void __launch_bounds__(SORT_THREADS) arrive_kernel(Pass a) {
    let_next_kernel_come();
    TokenSort *s = &token_sorts[a.stream];
    const int t = blockIdx.x * SORT_THREADS + threadIdx.x, id = id_in_pass(a, t);
    if (t == 0) s->n_placed = s->n_short = s->n_long = 0;
    if (id >= 0) s->arrival[t] = atomicAdd(&s->count[id], 1);
}

static __global__ void __launch_bounds__(SORT_THREADS) reserve_kernel(Pass a) {
    let_next_kernel_come();
    TokenSort *s = &token_sorts[a.stream];
    const int t = blockIdx.x * SORT_THREADS + threadIdx.x, id = id_in_pass(a, t), lane = threadIdx.x % 32;
    wait_for_kernel_before();
    const bool is_first = id >= 0 && s->arrival[t] == 0;
    const int n = is_first ? s->count[id] : 0;
    const int sum = warp_sum_upto(n);
    int start = 0;
    if (lane == 31 && sum > 0) start = atomicAdd(&s->n_placed, sum);
    start = __shfl_sync(0xFFFFFFFFu, start, 31) + sum - n;
    if (!is_first) return;
    s->start[id] = start;
    const Run run = {a.first + id, start, n};
    if (n <= SHORT_RUN)
        s->short_run[atomicAdd(&s->n_short, 1)] = run;
    else
        s->long_run[atomicAdd(&s->n_long, 1)] = run;
}

static __global__ void __launch_bounds__(SORT_THREADS) place_kernel(Pass a) {
    let_next_kernel_come();
    TokenSort *s = &token_sorts[a.stream];
    const int t = blockIdx.x * SORT_THREADS + threadIdx.x, id = id_in_pass(a, t);
    wait_for_kernel_before();
    if (id < 0) return;
    s->token[s->start[id] + s->arrival[t]] = t;
    s->count[id] = 0;
}

/* ---- backward: rows ---------------------------------------------------------------------------------------------- */

/* The gradient, as kernels see it. A row is cut into n_parts parts of 32 * N columns. */
template <typename T> struct Rows {
    float *dw;
    const T *dy;
    int64_t dw_ld, dy_ld;
    int D, n_parts, stream;
};

/* sum += columns of n rows of dy; the warp asks for their tokens one after the other. */
template <int ROWS, typename T, int N, typename Next>
__device__ static inline void add_rows(float (&sum)[N], int n, Next next_token, const T *__restrict__ dy, int64_t dy_ld,
                                       bool has) {
    for (int first = 0; first < n; first += ROWS) {
        Pack<T, N> row[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (first + k >= n) break;
            const int64_t token = next_token();
            if (has) row[k] = load_pack<N>(dy + token * dy_ld);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            if (has && first + k < n) add_pack(sum, row[k]);
    }
}

/* dw += sum. */
template <int N> __device__ static inline void add_to(float *dw, const Pack<float, N> &before, const float (&sum)[N]) {
    Pack<float, N> total;
#pragma unroll
    for (int i = 0; i < N; i++) total.x[i] = before.x[i] + sum[i];
    store_pack(dw, total);
}

/* The work of a block with long runs. */
template <int N> struct LongRun {
    uint32_t word[TOKEN_WORDS]; /* a bit for each token */
    uint16_t token[LONG_TOKENS];
    int scan[BACKWARD_WARPS];
    Pack<float, N> sum[BACKWARD_WARPS][32];
};

/* The bits of a run's tokens; returns how many the words of the threads before this one have. */
template <int N> __device__ static inline int mark_tokens(LongRun<N> *of, const int32_t *token, int n) {
    const int thread = threadIdx.y * 32 + threadIdx.x;
    for (int i = thread; i < TOKEN_WORDS; i += BACKWARD_THREADS) of->word[i] = 0;
    __syncthreads();
    for (int i = thread; i < n; i += BACKWARD_THREADS) atomicOr(&of->word[token[i] / 32], 1u << token[i] % 32);
    __syncthreads();
    int mine = 0, total;
    for (int i = 0; i < THREAD_WORDS; i++) mine += __popc(of->word[thread * THREAD_WORDS + i]);
    return block_sum_before(mine, &total, of->scan);
}

/* Tokens [first, first + LONG_TOKENS) of a run, in ascending order. */
template <int N> __device__ static inline void order_tokens(LongRun<N> *of, int before, int first) {
    const int thread = threadIdx.y * 32 + threadIdx.x;
    for (int i = 0; i < THREAD_WORDS; i++) {
        const int word = thread * THREAD_WORDS + i;
        for (uint32_t bits = of->word[word]; bits; bits &= bits - 1, before++)
            if (before >= first && before < first + LONG_TOKENS)
                of->token[before - first] = (uint16_t)(word * 32 + __ffs(bits) - 1);
    }
    __syncthreads();
}

template <typename T, int N>
__device__ static inline void add_long_run(const Rows<T> &a, const Run &run, int part, LongRun<N> *of) {
    const int lane = threadIdx.x, warp = threadIdx.y, c = (part * 32 + lane) * N;
    const int before = mark_tokens(of, token_sorts[a.stream].token + run.start, run.n);
    Pack<float, N> sum = {};
    for (int first = 0; first < run.n; first += LONG_TOKENS) {
        order_tokens(of, before, first);
        const int n = min(run.n - first, (int)LONG_TOKENS), share = (n + BACKWARD_WARPS - 1) / BACKWARD_WARPS;
        const uint16_t *token = of->token + min(warp * share, n);
        add_rows<LONG_ROWS>(
            sum.x, min((warp + 1) * share, n) - min(warp * share, n), [&] { return *token++; }, a.dy + c, a.dy_ld,
            c < a.D);
        __syncthreads();
    }
    of->sum[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= a.D) return;
    for (int w = 1; w < BACKWARD_WARPS; w++) add_pack(sum.x, of->sum[w][lane]);
    float *out = a.dw + run.id * a.dw_ld + c;
    add_to(out, load_pack<N>(out), sum.x);
}

/* Parts [first, first + step, ...) of the short runs, a warp each. Tokens come while the rows before them do, and runs
 * while the tokens before them do. */
template <typename T, int N> __device__ static inline void add_short_runs(const Rows<T> &a, int first, int step) {
    const TokenSort *s = &token_sorts[a.stream];
    const int lane = threadIdx.x, n_short = s->n_short * a.n_parts;
    const auto run_of = [=](int i) { return i < n_short ? s->short_run[i / a.n_parts] : Run{}; };
    const auto token_of = [=](const Run &run) { return lane < run.n ? s->token[run.start + lane] : 0; };
    Run run = run_of(first), next_run = run_of(first + step);
    int token = token_of(run);
    for (int i = first; i < n_short; i += step) {
        const int c = (i % a.n_parts * 32 + lane) * N, next_token = token_of(next_run);
        const Run run_after = run_of(i + 2 * step);
        const bool has = c < a.D;
        float *out = a.dw + run.id * a.dw_ld + c, sum[N] = {};
        Pack<float, N> before = {};
        if (has) before = load_pack<N>(out);
        int last = -1;
        const auto next = [&] {
            const bool is_left = lane < run.n && token > last;
            last = (int)__reduce_min_sync(0xFFFFFFFFu, is_left ? (unsigned)token : 0xFFFFFFFFu);
            return last;
        };
        add_rows<SHORT_ROWS>(sum, run.n, next, a.dy + c, a.dy_ld, has);
        if (has) add_to(out, before, sum);
        run = next_run, next_run = run_after, token = next_token;
    }
}

/* Work: (run, part). The first n_long_blocks have the long runs, a block each, the others the short ones. */
template <typename T, int N>
static __global__ void __launch_bounds__(BACKWARD_THREADS, BACKWARD_BLOCKS_PER_SM)
    backward_kernel(Rows<T> a, int n_long_blocks) {
    __shared__ LongRun<N> of;
    wait_for_kernel_before();
    const TokenSort *s = &token_sorts[a.stream];
    const int block = blockIdx.x;
    if (block >= n_long_blocks)
        add_short_runs<T, N>(a, (block - n_long_blocks) * BACKWARD_WARPS + threadIdx.y,
                             (gridDim.x - n_long_blocks) * BACKWARD_WARPS);
    else
        for (int i = block; i < s->n_long * a.n_parts; i += n_long_blocks) {
            __syncthreads();
            add_long_run(a, s->long_run[i / a.n_parts], i % a.n_parts, &of);
        }
}

template <typename T, int N>
static void backward(Tensor dw, Tensor dy, const int32_t *ids, int32_t first_id, Stream s) {
    const int n_tokens = (int)dy.shape[0], D = (int)dy.shape[1], n_parts = (int)ceil_div(D, 32 * N);
    const Pass pass = {ids, first_id, n_tokens, (int)s};
    const unsigned n_blocks = (unsigned)ceil_div(n_tokens, SORT_THREADS);
    arrive_kernel<<<n_blocks, SORT_THREADS, 0, cuda_stream(s)>>>(pass);
    LAUNCH_CHECK();
    for (auto kernel : {reserve_kernel, place_kernel})
        launch_behind(kernel, n_blocks, SORT_THREADS, 0, cuda_stream(s), pass);
    const Rows<T> rows = {data_of<float>(dw), data_of<T>(dy), dw.ld, dy.ld, D, n_parts, (int)s};
    const int64_t most_long = (int64_t)(n_tokens / (SHORT_RUN + 1)) * n_parts, most = (int64_t)n_tokens * n_parts;
    const unsigned n_long = most_long ? grid_for(most_long, BACKWARD_BLOCKS_PER_SM) : 0;
    const unsigned n_short = grid_for(ceil_div(most, BACKWARD_WARPS), BACKWARD_WAVES * BACKWARD_BLOCKS_PER_SM);
    launch_behind(backward_kernel<T, N>, n_long + n_short, dim3(32, BACKWARD_WARPS), 0, cuda_stream(s), rows,
                  (int)n_long);
}

void cuda_embed_backward(Tensor dw, Tensor dy, Tensor ids, Stream s) {
    const int64_t n_tokens = ids.shape[0], D = dy.shape[1], V = dw.shape[0];
    CHECK(D < 1 << 20, "embed_backward: %lld columns", (long long)D); /* tokens of a piece x parts are an int */
    if (D == 0) return;
    const bool packed = rows_are_packed(dw) && rows_are_packed(dy);
    for (int64_t first = 0; first < n_tokens; first += BACKWARD_TOKENS) {
        const Tensor rows = tensor_rows(dy, first, min(n_tokens - first, (int64_t)BACKWARD_TOKENS));
        const int32_t *piece = data_of<int32_t>(ids) + first;
        for (int64_t id = 0; id < V; id += BACKWARD_IDS)
            ACT_SWITCH(dy.dtype, T, {
                if (packed)
                    backward<T, Pack<T>::N>(dw, rows, piece, (int32_t)id, s);
                else
                    backward<T, 1>(dw, rows, piece, (int32_t)id, s);
            });
    }
}
