/* FP8 on the GPU: tiles, blocks and copies have the CPU's bits; producers have those of quantize behind them. */
#include <math.h>

#include "tests/cuda/fp8_test.h"

/* ---- quantize ---------------------------------------------------------------------------------------------------- */

static void quantize(const Side *s, const Fp8Case *f) {
    Tensor x = fp8_at(s, f, 2);
    if (f->first[3] >= 0) x.n_rows = (const int32_t *)fp8_at(s, f, 3).data;
    op_quantize(s->device, (Quantized){fp8_at(s, f, 0), fp8_at(s, f, 1)}, x, STREAM_COMPUTE);
}

/* n_rows < 0: all, and no bound. */
static void expect_quantize(const char *what, Dtype rows, bool columns, Tensor x, int n_rows) {
    const int64_t M = x.shape[0], C = x.shape[1];
    Fp8Case *f = fp8_case(case_name("%s (%d, %d), rows %s, columns %d, n_rows %d", what, (int)M, (int)C,
                                    dtype_name(rows), columns, n_rows),
                          quantize);
    fp8_arg(f, "rows", rows == DTYPE_NONE ? tensor_none() : h_tiles(rows, M, C), ARG_OUT);
    fp8_arg(f, "columns", columns ? h_tiles(DTYPE_E4M3, C, M) : tensor_none(), ARG_OUT);
    fp8_arg(f, "x", x, ARG_IN);
    fp8_arg(f, "n_rows", n_rows < 0 ? tensor_none() : t_ids(&n_rows, 1), ARG_IN);
    fp8_expect(f);
}

static Tensor e5m6_of(Tensor x) {
    const Quantized q = {h_tiles(DTYPE_E5M6, x.shape[0], x.shape[1]), tensor_none()};
    op_quantize(CPU, q, x, STREAM_COMPUTE);
    return q.rows;
}

/* Rows whose scales go down by powers of two, `steps` of them, and columns in which every fifth row alone has a number,
 * the smallest one that its scale leaves. */
static Tensor stairs(int64_t M, int64_t C, int steps, uint64_t seed) {
    Tensor x = t_normal(T2(DTYPE_BF16, M, C), 1, seed);
    for (int64_t i = 0; i < M * C; i++) {
        const int64_t row = i / C, col = i % C;
        const double value = col % 9 != 4 ? t_get(x, i) : row % 5 == 3 ? 0x1p-16 : 0;
        t_set(x, i, ldexp(value, -(int)(row % steps)));
    }
    return x;
}

