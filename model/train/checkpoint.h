/* Checkpoints: a run as a folder, whole or not there at all. Floor 5.
 *
 *     run.dir/step_00001000/manifest.json               what there is, and everything that is no tensor (manifest.h)
 *                           state_00000.safetensors     the tensors of rank 0, state_00001 those of rank 1, ...: each
 *                                                       element once; state_00000_001... if one file would be larger
 *                                                       than CHECKPOINT_FILE_BYTES
 *
 * A save (beside a run: saver.h) writes step_00001000.tmp, makes every file and the folder durable, then renames it. So
 * a folder with the final name is whole, whenever a process or a machine stops; *.tmp is what an interrupted save
 * left, and the next start removes it. Sizes are checked when a checkpoint is looked for, hashes when it is loaded. A
 * damaged one is named and passed over.
 *
 * A loaded run continues bit for bit: integers are exact, doubles go through %.17g, tensors are copied. */
#ifndef TRAIN_MOE_CHECKPOINT_H
#define TRAIN_MOE_CHECKPOINT_H

#include "loads.h"
#include "model/state.h"

enum {
    CHECKPOINT_PATH_LEN = 1024,
    CHECKPOINT_DAMAGED = -2 /* beside -1: what is on disk is broken, and an older checkpoint may do */
};
#define CHECKPOINT_FILE_BYTES ((int64_t)4 << 30)

/* All of a checkpoint but its tensors. */
typedef struct {
    RunState state;
    uint64_t data_identity; /* 0 = no data yet: weights brought in from elsewhere, where a run may start */
    uint64_t param_hash;
    char *config_json; /* the effective configuration, one JSON object; read: malloc'd, see checkpoint_info_free */
    char *device;      /* what computed it, as far as its bits go (device.h); NULL: not said. malloc'd likewise */
    char *gemms;       /* the algorithms of its GEMMs, one a line; NULL: none */
    ExpertLoads loads; /* of the experts; none in a dense model, or not said. malloc'd likewise */
} CheckpointInfo;

void checkpoint_info_free(CheckpointInfo *info);

/* ---- saving ------------------------------------------------------------------------------------------------------ */

/* Saves under run_dir as the step of info->state, by one rank: whole tensors with unique names (several: saver.h). They
 * are read from the device on STREAM_COPY and do not change meanwhile. Tensors are cut so that no
 * file holds more than file_bytes_max bytes of them. A checkpoint of the same step is replaced. Writes the folder into
 * path (CHECKPOINT_PATH_LEN) and its bytes into *bytes. Returns 0 once it is durable, or -1 with err; older checkpoints
 * are then untouched and the unfinished folder is gone. */
int checkpoint_save(const char *run_dir, const Device *d, const StateTensor *tensors, int64_t n,
                    const CheckpointInfo *info, int64_t file_bytes_max, char *path, int64_t *bytes, char *err);

/* Where bytes [at, at + n) of a tensor's part come from, into out. `t` points into the caller's list. Tensors are asked
 * for one after the other, each from its first byte to its last. Returns 0, or -1 with err, which ends the save. */
typedef struct {
    int (*read)(void *arg, const StateTensor *t, int64_t at, void *out, int64_t n, char *err);
    void *arg;
} CheckpointSource;

/* checkpoint_save for tensors that are not in memory; `data` is not used. The source may still fill info->param_hash
 * while it is read. */
int checkpoint_save_from(const char *run_dir, const CheckpointSource *source, const StateTensor *tensors, int64_t n,
                         const CheckpointInfo *info, int64_t file_bytes_max, char *path, int64_t *bytes, char *err);

/* Removes what interrupted saves have left. */
void checkpoint_clean(const char *run_dir);

/* Bytes of a checkpoint of these tensors on disk, estimated from above. */
int64_t checkpoint_bytes(const StateTensor *tensors, int64_t n);
/* Can `bytes` be saved under run_dir? Makes the folder, writes and removes a file in it, asks for the free space.
 * Returns 0, or -1 with err. */
