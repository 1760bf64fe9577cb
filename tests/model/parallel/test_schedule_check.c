/* Broken schedules are refused, in words that name the place. */
#include <string.h>

#include "tests/model/parallel/schedule_test.h"

typedef struct {
    PipeSchedule s;
    TransferList *t;
} Broken;

static Broken intact(ScheduleKind kind, int P, int M) {
    Broken b;
    b.s = make_schedule(kind, P, M);
    b.t = transfers_make(&b.s, &round_times);
    return b;
}

/* Refused, with this in its line; then released. */
static void expect_refused(Broken *b, const char *part) {
    char err[ERR_LEN] = "";
    EXPECT(schedule_check(&b->s, b->t, err) == -1, "%s accepted, expected: %s", schedule_name(b->s.shape.kind), part);
    EXPECT(strstr(err, part), "\"%s\", expected \"%s\"", err, part);
    transfers_free(b->t, b->s.shape.P);
    schedule_free(&b->s);
}

static int64_t find_step(const PipeSchedule *s, int rank, const char *text) {
    char buf[STEP_TEXT_LEN];
    for (int64_t k = 0; k < s->rank[rank].n; k++)
        if (strcmp(step_text(buf, sizeof buf, &s->rank[rank].step[k]), text) == 0) return k;
    REQUIRE(false, "rank %d has no %s", rank, text);
    return -1;
}

static void swap_steps(PipeSchedule *s, int rank, const char *a, const char *b) {
    PipeStep *x = &s->rank[rank].step[find_step(s, rank, a)], *y = &s->rank[rank].step[find_step(s, rank, b)], t = *x;
    *x = *y;
    *y = t;
}

TEST(schedule_check_names_broken_steps) {
    Broken b = intact(SCHEDULE_ZB1P, 4, 8);
    swap_steps(&b.s, 1, "I2", "W2");
    expect_refused(&b, "weight-backward before input-backward");

    b = intact(SCHEDULE_1F1B, 4, 8);
    swap_steps(&b.s, 3, "F5", "B5");
    expect_refused(&b, "(B5): backward before forward");

    b = intact(SCHEDULE_1F1B, 4, 8);
    b.s.rank[2].step[find_step(&b.s, 2, "F5")].forward.micro = 4;
    expect_refused(&b, "rank 2, step 9 (F4): forward twice");

    b = intact(SCHEDULE_1F1B, 4, 8);
    b.s.rank[2].step[find_step(&b.s, 2, "B5")].backward.micro = 4;
    expect_refused(&b, "(B4): backward twice");

    b = intact(SCHEDULE_ZB1P, 4, 8);
    b.s.rank[0].step[find_step(&b.s, 0, "W5")].backward.micro = 4;
    expect_refused(&b, "(W4): weight-backward twice");

    b = intact(SCHEDULE_ZB1P, 4, 8);
    b.s.rank[3].n--;
    expect_refused(&b, "micro-batch 7 on stage 3: no weight-backward");

    b = intact(SCHEDULE_1F1B, 4, 8);
    b.s.rank[3].n--;
    expect_refused(&b, "micro-batch 7 on stage 3: no backward");

    b = intact(SCHEDULE_GPIPE, 4, 8);
    b.s.rank[1].n -= 2; /* F7 and B7 */
    memmove(&b.s.rank[1].step[7], &b.s.rank[1].step[8], 7 * sizeof(PipeStep));
    expect_refused(&b, "micro-batch 7 on stage 1: no forward");

    b = intact(SCHEDULE_DUALPIPE, 4, 8);
    b.s.rank[0].step[0].forward.micro = 4; /* of the other direction */
    expect_refused(&b, "(F4): not a forward of this rank");

    b = intact(SCHEDULE_DUALPIPE, 4, 8);
    b.s.rank[0].step[find_step(&b.s, 0, "b7")].backward.chunk = 2;
    expect_refused(&b, "not a backward of this rank");

    b = intact(SCHEDULE_PAIRED, 1, 4);
    b.s.rank[0].step[1].backward.micro = 1; /* F1 & B1 */
    expect_refused(&b, "(F1&B1): backward before forward");
}

TEST(schedule_check_names_broken_transfers) {
    Broken b = intact(SCHEDULE_1F1B, 2, 4);
    b.t[0].transfer[0].post = 0;
    expect_refused(&b, "rank 0, step 0 (F0): sent before it is made");

    b = intact(SCHEDULE_1F1B, 2, 4);
    b.t[1].transfer[0].post = 1;
    expect_refused(&b, "rank 1, step 0 (F0): received after it is taken");

    b = intact(SCHEDULE_1F1B, 2, 4);
    b.t[1].n--;
    expect_refused(&b, "micro-batch 3 from stage 0 to 1: a send or receive is missing");

    b = intact(SCHEDULE_1F1B, 2, 4);
    b.t[0].transfer[1] = b.t[0].transfer[0];
    expect_refused(&b, "(F0): sent twice");

    b = intact(SCHEDULE_1F1B, 4, 8);
    b.t[1].transfer[0].peer = 2;
    expect_refused(&b, "rank 1, step 0 (F0): a transfer with the wrong rank");

    b = intact(SCHEDULE_1F1B, 4, 8);
    b.t[0].transfer[0].step = 1;
    expect_refused(&b, "a transfer that is not of this step");

    b = intact(SCHEDULE_1F1B, 4, 8);
    b.t[0].transfer[0].step = 99;
    expect_refused(&b, "a transfer of step 99");
}

