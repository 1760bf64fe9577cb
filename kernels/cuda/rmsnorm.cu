/* As cpu/rmsnorm.c, but a row belongs to a warp or to a block, which keeps it in registers between the sum of
 * squares and the output; its sums are butterflies over the threads.
 *
 * Backward: one block owns the RMSNORM_PARTIAL_ROWS rows of one partial, several rows at a time, which do not wait for
 * each other; PER_SM blocks share an SM. Every thread copies its own columns of the next rows to shared memory while it
 * works on the current ones (cp.async, no barrier: nobody else reads them), and keeps its columns' sums for dw in
 * registers. A second kernel adds the partials. */
#include "tiles.cuh"

enum {
    FORWARD_KEPT = 4,       /* packs of a row that a thread keeps */
    FORWARD_THREADS = 224,  /* at most, for a row: 7168 columns in bf16; what is then left is read again */
    BACKWARD_PACKS = 4,     /* packs of a row that belong to a thread */
    BACKWARD_THREADS = 512, /* of an SM, at most */
    BACKWARD_STAGES = 4,    /* at most: the row at work and those on their way behind it */
    BACKWARD_WIDE_THREADS = 256,
    DW_WARPS = 32 /* a block adds up 32 columns of dw */
};

/* Sum over the threads of one row: blockDim.x of them, one warp or the whole block. */
__device__ static inline float row_sum(float x, float *shared) {
    return blockDim.x == 32 ? warp_sum(x) : block_sum(x, shared);
}

/* Zeros past the end of the row. */
template <int N, typename T> __device__ static inline Pack<T, N> load_column(const T *row, int col, int D) {
    if (col < D) return load_pack<N>(row + col);
    const float zero[N] = {0};
    return pack_of<T>(zero);
}

template <typename T, int N> __device__ static inline float squares_of(const Pack<T, N> &v) {
    float x[N], sum = 0;
    unpack(x, v);
#pragma unroll
    for (int i = 0; i < N; i++) sum += x[i] * x[i];
    return sum;
}

/* The columns at `col` of row t, normed: to y, and with TILES, as a part of their tile, to q; then y may be NULL, all
 * lanes of the warp call it, and 16 of them have a tile. */
template <bool TILES, typename T, int N>
__device__ static inline void store_normed(T *y, const Tiles &q, int64_t t, int col, int D, const Pack<T, N> &v,
                                           float inverse, const float *w) {
    const bool has = col < D;
    float x[N] = {0};
    if (has) {
        unpack(x, v);
        const Pack<float, N> factor = load_pack<N>(w + col);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = x[i] * inverse * factor.x[i];
    }
    const Pack<T, N> normed = pack_of<T>(x);
    if (has && (!TILES || y)) store_pack(y + col, normed);
    if constexpr (TILES) row_tile_store(q, t, col, normed, has);
}

/* The packs of a row that a thread keeps: x and the branch, rounded as r stores them. PLANES of the branch are read
 * together with x; -1: any number J, one after the other. */
template <int PLANES, typename T, int N>
__device__ static inline void load_sum(Pack<T, N> (&row)[FORWARD_KEPT], const T *x, const T *__restrict__ branch, int J,
                                       int64_t plane, int D) {
    const int first = threadIdx.x * N, step = blockDim.x * N;
    const auto load = [=](Pack<T, N>(&to)[FORWARD_KEPT], const T *from) {
#pragma unroll
        for (int k = 0; k < FORWARD_KEPT; k++) to[k] = load_column<N>(from, first + k * step, D);
    };
    load(row, x);
    if constexpr (PLANES != 0) {
        const int n_planes = PLANES > 0 ? PLANES : J;
        float sum[FORWARD_KEPT][N];
        Pack<T, N> added[PLANES > 0 ? PLANES : 1][FORWARD_KEPT];
        for (int j = 0; j < PLANES; j++) load(added[j], branch + j * plane);
#pragma unroll
        for (int k = 0; k < FORWARD_KEPT; k++) unpack(sum[k], row[k]);
#pragma unroll
        for (int j = 0; j < n_planes; j++) {
            if (PLANES < 0) load(added[0], branch + j * plane);
#pragma unroll
            for (int k = 0; k < FORWARD_KEPT; k++) add_pack(sum[k], added[PLANES > 0 ? j : 0][k]);
        }
#pragma unroll
        for (int k = 0; k < FORWARD_KEPT; k++) row[k] = pack_of<T>(sum[k]);
    }
}

