/* Drawings of a schedule: one row a rank, time from left to right. Floor 4. */
#ifndef TRAIN_MOE_DRAW_H
#define TRAIN_MOE_DRAW_H

#include <stdio.h>

#include "schedule.h"

/* As text: F3 forward of micro-batch 3, B backward, I input-backward, W weight-backward, F5&B3 a pair; small letters
 * are the rank's second chunk; a dot is idle. The shortest step is as wide as its label. */
void draw_text(FILE *out, const PipeSchedule *s, const Timeline *t);

/* As an SVG that needs nothing else: colours by kind, darker for the second chunk, a pair as two halves, a tooltip on
 * every step, a legend, the title above. */
void draw_svg(FILE *out, const PipeSchedule *s, const Timeline *t, const char *title);

#endif
