/* Attention by mma.sync, for attention.cu: BF16, heads of whole 16-byte chunks, padded with zeros to DQK and DV
 * columns.
 *
 * One block of threads has a block of rows of one head in shared memory and walks 64 rows of the other side at a
 * time, loaded by cp.async while the ones before are used. Scores stay in registers; probabilities and the gradients
 * of scores are rounded to BF16 where they become operands. Exponentials are powers of two, with log2(e) in the
 * scale. */
#ifndef TRAIN_MOE_ATTENTION_MMA_CUH
#define TRAIN_MOE_ATTENTION_MMA_CUH

#include "mma.cuh"

static const int COLUMNS = 64;   /* keys (for dk and dv: queries) of one step */
static const int HEAD_GROUP = 8; /* heads whose blocks run together, so that their keys and values stay in L2 */
static const float LOG2_E = 1.4426950408889634f;

typedef struct {
    int n_tokens, n_heads, width_qk, width_v; /* T, H, Dqk, Dv */
    float scale;
    const int32_t *doc_start;
} Attention;

/* A matrix: its rows are ld apart. */
template <typename T> struct Rows {
    T *data;
    int64_t ld;
};

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

/* Which block of rows and which head a block of threads works for: groups of heads, in them block by block. */
typedef struct {
    int block, head;
} Work;

__device__ inline Work work_of(const Attention &a, int n_blocks) {
    const int group = (int)blockIdx.x / (HEAD_GROUP * n_blocks), i = (int)blockIdx.x - group * HEAD_GROUP * n_blocks;
    const int n = min(HEAD_GROUP, a.n_heads - group * HEAD_GROUP);
    const Work w = {i / n, group * HEAD_GROUP + i % n};
    return w;
}

/* Smallest and largest first key of `n` queries, of which n_valid exist, computed by each warp from doc_start. */
typedef struct {
    int least, last;
} Starts;

__device__ inline Starts starts_of(const int32_t *doc_start, int n, int n_valid) {
    Starts s = {INT32_MAX, 0};
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        if (i >= n_valid) continue;
        s.least = min(s.least, doc_start[i]);
        s.last = max(s.last, doc_start[i]);
    }
    s.least = __reduce_min_sync(0xFFFFFFFFu, s.least);
    s.last = __reduce_max_sync(0xFFFFFFFFu, s.last);
    return s;
}

/* Writes a warp's (MT * 16) x (NT * 8) sums, times factor[i] for 8 rows, as BF16. Eight columns j lie at
 * COLS_AT * (j / 2) + j % 2 * 8; columns from `width` on and rows from n_rows on do not exist. `to` is the corner. */
template <int MT, int NT, int COLS_AT>
__device__ inline void rows_write(bf16 *to, int64_t ld, int n_rows, int width, const float (&sum)[MT][NT][4],
                                  const float (&factor)[MT * 2]) {
    static_assert(NT % 4 == 0, "four lanes exchange four times eight columns");
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        const int row = i * 8 + lane / 4;
#pragma unroll
        for (int j = 0; j < NT; j += 4) {
            uint32_t v[4];
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float *s = sum[i / 2][j + c] + i % 2 * 2;
                v[c] = pack_bf16(factor[i] * s[0], factor[i] * s[1]);
            }
            quad_transpose(v);
            const int mine = j + lane % 4, col = COLS_AT * (mine / 2) + mine % 2 * 8;
            if (row < n_rows && col < width)
                *reinterpret_cast<int4 *>(to + row * ld + col) = make_int4((int)v[0], (int)v[1], (int)v[2], (int)v[3]);
        }
    }
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Four warps of MT * 16 queries. */
template <int DQK, int DV, int MT> struct Forward {
    static const int THREADS = 128, ROWS = 64 * MT;
    static const int Q = 0, K = Q + ROWS * DQK * 2, V = K + COLUMNS * DQK * 2, STARTS = V + COLUMNS * DV * 2;
    static const int BYTES = STARTS + ROWS * 4;
};

