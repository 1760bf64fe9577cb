/* A run: everything between the command line and the loop, opened in order and closed in reverse. Floor 5. */
#ifndef TRAIN_MOE_RUN_H
#define TRAIN_MOE_RUN_H

#include "checkpoint.h"
#include "cli.h"
#include "eval.h"
#include "generate.h"
#include "kernels/comm/comm.h"
#include "log.h"
#include "step.h"

typedef struct {
    const Args *args;
    Config config;
    Device device;
    Comm *comm;
    Model model;
    StateTensor *tensors; /* what a checkpoint holds */
    int64_t n_tensors;
    /* a training run has these too */
    Loader *loader;
    EvalSets val;
    Tokenizer *tokenizer; /* NULL: none found */
    int64_t document_token;
    Trainer trainer;
    Logger log;
    int lock_fd; /* of run.dir/lock; -1 */
    double started_s, saved_at_s;
    char last_checkpoint[CHECKPOINT_PATH_LEN]; /* "" before the first */
    bool is_fresh;        /* not resumed */
    char resume_note[3 * 768];
    ValReport last_val;
    bool has_val;
} Run;

/* Reads the configuration, chooses the device, plans and allocates the model. Bad input: DIE. `generate_len` positions for
 * generation, 0 = what the loop's samples need; `allocate` false only plans. */
void run_open_model(Run *r, const Args *args, const Launch *launch, int64_t generate_len, bool allocate);
/* Then, for training: data, log, lock, and the state of the run: fresh, or from a checkpoint. */
void run_open_training(Run *r);
/* Loads the weights that --checkpoint names and says so on stderr. */
void run_load_weights(Run *r);
void run_close(Run *r);

/* The block at the start. (banner.c) */
void banner_print(Run *r);
/* The memory plan and the parameters, by name. */
void banner_plan(Run *r);

/* Between steps. Each logs its line; a save that fails is a warning unless it is the last. */
void run_validate(Run *r);
void run_sample(Run *r);
void run_save(Run *r, bool is_last);
/* What is due after this step. */
void run_due(Run *r, const StepReport *report);

/* The commands beside train; each returns the exit code. */
int run_command_plan(const Args *args, const Launch *launch);
int run_command_eval(const Args *args, const Launch *launch);
int run_command_generate(const Args *args, const Launch *launch);

#endif