/* One row: a warp, four rows a block; or a block. r NULL: not written; it may be x. */
template <typename T, int N, int PLANES, bool TILES>
static __global__ void __launch_bounds__(FORWARD_THREADS, PLANES == 2 ? 2 : 3)
    forward_kernel(T *r, int64_t r_ld, T *__restrict__ y, int64_t y_ld, Tiles q, float *__restrict__ rstd, const T *x,
                   int64_t x_ld, const T *__restrict__ branch, int J, const float *__restrict__ w, float eps,
                   int64_t n_rows, int D) {
    __shared__ float shared[32];
    const int64_t t = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, plane = n_rows * D;
    if (t >= n_rows) return; /* whole warps, in blocks without a barrier */
    const int first = threadIdx.x * N, step = blockDim.x * N, end = first + FORWARD_KEPT * step;
    const bool has_sum = r != NULL;
    x += t * x_ld, r += t * r_ld, branch += t * D;
    if (!TILES || y) y += t * y_ld;
    float squares = 0;

    Pack<T, N> row[FORWARD_KEPT];
    load_sum<PLANES>(row, x, branch, J, plane, D);
#pragma unroll
    for (int k = 0; k < FORWARD_KEPT; k++)
        if (has_sum && first + k * step < D) store_pack(r + first + k * step, row[k]);
#pragma unroll
    for (int k = 0; k < FORWARD_KEPT; k++) squares += squares_of(row[k]);
    for (int c = end; c < D; c += step) {
        Pack<T, N> rest = load_pack<N>(x + c);
        if (has_sum) {
            float sum[N];
            unpack(sum, rest);
            for (int j = 0; j < J; j++) add_pack(sum, load_pack<N>(branch + j * plane + c));
            rest = pack_of<T>(sum);
            store_pack(r + c, rest);
        }
        squares += squares_of(rest);
    }

    if (!rstd) return; /* the sum alone */
    const float inverse = 1.0f / sqrtf(row_sum(squares, shared) / (float)D + eps);
#pragma unroll
    for (int k = 0; k < FORWARD_KEPT; k++)
        if (TILES || first + k * step < D) store_normed<TILES>(y, q, t, first + k * step, D, row[k], inverse, w);
    const int lane_col = TILES ? threadIdx.x % 32 * N : 0; /* the lanes stay together */
    for (int c = end; c - lane_col < D; c += step)
        store_normed<TILES>(y, q, t, c, D, load_column<N>((has_sum ? r : x), c, D), inverse, w);
    if (threadIdx.x == 0) rstd[t] = inverse;
}

template <typename T, int N, bool TILES>
static void forward(Tensor r, Tensor y, Tensor q, Tensor rstd, Tensor x, Tensor branch, Tensor w, double eps,
                    Stream s) {
    const int64_t n_rows = x.shape[0], D = x.shape[1], most = FORWARD_THREADS;
    const int64_t threads = min(32 * ceil_div(max(D, (int64_t)1), 32 * N * FORWARD_KEPT), most);
    const dim3 block((unsigned)threads, threads == 32 ? 4 : 1);
    const int J = tensor_is_none(branch) ? 0 : (int)branch.shape[0];
    auto kernel = forward_kernel<T, N, -1, TILES>;
    if (N > 1 && J == 0) kernel = forward_kernel<T, N, 0, TILES>;
    if (N > 1 && J == 1) kernel = forward_kernel<T, N, 1, TILES>;
    if (N > 1 && J == 2) kernel = forward_kernel<T, N, 2, TILES>;
    kernel<<<(unsigned)ceil_div(n_rows, block.y), block, 0, cuda_stream(s)>>>(
        data_of<T>(r), r.ld, data_of<T>(y), y.ld, tiles_of(q), data_of<float>(rstd), data_of<T>(x), x.ld,
        data_of<T>(branch), J, data_of<float>(w), (float)eps, n_rows, (int)D);
    LAUNCH_CHECK();
}