/* What the softmax of a lane's rows needs; row i is g + 8 (i % 2) of the 16 queries i / 2. */
template <int MT> struct Softmax { float largest[MT * 2], sum[MT * 2]; /* sum: of this lane's columns */ };

/* Scores of one block to exp(scale (s - largest)); earlier output shrinks with the maximum. */
template <int MT, int NO>
__device__ inline void softmax_block(float (&s)[MT][COLUMNS / 8][4], float (&out)[MT][NO][4], Softmax<MT> &m,
                                     float scale) {
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        float top = m.largest[i];
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
            top = fmaxf(top, fmaxf(s[i / 2][j][i % 2 * 2], s[i / 2][j][i % 2 * 2 + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
        const float shrink = exp2_fast((m.largest[i] - top) * scale), shift = top * scale;
        m.largest[i] = top;
        float sum = m.sum[i] * shrink;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int c = i % 2 * 2; c < i % 2 * 2 + 2; c++) {
                s[i / 2][j][c] = exp2_fast(s[i / 2][j][c] * scale - shift);
                sum += s[i / 2][j][c];
            }
        m.sum[i] = sum;
#pragma unroll
        for (int j = 0; j < NO; j++) out[i / 2][j][i % 2 * 2] *= shrink, out[i / 2][j][i % 2 * 2 + 1] *= shrink;
    }
}

/* Scores of keys that a query may not see become -infinity. first: the block's first query. */
template <int MT>
__device__ inline void mask_scores(float (&s)[MT][COLUMNS / 8][4], const int32_t *starts, int first, int key) {
    const int thread = thread_again(), row = thread / 32 * MT * 16 + thread % 32 / 4, col = key + thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        const int last = first + row + i * 8 - col, least = starts[row + i * 8] - col; /* columns that the query sees */
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)
                if ((j * 8 + c > last) | (j * 8 + c < least)) s[i / 2][j][i % 2 * 2 + c] = -INFINITY;
    }
}

/* s = q k^T for the warp's queries and the block's keys. */
template <int DQK, int MT>
__device__ inline void scores(float (&s)[MT][COLUMNS / 8][4], uint32_t q_tile, uint32_t k_tile) {
    const int thread = thread_again(), lane = thread % 32;
    const Fragment<DQK> q = Fragment<DQK>::rows_first(q_tile, thread / 32 * MT * 16, 0, lane);
    const Fragment<DQK> k = Fragment<DQK>::columns_first(k_tile, 0, 0, lane);
#pragma unroll
    for (int d = 0; d < DQK / 8; d += 2) {
        uint32_t a[MT][4], b[4];
#pragma unroll
        for (int i = 0; i < MT; i++) ldmatrix(a[i], q.at(i * 16, d));
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; j++) {
            ldmatrix(b, k.at(j * 16, d));
#pragma unroll
            for (int i = 0; i < MT; i++) {
                mma(s[i][j * 2], a[i], b[0], b[1]);
                mma(s[i][j * 2 + 1], a[i], b[2], b[3]);
            }
        }
    }
}

/* Probabilities, rounded: the layout of sums is that of operand A of 16 keys, two words of each eight. */
template <int MT>
__device__ inline void round_probabilities(uint32_t (&p)[MT][COLUMNS / 16][4], const float (&s)[MT][COLUMNS / 8][4]) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS / 4; c++)
            p[i][c / 4][c % 4] = pack_bf16(s[i][c / 2][c % 2 * 2], s[i][c / 2][c % 2 * 2 + 1]);
}

/* out += p v. */
template <int DV, int MT>
__device__ inline void weigh_values(float (&out)[MT][DV / 8][4], const uint32_t (&p)[MT][COLUMNS / 16][4],
                                    uint32_t v_tile) {
    const Fragment<DV> v = Fragment<DV>::rows_first(v_tile, 0, 0, thread_again() % 32);
#pragma unroll
    for (int key = 0; key < COLUMNS; key += 16)
#pragma unroll
        for (int j = 0; j < DV / 16; j++) {
            uint32_t b[4];
            ldmatrix_trans(b, v.at(key, j * 2));
#pragma unroll
            for (int i = 0; i < MT; i++) {
                mma(out[i][j * 2], p[i][key / 16], b[0], b[1]);
                mma(out[i][j * 2 + 1], p[i][key / 16], b[2], b[3]);
            }
        }
}

