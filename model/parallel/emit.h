/* Inside of schedule.c and dualpipe.c: appending to a rank's list. Floor 4. */
#ifndef TRAIN_MOE_EMIT_H
#define TRAIN_MOE_EMIT_H

#include "schedule.h"

typedef struct {
    const ScheduleShape *shape;
    int rank;
    StepList *list;
    int64_t room;
    int n_forward[CHUNKS_MAX], n_backward[CHUNKS_MAX]; /* emitted, a chunk; micro-batches go in order */
    Work *waiting;                                     /* weight-backwards put off: first in, first out */
    int64_t first, last;
} Emitter;

/* The chunk's next micro-batch. split: input-backward only. */
void emit_forward(Emitter *e, int chunk);
void emit_backward(Emitter *e, int chunk, bool split);
void emit_pair(Emitter *e, int forward_chunk, int backward_chunk);
/* The oldest weight-backward that waits. */
void emit_weight(Emitter *e);

void steps_dualpipe(Emitter *e);
void steps_dualpipev(Emitter *e);

#endif
