/* As cpu/grouped_gemm.c, but the experts' products are cut into tiles, and a fixed number of blocks walks the tiles
 * of all experts: how many there are follows from expert_start, which is read on the device. Rows of an expert start
 * at multiples of GROUP_ALIGN, so a tile of rows never holds two experts. Each element is summed by one thread over
 * ascending k, so the bits do not depend on the walk.
 *
 * BF16: tiles of 128 x 256 or 128 x 128 by mma.sync, 64 x 64 for a warp. Operands come through a ring of STAGES
 * pieces of 64 k in shared memory, filled by cp.async; operands that lie with k across the rows are transposed by
 * ldmatrix. The next tile's first pieces are on their way while a finished one is written out of the registers. F32:
 * tiles of 64 x 64 by plain multiply-add. */
#include "grouped.cuh"
#include "mma.cuh"

static const int ROW_TILE = 128, PIECE = 64, STAGES = 3, START_MAX = 4096;
static_assert((int)GROUP_ALIGN % ROW_TILE == 0 && ROW_TILE % PIECE == 0, "tiles of rows");

/* Terms of a sum. */
template <GemmKind KIND> __device__ int tile_depth(const Tile &t, const Grouped &g) {
    return KIND == GEMM_WGRAD ? t.n_rows : g.k;
}

/* First element of the operands of a tile, at k. FPROP a (m, k) b (n, k), DGRAD a (m, k) b (k, n), WGRAD a (k, m) b
 * (k, n): row-major as written. */
template <GemmKind KIND, typename T> __device__ const T *tile_a(const Tile &t, const Grouped &g, int k) {
    const T *a = (const T *)g.a;
    if (KIND == GEMM_WGRAD) return a + (int64_t)(t.row0 + k) * g.a_ld + t.m0;
    return a + (int64_t)(t.row0 + t.m0) * g.a_ld + k;
}
template <GemmKind KIND, typename T> __device__ const T *tile_b(const Tile &t, const Grouped &g, int k) {
    const T *b = (const T *)g.b;
    if (KIND == GEMM_FPROP) return b + t.expert * g.plane + (int64_t)t.n0 * g.b_ld + k;
    if (KIND == GEMM_DGRAD) return b + t.expert * g.plane + (int64_t)k * g.b_ld + t.n0;
    return b + (int64_t)(t.row0 + k) * g.b_ld + t.n0;
}

/* Row of y that is the tile's first, and how many it has. */
template <GemmKind KIND> __device__ int64_t tile_y_row(const Tile &t) {
    return KIND == GEMM_WGRAD ? t.m0 : t.row0 + t.m0;
}
template <GemmKind KIND, typename Y> __device__ Y *tile_y(const Tile &t, const Grouped &g) {
    return (Y *)g.y + (KIND == GEMM_WGRAD ? t.expert * g.plane : 0);
}

/* ---- BF16 -------------------------------------------------------------------------------------------------------- */

/* Shared memory of one piece: a, then b. A tile TN wide has TN threads. */
template <int TN> struct Ring {
    static const int A_BYTES = ROW_TILE * PIECE * 2, BYTES = A_BYTES + TN * PIECE * 2;
    static size_t bytes(int n_experts) {
        return (size_t)(STAGES * BYTES) + (size_t)(n_experts + 1) * sizeof(int32_t);
    }
};

template <GemmKind KIND, int TN, bool PACKED>
__device__ inline void piece_load(uint32_t stage, const Tile &t, const Grouped &g, int k) {
    const bf16 *a = tile_a<KIND, bf16>(t, g, k), *b = tile_b<KIND, bf16>(t, g, k);
    const uint32_t stage_b = stage + Ring<TN>::A_BYTES;
    const int thread = threadIdx.x;
    if (KIND == GEMM_WGRAD)
        tile_load<PIECE, ROW_TILE, TN, PACKED>(stage, a, g.a_ld, PIECE, g.m - t.m0, thread);
    else
        tile_load<ROW_TILE, PIECE, TN, PACKED>(stage, a, g.a_ld, ROW_TILE, g.k - k, thread);
    if (KIND == GEMM_FPROP)
        tile_load<TN, PIECE, TN, PACKED>(stage_b, b, g.b_ld, g.n - t.n0, g.k - k, thread);
    else
        tile_load<PIECE, TN, TN, PACKED>(stage_b, b, g.b_ld, KIND == GEMM_WGRAD ? PIECE : g.k - k, g.n - t.n0, thread);
}

