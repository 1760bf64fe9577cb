/* See replay.h. */
#include "replay.h"

#include <string.h>

#include "kernels/base/file.h"
#include "kernels/cpu/cpu.h"
#include "tests/test.h"

/* What a stream has seen of itself and of the others, in calls. */
typedef struct {
    int64_t seen[STREAM_COUNT];
} Clock;

struct Graph {
    StepPart part;
    bool is_fresh; /* what it holds has run when it was captured */
    uint64_t calls;
};

static struct {
    Trainer *trainer;
    Device *device;
    const Ops *ops_before;
    Comm comm, *comm_before;
    Ops ops;
    const StepPart *order;
    ReplayCount count;
    Graph graph[REPLAY_GRAPHS_MAX];
    bool is_capturing, is_replaying;
    bool is_inside;           /* of a transfer, whose own copies and waits are its affair */
    uint64_t calls;           /* since the capture or the launch began, as a hash */
    int event_of[EVENTS_MAX]; /* the capture in which it was recorded last, from 1; 0 = in none */
    bool has_joined[STREAM_COUNT];
    Clock stream[STREAM_COUNT], event[EVENTS_MAX];
} replay;

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static void note(const void *data, size_t bytes) {
    replay.calls = hash_bytes(data, bytes, replay.calls);
}

static void note_tensor(Tensor t) {
    note(&t.data, sizeof t.data);
    note(&t.scale, sizeof t.scale);
    note(&t.dtype, sizeof t.dtype);
    note(t.shape, (size_t)t.ndim * sizeof *t.shape);
    note(&t.ld, sizeof t.ld);
}

static void note_call(const char *name, Stream s) {
    if (replay.is_capturing) EXPECT(replay.has_joined[s], "%s runs on stream %d, which is not captured", name, (int)s);
    replay.stream[s].seen[s]++;
    note(name, strlen(name));
    note(&s, sizeof s);
}

