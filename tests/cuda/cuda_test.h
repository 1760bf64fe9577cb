/* What the tests of the CUDA ops share. An op runs on the CPU and on the GPU with the same arguments; the results
 * are held against each other.
 *
 * A test makes host tensors with the helpers of tests/kernels/op_test.h, lists them as the arguments of a case and
 * calls expect_case(). On the GPU, outputs are poisoned with NaN before the call, the memory around every argument
 * and between its rows is checked afterwards, and the op runs three times, the last time from a captured graph: all
 * bits must be equal. Without a GPU every test fails. */
#ifndef TRAIN_MOE_TESTS_CUDA_TEST_H
#define TRAIN_MOE_TESTS_CUDA_TEST_H

#include "tests/kernels/op_test.h"

enum { ARGS_MAX = 16 };

/* The GPU of the tests, started by the first call. */
const Device *cuda_test_device(void);
#define CPU op_test_device()
#define GPU cuda_test_device()

/* Largest difference between the backends, as a share of the largest element. */
#define CUDA_F32_TOLERANCE 1e-5
#define CUDA_SUM_TOLERANCE 2e-5 /* f32 sums over thousands of terms */
#define CUDA_BF16_TOLERANCE (1.0 / 128)

typedef enum {
    ARG_IN,     /* read */
    ARG_OUT,    /* written: poisoned before. What the CPU does not write must keep its poison on the GPU, too. */
    ARG_ADD,    /* read and written */
    ARG_SCRATCH /* poisoned before; what is left in it is its own affair, but the same in every run */
} ArgKind;

typedef struct {
    const char *name;
    Tensor t; /* on the host; two arguments with the same data share their memory on both sides */
    ArgKind kind;
} Arg;

/* The arguments where they are read and written: on the host or on the device. */
typedef struct {
    const Device *device;
    Tensor t[ARGS_MAX]; /* in the order of the case */
    StepParams *params;
    StepStats *stats;
    UpdateState *state;
    const void *context;
} Side;

typedef struct {
    const char *name;
    void (*run)(const Side *s); /* one or more ops on STREAM_COMPUTE */
    const void *context;
    Arg args[ARGS_MAX]; /* ends with the first that has no name */
    StepParams params;
    StepStats stats;
    UpdateState state;
    const char *by_element; /* argument whose differences count as a share of the element plus 1e-3 of the largest */
    double f32_tolerance;   /* 0: CUDA_F32_TOLERANCE */
    double bf16_tolerance;  /* 0: CUDA_BF16_TOLERANCE */
} Case;

/* Results of the CPU are left in the host tensors and structs of the case. */
void expect_case(Case *c);

/* Memory of the device with the content of a host tensor, at the same alignment. Released by d_free_all(). */
Tensor d_copy(Tensor host);
/* The content of a device tensor made from `host`, as a new host tensor (contiguous rows). */
Tensor d_read(Tensor device);
void d_free_all(void);

/* "f32" or "bf16" for loops over both. */
extern const Dtype act_dtypes[2];

/* A case's name: printf into a text that lives as long as the test. */
const char *case_name(const char *fmt, ...) PRINTF_LIKE(1, 2);

#endif