/* Complete lists, each in an order of its own: rank 1 runs micro-batch 1 before 0. */
TEST(schedule_check_finds_deadlocks) {
    Broken b = intact(SCHEDULE_1F1B, 2, 4);
    for (int64_t k = 0; k < b.s.rank[1].n; k++) {
        PipeStep *step = &b.s.rank[1].step[k];
        Work *w = step->kind == STEP_FORWARD ? &step->forward : &step->backward;
        if (w->micro < 2) w->micro = 1 - w->micro;
    }
    for (int64_t i = 0; i < b.t[1].n; i++)
        if (b.t[1].transfer[i].micro < 2) b.t[1].transfer[i].micro = 1 - b.t[1].transfer[i].micro;
    Timeline t;
    char err[ERR_LEN] = "";
    const StepTimes times = overlap_step_times(0, 4);
    EXPECT(schedule_simulate(&t, &b.s, &times, NULL, err) == 0, "as lists they run: rank 0 is ahead: %s", err);
    timeline_free(&t, 2);
    expect_refused(&b, "deadlock: its send with rank 1 never passes (one at a time)");

    /* The turn before what it turns: the lists themselves never end. */
    b = intact(SCHEDULE_DUALPIPEV, 2, 4);
    swap_steps(&b.s, 1, "F0", "f0");
    EXPECT(schedule_simulate(&t, &b.s, &times, NULL, err) == -1);
    EXPECT(strstr(err, "rank 0 waits for ever before step 3 (f0)"), "%s", err);
    for (int64_t i = 0; i < b.t[1].n; i++) { /* the transfers follow their steps */
        Transfer *x = &b.t[1].transfer[i];
        if (x->micro != 0 || x->kind != TRANSFER_ACTIVATION) continue;
        x->step = 1 - x->step;
        x->post = x->is_send ? 1 : 0;
    }
    EXPECT_EQ(b.t[1].transfer[0].post, 0);
    expect_refused(&b, "deadlock: ");
}

/* Two neighbours that send to each other, in opposite orders: a group of both passes, one at a time does not. */
TEST(schedule_check_tells_groups_from_single_transfers) {
    static const ScheduleKind kinds[] = {SCHEDULE_1F1B, SCHEDULE_ZB1P, SCHEDULE_DUALPIPE, SCHEDULE_DUALPIPEV};
    int n_found = 0;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int64_t i = 0;; i++) {
            Broken b = intact(kinds[k], 4, 12);
            TransferList *list = &b.t[1];
            while (i + 1 < list->n && (list->transfer[i].post != list->transfer[i + 1].post ||
                                       list->transfer[i].peer != list->transfer[i + 1].peer))
                i++;
            if (i + 1 >= list->n) {
                transfers_free(b.t, 4);
                schedule_free(&b.s);
                break;
            }
            const Transfer first = list->transfer[i];
            list->transfer[i] = list->transfer[i + 1];
            list->transfer[i + 1] = first;
            expect_refused(&b, "(one at a time)");
            n_found++;
        }
    EXPECT(n_found > 3, "only %d such neighbours", n_found);
}

/* Any one field of any step or transfer changed (but the moment of posting, which has some freedom) breaks a list. */
TEST(schedule_check_refuses_every_changed_field) {
    static const ScheduleKind kinds[] = {SCHEDULE_GPIPE, SCHEDULE_1F1B,     SCHEDULE_INTERLEAVED,
                                         SCHEDULE_ZB1P,  SCHEDULE_DUALPIPE, SCHEDULE_DUALPIPEV};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        Broken b = intact(kinds[i], 4, 8);
        char err[ERR_LEN];
        REQUIRE(schedule_check(&b.s, b.t, err) == 0, "%s", err);
        for (int r = 0; r < 4; r++) {
            for (int64_t k = 0; k < b.s.rank[r].n; k++) {
                PipeStep *step = &b.s.rank[r].step[k], saved = *step;
                const bool is_forward = step_has_forward(step), is_backward = step->kind != STEP_FORWARD;
                for (int by = 1; by < STEP_KINDS; by++) {
                    step->kind = (StepKind)((saved.kind + by) % STEP_KINDS);
                    EXPECT(schedule_check(&b.s, b.t, err) == -1, "rank %d, step %lld: kind", r, (long long)k);
                    *step = saved;
                }
                for (int field = 0; field < 4; field++) {
                    if (field < 2 ? !is_forward : !is_backward) continue;
                    Work *w = field < 2 ? &step->forward : &step->backward;
                    *(field % 2 ? &w->chunk : &w->micro) += k % 2 ? 1 : -1;
                    EXPECT(schedule_check(&b.s, b.t, err) == -1, "rank %d, step %lld: field %d", r, (long long)k,
                           field);
                    *step = saved;
                }
            }
            for (int64_t k = 0; k < b.t[r].n; k++)
                for (int field = 0; field < 6; field++) {
                    Transfer *x = &b.t[r].transfer[k], saved = *x;
                    const int by = k % 2 ? 1 : -1;
                    if (field == 0) x->is_send = !x->is_send;
                    if (field == 1) x->kind = (TransferKind)!x->kind;
                    if (field == 2) x->peer += by;
                    if (field == 3) x->chunk += by;
                    if (field == 4) x->micro += by;
                    if (field == 5) x->step += by;
                    EXPECT(schedule_check(&b.s, b.t, err) == -1, "rank %d, transfer %lld: field %d", r, (long long)k,
                           field);
                    *x = saved;
                }
        }
        transfers_free(b.t, 4);
        schedule_free(&b.s);
    }
}