void cuda_residual_rmsnorm_forward(Tensor r, Tensor y, Tensor q, Tensor rstd, Tensor x, Tensor branch, Tensor w,
                                   double eps, Stream s) {
    const bool tiles = !tensor_is_none(q);
    CHECK((tensor_is_none(y) ? tiles || tensor_is_none(rstd) : y.dtype == x.dtype) &&
              (tensor_is_none(r) || r.dtype == x.dtype) && (tensor_is_none(branch) || branch.dtype == x.dtype),
          "residual_rmsnorm_forward: %s to %s", dtype_name(x.dtype), dtype_name(y.dtype));
    CHECK(x.shape[1] < COLUMNS_MAX, "residual_rmsnorm_forward: %lld columns", (long long)x.shape[1]);
    if (x.shape[0] == 0) return;
    const bool packed = rows_are_packed(x) && (tensor_is_none(y) || rows_are_packed(y)) && is_aligned(w.data) &&
                        (tensor_is_none(r) || rows_are_packed(r)) &&
                        (tensor_is_none(branch) || rows_are_packed(branch));
    if (tiles) {
        CHECK(x.dtype == DTYPE_BF16 && packed, "residual_rmsnorm_forward: FP8 of %s, %lld columns", dtype_name(x.dtype),
              (long long)x.shape[1]);
        forward<bf16, LANE_COLUMNS, true>(r, y, q, rstd, x, branch, w, eps, s);
        return;
    }
    ACT_SWITCH(x.dtype, T, {
        if (packed)
            forward<T, Pack<T>::N, false>(r, y, q, rstd, x, branch, w, eps, s);
        else
            forward<T, 1, false>(r, y, q, rstd, x, branch, w, eps, s);
    });
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

typedef struct {
    void *dx;
    float *partial;
    const void *dy, *dr, *r; /* dr NULL: none; it may be dx */
    const float *rstd, *w;
    int64_t dx_ld, partial_ld, dy_ld, dr_ld, r_ld;
    int64_t n_rows;
    int J, D; /* planes of dy, n_rows * dy_ld elements apart; columns */
} NormGrad;

/* Sum over the blockDim.x threads of row threadIdx.y, which have a barrier of their own. `shared` has one float a warp
 * and is not the one of the call before, so one barrier is enough. */
__device__ static inline float rows_sum(float x, float *shared) {
    const int n_warps = blockDim.x / 32;
    x = warp_sum(x);
    if (n_warps == 1) return x;
    shared += threadIdx.y * n_warps;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
    asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
    x = 0;
    for (int i = 0; i < n_warps; i++) x += shared[i];
    return x;
}

/* partial[c] = the sum over the rows at work of their threads' dw, in order. `sum` has blockDim.y rows of `width`. */
template <int N>
__device__ static inline void store_partial(float *partial, const float (&dw)[BACKWARD_PACKS][N], float *sum, int width,
                                            int D) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < BACKWARD_PACKS; k++) {
        Pack<float, N> column;
#pragma unroll
        for (int i = 0; i < N; i++) column.x[i] = dw[k][i];
        *(Pack<float, N> *)(sum + threadIdx.y * width + (threadIdx.x + k * blockDim.x) * N) = column;
    }
    __syncthreads();
    for (int c = thread * 4; c < D; c += blockDim.x * blockDim.y * 4) {
        float total[4] = {0};
        for (int y = 0; y < (int)blockDim.y; y++) add_pack(total, load_pack<4>(sum + y * width + c));
        store_pack(partial + c, pack_of<float>(total));
    }
}

/* The rows of a block on their way through shared memory: (stage, tensor, pack, thread), where the tensors are the
 * planes of dy, then r, then dr. */
