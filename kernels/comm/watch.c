/* See watch.h. The thread never calls MPI, which the main thread may sit in: it ends the process, and a launcher takes
 * the other ranks down with it. */
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "comm.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/file.h"

enum { HOST_LEN = 64, WORD_LEN = 24, WHERE_LEN = 64, SECONDS_FOR_THE_FIRST = 5, SECONDS_FOR_AN_ABORT = 2 };
#define TICK_S 0.2

/* What a rank puts into its file. */
typedef struct {
    uint64_t beats; /* signs of life */
    int64_t step, micro_batch, pid;
    double published_s; /* time of day */
    char phase[WORD_LEN], transfer[WORD_LEN], host[HOST_LEN];
} Place;

static struct {
    atomic_uint_fast64_t beats;
    atomic_int_fast64_t step, micro_batch;
    _Atomic(const char *) phase, transfer;
    double transfer_at_s, waited_s; /* the main thread's own */
    char folder[PATH_MAX - 32];
    int rank, world, timeout_s;
    bool *is_here; /* other ranks of this host */
    bool is_on, is_ending;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t ending;
    WatchGuard guard;
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER, .ending = PTHREAD_COND_INITIALIZER};

void watch_beat(void) {
    atomic_fetch_add(&watch.beats, 1);
}

void watch_step(int64_t step) {
    atomic_store(&watch.step, step);
    atomic_fetch_add(&watch.beats, 1);
}

void watch_phase(const char *phase, int64_t micro_batch) {
    atomic_store(&watch.phase, phase);
    atomic_store(&watch.micro_batch, micro_batch);
    atomic_fetch_add(&watch.beats, 1);
}

void watch_transfer(const char *name) {
    if (name)
        watch.transfer_at_s = clock_s();
    else
        watch.waited_s += clock_s() - watch.transfer_at_s;
    atomic_store(&watch.transfer, name);
    atomic_fetch_add(&watch.beats, 1);
}

double watch_waited_s(void) {
    const double waited_s = watch.waited_s;
    watch.waited_s = 0;
    return waited_s;
}

/* ---- the files --------------------------------------------------------------------------------------------------- */

static double time_of_day(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void file_of(char path[PATH_MAX], int rank) {
    snprintf(path, PATH_MAX, "%s/%05d", watch.folder, rank);
}

static void publish(void) {
    char path[PATH_MAX];
    Place p;
    memset(&p, 0, sizeof p);
    const char *phase = atomic_load(&watch.phase), *transfer = atomic_load(&watch.transfer);
    p.beats = atomic_load(&watch.beats);
    p.step = atomic_load(&watch.step);
    p.micro_batch = atomic_load(&watch.micro_batch);
    p.pid = getpid();
    p.published_s = time_of_day();
    snprintf(p.phase, sizeof p.phase, "%s", phase ? phase : "start");
    snprintf(p.transfer, sizeof p.transfer, "%s", transfer ? transfer : "");
    gethostname(p.host, sizeof p.host - 1);
    file_of(path, watch.rank);
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0 || pwrite(fd, &p, sizeof p, 0) < 0) p.beats = 0; /* a full disk is the business of those who save */
    if (fd >= 0) close(fd);
}

static bool read_place(int rank, Place *p) {
    char path[PATH_MAX];
    file_of(path, rank);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const bool ok = fd >= 0 && pread(fd, p, sizeof *p, 0) == (ssize_t)sizeof *p;
    if (fd >= 0) close(fd);
    return ok;
}

/* Signs of life of all ranks; those that cannot be read count as none. */
static uint64_t beats_of_all(void) {
    uint64_t sum = 0;
    Place p;
    for (int r = 0; r < watch.world; r++)
        if (read_place(r, &p)) sum += p.beats;
    return sum;
}

/* ---- the end ----------------------------------------------------------------------------------------------------- */

