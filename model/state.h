/* What a run has to remember: named tensors, and a few numbers. Floor 3.
 *
 * The parameter table (params.h) turns itself into a list of StateTensors; a checkpoint is that list plus RunState. */
#ifndef TRAIN_MOE_STATE_H
#define TRAIN_MOE_STATE_H

#include "kernels/ops.h"

enum { TENSOR_NAME_LEN = 128, Z_WINDOW_MAX = 1024 };

/* One tensor of the training state, by its Hugging Face name: "model.norm.weight" (the f32 master), "adam.m.<name>",
 * "adam.v.<name>" (f32 or bf16), "<...>.e_score_correction_bias" (f32). This rank holds elements
 * [offset, offset + extent) of the flattened global tensor, at `data` on the device. */
typedef struct {
    char name[TENSOR_NAME_LEN];
    Dtype dtype;
    int ndim;
    int64_t shape[2]; /* global */
    int64_t offset, extent;
    void *data;
} StateTensor;

/* Window of a running z-score: the last `size` values seen, as a ring. */
typedef struct {
    int size, n; /* n <= size values are held; the oldest is at `head` when n == size */
    int head;
    double value[Z_WINDOW_MAX];
} ZWindow;

/* The last step's loss and norm, which are in the windows of the step after next only: a device reports a step while
 * the next one runs, and thresholds must not depend on who waited for whom. */
typedef struct {
    int64_t is_set; /* 0: nothing waits, or the step was skipped */
    double loss, norm;
} PendingValues;

/* Everything else that a bit-for-bit resume needs. */
typedef struct {
    int64_t step;    /* optimizer steps done, skipped ones included */
    int64_t tokens;  /* tokens trained on: what schedules are functions of */
    int64_t samples; /* consumed samples: the data position */
    UpdateState update;
    ZWindow loss_z, norm_z;
    PendingValues pending;
    double best_val;   /* lowest first validation loss so far, INFINITY before any */
    int64_t best_step; /* the step that had it, 0 before any */
    double wall_s;     /* seconds of training so far, over all runs */
} RunState;

#endif
