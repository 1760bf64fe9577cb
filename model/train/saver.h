/* Saves beside the run: the state is copied into host memory, and a thread writes the copy. Floor 5.
 *
 *     saver_begin      queues the copies on STREAM_COPY, where they run under the next step's micro-batches
 *     train_step       its update alone waits for EVENT_SAVE_COPIED, if Trainer.is_copied is set
 *     saver_copied     waits for the copies and starts the thread: hash, files, fsync; then rename, and what may go
 *     saver_end        what became of it, once
 *
 * Several ranks each write their own part. Between steps they tell each other who is done (ranks.h); after the last,
 * rank 0's thread makes a checkpoint of the parts, or removes them if one has failed. Nobody waits for a disk. They
 * call these functions together.
 *
 * One save at a time. The thread never touches the device or MPI, never prints and never ends the process: it leaves a
 * result. Whether there is a copy or not, the files hold the same bytes, and the run computes the same. Without room
 * for one the run waits for its saves, as it does with checkpoint.background false. */
#ifndef TRAIN_MOE_SAVER_H
#define TRAIN_MOE_SAVER_H

#include <pthread.h>
#include <stdatomic.h>

#include "checkpoint.h"
#include "data/config.h"
#include "kernels/base/check.h"
#include "log_file.h"
#include "model/model.h"
#include "ranks.h"

/* Events of a save: what it copies is whole; it is copied; the micro-batches that ran meanwhile are done. */
enum { EVENT_SAVE_READY = EVENT_STAGING_END, EVENT_SAVE_COPIED, EVENT_SAVE_BATCHES };

enum { SAVER_COPIES = 3, SAVER_NOTE_LEN = 128 }; /* masters, first and second moments */

typedef enum { SAVER_IDLE, SAVER_COPYING, SAVER_WRITING, SAVER_COMMITTING, SAVER_WRITTEN } SaverStage;

typedef struct {
    int64_t step, tokens;
    bool failed;
    char err[ERR_LEN];     /* why, if it failed; of several ranks, where */
    char warning[ERR_LEN]; /* what else went wrong; "" */
    char path[CHECKPOINT_PATH_LEN];
    int64_t bytes;
    uint64_t hash;
    double waited_s;  /* the run stood still */
    double on_disk_s; /* until all was on the disk; negative: it was written without a copy, and the run waited */
} SaveResult;

typedef struct {
    const Config *config;
    const Model *model;
    LogFile *log;         /* rank 0's; borrowed, as are those above */
    StateTensor *tensors; /* this rank's part; malloc'd */
    int64_t n_tensors;
    void *memory; /* NULL: no copy, the run waits */
    struct {
        const char *from;
        char *to;
        size_t bytes;
    } copy[SAVER_COPIES];
    SaverStage stage; /* the same on all ranks */
    bool has_thread;
    pthread_t thread;
    atomic_bool is_done; /* the thread: all below is the caller's again */
    double started_s;
    CheckpointInfo info;
    SavedPart own;
    Manifest part;       /* what this rank has written */
    ManifestPart *parts; /* on rank 0: all ranks */
    int64_t n_parts;
    SaveResult result;
} Saver;

/* Bytes of host memory that a rank takes for copies; 0 if the run saves at its end alone, or waits. */
int64_t saver_bytes(const Config *c, const Params *p);

/* Takes the memory, if there is enough on every rank, and removes what an interrupted save has left. note
 * (SAVER_NOTE_LEN) says for the banner how this run saves. `log` is made durable before each checkpoint that its lines
 * lead up to. */
void saver_open(Saver *s, const Config *c, const Model *m, LogFile *log, char *note);
/* Waits for the thread; its result is lost. */
void saver_close(Saver *s);

/* Saves info, whose strings it frees, as the state is now: every step is reported, none is queued. CHECK: idle. */
void saver_begin(Saver *s, const CheckpointInfo *info);
/* Does a copy run that the next update has to wait for? */
bool saver_is_copying(const Saver *s);
/* Waits for that copy, if there is one; `is_stepped`: a step was queued meanwhile. */
void saver_copied(Saver *s, bool is_stepped);
/* Fills the result of a save that has ended, with `wait` of any that was begun. Returns false if there is none. */
bool saver_end(Saver *s, bool wait, SaveResult *result);

#endif
