#include "op_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "kernels/base/rng.h"
#include "kernels/cpu/cpu.h"

enum { BLOCKS_MAX = 1 << 12, I32_POISON = 0x7FC0DEAD, OUTPUTS_MAX = 8 };

static void *blocks[BLOCKS_MAX];
static int n_blocks;

const Device *op_test_device(void) {
    static Device device;
    device.ops = ops_cpu();
    return &device;
}

/* ---- tensors ----------------------------------------------------------------------------------------------------- */

static void *block_new(size_t bytes) {
    REQUIRE(n_blocks < BLOCKS_MAX, "more than %d tensors: call t_free_all()", BLOCKS_MAX);
    size_t rounded = (bytes + 255) / 256 * 256;
    void *p = aligned_alloc(256, rounded ? rounded : 256);
    REQUIRE(p != NULL, "no memory for %zu bytes", bytes);
    memset(p, 0, rounded ? rounded : 256);
    blocks[n_blocks++] = p;
    return p;
}

void t_free_all(void) {
    while (n_blocks > 0) free(blocks[--n_blocks]);
}

Tensor t_zeros(Dtype dtype, int ndim, int64_t n0, int64_t n1, int64_t n2) {
    void *data = block_new((size_t)(n0 * n1 * n2) * dtype_size(dtype));
    if (ndim == 1) return tensor_1d(data, dtype, n0);
    if (ndim == 2) return tensor_2d(data, dtype, n0, n1);
    return tensor_3d(data, dtype, n0, n1, n2);
}

/* Position in memory of element i, counted without gaps. */
static int64_t t_at(Tensor t, int64_t i) {
    if (t.ndim < 2) return i;
    int64_t width = t.shape[t.ndim - 1];
    return i / width * t.ld + i % width;
}

static double load(const void *data, Dtype dtype, int64_t at) {
    if (dtype == DTYPE_F32) return (double)((const real *)data)[at];
    if (dtype == DTYPE_F64) return ((const double *)data)[at];
    if (dtype == DTYPE_BF16) return (double)bf16_to_real(((const uint16_t *)data)[at]);
    REQUIRE(dtype == DTYPE_I32, "dtype %s", dtype_name(dtype));
    return (double)((const int32_t *)data)[at];
}

static void store(void *data, Dtype dtype, int64_t at, double x) {
    if (dtype == DTYPE_F32) {
        ((real *)data)[at] = (real)x;
    } else if (dtype == DTYPE_F64) {
        ((double *)data)[at] = x;
    } else if (dtype == DTYPE_BF16) {
        ((uint16_t *)data)[at] = real_to_bf16((real)x);
    } else {
        REQUIRE(dtype == DTYPE_I32, "dtype %s", dtype_name(dtype));
        ((int32_t *)data)[at] = isnan(x) ? I32_POISON : (int32_t)x;
    }
}

double t_get(Tensor t, int64_t i) {
    return load(t.data, t.dtype, t_at(t, i));
}

void t_set(Tensor t, int64_t i, double x) {
    store(t.data, t.dtype, t_at(t, i), x);
}

static double canary(int64_t at) {
    return (double)(at % 61 + 3);
}

Tensor t_slice(Dtype dtype, int64_t rows, int64_t cols, int64_t gap) {
    Tensor whole = T2(dtype, rows, cols + gap);
    for (int64_t i = 0; i < rows * (cols + gap); i++) t_set(whole, i, canary(i));
    return tensor_cols(whole, gap / 2, cols);
}

bool t_gap_is_intact(Tensor slice, int64_t gap) {
    int64_t cols = slice.shape[1], width = cols + gap;
    const char *base = (const char *)slice.data - (size_t)(gap / 2) * dtype_size(slice.dtype);
    for (int64_t i = 0; i < slice.shape[0] * width; i++) {
        int64_t col = i % width;
        bool is_gap = col < gap / 2 || col >= gap / 2 + cols;
        if (is_gap && load(base, slice.dtype, i) != canary(i)) return false;
    }
    return true;
}

Tensor t_fill(Tensor t, double x) {
    for (int64_t i = 0; i < tensor_numel(t); i++) t_set(t, i, x);
    return t;
}

Tensor t_poison(Tensor t) {
    if (!t.scale) return t_fill(t, NAN);
    memset(t.data, 0x7F, tensor_bytes(t)); /* NaN in E4M3 */
    for (int64_t i = 0; i < tensor_n_scales(t); i++) t.scale[i] = NAN;
    return t;
}

Tensor t_normal(Tensor t, double scale, uint64_t seed) {
    for (int64_t i = 0; i < tensor_numel(t); i++) t_set(t, i, scale * rng_normal(seed, RNG_TEST, 0, (uint64_t)i));
    return t;
}

Tensor t_copy(Tensor t) {
    Tensor y = t_zeros(t.dtype, t.ndim, t.shape[0], t.ndim > 1 ? t.shape[1] : 1, t.ndim > 2 ? t.shape[2] : 1);
    for (int64_t i = 0; i < tensor_numel(t); i++) t_set(y, i, t_get(t, i));
    return y;
}

