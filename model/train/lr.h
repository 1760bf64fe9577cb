/* What changes over a run by plan: learning rate, batch size, bias speed, MTP weight, and how long the run is. Floor 5.
 *
 * Pure functions of the configuration and of where the run stands: `step` is the number of the update, from 1, and
 * `tokens` are the tokens trained on before it (RunState.tokens at the head of the step). A resumed run therefore
 * continues any schedule without state of its own. `ranks` are the ranks that take samples (DP x EP). */
#ifndef TRAIN_MOE_LR_H
#define TRAIN_MOE_LR_H

#include "data/config.h"

/* Sequences of the step that starts after `tokens`: train.global_batch_size, between two points rounded to the nearest
 * multiple of micro_batch_size x ranks, at least one such multiple. */
int64_t batch_at(const Config *c, int64_t tokens, int64_t ranks);

/* Every point of the batch schedule must be a multiple of micro_batch_size x ranks. Returns 0, or -1 with one line in
 * err and the nearest fitting values in hint (ERR_LEN each). */
int batch_check(const Config *c, int64_t ranks, char *err, char *hint);

/* The length of the whole run, from train.steps or train.tokens. The last step is the first that reaches the budget, so
 * `tokens` may exceed train.tokens by less than a batch. Counts beyond int64 stay at INT64_MAX. */
typedef struct {
    int64_t steps, tokens; /* of the whole run */
    int64_t
        tokens_at_peak; /* tokens before the step with the full rate: number lr_warmup_steps, or 1 without warm-up */
    int64_t tokens_at_last; /* tokens before the last step */
} RunLength;
RunLength run_length(const Config *c, int64_t ranks);

/* Learning rate of one step.
 *
 * Warm-up, W = lr_warmup_steps: step s < W has s/W of what follows; so step 1 has lr/W (never 0) and step W the peak.
 *
 * train.lr a number: after step W (or 1) it goes from lr to lr_final, which the last step has exactly. With p the share
 * of the way done, in the unit of the budget (steps, or tokens if train.tokens is given):
 *
 *   constant  lr
 *   linear    lr_final + (lr - lr_final) (1 - p)
 *   cosine    lr_final + (lr - lr_final) (1 + cos(pi p)) / 2
 *   wsd       lr, then over the last lr_decay_fraction of the budget lr_final + (lr - lr_final) (1 - sqrt(p)), with p
 *             from there
 *
 * train.lr a list of points: their value at `tokens`, joined by lr_shape; lr_final has no say. */
double lr_at(const Config *c, const RunLength *length, int64_t step, int64_t tokens);

/* Step of the router bias (0 with the gates of V2, which have none), and weight of the MTP loss. */
double bias_speed_at(const Config *c, int64_t tokens);
double mtp_weight_at(const Config *c, int64_t tokens);

#endif
