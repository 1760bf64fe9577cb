/* How many tokens each expert of each MoE layer got of late, and which ranks that makes busy. Floor 5.
 *
 *     load = load - floor(load / LOADS_STEPS) + tokens of the step
 *
 * a sum over about the last LOADS_STEPS steps. In integers: every layout and every machine has the same. A checkpoint
 * holds it, so that whoever goes on with it can place the experts (EPLB; V3 3.4.1). */
#ifndef TRAIN_MOE_LOADS_H
#define TRAIN_MOE_LOADS_H

#include <stdbool.h>
#include <stdint.h>

enum { LOADS_STEPS = 64 };
#define LOADS_MAX ((int64_t)1 << 53) /* more is no count */

typedef struct {
    int n_layers, n_experts; /* MoE layers, MTP's included, in ascending order; 0 = nothing is known */
    int64_t *load;           /* (n_layers, n_experts) malloc'd */
} ExpertLoads;

/* All zero; loads_free releases it. */
ExpertLoads loads_make(int n_layers, int n_experts);
ExpertLoads loads_copy(const ExpertLoads *l);
void loads_free(ExpertLoads *l);

/* counts (n_layers, n_experts): tokens of a step. */
void loads_add(ExpertLoads *l, const int32_t *counts);
/* Of this model, and did anybody get a token? */
bool loads_are_known(const ExpertLoads *l, int n_layers, int n_experts);

/* expert_of_slot (n_layers, n_experts): each layer's experts packed by load (placement.h), without replicas; where that
 * makes the largest rank's load no smaller, in their order. */
void loads_place(int32_t *expert_of_slot, const ExpertLoads *l, int n_groups, int n_nodes, int n_ranks);

/* The largest rank's load over the mean of the ranks: mean over the layers, and the worst layer's. */
typedef struct {
    double mean, worst;
} RankBalance;
/* expert_of_slot NULL: in their order. */
RankBalance loads_balance(const ExpertLoads *l, const int32_t *expert_of_slot, int n_ranks);
/* A table as loads_place makes it, malloc'd; groups stay together if the ranks fill several nodes. And what the
 * experts' order and the table make of the loads. */
int32_t *loads_pack(const ExpertLoads *l, int n_groups, int n_nodes, int n_ranks, RankBalance *in_order,
                    RankBalance *packed);
/* "1.045 of the mean, 1.102 in the worst layer" */
enum { BALANCE_TEXT_LEN = 64 };
void balance_text(char text[BALANCE_TEXT_LEN], RankBalance b);

#endif
