/* Which rank has which experts, when a run starts: in their order, or packed by the loads that the checkpoint has, so
 * that no rank has much more to do than the others (parallel.placement). See run.h.
 *
 * Checkpoints know experts by their number, so any placement loads any of them. A run keeps what it has begun with:
 * experts that moved would have to take their masters and moments along. */
#include <stdio.h>
#include <stdlib.h>

#include "places.h"
#include "run.h"

/* Nodes that the ranks of an expert group fill; 1 where routing is not limited by groups, which then need not stay
 * together. */
static int n_nodes_of(const Run *r) {
    const RouterShape *router = &r->model.shape.router;
    const Mesh *mesh = &r->comm->mesh;
    if (router->topk_group == router->n_group) return 1;
    RankPlace *places = places_gather("");
    const int n = places_n_nodes(places, mesh->world, mesh->n_ep);
    free(places);
    return n;
}

static void place(Run *r, const int32_t *expert_of_slot) {
    Params *p = &r->model.params;
    params_place(p, expert_of_slot);
    params_write_tables(p, &r->device);
    free(r->tensors); /* names of other experts */
    r->tensors = params_state(p, &r->n_tensors);
    r->moves_experts = true;
}

static void note(Run *r, RankBalance in_order, RankBalance packed, int n_nodes) {
    char before[BALANCE_TEXT_LEN], after[BALANCE_TEXT_LEN], nodes[48] = "";
    balance_text(before, in_order);
    balance_text(after, packed);
    if (n_nodes > 1) snprintf(nodes, sizeof nodes, ", groups to %d nodes", n_nodes);
    if (r->config.parallel.placement == PLACEMENT_BALANCED)
        snprintf(r->experts_note, sizeof r->experts_note,
                 "balanced by load%s: the largest rank's is %s; consecutive: %s", nodes, after, before);
    else
        snprintf(r->experts_note, sizeof r->experts_note,
                 "consecutive: the largest rank's load is %s; with parallel.placement=balanced: %s", before, after);
}

void run_place_experts(Run *r, const ExpertLoads *loads) {
    const ModelShape *s = &r->model.shape;
    const bool is_balanced = r->config.parallel.placement == PLACEMENT_BALANCED;
    const int n_layers = shape_n_moe(s);
    if (s->R == 1 || n_layers == 0) return;
    if (!loads_are_known(loads, n_layers, s->router.n_experts)) {
        if (is_balanced)
            snprintf(r->experts_note, sizeof r->experts_note,
                     "consecutive, as no loads are known yet; balanced when the run is resumed");
        return;
    }
    const int n_nodes = n_nodes_of(r);
    RankBalance in_order, packed;
    int32_t *placed = loads_pack(loads, s->router.n_group, n_nodes, s->R, &in_order, &packed);
    note(r, in_order, packed, n_nodes);
    if (is_balanced) place(r, placed);
    free(placed);
}
