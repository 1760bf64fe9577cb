/* data/mix.c: whose a sample is. */
#include "data/mix.h"

#include <math.h>

#include "tests/test.h"

static void expect_dealt_out(const double *weights, int n, int64_t first, int64_t count) {
    Mix m;
    int64_t next[SOURCES_MAX], counts[SOURCES_MAX];
    double sum = 0;
    mix_init(&m, weights, n);
    for (int k = 0; k < n; k++) sum += weights[k];
    mix_counts(&m, first, next);
    for (int64_t i = first; i < first + count; i++) {
        int64_t local;
        const int k = mix_at(&m, i, &local);
        REQUIRE(k >= 0 && k < n, "source %d", k);
        EXPECT_EQ(local, next[k]);
        next[k]++;
        mix_counts(&m, i + 1, counts);
        int64_t total = 0;
        for (int j = 0; j < n; j++) {
            EXPECT_EQ(counts[j], next[j]);
            EXPECT_NEAR((double)counts[j], (double)(i + 1) * weights[j] / sum, n);
            total += counts[j];
        }
        EXPECT_EQ(total, i + 1);
    }
}

/* Every source's samples come in order without a gap, and at every point in their share. */
TEST(mix_deals_out_by_weight) {
    const double two[] = {0.85, 0.15}, even[] = {1, 1, 1, 1}, odd[] = {3, 0.01, 7, 1e-3, 2}, one[] = {5};
    expect_dealt_out(two, 2, 0, 5000);
    expect_dealt_out(even, 4, 0, 1000);
    expect_dealt_out(odd, 5, 0, 20000);
    expect_dealt_out(one, 1, 0, 100);
    const double extreme[] = {1e-9, 1e9};
    expect_dealt_out(extreme, 2, 0, 1000);
    expect_dealt_out(two, 2, (int64_t)1 << 40, 300); /* far from the start too, where 64 bits alone would overflow */
}

TEST(mix_follows_the_ratio_alone) {
    const double a[] = {0.75, 0.25}, b[] = {3, 1};
    Mix x, y;
    mix_init(&x, a, 2);
    mix_init(&y, b, 2);
    const int expected[] = {1, 0, 0, 0};
    for (int64_t i = 0; i < 400; i++) {
        int64_t local_x, local_y;
        const int k = mix_at(&x, i, &local_x);
        EXPECT(k == mix_at(&y, i, &local_y) && local_x == local_y, "sample %lld", (long long)i);
        EXPECT(k == expected[i % 4], "sample %lld: source %d", (long long)i, k);
    }
}

/* A weight of a millionth gets its sample now and then, not none. */
TEST(mix_small_weight) {
    const double weights[] = {1e-6, 1};
    Mix m;
    int64_t counts[2];
    mix_init(&m, weights, 2);
    mix_counts(&m, 100 * 1000000LL, counts);
    EXPECT(counts[0] >= 99 && counts[0] <= 100, "%lld", (long long)counts[0]);
}
