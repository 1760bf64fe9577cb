/* Is a schedule complete, causal and free of deadlock? See schedule.h. Three passes: over the steps, over the
 * transfers, and a run of all ranks in which every send waits for its receive; once with the transfers one at a time,
 * once with those of equal post as one group. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "schedule.h"

enum { FORWARD_DONE = 1, INPUT_DONE = 2, WEIGHT_DONE = 4, ALL_DONE = 7 };
/* One bit for each end of the two messages that cross from a stage to the next; shifted by TransferKind. */
enum { SENT = 1, RECEIVED = 4, ALL_PASSED = 15 };

typedef struct {
    const PipeSchedule *s;
    const TransferList *transfers;
    unsigned char *done, *passed; /* [micro * n_stages + stage] */
    char *err;
} Checker;

static int refuse(const Checker *c, int rank, int64_t k, const char *what) {
    char text[STEP_TEXT_LEN];
    return err_set(c->err, "rank %d, step %lld (%s): %s", rank, (long long)k,
                   step_text(text, sizeof text, &c->s->rank[rank].step[k]), what);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

/* Is it a micro-batch that passes this chunk of the rank? */
static bool belongs(const ScheduleShape *s, int rank, Work w) {
    const int stage = schedule_stage(s, rank, w.chunk);
    if (stage < 0 || w.micro < 0 || w.micro >= s->M) return false;
    const Place p = schedule_place(s, w.micro, stage);
    return p.rank == rank && p.chunk == w.chunk;
}

static int64_t event_of(const ScheduleShape *s, int rank, Work w) {
    return (int64_t)w.micro * s->n_stages + schedule_stage(s, rank, w.chunk);
}

static int check_backward(Checker *c, int rank, int64_t k) {
    const PipeStep *step = &c->s->rank[rank].step[k];
    if (!belongs(&c->s->shape, rank, step->backward)) return refuse(c, rank, k, "not a backward of this rank");
    unsigned char *done = &c->done[event_of(&c->s->shape, rank, step->backward)];
    if (!(*done & FORWARD_DONE)) return refuse(c, rank, k, "backward before forward");
    if (step->kind == STEP_BACKWARD_WEIGHT) {
        if (!(*done & INPUT_DONE)) return refuse(c, rank, k, "weight-backward before input-backward");
        if (*done & WEIGHT_DONE) return refuse(c, rank, k, "weight-backward twice");
        *done |= WEIGHT_DONE;
        return 0;
    }
    if (*done & INPUT_DONE) return refuse(c, rank, k, "backward twice");
    *done |= step->kind == STEP_BACKWARD_INPUT ? INPUT_DONE : INPUT_DONE | WEIGHT_DONE;
    return 0;
}

static int check_step(Checker *c, int rank, int64_t k) {
    const PipeStep *step = &c->s->rank[rank].step[k];
    if ((int)step->kind < 0 || step->kind >= STEP_KINDS)
        return err_set(c->err, "rank %d, step %lld: no such kind", rank, (long long)k);
    /* Backward first: a pair's backward may not need its own forward. */
    if (step->kind != STEP_FORWARD && check_backward(c, rank, k) != 0) return -1;
    if (!step_has_forward(step)) return 0;
    if (!belongs(&c->s->shape, rank, step->forward)) return refuse(c, rank, k, "not a forward of this rank");
    unsigned char *done = &c->done[event_of(&c->s->shape, rank, step->forward)];
    if (*done & FORWARD_DONE) return refuse(c, rank, k, "forward twice");
    *done |= FORWARD_DONE;
    return 0;
}

static int check_steps(Checker *c) {
    const ScheduleShape *s = &c->s->shape;
    for (int r = 0; r < s->P; r++)
        for (int64_t k = 0; k < c->s->rank[r].n; k++)
            if (check_step(c, r, k) != 0) return -1;
    for (int micro = 0; micro < s->M; micro++)
        for (int stage = 0; stage < s->n_stages; stage++) {
            const unsigned char done = c->done[(int64_t)micro * s->n_stages + stage];
            if (done != ALL_DONE)
                return err_set(c->err, "micro-batch %d on stage %d: no %s", micro, stage,
                               !(done & FORWARD_DONE) ? "forward"
                               : !(done & INPUT_DONE) ? "backward"
                                                      : "weight-backward");
        }
    return 0;
}

/* ---- transfers --------------------------------------------------------------------------------------------------- */

/* The work of the step that makes or takes it; NULL if the step has none of that kind. */
static const Work *work_of(const PipeStep *step, TransferKind kind) {
    if (kind == TRANSFER_ACTIVATION) return step_has_forward(step) ? &step->forward : NULL;
    return step_has_backward_input(step) ? &step->backward : NULL;
}

static int check_transfer(Checker *c, int rank, const Transfer *x) {
    const StepList *list = &c->s->rank[rank];
    const ScheduleShape *s = &c->s->shape;
    if (x->step < 0 || x->step >= list->n || x->post < 0 || x->post > list->n || (unsigned)x->kind > TRANSFER_GRADIENT)
        return err_set(c->err, "rank %d: a transfer of step %lld, posted at %lld", rank, (long long)x->step,
                       (long long)x->post);
    const Work *work = work_of(&list->step[x->step], x->kind);
    if (!work || work->chunk != x->chunk || work->micro != x->micro)
        return refuse(c, rank, x->step, "a transfer that is not of this step");
    if (x->is_send ? x->post <= x->step : x->post > x->step)
        return refuse(c, rank, x->step, x->is_send ? "sent before it is made" : "received after it is taken");
    const int stage = schedule_stage(s, rank, x->chunk);
    const int other = x->is_send == (x->kind == TRANSFER_ACTIVATION) ? stage + 1 : stage - 1;
    if (other < 0 || other >= s->n_stages || schedule_place(s, x->micro, other).rank != x->peer || x->peer == rank)
        return refuse(c, rank, x->step, "a transfer with the wrong rank");
    unsigned char *passed = &c->passed[(int64_t)x->micro * s->n_stages + (stage < other ? stage : other)];
    const unsigned char bit = (unsigned char)((x->is_send ? SENT : RECEIVED) << x->kind);
    if (*passed & bit) return refuse(c, rank, x->step, x->is_send ? "sent twice" : "received twice");
    *passed |= bit;
    return 0;
}

static int check_transfers(Checker *c) {
    const ScheduleShape *s = &c->s->shape;
    for (int r = 0; r < s->P; r++)
        for (int64_t i = 0; i < c->transfers[r].n; i++) {
            const Transfer *x = &c->transfers[r].transfer[i];
            if (check_transfer(c, r, x) != 0) return -1;
            if (i > 0 && x->post < x[-1].post) return refuse(c, r, x->step, "posted out of order");
        }
    for (int micro = 0; micro < s->M; micro++)
        for (int stage = 0; stage + 1 < s->n_stages; stage++) {
            const bool is_local = schedule_place(s, micro, stage).rank == schedule_place(s, micro, stage + 1).rank;
            const unsigned char passed = c->passed[(int64_t)micro * s->n_stages + stage];
            if (passed != (is_local ? 0 : ALL_PASSED))
                return err_set(c->err, "micro-batch %d from stage %d to %d: a send or receive is missing", micro, stage,
                               stage + 1);
        }
    return 0;
}

/* ---- run --------------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t step;     /* next */
    int64_t transfer; /* first that has not passed */
    bool *is_passed;  /* of the rank's transfers */
} RankState;

