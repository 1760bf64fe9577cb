/* FP8 tensors in the tests of the CUDA ops. Their bytes and scales are compared as integers: every bit counts. */
#ifndef TRAIN_MOE_TESTS_FP8_TEST_H
#define TRAIN_MOE_TESTS_FP8_TEST_H

#include "tests/cuda/cuda_test.h"

/* On the host, poisoned. blocks: planes 0 is a matrix. */
Tensor h_tiles(Dtype dtype, int64_t rows, int64_t cols);
Tensor h_blocks(int64_t planes, int64_t rows, int64_t cols);
/* Tiles of x (bf16), of its columns; blocks of normal numbers: by the CPU's ops. */
Tensor h_rows_of(Tensor x);
Tensor h_columns_of(Tensor x);
void h_weight(Tensor *w, Tensor *wt, int64_t planes, int64_t rows, int64_t cols, double scale, uint64_t seed);
/* Normal numbers with exponents over 24 binades, and among them tiles of zeros, of 1e-12, of subnormals, at the edges
 * of the formats, with Inf and with NaN. bf16. */
Tensor h_wild(int64_t rows, int64_t cols, uint64_t seed);

/* On the device: a copy, and do two hold the same bits? */
Tensor d_fp8(Tensor host);
bool d_same_fp8(Tensor a, Tensor b);

/* A case whose arguments are any tensors. `call` finds them with fp8_at() in the order of fp8_arg(). */
typedef struct Fp8Case Fp8Case;
struct Fp8Case {
    Case c;
    void (*call)(const Side *s, const Fp8Case *f);
    GemmKind kind;
    bool flag;
    int n, n_args;
    Tensor like[ARGS_MAX];
    int first[ARGS_MAX]; /* argument of the case that has the data, then the scales; -1: absent */
};
Fp8Case *fp8_case(const char *name, void (*call)(const Side *s, const Fp8Case *f));
void fp8_arg(Fp8Case *f, const char *name, Tensor t, ArgKind kind);
Tensor fp8_at(const Side *s, const Fp8Case *f, int i);
/* expect_case, then frees all. */
void fp8_expect(Fp8Case *f);

#endif
