/* ZeRO-1's cut of weights into shards. */
#include "kernels/base/ints.h"
#include "model/cut.h"
#include "tests/test.h"

typedef struct {
    int64_t planes, rows, cols;
} Extents;

/* Whole blocks, one less than ranks, vectors, odd rows, planes with a short last block. */
static const Extents even[] = {{0, 1024, 32}, {0, 2048, 7}, {0, 128, 100}, {0, 384, 64}, {8, 256, 16}, {0, 1, 300}};
static const Extents odd[] = {{0, 1, 24}, {0, 576, 20}, {8, 10, 24}, {3, 200, 8}, {0, 37, 24}, {0, 1, 8}, {5, 129, 3}};
enum { N_EVEN = sizeof even / sizeof *even, N_ODD = sizeof odd / sizeof *odd, RANKS_MAX = 64 };

static int64_t planes_of(const Extents *x) {
    return max_i64(x->planes, 1);
}

static bool begins_a_block(const Extents *x, int64_t element) {
    for (int64_t b = 0; b < cut_blocks(planes_of(x), x->rows); b++)
        if (cut_block(planes_of(x), x->rows, x->cols, b).first == element) return true;
    return element == planes_of(x) * x->rows * x->cols;
}

TEST(cut_blocks_cover_a_weight) {
    for (int i = 0; i < N_ODD; i++) {
        const Extents *x = &odd[i];
        int64_t at = 0;
        for (int64_t b = 0; b < cut_blocks(planes_of(x), x->rows); b++) {
            const Interval block = cut_block(planes_of(x), x->rows, x->cols, b);
            EXPECT_EQ(block.first, at);
            EXPECT(block.n > 0 && block.n <= CUT_ROWS * x->cols && block.n % x->cols == 0, "%lld", (long long)block.n);
            EXPECT_EQ(block.first / (x->rows * x->cols), (block.first + block.n - 1) / (x->rows * x->cols));
            at += block.n;
        }
        EXPECT_EQ(at, planes_of(x) * x->rows * x->cols);
    }
}

/* Whole blocks, everything once, and the loads at most `blocks` of the widest block apart. */
static void check_cut(const Extents *list, int n, int n_ranks, int blocks) {
    int64_t load[RANKS_MAX] = {0}, widest = 0, sum[RANKS_MAX] = {0};
    for (int i = 0; i < 30 * n; i++) { /* thirty layers */
        const Extents *x = &list[i % n];
        Interval shards[RANKS_MAX];
        int64_t total = 0;
        widest = max_i64(widest, min_i64(x->rows, CUT_ROWS) * x->cols);
        cut_weight(shards, load, n_ranks, planes_of(x), x->rows, x->cols);
        for (int r = 0; r < n_ranks; r++) {
            EXPECT(shards[r].n == 0 ||
                       (begins_a_block(x, shards[r].first) && begins_a_block(x, shards[r].first + shards[r].n)),
                   "rank %d: %lld + %lld", r, (long long)shards[r].first, (long long)shards[r].n);
            for (int q = 0; q < r; q++) EXPECT_EQ(interval_overlap(shards[q], shards[r]).n, 0);
            total += shards[r].n;
            sum[r] += shards[r].n;
        }
        EXPECT_EQ(total, planes_of(x) * x->rows * x->cols);
        int64_t least = load[0], most = load[0];
        for (int r = 0; r < n_ranks; r++) least = min_i64(least, load[r]), most = max_i64(most, load[r]);
        EXPECT(most - least <= blocks * widest, "weight %d, %d ranks: loads from %lld to %lld", i, n_ranks,
               (long long)least, (long long)most);
    }
    for (int r = 0; r < n_ranks; r++) EXPECT_EQ(sum[r], load[r]);
}

TEST(cut_is_whole_blocks_and_balanced) {
    static const int ranks[] = {1, 2, 3, 4, 7, 16, RANKS_MAX};
    for (int i = 0; i < 7; i++) {
        check_cut(even, N_EVEN, ranks[i], 1);
        check_cut(odd, N_ODD, ranks[i], 2);
    }
}

TEST(cut_intervals_overlap) {
    const Interval a = {10, 5}, b = {12, 9}, apart = {15, 3}, nothing = {12, 0};
    EXPECT(interval_overlap(a, b).first == 12 && interval_overlap(a, b).n == 3, "from 12, 3");
    EXPECT(interval_overlap(b, a).first == 12 && interval_overlap(b, a).n == 3, "either way round");
    EXPECT(interval_overlap(a, apart).n == 0 && interval_overlap(apart, a).n == 0, "apart");
    EXPECT(interval_overlap(a, nothing).n == 0, "nothing");
}
