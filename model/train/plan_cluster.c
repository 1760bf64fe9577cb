/* See plan_cluster.h. */
#include "plan_cluster.h"

#include <math.h>
#include <string.h>

#include "format.h"
#include "kernels/base/check.h"
#include "part.h"

/* Steps that others have published, for the line beside ours: one model, one cluster. */
static const struct {
    int64_t params; /* of the main model */
    int world;
    double tokens, seconds;
    const char *text;
} published[] = {
    {671026404352, 2048, 15360.0 * 4096, 19.926, "DeepSeek's on 2,048 H800 (ISCA 2025)"},
};

void plan_cluster_make(Plan *p, const PipelinePlan *pipeline) {
    ScheduleShape schedule = pipeline->schedule;
    GpuRates rates = p->gpu.rates;
    Device gpu;
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    if (p->world == 1) return;
    const Config *c = &p->run->config;
    if (!p->has_gpu) CHECK(rates_find(&rates, rates_known(0), err, hint) == 0, "%s", err);
    if (p->mesh.n_pp == 1) {
        const int64_t M = p->batch_last / (p->run->model.shape.B * p->ranks);
        const ScheduleKind kind = part_is_pipelined(c, &p->mesh) ? part_schedule(c) : SCHEDULE_1F1B;
        CHECK(schedule_shape(&schedule, kind, 1, M, err, hint) == 0, "%s", err);
    } else if (!pipeline->is_chosen || pipeline->P != p->mesh.n_pp) {
        snprintf(p->cluster_why, ERR_LEN, "%.400s",
                 pipeline->is_chosen ? "--pp is another than parallel.pp" : pipeline->why_not);
        return;
    }
    device_for_plan(&gpu, c, true);
    p->has_cluster = cluster_make(&p->cluster, c, &p->mesh, &schedule, &rates, &gpu, err, hint) == 0;
    if (!p->has_cluster) snprintf(p->cluster_why, ERR_LEN, "%.400s", err);
}

/* ---- lines ------------------------------------------------------------------------------------------------------- */

static void print_memory(const Cluster *c, Logger *l) {
    const RankMemory *m = &c->memory[c->fullest];
    char bytes[32], room[32], least[32];
    int64_t smallest = m->bytes;
    for (int r = 0; r < c->schedule.P; r++) smallest = c->memory[r].bytes < smallest ? c->memory[r].bytes : smallest;
    log_banner(l, "a rank", "%s of %s on pipeline rank %d, the fullest, %s on the emptiest: %s",
               format_bytes(bytes, sizeof bytes, (double)m->bytes),
               format_bytes(room, sizeof room, (double)c->capacity), c->fullest,
               format_bytes(least, sizeof least, (double)smallest), m->bytes <= c->capacity ? "fits" : "does not fit");
    for (int i = 0; i < m->items.n_items; i++)
        log_banner(l, "", "%12s  %s", format_bytes(bytes, sizeof bytes, (double)m->items.items[i].bytes),
                   m->items.items[i].name);
}

static void print_stages(const Cluster *c, Logger *l) {
    log_banner(l, "seconds", "%5s %8s %9s %9s %9s %9s %9s", "stage", "layers", "F", "B", "I", "W", "F&B");
    for (int i = 0; i < c->schedule.n_stages; i++) {
        const StageTimes *t = &c->times[i];
        char pair[16] = "-";
        if (t->pair > 0) snprintf(pair, sizeof pair, "%.4f", t->pair);
        log_banner(l, "", "%5d %8d %9.4f %9.4f %9.4f %9.4f %9s", i, c->stages[i].end - c->stages[i].first, t->forward,
                   t->backward, t->backward_input, t->backward_weight, pair);
    }
}

