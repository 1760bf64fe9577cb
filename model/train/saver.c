/* See saver.h. */
#include "saver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint_parts.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/host_memory.h"
#include "model/memory.h"

static int rank_of(const Saver *s) {
    return s->model->comm->mesh.rank;
}

static bool is_alone(const Saver *s) {
    return s->model->comm->mesh.world == 1;
}

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
    return total > 0 ? available / job_ranks_here() : -1;
}

/* All ranks, or none. */
static void take_memory(Saver *s, int64_t bytes, char *note) {
    char need[32], room[32];
    const Device *d = s->model->device;
    if (bytes == 0) {
        snprintf(note, SAVER_NOTE_LEN, saves_on_the_way(s->config) ? "the run waits for saves" : "saved at the end");
        return;
    }
    const int64_t left = room_for_copy(s->model);
    if (left < 0 || bytes <= left - left / 16) s->memory = op_host_alloc(d, (size_t)bytes);
    uint64_t lacking = s->memory ? 0 : 1;
    job_sum(&lacking, 1);
    format_bytes(need, sizeof need, (double)bytes);
    if (lacking == 0) {
        snprintf(note, SAVER_NOTE_LEN, "saved beside the run, from a copy of %s in host memory%s", need,
                 is_alone(s) ? "" : " on each rank");
    } else if (!s->memory) {
        snprintf(note, SAVER_NOTE_LEN, "the run waits for saves: a copy takes %s of host memory, %s are left", need,
                 left < 0 ? "fewer" : format_bytes(room, sizeof room, left > 0 ? (double)left : 0));
    } else {
        snprintf(note, SAVER_NOTE_LEN, "the run waits for saves: host memory for a copy is missing on %llu rank%s",
                 (unsigned long long)lacking, lacking > 1 ? "s" : "");
        op_host_release(d, s->memory);
        s->memory = NULL;
    }
}

void saver_open(Saver *s, const Config *c, const Model *m, LogFile *log, char *note) {
    const Params *p = &m->params;
    const Tensor flat[SAVER_COPIES] = {p->master, p->m, p->v};
    memset(s, 0, sizeof *s);
    s->config = c;
    s->model = m;
    s->log = log;
    s->tensors = params_saved(p, &s->n_tensors);
    if (rank_of(s) == 0) checkpoint_clean(c->run.dir);
    take_memory(s, saver_bytes(c, p), note);
    char *next = (char *)s->memory;
    for (int i = 0; i < SAVER_COPIES && s->memory; i++) {
        s->copy[i].from = (const char *)flat[i].data;
        s->copy[i].bytes = tensor_bytes(flat[i]);
        s->copy[i].to = next;
        next += s->copy[i].bytes;
    }
}

void saver_close(Saver *s) {
    SaveResult ignored;
    if (!s->model) return;
    saver_end(s, true, &ignored);
    if (s->memory) op_host_release(s->model->device, s->memory);
    free(s->tensors);
    memset(s, 0, sizeof *s);
}

/* ---- writing ----------------------------------------------------------------------------------------------------- */

static int read_copy(void *arg, const StateTensor *t, int64_t at, void *out, int64_t n, char *err) {
    const Saver *s = (const Saver *)arg;
    const char *data = (const char *)t->data;
    for (int i = 0; i < SAVER_COPIES; i++) {
        if (data < s->copy[i].from || data >= s->copy[i].from + s->copy[i].bytes) continue;
        memcpy(out, s->copy[i].to + (data - s->copy[i].from) + at, (size_t)n);
        return 0;
    }
    return err_set(err, "%s is not in the copy of the state", t->name);
}

static void remove_old(const Saver *s, char *warning) {
    const CheckpointConfig *c = &s->config->checkpoint;
    const CheckpointKeep keep = {.last = c->keep_last,
                                 .every_steps = c->keep_every_steps,
                                 .saved_step = s->info.state.step,
                                 .best_step = c->keep_best ? s->info.state.best_step : 0};
    checkpoint_prune(s->config->run.dir, &keep, warning);
}

/* A checkpoint of what m names, or nothing, if not all is there. The log up to the step comes first: a resume continues
 * it. Old checkpoints go when the new one is durable. */
static void commit(Saver *s, Manifest *m) {
    const char *dir = s->config->run.dir;
    SaveResult *r = &s->result;
    if (!r->failed && s->log) log_file_sync(s->log, r->warning);
    r->failed = r->failed || checkpoint_commit(dir, &s->info, m, r->path, &r->bytes, r->err) != 0;
    r->hash = s->info.param_hash;
    r->on_disk_s = s->memory ? clock_s() - s->started_s : -1;
    if (r->failed)
        checkpoint_clean(dir);
    else
        remove_old(s, r->warning);
}