int checkpoint_can_write(const char *run_dir, int64_t bytes, char *err);

/* ---- finding ----------------------------------------------------------------------------------------------------- */

/* The newest complete checkpoint of run_dir by step number (step -1), or that of a step: its manifest is whole and of a
 * known format, its files are there in their exact sizes. Damaged and unfinished ones are named in note (ERR_LEN, else
 * ""). Returns 0 and path (CHECKPOINT_PATH_LEN); 1 if there is none (only with step -1); -1 with err: no such step, all
 * are damaged, or the newest was written by a newer train_moe. */
int checkpoint_find(const char *run_dir, int64_t step, char *path, char *note, char *err);

/* Step numbers are the run's history: after a resume from an older step of the same folder, the later checkpoints
 * belong to another history, and the next rerun must not pick them. Renames those after `step` to step_N.aside, which
 * nothing here looks at again, and names them in note (ERR_LEN, else ""). Returns 0, or -1 with err. */
int checkpoint_set_aside_after(const char *run_dir, int64_t step, char *note, char *err);

/* Removes old checkpoints, judged from what is on disk: complete ones are kept from the highest step down until `last`
 * are (0: all are kept), and so are the steps divisible by every_steps (0: none), saved_step and best_step (0: none).
 * Called when saved_step is durable. Returns 0, or -1 with err, which is a warning: what could be removed is. */
typedef struct {
    int last;
    int64_t every_steps, saved_step, best_step;
} CheckpointKeep;
int checkpoint_prune(const char *run_dir, const CheckpointKeep *keep, char *err);

/* ---- loading ----------------------------------------------------------------------------------------------------- */

typedef enum {
    CHECKPOINT_ALL,    /* a resume: the tensors asked for must be exactly those that were saved */
    CHECKPOINT_SHARE,  /* a resume by one of several ranks: what else was saved is another's */
    CHECKPOINT_WEIGHTS /* a new run: masters and router biases; names that begin with "adam." are left alone */
} CheckpointPart;

/* The numbers and the configuration of the checkpoint at `path`, without its tensors: what a run compares with its own
 * before it loads. Returns 0, -1 (no checkpoint there; a newer format) or CHECKPOINT_DAMAGED, with err. */
int checkpoint_peek(const char *path, CheckpointInfo *info, char *err);

/* Fills the tensors (this rank's part of each: any offset and extent) on STREAM_COPY, verifying every byte read, and
 * *info, which may be NULL. Returns 0; -1 with err if it does not fit: a tensor too many or too few, another dtype or
 * shape; or CHECKPOINT_DAMAGED with err. The tensors are undefined after a failure, *info is then empty. */
int checkpoint_load(const char *path, const Device *d, const StateTensor *tensors, int64_t n, CheckpointPart part,
                    CheckpointInfo *info, char *err);

/* Tensor by tensor, for who does not hold all of them. */
typedef struct CheckpointReader CheckpointReader;

/* Opens the checkpoint at `path`; *info may be NULL. `tensors` are all that will be read; they have to fit, as for
 * checkpoint_load. Returns 0 and a reader for checkpoint_close, or what checkpoint_load returns. */
int checkpoint_open(CheckpointReader **reader, const char *path, const StateTensor *tensors, int64_t n,
                    CheckpointPart part, CheckpointInfo *info, char *err);
/* Fills one tensor, verifying every byte read. Returns 0, or CHECKPOINT_DAMAGED with err. */
int checkpoint_read(CheckpointReader *reader, const Device *d, const StateTensor *t, char *err);
void checkpoint_close(CheckpointReader *reader);

/* Loads the newest checkpoint of run_dir whose every byte is right, older ones if newer ones turn out to be damaged.
 * Arguments and results of checkpoint_find and checkpoint_load; when all are damaged, err names each. */
int checkpoint_load_newest(const char *run_dir, const Device *d, const StateTensor *tensors, int64_t n,
                           CheckpointPart part, CheckpointInfo *info, char *path, char *note, char *err);

#endif
