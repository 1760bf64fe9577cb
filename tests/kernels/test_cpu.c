/* What the CPU ops share (kernels/cpu/cpu.h), and the backend's memory and copies. */
#include <math.h>
#include <string.h>

#include "kernels/base/arena.h"
#include "kernels/cpu/cpu.h"
#include "op_test.h"

/* ---- exp --------------------------------------------------------------------------------------------------------- */

TEST(cpu_exp_special_values) {
    EXPECT(exp_real((real)0) == 1, "exp(0) is %.9g", (double)exp_real(0));
    EXPECT(exp_real((real)-INFINITY) == 0, "exp(-inf) is %.9g", (double)exp_real((real)-INFINITY));
    EXPECT(isnan(exp_real((real)NAN)), "exp(nan) is %.9g", (double)exp_real((real)NAN));
    EXPECT(isinf(exp_real((real)INFINITY)), "exp(inf) is %.9g", (double)exp_real((real)INFINITY));
    EXPECT(isinf(exp_real((real)1e30)), "exp(1e30) is %.9g", (double)exp_real((real)1e30));
    EXPECT(exp_real((real)-1e30) == 0, "exp(-1e30) is %.9g", (double)exp_real((real)-1e30));
    EXPECT_NEAR(sigmoid_real((real)0), 0.5, 0);
    EXPECT_NEAR(sigmoid_real((real)-200), 0, 1e-38);
    EXPECT_NEAR(sigmoid_real((real)200), 1, 0);
}

#ifndef REAL_IS_DOUBLE
enum { BATCH = 4096 };

static CPU_CLONES void exp_of_row(real *y, const real *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = exp_real(x[i]);
}

static double ulp_of(float x) {
    return (double)nextafterf(x, INFINITY) - (double)x;
}

/* Every 251st float of the range with a normal result; the loop runs in the clone of this machine and in plain code. */
TEST(cpu_exp_error_over_its_range) {
    static float x[BATCH], cloned[BATCH];
    double worst = 0, worst_at = 0;
    int64_t n_tried = 0;
    for (int sign = 0; sign < 2; sign++) {
        uint32_t bits = 0;
        float top = sign ? 87.33f : 88.72f;
        for (bool more = true; more;) {
            int n = 0;
            for (; n < BATCH; n++, bits += 251) {
                float value;
                memcpy(&value, &bits, 4);
                if (value > top) break;
                x[n] = sign ? -value : value;
            }
            more = n == BATCH;
            exp_of_row(cloned, x, n);
            for (int i = 0; i < n; i++, n_tried++) {
                double want = exp((double)x[i]), ulp = ulp_of((float)want);
                double error = fmax(fabs((double)cloned[i] - want), fabs((double)exp_real(x[i]) - want)) / ulp;
                if (error > worst) worst = error, worst_at = (double)x[i];
            }
        }
    }
    EXPECT(n_tried > 8000000, "only %lld values tried", (long long)n_tried);
    EXPECT(worst < 1.1, "error of %.3f ulp at %.9g", worst, worst_at);
}

/* Between the smallest normal result and zero the error is absolute: below the smallest normal number's last place. */
TEST(cpu_exp_underflows_to_zero) {
    double worst = 0;
    for (double at = -87.3; at > -110; at -= 0.0007) {
        double got = (double)exp_real((float)at), want = exp((double)(float)at);
        EXPECT(got >= 0 && (at < -87.7 ? got == 0 : true), "exp(%.9g) is %.9g", at, got);
        if (at > -87.65) worst = fmax(worst, fabs(got - want));
    }
    EXPECT(worst < 2e-45, "error %.3g", worst);
}
#endif

/* ---- bf16 -------------------------------------------------------------------------------------------------------- */

