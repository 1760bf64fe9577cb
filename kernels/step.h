/* The three small structs that live on the device and change from step to step. Floor 1; valid C and C++.
 *
 * What changes from step to step is never a by-value argument of an op (a captured graph would freeze it): kernels read
 * StepParams, which one asynchronous copy fills at the head of the step. */
#ifndef TRAIN_MOE_STEP_H
#define TRAIN_MOE_STEP_H

#include <stdint.h>

enum { LOSSES_MAX = 5 }; /* depth 0, the main model, and up to four MTP depths */

/* Host -> device, once a step. Losses are sums over tokens inside a step; inv_tokens is applied once, at the update. */
typedef struct {
    int64_t step;      /* of this update, from 1 */
    double inv_tokens; /* 1 / (targets of depth 0 in the global batch), 0 = no targets: the update is skipped */
    double loss_scale[LOSSES_MAX]; /* [0] = 1; [k] = lambda / depths * N_0 / N_k: each depth is a mean over its own
                                      targets */
    double balance_scale;          /* balance_alpha * S: see router_backward */
    double lr, beta1, beta2, eps, weight_decay;
    double grad_clip;       /* bound of the global norm, 0 = off */
    double bias_speed;      /* gamma of the router bias */
    double skip_loss_above; /* an update whose loss or norm lies above is skipped; INFINITY = off */
    double skip_norm_above;
} StepParams;

enum {
    SKIP_NONE = 0,
    SKIP_NO_TARGETS,
    SKIP_LOSS_NOT_FINITE,
    SKIP_NORM_NOT_FINITE,
    SKIP_LOSS_SPIKE,
    SKIP_NORM_SPIKE,
    SKIP_OVERFLOW /* expert rows did not fit, in this step or one before: it will be trained again */
};

/* Device -> host, once a step; zeroed at the head of the step. */
typedef struct {
    double loss_sum[LOSSES_MAX]; /* sum of token losses (nats), by depth */
    double balance_sum;          /* sum over MoE layers and sequences of sum_i f_i P_i; 1 each when balanced */
    double overflow;             /* maps whose expert rows did not fit (MoeMap) */
    double grad_norm_sq;         /* of the sums, before inv_tokens */
    double grad_norm;            /* sqrt(grad_norm_sq) * inv_tokens: before clipping */
    double grad_scale;           /* what AdamW multiplies gradients with: inv_tokens * clip factor */
    int32_t skip;                /* SKIP_*: this update changes nothing */
    int32_t unused;
} StepStats;

/* Stays on the device for the life of the run, and in checkpoints. */
typedef struct {
    int64_t adam_t; /* updates applied: t of Adam's bias correction */
    int64_t skipped_total;
    int64_t skipped_in_a_row;
    int64_t has_overflow; /* no update until the host has made room and says 0; never in a checkpoint */
} UpdateState;

#endif
