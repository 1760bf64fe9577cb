/* report.md: a run on one page, for people: what, on which data, how good, what it writes, how fast, how long, what it
 * cost. Floor 5.
 *
 * Written into run.dir when a run ends, also when it stops early; the next process of the run writes it anew. What a
 * run has not (no validation, no samples, no price) is said or left out, and never makes it fail. */
#ifndef TRAIN_MOE_REPORT_H
#define TRAIN_MOE_REPORT_H

#include "data/config.h"
#include "log.h"
#include "model/params.h"
#include "model/state.h"

typedef struct {
    const char *prompt; /* borrowed */
    char *text;         /* malloc'd */
} ReportSample;

/* All borrowed. */
typedef struct {
    const Config *config;
    const RunState *state;
    bool is_finished;
    int64_t steps_total, tokens_total;
    ParamCount count;
    double flops_per_token;
    const char *data;        /* "1.31M tokens in 1 shard ..." */
    const char *device;      /* "cpu" */
    int n_devices;           /* that the run computes on: GPUs, or processes on a CPU */
    const ValReport *val;    /* the last validation, or NULL */
    const ValReport *choice; /* the last multiple-choice evaluation, or NULL */
    int64_t sample_step;
    int n_samples;
    const ReportSample *samples;
    const char *checkpoint; /* "" = none */
    const char *version;
} ReportFacts;

/* The page. malloc'd; the caller frees it. */
char *report_text(const ReportFacts *f);

#endif
