/* A run: everything between the command line and the loop, opened in order and closed in reverse. Floor 5. */
#ifndef TRAIN_MOE_RUN_H
#define TRAIN_MOE_RUN_H

#include "checkpoint.h"
#include "choice.h"
#include "cli.h"
#include "device.h"
#include "eval.h"
#include "generate.h"
#include "kernels/comm/comm.h"
#include "log.h"
#include "report.h"
#include "saver.h"
#include "step.h"

enum { EXPERTS_NOTE_LEN = 256 };

typedef struct {
    const Args *args;
    Config config;
    Device device;
    char device_text[DEVICE_TEXT_LEN];
    Comm *comm;
    RankPart part; /* of the model, if it is pipelined */
    Model model;
    StateTensor *tensors; /* what a checkpoint holds */
    int64_t n_tensors;
    /* a training run has these too */
    Loader *loader;
    EvalSets val;
    ChoiceSets choice;
    Tokenizer *tokenizer; /* NULL: none found */
    int64_t document_token;
    Trainer trainer;
    Logger log;
    Saver saver;
    char saver_note[SAVER_NOTE_LEN];           /* how it saves */
    int lock_fd;                               /* of run.dir/lock; -1 */
    double started_s, saved_at_s;              /* the latter: when the last save began */
    char last_checkpoint[CHECKPOINT_PATH_LEN]; /* "" before the first */
    int64_t saved_step;                        /* its step; -1 before the first */
    bool owes_save;                            /* one was put off: it fell into a row of skipped updates */
    bool is_fresh;                             /* not resumed */
    char resume_note[3 * 768];
    char device_note[DEVICE_NOTE_LEN];   /* why bits differ from the checkpoint's run, or "" */
    char experts_note[EXPERTS_NOTE_LEN]; /* which rank has which experts, and what that makes of their loads; "" */
    bool moves_experts;              /* they may lie elsewhere than in the run that has saved: sums round otherwise */
    ValReport last_val, last_choice; /* of this process; their steps may differ */
    bool has_val, has_choice;
    ReportSample samples[PROMPTS_MAX]; /* the last ones */
    int n_samples;
    int64_t sample_step;
} Run;

/* Reads the configuration, chooses the device, plans and allocates the model. Bad input: DIE. `generate_len` positions
 * for generation, 0 = what the loop's samples need; `allocate` false only plans. */
void run_open_model(Run *r, const Args *args, const Launch *launch, int64_t generate_len, bool allocate);
/* f, or what nobody reads: rank 0 speaks for all. */
FILE *run_out(FILE *f);
/* Then, for training: data, log, lock, and the state of the run: fresh, or from a checkpoint. */
void run_open_training(Run *r);
/* Opens eval.choice; says on stderr where contexts do not fit. After log_init. */
void run_open_choice(Run *r);
/* The folder of the checkpoint that --checkpoint names, as rank 0 finds it, into path (CHECKPOINT_PATH_LEN); says so on
 * stderr. */
void run_find_weights(const Args *args, const Config *c, char *path);
/* Loads those weights. */
void run_load_weights(Run *r);
/* Are the architectures equal? Returns 0, or -1 with the first difference in err. */
int run_compare_model(const char *config_json, const char *path, const Config *now, char *err);
/* Weights of a Hugging Face folder; warns where its config.json says something else than the run's. (hf_commands.c) */
void run_init_from_hf(Run *r, const char *dir);
void run_close(Run *r);

/* The block at the start. (banner.c) */
void banner_print(Run *r);
/* The memory plan and the parameters, by name. */
void banner_plan(Run *r);

/* Before weights are loaded: parallel.placement, from the loads that their checkpoint has (place_experts.c). */
void run_place_experts(Run *r, const ExpertLoads *loads);
/* Expert rows did not fit into the plan of moe.capacity, in `what`: twice as many from now on. What does not fit into
 * the device ends the process. (room.c) */
void run_make_room(Run *r, const char *what);
/* Logs the steps that are reported now: those that are done, or, with `all`, the last one too. Too many skipped in a
 * row end the process. Makes room where expert rows did not fit: then the last steps are to be trained again. Returns
 * the skip of the last one reported. */
int run_reports(Run *r, bool all);
/* Validation, multiple choice, or both, into report, on all ranks; makes room where expert rows did not fit. Returns -1
 * with err if data cannot be read. */
int run_evaluate(Run *r, bool want_val, bool want_choice, ValReport *report, char *err);
/* Between steps, with every step reported. Each logs its line; a save that fails is a warning unless it is the last. */
void run_validate(Run *r, bool want_val, bool want_choice);
void run_sample(Run *r);
void run_forget_samples(Run *r);
void run_save(Run *r, bool is_last);
/* Logs a save that has ended meanwhile, or, with `wait`, the one that is being written. */
void run_saved(Run *r, bool wait);
/* The data cannot be read, err says why: reports what was trained, then ends the process, with exit 1 and the last good
 * checkpoint, or with exit 2 while there is none. */
void run_data_failed(Run *r, const char *err) __attribute__((noreturn));
/* Writes report.md into run.dir; a failure is a warning. (report.c) */
void run_report(Run *r, bool is_finished);
/* Before each step, and after the last: --profile begins or ends here, with nothing under way. */
void run_profile(Run *r);
/* What is due after the step queued last: reports, and what only happens at some steps. */
void run_due(Run *r);

/* The file of the tokenizer that the configuration, or the JSON beside its shards, names, into path (PATH_LEN); ""
 * where neither does. *document_token as the JSON completes the configuration. (commands.c) */
void run_find_tokenizer(const Config *c, char *path, int64_t *document_token);

/* train --overfit. Returns the exit code: EXIT_DONE if the batch was learnt by heart. (overfit.c) */
int run_overfit(const Args *args, const Launch *launch);

/* The commands beside train; each returns the exit code. */
int run_command_plan(const Args *args, const Launch *launch);
int run_command_eval(const Args *args, const Launch *launch);
int run_command_generate(const Args *args, const Launch *launch);
int run_command_export_hf(const Args *args, const Launch *launch);
int run_command_import_hf(const Args *args, const Launch *launch);
int run_command_check_data(const Args *args, const Launch *launch);

#endif
