/* See cluster.h. */
#include "cluster.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/arena.h"
#include "kernels/base/check.h"
#include "model/memory.h"
#include "step_time.h"

/* ---- a step of a stage ------------------------------------------------------------------------------------------- */

enum { PHASES = 4, PASSES = 3 };

typedef struct {
    const Cluster *c;
    const ClusterShape *shape;
    double phase_s[2][PHASES][PASSES]; /* of a dense block, of an MoE block */
    double head_s;                     /* what the last stage has beside blocks, in its forward */
    double *took;                      /* [kind][forward stage + 1][backward stage + 1]; negative = not known yet */
    double exchange, exposed;          /* seconds, summed over all steps of all ranks */
    LinkBytes experts;                 /* likewise */
} StepModel;

/* Products beside an exchange have the multiprocessors that it leaves. */
static GpuRates beside_exchange(const GpuRates *rates, bool exchanges) {
    GpuRates r = *rates;
    const double left = exchanges ? 1 - rates->exchange_share : 1;
    double *const products[] = {&r.gemm_bf16,         &r.gemm_fp8,           &r.grouped_bf16, &r.grouped_fp8,
                                &r.attention_forward, &r.attention_backward, &r.gradient_fp8};
    for (size_t i = 0; i < sizeof products / sizeof *products; i++) *products[i] *= left;
    return r;
}

static void time_phases(StepModel *m) {
    const ModelShape *s = &m->c->shape;
    const Exchange *x = &m->c->exchange;
    const GpuRates r = beside_exchange(&m->c->rates, s->R > 1);
    const bool fp8 = s->fp8 && r.peak_fp8 > 0;
    for (int is_moe = 0; is_moe < 2; is_moe++)
        for (int phase = 0; phase < PHASES; phase++)
            for (int pass = 0; pass < PASSES; pass++) {
                double *took = &m->phase_s[is_moe][phase][pass];
                const int block = is_moe ? s->n_blocks - 1 : 0;
                if (shape_block_is_moe(s, block) != is_moe) continue; /* the model has no such block */
                const OpWork w = op_work_of_phase(s, block, (Phase)phase, (Pass)pass);
                *took = op_time(&w, &r, fp8).sum;
                if (is_moe && (phase == PHASE_DISPATCH || phase == PHASE_COMBINE) && s->R > 1)
                    *took = x->seconds[exchange_travel((Phase)phase, (Pass)pass)];
            }
    const OpWork head = op_work_of_head(s);
    m->head_s = op_time(&head, &r, fp8).sum;
}

/* Of which kind of block is the launch? */
static bool launch_is_moe(const StepModel *m, const PhaseLaunch *l, int forward_stage, int backward_stage) {
    const int stage = l->row.pass == PASS_FORWARD ? forward_stage : backward_stage;
    return shape_block_is_moe(&m->c->shape, stage_block(m->shape, stage, l->layer));
}

static void count_exchange(StepModel *m, const PhaseLaunch *l) {
    const LinkBytes bytes = m->c->exchange.bytes[exchange_travel(l->row.phase, l->row.pass)];
    m->experts.nvlink += bytes.nvlink;
    m->experts.ib += bytes.ib;
}

/* Seconds of a step; with `count`, its exchange and what of it is exposed are added up. */
static double time_step(StepModel *m, StepKind kind, int forward_stage, int backward_stage, bool count) {
    const int n_forward = forward_stage >= 0 ? stage_n_blocks(m->shape, forward_stage) : 0;
    const int n_backward = backward_stage >= 0 ? stage_n_blocks(m->shape, backward_stage) : 0;
    const int room = OVERLAP_ROWS * (n_forward > n_backward ? n_forward : n_backward);
    PhaseLaunch *launches = (PhaseLaunch *)zeroed(room, sizeof *launches);
    double *took = (double *)zeroed(room, sizeof *took), busy[STREAM_COUNT];
    const int n = overlap_launches(launches, kind, n_forward, n_backward);
    for (int i = 0; i < n; i++) {
        const PhaseLaunch *l = &launches[i];
        const bool is_moe = launch_is_moe(m, l, forward_stage, backward_stage);
        took[i] = m->phase_s[is_moe][l->row.phase][l->row.pass];
        if (count && is_moe && l->row.stream == STREAM_COMM) count_exchange(m, l);
    }
    const double blocks = overlap_simulate_launches(launches, n, took, busy);
    if (count) {
        m->exchange += busy[STREAM_COMM];
        m->exposed += blocks - busy[STREAM_COMPUTE];
    }
    free(launches);
    free(took);
    return blocks + (forward_stage == m->shape->schedule->shape.n_stages - 1 ? m->head_s : 0);
}

static double *known(const StepModel *m, StepKind kind, int forward_stage, int backward_stage) {
    const int n = m->shape->schedule->shape.n_stages + 1;
    return &m->took[(kind * n + forward_stage + 1) * n + backward_stage + 1];
}

static double known_time(const void *arg, StepKind kind, int forward_stage, int backward_stage) {
    return *known((const StepModel *)arg, kind, forward_stage, backward_stage);
}

