/* Schedules of one direction, and what all schedules share. See schedule.h; dualpipe.c has the two of DeepSeek.
 *
 *   gpipe         all forwards, then all backwards                                  (Huang et al. 2019)
 *   1f1b          P-1-r forwards, then forward and backward in turn                  (Narayanan et al. 2019)
 *   interleaved   the same over two chunks a rank, in groups of P micro-batches      (Narayanan et al. 2021)
 *   zb1p          1f1b with backward split: a rank r puts off r weight-backwards, and fills the gaps of the end with
 *                 them; the memory of 1f1b                                           (Qi et al. 2023, ZB-H1)
 *   paired        one rank: F0, [F1 & B0], [F2 & B1], ..., B of the last */
#include "schedule.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emit.h"
#include "kernels/base/check.h"
#include "kernels/base/ints.h"

/* ---- emitting ---------------------------------------------------------------------------------------------------- */

/* Micro-batches that pass one chunk. */
static int micros_of_chunk(const ScheduleShape *s) {
    return s->kind == SCHEDULE_DUALPIPE ? s->M / 2 : s->M;
}

static Work work_of(const Emitter *e, int chunk, int nth) {
    Work w = {chunk, e->shape->kind == SCHEDULE_DUALPIPE ? chunk * (e->shape->M / 2) + nth : nth};
    return w;
}

static void emit(Emitter *e, StepKind kind, Work forward, Work backward) {
    PipeStep step = {kind, forward, backward};
    CHECK(e->list->n < e->room, "rank %d has more than %lld steps", e->rank, (long long)e->room);
    e->list->step[e->list->n++] = step;
}

static const Work no_work = {-1, -1};

void emit_forward(Emitter *e, int chunk) {
    emit(e, STEP_FORWARD, work_of(e, chunk, e->n_forward[chunk]++), no_work);
}

void emit_backward(Emitter *e, int chunk, bool split) {
    const Work w = work_of(e, chunk, e->n_backward[chunk]++);
    emit(e, split ? STEP_BACKWARD_INPUT : STEP_BACKWARD, no_work, w);
    if (split) e->waiting[e->last++] = w;
}

void emit_weight(Emitter *e) {
    CHECK(e->first < e->last, "rank %d has no weight-backward waiting", e->rank);
    emit(e, STEP_BACKWARD_WEIGHT, no_work, e->waiting[e->first++]);
}

void emit_pair(Emitter *e, int forward_chunk, int backward_chunk) {
    const Work f = work_of(e, forward_chunk, e->n_forward[forward_chunk]++);
    emit(e, STEP_PAIR, f, work_of(e, backward_chunk, e->n_backward[backward_chunk]++));
}

/* ---- the lists --------------------------------------------------------------------------------------------------- */

static void steps_gpipe(Emitter *e) {
    for (int i = 0; i < e->shape->M; i++) emit_forward(e, 0);
    for (int i = 0; i < e->shape->M; i++) emit_backward(e, 0, false);
}

static void steps_1f1b(Emitter *e) {
    const int M = e->shape->M, warm = (int)min_i64(e->shape->P - 1 - e->rank, M);
    for (int i = 0; i < warm; i++) emit_forward(e, 0);
    for (int i = warm; i < M; i++) {
        emit_forward(e, 0);
        emit_backward(e, 0, false);
    }
    for (int i = 0; i < warm; i++) emit_backward(e, 0, false);
}

/* The last rank starts its backwards P-1 weight-backwards early, so the first rank ends P-1 of them sooner. */
static void steps_zb1p(Emitter *e) {
    const int M = e->shape->M, warm = (int)min_i64(e->shape->P - 1 - e->rank, M);
    for (int i = 0; i < warm; i++) emit_forward(e, 0);
    for (int i = 0; i < M; i++) {
        if (i < M - warm) emit_forward(e, 0);
        emit_backward(e, 0, true);
        if (e->last - e->first > e->rank) emit_weight(e);
    }
    while (e->first < e->last) emit_weight(e);
}

/* The order of chunks: P micro-batches through one chunk, then through the next; backward from the last. */
static int interleaved_chunk(const ScheduleShape *s, int nth, bool is_backward) {
    const int chunk = nth / s->P % s->n_chunks;
    return is_backward ? s->n_chunks - 1 - chunk : chunk;
}

static void steps_interleaved(Emitter *e) {
    const ScheduleShape *s = e->shape;
    const int n = s->M * s->n_chunks;
    const int warm = (int)min_i64(2 * (s->P - 1 - e->rank) + (s->n_chunks - 1) * s->P, n);
    for (int i = 0; i < n + warm; i++) {
        if (i < n) emit_forward(e, interleaved_chunk(s, i, false));
        if (i >= warm) emit_backward(e, interleaved_chunk(s, i - warm, true), false);
    }
}

