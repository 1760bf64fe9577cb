/* What ranks send and receive: by hand, and that one order for all costs nothing. */
#include <stdlib.h>

#include "tests/model/parallel/schedule_test.h"

TEST(schedule_transfers_by_hand) {
    PipeSchedule s = make_schedule(SCHEDULE_1F1B, 2, 2);
    TransferList *t = transfers_make(&s, &round_times);
    /* rank 0: F0 F1 B0 B1; rank 1: F0 B0 F1 B1. F0 ends at 1, F1 at 2; rank 1's B0 at 4, its B1 at 7. */
    static const Transfer expected[2][4] = {
        {{true, TRANSFER_ACTIVATION, 1, 0, 0, 0, 1, 1},
         {true, TRANSFER_ACTIVATION, 1, 0, 1, 1, 2, 2},
         {false, TRANSFER_GRADIENT, 1, 0, 0, 2, 2, 4},
         {false, TRANSFER_GRADIENT, 1, 0, 1, 3, 3, 7}},
        {{false, TRANSFER_ACTIVATION, 0, 0, 0, 0, 0, 1},
         {false, TRANSFER_ACTIVATION, 0, 0, 1, 2, 1, 2},
         {true, TRANSFER_GRADIENT, 0, 0, 0, 1, 2, 4},
         {true, TRANSFER_GRADIENT, 0, 0, 1, 3, 4, 7}},
    };
    for (int r = 0; r < 2; r++) {
        EXPECT_EQ(t[r].n, 4);
        for (int64_t i = 0; i < t[r].n && i < 4; i++) {
            const Transfer *x = &t[r].transfer[i], *e = &expected[r][i];
            EXPECT(x->is_send == e->is_send && x->kind == e->kind && x->peer == e->peer && x->chunk == e->chunk &&
                       x->micro == e->micro && x->step == e->step && x->post == e->post && x->time == e->time,
                   "rank %d, transfer %lld: %s %d of micro-batch %d, step %lld, post %lld, time %g", r, (long long)i,
                   x->is_send ? "send" : "receive", x->kind, x->micro, (long long)x->step, (long long)x->post, x->time);
        }
    }
    transfers_free(t, 2);
    schedule_free(&s);
}

TEST(schedule_transfers_of_a_pair_and_a_turn) {
    PipeSchedule s = make_schedule(SCHEDULE_DUALPIPEV, 2, 4);
    TransferList *t = transfers_make(&s, &round_times);
    /* Stages 0 1 2 3 on ranks 0 1 1 0: 0-1 and 2-3 cross, 1-2 does not; 2 x 4 messages each way, both ends. */
    EXPECT(t[0].n == 16 && t[1].n == 16, "%lld, %lld", (long long)t[0].n, (long long)t[1].n);
    int in_pairs = 0;
    for (int64_t i = 0; i < t[0].n; i++) in_pairs += s.rank[0].step[t[0].transfer[i].step].kind == STEP_PAIR;
    EXPECT(in_pairs > 0, "no pair of the first rank talks");
    transfers_free(t, 2);
    schedule_free(&s);
}

/* ---- posting in order costs nothing ------------------------------------------------------------------------------ */

/* A run in which each rank's transfers pass one after the other, each when both ends have come to it and its step has
 * ended; a step waits for its own receives. */
typedef struct {
    const PipeSchedule *s;
    const TransferList *t;
    double duration[STEP_KINDS];
    double *step_end[16], *passed_at[16]; /* of the rank's steps and transfers */
    int64_t step[16], transfer[16];       /* next */
    double queue_free[16];
} Queues;

static bool pass_transfer(Queues *q, int r) {
    if (q->transfer[r] == q->t[r].n) return false;
    const Transfer *x = &q->t[r].transfer[q->transfer[r]];
    const int peer = x->peer, sender = x->is_send ? r : peer;
    if (q->transfer[peer] == q->t[peer].n) return false;
    const Transfer *y = &q->t[peer].transfer[q->transfer[peer]], *send = x->is_send ? x : y;
    if (y->peer != r || y->micro != x->micro || y->kind != x->kind || y->is_send == x->is_send) return false;
    if (q->step[sender] <= send->step) return false;
    double at = q->step_end[sender][send->step];
    if (q->queue_free[r] > at) at = q->queue_free[r];
    if (q->queue_free[peer] > at) at = q->queue_free[peer];
    q->passed_at[r][q->transfer[r]++] = q->passed_at[peer][q->transfer[peer]++] = at;
    q->queue_free[r] = q->queue_free[peer] = at;
    return true;
}

static bool run_step(Queues *q, int r) {
    const int64_t k = q->step[r];
    if (k == q->s->rank[r].n) return false;
    double start = k ? q->step_end[r][k - 1] : 0;
    for (int64_t i = 0; i < q->t[r].n; i++) {
        const Transfer *x = &q->t[r].transfer[i];
        if (x->is_send || x->step != k) continue;
        if (i >= q->transfer[r]) return false;
        if (q->passed_at[r][i] > start) start = q->passed_at[r][i];
    }
    q->step_end[r][k] = start + q->duration[q->s->rank[r].step[k].kind];
    q->step[r]++;
    return true;
}

static double last_end(const PipeSchedule *s, const TransferList *t, const StepTimes *times) {
    Queues q = {
        .s = s,
        .t = t,
        .duration = {times->forward, times->backward, times->backward_input, times->backward_weight, times->pair}};
    double last = 0;
    for (int r = 0; r < s->shape.P; r++) {
        q.step_end[r] = (double *)calloc((size_t)s->rank[r].n + 1, sizeof(double));
        q.passed_at[r] = (double *)calloc((size_t)t[r].n + 1, sizeof(double));
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (int r = 0; r < s->shape.P; r++) {
            while (pass_transfer(&q, r)) moved = true;
            while (run_step(&q, r)) moved = true;
        }
    }
    for (int r = 0; r < s->shape.P; r++) {
        EXPECT_EQ(q.step[r], s->rank[r].n);
        if (s->rank[r].n && q.step_end[r][s->rank[r].n - 1] > last) last = q.step_end[r][s->rank[r].n - 1];
        free(q.step_end[r]);
        free(q.passed_at[r]);
    }
    return last;
}

TEST(schedule_transfers_in_order_cost_nothing) {
    static const int shapes[][2] = {{2, 8}, {4, 12}, {8, 24}, {16, 48}};
    const StepTimes times[] = {round_times, overlap_step_times(1, 4), {1.3, 2.2, 1.4, 0.9, 2.7}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int kind = SCHEDULE_GPIPE; kind < SCHEDULE_COUNT; kind++)
            for (size_t k = 0; k < sizeof times / sizeof *times; k++) {
                PipeSchedule s = make_schedule((ScheduleKind)kind, shapes[i][0], shapes[i][1]);
                TransferList *t = transfers_make(&s, &times[k]);
                Timeline free_run;
                char err[ERR_LEN];
                EXPECT(schedule_check(&s, t, err) == 0, "%s", err);
                REQUIRE(schedule_simulate(&free_run, &s, &times[k], NULL, err) == 0, "%s", err);
                EXPECT_NEAR(last_end(&s, t, &times[k]), free_run.makespan, 1e-9);
                timeline_free(&free_run, s.shape.P);
                transfers_free(t, s.shape.P);
                schedule_free(&s);
            }
}
