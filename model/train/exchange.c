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

static double row_bytes(const ModelShape *s, bool as_tiles) {
    const double D = (double)s->D;
    return as_tiles ? D + 4 * ceil(D / SCALE_TILE) : D * (double)dtype_size(s->act);
}

Exchange exchange_of(const ModelShape *s, const GpuRates *r) {
    Exchange x = {0};
    if (s->R == 1 || shape_n_moe(s) == 0) return x;
    const double per_node = fmin(r->gpus_per_node, s->R), n_nodes = ceil(s->R / per_node), T = (double)s->T;
    count_hits(&x, s, n_nodes);
    /* Its own node takes part like any other; of the ranks of a node one has the token already. */
    const double ib_rows = T * x.nodes * (n_nodes - 1) / n_nodes, nvlink_rows = T * x.ranks * (per_node - 1) / per_node;
    const double wide = row_bytes(s, false), number = 4 * s->router.n_chosen;
    const double of_token[TRAVELS] = {[TOKENS_OUT] = row_bytes(s, s->fp8_parts.inputs) + 2 * number,
                                      [SUMS_BACK] = wide,
                                      [GRADIENTS_OUT] = row_bytes(s, s->fp8_parts.gradients),
                                      [GRADIENTS_BACK] = wide + number};
    for (int i = 0; i < TRAVELS; i++) {
        x.bytes[i] = (LinkBytes){nvlink_rows * of_token[i], ib_rows * of_token[i]};
        x.seconds[i] = link_seconds(x.bytes[i], r);
    }
    return x;
}

Travel exchange_travel(Phase phase, Pass pass) {
    if (pass == PASS_FORWARD) return phase == PHASE_DISPATCH ? TOKENS_OUT : SUMS_BACK;
    return phase == PHASE_DISPATCH ? GRADIENTS_BACK : GRADIENTS_OUT;
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
