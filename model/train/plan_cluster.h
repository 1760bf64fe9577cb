/* train_moe plan: many GPUs. Floor 5. */
#ifndef TRAIN_MOE_PLAN_CLUSTER_H
#define TRAIN_MOE_PLAN_CLUSTER_H

#include "plan.h"
#include "plan_schedule.h"

/* Of a world of more than one; --gpu's rates, or the H200's. The schedule is the pipeline's; without a pipeline
 * micro-batches follow each other. */
void plan_cluster_make(Plan *p, const PipelinePlan *pipeline);
void plan_cluster_print(const Plan *p, Logger *l);

#endif
