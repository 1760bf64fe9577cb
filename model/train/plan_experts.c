/* See plan.h: how the experts of a run that has begun would weigh on their ranks. */
#include <stdlib.h>

#include "kernels/base/check.h"
#include "plan.h"

/* Of consecutive ranks on nodes of the table's GPUs; where routing is not limited by groups they do not count. */
static int n_nodes_of(const Plan *p) {
    const RouterShape *router = &p->run->model.shape.router;
    GpuRates rates = p->gpu.rates;
    char err[ERR_LEN], hint[ERR_LEN];
    if (router->topk_group == router->n_group) return 1;
    if (!p->has_gpu) CHECK(rates_find(&rates, rates_known(0), err, hint) == 0, "%s", err);
    const int per_node = (int)rates.gpus_per_node;
    return per_node > 0 && p->mesh.n_ep % per_node == 0 ? p->mesh.n_ep / per_node : 1;
}

static void weigh(Plan *p, const ExpertLoads *loads) {
    const ModelShape *s = &p->run->model.shape;
    if (!loads_are_known(loads, shape_n_moe(s), s->router.n_experts)) return;
    free(loads_pack(loads, s->router.n_group, n_nodes_of(p), p->mesh.n_ep, &p->consecutive, &p->balanced));
    p->has_experts = true;
}

void plan_make_experts(Plan *p) {
    char err[ERR_LEN], note[ERR_LEN];
    CheckpointInfo info;
    if (p->mesh.n_ep == 1 || checkpoint_find(p->run->config.run.dir, -1, p->experts_of, note, err) != 0 ||
        checkpoint_peek(p->experts_of, &info, err) != 0)
        return;
    weigh(p, &info.loads);
    checkpoint_info_free(&info);
}

void plan_print_experts(const Plan *p, Logger *l) {
    char consecutive[BALANCE_TEXT_LEN], balanced[BALANCE_TEXT_LEN];
    if (!p->has_experts) return;
    balance_text(consecutive, p->consecutive);
    balance_text(balanced, p->balanced);
    log_banner(l, "experts", "by the loads of %s the largest of %d ranks has %s;", p->experts_of, p->mesh.n_ep,
               consecutive);
    log_banner(l, "", "with parallel.placement=balanced %s", balanced);
}
