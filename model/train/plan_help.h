/* Help on train_moe plan. Floor 5. */
#ifndef TRAIN_MOE_PLAN_HELP_H
#define TRAIN_MOE_PLAN_HELP_H

#include <stdio.h>

/* What goes with the help words plan and json: the members of --json; gpu: a file of rates; flops: how they are
 * counted. Returns the lines printed, or 0 for any other word. */
int plan_help(FILE *out, const char *word);

#endif