static float float_of(uint32_t bits) {
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

TEST(cpu_bf16_round_trip_of_every_pattern) {
    for (uint32_t upper = 0; upper < 65536; upper++) {
        bool is_nan = (upper & 0x7FFF) > 0x7F80;
        real value = bf16_to_real((uint16_t)upper);
        EXPECT(isnan(value) == is_nan, "pattern %04x reads as %g", upper, (double)value);
        uint16_t back = real_to_bf16(value);
        EXPECT(back == (is_nan ? (upper | 0x40) : upper), "pattern %04x comes back as %04x", upper, back);
    }
}

TEST(cpu_bf16_rounds_to_nearest_even) {
    for (uint32_t upper = 0; upper < 65536; upper++) {
        if ((upper & 0x7F80) == 0x7F80) continue;
        uint32_t low = upper << 16, next = upper + 1; /* the next larger magnitude; 7F80 is infinity */
        struct {
            uint32_t bits, want;
        } trial[] = {{low | 0x0001, upper},
                     {low | 0x7FFF, upper},
                     {low | 0x8000, upper & 1 ? next : upper},
                     {low | 0x8001, next},
                     {low | 0xFFFF, next}};
        for (int i = 0; i < 5; i++) {
            uint32_t got = real_to_bf16((real)float_of(trial[i].bits));
            EXPECT(got == trial[i].want, "float %08x rounds to %04x, not %04x", trial[i].bits, got, trial[i].want);
        }
    }
}

TEST(cpu_bf16_nan_stays_nan) {
    static const uint32_t nans[] = {0x7F800001, 0x7F80FFFF, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        uint16_t bits = real_to_bf16((real)float_of(nans[i]));
        EXPECT(isnan(bf16_to_real(bits)), "NaN %08x became %04x", nans[i], bits);
        EXPECT_EQ(bits >> 15, nans[i] >> 31);
    }
}

/* ---- backend ----------------------------------------------------------------------------------------------------- */

TEST(cpu_table_is_complete) {
    ops_check_complete(ops_cpu());
    EXPECT(strcmp(ops_cpu()->name, "cpu") == 0, "name is %s", ops_cpu()->name);
    EXPECT(strlen(cpu_isa_name()) > 0, "no name for the instruction set");
#if defined(CPU_HAS_CLONES)
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    EXPECT((strcmp(cpu_isa_name(), "x86-64") != 0) == has_avx2, "%s, but avx2 is %d", cpu_isa_name(), has_avx2);
#endif
}

TEST(cpu_alloc_is_aligned_and_zeroed) {
    static const size_t sizes[] = {0, 1, 255, 256, 4097, 1000003};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (int again = 0; again < 3; again++) {
            unsigned char *p = (unsigned char *)op_alloc(DEV, sizes[i]);
            REQUIRE(p != NULL, "%zu bytes", sizes[i]);
            EXPECT_EQ((uintptr_t)p % ARENA_ALIGN, 0);
            size_t n_set = 0;
            for (size_t k = 0; k < sizes[i]; k++) n_set += p[k] != 0;
            EXPECT_EQ(n_set, 0);
            memset(p, 0xAB, sizes[i]);
            op_release(DEV, p);
        }
    }
#ifndef __SANITIZE_ADDRESS__ /* which ends the process instead */
    EXPECT(op_alloc(DEV, (size_t)1 << 62) == NULL, "4 EiB were handed out");
#endif
    EXPECT(op_alloc(DEV, SIZE_MAX) == NULL, "SIZE_MAX bytes were handed out");
    op_release(DEV, NULL);
}

TEST(cpu_copy_in_and_out) {
    const char text[] = "a row of bytes";
    char *p = (char *)op_alloc(DEV, sizeof text), back[sizeof text] = "";
    op_copy_in(DEV, p, text, sizeof text, STREAM_COPY);
    op_event_record(DEV, 0, STREAM_COPY);
    op_event_wait(DEV, 0, STREAM_COMPUTE);
    op_copy_out(DEV, back, p, sizeof text, STREAM_COPY);
    op_synchronize(DEV, STREAM_COPY);
    EXPECT(strcmp(back, text) == 0, "came back as '%s'", back);
    op_release(DEV, p);
}

TEST(cpu_zero_writes_all) {
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    for (int i = 0; i < 3; i++) {
        Tensor whole = t_poison(T2(dtypes[i], 9, 7)), part = tensor_rows(whole, 2, 5);
        op_zero(DEV, part, STREAM_COMPUTE);
        for (int64_t k = 0; k < 9 * 7; k++) {
            bool is_zero = t_get(whole, k) == 0;
            EXPECT(is_zero == (k >= 14 && k < 49), "%s element %lld", dtype_name(dtypes[i]), (long long)k);
        }
    }
}

static void expect_copied(Tensor y, Tensor x, const char *what) {
    int64_t n_wrong = 0;
    for (int64_t i = 0; i < tensor_numel(x); i++) {
        double want = y.dtype == DTYPE_BF16 ? (double)bf16_to_real(real_to_bf16((real)t_get(x, i))) : t_get(x, i);
        n_wrong += !(t_get(y, i) == want);
    }
    EXPECT(n_wrong == 0, "%s: %lld elements are wrong", what, (long long)n_wrong);
}

TEST(cpu_copy_of_shapes_and_dtypes) {
    static const Dtype pairs[][2] = {{DTYPE_F32, DTYPE_F32},
                                     {DTYPE_BF16, DTYPE_F32},
                                     {DTYPE_F32, DTYPE_BF16},
                                     {DTYPE_BF16, DTYPE_BF16},
                                     {DTYPE_I32, DTYPE_I32}};
    for (int i = 0; i < 5; i++) {
        Dtype to = pairs[i][0], from = pairs[i][1];
        double scale = from == DTYPE_I32 ? 1e4 : 1;
        Tensor x = t_normal(T1(from, 3 * SUM_PARTIAL + 17), scale, 1), y = t_poison(T1(to, 3 * SUM_PARTIAL + 17));
        op_copy(DEV, y, x, STREAM_COMPUTE);
        expect_copied(y, x, "vector");
        x = t_normal(T3(from, 2, 3, 5), scale, 2), y = t_poison(T3(to, 2, 3, 5));
        op_copy(DEV, y, x, STREAM_COMPUTE);
        expect_copied(y, x, "3-D");
        x = t_normal(t_slice(from, 4, 7, 3), scale, 3), y = t_poison(t_slice(to, 4, 7, 6));
        op_copy(DEV, y, x, STREAM_COMPUTE);
        expect_copied(y, x, "slice");
        EXPECT(t_gap_is_intact(y, 6), "the gap of a slice was written");
        op_copy(DEV, T1(to, 0), T1(from, 0), STREAM_COMPUTE);
    }
}
