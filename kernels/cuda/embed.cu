/* As cpu/embed.c, but a warp per row.
 *
 * Backward: equal ids add to one row in ascending order of the token, so somebody must know all tokens of an id. The
 * tokens are sorted by (id, token) first: a warp a token counts the tokens that stand before its own, which is its
 * place. That is quadratic, and still little: about 0.03 ms for 16384 tokens (estimated). Then a run of equal ids
 * belongs to one block, which loads many of its rows at once and adds them in order. */
#include "common.cuh"

enum {
    EMBED_WARPS = 8, /* of a block */
    EMBED_BLOCKS_PER_SM = 8,
    FORWARD_PACKS = 8,         /* on their way at once */
    BACKWARD_TOKENS = 1 << 15, /* tokens sorted at once; more are added in pieces of this */
    BACKWARD_ROWS = 16,        /* rows on their way at once */
    BACKWARD_PARTS = 2         /* parts of a row that a warp walks through */
};

/* The sorted tokens of one call; calls on one stream follow each other. */
typedef struct {
    int32_t id, token;
} SortedToken;
static __device__ SortedToken sorted_tokens[STREAM_COUNT][BACKWARD_TOKENS];
OP_SCRATCH(sorted_tokens);

template <typename T, int N>
static __global__ void __launch_bounds__(32 * EMBED_WARPS)
    forward_kernel(T *__restrict__ y, int64_t y_ld, const int32_t *__restrict__ ids, const T *__restrict__ w,
                   int64_t w_ld, int64_t n_tokens, int D) {
    const int64_t stride = (int64_t)gridDim.x * EMBED_WARPS;
    for (int64_t t = (int64_t)blockIdx.x * EMBED_WARPS + threadIdx.y; t < n_tokens; t += stride) {
        const T *in = w + ids[t] * w_ld;
        T *out = y + t * y_ld;
        for (int first = threadIdx.x * N; first < D; first += 32 * N * FORWARD_PACKS) {
            Pack<T, N> pack[FORWARD_PACKS];
#pragma unroll
            for (int k = 0; k < FORWARD_PACKS; k++)
                if (first + 32 * N * k < D) pack[k] = load_pack<N>(in + first + 32 * N * k);
#pragma unroll
            for (int k = 0; k < FORWARD_PACKS; k++)
                if (first + 32 * N * k < D) store_pack(out + first + 32 * N * k, pack[k]);
        }
    }
}

void cuda_embed_forward(Tensor y, Tensor ids, Tensor w, Stream s) {
    const int64_t n_tokens = ids.shape[0], D = y.shape[1];
    CHECK(w.dtype == y.dtype && D < COLUMNS_MAX, "embed_forward: %s to %s, %lld columns", dtype_name(w.dtype),
          dtype_name(y.dtype), (long long)D);
    if (n_tokens == 0) return;
    const unsigned grid = grid_for(ceil_div(n_tokens, EMBED_WARPS), EMBED_BLOCKS_PER_SM);
    const bool packed = rows_are_packed(y) && rows_are_packed(w);
    ACT_SWITCH(y.dtype, T, {
        auto kernel = packed ? forward_kernel<T, Pack<T>::N> : forward_kernel<T, 1>;
        kernel<<<grid, dim3(32, EMBED_WARPS), 0, cuda_stream(s)>>>(data_of<T>(y), y.ld, data_of<int32_t>(ids),
                                                                   data_of<T>(w), w.ld, n_tokens, (int)D);
    });
    LAUNCH_CHECK();
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* One warp a token: its place is the number of tokens with a lower id, or with its id and before it. */
static __global__ void __launch_bounds__(32 * EMBED_WARPS)
    sort_kernel(int stream, const int32_t *__restrict__ ids, int n_tokens) {
    const int t = blockIdx.x * EMBED_WARPS + threadIdx.y;
    if (t >= n_tokens) return;
    const int32_t id = ids[t];
    int before = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < t; i += 32) before += ids[i] <= id;
#pragma unroll 8
    for (int i = t + 1 + threadIdx.x; i < n_tokens; i += 32) before += ids[i] < id;
    before = warp_sum(before);
    if (threadIdx.x == 0) sorted_tokens[stream][before] = {id, t};
}

