/* data/order.c: which sample is the c-th. */
#include "data/order.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

TEST(order_permutation_is_a_bijection) {
    const int64_t sizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 17, 100, 1000, 4097};
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        int64_t n = sizes[k];
        char *seen = (char *)malloc((size_t)n);
        for (int64_t epoch = 0; epoch < 3; epoch++) {
            memset(seen, 0, (size_t)n);
            for (int64_t i = 0; i < n; i++) {
                int64_t image = permutation_at(1337, epoch, n, i);
                REQUIRE(image >= 0 && image < n, "n %lld: image %lld", (long long)n, (long long)image);
                EXPECT(!seen[image], "n %lld, epoch %lld: %lld twice", (long long)n, (long long)epoch,
                       (long long)image);
                seen[image] = 1;
            }
        }
        free(seen);
    }
    int64_t huge = ((int64_t)1 << 45) + 12345; /* inside, and not the identity */
    int64_t image = permutation_at(1, 0, huge, huge - 1);
    EXPECT(image >= 0 && image < huge && image != huge - 1, "%lld", (long long)image);
}

TEST(order_permutation_differs_by_epoch_and_seed) {
    int n_same_epoch = 0, n_same_seed = 0, n_fixed = 0, n_next = 0;
    for (int64_t i = 0; i < 1000; i++) {
        int64_t image = permutation_at(1337, 0, 1000, i);
        n_same_epoch += image == permutation_at(1337, 1, 1000, i);
        n_same_seed += image == permutation_at(1338, 0, 1000, i);
        n_fixed += image == i;
        if (i > 0) n_next += image == permutation_at(1337, 0, 1000, i - 1) + 1;
    }
    /* Each is about 1 for independent random permutations. */
    EXPECT(n_same_epoch < 8 && n_same_seed < 8 && n_fixed < 8 && n_next < 8, "%d %d %d %d", n_same_epoch, n_same_seed,
           n_fixed, n_next);
}

/* Over many epochs every permutation of three, and every (place, sample) of seven and of a hundred, is equally likely.
 */
TEST(order_permutation_is_even) {
    int counts[27] = {0};
    for (int64_t epoch = 0; epoch < 6000; epoch++) {
        int64_t code = 0;
        for (int64_t i = 0; i < 3; i++) code = 3 * code + permutation_at(5, epoch, 3, i);
        counts[code]++;
    }
    int n_kinds = 0;
    for (int i = 0; i < 27; i++) {
        n_kinds += counts[i] > 0;
        EXPECT(counts[i] == 0 || (counts[i] > 850 && counts[i] < 1150), "permutation %d: %d of 6000", i, counts[i]);
    }
    EXPECT_EQ(n_kinds, 6);
    const int sizes[] = {7, 100};
    const int64_t n_epochs[] = {3500, 2000};
    for (int k = 0; k < 2; k++) {
        int n = sizes[k];
        double *table = (double *)calloc((size_t)(n * n), sizeof *table), chi2 = 0;
        double expected = (double)n_epochs[k] / n, degrees = (n - 1) * (n - 1);
        for (int64_t epoch = 0; epoch < n_epochs[k]; epoch++)
            for (int i = 0; i < n; i++) table[i * n + permutation_at(7, epoch, n, i)] += 1;
        for (int i = 0; i < n * n; i++) chi2 += (table[i] - expected) * (table[i] - expected) / expected;
        EXPECT_NEAR(chi2, degrees, 5 * sqrt(2 * degrees));
        free(table);
    }
}

TEST(order_epochs_are_whole) {
    SampleOrder o;
    char err[ERR_LEN];
    REQUIRE(sample_order_init(&o, 3, 10, true, NULL, 0, err) == 0);
    for (int64_t e = 0; e < 4; e++) {
        int seen = 0;
        for (int64_t i = 0; i < 10; i++) {
            int64_t epoch, index = sample_order_index(&o, 10 * e + i, &epoch);
            EXPECT_EQ(epoch, e);
            seen |= 1 << index;
        }
        EXPECT_EQ(seen, 1023);
    }
    o.shuffle = false;
    for (int64_t i = 0; i < 25; i++) EXPECT_EQ(sample_order_index(&o, i, NULL), i % 10);
    REQUIRE(sample_order_init(&o, 3, SAMPLES_ENDLESS, true, NULL, 0, err) == 0);
    EXPECT_EQ(sample_order_index(&o, (int64_t)1 << 50, NULL), (int64_t)1 << 50);
}

TEST(order_steps_over_skip_ranges) {
    /* Unsorted, overlapping, touching and empty ranges: {2,3}, {10..15}, {20}. */
    const int64_t skip[][2] = {{12, 16}, {20, 21}, {2, 4}, {10, 13}, {30, 30}, {13, 14}};
    SampleOrder o;
    char err[ERR_LEN] = "";
    REQUIRE(sample_order_init(&o, 3, 1000, false, skip, 6, err) == 0, "%s", err);
    EXPECT_EQ(o.n_skip, 3);
    int64_t consumed = 0;
    for (int64_t number = 0; number < 60; number++) {
        bool is_skipped = (number >= 2 && number < 4) || (number >= 10 && number < 16) || number == 20;
        if (is_skipped) continue;
        EXPECT_EQ(sample_order_number(&o, consumed), number);
        consumed++;
    }
    const int64_t from_zero[][2] = {{0, 5}};
    REQUIRE(sample_order_init(&o, 3, 1000, false, from_zero, 1, err) == 0, "%s", err);
    EXPECT_EQ(sample_order_number(&o, 0), 5);
    const int64_t backwards[][2] = {{5, 4}}, negative[][2] = {{-1, 4}};
    EXPECT(sample_order_init(&o, 3, 1000, false, backwards, 1, err) == -1 && strstr(err, "[5, 4]"), "%s", err);
    EXPECT(sample_order_init(&o, 3, 1000, false, negative, 1, err) == -1 && strstr(err, "[-1, 4]"), "%s", err);
}

/* A range that lies ahead of a saved position leaves all before it as it was. */
TEST(order_skip_ahead_keeps_the_past) {
    const int64_t skip[][2] = {{8000, 8080}};
    SampleOrder before, after;
    char err[ERR_LEN];
    REQUIRE(sample_order_init(&before, 3, 300, true, NULL, 0, err) == 0);
    REQUIRE(sample_order_init(&after, 3, 300, true, skip, 1, err) == 0);
    for (int64_t c = 7000; c < 8000; c++) EXPECT_EQ(sample_order_number(&after, c), sample_order_number(&before, c));
    EXPECT_EQ(sample_order_number(&after, 8000), 8080);
}
