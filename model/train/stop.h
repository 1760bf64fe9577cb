/* When a run should stop early: signals, a STOP file, time limits. Floor 5. */
#ifndef TRAIN_MOE_STOP_H
#define TRAIN_MOE_STOP_H

#include "data/config.h"

/* Catches SIGTERM, SIGINT and SIGUSR1: the step in work is finished, then the run saves and leaves. A second SIGINT
 * ends the process at once. SIGPIPE is ignored: a reader of the output that leaves does not end a run. */
void stop_watch(void);

/* Why to stop now, or NULL; what one rank knows, all of them obey: they call it together. started_s: clock_s() at the
 * start of the process. A STOP file in run.dir is removed when it is obeyed, so that the next start goes on. */
const char *stop_requested(const Config *c, double started_s);

#endif
