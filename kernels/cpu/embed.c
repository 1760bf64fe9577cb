/* The embedding: rows of a table, picked by token. */
#include "cpu.h"
#include "cpu_ops.h"

enum { EMBED_COLUMNS = 64 }; /* columns of dw that one loop iteration owns */

static CPU_CLONES void forward_row(const Tensor *y, const Tensor *w, int64_t t, int64_t id) {
    real w_buf[row_buf(*w)], y_buf[row_buf(*y)];
    const real *in = row_in(*w, id, w_buf);
    real *out = row_out(*y, t, y_buf);
    for (int64_t j = 0; j < y->shape[1]; j++) out[j] = in[j];
    row_done(*y, t, out);
}

void cpu_embed_forward(Tensor y, Tensor ids, Tensor w, Stream s) {
    (void)s;
    const int32_t *id = (const int32_t *)ids.data;
#pragma omp parallel for schedule(static) if (ids.shape[0] > 1)
    for (int64_t t = 0; t < ids.shape[0]; t++) forward_row(&y, &w, t, id[t]);
}

static CPU_CLONES void backward_columns(const Tensor *dw, const Tensor *dy, const int32_t *id, int64_t n_tokens) {
    for (int64_t t = 0; t < n_tokens; t++) {
        real dy_buf[EMBED_COLUMNS];
        const real *in = row_in(*dy, t, dy_buf);
        real *out = (real *)dw->data + id[t] * dw->ld;
        for (int64_t j = 0; j < dy->shape[1]; j++) out[j] += in[j];
    }
}

/* Threads share the columns, not the tokens: two tokens with one id add to one row, and their order must not change. */
void cpu_embed_backward(Tensor dw, Tensor dy, Tensor ids, Stream s) {
    (void)s;
    const int64_t D = dy.shape[1];
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < D; first += EMBED_COLUMNS) {
        int64_t n = D - first < EMBED_COLUMNS ? D - first : EMBED_COLUMNS;
        Tensor dw_part = tensor_cols(dw, first, n), dy_part = tensor_cols(dy, first, n);
        backward_columns(&dw_part, &dy_part, (const int32_t *)ids.data, ids.shape[0]);
    }
}
