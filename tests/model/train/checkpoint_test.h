/* What the tests of checkpoints share: a small state, and its checkpoints in the test's own folder. */
#ifndef TRAIN_MOE_TESTS_CHECKPOINT_TEST_H
#define TRAIN_MOE_TESTS_CHECKPOINT_TEST_H

#include "model/train/checkpoint.h"

/* Asynchronous as far as its contract allows: a copy happens when its stream is synchronised, not before. */
extern const Device late_device;
/* The process is killed at the n-th synchronisation from now on; 0: it is not. */
void late_dies_after(int n_synchronizations);

enum { SAVED_TENSORS = 8 };

typedef struct {
    StateTensor t[SAVED_TENSORS];
    CheckpointInfo info;
} SavedState;

#define SAVED_CONFIG                                                                                                   \
    "{\"version\": 1, \"run\": {\"seed\": 18446744073709551615, \"name\": \"a \\\"b\\\"\"}, \"lr\": [3e-4, null, "     \
    "true]}"

/* Random bits (NaNs, denormals and all), other ones for another step. */
SavedState saved_make(int64_t step);
void saved_free(SavedState *s);
/* Its numbers are overwritten, its info released. */
void saved_clear(SavedState *s);
void saved_expect_same(const SavedState *a, const SavedState *b);

/* The run's folder, and what is in it; the latter good for the next few calls. */
const char *saved_run_dir(void);
const char *saved_in_run(const char *name);
/* Saves the state of a step there. */
void saved_step(int64_t step);

/* The text of a manifest up to its hash; malloc'd. */
void saved_read_manifest(const char *folder, char **text, size_t *size);
/* Replaces the manifest of a checkpoint by an edited text with a right hash. */
void saved_rewrite_manifest(const char *folder, const char *text, size_t size);

#endif
