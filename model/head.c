/* The head and the loss, in chunks of rows. (V3 eq. 24; the head is shared by all MTP depths)
 *
 *   logits = hidden W_head^T;  loss = cross entropy;  dhidden = dlogits W_head;  dW_head += dlogits^T hidden
 *
 * Logits of all T rows would be the largest tensor of the model, so only head_chunk rows exist at a time: their
 * gradient is made in place and used up before the next chunk. So head and loss run whole in forward and leave dhidden.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "model.h"

void head_forward(Model *m, Acts *a, int depth, ForwardMode mode) {
    RANGE(m->device, "head forward");
    const Device *d = m->device;
    const ModelShape *s = &a->shape;
    const Weight *head = &m->params.top.weight[WEIGHT_HEAD];
    const bool train = mode == FORWARD_TRAIN;
    for (int64_t first = 0; first < s->T; first += s->head_chunk) {
        const int64_t n = s->T - first < s->head_chunk ? s->T - first : s->head_chunk;
        Tensor hidden = tensor_rows(a->depth[depth].hidden, first, n), logits = tensor_rows(a->logits, 0, n);
        op_gemm(d, logits, hidden, head->w, GEMM_FPROP, false, STREAM_COMPUTE);
        op_cross_entropy(d, tensor_rows(a->loss, first, n), logits,
                         tensor_rows(m->batch[a->batch].targets[depth], first, n), s->V, depth, train, m->step_params,
                         STREAM_COMPUTE);
        if (!train) continue;
        op_gemm(d, tensor_rows(a->depth[depth].dhidden, first, n), logits, head->w, GEMM_DGRAD, false, STREAM_COMPUTE);
        op_gemm(d, head->dw, logits, hidden, GEMM_WGRAD, true, STREAM_COMPUTE);
    }
    op_loss_sum(d, train ? m->stats : m->eval_stats, a->loss, depth, STREAM_COMPUTE);
}

void model_logits(Model *m, Acts *a, int64_t t, float *logits) {
    const Device *d = m->device;
    const ModelShape *s = &a->shape;
    if (!model_has_output(m)) return;
    Tensor row = tensor_rows(a->logits, 0, 1);
    op_gemm(d, row, tensor_rows(a->depth[0].hidden, t, 1), m->params.top.weight[WEIGHT_HEAD].w, GEMM_FPROP, false,
            STREAM_COMPUTE);
    const size_t bytes = (size_t)s->V * dtype_size(s->act);
    void *host = calloc(1, bytes);
    CHECK(host, "no memory for %lld logits", (long long)s->V);
    op_synchronize(d, STREAM_COMPUTE);
    op_copy_out(d, host, row.data, bytes, STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
    for (int64_t i = 0; i < s->V; i++) {
        if (s->act == DTYPE_F32) {
            logits[i] = (float)((const real *)host)[i];
        } else {
            uint32_t bits = (uint32_t)((const uint16_t *)host)[i] << 16;
            memcpy(&logits[i], &bits, 4);
        }
    }
    free(host);
}
