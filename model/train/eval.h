/* Validation: mean token loss over named sets. Floor 5.
 *
 * A set is walked once in file order, always the same tokens; its loss is the sum of token losses over the number of
 * tokens, so it does not depend on the micro-batch. Training's data position is not touched. */
#ifndef TRAIN_MOE_EVAL_H
#define TRAIN_MOE_EVAL_H

#include "data/loader.h"
#include "log.h"
#include "model/model.h"

typedef struct {
    int n;
    Loader *loader[SOURCES_MAX];
    char name[SOURCES_MAX][NAME_LEN];
    double bytes_per_token[SOURCES_MAX]; /* 0 = not known */
    char ladder[SOURCES_MAX][128];       /* "bigram 2.48, 3-gram 1.91" in nats a byte, or "" */
} EvalSets;

/* Opens data.val, for one of n_ranks ranks that take micro-batches in turn. Returns -1 with err and hint. */
int eval_open(EvalSets *e, const Config *c, int64_t n_ranks, char *err, char *hint);
void eval_close(EvalSets *e);

/* Runs all sets with the present weights, each shared among the ranks, and fills report's sets, tokens_evaluated and
 * seconds, equal on all ranks; adds to report's overflow, with which the losses are void. logger (or NULL) shows the
 * progress. Returns -1 with err if data cannot be read. */
int eval_run(EvalSets *e, Model *m, ValReport *report, Logger *logger, char *err);

/* Writes the logits of the main model over a micro-batch of the evaluation's size as a safetensors file: "logits"
 * (B, S, V) F32 and "tokens" (B, S) I32, padding sequences left out. Returns -1 with err; then there is no file.
 * (dump_logits.c) */
int dump_logits(Model *m, const MicroBatch *mb, const char *path, char *err);

#endif
