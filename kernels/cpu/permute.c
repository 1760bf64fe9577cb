/* Tokens to rows of the local experts, and back. Every expert's rows start at a multiple of GROUP_ALIGN and lie in the
 * order of the received tokens, so the rows, and every sum over them, are the same on any layout of ranks. */
#include "cpu.h"
#include "cpu_ops.h"

/* The local index of the expert, or -1. */
static inline int64_t local_expert(int32_t id, const int32_t *slot_of_expert, int first_slot, int64_t n_local) {
    if (id < 0) return -1;
    int64_t local = slot_of_expert[id] - first_slot;
    return local >= 0 && local < n_local ? local : -1;
}

/* A map without rows, and the word that one did not fit. */
static void map_nothing(MoeMap map) {
    for (int64_t e = 0; e < map.expert_start.shape[0]; e++) ((int32_t *)map.expert_start.data)[e] = 0;
    for (int64_t t = 0; t < map.token_row.shape[0]; t++)
        for (int64_t k = 0; k < map.token_row.shape[1]; k++)
            ((int32_t *)map.token_row.data)[t * map.token_row.ld + k] = -1;
    *(double *)map.overflow.data += 1;
}

/* Counts, then starts, then rows: one thread, because the order is the result. */
void cpu_moe_map(MoeMap map, Tensor ids, Tensor weights, Tensor slot_of_expert, int first_slot, Stream s) {
    (void)s;
    const int64_t Tr = ids.shape[0], K = ids.shape[1], El = map.expert_start.shape[0] - 1;
    const int32_t *slot = (const int32_t *)slot_of_expert.data;
    int32_t *start = (int32_t *)map.expert_start.data, *row_token = (int32_t *)map.row_token.data;
    real *row_weight = (real *)map.row_weight.data;
    int32_t next[El];

    for (int64_t e = 0; e < El; e++) next[e] = 0;
    for (int64_t t = 0; t < Tr; t++) {
        for (int64_t k = 0; k < K; k++) {
            int64_t e = local_expert(((const int32_t *)ids.data)[t * ids.ld + k], slot, first_slot, El);
            if (e >= 0) next[e]++;
        }
    }
    start[0] = 0;
    for (int64_t e = 0; e < El; e++) {
        start[e + 1] = start[e] + (next[e] + GROUP_ALIGN - 1) / GROUP_ALIGN * GROUP_ALIGN;
        next[e] = start[e];
    }
    if (start[El] > map.row_token.shape[0]) {
        map_nothing(map);
        return;
    }
    for (int64_t t = 0; t < Tr; t++) {
        for (int64_t k = 0; k < K; k++) {
            int64_t e = local_expert(((const int32_t *)ids.data)[t * ids.ld + k], slot, first_slot, El);
            int32_t row = e < 0 ? -1 : next[e]++;
            ((int32_t *)map.token_row.data)[t * map.token_row.ld + k] = row;
            if (row < 0) continue;
            row_token[row] = (int32_t)t;
            row_weight[row] = ((const real *)weights.data)[t * weights.ld + k];
        }
    }
    for (int64_t e = 0; e < El; e++)
        for (int32_t row = next[e]; row < start[e + 1]; row++) row_token[row] = -1, row_weight[row] = 0;
}

/* The bytes and the scales of a row of tiles. */
static void gather_tiles(const Tensor *y, const Tensor *x, int64_t n, int64_t token) {
    uint8_t *out = (uint8_t *)y->data + n * y->ld;
    if (token < 0)
        memset(out, 0, (size_t)y->shape[1]);
    else
        memcpy(out, (const uint8_t *)x->data + token * x->ld, (size_t)y->shape[1]);
    for (int64_t i = 0; i < ceil_div(y->shape[1], SCALE_TILE); i++)
        y->scale[i * y->scale_ld + n] = token < 0 ? 1 : x->scale[i * x->scale_ld + token];
}

