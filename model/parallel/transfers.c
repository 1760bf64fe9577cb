/* What each rank sends and receives, derived from the lists of all. See schedule.h.
 *
 * The lists are run with the given times. A message belongs to the moment at which it has been
 * made; all messages of the pipeline are put in the order of those moments, ties by kind, micro-batch and stage. A rank
 * posts its own in this order, each behind the steps that have begun before its moment. Every rank's program is then a
 * part of one and the same sequence of events in which nothing comes before what it needs, so no cycle of waiting can
 * arise, with any real times. */
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "schedule.h"

/* Which step of which rank passes (micro, stage). */
typedef struct {
    int64_t *forward, *backward; /* [micro * n_stages + stage], -1 = none */
} StepIndex;

static StepIndex index_steps(const PipeSchedule *s) {
    const ScheduleShape *shape = &s->shape;
    const int64_t events = (int64_t)shape->M * shape->n_stages;
    StepIndex index = {(int64_t *)malloc((size_t)events * sizeof(int64_t)),
                       (int64_t *)malloc((size_t)events * sizeof(int64_t))};
    CHECK(index.forward && index.backward, "no memory for %lld events", (long long)events);
    for (int64_t i = 0; i < events; i++) index.forward[i] = index.backward[i] = -1;
    for (int r = 0; r < shape->P; r++)
        for (int64_t k = 0; k < s->rank[r].n; k++) {
            const PipeStep *step = &s->rank[r].step[k];
            const int64_t n = shape->n_stages, f = step->forward.micro, b = step->backward.micro;
            if (step_has_forward(step)) index.forward[f * n + schedule_stage(shape, r, step->forward.chunk)] = k;
            if (step_has_backward_input(step))
                index.backward[b * n + schedule_stage(shape, r, step->backward.chunk)] = k;
        }
    return index;
}

static int compare_transfers(const void *a, const void *b) {
    const Transfer *x = (const Transfer *)a, *y = (const Transfer *)b;
    if (x->time != y->time) return x->time < y->time ? -1 : 1;
    if (x->kind != y->kind) return x->kind < y->kind ? -1 : 1;
    return (x->micro > y->micro) - (x->micro < y->micro);
}

static void append(TransferList *list, Transfer x, int64_t room) {
    CHECK(list->n < room, "more than %lld transfers", (long long)room);
    list->transfer[list->n++] = x;
}

/* The message of one micro-batch from one place to another: both ends. */
static void add_message(TransferList *lists, int64_t room, TransferKind kind, int micro, Place from, int64_t from_step,
                        Place to, int64_t to_step, double time) {
    CHECK(from_step >= 0 && to_step >= 0, "micro-batch %d passes a stage that no step names", micro);
    const Transfer send = {true, kind, to.rank, from.chunk, micro, from_step, 0, time};
    const Transfer receive = {false, kind, from.rank, to.chunk, micro, to_step, 0, time};
    append(&lists[from.rank], send, room);
    append(&lists[to.rank], receive, room);
}

static void add_messages(const PipeSchedule *s, const Timeline *t, TransferList *lists, int64_t room) {
    const ScheduleShape *shape = &s->shape;
    const StepIndex index = index_steps(s);
    for (int micro = 0; micro < shape->M; micro++)
        for (int stage = 0; stage + 1 < shape->n_stages; stage++) {
            const Place low = schedule_place(shape, micro, stage), high = schedule_place(shape, micro, stage + 1);
            const int64_t i = (int64_t)micro * shape->n_stages + stage;
            if (low.rank == high.rank) continue;
            add_message(lists, room, TRANSFER_ACTIVATION, micro, low, index.forward[i], high, index.forward[i + 1],
                        t->spans[low.rank].end[index.forward[i]]);
            add_message(lists, room, TRANSFER_GRADIENT, micro, high, index.backward[i + 1], low, index.backward[i],
                        t->spans[high.rank].end[index.backward[i + 1]]);
        }
    free(index.forward);
    free(index.backward);
}

TransferList *transfers_make(const PipeSchedule *s, const StepTimes *times) {
    const ScheduleShape *shape = &s->shape;
    const int64_t room = 4 * (int64_t)shape->M * shape->n_chunks;
    char err[ERR_LEN];
    Timeline t;
    CHECK(schedule_simulate(&t, s, times, NULL, err) == 0, "%s", err);
    TransferList *lists = (TransferList *)calloc((size_t)shape->P, sizeof *lists);
    CHECK(lists, "no memory for the transfers");
    for (int r = 0; r < shape->P; r++) {
        lists[r].transfer = (Transfer *)malloc((size_t)room * sizeof(Transfer));
        CHECK(lists[r].transfer, "no memory for %lld transfers", (long long)room);
    }
    add_messages(s, &t, lists, room);
    for (int r = 0; r < shape->P; r++) {
        qsort(lists[r].transfer, (size_t)lists[r].n, sizeof(Transfer), compare_transfers);
        int64_t post = 0;
        for (int64_t i = 0; i < lists[r].n; i++) {
            while (post < s->rank[r].n && t.spans[r].start[post] < lists[r].transfer[i].time) post++;
            lists[r].transfer[i].post = post;
        }
    }
    timeline_free(&t, shape->P);
    return lists;
}

void transfers_free(TransferList *lists, int P) {
    if (!lists) return;
    for (int r = 0; r < P; r++) free(lists[r].transfer);
    free(lists);
}
