/* Numbers with a scale for each 128 of a row: E4M3 and E5M6 tiles (tensor.h, small_floats.h), read and written one
 * scale at a time; blocks of a matrix are read likewise. Internal to kernels/cpu. */
#ifndef TRAIN_MOE_TILES_H
#define TRAIN_MOE_TILES_H

#include "kernels/ops.h"

/* A square of numbers on its way into tiles of rows and of columns. */
typedef struct {
    float row[SCALE_TILE][SCALE_TILE];
} Square;

/* out = elements [col, col + n) of row `row`; they have one scale: col is a multiple of 128, n at most 128. */
void tile_read(float *out, Tensor x, int64_t row, int64_t col, int64_t n);
/* Chooses the scale of x and writes it and the elements. */
void tile_write(Tensor q, int64_t row, int64_t col, const float *x, int64_t n);
/* The corner (n_rows, n_cols) of a square, whose first element is (row, col) of the matrix, to q.rows and q.columns. */
void square_write(Quantized q, const Square *square, int64_t row, int64_t col, int64_t n_rows, int64_t n_cols);

/* x as bf16 would keep it. */
float tile_round(float x);

#endif
