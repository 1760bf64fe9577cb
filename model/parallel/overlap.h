/* The phases of a forward beside the phases of a backward: the table behind a PAIR step. Pure. Floor 4.
 *
 * V3 figure 4: while one micro-batch exchanges tokens with its experts, the other computes. One MoE layer of each,
 * launched from top to bottom, each column a stream:
 *
 *     STREAM_COMPUTE             STREAM_COMM
 *                                combine   backward     gradients to the experts: the bytes of a dispatch
 *     attn      forward
 *                                dispatch  forward
 *     experts   backward input
 *                                dispatch  backward     gradients back to the tokens: the bytes of a combine
 *     experts   backward weight
 *     experts   forward
 *                                combine   forward
 *     attn      backward input
 *     attn      backward weight
 *
 * A launch waits for what its own micro-batch did before it (`after`), and for its stream. So combine backward runs
 * under attn forward, dispatch forward under experts backward input, dispatch backward under experts backward weight
 * and experts forward, combine forward under attn backward. A layer without experts has empty dispatch and combine. */
#ifndef TRAIN_MOE_OVERLAP_H
#define TRAIN_MOE_OVERLAP_H

#include "kernels/ops.h"
#include "model/layer.h"
#include "schedule.h"

typedef struct {
    Phase phase;
    Pass pass;
    Stream stream;
} OverlapRow;

/* The table above; *n rows. */
const OverlapRow *overlap_table(int *n);

/* "experts backward weight" */
const char *phase_name(Phase phase);
const char *pass_name(Pass pass);

/* One phase of one layer, for one of the two micro-batches. */
typedef struct {
    OverlapRow row;
    int layer; /* of the chunk that runs forward, or of the one that runs backward, from 0 at its input */
    int after; /* launch of the same step that has to end first, on whatever stream; -1 = none */
} PhaseLaunch;

/* The launches of a step over chunks of n_forward and n_backward layers, in order; the number that does not apply is 0.
 * Forward layer i goes beside backward layer n_backward-1-i; what is left of the longer chunk follows by itself.
 * `launches` has room for OVERLAP_ROWS * max(n_forward, n_backward). Returns how many. */
enum { OVERLAP_ROWS = 10 };
int overlap_launches(PhaseLaunch *launches, StepKind kind, int n_forward, int n_backward);

/* When the last of the launches ends, each stream running its own in order; took[phase][pass] are durations. */
double overlap_simulate(const PhaseLaunch *launches, int n, double took[4][3]);
/* The same with what each launch takes by itself; busy (STREAM_COUNT): what each stream has to do. */
double overlap_simulate_launches(const PhaseLaunch *launches, int n, const double *took, double *busy);

/* Times of the steps of a stage of n_layers, by running their launches: the compute of a forward, of an input-backward
 * and of a weight-backward is 1 each, half of it attn, half experts; dispatch and combine together take `comm` in a
 * forward and as long in an input-backward (V3: about 1). Exchange is hidden under what may run beside it: most of it
 * inside a pair, in a full backward as much as weight-backward covers, none else. */
StepTimes overlap_step_times(double comm, int n_layers);

#endif
