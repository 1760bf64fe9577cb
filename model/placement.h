/* Where experts go when their loads differ: replicas and balanced packing, after DeepSeek's EPLB. Floor 3. */
#ifndef TRAIN_MOE_PLACEMENT_H
#define TRAIN_MOE_PLACEMENT_H

#include <stdint.h>

/* n_experts divide into n_groups of consecutive ones; n_slots >= n_experts places divide over n_ranks, and ranks over
 * n_nodes. With n_slots = n_experts there are no replicas, and slot_of_expert is a table for the model. */
typedef struct {
    int n_experts, n_slots, n_groups, n_nodes, n_ranks;
} PlacementShape;

/* From the load of each expert (n_experts, not negative):
 *   expert_of_slot (n_slots)    rank r holds slots [r, r + 1) * n_slots / n_ranks
 *   slot_of_expert (n_experts)  the slot of its first copy
 *   n_copies       (n_experts)
 * Where nodes divide the groups, groups are packed to nodes first, so that group-limited routing stays inside a node;
 * then each node copies its experts of the largest load a copy, and packs the copies to its ranks. Pure: ties go to the
 * first. Sizes that do not divide are our bug (CHECK). */
void placement_balance(int32_t *expert_of_slot, int32_t *slot_of_expert, int32_t *n_copies, const double *load,
                       PlacementShape shape);

/* The largest of the ranks' loads over their mean, where n_ranks share n_experts slots evenly and expert_of_slot says
 * who lies there (NULL: slot = expert); 1 where nobody got anything. */
double placement_peak(const double *load, const int32_t *expert_of_slot, int n_experts, int n_ranks);

#endif
