/* Rows of the ops that move bytes, in f32 and BF16. See bench_cuda.cu. */
#include <math.h>

#include "bench.cuh"

/* ---- embedding --------------------------------------------------------------------------------------------------- */

/* Owned: free. */
static int32_t *ids_on_host(Tensor ids) {
    const size_t bytes = (size_t)ids.shape[0] * 4;
    int32_t *host = (int32_t *)malloc(bytes);
    CHECK(host, "no memory");
    op_copy_out(&device, host, ids.data, bytes, S);
    op_synchronize(&device, S);
    return host;
}

static int64_t distinct(Tensor ids, int64_t V) {
    int32_t *host = ids_on_host(ids);
    bool *is_there = (bool *)calloc((size_t)V, 1);
    CHECK(is_there, "no memory");
    int64_t n_distinct = 0;
    for (int64_t i = 0; i < ids.shape[0]; i++) n_distinct += !is_there[host[i]], is_there[host[i]] = true;
    free(host);
    free(is_there);
    return n_distinct;
}

/* Uniform ids become those of a text: id i about as often as 1 / (i + 1), the first one 6 % of all. */
static Tensor natural(Tensor ids, int64_t V) {
    int32_t *host = ids_on_host(ids);
    for (int64_t i = 0; i < ids.shape[0]; i++)
        host[i] = (int32_t)min((int64_t)(exp((host[i] + 0.5) / (double)V * log((double)V + 1)) - 1), V - 1);
    ids.data = copied(host, (size_t)ids.shape[0] * 4);
    free(host);
    return ids;
}

void rows_embed(int64_t T, int64_t D, int64_t V) {
    const double act = 2.0 * (double)(T * D);
    const char *name = title("embed_forward/%dx%d", (int)T, (int)D);
    if (is_wanted(name)) {
        Tensor y = matrix(DTYPE_BF16, T, D), ids = integers(T, (int32_t)V), w = matrix(DTYPE_BF16, V, D);
        row(name, 2 * act, 0.85, [=] { op_embed_forward(&device, y, ids, w, S); });
    }
    for (int as_text = 0; as_text < 2; as_text++) { /* dy is read, every row of dw that has a token read and written */
        name = title("embed_backward/%dx%d%s", (int)T, (int)D, as_text ? "/natural" : "");
        if (!is_wanted(name)) continue;
        Tensor dw = matrix(DTYPE_F32, V, D), dy = matrix(DTYPE_BF16, T, D), ids = integers(T, (int32_t)V);
        if (as_text) ids = natural(ids, V);
        const int64_t n_ids = distinct(ids, V);
        row(name, act + 8.0 * (double)(n_ids * D), 0.75, [=] { op_embed_backward(&device, dw, dy, ids, S); });
    }
}

/* ---- a layer ----------------------------------------------------------------------------------------------------- */

void rows_rmsnorm(int64_t T, int64_t D, int64_t J) {
    const double act = 2.0 * (double)(T * D);
    const char *name = title("rmsnorm_forward/%dx%d+%d", (int)T, (int)D, (int)J);
    if (is_wanted(name)) {
        Tensor r = matrix(DTYPE_BF16, T, D), y = matrix(DTYPE_BF16, T, D), rstd = vector(DTYPE_F32, T);
        Tensor x = matrix(DTYPE_BF16, T, D), branch = planes(DTYPE_BF16, J, T, D), w = vector(DTYPE_F32, D);
        row(name, (double)(3 + J) * act, 0.85,
            [=] { op_residual_rmsnorm_forward(&device, r, y, tensor_none(), rstd, x, branch, w, 1e-6, S); });
    }
    name = title("rmsnorm_backward/%dx%d+%d", (int)T, (int)D, (int)J);
    if (is_wanted(name)) {
        Tensor dx = matrix(DTYPE_BF16, T, D), dw = vector(DTYPE_F32, D), dy = planes(DTYPE_BF16, J, T, D);
        Tensor partial = matrix(DTYPE_F32, ceil_div(T, RMSNORM_PARTIAL_ROWS), D), dr = matrix(DTYPE_BF16, T, D);
        Tensor r = matrix(DTYPE_BF16, T, D), rstd = vector(DTYPE_F32, T), w = vector(DTYPE_F32, D);
        row(name, (double)(3 + J) * act, 0.85,
            [=] { op_residual_rmsnorm_backward(&device, dx, dw, partial, dy, dr, r, rstd, w, S); });
    }
}

