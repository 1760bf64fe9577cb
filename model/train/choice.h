/* Multiple choice: which continuation of a context does the model find likeliest? Floor 5.
 *
 *   score of a choice = mean over its ids of -ln p(id | context, ids before it)        the lowest is the answer
 *
 * the length-normalised likelihood of llm.c and of lm-evaluation-harness' acc_norm, by ids. Equal scores: the first.
 *
 * Context and choice lie behind one another in sequences of a micro-batch, as many as fit; each attends to itself alone
 * and its positions start at 0. So a score does not depend on what else is in the file, nor on the micro-batch. */
#ifndef TRAIN_MOE_CHOICE_H
#define TRAIN_MOE_CHOICE_H

#include "data/choice_file.h"
#include "log.h"
#include "model/model.h"

typedef struct {
    int n;
    ChoiceFile file[SOURCES_MAX];
    char name[SOURCES_MAX][NAME_LEN];
    int64_t n_cut[SOURCES_MAX]; /* examples whose context loses its beginning to train.seq_len */
} ChoiceSets;

/* Opens eval.choice. An example whose longest choice leaves no room for a context in train.seq_len is refused. Returns
 * -1 with err and hint. */
int choice_open(ChoiceSets *c, const Config *config, char *err, char *hint);
void choice_close(ChoiceSets *c);

/* nats[example * CHOICES_MAX + choice] = sum over the choice's ids of -ln p, with the present weights; logger (or NULL)
 * shows the progress as `name`. Ranks share the micro-batches, and all have the scores. A context that does not fit
 * train.seq_len with the example's longest choice loses its beginning, the same for all choices. */
void choice_score(const ChoiceFile *f, Model *m, double *nats, Logger *logger, const char *name);

/* What the scores say. */
void choice_judge(const ChoiceFile *f, const double *nats, ChoiceResult *result);

/* Answers all sets, fills the report's choices and adds to its seconds. */
void choice_run(const ChoiceSets *c, Model *m, ValReport *report, Logger *logger);

#endif
