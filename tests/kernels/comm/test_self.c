/* The mesh of one runs every call of comm.h: sums and gathers of one rank are copies, exchanges are the identity. */
#include <signal.h>
#include <string.h>

#include "kernels/comm/comm.h"
#include "tests/kernels/op_test.h"

enum { ABORTED = 128 + SIGABRT };

typedef struct {
    Device device;
    Comm *comm;
    int n_copies;
} Self;

static void count_copy(void *watcher, const char *op, Stream s, const Tensor *writes, int n_writes, const Tensor *reads,
                       int n_reads) {
    (void)writes, (void)n_writes, (void)reads, (void)n_reads;
    EXPECT(strcmp(op, "copy") == 0 && s == STREAM_COMM, "%s on stream %d", op, (int)s);
    ++*(int *)watcher;
}

static void open_self(Self *self) {
    memset(self, 0, sizeof *self);
    self->device = (Device){.ops = ops_cpu(), .watch = count_copy, .watcher = &self->n_copies};
    self->comm = comm_self(&self->device);
}

TEST(comm_self_is_a_mesh_of_one) {
    Self self;
    open_self(&self);
    const Comm *c = self.comm;
    EXPECT(strcmp(c->name, "self") == 0 && c->device == &self.device);
    EXPECT(c->mesh.world == 1 && c->mesh.rank == 0 && c->mesh.n_dp == 1 && c->mesh.n_pp == 1 && c->mesh.n_ep == 1);
    for (int g = 0; g < GROUP_COUNT; g++) EXPECT(c->mesh.size[g] == 1 && c->mesh.rank_in[g] == 0, "group %d", g);
    EXPECT(c->all_reduce && c->reduce_scatter && c->all_gather && c->broadcast && c->send && c->recv && c->dispatch);
    EXPECT(c->combine && c->alloc_symmetric && c->free);
    self.comm->free(self.comm);
}

TEST(comm_self_collectives_copy) {
    Self self;
    open_self(&self);
    Comm *c = self.comm;
    void (*const calls[])(Comm *, Tensor, Tensor, Group, Stream) = {c->all_reduce, c->reduce_scatter, c->all_gather};
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16, DTYPE_I32};
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 3; k++) {
            Tensor x = t_normal(T1(dtypes[k], 70), 9, 1), y = t_poison(T1(dtypes[k], 70)), before = t_copy(x);
            self.n_copies = 0;
            calls[i](c, y, x, (Group)(k + i), STREAM_COMM);
            EXPECT(t_same_bits(y, x) && t_same_bits(x, before), "call %d, %s", i, dtype_name(dtypes[k]));
            EXPECT_EQ(self.n_copies, 1);
            calls[i](c, x, x, GROUP_DATA, STREAM_COMM);
            EXPECT(t_same_bits(x, before), "call %d in place", i);
            EXPECT_EQ(self.n_copies, 1);
        }
    }
    Tensor x = t_normal(T1(DTYPE_F32, 70), 1, 1), before = t_copy(x);
    c->broadcast(c, x, 0, GROUP_WORLD, STREAM_COMM);
    EXPECT(t_same_bits(x, before), "a broadcast to nobody");
    c->free(c);
}

TEST(comm_self_dispatch_and_combine_are_the_identity) {
    Self self;
    open_self(&self);
    Comm *c = self.comm;
    Tensor x = t_normal(T2(DTYPE_F32, 6, 8), 1, 1), weights = t_normal(T2(DTYPE_F32, 6, 2), 1, 2);
    Tensor ids = T2(DTYPE_I32, 6, 2), received = t_poison(T2(DTYPE_F32, 6, 8));
    for (int64_t i = 0; i < 12; i++) t_set(ids, i, i == 5 ? -1 : (double)i);
    DispatchPlan plan = {t_poison(T2(DTYPE_I32, 6, 2)), t_poison(T2(DTYPE_F32, 6, 2)), tensor_none()};
    c->dispatch(c, received, plan, x, ids, weights, STREAM_COMM);
    EXPECT(t_same_bits(received, x) && t_same_bits(plan.ids, ids) && t_same_bits(plan.weights, weights));
    EXPECT_EQ(self.n_copies, 3);

    Tensor y = t_poison(T3(DTYPE_F32, 1, 6, 8)), dw = t_poison(T2(DTYPE_F32, 6, 2));
    c->combine(c, y, dw, received, weights, plan, STREAM_COMM);
    EXPECT(t_same_bits(tensor_plane(y, 0), x) && t_same_bits(dw, weights));
    t_poison(y);
    c->combine(c, y, tensor_none(), received, tensor_none(), plan, STREAM_COMM);
    EXPECT(t_same_bits(tensor_plane(y, 0), x), "forward: no weights travel");

    /* What was computed in the place where it would arrive is not moved at all. */
    self.n_copies = 0;
    DispatchPlan same = {ids, weights, tensor_none()};
    c->dispatch(c, x, same, x, ids, weights, STREAM_COMM);
    c->combine(c, y, weights, tensor_plane(y, 0), weights, same, STREAM_COMM);
    EXPECT_EQ(self.n_copies, 0);
    c->free(c);
}