void rows_rope(int64_t T, int n_heads, bool in_place) {
    const AttentionShape a = {n_heads, 128, 64, 128, 0.07, 1};
    const double q = 2.0 * (double)(T * n_heads * 192), kv = 2.0 * (double)(T * n_heads * 256), v = kv / 2;
    const double q_bytes = in_place ? 2 * q / 3 : 2 * q; /* in place, only the rotated third moves */
    for (int backward = 0; backward < 2; backward++) {
        const char *name =
            title("rope_%s/%dx%d%s", backward ? "backward" : "forward", (int)T, n_heads, in_place ? "/in_place" : "");
        if (!is_wanted(name)) continue;
        Tensor q_in = matrix(DTYPE_BF16, T, n_heads * 192),
               q_out = in_place ? q_in : matrix(DTYPE_BF16, T, n_heads * 192);
        Tensor k = matrix(DTYPE_BF16, T, n_heads * 192), v_out = matrix(DTYPE_BF16, T, n_heads * 128);
        Tensor kv_in = matrix(DTYPE_BF16, T, n_heads * 256), k_pe = matrix(DTYPE_BF16, T, 64);
        Tensor position = integers(T, 0), inv_freq = vector(DTYPE_F32, 32);
        row(name, q_bytes + kv + q + v, 0.85, [=] {
            if (backward)
                op_rope_split_backward(&device, q_in, kv_in, k_pe, q_out, k, v_out, position, inv_freq, a, S);
            else
                op_rope_split_forward(&device, q_out, k, v_out, q_in, kv_in, k_pe, position, inv_freq, a, S);
        });
    }
}

void rows_swiglu(int64_t M, int64_t F, bool weighted) {
    const double act = 2.0 * (double)(M * F);
    for (int backward = 0; backward < 2; backward++) {
        const char *name =
            title("swiglu_%s/%dx%d%s", backward ? "backward" : "forward", (int)M, (int)F, weighted ? "/weighted" : "");
        if (!is_wanted(name)) continue;
        Tensor h = matrix(DTYPE_BF16, M, 2 * F), y = matrix(DTYPE_BF16, M, F);
        Tensor weight = weighted ? vector(DTYPE_F32, M) : tensor_none();
        Tensor dweight = weighted ? vector(DTYPE_F32, M) : tensor_none();
        Tensor dh = backward ? matrix(DTYPE_BF16, M, 2 * F) : tensor_none();
        row(name, (backward ? 5 : 3) * act, 0.85, [=] {
            if (backward)
                op_swiglu_backward(&device, dh, quantized_none(), tensor_none(), dweight, y, h, weight, S);
            else
                op_swiglu_forward(&device, y, tensor_none(), tensor_none(), h, weight, S);
        });
    }
}

void rows_router(int64_t T, RouterShape shape, const char *what) {
    const int64_t E = shape.n_experts, K = shape.n_chosen;
    for (int backward = 0; backward < 2; backward++) {
        const char *name = title("router_%s/%dx%d/%s (in L2)", backward ? "backward" : "forward", (int)T, (int)E, what);
        if (!is_wanted(name)) continue;
        Tensor logits = matrix(DTYPE_F32, T, E), scores = matrix(DTYPE_F32, T, E), weights = matrix(DTYPE_F32, T, K);
        Tensor ids = tensor_reshape2(integers(T * K, (int32_t)E), T, K), counts = integers(E, 1),
               position = integers(T, 0);
        Tensor seq_count = tensor_reshape2(integers(T / shape.seq_len * E, 9), T / shape.seq_len, E);
        Tensor bias = vector(DTYPE_F32, E), dweights = matrix(DTYPE_F32, T, K), dlogits = matrix(DTYPE_BF16, T, E);
        StepStats *stats = stats_make();
        const StepParams *params = params_make();
        row(name, (backward ? 6.0 : 8.0) * (double)(T * E), 0, [=] {
            if (backward)
                op_router_backward(&device, dlogits, dweights, ids, weights, scores, seq_count, position, params, shape,
                                   S);
            else
                op_router_forward(&device, ids, weights, scores, counts, seq_count, stats, logits, bias, position,
                                  shape, S);
        });
    }
}