typedef struct {
    int4 *own; /* this thread's first pack */
    int n_tensors, n_threads;
    int64_t row_0, row_end;
} NormRing;

__device__ static inline NormRing norm_ring(const NormGrad &a, int4 *packs) {
    const int64_t row_0 = (int64_t)blockIdx.x * RMSNORM_PARTIAL_ROWS;
    return {packs + threadIdx.y * blockDim.x + threadIdx.x, a.J + 1 + (a.dr != NULL), (int)(blockDim.x * blockDim.y),
            row_0, min(row_0 + RMSNORM_PARTIAL_ROWS, a.n_rows)};
}
__device__ static inline int64_t ring_row(const NormRing &ring, int round) {
    return ring.row_0 + (int64_t)round * blockDim.y + threadIdx.y;
}
__device__ static inline int4 *ring_slot(const NormRing &ring, int stage, int tensor, int k) {
    return ring.own + ((stage * ring.n_tensors + tensor) * BACKWARD_PACKS + k) * ring.n_threads;
}
/* Asks for a row; past the end, an empty group of copies. */
template <typename T, int N>
__device__ static inline void ring_fetch(const NormRing &ring, const NormGrad &a, int64_t t, int stage) {
    const int first = threadIdx.x * N, step = blockDim.x * N;
    if (t < ring.row_end) {
        for (int j = 0; j < ring.n_tensors; j++) {
            const T *row = j < a.J    ? (const T *)a.dy + (j * a.n_rows + t) * a.dy_ld
                           : j == a.J ? (const T *)a.r + t * a.r_ld
                                      : (const T *)a.dr + t * a.dr_ld;
#pragma unroll
            for (int k = 0; k < BACKWARD_PACKS; k++)
                if (first + k * step < a.D) cp_async_16(ring_slot(ring, stage, j, k), row + first + k * step);
        }
    }
    cp_async_commit();
}
/* Pack k of the gradient of y, which is the sum of J planes, and of r. */
template <typename T, int N>
__device__ static inline void ring_read(float (&dy)[N], float (&r)[N], const NormRing &ring, int J, int stage, int k) {
    unpack(dy, load_pack<N>((const T *)ring_slot(ring, stage, 0, k)));
    for (int j = 1; j < J; j++) add_pack(dy, load_pack<N>((const T *)ring_slot(ring, stage, j, k)));
    unpack(r, load_pack<N>((const T *)ring_slot(ring, stage, J, k)));
}

/* Block p: rows [p * RMSNORM_PARTIAL_ROWS, ...), blockDim.y at a time. With n = r * rstd, the normalised row, and
 * g = the gradient of n:  dx = rstd * (g - n * mean(g n)) + dr,  dw = sum dy n. */
