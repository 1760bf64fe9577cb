/* To FP8 and back: tiles of activations and gradients, blocks of weights, and what is in them. (V3 3.3.2)
 *
 * A matrix is walked in squares of 128 x 128, which hold whole tiles of its rows and of its columns. */
#include "cpu.h"
#include "cpu_ops.h"
#include "kernels/base/ints.h"
#include "kernels/base/small_floats.h"

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Of tiles, or of a matrix of blocks. */
static float *scale_at(Tensor t, int64_t row, int64_t col) {
    if (t.scale_layout == SCALE_BLOCK_128X128) return t.scale + row / SCALE_TILE * t.scale_ld + col / SCALE_TILE;
    return t.scale + col / SCALE_TILE * t.scale_ld + row;
}

/* Eight elements a group of three words. */
static uint32_t *words_at(Tensor t, int64_t row, int64_t col) {
    return (uint32_t *)t.data + (row * t.shape[1] + col) / 8 * 3;
}

void tile_read(float *out, Tensor x, int64_t row, int64_t col, int64_t n) {
    const float scale = *scale_at(x, row, col);
    if (x.dtype == DTYPE_E4M3) {
        const uint8_t *bits = (const uint8_t *)x.data + row * x.ld + col;
        for (int64_t i = 0; i < n; i++) out[i] = (float)e4m3_to_real(bits[i]) * scale;
        return;
    }
    const uint32_t *words = words_at(x, row, col);
    for (int64_t i = 0; i < n; i += 8, words += 3) {
        uint16_t bits[8];
        e5m6_unpack(bits, words);
        for (int j = 0; j < 8; j++) out[i + j] = float_from_e5m6(bits[j]) * scale;
    }
}

void tile_write(Tensor q, int64_t row, int64_t col, const float *x, int64_t n) {
    const float amax = amax_of(x, n), scale = q.dtype == DTYPE_E4M3 ? e4m3_scale_pow2(amax) : e5m6_scale_pow2(amax);
    const float inverse = 1 / scale; /* exact: a power of two */
    *scale_at(q, row, col) = scale;
    if (q.dtype == DTYPE_E4M3) {
        uint8_t *bits = (uint8_t *)q.data + row * q.ld + col;
        for (int64_t i = 0; i < n; i++) bits[i] = isnan(scale) ? 0x7F : e4m3_from_float(x[i] * inverse);
        return;
    }
    uint32_t *words = words_at(q, row, col);
    for (int64_t i = 0; i < n; i += 8, words += 3) {
        uint16_t bits[8];
        for (int j = 0; j < 8; j++) bits[j] = isnan(scale) ? 0x7FF : e5m6_from_float(x[i + j] * inverse);
        e5m6_pack(words, bits);
    }
}

float tile_round(float x) {
    return (float)bf16_to_real(real_to_bf16((real)x));
}

void square_write(Quantized q, const Square *square, int64_t row, int64_t col, int64_t n_rows, int64_t n_cols) {
    if (!tensor_is_none(q.rows))
        for (int64_t r = 0; r < n_rows; r++) tile_write(q.rows, row + r, col, square->row[r], n_cols);
    if (tensor_is_none(q.columns)) return;
    for (int64_t c = 0; c < n_cols; c++) {
        float column[SCALE_TILE];
        for (int64_t r = 0; r < n_rows; r++) column[r] = square->row[r][c];
        tile_write(q.columns, col + c, row, column, n_rows);
    }
}

/* Elements [col, col + n) of a row of bf16 or tiles. */
static void row_part(float *out, Tensor x, int64_t row, int64_t col, int64_t n) {
    if (x.dtype == DTYPE_BF16)
        for (int64_t i = 0; i < n; i++) out[i] = (float)bf16_to_real(((const uint16_t *)x.data)[row * x.ld + col + i]);
    else
        tile_read(out, x, row, col, n);
}

void cpu_quantize(Quantized q, Tensor x, Stream s) {
    (void)s;
    const int64_t M = rows_in_use(x), C = x.shape[1], squares = ceil_div(C, SCALE_TILE);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < ceil_div(M, SCALE_TILE) * squares; i++) {
        const int64_t row = i / squares * SCALE_TILE, col = i % squares * SCALE_TILE;
        const int64_t n_rows = min_i64(M - row, SCALE_TILE), n_cols = min_i64(C - col, SCALE_TILE);
        Square square;
        for (int64_t r = 0; r < n_rows; r++) row_part(square.row[r], x, row + r, col, n_cols);
        square_write(q, &square, row, col, n_rows, n_cols);
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

static float block_amax(const real *x, int64_t ld, int64_t n_rows, int64_t n_cols) {
    float amax[SCALE_TILE];
    for (int64_t r = 0; r < n_rows; r++) {
        float row[SCALE_TILE];
        for (int64_t c = 0; c < n_cols; c++) row[c] = (float)x[r * ld + c];
        amax[r] = amax_of(row, n_cols);
    }
    return amax_of(amax, n_rows);
}

/* The block at (row, col) of a plane. */
static void block_quantize(Tensor w, const real *x, int64_t row, int64_t col) {
    const int64_t I = w.shape[1];
    const int64_t n_rows = min_i64(w.shape[0] - row, SCALE_TILE), n_cols = min_i64(I - col, SCALE_TILE);
    const real *corner = x + row * I + col;
    const float scale = e4m3_scale_nearest(block_amax(corner, I, n_rows, n_cols));
    w.scale[row / SCALE_TILE * w.scale_ld + col / SCALE_TILE] = scale;
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t c = 0; c < n_cols; c++)
            ((uint8_t *)w.data)[(row + r) * I + col + c] =
                isnan(scale) ? 0x7F : e4m3_from_float((float)corner[r * I + c] / scale);
}

