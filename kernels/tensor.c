/* See tensor.h. */
#include "tensor.h"

#include <string.h>

#include "base/check.h"
#include "base/ints.h"

size_t dtype_size(Dtype dtype) {
    switch (dtype) {
    case DTYPE_F32: return sizeof(real);
    case DTYPE_BF16: return 2;
    case DTYPE_E4M3: return 1;
    case DTYPE_I32: return 4;
    case DTYPE_F64: return 8;
    case DTYPE_NONE:
    case DTYPE_E5M6:
    case DTYPE_COUNT: break;
    }
    return 0;
}

const char *dtype_name(Dtype dtype) {
    static const char *const names[DTYPE_COUNT] = {"none", "f32", "bf16", "e4m3", "i32", "f64", "e5m6"};
    return dtype >= 0 && dtype < DTYPE_COUNT ? names[dtype] : "?";
}

Tensor tensor_none(void) {
    Tensor t;
    memset(&t, 0, sizeof t);
    return t;
}

bool tensor_is_none(Tensor t) {
    return t.dtype == DTYPE_NONE;
}

static Tensor contiguous(void *data, Dtype dtype, int ndim, int64_t a, int64_t b, int64_t c) {
    CHECK(a >= 0 && b >= 0 && c >= 0, "shape (%lld, %lld, %lld)", (long long)a, (long long)b, (long long)c);
    Tensor t = tensor_none();
    t.data = data;
    t.dtype = dtype;
    t.ndim = ndim;
    const int64_t shape[3] = {a, b, c};
    for (int i = 0; i < ndim; i++) t.shape[i] = shape[i];
    t.ld = ndim == 1 ? 1 : t.shape[ndim - 1];
    return t;
}

Tensor tensor_1d(void *data, Dtype dtype, int64_t n) {
    return contiguous(data, dtype, 1, n, 0, 0);
}

Tensor tensor_2d(void *data, Dtype dtype, int64_t rows, int64_t cols) {
    return contiguous(data, dtype, 2, rows, cols, 0);
}

Tensor tensor_3d(void *data, Dtype dtype, int64_t planes, int64_t rows, int64_t cols) {
    return contiguous(data, dtype, 3, planes, rows, cols);
}

Tensor tensor_tiles(void *data, float *scale, Dtype dtype, int64_t rows, int64_t cols) {
    Tensor t = tensor_2d(data, dtype, rows, cols);
    CHECK(dtype == DTYPE_E4M3 || (dtype == DTYPE_E5M6 && cols % 8 == 0), "tiles of %s, %lld columns", dtype_name(dtype),
          (long long)cols);
    t.scale = scale;
    t.scale_layout = SCALE_ROW_1X128;
    t.scale_ld = rows;
    return t;
}

Tensor tensor_blocks(void *data, float *scale, int64_t planes, int64_t rows, int64_t cols) {
    Tensor t = planes ? tensor_3d(data, DTYPE_E4M3, planes, rows, cols) : tensor_2d(data, DTYPE_E4M3, rows, cols);
    t.scale = scale;
    t.scale_layout = SCALE_BLOCK_128X128;
    t.scale_ld = round_up(ceil_div(cols, SCALE_TILE), 4);
    return t;
}

/* Scales of one plane of blocks. */
static int64_t plane_scales(Tensor t) {
    return ceil_div(t.shape[t.ndim - 2], SCALE_TILE) * t.scale_ld;
}

int64_t tensor_n_scales(Tensor t) {
    switch (t.scale_layout) {
    case SCALE_NONE: return 0;
    case SCALE_ROW_1X128: return ceil_div(t.shape[1], SCALE_TILE) * t.scale_ld;
    case SCALE_BLOCK_128X128: return plane_scales(t) * (t.ndim == 3 ? t.shape[0] : 1);
    }
    return 0;
}

int64_t tensor_numel(Tensor t) {
    int64_t n = t.ndim > 0 ? 1 : 0;
    for (int i = 0; i < t.ndim; i++) n *= t.shape[i];
    return n;
}

size_t tensor_bytes(Tensor t) {
    if (t.dtype == DTYPE_E5M6) return (size_t)tensor_numel(t) / 8 * 12;
    return (size_t)tensor_numel(t) * dtype_size(t.dtype);
}

bool tensor_is_contiguous(Tensor t) {
    return t.ndim <= 1 ? t.ld <= 1 : t.ld == t.shape[t.ndim - 1];
}

static void *offset(Tensor t, int64_t elements) {
    CHECK(t.dtype != DTYPE_E5M6, "a view of %s", dtype_name(t.dtype));
    return t.data ? (char *)t.data + elements * (int64_t)dtype_size(t.dtype) : NULL;
}

Tensor tensor_cols(Tensor t, int64_t first, int64_t n) {
    CHECK(t.ndim == 2 && first >= 0 && n >= 0 && first + n <= t.shape[1], "columns [%lld, +%lld) of %lld",
          (long long)first, (long long)n, (long long)t.shape[1]);
    CHECK(t.scale_layout == SCALE_NONE || (t.scale_layout == SCALE_ROW_1X128 && first % SCALE_TILE == 0),
          "columns from %lld of a tensor with scales", (long long)first);
    t.data = offset(t, first);
    if (t.scale) t.scale += first / SCALE_TILE * t.scale_ld;
    t.shape[1] = n;
    return t;
}

Tensor tensor_rows(Tensor t, int64_t first, int64_t n) {
    CHECK(t.ndim >= 1 && t.ndim <= 2 && first >= 0 && n >= 0 && first + n <= t.shape[0], "rows [%lld, +%lld) of %lld",
          (long long)first, (long long)n, (long long)t.shape[0]);
    CHECK(t.scale_layout != SCALE_BLOCK_128X128, "rows of a tensor with a scale for each 128 x 128");
    t.data = offset(t, first * t.ld);
    if (t.scale) t.scale += first; /* by rows: one after the other */
    t.shape[0] = n;
    t.n_rows = NULL;
    return t;
}

Tensor tensor_plane(Tensor t, int64_t index) {
    CHECK(t.ndim >= 2 && index >= 0 && index < t.shape[0] && tensor_is_contiguous(t), "plane %lld of %lld",
          (long long)index, (long long)t.shape[0]);
    int64_t size = tensor_numel(t) / t.shape[0];
    CHECK(t.scale_layout != SCALE_ROW_1X128, "plane of a tensor with a scale for each 1 x 128");
    t.data = offset(t, index * size);
    if (t.scale) t.scale += index * plane_scales(t);
    for (int i = 0; i + 1 < t.ndim; i++) t.shape[i] = t.shape[i + 1];
    t.ndim--;
    t.shape[t.ndim] = 0;
    t.ld = t.ndim == 1 ? 1 : t.shape[t.ndim - 1];
    t.n_rows = NULL;
    return t;
}

Tensor tensor_reshape2(Tensor t, int64_t rows, int64_t cols) {
    CHECK(tensor_is_contiguous(t) && rows * cols == tensor_numel(t), "reshape of %lld elements to (%lld, %lld)",
          (long long)tensor_numel(t), (long long)rows, (long long)cols);
    CHECK(t.scale_layout == SCALE_NONE, "reshape of a tensor with scales");
    return tensor_2d(t.data, t.dtype, rows, cols);
}
