/* A tensor: a small value that borrows its memory. Floor 1; valid C and C++.
 *
 * The dictionary of letters, used in every comment below this folder and above it:
 *
 *     B sequences   S positions of a sequence   T = B*S tokens of a micro-batch
 *     D hidden width   H heads   V vocabulary   L layers
 *     E routed experts   K experts per token   F expert hidden width   N rows after dispatch
 *     Dc kv latent   Dq q latent   Dn / Dr / Dv per-head no-rope / rope / value widths   Dqk = Dn + Dr
 *     P pipeline ranks   M micro-batches   R expert-parallel ranks
 *
 * All extents, strides and counts are 64-bit. Row-major; only the last-but-one dimension may be strided (`ld`), so a
 * column slice of a matrix is a tensor. `n_rows` (or NULL) points to the true row count on the device where routing
 * decides it: rows past it hold nothing that may be read. */
#ifndef TRAIN_MOE_TENSOR_H
#define TRAIN_MOE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `real` is how the CPU stores and computes DTYPE_F32. The tests build the same sources with -DREAL_IS_DOUBLE, so that
 * gradients can be held against finite differences; the trainer is always built with float. */
#ifdef REAL_IS_DOUBLE
typedef double real;
#else
typedef float real;
#endif

/* E5M6 is a storage format of 12 bits: eight values of a row lie in three 32-bit words. */
typedef enum { DTYPE_NONE, DTYPE_F32, DTYPE_BF16, DTYPE_E4M3, DTYPE_I32, DTYPE_F64, DTYPE_E5M6, DTYPE_COUNT } Dtype;

/* How `scale` belongs to the data of an E4M3 or E5M6 tensor (value = stored number * scale); SCALE_NONE everywhere
 * else.
 *   ROW_1X128      (rows, cols): element (r, c) has scale[c / 128 * scale_ld + r]
 *   BLOCK_128X128  (.., rows, cols): element (r, c) of a plane has scale[r / 128 * scale_ld + c / 128]; a plane has
 *                  ceil(rows / 128) * scale_ld of them
 * The last tile of a row or column may be partial. These are the layouts that cuBLASLt reads. */
typedef enum { SCALE_NONE, SCALE_ROW_1X128, SCALE_BLOCK_128X128 } ScaleLayout;
enum { SCALE_TILE = 128 };

typedef struct {
    void *data; /* NULL: absent, or being laid out */
    float *scale;
    const int32_t *n_rows;
    ScaleLayout scale_layout;
    Dtype dtype;
    int ndim;
    int64_t shape[4];
    int64_t ld;       /* elements from one row (last dimension) to the next */
    int64_t scale_ld; /* see ScaleLayout */
} Tensor;

size_t dtype_size(Dtype dtype); /* bytes of an element; 0 for E5M6, see tensor_bytes */
const char *dtype_name(Dtype dtype);

/* Elements [first, first + n) of a vector, or of a tensor flattened. */
typedef struct {
    int64_t first, n;
} Interval;

/* An absent tensor, for optional arguments. */
Tensor tensor_none(void);
bool tensor_is_none(Tensor t);

/* Contiguous tensors over `data` (borrowed). */
Tensor tensor_1d(void *data, Dtype dtype, int64_t n);
Tensor tensor_2d(void *data, Dtype dtype, int64_t rows, int64_t cols);
Tensor tensor_3d(void *data, Dtype dtype, int64_t planes, int64_t rows, int64_t cols);

/* E4M3 with a scale for each 1 x 128, E5M6 likewise; E4M3 with one for each 128 x 128, of a matrix or of planes. */
Tensor tensor_tiles(void *data, float *scale, Dtype dtype, int64_t rows, int64_t cols);
Tensor tensor_blocks(void *data, float *scale, int64_t planes, int64_t rows, int64_t cols); /* planes 0: 2-D */
int64_t tensor_n_scales(Tensor t); /* floats behind `scale`; 0 without one */

int64_t tensor_numel(Tensor t); /* elements, without the gaps of ld */
size_t tensor_bytes(Tensor t);  /* bytes of a contiguous tensor of this shape */
bool tensor_is_contiguous(Tensor t);

/* Views: nothing is copied. */
Tensor tensor_cols(Tensor t, int64_t first, int64_t n); /* columns [first, first + n) of a 2-D tensor */
Tensor tensor_rows(Tensor t, int64_t first, int64_t n); /* rows [first, first + n) of a 1-D or 2-D tensor */
Tensor tensor_plane(Tensor t, int64_t index);           /* t[index] of a 3-D or contiguous 2-D tensor: one dim less */
Tensor tensor_reshape2(Tensor t, int64_t rows, int64_t cols); /* of a contiguous tensor */

#ifdef __cplusplus
}
#endif
#endif