/* Times of all steps that the lists have, and the sums over them. */
static void time_steps(StepModel *m) {
    const PipeSchedule *s = m->shape->schedule;
    const int n = s->shape.n_stages + 1;
    m->took = (double *)zeroed((int64_t)STEP_KINDS * n * n, sizeof *m->took);
    for (int r = 0; r < s->shape.P; r++)
        for (int64_t k = 0; k < s->rank[r].n; k++) {
            const PipeStep *step = &s->rank[r].step[k];
            const int f = schedule_stage(&s->shape, r, step->forward.chunk),
                      b = schedule_stage(&s->shape, r, step->backward.chunk);
            *known(m, step->kind, f, b) = time_step(m, step->kind, f, b, true);
        }
}

/* ---- between stages ---------------------------------------------------------------------------------------------- */

static double boundary_bytes(const ModelShape *s) {
    return (double)(s->T * s->D) * (double)dtype_size(s->act);
}

/* Neighbouring stages are n_dp * n_ep ranks apart. */
static bool crosses_nodes(const Cluster *c) {
    return c->mesh.n_dp * c->mesh.n_ep >= c->rates.gpus_per_node;
}

/* Micro-batch by micro-batch, from each stage to the next and back. */
static void count_transfers(Cluster *c) {
    const ScheduleShape *s = &c->schedule;
    double sends = 0;
    for (int micro = 0; micro < s->M; micro++)
        for (int stage = 0; stage + 1 < s->n_stages; stage++)
            sends += 2 * (schedule_place(s, micro, stage).rank != schedule_place(s, micro, stage + 1).rank);
    const double bytes = sends * boundary_bytes(&c->shape) / s->P;
    c->stage_to_stage = crosses_nodes(c) ? (LinkBytes){0, bytes} : (LinkBytes){bytes, 0};
}

static void simulate(Cluster *c, StepModel *m) {
    char err[ERR_LEN];
    Timeline t;
    const double rate = 1e9 * (crosses_nodes(c) ? c->rates.ib : c->rates.nvlink);
    const StepCosts costs = {known_time, m, c->schedule.P > 1 ? boundary_bytes(&c->shape) / rate : 0};
    CHECK(schedule_simulate_costs(&t, m->shape->schedule, &costs, err) == 0, "%s", err);
    c->pipeline_s = t.makespan;
    c->bubble_s = t.mean_bubble;
    timeline_free(&t, c->schedule.P);
}

/* ---- update ------------------------------------------------------------------------------------------------------ */

static LinkBytes sum_of(LinkBytes a, LinkBytes b) {
    return (LinkBytes){a.nvlink + b.nvlink, a.ib + b.ib};
}

/* Ranks of a group that share a node, when they are `stride` ranks apart. Copies of a stage are on other nodes. */
static int64_t ranks_in_node(const Cluster *c, int64_t n, int64_t stride) {
    const int64_t in_node = (int64_t)c->rates.gpus_per_node / stride;
    return in_node < 1 ? 1 : in_node < n ? in_node : n;
}

/* Summed and scattered over their holders, or gathered from them. */
static LinkBytes shard_bytes(const Cluster *c, const RankParams *p, double of_others, double of_experts) {
    const int copies = schedule_copies(c->schedule.kind);
    const int64_t others = ranks_in_node(c, p->n_others / copies, 1),
                  experts = ranks_in_node(c, p->n_experts / copies, c->mesh.n_ep);
    return sum_of(link_bytes_of_group(of_others, p->n_others, others),
                  link_bytes_of_group(of_experts, p->n_experts, experts));
}

/* The slowest rank's seconds; the bytes are the ranks' mean. */
static void time_update(Cluster *c, const ClusterShape *shape) {
    const double copy = 1e9 * c->rates.hbm;
    for (int rank = 0; rank < c->schedule.P; rank++) {
        const RankParams p = rank_params(shape, rank);
        const double all = p.others + p.experts;
        const double shard = p.others / (double)p.n_others + p.experts / (double)p.n_experts;
        const LinkBytes out = shard_bytes(c, &p, 4 * p.others, 4 * p.experts),
                        back = shard_bytes(c, &p, p.others_bytes, p.experts_bytes);
        const double local = (4 + (c->shape.fp8 ? 2 : 0)) * all; /* gradients to zero, weights transposed */
        const double seconds = link_seconds(out, &c->rates) + link_seconds(back, &c->rates) +
                               (shard * update_bytes(&c->shape) + local) / copy;
        c->update_s = fmax(c->update_s, seconds);
        c->optimizer.nvlink += (out.nvlink + back.nvlink) / c->schedule.P;
        c->optimizer.ib += (out.ib + back.ib) / c->schedule.P;
    }
}

/* ---- all --------------------------------------------------------------------------------------------------------- */

