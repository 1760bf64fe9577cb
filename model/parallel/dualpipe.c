/* DualPipe and DualPipeV (DeepSeek-V3, section 3.2.1; the eight phases are those of the published lists).
 *
 * A rank sits h ranks from an end and H-1-h from the middle (H = P/2; for the V H = P, the last rank is its middle).
 * `a` enters at the near end, `b` comes over the middle. Backwards of b start a weight-backward early while the
 * pipeline fills, and those of the last ones are put off to its end; between, a forward of one direction always runs
 * beside a backward of the other. */
#include "emit.h"

typedef struct {
    int h, H;
    int n; /* micro-batches of a direction */
    int a, b;
} Position;

static void fill(Emitter *e, Position p) {
    for (int i = 0; i < 2 * (p.H - p.h - 1); i++) emit_forward(e, p.a); /* 1 */
    for (int i = 0; i < p.h + 1; i++) {                                 /* 2 */
        emit_forward(e, p.a);
        emit_forward(e, p.b);
    }
    for (int i = 0; i < p.H - p.h - 1; i++) { /* 3 */
        emit_backward(e, p.b, true);
        emit_weight(e);
        emit_forward(e, p.b);
    }
}

static void main_part(Emitter *e, Position p) {
    for (int i = 0; i < p.n - 2 * p.H + p.h + 1; i++) { /* 4 */
        if (i == 0 && p.h == p.H - 1) {
            /* In the middle the first two do not overlap: the forward is on its way sooner. */
            emit_forward(e, p.a);
            emit_backward(e, p.b, false);
        } else {
            emit_pair(e, p.a, p.b);
        }
        emit_pair(e, p.b, p.a);
    }
    for (int i = 0; i < p.H - p.h - 1; i++) { /* 5 */
        emit_backward(e, p.b, false);
        emit_pair(e, p.b, p.a);
    }
}

static void drain(Emitter *e, Position p) {
    for (int i = 0; i < 2 * (p.h + 1); i++) /* 6: b, a in turn; the second half leaves its weights for later */
        emit_backward(e, i % 2 ? p.a : p.b, i >= p.h + 1);
    for (int i = 0; i < p.H - p.h - 1; i++) { /* 7 */
        emit_weight(e);
        emit_backward(e, p.a, true);
    }
    for (int i = 0; i < p.h + 1; i++) emit_weight(e); /* 8 */
}

static void all_phases(Emitter *e, Position p) {
    fill(e, p);
    main_part(e, p);
    drain(e, p);
}

void steps_dualpipe(Emitter *e) {
    const int H = e->shape->P / 2, is_far = e->rank >= H;
    const Position p = {is_far ? e->shape->P - 1 - e->rank : e->rank, H, e->shape->M / 2, is_far, !is_far};
    all_phases(e, p);
}

void steps_dualpipev(Emitter *e) {
    const Position p = {e->rank, e->shape->P, e->shape->M, 0, 1};
    all_phases(e, p);
}
