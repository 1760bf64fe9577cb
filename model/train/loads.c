/* See loads.h. */
#include "loads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "model/placement.h"

static void *array(int64_t n, size_t width) {
    void *p = calloc((size_t)n + 1, width);
    CHECK(p, "no memory for the loads of %lld experts", (long long)n);
    return p;
}

static int64_t n_loads(const ExpertLoads *l) {
    return (int64_t)l->n_layers * l->n_experts;
}

ExpertLoads loads_make(int n_layers, int n_experts) {
    ExpertLoads l = {n_layers, n_experts, NULL};
    l.load = (int64_t *)array(n_loads(&l), sizeof *l.load);
    return l;
}

ExpertLoads loads_copy(const ExpertLoads *from) {
    ExpertLoads l = loads_make(from->n_layers, from->n_experts);
    memcpy(l.load, from->load, (size_t)n_loads(from) * sizeof *l.load);
    return l;
}

void loads_free(ExpertLoads *l) {
    free(l->load);
    memset(l, 0, sizeof *l);
}

void loads_add(ExpertLoads *l, const int32_t *counts) {
    for (int64_t i = 0; i < n_loads(l); i++) l->load[i] += counts[i] - l->load[i] / LOADS_STEPS;
}

bool loads_are_known(const ExpertLoads *l, int n_layers, int n_experts) {
    if (l->n_layers != n_layers || l->n_experts != n_experts) return false;
    for (int64_t i = 0; i < n_loads(l); i++)
        if (l->load[i] > 0) return true;
    return false;
}

/* A layer's, as placement.h takes them. */
static void layer_loads(double *load, const ExpertLoads *l, int layer) {
    for (int e = 0; e < l->n_experts; e++) load[e] = (double)l->load[(int64_t)layer * l->n_experts + e];
}

void loads_place(int32_t *expert_of_slot, const ExpertLoads *l, int n_groups, int n_nodes, int n_ranks) {
    const int E = l->n_experts;
    const PlacementShape shape = {E, E, n_groups, n_nodes, n_ranks};
    double *load = (double *)array(E, sizeof *load);
    int32_t *slot = (int32_t *)array(E, sizeof *slot), *copies = (int32_t *)array(E, sizeof *copies);
    for (int i = 0; i < l->n_layers; i++) {
        int32_t *placed = expert_of_slot + (int64_t)i * E;
        layer_loads(load, l, i);
        placement_balance(placed, slot, copies, load, shape);
        if (placement_peak(load, placed, E, n_ranks) < placement_peak(load, NULL, E, n_ranks)) continue;
        for (int e = 0; e < E; e++) placed[e] = e;
    }
    free(load);
    free(slot);
    free(copies);
}

RankBalance loads_balance(const ExpertLoads *l, const int32_t *expert_of_slot, int n_ranks) {
    RankBalance b = {0, 0};
    double *load = (double *)array(l->n_experts, sizeof *load);
    for (int i = 0; i < l->n_layers; i++) {
        layer_loads(load, l, i);
        const int32_t *placed = expert_of_slot ? expert_of_slot + (int64_t)i * l->n_experts : NULL;
        const double peak = placement_peak(load, placed, l->n_experts, n_ranks);
        b.mean += peak / l->n_layers;
        if (peak > b.worst) b.worst = peak;
    }
    free(load);
    return b;
}

int32_t *loads_pack(const ExpertLoads *l, int n_groups, int n_nodes, int n_ranks, RankBalance *in_order,
                    RankBalance *packed) {
    int32_t *placed = (int32_t *)array(n_loads(l), sizeof *placed);
    loads_place(placed, l, n_nodes > 1 ? n_groups : 1, n_nodes, n_ranks);
    *in_order = loads_balance(l, NULL, n_ranks);
    *packed = loads_balance(l, placed, n_ranks);
    return placed;
}

void balance_text(char text[BALANCE_TEXT_LEN], RankBalance b) {
    snprintf(text, BALANCE_TEXT_LEN, "%.3f of the mean, %.3f in the worst layer", b.mean, b.worst);
}
