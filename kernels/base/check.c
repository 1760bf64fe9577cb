/* See check.h. The only file-level state is who we are in the job, where it stands and how to end it. */
#include "check.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { SECONDS_FOR_RANK_0 = 2 };

static struct {
    int rank, n_ranks;
    void (*abort_job)(int exit_code);
    void (*about)(void *arg, char *text, size_t text_len);
    void *about_arg;
} job = {0, 1, NULL, NULL, NULL};

void check_set_job(int rank, int n_ranks, void (*abort_job)(int exit_code)) {
    job.rank = rank;
    job.n_ranks = n_ranks;
    job.abort_job = abort_job;
}

void check_set_about(void (*about)(void *arg, char *text, size_t text_len), void *arg) {
    job.about = about;
    job.about_arg = arg;
}

const char *check_about(char *buf, size_t buf_len) {
    buf[0] = 0;
    if (job.about) job.about(job.about_arg, buf, buf_len);
    return buf;
}

void check_failed(const char *file, int line, const char *cond, const char *fmt, ...) {
    char host[64] = "?";
    gethostname(host, sizeof host - 1);
    fflush(stdout);
    fprintf(stderr, "bug: %s:%d: CHECK(%s) failed: ", file, line, cond);
    va_list args;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, " (rank %d of %d on %s)\n", job.rank, job.n_ranks, host);
    fflush(stderr);
    if (job.abort_job) job.abort_job(EXIT_FAILED);
    abort();
}

/* An abort begins with a signal, which a run may catch: it is no reason to speak early. */
static void leave_time_for_rank_0(void) {
    struct timespec left = {SECONDS_FOR_RANK_0, 0};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) continue;
}

void fatal_with_hint(int exit_code, const char *hint, const char *fmt, ...) {
    /* Most mistakes are found by all ranks at once: rank 0 speaks, and its abort ends the others before they do. */
    if (job.abort_job && job.rank > 0) leave_time_for_rank_0();
    fflush(stdout);
    char text[2 * ERR_LEN];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    make_one_line(text);
    fprintf(stderr, "error: %s\n", text);
    if (hint) fprintf(stderr, "hint:  %s\n", hint);
    fflush(stderr);
    if (job.abort_job) job.abort_job(exit_code);
    exit(exit_code);
}

int err_set(char *err, const char *fmt, ...) {
    if (!err) return -1;
    va_list args;
    va_start(args, fmt);
    vsnprintf(err, ERR_LEN, fmt, args);
    va_end(args);
    make_one_line(err);
    return -1;
}

void make_one_line(char *text) {
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7F) *text = '?';
}
