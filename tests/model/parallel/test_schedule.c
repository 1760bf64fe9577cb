/* Pipeline schedules: golden lists and counts, completeness over many shapes, bubbles and peaks as published. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "data/config_table.h"
#include "tests/model/parallel/schedule_test.h"

static void expect_list(const PipeSchedule *s, int rank, const char *expected) {
    char list[4096] = "", text[STEP_TEXT_LEN];
    for (int64_t k = 0; k < s->rank[rank].n; k++) {
        const size_t length = strlen(list);
        snprintf(list + length, sizeof list - length, "%s%s", k ? " " : "",
                 step_text(text, sizeof text, &s->rank[rank].step[k]));
    }
    EXPECT(strcmp(list, expected) == 0, "%s, rank %d:\n%s\nexpected\n%s", schedule_name(s->shape.kind), rank, list,
           expected);
}

/* Written out by hand from the published loops and figures; small letters are the second chunk. */
TEST(schedule_lists_by_hand) {
    static const struct {
        ScheduleKind kind;
        int P, M, rank;
        const char *list;
    } cases[] = {
        {SCHEDULE_PAIRED, 1, 1, 0, "F0 B0"},
        {SCHEDULE_PAIRED, 1, 4, 0, "F0 F1&B0 F2&B1 F3&B2 B3"},
        {SCHEDULE_GPIPE, 2, 3, 1, "F0 F1 F2 B0 B1 B2"},
        {SCHEDULE_1F1B, 4, 6, 0, "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"},
        {SCHEDULE_1F1B, 4, 6, 2, "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5"},
        {SCHEDULE_1F1B, 4, 2, 0, "F0 F1 B0 B1"},
        {SCHEDULE_INTERLEAVED, 2, 4, 0, "F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3"},
        {SCHEDULE_INTERLEAVED, 2, 4, 1, "F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3"},
        {SCHEDULE_ZB1P, 4, 6, 0, "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5"},
        {SCHEDULE_ZB1P, 4, 6, 3, "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5"},
        {SCHEDULE_DUALPIPE, 4, 10, 0, "F0 F1 F2 f5 i5 w5 f6 F3&b6 f7&B0 F4&b7 f8&B1 b8 f9&B2 b9 I3 W3 I4 W4"},
        {SCHEDULE_DUALPIPE, 4, 10, 1, "F0 f5 F1 f6 F2 b5 f7&B0 F3&b6 f8&B1 F4&b7 f9&B2 b8 B3 i9 I4 w9 W4"},
        {SCHEDULE_DUALPIPE, 4, 10, 3, "f5 f6 f7 F0 I0 W0 F1 f8&B1 F2&b5 f9&B2 F3&b6 B3 F4&b7 B4 i8 w8 i9 w9"},
        {SCHEDULE_DUALPIPE, 8, 20, 0,
         "F0 F1 F2 F3 F4 F5 F6 f10 i10 w10 f11 i11 w11 f12 i12 w12 f13 F7&b13 f14&B0 F8&b14 f15&B1 F9&b15 f16&B2 b16 "
         "f17&B3 b17 f18&B4 b18 f19&B5 b19 I6 W6 I7 W7 I8 W8 I9 W9"},
        {SCHEDULE_DUALPIPEV, 2, 5, 0, "F0 F1 F2 f0 i0 w0 f1 F3&b1 f2&B0 F4&b2 f3&B1 b3 f4&B2 b4 I3 W3 I4 W4"},
        {SCHEDULE_DUALPIPEV, 2, 5, 1, "F0 f0 F1 f1 F2 b0 f2&B0 F3&b1 f3&B1 F4&b2 f4&B2 b3 B3 i4 I4 w4 W4"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        PipeSchedule s = make_schedule(cases[i].kind, cases[i].P, cases[i].M);
        expect_list(&s, cases[i].rank, cases[i].list);
        schedule_free(&s);
    }
}

typedef struct {
    int of[STEP_KINDS];
} Counts;

static Counts count_steps(const StepList *list) {
    Counts c;
    memset(&c, 0, sizeof c);
    for (int64_t k = 0; k < list->n; k++) c.of[list->step[k].kind]++;
    return c;
}

/* DualPipe as V3 ran it: 16 ranks, 120 micro-batches. */
TEST(schedule_dualpipe_golden_counts) {
    PipeSchedule s = make_schedule(SCHEDULE_DUALPIPE, 16, 120);
    static const struct {
        int rank, pairs, forward, backward, weight;
    } cases[] = {{0, 97, 23, 23, 15}, {7, 103, 17, 17, 8}, {8, 103, 17, 17, 8}, {15, 97, 23, 23, 15}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Counts c = count_steps(&s.rank[cases[i].rank]);
        EXPECT_EQ(c.of[STEP_PAIR], cases[i].pairs);
        EXPECT_EQ(c.of[STEP_FORWARD], cases[i].forward);
        EXPECT_EQ(c.of[STEP_BACKWARD] + c.of[STEP_BACKWARD_INPUT], cases[i].backward);
        EXPECT_EQ(c.of[STEP_BACKWARD_WEIGHT], cases[i].weight);
    }
    /* The phases of rank 0: 14, 1, 7, 45, 7, 1, 7, 1 rounds of 1, 2, 3, 2, 2, 2, 2, 1 steps. */
    EXPECT_EQ(s.rank[0].n, 14 + 2 + 21 + 90 + 14 + 2 + 14 + 1);
    schedule_free(&s);
}

/* ---- every shape ------------------------------------------------------------------------------------------------- */

/* The table of DeepSeek's report: B is a full backward of I and W, and I takes as long as F. PP is the number of stages
 * that a micro-batch passes; the times are of one stage. */
static double published_bubble(const ScheduleShape *s, const StepTimes *t) {
    const double F = t->forward, B = t->backward, W = t->backward_weight, PP = s->n_stages;
    switch (s->kind) {
    case SCHEDULE_PAIRED: return 0;
    case SCHEDULE_ZB1P: return (PP - 1) * (F + B - 2 * W);
    case SCHEDULE_DUALPIPE:
    case SCHEDULE_DUALPIPEV: return (PP / 2 - 1) * (t->pair + B - 3 * W);
    default: return (s->P - 1) * (F + B);
    }
}

static bool is_as_published(const StepTimes *t) {
    return t->backward == t->backward_input + t->backward_weight && t->forward == t->backward_input;
}

static void check_bubbles(const PipeSchedule *s) {
    const bool is_dual = s->shape.kind == SCHEDULE_DUALPIPE || s->shape.kind == SCHEDULE_DUALPIPEV;
    const StepTimes times[] = {
        overlap_step_times(0, 4),
        overlap_step_times(0.3, 4),
        overlap_step_times(1, 2),
        overlap_step_times(2, 4),
        {1.7, 2.4, 1.7, 1.2, 3.1},
        {1.3, 2.5, 1.3, 1.2, 2.9},
        {1.3, 2.1, is_dual ? 1.3 : 1.8, 1.1, 3.6},
        {2, 3, 2, 1, 3},
    };
    int n_as_published = 0;
    char err[ERR_LEN];
    for (size_t i = 0; i < sizeof times / sizeof *times; i++) {
        Timeline t;
        REQUIRE(schedule_simulate(&t, s, &times[i], NULL, err) == 0, "%s", err);
        const double formula = schedule_bubble(&s->shape, &times[i]);
        EXPECT(test_near(t.bubble, formula, 1e-9), "%s, P %d, M %d, times %zu: simulated %g, formula %g",
               schedule_name(s->shape.kind), s->shape.P, s->shape.M, i, t.bubble, formula);
        if (is_as_published(&times[i])) {
            EXPECT_NEAR(formula, published_bubble(&s->shape, &times[i]), 1e-9);
            n_as_published++;
        }
        EXPECT(t.mean_bubble <= t.bubble + 1e-9);
        timeline_free(&t, s->shape.P);
    }
    EXPECT_EQ(n_as_published, 3);
}

static void check_peaks(const PipeSchedule *s, const TransferList *transfers) {
    const ScheduleShape *shape = &s->shape;
    int fullest = 0;
    for (int r = 0; r < shape->P; r++) {
        const SchedulePeak p = schedule_peak(s, r, &transfers[r]);
        if (p.live > fullest) fullest = p.live;
        EXPECT(p.live_of[0] + p.live_of[1] >= p.live && p.live_of[0] <= p.live && p.live_of[1] <= p.live);
        if (schedule_copies(shape->kind) == 2 || shape->kind == SCHEDULE_DUALPIPEV) {
            EXPECT_EQ(p.live, shape->n_stages + 1); /* on every rank */
            const int h = shape->kind == SCHEDULE_DUALPIPEV || r < shape->P / 2 ? r : shape->P - 1 - r;
            EXPECT_EQ(p.pending, h + 1);
        } else {
            EXPECT_EQ(p.pending, shape->kind == SCHEDULE_ZB1P ? r + 1 : 0);
        }
        /* zb1p keeps 1f1b's memory even where a waiting weight-backward keeps all activations. */
        if (shape->kind == SCHEDULE_ZB1P) EXPECT(p.live + p.pending <= shape->P + 1);
        if (shape->kind == SCHEDULE_1F1B) EXPECT_EQ(p.live, shape->P - r);
        EXPECT(shape->P == 1 || (p.inbox >= 1 && p.inbox <= 2 * shape->P), "inbox %d", p.inbox);
    }
    EXPECT(fullest == schedule_peak_published(shape), "%s, P %d, M %d: peak %d, published %d",
           schedule_name(shape->kind), shape->P, shape->M, fullest, schedule_peak_published(shape));
}

TEST(schedule_every_shape_is_complete_and_as_published) {
    static const int ranks[] = {1, 2, 3, 4, 6, 8, 16};
    int n_shapes[SCHEDULE_COUNT] = {0};
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++)
        for (int M = 2 * ranks[i]; M <= 6 * ranks[i]; M++)
            for (int kind = 0; kind < SCHEDULE_COUNT; kind++) {
                ScheduleShape shape;
                char err[ERR_LEN];
                if (schedule_shape(&shape, (ScheduleKind)kind, ranks[i], M, NULL, NULL) != 0) continue;
                PipeSchedule s = schedule_make(shape);
                TransferList *transfers = transfers_make(&s, &round_times);
                EXPECT(schedule_check(&s, transfers, err) == 0, "%s, P %d, M %d: %s", schedule_name(shape.kind),
                       shape.P, M, err);
                check_bubbles(&s);
                check_peaks(&s, transfers);
                transfers_free(transfers, shape.P);
                schedule_free(&s);
                n_shapes[kind]++;
            }
    /* P = 1, 2, 3, 4, 6, 8, 16 have 5, 9, 13, 17, 25, 33, 65 numbers of micro-batches from 2P to 6P. */
    EXPECT_EQ(n_shapes[SCHEDULE_1F1B], 167);
    EXPECT_EQ(n_shapes[SCHEDULE_GPIPE], 167);
    EXPECT_EQ(n_shapes[SCHEDULE_ZB1P], 167);
    EXPECT_EQ(n_shapes[SCHEDULE_DUALPIPEV], 167);
    EXPECT_EQ(n_shapes[SCHEDULE_DUALPIPE], 5 + 9 + 13 + 17 + 33); /* P and M even */
    EXPECT_EQ(n_shapes[SCHEDULE_INTERLEAVED], 7 * 5);             /* multiples of P */
    EXPECT_EQ(n_shapes[SCHEDULE_PAIRED], 5);
}