typedef struct {
    Checker *c;
    RankState *rank;
    bool grouped;
} Rehearsal;

/* Transfers [state->transfer, end) are posted and wait. */
static int64_t posted_end(const Rehearsal *h, int r) {
    const TransferList *list = &h->c->transfers[r];
    const RankState *state = &h->rank[r];
    int64_t end = state->transfer;
    if (end == list->n || list->transfer[end].post > state->step) return end;
    const int64_t post = list->transfer[end].post;
    for (end++; h->grouped && end < list->n && list->transfer[end].post == post;) end++;
    return end;
}

static bool is_counterpart(const Transfer *a, int rank_a, const Transfer *b, int rank_b) {
    return a->is_send != b->is_send && a->kind == b->kind && a->micro == b->micro && a->peer == rank_b &&
           b->peer == rank_a;
}

static void mark_passed(Rehearsal *h, int r, int64_t i) {
    RankState *state = &h->rank[r];
    state->is_passed[i] = true;
    while (state->transfer < h->c->transfers[r].n && state->is_passed[state->transfer]) state->transfer++;
}

/* Lets one posted transfer of the rank pass whose other end is posted as well. */
static bool pass_one(Rehearsal *h, int r) {
    const int64_t end = posted_end(h, r);
    for (int64_t i = h->rank[r].transfer; i < end; i++) {
        const Transfer *x = &h->c->transfers[r].transfer[i];
        const int64_t peer_end = posted_end(h, x->peer);
        for (int64_t j = h->rank[x->peer].transfer; j < peer_end && !h->rank[r].is_passed[i]; j++) {
            const Transfer *y = &h->c->transfers[x->peer].transfer[j];
            if (h->rank[x->peer].is_passed[j] || !is_counterpart(x, r, y, x->peer)) continue;
            mark_passed(h, r, i);
            mark_passed(h, x->peer, j);
            return true;
        }
    }
    return false;
}

