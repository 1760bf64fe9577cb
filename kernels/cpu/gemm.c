/* Dense GEMM, and the core that the other products of this folder stand on: the one CPU op that is blocked and packed.
 *
 * A tile of C, a few rows by two vectors, stays in registers while k runs: for each k two vectors of B are loaded and
 * each row adds one broadcast element of A times them. B is packed into panels as wide as a tile, so that it is read as
 * one stream; A is read where it lies if its k is contiguous, else packed in tiles. The vectors are GCC's vector
 * extension, so the tile is plain C; it is instantiated for AVX-512, AVX2 and 128-bit vectors, in three heights and two
 * widths, so that edges waste little, and chosen at run time.
 *
 * Rejected: packing A always (outputs 64 columns wide do not pay for it), splitting k among threads (the bits would
 * depend on their number). gemm_block's buffers take about 1 MB of the thread's stack. */
#include "kernels/cpu/gemm_core.h"

#include "kernels/base/ints.h"
#include "kernels/cpu/cpu_ops.h"

typedef void GemmTile(int64_t k, const real *a, int64_t a_row, int64_t a_k, const real *b, int64_t b_k, real *c,
                      int64_t c_row, bool add);

#define UNROLL _Pragma("GCC unroll 16")

/* c (ROWS, COLS vectors) = or += the sum over k. The upper half of the rows has its own pointer: two bases and three
 * strides fit the address registers. */
#define GEMM_TILE(NAME, TARGET, BYTES, ROWS, COLS)                                                                     \
    TARGET static void NAME(int64_t k, const real *a, int64_t a_row, int64_t a_k, const real *b, int64_t b_k, real *c, \
                            int64_t c_row, bool add) {                                                                 \
        typedef real Vec __attribute__((vector_size(BYTES)));                                                          \
        typedef real Memory __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));                     \
        enum { LANES = BYTES / sizeof(real), HALF = ROWS / 2 };                                                        \
        const real *a_upper = a + HALF * a_row;                                                                        \
        Vec sum[ROWS][COLS];                                                                                           \
        UNROLL for (int i = 0; i < ROWS; i++) {                                                                        \
            UNROLL for (int j = 0; j < COLS; j++) sum[i][j] = (Vec){0};                                                \
        }                                                                                                              \
        for (; k > 0; k--, a += a_k, a_upper += a_k, b += b_k) {                                                       \
            Vec row[COLS];                                                                                             \
            UNROLL for (int j = 0; j < COLS; j++) row[j] = *(const Memory *)(b + j * LANES);                           \
            UNROLL for (int i = 0; i < ROWS; i++) {                                                                    \
                real x = i < HALF ? a[i * a_row] : a_upper[(i - HALF) * a_row];                                        \
                UNROLL for (int j = 0; j < COLS; j++) sum[i][j] += x * row[j];                                         \
            }                                                                                                          \
        }                                                                                                              \
        if (add) {                                                                                                     \
            UNROLL for (int i = 0; i < ROWS; i++, c += c_row) {                                                        \
                UNROLL for (int j = 0; j < COLS; j++) * (Memory *)(c + j * LANES) += sum[i][j];                        \
            }                                                                                                          \
        } else {                                                                                                       \
            UNROLL for (int i = 0; i < ROWS; i++, c += c_row) {                                                        \
                UNROLL for (int j = 0; j < COLS; j++) * (Memory *)(c + j * LANES) = sum[i][j];                         \
            }                                                                                                          \
        }                                                                                                              \
    }

