/* What the FP8 tensors of a block hold, counted while a layer runs: one table, a row a tensor. Floor 3.
 *
 * At the end of a phase the E4M3 tiles of rows that it has made are still there: those are counted (their transposes
 * hold the same numbers under other scales), and with phase attn the blocks of the weights. What this precision does
 * not have is not counted. Rows of the experts are those in use, with each expert's padding: zeros of scale 1. */
#ifndef TRAIN_MOE_OBSERVE_H
#define TRAIN_MOE_OBSERVE_H

#include "layer.h"

enum { OBSERVED_COUNT = 26 };

/* "xn", "dhs", "w_kv_b": the row's name in comments and in log.jsonl. */
const char *observed_name(int i);

/* Counts the tensors of a phase (IN_ATTN, IN_EXPERTS, IN_EXPERTS_BACK or IN_ATTN_BACK) that has just run, where the
 * layer is observed. */
void layer_observe(Layer *l, int phase);

#endif