static void make_stage_times(Cluster *c, StepModel *m) {
    const ScheduleShape *s = &c->schedule;
    for (int stage = 0; stage < s->n_stages; stage++) {
        StageTimes *t = &c->times[stage];
        t->forward = time_step(m, STEP_FORWARD, stage, -1, false);
        t->backward = time_step(m, STEP_BACKWARD, -1, stage, false);
        t->backward_input = time_step(m, STEP_BACKWARD_INPUT, -1, stage, false);
        t->backward_weight = time_step(m, STEP_BACKWARD_WEIGHT, -1, stage, false);
    }
    for (int r = 0; r < s->P; r++)
        for (int chunk = 0; chunk < s->n_chunks; chunk++) {
            const int stage = schedule_stage(s, r, chunk), other = schedule_stage(s, r, s->n_chunks - 1 - chunk);
            c->times[stage].pair = *known(m, STEP_PAIR, stage, other);
        }
}

static void make_time(Cluster *c, const ClusterShape *shape) {
    StepModel m = {.c = c, .shape = shape};
    const int P = c->schedule.P;
    time_phases(&m);
    time_steps(&m);
    simulate(c, &m);
    make_stage_times(c, &m);
    count_transfers(c);
    time_update(c, shape);
    c->experts = (LinkBytes){m.experts.nvlink / P, m.experts.ib / P};
    c->exchange_s = m.exchange / P;
    c->hidden = m.exchange > 0 ? 1 - m.exposed / m.exchange : 0;
    free(m.took);
    c->step_s = c->pipeline_s + c->update_s;
    c->tokens = (double)c->schedule.M * (double)c->shape.T * c->mesh.n_dp * c->mesh.n_ep;
    c->tokens_per_s = c->tokens / c->step_s / c->mesh.world;
    c->model_tflops = 1e-12 * shape_flops_per_token(&c->shape) * c->tokens_per_s;
    c->mfu = c->model_tflops < c->rates.peak_bf16 ? c->model_tflops / c->rates.peak_bf16 : 0;
    c->hours_per_trillion = 1e12 / c->tokens_per_s / 3600;
}

static void make_memory(Cluster *c, const ClusterShape *shape, const Config *config, const Device *device) {
    c->fullest = 0;
    for (int r = 0; r < c->schedule.P; r++) {
        c->memory[r] = rank_memory(shape, r, config, device);
        if (c->memory[r].bytes > c->memory[c->fullest].bytes) c->fullest = r;
    }
}

/* memory.recompute "auto" becomes the first of its choices, added up, with which the fullest rank fits. */
static void fit_memory(Cluster *c, const ClusterShape *shape, const Config *config, const Device *device) {
    make_memory(c, shape, config, device);
    for (int i = 0; i < RECOMPUTE_CHOICES && config->memory.recompute == RECOMPUTE_AUTO &&
                    c->memory[c->fullest].bytes > c->capacity;
         i++) {
        c->shape.recompute |= recompute_choices[i].bit;
        make_memory(c, shape, config, device);
    }
}

static int check_rates(const Cluster *c, char *err, char *hint) {
    const GpuRates *r = &c->rates;
    const char *missing = r->gpus_per_node < 1                                  ? "gpus_per_node"
                          : r->nvlink == 0 && r->gpus_per_node > 1              ? "nvlink"
                          : r->ib == 0 && c->mesh.world > (int)r->gpus_per_node ? "ib"
                                                                                : NULL;
    err_set(hint, "train_moe help gpu shows a file of rates");
    return missing ? err_set(err, "the rates of %s do not say %s, which %d GPUs need", r->name, missing, c->mesh.world)
                   : 0;
}

int cluster_make(Cluster *c, const Config *config, const Mesh *mesh, const ScheduleShape *schedule,
                 const GpuRates *rates, const Device *device, char *err, char *hint) {
    memset(c, 0, sizeof *c);
    c->rates = *rates;
    c->mesh = *mesh;
    c->schedule = *schedule;
    if (check_rates(c, err, hint) != 0) return -1;
    if (config->precision.compute == COMPUTE_FP32)
        return err_set(err, "there are no rates for precision.compute fp32 on a GPU");
    c->n_nodes = (int)ceil(mesh->world / rates->gpus_per_node);
    c->shape = shape_make(config, mesh, device->logits_bytes);
    c->capacity = (int64_t)(rates->memory_gib * (double)(1 << 30));
    c->exchange = exchange_of(&c->shape, rates);
    c->stages = (Stage *)zeroed(schedule->n_stages, sizeof *c->stages);
    c->times = (StageTimes *)zeroed(schedule->n_stages, sizeof *c->times);
    c->memory = (RankMemory *)zeroed(schedule->P, sizeof *c->memory);
    hint[0] = 0;
    if (stages_of_model(c->stages, schedule->n_stages, &c->shape, err) != 0) {
        cluster_free(c);
        return -1;
    }
    Params params;
    PipeSchedule lists = schedule_make(*schedule);
    params_make(&params, &c->shape);
    const ClusterShape shape = {&c->shape, &params, &lists, c->stages, &c->mesh};
    fit_memory(c, &shape, config, device);
    make_time(c, &shape);
    schedule_free(&lists);
    params_free(&params);
    return 0;
}

void cluster_free(Cluster *c) {
    free(c->stages);
    free(c->times);
    free(c->memory);
    memset(c, 0, sizeof *c);
}
