/* The part of the model that this rank trains, and how micro-batches go through it, by the configuration. Floor 5. */
#ifndef TRAIN_MOE_PART_H
#define TRAIN_MOE_PART_H

#include "data/config.h"
#include "model/parallel/schedule.h"

/* The schedule that the configuration names. */
ScheduleKind part_schedule(const Config *c);

/* Do micro-batches go through a pipeline, or forward beside backward? Else one after the other: on one pipeline rank
 * without tokens to exchange there is nothing to hide, and 1f1b, zb1p and dualpipe are just that. */
bool part_is_pipelined(const Config *c, const Mesh *mesh);

/* A step has a multiple of so many micro-batches: of each rank one (or what the schedule asks for). For the functions
 * of lr.h: their `ranks`. n_data: ranks that take samples. */
int64_t part_batch_unit(const Config *c, int64_t n_data);

/* The part of a pipelined rank, for the largest batch. What does not go together: DIE. */
RankPart part_make(const Config *c, const Mesh *mesh, int64_t logits_bytes);
/* That of one micro-batch, whatever the batch is: for who trains nothing. */
RankPart part_make_forward(const Config *c, const Mesh *mesh, int64_t logits_bytes);

#endif
