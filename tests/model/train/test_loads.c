/* Loads of experts over the last steps, and what they make of the ranks. */
#include "model/train/loads.h"

#include <string.h>

#include "kernels/base/rng.h"
#include "tests/test.h"

enum { LAYERS = 2, E = 8, N = LAYERS * E };

/* The recent steps count: what a step had is halved after about 44 more, and gone after some hundred. */
TEST(loads_follow_the_last_steps) {
    ExpertLoads l = loads_make(LAYERS, E);
    int32_t counts[N];
    EXPECT(!loads_are_known(&l, LAYERS, E), "nobody got anything yet");
    for (int i = 0; i < N; i++) counts[i] = i < E ? 100 * i : 0;
    loads_add(&l, counts);
    EXPECT(loads_are_known(&l, LAYERS, E) && !loads_are_known(&l, LAYERS, E + 1), "of another model");
    for (int i = 0; i < N; i++) EXPECT_EQ(l.load[i], counts[i]);
    for (int step = 1; step < 1000; step++) loads_add(&l, counts);
    for (int i = 0; i < E; i++)
        EXPECT(l.load[i] >= LOADS_STEPS * counts[i] && l.load[i] < LOADS_STEPS * (counts[i] + 1), "%lld of %d a step",
               (long long)l.load[i], counts[i]);
    const int64_t full = l.load[E - 1];
    memset(counts, 0, sizeof counts);
    for (int step = 0; step < 44; step++) loads_add(&l, counts);
    EXPECT(l.load[E - 1] > 0.49 * (double)full && l.load[E - 1] < 0.51 * (double)full, "%lld of %lld",
           (long long)l.load[E - 1], (long long)full);
    ExpertLoads copy = loads_copy(&l);
    EXPECT(copy.load != l.load && memcmp(copy.load, l.load, N * sizeof *l.load) == 0, "the copy differs");
    loads_free(&copy);
    loads_free(&l);
}

/* For any loads each layer is a permutation of its own, and no rank has more than in order; groups keep to their nodes.
 */
TEST(loads_place_never_makes_it_worse) {
    for (uint64_t seed = 0; seed < 50; seed++)
        for (int n_nodes = 1; n_nodes <= 2; n_nodes++) {
            ExpertLoads l = loads_make(LAYERS, E);
            int32_t placed[N];
            for (int i = 0; i < N; i++) l.load[i] = (int64_t)(rng_bits(seed, RNG_TEST, 0, (uint64_t)i) % 100);
            loads_place(placed, &l, 4, n_nodes, 4);
            for (int layer = 0; layer < LAYERS; layer++) {
                int seen = 0;
                for (int i = 0; i < E; i++) seen |= 1 << placed[layer * E + i];
                EXPECT_EQ(seen, (1 << E) - 1);
                for (int i = 0; i < E && n_nodes == 2; i += 4) {
                    int groups = 0; /* two, with both of their experts, in the four slots of a node */
                    for (int k = 0; k < 4; k++) groups |= 1 << placed[layer * E + i + k] / 2;
                    EXPECT_EQ(__builtin_popcount((unsigned)groups), 2);
                }
            }
            const RankBalance before = loads_balance(&l, NULL, 4), after = loads_balance(&l, placed, 4);
            EXPECT(after.mean <= before.mean && after.worst <= before.worst && after.mean >= 1, "seed %d: %g, not %g",
                   (int)seed, after.mean, before.mean);
            loads_free(&l);
        }
}

TEST(loads_balance_of_ranks) {
    ExpertLoads l = loads_make(LAYERS, E);
    int32_t placed[N];
    char text[BALANCE_TEXT_LEN];
    static const int64_t load[N] = {4, 4, 0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1};
    memcpy(l.load, load, sizeof load);
    const RankBalance in_order = loads_balance(&l, NULL, 4);
    EXPECT(in_order.worst == 2 && in_order.mean == 1.5, "%g, %g", in_order.worst, in_order.mean);
    loads_place(placed, &l, 1, 1, 4);
    const RankBalance after = loads_balance(&l, placed, 4);
    EXPECT(after.worst == 1 && after.mean == 1, "%g, %g", after.worst, after.mean);
    for (int e = 0; e < E; e++) EXPECT(placed[E + e] == e, "an even layer stays as it is");
    balance_text(text, in_order);
    EXPECT(strcmp(text, "1.500 of the mean, 2.000 in the worst layer") == 0, "%s", text);
    loads_free(&l);
}
