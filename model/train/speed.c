/* See speed.h. */
#include "speed.h"

void speed_add(Speed *s, double seconds, int64_t tokens) {
    s->open.steps++;
    s->open.tokens += tokens;
    s->open.seconds += seconds;
}

SpeedInterval speed_close(Speed *s) {
    SpeedInterval interval = s->open;
    if (interval.steps == 0) return interval;
    s->closed[s->head] = interval;
    s->head = (s->head + 1) % SPEED_INTERVALS;
    if (s->n < SPEED_INTERVALS) s->n++;
    s->open = (SpeedInterval){0};
    return interval;
}

double speed_rate(const Speed *s) {
    double tokens = (double)s->open.tokens, seconds = s->open.seconds;
    for (int i = 0; i < s->n; i++) {
        tokens += (double)s->closed[i].tokens;
        seconds += s->closed[i].seconds;
    }
    return seconds > 0 ? tokens / seconds : 0;
}
