/* One process starts nothing; a launcher's word that MPI contradicts is refused, never N runs of one rank. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/comm/comm.h"
#include "tests/test.h"

static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
enum { N_VARIABLES = sizeof variables / sizeof *variables };

static void clear_environment(void) {
    for (int i = 0; i < N_VARIABLES; i++) unsetenv(variables[i]);
}

static Launch start(void) {
    char *argv[] = {(char *)(uintptr_t) "train_moe", NULL}, **args = argv;
    int argc = 1;
    return launch_start(&argc, &args);
}

static void start_job(void *arg) {
    (void)arg;
    Launch l = start();
    launch_end(&l);
}

/* One task, an empty value, or a text that is no count of tasks. Negative numbers and overflows are no count either. */
TEST(launch_alone_starts_nothing) {
    static const char *const values[] = {NULL, "1", "", "0", "-2", "four", "2x", "1e3", "99999999999999999999"};
    for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
        for (int i = 0; i < N_VARIABLES; i++) {
            clear_environment();
            if (values[v]) setenv(variables[i], values[v], 1);
            Launch l = start();
            EXPECT(l.world == 1 && l.rank == 0 && !l.mpi_started, "%s=%s", variables[i], values[v] ? values[v] : "");
            launch_end(&l);
        }
    }
    clear_environment();
}

/* No launcher started this process, so MPI finds itself alone (or is not there), whatever the variable says. */
TEST(launch_that_mpi_contradicts_is_refused) {
    for (int i = 0; i < N_VARIABLES; i++) {
        clear_environment();
        setenv(variables[i], "3", 1);
        char text[128];
        snprintf(text, sizeof text, "%s says 3 tasks", variables[i]);
        EXPECT(expect_exit(EXIT_USER, text, start_job, NULL), "%s=3", variables[i]);
    }
    EXPECT(expect_exit(EXIT_USER, "hint: ", start_job, NULL), "no hint");
    /* A launcher that says one task beside another's leftover: the first that speaks is believed. */
    clear_environment();
    setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
    setenv("SLURM_STEP_NUM_TASKS", "8", 1);
    EXPECT(expect_exit(EXIT_DONE, NULL, start_job, NULL));
    clear_environment();
}

TEST(launch_names_its_mpi) {
    const char *version = launch_mpi_version();
#ifdef HAVE_MPI
    EXPECT(strpbrk(version, "0123456789") || strcmp(version, "MPI") == 0, "%s", version);
#else
    EXPECT(strcmp(version, "no MPI") == 0, "%s", version);
#endif
}