/* The first STAGES - 1 pieces of a tile, a group each, empty where the sum is shorter. */
template <GemmKind KIND, int TN, bool PACKED>
__device__ inline void tile_start(uint32_t ring, const Tile &t, const Grouped &g) {
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
        if (i * PIECE < tile_depth<KIND>(t, g))
            piece_load<KIND, TN, PACKED>(ring + i * Ring<TN>::BYTES, t, g, i * PIECE);
        cp_async_commit();
    }
}

/* A warp's operands of 16 k: 64 rows of a, 64 columns of b. */
typedef struct {
    uint32_t a[4][4], b[4][4];
} Operands;

/* The places of a warp's operands within a piece. */
template <GemmKind KIND, int TN> struct Places {
    static const bool A_IS_TURNED = KIND == GEMM_WGRAD, B_IS_TURNED = KIND != GEMM_FPROP;
    static const int A_COLS = A_IS_TURNED ? ROW_TILE : PIECE, B_COLS = B_IS_TURNED ? TN : PIECE;
    Fragment<A_COLS> a;
    Fragment<B_COLS> b;

    __device__ Places(uint32_t ring, int warp_m, int warp_n) {
        const uint32_t ring_b = ring + Ring<TN>::A_BYTES;
        const int lane = threadIdx.x % 32;
        if (A_IS_TURNED)
            a = Fragment<A_COLS>::columns_first(ring, 0, warp_m * 8, lane);
        else
            a = Fragment<A_COLS>::rows_first(ring, warp_m * 64, 0, lane);
        if (B_IS_TURNED)
            b = Fragment<B_COLS>::rows_first(ring_b, 0, warp_n * 8, lane);
        else
            b = Fragment<B_COLS>::columns_first(ring_b, warp_n * 64, 0, lane);
    }
    /* step: which 16 of the piece's 64 k. */
    __device__ void load(Operands &to, uint32_t stage_offset, int step) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (A_IS_TURNED)
                ldmatrix_trans(to.a[i], a.at(step * 16, i * 2) + stage_offset);
            else
                ldmatrix(to.a[i], a.at(i * 16, step * 2) + stage_offset);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (B_IS_TURNED)
                ldmatrix_trans(to.b[i], b.at(step * 16, i * 2) + stage_offset);
            else
                ldmatrix(to.b[i], b.at(i * 16, step * 2) + stage_offset);
        }
    }
};

/* sum = a b of one tile, whose first pieces have been started. Operands are loaded one step ahead of their use. The
 * barrier before the last step of a piece says two things: the next piece has arrived, and nobody reads this one any
 * more, for its last operands are in registers; its place is filled again from the first step of the next on. */
template <GemmKind KIND, int TN, bool PACKED>
__device__ inline void tile_sum(float (&sum)[4][8][4], uint32_t ring, const Places<KIND, TN> &places, const Tile &t,
                                const Grouped &g) {
    const int depth = tile_depth<KIND>(t, g);
    Operands operands[2];
    int stage = 0, stage_filled = STAGES - 1;
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    places.load(operands[0], 0, 0);
    for (int k = 0; k < depth; k += PIECE) {
#pragma unroll
        for (int step = 0; step < 4; step++) {
            if (step == 0) {
                const int ahead = k + (STAGES - 1) * PIECE;
                if (ahead < depth) piece_load<KIND, TN, PACKED>(ring + stage_filled * Ring<TN>::BYTES, t, g, ahead);
                cp_async_commit();
                stage_filled = stage_filled + 1 == STAGES ? 0 : stage_filled + 1;
            }
            if (step == 3) {
                stage = stage + 1 == STAGES ? 0 : stage + 1;
                cp_async_wait<STAGES - 2>();
                __syncthreads();
            }
            /* Behind the last piece this reads what nobody uses. */
            places.load(operands[(step + 1) % 2], stage * Ring<TN>::BYTES, (step + 1) % 4);
            const Operands &o = operands[step % 2];
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) mma(sum[i][j], o.a[i], o.b[j / 2][j % 2 * 2], o.b[j / 2][j % 2 * 2 + 1]);
        }
    }
}

