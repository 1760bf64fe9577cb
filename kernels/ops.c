/* The wrappers of ops.h: every contract is checked here, once, for all backends; then the op runs.
 *
 * A failed check is our bug, never the user's, so it ends the job with the op's name, the argument and both shapes.
 * Each wrapper tells the device's watcher, if there is one, what the op reads and writes.
 *
 * Here: memory, streams, casts and the update. ops_layer.c: what forward and backward call. */
#include "ops.h"

#include "ops_check.h"

void ops_check_complete(const Ops *ops) {
    /* Every member is a pointer of the same size, so the struct can be walked as an array of them. */
    const char *bytes = (const char *)ops;
    for (size_t at = 0; at < sizeof *ops; at += sizeof(void *)) {
        bool set = false;
        for (size_t i = 0; i < sizeof(void *); i++) set |= bytes[at + i] != 0;
        CHECK(set, "backend %s: member %zu of Ops is not set", ops->name ? ops->name : "?", at / sizeof(void *));
    }
}

static const char *last_op;

const char *ops_last(void) {
    return last_op;
}

void ops_watch(const Device *d, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
               int n_reads) {
    CHECK(s >= 0 && s < STREAM_COUNT, "%s: stream %d", op, (int)s);
    last_op = op;
    if (d->watch) d->watch(d->watcher, op, s, writes, n_writes, reads, n_reads);
}

static Tensor state_tensor(const UpdateState *state) {
    return tensor_1d((void *)(uintptr_t)state, DTYPE_F64, (int64_t)(sizeof *state / 8));
}
static Tensor intervals_tensor(const Interval *intervals, int64_t n) {
    return tensor_1d((void *)(uintptr_t)intervals, DTYPE_F64, n * (int64_t)(sizeof *intervals / 8));
}

/* ---- memory and streams ------------------------------------------------------------------------------------------ */

void *op_alloc(const Device *d, size_t bytes) {
    return d->ops->alloc(bytes);
}

void op_release(const Device *d, void *p) {
    d->ops->release(p);
}

void *op_host_alloc(const Device *d, size_t bytes) {
    return d->ops->host_alloc(bytes);
}

void op_host_release(const Device *d, void *p) {
    d->ops->host_release(p);
}

void op_copy_in(const Device *d, void *device, const void *host, size_t bytes, Stream s) {
    Tensor writes[] = {tensor_1d(device, DTYPE_E4M3, (int64_t)bytes)};
    ops_watch(d, "copy_in", s, writes, 1, NULL, 0);
    d->ops->copy_in(device, host, bytes, s);
}

void op_copy_out(const Device *d, void *host, const void *device, size_t bytes, Stream s) {
    Tensor reads[] = {tensor_1d((void *)(uintptr_t)device, DTYPE_E4M3, (int64_t)bytes)};
    ops_watch(d, "copy_out", s, NULL, 0, reads, 1);
    d->ops->copy_out(host, device, bytes, s);
}

void op_event_record(const Device *d, int event, Stream s) {
    CHECK(event >= 0 && event < EVENTS_MAX, "event %d", event);
    ops_watch(d, "event_record", s, NULL, event, NULL, 0);
    d->ops->event_record(event, s);
}

void op_event_wait(const Device *d, int event, Stream s) {
    CHECK(event >= 0 && event < EVENTS_MAX, "event %d", event);
    ops_watch(d, "event_wait", s, NULL, event, NULL, 0);
    d->ops->event_wait(event, s);
}

void op_event_synchronize(const Device *d, int event) {
    CHECK(event >= 0 && event < EVENTS_MAX, "event %d", event);
    if (d->watch) d->watch(d->watcher, "event_synchronize", STREAM_COPY, NULL, event, NULL, 0);
    d->ops->event_synchronize(event);
}

void op_synchronize(const Device *d, Stream s) {
    if (d->watch) d->watch(d->watcher, "synchronize", s, NULL, 0, NULL, 0);
    d->ops->synchronize(s);
}

void op_graph_begin(const Device *d, Stream s) {
    d->ops->graph_begin(s);
}

Graph *op_graph_end(const Device *d, Stream s) {
    return d->ops->graph_end(s);
}

