/* Pipeline schedules as data: for each rank a flat list of steps. Pure functions; no MPI, no device. Floor 4.
 *
 *     schedule_make      the lists            schedule_check       are they complete, causal, free of deadlock
 *     transfers_make     what each rank sends and receives, and when      schedule_simulate, schedule_peak, ...
 *
 * A model is cut into `n_stages` stages. A micro-batch runs forward through stages 0, 1, ..., and backward the other
 * way. Each rank holds one or two of the stages, its chunks:
 *
 *     gpipe, 1f1b, zb1p   P stages    rank r holds stage r
 *     interleaved         2P stages   rank r holds stages r and P + r
 *     dualpipe            P stages    rank r holds stages r and P-1-r; the first half of the micro-batches enters at
 *                                     rank 0, the second half at rank P-1 and runs the other way; each stage is held
 *                                     twice, so its gradients are summed over ranks r and P-1-r
 *     dualpipev           2P stages   rank r holds stages r and 2P-1-r: down the ranks and back, one direction
 *     paired              1 stage     P = 1: forward of one micro-batch beside backward of the one before
 *
 * Chunk 0 of rank r is stage r in all of them; so a chunk of dualpipe is a direction. Embedding and head: stages.h. */
#ifndef TRAIN_MOE_SCHEDULE_H
#define TRAIN_MOE_SCHEDULE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/shape.h"

typedef enum {
    SCHEDULE_PAIRED,
    SCHEDULE_GPIPE,
    SCHEDULE_1F1B,
    SCHEDULE_INTERLEAVED,
    SCHEDULE_ZB1P,
    SCHEDULE_DUALPIPE,
    SCHEDULE_DUALPIPEV,
    SCHEDULE_COUNT
} ScheduleKind;

typedef struct {
    ScheduleKind kind;
    int P, M;     /* ranks of the pipeline; micro-batches of a step, of both directions together */
    int n_chunks; /* stages that a rank holds */
    int n_stages;
} ScheduleShape;

typedef enum {
    STEP_FORWARD,
    STEP_BACKWARD,        /* input- and weight-backward */
    STEP_BACKWARD_INPUT,  /* leaves its weight-backward for later */
    STEP_BACKWARD_WEIGHT, /* of an input-backward before */
    STEP_PAIR,            /* a forward and a full backward, overlapped (overlap.h) */
    STEP_KINDS
} StepKind;

/* One micro-batch on one of the rank's chunks; {-1, -1} = none. micro is one of the whole step's M. */
typedef struct {
    int chunk, micro;
} Work;

typedef struct {
    StepKind kind;
    Work forward;  /* of FORWARD and PAIR */
    Work backward; /* of all others and PAIR */
} PipeStep;

typedef struct {
    int64_t n;
    PipeStep *step;
} StepList;

typedef struct {
    ScheduleShape shape;
    StepList *rank; /* P lists */
} PipeSchedule;

/* "1f1b"; what it is, in a line; model copies that its ranks hold together (2 for dualpipe). */
const char *schedule_name(ScheduleKind kind);
const char *schedule_text(ScheduleKind kind);
int schedule_copies(ScheduleKind kind);
/* Kind of a name, or -1. */
int schedule_find(const char *name);

/* Checks that the schedule runs on P ranks with M micro-batches. Returns 0, or -1 with one line in err and a hint
 * (ERR_LEN each, may be NULL). */
int schedule_shape(ScheduleShape *s, ScheduleKind kind, int P, int64_t M, char *err, char *hint);

/* M has to be a multiple of this on P ranks. */
int schedule_multiple(ScheduleKind kind, int P);

/* The lists of all ranks of a checked shape; schedule_free releases them. */
PipeSchedule schedule_make(ScheduleShape shape);
void schedule_free(PipeSchedule *s);

/* Which stage a rank's chunk is; -1: no such rank or chunk. */
int schedule_stage(const ScheduleShape *s, int rank, int chunk);
/* Where a micro-batch passes a stage. */
typedef struct {
    int rank, chunk;
} Place;
Place schedule_place(const ScheduleShape *s, int micro, int stage);

bool step_has_forward(const PipeStep *step);
/* The backward that takes a gradient in and hands one on: BACKWARD, BACKWARD_INPUT, PAIR. */
bool step_has_backward_input(const PipeStep *step);

/* "F3", "B3", "I3", "W3", "F5&B3"; letters of chunk 1 are small: "f3". Into buf, returned. */
enum { STEP_TEXT_LEN = 48 };
const char *step_text(char *buf, size_t buf_len, const PipeStep *step);

/* Durations of the steps of an average stage, any unit; overlap_step_times (overlap.h) has some. */
typedef struct {
    double forward, backward, backward_input, backward_weight, pair;
} StepTimes;

/* ---- what a rank sends and receives (transfers.c) ---------------------------------------------------------------- */

typedef enum { TRANSFER_ACTIVATION, TRANSFER_GRADIENT } TransferKind;

