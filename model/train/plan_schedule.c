/* See plan_schedule.h. Times are in units of the compute of one forward through 1/P of the layers; the exchange between
 * expert-parallel ranks takes as long as that compute, as V3 reports (overlap_step_times). */
#include "plan_schedule.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/file.h"
#include "lr.h"
#include "model/parallel/draw.h"
#include "model/parallel/overlap.h"
#include "model/parallel/stages.h"

enum { STEPS_DRAWN_MAX = 200000 };

/* Of 1/P of the layers. */
static StepTimes stage_times(const PipelinePlan *p) {
    const int n_layers = (p->model->L + p->P / 2) / p->P;
    return overlap_step_times(p->comm, n_layers > 0 ? n_layers : 1);
}

/* Times of one of the schedule's chunks. */
static StepTimes chunk_times(const PipelinePlan *p, const ScheduleShape *shape) {
    const double part = (double)p->P / shape->n_stages;
    StepTimes t = stage_times(p);
    t.forward *= part, t.backward *= part, t.backward_input *= part, t.backward_weight *= part, t.pair *= part;
    return t;
}

static SchedulePeak fullest_rank(const PipeSchedule *s) {
    SchedulePeak most = schedule_peak(s, 0, NULL);
    for (int r = 1; r < s->shape.P; r++) {
        const SchedulePeak peak = schedule_peak(s, r, NULL);
        if (peak.live > most.live) most.live = peak.live;
        if (peak.pending > most.pending) most.pending = peak.pending;
    }
    return most;
}

/* ---- stages ------------------------------------------------------------------------------------------------------ */

/* "embedding, layers 0-2 (3 dense)"; "layers 57-60, head, 1 MTP" */
static void stage_text(const PipelinePlan *p, const Stage *stage, bool is_first, bool is_last, char *buf,
                       size_t buf_len) {
    const ModelShape *m = p->model;
    const int n_dense = (m->n_dense < stage->end ? m->n_dense : stage->end) - stage->first;
    char layers[48] = "no layer", dense[32] = "", mtp[32] = "";
    if (stage->end > stage->first + 1)
        snprintf(layers, sizeof layers, "layers %d-%d", stage->first, stage->end - 1);
    else if (stage->end > stage->first)
        snprintf(layers, sizeof layers, "layer %d", stage->first);
    if (n_dense > 0 && shape_n_moe(m) > 0) snprintf(dense, sizeof dense, " (%d dense)", n_dense);
    if (is_last && m->n_mtp) snprintf(mtp, sizeof mtp, ", %d MTP", m->n_mtp);
    snprintf(buf, buf_len, "%s%s%s%s%s", is_first ? "embedding, " : "", layers, dense, is_last ? ", head" : "", mtp);
}

/* The ranks that hold a stage: "rank 3", "ranks 0 and 15". */
static void holders_text(const ScheduleShape *shape, int stage, char *buf, size_t buf_len) {
    const int last = shape->M - 1, a = schedule_place(shape, 0, stage).rank,
              b = schedule_place(shape, last, stage).rank;
    if (a == b)
        snprintf(buf, buf_len, "rank %d", a);
    else
        snprintf(buf, buf_len, "ranks %d and %d", a < b ? a : b, a < b ? b : a);
}

static void print_embedding(const PipelinePlan *p, Logger *l) {
    char ranks[256] = "";
    int n = 0;
    for (int r = 0; r < p->P; r++) {
        if (!stages_rank_top(&p->schedule, r, p->model->n_mtp).embedding) continue;
        const size_t length = strlen(ranks);
        snprintf(ranks + length, sizeof ranks - length, "%s%d", n++ ? " and " : "", r);
    }
    log_banner(l, "", "embedding%s on rank%s %s%s", p->model->n_mtp ? " (MTP shares it)" : "", n > 1 ? "s" : "", ranks,
               n > 1 ? ": gradients are summed over them" : "");
}

