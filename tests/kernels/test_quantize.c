/* FP8: tiles and blocks against their definition, products against double, producers against quantize. */
#include <math.h>
#include <string.h>

#include "kernels/base/ints.h"
#include "kernels/base/rng.h"
#include "kernels/base/small_floats.h"
#include "op_test.h"

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static float *new_scales(Tensor t) {
    Tensor scales = T1(DTYPE_I32, tensor_n_scales(t)); /* four bytes each in both builds */
    memset(scales.data, 0xFF, (size_t)tensor_n_scales(t) * 4);
    return (float *)scales.data;
}

/* Poisoned: every byte NaN, every scale NaN. */
static Tensor new_tiles(Dtype dtype, int64_t rows, int64_t cols) {
    Tensor t = tensor_tiles(NULL, NULL, dtype, rows, cols);
    t.data = T1(DTYPE_I32, (int64_t)tensor_bytes(t) / 4 + 1).data;
    memset(t.data, 0xFF, tensor_bytes(t));
    t.scale = new_scales(t);
    return t;
}

static Tensor new_blocks(int64_t planes, int64_t rows, int64_t cols) {
    Tensor t = tensor_blocks(NULL, NULL, planes, rows, cols);
    t.data = T1(DTYPE_I32, (int64_t)tensor_bytes(t) / 4 + 1).data;
    memset(t.data, 0xFF, tensor_bytes(t));
    t.scale = new_scales(t);
    return t;
}

static float scale_of(Tensor t, int64_t row, int64_t col) {
    return t.scale_layout == SCALE_ROW_1X128 ? t.scale[col / 128 * t.scale_ld + row]
                                             : t.scale[row / 128 * t.scale_ld + col / 128];
}

static double value(Tensor t, int64_t row, int64_t col) {
    if (t.dtype != DTYPE_E5M6)
        return (double)float_from_e4m3(((const uint8_t *)t.data)[row * t.ld + col]) * (double)scale_of(t, row, col);
    uint16_t bits[8];
    const int64_t at = row * t.shape[1] + col;
    e5m6_unpack(bits, (const uint32_t *)t.data + at / 8 * 3);
    return (double)float_from_e5m6(bits[at % 8]) * (double)scale_of(t, row, col);
}

static bool same(double a, double b) {
    return a == b || (isnan(a) && isnan(b));
}