/* This rank's files; of one rank they are the checkpoint. */
static void *write_part(void *arg) {
    Saver *s = (Saver *)arg;
    const Model *m = s->model;
    const CheckpointSource source = s->memory ? (CheckpointSource){read_copy, s} : checkpoint_source(m->device);
    s->own.is_written = true;
    s->own.hash = s->memory ? params_hash_copy(&m->params, s->copy[0].to) : params_hash_saved(&m->params, m->device);
    s->own.has_failed = checkpoint_write_part(s->config->run.dir, s->result.step, rank_of(s), &source, s->tensors,
                                              s->n_tensors, CHECKPOINT_FILE_BYTES, &s->part, s->result.err) != 0;
    if (is_alone(s)) {
        s->info.param_hash = s->own.hash;
        s->result.failed = s->own.has_failed;
        commit(s, &s->part);
    }
    atomic_store(&s->is_done, true);
    return NULL;
}

/* Rank 0: the files of all ranks. */
static void *join_parts(void *arg) {
    Saver *s = (Saver *)arg;
    SaveResult *r = &s->result;
    Manifest all = {.ranks = 0};
    if (!r->failed) r->failed = manifest_join(&all, s->parts, s->n_parts, s->model->comm->mesh.world, r->err) != 0;
    commit(s, &all);
    manifest_free(&all);
    free(s->parts);
    s->parts = NULL;
    atomic_store(&s->is_done, true);
    return NULL;
}

/* ---- its stages -------------------------------------------------------------------------------------------------- */

static void start(Saver *s, void *(*work)(void *)) {
    atomic_store(&s->is_done, false);
    s->has_thread = s->memory && pthread_create(&s->thread, NULL, work, s) == 0;
    if (!s->has_thread) work(s);
}

static bool thread_is_done(Saver *s, bool wait) {
    if (!wait && !atomic_load(&s->is_done)) return false;
    if (s->has_thread) pthread_join(s->thread, NULL);
    s->has_thread = false;
    return true;
}

/* From SAVER_WRITING, once all ranks have written. */
static void end_of_parts(Saver *s, bool wait) {
    SavedPart own = {.is_written = thread_is_done(s, wait)};
    if (own.is_written) own = s->own;
    if (is_alone(s)) {
        if (own.is_written) s->stage = SAVER_WRITTEN;
        return;
    }
    if (!ranks_have_written(own, &s->info.param_hash, s->result.err)) return;
    s->result.failed = s->result.err[0] != 0;
    if (!s->result.failed) s->parts = ranks_gather_parts(&s->part, &s->n_parts);
    if (rank_of(s) == 0) start(s, join_parts);
    s->stage = SAVER_COMMITTING;
}

/* From SAVER_COMMITTING, once rank 0 says what became of it. */
static void end_of_commit(Saver *s, bool wait) {
    bool is_done = rank_of(s) == 0 && thread_is_done(s, wait);
    job_spread(&is_done, sizeof is_done);
    if (!is_done) return;
    job_spread(&s->result, sizeof s->result);
    s->stage = SAVER_WRITTEN;
}

static bool is_over(Saver *s, bool wait) {
    if (s->stage == SAVER_WRITING) end_of_parts(s, wait);
    if (s->stage == SAVER_COMMITTING) end_of_commit(s, wait);
    return s->stage == SAVER_WRITTEN;
}

void saver_begin(Saver *s, const CheckpointInfo *info) {
    const Device *d = s->model->device;
    CHECK(s->stage == SAVER_IDLE, "a save of step %lld inside that of step %lld", (long long)info->state.step,
          (long long)s->result.step);
    s->info = *info;
    memset(&s->result, 0, sizeof s->result);
    s->result.step = info->state.step;
    s->result.tokens = info->state.tokens;
    s->started_s = clock_s();
    if (s->memory) {
        op_event_record(d, EVENT_SAVE_READY, STREAM_COMPUTE);
        op_event_wait(d, EVENT_SAVE_READY, STREAM_COPY);
        for (int i = 0; i < SAVER_COPIES; i++)
            op_copy_out(d, s->copy[i].to, s->copy[i].from, s->copy[i].bytes, STREAM_COPY);
        op_event_record(d, EVENT_SAVE_COPIED, STREAM_COPY);
        s->stage = SAVER_COPYING;
    } else {
        s->stage = SAVER_WRITING;
        start(s, write_part);
        is_over(s, true);
    }
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
    start(s, write_part);
    s->result.waited_s += clock_s() - from;
}

bool saver_end(Saver *s, bool wait, SaveResult *result) {
    if (s->stage == SAVER_IDLE || (!wait && s->stage == SAVER_COPYING)) return false;
    saver_copied(s, false);
    const double from = clock_s();
    if (!is_over(s, wait)) return false;
    if (s->memory && wait) s->result.waited_s += clock_s() - from;
    manifest_free(&s->part);
    checkpoint_info_free(&s->info);
    s->stage = SAVER_IDLE;
    *result = s->result;
    return true;
}
