/* A backend that computes nothing: to walk through a model's calls before the first step. Floor 1. */
#ifndef TRAIN_MOE_REHEARSAL_H
#define TRAIN_MOE_REHEARSAL_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Every op returns at once, alloc with NULL; but gemm is the function given. The wrappers op_*() check their contracts
 * as ever, so tensors have to have memory; nothing reads or writes it. */
Ops ops_rehearsal(void (*gemm)(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s));

#ifdef __cplusplus
}
#endif
#endif
