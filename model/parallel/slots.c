/* See slots.h. */
#include "slots.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/arena.h"
#include "kernels/base/check.h"

Slots slots_make(const PipeSchedule *schedule, int rank) {
    const int64_t M = schedule->shape.M;
    Slots s;
    memset(&s, 0, sizeof s);
    s.shape = schedule->shape;
    s.rank = rank;
    for (int64_t k = 0; k < schedule->rank[rank].n; k++)
        s.splits |= schedule->rank[rank].step[k].kind == STEP_BACKWARD_INPUT;
    for (int c = 0; c < s.shape.n_chunks; c++) {
        s.slot[c] = (int *)zeroed(M * SLOT_KINDS, sizeof(int));
        for (int64_t i = 0; i < M * SLOT_KINDS; i++) s.slot[c][i] = -1;
        for (int kind = 0; kind < SLOT_KINDS; kind++)
            s.used[c][kind] = (unsigned char *)zeroed(M + 1, 1); /* the last is never used */
    }
    s.room = 4 * s.shape.M * s.shape.n_chunks; /* a micro-batch has two that come and two that leave */
    s.boundary = (Boundary *)zeroed(s.room, sizeof *s.boundary);
    return s;
}

void slots_free(Slots *s) {
    for (int c = 0; c < CHUNKS_MAX; c++) {
        free(s->slot[c]);
        for (int kind = 0; kind < SLOT_KINDS; kind++) free(s->used[c][kind]);
    }
    free(s->boundary);
    memset(s, 0, sizeof *s);
}

/* ---- slots ------------------------------------------------------------------------------------------------------- */

static int *slot_of(Slots *s, Work w, SlotKind kind) {
    return &s->slot[w.chunk][w.micro * SLOT_KINDS + kind];
}

static void take(Slots *s, Work w, SlotKind kind) {
    unsigned char *used = s->used[w.chunk][kind];
    int free_one = 0;
    while (used[free_one]) free_one++;
    used[free_one] = 1;
    *slot_of(s, w, kind) = free_one;
    if (free_one >= s->n_slots[w.chunk][kind]) s->n_slots[w.chunk][kind] = free_one + 1;
}

static void give_back(Slots *s, Work w, SlotKind kind) {
    int *slot = slot_of(s, w, kind);
    CHECK(*slot >= 0, "micro-batch %d, chunk %d has no slot of kind %d", w.micro, w.chunk, kind);
    s->used[w.chunk][kind][*slot] = 0;
    *slot = -1;
}

/* ---- tensors between stages -------------------------------------------------------------------------------------- */

static int boundary_new(Slots *s, TransferKind kind, Work w, bool is_leaving) {
    int i = 0;
    while (i < s->room && s->boundary[i].is_used) i++;
    CHECK(i < s->room, "more than %d tensors between stages", s->room);
    s->boundary[i] = (Boundary){true, is_leaving, kind, w.chunk, w.micro};
    if (i >= s->n_boundaries) s->n_boundaries = i + 1;
    return i;
}

static int boundary_find(const Slots *s, TransferKind kind, Work w, bool is_leaving) {
    for (int i = 0; i < s->n_boundaries; i++) {
        const Boundary *b = &s->boundary[i];
        if (b->is_used && b->is_leaving == is_leaving && b->kind == kind && b->chunk == w.chunk && b->micro == w.micro)
            return i;
    }
    CHECK(false, "rank %d: nothing has come for micro-batch %d, chunk %d", s->rank, w.micro, w.chunk);
    return -1;
}

/* The stage behind (by 1) or before (by -1) a chunk; -1: there is none. */
static int neighbour(const Slots *s, int chunk, int by) {
    const int stage = schedule_stage(&s->shape, s->rank, chunk) + by;
    return stage < s->shape.n_stages ? stage : -1;
}

/* What a step takes in, and where it leaves what it makes. */
static void open_boundaries(Slots *s, WorkSlots *at, TransferKind kind, Work w) {
    const int ahead = kind == TRANSFER_ACTIVATION ? 1 : -1;
    at->in = neighbour(s, w.chunk, -ahead) < 0 ? -1 : boundary_find(s, kind, w, false);
    at->out = neighbour(s, w.chunk, ahead) < 0 ? -1 : boundary_new(s, kind, w, true);
}

/* Behind the step: where the next stage is this rank's too, what was made has arrived. */
static void close_boundaries(Slots *s, WorkSlots at, TransferKind kind, Work w) {
    if (at.in >= 0) s->boundary[at.in].is_used = false;
    if (at.out < 0) return;
    const Place next = schedule_place(&s->shape, w.micro, neighbour(s, w.chunk, kind == TRANSFER_ACTIVATION ? 1 : -1));
    if (next.rank != s->rank) return;
    s->boundary[at.out].chunk = next.chunk;
    s->boundary[at.out].is_leaving = false;
}

int slots_transfer(Slots *s, const Transfer *x) {
    const Work w = {x->chunk, x->micro};
    if (!x->is_send) return boundary_new(s, x->kind, w, false);
    const int i = boundary_find(s, x->kind, w, true);
    s->boundary[i].is_used = false;
    return i;
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static WorkSlots found(Slots *s, Work w) {
    return (WorkSlots){slot_of(s, w, (SlotKind)0), -1, -1};
}

WorkSlots slots_begin_forward(Slots *s, Work w) {
    WorkSlots at = found(s, w);
    take(s, w, SLOT_INPUT);
    take(s, w, SLOT_WEIGHT);
    open_boundaries(s, &at, TRANSFER_ACTIVATION, w);
    return at;
}

void slots_end_forward(Slots *s, Work w, WorkSlots at) {
    close_boundaries(s, at, TRANSFER_ACTIVATION, w);
}

WorkSlots slots_begin_backward(Slots *s, StepKind kind, Work w) {
    WorkSlots at = found(s, w);
    if (kind == STEP_BACKWARD_WEIGHT) return at;
    if (s->splits) take(s, w, SLOT_GRADIENT);
    open_boundaries(s, &at, TRANSFER_GRADIENT, w);
    return at;
}

void slots_end_backward(Slots *s, StepKind kind, Work w, WorkSlots at) {
    if (kind != STEP_BACKWARD_WEIGHT) {
        close_boundaries(s, at, TRANSFER_GRADIENT, w);
        give_back(s, w, SLOT_INPUT);
    }
    if (kind == STEP_BACKWARD_INPUT) return;
    give_back(s, w, SLOT_WEIGHT);
    if (s->splits) give_back(s, w, SLOT_GRADIENT);
}
