/* What crosses between host and device in a step, without either waiting for the other. Floor 3.
 *
 * In: StepParams and micro-batches. The caller writes into the next slot of a ring of pinned memory; an asynchronous
 * copy takes it to the device on STREAM_COMPUTE, behind the last reader of what it overwrites. A slot is free again
 * when its copy is done, so the host waits only when it is a whole ring ahead, and then the device has work for as
 * long.
 *
 * Out: the record of a step, copied behind its last op into one of two pinned records in turn, so that step k may run
 * while the host reads what step k - 1 has left. */
#ifndef TRAIN_MOE_STAGING_H
#define TRAIN_MOE_STAGING_H

#include "kernels/base/arena.h"
#include "observe.h"

enum { STAGING_SLOTS = 16, STAGING_RECORDS = 2 };
/* The events it records. */
enum { EVENT_STAGED, EVENT_RECORD = EVENT_STAGED + STAGING_SLOTS, EVENT_STAGING_END = EVENT_RECORD + STAGING_RECORDS };

/* What a step leaves for the host, in one piece of memory of the same layout on both sides. M MoE blocks, MTP's
 * included, in ascending order. */
typedef struct {
    void *data;
    size_t bytes;
    UpdateState *update; /* not of one step: it stays */
    StepStats *stats;
    Tensor counts;  /* (M, E) i32: tokens routed to each expert */
    Tensor bias;    /* (M, E) f32: router biases after the update */
    TileStats *fp8; /* (n_blocks, OBSERVED_COUNT) what the FP8 tensors held in the last step that counted; NULL where
                       none does (shape.counts_fp8) */
} StepRecord;

size_t record_fp8_bytes(const ModelShape *shape); /* 0 without */

/* Takes its memory from `a`: counts or points, as the arena does. */
StepRecord record_layout(Arena *a, const ModelShape *shape);

typedef struct {
    const Device *device;
    size_t slot_bytes;
    char *slot[STAGING_SLOTS];
    int next; /* slot */
    StepRecord record[STAGING_RECORDS];
} Staging;

/* Lays the rings out in `pinned`, memory of op_host_alloc; a counting arena only counts. Slots of `slot_bytes`. */
void staging_layout(Staging *s, const Device *d, const ModelShape *shape, size_t slot_bytes, Arena *pinned);

/* The next slot, to write into. Waits for the copy that has used it last, STAGING_SLOTS copies ago. */
void *staging_take(Staging *s);
/* Copies `bytes` of the slot taken last to the device, asynchronously. */
void staging_send(Staging *s, void *device, size_t bytes);

/* The device's record behind all work of step `step` so far, asynchronously. The record of step - STAGING_RECORDS is
 * overwritten. */
void staging_fetch(Staging *s, const StepRecord *from, int64_t step);
/* Waits for that copy alone, whatever has been queued behind it; borrowed until it is overwritten. */
const StepRecord *staging_record(Staging *s, int64_t step);

#endif