/* Nothing is waited for, and a chunk of the same rank that hands over has run before. */
static bool may_step(const Rehearsal *h, int r) {
    const ScheduleShape *s = &h->c->s->shape;
    const StepList *list = &h->c->s->rank[r];
    if (h->rank[r].step == list->n || posted_end(h, r) > h->rank[r].transfer) return false;
    const PipeStep *step = &list->step[h->rank[r].step];
    if (step_has_forward(step)) {
        const int64_t at = event_of(s, r, step->forward);
        const int stage = (int)(at % s->n_stages);
        if (stage > 0 && !(h->c->done[at - 1] & FORWARD_DONE)) return false;
    }
    if (step_has_backward_input(step)) {
        const int64_t at = event_of(s, r, step->backward);
        const int stage = (int)(at % s->n_stages);
        if (stage + 1 < s->n_stages && !(h->c->done[at + 1] & INPUT_DONE)) return false;
    }
    return true;
}

static void take_step(Rehearsal *h, int r) {
    const ScheduleShape *s = &h->c->s->shape;
    const PipeStep *step = &h->c->s->rank[r].step[h->rank[r].step++];
    if (step_has_forward(step)) h->c->done[event_of(s, r, step->forward)] |= FORWARD_DONE;
    if (step_has_backward_input(step)) h->c->done[event_of(s, r, step->backward)] |= INPUT_DONE;
}

static int stuck(const Rehearsal *h) {
    for (int r = 0; r < h->c->s->shape.P; r++) {
        const RankState *state = &h->rank[r];
        const char *how = h->grouped ? "in groups" : "one at a time";
        char what[96];
        if (posted_end(h, r) > state->transfer) {
            const Transfer *x = &h->c->transfers[r].transfer[state->transfer];
            snprintf(what, sizeof what, "deadlock: its %s with rank %d never passes (%s)",
                     x->is_send ? "send" : "receive", x->peer, how);
            return refuse(h->c, r, x->step, what);
        }
        if (state->step < h->c->s->rank[r].n) {
            snprintf(what, sizeof what, "deadlock: what it needs is never made (%s)", how);
            return refuse(h->c, r, state->step, what);
        }
    }
    return 0;
}

static int rehearse(Checker *c, bool grouped) {
    const int P = c->s->shape.P;
    Rehearsal h = {c, (RankState *)calloc((size_t)P, sizeof(RankState)), grouped};
    CHECK(h.rank, "no memory for %d ranks", P);
    for (int r = 0; r < P; r++) {
        h.rank[r].is_passed = (bool *)calloc((size_t)c->transfers[r].n + 1, sizeof(bool));
        CHECK(h.rank[r].is_passed, "no memory for %lld transfers", (long long)c->transfers[r].n);
    }
    memset(c->done, 0, (size_t)c->s->shape.M * (size_t)c->s->shape.n_stages);
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < P; r++) {
            while (pass_one(&h, r)) moved = true;
            for (; may_step(&h, r); moved = true) take_step(&h, r);
        }
    }
    const int result = stuck(&h);
    for (int r = 0; r < P; r++) free(h.rank[r].is_passed);
    free(h.rank);
    return result;
}

int schedule_check(const PipeSchedule *s, const TransferList *transfers, char *err) {
    const size_t events = (size_t)s->shape.M * (size_t)s->shape.n_stages;
    Checker c = {s, transfers, (unsigned char *)calloc(events, 1), (unsigned char *)calloc(events, 1), err};
    CHECK(c.done && c.passed, "no memory for %zu events", events);
    int result = check_steps(&c);
    if (result == 0) result = check_transfers(&c);
    if (result == 0) result = rehearse(&c, false);
    if (result == 0) result = rehearse(&c, true);
    free(c.done);
    free(c.passed);
    return result;
}
