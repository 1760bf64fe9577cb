/* What the wrappers of ops.h check of their arguments, and how they tell the device's watcher. */
#ifndef TRAIN_MOE_OPS_CHECK_H
#define TRAIN_MOE_OPS_CHECK_H

#include "base/check.h"
#include "ops.h"

/* Remembers the op (ops_last), and tells the device's watcher, if there is one, what it reads and writes. */
void ops_watch(const Device *d, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
               int n_reads);

/* ndim extents, those below zero any. */
static inline void check_shape(const char *op, const char *arg, Tensor t, int ndim, int64_t a, int64_t b, int64_t c) {
    const int64_t want[3] = {a, b, c};
    CHECK(t.ndim == ndim, "%s: %s has %d dims, not %d", op, arg, t.ndim, ndim);
    for (int i = 0; i < ndim; i++)
        CHECK(want[i] < 0 || t.shape[i] == want[i], "%s: %s has extent %lld in dim %d, not %lld", op, arg,
              (long long)t.shape[i], i, (long long)want[i]);
    CHECK(ndim < 2 || t.ld >= t.shape[ndim - 1], "%s: %s has ld %lld below its width %lld", op, arg, (long long)t.ld,
          (long long)t.shape[ndim - 1]);
    CHECK(t.data || tensor_numel(t) == 0, "%s: %s has no memory", op, arg);
}

static inline bool is_act(Dtype d) {
    return d == DTYPE_F32 || d == DTYPE_BF16;
}

/* 1-D, contiguous. n < 0: any. */
static inline void check_vector(const char *op, const char *arg, Tensor t, Dtype dtype, int64_t n) {
    CHECK(t.dtype == dtype, "%s: %s is %s, not %s", op, arg, dtype_name(t.dtype), dtype_name(dtype));
    check_shape(op, arg, t, 1, n, 0, 0);
    CHECK(t.ld == 1, "%s: %s is strided", op, arg);
}

static inline void check_matrix(const char *op, const char *arg, Tensor t, Dtype dtype, int64_t rows, int64_t cols) {
    CHECK(t.dtype == dtype, "%s: %s is %s, not %s", op, arg, dtype_name(t.dtype), dtype_name(dtype));
    check_shape(op, arg, t, 2, rows, cols, 0);
}

static inline void check_act(const char *op, const char *arg, Tensor t, int64_t rows, int64_t cols) {
    CHECK(is_act(t.dtype), "%s: %s is %s, not f32 or bf16", op, arg, dtype_name(t.dtype));
    check_shape(op, arg, t, 2, rows, cols, 0);
}

/* E4M3 with a scale for each 1 x 128. */
static inline void check_tiles(const char *op, const char *arg, Tensor t, int64_t rows, int64_t cols) {
    check_matrix(op, arg, t, DTYPE_E4M3, rows, cols);
    CHECK(t.scale_layout == SCALE_ROW_1X128 && t.scale_ld >= t.shape[0], "%s: %s has no scale for each 1 x 128", op,
          arg);
    CHECK(t.scale || tensor_numel(t) == 0, "%s: the scales of %s have no memory", op, arg);
}

/* E4M3 with a scale for each 128 x 128; planes 0: a matrix. */
static inline void check_blocks(const char *op, const char *arg, Tensor t, int64_t planes, int64_t rows, int64_t cols) {
    CHECK(t.dtype == DTYPE_E4M3 && t.scale_layout == SCALE_BLOCK_128X128, "%s: %s has no scale for each 128 x 128", op,
          arg);
    if (planes)
        check_shape(op, arg, t, 3, planes, rows, cols);
    else
        check_shape(op, arg, t, 2, rows, cols, 0);
    CHECK(tensor_is_contiguous(t), "%s: %s is strided", op, arg);
    CHECK(t.scale || tensor_numel(t) == 0, "%s: the scales of %s have no memory", op, arg);
}

static inline void check_quantized(const char *op, Quantized q, int64_t rows, int64_t cols) {
    if (q.rows.dtype == DTYPE_E5M6)
        check_matrix(op, "q.rows", q.rows, DTYPE_E5M6, rows, cols);
    else if (!tensor_is_none(q.rows))
        check_tiles(op, "q.rows", q.rows, rows, cols);
    if (!tensor_is_none(q.columns)) check_tiles(op, "q.columns", q.columns, cols, rows);
}

/* Activations, or tiles of them. */
static inline void check_act_or_tiles(const char *op, const char *arg, Tensor t, int64_t rows, int64_t cols) {
    if (t.dtype == DTYPE_E4M3)
        check_tiles(op, arg, t, rows, cols);
    else
        check_act(op, arg, t, rows, cols);
}

/* Outputs lie on no input and on no other output. Bit i of in_place: output i is one of the inputs too. */
static inline void check_apart(const char *op, const Tensor *writes, int n_writes, const Tensor *reads, int n_reads,
                               unsigned in_place) {
    for (int i = 0; i < n_writes; i++) {
        if (!writes[i].data || tensor_numel(writes[i]) == 0) continue;
        int n_shared = 0;
        for (int k = 0; k < n_reads; k++) {
            n_shared += reads[k].data == writes[i].data && tensor_numel(reads[k]) > 0;
            CHECK(n_shared <= (int)(in_place >> i & 1), "%s: output %d lies on input %d", op, i, k);
        }
        for (int k = 0; k < i; k++)
            CHECK(writes[k].data != writes[i].data, "%s: output %d lies on output %d", op, i, k);
    }
}

#define N_OF(tensors) (int)(sizeof(tensors) / sizeof(Tensor))
#define WATCH_IN_PLACE(op, s, writes, reads, in_place)                                                                 \
    do {                                                                                                               \
        check_apart(op, writes, N_OF(writes), reads, N_OF(reads), in_place);                                           \
        ops_watch(d, op, s, writes, N_OF(writes), reads, N_OF(reads));                                                 \
    } while (0)
#define WATCH(op, s, writes, reads) WATCH_IN_PLACE(op, s, writes, reads, 0)

/* Small structs on the device, as tensors for the watcher. */
static inline Tensor stats_tensor(const StepStats *stats) {
    return tensor_1d((void *)(uintptr_t)stats, DTYPE_F64, (int64_t)(sizeof *stats / 8));
}
static inline Tensor params_tensor(const StepParams *params) {
    return tensor_1d((void *)(uintptr_t)params, DTYPE_F64, (int64_t)(sizeof *params / 8));
}

#endif
