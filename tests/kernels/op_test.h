/* What the tests of the ops share. Both builds use it: float (DTYPE_F32 tensors hold floats, compared with a double
 * loop written in the test) and -DREAL_IS_DOUBLE (they hold doubles, gradients are compared with finite differences).
 */
#ifndef TRAIN_MOE_TESTS_OP_TEST_H
#define TRAIN_MOE_TESTS_OP_TEST_H

#include "kernels/ops.h"
#include "tests/test.h"

/* The CPU device of the tests. */
const Device *op_test_device(void);
#define DEV op_test_device()

/* Bound of a result against a reference made in double from the same (rounded) inputs, relative to the largest element:
 * what float's or double's rounding may do in sums of a few thousand terms. A bf16 output adds one rounding, 2^-8. */
#ifdef REAL_IS_DOUBLE
#define OP_TOLERANCE 1e-12
#else
#define OP_TOLERANCE 2e-5
#endif
#define BF16_TOLERANCE (1.0 / 256 + OP_TOLERANCE)
/* Bound of an analytic gradient against central differences, in the double build. */
#define FD_TOLERANCE 1e-6

/* New contiguous tensors, zeroed; freed with the test's process or by t_free_all(). */
Tensor t_zeros(Dtype dtype, int ndim, int64_t n0, int64_t n1, int64_t n2);
#define T1(dtype, n) t_zeros(dtype, 1, n, 1, 1)
#define T2(dtype, rows, cols) t_zeros(dtype, 2, rows, cols, 1)
#define T3(dtype, planes, rows, cols) t_zeros(dtype, 3, planes, rows, cols)
/* A (rows, cols) column slice in the middle of a matrix that has `gap` columns more; the gap holds a canary that
 * t_gap_is_intact() checks. */
Tensor t_slice(Dtype dtype, int64_t rows, int64_t cols, int64_t gap);
bool t_gap_is_intact(Tensor slice, int64_t gap);
void t_free_all(void);

/* Element i of the rows of `t` laid end to end (the gaps of ld not counted), F32, BF16 or I32. t_set rounds. */
double t_get(Tensor t, int64_t i);
void t_set(Tensor t, int64_t i, double x);

/* Fills with scale * normal numbers of stream `seed` (rounded to the tensor's dtype). Returns t. */
Tensor t_normal(Tensor t, double scale, uint64_t seed);
/* Every element NaN (integers: 0x7FC0DEAD; of tiles scales too), to prove what an op writes. Returns t. */
Tensor t_poison(Tensor t);
Tensor t_fill(Tensor t, double x);
/* A new contiguous tensor of the same shape, dtype and values. */
Tensor t_copy(Tensor t);
/* i32 tensor from a list. */
Tensor t_ids(const int *list, int64_t n);

/* max |t[i] - want[i]| / max(|want|, tiny); NaN if any element of t is NaN. */
double t_error(Tensor t, const double *want);
bool t_same_bits(Tensor a, Tensor b);
bool t_is_finite(Tensor t);
/* The elements as new doubles (freed by t_free_all). */
double *t_doubles(Tensor t);

/* sum_i y[i] * c[i], c the normal numbers of stream `seed`: the scalar loss of finite differences. Its gradient is
 * t_normal(dy, 1, seed). */
double t_dot_normal(Tensor y, uint64_t seed);

/* Central differences of loss(context) by every element of x (at most max_elements, spread evenly), against dx.
 * `signature` (may be NULL) names the discrete choice made by the last loss(): steps that change it are skipped and
 * counted in *n_skipped (may be NULL). Expects the largest |difference| / max |dx or difference| < FD_TOLERANCE, names
 * `name` if not, and expects that at least half of the steps were taken. Double build only (else returns 0 at once).
 * Runs on one OpenMP thread and leaves it so. Returns the error. */
typedef double (*LossFn)(void *context);
typedef uint64_t (*SignatureFn)(void *context);
double fd_check(const char *name, Tensor x, Tensor dx, LossFn loss, SignatureFn signature, void *context,
                int64_t max_elements, int64_t *n_skipped);

/* Runs fn(context) with one OpenMP thread and with two and four, and once more with one; expects equal bits in every
 * one of the outputs each time. fn must write all of the outputs (they are poisoned before; accumulated ones are zeroed
 * by fn). */
void expect_same_bits(const char *name, void (*fn)(void *context), void *context, const Tensor *outputs, int n_outputs);

#endif
