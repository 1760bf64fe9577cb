/* The rings between host and device: what was written arrives, and nothing is overwritten before its event. */
#include <signal.h>
#include <string.h>

#include "model/staging.h"
#include "tests/model/model_test.h"

/* A backend on which no copy is done before somebody waits for the event behind it. */
enum { COPIES_MAX = 64 };
typedef struct {
    void *to;
    const void *from;
    size_t bytes;
    int event; /* -1: not recorded yet */
} LateCopy;
static struct {
    int n, n_waits;
    LateCopy copy[COPIES_MAX];
} late;

static void late_copy(void *to, const void *from, size_t bytes, Stream s) {
    REQUIRE(late.n < COPIES_MAX && s == STREAM_COMPUTE, "copy %d on stream %d", late.n, (int)s);
    late.copy[late.n++] = (LateCopy){to, from, bytes, -1};
}

static void late_record(int event, Stream s) {
    REQUIRE(late.n > 0 && late.copy[late.n - 1].event == -1 && s == STREAM_COMPUTE, "event %d without a copy", event);
    late.copy[late.n - 1].event = event;
}

/* A stream is in order: all copies up to the last one with this event. */
static void late_wait(int event) {
    int end = 0;
    for (int i = 0; i < late.n; i++)
        if (late.copy[i].event == event) end = i + 1;
    for (int i = 0; i < end; i++) memcpy(late.copy[i].to, late.copy[i].from, late.copy[i].bytes);
    memmove(late.copy, late.copy + end, (size_t)(late.n - end) * sizeof *late.copy);
    late.n -= end;
    late.n_waits += end > 0;
}

static Ops late_ops(void) {
    Ops ops = *ops_cpu();
    memset(&late, 0, sizeof late);
    ops.copy_in = ops.copy_out = late_copy;
    ops.event_record = late_record;
    ops.event_synchronize = late_wait;
    return ops;
}

/* The shape and the memory of a small model; the rings on their own. */
typedef struct {
    Fixture f;
    Ops ops;
    Device device;
    Arena pinned;
    Staging staging;
} Rings;

static void rings_open(Rings *r, size_t slot_bytes) {
    fixture_open(&r->f, NULL);
    r->ops = late_ops();
    r->device = (Device){.ops = &r->ops};
    r->pinned = arena_make("pinned", NULL, 0);
    staging_layout(&r->staging, &r->device, &r->f.model.shape, slot_bytes, &r->pinned);
    r->pinned = arena_make("pinned", op_host_alloc(&r->device, r->pinned.peak), r->pinned.peak);
    staging_layout(&r->staging, &r->device, &r->f.model.shape, slot_bytes, &r->pinned);
    EXPECT(r->pinned.peak == r->pinned.size, "counted %zu bytes, used %zu", r->pinned.size, r->pinned.peak);
}

static void rings_close(Rings *r) {
    op_host_release(&r->device, r->pinned.base);
    fixture_close(&r->f);
}

/* Three rounds, and nobody waits before the first is over; the newest copies of a round are still on their way. */
TEST(staging_slots_wait_for_their_copy) {
    enum { SENT = 3 * STAGING_SLOTS };
    Rings r;
    int32_t device[SENT] = {0};
    rings_open(&r, 4 * sizeof(int32_t));
    for (int i = 0; i < SENT; i++) {
        int32_t *slot = (int32_t *)staging_take(&r.staging);
        EXPECT_EQ(late.n_waits, i < STAGING_SLOTS ? 0 : i - STAGING_SLOTS + 1);
        EXPECT_EQ(late.n, i < STAGING_SLOTS ? i : STAGING_SLOTS - 1);
        *slot = 100 + i;
        staging_send(&r.staging, &device[i], sizeof *slot);
    }
    for (int i = 0; i < STAGING_SLOTS; i++) late_wait(EVENT_STAGED + i);
    for (int i = 0; i < SENT; i++) EXPECT_EQ(device[i], 100 + i);
    rings_close(&r);
}

TEST(staging_records_are_read_a_step_late) {
    Rings r;
    rings_open(&r, 64);
    const StepRecord *device = &r.f.model.record;
    const int64_t n_moe = shape_n_moe(&r.f.model.shape), E = r.f.model.shape.router.n_experts;
    EXPECT(device->counts.shape[0] == n_moe && device->bias.shape[0] == n_moe && device->bias.shape[1] == E);
    for (int64_t step = 1; step <= 5; step++) {
        device->stats->loss_sum[0] = (double)step;
        device->update->adam_t = step;
        t_fill(device->counts, (double)step);
        t_fill(device->bias, (double)step / 8);
        staging_fetch(&r.staging, device, step);
        EXPECT_EQ(late.n, step == 1 ? 1 : 2);
        if (step == 1) continue;
        /* This backend copies when it is waited for, so what is read of a step is as the device is now. */
        const StepRecord *record = staging_record(&r.staging, step - 1);
        EXPECT(record->stats->loss_sum[0] == (double)step && record->update->adam_t == step, "step %lld",
               (long long)record->update->adam_t);
        EXPECT_EQ(late.n, 1);
        for (int64_t i = 0; i < n_moe * E; i++)
            REQUIRE(t_get(record->counts, i) == (double)step && t_get(record->bias, i) == (double)step / 8,
                    "element %lld", (long long)i);
    }
    rings_close(&r);
}

static void send_too_much(void *arg) {
    Rings *r = (Rings *)arg;
    static char device[256];
    staging_take(&r->staging);
    staging_send(&r->staging, device, r->staging.slot_bytes + 1);
}

TEST(staging_refuses_more_than_a_slot) {
    Rings r;
    rings_open(&r, 64);
    EXPECT(expect_exit(128 + SIGABRT, "65 bytes in a slot of 64", send_too_much, &r));
    rings_close(&r);
}

/* The caller's memory is free at once, rows lie apart, and each shape has its own. */
TEST(staging_brings_micro_batches) {
    Fixture f;
    fixture_open(&f, (const char *const[]){"model.num_nextn_predict_layers=2", "train.seq_len=17", NULL});
    const ModelShape one = shape_with_batch(f.model.shape, 1, 5), *shapes[] = {&f.model.shape, &one, &f.model.shape};
    for (int i = 0; i < 3; i++) {
        const ModelShape *s = shapes[i];
        const int64_t T = s->T, n = (2 * (s->n_mtp + 1) + 2) * T;
        MicroBatch mb;
        char err[ERR_LEN];
        REQUIRE(micro_batch_alloc(&mb, s->B, s->S, s->n_mtp, err) == 0, "%s", err);
        for (int64_t k = 0; k < n; k++) mb.tokens[k] = (int32_t)(1000 * i + k);
        model_set_batch(&f.model, s, &mb);
        memset(mb.tokens, 0, (size_t)n * sizeof *mb.tokens);
        const Batch *b = f.model.batch;
        for (int64_t row = 0; row < 2 * (s->n_mtp + 1) + 2; row++) {
            const int64_t depths = s->n_mtp + 1;
            const Tensor t = row < depths        ? b->tokens[row]
                             : row < 2 * depths  ? b->targets[row - depths]
                             : row == 2 * depths ? b->position
                                                 : b->doc_start;
            REQUIRE(t.shape[0] == T && (uintptr_t)t.data % ARENA_ALIGN == 0, "row %lld of %lld at %p", (long long)row,
                    (long long)t.shape[0], t.data);
            for (int64_t k = 0; k < T; k++)
                REQUIRE(((int32_t *)t.data)[k] == 1000 * i + row * T + k, "row %lld", (long long)row);
        }
        micro_batch_free(&mb);
    }
    fixture_close(&f);
}
