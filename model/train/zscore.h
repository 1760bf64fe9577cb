/* Running z-score: how far a value lies from the last ones, in standard deviations. Floor 5.
 *
 * The window (ZWindow, model/state.h) is part of the run's state: after a resume it holds the same values in the same
 * places, and sums run in the order of places, so scores and thresholds are the same bits. Order in a step: the
 * threshold before it, the score of its value, then the push.
 *
 * Below, mean and deviation (population, divided by n) are those of the values held. While fewer than 16 are held (or
 * fewer than the window takes, if that is less), or all are equal, there is no scale to measure by. */
#ifndef TRAIN_MOE_ZSCORE_H
#define TRAIN_MOE_ZSCORE_H

#include "model/state.h"

/* An empty window of the last `size` values, 1 <= size <= Z_WINDOW_MAX. */
void zscore_init(ZWindow *w, int size);

/* Takes a value in; the oldest leaves a full window. NaN and infinities are passed over. */
void zscore_push(ZWindow *w, double x);

/* (x - mean) / deviation; 0 without a scale or for an x that is not finite. */
double zscore_of(const ZWindow *w, double x);

/* mean + z * deviation, above which train.skip_if_z = z skips an update; INFINITY without a scale or for z <= 0. */
double zscore_threshold(const ZWindow *w, double z);

#endif