static CPU_CLONES void gather_row(const Tensor *y, const Tensor *x, int64_t n, int64_t token) {
    real x_buf[row_buf(*x)], y_buf[row_buf(*y)];
    const int64_t D = y->shape[1];
    real *out = row_out(*y, n, y_buf);
    if (token < 0) {
        for (int64_t i = 0; i < D; i++) out[i] = 0;
    } else {
        const real *in = row_in(*x, token, x_buf);
        for (int64_t i = 0; i < D; i++) out[i] = in[i];
    }
    row_done(*y, n, out);
}

/* y's columns, anew: 128 rows belong to one expert. */
static void gather_square(const Tensor *yt, const Tensor *x, const int32_t *row_token, int64_t row, int64_t col) {
    const int64_t n_cols = min_i64(x->shape[1] - col, SCALE_TILE);
    Square square;
    for (int64_t r = 0; r < SCALE_TILE; r++) {
        if (row_token[row + r] < 0)
            memset(square.row[r], 0, sizeof square.row[r]);
        else
            tile_read(square.row[r], *x, row_token[row + r], col, n_cols);
    }
    const Quantized q = {tensor_none(), *yt};
    square_write(q, &square, row, col, SCALE_TILE, n_cols);
}

void cpu_gather_rows(Tensor y, Tensor yt, Tensor x, MoeMap map, Stream s) {
    (void)s;
    const int64_t n_rows = ((const int32_t *)map.expert_start.data)[map.expert_start.shape[0] - 1];
    const int64_t squares = ceil_div(x.shape[1], SCALE_TILE);
    if (!tensor_is_none(yt)) {
#pragma omp parallel for schedule(static)
        for (int64_t i = 0; i < n_rows / SCALE_TILE * squares; i++)
            gather_square(&yt, &x, (const int32_t *)map.row_token.data, i / squares * SCALE_TILE,
                          i % squares * SCALE_TILE);
    }
    if (tensor_is_none(y)) return;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < n_rows; n++) {
        const int64_t token = ((const int32_t *)map.row_token.data)[n];
        if (y.dtype == DTYPE_E4M3)
            gather_tiles(&y, &x, n, token);
        else
            gather_row(&y, &x, n, token);
    }
}

static CPU_CLONES void reduce_row(const Tensor *y, const Tensor *x, const int32_t *rows, int64_t K, bool accumulate,
                                  int64_t t) {
    const int64_t D = y->shape[1];
    real x_buf[row_buf(*x)], y_buf[row_buf(*y)], sum[D];
    for (int64_t i = 0; i < D; i++) sum[i] = 0;
    for (int64_t k = 0; k < K; k++) {
        if (rows[k] < 0) continue;
        const real *in = row_in(*x, rows[k], x_buf);
        for (int64_t i = 0; i < D; i++) sum[i] += in[i];
    }
    if (accumulate) {
        const real *before = row_in(*y, t, y_buf);
        for (int64_t i = 0; i < D; i++) sum[i] = before[i] + sum[i];
    }
    real *out = row_out(*y, t, y_buf);
    for (int64_t i = 0; i < D; i++) out[i] = sum[i];
    row_done(*y, t, out);
}

void cpu_reduce_rows(Tensor y, Tensor x, MoeMap map, bool accumulate, Stream s) {
    (void)s;
    const int64_t K = map.token_row.shape[1];
#pragma omp parallel for schedule(static) if (y.shape[0] > 1)
    for (int64_t t = 0; t < y.shape[0]; t++)
        reduce_row(&y, &x, (const int32_t *)map.token_row.data + t * map.token_row.ld, K, accumulate, t);
}

void cpu_unmap_weights(Tensor dweights, Tensor drow_weight, MoeMap map, Stream s) {
    (void)s;
    const int64_t K = dweights.shape[1];
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < dweights.shape[0]; t++) {
        const int32_t *row = (const int32_t *)map.token_row.data + t * map.token_row.ld;
        real *out = (real *)dweights.data + t * dweights.ld;
        for (int64_t k = 0; k < K; k++) out[k] = row[k] < 0 ? 0 : ((const real *)drow_weight.data)[row[k]];
    }
}
