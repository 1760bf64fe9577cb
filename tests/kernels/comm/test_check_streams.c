/* The race detector: what events order passes, what none orders ends the process. */
#include "kernels/comm/check_streams.h"

#include <signal.h>

#include "kernels/comm/comm.h"
#include "tests/kernels/op_test.h"

enum { N = 64, EVENT = 7 };

typedef struct {
    Device device;
    Comm *comm;
    Tensor x, y, z;
} Streams;

static Streams streams_open(void) {
    Streams s = {.device = {.ops = ops_cpu()}, .x = T1(DTYPE_F32, N), .y = T1(DTYPE_F32, N), .z = T1(DTYPE_F32, N)};
    return s;
}

/* Runs in a process of its own when it is to end it. */
static void run(void *arg) {
    void (*order)(Streams * s) = *(void (**)(Streams *))arg;
    Streams s = streams_open();
    s.comm = check_streams(&s.device, comm_self(&s.device));
    order(&s);
    s.comm->free(s.comm);
    EXPECT(!s.device.watch, "nobody watches any more");
    t_free_all();
}

static void pass_on(const Streams *s, Stream from, Stream to) {
    op_event_record(&s->device, EVENT, from);
    op_event_wait(&s->device, EVENT, to);
}

/* ---- ordered ----------------------------------------------------------------------------------------------------- */

static void one_stream(Streams *s) {
    op_zero(&s->device, s->x, STREAM_COMPUTE);
    op_copy(&s->device, s->y, s->x, STREAM_COMPUTE);
    op_zero(&s->device, s->x, STREAM_COMPUTE);
}

static void by_an_event(Streams *s) {
    op_zero(&s->device, s->x, STREAM_COMPUTE);
    pass_on(s, STREAM_COMPUTE, STREAM_COMM);
    op_copy(&s->device, s->y, s->x, STREAM_COMM);
    pass_on(s, STREAM_COMM, STREAM_COMPUTE);
    op_zero(&s->device, s->x, STREAM_COMPUTE);
}

/* copy sees compute because comm has. */
static void by_way_of_another(Streams *s) {
    op_zero(&s->device, s->x, STREAM_COMPUTE);
    pass_on(s, STREAM_COMPUTE, STREAM_COMM);
    pass_on(s, STREAM_COMM, STREAM_COPY);
    op_copy(&s->device, s->y, s->x, STREAM_COPY);
}

static void both_only_read(Streams *s) {
    op_copy(&s->device, s->y, s->x, STREAM_COMPUTE);
    op_copy(&s->device, s->z, s->x, STREAM_COMM);
}

static void parts_that_lie_apart(Streams *s) {
    op_zero(&s->device, tensor_rows(s->x, 0, N / 2), STREAM_COMPUTE);
    op_zero(&s->device, tensor_rows(s->x, N / 2, N / 2), STREAM_COMM);
}

static void by_the_host(Streams *s) {
    op_zero(&s->device, s->x, STREAM_COMM);
    op_synchronize(&s->device, STREAM_COMM);
    op_zero(&s->device, s->x, STREAM_COMPUTE);
    op_event_record(&s->device, EVENT, STREAM_COMPUTE);
    op_event_synchronize(&s->device, EVENT);
    op_zero(&s->device, s->x, STREAM_COPY);
}

static void by_a_transfer_itself(Streams *s) {
    op_zero(&s->device, s->x, STREAM_COMPUTE);
    s->comm->all_reduce(s->comm, s->y, s->x, GROUP_WORLD, STREAM_COMM);
    op_zero(&s->device, s->y, STREAM_COMPUTE);
}

TEST(check_streams_lets_what_is_ordered_pass) {
    void (*orders[])(Streams *) = {one_stream,           by_an_event, by_way_of_another,   both_only_read,
                                   parts_that_lie_apart, by_the_host, by_a_transfer_itself};
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++) run(&orders[i]);
}

/* ---- races ------------------------------------------------------------------------------------------------------- */

static void read_too_soon(Streams *s) {
    op_zero(&s->device, s->x, STREAM_COMPUTE);
    op_copy(&s->device, s->y, s->x, STREAM_COMM);
}

static void written_too_soon(Streams *s) {
    op_copy(&s->device, s->y, s->x, STREAM_COMM);
    op_zero(&s->device, tensor_rows(s->x, N - 1, 1), STREAM_COMPUTE);
}

static void written_twice(Streams *s) {
    op_zero(&s->device, s->x, STREAM_COMM);
    op_zero(&s->device, s->x, STREAM_COMPUTE);
}

/* The event was recorded before the write. */
static void an_event_too_early(Streams *s) {
    op_event_record(&s->device, EVENT, STREAM_COMPUTE);
    op_zero(&s->device, s->x, STREAM_COMPUTE);
    op_event_wait(&s->device, EVENT, STREAM_COMM);
    op_copy(&s->device, s->y, s->x, STREAM_COMM);
}

/* The first of two readers was seen, the second was not. */
static void one_of_two_readers(Streams *s) {
    op_copy(&s->device, s->y, s->x, STREAM_COMM);
    pass_on(s, STREAM_COMM, STREAM_COMPUTE);
    op_copy(&s->device, s->z, s->x, STREAM_COPY);
    op_zero(&s->device, s->x, STREAM_COMPUTE);
}

static void a_transfer_that_nobody_ordered(Streams *s) {
    op_zero(&s->device, s->x, STREAM_COMPUTE);
    s->comm->is_ordered_by_caller = true;
    s->comm->all_reduce(s->comm, s->y, s->x, GROUP_WORLD, STREAM_COMM);
}

TEST(check_streams_ends_at_a_race) {
    static const struct {
        void (*order)(Streams *);
        const char *text;
    } races[] = {
        {read_too_soon, "copy on the comm stream reads what zero on the compute stream writes"},
        {written_too_soon, "zero on the compute stream writes what copy on the comm stream reads"},
        {written_twice, "zero on the compute stream writes what zero on the comm stream writes"},
        {an_event_too_early, "copy on the comm stream reads what zero on the compute stream writes"},
        {one_of_two_readers, "zero on the compute stream writes what copy on the copy stream reads"},
        {a_transfer_that_nobody_ordered, "all_reduce on the comm stream reads what zero on the compute stream writes"},
    };
    for (size_t i = 0; i < sizeof races / sizeof *races; i++)
        EXPECT(expect_exit(128 + SIGABRT, races[i].text, run, (void *)(uintptr_t)&races[i].order), "case %zu", i);
}
