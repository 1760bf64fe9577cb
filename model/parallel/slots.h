/* What lies where while a rank's list of steps runs: slots of activations, tensors between stages. Pure. Floor 4.
 *
 * A micro-batch on a chunk takes one slot of each kind (shape.h): with its forward one of the rows that input-backward
 * and one of those that weight-backward reads last, with its backward one of the gradients; each goes back when it was
 * read for the last time. A tensor between stages is taken by the step that writes it or by the receive that fills it,
 * and goes back with its send or with the step that reads it; the turn of dualpipev just hands it over.
 *
 * The lowest free one is taken, so what a list needs at most is found by running it once without computing. */
#ifndef TRAIN_MOE_SLOTS_H
#define TRAIN_MOE_SLOTS_H

#include "schedule.h"

typedef struct {
    bool is_used, is_leaving; /* leaving: made here, to be sent */
    TransferKind kind;
    int chunk, micro;
} Boundary;

typedef struct {
    ScheduleShape shape;
    int rank;
    bool splits;                                       /* some weight-backwards wait */
    int *slot[CHUNKS_MAX];                             /* [micro * SLOT_KINDS + kind], -1 = none */
    unsigned char *used[CHUNKS_MAX][SLOT_KINDS];       /* [slot] */
    int n_slots[CHUNKS_MAX][SLOT_KINDS], n_boundaries; /* most that were used */
    Boundary *boundary;                                /* room for `room` */
    int room;
} Slots;

/* For the list of a rank. slots_free releases. */
Slots slots_make(const PipeSchedule *s, int rank);
void slots_free(Slots *s);

/* Where the work of a step finds its rows, and the tensors that enter and leave its chunk; -1 = none. */
typedef struct {
    const int *slot; /* SLOT_KINDS */
    int in, out;
} WorkSlots;

/* Before and behind a forward, and a backward of the kind; the same work and the same slots. */
WorkSlots slots_begin_forward(Slots *s, Work w);
void slots_end_forward(Slots *s, Work w, WorkSlots at);
WorkSlots slots_begin_backward(Slots *s, StepKind kind, Work w);
void slots_end_backward(Slots *s, StepKind kind, Work w, WorkSlots at);

/* The tensor of a transfer: a new one that is received, or the one that is sent, which is free again behind it. */
int slots_transfer(Slots *s, const Transfer *x);

#endif