/* Few micro-batches: not the regime of the formulas, but what may run has to be right. */
TEST(schedule_with_few_micro_batches) {
    int n = 0;
    for (int P = 1; P <= 9; P++)
        for (int M = 1; M < 2 * P; M++)
            for (int kind = 0; kind < SCHEDULE_COUNT; kind++) {
                ScheduleShape shape;
                char err[ERR_LEN];
                if (schedule_shape(&shape, (ScheduleKind)kind, P, M, NULL, NULL) != 0) continue;
                PipeSchedule s = schedule_make(shape);
                TransferList *transfers = transfers_make(&s, &round_times);
                EXPECT(schedule_check(&s, transfers, err) == 0, "%s, P %d, M %d: %s", schedule_name(shape.kind), P, M,
                       err);
                transfers_free(transfers, P);
                schedule_free(&s);
                n++;
            }
    EXPECT_EQ(n, 3 * 81 + 9 + 1); /* gpipe, 1f1b, zb1p always; interleaved at M = P; paired at 1, 1 */
}

TEST(schedule_refuses_shapes) {
    static const struct {
        ScheduleKind kind;
        int P;
        int64_t M;
        const char *err, *hint;
    } cases[] = {
        {SCHEDULE_PAIRED, 2, 8, "schedule paired is for one pipeline rank, not for 2", "1f1b, zb1p"},
        {SCHEDULE_DUALPIPE, 3, 8, "schedule dualpipe needs an even number of ranks, not 3", "dualpipev"},
        {SCHEDULE_DUALPIPE, 4, 6, "schedule dualpipe on 4 ranks needs at least 8 micro-batches, not 6", "batch_size"},
        {SCHEDULE_DUALPIPE, 4, 9, "schedule dualpipe needs a multiple of 2 micro-batches, not 9", ""},
        {SCHEDULE_DUALPIPEV, 4, 7, "at least 8 micro-batches, not 7", "batch_size"},
        {SCHEDULE_INTERLEAVED, 4, 6, "schedule interleaved needs a multiple of 4 micro-batches, not 6", ""},
        {SCHEDULE_INTERLEAVED, 4, 2, "at least 4 micro-batches, not 2", "batch_size"},
        {SCHEDULE_1F1B, 0, 4, "a pipeline of 0 ranks", ""},
        {SCHEDULE_1F1B, 1025, 4, "a pipeline of 1025 ranks", ""},
        {SCHEDULE_1F1B, 2, 0, "0 micro-batches on 2 ranks", ""},
        {SCHEDULE_1F1B, 4, 1LL << 40, "1099511627776 micro-batches on 4 ranks", ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ScheduleShape s;
        char err[ERR_LEN] = "", hint[ERR_LEN] = "stale";
        EXPECT(schedule_shape(&s, cases[i].kind, cases[i].P, cases[i].M, err, hint) == -1, "case %zu", i);
        EXPECT(strstr(err, cases[i].err), "case %zu: %s", i, err);
        EXPECT(cases[i].hint[0] ? strstr(hint, cases[i].hint) != NULL : hint[0] == 0, "case %zu: hint %s", i, hint);
    }
}

/* What the configuration offers is in the table, under the same name. */
TEST(schedule_names_of_the_configuration) {
    const Field *f = field_find("parallel", "schedule");
    REQUIRE(f != NULL, "no parallel.schedule");
    char words[128], *rest = words;
    int n = 0;
    snprintf(words, sizeof words, "%s", f->unit);
    for (char *word; (word = strsep(&rest, "|")); n++) {
        const int kind = schedule_find(word);
        EXPECT(kind >= 0 && strcmp(schedule_name((ScheduleKind)kind), word) == 0, "%s", word);
        EXPECT(kind != SCHEDULE_GPIPE && kind != SCHEDULE_INTERLEAVED, "%s is to compare with", word);
    }
    EXPECT_EQ(n, SCHEDULE_COUNT - 2);
    EXPECT_EQ(schedule_find("1F1B"), -1);
}

/* ---- places ------------------------------------------------------------------------------------------- */

TEST(schedule_places_are_where_stages_are) {
    static const ScheduleKind kinds[] = {SCHEDULE_1F1B, SCHEDULE_INTERLEAVED, SCHEDULE_DUALPIPE, SCHEDULE_DUALPIPEV};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        ScheduleShape s;
        REQUIRE(schedule_shape(&s, kinds[i], 6, 12, NULL, NULL) == 0);
        for (int micro = 0; micro < s.M; micro++)
            for (int stage = 0; stage < s.n_stages; stage++) {
                const Place p = schedule_place(&s, micro, stage);
                EXPECT_EQ(schedule_stage(&s, p.rank, p.chunk), stage);
            }
    }
    ScheduleShape dual, turn;
    REQUIRE(schedule_shape(&dual, SCHEDULE_DUALPIPE, 6, 12, NULL, NULL) == 0);
    REQUIRE(schedule_shape(&turn, SCHEDULE_DUALPIPEV, 3, 6, NULL, NULL) == 0);
    EXPECT(dual.n_stages == 6 && turn.n_stages == 6);
    EXPECT(schedule_place(&dual, 5, 0).rank == 0 && schedule_place(&dual, 6, 0).rank == 5, "both ends take tokens in");
    EXPECT(schedule_place(&turn, 0, 2).rank == 2 && schedule_place(&turn, 0, 3).rank == 2, "the turn is on one rank");
    EXPECT(schedule_place(&turn, 0, 5).rank == 0 && schedule_place(&turn, 0, 5).chunk == 1, "the loss is on rank 0");
    EXPECT(schedule_stage(&dual, 6, 0) == -1 && schedule_stage(&dual, 0, 2) == -1 &&
           schedule_stage(&dual, -1, 0) == -1);
}