/* K ids a token, spread over E experts, all local. */
void rows_permute(int64_t T, int64_t D, int64_t K, int64_t E) {
    const double act = 2.0 * (double)(T * D);
    static const char *const names[] = {"moe_map", "gather_rows", "reduce_rows", "unmap_weights"};
    for (int i = 0; i < 4; i++) {
        const char *name = title("%s/%dx%d/%d of %d", names[i], (int)T, (int)D, (int)K, (int)E);
        if (!is_wanted(name)) continue;
        const Routing r = routing_make(T, K, E);
        Tensor x = matrix(DTYPE_BF16, T, D), rows = matrix(DTYPE_BF16, r.n_rows, D);
        Tensor drow_weight = vector(DTYPE_F32, r.n_rows), dweights = matrix(DTYPE_F32, T, K);
        if (i == 0)
            row(name, 12.0 * (double)(T * K) + 8.0 * (double)(T * K), 0,
                [=] { op_moe_map(&device, r.map, r.ids, r.weights, r.slots, 0, S); });
        else if (i == 1) /* each token is read once and comes from L2 then */
            row(name, (double)(K + 1) * act, 0.75, [=] { op_gather_rows(&device, rows, tensor_none(), x, r.map, S); });
        else if (i == 2)
            row(name, (double)(K + 1) * act, 0.75, [=] { op_reduce_rows(&device, x, rows, r.map, false, S); });
        else
            row(name, 12.0 * (double)(T * K), 0, [=] { op_unmap_weights(&device, dweights, drow_weight, r.map, S); });
    }
}

/* ---- loss and update --------------------------------------------------------------------------------------------- */

void rows_cross_entropy(int64_t C, int64_t V) {
    for (int gradient = 0; gradient < 2; gradient++) {
        const char *name = title("cross_entropy%s/%dx%d", gradient ? "" : "_loss", (int)C, (int)V);
        if (!is_wanted(name)) continue;
        Tensor loss = vector(DTYPE_F32, C), logits = matrix(DTYPE_BF16, C, V), targets = integers(C, (int32_t)V);
        const StepParams *params = params_make();
        row(name, (gradient ? 4.0 : 2.0) * (double)(C * V), 0.85,
            [=] { op_cross_entropy(&device, loss, logits, targets, V, 0, gradient, params, S); });
    }
}

void row_adamw(const char *name, Tensor copy, Tensor copy_t, Dtype moments) {
    const int64_t n = tensor_numel(copy);
    Tensor master = vector(DTYPE_F32, n), grad = vector(DTYPE_F32, n), m = vector(moments, n), v = vector(moments, n);
    op_zero(&device, v, S); /* a negative v would make NaN */
    const StepParams *params = params_make();
    const StepStats *stats = stats_make();
    const UpdateState *state = state_make();
    const size_t copies = tensor_bytes(copy) + tensor_bytes(copy_t);
    row(name, (12.0 + 4.0 * (double)dtype_size(moments)) * (double)n + (double)copies, 0.8,
        [=] { op_adamw_cast(&device, copy, copy_t, master, m, v, grad, true, params, stats, state, S); });
}

static Interval *intervals_make(int64_t n_blocks, int64_t block) {
    Interval *host = (Interval *)malloc((size_t)n_blocks * sizeof *host);
    CHECK(host, "no memory");
    for (int64_t i = 0; i < n_blocks; i++) host[i] = (Interval){i * block, block};
    Interval *intervals = (Interval *)copied(host, (size_t)n_blocks * sizeof *host);
    free(host);
    return intervals;
}

void rows_update(int64_t n) {
    const char *name = title("grad_norm/%dM", (int)(n >> 20));
    if (is_wanted(name)) {
        const int64_t block = 128 * 2048, n_blocks = n / block;
        Tensor g = vector(DTYPE_F32, n);
        Tensor partial = tensor_1d(allocate((size_t)n_blocks * sizeof(double)), DTYPE_F64, n_blocks);
        const Interval *intervals = intervals_make(n_blocks, block);
        StepStats *stats = stats_make();
        row(name, 4.0 * (double)n, 0.85, [=] {
            op_grad_squares(&device, partial, g, intervals, S);
            op_grad_norm(&device, stats, partial, S);
        });
    }
    for (int bf16_moments = 0; bf16_moments < 2; bf16_moments++) {
        const Dtype moments = bf16_moments ? DTYPE_BF16 : DTYPE_F32;
        name = title("adamw_cast/%dM/%s moments", (int)(n >> 20), dtype_name(moments));
        if (is_wanted(name)) row_adamw(name, vector(DTYPE_BF16, n), tensor_none(), moments);
    }
}