void op_graph_launch(const Device *d, Graph *g, Stream s) {
    CHECK(g, "no graph to launch");
    d->ops->graph_launch(g, s);
}

void op_graph_free(const Device *d, Graph *g) {
    if (g) d->ops->graph_free(g);
}

void op_zero(const Device *d, Tensor y, Stream s) {
    CHECK(y.ndim >= 1 && y.ndim <= 3, "zero: y has %d dims", y.ndim);
    CHECK(tensor_is_contiguous(y), "zero: y is strided");
    CHECK(y.data || tensor_numel(y) == 0, "zero: y has no memory");
    Tensor writes[] = {y};
    ops_watch(d, "zero", s, writes, 1, NULL, 0);
    d->ops->zero(y, s);
}

void op_copy(const Device *d, Tensor y, Tensor x, Stream s) {
    CHECK(x.ndim >= 1 && x.ndim <= 3, "copy: x has %d dims", x.ndim);
    check_shape("copy", "x", x, x.ndim, -1, -1, -1);
    check_shape("copy", "y", y, x.ndim, x.shape[0], x.shape[1], x.shape[2]);
    CHECK(x.ndim > 1 || (x.ld == 1 && y.ld == 1), "copy: x or y is a strided vector");
    const bool has_scales = x.scale_layout != SCALE_NONE;
    CHECK(x.scale_layout != SCALE_BLOCK_128X128 || x.ndim == 2, "copy: blocks of %d dims", x.ndim);
    CHECK(has_scales ? is_act(y.dtype)
                     : x.dtype != DTYPE_NONE && (y.dtype == x.dtype || (is_act(y.dtype) && is_act(x.dtype))),
          "copy: x is %s, y is %s", dtype_name(x.dtype), dtype_name(y.dtype));
    Tensor writes[] = {y}, reads[] = {x};
    WATCH("copy", s, writes, reads);
    d->ops->copy(y, x, s);
}

void op_quantize(const Device *d, Quantized q, Tensor x, Stream s) {
    const char *op = "quantize";
    if (x.scale_layout == SCALE_ROW_1X128 && x.dtype == DTYPE_E4M3)
        check_tiles(op, "x", x, -1, -1);
    else
        check_matrix(op, "x", x, x.dtype == DTYPE_E5M6 ? DTYPE_E5M6 : DTYPE_BF16, -1, -1);
    check_quantized(op, q, x.shape[0], x.shape[1]);
    CHECK(x.shape[1] % 8 == 0 && (tensor_is_none(q.columns) || x.shape[0] % 16 == 0), "%s: x is (%lld, %lld)", op,
          (long long)x.shape[0], (long long)x.shape[1]);
    CHECK(q.rows.dtype != DTYPE_E5M6 || x.dtype == DTYPE_BF16, "%s: %s to e5m6", op, dtype_name(x.dtype));
    Tensor writes[] = {q.rows, q.columns}, reads[] = {x};
    WATCH(op, s, writes, reads);
    d->ops->quantize(q, x, s);
}

void op_quantize_weight(const Device *d, Tensor w, Tensor wt, Tensor master, Stream s) {
    const char *op = "quantize_weight";
    const int64_t planes = w.ndim == 3 ? w.shape[0] : 0;
    check_blocks(op, "w", w, planes, -1, -1);
    if (!tensor_is_none(wt)) check_blocks(op, "wt", wt, planes, w.shape[w.ndim - 1], w.shape[w.ndim - 2]);
    check_vector(op, "master", master, DTYPE_F32, tensor_numel(w));
    Tensor writes[] = {w, wt}, reads[] = {master};
    WATCH(op, s, writes, reads);
    d->ops->quantize_weight(w, wt, master, s);
}

void op_transpose_weight(const Device *d, Tensor wt, Tensor w, Stream s) {
    const char *op = "transpose_weight";
    const int64_t planes = w.ndim == 3 ? w.shape[0] : 0;
    check_blocks(op, "w", w, planes, -1, -1);
    check_blocks(op, "wt", wt, planes, w.shape[w.ndim - 1], w.shape[w.ndim - 2]);
    Tensor writes[] = {wt}, reads[] = {w};
    WATCH(op, s, writes, reads);
    d->ops->transpose_weight(wt, w, s);
}