static void steps_paired(Emitter *e) {
    emit_forward(e, 0);
    for (int i = 1; i < e->shape->M; i++) emit_pair(e, 0, 0);
    emit_backward(e, 0, false);
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

/* All times are of one chunk. */
static double bubble_none(const ScheduleShape *s, const StepTimes *t) {
    (void)s, (void)t;
    return 0;
}

static double bubble_1f1b(const ScheduleShape *s, const StepTimes *t) {
    return (s->P - 1) * (t->forward + t->backward);
}

static double bubble_zb1p(const ScheduleShape *s, const StepTimes *t) {
    return (s->P - 1) * (t->forward + t->backward_input - t->backward_weight);
}

static double bubble_dual(const ScheduleShape *s, const StepTimes *t) {
    return (s->n_stages / 2 - 1) * (t->pair + 2 * t->forward - t->backward - t->backward_weight);
}

static int peak_paired(const ScheduleShape *s) {
    return s->M < 2 ? 1 : 2;
}

static int peak_gpipe(const ScheduleShape *s) {
    return s->M;
}

static int peak_1f1b(const ScheduleShape *s) {
    return (int)min_i64(s->P, s->M);
}

static int peak_interleaved(const ScheduleShape *s) {
    return (int)min_i64(2 * (s->P - 1) + (s->n_chunks - 1) * s->P + 1, s->M * s->n_chunks);
}

static int peak_dual(const ScheduleShape *s) {
    return s->n_stages + 1;
}

static const struct {
    const char *name, *text, *bubble_text;
    void (*steps)(Emitter *e);
    double (*bubble)(const ScheduleShape *s, const StepTimes *t);
    int (*peak)(const ScheduleShape *s);
    int n_chunks, copies;
    bool is_one_rank, is_even; /* P has to be 1; even */
    int micros_a_rank;         /* M has to be at least this x P */
    int multiple_of;           /* M has to be a multiple of this, 0 = of P */
} rows[SCHEDULE_COUNT] = {
    [SCHEDULE_PAIRED] = {"paired", "one rank: a forward beside the backward before it", "0", steps_paired, bubble_none,
                         peak_paired, 1, 1, true, false, 1, 1},
    [SCHEDULE_GPIPE] = {"gpipe", "all forwards, then all backwards; to compare with", "(P-1)(F+B)", steps_gpipe,
                        bubble_1f1b, peak_gpipe, 1, 1, false, false, 0, 1},
    [SCHEDULE_1F1B] = {"1f1b", "forward and backward in turn", "(P-1)(F+B)", steps_1f1b, bubble_1f1b, peak_1f1b, 1, 1,
                       false, false, 0, 1},
    [SCHEDULE_INTERLEAVED] = {"interleaved", "1f1b over two chunks a rank; to compare with", "(P-1)(F+B)",
                              steps_interleaved, bubble_1f1b, peak_interleaved, 2, 1, false, false, 1, 0},
    [SCHEDULE_ZB1P] = {"zb1p", "1f1b that fills gaps with weight-backwards", "(P-1)(F+I-W)", steps_zb1p, bubble_zb1p,
                       peak_1f1b, 1, 1, false, false, 0, 1},
    [SCHEDULE_DUALPIPE] = {"dualpipe", "from both ends, forward and backward overlapped", "(P/2-1)(F&B+2F-B-W)",
                           steps_dualpipe, bubble_dual, peak_dual, 2, 2, false, true, 2, 2},
    [SCHEDULE_DUALPIPEV] = {"dualpipev", "down the ranks and back, forward and backward overlapped",
                            "(P-1)(F&B+2F-B-W)", steps_dualpipev, bubble_dual, peak_dual, 2, 1, false, false, 2, 1},
};

const char *schedule_name(ScheduleKind kind) {
    return rows[kind].name;
}

const char *schedule_text(ScheduleKind kind) {
    return rows[kind].text;
}

int schedule_copies(ScheduleKind kind) {
    return rows[kind].copies;
}

int schedule_find(const char *name) {
    for (int i = 0; i < SCHEDULE_COUNT; i++)
        if (strcmp(rows[i].name, name) == 0) return i;
    return -1;
}

double schedule_bubble(const ScheduleShape *s, const StepTimes *times) {
    return rows[s->kind].bubble(s, times);
}

const char *schedule_bubble_text(ScheduleKind kind) {
    return rows[kind].bubble_text;
}

int schedule_peak_published(const ScheduleShape *s) {
    return rows[s->kind].peak(s);
}

int schedule_multiple(ScheduleKind kind, int P) {
    return rows[kind].multiple_of ? rows[kind].multiple_of : P;
}

/* ---- shape ------------------------------------------------------------------------------------------------------- */

enum { RANKS_MAX = 1024, WORKS_MAX = 1 << 28 };

int schedule_shape(ScheduleShape *s, ScheduleKind kind, int P, int64_t M, char *err, char *hint) {
    const char *name = rows[kind].name;
    memset(s, 0, sizeof *s);
    if (hint) hint[0] = 0;
    if (P < 1 || P > RANKS_MAX) return err_set(err, "a pipeline of %d ranks", P);
    if (M < 1 || M * P > WORKS_MAX) return err_set(err, "%lld micro-batches on %d ranks", (long long)M, P);
    if (rows[kind].is_one_rank && P > 1) {
        err_set(hint, "schedules for more: 1f1b, zb1p, dualpipe, dualpipev");
        return err_set(err, "schedule %s is for one pipeline rank, not for %d", name, P);
    }
    if (rows[kind].is_even && P % 2) {
        err_set(hint, "dualpipev takes any number");
        return err_set(err, "schedule %s needs an even number of ranks, not %d", name, P);
    }
    if (M < (int64_t)rows[kind].micros_a_rank * P) {
        err_set(hint, "a larger train.global_batch_size or a smaller train.micro_batch_size gives more");
        return err_set(err, "schedule %s on %d ranks needs at least %d micro-batches, not %lld", name, P,
                       rows[kind].micros_a_rank * P, (long long)M);
    }
    const int multiple = schedule_multiple(kind, P);
    if (M % multiple)
        return err_set(err, "schedule %s needs a multiple of %d micro-batches, not %lld", name, multiple, (long long)M);
    s->kind = kind;
    s->P = P;
    s->M = (int)M;
    s->n_chunks = rows[kind].n_chunks;
    s->n_stages = P * rows[kind].n_chunks / rows[kind].copies;
    return 0;
}

static void make_rank(const ScheduleShape *s, int rank, StepList *list) {
    const int64_t works = (int64_t)micros_of_chunk(s) * s->n_chunks;
    Emitter e;
    memset(&e, 0, sizeof e);
    e.shape = s;
    e.rank = rank;
    e.list = list;
    e.room = 3 * works;
    e.waiting = (Work *)malloc((size_t)works * sizeof *e.waiting);
    list->n = 0;
    list->step = (PipeStep *)malloc((size_t)e.room * sizeof *list->step);
    CHECK(e.waiting && list->step, "no memory for %lld steps", (long long)e.room);
    rows[s->kind].steps(&e);
    free(e.waiting);
}

PipeSchedule schedule_make(ScheduleShape shape) {
    PipeSchedule s = {shape, (StepList *)calloc((size_t)shape.P, sizeof(StepList))};
    CHECK(s.rank, "no memory for a schedule");
    for (int r = 0; r < shape.P; r++) make_rank(&shape, r, &s.rank[r]);
    return s;
}

void schedule_free(PipeSchedule *s) {
    for (int r = 0; r < s->shape.P; r++) free(s->rank[r].step);
    free(s->rank);
    memset(s, 0, sizeof *s);
}

/* ---- places ------------------------------------------------------------------------------------------------------ */

int schedule_stage(const ScheduleShape *s, int rank, int chunk) {
    if (rank < 0 || rank >= s->P || chunk < 0 || chunk >= s->n_chunks) return -1;
    if (chunk == 0) return rank;
    return s->kind == SCHEDULE_INTERLEAVED ? s->P + rank : s->n_stages - 1 - rank;
}

Place schedule_place(const ScheduleShape *s, int micro, int stage) {
    Place p = {stage % s->P, stage / s->P};
    if (s->kind == SCHEDULE_DUALPIPE) p.chunk = micro / (s->M / 2);
    if (p.chunk == 1 && s->kind != SCHEDULE_INTERLEAVED) p.rank = s->n_stages - 1 - stage;
    return p;
}

bool step_has_forward(const PipeStep *step) {
    return step->kind == STEP_FORWARD || step->kind == STEP_PAIR;
}

bool step_has_backward_input(const PipeStep *step) {
    return step->kind == STEP_BACKWARD || step->kind == STEP_BACKWARD_INPUT || step->kind == STEP_PAIR;
}

const char *step_text(char *buf, size_t buf_len, const PipeStep *step) {
    static const char letters[STEP_KINDS] = {'F', 'B', 'I', 'W', 'B'};
    const Work *f = &step->forward, *b = &step->backward;
    const char letter_b = (char)(letters[step->kind] + (b->chunk == 1 ? 'a' - 'A' : 0));
    const char letter_f = f->chunk == 1 ? 'f' : 'F';
    if (step->kind == STEP_PAIR)
        snprintf(buf, buf_len, "%c%d&%c%d", letter_f, f->micro, letter_b, b->micro);
    else
        snprintf(buf, buf_len, "%c%d", letter_b, step->kind == STEP_FORWARD ? f->micro : b->micro);
    if (step->kind == STEP_FORWARD) buf[0] = letter_f;
    return buf;
}