static bool same_tiles(Tensor a, Tensor b) {
    return memcmp(a.data, b.data, tensor_bytes(a)) == 0 &&
           memcmp(a.scale, b.scale, (size_t)tensor_n_scales(a) * sizeof(float)) == 0;
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* What the tile at (row, 128 j) of x, or of its transpose, must say. */
static void expect_tiles(const char *what, Tensor q, Tensor x, bool transposed) {
    const int64_t n = q.shape[1];
    for (int64_t r = 0; r < q.shape[0]; r++)
        for (int64_t first = 0; first < n; first += 128) {
            float tile[128];
            const int64_t count = min_i64(n - first, 128);
            for (int64_t i = 0; i < count; i++)
                tile[i] = (float)t_get(x, transposed ? (first + i) * x.shape[1] + r : r * x.shape[1] + first + i);
            const bool is_e4m3 = q.dtype == DTYPE_E4M3;
            const float amax = amax_of(tile, count), scale = is_e4m3 ? e4m3_scale_pow2(amax) : e5m6_scale_pow2(amax);
            EXPECT(same((double)scale_of(q, r, first), (double)scale), "%s (%d, %d): scale %g, not %g", what, (int)r,
                   (int)first, (double)scale_of(q, r, first), (double)scale);
            for (int64_t i = 0; i < count; i++) {
                const float stored = is_e4m3 ? float_from_e4m3(e4m3_from_float(tile[i] / scale))
                                             : float_from_e5m6(e5m6_from_float(tile[i] / scale));
                const double want = (double)stored * (double)scale;
                EXPECT(same(value(q, r, first + i), want), "%s (%d, %d): %g, not %g", what, (int)r, (int)(first + i),
                       value(q, r, first + i), want);
            }
        }
}

static Tensor wild(Dtype dtype, int64_t rows, int64_t cols, uint64_t seed) {
    Tensor x = T2(dtype, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++)
        t_set(x, i,
              ldexp(rng_normal(seed, RNG_TEST, 0, (uint64_t)i),
                    (int)(rng_uniform(seed, RNG_TEST, 1, (uint64_t)i) * 24) - 20));
    return x;
}

TEST(quantize_by_definition) {
    static const int64_t shapes[][2] = {{16, 8}, {16, 128}, {32, 136}, {144, 8}, {272, 296}, {128, 128}};
    for (int i = 0; i < 6; i++) {
        const int64_t M = shapes[i][0], C = shapes[i][1];
        Tensor x = wild(DTYPE_BF16, M, C, (uint64_t)i + 1);
        const Quantized q = {new_tiles(DTYPE_E4M3, M, C), new_tiles(DTYPE_E4M3, C, M)};
        op_quantize(DEV, q, x, STREAM_COMPUTE);
        expect_tiles("rows", q.rows, x, false);
        expect_tiles("columns", q.columns, x, true);
        const Quantized wide = {new_tiles(DTYPE_E5M6, M, C), tensor_none()};
        op_quantize(DEV, wide, x, STREAM_COMPUTE);
        expect_tiles("e5m6", wide.rows, x, false);
        t_free_all();
    }
}

/* Tiles that are all zero, all negative, tiny, subnormal, at the edge of the format, and not finite. */
TEST(quantize_extremes) {
    static const double fill[] = {0, -3, 1e-12, -1e-42, 448, 449, 3e38, -0.0};
    Tensor x = T2(DTYPE_BF16, 16, 128);
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 128; c++) t_set(x, r * 128 + c, fill[r] * (1 - c / 256.0));
    for (int r = 8; r < 16; r++)
        for (int c = 0; c < 128; c++) t_set(x, r * 128 + c, r == 8 && c == 5 ? INFINITY : r == 9 && c == 7 ? NAN : 1);
    const Quantized q = {new_tiles(DTYPE_E4M3, 16, 128), new_tiles(DTYPE_E4M3, 128, 16)};
    op_quantize(DEV, q, x, STREAM_COMPUTE);
    expect_tiles("rows", q.rows, x, false);
    expect_tiles("columns", q.columns, x, true);
    EXPECT(q.rows.scale[0] == 1, "zeros have scale %g", (double)q.rows.scale[0]);
    EXPECT(value(q.rows, 2, 0) > 0.9e-12, "1e-12 became %g", value(q.rows, 2, 0));
    EXPECT(isnan(value(q.rows, 8, 0)) && isnan(value(q.rows, 9, 0)), "a tile with Inf or NaN shows it everywhere");
    EXPECT(isfinite(value(q.rows, 10, 0)), "and only there");
}

TEST(quantize_stops_at_n_rows) {
    int32_t n_rows = 128;
    Tensor x = wild(DTYPE_BF16, 304, 40, 3);
    x.n_rows = &n_rows;
    const Quantized q = {new_tiles(DTYPE_E4M3, 304, 40), new_tiles(DTYPE_E4M3, 40, 304)};
    op_quantize(DEV, q, x, STREAM_COMPUTE);
    EXPECT(!isnan(value(q.rows, 127, 0)) && isnan(value(q.rows, 128, 0)), "rows");
    EXPECT(!isnan(value(q.columns, 0, 127)) && isnan(value(q.columns, 0, 128)), "columns");
}