/* o = out / sum and lse of the block's rows. The sums of four lanes make that of a row. */
template <int MT, int NO>
__device__ inline void forward_write(const Attention &a, const Rows<bf16> &o, const Rows<float> &lse, int head,
                                     int first, int n_rows, const float (&out)[MT][NO][4], const Softmax<MT> &m) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = warp * MT * 16 + lane / 4;
    float factor[MT * 2];
#pragma unroll
    for (int i = 0; i < MT * 2; i++) {
        float sum = m.sum[i];
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        factor[i] = 1 / sum;
        if (lane % 4 == 0 && row + i * 8 < n_rows)
            lse.data[(first + row + i * 8) * lse.ld + head] = m.largest[i] * a.scale + logf(sum);
    }
    const int64_t corner = first + warp * MT * 16;
    rows_write<MT, NO, 16>(o.data + corner * o.ld + head * a.width_v, o.ld, n_rows - warp * MT * 16, a.width_v, out,
                           factor);
}

template <int DQK, int DV, int MT>
__global__ __launch_bounds__(128, DQK + DV <= 320 ? 2 : 1) void attention_forward_kernel(
    Attention a, Rows<bf16> o, Rows<float> lse, Rows<const bf16> q, Rows<const bf16> k, Rows<const bf16> v) {
    typedef Forward<DQK, DV, MT> F;
    extern __shared__ __align__(128) char shared[];
    const uint32_t tiles = shared_address(shared);
    int32_t *starts = reinterpret_cast<int32_t *>(shared + F::STARTS);
    const int n_blocks = (a.n_tokens + F::ROWS - 1) / F::ROWS;
    const Work w = work_of(a, n_blocks);
    const int first = (n_blocks - 1 - w.block) * F::ROWS, n_rows = min(F::ROWS, a.n_tokens - first); /* longest first */
    const auto keys_load = [&](int key) {
        tile_load<COLUMNS, DQK, F::THREADS, true>(tiles + F::K, k.data + key * k.ld + w.head * a.width_qk, k.ld,
                                                  a.n_tokens - key, a.width_qk, thread_again());
    };
    const auto values_load = [&](int key) {
        tile_load<COLUMNS, DV, F::THREADS, true>(tiles + F::V, v.data + key * v.ld + w.head * a.width_v, v.ld,
                                                 a.n_tokens - key, a.width_v, thread_again());
    };

    for (int i = threadIdx.x; i < F::ROWS; i += F::THREADS) starts[i] = i < n_rows ? a.doc_start[first + i] : first + i;
    __syncthreads();
    const Starts limits = starts_of(starts, F::ROWS, n_rows);
    const int key0 = limits.least / COLUMNS * COLUMNS, key_end = first + n_rows;
    tile_load<F::ROWS, DQK, F::THREADS, true>(tiles + F::Q, q.data + first * q.ld + w.head * a.width_qk, q.ld, n_rows,
                                              a.width_qk, threadIdx.x);
    keys_load(key0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    values_load(key0);
    cp_async_commit();

    float out[MT][DV / 8][4] = {};
    Softmax<MT> m;
#pragma unroll
    for (int i = 0; i < MT * 2; i++)
        m.largest[i] = -1e30f, m.sum[i] = 0; /* finite: a query may see nothing of a block */
    for (int key = key0; key < key_end; key += COLUMNS) {
        float s[MT][COLUMNS / 8][4] = {};
        uint32_t p[MT][COLUMNS / 16][4];
        scores<DQK, MT>(s, tiles + F::Q, tiles + F::K);
        cp_async_wait<0>();
        __syncthreads(); /* this block's values have arrived, its keys have been read */
        if (key + COLUMNS > first || limits.last > key) mask_scores<MT>(s, starts, first, key);
        softmax_block<MT>(s, out, m, a.scale * LOG2_E);
        round_probabilities<MT>(p, s);
        if (key + COLUMNS < key_end) keys_load(key + COLUMNS);
        cp_async_commit();
        weigh_values<DV, MT>(out, p, tiles + F::V);
        cp_async_wait<0>();
        __syncthreads(); /* the next keys have arrived, these values have been read */
        if (key + COLUMNS < key_end) values_load(key + COLUMNS);
        cp_async_commit();
    }
    forward_write<MT>(a, o, lse, w.head, first, n_rows, out, m);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* One kernel for both sides. KEYS false: rows are queries, columns keys, and it sums dq. KEYS true: rows are keys,
 * columns queries, and it sums dk and dv. With x1, x2 the rows and y1, y2 the columns (q or k, and d_o or v; the
 * other way round):
 *     s = x1 y1^T    p = exp(scale s - lse)    dp = x2 y2^T    ds = p (dp - delta)    d1 = scale ds y1    d2 = p y2
 * WM x WN warps; each computes 32 rows x 64 / WN columns of s and dp, gives p and ds to the warps of its rows, and
 * sums 32 rows of d1 and d2 in every WN-th 16 columns. */
template <int DQK, int DV, int WM, int WN, bool KEYS> struct Backward {
    static const int THREADS = 32 * WM * WN, ROWS = 32 * WM;
    static const int X1 = 0, X2 = X1 + ROWS * DQK * 2, DS = X2 + ROWS * DV * 2, P = DS + ROWS * COLUMNS * 2;
    /* lse, delta and doc_start of the queries: of the rows, or with each stage */
    static const int QUERIES = P + (KEYS ? ROWS * COLUMNS * 2 : 0), STAGE = QUERIES + (KEYS ? 0 : ROWS * 12);
    static const int Y1 = 0, Y2 = Y1 + COLUMNS * DQK * 2, STAGE_QUERIES = Y2 + COLUMNS * DV * 2;
    static const int STAGE_BYTES = STAGE_QUERIES + (KEYS ? COLUMNS * 12 : 0);
    static size_t bytes(int n_stages) {
        return (size_t)(STAGE + n_stages * STAGE_BYTES);
    }
};

/* Queries of a block in shared memory: n of lse, then of delta, then of doc_start. */
typedef struct {
    const float *lse, *delta;
    const int32_t *start;
} Queries;

__device__ inline Queries queries_at(const char *shared, int n) {
    const float *f = reinterpret_cast<const float *>(shared);
    const Queries u = {f, f + n, reinterpret_cast<const int32_t *>(f + 2 * n)};
    return u;
}

/* Copies them, in the background. Queries past the last token get zeros: their rows of q and d_o are zero, and so is
 * all that comes of them. */
template <int N, int THREADS>
__device__ inline void queries_load(uint32_t to, const Attention &a, const Rows<const float> &lse,
                                    const Rows<const float> &delta, int head, int first) {
    const int thread = thread_again();
#pragma unroll
    for (int base = 0; base < 3 * N; base += THREADS) {
        const int i = base + thread, part = i / N, t = first + i % N;
        if (i >= 3 * N) continue;
        const void *from = a.doc_start + t;
        if (part == 0) from = lse.data + t * lse.ld + head;
        if (part == 1) from = delta.data + t * delta.ld + head;
        cp_async_4(to + i * 4, from, t < a.n_tokens);
    }
}

/* s = x y^T for a warp's 32 rows and NT * 8 columns. */
template <int D, int WM, int NT>
__device__ inline void products(float (&s)[2][NT][4], uint32_t x_tile, uint32_t y_tile) {
    const int thread = thread_again(), lane = thread % 32, warp = thread / 32;
    const Fragment<D> x = Fragment<D>::rows_first(x_tile, warp % WM * 32, 0, lane);
    const Fragment<D> y = Fragment<D>::columns_first(y_tile, warp / WM * NT * 8, 0, lane);
#pragma unroll
    for (int d = 0; d < D / 8; d += 2) {
        uint32_t a[2][4], b[4];
#pragma unroll
        for (int i = 0; i < 2; i++) ldmatrix(a[i], x.at(i * 16, d));
#pragma unroll
        for (int j = 0; j < NT / 2; j++) {
            ldmatrix(b, y.at(j * 16, d));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma(s[i][j * 2], a[i], b[0], b[1]);
                mma(s[i][j * 2 + 1], a[i], b[2], b[3]);
            }
        }
    }
}

/* d += w y: 32 rows of w (COLUMNS wide), D / WN columns of y. */
template <int D, int WM, int WN>
__device__ inline void accumulate(float (&d)[2][D / WN / 8][4], uint32_t w_tile, uint32_t y_tile) {
    const int thread = thread_again(), lane = thread % 32, warp = thread / 32;
    const Fragment<COLUMNS> w = Fragment<COLUMNS>::rows_first(w_tile, warp % WM * 32, 0, lane);
    const Fragment<D> y = Fragment<D>::rows_first(y_tile, 0, warp / WM * 2, lane);
#pragma unroll
    for (int k = 0; k < COLUMNS; k += 16) {
        uint32_t a[2][4], b[4];
#pragma unroll
        for (int i = 0; i < 2; i++) ldmatrix(a[i], w.at(i * 16, k / 8));
#pragma unroll
        for (int j = 0; j < D / WN / 16; j++) {
            ldmatrix_trans(b, y.at(k, j * WN * 2));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                mma(d[i][j * 2], a[i], b[0], b[1]);
                mma(d[i][j * 2 + 1], a[i], b[2], b[3]);
            }
        }
    }
}

