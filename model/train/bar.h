/* A progress bar: the last line of a terminal, drawn over itself. Floor 5.
 *
 *     [=========>                     ]  31%  140/450  eta 2m34s
 *
 * It has no line end; bar_clear takes it away before a line is printed. Off, every call does nothing. */
#ifndef TRAIN_MOE_BAR_H
#define TRAIN_MOE_BAR_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* Starts zeroed: off. */
typedef struct {
    FILE *out; /* borrowed: stderr */
    bool is_on, is_drawn;
    double drawn_at_s;
} Bar;

/* On, if `out` is a terminal. */
void bar_init(Bar *bar, FILE *out);
/* `done` of `total`, and text behind it. At most ten times a second unless the bar is not on the screen. */
void bar_draw(Bar *bar, int64_t done, int64_t total, const char *text);
void bar_clear(Bar *bar);

#endif