#define GEMM_ISA(NAME, TARGET, BYTES, ROWS)                                                                            \
    GEMM_TILE(NAME##_full_2, TARGET, BYTES, ROWS, 2)                                                                   \
    GEMM_TILE(NAME##_full_1, TARGET, BYTES, ROWS, 1)                                                                   \
    GEMM_TILE(NAME##_two_thirds_2, TARGET, BYTES, (ROWS * 2 / 3), 2)                                                   \
    GEMM_TILE(NAME##_two_thirds_1, TARGET, BYTES, (ROWS * 2 / 3), 1)                                                   \
    GEMM_TILE(NAME##_third_2, TARGET, BYTES, (ROWS / 3), 2)                                                            \
    GEMM_TILE(NAME##_third_1, TARGET, BYTES, (ROWS / 3), 1)                                                            \
    static const GemmIsa NAME = {ROWS,                                                                                 \
                                 2 * BYTES / sizeof(real),                                                             \
                                 {{NAME##_full_2, NAME##_full_1},                                                      \
                                  {NAME##_two_thirds_2, NAME##_two_thirds_1},                                          \
                                  {NAME##_third_2, NAME##_third_1}}};

typedef struct {
    int rows, cols;       /* of a full tile */
    GemmTile *tile[3][2]; /* full, 2/3 and 1/3 of the rows; full and half of the columns */
} GemmIsa;

#if defined(__x86_64__)
GEMM_ISA(isa_avx512, __attribute__((target("avx512f"))), 64, 12)
GEMM_ISA(isa_avx2, __attribute__((target("avx2,fma"))), 32, 6)
#endif
GEMM_ISA(isa_baseline, , 16, 6)

enum {
    ROWS_MAX = 12,
    COLS_MAX = 128 / sizeof(real),
    PACK_MAX = GEMM_K_CHUNK * 256, /* elements of B packed at a time */
    PART_MAX = 384 * 256,          /* partial sums kept between chunks of k */
    PACK_COST = 16                 /* time to pack one element, in multiply-adds */
};

static const GemmIsa *gemm_isa(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return &isa_avx512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &isa_avx2;
#endif
    return &isa_baseline;
}

/* The smallest tile that holds rows x cols. */
static GemmTile *pick_tile(const GemmIsa *isa, int64_t rows, int64_t cols) {
    int height = rows > isa->rows * 2 / 3 ? 0 : (rows > isa->rows / 3 ? 1 : 2);
    return isa->tile[height][cols > isa->cols / 2 ? 0 : 1];
}

/* Elements [k0, k0 + n) of row o of an FP8 operand; what they mean is exact but for the scale of a weight. */
static inline void fp8_reals(const GemmOperand *x, int64_t o, int64_t k0, int64_t n, real *buf) {
    const uint8_t *bits = (const uint8_t *)x->data + o * x->ld + k0;
    for (int64_t i = 0; i < n; i++) buf[i] = e4m3_to_real(bits[i]);
    for (int64_t i = 0; i < n;) {
        const int64_t block = (k0 + i) / SCALE_TILE, end = min_i64((block + 1) * SCALE_TILE - k0, n);
        const real scale = x->scale_layout == SCALE_ROW_1X128 ? (real)x->scale[block * x->scale_ld + o]
                                                              : (real)x->scale[o / SCALE_TILE * x->scale_ld + block];
        for (; i < end; i++) buf[i] *= scale;
    }
}

/* Elements [k0, k0 + n) of row o of an operand whose rows run over k: where they lie, or converted into buf. */
static inline const real *as_reals(const GemmOperand *x, int64_t o, int64_t k0, int64_t n, real *buf) {
    const int64_t offset = o * x->ld + k0;
    if (x->dtype == DTYPE_F32) return (const real *)x->data + offset;
    if (x->dtype == DTYPE_E4M3) {
        fp8_reals(x, o, k0, n, buf);
        return buf;
    }
    const uint16_t *bits = (const uint16_t *)x->data + offset;
    for (int64_t i = 0; i < n; i++) buf[i] = bf16_to_real(bits[i]);
    return buf;
}

/* panel[k][o] = x(first + o, k0 + k) for o < n, where rows of memory run over o. */
static inline __attribute__((always_inline)) void pack_rows(real *panel, int64_t width, const GemmOperand *x,
                                                            int64_t first, int64_t n, int64_t k0, int64_t n_k) {
    int64_t offset = k0 * x->ld + first;
    if (x->dtype == DTYPE_F32) {
        const real *row = (const real *)x->data + offset;
        for (int64_t k = 0; k < n_k; k++, row += x->ld, panel += width) memcpy(panel, row, (size_t)n * sizeof *row);
    } else {
        const uint16_t *row = (const uint16_t *)x->data + offset;
        for (int64_t k = 0; k < n_k; k++, row += x->ld, panel += width)
            for (int64_t o = 0; o < n; o++) panel[o] = bf16_to_real(row[o]);
    }
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (FourIndices){__VA_ARGS__})
#endif
typedef real Four __attribute__((vector_size(4 * sizeof(real)), aligned(sizeof(real)), may_alias));
#ifdef REAL_IS_DOUBLE
typedef int64_t FourIndices __attribute__((vector_size(4 * sizeof(real))));
#else
typedef int32_t FourIndices __attribute__((vector_size(4 * sizeof(real))));
#endif

/* Four rows of four elements become four columns, `width` apart. */
static inline __attribute__((always_inline)) void turn_four(real *out, int64_t width, Four r0, Four r1, Four r2,
                                                            Four r3) {
    const Four low01 = SHUFFLE(r0, r1, 0, 4, 1, 5), high01 = SHUFFLE(r0, r1, 2, 6, 3, 7);
    const Four low23 = SHUFFLE(r2, r3, 0, 4, 1, 5), high23 = SHUFFLE(r2, r3, 2, 6, 3, 7);
    *(Four *)out = SHUFFLE(low01, low23, 0, 1, 4, 5);
    *(Four *)(out + width) = SHUFFLE(low01, low23, 2, 3, 6, 7);
    *(Four *)(out + 2 * width) = SHUFFLE(high01, high23, 0, 1, 4, 5);
    *(Four *)(out + 3 * width) = SHUFFLE(high01, high23, 2, 3, 6, 7);
}

/* The same where rows of memory run over k: four rows at a time are turned into columns. */
static inline __attribute__((always_inline)) void pack_columns(real *panel, int64_t width, const GemmOperand *x,
                                                               int64_t first, int64_t n, int64_t k0, int64_t n_k) {
    real buf[4][GEMM_K_CHUNK];
    int64_t o = 0;
    for (; o + 4 <= n; o += 4) {
        const real *r0 = as_reals(x, first + o, k0, n_k, buf[0]);
        const real *r1 = as_reals(x, first + o + 1, k0, n_k, buf[1]);
        const real *r2 = as_reals(x, first + o + 2, k0, n_k, buf[2]);
        const real *r3 = as_reals(x, first + o + 3, k0, n_k, buf[3]);
        real *out = panel + o;
        int64_t k = 0;
        for (; k + 4 <= n_k; k += 4, out += 4 * width)
            turn_four(out, width, *(const Four *)(r0 + k), *(const Four *)(r1 + k), *(const Four *)(r2 + k),
                      *(const Four *)(r3 + k));
        for (; k < n_k; k++, out += width) {
            out[0] = r0[k];
            out[1] = r1[k];
            out[2] = r2[k];
            out[3] = r3[k];
        }
    }
    for (; o < n; o++) {
        const real *row = as_reals(x, first + o, k0, n_k, buf[0]);
        for (int64_t k = 0; k < n_k; k++) panel[k * width + o] = row[k];
    }
}

/* panel[k][o] of `width` columns = x(first + o, k0 + k), zero for o >= n. Full panels of the common widths are copied
 * with constant lengths, which a weight gradient feels. */
static CPU_CLONES void pack_panel(real *panel, int64_t width, const GemmOperand *x, int64_t first, int64_t n,
                                  int64_t k0, int64_t n_k) {
    if (n < width) memset(panel, 0, (size_t)(n_k * width) * sizeof *panel);
    if (x->k_last) {
        pack_columns(panel, width, x, first, n, k0, n_k);
        return;
    }
    switch (n == width ? width : 0) {
    case 32: pack_rows(panel, 32, x, first, 32, k0, n_k); break;
    case 16: pack_rows(panel, 16, x, first, 16, k0, n_k); break;
    case 12: pack_rows(panel, 12, x, first, 12, k0, n_k); break;
    case 8: pack_rows(panel, 8, x, first, 8, k0, n_k); break;
    case 4: pack_rows(panel, 4, x, first, 4, k0, n_k); break;
    default: pack_rows(panel, width, x, first, n, k0, n_k); break;
    }
}

/* y[i, j] = or += the corner of a tile. */
static void store_tile(const Gemm *g, const real *tile, int64_t tile_row, int64_t i0, int64_t rows, int64_t j0,
                       int64_t cols) {
    for (int64_t i = 0; i < rows; i++) {
        const real *sum = tile + i * tile_row;
        int64_t offset = (i0 + i) * g->y_ld + j0;
        if (g->y_dtype == DTYPE_F32) {
            real *y = (real *)g->y + offset;
            for (int64_t j = 0; j < cols; j++) y[j] = g->accumulate ? y[j] + sum[j] : sum[j];
        } else {
            uint16_t *y = (uint16_t *)g->y + offset;
            for (int64_t j = 0; j < cols; j++)
                y[j] = real_to_bf16(g->accumulate ? bf16_to_real(y[j]) + sum[j] : sum[j]);
        }
    }
}

/* Rows [i0, i0 + rows) of one tile row by the packed columns [n0, n1), over k in [k0, k0 + n_k). part: sums of earlier
 * chunks for these rows, isa->cols per row and panel, or NULL if k is one chunk. */
static void tile_row(const Gemm *g, const GemmIsa *isa, const real *packed_b, real *part, int64_t i0, int64_t rows,
                     int64_t n0, int64_t n1, int64_t k0, int64_t n_k) {
    real packed_a[ROWS_MAX * GEMM_K_CHUNK] __attribute__((aligned(64)));
    real local[ROWS_MAX * COLS_MAX] __attribute__((aligned(64)));
    int64_t height = rows > isa->rows * 2 / 3 ? isa->rows : (rows > isa->rows / 3 ? isa->rows * 2 / 3 : isa->rows / 3);
    const real *a = (const real *)g->a.data + i0 * g->a.ld + k0;
    int64_t a_row = g->a.ld, a_k = 1;
    if (!g->a.k_last || g->a.dtype != DTYPE_F32 || rows < height) {
        pack_panel(packed_a, height, &g->a, i0, rows, k0, n_k);
        a = packed_a;
        a_row = 1;
        a_k = height;
    }
    bool last = k0 + n_k == g->k;
    for (int64_t j0 = n0; j0 < n1; j0 += isa->cols) {
        int64_t cols = min_i64(isa->cols, n1 - j0);
        GemmTile *tile = pick_tile(isa, rows, cols);
        const real *b = packed_b + (j0 - n0) * n_k;
        bool whole = rows == height && (cols == isa->cols || cols == isa->cols / 2);
        if (!part && whole && g->y_dtype == DTYPE_F32) {
            tile(n_k, a, a_row, a_k, b, isa->cols, (real *)g->y + i0 * g->y_ld + j0, g->y_ld, g->accumulate);
            continue;
        }
        real *sum = part ? part + (j0 - n0) * isa->rows : local;
        tile(n_k, a, a_row, a_k, b, isa->cols, sum, isa->cols, part && k0 > 0);
        if (last) store_tile(g, sum, isa->cols, i0, rows, j0, cols);
    }
}

void gemm_block(const Gemm *g, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
    real packed_b[PACK_MAX] __attribute__((aligned(64)));
    real part[PART_MAX] __attribute__((aligned(64)));
    const GemmIsa *isa = gemm_isa();
    bool one_chunk = g->k <= GEMM_K_CHUNK;
    int64_t n_step = PACK_MAX / (one_chunk && g->k > 0 ? g->k : GEMM_K_CHUNK) / isa->cols * isa->cols;
    int64_t m_step = one_chunk ? m1 - m0 : PART_MAX / n_step / isa->rows * isa->rows;
    for (int64_t j0 = n0; j0 < n1; j0 += n_step) {
        int64_t j1 = min_i64(j0 + n_step, n1);
        for (int64_t r0 = m0; r0 < m1; r0 += m_step) {
            int64_t r1 = min_i64(r0 + m_step, m1);
            int64_t k0 = 0;
            do {
                int64_t n_k = min_i64(GEMM_K_CHUNK, g->k - k0);
                for (int64_t j = j0; j < j1; j += isa->cols)
                    pack_panel(packed_b + (j - j0) * n_k, isa->cols, &g->b, j, min_i64(isa->cols, j1 - j), k0, n_k);
                for (int64_t i = r0; i < r1; i += isa->rows)
                    tile_row(g, isa, packed_b, one_chunk ? NULL : part + (i - r0) * n_step, i,
                             min_i64(isa->rows, r1 - i), j0, j1, k0, n_k);
                k0 += n_k;
            } while (k0 < g->k);
        }
    }
}

/* Threads form a grid over C: of the grids with n_threads cells, the one whose cells cost least to pack and multiply.
 */
void gemm_share(const Gemm *g, int thread, int n_threads) {
    const GemmIsa *isa = gemm_isa();
    int64_t best_cost = INT64_MAX, m_step = g->m, n_step = g->n;
    int n_across = 1;
    for (int across = 1; across <= n_threads; across++) {
        if (n_threads % across != 0) continue;
        int64_t rows = ceil_div(ceil_div(g->m, n_threads / across), 4) * 4;
        int64_t cols = ceil_div(ceil_div(g->n, across), isa->cols) * isa->cols;
        int64_t cost = ceil_div(rows, isa->rows) * isa->rows * cols + PACK_COST * (cols + (g->a.k_last ? 0 : rows));
        if (cost >= best_cost) continue;
        best_cost = cost;
        n_across = across;
        m_step = rows;
        n_step = cols;
    }
    int64_t m0 = min_i64(thread / n_across * m_step, g->m), n0 = min_i64(thread % n_across * n_step, g->n);
    gemm_block(g, m0, min_i64(m0 + m_step, g->m), n0, min_i64(n0 + n_step, g->n));
}

void gemm_local(int64_t m, int64_t n, int64_t k, const real *a, int64_t a_row, int64_t a_k, const real *b, int64_t b_k,
                real *c, int64_t c_row, bool add) {
    const GemmIsa *isa = gemm_isa();
    for (int64_t i = 0; i < m; i += isa->rows)
        for (int64_t j = 0; j < n; j += isa->cols)
            pick_tile(isa, m - i, n - j)(k, a + i * a_row, a_row, a_k, b + j, b_k, c + i * c_row + j, c_row, add);
}

Gemm gemm_make(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate) {
    const bool fp8 = a.dtype == DTYPE_E4M3; /* then the sum runs over the last dimension of both */
    const bool by_tokens = kind == GEMM_WGRAD && !fp8;
    Gemm g = {.m = y.shape[0], .n = y.shape[1], .k = a.shape[by_tokens ? 0 : 1], .y = y.data, .accumulate = accumulate};
    g.a = (GemmOperand){a.data, a.dtype, a.ld, !by_tokens, a.scale_layout, a.scale, a.scale_ld};
    g.b = (GemmOperand){b.data, b.dtype, b.ld, kind == GEMM_FPROP || fp8, b.scale_layout, b.scale, b.scale_ld};
    g.y_dtype = y.dtype;
    g.y_ld = y.ld;
    return g;
}

void cpu_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s) {
    (void)s;
    const Gemm g = gemm_make(y, a, b, kind, accumulate);
#pragma omp parallel if (g.m * g.n * g.k >= GEMM_SERIAL)
    gemm_share(&g, cpu_thread(), cpu_n_threads());
}

/* A head is one work item: with one token its product is a matrix by a vector. */
void cpu_head_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, HeadSteps steps, Stream s) {
    (void)s;
    const Gemm first = gemm_make(y, a, b, kind, false);
    const int64_t y_step = steps.y_cols * (int64_t)dtype_size(y.dtype),
                  a_step = steps.a_cols * (int64_t)dtype_size(a.dtype);
    const int64_t b_step = steps.b_rows * b.ld * (int64_t)dtype_size(b.dtype);
#pragma omp parallel for schedule(static) if (steps.n_heads * first.m * first.n * first.k >= GEMM_SERIAL)
    for (int head = 0; head < steps.n_heads; head++) {
        Gemm g = first;
        g.y = (char *)g.y + head * y_step;
        g.a.data = (const char *)g.a.data + head * a_step;
        g.b.data = (const char *)g.b.data + head * b_step;
        gemm_block(&g, 0, g.m, 0, g.n);
    }
}