Tensor t_ids(const int *list, int64_t n) {
    Tensor t = T1(DTYPE_I32, n);
    for (int64_t i = 0; i < n; i++) t_set(t, i, list[i]);
    return t;
}

double *t_doubles(Tensor t) {
    int64_t n = tensor_numel(t);
    double *x = (double *)block_new((size_t)n * sizeof(double));
    for (int64_t i = 0; i < n; i++) x[i] = t_get(t, i);
    return x;
}

/* ---- comparison -------------------------------------------------------------------------------------------------- */

double t_error(Tensor t, const double *want) {
    double worst = 0, largest = 1e-30;
    for (int64_t i = 0; i < tensor_numel(t); i++) {
        double off = fabs(t_get(t, i) - want[i]);
        if (isnan(off)) return NAN;
        worst = fmax(worst, off);
        largest = fmax(largest, fabs(want[i]));
    }
    return worst / largest;
}

bool t_same_bits(Tensor a, Tensor b) {
    if (a.dtype != b.dtype || tensor_numel(a) != tensor_numel(b)) return false;
    size_t size = dtype_size(a.dtype);
    for (int64_t i = 0; i < tensor_numel(a); i++) {
        const char *x = (const char *)a.data + (size_t)t_at(a, i) * size;
        const char *y = (const char *)b.data + (size_t)t_at(b, i) * size;
        if (memcmp(x, y, size) != 0) return false;
    }
    return true;
}

bool t_is_finite(Tensor t) {
    for (int64_t i = 0; i < tensor_numel(t); i++) {
        if (!isfinite(t_get(t, i))) return false;
        if (t.dtype == DTYPE_I32 && t_get(t, i) == I32_POISON) return false;
    }
    return true;
}

double t_dot_normal(Tensor y, uint64_t seed) {
    double sum = 0;
    for (int64_t i = 0; i < tensor_numel(y); i++) sum += t_get(y, i) * rng_normal(seed, RNG_TEST, 0, (uint64_t)i);
    return sum;
}

static void use_threads(int n) {
#ifdef _OPENMP
    omp_set_num_threads(n);
#else
    (void)n;
#endif
}

double fd_check(const char *name, Tensor x, Tensor dx, LossFn loss, SignatureFn signature, void *context,
                int64_t max_elements, int64_t *n_skipped) {
    if (sizeof(real) == sizeof(float)) return 0;
    REQUIRE(x.dtype == DTYPE_F32 && tensor_numel(x) == tensor_numel(dx), "%s: shapes of x and dx", name);
    use_threads(1); /* thousands of tiny calls: on busy cores, threads would wait for each other most of the time */
    loss(context);
    uint64_t choice = signature ? signature(context) : 0;
    int64_t n = tensor_numel(x), n_steps = n < max_elements ? n : max_elements, n_taken = 0;
    double worst = 0, largest = 1e-30;
    for (int64_t step = 0; step < n_steps; step++) {
        int64_t i = step * n / n_steps;
        double at = t_get(x, i), h = 1e-5 * fmax(1, fabs(at));
        t_set(x, i, at + h);
        double above = loss(context);
        bool same_choice = !signature || signature(context) == choice;
        t_set(x, i, at - h);
        double below = loss(context);
        same_choice = same_choice && (!signature || signature(context) == choice);
        t_set(x, i, at);
        if (!same_choice) {
            if (n_skipped) ++*n_skipped;
            continue;
        }
        double difference = (above - below) / (2 * h), gradient = t_get(dx, i);
        EXPECT(isfinite(difference) && isfinite(gradient), "%s[%lld]: difference %g, gradient %g", name, (long long)i,
               difference, gradient);
        worst = fmax(worst, fabs(difference - gradient));
        largest = fmax(largest, fmax(fabs(difference), fabs(gradient)));
        n_taken++;
    }
    loss(context);
    EXPECT(2 * n_taken >= n_steps, "%s: only %lld of %lld steps kept the choice", name, (long long)n_taken,
           (long long)n_steps);
    EXPECT(worst / largest < FD_TOLERANCE, "%s: error %.3g of the largest gradient %.3g", name, worst / largest,
           largest);
    return worst / largest;
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

void expect_same_bits(const char *name, void (*fn)(void *context), void *context, const Tensor *outputs,
                      int n_outputs) {
    static const int threads[] = {1, 2, 4, 1};
    Tensor first[OUTPUTS_MAX];
    REQUIRE(n_outputs <= OUTPUTS_MAX, "%s: %d outputs", name, n_outputs);
    for (int run = 0; run < 4; run++) {
        use_threads(threads[run]);
        for (int i = 0; i < n_outputs; i++) t_poison(outputs[i]);
        fn(context);
        for (int i = 0; i < n_outputs; i++) {
            if (run == 0) first[i] = t_copy(outputs[i]);
            EXPECT(t_same_bits(outputs[i], first[i]), "%s: output %d differs in run %d with %d threads", name, i, run,
                   threads[run]);
        }
    }
}
