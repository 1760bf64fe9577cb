/* What the GPU did over a stretch of time, and where the host stood still for it, by CUPTI's activity records.
 *
 * idle = 1 - (union of the intervals of kernels, copies and memsets) / (first start to last end). Under the trace each
 * kernel of a graph is stamped by itself, which costs a little: idle is an upper bound. */
#ifndef TRAIN_MOE_GPU_TRACE_H
#define TRAIN_MOE_GPU_TRACE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
    double span_s, busy_s;
    int64_t n_work;        /* kernels, copies, memsets */
    int64_t n_syncs;       /* the host waited for a stream or the device, or for a copy of memory that is not pinned */
    int64_t n_event_waits; /* for an event */
    int64_t n_memory;      /* memory was allocated or freed */
} GpuTrace;

#ifdef HAVE_CUPTI
#include <cupti.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"

#define CUPTI_CHECK(call)                                                                                              \
    do {                                                                                                               \
        CUptiResult cupti_result = (call);                                                                             \
        CHECK(cupti_result == CUPTI_SUCCESS, "CUPTI answers %d", (int)cupti_result);                                   \
    } while (0)

enum { TRACE_BUFFER_BYTES = 8 << 20 };

typedef struct {
    uint64_t start, end; /* ns */
} TraceInterval;

static struct {
    pthread_mutex_t lock; /* CUPTI hands buffers over from a thread of its own */
    int64_t n, room;
    TraceInterval *interval;
    GpuTrace sums;
} trace = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void trace_add(uint64_t start, uint64_t end) {
    if (trace.n == trace.room) {
        trace.room = trace.room ? 2 * trace.room : 1 << 16;
        trace.interval = (TraceInterval *)realloc(trace.interval, (size_t)trace.room * sizeof *trace.interval);
        CHECK(trace.interval, "no memory for %lld intervals", (long long)trace.room);
    }
    trace.interval[trace.n++] = (TraceInterval){start, end};
}

static void trace_sync(const CUpti_ActivitySynchronization *s) {
    trace.sums.n_event_waits += s->type == CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_EVENT_SYNCHRONIZE;
    trace.sums.n_syncs += s->type == CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE ||
                          s->type == CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_CONTEXT_SYNCHRONIZE;
}

/* Calls that wait and are no synchronization record: copies without a stream, allocation. */
static void trace_call(const CUpti_ActivityAPI *call) {
    const char *name;
    if (cuptiGetCallbackName(CUPTI_CB_DOMAIN_RUNTIME_API, call->cbid, &name) != CUPTI_SUCCESS) return;
    trace.sums.n_syncs += strncmp(name, "cudaMemcpy", 10) == 0 && !strstr(name, "Async");
    trace.sums.n_memory += strncmp(name, "cudaMalloc", 10) == 0 || strncmp(name, "cudaFree", 8) == 0 ||
                           strncmp(name, "cudaHostAlloc", 13) == 0;
}

static void trace_record(CUpti_Activity *record) {
    switch (record->kind) {
    case CUPTI_ACTIVITY_KIND_KERNEL:
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
        trace_add(((CUpti_ActivityKernel9 *)record)->start, ((CUpti_ActivityKernel9 *)record)->end);
        break;
    case CUPTI_ACTIVITY_KIND_MEMCPY: {
        const CUpti_ActivityMemcpy5 *copy = (CUpti_ActivityMemcpy5 *)record;
        trace.sums.n_syncs += copy->srcKind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE ||
                              copy->dstKind == CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE;
        trace_add(copy->start, copy->end);
        break;
    }
    case CUPTI_ACTIVITY_KIND_MEMSET:
        trace_add(((CUpti_ActivityMemset4 *)record)->start, ((CUpti_ActivityMemset4 *)record)->end);
        break;
    case CUPTI_ACTIVITY_KIND_SYNCHRONIZATION: trace_sync((CUpti_ActivitySynchronization *)record); break;
    case CUPTI_ACTIVITY_KIND_RUNTIME: trace_call((CUpti_ActivityAPI *)record); break;
    default: break;
    }
}