template <typename T, int N, int PER_SM>
static __global__ void __launch_bounds__(BACKWARD_THREADS / PER_SM, PER_SM) backward_kernel(NormGrad a, int n_stages) {
    extern __shared__ int4 packs[];
    __shared__ float shared[2][BACKWARD_THREADS / PER_SM / 32];
    let_next_kernel_come();
    const NormRing ring = norm_ring(a, packs);
    const int first = threadIdx.x * N, step = blockDim.x * N;
    const float inverse_D = 1.0f / (float)a.D;
    float dw[BACKWARD_PACKS][N], w[BACKWARD_PACKS][N];
#pragma unroll
    for (int k = 0; k < BACKWARD_PACKS; k++) {
        const Pack<float, N> column = load_column<N>(a.w, first + k * step, a.D);
#pragma unroll
        for (int i = 0; i < N; i++) dw[k][i] = 0, w[k][i] = column.x[i];
    }
    for (int round = 0; round < n_stages - 1; round++) ring_fetch<T, N>(ring, a, ring_row(ring, round), round);

    for (int round = 0;; round++) {
        const int64_t t = ring_row(ring, round);
        if (t >= ring.row_end) break; /* the threads of a row together */
        const int stage = round % n_stages, ahead = round + n_stages - 1;
        ring_fetch<T, N>(ring, a, ring_row(ring, ahead), ahead % n_stages);
        const float rstd = a.rstd[t];
        cp_async_wait(n_stages - 1);
        float dot = 0;
#pragma unroll
        for (int k = 0; k < BACKWARD_PACKS; k++) {
            if (first + k * step >= a.D) break;
            float dy[N], n[N];
            ring_read<T>(dy, n, ring, a.J, stage, k);
#pragma unroll
            for (int i = 0; i < N; i++) {
                n[i] *= rstd;
                dot += dy[i] * w[k][i] * n[i];
                dw[k][i] += dy[i] * n[i];
            }
        }
        const float mean = rows_sum(dot, shared[round % 2]) * inverse_D;
#pragma unroll
        for (int k = 0; k < BACKWARD_PACKS; k++) {
            if (first + k * step >= a.D) break;
            float dy[N], n[N];
            ring_read<T>(dy, n, ring, a.J, stage, k);
#pragma unroll
            for (int i = 0; i < N; i++) n[i] = rstd * (dy[i] * w[k][i] - n[i] * rstd * mean);
            if (a.dr) add_pack(n, load_pack<N>((const T *)ring_slot(ring, stage, a.J + 1, k)));
            store_pack((T *)a.dx + t * a.dx_ld + first + k * step, pack_of<T>(n));
        }
    }
    cp_async_wait<0>();
    store_partial(a.partial + blockIdx.x * a.partial_ld, dw, (float *)packs, step * BACKWARD_PACKS, a.D);
}

/* Rows of any width, at any address: one element at a time, a row read twice, dw's partial kept in memory. */
template <typename T> static __global__ void __launch_bounds__(BACKWARD_WIDE_THREADS) backward_wide_kernel(NormGrad a) {
    __shared__ float shared[32];
    const int64_t row_0 = (int64_t)blockIdx.x * RMSNORM_PARTIAL_ROWS;
    const int64_t row_end = row_0 + RMSNORM_PARTIAL_ROWS < a.n_rows ? row_0 + RMSNORM_PARTIAL_ROWS : a.n_rows;
    float *dw = a.partial + blockIdx.x * a.partial_ld;
    for (int64_t t = row_0; t < row_end; t++) {
        const T *row = (const T *)a.r + t * a.r_ld;
        const float rstd = a.rstd[t];
        auto gradient = [&](int c) {
            float g = 0;
            for (int j = 0; j < a.J; j++) g += to_f32(((const T *)a.dy)[(j * a.n_rows + t) * a.dy_ld + c]);
            return g;
        };
        float dot = 0;
        for (int c = threadIdx.x; c < a.D; c += blockDim.x) dot += gradient(c) * a.w[c] * to_f32(row[c]);
        const float along = block_sum(dot, shared) * rstd * rstd * rstd / (float)a.D;
        for (int c = threadIdx.x; c < a.D; c += blockDim.x) {
            const float g = gradient(c), x = to_f32(row[c]);
            float out = rstd * a.w[c] * g - along * x;
            if (a.dr) out = to_f32(((const T *)a.dr)[t * a.dr_ld + c]) + out;
            ((T *)a.dx)[t * a.dx_ld + c] = from_f32<T>(out);
            dw[c] = (t > row_0 ? dw[c] : 0) + g * x * rstd;
        }
    }
}

/* dw += the sum of the partials. Warp y adds partials y, y + DW_WARPS, ... of 32 columns, a column a lane; then it adds
 * the DW_WARPS sums of column y. */
