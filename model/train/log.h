/* What a run says: the banner, one aligned line per step, val, save, warn, sample, done; and log.jsonl. Floor 5.
 *
 *     step    10/450 | 20.5K | loss 6.1120 | mtp 6.3021 | gnorm  1.92 | lr 1.00e-03 | maxvio 0.31 | 508 ms | eta 3m43s
 *
 * The first word is the kind, so grep works; widths are fixed; units stand in the line. On a terminal the least
 * important columns are left out where it is narrow (columns.h), and a bar shows the way; elsewhere a line starts with
 * its UTC time. stdout has the lines, stderr the bar and warnings. Quiet prints warnings and the last line only.
 * log.jsonl gets every step with all digits, printed or not; a record that cannot be written is warned about once and
 * never ends the run.
 *
 * On a GPU the line has `30.0k tok/s/gpu | 515 TF 52.1%`: FLOPs of the model (shape.h: causal, active experts, MTP
 * and head; nothing for what is recomputed) a second, and their share of the GPU's dense BF16 peak, in every precision.
 * Both go by tokens trained on over the time of the steps. log.jsonl has them as tflops and mfu (0 to 1).
 *
 * The logger receives numbers and asks nobody: one thread of one rank calls it. What a report holds:
 *   losses  sum of token losses of the whole step (all micro-batches, all ranks) / targets, nats per token
 *   gnorm   norm of the whole gradient before clipping
 *   lr      the rate that this step's update used
 *   maxvio  largest load of an expert / mean load - 1
 *   rank_load  largest load of an expert rank / mean load */
#ifndef TRAIN_MOE_LOG_H
#define TRAIN_MOE_LOG_H

#include "bar.h"
#include "columns.h"
#include "data/config.h"
#include "kernels/gpu_health.h"
#include "kernels/step.h"
#include "log_file.h"
#include "model/observe.h"
#include "speed.h"

/* What a token costs, and what the device could do. */
typedef struct {
    double flops_per_token; /* of the model, forward and backward; 0 = not told: no TF */
    bool is_gpu;            /* "tok/s/gpu", and TF on the line */
    double peak_flops;      /* of the GPU (peak.h); 0 = not known: no utilisation */
} LogRate;

typedef struct {
    FILE *out, *err_out; /* borrowed */
    bool is_quiet;
    bool out_is_terminal, err_is_terminal;
    int64_t every_steps;
    int64_t step, steps_total, tokens; /* of the last report: the front of lines that have no own */
    double worst_z;                    /* largest z-score since the last step line, and whose it is */
    bool worst_is_norm;
    bool has_warned_of_file;
    LogRate rate;
    bool was_throttled; /* since the last step line, as is ecc_errors */
    int64_t ecc_errors, ecc_seen;
    double data_wait_s; /* since the last step line */
    Speed speed;
    Bar bar;
    LogFile file;
} Logger;

/* A logger without a file. every_steps is log.every_steps; out and err_out are stdout and stderr except in tests. */
void log_init(Logger *l, int64_t every_steps, bool is_quiet, FILE *out, FILE *err_out);

void log_set_rate(Logger *l, LogRate rate);

typedef struct {
    const char *dir;
    int64_t step, tokens; /* where the run stands: 0, or what the checkpoint says */
    int64_t steps_total;
    const char *commit;
    const char *config_json; /* the effective configuration */
} LogRun;

/* Opens dir/log.jsonl behind that step (log_file_open: cut back on a resume, an earlier file kept aside at step 0) and
 * writes the record of this process with format version and start time. Returns -1 with err. */
int log_open(Logger *l, const LogRun *run, char *err);
void log_close(Logger *l);