/* (T, D) of the residual stream, or its gradient, between two neighbouring stages on different ranks. */
typedef struct {
    bool is_send;
    TransferKind kind;
    int peer;  /* rank in the pipeline */
    int chunk; /* of this rank: whose output is sent, or whose input is received */
    int micro;
    int64_t step; /* of this rank: makes what is sent, or takes what is received */
    int64_t post; /* posted when this many steps have been launched: step < post for sends, post <= step for receives */
    double time;  /* in the timeline that orders them: equal at both ends */
} Transfer;

typedef struct {
    int64_t n;
    Transfer *transfer;
} TransferList;

/* One list a rank (P of them), in the order of posting, which is also their order on the stream: one order for the
 * whole pipeline, that in which the messages are made when the lists run with `times` (then a fixed rule). All ranks
 * must give equal times; overlap_step_times of the configuration are.
 *
 * Posted before the steps they name, they never deadlock, whatever the real times are: not as blocking sends without
 * buffers one at a time, not as one group of all that have equal `post`. A send is posted right behind its step; a
 * receive often before steps that do not need it. So a step waits for its own receives only, and transfers have a queue
 * of their own: with `times` as they are no step is then later than its inputs. (Where each step waits for all that was
 * posted, 1f1b and the two dualpipes lose nothing, zb1p up to a quarter.)
 *
 * A stage whose neighbour is on the same rank (the turn of dualpipev) hands over without a transfer. The caller frees
 * with transfers_free. The lists must be complete (CHECK). */
TransferList *transfers_make(const PipeSchedule *s, const StepTimes *times);
void transfers_free(TransferList *lists, int P);

/* ---- checker (schedule_check.c) ---------------------------------------------------------------------------------- */

/* Every micro-batch forward once and backward once (whole, or input then weight) on every stage, at the place of
 * schedule_place, after what it needs; every message sent once and received once by the right ranks, after what makes
 * it and before what takes it; and the lists run to their end with blocking sends that wait for their receive. Returns
 * 0, or -1 with one line in err that names rank and step. */
int schedule_check(const PipeSchedule *s, const TransferList *transfers, char *err);

/* ---- time and memory (schedule_time.c) --------------------------------------------------------------------------- */

typedef struct {
    double *start, *end; /* of the steps of a list */
} StepSpans;

typedef struct {
    double makespan;            /* end of the last step of any rank */
    double *busy;               /* (P) sum of a rank's steps; the makespan less this is its bubble */
    double bubble, mean_bubble; /* the largest and the mean of the ranks' */
    StepSpans *spans;           /* (P) */
} Timeline;

/* Runs the lists: a step starts when the one before it on its rank has ended, and what its micro-batches need from the
 * neighbouring stages (transfers take no time). scale (n_stages, or NULL = all 1) multiplies the times of a stage; a
 * pair takes the mean of its two stages. Returns 0, or -1 with err if the lists never end. timeline_free releases. */
int schedule_simulate(Timeline *t, const PipeSchedule *s, const StepTimes *times, const double *scale, char *err);
void timeline_free(Timeline *t, int P);

/* The same with what each step takes by itself, and what a tensor takes from one rank to another; seconds, or any unit.
 * forward_stage, backward_stage: -1 where the step has none. */
typedef struct {
    double (*took)(const void *arg, StepKind kind, int forward_stage, int backward_stage);
    const void *arg;
    double transfer;
} StepCosts;
int schedule_simulate_costs(Timeline *t, const PipeSchedule *s, const StepCosts *costs, char *err);

/* The bubble of the rank that waits longest, with the times of one of its chunks and enough micro-batches, in closed
 * form and as text: "(P-1)(F+B)". Exact; for dualpipe and dualpipev if I = F and B <= I+W. If B = I+W they are the
 * published ones: zb1p (P-1)(F+B-2W); dualpipe and dualpipev (P/2-1)(F&B+B-3W), P the number of stages. */
double schedule_bubble(const ScheduleShape *s, const StepTimes *times);
const char *schedule_bubble_text(ScheduleKind kind);

/* The most that a rank holds at once. A pair holds both of its micro-batches; backward or input-backward ends a life.
 * Divide by n_chunks = the part of a rank's layers that one of them covers. */
typedef struct {
    int live, live_of[CHUNKS_MAX];       /* micro-batches with activations, all chunks and each */
    int pending, pending_of[CHUNKS_MAX]; /* input-backwards whose weight-backward has not ended */
    int inbox;                           /* received (posted) and not yet taken; 0 without transfers */
} SchedulePeak;

/* transfers: the rank's, or NULL. */
SchedulePeak schedule_peak(const PipeSchedule *s, int rank, const TransferList *transfers);
/* The published peak of live micro-batches of the fullest rank: P for 1f1b, P+1 for dualpipe. */
int schedule_peak_published(const ScheduleShape *s);

#endif