static void watch_op(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                     int n_reads) {
    (void)watcher;
    if (replay.is_inside || strstr(op, "synchronize")) return;
    if (strncmp(op, "event", 5) == 0) { /* their number stands where others have their writes */
        note(op, strlen(op));
        note(&n_writes, sizeof n_writes);
        return;
    }
    EXPECT(strncmp(op, "copy_", 5) != 0, "%s: nothing crosses to the host in a part of a step", op);
    note_call(op, s);
    for (int i = 0; i < n_writes; i++) note_tensor(writes[i]);
    for (int i = 0; i < n_reads; i++) note_tensor(reads[i]);
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

/* A replay leaves events as the capture did. */
static void record(int event, Stream s) {
    if (replay.is_replaying) return;
    replay.event[event] = replay.stream[s];
    replay.event_of[event] = replay.is_capturing && replay.has_joined[s] ? replay.count.n_captured + 1 : 0;
}

static void wait(int event, Stream s) {
    if (replay.is_replaying) return;
    const int now = replay.is_capturing ? replay.count.n_captured + 1 : 0;
    EXPECT(replay.event_of[event] == now, "in capture %d, stream %d waits for event %d of capture %d", now, (int)s,
           event, replay.event_of[event]);
    if (now) replay.has_joined[s] = true;
    for (int i = 0; i < STREAM_COUNT; i++)
        if (replay.event[event].seen[i] > replay.stream[s].seen[i])
            replay.stream[s].seen[i] = replay.event[event].seen[i];
}

static void event_synchronize(int event) {
    EXPECT(!replay.is_capturing && replay.event_of[event] == 0, "the host waits for event %d", event);
}

static void synchronize(Stream s) {
    EXPECT(!replay.is_capturing || replay.is_inside, "the host waits for stream %d in a capture", (int)s);
}

/* ---- transfers --------------------------------------------------------------------------------------------------- */

/* The events that a Comm puts around a call itself, where its caller orders nothing. */
static void begin_transfer(Comm *c, const char *name, Stream s, Group g, int peer) {
    replay.comm_before->is_ordered_by_caller = c->is_ordered_by_caller;
    if (!c->is_ordered_by_caller) {
        op_event_record(c->device, EVENT_COMM_BEGIN, STREAM_COMPUTE);
        op_event_wait(c->device, EVENT_COMM_BEGIN, s);
    }
    note_call(name, s);
    note(&g, sizeof g);
    note(&peer, sizeof peer);
    replay.is_inside = true;
}

static void end_transfer(Comm *c, Stream s, Tensor first, Tensor second) {
    replay.is_inside = false;
    note_tensor(first);
    note_tensor(second);
    if (c->is_ordered_by_caller) return;
    op_event_record(c->device, EVENT_COMM_END, s);
    op_event_wait(c->device, EVENT_COMM_END, STREAM_COMPUTE);
}

#define TRANSFER(name, g, peer, first, second, call)                                                                   \
    do {                                                                                                               \
        begin_transfer(c, name, s, g, peer);                                                                           \
        replay.comm_before->call;                                                                                      \
        end_transfer(c, s, first, second);                                                                             \
    } while (0)

static void all_reduce(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    TRANSFER("all_reduce", g, 0, y, x, all_reduce(replay.comm_before, y, x, g, s));
}

static void reduce_scatter(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    TRANSFER("reduce_scatter", g, 0, y, x, reduce_scatter(replay.comm_before, y, x, g, s));
}

static void all_gather(Comm *c, Tensor y, Tensor x, Group g, Stream s) {
    TRANSFER("all_gather", g, 0, y, x, all_gather(replay.comm_before, y, x, g, s));
}

static void send(Comm *c, Tensor x, int to, Group g, Stream s) {
    TRANSFER("send", g, to, x, tensor_none(), send(replay.comm_before, x, to, g, s));
}

static void recv(Comm *c, Tensor y, int from, Group g, Stream s) {
    TRANSFER("recv", g, from, y, tensor_none(), recv(replay.comm_before, y, from, g, s));
}

static void dispatch(Comm *c, Tensor received, DispatchPlan plan, Tensor x, Tensor ids, Tensor weights, Stream s) {
    TRANSFER("dispatch", GROUP_EXPERT, 0, received, x,
             dispatch(replay.comm_before, received, plan, x, ids, weights, s));
}

static void combine(Comm *c, Tensor y, Tensor dw, Tensor rows, Tensor dweights, DispatchPlan plan, Stream s) {
    TRANSFER("combine", GROUP_EXPERT, 0, y, rows, combine(replay.comm_before, y, dw, rows, dweights, plan, s));
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

static void begin_calls(void) {
    replay.calls = 0;
    replay.device->watch = watch_op;
}

static uint64_t end_calls(void) {
    replay.device->watch = NULL;
    return replay.calls;
}

static void graph_begin(Stream s) {
    EXPECT(!replay.is_capturing && s == STREAM_COMPUTE);
    replay.is_capturing = true;
    memset(replay.has_joined, 0, sizeof replay.has_joined);
    replay.has_joined[s] = true;
    memset(replay.stream, 0, sizeof replay.stream);
    begin_calls();
}

static Graph *graph_end(Stream s) {
    REQUIRE(replay.is_capturing && s == STREAM_COMPUTE && replay.count.n_captured < REPLAY_GRAPHS_MAX, "%d graphs",
            replay.count.n_captured);
    for (int other = 0; other < STREAM_COUNT; other++)
        EXPECT(replay.stream[s].seen[other] == replay.stream[other].seen[other],
               "what stream %d was given last is not waited for", other);
    Graph *g = &replay.graph[replay.count.n_captured];
    *g = (Graph){replay.order[replay.count.n_captured++], true, end_calls()};
    replay.is_capturing = false;
    return g;
}

static void run_again(StepPart part) {
    Model *m = replay.trainer->model;
    if (part == STEP_UPDATE) {
        model_update(m);
        return;
    }
    if (part != STEP_NEXT) model_zero(m);
    if (part == STEP_PIPELINE) {
        pipeline_run(replay.trainer->pipeline, (int)replay.trainer->n_piped);
        return;
    }
    model_forward(m, &m->train, FORWARD_TRAIN);
    model_backward(m, &m->train);
}

static void graph_launch(Graph *g, Stream s) {
    EXPECT(!replay.is_capturing && s == STREAM_COMPUTE);
    replay.count.n_launched++;
    if (!g->is_fresh) {
        replay.is_replaying = true;
        begin_calls();
        run_again(g->part);
        replay.is_replaying = false;
        EXPECT(end_calls() == g->calls, "part %d makes other calls than those captured", (int)g->part);
    }
    g->is_fresh = false;
}

static void graph_free(Graph *g) {
    EXPECT(g >= replay.graph && g < replay.graph + replay.count.n_captured);
    replay.count.n_freed++;
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

static void replace_comm(Trainer *t) {
    Comm *c = &replay.comm;
    replay.comm_before = t->model->comm;
    *c = *replay.comm_before;
    c->all_reduce = all_reduce;
    c->reduce_scatter = reduce_scatter;
    c->all_gather = all_gather;
    c->send = send;
    c->recv = recv;
    c->dispatch = dispatch;
    c->combine = combine;
    c->needs_host = false;
    t->model->comm = c;
}

void replay_open(Trainer *t, Device *d, const StepPart *order) {
    memset(&replay, 0, sizeof replay);
    replay.trainer = t;
    replay.device = d;
    replay.order = order;
    replay.ops_before = d->ops;
    replay.ops = *d->ops;
    replay.ops.event_record = record;
    replay.ops.event_wait = wait;
    replay.ops.event_synchronize = event_synchronize;
    replay.ops.synchronize = synchronize;
    replay.ops.graph_begin = graph_begin;
    replay.ops.graph_end = graph_end;
    replay.ops.graph_launch = graph_launch;
    replay.ops.graph_free = graph_free;
    d->ops = &replay.ops;
    replace_comm(t);
}

ReplayCount replay_count(void) {
    return replay.count;
}

void replay_close(void) {
    trainer_forget_graphs(replay.trainer);
    EXPECT_EQ(replay.count.n_freed, replay.count.n_captured);
    replay.trainer->model->comm = replay.comm_before;
    replay.device->ops = replay.ops_before;
}