static void CUPTIAPI trace_buffer(uint8_t **buffer, size_t *size, size_t *n_records_max) {
    *buffer = (uint8_t *)aligned_alloc(8, TRACE_BUFFER_BYTES);
    *size = *buffer ? TRACE_BUFFER_BYTES : 0;
    *n_records_max = 0;
}

static void CUPTIAPI trace_filled(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t used) {
    CUpti_Activity *record = NULL;
    size_t n_dropped = 0;
    (void)size;
    pthread_mutex_lock(&trace.lock);
    while (cuptiActivityGetNextRecord(buffer, used, &record) == CUPTI_SUCCESS) trace_record(record);
    pthread_mutex_unlock(&trace.lock);
    CUPTI_CHECK(cuptiActivityGetNumDroppedRecords(context, stream, &n_dropped));
    CHECK(n_dropped == 0, "CUPTI lost %zu records", n_dropped);
    free(buffer);
}

static const CUpti_ActivityKind trace_kinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                                 CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_SYNCHRONIZATION,
                                                 CUPTI_ACTIVITY_KIND_RUNTIME};
enum { TRACE_KINDS = sizeof trace_kinds / sizeof *trace_kinds };

/* Begins. Graphs have to be captured after it: those made before may hide their kernels. Returns false, with a line on
 * stderr, if this machine does not let us: profiling may be reserved for the administrator. */
static bool gpu_trace_start(void) {
    CUptiResult result = cuptiActivityRegisterCallbacks(trace_buffer, trace_filled);
    for (int i = 0; i < TRACE_KINDS && result == CUPTI_SUCCESS; i++) result = cuptiActivityEnable(trace_kinds[i]);
    if (result == CUPTI_SUCCESS) return true;
    fprintf(stderr, "no trace of the GPU: CUPTI answers %d\n", (int)result);
    return false;
}

/* Forgets what was seen so far. The device must have nothing to do. */
static void gpu_trace_clear(void) {
    CUPTI_CHECK(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
    pthread_mutex_lock(&trace.lock);
    trace.n = 0;
    memset(&trace.sums, 0, sizeof trace.sums);
    pthread_mutex_unlock(&trace.lock);
}

static int trace_by_start(const void *a, const void *b) {
    const TraceInterval *x = (const TraceInterval *)a, *y = (const TraceInterval *)b;
    return x->start < y->start ? -1 : x->start > y->start;
}

/* Ends it. The device must have nothing to do. */
static GpuTrace gpu_trace_stop(void) {
    CUPTI_CHECK(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
    for (int i = 0; i < TRACE_KINDS; i++) CUPTI_CHECK(cuptiActivityDisable(trace_kinds[i]));
    CHECK(trace.n > 0, "the trace of the GPU is empty");
    qsort(trace.interval, (size_t)trace.n, sizeof *trace.interval, trace_by_start);
    GpuTrace t = trace.sums;
    uint64_t busy = 0, end = trace.interval[0].start;
    for (int64_t i = 0; i < trace.n; i++) {
        const TraceInterval *x = &trace.interval[i];
        if (x->end <= end) continue;
        busy += x->end - (x->start > end ? x->start : end);
        end = x->end;
    }
    t.n_work = trace.n;
    t.busy_s = 1e-9 * (double)busy;
    t.span_s = 1e-9 * (double)(end - trace.interval[0].start);
    free(trace.interval);
    return t;
}
#else
static bool gpu_trace_start(void) {
    fprintf(stderr, "no trace of the GPU: this build has no CUPTI\n");
    return false;
}
static void gpu_trace_clear(void) {
}
static GpuTrace gpu_trace_stop(void) {
    return (GpuTrace){0, 0, 0, 0, 0, 0};
}
#endif
#endif