static __global__ void __launch_bounds__(32 * DW_WARPS)
    dw_kernel(float *dw, const float *partial, int64_t ld, int64_t n_partials, int64_t D) {
    __shared__ float shared[DW_WARPS][32 + 1];
    wait_for_kernel_before();
    const int64_t c = (int64_t)blockIdx.x * 32 + threadIdx.x;
    float sum = 0;
    if (c < D) {
#pragma unroll 16
        for (int64_t p = threadIdx.y; p < n_partials; p += DW_WARPS) sum += partial[p * ld + c];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    sum = warp_sum(shared[threadIdx.x][threadIdx.y]);
    const int64_t mine = (int64_t)blockIdx.x * 32 + threadIdx.y;
    if (threadIdx.x == 0 && mine < D) dw[mine] += sum;
}
static_assert(DW_WARPS == 32, "dw_kernel turns a square of sums");

/* Narrow rows are many at once, in two blocks of an SM, and wait for their own data each at its own place; wide ones
 * are few, and a single block takes all of the shared memory for those on their way. False: the rows are too wide for
 * this kernel. */
template <typename T, int PER_SM>
static bool backward(const NormGrad *a, int64_t n_partials, int64_t row_threads, Stream s) {
    auto kernel = backward_kernel<T, Pack<T>::N, PER_SM>;
    const size_t most = shared_limit() - 1024;
    const size_t row_bytes = (size_t)(a->J + 1 + (a->dr != NULL)) * BACKWARD_PACKS * (size_t)row_threads * 16;
    const int64_t rows = min(BACKWARD_THREADS / PER_SM / row_threads, (int64_t)(most / row_bytes));
    if (rows == 0) return false;
    const size_t stage_bytes = (size_t)rows * row_bytes; /* holds all dw: two tensors and more */
    const int n_stages = PER_SM > 1 ? 1 : (int)min(most / stage_bytes, (size_t)BACKWARD_STAGES);
    static bool allowed;
    if (!allowed) allow_all_shared(kernel);
    allowed = true;
    kernel<<<(unsigned)n_partials, dim3((unsigned)row_threads, (unsigned)rows), (size_t)n_stages * stage_bytes,
             cuda_stream(s)>>>(*a, n_stages);
    return true;
}
template <typename T> static bool backward(const NormGrad *a, int64_t n_partials, Stream s) {
    const int64_t row_threads = 32 * ceil_div(a->D, 32 * Pack<T>::N * BACKWARD_PACKS);
    return row_threads <= BACKWARD_THREADS / 4 ? backward<T, 2>(a, n_partials, row_threads, s)
                                               : backward<T, 1>(a, n_partials, row_threads, s);
}

void cuda_residual_rmsnorm_backward(Tensor dx, Tensor dw, Tensor partial, Tensor dy, Tensor dr, Tensor r, Tensor rstd,
                                    Tensor w, Stream s) {
    CHECK(dx.dtype == r.dtype && dy.dtype == r.dtype && (tensor_is_none(dr) || dr.dtype == r.dtype),
          "residual_rmsnorm_backward: %s, %s, %s", dtype_name(dx.dtype), dtype_name(dy.dtype), dtype_name(r.dtype));
    const int64_t n_partials = partial.shape[0], D = r.shape[1];
    CHECK(D < COLUMNS_MAX, "residual_rmsnorm_backward: %lld columns", (long long)D);
    if (n_partials == 0 || D == 0) return;
    const NormGrad a = {dx.data,
                        data_of<float>(partial),
                        dy.data,
                        dr.data,
                        r.data,
                        data_of<float>(rstd),
                        data_of<float>(w),
                        dx.ld,
                        partial.ld,
                        dy.ld,
                        dr.ld,
                        r.ld,
                        r.shape[0],
                        dy.ndim == 3 ? (int)dy.shape[0] : 1,
                        (int)D};
    const bool packed = rows_are_packed(dx) && rows_are_packed(dy) && rows_are_packed(r) && is_aligned(w.data) &&
                        rows_are_packed(partial) && (tensor_is_none(dr) || rows_are_packed(dr));
    ACT_SWITCH(r.dtype, T, {
        if (!packed || !backward<T>(&a, n_partials, s))
            backward_wide_kernel<T><<<(unsigned)n_partials, BACKWARD_WIDE_THREADS, 0, cuda_stream(s)>>>(a);
    });
    LAUNCH_CHECK();
    launch_behind(dw_kernel, (unsigned)ceil_div(D, 32), dim3(32, DW_WARPS), 0, cuda_stream(s), data_of<float>(dw),
                  data_of<float>(partial), partial.ld, n_partials, D);
}