/* "train_moe 0.1.0 (...)   2026-11-30 22:10:05 UTC". */
void log_title(Logger *l, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* "model      tiny: 1.94M parameters": the word in 10 columns; "" continues the line before. */
void log_banner(Logger *l, const char *word, const char *fmt, ...) PRINTF_LIKE(3, 4);

/* -------------------------------------------------------------------------------------------------------- steps */

/* Time of a step that the ranks spend on their own part, without waiting for each other. */
typedef struct {
    int n; /* ranks; 0 = one, and nothing to tell */
    double least_ms, median_ms, most_ms;
    int slowest;
    char host[64]; /* of the slowest */
} RankTimes;

typedef struct {
    int64_t step, steps_total;    /* from 1 */
    int64_t tokens, tokens_total; /* trained on, this step included; of the whole run, 0 = no forecast */
    int n_losses;                 /* 1 + MTP depth */
    double loss[LOSSES_MAX];      /* [0] the main model, [k] MTP depth k */
    double balance;               /* mean over MoE layers and sequences of sum_i f_i P_i; 1 = balanced */
    double gnorm, lr;
    int skip; /* SKIP_* */
    double loss_z, norm_z;
    double maxvio, maxvio_mean; /* of the worst MoE layer, and the mean over layers (maxvio_of_layers) */
    int n_layers, n_experts;    /* MoE layers, MTP's included; 0 = no columns and members about balance */
    const int32_t *load;        /* (n_layers, n_experts) tokens an expert got in this step; NULL: not recorded */
    const float *bias;          /* (n_layers, n_experts) router biases after this step; NULL: not recorded */
    int n_blocks;
    const TileStats
        *fp8; /* (n_blocks, OBSERVED_COUNT) what FP8 tensors held in the first micro-batch; NULL: not counted */
    bool has_hash;
    uint64_t hash;       /* of the parameters after this step */
    double step_ms;      /* wall time of this step; evaluation, samples and saves excluded */
    double data_wait_ms; /* of it, waiting for data */
    int64_t tokens_in_step;
    bool has_gpu;
    GpuHealth gpu; /* after this step */
    RankTimes ranks;
    int n_expert_ranks;               /* that share the experts; 0 or 1 = no members about their loads */
    double rank_load, rank_load_mean; /* of the worst layer, and the mean over layers (loads_balance) */
} StepReport;

/* Records the step; prints it if it is the first, the last, a multiple of every_steps or skipped. Time and tok/s on the
 * line are means since the last such line, a spike the largest since then (a z-score above 4); "data 12 %" stands there
 * if that much of the time since then went into waiting for data, and it was 5 % or more; eta goes by the last 20.
 * `throttle` (heat, a power brake) and `ecc N` (uncorrectable memory errors of this process) stand behind it if a
 * reading of the GPU since the last line had them, or more of them. */
void log_step(Logger *l, const StepReport *r);

/* The record "fp8" of a step whose report has it: for each layer, by the name of the tensor (model/observe.h),
 *   amax        largest |value|
 *   zero, subnormal, saturated   shares of the values: code 0, below 2^-6, 448. What was flushed is among the zeros.
 *   nan         values
 *   scales      [first exponent, then how many scales have it, the next one, ...], exponent = floor(log2(scale))
 * Several ranks: of rank 0's part. One warning names the worst tensor, with NaN or with more than 5 % of its values at
 * 448: scales follow the largest value of each tile, so few can be that large unless a scale is wrong. */
void log_fp8(Logger *l, const StepReport *r);

/* "loss not finite", for SKIP_*; "" for none. */
const char *skip_reason(int skip);

/* max / mean - 1 of the loads of n experts; 0 when nobody got anything. */
double maxvio(const int32_t *load, int n);
/* Over layers: the worst and the mean. Both 0 without layers. */
void maxvio_of_layers(const int32_t *load, int n_layers, int n_experts, double *worst, double *mean);

/* -------------------------------------------------------------------------------------------------------- the rest */

typedef struct {
    char name[NAME_LEN];
    double loss;            /* nats per token */
    double bytes_per_token; /* 0 = not known: then nothing is said per byte */
    const char *comparison; /* "bigram 2.48, 3-gram 1.91" in nats a byte, or NULL; borrowed */
} ValSet;

/* A multiple-choice set; choice.h. */
typedef struct {
    char name[NAME_LEN];
    int64_t n_examples;
    double accuracy;        /* by the mean over a choice's ids */
    double accuracy_by_sum; /* by their sum: longer choices are less likely */
    double label_nats;      /* the right choice's nats per id, mean over examples: moves before accuracy does */
    double chance;          /* accuracy of guessing */
} ChoiceResult;

typedef struct {
    int64_t step, steps_total, tokens;
    int n_sets;
    ValSet sets[SOURCES_MAX];
    int n_choices;
    ChoiceResult choices[SOURCES_MAX];
    bool in_full; /* perplexity, and what else explains the numbers, on the line too */
    int64_t tokens_evaluated;
    double overflow; /* maps of expert rows that did not fit: if any, the numbers are void */
    double seconds;
    bool is_best; /* the first set's loss is the lowest so far */
} ValReport;
void log_val(Logger *l, const ValReport *r);

typedef struct {
    int64_t step, steps_total, tokens;
    const char *name; /* "step_00001500" */
    int64_t bytes;
    uint64_t hash;    /* of the parameters */
    double waited_s;  /* training stood still */
    double on_disk_s; /* until all was on the disk, in the background; negative: the run waited for all of it */
} SaveReport;
void log_save(Logger *l, const SaveReport *r);

/* One line on stderr, also in log.jsonl. */
void log_warn(Logger *l, int64_t step, const char *fmt, ...) PRINTF_LIKE(3, 4);

/* One generated text: control characters and line ends are made harmless on the line, all kept in log.jsonl. */
void log_sample(Logger *l, int64_t step, const char *prompt, const char *text);

/* The last line: `val` is the last evaluation or NULL, wall_s the seconds of training over all processes of the run,
 * hint what to do now. is_finished false writes "stop" instead of "done": stopped early and saved. */
void log_done(Logger *l, bool is_finished, const ValReport *val, double wall_s, const char *hint);

/* Moves the bar inside something longer than a step: "val austen", part `done` of `total`. */
void log_progress(Logger *l, const char *what, int64_t done, int64_t total);

#endif