/* ---- stages of unequal cost -------------------------------------------------------------------------------------- */

/* One stage twice as slow: 1f1b then runs at its pace, M (F+B) of it, behind and before the others. */
TEST(schedule_simulates_a_slow_stage) {
    const int P = 4, M = 12;
    const double scale[] = {1, 1, 2, 1};
    const StepTimes times = {1, 2, 1, 1, 3};
    char err[ERR_LEN];
    PipeSchedule s = make_schedule(SCHEDULE_1F1B, P, M);
    Timeline t;
    REQUIRE(schedule_simulate(&t, &s, &times, scale, err) == 0, "%s", err);
    EXPECT_NEAR(t.busy[2], M * 6, 1e-9);
    EXPECT_NEAR(t.busy[0], M * 3, 1e-9);
    EXPECT(t.makespan >= M * 6 + 2 * 3, "at least the slow stage and the way to it and back: %g", t.makespan);
    EXPECT(t.makespan <= M * 6 + 3 * 6, "no more than if all were as slow: %g", t.makespan);
    timeline_free(&t, P);

    /* A pair takes the mean of its two stages. */
    PipeSchedule pairs = make_schedule(SCHEDULE_DUALPIPE, 2, 4);
    const double two[] = {1, 3};
    REQUIRE(schedule_simulate(&t, &pairs, &times, two, err) == 0, "%s", err);
    for (int64_t k = 0; k < pairs.rank[0].n; k++)
        if (pairs.rank[0].step[k].kind == STEP_PAIR) EXPECT_NEAR(t.spans[0].end[k] - t.spans[0].start[k], 6, 1e-12);
    timeline_free(&t, 2);
    schedule_free(&pairs);
    schedule_free(&s);
}

static void take_too_many(void *arg) {
    PipeSchedule s = make_schedule(SCHEDULE_1F1B, 2, 4);
    (void)arg;
    s.rank[0].step[0].forward.micro = 7;
    Timeline t;
    const StepTimes times = overlap_step_times(0, 4);
    schedule_simulate(&t, &s, &times, NULL, NULL);
}

TEST(schedule_simulation_checks_its_lists) {
    EXPECT(expect_exit(128 + SIGABRT, "micro-batch 7 of chunk 0", take_too_many, NULL));
}
