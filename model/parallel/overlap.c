/* See overlap.h. */
#include "overlap.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/base/check.h"

static const OverlapRow table[OVERLAP_ROWS] = {
    {PHASE_COMBINE, PASS_BACKWARD_INPUT, STREAM_COMM},  {PHASE_ATTN, PASS_FORWARD, STREAM_COMPUTE},
    {PHASE_DISPATCH, PASS_FORWARD, STREAM_COMM},        {PHASE_EXPERTS, PASS_BACKWARD_INPUT, STREAM_COMPUTE},
    {PHASE_DISPATCH, PASS_BACKWARD_INPUT, STREAM_COMM}, {PHASE_EXPERTS, PASS_BACKWARD_WEIGHT, STREAM_COMPUTE},
    {PHASE_EXPERTS, PASS_FORWARD, STREAM_COMPUTE},      {PHASE_COMBINE, PASS_FORWARD, STREAM_COMM},
    {PHASE_ATTN, PASS_BACKWARD_INPUT, STREAM_COMPUTE},  {PHASE_ATTN, PASS_BACKWARD_WEIGHT, STREAM_COMPUTE},
};

const OverlapRow *overlap_table(int *n) {
    *n = OVERLAP_ROWS;
    return table;
}

const char *phase_name(Phase phase) {
    static const char *const names[] = {"attn", "dispatch", "experts", "combine"};
    return names[phase];
}

const char *pass_name(Pass pass) {
    static const char *const names[] = {"forward", "backward input", "backward weight"};
    return names[pass];
}

static bool step_has_pass(StepKind kind, Pass pass) {
    switch (pass) {
    case PASS_FORWARD: return kind == STEP_FORWARD || kind == STEP_PAIR;
    case PASS_BACKWARD_INPUT: return kind == STEP_BACKWARD || kind == STEP_BACKWARD_INPUT || kind == STEP_PAIR;
    case PASS_BACKWARD_WEIGHT: return kind == STEP_BACKWARD || kind == STEP_BACKWARD_WEIGHT || kind == STEP_PAIR;
    }
    return false;
}

/* A forward follows the forward before it, an input-backward the one before it, through all layers of the chunk; a
 * weight-backward follows its own phase's input-backward, if that is of this step. */
int overlap_launches(PhaseLaunch *launches, StepKind kind, int n_forward, int n_backward) {
    const int n_layers = n_forward > n_backward ? n_forward : n_backward;
    int n = 0, last[] = {-1, -1};
    for (int i = 0; i < n_layers; i++) {
        int input_of_phase[4] = {-1, -1, -1, -1};
        for (int k = 0; k < OVERLAP_ROWS; k++) {
            const OverlapRow *row = &table[k];
            if (!step_has_pass(kind, row->pass) || i >= (row->pass == PASS_FORWARD ? n_forward : n_backward)) continue;
            PhaseLaunch launch = {*row, row->pass == PASS_FORWARD ? i : n_backward - 1 - i, -1};
            if (row->pass == PASS_BACKWARD_WEIGHT) {
                launch.after = input_of_phase[row->phase];
            } else {
                launch.after = last[row->pass];
                last[row->pass] = n;
            }
            if (row->pass == PASS_BACKWARD_INPUT) input_of_phase[row->phase] = n;
            launches[n++] = launch;
        }
    }
    return n;
}

static double *numbers(int n) {
    double *x = (double *)calloc((size_t)n + 1, sizeof *x);
    CHECK(x, "no memory for %d launches", n);
    return x;
}

double overlap_simulate_launches(const PhaseLaunch *launches, int n, const double *took, double *busy) {
    double free_at[STREAM_COUNT] = {0}, last = 0, *end = numbers(n);
    for (int i = 0; i < STREAM_COUNT; i++) busy[i] = 0;
    for (int i = 0; i < n; i++) {
        const PhaseLaunch *l = &launches[i];
        const double ready = l->after >= 0 ? end[l->after] : 0;
        end[i] = fmax(ready, free_at[l->row.stream]) + took[i];
        free_at[l->row.stream] = end[i];
        busy[l->row.stream] += took[i];
        last = fmax(last, end[i]);
    }
    free(end);
    return last;
}

double overlap_simulate(const PhaseLaunch *launches, int n, double took[4][3]) {
    double busy[STREAM_COUNT], *of_launch = numbers(n);
    for (int i = 0; i < n; i++) of_launch[i] = took[launches[i].row.phase][launches[i].row.pass];
    const double last = overlap_simulate_launches(launches, n, of_launch, busy);
    free(of_launch);
    return last;
}

StepTimes overlap_step_times(double comm, int n_layers) {
    const double half = 0.5 / n_layers, bytes = comm / 2 / n_layers;
    double took[4][3] = {{half, half, half}, {bytes, bytes, 0}, {half, half, half}, {bytes, bytes, 0}};
    PhaseLaunch *launches = (PhaseLaunch *)calloc((size_t)n_layers * OVERLAP_ROWS, sizeof *launches);
    CHECK(launches, "no memory for %d layers", n_layers);
    double times[STEP_KINDS];
    for (int kind = 0; kind < STEP_KINDS; kind++) {
        const int n = overlap_launches(launches, (StepKind)kind, n_layers, n_layers);
        times[kind] = overlap_simulate(launches, n, took);
    }
    free(launches);
    const StepTimes t = {times[STEP_FORWARD], times[STEP_BACKWARD], times[STEP_BACKWARD_INPUT],
                         times[STEP_BACKWARD_WEIGHT], times[STEP_PAIR]};
    return t;
}