/* A lane's pairs of a warp's 32 rows and NT * 8 columns, rounded, into a tile of COLUMNS. */
template <int NT>
__device__ inline void pairs_store(uint32_t tile, int row, int chunk, const uint32_t (&pairs)[2][NT][2]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
            store_shared_4(tile + tile_offset<COLUMNS>(row + i * 8, chunk + j) + threadIdx.x % 4 * 4,
                           pairs[i / 2][j][i % 2]);
}

/* Where a lane's elements are: row `row` + 8 i, columns `col` + 8 j and the next; both count from the blocks' first. */
typedef struct {
    int row, col, row0, col0;
} Place;

/* p = exp(scale s - lse), 0 where the query does not see the key, rounded to pairs. s is overwritten. */
template <int NT, bool KEYS>
__device__ inline void probabilities(uint32_t (&p)[2][NT][2], float (&s)[2][NT][4], const Queries &u, Place at,
                                     float scale, bool is_masked) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < NT * 2; j++) {
            const int query = KEYS ? at.col + j / 2 * 8 + j % 2 : at.row + i * 8;
            float &x = s[i / 2][j / 2][i % 2 * 2 + j % 2];
            x = exp2_fast(x * scale - u.lse[query] * LOG2_E);
        }
    if (is_masked) {
        const int ahead = at.row0 + at.row - at.col0 - at.col; /* of the first column */
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < NT * 2; j++) {
                const int col = j / 2 * 8 + j % 2, row = i * 8;
                const int key = KEYS ? at.row0 + at.row + row : at.col0 + at.col + col;
                const int start = u.start[KEYS ? at.col + col : at.row + row];
                const bool sees = (KEYS ? ahead + row <= col : col <= ahead + row) & (key >= start);
                float &x = s[i / 2][j / 2][i % 2 * 2 + j % 2];
                x = sees ? x : 0;
            }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) p[i / 2][j][i % 2] = pack_bf16(s[i / 2][j][i % 2 * 2], s[i / 2][j][i % 2 * 2 + 1]);
}

