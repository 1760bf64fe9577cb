/* See staging.h. */
#include "staging.h"

#include "kernels/base/check.h"

size_t record_fp8_bytes(const ModelShape *shape) {
    return shape->counts_fp8 ? (size_t)shape->n_blocks * OBSERVED_COUNT * sizeof(TileStats) : 0;
}

StepRecord record_layout(Arena *a, const ModelShape *shape) {
    const int64_t n_moe = shape_n_moe(shape), E = shape->router.n_experts;
    const size_t n = (size_t)(n_moe * E), start = a->used;
    StepRecord r;
    r.data = r.update = (UpdateState *)arena_alloc(a, sizeof *r.update, "step record");
    r.stats = (StepStats *)arena_alloc(a, sizeof *r.stats, "step record");
    r.counts = tensor_2d(arena_alloc(a, n * dtype_size(DTYPE_I32), "step record"), DTYPE_I32, n_moe, E);
    r.bias = tensor_2d(arena_alloc(a, n * dtype_size(DTYPE_F32), "step record"), DTYPE_F32, n_moe, E);
    const size_t fp8 = record_fp8_bytes(shape);
    r.fp8 = fp8 ? (TileStats *)arena_alloc(a, fp8, "step record") : NULL;
    r.bytes = a->used - start;
    return r;
}

void staging_layout(Staging *s, const Device *d, const ModelShape *shape, size_t slot_bytes, Arena *pinned) {
    s->device = d;
    s->slot_bytes = slot_bytes;
    s->next = 0;
    for (int i = 0; i < STAGING_SLOTS; i++) s->slot[i] = (char *)arena_alloc(pinned, slot_bytes, "micro-batches");
    for (int i = 0; i < STAGING_RECORDS; i++) s->record[i] = record_layout(pinned, shape);
}

void *staging_take(Staging *s) {
    op_event_synchronize(s->device, EVENT_STAGED + s->next);
    return s->slot[s->next];
}

void staging_send(Staging *s, void *device, size_t bytes) {
    CHECK(bytes <= s->slot_bytes, "%zu bytes in a slot of %zu", bytes, s->slot_bytes);
    op_copy_in(s->device, device, s->slot[s->next], bytes, STREAM_COMPUTE);
    op_event_record(s->device, EVENT_STAGED + s->next, STREAM_COMPUTE);
    s->next = (s->next + 1) % STAGING_SLOTS;
}

void staging_fetch(Staging *s, const StepRecord *from, int64_t step) {
    const int i = (int)(step % STAGING_RECORDS);
    CHECK(from->bytes == s->record[i].bytes, "a record of %zu bytes into %zu", from->bytes, s->record[i].bytes);
    op_copy_out(s->device, s->record[i].data, from->data, from->bytes, STREAM_COMPUTE);
    op_event_record(s->device, EVENT_RECORD + i, STREAM_COMPUTE);
}

const StepRecord *staging_record(Staging *s, int64_t step) {
    const int i = (int)(step % STAGING_RECORDS);
    op_event_synchronize(s->device, EVENT_RECORD + i);
    return &s->record[i];
}
