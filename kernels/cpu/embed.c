/* The embedding: rows of a table, picked by token. */
#include "cpu.h"
#include "cpu_ops.h"

enum {
    EMBED_COLUMNS = 64,     /* columns of dw that one loop iteration owns */
    EMBED_TOKENS = 1 << 15, /* tokens whose rows are summed before they are added to dw */
};

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

static void sift_down(int64_t *heap, int64_t root, int64_t n) {
    for (int64_t child = 2 * root + 1; child < n; root = child, child = 2 * root + 1) {
        if (child + 1 < n && heap[child + 1] > heap[child]) child++;
        if (heap[root] >= heap[child]) return;
        const int64_t swap = heap[root];
        heap[root] = heap[child];
        heap[child] = swap;
    }
}

/* order = id * 2^32 + token, ascending: tokens of one id stand together. Sorted in place. */
static void sort_by_id(int64_t *order, const int32_t *id, int64_t n) {
    for (int64_t t = 0; t < n; t++) order[t] = (int64_t)id[t] << 32 | t;
    for (int64_t root = n / 2 - 1; root >= 0; root--) sift_down(order, root, n);
    for (int64_t end = n - 1; end > 0; end--) {
        const int64_t largest = order[0];
        order[0] = order[end];
        order[end] = largest;
        sift_down(order, 0, end);
    }
}

static CPU_CLONES void backward_columns(const Tensor *dw, const Tensor *dy, const int64_t *order, int64_t n_tokens) {
    for (int64_t i = 0; i < n_tokens;) {
        const int64_t id = order[i] >> 32, n = dy->shape[1];
        real sum[EMBED_COLUMNS] = {0}, dy_buf[EMBED_COLUMNS];
        for (; i < n_tokens && order[i] >> 32 == id; i++) {
            const real *in = row_in(*dy, order[i] & INT32_MAX, dy_buf);
            for (int64_t j = 0; j < n; j++) sum[j] += in[j];
        }
        real *out = (real *)dw->data + id * dw->ld;
        for (int64_t j = 0; j < n; j++) out[j] += sum[j];
    }
}

/* Threads share the columns, not the tokens: two tokens with one id add to one row, and their order must not change. */
void cpu_embed_backward(Tensor dw, Tensor dy, Tensor ids, Stream s) {
    (void)s;
    const int64_t T = dy.shape[0], D = dy.shape[1];
    int64_t order[T < EMBED_TOKENS ? T : EMBED_TOKENS];
    for (int64_t at = 0; at < T; at += EMBED_TOKENS) {
        const int64_t n_tokens = T - at < EMBED_TOKENS ? T - at : EMBED_TOKENS;
        sort_by_id(order, (const int32_t *)ids.data + at, n_tokens);
#pragma omp parallel for schedule(static)
        for (int64_t first = 0; first < D; first += EMBED_COLUMNS) {
            const int64_t n = D - first < EMBED_COLUMNS ? D - first : EMBED_COLUMNS;
            Tensor dw_part = tensor_cols(dw, first, n), dy_part = tensor_cols(tensor_rows(dy, at, n_tokens), first, n);
            backward_columns(&dw_part, &dy_part, order, n_tokens);
        }
    }
}