/* p becomes p (dp - delta). */
template <int NT, bool KEYS>
__device__ inline void score_gradients(uint32_t (&p)[2][NT][2], const float (&dp)[2][NT][4], const Queries &u,
                                       Place at) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const float *g = dp[i / 2][j] + i % 2 * 2;
            const int row = at.row + i * 8, col = at.col + j * 8;
            const float d0 = u.delta[KEYS ? col : row], d1 = u.delta[KEYS ? col + 1 : row];
            uint32_t &pair = p[i / 2][j][i % 2];
            pair = pack_bf16(bf16_low(pair) * (g[0] - d0), bf16_high(pair) * (g[1] - d1));
        }
}

/* One past the last query that may see a key below key_end. */
__device__ inline int queries_end(const Attention &a, int first, int key_end) {
    __shared__ int ends[32];
    int end = first;
    for (int t = first + threadIdx.x; t < a.n_tokens; t += blockDim.x)
        if (a.doc_start[t] < key_end) end = t + 1;
    end = __reduce_max_sync(0xFFFFFFFFu, end);
    if (threadIdx.x % 32 == 0) ends[threadIdx.x / 32] = end;
    __syncthreads();
    const int i = threadIdx.x % 32;
    return __reduce_max_sync(0xFFFFFFFFu, i < (int)blockDim.x / 32 ? ends[i] : first);
}

