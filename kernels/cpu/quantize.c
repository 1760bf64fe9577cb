/* To FP8 and back: tiles of activations and gradients, blocks of weights. (V3 3.3.2)
 *
 * A matrix is walked in squares of 128 x 128, which hold whole tiles of its rows and of its columns. */
#include "cpu.h"
#include "cpu_ops.h"
#include "kernels/base/ints.h"
#include "kernels/base/small_floats.h"

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

static float *scale_at(Tensor t, int64_t row, int64_t col) {
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