static void block_transpose(Tensor wt, Tensor w, int64_t row, int64_t col) {
    const int64_t O = w.shape[0], I = w.shape[1];
    const int64_t n_rows = min_i64(O - row, SCALE_TILE), n_cols = min_i64(I - col, SCALE_TILE);
    wt.scale[col / SCALE_TILE * wt.scale_ld + row / SCALE_TILE] =
        w.scale[row / SCALE_TILE * w.scale_ld + col / SCALE_TILE];
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t c = 0; c < n_cols; c++)
            ((uint8_t *)wt.data)[(col + c) * O + row + r] = ((const uint8_t *)w.data)[(row + r) * I + col + c];
}

/* master none: w stands; wt none: it is not wanted. */
static void each_block(Tensor w, Tensor wt, Tensor master) {
    const int64_t planes = w.ndim == 3 ? w.shape[0] : 1, O = w.shape[w.ndim - 2], I = w.shape[w.ndim - 1];
    const int64_t down = ceil_div(O, SCALE_TILE), across = ceil_div(I, SCALE_TILE);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < planes * down * across; i++) {
        const int64_t plane = i / (down * across), block = i % (down * across);
        const int64_t row = block / across * SCALE_TILE, col = block % across * SCALE_TILE;
        const Tensor own = w.ndim == 3 ? tensor_plane(w, plane) : w;
        if (!tensor_is_none(master)) block_quantize(own, (const real *)master.data + plane * O * I, row, col);
        if (!tensor_is_none(wt)) block_transpose(w.ndim == 3 ? tensor_plane(wt, plane) : wt, own, row, col);
    }
}

void cpu_quantize_weight(Tensor w, Tensor wt, Tensor master, Stream s) {
    (void)s;
    each_block(w, wt, master);
}

void cpu_transpose_weight(Tensor wt, Tensor w, Stream s) {
    (void)s;
    each_block(w, wt, tensor_none());
}

/* ---- what is in them --------------------------------------------------------------------------------------------- */

static int64_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* n numbers with one scale. */
static void count_codes(TileStats *stats, const uint8_t *code, int64_t n, float scale) {
    enum { SMALLEST_NORMAL = 0x08, LARGEST = 0x7E, NOT_A_NUMBER = 0x7F };
    uint8_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint8_t magnitude = code[i] & 0x7F;
        stats->zeros += magnitude == 0;
        stats->subnormals += magnitude > 0 && magnitude < SMALLEST_NORMAL;
        stats->largest += magnitude == LARGEST;
        stats->nans += magnitude == NOT_A_NUMBER;
        if (magnitude > most && magnitude != NOT_A_NUMBER) most = magnitude;
    }
    stats->values += n;
    const float amax = float_from_e4m3(most) * scale;
    if (!isnan(amax)) stats->amax_bits = max_i64(stats->amax_bits, float_bits(amax));
}

static void count_scale(TileStats *stats, float scale) {
    const int64_t exponent = (float_bits(scale) >> 23) - 127, last = SCALE_EXPONENTS - 1;
    if (!isnan(scale)) stats->scales[max_i64(0, min_i64(exponent - SCALE_EXPONENT_FIRST, last))]++;
}

/* Row `row` of tiles, or of a plane of blocks, whose scales count with their first row. */
static void count_row(TileStats *stats, Tensor x, int64_t row) {
    const bool is_blocks = x.scale_layout == SCALE_BLOCK_128X128;
    for (int64_t col = 0; col < x.shape[1]; col += SCALE_TILE) {
        const float scale =
            is_blocks ? x.scale[row / SCALE_TILE * x.scale_ld + col / SCALE_TILE] : *scale_at(x, row, col);
        count_codes(stats, (const uint8_t *)x.data + row * x.ld + col, min_i64(x.shape[1] - col, SCALE_TILE), scale);
        if (!is_blocks || row % SCALE_TILE == 0) count_scale(stats, scale);
    }
}

static void add_stats(TileStats *sum, const TileStats *x) {
    sum->values += x->values;
    sum->zeros += x->zeros;
    sum->subnormals += x->subnormals;
    sum->largest += x->largest;
    sum->nans += x->nans;
    sum->amax_bits = max_i64(sum->amax_bits, x->amax_bits);
    for (int i = 0; i < SCALE_EXPONENTS; i++) sum->scales[i] += x->scales[i];
}

void cpu_tile_stats(TileStats *stats, Tensor x, Stream s) {
    (void)s;
    const int64_t planes = x.ndim == 3 ? x.shape[0] : 1, M = x.ndim == 3 ? x.shape[1] : rows_in_use(x);
#pragma omp parallel
    {
        TileStats own;
        memset(&own, 0, sizeof own);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < planes * M; i++) count_row(&own, x.ndim == 3 ? tensor_plane(x, i / M) : x, i % M);
#pragma omp critical
        add_stats(stats, &own);
    }
}
