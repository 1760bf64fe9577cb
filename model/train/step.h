/* One optimizer step on one rank. Floor 5.
 *
 *   StepParams from the schedules -> micro-batches: forward, backward -> update -> statistics to the host. */
#ifndef TRAIN_MOE_TRAIN_STEP_H
#define TRAIN_MOE_TRAIN_STEP_H

#include "data/loader.h"
#include "log.h"
#include "lr.h"
#include "model/model.h"
#include "model/state.h"

typedef struct {
    const Config *config;
    Model *model; /* borrowed, as is the loader */
    Loader *loader;
    RunLength length;
    RunState state;     /* where the run stands; train_step moves it */
    int32_t *load;      /* (MoE blocks, E): tokens of each expert in the last step */
    float *bias;        /* (MoE blocks, E): router biases after it */
    bool has_bias;      /* noaux_tc has them */
    MicroBatch counted; /* for counting targets ahead, under a document mask */
} Trainer;

/* A run at its beginning: state zero. Returns -1 with err. */
int trainer_init(Trainer *t, const Config *c, Model *m, Loader *loader, char *err);
void trainer_free(Trainer *t);

/* After a checkpoint was loaded into t->state: the device's copy of what lives there. */
void trainer_restore(Trainer *t);

/* Does the step and fills the report, times included. Returns -1 with err if data cannot be read; then nothing moved.
 */
int train_step(Trainer *t, StepReport *report, char *err);

#endif
