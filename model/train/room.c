/* More room for the rows of the experts, when routing was more uneven than moe.capacity has planned for. See run.h.
 *
 * The activations are planned again with twice the capacity and take memory of their new size, between two steps. A
 * reservation that could hold the doubled plan would have to be paid from the first step on, which is what a capacity
 * below the worst case is there to avoid. Weights, moments and the data position are not touched; the capacity is no
 * part of a checkpoint. */
#include "kernels/base/check.h"
#include "run.h"

void run_make_room(Run *r, const char *what) {
    Model *m = &r->model;
    const double capacity = m->shape.capacity;
    const long long rows = (long long)m->shape.N;
    const size_t bytes = m->slots.peak + m->scratch.peak;
    char err[ERR_LEN], hint[ERR_LEN], before[32], now[32];
    op_synchronize(&r->device, STREAM_COMPUTE);
    trainer_forget_graphs(&r->trainer);
    if (model_set_capacity(m, 2 * capacity, err, hint) != 0)
        FAIL(hint[0] ? hint : NULL, "%s: expert rows did not fit into %lld a rank, and for twice as many %s", what,
             rows, err);
    const Ops *rehearsal = device_rehearsal(&r->device);
    if (rehearsal) model_rehearse(m, rehearsal);
    log_warn(&r->log, r->trainer.state.step,
             "%s: expert rows did not fit into %lld a rank (moe.capacity %g); now %lld (%g), activations %s instead of "
             "%s; done again",
             what, rows, capacity, (long long)m->shape.N, m->shape.capacity,
             format_bytes(now, sizeof now, (double)(m->slots.peak + m->scratch.peak)),
             format_bytes(before, sizeof before, (double)bytes));
}
