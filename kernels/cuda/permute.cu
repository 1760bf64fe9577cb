/* As cpu/permute.c, but a warp per row, and the map in three launches: the list of (token, k) is cut into pieces, a
 * warp counts the local experts of its piece; a block per expert turns the counts into places; then the warps walk
 * their pieces once more and place the rows. The order is that of the list whatever the pieces are, so the map is
 * the CPU's. */
#include "tiles.cuh"

enum {
    MAP_WARPS = 8,        /* pieces of a block */
    MAP_PIECE = 128,      /* entries of a piece, or more if the counts would not fit; multiple of 32 */
    MAP_COUNTS = 1 << 17, /* counts of all pieces */
    MAP_EXPERTS = 1024,   /* local experts, at most */
    MAP_THREADS = 32 * MAP_WARPS,
    ROW_WARPS = 8, /* rows of a block */
    ROW_BLOCKS_PER_SM = 8,
    GATHER_WARPS = 4, /* tokens of a block */
    SCALE_THREADS = 256,
    SCALE_COLUMNS = 4, /* of tiles, on their way at once */
    REDUCE_ROWS = 8
};

/* Between the launches of one moe_map; calls on one stream follow each other. */
typedef struct {
    int32_t
        count[MAP_COUNTS]; /* (El, pieces): entries of the expert in the piece; then those in the pieces before it */
    int32_t total[MAP_EXPERTS];
} MapCounts;
static __device__ MapCounts map_counts[STREAM_COUNT];
OP_SCRATCH(map_counts);

typedef struct {
    const int32_t *ids, *slot_of_expert;
    int64_t ids_ld;
    int first_slot, El, K, n_entries, piece, n_pieces, stream;
} MapList;

/* ---- moe_map ----------------------------------------------------------------------------------------------------- */

/* The local index of the expert of an entry, or -1. */
__device__ static inline int local_expert(const MapList &a, int entry) {
    const int id = a.ids[entry / a.K * a.ids_ld + entry % a.K];
    if (id < 0) return -1;
    const int local = a.slot_of_expert[id] - a.first_slot;
    return local >= 0 && local < a.El ? local : -1;
}

static __global__ void __launch_bounds__(MAP_THREADS) count_kernel(MapList a) {
    extern __shared__ int32_t counts[]; /* (MAP_WARPS, El) */
    let_next_kernel_come();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, piece = blockIdx.x * MAP_WARPS + warp;
    int32_t *count = counts + warp * a.El;
    for (int e = lane; e < a.El; e += 32) count[e] = 0;
    __syncwarp();
    if (piece >= a.n_pieces) return;
    const int last = min((piece + 1) * a.piece, a.n_entries);
    for (int entry = piece * a.piece + lane; entry < last; entry += 32) {
        const int e = local_expert(a, entry);
        if (e >= 0) atomicAdd(&count[e], 1);
    }
    __syncwarp();
    for (int e = lane; e < a.El; e += 32) map_counts[a.stream].count[(int64_t)e * a.n_pieces + piece] = count[e];
}

/* A block per local expert. */
static __global__ void __launch_bounds__(MAP_THREADS) place_kernel(MapList a) {
    __shared__ int shared[MAP_WARPS];
    let_next_kernel_come();
    wait_for_kernel_before();
    int32_t *count = map_counts[a.stream].count + (int64_t)blockIdx.x * a.n_pieces;
    int before = 0;
    for (int first = 0; first < a.n_pieces; first += MAP_THREADS) {
        const int piece = first + threadIdx.x, x = piece < a.n_pieces ? count[piece] : 0;
        int total;
        const int place = before + block_sum_before(x, &total, shared);
        if (piece < a.n_pieces) count[piece] = place;
        before += total;
    }
    if (threadIdx.x == 0) map_counts[a.stream].total[blockIdx.x] = before;
}

