/* Who hangs: every rank says where it is, and all of them know who says nothing any more. Floor 2.
 *
 * A rank's place is a few words: step, micro-batch, phase, and the transfer it waits in. The main thread writes
 * them; a thread of its own puts them into a small file beside those of the other ranks, since a rank that hangs
 * answers to nobody. When no rank of the job has moved for the time limit, or a rank of the same host is gone, the
 * first thread that sees it says so and ends its process, and with it the job. A rank alone waits for nobody and is
 * not watched. */
#ifndef TRAIN_MOE_WATCH_H
#define TRAIN_MOE_WATCH_H

#include <stdint.h>

/* Starts the thread: files go into folder/ranks, which all hosts see. Called by all ranks; world 1: nothing. */
void watch_start(const char *folder, int timeout_s);
/* Ends the thread and takes the files away. */
void watch_stop(void);

/* A library that moves bytes on its own and may know more: asked by the thread, a few times a second. */
typedef struct {
    const char *(*trouble)(void *arg); /* what has befallen the other ranks, or NULL */
    void (*abort)(void *arg);          /* lets go of all that waits on the device; returns at once */
    void *arg;
} WatchGuard;

/* Copied; NULL: none. Not while the thread runs. */
void watch_guard(const WatchGuard *guard);

/* This rank is going and has said why: nobody has to look for it. */
void watch_leave(void);

/* A sign of life, as are the next three. */
void watch_beat(void);
/* Where this rank is: "forward", "save", ... (a string literal). */
void watch_step(int64_t step);
void watch_phase(const char *phase, int64_t micro_batch);
/* The transfer that begins ("all_reduce", ...), NULL when it is done. */
void watch_transfer(const char *name);
/* Seconds spent in transfers since the last call. */
double watch_waited_s(void);

#endif
