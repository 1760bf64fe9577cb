/* See threads.h. */
#include "threads.h"

#include <stdlib.h>
#include <unistd.h>

void cpu_threads_wait_short(char **argv) {
#ifdef _OPENMP
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY") || setenv("GOMP_SPINCOUNT", "20000", 1) != 0) return;
    execv("/proc/self/exe", argv);
#else
    (void)argv;
#endif
}
