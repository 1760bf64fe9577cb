/* The pipeline's executor: one loop that runs a rank's flat list of steps. Floor 4.
 *
 * The lists are data (schedule.h), as are the transfers between them (transfers_make) and the order of phases inside a
 * step (overlap.h); this is what happens for each entry. All ranks of a pipeline call the same functions with the same
 * numbers. Everything is queued: nobody waits but for events, and a Comm that needs the host. */
#ifndef TRAIN_MOE_PIPELINE_H
#define TRAIN_MOE_PIPELINE_H

#include "model/passage.h"
#include "schedule.h"

/* What `rank` of the pipeline holds for steps of at most `shape.M` micro-batches, of the model that s is: its stages,
 * slots for as many micro-batches as its list has under way, tensors between stages. Returns 0, or -1 with err. */
int pipeline_part(RankPart *part, const ScheduleShape *shape, int rank, const ModelShape *s, char *err);

typedef struct Pipeline Pipeline;

/* For a model that was planned with such a part; model_forward without gradients goes through the stages as long as it
 * is open. malloc'd; pipeline_close (NULL is fine) releases it. */
Pipeline *pipeline_open(Model *m, ScheduleKind kind);
void pipeline_close(Pipeline *p);

/* Forward and backward of micro-batches 0 .. n - 1, whose tokens are on the device (model_set_batch_at): adds losses,
 * counts and gradients. n is at most the part's; of a schedule that takes so many (CHECK). */
void pipeline_run(Pipeline *p, int n);

#endif