static const int64_t shapes[][2] = {{16, 8},    {16, 128},   {32, 136},  {144, 8},    {272, 296},
                                    {128, 128}, {1024, 576}, {208, 264}, {384, 2112}, {640, 1024}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

TEST(cuda_quantize_has_the_cpus_bits) {
    for (int i = 0; i < SHAPES; i++) {
        const int64_t M = shapes[i][0], C = shapes[i][1];
        for (int wild = 0; wild < 2; wild++) {
            const uint64_t seed = 10 + (uint64_t)i;
#define X (wild ? h_wild(M, C, seed) : t_normal(T2(DTYPE_BF16, M, C), 3, seed))
            const char *what = wild ? "wild" : "normal";
            expect_quantize(what, DTYPE_E4M3, false, X, -1);
            expect_quantize(what, DTYPE_E4M3, true, X, -1);
            expect_quantize(what, DTYPE_NONE, true, X, -1);
            expect_quantize(what, DTYPE_E5M6, false, X, -1);
            expect_quantize(what, DTYPE_E5M6, true, X, -1);
            expect_quantize("tiles", DTYPE_NONE, true, h_rows_of(t_normal(T2(DTYPE_BF16, M, C), 1e-4, seed)), -1);
            expect_quantize("tiles, their columns", DTYPE_NONE, true, h_rows_of(X), -1);
            expect_quantize("stairs", DTYPE_NONE, true, h_rows_of(stairs(M, C, wild ? 40 : 20, seed)), -1);
            expect_quantize("e5m6 tiles", DTYPE_E4M3, true, e5m6_of(t_normal(T2(DTYPE_BF16, M, C), 1e4, seed)), -1);
#undef X
        }
    }
}

/* Every bf16 there is, in tiles of one exponent and of all. */
TEST(cuda_quantize_every_bf16) {
    for (int order = 0; order < 2; order++) {
        for (int wide = 0; wide < 2; wide++) {
            Tensor x = T2(DTYPE_BF16, 512, 128);
            for (int i = 0; i < 65536; i++)
                ((uint16_t *)x.data)[i] =
                    (uint16_t)(order ? (unsigned)i * 40503u : (unsigned)i); /* odd: a permutation */
            expect_quantize(order ? "mixed" : "in order", wide ? DTYPE_E5M6 : DTYPE_E4M3, !wide, x, -1);
        }
    }
}

/* An odd number of rows is fine where no columns are asked for; a bound on the device. */
TEST(cuda_quantize_edges) {
    expect_quantize("one row", DTYPE_E4M3, false, h_wild(1, 7168, 1), -1);
    expect_quantize("odd rows", DTYPE_E4M3, false, h_wild(131, 72, 2), -1);
    expect_quantize("bounded", DTYPE_E4M3, true, h_wild(512, 200, 3), 256);
    expect_quantize("bounded by none", DTYPE_E4M3, true, h_wild(512, 200, 4), 0);
    expect_quantize("a slice", DTYPE_E4M3, true, t_normal(t_slice(DTYPE_BF16, 160, 136, 16), 1, 5), -1);
}

static void copy(const Side *s, const Fp8Case *f) {
    op_copy(s->device, fp8_at(s, f, 0), fp8_at(s, f, 1), STREAM_COMPUTE);
}

TEST(cuda_copy_says_what_tiles_mean) {
    for (int i = 0; i < SHAPES; i++) {
        for (int variant = 0; variant < 4; variant++) {
            Tensor x = h_wild(shapes[i][0], shapes[i][1], 30 + (uint64_t)i);
            Fp8Case *f = fp8_case(case_name("copy %d of shape %d", variant, i), copy);
            fp8_arg(f, "y", T2(act_dtypes[variant % 2], x.shape[0], x.shape[1]), ARG_OUT);
            fp8_arg(f, "x", variant / 2 ? e5m6_of(x) : h_rows_of(x), ARG_IN);
            f->c.f32_tolerance = f->c.bf16_tolerance = 1e-30;
            fp8_expect(f);
        }
    }
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

static void quantize_weight(const Side *s, const Fp8Case *f) {
    op_quantize_weight(s->device, fp8_at(s, f, 0), fp8_at(s, f, 1), fp8_at(s, f, 2), STREAM_COMPUTE);
}

static void quantize_then_transpose(const Side *s, const Fp8Case *f) {
    op_quantize_weight(s->device, fp8_at(s, f, 0), tensor_none(), fp8_at(s, f, 2), STREAM_COMPUTE);
    op_transpose_weight(s->device, fp8_at(s, f, 1), fp8_at(s, f, 0), STREAM_COMPUTE);
}

static const int64_t weights[][3] = {{0, 16, 16},  {0, 144, 272},  {3, 128, 128},
                                     {2, 48, 208}, {0, 576, 2048}, {5, 256, 400}};
enum { WEIGHTS = sizeof weights / sizeof *weights };

TEST(cuda_quantize_weight_has_the_cpus_bits) {
    static const double special[] = {0, 1e-38, 448, 1e30, NAN, INFINITY, 1e-45, -448};
    for (int i = 0; i < WEIGHTS; i++) {
        for (int wild = 0; wild < 4; wild++) {
            const int64_t planes = weights[i][0], O = weights[i][1], I = weights[i][2];
            Tensor master = t_normal(T1(DTYPE_F32, (planes ? planes : 1) * O * I), 0.02, 7);
            for (int64_t k = 0; wild % 2 && k < master.shape[0]; k += 1 + k % 9973) t_set(master, k, special[k % 8]);
            if (i == 2 && wild % 2) t_fill(tensor_rows(master, O * I, O * I), 0); /* a block of zeros */
            Fp8Case *f = fp8_case(case_name("weight %d, wild %d", i, wild % 2),
                                  wild / 2 ? quantize_then_transpose : quantize_weight);
            fp8_arg(f, "w", h_blocks(planes, O, I), ARG_OUT);
            fp8_arg(f, "wt", h_blocks(planes, I, O), ARG_OUT);
            fp8_arg(f, "master", master, ARG_IN);
            fp8_expect(f);
        }
    }
}

TEST(cuda_copy_says_what_blocks_mean) {
    for (int i = 0; i < WEIGHTS; i++) {
        const int64_t O = weights[i][1], I = weights[i][2];
        for (int k = 0; k < 2; k++) {
            Fp8Case *f = fp8_case(case_name("copy of blocks %d to %s", i, dtype_name(act_dtypes[k])), copy);
            Tensor w, wt;
            h_weight(&w, &wt, 0, O, I, 0.02, 9);
            fp8_arg(f, "y", T2(act_dtypes[k], O, I), ARG_OUT);
            fp8_arg(f, "x", w, ARG_IN);
            f->c.f32_tolerance = f->c.bf16_tolerance = 1e-30;
            fp8_expect(f);
        }
    }
}

/* ---- what is in them --------------------------------------------------------------------------------------------- */

/* The counts as 32-bit words: all of them to the bit, added to what is there. */
static void tile_stats(const Side *s, const Fp8Case *f) {
    Tensor x = fp8_at(s, f, 1);
    if (f->first[2] >= 0) x.n_rows = (const int32_t *)fp8_at(s, f, 2).data;
    op_tile_stats(s->device, (TileStats *)fp8_at(s, f, 0).data, x, STREAM_COMPUTE);
}

static void expect_tile_stats(const char *name, Tensor x, int n_rows) {
    Fp8Case *f = fp8_case(name, tile_stats);
    Tensor stats = T1(DTYPE_I32, sizeof(TileStats) / 4);
    for (int64_t i = 0; i < stats.shape[0]; i += 2) t_set(stats, i, (double)(1000 + i));
    fp8_arg(f, "stats", stats, ARG_ADD);
    fp8_arg(f, "x", x, ARG_IN);
    fp8_arg(f, "n_rows", n_rows < 0 ? tensor_none() : t_ids(&n_rows, 1), ARG_IN);
    fp8_expect(f);
}

TEST(cuda_tile_stats_counts_as_the_cpu) {
    for (int i = 0; i < SHAPES; i++) {
        const int64_t M = shapes[i][0], C = shapes[i][1];
        expect_tile_stats(case_name("wild (%d, %d)", (int)M, (int)C), h_rows_of(h_wild(M, C, 70 + (uint64_t)i)), -1);
        expect_tile_stats(case_name("columns (%d, %d)", (int)C, (int)M),
                          h_columns_of(t_normal(T2(DTYPE_BF16, M, C), 1e-4, 70 + (uint64_t)i)), -1);
    }
    expect_tile_stats("one row", h_rows_of(h_wild(1, 7168, 1)), -1);
    expect_tile_stats("bounded", h_rows_of(h_wild(512, 200, 3)), 256);
    expect_tile_stats("bounded by none", h_rows_of(h_wild(512, 200, 4)), 0);
    for (int i = 0; i < WEIGHTS; i++) {
        Tensor w, wt;
        h_weight(&w, &wt, weights[i][0], weights[i][1], weights[i][2], 0.02, 9);
        expect_tile_stats(case_name("blocks %d", i), w, -1);
    }
}

/* ---- producers: the bits of quantize behind the op --------------------------------------------------------------- */

static Tensor d_rows_of(Tensor x) {
    const Quantized q = {d_fp8(h_tiles(DTYPE_E4M3, x.shape[0], x.shape[1])), tensor_none()};
    op_quantize(GPU, q, x, STREAM_COMPUTE);
    return q.rows;
}
static Tensor d_columns_of(Tensor x) {
    const Quantized q = {tensor_none(), d_fp8(h_tiles(DTYPE_E4M3, x.shape[1], x.shape[0]))};
    op_quantize(GPU, q, x, STREAM_COMPUTE);
    return q.columns;
}
static Tensor d_tiles(int64_t rows, int64_t cols) {
    return d_fp8(h_tiles(DTYPE_E4M3, rows, cols));
}
static void free_all(void) {
    op_synchronize(GPU, STREAM_COMPUTE);
    d_free_all();
    t_free_all();
}

TEST(cuda_rmsnorm_quantizes_its_bf16) {
    static const int64_t sizes[][2] = {{5, 264}, {1, 8}, {130, 1024}, {33, 2048}, {16, 7168}, {3, 7936}};
    for (int i = 0; i < 24; i++) {
        const int64_t T = sizes[i / 4][0], D = sizes[i / 4][1], J = i % 4;
        Tensor x = d_copy(t_normal(T2(DTYPE_BF16, T, D), 2, 1)), w = d_copy(t_normal(T1(DTYPE_F32, D), 1, 2));
        Tensor branch = J ? d_copy(t_normal(T3(DTYPE_BF16, J, T, D), 1, 3)) : tensor_none();
        Tensor r = J ? d_copy(T2(DTYPE_BF16, T, D)) : tensor_none(), rstd = d_copy(T1(DTYPE_F32, T));
        Tensor y = d_copy(t_poison(T2(DTYPE_BF16, T, D))), both = d_copy(t_poison(T2(DTYPE_BF16, T, D)));
        Tensor q = d_tiles(T, D), alone = d_tiles(T, D);
        const Tensor none = tensor_none();
        op_residual_rmsnorm_forward(GPU, r, y, none, rstd, x, branch, w, 1e-6, STREAM_COMPUTE);
        op_residual_rmsnorm_forward(GPU, r, both, q, rstd, x, branch, w, 1e-6, STREAM_COMPUTE);
        op_residual_rmsnorm_forward(GPU, r, none, alone, rstd, x, branch, w, 1e-6, STREAM_COMPUTE);
        EXPECT(t_same_bits(d_read(y), d_read(both)), "T %d, D %d, J %d: y", (int)T, (int)D, (int)J);
        EXPECT(d_same_fp8(q, d_rows_of(y)), "T %d, D %d, J %d: with y", (int)T, (int)D, (int)J);
        EXPECT(d_same_fp8(alone, q), "T %d, D %d, J %d: without", (int)T, (int)D, (int)J);
        free_all();
    }
}

TEST(cuda_swiglu_quantizes_its_bf16) {
    static const int64_t sizes[][2] = {{144, 128}, {16, 256}, {400, 1408}, {256, 2048}};
    for (int i = 0; i < 16; i++) {
        const int64_t M = sizes[i / 4][0], F = sizes[i / 4][1];
        const bool weighted = i & 1, bounded = (i & 2) && M >= 256;
        const int n_rows = 128;
        const Tensor none = tensor_none();
        Tensor h = d_copy(t_normal(T2(DTYPE_BF16, M, 2 * F), 2, 1)), h_kept = d_copy(T2(DTYPE_BF16, M, 2 * F));
        Tensor weight = weighted ? d_copy(t_normal(T1(DTYPE_F32, M), 1, 2)) : none;
        Tensor y = d_copy(T2(DTYPE_BF16, M, F)), dh = d_copy(T2(DTYPE_BF16, M, 2 * F));
        Tensor dy = d_copy(t_normal(T2(DTYPE_BF16, M, F), 1e-4, 3));
        Tensor dweight = weighted ? d_copy(T1(DTYPE_F32, M)) : none,
               dweight_q = weighted ? d_copy(T1(DTYPE_F32, M)) : none;
        Tensor y_rows = d_tiles(M, F), h_rows = d_tiles(M, 2 * F), y_columns = d_tiles(F, M);
        const Quantized dhq = {d_tiles(M, 2 * F), d_tiles(2 * F, M)};
        const int32_t *bound = bounded ? (const int32_t *)d_copy(t_ids(&n_rows, 1)).data : NULL;
        h.n_rows = h_rows.n_rows = h_kept.n_rows = bound;
        op_swiglu_forward(GPU, y, none, none, h, weight, STREAM_COMPUTE);
        op_swiglu_forward(GPU, none, y_rows, h_rows, h, weight, STREAM_COMPUTE);
        y.n_rows = dh.n_rows = bound;
        EXPECT(d_same_fp8(y_rows, d_rows_of(y)), "case %d: y", i);
        EXPECT(d_same_fp8(h_rows, d_rows_of(h)), "case %d: h", i);
        Tensor whole = h_rows, wide = h_kept;
        whole.n_rows = wide.n_rows = NULL;
        op_copy(GPU, wide, whole, STREAM_COMPUTE);
        op_swiglu_forward(GPU, y, none, none, h_kept, weight, STREAM_COMPUTE);
        op_swiglu_backward(GPU, dh, quantized_none(), none, dweight, dy, h_kept, weight, STREAM_COMPUTE);
        op_swiglu_backward(GPU, none, dhq, y_columns, dweight_q, dy, h_rows, weight, STREAM_COMPUTE);
        EXPECT(d_same_fp8(dhq.rows, d_rows_of(dh)), "case %d: dh", i);
        EXPECT(d_same_fp8(dhq.columns, d_columns_of(dh)), "case %d: columns of dh", i);
        EXPECT(d_same_fp8(y_columns, d_columns_of(y)), "case %d: columns of y", i);
        if (weighted) { /* the sums go another way round */
            const double error = t_error(d_read(dweight_q), t_doubles(d_read(dweight)));
            EXPECT(error < CUDA_SUM_TOLERANCE, "case %d: the weight's gradient is off by %g", i, error);
        }
        free_all();
    }
}

TEST(cuda_adamw_quantizes_what_it_updated) {
    const StepParams params = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    const UpdateState state = {.adam_t = 1};
    for (int i = 0; i < 2 * WEIGHTS; i++) {
        const int64_t planes = weights[i / 2][0], O = weights[i / 2][1], I = weights[i / 2][2],
                      n = (planes ? planes : 1) * O * I;
        const Dtype moments = act_dtypes[i % 2];
        StepStats stats = {.grad_scale = 1};
        Tensor step = d_copy(tensor_1d((void *)&params, DTYPE_I32, sizeof params / 4));
        Tensor gate = d_copy(tensor_1d(&stats, DTYPE_I32, sizeof stats / 4));
        Tensor count = d_copy(tensor_1d((void *)&state, DTYPE_I32, sizeof state / 4));
        Tensor master = t_normal(T1(DTYPE_F32, n), 0.02, 1), grad = d_copy(t_normal(T1(DTYPE_F32, n), 1, 2));
        Tensor one = d_copy(master), m = d_copy(T1(moments, n)), v = d_copy(T1(moments, n));
        Tensor two = d_copy(master), m2 = d_copy(T1(moments, n)), v2 = d_copy(T1(moments, n));
        Tensor w = d_fp8(h_blocks(planes, O, I)), wt = d_fp8(h_blocks(planes, I, O));
        Tensor again = d_fp8(h_blocks(planes, O, I)), again_t = d_fp8(h_blocks(planes, I, O));
        const Tensor none = tensor_none();
        const StepParams *p = (const StepParams *)step.data;
        for (int skipped = 0; skipped < 2; skipped++) {
            op_adamw_cast(GPU, w, wt, one, m, v, grad, true, p, (const StepStats *)gate.data,
                          (const UpdateState *)count.data, STREAM_COMPUTE);
            if (!skipped)
                op_adamw_cast(GPU, none, none, two, m2, v2, grad, true, p, (const StepStats *)gate.data,
                              (const UpdateState *)count.data, STREAM_COMPUTE);
            if (!skipped) op_quantize_weight(GPU, again, again_t, two, STREAM_COMPUTE);
            EXPECT(t_same_bits(d_read(one), d_read(two)) && t_same_bits(d_read(m), d_read(m2)) &&
                       t_same_bits(d_read(v), d_read(v2)),
                   "weight %d, %s moments: the update, skipped %d", i / 2, dtype_name(moments), skipped);
            EXPECT(d_same_fp8(w, again) && d_same_fp8(wt, again_t), "weight %d: blocks, skipped %d", i / 2, skipped);
            stats.skip = SKIP_LOSS_NOT_FINITE;
            op_copy_in(GPU, gate.data, &stats, sizeof stats, STREAM_COMPUTE);
        }
        free_all();
    }
}

/* ---- rows of the experts ----------------------------------------------------------------------------------------- */

static void gather(const Side *s, const Fp8Case *f) {
    const MoeMap map = {fp8_at(s, f, 3), fp8_at(s, f, 4), fp8_at(s, f, 5), fp8_at(s, f, 6), tensor_none()};
    op_gather_rows(s->device, fp8_at(s, f, 0), fp8_at(s, f, 1), fp8_at(s, f, 2), map, STREAM_COMPUTE);
}

/* An expert without rows, one with whole groups, padding; rows, columns, both: the CPU's bits. */
TEST(cuda_gather_rows_of_tiles) {
    enum { T = 150, E = 4, K = 2, N = 896 };
    static const int64_t widths[] = {8, 136, 256, 1024, 2056};
    for (int i = 0; i < 15; i++) {
        const int64_t D = widths[i / 3];
        const int slots[] = {0, 1, 2, 3};
        MoeMap map = {T1(DTYPE_I32, N), T1(DTYPE_F32, N), T2(DTYPE_I32, T, K), T1(DTYPE_I32, E + 1), tensor_none()};
        Tensor ids = T2(DTYPE_I32, T, K), weight = t_fill(T2(DTYPE_F32, T, K), 0.5);
        for (int t = 0; t < T; t++) t_set(ids, t * K, t < 128 ? 0 : 1), t_set(ids, t * K + 1, t % 5 ? 3 : -1);
        op_moe_map(CPU, map, ids, weight, t_ids(slots, E), 0, STREAM_COMPUTE);
        Fp8Case *f = fp8_case(case_name("gather tiles, width %d, variant %d", (int)D, i % 3), gather);
        fp8_arg(f, "y", i % 3 == 1 ? tensor_none() : h_tiles(DTYPE_E4M3, N, D), ARG_OUT);
        fp8_arg(f, "yt", i % 3 == 0 ? tensor_none() : h_tiles(DTYPE_E4M3, D, N), ARG_OUT);
        fp8_arg(f, "x", h_rows_of(t_normal(T2(DTYPE_BF16, T, D), 1e-3, 9)), ARG_IN);
        fp8_arg(f, "row_token", map.row_token, ARG_IN);
        fp8_arg(f, "row_weight", map.row_weight, ARG_IN);
        fp8_arg(f, "token_row", map.token_row, ARG_IN);
        fp8_arg(f, "expert_start", map.expert_start, ARG_IN);
        fp8_expect(f);
    }
}
