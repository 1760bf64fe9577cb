#include "tests/cuda/fp8_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/rng.h"

/* ---- on the host ------------------------------------------------------------------------------------------------- */

/* The bytes as integers: what the harness poisons, guards and compares. */
static Tensor words_of(Tensor t) {
    return tensor_1d(t.data, DTYPE_I32, (int64_t)tensor_bytes(t) / 4);
}
static Tensor scales_of(Tensor t) {
    return tensor_1d(t.scale, DTYPE_I32, tensor_n_scales(t));
}

static Tensor with_memory(Tensor t) {
    REQUIRE(tensor_bytes(t) % 4 == 0, "%zu bytes of FP8", tensor_bytes(t));
    t.data = t_poison(T1(DTYPE_I32, (int64_t)tensor_bytes(t) / 4)).data;
    t.scale = (float *)t_poison(T1(DTYPE_I32, tensor_n_scales(t))).data;
    return t;
}

Tensor h_tiles(Dtype dtype, int64_t rows, int64_t cols) {
    return with_memory(tensor_tiles(NULL, NULL, dtype, rows, cols));
}
Tensor h_blocks(int64_t planes, int64_t rows, int64_t cols) {
    return with_memory(tensor_blocks(NULL, NULL, planes, rows, cols));
}

Tensor h_rows_of(Tensor x) {
    const Quantized q = {h_tiles(DTYPE_E4M3, x.shape[0], x.shape[1]), tensor_none()};
    op_quantize(CPU, q, x, STREAM_COMPUTE);
    return q.rows;
}
Tensor h_columns_of(Tensor x) {
    const Quantized q = {tensor_none(), h_tiles(DTYPE_E4M3, x.shape[1], x.shape[0])};
    op_quantize(CPU, q, x, STREAM_COMPUTE);
    return q.columns;
}

void h_weight(Tensor *w, Tensor *wt, int64_t planes, int64_t rows, int64_t cols, double scale, uint64_t seed) {
    *w = h_blocks(planes, rows, cols);
    *wt = h_blocks(planes, cols, rows);
    op_quantize_weight(CPU, *w, *wt, t_normal(T1(DTYPE_F32, tensor_numel(*w)), scale, seed), STREAM_COMPUTE);
}

Tensor h_wild(int64_t rows, int64_t cols, uint64_t seed) {
    static const double fill[] = {0, -3, 1e-12, -1e-39, 448, 449, 3e38, -0.0, 464, 1e-37, 65024, 65280};
    Tensor x = T2(DTYPE_BF16, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++) {
        const int exponent = (int)(rng_uniform(seed, RNG_TEST, 1, (uint64_t)i) * 24) - 20;
        const int64_t row = i / cols, tile = i % cols / SCALE_TILE;
        const uint64_t which = rng_bits(seed, RNG_TEST, 2, (uint64_t)(row * 64 + tile)) % 48;
        double value = ldexp(rng_normal(seed, RNG_TEST, 0, (uint64_t)i), exponent);
        if (which < 12) value = fill[which] * (1 - (double)(i % 7) / 256);
        if (which == 12 && i % 5 == 0) value = INFINITY;
        if (which == 13 && i % 11 == 0) value = NAN;
        t_set(x, i, value);
    }
    return x;
}

/* ---- on the device ----------------------------------------------------------------------------------------------- */

Tensor d_fp8(Tensor host) {
    Tensor t = host;
    t.data = d_copy(words_of(host)).data;
    t.scale = (float *)d_copy(scales_of(host)).data;
    return t;
}

bool d_same_fp8(Tensor a, Tensor b) {
    return t_same_bits(d_read(words_of(a)), d_read(words_of(b))) &&
           t_same_bits(d_read(scales_of(a)), d_read(scales_of(b)));
}

/* ---- cases ------------------------------------------------------------------------------------------------------- */

static void run(const Side *s) {
    const Fp8Case *f = (const Fp8Case *)s->context;
    f->call(s, f);
}

Fp8Case *fp8_case(const char *name, void (*call)(const Side *s, const Fp8Case *f)) {
    Fp8Case *f = calloc(1, sizeof *f);
    REQUIRE(f != NULL, "no memory");
    f->c.name = name;
    f->c.run = run;
    f->c.context = f;
    f->call = call;
    return f;
}

static void add(Fp8Case *f, const char *name, Tensor t, ArgKind kind) {
    REQUIRE(f->n_args < ARGS_MAX, "%s: more than %d arguments", f->c.name, ARGS_MAX);
    f->c.args[f->n_args++] = (Arg){name, t, kind};
}

void fp8_arg(Fp8Case *f, const char *name, Tensor t, ArgKind kind) {
    f->like[f->n] = t;
    f->first[f->n++] = tensor_is_none(t) ? -1 : f->n_args;
    if (tensor_is_none(t)) return;
    add(f, name, t.scale ? words_of(t) : t, kind);
    if (t.scale) add(f, case_name("scales of %s", name), scales_of(t), kind);
}

Tensor fp8_at(const Side *s, const Fp8Case *f, int i) {
    Tensor t = f->like[i];
    if (f->first[i] < 0) return tensor_none();
    t.data = s->t[f->first[i]].data;
    if (t.scale) t.scale = (float *)s->t[f->first[i] + 1].data;
    return t;
}

void fp8_expect(Fp8Case *f) {
    expect_case(&f->c);
    free(f);
    t_free_all();
}