/* Writes a warp's 64 x 64 sums, rounded. Four lanes exchange columns, so that each writes 16 bytes. */
template <GemmKind KIND>
__device__ inline void tile_write(const float (&sum)[4][8][4], int warp_m, int warp_n, const Tile &t, const Grouped &g,
                                  bool is_packed) {
    const int lane = threadIdx.x % 32;
    bf16 *y = tile_y<KIND, bf16>(t, g);
#pragma unroll
    for (int i = 0; i < 8; i++) { /* 16 rows and which half of them */
        const int64_t row = tile_y_row<KIND>(t) + warp_m * 64 + i * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t v[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float *s = sum[i / 2][j * 4 + c] + i % 2 * 2;
                v[c] = pack_bf16(s[0], s[1]);
            }
            quad_transpose(v);
            const int col = t.n0 + warp_n * 64 + (j * 4 + lane % 4) * 8;
            bf16 *to = y + row * g.y_ld + col;
            if (is_packed && col + 8 <= g.n) {
                *reinterpret_cast<int4 *>(to) = make_int4((int)v[0], (int)v[1], (int)v[2], (int)v[3]);
                continue;
            }
#pragma unroll
            for (int c = 0; c < 8; c++)
                if (col + c < g.n) to[c] = __ushort_as_bfloat16((unsigned short)(v[c / 2] >> (c % 2 * 16)));
        }
    }
}

/* Adds a warp's 64 x 64 sums. A lane reads its part of a row before it writes any: several loads are under way at
 * once. */
__device__ inline void tile_add(const float (&sum)[4][8][4], int warp_m, int warp_n, const Tile &t, const Grouped &g,
                                bool is_paired) {
    const int lane = threadIdx.x % 32, col0 = t.n0 + warp_n * 64 + lane % 4 * 2;
    float *y = tile_y<GEMM_WGRAD, float>(t, g);
#pragma unroll
    for (int i = 0; i < 8; i++) { /* 16 rows and which half of them */
        const int row = t.m0 + warp_m * 64 + i * 8 + lane / 4;
        if (row >= g.m) continue;
        float *to = y + row * g.y_ld + col0, old[8][2];
        if (is_paired) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (col0 + j * 8 >= g.n) continue;
                const float2 pair = *reinterpret_cast<const float2 *>(to + j * 8);
                old[j][0] = pair.x, old[j][1] = pair.y;
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float *s = sum[i / 2][j] + i % 2 * 2;
                if (col0 + j * 8 < g.n)
                    *reinterpret_cast<float2 *>(to + j * 8) = make_float2(old[j][0] + s[0], old[j][1] + s[1]);
            }
        } else {
#pragma unroll
            for (int j = 0; j < 16; j++)
                if (col0 + j / 2 * 8 + j % 2 < g.n) to[j / 2 * 8 + j % 2] += sum[i / 2][j / 2][i % 2 * 2 + j % 2];
        }
    }
}

/* is_packed: rows of y begin at multiples of 16 bytes, of dw at multiples of 8 and have an even width. */
template <GemmKind KIND, int TN, bool PACKED>
__global__ __launch_bounds__(TN, TN == 128 ? 2 : 1) void grouped_bf16_kernel(Grouped g, bool is_packed) {
    extern __shared__ __align__(128) char shared[];
    int32_t *start = reinterpret_cast<int32_t *>(shared + STAGES * Ring<TN>::BYTES);
    const uint32_t ring = shared_address(shared);
    const int warp_m = threadIdx.x / 32 % 2, warp_n = threadIdx.x / 64;
    start_load(start, g);
    Tile t = {};
    t.at = blockIdx.x;
    if (!tile_seek<KIND, ROW_TILE, TN>(&t, g, start)) return;
    tile_start<KIND, TN, PACKED>(ring, t, g);
    const Places<KIND, TN> places(ring, warp_m, warp_n);
    for (bool more = true; more;) {
        float sum[4][8][4] = {};
        tile_sum<KIND, TN, PACKED>(sum, ring, places, t, g);
        __syncthreads(); /* the ring is free */
        const Tile done = t;
        t.at += (int)gridDim.x;
        more = tile_seek<KIND, ROW_TILE, TN>(&t, g, start);
        if (more) tile_start<KIND, TN, PACKED>(ring, t, g);
        if (KIND == GEMM_WGRAD)
            tile_add(sum, warp_m, warp_n, done, g, is_packed);
        else
            tile_write<KIND>(sum, warp_m, warp_n, done, g, is_packed);
    }
}

/* ---- F32 --------------------------------------------------------------------------------------------------------- */

static const int F32_TILE = 64, F32_PIECE = 16, F32_THREADS = 256;

/* to[k][i] = F32_PIECE x F32_TILE elements of an operand, zero past n_k and n. K_IS_INNER: src[i * ld + k], else
 * src[k * ld + i]. Neighbouring threads read neighbours in memory. */