/* Block (p, column part): if a run of equal ids begins at place p, dw[id] += the sum of its rows. */
template <typename T, int N>
static __global__ void __launch_bounds__(32 * EMBED_WARPS)
    backward_kernel(int stream, float *__restrict__ dw, int64_t dw_ld, const T *__restrict__ dy, int64_t dy_ld,
                    int n_tokens, int D) {
    const SortedToken *sorted = sorted_tokens[stream];
    const int start = blockIdx.x, lane = threadIdx.x;
    const int32_t id = sorted[start].id;
    if (start > 0 && sorted[start - 1].id == id) return;
#pragma unroll
    for (int part = 0; part < BACKWARD_PARTS; part++) {
        const int c = (((int)blockIdx.y * BACKWARD_PARTS + part) * EMBED_WARPS + (int)threadIdx.y) * 32 * N + lane * N;
        const bool is_column = c < D;
        Pack<float, N> total;
        float sum[N];
        if (is_column) total = load_pack<N>(dw + id * dw_ld + c);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = 0;
        for (int place = start; place < n_tokens; place += 32) {
            SortedToken mine = {-1, 0};
            if (place + lane < n_tokens) mine = sorted[place + lane];
            const unsigned others = __ballot_sync(0xFFFFFFFFu, mine.id != id);
            const int n_rows = others ? __ffs(others) - 1 : 32; /* the run is without a gap */
            for (int first = 0; first < n_rows; first += BACKWARD_ROWS) {
                Pack<T, N> row[BACKWARD_ROWS];
#pragma unroll
                for (int k = 0; k < BACKWARD_ROWS; k++) {
                    const int64_t t = __shfl_sync(0xFFFFFFFFu, mine.token, first + k);
                    if (first + k < n_rows && is_column) row[k] = load_pack<N>(dy + t * dy_ld + c);
                }
#pragma unroll
                for (int k = 0; k < BACKWARD_ROWS; k++) {
                    if (first + k < n_rows && is_column) add_pack(sum, row[k]);
                }
            }
            if (n_rows < 32) break;
        }
        if (!is_column) continue;
#pragma unroll
        for (int i = 0; i < N; i++) total.x[i] += sum[i];
        store_pack(dw + id * dw_ld + c, total);
    }
}

template <typename T, int N> static void backward(Tensor dw, Tensor dy, int n_tokens, Stream s) {
    const int64_t D = dy.shape[1], parts = ceil_div(D, 32 * N * EMBED_WARPS * BACKWARD_PARTS);
    backward_kernel<T, N><<<dim3((unsigned)n_tokens, (unsigned)parts), dim3(32, EMBED_WARPS), 0, cuda_stream(s)>>>(
        (int)s, data_of<float>(dw), dw.ld, data_of<T>(dy), dy.ld, n_tokens, (int)D);
}

void cuda_embed_backward(Tensor dw, Tensor dy, Tensor ids, Stream s) {
    const int64_t D = dy.shape[1];
    CHECK(D < 1 << 24, "embed_backward: %lld columns", (long long)D); /* parts of rows in gridDim.y */
    if (D == 0) return;
    const bool packed = rows_are_packed(dw) && rows_are_packed(dy);
    for (int64_t first = 0; first < ids.shape[0]; first += BACKWARD_TOKENS) {
        const int64_t n = min(ids.shape[0] - first, (int64_t)BACKWARD_TOKENS);
        const int32_t *piece = data_of<int32_t>(ids) + first;
        sort_kernel<<<(unsigned)ceil_div(n, EMBED_WARPS), dim3(32, EMBED_WARPS), 0, cuda_stream(s)>>>((int)s, piece,
                                                                                                      (int)n);
        LAUNCH_CHECK();
        const Tensor rows = tensor_rows(dy, first, n);
        ACT_SWITCH(dy.dtype, T, {
            if (packed)
                backward<T, 4>(dw, rows, (int)n, s);
            else
                backward<T, 1>(dw, rows, (int)n, s);
        });
        LAUNCH_CHECK();
    }
}