/* Bytes and scales of a tensor of its own, of a part of a larger one too: what lies between is not touched. */
TEST(comm_self_dispatches_tiles_with_their_scales) {
    enum { ROWS = 6, COLS = 130, ALL = 9, FIRST = 2 };
    Self self;
    open_self(&self);
    uint8_t bytes[2][ALL * COLS], before[ALL * COLS];
    float scales[2][2 * ALL], before_scales[2 * ALL];
    Tensor x, y;
    for (int i = 0; i < ALL * COLS; i++) bytes[0][i] = (uint8_t)(i * 7), bytes[1][i] = before[i] = 0x55;
    for (int i = 0; i < 2 * ALL; i++) scales[0][i] = (float)i, scales[1][i] = before_scales[i] = -1;
    x = tensor_rows(tensor_tiles(bytes[0], scales[0], DTYPE_E4M3, ALL, COLS), FIRST, ROWS);
    y = tensor_rows(tensor_tiles(bytes[1], scales[1], DTYPE_E4M3, ALL, COLS), FIRST, ROWS);
    memcpy(before + FIRST * COLS, bytes[0] + FIRST * COLS, ROWS * COLS);
    for (int i = 0; i < 2; i++) memcpy(before_scales + i * ALL + FIRST, x.scale + i * ALL, ROWS * sizeof(float));
    const Tensor ids = T2(DTYPE_I32, ROWS, 2);
    const DispatchPlan plan = {ids, tensor_none(), tensor_none()};
    self.comm->dispatch(self.comm, y, plan, x, ids, tensor_none(), STREAM_COMM);
    EXPECT(memcmp(bytes[1], before, sizeof before) == 0 && memcmp(scales[1], before_scales, sizeof before_scales) == 0);
    EXPECT_EQ(self.n_copies, 2);
    self.n_copies = 0;
    self.comm->dispatch(self.comm, x, plan, x, ids, tensor_none(), STREAM_COMM);
    EXPECT_EQ(self.n_copies, 0);
    self.comm->free(self.comm);
}

TEST(comm_self_symmetric_memory_is_zeroed) {
    Self self;
    open_self(&self);
    unsigned char *p = (unsigned char *)self.comm->alloc_symmetric(self.comm, &self.device, 1000);
    REQUIRE(p, "no memory");
    for (int i = 0; i < 1000; i++) EXPECT(p[i] == 0, "byte %d", i);
    op_release(&self.device, p);
    self.comm->free(self.comm);
}

/* Arguments that any other Comm would refuse. */
TEST(comm_silent_does_nothing) {
    Self self;
    open_self(&self);
    Comm silent = comm_silent(self.comm, self.comm->device), *c = &silent;
    Tensor x = T1(DTYPE_F32, 7), y = t_poison(T1(DTYPE_F32, 8)), before = t_copy(y), none = tensor_none();
    const DispatchPlan plan = {none, none, none};
    c->all_reduce(c, y, x, GROUP_DATA, STREAM_COMM);
    c->reduce_scatter(c, y, x, GROUP_DATA, STREAM_COMM);
    c->all_gather(c, y, x, GROUP_DATA, STREAM_COMM);
    c->broadcast(c, y, 1, GROUP_DATA, STREAM_COMM);
    c->send(c, y, 1, GROUP_PIPE, STREAM_COMM);
    c->recv(c, y, 1, GROUP_PIPE, STREAM_COMM);
    c->dispatch(c, y, plan, x, none, none, STREAM_COMM);
    c->combine(c, y, none, x, none, plan, STREAM_COMM);
    EXPECT(t_same_bits(y, before) && self.n_copies == 0, "%d copies", self.n_copies);
    EXPECT(c->mesh.world == 1 && c->device == &self.device);
    self.comm->free(self.comm);
}

static void broadcast_from_other(void *arg) {
    Comm *c = (Comm *)arg;
    c->broadcast(c, tensor_none(), 1, GROUP_WORLD, STREAM_COMM);
}
static void send(void *arg) {
    Comm *c = (Comm *)arg;
    c->send(c, tensor_none(), 1, GROUP_PIPE, STREAM_COMM);
}
static void receive(void *arg) {
    Comm *c = (Comm *)arg;
    c->recv(c, tensor_none(), 0, GROUP_PIPE, STREAM_COMM);
}
static void combine_two_planes(void *arg) {
    Comm *c = (Comm *)arg;
    DispatchPlan plan = {tensor_none(), tensor_none(), tensor_none()};
    c->combine(c, T3(DTYPE_F32, 2, 6, 8), tensor_none(), T2(DTYPE_F32, 6, 8), tensor_none(), plan, STREAM_COMM);
}
static void reduce_to_other_size(void *arg) {
    Comm *c = (Comm *)arg;
    c->all_reduce(c, T1(DTYPE_F32, 7), T1(DTYPE_F32, 8), GROUP_DATA, STREAM_COMM);
}

TEST(comm_self_refuses_other_ranks) {
    Self self;
    open_self(&self);
    EXPECT(expect_exit(ABORTED, "broadcast from rank 1", broadcast_from_other, self.comm));
    EXPECT(expect_exit(ABORTED, "rank 1 on a mesh of one", send, self.comm));
    EXPECT(expect_exit(ABORTED, "rank 0 on a mesh of one", receive, self.comm));
    EXPECT(expect_exit(ABORTED, "one plane", combine_two_planes, self.comm));
    EXPECT(expect_exit(ABORTED, "copy", reduce_to_other_size, self.comm));
    self.comm->free(self.comm);
}