/* What tiles mean, read back; columns from tiles; a wider format keeps seven digits. */
TEST(quantize_and_back) {
    Tensor x = t_normal(T2(DTYPE_BF16, 144, 264), 1, 5), back = t_poison(T2(DTYPE_BF16, 144, 264));
    const Quantized q = {new_tiles(DTYPE_E4M3, 144, 264), tensor_none()};
    op_quantize(DEV, q, x, STREAM_COMPUTE);
    op_copy(DEV, back, q.rows, STREAM_COMPUTE);
    for (int64_t i = 0; i < tensor_numel(x); i++)
        EXPECT(t_get(back, i) == value(q.rows, i / 264, i % 264), "element %d", (int)i); /* exact in bf16 */
    const Quantized anew = {tensor_none(), new_tiles(DTYPE_E4M3, 264, 144)};
    op_quantize(DEV, anew, q.rows, STREAM_COMPUTE);
    expect_tiles("from tiles", anew.columns, back, true);

    const Quantized wide = {new_tiles(DTYPE_E5M6, 144, 264), tensor_none()};
    op_quantize(DEV, wide, x, STREAM_COMPUTE);
    op_copy(DEV, back, wide.rows, STREAM_COMPUTE);
    for (int64_t i = 0; i < tensor_numel(x); i++) {
        const double bound = fmax(fabs(t_get(x, i)) / 128, (double)scale_of(wide.rows, i / 264, i % 264) * 0x1p-21);
        EXPECT(fabs(t_get(back, i) - t_get(x, i)) <= bound, "%g became %g", t_get(x, i), t_get(back, i));
    }
    op_quantize(DEV, anew, wide.rows, STREAM_COMPUTE);
    expect_tiles("from e5m6", anew.columns, back, true);
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

TEST(quantize_weight_both_ways) {
    static const int64_t shapes[][3] = {{0, 130, 260}, {3, 128, 128}, {2, 5, 200}};
    for (int i = 0; i < 3; i++) {
        const int64_t planes = shapes[i][0], O = shapes[i][1], I = shapes[i][2], n = (planes ? planes : 1) * O * I;
        Tensor master = t_normal(T1(DTYPE_F32, n), 0.02, 7), w = new_blocks(planes, O, I),
               wt = new_blocks(planes, I, O);
        op_quantize_weight(DEV, w, wt, master, STREAM_COMPUTE);
        Tensor alone = new_blocks(planes, O, I), alone_t = new_blocks(planes, I, O);
        op_quantize_weight(DEV, alone, tensor_none(), master, STREAM_COMPUTE);
        op_transpose_weight(DEV, alone_t, alone, STREAM_COMPUTE);
        EXPECT(same_tiles(w, alone) && same_tiles(wt, alone_t), "one after the other");
        for (int64_t p = 0; p < (planes ? planes : 1); p++) {
            const Tensor plane = planes ? tensor_plane(w, p) : w, plane_t = planes ? tensor_plane(wt, p) : wt;
            float flat[200 * 260 + 1], scales[16];
            uint8_t bits[200 * 260 + 1];
            for (int64_t k = 0; k < O * I; k++) flat[k] = (float)t_get(master, p * O * I + k);
            e4m3_block_scales(scales, flat, O, I);
            e4m3_block_quantize(bits, flat, scales, 0, O, I);
            EXPECT(memcmp(plane.data, bits, (size_t)(O * I)) == 0, "plane %d: bytes", (int)p);
            for (int64_t r = 0; r < O; r++)
                for (int64_t c = 0; c < I; c++)
                    EXPECT(scale_of(plane, r, c) == scales[r / 128 * ceil_div(I, 128) + c / 128] &&
                               value(plane, r, c) == value(plane_t, c, r),
                           "plane %d (%d, %d)", (int)p, (int)r, (int)c);
        }
    }
}

/* What blocks mean, rounded once. */
TEST(copy_of_blocks) {
    const int64_t O = 136, I = 272;
    Tensor w = new_blocks(0, O, I), wide = t_poison(T2(DTYPE_F32, O, I)), narrow = t_poison(T2(DTYPE_BF16, O, I));
    Tensor rounded = T2(DTYPE_BF16, O, I);
    op_quantize_weight(DEV, w, tensor_none(), t_normal(T1(DTYPE_F32, O * I), 0.02, 7), STREAM_COMPUTE);
    op_copy(DEV, wide, w, STREAM_COMPUTE);
    op_copy(DEV, narrow, w, STREAM_COMPUTE);
    for (int64_t i = 0; i < O * I; i++) {
        const float want = (float)value(w, i / I, i % I);
        EXPECT((float)t_get(wide, i) == want, "element %d: %g, not %g", (int)i, t_get(wide, i), (double)want);
    }
    op_copy(DEV, rounded, wide, STREAM_COMPUTE);
    EXPECT(t_same_bits(narrow, rounded), "to bf16");
}

TEST(adamw_quantizes_what_it_updated) {
    const int64_t O = 140, I = 128, n = O * I;
    Tensor master = t_normal(T1(DTYPE_F32, n), 0.02, 1), m = T1(DTYPE_F32, n), v = T1(DTYPE_F32, n);
    Tensor grad = t_normal(T1(DTYPE_F32, n), 1, 2), w = new_blocks(0, O, I), wt = new_blocks(0, I, O);
    Tensor again = new_blocks(0, O, I), again_t = new_blocks(0, I, O);
    StepParams params = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    StepStats stats = {.grad_scale = 1};
    const UpdateState state = {.adam_t = 1};
    op_adamw_cast(DEV, w, wt, master, m, v, grad, true, &params, &stats, &state, STREAM_COMPUTE);
    op_quantize_weight(DEV, again, again_t, master, STREAM_COMPUTE);
    EXPECT(same_tiles(w, again) && same_tiles(wt, again_t), "blocks of the updated master");
    stats.skip = SKIP_LOSS_NOT_FINITE;
    t_normal(grad, 5, 3);
    op_adamw_cast(DEV, w, wt, master, m, v, grad, true, &params, &stats, &state, STREAM_COMPUTE);
    EXPECT(same_tiles(w, again) && same_tiles(wt, again_t), "a skipped update");
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* y (m, n) = a (m, k) b (n, k)^T against the double sum of what the operands mean. */
static void expect_product(const char *what, Tensor y, Tensor a, Tensor b, const double *before) {
    const int64_t M = a.shape[0], N = b.shape[0], K = a.shape[1];
    double *want = t_doubles(y);
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < N; j++) {
            double sum = before ? before[i * N + j] : 0;
            for (int64_t k = 0; k < K; k++) sum += value(a, i, k) * value(b, j, k);
            want[i * N + j] = sum;
        }
    const double tolerance = y.dtype == DTYPE_BF16 ? BF16_TOLERANCE : 2e-5;
    EXPECT(t_error(y, want) <= tolerance, "%s %dx%dx%d: off by %g", what, (int)M, (int)N, (int)K, t_error(y, want));
}

static Quantized tiles_of_normal(int64_t M, int64_t C, double scale, uint64_t seed) {
    const Quantized q = {new_tiles(DTYPE_E4M3, M, C), new_tiles(DTYPE_E4M3, C, M)};
    op_quantize(DEV, q, t_normal(T2(DTYPE_BF16, M, C), scale, seed), STREAM_COMPUTE);
    return q;
}

TEST(gemm_fp8_against_double) {
    static const int64_t shapes[][3] = {{16, 8, 128}, {32, 72, 256}, {128, 136, 640}, {48, 136, 576}};
    for (int i = 0; i < 4; i++) {
        const int64_t M = shapes[i][0], O = shapes[i][1], I = shapes[i][2];
        const Quantized x = tiles_of_normal(M, I, 1, 1), dy = tiles_of_normal(M, O, 1e-6, 2);
        Tensor w = new_blocks(0, O, I), wt = new_blocks(0, I, O);
        op_quantize_weight(DEV, w, wt, t_normal(T1(DTYPE_F32, O * I), 0.02, 3), STREAM_COMPUTE);
        for (int k = 0; k < 2; k++) {
            const Dtype dtype = k ? DTYPE_BF16 : DTYPE_F32;
            Tensor y = t_poison(T2(dtype, M, O)), dx = t_poison(T2(dtype, M, I));
            op_gemm(DEV, y, x.rows, w, GEMM_FPROP, false, STREAM_COMPUTE);
            expect_product("fprop", y, x.rows, w, NULL);
            op_gemm(DEV, dx, dy.rows, wt, GEMM_DGRAD, false, STREAM_COMPUTE);
            expect_product("dgrad", dx, dy.rows, wt, NULL);
        }
        Tensor dw = t_normal(T2(DTYPE_F32, O, I), 1e-6, 4);
        const double *before = t_doubles(dw);
        op_gemm(DEV, dw, dy.columns, x.columns, GEMM_WGRAD, true, STREAM_COMPUTE);
        expect_product("wgrad", dw, dy.columns, x.columns, before);
    }
}

/* Three experts, one without rows: each its own product, and its own columns. */
TEST(grouped_gemm_fp8_is_one_product_an_expert) {
    enum { EXPERTS = 3, N = 384, O = 256, I = 128 };
    const int start_list[] = {0, 128, 128, 384};
    Tensor start = t_ids(start_list, EXPERTS + 1), w = new_blocks(EXPERTS, O, I), wt = new_blocks(EXPERTS, I, O);
    op_quantize_weight(DEV, w, wt, t_normal(T1(DTYPE_F32, EXPERTS * O * I), 0.02, 1), STREAM_COMPUTE);
    const Quantized x = tiles_of_normal(N, I, 1, 2), dy = tiles_of_normal(N, O, 1, 3);
    Tensor y = t_poison(T2(DTYPE_BF16, N, O)), dx = t_poison(T2(DTYPE_BF16, N, I)), dw = T3(DTYPE_F32, EXPERTS, O, I);
    op_grouped_gemm(DEV, y, x.rows, w, start, GEMM_FPROP, STREAM_COMPUTE);
    op_grouped_gemm(DEV, dx, dy.rows, wt, start, GEMM_DGRAD, STREAM_COMPUTE);
    op_grouped_wgrad(DEV, dw, dy.columns, x.columns, start, STREAM_COMPUTE);
    for (int e = 0; e < EXPERTS; e++) {
        const int64_t r0 = start_list[e], n = start_list[e + 1] - r0;
        if (n > 0) {
            expect_product("fprop", tensor_rows(y, r0, n), tensor_rows(x.rows, r0, n), tensor_plane(w, e), NULL);
            expect_product("dgrad", tensor_rows(dx, r0, n), tensor_rows(dy.rows, r0, n), tensor_plane(wt, e), NULL);
        }
        expect_product("wgrad", tensor_plane(dw, e), tensor_cols(dy.columns, r0, n), tensor_cols(x.columns, r0, n),
                       NULL);
    }
}

/* ---- producers --------------------------------------------------------------------------------------------------- */

static Tensor rows_of(Tensor x) {
    const Quantized q = {new_tiles(DTYPE_E4M3, x.shape[0], x.shape[1]), tensor_none()};
    op_quantize(DEV, q, x, STREAM_COMPUTE);
    return q.rows;
}

static Tensor columns_of(Tensor x) {
    const Quantized q = {tensor_none(), new_tiles(DTYPE_E4M3, x.shape[1], x.shape[0])};
    op_quantize(DEV, q, x, STREAM_COMPUTE);
    return q.columns;
}

TEST(rmsnorm_quantizes_its_bf16) {
    enum { T = 5, D = 264 };
    Tensor x = t_normal(T2(DTYPE_BF16, T, D), 2, 1), w = t_normal(T1(DTYPE_F32, D), 1, 2), rstd = T1(DTYPE_F32, T);
    Tensor y = t_poison(T2(DTYPE_BF16, T, D)), q = new_tiles(DTYPE_E4M3, T, D), alone = new_tiles(DTYPE_E4M3, T, D);
    const Tensor none = tensor_none();
    op_residual_rmsnorm_forward(DEV, none, y, q, rstd, x, none, w, 1e-6, STREAM_COMPUTE);
    op_residual_rmsnorm_forward(DEV, none, none, alone, rstd, x, none, w, 1e-6, STREAM_COMPUTE);
    EXPECT(same_tiles(q, rows_of(y)), "with y");
    EXPECT(same_tiles(alone, q), "without");
}

TEST(swiglu_quantizes_its_bf16) {
    enum { M = 144, F = 128 };
    const Tensor none = tensor_none();
    for (int has_weight = 0; has_weight < 2; has_weight++) {
        Tensor h = t_normal(T2(DTYPE_BF16, M, 2 * F), 2, 1),
               weight = has_weight ? t_normal(T1(DTYPE_F32, M), 1, 2) : none;
        Tensor y = t_poison(T2(DTYPE_BF16, M, F)), dh = t_poison(T2(DTYPE_BF16, M, 2 * F));
        Tensor dy = t_normal(T2(DTYPE_BF16, M, F), 1e-4, 3), h_kept = T2(DTYPE_BF16, M, 2 * F);
        Tensor dweight = has_weight ? t_poison(T1(DTYPE_F32, M)) : none,
               dweight_q = has_weight ? t_poison(T1(DTYPE_F32, M)) : none;
        Tensor y_rows = new_tiles(DTYPE_E4M3, M, F), h_rows = new_tiles(DTYPE_E4M3, M, 2 * F);
        op_swiglu_forward(DEV, y, none, none, h, weight, STREAM_COMPUTE);
        op_swiglu_forward(DEV, none, y_rows, h_rows, h, weight, STREAM_COMPUTE);
        EXPECT(same_tiles(y_rows, rows_of(y)) && same_tiles(h_rows, rows_of(h)), "forward");

        op_copy(DEV, h_kept, h_rows, STREAM_COMPUTE);
        op_swiglu_forward(DEV, y, none, none, h_kept, weight, STREAM_COMPUTE);
        op_swiglu_backward(DEV, dh, quantized_none(), none, dweight, dy, h_kept, weight, STREAM_COMPUTE);
        const Quantized dhq = {new_tiles(DTYPE_E4M3, M, 2 * F), new_tiles(DTYPE_E4M3, 2 * F, M)};
        Tensor y_columns = new_tiles(DTYPE_E4M3, F, M);
        op_swiglu_backward(DEV, none, dhq, y_columns, dweight_q, dy, h_rows, weight, STREAM_COMPUTE);
        EXPECT(same_tiles(dhq.rows, rows_of(dh)) && same_tiles(dhq.columns, columns_of(dh)), "gradient of h");
        EXPECT(same_tiles(y_columns, columns_of(y)), "the output, made again");
        if (has_weight) EXPECT(t_same_bits(dweight, dweight_q), "gradient of the weight");
    }
}

/* Rows are copied with their scales; columns are the gathered rows, quantised anew; padding is zero with scale 1. */
TEST(gather_rows_of_tiles) {
    enum { T = 150, E = 3, K = 2, D = 136, N = 768 };
    MoeMap map = {T1(DTYPE_I32, N), T1(DTYPE_F32, N), T2(DTYPE_I32, T, K), T1(DTYPE_I32, E + 1), tensor_none()};
    Tensor ids = T2(DTYPE_I32, T, K), weights = t_fill(T2(DTYPE_F32, T, K), 0.5);
    const int slots[] = {0, 1, 2};
    for (int t = 0; t < T; t++) t_set(ids, t * K, t % 2), t_set(ids, t * K + 1, 2);
    op_moe_map(DEV, map, ids, weights, t_ids(slots, E), 0, STREAM_COMPUTE);
    const Tensor none = tensor_none(), x = rows_of(wild(DTYPE_BF16, T, D, 9));
    Tensor y = new_tiles(DTYPE_E4M3, N, D), yt = new_tiles(DTYPE_E4M3, D, N), alone = new_tiles(DTYPE_E4M3, D, N);
    op_gather_rows(DEV, y, yt, x, map, STREAM_COMPUTE);
    op_gather_rows(DEV, none, alone, x, map, STREAM_COMPUTE);
    EXPECT(same_tiles(yt, alone), "columns without rows");
    const int64_t used = (int64_t)t_get(map.expert_start, E);
    for (int64_t n = 0; n < used; n++) {
        const int64_t token = (int64_t)t_get(map.row_token, n);
        for (int64_t c = 0; c < D; c++)
            EXPECT(value(y, n, c) == (token < 0 ? 0 : value(x, token, c)) &&
                       scale_of(y, n, c) == (token < 0 ? 1 : scale_of(x, token, c)),
                   "row %d, column %d", (int)n, (int)c);
    }
    Tensor wide = T2(DTYPE_BF16, N, D);
    int32_t n_rows = (int32_t)used;
    op_copy(DEV, tensor_rows(wide, 0, used), tensor_rows(y, 0, used), STREAM_COMPUTE);
    wide.n_rows = &n_rows;
    const Quantized anew = {none, new_tiles(DTYPE_E4M3, D, N)};
    op_quantize(DEV, anew, wide, STREAM_COMPUTE);
    EXPECT(same_tiles(yt, anew.columns), "columns are the rows' own");
}

/* ---- what is in them --------------------------------------------------------------------------------------------- */

/* By the meaning of every number. Blocks have a scale for each square, tiles for each row of one. */
static void count_by_hand(TileStats *want, Tensor x, int64_t n_rows) {
    const bool is_blocks = x.scale_layout == SCALE_BLOCK_128X128;
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t c = 0; c < x.shape[1]; c++) {
            const float scale = scale_of(x, r, c);
            const float code = fabsf(float_from_e4m3(((const uint8_t *)x.data)[r * x.ld + c])), size = code * scale;
            float amax;
            memcpy(&amax, (const char *)&want->amax_bits, sizeof amax); /* little-endian */
            want->values++;
            want->zeros += code == 0;
            want->subnormals += code > 0 && code < 0x1p-6f;
            want->largest += code == 448;
            want->nans += isnan(code);
            if (size > amax) memcpy((char *)&want->amax_bits, &size, sizeof size);
            if (c % 128 || (is_blocks && r % 128) || isnan(scale)) continue;
            const int at = ilogbf(scale) + 48;
            want->scales[at < 0 ? 0 : at > 63 ? 63 : at]++;
        }
}

