/* See pipeline.h. */
#include "pipeline.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/comm/watch.h"
#include "overlap.h"
#include "slots.h"
#include "stages.h"

/* What was queued before a pipeline, and in it; then one for each tensor between stages: its last user is done with it.
 */
enum { EVENT_PIPELINE = EVENT_PASSAGE + 2, EVENT_BOUNDARY, BOUNDARIES_MAX = EVENTS_MAX - 2 - EVENT_BOUNDARY };

struct Pipeline {
    Model *model; /* NULL: nothing is computed, slots are counted */
    ScheduleKind kind;
    int P, rank;
    PipeSchedule schedule;   /* of the last step's micro-batches; none before the first */
    TransferList *transfers; /* of all ranks */
    Slots slots;
    PhaseLaunch *launches;
};

/* ---- its lists --------------------------------------------------------------------------------------------------- */

static void drop_lists(Pipeline *p) {
    slots_free(&p->slots);
    transfers_free(p->transfers, p->P);
    p->transfers = NULL;
    if (p->schedule.rank) schedule_free(&p->schedule);
}

/* Transfers are ordered by times that all ranks agree on: those of an average stage. */
static void make_lists(Pipeline *p, ScheduleShape shape, int n_layers, bool exchanges) {
    const int average = n_layers / shape.n_stages;
    const StepTimes times = overlap_step_times(exchanges ? 1 : 0, average > 0 ? average : 1);
    drop_lists(p);
    p->schedule = schedule_make(shape);
    p->transfers = transfers_make(&p->schedule, &times);
    p->slots = slots_make(&p->schedule, p->rank);
}

/* ---- without gradients ------------------------------------------------------------------------------------------- */

static int n_forward_chunks(const Pipeline *p, const ScheduleShape *shape) {
    return shape->n_stages > p->P ? shape->n_chunks : 1; /* of one direction */
}

static ScheduleShape forward_shape(const Pipeline *p) {
    ScheduleShape shape;
    char err[ERR_LEN];
    CHECK(schedule_shape(&shape, p->kind, p->P, p->model->shape.part.n_batches, err, NULL) == 0, "%s", err);
    return shape;
}

static Tensor rows_of_boundary(const Pipeline *p, int i, int64_t T) {
    Tensor t = p->model->boundary[i];
    t.shape[0] = T;
    return t;
}

/* Through the stages that this rank has of one direction, one after the other; a->shape.T rows between them. */
static void forward_stages(void *arg, Acts *a, ForwardMode mode) {
    Pipeline *p = (Pipeline *)arg;
    Model *m = p->model;
    Comm *c = m->comm;
    const ScheduleShape shape = forward_shape(p);
    Tensor in = rows_of_boundary(p, 0, a->shape.T), out = rows_of_boundary(p, 1, a->shape.T);
    for (int chunk = 0; chunk < n_forward_chunks(p, &shape); chunk++) {
        const int stage = schedule_stage(&shape, p->rank, chunk);
        const bool is_last = stage == shape.n_stages - 1;
        const Place before = schedule_place(&shape, 0, stage - (stage > 0));
        const Place behind = schedule_place(&shape, 0, stage + !is_last);
        Passage e = passage_of(m, a, chunk, mode);
        if (stage > 0 && before.rank != p->rank) c->recv(c, in, before.rank, GROUP_PIPE, STREAM_COMM);
        e.in = in;
        e.out = out;
        passage_forward(&e);
        if (!is_last && behind.rank != p->rank) c->send(c, out, behind.rank, GROUP_PIPE, STREAM_COMM);
        if (!is_last && behind.rank == p->rank) {
            in = out;
            out = rows_of_boundary(p, 0, a->shape.T);
        }
    }
}

/* ---- open and closed --------------------------------------------------------------------------------------------- */

static bool exchanges(const ModelShape *s) {
    return s->R > 1 && shape_n_moe(s) > 0;
}

Pipeline *pipeline_open(Model *m, ScheduleKind kind) {
    const ModelShape *s = &m->shape;
    Pipeline *p = (Pipeline *)calloc(1, sizeof *p);
    CHECK(p, "no memory for a pipeline");
    p->model = m;
    p->kind = kind;
    p->P = m->comm->mesh.n_pp;
    p->rank = m->comm->mesh.pp;
    int most = 0;
    for (int c = 0; c < s->part.n_chunks; c++)
        if (shape_chunk_blocks(s, c) > most) most = shape_chunk_blocks(s, c);
    p->launches = (PhaseLaunch *)calloc((size_t)most * OVERLAP_ROWS + 1, sizeof *p->launches);
    CHECK(p->launches, "no memory for the phases of %d blocks", most);
    const ScheduleShape shape = forward_shape(p);
    m->stages = (Stages){forward_stages, p, schedule_place(&shape, 0, shape.n_stages - 1).rank == p->rank};
    return p;
}

