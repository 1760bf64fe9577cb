/* See placement.h. Items are packed greedily: the heaviest first, each into the lightest bin with room. */
#include "placement.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"

static void *array(int n, size_t width) {
    void *p = calloc((size_t)n + 1, width);
    CHECK(p, "no memory for the placement of %d experts", n);
    return p;
}

/* place[i] = the place of item i, when n items lie in n_bins bins of n / n_bins places each: bin by bin, in the order
 * of packing. */
static void pack(int *place, const double *weight, int n, int n_bins) {
    const int room = n / n_bins;
    double *sum = (double *)array(n_bins, sizeof *sum);
    int *filled = (int *)array(n_bins, sizeof *filled);
    bool *is_packed = (bool *)array(n, sizeof *is_packed);
    for (int k = 0; k < n; k++) {
        int heaviest = -1, lightest = -1;
        for (int i = 0; i < n; i++)
            if (!is_packed[i] && (heaviest < 0 || weight[i] > weight[heaviest])) heaviest = i;
        for (int b = 0; b < n_bins; b++)
            if (filled[b] < room && (lightest < 0 || sum[b] < sum[lightest])) lightest = b;
        is_packed[heaviest] = true;
        place[heaviest] = lightest * room + filled[lightest]++;
        sum[lightest] += weight[heaviest];
    }
    free(sum);
    free(filled);
    free(is_packed);
}

/* item[j] = what copy j of n_all is a copy of: one of each of n items, then again and again the one whose copies carry
 * most. */
static void replicate(int *item, int *n_copies, const double *load, int n, int n_all) {
    for (int i = 0; i < n; i++) {
        item[i] = i;
        n_copies[i] = 1;
    }
    for (int j = n; j < n_all; j++) {
        int most = 0;
        for (int i = 1; i < n; i++)
            if (load[i] / n_copies[i] > load[most] / n_copies[most]) most = i;
        item[j] = most;
        n_copies[most]++;
    }
}

/* order[i] = the expert that is i-th when groups are packed to nodes. */
static void order_by_node(int *order, const double *load, int n_experts, int n_groups, int n_nodes) {
    const int size = n_experts / n_groups;
    double *sum = (double *)array(n_groups, sizeof *sum);
    int *place = (int *)array(n_groups, sizeof *place);
    for (int e = 0; e < n_experts; e++) sum[e / size] += load[e];
    pack(place, sum, n_groups, n_nodes);
    for (int e = 0; e < n_experts; e++) order[place[e / size] * size + e % size] = e;
    free(sum);
    free(place);
}

/* The copies of one node's n experts on its n_slots slots. */
static void place_node(int32_t *expert_of_slot, int32_t *n_copies, const int *expert, const double *load, int n,
                       int n_slots, int n_ranks) {
    double *own = (double *)array(n, sizeof *own), *weight = (double *)array(n_slots, sizeof *weight);
    int *item = (int *)array(n_slots, sizeof *item), *copies = (int *)array(n, sizeof *copies);
    int *place = (int *)array(n_slots, sizeof *place);
    for (int i = 0; i < n; i++) own[i] = load[expert[i]];
    replicate(item, copies, own, n, n_slots);
    for (int j = 0; j < n_slots; j++) weight[j] = own[item[j]] / copies[item[j]];
    pack(place, weight, n_slots, n_ranks);
    for (int j = 0; j < n_slots; j++) expert_of_slot[place[j]] = expert[item[j]];
    for (int i = 0; i < n; i++) n_copies[expert[i]] = copies[i];
    free(own);
    free(weight);
    free(item);
    free(copies);
    free(place);
}

void placement_balance(int32_t *expert_of_slot, int32_t *slot_of_expert, int32_t *n_copies, const double *load,
                       PlacementShape s) {
    CHECK(s.n_experts > 0 && s.n_slots >= s.n_experts && s.n_groups > 0 && s.n_nodes > 0 && s.n_ranks > 0,
          "%d experts on %d slots", s.n_experts, s.n_slots);
    CHECK(s.n_experts % s.n_groups == 0 && s.n_slots % s.n_ranks == 0 && s.n_ranks % s.n_nodes == 0,
          "%d experts, %d groups; %d slots, %d ranks, %d nodes", s.n_experts, s.n_groups, s.n_slots, s.n_ranks,
          s.n_nodes);
    const bool by_node = s.n_groups % s.n_nodes == 0;
    const int n_groups = by_node ? s.n_groups : 1, n_nodes = by_node ? s.n_nodes : 1;
    const int experts = s.n_experts / n_nodes, slots = s.n_slots / n_nodes;
    int *order = (int *)array(s.n_experts, sizeof *order);
    order_by_node(order, load, s.n_experts, n_groups, n_nodes);
    for (int node = 0; node < n_nodes; node++)
        place_node(expert_of_slot + node * slots, n_copies, order + node * experts, load, experts, slots,
                   s.n_ranks / n_nodes);
    for (int slot = s.n_slots - 1; slot >= 0; slot--) slot_of_expert[expert_of_slot[slot]] = slot;
    free(order);
}

double placement_peak(const double *load, const int32_t *expert_of_slot, int n_experts, int n_ranks) {
    const int n_local = n_experts / n_ranks;
    double sum = 0, largest = 0;
    for (int r = 0; r < n_ranks; r++) {
        double own = 0;
        for (int slot = r * n_local; slot < (r + 1) * n_local; slot++)
            own += load[expert_of_slot ? expert_of_slot[slot] : slot];
        if (own > largest) largest = own;
        sum += own;
    }
    return sum > 0 ? largest * n_ranks / sum : 1;
}
