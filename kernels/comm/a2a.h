/* What an exchange of tokens over NCCL computes beside moving bytes (a2a.cu). Floor 2; valid C and C++. */
#ifndef TRAIN_MOE_A2A_H
#define TRAIN_MOE_A2A_H

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of the plan that everybody sent whole, what is meant for expert rank `ep` of n_ep: other ids become -1, their weights
 * 0.   ids (R*T, K) i32, weights (R*T, K) f32: read and written; slot_of_expert (E) i32 */
void a2a_keep_own(Tensor ids, Tensor weights, Tensor slot_of_expert, int ep, int n_ep, Stream s);

/* Rows without an id become zero.   rows (R*T, D) of 2 or 4 bytes an element;  ids (R*T, K) i32 */
void a2a_zero_absent(Tensor rows, Tensor ids, Stream s);

/* y = parts[0] + parts[1] + ..., in this order.   y (n) f32, f64, i32, or bf16 (summed in f32);  parts (size, n) of its
 * dtype, not y */
void a2a_sum_in_order(Tensor y, const void *parts, int size, Stream s);

#ifdef __cplusplus
}
#endif
#endif