static void expect_counts(const char *what, const TileStats *got, const TileStats *want) {
    EXPECT(got->values == want->values && got->zeros == want->zeros && got->subnormals == want->subnormals &&
               got->largest == want->largest && got->nans == want->nans && got->amax_bits == want->amax_bits,
           "%s: %d values, %d zeros, %d subnormal, %d at 448, %d NaN, amax %x; not %d, %d, %d, %d, %d, %x", what,
           (int)got->values, (int)got->zeros, (int)got->subnormals, (int)got->largest, (int)got->nans,
           (unsigned)got->amax_bits, (int)want->values, (int)want->zeros, (int)want->subnormals, (int)want->largest,
           (int)want->nans, (unsigned)want->amax_bits);
    for (int i = 0; i < SCALE_EXPONENTS; i++)
        EXPECT(got->scales[i] == want->scales[i], "%s: %d scales of 2^%d, not %d", what, (int)got->scales[i],
               SCALE_EXPONENT_FIRST + i, (int)want->scales[i]);
}

/* Tiles of all sizes, among them zeros, Inf, NaN, and scales beyond both ends; what is there already is added to. */
TEST(tile_stats_by_counting) {
    static const int64_t shapes[][2] = {{1, 8}, {16, 128}, {144, 136}, {37, 264}};
    for (int i = 0; i < 4; i++) {
        const int64_t M = shapes[i][0], C = shapes[i][1];
        TileStats got = {0}, want = {0};
        for (int round = 0; round < 2; round++) {
            Tensor x = wild(DTYPE_BF16, M, C, (uint64_t)(7 * i + round));
            if (M > 9)
                for (int64_t c = 0; c < C; c++) {
                    t_set(x, c, 0);
                    t_set(x, C + c, c == 3 ? INFINITY : 1);
                    t_set(x, 2 * C + c, c == C - 1 ? NAN : 1);
                    t_set(x, 3 * C + c, -0x1p-80);
                    t_set(x, 4 * C + c, 0x1p60);
                    t_set(x, 5 * C + c, -7);
                }
            const Quantized q = {new_tiles(DTYPE_E4M3, M, C), tensor_none()};
            op_quantize(DEV, q, x, STREAM_COMPUTE);
            op_tile_stats(DEV, &got, q.rows, STREAM_COMPUTE);
            count_by_hand(&want, q.rows, M);
            expect_counts(round ? "added" : "tiles", &got, &want);
        }
        if (M > 9)
            EXPECT(got.nans > 0 && got.zeros >= 2 * C && got.largest >= 2 * C && got.scales[0] && got.scales[63]);
        t_free_all();
    }
}