/* One rank speaks: the first that makes the file. The others leave time for that, then go too. */
static void claim_the_word(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/said", watch.folder);
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0 && errno == EEXIST) {
        sleep(SECONDS_FOR_THE_FIRST);
        _exit(EXIT_FAILED);
    }
}

/* What waits on a device has a bounded time to let go of it; then the process ends whatever it does. */
__attribute__((noreturn)) static void leave(void) {
    fprintf(stderr, "hint:  the same command goes on from the last checkpoint\n");
    fflush(stderr);
    watch_leave();
    if (watch.guard.abort) {
        watch.guard.abort(watch.guard.arg);
        sleep(SECONDS_FOR_AN_ABORT);
    }
    _exit(EXIT_FAILED);
}

static const char *where_is(char text[WHERE_LEN], const Place *p) {
    if (p->micro_batch >= 0)
        snprintf(text, WHERE_LEN, "%s, micro-batch %lld", p->phase, (long long)p->micro_batch);
    else
        snprintf(text, WHERE_LEN, "%s", p->phase);
    return text;
}

/* A rank whose thread is silent is stopped or gone; one that is in no transfer is what the others wait for. Where a
 * library moves the bytes, transfers are the device's, and the steps and phases tell who is behind. */
static void print_rank(int rank, double period_s) {
    Place p;
    if (!read_place(rank, &p)) {
        fprintf(stderr, "  %4d  nothing is known of it\n", rank);
        return;
    }
    char where[WHERE_LEN], verdict[64];
    const double silent_s = time_of_day() - p.published_s;
    if (silent_s > 2 * period_s + 1)
        snprintf(verdict, sizeof verdict, "silent for %.0f s: stopped or gone", silent_s);
    else if (p.transfer[0])
        snprintf(verdict, sizeof verdict, "waits in %s", p.transfer);
    else
        snprintf(verdict, sizeof verdict, "%s",
                 watch.guard.trouble ? "waits for its device, or hangs itself" : "waits for no rank: it hangs itself");
    fprintf(stderr, "  %4d  %-20s %8lld  %5lld  %-28s  %s\n", rank, p.host, (long long)p.pid, (long long)p.step,
            where_is(where, &p), verdict);
}

static void end_hanging_job(double period_s) {
    claim_the_word();
    fprintf(stderr, "error: no rank has moved for %d s (run.hang_timeout_s)\n", watch.timeout_s);
    fprintf(stderr, "  rank  host                      pid   step  where\n");
    for (int r = 0; r < watch.world; r++) print_rank(r, period_s);
    leave();
}

/* A rank of this host that is gone without taking its file away. Others are seen by who starts them, or by MPI. */
static void look_for_dead(void) {
    Place p;
    for (int r = 0; r < watch.world; r++) {
        if (!watch.is_here[r] || !read_place(r, &p) || kill((pid_t)p.pid, 0) == 0 || errno != ESRCH) continue;
        char where[WHERE_LEN];
        claim_the_word();
        fprintf(stderr, "error: rank %d of %d (pid %lld on %s) has ended, last seen in step %lld: %s\n", r, watch.world,
                (long long)p.pid, p.host, (long long)p.step, where_is(where, &p));
        leave();
    }
}

static void ask_guard(void) {
    const char *trouble = watch.guard.trouble ? watch.guard.trouble(watch.guard.arg) : NULL;
    if (!trouble) return;
    char host[HOST_LEN] = "";
    gethostname(host, sizeof host - 1);
    claim_the_word();
    fprintf(stderr, "error: rank %d of %d on %s has lost the others in step %lld: %s\n", watch.rank, watch.world, host,
            (long long)atomic_load(&watch.step), trouble);
    leave();
}

/* ---- the thread -------------------------------------------------------------------------------------------------- */

