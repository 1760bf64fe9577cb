/* A line of columns that fits its terminal. Floor 5.
 *
 *     step    10/450 | 20.5K | loss 6.1120 | gnorm  1.92 | eta 3m43s  spike 4.1
 *     kind and step  | columns, each with a priority ...            | flags
 *
 * Where the line is wider than the terminal, whole columns are left out, those of the largest priority number first and
 * of equal ones the rightmost; priority 0, the front and the flags always stay. */
#ifndef TRAIN_MOE_COLUMNS_H
#define TRAIN_MOE_COLUMNS_H

#include <stdint.h>

#include "kernels/base/check.h"

enum { COLUMNS_MAX = 24, COLUMN_LEN = 320, LINE_LEN = 9216 };

typedef struct {
    char front[96];
    int n;
    int priority[COLUMNS_MAX];
    char column[COLUMNS_MAX][COLUMN_LEN];
    char flags[COLUMN_LEN];
} Line;

/* "step    10/450": the kind, which is what grep finds, and the step in the width of steps_total. */
void line_start(Line *line, const char *kind, int64_t step, int64_t steps_total);
/* One more column; text beyond COLUMN_LEN is cut. Beyond COLUMNS_MAX columns the rest is left out. */
void line_add(Line *line, int priority, const char *fmt, ...) PRINTF_LIKE(3, 4);
/* One more flag behind the last column. */
void line_flag(Line *line, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* The whole line without a line end into out (LINE_LEN bytes), in at most `width` characters if columns can be left out
 * for it; width 0 = no limit. */
void line_text(const Line *line, int width, char *out);

/* Columns of the terminal behind a file descriptor; 0 if it is none, or does not say. */
int terminal_width(int fd);

#endif