/* Rows past n_rows are not looked at; columns past a slice neither. */
TEST(tile_stats_of_a_part) {
    const Quantized q = tiles_of_normal(256, 264, 1, 1);
    int32_t n_rows = 128;
    TileStats got = {0}, want = {0}, none = {0};
    Tensor x = tensor_cols(q.rows, 128, 100);
    x.n_rows = &n_rows;
    op_tile_stats(DEV, &got, x, STREAM_COMPUTE);
    count_by_hand(&want, x, n_rows);
    expect_counts("a part", &got, &want);
    EXPECT_EQ(got.values, 128 * 100);
    n_rows = 0;
    op_tile_stats(DEV, &none, x, STREAM_COMPUTE);
    EXPECT_EQ(none.values, 0);
}

/* Every block of a weight has a number at 448, and a scale that counts once. */
TEST(tile_stats_of_weights) {
    static const int64_t shapes[][3] = {{0, 130, 260}, {3, 128, 128}, {2, 5, 200}};
    for (int i = 0; i < 3; i++) {
        const int64_t planes = shapes[i][0], O = shapes[i][1], I = shapes[i][2], n = planes ? planes : 1;
        Tensor master = t_normal(T1(DTYPE_F32, n * O * I), 0.02, 7), w = new_blocks(planes, O, I),
               wt = new_blocks(planes, I, O);
        op_quantize_weight(DEV, w, wt, master, STREAM_COMPUTE);
        TileStats got = {0}, want = {0};
        op_tile_stats(DEV, &got, w, STREAM_COMPUTE);
        for (int64_t p = 0; p < n; p++) count_by_hand(&want, planes ? tensor_plane(w, p) : w, O);
        expect_counts("blocks", &got, &want);
        EXPECT(got.largest >= n * ceil_div(O, 128) * ceil_div(I, 128), "%d numbers at 448", (int)got.largest);
    }
}

typedef struct {
    Tensor stats, x;
} StatsCall;

static void count(void *context) {
    const StatsCall *call = (const StatsCall *)context;
    op_zero(DEV, call->stats, STREAM_COMPUTE);
    op_tile_stats(DEV, (TileStats *)call->stats.data, call->x, STREAM_COMPUTE);
}

TEST(tile_stats_are_repeatable) {
    const StatsCall call = {T1(DTYPE_I32, sizeof(TileStats) / 4), tiles_of_normal(512, 256, 1, 3).rows};
    expect_same_bits("tile_stats", count, (void *)(uintptr_t)&call, &call.stats, 1);
}
