/* Steps that are replayed on a CPU, under the rules of a CUDA capture.
 *
 * Between the begin and the end of a graph ops and transfers run as ever, and have to keep to this:
 *  - they are on the captured stream, or on one that has waited for an event of this capture;
 *  - a wait is for an event that was recorded in this capture (elsewhere: in none), and the host waits for nothing;
 *  - at the end, the captured stream has seen all that the others were given.
 * So the first launch of a graph has nothing left to do. Each later one does its part of the step again, from what is
 * on the device, and has to make the same calls on the same tensors: a graph could make no others. */
#ifndef TRAIN_MOE_TESTS_REPLAY_H
#define TRAIN_MOE_TESTS_REPLAY_H

#include "model/train/step.h"

enum { REPLAY_GRAPHS_MAX = 8 };

typedef struct {
    int n_captured, n_launched, n_freed;
} ReplayCount;

/* From now on the steps of `t` are captured and replayed; d is its device, `order` the parts in the order in which they
 * will be captured (borrowed, up to REPLAY_GRAPHS_MAX). One run at a time; to be closed before the run is. */
void replay_open(Trainer *t, Device *d, const StepPart *order);
ReplayCount replay_count(void);
/* Device and Comm are as they were. */
void replay_close(void);

#endif
