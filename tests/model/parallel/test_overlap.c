/* The order of phases inside a pair, and of the steps that are not pairs. */
#include <stdio.h>
#include <string.h>

#include "model/parallel/overlap.h"
#include "tests/test.h"

enum { LAYERS_MAX = 8 };

/* "c:combine.I1<-1": stream, phase, pass, layer, the launch that has to end first. */
static void expect_launches(StepKind kind, int n_forward, int n_backward, const char *expected) {
    static const char passes[] = "FIW";
    PhaseLaunch launches[OVERLAP_ROWS * LAYERS_MAX];
    const int n = overlap_launches(launches, kind, n_forward, n_backward);
    char list[4096] = "";
    for (int i = 0; i < n; i++) {
        const size_t length = strlen(list);
        const PhaseLaunch *l = &launches[i];
        snprintf(list + length, sizeof list - length, "%s%s.%c%d", i ? " " : "", phase_name(l->row.phase),
                 passes[l->row.pass], l->layer);
        EXPECT(l->after < i, "launch %d waits for %d", i, l->after);
        const bool is_exchange = l->row.phase == PHASE_DISPATCH || l->row.phase == PHASE_COMBINE;
        EXPECT(l->row.stream == (is_exchange ? STREAM_COMM : STREAM_COMPUTE));
    }
    EXPECT(strcmp(list, expected) == 0, "\n%s\nexpected\n%s", list, expected);
}

TEST(overlap_order_of_each_step) {
    expect_launches(STEP_PAIR, 1, 1,
                    "combine.I0 attn.F0 dispatch.F0 experts.I0 dispatch.I0 experts.W0 experts.F0 combine.F0 attn.I0 "
                    "attn.W0");
    expect_launches(STEP_FORWARD, 2, 0,
                    "attn.F0 dispatch.F0 experts.F0 combine.F0 attn.F1 dispatch.F1 experts.F1 combine.F1");
    expect_launches(STEP_BACKWARD, 0, 2,
                    "combine.I1 experts.I1 dispatch.I1 experts.W1 attn.I1 attn.W1 combine.I0 experts.I0 dispatch.I0 "
                    "experts.W0 attn.I0 attn.W0");
    expect_launches(STEP_BACKWARD_INPUT, 0, 2,
                    "combine.I1 experts.I1 dispatch.I1 attn.I1 combine.I0 experts.I0 dispatch.I0 attn.I0");
    expect_launches(STEP_BACKWARD_WEIGHT, 0, 2, "experts.W1 attn.W1 experts.W0 attn.W0");
    /* Chunks of unequal length: what is left of the longer one follows. */
    expect_launches(STEP_PAIR, 2, 1,
                    "combine.I0 attn.F0 dispatch.F0 experts.I0 dispatch.I0 experts.W0 experts.F0 combine.F0 attn.I0 "
                    "attn.W0 attn.F1 dispatch.F1 experts.F1 combine.F1");
    expect_launches(STEP_PAIR, 1, 2,
                    "combine.I1 attn.F0 dispatch.F0 experts.I1 dispatch.I1 experts.W1 experts.F0 combine.F0 attn.I1 "
                    "attn.W1 combine.I0 experts.I0 dispatch.I0 experts.W0 attn.I0 attn.W0");
    expect_launches(STEP_PAIR, 0, 0, "");
}

/* Each column is the order of its own mathematics: forward through the phases of layer 0, 1, ...; input-backward the
 * other way through both; weight-backward behind the input-backward of its phase. */
TEST(overlap_waits_for_its_own_micro_batch) {
    static const Phase forward[] = {PHASE_ATTN, PHASE_DISPATCH, PHASE_EXPERTS, PHASE_COMBINE};
    for (int n_forward = 0; n_forward <= 4; n_forward++)
        for (int n_backward = 0; n_backward <= 4; n_backward++) {
            PhaseLaunch launches[OVERLAP_ROWS * LAYERS_MAX];
            const int n = overlap_launches(launches, STEP_PAIR, n_forward, n_backward);
            EXPECT_EQ(n, 4 * n_forward + 6 * n_backward);
            int passed[2] = {0, 0}, last[2] = {-1, -1}, n_weight = 0;
            for (int i = 0; i < n; i++) {
                const PhaseLaunch *l = &launches[i];
                const Pass pass = l->row.pass;
                if (pass == PASS_BACKWARD_WEIGHT) {
                    const PhaseLaunch *input = &launches[l->after];
                    EXPECT(input->row.pass == PASS_BACKWARD_INPUT && input->row.phase == l->row.phase &&
                           input->layer == l->layer);
                    n_weight++;
                    continue;
                }
                const int layer = passed[pass] / 4, phase = passed[pass] % 4;
                EXPECT_EQ(l->row.phase, forward[pass == PASS_FORWARD ? phase : 3 - phase]);
                EXPECT_EQ(l->layer, pass == PASS_FORWARD ? layer : n_backward - 1 - layer);
                EXPECT_EQ(l->after, last[pass]);
                last[pass] = i;
                passed[pass]++;
            }
            EXPECT(passed[0] == 4 * n_forward && passed[1] == 4 * n_backward && n_weight == 2 * n_backward);
        }
}