/* Every block works out where the experts start, and whether all rows fit; the first one writes it down. */
static __global__ void __launch_bounds__(MAP_THREADS)
    fill_kernel(MapList a, int32_t *__restrict__ row_token, float *__restrict__ row_weight,
                int32_t *__restrict__ token_row, int64_t token_row_ld, int32_t *__restrict__ expert_start,
                const float *__restrict__ weights, int64_t weights_ld, int64_t capacity, double *overflow) {
    extern __shared__ int32_t rows[]; /* (El): first row of an expert; then (MAP_WARPS, El): next row of an expert */
    __shared__ int shared[MAP_WARPS];
    wait_for_kernel_before();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, piece = blockIdx.x * MAP_WARPS + warp;
    const int32_t *total = map_counts[a.stream].total;
    int32_t *start = rows, *next = rows + (1 + warp) * a.El;
    int before = 0;
    for (int first = 0; first < a.El; first += MAP_THREADS) {
        const int e = first + threadIdx.x;
        const int padded = e < a.El ? (total[e] + GROUP_ALIGN - 1) / GROUP_ALIGN * GROUP_ALIGN : 0;
        int sum;
        const int row = before + block_sum_before(padded, &sum, shared);
        if (e < a.El) start[e] = row;
        before += sum;
    }
    __syncthreads();
    const bool fits = before <= capacity;
    for (int e = threadIdx.x; e <= a.El && blockIdx.x == 0; e += MAP_THREADS)
        expert_start[e] = !fits ? 0 : e < a.El ? start[e] : before;
    if (!fits && blockIdx.x == 0 && threadIdx.x == 0) *overflow += 1;

    for (int e = blockIdx.x; e < a.El && fits; e += gridDim.x) { /* padding: less than GROUP_ALIGN rows */
        const int end = e + 1 < a.El ? start[e + 1] : before;
        for (int row = start[e] + total[e] + (int)threadIdx.x; row < end; row += MAP_THREADS)
            row_token[row] = -1, row_weight[row] = 0;
    }

    if (piece >= a.n_pieces) return;
    for (int e = lane; e < a.El; e += 32)
        next[e] = start[e] + map_counts[a.stream].count[(int64_t)e * a.n_pieces + piece];
    __syncwarp();
    const int last = min((piece + 1) * a.piece, a.n_entries);
    for (int first = piece * a.piece; first < last; first += 32) {
        const int entry = first + lane;
        const int e = entry < last ? local_expert(a, entry) : -1;
        const unsigned same = __match_any_sync(0xFFFFFFFFu, e);
        const int row = e < 0 || !fits ? -1 : next[e] + __popc(same & ((1u << lane) - 1));
        __syncwarp();
        if (e >= 0 && lane == __ffs(same) - 1) next[e] += __popc(same);
        __syncwarp();
        if (entry >= last) continue;
        const int t = entry / a.K, k = entry % a.K;
        token_row[t * token_row_ld + k] = row;
        if (row < 0) continue;
        row_token[row] = t;
        row_weight[row] = weights[t * weights_ld + k];
    }
}