static void print_links(const Cluster *c, Logger *l) {
    const LinkBytes *const rows[] = {&c->experts, &c->stage_to_stage, &c->optimizer};
    static const char *const names[] = {"experts", "stages", "optimizer"};
    LinkBytes all = {0, 0};
    char nvlink[32], ib[32], others[96] = "";
    for (int i = 0; i < 3; i++) all.nvlink += rows[i]->nvlink, all.ib += rows[i]->ib;
    if (c->n_nodes > 1)
        snprintf(others, sizeof others, " and %s over InfiniBand (%.0f GB/s)", format_bytes(ib, sizeof ib, all.ib),
                 c->rates.ib);
    log_banner(l, "links", "a GPU sends %s over NVLink (%.0f GB/s)%s in a step",
               format_bytes(nvlink, sizeof nvlink, all.nvlink), c->rates.nvlink, others);
    for (int i = 0; i < 3; i++)
        if (rows[i]->nvlink + rows[i]->ib > 0)
            log_banner(l, "", "  %-10s %12s NVLink %12s InfiniBand", names[i],
                       format_bytes(nvlink, sizeof nvlink, rows[i]->nvlink), format_bytes(ib, sizeof ib, rows[i]->ib));
    const Exchange *x = &c->exchange;
    if (x->ranks > 0)
        log_banner(
            l, "", "  a token's experts are on %.2f ranks of %.2f nodes: out in %s, back in %s, gradients in %s and %s",
            x->ranks, x->nodes, format_step_time(1e3 * x->seconds[TOKENS_OUT]).text,
            format_step_time(1e3 * x->seconds[SUMS_BACK]).text, format_step_time(1e3 * x->seconds[GRADIENTS_OUT]).text,
            format_step_time(1e3 * x->seconds[GRADIENTS_BACK]).text);
}

static void print_step(const Plan *p, Logger *l) {
    const Cluster *c = &p->cluster;
    char exchange[96] = "", mfu[48] = "", bubble[48] = "";
    if (c->exchange_s > 0)
        snprintf(exchange, sizeof exchange, "; experts exchange for %.2f s, %.0f %% of it hidden", c->exchange_s,
                 100 * c->hidden);
    if (c->mfu > 0) snprintf(mfu, sizeof mfu, ", %.1f %% of the BF16 peak", 100 * c->mfu);
    if (c->schedule.P > 1)
        snprintf(bubble, sizeof bubble, " (bubble %.2f s, %.1f %%)", c->bubble_s, 100 * c->bubble_s / c->pipeline_s);
    log_banner(l, "step", "%.2f s = %s %.2f s%s + update %.2f s%s", c->step_s,
               c->schedule.P > 1 ? schedule_name(c->schedule.kind) : "micro-batches", c->pipeline_s, bubble,
               c->update_s, exchange);
    for (size_t i = 0; i < sizeof published / sizeof *published; i++)
        if (p->count.main_total.params == published[i].params && p->world == published[i].world &&
            c->tokens == published[i].tokens)
            log_banner(l, "", "published: %.2f s, %s; ours is %.2f of it", published[i].seconds, published[i].text,
                       c->step_s / published[i].seconds);
    log_banner(l, "", "%s tok/s/gpu, %.0f TF a GPU%s", format_rate(c->tokens_per_s).text, c->model_tflops, mfu);
    const double price = p->run->config.run.price_per_gpu_hour;
    char cost[96] = "; what that costs: run.price_per_gpu_hour";
    if (price > 0)
        snprintf(cost, sizeof cost, ", price %s", format_grouped((int64_t)llround(price * c->hours_per_trillion)).text);
    log_banner(l, "", "%s GPU-hours for a trillion tokens, %s%s",
               format_grouped((int64_t)llround(c->hours_per_trillion)).text,
               format_duration(c->hours_per_trillion * 3600 / p->world).text, cost);
}

void plan_cluster_print(const Plan *p, Logger *l) {
    const Cluster *c = &p->cluster;
    if (!p->has_cluster) {
        if (p->cluster_why[0]) log_banner(l, "cluster", "no forecast: %s", p->cluster_why);
        return;
    }
    log_banner(l, "cluster", "%s GPUs on %s node%s: %s", format_grouped(p->world).text, format_grouped(c->n_nodes).text,
               c->n_nodes > 1 ? "s" : "", c->rates.name);
    log_banner(l, "", "rates %s", c->rates.source);
    print_memory(c, l);
    print_stages(c, l);
    print_links(c, l);
    print_step(p, l);
}
