/* How the threads of the CPU backend wait for each other. */
#ifndef TRAIN_MOE_THREADS_H
#define TRAIN_MOE_THREADS_H

/* GNU OpenMP spins for milliseconds at the end of every parallel loop. On a machine that does anything else besides,
 * the spinning threads take the core from the one that is still working: a step of the quick start takes ten times as
 * long (measured). The spin can only be set in the environment, and is read before main; so the program starts itself
 * again with a short one. Does nothing if the user has set OMP_WAIT_POLICY, GOMP_SPINCOUNT, or the restart fails. */
void cpu_threads_wait_short(char **argv);

#endif