void pipeline_close(Pipeline *p) {
    if (!p) return;
    p->model->stages = (Stages){NULL, NULL, false};
    drop_lists(p);
    free(p->launches);
    free(p);
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

/* From here on transfers run beside the mathematics, ordered by the events of passages and boundaries alone. These are
 * recorded here first: a graph may wait for nothing that was recorded outside it, nor may what is outside for what is
 * in it. */
static void begin_beside(Pipeline *p) {
    const Device *d = p->model->device;
    p->model->comm->is_ordered_by_caller = true;
    for (int i = 0; i < p->model->shape.part.n_boundaries; i++) op_event_record(d, EVENT_BOUNDARY + i, STREAM_COMPUTE);
    op_event_record(d, EVENT_PIPELINE, STREAM_COMPUTE);
    op_event_wait(d, EVENT_PIPELINE, STREAM_COMM);
}

static void end_beside(Pipeline *p) {
    p->model->comm->is_ordered_by_caller = false;
    op_event_record(p->model->device, EVENT_PIPELINE, STREAM_COMM);
    op_event_wait(p->model->device, EVENT_PIPELINE, STREAM_COMPUTE);
}

/* ---- transfers --------------------------------------------------------------------------------------------------- */

/* A tensor between stages is used by one stream at a time, each behind the one before. */
static Tensor boundary_begin(const Pipeline *p, int i, Stream s) {
    if (i < 0) return tensor_none();
    op_event_wait(p->model->device, EVENT_BOUNDARY + i, s);
    return p->model->boundary[i];
}

static void boundary_end(const Pipeline *p, int i, Stream s) {
    if (i >= 0) op_event_record(p->model->device, EVENT_BOUNDARY + i, s);
}

static void send_to(Pipeline *p, int i, int peer) {
    Comm *c = p->model->comm;
    c->send(c, boundary_begin(p, i, STREAM_COMM), peer, GROUP_PIPE, STREAM_COMM);
    boundary_end(p, i, STREAM_COMM);
}

static void receive_from(Pipeline *p, int i, int peer) {
    Comm *c = p->model->comm;
    c->recv(c, boundary_begin(p, i, STREAM_COMM), peer, GROUP_PIPE, STREAM_COMM);
    boundary_end(p, i, STREAM_COMM);
}

static void transfer(Pipeline *p, const Transfer *x) {
    const int i = slots_transfer(&p->slots, x);
    if (!p->model) return;
    if (x->is_send)
        send_to(p, i, x->peer);
    else
        receive_from(p, i, x->peer);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static Passage begin_passage(Pipeline *p, Acts *a, Work w, const WorkSlots *at) {
    acts_point(a, w.chunk, at->slot);
    a->batch = w.micro;
    return passage_of(p->model, a, w.chunk, FORWARD_TRAIN);
}

/* The phases of a step in the order of its launches; f or b is NULL where the step has none. */
static void run_phases(Pipeline *p, StepKind kind, Passage *f, Passage *b) {
    const int n = overlap_launches(p->launches, kind, f ? f->n_blocks : 0, b ? b->n_blocks : 0);
    for (int k = 0; k < n; k++) {
        const PhaseLaunch *l = &p->launches[k];
        if (l->row.pass == PASS_FORWARD && l->row.phase == PHASE_ATTN) passage_seam_forward(f, l->layer);
        if (l->row.pass == PASS_BACKWARD_INPUT && l->row.phase == PHASE_COMBINE) passage_seam_backward(b, l->layer + 1);
        passage_phase(l->row.pass == PASS_FORWARD ? f : b, l->layer, l->row.phase, l->row.pass);
    }
    if (f) passage_seam_forward(f, f->n_blocks);
    if (b && kind != STEP_BACKWARD_WEIGHT) passage_seam_backward(b, 0);
}

static void compute(Pipeline *p, const PipeStep *step, const WorkSlots *forward, const WorkSlots *backward) {
    Model *m = p->model;
    Passage f, b;
    if (forward) {
        watch_phase("forward", step->forward.micro);
        f = begin_passage(p, m->shape.part.pairs ? &m->beside : &m->train, step->forward, forward);
        f.in = boundary_begin(p, forward->in, STREAM_COMPUTE);
        f.out = boundary_begin(p, forward->out, STREAM_COMPUTE);
    }
    if (backward) {
        watch_phase("backward", step->backward.micro);
        b = begin_passage(p, &m->train, step->backward, backward);
        b.event = EVENT_PASSAGE + 1;
        b.dout = boundary_begin(p, backward->in, STREAM_COMPUTE);
        b.dx = boundary_begin(p, backward->out, STREAM_COMPUTE);
    }
    run_phases(p, step->kind, forward ? &f : NULL, backward ? &b : NULL);
    const WorkSlots *used[] = {forward, backward};
    for (int i = 0; i < 2; i++) {
        if (!used[i]) continue;
        boundary_end(p, used[i]->in, STREAM_COMPUTE);
        boundary_end(p, used[i]->out, STREAM_COMPUTE);
    }
}

static void run_step(Pipeline *p, const PipeStep *step) {
    const bool has_forward = step_has_forward(step), has_backward = step->kind != STEP_FORWARD;
    WorkSlots forward, backward;
    if (has_forward) forward = slots_begin_forward(&p->slots, step->forward);
    if (has_backward) backward = slots_begin_backward(&p->slots, step->kind, step->backward);
    if (p->model) compute(p, step, has_forward ? &forward : NULL, has_backward ? &backward : NULL);
    if (has_forward) slots_end_forward(&p->slots, step->forward, forward);
    if (has_backward) slots_end_backward(&p->slots, step->kind, step->backward, backward);
}

/* Transfers in the order that all ranks agree on, each before the steps that it was posted before. */
static void run_list(Pipeline *p) {
    const StepList *list = &p->schedule.rank[p->rank];
    const TransferList *transfers = &p->transfers[p->rank];
    for (int64_t k = 0, t = 0; k <= list->n; k++) {
        for (; t < transfers->n && transfers->transfer[t].post == k; t++) transfer(p, &transfers->transfer[t]);
        if (k < list->n) run_step(p, &list->step[k]);
    }
}

void pipeline_run(Pipeline *p, int n) {
    const ModelShape *s = &p->model->shape;
    RANGE(p->model->device, "pipeline");
    CHECK(n <= s->part.n_batches, "%d micro-batches, %d are planned", n, s->part.n_batches);
    if (p->schedule.shape.M != n) {
        ScheduleShape shape;
        char err[ERR_LEN];
        CHECK(schedule_shape(&shape, p->kind, p->P, n, err, NULL) == 0, "%s", err);
        make_lists(p, shape, s->n_blocks, exchanges(s));
    }
    begin_beside(p);
    run_list(p);
    end_beside(p);
}

/* ---- what it needs ----------------------------------------------------------------------------------------------- */

static int set_chunks(RankPart *part, const ScheduleShape *shape, int rank, const ModelShape *s, char *err) {
    Stage *stages = (Stage *)calloc((size_t)shape->n_stages, sizeof *stages);
    CHECK(stages, "no memory for %d stages", shape->n_stages);
    const int result = stages_of_model(stages, shape->n_stages, s, err);
    part->n_chunks = shape->n_chunks;
    for (int c = 0; c < shape->n_chunks; c++) {
        const int stage = schedule_stage(shape, rank, c);
        part->chunk[c] = (Chunk){.first = stages[stage].first,
                                 .end = stages[stage].end,
                                 .embeds = stage == 0,
                                 .has_loss = stage == shape->n_stages - 1};
    }
    free(stages);
    return result;
}

int pipeline_part(RankPart *part, const ScheduleShape *shape, int rank, const ModelShape *s, char *err) {
    const RankTop top = stages_rank_top(shape, rank, s->n_mtp);
    Pipeline p;
    memset(part, 0, sizeof *part);
    memset(&p, 0, sizeof p);
    if (set_chunks(part, shape, rank, s, err) != 0) return -1;
    part->embedding = top.embedding;
    part->shares_embedding = top.embedding && s->n_mtp > 0 && !(top.embeds && top.has_loss);
    part->embedding_is_copy = part->shares_embedding && !top.embeds;
    part->is_copy = schedule_copies(shape->kind) > 1 && rank >= shape->P / 2;
    part->n_batches = shape->M;

    p.P = shape->P;
    p.rank = rank;
    make_lists(&p, *shape, s->n_blocks, exchanges(s));
    run_list(&p);
    for (int64_t k = 0; k < p.schedule.rank[rank].n; k++)
        part->pairs |= p.schedule.rank[rank].step[k].kind == STEP_PAIR;
    for (int c = 0; c < shape->n_chunks; c++)
        memcpy(part->chunk[c].n_slots, p.slots.n_slots[c], sizeof p.slots.n_slots[c]);
    part->n_boundaries = p.slots.n_boundaries > 2 ? p.slots.n_boundaries : 2; /* an evaluation has two */
    drop_lists(&p);
    if (part->n_boundaries > BOUNDARIES_MAX)
        return err_set(err, "%d tensors between stages under way, more than %d", part->n_boundaries, BOUNDARIES_MAX);
    return 0;
}
