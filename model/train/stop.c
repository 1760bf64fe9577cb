/* See stop.h. The flag is the one thing a signal handler may touch. */
#include "stop.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernels/base/clock.h"
#include "kernels/base/file.h"
#include "kernels/comm/comm.h"

enum { SLURM_MARGIN_S = 120 };

static volatile sig_atomic_t caught;

static void on_signal(int number) {
    if (caught == SIGINT && number == SIGINT) _exit(130);
    caught = number;
}

void stop_watch(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    /* Ctrl-C ends the `tee` behind a pipe as well: what is then printed must not end the run before it is saved. */
    signal(SIGPIPE, SIG_IGN);
}

/* What this rank knows. The file is rank 0's to see, so that nobody looks for it after it is gone. */
static const char *asked_here(const Config *c, double started_s) {
    if (caught == SIGTERM) return "SIGTERM";
    if (caught == SIGINT) return "SIGINT";
    if (caught == SIGUSR1) return "SIGUSR1";
    if (c->run.stop_after_minutes > 0 && clock_s() - started_s >= 60 * c->run.stop_after_minutes)
        return "run.stop_after_minutes";
    const char *slurm_end = getenv("SLURM_JOB_END_TIME");
    if (slurm_end && (double)time(NULL) > strtod(slurm_end, NULL) - SLURM_MARGIN_S && strtod(slurm_end, NULL) > 0)
        return "SLURM_JOB_END_TIME";
    char path[PATH_LEN + 8];
    snprintf(path, sizeof path, "%s/STOP", c->run.dir);
    if (job_rank() > 0 || !path_exists(path)) return NULL;
    unlink(path);
    return "the STOP file";
}

const char *stop_requested(const Config *c, double started_s) {
    static char agreed[64];
    const char *here = asked_here(c, started_s);
    snprintf(agreed, sizeof agreed, "%s", here ? here : "");
    return job_first_text(agreed, sizeof agreed) < 0 ? NULL : agreed;
}
