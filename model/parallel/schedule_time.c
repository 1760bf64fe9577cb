/* Time and memory of a schedule: a simulation of its lists, and what a walk over one list counts. See schedule.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/arena.h"
#include "kernels/base/check.h"
#include "schedule.h"

/* ---- simulation -------------------------------------------------------------------------------------------------- */

typedef struct {
    const PipeSchedule *s;
    const StepCosts *costs;
    Timeline *t;
    double *forward_end, *backward_end; /* [micro * n_stages + stage], -1 = not yet */
    int64_t *next;                      /* (P) step of the rank */
    double *now;                        /* (P) when it is free */
} Simulation;

static int64_t event_of(const Simulation *m, int rank, Work w, int *stage) {
    const ScheduleShape *s = &m->s->shape;
    *stage = schedule_stage(s, rank, w.chunk);
    CHECK(*stage >= 0 && w.micro >= 0 && w.micro < s->M, "rank %d: micro-batch %d of chunk %d", rank, w.micro, w.chunk);
    return (int64_t)w.micro * s->n_stages + *stage;
}

/* When what another stage made at `end` is on this rank; -1 = not made yet. */
static double arrives_at(const Simulation *m, int rank, int micro, int from_stage, double end) {
    if (end < 0) return -1;
    return schedule_place(&m->s->shape, micro, from_stage).rank == rank ? end : end + m->costs->transfer;
}

/* When the step's inputs are there; -1 = not yet. Notes where its outputs go. */
static double ready_at(const Simulation *m, int rank, const PipeStep *step, double **forward_to, double **backward_to) {
    const int last = m->s->shape.n_stages - 1;
    double ready = 0;
    int stage;
    *forward_to = *backward_to = NULL;
    if (step_has_forward(step)) {
        const int64_t at = event_of(m, rank, step->forward, &stage);
        *forward_to = &m->forward_end[at];
        if (stage > 0) ready = arrives_at(m, rank, step->forward.micro, stage - 1, m->forward_end[at - 1]);
        if (ready < 0) return -1;
    }
    if (step_has_backward_input(step)) {
        const int64_t at = event_of(m, rank, step->backward, &stage);
        *backward_to = &m->backward_end[at];
        const double gradient =
            stage < last ? arrives_at(m, rank, step->backward.micro, stage + 1, m->backward_end[at + 1]) : 0;
        if (m->forward_end[at] < 0 || gradient < 0) return -1;
        ready = fmax(ready, gradient);
    }
    return ready;
}

static int stage_of(const Simulation *m, int rank, Work w) {
    return w.chunk >= 0 ? schedule_stage(&m->s->shape, rank, w.chunk) : -1;
}

/* Runs the rank's next step if it can. */
static bool advance(Simulation *m, int rank) {
    const int64_t k = m->next[rank];
    if (k == m->s->rank[rank].n) return false;
    const PipeStep *step = &m->s->rank[rank].step[k];
    double *forward_to, *backward_to;
    const double ready = ready_at(m, rank, step, &forward_to, &backward_to);
    if (ready < 0) return false;
    const double start = fmax(ready, m->now[rank]),
                 took = m->costs->took(m->costs->arg, step->kind, stage_of(m, rank, step->forward),
                                       stage_of(m, rank, step->backward)),
                 end = start + took;
    m->t->spans[rank].start[k] = start;
    m->t->spans[rank].end[k] = end;
    m->t->busy[rank] += took;
    if (end > m->t->makespan) m->t->makespan = end;
    if (forward_to) *forward_to = end;
    if (backward_to) *backward_to = end;
    m->now[rank] = end;
    m->next[rank]++;
    return true;
}

static int run_lists(Simulation *m, char *err) {
    const int P = m->s->shape.P;
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < P; r++)
            while (advance(m, r)) moved = true;
    }
    for (int r = 0; r < P; r++) {
        char text[STEP_TEXT_LEN];
        if (m->next[r] < m->s->rank[r].n)
            return err_set(err, "rank %d waits for ever before step %lld (%s)", r, (long long)m->next[r],
                           step_text(text, sizeof text, &m->s->rank[r].step[m->next[r]]));
    }
    return 0;
}

