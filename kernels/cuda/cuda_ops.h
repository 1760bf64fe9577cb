/* The CUDA backend's functions, one for each member of Ops and named after it. Contracts: kernels/ops.h. Only
 * backend.cu puts them into the table; everybody else calls the wrappers op_*(). Kept in the order of Ops. */
#ifndef TRAIN_MOE_CUDA_OPS_H
#define TRAIN_MOE_CUDA_OPS_H

#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* quantize.cu */
void cuda_quantize(Quantized q, Tensor x, Stream s);
void cuda_quantize_weight(Tensor w, Tensor wt, Tensor master, Stream s);
void cuda_transpose_weight(Tensor wt, Tensor w, Stream s);
void cuda_tile_stats(TileStats *stats, Tensor x, Stream s);
/* y (act) = what the tiles or blocks x mean: a part of copy. */
void cuda_dequantize(Tensor y, Tensor x, Stream s);

/* embed.cu */
void cuda_embed_forward(Tensor y, Tensor ids, Tensor w, Stream s);
void cuda_embed_backward(Tensor dw, Tensor dy, Tensor ids, Stream s);

/* rmsnorm.cu */
void cuda_residual_rmsnorm_forward(Tensor r, Tensor y, Tensor q, Tensor rstd, Tensor x, Tensor branch, Tensor w,
                                   double eps, Stream s);
void cuda_residual_rmsnorm_backward(Tensor dx, Tensor dw, Tensor partial, Tensor dy, Tensor dr, Tensor r, Tensor rstd,
                                    Tensor w, Stream s);

/* gemm.cu */
void cuda_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s);
/* Chooses the algorithm and makes the descriptors of such a call; computes nothing. */
void cuda_gemm_prepare(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s);
void cuda_head_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, HeadSteps steps, Stream s);
/* Drops all that it has made. */
void cuda_gemm_forget(void);

/* rope.cu */
void cuda_rope_split_forward(Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe, Tensor position,
                             Tensor inv_freq, AttentionShape shape, Stream s);
void cuda_rope_split_backward(Tensor dq_in, Tensor dkv, Tensor dk_pe, Tensor dq, Tensor dk, Tensor dv, Tensor position,
                              Tensor inv_freq, AttentionShape shape, Stream s);
void cuda_rope_forward(Tensor y, Tensor x, Tensor position, Tensor inv_freq, AttentionShape shape, Stream s);

/* attention.cu */
void cuda_attention_forward(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor doc_start, AttentionShape shape,
                            Stream s);
void cuda_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor o, Tensor q, Tensor k,
                             Tensor v, Tensor lse, Tensor doc_start, AttentionShape shape, Stream s);

/* attention_decode.cu */
void cuda_attention_decode(Tensor o, Tensor partial, Tensor q_latent, Tensor q, Tensor cache, AttentionShape shape,
                           Stream s);

/* router.cu */
void cuda_router_forward(Tensor ids, Tensor weights, Tensor scores, Tensor counts, Tensor seq_count, StepStats *stats,
                         Tensor logits, Tensor bias, Tensor position, RouterShape shape, Stream s);
void cuda_router_backward(Tensor dlogits, Tensor dweights, Tensor ids, Tensor weights, Tensor scores, Tensor seq_count,
                          Tensor position, const StepParams *params, RouterShape shape, Stream s);

/* update.cu */
void cuda_bias_step(Tensor bias, Tensor counts, const StepParams *params, const StepStats *stats, Stream s);

/* permute.cu */
void cuda_moe_map(MoeMap map, Tensor ids, Tensor weights, Tensor slot_of_expert, int first_slot, Stream s);
void cuda_gather_rows(Tensor y, Tensor yt, Tensor x, MoeMap map, Stream s);
void cuda_reduce_rows(Tensor y, Tensor x, MoeMap map, bool accumulate, Stream s);
void cuda_unmap_weights(Tensor dweights, Tensor drow_weight, MoeMap map, Stream s);

/* grouped_gemm.cu */
void cuda_grouped_gemm(Tensor y, Tensor x, Tensor w, Tensor expert_start, GemmKind kind, Stream s);
void cuda_grouped_wgrad(Tensor dw, Tensor dy, Tensor x, Tensor expert_start, Stream s);

/* swiglu.cu */
void cuda_swiglu_forward(Tensor y, Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s);
void cuda_swiglu_backward(Tensor dh, Quantized dhq, Tensor y_columns, Tensor dweight, Tensor dy, Tensor h,
                          Tensor weight, Stream s);

/* cross_entropy.cu */
void cuda_cross_entropy(Tensor loss, Tensor logits, Tensor targets, int64_t vocab, int depth, bool want_gradient,
                        const StepParams *params, Stream s);

/* update.cu */
void cuda_loss_sum(StepStats *stats, Tensor loss, int depth, Stream s);
void cuda_grad_squares(Tensor partial, Tensor g, const Interval *intervals, Stream s);
void cuda_grad_norm(StepStats *stats, Tensor partial, Stream s);
void cuda_update_gate(StepStats *stats, UpdateState *state, const StepParams *params, Stream s);
void cuda_adamw_cast(Tensor copy, Tensor copy_t, Tensor master, Tensor m, Tensor v, Tensor grad, bool decay,
                     const StepParams *params, const StepStats *stats, const UpdateState *state, Stream s);

#ifdef __cplusplus
}
#endif
#endif
