/* Rows of what makes FP8: casts of their own, and those in the ops that produce what is cast. See bench_cuda.cu. */
#include "bench.cuh"

void rows_quantize(int64_t M, int64_t C) {
    static const char *const names[] = {"rows", "both", "rows_e5m6", "from_tiles", "from_e5m6"};
    static const double bytes[] = {3, 4, 3.5, 2, 2.5}, gates[] = {0.85, 0.8, 0.85, 0.8, 0.8};
    for (int i = 0; i < 5; i++) {
        const char *name = title("quantize_%s/%dx%d", names[i], (int)M, (int)C);
        if (!is_wanted(name)) continue;
        const Tensor x = i == 3 ? tiles(M, C) : i == 4 ? tiles_empty(DTYPE_E5M6, M, C) : matrix(DTYPE_BF16, M, C);
        if (i == 4) op_quantize(&device, (Quantized){x, tensor_none()}, matrix(DTYPE_BF16, M, C), S);
        const Quantized q = {i < 3 ? tiles_empty(i == 2 ? DTYPE_E5M6 : DTYPE_E4M3, M, C) : tensor_none(),
                             i == 1 || i > 2 ? tiles_empty(DTYPE_E4M3, C, M) : tensor_none()};
        row(name, bytes[i] * (double)(M * C), gates[i], [=] { op_quantize(&device, q, x, S); });
    }
}

void rows_weight(int64_t n, int64_t O, int64_t I) {
    const int64_t numel = (n ? n : 1) * O * I; /* n 0: a matrix */
    const char *name =
        n ? title("quantize_weight/%dx%dx%d", (int)n, (int)O, (int)I) : title("quantize_weight/%dx%d", (int)O, (int)I);
    if (is_wanted(name)) {
        Tensor w = blocks_empty(n, O, I), wt = blocks_empty(n, I, O), master = vector(DTYPE_F32, numel);
        row(name, 6 * (double)numel, 0.8, [=] { op_quantize_weight(&device, w, wt, master, S); });
    }
    name = title("transpose_weight/%dx%dx%d", (int)(n ? n : 1), (int)O, (int)I);
    if (is_wanted(name)) {
        Tensor w = blocks_empty(n, O, I), wt = blocks_empty(n, I, O);
        row(name, 2 * (double)numel, 0.8, [=] { op_transpose_weight(&device, wt, w, S); });
    }
    for (int bf16_moments = 0; bf16_moments < 2; bf16_moments++) {
        const Dtype moments = bf16_moments ? DTYPE_BF16 : DTYPE_F32;
        name = n ? title("adamw_fp8/%dx%dx%d/%s moments", (int)n, (int)O, (int)I, dtype_name(moments))
                 : title("adamw_fp8/%dx%d/%s moments", (int)O, (int)I, dtype_name(moments));
        if (is_wanted(name)) row_adamw(name, blocks_empty(n, O, I), blocks_empty(n, I, O), moments);
    }
}

void rows_norm_fp8(int64_t T, int64_t D, int64_t J) {
    const char *name = title("rmsnorm_fp8_forward/%dx%d+%d", (int)T, (int)D, (int)J);
    if (!is_wanted(name)) return;
    Tensor r = matrix(DTYPE_BF16, T, D), q = tiles_empty(DTYPE_E4M3, T, D), rstd = vector(DTYPE_F32, T);
    Tensor x = matrix(DTYPE_BF16, T, D), branch = planes(DTYPE_BF16, J, T, D), w = vector(DTYPE_F32, D);
    row(name, (2.0 * (double)(2 + J) + 1) * (double)(T * D), 0.85,
        [=] { op_residual_rmsnorm_forward(&device, r, tensor_none(), q, rstd, x, branch, w, 1e-6, S); });
}

void rows_swiglu_fp8(int64_t M, int64_t F, bool weighted) {
    for (int backward = 0; backward < 2; backward++) {
        const char *name = title("swiglu_fp8_%s/%dx%d%s", backward ? "backward" : "forward", (int)M, (int)F,
                                 weighted ? "/weighted" : "");
        if (!is_wanted(name)) continue;
        const Tensor none = tensor_none(), h = backward ? tiles(M, 2 * F) : matrix(DTYPE_BF16, M, 2 * F);
        const Tensor weight = weighted ? vector(DTYPE_F32, M) : none, dweight = weighted ? vector(DTYPE_F32, M) : none;
        if (backward) {
            const Tensor dy = matrix(DTYPE_BF16, M, F), y_columns = tiles_empty(DTYPE_E4M3, F, M);
            const Quantized dh = {tiles_empty(DTYPE_E4M3, M, 2 * F), tiles_empty(DTYPE_E4M3, 2 * F, M)};
            row(name, 9.0 * (double)(M * F), 0.8,
                [=] { op_swiglu_backward(&device, none, dh, y_columns, dweight, dy, h, weight, S); });
        } else {
            const Tensor y = tiles_empty(DTYPE_E4M3, M, F), h_rows = tiles_empty(DTYPE_E4M3, M, 2 * F);
            row(name, 7.0 * (double)(M * F), 0.85, [=] { op_swiglu_forward(&device, none, y, h_rows, h, weight, S); });
        }
    }
}

/* Rows: each token is read once and comes from L2 then. Columns: likewise. */
void rows_gather_fp8(int64_t T, int64_t D, int64_t K, int64_t E) {
    for (int columns = 0; columns < 2; columns++) {
        const char *name =
            title("gather_%s_fp8/%dx%d/%d of %d", columns ? "columns" : "rows", (int)T, (int)D, (int)K, (int)E);
        if (!is_wanted(name)) continue;
        const Routing r = routing_make(T, K, E);
        const Tensor x = tiles(T, D), none = tensor_none();
        const Tensor y = columns ? none : tiles_empty(DTYPE_E4M3, r.n_rows, D);
        const Tensor yt = columns ? tiles_empty(DTYPE_E4M3, D, r.n_rows) : none;
        row(name, (double)(K + 1) * (double)(T * D), 0.75, [=] { op_gather_rows(&device, y, yt, x, r.map, S); });
    }
}