int schedule_simulate_costs(Timeline *t, const PipeSchedule *s, const StepCosts *costs, char *err) {
    const int P = s->shape.P;
    const int64_t events = (int64_t)s->shape.M * s->shape.n_stages;
    memset(t, 0, sizeof *t);
    t->busy = (double *)zeroed(P, sizeof(double));
    t->spans = (StepSpans *)zeroed(P, sizeof(StepSpans));
    for (int r = 0; r < P; r++) {
        t->spans[r].start = (double *)zeroed(s->rank[r].n, sizeof(double));
        t->spans[r].end = (double *)zeroed(s->rank[r].n, sizeof(double));
    }
    Simulation m = {s,
                    costs,
                    t,
                    (double *)zeroed(events, sizeof(double)),
                    (double *)zeroed(events, sizeof(double)),
                    (int64_t *)zeroed(P, sizeof(int64_t)),
                    (double *)zeroed(P, sizeof(double))};
    for (int64_t i = 0; i < events; i++) m.forward_end[i] = m.backward_end[i] = -1;
    const int result = run_lists(&m, err);
    for (int r = 0; r < P; r++) {
        const double idle = t->makespan - t->busy[r];
        t->bubble = fmax(t->bubble, idle);
        t->mean_bubble += idle / P;
    }
    free(m.forward_end);
    free(m.backward_end);
    free(m.next);
    free(m.now);
    if (result != 0) timeline_free(t, P);
    return result;
}

/* Times of an average stage, and how much larger or smaller each stage is. */
typedef struct {
    const StepTimes *times;
    const double *scale;
} ScaledTimes;

static double scaled_time(const void *arg, StepKind kind, int forward_stage, int backward_stage) {
    const ScaledTimes *of = (const ScaledTimes *)arg;
    const StepTimes *t = of->times;
    const double of_kind[STEP_KINDS] = {t->forward, t->backward, t->backward_input, t->backward_weight, t->pair};
    if (!of->scale) return of_kind[kind];
    const double f = forward_stage >= 0 ? of->scale[forward_stage] : 0;
    const double b = backward_stage >= 0 ? of->scale[backward_stage] : 0;
    return of_kind[kind] * (kind == STEP_PAIR ? (f + b) / 2 : f + b);
}

int schedule_simulate(Timeline *t, const PipeSchedule *s, const StepTimes *times, const double *scale, char *err) {
    const ScaledTimes scaled = {times, scale};
    const StepCosts costs = {scaled_time, &scaled, 0};
    return schedule_simulate_costs(t, s, &costs, err);
}

void timeline_free(Timeline *t, int P) {
    for (int r = 0; r < P && t->spans; r++) {
        free(t->spans[r].start);
        free(t->spans[r].end);
    }
    free(t->spans);
    free(t->busy);
    memset(t, 0, sizeof *t);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int all, of[CHUNKS_MAX];
} Held;

static void hold(Held *h, int chunk, int n, int *peak, int *peak_of) {
    h->all += n;
    h->of[chunk] += n;
    if (h->all > *peak) *peak = h->all;
    if (h->of[chunk] > peak_of[chunk]) peak_of[chunk] = h->of[chunk];
}

/* A receive is held from its post to the launch of the step that takes it. */
static int peak_inbox(const TransferList *transfers, int64_t n_steps) {
    int *taken_by = (int *)zeroed(n_steps, sizeof *taken_by), held = 0, peak = 0;
    for (int64_t i = 0; i < transfers->n; i++)
        if (!transfers->transfer[i].is_send) taken_by[transfers->transfer[i].step]++;
    int64_t launched = 0;
    for (int64_t i = 0; i < transfers->n; i++) {
        const Transfer *x = &transfers->transfer[i];
        while (launched < x->post) held -= taken_by[launched++];
        held += !x->is_send;
        if (held > peak) peak = held;
    }
    free(taken_by);
    return peak;
}

SchedulePeak schedule_peak(const PipeSchedule *s, int rank, const TransferList *transfers) {
    SchedulePeak p;
    Held live, pending;
    memset(&p, 0, sizeof p);
    memset(&live, 0, sizeof live);
    memset(&pending, 0, sizeof pending);
    for (int64_t k = 0; k < s->rank[rank].n; k++) {
        const PipeStep *step = &s->rank[rank].step[k];
        if (step_has_forward(step)) hold(&live, step->forward.chunk, 1, &p.live, p.live_of);
        if (step_has_backward_input(step)) hold(&live, step->backward.chunk, -1, &p.live, p.live_of);
        if (step->kind == STEP_BACKWARD_INPUT) hold(&pending, step->backward.chunk, 1, &p.pending, p.pending_of);
        if (step->kind == STEP_BACKWARD_WEIGHT) hold(&pending, step->backward.chunk, -1, &p.pending, p.pending_of);
    }
    if (transfers) p.inbox = peak_inbox(transfers, s->rank[rank].n);
    return p;
}
