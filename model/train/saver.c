/* See saver.h. */
#include "saver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/host_memory.h"
#include "model/memory.h"

/* ---- the copy's memory ------------------------------------------------------------------------------------------- */

static bool saves_on_the_way(const Config *c) {
    const CheckpointConfig *k = &c->checkpoint;
    return k->every_steps > 0 || k->every_minutes > 0 || (k->keep_best && c->eval.every_steps > 0);
}

int64_t saver_bytes(const Config *c, const Params *p) {
    if (!c->checkpoint.background || !saves_on_the_way(c)) return 0;
    return (int64_t)(tensor_bytes(p->master) + tensor_bytes(p->m) + tensor_bytes(p->v));
}

/* Host memory that is left beside the model; -1: not known. Where the host is the device, the model's pages are taken
 * when they are first touched: what was free before it counts. */
static int64_t room_for_copy(const Model *m) {
    int64_t total, available;
    const DeviceMemory *d = &m->device->memory;
    if (d->on_touch) return d->total > 0 ? d->free - memory_total(m) : -1;
    host_memory("", &total, &available);
    return total > 0 ? available : -1;
}

static void *take_memory(const Saver *s, int64_t bytes, char *note) {
    char need[32], room[32];
    if (bytes == 0) {
        snprintf(note, SAVER_NOTE_LEN, saves_on_the_way(s->config) ? "the run waits for saves" : "saved at the end");
        return NULL;
    }
    const int64_t left = room_for_copy(s->model);
    format_bytes(need, sizeof need, (double)bytes);
    void *memory = left < 0 || bytes <= left - left / 16 ? op_host_alloc(s->model->device, (size_t)bytes) : NULL;
    if (memory)
        snprintf(note, SAVER_NOTE_LEN, "saved beside the run, from a copy of %s in host memory", need);
    else
        snprintf(note, SAVER_NOTE_LEN, "the run waits for saves: a copy takes %s of host memory, %s are left", need,
                 left < 0 ? "fewer" : format_bytes(room, sizeof room, left > 0 ? (double)left : 0));
    return memory;
}

void saver_open(Saver *s, const Config *c, const Model *m, const StateTensor *tensors, int64_t n, LogFile *log,
                char *note) {
    const Params *p = &m->params;
    const Tensor flat[SAVER_PARTS] = {p->master, p->m, p->v};
    memset(s, 0, sizeof *s);
    s->config = c;
    s->model = m;
    s->tensors = tensors;
    s->n_tensors = n;
    s->log = log;
    s->memory = take_memory(s, saver_bytes(c, p), note);
    char *next = (char *)s->memory;
    for (int i = 0; i < SAVER_PARTS && s->memory; i++) {
        s->part[i].from = (const char *)flat[i].data;
        s->part[i].bytes = tensor_bytes(flat[i]);
        s->part[i].to = next;
        next += s->part[i].bytes;
    }
}