template <bool K_IS_INNER>
__device__ inline void f32_load(float (*to)[F32_TILE + 1], const float *src, int64_t ld, int n_k, int n) {
    for (int at = threadIdx.x; at < F32_PIECE * F32_TILE; at += F32_THREADS) {
        const int k = K_IS_INNER ? at % F32_PIECE : at / F32_TILE, i = K_IS_INNER ? at / F32_PIECE : at % F32_TILE;
        to[k][i] = k < n_k && i < n ? src[K_IS_INNER ? i * ld + k : k * ld + i] : 0;
    }
}

/* A thread owns rows y + 16 i and columns x + 16 j of the tile. */
template <GemmKind KIND> __global__ __launch_bounds__(F32_THREADS) void grouped_f32_kernel(Grouped g) {
    extern __shared__ __align__(128) char shared[];
    __shared__ float a[F32_PIECE][F32_TILE + 1], b[F32_PIECE][F32_TILE + 1];
    int32_t *start = reinterpret_cast<int32_t *>(shared);
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    start_load(start, g);
    Tile t = {};
    for (t.at = blockIdx.x; tile_seek<KIND, F32_TILE, F32_TILE>(&t, g, start); t.at += (int)gridDim.x) {
        float sum[4][4] = {};
        const int depth = tile_depth<KIND>(t, g), m = KIND == GEMM_WGRAD ? g.m - t.m0 : F32_TILE, n = g.n - t.n0;
        for (int k = 0; k < depth; k += F32_PIECE) {
            f32_load<KIND != GEMM_WGRAD>(a, tile_a<KIND, float>(t, g, k), g.a_ld, depth - k, m);
            f32_load<KIND == GEMM_FPROP>(b, tile_b<KIND, float>(t, g, k), g.b_ld, depth - k, n);
            __syncthreads();
#pragma unroll
            for (int step = 0; step < F32_PIECE; step++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[i][j] = fmaf(a[step][y + 16 * i], b[step][x + 16 * j], sum[i][j]);
            __syncthreads();
        }
        float *out = tile_y<KIND, float>(t, g) + tile_y_row<KIND>(t) * g.y_ld + t.n0;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int row = y + 16 * i, col = x + 16 * j;
                if (row >= m || col >= n) continue;
                float *to = out + row * g.y_ld + col;
                *to = KIND == GEMM_WGRAD ? *to + sum[i][j] : sum[i][j];
            }
    }
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* max_tiles: no more blocks than tiles there can be. */
template <GemmKind KIND, int TN, bool PACKED>
static void launch_bf16(const Grouped &g, bool is_packed, int64_t max_tiles, cudaStream_t stream) {
    const size_t bytes = Ring<TN>::bytes(g.n_experts);
    static size_t allowed;
    if (allowed < bytes) {
        allow_shared(grouped_bf16_kernel<KIND, TN, PACKED>, bytes);
        allowed = bytes;
    }
    const int64_t blocks = (TN == 128 ? 2 : 1) * (int64_t)cuda_context()->n_sms;
    const unsigned grid = (unsigned)(blocks < max_tiles ? blocks : max_tiles);
    grouped_bf16_kernel<KIND, TN, PACKED><<<grid, TN, bytes, stream>>>(g, is_packed);
    LAUNCH_CHECK();
}

template <GemmKind KIND> static void launch_f32(const Grouped &g, int64_t max_tiles, cudaStream_t stream) {
    const int64_t blocks = 8 * (int64_t)cuda_context()->n_sms;
    const unsigned grid = (unsigned)(blocks < max_tiles ? blocks : max_tiles);
    const size_t bytes = (size_t)(g.n_experts + 1) * sizeof(int32_t);
    grouped_f32_kernel<KIND><<<grid, F32_THREADS, bytes, stream>>>(g);
    LAUNCH_CHECK();
}

/* Tiles there can be at most, of tm x tn; the device counts them in 32 bits. */
static int64_t tiles_max(const Grouped &g, int64_t rows, int64_t tm, int64_t tn) {
    const int64_t n = ceil_div(rows, tm) * ceil_div(g.n, tn);
    CHECK(n < INT32_MAX, "%lld tiles", (long long)n);
    return n;
}

/* Rows begin at multiples of 16 bytes, so that they can be copied in the background. Their last chunk may be a part. */
static bool is_copied_packed(const void *data, int64_t ld) {
    return (uintptr_t)data % 16 == 0 && ld % 8 == 0;
}

template <GemmKind KIND> static void grouped_rows(const Grouped &g, Dtype dtype, int64_t rows, cudaStream_t stream) {
    if (dtype == DTYPE_F32) {
        launch_f32<KIND>(g, tiles_max(g, rows, F32_TILE, F32_TILE), stream);
        return;
    }
    const bool reads = is_copied_packed(g.a, g.a_ld) && is_copied_packed(g.b, g.b_ld);
    const bool writes = is_copied_packed(g.y, g.y_ld);
    /* The wide tile moves fewer bytes for a product, unless much of it would lie past the last column. */
    const bool is_wide = ceil_div(g.n, 256) * 256 * 16 <= ceil_div(g.n, 128) * 128 * 17;
    const int64_t max_tiles = tiles_max(g, rows, ROW_TILE, is_wide ? 256 : 128);
    if (!reads)
        launch_bf16<KIND, 128, false>(g, writes, tiles_max(g, rows, ROW_TILE, 128), stream);
    else if (is_wide && Ring<256>::bytes(g.n_experts) <= shared_limit())
        launch_bf16<KIND, 256, true>(g, writes, max_tiles, stream);
    else
        launch_bf16<KIND, 128, true>(g, writes, tiles_max(g, rows, ROW_TILE, 128), stream);
}

static Grouped grouped_make(Tensor y, Tensor a, Tensor b, Tensor w, Tensor expert_start) {
    Grouped g = {};
    g.y = y.data, g.a = a.data, g.b = b.data;
    g.y_ld = y.ld, g.a_ld = a.ld, g.b_ld = b.ld;
    g.plane = w.shape[1] * w.shape[2];
    g.start = data_of<int32_t>(expert_start);
    CHECK(w.shape[0] < START_MAX && y.shape[0] < INT32_MAX && a.shape[0] < INT32_MAX,
          "grouped: %lld experts, %lld rows", (long long)w.shape[0], (long long)a.shape[0]);
    CHECK(w.shape[1] < INT32_MAX && w.shape[2] < INT32_MAX, "grouped: w is %lld x %lld", (long long)w.shape[1],
          (long long)w.shape[2]);
    g.n_experts = (int)w.shape[0];
    return g;
}

void cuda_grouped_gemm(Tensor y, Tensor x, Tensor w, Tensor expert_start, GemmKind kind, Stream s) {
    const bool fp8 = x.dtype == DTYPE_E4M3;
    CHECK(x.dtype == w.dtype && (fp8 || x.dtype == y.dtype), "grouped_gemm: %s = %s by %s", dtype_name(y.dtype),
          dtype_name(x.dtype), dtype_name(w.dtype));
    if (tensor_numel(y) == 0 || w.shape[0] == 0) return;
    if (fp8) {
        grouped_gemm_fp8(y, x, w, expert_start, cuda_stream(s));
        return;
    }
    Grouped g = grouped_make(y, x, w, w, expert_start);
    g.n = (int)y.shape[1], g.k = (int)x.shape[1];
    if (kind == GEMM_FPROP)
        grouped_rows<GEMM_FPROP>(g, x.dtype, y.shape[0], cuda_stream(s));
    else
        grouped_rows<GEMM_DGRAD>(g, x.dtype, y.shape[0], cuda_stream(s));
}

void cuda_grouped_wgrad(Tensor dw, Tensor dy, Tensor x, Tensor expert_start, Stream s) {
    CHECK(x.dtype == dy.dtype, "grouped_wgrad: %s by %s", dtype_name(dy.dtype), dtype_name(x.dtype));
    if (tensor_numel(dw) == 0 || tensor_numel(x) == 0) return;
    if (x.dtype == DTYPE_E4M3) {
        grouped_wgrad_fp8(dw, dy, x, expert_start, cuda_stream(s));
        return;
    }
    Grouped g = grouped_make(dw, dy, x, dw, expert_start);
    g.m = (int)dw.shape[1], g.n = (int)dw.shape[2];
    const int64_t tile = x.dtype == DTYPE_F32 ? F32_TILE : ROW_TILE;
    const int64_t max_tiles = g.n_experts * tiles_max(g, g.m, tile, tile);
    CHECK(max_tiles < INT32_MAX, "grouped_wgrad: %lld tiles", (long long)max_tiles);
    const bool is_paired = (uintptr_t)dw.data % 8 == 0 && g.n % 2 == 0;
    if (x.dtype == DTYPE_F32)
        launch_f32<GEMM_WGRAD>(g, max_tiles, cuda_stream(s));
    else if (is_copied_packed(g.a, g.a_ld) && is_copied_packed(g.b, g.b_ld))
        launch_bf16<GEMM_WGRAD, 128, true>(g, is_paired, max_tiles, cuda_stream(s));
    else
        launch_bf16<GEMM_WGRAD, 128, false>(g, is_paired, max_tiles, cuda_stream(s));
}
