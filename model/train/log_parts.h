/* Inside of the logger: what log*.c share. Floor 5. */
#ifndef TRAIN_MOE_LOG_PARTS_H
#define TRAIN_MOE_LOG_PARTS_H

#include "log.h"

/* Every line goes through here: the bar away, the UTC time in front where nobody watches, out at once. */
void print_line(Logger *l, FILE *to, bool with_time, const char *text);
/* The same for columns, fitted to the terminal. */
void print_columns(Logger *l, FILE *to, const Line *line);

/* Ends the open record. The first that cannot be written is warned about; later ones are tried again in silence. */
void end_record(Logger *l);

#endif
