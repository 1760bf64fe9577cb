/* How many processes this job has, and whether MPI must be started for it.
 *
 * One process starts no MPI: a laptop run depends on nothing. The launcher's environment says how many tasks it
 * started; when that number and MPI's disagree (an mpirun of another MPI, a binary without MPI) the job would be N runs
 * of one rank in one folder, so it is refused. */
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm.h"
#include "kernels/base/check.h"

#ifdef HAVE_MPI
#include <mpi.h>

#include "watch.h"
#endif

/* Tasks by the launcher's word, 0 if no launcher speaks; *variable names who said so. */
static long launcher_tasks(const char **variable) {
    static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        const char *text = getenv(variables[i]);
        if (!text || !*text) continue;
        char *end;
        long n = strtol(text, &end, 10);
        if (*end || n < 1 || n > INT_MAX) continue;
        *variable = variables[i];
        return n;
    }
    return 0;
}

#ifdef HAVE_MPI
enum { ABORT_SECONDS = 10 };

/* Ends all ranks. An abort that hangs ends this process all the same, and the launcher takes down the others. */
static void abort_job(int exit_code) {
    watch_leave();
    signal(SIGALRM, SIG_DFL);
    alarm(ABORT_SECONDS);
    MPI_Abort(MPI_COMM_WORLD, exit_code);
}

const char *launch_mpi_version(void) {
#if defined(OMPI_MAJOR_VERSION)
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
    return "Open MPI " TEXT(OMPI_MAJOR_VERSION) "." TEXT(OMPI_MINOR_VERSION) "." TEXT(OMPI_RELEASE_VERSION);
#elif defined(MPICH_VERSION)
    return "MPICH " MPICH_VERSION;
#else
    return "MPI";
#endif
}

static void start_mpi(Launch *l, int *argc, char ***argv, long tasks, const char *variable) {
    int provided;
    MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
    l->mpi_started = true;
    MPI_Comm_rank(MPI_COMM_WORLD, &l->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &l->world);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD,
                            MPI_ERRORS_RETURN); /* and of what is cut from it: errors are ours to tell */
    check_set_job(l->rank, l->world, abort_job);
    if (l->world != tasks) {
        /* Nobody else hears an abort, but Open MPI would print seven lines about it. */
        const int world = l->world;
        if (world == 1) launch_end(l);
        DIE("start it with the mpirun of the MPI it was built with (./train_moe --version), or rebuild with "
            "MPI_HOME=...",
            "%s says %ld tasks, but %s sees %d", variable, tasks, launch_mpi_version(), world);
    }
}
#else
const char *launch_mpi_version(void) {
    return "no MPI";
}

static void start_mpi(Launch *l, int *argc, char ***argv, long tasks, const char *variable) {
    (void)l, (void)argc, (void)argv;
    DIE("install MPI (Debian: libopenmpi-dev openmpi-bin) and run make again, or start one process",
        "%s says %ld tasks, but this binary was built without MPI", variable, tasks);
}
#endif

Launch launch_start(int *argc, char ***argv) {
    Launch l = {0, 1, false};
    const char *variable = NULL;
    long tasks = launcher_tasks(&variable);
    if (tasks > 1) start_mpi(&l, argc, argv, tasks, variable);
    return l;
}

void launch_end(Launch *l) {
#ifdef HAVE_MPI
    if (l->mpi_started) {
        MPI_Barrier(MPI_COMM_WORLD); /* a launcher that sees a rank leave with 3 kills those that still write */
        MPI_Finalize();
    }
#endif
    check_set_job(0, 1, NULL);
    l->mpi_started = false;
}
