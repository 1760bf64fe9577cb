/* Running z-scores of loss and gradient norm. */
#include <math.h>
#include <string.h>

#include "kernels/base/rng.h"
#include "model/train/zscore.h"
#include "tests/test.h"

TEST(zscore_needs_sixteen_values) {
    ZWindow w;
    zscore_init(&w, 128);
    for (int i = 0; i < 15; i++) {
        zscore_push(&w, i % 2 ? 1 : 3);
        EXPECT(zscore_of(&w, 100) == 0);
        EXPECT(zscore_threshold(&w, 3) == INFINITY);
    }
    zscore_push(&w, 1); /* eight times 3 and eight times 1: mean 2, deviation 1 */
    EXPECT_NEAR(zscore_of(&w, 100), 98, 1e-12);
    EXPECT_NEAR(zscore_of(&w, -1), -3, 1e-12);
    EXPECT_NEAR(zscore_threshold(&w, 3), 5, 1e-12);
    EXPECT(zscore_threshold(&w, 0) == INFINITY);
}

/* A short window is enough when it is full. */
TEST(zscore_of_a_window_below_sixteen) {
    ZWindow w;
    zscore_init(&w, 8);
    for (int i = 0; i < 8; i++) {
        EXPECT(zscore_of(&w, 7) == 0);
        zscore_push(&w, i % 2 ? 4 : 6);
    }
    EXPECT_NEAR(zscore_of(&w, 7), 2, 1e-12);
}

/* NaN and infinities neither enter the window nor come out of it. */
TEST(zscore_ignores_what_is_not_finite) {
    ZWindow w;
    zscore_init(&w, 20);
    for (int i = 0; i < 60; i++) {
        zscore_push(&w, NAN);
        zscore_push(&w, INFINITY);
        zscore_push(&w, i);
        zscore_push(&w, -INFINITY);
    }
    EXPECT_EQ(w.n, 20);
    EXPECT_NEAR(zscore_threshold(&w, 1), 49.5 + sqrt((400.0 - 1) / 12), 1e-9); /* 40 .. 59 */
    EXPECT(zscore_of(&w, NAN) == 0);
    EXPECT(zscore_of(&w, INFINITY) == 0);
}

/* Equal losses, say of a synthetic set, give no scale: nothing may be skipped for the last bit. */
TEST(zscore_of_equal_values_is_zero) {
    ZWindow w;
    zscore_init(&w, 128);
    for (int i = 0; i < 100; i++) zscore_push(&w, 6.93147180559945);
    EXPECT(zscore_of(&w, 6.94) == 0);
    EXPECT(zscore_threshold(&w, 4) == INFINITY);
    zscore_init(&w, 1);
    zscore_push(&w, 2);
    EXPECT(zscore_of(&w, 3) == 0);
}

/* The ring against plain sums over the last values, and the same bits from a copy: what a resume does. */
TEST(zscore_ring_equals_plain_sums) {
    enum { SIZE = 37, N = 500 };
    double x[N];
    ZWindow w, copy;
    zscore_init(&w, SIZE);
    for (int i = 0; i < N; i++) {
        x[i] = 5 + rng_normal(3, RNG_TEST, 0, (uint64_t)i);
        if (i >= SIZE) {
            double mean = 0, squares = 0;
            for (int j = i - SIZE; j < i; j++) mean += x[j] / SIZE;
            for (int j = i - SIZE; j < i; j++) squares += (x[j] - mean) * (x[j] - mean) / SIZE;
            EXPECT_NEAR(zscore_of(&w, x[i]), (x[i] - mean) / sqrt(squares), 1e-9);
            EXPECT_NEAR(zscore_threshold(&w, 2.5), mean + 2.5 * sqrt(squares), 1e-9);
        }
        if (i == 222) memcpy(&copy, &w, sizeof w);
        if (i >= 222) {
            double of_copy = zscore_of(&copy, x[i]), of_window = zscore_of(&w, x[i]);
            EXPECT(memcmp(&of_copy, &of_window, sizeof of_copy) == 0, "at %d", i);
            zscore_push(&copy, x[i]);
        }
        zscore_push(&w, x[i]);
    }
}
