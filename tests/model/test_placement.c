/* Placement of experts by load: the published example, and what has to hold for any loads. */
#include <signal.h>
#include <string.h>

#include "kernels/base/rng.h"
#include "model/placement.h"
#include "tests/test.h"

enum { SLOTS_MAX = 64 };

TEST(placement_published_example) {
    static const struct {
        double load[12];
        int slots[16];
    } layers[] = {
        {{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86}, {5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1}},
        {{20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}, {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}},
    };
    for (int layer = 0; layer < 2; layer++) {
        int32_t expert[16], slot[12], copies[12];
        placement_balance(expert, slot, copies, layers[layer].load, (PlacementShape){12, 16, 4, 2, 8});
        for (int i = 0; i < 16; i++)
            EXPECT(expert[i] == layers[layer].slots[i], "layer %d, slot %d: expert %d, not %d", layer, i, expert[i],
                   layers[layer].slots[i]);
    }
}

/* Every expert is somewhere, copies are counted, a group stays on its node, equal shapes need no replicas. */
static void check_shape(PlacementShape s, uint64_t seed) {
    double load[SLOTS_MAX] = {0};
    int32_t expert[SLOTS_MAX], slot[SLOTS_MAX], copies[SLOTS_MAX];
    int n[SLOTS_MAX] = {0};
    for (int e = 0; e < s.n_experts; e++) load[e] = (double)(rng_bits(seed, RNG_TEST, 0, (uint64_t)e) % 1000);
    placement_balance(expert, slot, copies, load, s);
    for (int i = 0; i < s.n_slots; i++) {
        EXPECT(expert[i] >= 0 && expert[i] < s.n_experts, "slot %d: %d", i, expert[i]);
        n[expert[i]]++;
    }
    for (int e = 0; e < s.n_experts; e++) {
        EXPECT(n[e] >= 1 && n[e] == copies[e] && expert[slot[e]] == e, "expert %d: %d copies, %d", e, n[e], copies[e]);
        for (int other = 0; other < e; other++) EXPECT(slot[other] != slot[e], "experts %d and %d", e, other);
    }
    if (s.n_groups % s.n_nodes) return;
    const int group = s.n_experts / s.n_groups, node = s.n_slots / s.n_nodes;
    int node_of_group[SLOTS_MAX];
    memset(node_of_group, -1, sizeof node_of_group);
    for (int i = 0; i < s.n_slots; i++) {
        int *at = &node_of_group[expert[i] / group];
        EXPECT(*at < 0 || *at == i / node, "group %d on nodes %d and %d", expert[i] / group, *at, i / node);
        *at = i / node;
    }
}

TEST(placement_holds_for_any_loads) {
    static const PlacementShape shapes[] = {{8, 8, 1, 1, 1},   {8, 8, 4, 1, 4},    {16, 16, 4, 2, 4}, {16, 24, 4, 2, 8},
                                            {12, 20, 3, 2, 4}, {32, 64, 8, 4, 16}, {7, 14, 1, 1, 14}, {1, 4, 1, 1, 4}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (uint64_t seed = 0; seed < 20; seed++) check_shape(shapes[i], seed);
}

/* The heaviest rank carries less than with the experts in their order. */
TEST(placement_evens_the_load) {
    enum { E = 16, RANKS = 4 };
    double load[E], worst = 0, worst_in_order = 0;
    int32_t expert[E], slot[E], copies[E];
    for (int e = 0; e < E; e++) load[e] = 1000 / (e + 1);
    placement_balance(expert, slot, copies, load, (PlacementShape){E, E, 1, 1, RANKS});
    for (int r = 0; r < RANKS; r++) {
        double sum = 0, in_order = 0;
        for (int i = r * E / RANKS; i < (r + 1) * E / RANKS; i++) sum += load[expert[i]], in_order += load[i];
        worst = sum > worst ? sum : worst;
        worst_in_order = in_order > worst_in_order ? in_order : worst_in_order;
    }
    EXPECT(worst < 0.6 * worst_in_order, "%g, not below %g", worst, worst_in_order);
}

TEST(placement_peak_of_ranks) {
    static const double load[] = {4, 0, 1, 3}, none[4];
    static const int32_t swapped[] = {0, 2, 1, 3};
    EXPECT(placement_peak(load, NULL, 4, 2) == 1 && placement_peak(load, NULL, 4, 4) == 2);
    EXPECT(placement_peak(load, swapped, 4, 2) == 1.25 && placement_peak(load, swapped, 4, 1) == 1);
    EXPECT(placement_peak(none, NULL, 4, 2) == 1, "nobody got anything");
}

static void balance(void *arg) {
    double load[SLOTS_MAX] = {0};
    int32_t expert[SLOTS_MAX], slot[SLOTS_MAX], copies[SLOTS_MAX];
    placement_balance(expert, slot, copies, load, *(const PlacementShape *)arg);
}

TEST(placement_refuses_what_does_not_divide) {
    PlacementShape shapes[] = {{8, 7, 1, 1, 1}, {8, 8, 3, 1, 1}, {8, 9, 1, 1, 2}, {8, 8, 1, 2, 1}, {0, 8, 1, 1, 1}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        EXPECT(expect_exit(128 + SIGABRT, "experts", balance, &shapes[i]), "shape %zu", i);
}
