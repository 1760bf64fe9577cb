/* Which algorithm of cuBLASLt a GEMM runs with: rows of a table, as text. Floor 1; plain C, built without nvcc too.
 *
 *     sm_90/132 13.1.0 fprop 8192x2048x512 ld 512,512,2048 bf16>bf16 set align 16 sms 132 : id 66 tile 20 stages 36
 *     splitk 1 reduction 0 swizzle 0 custom 5 inner 0 cluster 3 : 42.14.0.5.0.0.0.0
 *
 * One line a row. In front of the first colon stands what the row is for: GPU (architecture / SMs), version of the
 * library, the three GEMMs of a Linear (kernels/ops.h) as MxNxK, row strides of a, b and y in elements, the element
 * types of inputs and output (sums are f32), whether y is set or added to, the alignment of the addresses in bytes, and
 * how many SMs it may fill. Then the algorithm: the library's attributes of it, for the reader, and behind the second
 * colon the library's own 64 bytes, as 64-bit words in hexadecimal. They mean something to that version only.
 *
 * The committed rows are gemm_rows.inc, which `make tune` writes; a checkpoint holds the rows its run computed with. */
#ifndef TRAIN_MOE_CUDA_GEMM_TABLE_H
#define TRAIN_MOE_CUDA_GEMM_TABLE_H

#include <stdio.h>

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GEMM_ROW_LEN = 512, GEMM_ALGO_WORDS = 8 };

/* Where an algorithm was chosen: elsewhere it may not exist, or give other bits. */
typedef struct {
    int arch; /* 90 */
    int n_sms;
    int64_t library; /* as cublasLtGetVersion says it: 130100 = 13.1.0 */
} GemmPlace;

/* One GEMM: everything that its algorithm may depend on. */
typedef struct {
    GemmKind kind;
    int64_t m, n, k, lda, ldb, ldy;
    Dtype in, out;
    bool accumulate;
    int alignment; /* of the addresses, in bytes, at most 16 */
    int sms;       /* it may fill */
} GemmCall;

typedef enum {
    GEMM_ID,
    GEMM_TILE,
    GEMM_STAGES,
    GEMM_SPLITK,
    GEMM_REDUCTION,
    GEMM_SWIZZLE,
    GEMM_CUSTOM,
    GEMM_INNER,
    GEMM_CLUSTER,
    GEMM_ATTRIBUTES
} GemmAttribute;

typedef struct {
    GemmPlace place;
    GemmCall call;
    int32_t attribute[GEMM_ATTRIBUTES]; /* -1: the library does not say */
    uint64_t word[GEMM_ALGO_WORDS];
} GemmRow;

/* Owned: gemm_rows_free. */
typedef struct {
    int n;
    GemmRow *row;
} GemmRows;

/* "sm_90, 132 SMs, cuBLASLt 13.1.0" into buf, returned. */
const char *gemm_place_text(char *buf, int64_t buf_len, const GemmPlace *place);
/* "fprop 8192x2048x512 bf16" into buf, returned: for messages. */
const char *gemm_call_text(char *buf, int64_t buf_len, const GemmCall *call);

/* The row as one line (GEMM_ROW_LEN), without a line end. */
void gemm_row_text(char *text, const GemmRow *row);
/* Reads such a line. Returns 0, or -1 if it is none. */
int gemm_row_parse(GemmRow *row, const char *text);

/* All lines of text; empty ones count for nothing. Returns 0, or -1 with the first that is no row in err (ERR_LEN);
 * then there is nothing to free. */
int gemm_rows_parse(GemmRows *rows, const char *text, char *err);
/* The committed rows. */
void gemm_rows_builtin(GemmRows *rows);
void gemm_rows_free(GemmRows *rows);

bool gemm_place_equal(const GemmPlace *a, const GemmPlace *b);
bool gemm_call_equal(const GemmCall *a, const GemmCall *b);
/* The row of this call at this place, or NULL. */
const GemmRow *gemm_rows_find(const GemmRows *rows, const GemmPlace *place, const GemmCall *call);
/* Adds a row, or puts it in the place of the one for the same call. */
void gemm_rows_put(GemmRows *rows, const GemmRow *row);

/* The file of committed rows: C string literals, one a line, sorted. Reading one that is not there gives no rows. Both
 * return 0, or -1 with err. */
int gemm_rows_read(GemmRows *rows, const char *path, char *err);
int gemm_rows_write(const GemmRows *rows, const char *path, char *err);

#ifdef __cplusplus
}
#endif
#endif
