/* See stages.h. Two passes of dynamic programming over (stage, layers placed): the least maximum, then the least sum of
 * squares among the cuts that keep it. */
#include "stages.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"

typedef struct {
    int n_stages, L;
    const double *sum; /* (L + 1) cost of the first layers */
    double last_flops;
    double *best; /* [stage * (L + 1) + end]: of stages 0..stage that hold layers 0..end */
    int *cut;     /* where that stage begins */
} Search;

static double cost_of(const Search *c, int stage, int first, int end) {
    return c->sum[end] - c->sum[first] + (stage == c->n_stages - 1 ? c->last_flops : 0);
}

/* Fills best and cut: the least maximum; or with a cap the least sum of squares of stages that cost no more than it. */
static double search(Search *c, double cap, bool by_squares) {
    const int width = c->L + 1;
    for (int stage = 0; stage < c->n_stages; stage++)
        for (int end = 0; end <= c->L; end++) {
            double *best = &c->best[stage * width + end];
            *best = DBL_MAX;
            /* Ties go to the later cut: fewer layers in later stages, which hold head and MTP. */
            for (int first = end - (stage < c->n_stages - 1); first >= 0; first--) {
                const double before = stage > 0 ? c->best[(stage - 1) * width + first] : (first > 0 ? DBL_MAX : 0);
                const double cost = cost_of(c, stage, first, end);
                if (before == DBL_MAX || cost > cap) continue;
                const double value = by_squares ? before + cost * cost : fmax(before, cost);
                if (value >= *best * (1 - 1e-12)) continue;
                *best = value;
                c->cut[stage * width + end] = first;
            }
        }
    return c->best[(c->n_stages - 1) * width + c->L];
}

int stages_balance(Stage *stages, int n_stages, const double *layer_flops, int L, double last_flops, char *err) {
    if (n_stages < 1 || L < 1 || L < n_stages - 1)
        return err_set(err, "%d layers are too few for %d stages", L, n_stages);
    const size_t cells = (size_t)n_stages * (size_t)(L + 1);
    double *sum = (double *)calloc((size_t)L + 1, sizeof *sum);
    Search c = {
        n_stages, L, sum, last_flops, (double *)calloc(cells, sizeof(double)), (int *)calloc(cells, sizeof(int))};
    CHECK(sum && c.best && c.cut, "no memory for %zu cuts", cells);
    for (int l = 0; l < L; l++) sum[l + 1] = sum[l] + layer_flops[l];
    const double least = search(&c, DBL_MAX, false);
    search(&c, least * (1 + 1e-12), true);
    for (int stage = n_stages - 1, end = L; stage >= 0; stage--) {
        stages[stage].first = c.cut[stage * (L + 1) + end];
        stages[stage].end = end;
        stages[stage].flops = cost_of(&c, stage, stages[stage].first, end);
        end = stages[stage].first;
    }
    free(sum);
    free(c.best);
    free(c.cut);
    return 0;
}

int stages_of_model(Stage *stages, int n_stages, const ModelShape *s, char *err) {
    double *layers = (double *)calloc((size_t)s->L, sizeof *layers), last = shape_flops_per_token(s);
    CHECK(layers, "no memory for %d layers", s->L);
    for (int l = 0; l < s->L; l++) {
        layers[l] = shape_block_flops(s, l);
        last -= layers[l]; /* heads, MTP blocks and projections are left */
    }
    const int result = stages_balance(stages, n_stages, layers, s->L, last, err);
    free(layers);
    return result;
}

double stages_scale(double *scale, const Stage *stages, int n_stages) {
    double total = 0, largest = 0;
    for (int i = 0; i < n_stages; i++) total += stages[i].flops;
    for (int i = 0; i < n_stages; i++) {
        scale[i] = stages[i].flops * n_stages / total;
        largest = fmax(largest, scale[i]);
    }
    return largest;
}

RankTop stages_rank_top(const ScheduleShape *schedule, int rank, int n_mtp) {
    RankTop top = {false, false, false};
    for (int chunk = 0; chunk < schedule->n_chunks; chunk++) {
        const int stage = schedule_stage(schedule, rank, chunk);
        top.embeds |= stage == 0;
        top.has_loss |= stage == schedule->n_stages - 1;
    }
    top.embedding = top.embeds || (top.has_loss && n_mtp > 0);
    return top;
}
