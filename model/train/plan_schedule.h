/* train_moe plan: the pipeline. Floor 5. */
#ifndef TRAIN_MOE_PLAN_SCHEDULE_H
#define TRAIN_MOE_PLAN_SCHEDULE_H

#include "cli.h"
#include "kernels/base/check.h"
#include "log.h"
#include "model/parallel/schedule.h"
#include "model/shape.h"

enum { PIPELINE_TEXT_LEN = 160 };

typedef struct {
    bool is_asked; /* more than one rank, or one of --draw, --schedule, --pp, --micro-batches; else all below is void */
    const ModelShape *model; /* borrowed */
    int P;
    int64_t M;              /* micro-batches of one pipeline */
    double comm;            /* exchange with experts, in units of a forward's compute */
    bool is_chosen;         /* the schedule that --schedule or the configuration names runs on P, M: */
    ScheduleShape schedule; /* that one */
    char why_not[ERR_LEN], hint[ERR_LEN];
    const char *drawing; /* written, or NULL */
    char title[PIPELINE_TEXT_LEN];
} PipelinePlan;

/* `ranks`: those that take samples, of all data-parallel and expert-parallel copies of the pipeline; they decide how
 * many micro-batches a pipeline has, if --micro-batches does not. Writes --draw. What is asked for and cannot be: DIE.
 */
PipelinePlan plan_schedule_make(const Config *c, const ModelShape *s, const Args *args, int64_t ranks);
/* The schedules beside each other (bubble as published and as simulated, memory), and the stages of the chosen one.
 * Nothing if nothing was asked. */
void plan_schedule_print(const PipelinePlan *p, Logger *l);

#endif
