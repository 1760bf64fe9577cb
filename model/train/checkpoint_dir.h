/* Names of checkpoints in a run's folder, for checkpoint.c alone. Floor 5. */
#ifndef TRAIN_MOE_CHECKPOINT_DIR_H
#define TRAIN_MOE_CHECKPOINT_DIR_H

#include <stdint.h>

/* path (CHECKPOINT_PATH_LEN) = run_dir/step_00001000 and suffix. Returns -1 with err if it is too long. */
int checkpoint_dir_path(char *path, const char *run_dir, int64_t step, const char *suffix, char *err);

/* Removes the folders step_N + suffix, of every N, as far as it can. */
void checkpoint_dir_remove(const char *run_dir, const char *suffix);

/* The folder `from` becomes that of `step`; one that was there goes. Durable on return. Returns 0, or -1 with err. */
int checkpoint_dir_commit(const char *from, const char *run_dir, int64_t step, char *err);

#endif