/* A block of columns: its products, and what they add to the sums. */
template <int DQK, int DV, int WM, int WN, bool KEYS>
__device__ inline void backward_step(float (&sum1)[2][DQK / WN / 8][4], float (&sum2)[2][KEYS ? DV / WN / 8 : 1][4],
                                     uint32_t tiles, uint32_t columns, const Queries &u, int row0, int col0,
                                     float scale, bool is_masked) {
    typedef Backward<DQK, DV, WM, WN, KEYS> B;
    static const int NT = COLUMNS / WN / 8;
    const int thread = thread_again(), lane = thread % 32, warp_m = thread / 32 % WM, warp_n = thread / 32 / WM;
    const Place at = {warp_m * 32 + lane / 4, warp_n * NT * 8 + lane % 4 * 2, row0, col0};
    float s[2][NT][4] = {}, dp[2][NT][4] = {};
    uint32_t p[2][NT][2];
    products<DQK, WM>(s, tiles + B::X1, columns + B::Y1);
    probabilities<NT, KEYS>(p, s, u, at, scale, is_masked);
    if (KEYS) pairs_store<NT>(tiles + B::P, at.row, warp_n * NT, p);
    products<DV, WM>(dp, tiles + B::X2, columns + B::Y2);
    score_gradients<NT, KEYS>(p, dp, u, at);
    pairs_store<NT>(tiles + B::DS, at.row, warp_n * NT, p);
    barrier_sync(1 + warp_m, 32 * WN); /* the warps of these rows */
    if constexpr (KEYS) accumulate<DV, WM, WN>(sum2, tiles + B::P, columns + B::Y2);
    accumulate<DQK, WM, WN>(sum1, tiles + B::DS, columns + B::Y1);
}

