/* One optimizer step, by this rank and the others at once. Floor 5.
 *
 *   StepParams from the schedules -> micro-batches: forward, backward -> update -> the record to the host.
 *
 * A step is queued and nobody waits for it: on a device that runs behind the host, train_step returns long before the
 * step is done, and its report is taken while the next one runs. So a loop is
 *
 *   train_step; then train_report until it is false       or train_flush, where the last step must be done as well
 *
 * What a step computes never depends on when reports are taken: the windows behind its spike thresholds hold the steps
 * up to the last but one (RunState.pending).
 *
 * Where expert rows did not fit (moe.capacity), the step and those queued behind it have changed nothing. Its report
 * says SKIP_OVERFLOW, and the state is back in front of it: once there is room (run_make_room), the loop trains the
 * same batches again, in the same order. */
#ifndef TRAIN_MOE_TRAIN_STEP_H
#define TRAIN_MOE_TRAIN_STEP_H

#include "data/loader.h"
#include "loads.h"
#include "log.h"
#include "lr.h"
#include "model/model.h"
#include "model/parallel/pipeline.h"
#include "model/state.h"

/* What is queued as one piece, and replayed as one graph. Nothing in a part changes from step to step but what it reads
 * from the device. */
typedef enum {
    STEP_FIRST,    /* gradients and statistics to zero, forward and backward of a step's first micro-batch */
    STEP_NEXT,     /* forward and backward of any other */
    STEP_PIPELINE, /* the same of all at once: a rank's whole list of a pipeline, with its transfers */
    STEP_UPDATE,
    STEP_PARTS
} StepPart;

/* A step between train_step and its report. */
typedef struct {
    RunState before;   /* where the run stood, with the step before it reported */
    StepReport report; /* what was known when it was queued */
    int64_t n_targets[LOSSES_MAX], sequences;
    double started_s;
} StepInFlight;

typedef struct {
    const Config *config;
    Model *model; /* borrowed, as is the loader */
    Loader *loader;
    Pipeline *pipeline; /* NULL: micro-batches go one after the other through the whole model */
    int64_t batch_unit; /* the `ranks` of lr.h */
    RunLength length;
    /* Where the run stands. step, tokens and samples are those of the last step queued; update, the windows and wall_s
     * those of the last one reported. After train_flush all are of one step, and it may be saved. */
    RunState state;
    ExpertLoads loads;                       /* of the steps reported */
    int64_t reported;                        /* steps whose report was taken */
    StepInFlight in_flight[STAGING_RECORDS]; /* by step */
    double done_s;                           /* when the last report was taken */
    bool has_run[STEP_PARTS];                /* once without a graph: libraries and kernels are set up */
    Graph *graph[STEP_PARTS];
    int64_t n_piped;    /* micro-batches of STEP_PIPELINE, and of its graph */
    bool has_bias;      /* noaux_tc has router biases */
    bool is_copied;     /* a save copies the state: the next update waits until it has */
    MicroBatch counted; /* for counting targets ahead, under a document mask */
    bool reads_tokens;  /* else a middle stage: of a micro-batch it needs the positions alone, which `counted` has */
} Trainer;

/* A run at its beginning: state zero. Returns -1 with err. */
int trainer_init(Trainer *t, const Config *c, Model *m, Loader *loader, char *err);
void trainer_free(Trainer *t);

/* After a checkpoint was loaded into t->state: the device's copy of what lives there. */
void trainer_restore(Trainer *t);
/* Parts are queued anew from now on: after the activations have moved. */
void trainer_forget_graphs(Trainer *t);

/* Queues the step. At most one before it may still be without its report. Returns -1 with err if data cannot be read;
 * then nothing moved. */
int train_step(Trainer *t, char *err);

/* Fills the report of the oldest step that has none, if that step is due: on a device that runs behind the host, a step
 * is when another is queued behind it, else at once. Waits for this step only. Returns false if none is due. The loads,
 * biases and FP8 counts are borrowed until the next train_step. After SKIP_OVERFLOW nothing is due, and t->state is
 * that before the step. */
bool train_report(Trainer *t, StepReport *r);
/* The same, with every step due. */
bool train_flush(Trainer *t, StepReport *r);

#endif
