/* Multi-token prediction: the module in front of its block. (V3 2.2, eq. 21-23)
 *
 *   x0^k = M_k [ RMSNorm(Emb(t_{i+k})) ; RMSNorm(h^{k-1}_i) ]
 *
 * The report writes the hidden half first; the released weights, and so we, put the embedding first. h^{k-1} is the
 * state after the final norm (of the main model, or of the depth before). Embedding and head are the main model's own,
 * gradients included. Position i of depth k sees the embedding of token i+k and predicts token i+k+1. */
#include "model.h"

static Block *mtp_block(Model *m, int depth) {
    return &m->params.blocks[m->shape.L + depth - 1];
}

void mtp_input_forward(Model *m, Acts *a, int depth) {
    RANGE(m->device, "mtp input forward");
    const Device *d = m->device;
    const ModelShape *s = &a->shape;
    const Weight *w = mtp_block(m, depth)->weight;
    Tensor eh = a->depth[depth].eh, none = tensor_none();
    op_embed_forward(d, a->depth[depth].emb, m->batch[a->batch].tokens[depth], m->params.top.weight[WEIGHT_EMBED].w,
                     STREAM_COMPUTE);
    op_residual_rmsnorm_forward(d, none, tensor_cols(eh, 0, s->D), none, a->depth[depth].emb_rstd, a->depth[depth].emb,
                                none, w[WEIGHT_ENORM].w, s->eps, STREAM_COMPUTE);
    op_residual_rmsnorm_forward(d, none, tensor_cols(eh, s->D, s->D), none, a->depth[depth].h_rstd,
                                a->depth[depth - 1].hidden, none, w[WEIGHT_HNORM].w, s->eps, STREAM_COMPUTE);
    op_gemm(d, a->x0, eh, w[WEIGHT_EH_PROJ].w, GEMM_FPROP, false, STREAM_COMPUTE);
}

void mtp_input_backward(Model *m, Acts *a, int depth, Tensor dx0) {
    RANGE(m->device, "mtp input backward");
    const Device *d = m->device;
    const ModelShape *s = &a->shape;
    const Weight *w = mtp_block(m, depth)->weight;
    Tensor none = tensor_none();
    Tensor partial = tensor_2d(a->partial.data, a->partial.dtype, a->partial.shape[0], s->D);
    op_gemm(d, w[WEIGHT_EH_PROJ].dw, dx0, a->depth[depth].eh, GEMM_WGRAD, true, STREAM_COMPUTE);
    op_gemm(d, a->deh, dx0, w[WEIGHT_EH_PROJ].w, GEMM_DGRAD, false, STREAM_COMPUTE);
    op_residual_rmsnorm_backward(d, a->demb, w[WEIGHT_ENORM].dw, partial, tensor_cols(a->deh, 0, s->D), none,
                                 a->depth[depth].emb, a->depth[depth].emb_rstd, w[WEIGHT_ENORM].w, STREAM_COMPUTE);
    op_embed_backward(d, m->params.top.weight[WEIGHT_EMBED].dw, a->demb, m->batch[a->batch].tokens[depth],
                      STREAM_COMPUTE);
    /* Into the hidden state of the depth before, beside what its own head left there. */
    Tensor dh = a->depth[depth - 1].dhidden;
    op_residual_rmsnorm_backward(d, dh, w[WEIGHT_HNORM].dw, partial, tensor_cols(a->deh, s->D, s->D), dh,
                                 a->depth[depth - 1].hidden, a->depth[depth].h_rstd, w[WEIGHT_HNORM].w, STREAM_COMPUTE);
}
