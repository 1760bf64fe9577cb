/* See exchange.h. */
#include "exchange.h"

#include <math.h>

#include "kernels/base/ints.h"

/* Of `parts` equal parts of N experts, how many hold at least one of K that are drawn from the N. */
static double parts_hit(double parts, double N, int K) {
    double missed = 1;
    for (int i = 0; i < K; i++) missed *= fmax(N - N / parts - i, 0) / (N - i);
    return parts * (1 - missed);
}

/* Fills ranks and nodes: of the experts that the chosen groups leave, whose ranks are neighbours. */
static void count_hits(Exchange *x, const ModelShape *s, double n_nodes) {
    const RouterShape *r = &s->router;
    const double share = r->n_group > 1 ? (double)r->topk_group / r->n_group : 1, E = r->n_experts;
    const bool by_node = r->n_group > 1 && r->n_group == (int)n_nodes;
    x->ranks = parts_hit(fmax(share * s->R, 1), share * E, r->n_chosen);
    x->nodes = by_node ? parts_hit(r->topk_group, share * E, r->n_chosen) : parts_hit(n_nodes, E, r->n_chosen);
}

Exchange exchange_of(const ModelShape *s, const GpuRates *r) {
    Exchange x = {0};
    if (s->R == 1 || shape_n_moe(s) == 0) return x;
    const double per_node = fmin(r->gpus_per_node, s->R), n_nodes = ceil(s->R / per_node), T = (double)s->T;
    count_hits(&x, s, n_nodes);
    /* Its own node takes part like any other; of the ranks of a node one has the token already. */
    const double ib_rows = T * x.nodes * (n_nodes - 1) / n_nodes, nvlink_rows = T * x.ranks * (per_node - 1) / per_node;
    const double D = (double)s->D, routing = 8.0 * s->router.n_chosen;
    const double row = s->fp8 ? D + 4 * ceil(D / SCALE_TILE) : D * (double)dtype_size(s->act);
    const double sum = D * (double)dtype_size(s->act);
    x.dispatch = (LinkBytes){nvlink_rows * (row + routing), ib_rows * (row + routing)};
    x.combine = (LinkBytes){nvlink_rows * sum, ib_rows * sum};
    x.dispatch_s = link_seconds(x.dispatch, r);
    x.combine_s = link_seconds(x.combine, r);
    return x;
}

static bool is_dispatch(Phase phase, Pass pass) {
    return (phase == PHASE_DISPATCH) == (pass == PASS_FORWARD);
}

LinkBytes exchange_bytes(const Exchange *x, Phase phase, Pass pass) {
    return is_dispatch(phase, pass) ? x->dispatch : x->combine;
}

double exchange_seconds(const Exchange *x, Phase phase, Pass pass) {
    return is_dispatch(phase, pass) ? x->dispatch_s : x->combine_s;
}

double link_seconds(LinkBytes bytes, const GpuRates *r) {
    const double nvlink = bytes.nvlink > 0 ? bytes.nvlink / (1e9 * r->nvlink) : 0;
    return fmax(nvlink, bytes.ib > 0 ? bytes.ib / (1e9 * r->ib) : 0);
}

LinkBytes link_bytes_of_group(double bytes, int64_t n, int64_t in_node) {
    in_node = min_i64(in_node > 0 ? in_node : 1, n);
    const double nodes = (double)n / (double)in_node, part = bytes / (double)in_node;
    return (LinkBytes){bytes - part, part * (nodes - 1) / nodes};
}