/* attn, dispatch, experts, combine by forward, input-backward, weight-backward */
typedef struct {
    double took[4][3];
} Took;

static double run(StepKind kind, int n_forward, int n_backward, Took t) {
    PhaseLaunch launches[OVERLAP_ROWS * LAYERS_MAX];
    const int n = overlap_launches(launches, kind, n_forward, n_backward);
    return overlap_simulate(launches, n, t.took);
}

/* With exchanges as long as what they run under, a pair takes its compute alone: the point of the table. The same work
 * as two steps waits for every exchange but those that weight-backward covers. */
TEST(overlap_hides_the_exchange) {
    const Took even = {{{2, 2, 1}, {2, 2, 0}, {2, 2, 1}, {2, 2, 0}}};
    const double compute = 2 + 2 + 1 + 2 + 2 + 1;
    for (int layers = 1; layers <= 6; layers++) {
        EXPECT_NEAR(run(STEP_PAIR, layers, layers, even), layers * compute, 1e-9);
        EXPECT_NEAR(run(STEP_FORWARD, layers, 0, even), layers * 8, 1e-9);
        /* experts W (1) runs under dispatch (2), attn W (1) under the next layer's combine (2) but for the last */
        EXPECT_NEAR(run(STEP_BACKWARD, 0, layers, even), layers * 8 + 1, 1e-9);
        EXPECT_NEAR(run(STEP_BACKWARD_WEIGHT, 0, layers, even), layers * 2, 1e-9);
    }
    /* Exchange alone: both streams are never busy for nothing, so the sum of the exchanges bounds the pair. */
    const Took slow = {{{1, 1, 1}, {5, 5, 0}, {1, 1, 1}, {5, 5, 0}}};
    EXPECT(run(STEP_PAIR, 4, 4, slow) >= 4 * 20 && run(STEP_PAIR, 4, 4, slow) <= 4 * 20 + 6);
    /* Without exchange: the compute. */
    const Took none = {{{1, 2, 3}, {0, 0, 0}, {4, 5, 6}, {0, 0, 0}}};
    EXPECT_NEAR(run(STEP_PAIR, 3, 2, none), 3 * 5 + 2 * 16, 1e-9);
}

TEST(overlap_step_times_of_a_stage) {
    for (int layers = 1; layers <= 8; layers *= 2) {
        const StepTimes none = overlap_step_times(0, layers), even = overlap_step_times(1, layers);
        EXPECT(none.forward == 1 && none.backward_input == 1 && none.backward_weight == 1 && none.backward == 2 &&
               none.pair == 3);
        EXPECT(even.forward == 2 && even.backward_input == 2 && even.backward_weight == 1 && even.pair == 3);
        EXPECT_NEAR(even.backward, 2 + 0.5 / layers, 1e-12);
        /* twice the exchange: it is all there is, but for what no exchange runs beside */
        const StepTimes slow = overlap_step_times(2, layers);
        EXPECT(slow.forward == 3 && slow.pair >= 4 && slow.pair <= 4 + 1.5 / layers, "%g", slow.pair);
    }
}

/* What each exchange runs under, by V3's figure: the compute that is launched after it and does not wait for it. */
TEST(overlap_table_is_the_figure) {
    static const struct {
        Phase phase;
        Pass pass;
    } figure[][3] = {
        {{PHASE_COMBINE, PASS_BACKWARD_INPUT}, {PHASE_ATTN, PASS_FORWARD}, {PHASE_ATTN, PASS_FORWARD}},
        {{PHASE_DISPATCH, PASS_FORWARD}, {PHASE_EXPERTS, PASS_BACKWARD_INPUT}, {PHASE_EXPERTS, PASS_BACKWARD_INPUT}},
        {{PHASE_DISPATCH, PASS_BACKWARD_INPUT}, {PHASE_EXPERTS, PASS_BACKWARD_WEIGHT}, {PHASE_EXPERTS, PASS_FORWARD}},
        {{PHASE_COMBINE, PASS_FORWARD}, {PHASE_ATTN, PASS_BACKWARD_INPUT}, {PHASE_ATTN, PASS_BACKWARD_WEIGHT}},
    };
    int n, row = 0;
    const OverlapRow *table = overlap_table(&n);
    EXPECT_EQ(n, OVERLAP_ROWS);
    for (size_t i = 0; i < sizeof figure / sizeof *figure; i++)
        for (int k = 0; k < 3; k++) {
            if (k == 2 && figure[i][2].phase == figure[i][1].phase && figure[i][2].pass == figure[i][1].pass) continue;
            EXPECT(row < n && table[row].phase == figure[i][k].phase && table[row].pass == figure[i][k].pass,
                   "row %d is %s %s", row, phase_name(table[row].phase), pass_name(table[row].pass));
            row++;
        }
    EXPECT_EQ(row, n);
}