template <int DQK, int DV, int WM, int WN, bool KEYS>
__global__ __launch_bounds__(32 * WM * WN, 1) void attention_backward_kernel(Attention a, Rows<bf16> d1, Rows<bf16> d2,
                                                                             Rows<const bf16> x1, Rows<const bf16> x2,
                                                                             Rows<const bf16> y1, Rows<const bf16> y2,
                                                                             Rows<const float> lse,
                                                                             Rows<const float> delta, int n_stages) {
    typedef Backward<DQK, DV, WM, WN, KEYS> B;
    extern __shared__ __align__(128) char shared[];
    const uint32_t tiles = shared_address(shared);
    const int n_blocks = (a.n_tokens + B::ROWS - 1) / B::ROWS;
    const Work w = work_of(a, n_blocks);
    const int row0 = (KEYS ? w.block : n_blocks - 1 - w.block) * B::ROWS; /* longest first */
    const int n_rows = min(B::ROWS, a.n_tokens - row0), at1 = w.head * a.width_qk, at2 = w.head * a.width_v;
    tile_load<B::ROWS, DQK, B::THREADS, true>(tiles + B::X1, x1.data + row0 * x1.ld + at1, x1.ld, n_rows, a.width_qk,
                                              threadIdx.x);
    tile_load<B::ROWS, DV, B::THREADS, true>(tiles + B::X2, x2.data + row0 * x2.ld + at2, x2.ld, n_rows, a.width_v,
                                             threadIdx.x);
    if (!KEYS) queries_load<B::ROWS, B::THREADS>(tiles + B::QUERIES, a, lse, delta, w.head, row0);
    /* Blocks of columns: keys from the first that a row sees, or queries up to the last that sees a row. */
    const Starts rows = KEYS ? Starts{0, 0} : starts_of(a.doc_start + row0, B::ROWS, n_rows);
    const int begin = KEYS ? row0 : rows.least / COLUMNS * COLUMNS;
    const int end = KEYS ? queries_end(a, row0, row0 + n_rows) : row0 + n_rows;
    const auto columns_load = [&](int col0, int stage) {
        const uint32_t to = tiles + B::STAGE + stage * B::STAGE_BYTES;
        const int n = a.n_tokens - col0;
        tile_load<COLUMNS, DQK, B::THREADS, true>(to + B::Y1, y1.data + col0 * y1.ld + at1, y1.ld, n, a.width_qk,
                                                  thread_again());
        tile_load<COLUMNS, DV, B::THREADS, true>(to + B::Y2, y2.data + col0 * y2.ld + at2, y2.ld, n, a.width_v,
                                                 thread_again());
        if (KEYS) queries_load<COLUMNS, B::THREADS>(to + B::STAGE_QUERIES, a, lse, delta, w.head, col0);
        cp_async_commit();
    };
    columns_load(begin, 0);

    float sum1[2][DQK / WN / 8][4] = {}, sum2[2][KEYS ? DV / WN / 8 : 1][4] = {};
    int stage = 0;
    for (int col0 = begin; col0 < end; col0 += COLUMNS) {
        cp_async_wait<0>();
        __syncthreads(); /* these columns have arrived; the last ones, p and ds have been read */
        const int next = col0 + COLUMNS, offset = B::STAGE + stage * B::STAGE_BYTES;
        if (n_stages == 2 && next < end) columns_load(next, stage ^ 1);
        const Queries u =
            KEYS ? queries_at(shared + offset + B::STAGE_QUERIES, COLUMNS) : queries_at(shared + B::QUERIES, B::ROWS);
        const int last_start = KEYS ? starts_of(u.start, COLUMNS, a.n_tokens - col0).last : rows.last;
        const bool is_masked = KEYS ? col0 < row0 + B::ROWS || last_start > row0 : next > row0 || last_start > col0;
        backward_step<DQK, DV, WM, WN, KEYS>(sum1, sum2, tiles, tiles + offset, u, row0, col0, a.scale * LOG2_E,
                                             is_masked);
        if (n_stages == 2) {
            stage ^= 1;
        } else if (next < end) {
            __syncthreads();
            columns_load(next, 0);
        }
    }
    const float factor1[4] = {a.scale, a.scale, a.scale, a.scale}, factor2[4] = {1, 1, 1, 1};
    const int warp_m = threadIdx.x / 32 % WM, warp_n = threadIdx.x / 32 / WM, n = n_rows - warp_m * 32;
    const int64_t row = row0 + warp_m * 32;
    rows_write<2, DQK / WN / 8, 16 * WN>(d1.data + row * d1.ld + at1 + warp_n * 16, d1.ld, n, a.width_qk - warp_n * 16,
                                         sum1, factor1);
    if constexpr (KEYS)
        rows_write<2, DV / WN / 8, 16 * WN>(d2.data + row * d2.ld + at2 + warp_n * 16, d2.ld, n,
                                            a.width_v - warp_n * 16, sum2, factor2);
}

#endif
