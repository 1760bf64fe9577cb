/* Tokens a second, over time really spent training. Floor 5.
 *
 * The caller reports each step's own wall time, so evaluation and saving never enter. An interval is what lies between
 * two printed lines; the rate for forecasts is total tokens over total time of the last SPEED_INTERVALS of them,
 * counted in this process: right from the first interval after a resume, with no average to warm up. */
#ifndef TRAIN_MOE_SPEED_H
#define TRAIN_MOE_SPEED_H

#include <stdint.h>

enum { SPEED_INTERVALS = 20 };

typedef struct {
    int64_t steps, tokens;
    double seconds;
} SpeedInterval;

/* Starts zeroed. */
typedef struct {
    int n, head; /* a ring; the next interval goes to `head` */
    SpeedInterval closed[SPEED_INTERVALS];
    SpeedInterval open;
} Speed;

void speed_add(Speed *s, double seconds, int64_t tokens);
/* Ends the open interval and returns it: all steps since the last call. */
SpeedInterval speed_close(Speed *s);
/* Tokens a second over the last intervals, the open one included; 0 before any time has passed. */
double speed_rate(const Speed *s);

#endif
