/* Tests of data/bpe.h. */
#include "data/bpe.h"

#include <string.h>

#include "kernels/base/rng.h"
#include "tests/test.h"

/* The rule read literally: look for the pair of lowest rank, the leftmost first, merge it, begin again. */
static int64_t encode_slowly(const int32_t (*merges)[4], int n_merges, int32_t *ids, int64_t n) {
    for (;;) {
        int64_t at = -1;
        int best = n_merges;
        for (int64_t i = 0; i + 1 < n; i++)
            for (int m = 0; m < best; m++)
                if (merges[m][0] == ids[i] && merges[m][1] == ids[i + 1]) {
                    best = m;
                    at = i;
                }
        if (at < 0) return n;
        ids[at] = merges[best][3];
        memmove(ids + at + 1, ids + at + 2, (size_t)(n - at - 2) * sizeof *ids);
        n--;
    }
}

/* Random merge tables, in which a merge may well make a pair of lower rank than its own, on random pieces. */
TEST(bpe_equals_the_literal_rule) {
    enum { MERGES = 24, LENGTH = 60 };
    uint64_t draw = 0;
    for (int round = 0; round < 300; round++) {
        int32_t merges[MERGES][4];
        BpeMerges table;
        bpe_init(&table, MERGES);
        int n_merges = 0;
        for (int m = 0; m < MERGES; m++) {
            int32_t left = (int32_t)(rng_bits(7, RNG_TEST, 1, draw++) % 8);
            int32_t right = (int32_t)(rng_bits(7, RNG_TEST, 1, draw++) % 8);
            int32_t merged = (int32_t)(rng_bits(7, RNG_TEST, 1, draw++) % 8);
            if (!bpe_add(&table, left, right, n_merges, merged)) continue;
            memcpy(merges[n_merges], (int32_t[4]){left, right, n_merges, merged}, sizeof merges[0]);
            n_merges++;
        }
        BpeScratch scratch = {0};
        for (int k = 0; k < 20; k++) {
            int32_t ids[LENGTH], slow[LENGTH];
            int64_t n = (int64_t)(rng_bits(7, RNG_TEST, 1, draw++) % (LENGTH + 1));
            for (int64_t i = 0; i < n; i++) ids[i] = slow[i] = (int32_t)(rng_bits(7, RNG_TEST, 1, draw++) % 8);
            int64_t n_slow = encode_slowly(merges, n_merges, slow, n);
            int64_t n_left = bpe_encode(&table, &scratch, ids, n);
            EXPECT(n_left == n_slow && memcmp(ids, slow, (size_t)n_slow * sizeof *ids) == 0, "round %d, piece %d",
                   round, k);
        }
        bpe_scratch_free(&scratch);
        bpe_free(&table);
    }
}
