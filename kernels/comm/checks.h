/* What every transfer between ranks wants of its arguments, and what is left of it on a rank alone. */
#ifndef TRAIN_MOE_COMM_CHECKS_H
#define TRAIN_MOE_COMM_CHECKS_H

#include "comm.h"
#include "kernels/base/check.h"

/* n_y elements from n_x of the same kind, each in one piece. */
static inline void check_flat(Tensor y, Tensor x, int64_t n_y, int64_t n_x) {
    CHECK(tensor_is_contiguous(y) && tensor_is_contiguous(x), "a strided tensor is not sent");
    CHECK(y.dtype == x.dtype, "%s from %s", dtype_name(y.dtype), dtype_name(x.dtype));
    CHECK(tensor_numel(y) == n_y && tensor_numel(x) == n_x, "%lld elements from %lld", (long long)tensor_numel(y),
          (long long)tensor_numel(x));
}

static inline void check_peer(const Comm *c, Tensor t, int peer, Group g, const char *name) {
    CHECK(tensor_is_contiguous(t), "a strided tensor is not sent");
    CHECK(peer >= 0 && peer < c->mesh.size[g], "%s: rank %d of %d", name, peer, c->mesh.size[g]);
}

/* What a dispatch moves: rows, or tiles of them. */
static inline void check_sent(Tensor y, Tensor x, int64_t n_y, int64_t n_x) {
    check_flat(y, x, n_y, n_x);
    CHECK(x.dtype != DTYPE_E5M6 && x.scale_layout != SCALE_BLOCK_128X128 && y.scale_layout == x.scale_layout,
          "%s is not sent to experts, or received with other scales", dtype_name(x.dtype));
}

/* R*T tokens as rows, and a plan of as many. */
static inline void check_tokens(const Comm *c, Tensor rows, DispatchPlan plan) {
    const int64_t n_experts = tensor_numel(plan.slot_of_expert);
    CHECK(rows.ndim == 2 && plan.ids.ndim == 2 && plan.ids.dtype == DTYPE_I32, "tokens are rows");
    CHECK(rows.shape[0] == plan.ids.shape[0] && tensor_is_contiguous(rows) && tensor_is_contiguous(plan.ids),
          "%lld rows, a plan of %lld", (long long)rows.shape[0], (long long)plan.ids.shape[0]);
    CHECK(n_experts % c->mesh.n_ep == 0 && rows.shape[0] % c->mesh.n_ep == 0, "%lld experts, %lld rows on %d ranks",
          (long long)n_experts, (long long)rows.shape[0], c->mesh.n_ep);
}

/* The scales of tiles: (tiles of a row, rows), as bits, for they are floats in every build. */
static inline Tensor scales_of(Tensor t) {
    Tensor scales = tensor_2d(t.scale, DTYPE_I32, (t.shape[1] + SCALE_TILE - 1) / SCALE_TILE, t.shape[0]);
    scales.ld = t.scale_ld;
    return scales;
}

/* y = x, and of tiles the scales, unless they are the same memory. */
static inline void copy_alone(const Comm *c, Tensor y, Tensor x, Stream s) {
    if (tensor_is_none(y) || tensor_is_none(x) || y.data == x.data) return;
    if (!x.scale) {
        op_copy(c->device, y, x, s);
        return;
    }
    const int64_t n = tensor_numel(x);
    check_sent(y, x, n, n);
    op_copy(c->device, tensor_1d(y.data, y.dtype, n), tensor_1d(x.data, x.dtype, n), s);
    op_copy(c->device, scales_of(y), scales_of(x), s);
}

#endif