/* Sleeps; true when it is time to end. */
static bool sleep_or_end(double seconds) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const double at = (double)until.tv_nsec * 1e-9 + seconds;
    until.tv_sec += (time_t)at;
    until.tv_nsec = (long)((at - (double)(time_t)at) * 1e9);
    pthread_mutex_lock(&watch.lock);
    while (!watch.is_ending && pthread_cond_timedwait(&watch.ending, &watch.lock, &until) == 0) continue;
    const bool ends = watch.is_ending;
    pthread_mutex_unlock(&watch.lock);
    return ends;
}

/* Signs of life of the others are asked for only while this rank stands still itself. */
static void *run(void *arg) {
    (void)arg;
    const double tenth = watch.timeout_s / 10.0, period_s = tenth > 2 ? 2 : tenth;
    uint64_t own = 0, all = 0;
    double now = clock_s(), own_moved_s = now, all_moved_s = now, published_s = now;
    while (!sleep_or_end(TICK_S)) {
        now = clock_s();
        look_for_dead();
        ask_guard();
        if (now - published_s >= period_s) publish(), published_s = now;
        const uint64_t own_now = atomic_load(&watch.beats);
        if (own_now != own) own = own_now, own_moved_s = all_moved_s = now;
        if (now - own_moved_s < watch.timeout_s / 2.0) continue;
        const uint64_t all_now = beats_of_all();
        if (all_now != all) all = all_now, all_moved_s = now;
        if (now - own_moved_s >= watch.timeout_s && now - all_moved_s >= watch.timeout_s / 2.0)
            end_hanging_job(period_s);
    }
    return NULL;
}

/* Which ranks share this host. */
static void find_neighbours(void) {
    char own[HOST_LEN] = "";
    char *all = (char *)calloc((size_t)watch.world, HOST_LEN);
    watch.is_here = (bool *)calloc((size_t)watch.world, sizeof *watch.is_here);
    CHECK(all && watch.is_here, "no memory for the names of %d hosts", watch.world);
    gethostname(own, sizeof own - 1);
    job_gather(all, own, HOST_LEN);
    for (int r = 0; r < watch.world; r++)
        watch.is_here[r] = r != watch.rank && memcmp(all + (size_t)r * HOST_LEN, own, HOST_LEN) == 0;
    free(all);
}

void watch_start(const char *folder, int timeout_s) {
    char err[ERR_LEN], said[PATH_MAX];
    watch.rank = job_rank();
    watch.world = job_world();
    watch.timeout_s = timeout_s;
    watch.is_ending = false;
    if (watch.world == 1) return;
    CHECK(snprintf(watch.folder, sizeof watch.folder, "%s/ranks", folder) < (int)sizeof watch.folder, "%s", folder);
    if (dir_make(watch.folder, err) != 0) DIE("choose another run.dir", "%s", err);
    snprintf(said, sizeof said, "%s/said", watch.folder);
    if (watch.rank == 0) unlink(said);
    watch_phase("start", -1);
    publish();         /* over what an earlier run may have left */
    find_neighbours(); /* which has seen to it that all have done so */
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    CHECK(pthread_create(&watch.thread, NULL, run, NULL) == 0, "no thread to watch the ranks");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    watch.is_on = true;
}

void watch_guard(const WatchGuard *guard) {
    watch.guard = guard ? *guard : (WatchGuard){NULL, NULL, NULL};
}

void watch_leave(void) {
    char path[PATH_MAX];
    if (!watch.folder[0]) return;
    file_of(path, watch.rank);
    unlink(path);
}

void watch_stop(void) {
    if (!watch.is_on) return;
    pthread_mutex_lock(&watch.lock);
    watch.is_ending = true;
    pthread_cond_broadcast(&watch.ending);
    pthread_mutex_unlock(&watch.lock);
    pthread_join(watch.thread, NULL);
    watch.is_on = false;
    watch_leave();
    rmdir(watch.folder); /* the last rank's succeeds */
    free(watch.is_here);
    watch.is_here = NULL;
    watch.folder[0] = 0;
}
