/* What the tests of schedules share. */
#ifndef TRAIN_MOE_TESTS_SCHEDULE_TEST_H
#define TRAIN_MOE_TESTS_SCHEDULE_TEST_H

#include "model/parallel/overlap.h"
#include "tests/test.h"

/* F 1, I 1, W 1, B 2, F&B 3 */
extern const StepTimes round_times;

/* A schedule that fits its shape (else the test ends). */
PipeSchedule make_schedule(ScheduleKind kind, int P, int M);

#endif