void op_tile_stats(const Device *d, TileStats *stats, Tensor x, Stream s) {
    const char *op = "tile_stats";
    if (x.scale_layout == SCALE_BLOCK_128X128)
        check_blocks(op, "x", x, x.ndim == 3 ? x.shape[0] : 0, -1, -1);
    else
        check_tiles(op, "x", x, -1, -1);
    CHECK(x.shape[x.ndim - 1] % 4 == 0 && x.ld % 4 == 0, "%s: x has %lld columns, ld %lld", op,
          (long long)x.shape[x.ndim - 1], (long long)x.ld);
    CHECK(stats, "%s: stats has no memory", op);
    const Tensor all = tensor_1d(stats, DTYPE_F64, (int64_t)(sizeof *stats / 8));
    Tensor writes[] = {all}, reads[] = {all, x};
    WATCH_IN_PLACE(op, s, writes, reads, 1);
    d->ops->tile_stats(stats, x, s);
}

/* ---- update ------------------------------------------------------------------------------------------------------ */

void op_grad_squares(const Device *d, Tensor partial, Tensor g, const Interval *intervals, Stream s) {
    check_vector("grad_squares", "partial", partial, DTYPE_F64, -1);
    check_vector("grad_squares", "g", g, DTYPE_F32, -1);
    Tensor writes[] = {partial}, reads[] = {g, intervals_tensor(intervals, partial.shape[0])};
    WATCH("grad_squares", s, writes, reads);
    d->ops->grad_squares(partial, g, intervals, s);
}

void op_grad_norm(const Device *d, StepStats *stats, Tensor partial, Stream s) {
    check_vector("grad_norm", "partial", partial, DTYPE_F64, -1);
    Tensor writes[] = {stats_tensor(stats)}, reads[] = {stats_tensor(stats), partial};
    WATCH_IN_PLACE("grad_norm", s, writes, reads, 1);
    d->ops->grad_norm(stats, partial, s);
}

void op_update_gate(const Device *d, StepStats *stats, UpdateState *state, const StepParams *params, Stream s) {
    Tensor writes[] = {stats_tensor(stats), state_tensor(state)};
    Tensor reads[] = {stats_tensor(stats), state_tensor(state), params_tensor(params)};
    WATCH_IN_PLACE("update_gate", s, writes, reads, 1 | 2);
    d->ops->update_gate(stats, state, params, s);
}

void op_adamw_cast(const Device *d, Tensor copy, Tensor copy_t, Tensor master, Tensor m, Tensor v, Tensor grad,
                   bool decay, const StepParams *params, const StepStats *stats, const UpdateState *state, Stream s) {
    const char *op = "adamw_cast";
    check_vector(op, "master", master, DTYPE_F32, -1);
    const int64_t n = master.shape[0];
    check_vector(op, "grad", grad, DTYPE_F32, n);
    CHECK(is_act(m.dtype), "%s: m is %s, not f32 or bf16", op, dtype_name(m.dtype));
    check_vector(op, "m", m, m.dtype, n);
    check_vector(op, "v", v, m.dtype, n);
    if (copy.dtype == DTYPE_E4M3) {
        const int64_t planes = copy.ndim == 3 ? copy.shape[0] : 0;
        check_blocks(op, "copy", copy, planes, -1, -1);
        check_blocks(op, "copy_t", copy_t, planes, copy.shape[copy.ndim - 1], copy.shape[copy.ndim - 2]);
        CHECK(tensor_numel(copy) == n, "%s: copy has %lld elements, not %lld", op, (long long)tensor_numel(copy),
              (long long)n);
    } else {
        if (!tensor_is_none(copy)) check_vector(op, "copy", copy, DTYPE_BF16, n);
        CHECK(tensor_is_none(copy_t), "%s: copy_t without FP8", op);
    }
    Tensor writes[] = {copy, copy_t, master, m, v};
    Tensor reads[] = {master, m, v, grad, params_tensor(params), stats_tensor(stats), state_tensor(state)};
    WATCH_IN_PLACE(op, s, writes, reads, 4 | 8 | 16);
    d->ops->adamw_cast(copy, copy_t, master, m, v, grad, decay, params, stats, state, s);
}
