/* The CPU backend's functions, one for each member of Ops and named after it. Contracts: kernels/ops.h. Only backend.c
 * puts them into the table; everybody else calls the wrappers op_*(). Kept in the order of Ops. */
#ifndef TRAIN_MOE_CPU_OPS_H
#define TRAIN_MOE_CPU_OPS_H

#include "kernels/ops.h"

/* quantize.c */
void cpu_quantize(Quantized q, Tensor x, Stream s);
void cpu_quantize_weight(Tensor w, Tensor wt, Tensor master, Stream s);
void cpu_transpose_weight(Tensor wt, Tensor w, Stream s);
void cpu_tile_stats(TileStats *stats, Tensor x, Stream s);

/* embed.c */
void cpu_embed_forward(Tensor y, Tensor ids, Tensor w, Stream s);
void cpu_embed_backward(Tensor dw, Tensor dy, Tensor ids, Stream s);

/* rmsnorm.c */
void cpu_residual_rmsnorm_forward(Tensor r, Tensor y, Tensor q, Tensor rstd, Tensor x, Tensor branch, Tensor w,
                                  double eps, Stream s);
void cpu_residual_rmsnorm_backward(Tensor dx, Tensor dw, Tensor partial, Tensor dy, Tensor dr, Tensor r, Tensor rstd,
                                   Tensor w, Stream s);

/* gemm.c */
void cpu_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s);
void cpu_head_gemm(Tensor y, Tensor a, Tensor b, GemmKind kind, HeadSteps steps, Stream s);

/* rope.c */
void cpu_rope_split_forward(Tensor q, Tensor k, Tensor v, Tensor q_in, Tensor kv, Tensor k_pe, Tensor position,
                            Tensor inv_freq, AttentionShape shape, Stream s);
void cpu_rope_split_backward(Tensor dq_in, Tensor dkv, Tensor dk_pe, Tensor dq, Tensor dk, Tensor dv, Tensor position,
                             Tensor inv_freq, AttentionShape shape, Stream s);
void cpu_rope_forward(Tensor y, Tensor x, Tensor position, Tensor inv_freq, AttentionShape shape, Stream s);

/* attention.c */
void cpu_attention_forward(Tensor o, Tensor lse, Tensor q, Tensor k, Tensor v, Tensor doc_start, AttentionShape shape,
                           Stream s);
void cpu_attention_backward(Tensor dq, Tensor dk, Tensor dv, Tensor delta, Tensor d_o, Tensor o, Tensor q, Tensor k,
                            Tensor v, Tensor lse, Tensor doc_start, AttentionShape shape, Stream s);

/* attention_decode.c */
void cpu_attention_decode(Tensor o, Tensor partial, Tensor q_latent, Tensor q, Tensor cache, AttentionShape shape,
                          Stream s);

/* router.c */
void cpu_router_forward(Tensor ids, Tensor weights, Tensor scores, Tensor counts, Tensor seq_count, StepStats *stats,
                        Tensor logits, Tensor bias, Tensor position, RouterShape shape, Stream s);
void cpu_router_backward(Tensor dlogits, Tensor dweights, Tensor ids, Tensor weights, Tensor scores, Tensor seq_count,
                         Tensor position, const StepParams *params, RouterShape shape, Stream s);

/* update.c */
void cpu_bias_step(Tensor bias, Tensor counts, const StepParams *params, const StepStats *stats, Stream s);

/* permute.c */
void cpu_moe_map(MoeMap map, Tensor ids, Tensor weights, Tensor slot_of_expert, int first_slot, Stream s);
void cpu_gather_rows(Tensor y, Tensor yt, Tensor x, MoeMap map, Stream s);
void cpu_reduce_rows(Tensor y, Tensor x, MoeMap map, bool accumulate, Stream s);
void cpu_unmap_weights(Tensor dweights, Tensor drow_weight, MoeMap map, Stream s);

/* grouped_gemm.c */
void cpu_grouped_gemm(Tensor y, Tensor x, Tensor w, Tensor expert_start, GemmKind kind, Stream s);
void cpu_grouped_wgrad(Tensor dw, Tensor dy, Tensor x, Tensor expert_start, Stream s);

/* swiglu.c */
void cpu_swiglu_forward(Tensor y, Tensor y_rows, Tensor h_rows, Tensor h, Tensor weight, Stream s);
void cpu_swiglu_backward(Tensor dh, Quantized dhq, Tensor y_columns, Tensor dweight, Tensor dy, Tensor h, Tensor weight,
                         Stream s);

/* cross_entropy.c */
void cpu_cross_entropy(Tensor loss, Tensor logits, Tensor targets, int64_t vocab, int depth, bool want_gradient,
                       const StepParams *params, Stream s);

/* update.c */
void cpu_loss_sum(StepStats *stats, Tensor loss, int depth, Stream s);
void cpu_grad_squares(Tensor partial, Tensor g, const Interval *intervals, Stream s);
void cpu_grad_norm(StepStats *stats, Tensor partial, Stream s);
void cpu_update_gate(StepStats *stats, UpdateState *state, const StepParams *params, Stream s);
void cpu_adamw_cast(Tensor copy, Tensor copy_t, Tensor master, Tensor m, Tensor v, Tensor grad, bool decay,
                    const StepParams *params, const StepStats *stats, const UpdateState *state, Stream s);

#endif