static void print_stages(const PipelinePlan *p, Logger *l) {
    const ScheduleShape *shape = &p->schedule;
    const int n = shape->n_stages;
    Stage *stages = (Stage *)calloc((size_t)n, sizeof *stages);
    double *scale = (double *)calloc((size_t)n, sizeof *scale);
    char err[ERR_LEN];
    CHECK(stages && scale, "no memory for %d stages", n);
    if (stages_of_model(stages, n, p->model, err) != 0) {
        log_banner(l, "stages", "%s", err);
    } else {
        log_banner(l, "stages", "of %s by FLOPs, in units of their mean; largest %.3f", schedule_name(shape->kind),
                   stages_scale(scale, stages, n));
        for (int i = 0; i < n; i++) {
            char text[128], ranks[48];
            stage_text(p, &stages[i], i == 0, i == n - 1, text, sizeof text);
            holders_text(shape, i, ranks, sizeof ranks);
            log_banner(l, "", "  %3d  %5.3f  %s: %s", i, scale[i], ranks, text);
        }
        print_embedding(p, l);
    }
    free(stages);
    free(scale);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

/* Length of a step with the stages that the model can be cut into; 0 = it cannot. */
static double step_as_cut(const PipelinePlan *p, const PipeSchedule *s, const StepTimes *times) {
    const int n = s->shape.n_stages;
    Stage *stages = (Stage *)calloc((size_t)n, sizeof *stages);
    double *scale = (double *)calloc((size_t)n, sizeof *scale), step = 0;
    char err[ERR_LEN];
    Timeline t;
    CHECK(stages && scale, "no memory for %d stages", n);
    if (stages_of_model(stages, n, p->model, err) == 0) {
        stages_scale(scale, stages, n);
        CHECK(schedule_simulate(&t, s, times, scale, err) == 0, "%s", err);
        step = t.makespan;
        timeline_free(&t, s->shape.P);
    }
    free(stages);
    free(scale);
    return step;
}

static void print_row(const PipelinePlan *p, ScheduleKind kind, Logger *l) {
    ScheduleShape shape;
    char err[ERR_LEN], hint[ERR_LEN], cut[16] = "-";
    if (schedule_shape(&shape, kind, p->P, p->M, err, hint) != 0) {
        log_banner(l, "", "  %s", err);
        return;
    }
    PipeSchedule s = schedule_make(shape);
    const StepTimes times = chunk_times(p, &shape);
    Timeline t;
    CHECK(schedule_simulate(&t, &s, &times, NULL, err) == 0, "%s", err);
    const double as_cut = step_as_cut(p, &s, &times), part = (double)p->P / shape.n_stages;
    const SchedulePeak peak = fullest_rank(&s);
    if (as_cut > 0) snprintf(cut, sizeof cut, "%.6g", as_cut);
    log_banner(l, "", "%s %-12s %-20s %8.6g %9.6g %8.6g %6.1f %% %8s %11g %9g %6d",
               p->is_chosen && kind == p->schedule.kind ? "*" : " ", schedule_name(kind), schedule_bubble_text(kind),
               schedule_bubble(&shape, &times), t.bubble, t.makespan, 100 * t.mean_bubble / t.makespan, cut,
               peak.live * part, peak.pending * part, schedule_copies(kind));
    timeline_free(&t, shape.P);
    schedule_free(&s);
}

static void print_table(const PipelinePlan *p, Logger *l) {
    const StepTimes t = stage_times(p);
    log_banner(l, "pipeline", "pp %d, %lld micro-batch%s; F %g, I %g, W %g, B %g, F&B %g%s", p->P, (long long)p->M,
               p->M > 1 ? "es" : "", t.forward, t.backward_input, t.backward_weight, t.backward, t.pair,
               p->comm > 0 ? "; F and I wait for the experts' exchange" : "");
    log_banner(l, "", "  %-12s %-20s %8s %9s %8s %8s %8s %11s %9s %6s", "schedule", "bubble of a rank", "formula",
               "simulated", "step", "idle", "as cut", "activations", "W waiting", "copies");
    for (int kind = 0; kind < SCHEDULE_COUNT; kind++)
        if (p->P > 1 ? kind != SCHEDULE_PAIRED : kind == SCHEDULE_PAIRED || kind == SCHEDULE_1F1B)
            print_row(p, (ScheduleKind)kind, l);
    log_banner(l, "", "  unit: compute of a forward of 1/P of the layers; F, B, W of a formula are of one stage");
    log_banner(l, "", "  where B = I+W and I = F, zb1p's is the published (P-1)(F+B-2W), dualpipe's (P/2-1)(F&B+B-3W)");
    log_banner(l, "", "  step, idle: equal stages; as cut: the step with stages of whole layers");
    log_banner(l, "", "  activations, W waiting: micro-batches of 1/P of the layers, on the fullest rank");
}

/* ---- drawing ----------------------------------------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end) {
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

static void draw(PipelinePlan *p, const char *path) {
    const ScheduleShape *shape = &p->schedule;
    char err[ERR_LEN], *text = NULL;
    size_t size = 0;
    Timeline t;
    if (!ends_with(path, ".svg") && !ends_with(path, ".txt"))
        DIE("for example --draw schedule.svg", "--draw %s: a drawing is a .svg or a .txt", path);
    PipeSchedule s = schedule_make(*shape);
    int64_t n_steps = 0;
    for (int r = 0; r < shape->P; r++) n_steps += s.rank[r].n;
    if (n_steps > STEPS_DRAWN_MAX)
        DIE("fewer look the same: --micro-batches N", "--draw: %lld steps are too many for a drawing",
            (long long)n_steps);
    const StepTimes times = chunk_times(p, shape);
    CHECK(schedule_simulate(&t, &s, &times, NULL, err) == 0, "%s", err);
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "no memory for a drawing");
    snprintf(p->title, sizeof p->title, "%s: pp %d, %d micro-batches; bubble %s = %g, step %g",
             schedule_name(shape->kind), shape->P, shape->M, schedule_bubble_text(shape->kind), t.bubble, t.makespan);
    if (ends_with(path, ".svg"))
        draw_svg(out, &s, &t, p->title);
    else
        draw_text(out, &s, &t);
    fclose(out);
    if (file_write_durable(path, text, size, err) != 0) DIE(NULL, "%s", err);
    p->drawing = path;
    free(text);
    timeline_free(&t, shape->P);
    schedule_free(&s);
}

/* ---- all --------------------------------------------------------------------------------------------------------- */

/* Of one pipeline, at the end of the run. */
static int64_t micro_batches(const Config *c, const ModelShape *s, int64_t ranks) {
    return batch_at(c, run_length(c, ranks).tokens_at_last, ranks) / (s->B * ranks);
}

PipelinePlan plan_schedule_make(const Config *c, const ModelShape *s, const Args *args, int64_t ranks) {
    PipelinePlan p;
    memset(&p, 0, sizeof p);
    p.model = s;
    p.P = (int)(args->pp > 0 ? args->pp : c->parallel.pp);
    p.is_asked = p.P > 1 || args->draw || args->schedule || args->pp > 0 || args->micro_batches > 0;
    if (!p.is_asked) return p;
    const char *name = args->schedule ? args->schedule : c->parallel.schedule;
    const int kind = schedule_find(name);
    if (kind < 0)
        DIE("paired, gpipe, 1f1b, interleaved, zb1p, dualpipe, dualpipev", "--schedule %s: there is no such schedule",
            name);
    p.M = args->micro_batches > 0 ? args->micro_batches : micro_batches(c, s, ranks);
    p.comm = c->parallel.ep > 1 && shape_n_moe(s) > 0 ? 1 : 0;
    p.is_chosen = schedule_shape(&p.schedule, (ScheduleKind)kind, p.P, p.M, p.why_not, p.hint) == 0;
    if (!p.is_chosen && (args->schedule || args->draw)) DIE(p.hint[0] ? p.hint : NULL, "%s", p.why_not);
    if (args->draw) draw(&p, args->draw);
    return p;
}

void plan_schedule_print(const PipelinePlan *p, Logger *l) {
    if (!p->is_asked) return;
    print_table(p, l);
    if (p->is_chosen)
        print_stages(p, l);
    else
        log_banner(l, "", "  %s%s%s", p->why_not, p->hint[0] ? "; " : "", p->hint);
    if (p->drawing) log_banner(l, "drawing", "%s: %s", p->drawing, p->title);
}
