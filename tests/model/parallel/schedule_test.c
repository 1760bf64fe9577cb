/* See schedule_test.h. */
#include "tests/model/parallel/schedule_test.h"

const StepTimes round_times = {1, 2, 1, 1, 3};

PipeSchedule make_schedule(ScheduleKind kind, int P, int M) {
    ScheduleShape shape;
    char err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(schedule_shape(&shape, kind, P, M, err, hint) == 0, "%s", err);
    return schedule_make(shape);
}