void saver_close(Saver *s) {
    SaveResult ignored;
    if (!s->model) return;
    saver_end(s, true, &ignored);
    if (s->memory) op_host_release(s->model->device, s->memory);
    memset(s, 0, sizeof *s);
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

static int read_copy(void *arg, const StateTensor *t, int64_t at, void *out, int64_t n, char *err) {
    const Saver *s = (const Saver *)arg;
    const char *data = (const char *)t->data;
    for (int i = 0; i < SAVER_PARTS; i++) {
        if (data < s->part[i].from || data >= s->part[i].from + s->part[i].bytes) continue;
        memcpy(out, s->part[i].to + (data - s->part[i].from) + at, (size_t)n);
        return 0;
    }
    return err_set(err, "%s is not in the copy of the state", t->name);
}

CheckpointKeep saver_keep(const CheckpointConfig *c, const RunState *s) {
    return (CheckpointKeep){.last = c->keep_last,
                            .every_steps = c->keep_every_steps,
                            .saved_step = s->step,
                            .best_step = c->keep_best ? s->best_step : 0};
}

/* The log up to the step comes first: a resume continues it. Old checkpoints go when the new one is durable. */
static void write_checkpoint(Saver *s) {
    const char *dir = s->config->run.dir;
    const CheckpointSource copy = {read_copy, s};
    const int64_t n = s->n_tensors, most = CHECKPOINT_FILE_BYTES;
    SaveResult *r = &s->result;
    int result;
    if (s->log) log_file_sync(s->log, r->warning);
    if (s->memory)
        result = checkpoint_save_from(dir, &copy, s->tensors, n, &s->info, most, r->path, &r->bytes, r->err);
    else
        result = checkpoint_save(dir, s->model->device, s->tensors, n, &s->info, most, r->path, &r->bytes, r->err);
    r->failed = result != 0;
    r->hash = s->info.param_hash;
    r->on_disk_s = s->memory ? clock_s() - s->started_s : -1;
    const CheckpointKeep keep = saver_keep(&s->config->checkpoint, &s->info.state);
    if (!r->failed) checkpoint_prune(dir, &keep, r->warning);
    checkpoint_info_free(&s->info);
}

static void *write_copy(void *arg) {
    Saver *s = (Saver *)arg;
    s->info.param_hash = params_hash_copy(&s->model->params, s->part[0].to);
    write_checkpoint(s);
    atomic_store(&s->is_done, true);
    return NULL;
}

/* ---- its stages -------------------------------------------------------------------------------------------------- */

void saver_begin(Saver *s, const CheckpointInfo *info) {
    const Device *d = s->model->device;
    CHECK(s->stage == SAVER_IDLE, "a save of step %lld inside that of step %lld", (long long)info->state.step,
          (long long)s->result.step);
    s->info = *info;
    memset(&s->result, 0, sizeof s->result);
    s->result.step = info->state.step;
    s->result.tokens = info->state.tokens;
    s->started_s = clock_s();
    if (!s->memory) {
        s->info.param_hash = params_hash(&s->model->params, d);
        write_checkpoint(s);
        s->stage = SAVER_WRITTEN;
        s->result.waited_s = clock_s() - s->started_s;
        return;
    }
    op_event_record(d, EVENT_SAVE_READY, STREAM_COMPUTE);
    op_event_wait(d, EVENT_SAVE_READY, STREAM_COPY);
    for (int i = 0; i < SAVER_PARTS; i++) op_copy_out(d, s->part[i].to, s->part[i].from, s->part[i].bytes, STREAM_COPY);
    op_event_record(d, EVENT_SAVE_COPIED, STREAM_COPY);
    s->stage = SAVER_COPYING;
    s->result.waited_s = clock_s() - s->started_s;
    if (!d->is_asynchronous) saver_copied(s, false);
}

bool saver_is_copying(const Saver *s) {
    return s->stage == SAVER_COPYING;
}

void saver_copied(Saver *s, bool is_stepped) {
    if (s->stage != SAVER_COPYING) return;
    /* Up to here the device had work; from here on it waits for the copy, and so do we. */
    if (is_stepped) op_event_synchronize(s->model->device, EVENT_SAVE_BATCHES);
    const double from = clock_s();
    op_event_synchronize(s->model->device, EVENT_SAVE_COPIED);
    s->stage = SAVER_WRITING;
    atomic_store(&s->is_done, false);
    s->has_thread = pthread_create(&s->thread, NULL, write_copy, s) == 0;
    if (!s->has_thread) write_copy(s);
    s->result.waited_s += clock_s() - from;
}

bool saver_end(Saver *s, bool wait, SaveResult *result) {
    if (s->stage == SAVER_IDLE || (!wait && s->stage == SAVER_COPYING)) return false;
    saver_copied(s, false);
    if (s->stage == SAVER_WRITING) {
        if (!wait && !atomic_load(&s->is_done)) return false;
        const double from = clock_s();
        if (s->has_thread) pthread_join(s->thread, NULL);
        s->has_thread = false;
        s->result.waited_s += clock_s() - from;
    }
    s->stage = SAVER_IDLE;
    *result = s->result;
    return true;
}