void cuda_moe_map(MoeMap map, Tensor ids, Tensor weights, Tensor slot_of_expert, int first_slot, Stream s) {
    const int64_t Tr = ids.shape[0], K = ids.shape[1], El = map.expert_start.shape[0] - 1, n_entries = Tr * K;
    CHECK(El <= MAP_EXPERTS && n_entries < 1 << 30 && map.row_token.shape[0] < INT32_MAX,
          "moe_map: %lld local experts, %lld entries", (long long)El, (long long)n_entries);
    int64_t piece = MAP_PIECE;
    while (ceil_div(n_entries, piece) * El > MAP_COUNTS) piece *= 2;
    const int64_t n_pieces = ceil_div(n_entries, piece), n_blocks = max(ceil_div(n_pieces, MAP_WARPS), (int64_t)1);
    const MapList a = {data_of<int32_t>(ids),
                       data_of<int32_t>(slot_of_expert),
                       ids.ld,
                       first_slot,
                       (int)El,
                       (int)K,
                       (int)n_entries,
                       (int)piece,
                       (int)n_pieces,
                       (int)s};
    const size_t row_bytes = (size_t)El * sizeof(int32_t);
    count_kernel<<<(unsigned)n_blocks, MAP_THREADS, MAP_WARPS * row_bytes, cuda_stream(s)>>>(a);
    LAUNCH_CHECK();
    launch_behind(place_kernel, (unsigned)El, MAP_THREADS, 0, cuda_stream(s), a);
    launch_behind(fill_kernel, (unsigned)n_blocks, MAP_THREADS, (1 + MAP_WARPS) * row_bytes, cuda_stream(s), a,
                  data_of<int32_t>(map.row_token), data_of<float>(map.row_weight), data_of<int32_t>(map.token_row),
                  map.token_row.ld, data_of<int32_t>(map.expert_start), data_of<float>(weights), weights.ld,
                  map.row_token.shape[0], data_of<double>(map.overflow));
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* A warp per token, whose row is read once and written to its K places: row by row it would come from device memory
 * again for every expert. The rows of padding lie in between; each warp also looks at 32 rows for some. */
template <typename T, int N>
static __global__ void __launch_bounds__(32 * GATHER_WARPS)
    gather_kernel(T *__restrict__ y, int64_t y_ld, const T *__restrict__ x, int64_t x_ld,
                  const int32_t *__restrict__ token_row, int64_t token_row_ld, const int32_t *__restrict__ row_token,
                  const int32_t *__restrict__ n_rows, int K, int64_t n_tokens, int D) {
    const int64_t warp = (int64_t)blockIdx.x * GATHER_WARPS + threadIdx.y;
    if (warp < n_tokens) {
        const int32_t *rows = token_row + warp * token_row_ld;
        copy_row<N>(
            K, [=](int k) { return rows[k] < 0 ? NULL : y + rows[k] * y_ld; }, x + warp * x_ld, D);
    }
    const float zero[N] = {0};
    for (int64_t first = warp * 32; first < *n_rows; first += (int64_t)gridDim.x * GATHER_WARPS * 32) {
        const int64_t mine = first + threadIdx.x;
        unsigned padding = __ballot_sync(0xFFFFFFFFu, mine < *n_rows && row_token[mine] < 0);
        for (; padding; padding &= padding - 1) {
            T *out = y + (first + __ffs(padding) - 1) * y_ld;
            for (int c = threadIdx.x * N; c < D; c += 32 * N) store_pack(out + c, pack_of<T>(zero));
        }
    }
}

/* The scales of the tiles in SCALE_COLUMNS columns of tiles, a row a thread. */
static __global__ void __launch_bounds__(SCALE_THREADS)
    gather_scales_kernel(float *__restrict__ y, int64_t y_ld, const float *__restrict__ x, int64_t x_ld,
                         const int32_t *__restrict__ row_token, const int32_t *__restrict__ n_rows, int across) {
    const int64_t n = (int64_t)blockIdx.x * SCALE_THREADS + threadIdx.x;
    if (n >= *n_rows) return;
    const int token = row_token[n], first = blockIdx.y * SCALE_COLUMNS;
    float scale[SCALE_COLUMNS];
#pragma unroll
    for (int i = 0; i < SCALE_COLUMNS; i++)
        scale[i] = token >= 0 && first + i < across ? x[(first + i) * x_ld + token] : 1;
#pragma unroll
    for (int i = 0; i < SCALE_COLUMNS; i++)
        if (first + i < across) y[(first + i) * y_ld + n] = scale[i];
}

/* The bytes of tiles, as words of four. */
static Tensor words_of(Tensor t) {
    CHECK(t.shape[1] % 4 == 0 && t.ld % 4 == 0, "gather_rows: %lld columns of FP8", (long long)t.shape[1]);
    Tensor words = tensor_2d(t.data, DTYPE_F32, t.shape[0], t.shape[1] / 4);
    words.ld = t.ld / 4;
    return words;
}

static void gather_tiles(Tensor y, Tensor yt, Tensor x, MoeMap map, const int32_t *n_rows, Stream s) {
    const int32_t *row_token = data_of<int32_t>(map.row_token);
    const int64_t N = map.row_token.shape[0], across = ceil_div(x.shape[1], TILE);
    if (!tensor_is_none(y)) {
        const dim3 grid((unsigned)ceil_div(N, SCALE_THREADS), (unsigned)ceil_div(across, SCALE_COLUMNS));
        gather_scales_kernel<<<grid, SCALE_THREADS, 0, cuda_stream(s)>>>(y.scale, y.scale_ld, x.scale, x.scale_ld,
                                                                         row_token, n_rows, (int)across);
        LAUNCH_CHECK();
        cuda_gather_rows(words_of(y), tensor_none(), words_of(x), map, s);
    }
    if (tensor_is_none(yt) || N == 0) return;
    CHECK(yt.ld % 16 == 0, "gather_rows: columns of %lld", (long long)yt.ld);
    cuda_requantize_columns(yt, x, row_token, N, n_rows, cuda_stream(s));
}

void cuda_gather_rows(Tensor y, Tensor yt, Tensor x, MoeMap map, Stream s) {
    const int64_t Tr = x.shape[0], D = x.shape[1], n_blocks = ceil_div(Tr, GATHER_WARPS);
    CHECK((tensor_is_none(y) || x.dtype == y.dtype) && D < COLUMNS_MAX && n_blocks < INT32_MAX,
          "gather_rows: %s to %s, %lld columns", dtype_name(x.dtype), dtype_name(y.dtype), (long long)D);
    if (Tr == 0) return; /* no token, no row */
    const int32_t *n_rows = data_of<int32_t>(map.expert_start) + map.expert_start.shape[0] - 1;
    if (x.dtype == DTYPE_E4M3) {
        gather_tiles(y, yt, x, map, n_rows, s);
        return;
    }
    const bool packed = rows_are_packed(y) && rows_are_packed(x);
    ACT_SWITCH(y.dtype, T, {
        auto kernel = packed ? gather_kernel<T, Pack<T>::N> : gather_kernel<T, 1>;
        kernel<<<(unsigned)n_blocks, dim3(32, GATHER_WARPS), 0, cuda_stream(s)>>>(
            data_of<T>(y), y.ld, data_of<T>(x), x.ld, data_of<int32_t>(map.token_row), map.token_row.ld,
            data_of<int32_t>(map.row_token), n_rows, (int)map.token_row.shape[1], Tr, (int)D);
    });
    LAUNCH_CHECK();
}

template <typename T, int N>
static __global__ void __launch_bounds__(32 * ROW_WARPS)
    reduce_kernel(T *__restrict__ y, int64_t y_ld, const T *__restrict__ x, int64_t x_ld,
                  const int32_t *__restrict__ token_row, int64_t token_row_ld, int K, bool accumulate, int64_t n_tokens,
                  int D) {
    const int lane = threadIdx.x;
    const int64_t stride = (int64_t)gridDim.x * ROW_WARPS;
    for (int64_t t = (int64_t)blockIdx.x * ROW_WARPS + threadIdx.y; t < n_tokens; t += stride) {
        for (int c = lane * N; c - lane * N < D; c += 32 * N) { /* the lanes stay together */
            const bool is_column = c < D;
            float sum[N];
#pragma unroll
            for (int i = 0; i < N; i++) sum[i] = 0;
            for (int k_0 = 0; k_0 < K; k_0 += REDUCE_ROWS) {
                const int mine = lane < REDUCE_ROWS && k_0 + lane < K ? token_row[t * token_row_ld + k_0 + lane] : -1;
                Pack<T, N> pack[REDUCE_ROWS];
#pragma unroll
                for (int k = 0; k < REDUCE_ROWS; k++) {
                    const int64_t row = __shfl_sync(0xFFFFFFFFu, mine, k);
                    if (row >= 0 && is_column) pack[k] = load_pack<N>(x + row * x_ld + c);
                }
#pragma unroll
                for (int k = 0; k < REDUCE_ROWS; k++) {
                    if (__shfl_sync(0xFFFFFFFFu, mine, k) >= 0 && is_column) add_pack(sum, pack[k]);
                }
            }
            if (!is_column) continue;
            T *out = y + t * y_ld + c;
            if (accumulate) add_pack(sum, load_pack<N>(out));
            store_pack(out, pack_of<T>(sum));
        }
    }
}

void cuda_reduce_rows(Tensor y, Tensor x, MoeMap map, bool accumulate, Stream s) {
    const int64_t n_tokens = y.shape[0], D = y.shape[1], K = map.token_row.shape[1];
    CHECK(x.dtype == y.dtype && D < COLUMNS_MAX, "reduce_rows: %s to %s, %lld columns", dtype_name(x.dtype),
          dtype_name(y.dtype), (long long)D);
    if (n_tokens == 0) return;
    const unsigned grid = grid_for(ceil_div(n_tokens, ROW_WARPS), ROW_BLOCKS_PER_SM);
    const bool packed = rows_are_packed(y) && rows_are_packed(x);
    ACT_SWITCH(y.dtype, T, {
        auto kernel = packed ? reduce_kernel<T, Pack<T>::N> : reduce_kernel<T, 1>;
        kernel<<<grid, dim3(32, ROW_WARPS), 0, cuda_stream(s)>>>(data_of<T>(y), y.ld, data_of<T>(x), x.ld,
                                                                 data_of<int32_t>(map.token_row), map.token_row.ld,
                                                                 (int)K, accumulate, n_tokens, (int)D);
    });
    LAUNCH_CHECK();
}

static __global__ void unmap_kernel(float *__restrict__ dweights, int64_t dweights_ld,
                                    const float *__restrict__ drow_weight, const int32_t *__restrict__ token_row,
                                    int64_t token_row_ld, int K, int64_t n) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int64_t t = i / K, k = i % K;
    const int32_t row = token_row[t * token_row_ld + k];
    dweights[t * dweights_ld + k] = row < 0 ? 0 : drow_weight[row];
}

void cuda_unmap_weights(Tensor dweights, Tensor drow_weight, MoeMap map, Stream s) {
    const int64_t K = dweights.shape[1], n = dweights.shape[0] * K;
    if (n == 0) return;
    unmap_kernel<<<(unsigned)ceil_div(n, 256), 256, 0, cuda_stream(s)>>>(
        data_of<float>(dweights), dweights.ld, data_of<float>(drow_weight), data_of<int32_t>(map.token_row),
        map.token_row.ld, (int)K, n);
    LAUNCH_CHECK();
}
