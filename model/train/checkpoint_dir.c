/* See checkpoint.h: what there is in a run's folder, newest first, and what may go. */
#include "checkpoint_dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "checkpoint.h"
#include "kernels/base/arena.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "manifest.h"

/* ---- names ------------------------------------------------------------------------------------------------------- */

static void step_name(char name[40], int64_t step) {
    snprintf(name, 40, "step_%08lld", (long long)step);
}

int checkpoint_dir_path(char *path, const char *run_dir, int64_t step, const char *suffix, char *err) {
    char name[40];
    step_name(name, step);
    if (snprintf(path, CHECKPOINT_PATH_LEN, "%s/%s%s", run_dir, name, suffix) < CHECKPOINT_PATH_LEN) return 0;
    return err_set(err, "%s: path too long", run_dir);
}

/* The step of a folder's name, and what follows it; -1 if it is not in our spelling. */
static int64_t step_of(const char *folder, const char **suffix) {
    char name[40], *end;
    if (strncmp(folder, "step_", 5) != 0) return -1;
    errno = 0;
    long long step = strtoll(folder + 5, &end, 10);
    if (errno != 0 || step < 0) return -1;
    step_name(name, step);
    *suffix = end;
    return strlen(name) == (size_t)(end - folder) && strncmp(name, folder, strlen(name)) == 0 ? (int64_t)step : -1;
}

/* Calls fn with every folder step_N + suffix. A run folder that is not there holds none. */
static void each_step(const char *run_dir, const char *suffix, void (*fn)(void *arg, int64_t step, const char *name),
                      void *arg) {
    DIR *dir = opendir(run_dir);
    const struct dirent *e;
    if (!dir) return;
    while ((e = readdir(dir))) {
        const char *rest;
        int64_t step = step_of(e->d_name, &rest);
        if (step >= 0 && strcmp(rest, suffix) == 0) fn(arg, step, e->d_name);
    }
    closedir(dir);
}

typedef struct {
    int64_t n, room;
    int64_t *step;
} Steps;

static void add_step(void *arg, int64_t step, const char *name) {
    Steps *s = (Steps *)arg;
    (void)name;
    if (s->n == s->room) {
        s->room = 2 * s->room + 16;
        s->step = (int64_t *)realloc(s->step, (size_t)s->room * sizeof *s->step);
        CHECK(s->step, "no memory for a list of %lld checkpoints", (long long)s->room);
    }
    s->step[s->n++] = step;
}

static int descending(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

/* Newest first. The caller frees .step. */
static Steps list_steps(const char *run_dir, const char *suffix) {
    Steps s = {0, 0, NULL};
    each_step(run_dir, suffix, add_step, &s);
    if (s.n) qsort(s.step, (size_t)s.n, sizeof *s.step, descending);
    return s;
}

/* Adds "; text" to a note; a path inside run_dir is shortened to what differs. */
static void add_note(char *note, const char *run_dir, const char *text) {
    size_t used = strlen(note), prefix = strlen(run_dir);
    if (strncmp(text, run_dir, prefix) == 0 && text[prefix] == '/') text += prefix + 1;
    snprintf(note + used, ERR_LEN - used, "%s%s", used ? "; " : "", text);
}

/* ---- making and removing ----------------------------------------------------------------------------------------- */

void checkpoint_dir_remove(const char *run_dir, const char *suffix) {
    char path[CHECKPOINT_PATH_LEN];
    Steps steps = list_steps(run_dir, suffix);
    for (int64_t i = 0; i < steps.n; i++)
        if (checkpoint_dir_path(path, run_dir, steps.step[i], suffix, NULL) == 0) dir_remove(path, NULL);
    free(steps.step);
}

/* A folder cannot be renamed over one that holds files: the old one makes way under the name .old, and goes when the
 * new one is durable. */
int checkpoint_dir_commit(const char *from, const char *run_dir, int64_t step, char *err) {
    char path[CHECKPOINT_PATH_LEN], old[CHECKPOINT_PATH_LEN];
    if (checkpoint_dir_path(path, run_dir, step, "", err) != 0 ||
        checkpoint_dir_path(old, run_dir, step, ".old", err) != 0)
        return -1;
    bool replaces = path_exists(path);
    if (replaces) {
        if (path_exists(old) && dir_remove(old, err) != 0) return -1;
        if (rename(path, old) != 0) return err_set(err, "%s: cannot rename: %s", path, strerror(errno));
    }
    if (rename(from, path) != 0) {
        int error = errno;
        if (replaces) rename(old, path);
        return err_set(err, "%s: cannot rename: %s", from, strerror(error));
    }
    if (file_sync(run_dir, err) != 0) return -1;
    checkpoint_dir_remove(run_dir, ".old");
    return 0;
}

int checkpoint_can_write(const char *run_dir, int64_t bytes, char *err) {
    char path[CHECKPOINT_PATH_LEN], need[32], have[32];
    struct statvfs fs;
    if (dir_make(run_dir, err) != 0) return -1;
    if (snprintf(path, sizeof path, "%s/.write_test", run_dir) >= (int)sizeof path)
        return err_set(err, "%s: path too long", run_dir);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) return err_set(err, "%s: cannot write there: %s", run_dir, strerror(errno));
    bool ok = write(fd, "test\n", 5) == 5;
    int error = errno;
    ok = close(fd) == 0 && ok;
    unlink(path);
    if (!ok) return err_set(err, "%s: cannot write there: %s", run_dir, strerror(error));
    if (statvfs(run_dir, &fs) != 0) return err_set(err, "%s: cannot ask for free space: %s", run_dir, strerror(errno));
    double free_bytes = (double)fs.f_bavail * (double)fs.f_frsize;
    if (free_bytes >= (double)bytes) return 0;
    return err_set(err, "%s: %s free, a checkpoint needs %s", run_dir, format_bytes(have, sizeof have, free_bytes),
                   format_bytes(need, sizeof need, (double)bytes));
}

/* ---- finding ----------------------------------------------------------------------------------------------------- */

/* 0 and path if the checkpoint of `step` is complete; -1 (a newer format) or CHECKPOINT_DAMAGED with err. */
static int check_step(const char *run_dir, int64_t step, char *path, char *err) {
    Manifest m;
    if (checkpoint_dir_path(path, run_dir, step, "", err) != 0) return -1;
    int result = manifest_read(&m, path, err);
    if (result != 0) return result;
    if (m.info.state.step != step) {
        err_set(err, "%s: holds step %lld", path, (long long)m.info.state.step);
        result = CHECKPOINT_DAMAGED;
    } else {
        result = manifest_check_files(&m, path, err);
    }
    manifest_free(&m);
    return result;
}

static void note_unfinished(void *arg, int64_t step, const char *name) {
    char text[80];
    (void)step;
    snprintf(text, sizeof text, "%.40s: an unfinished save", name);
    add_note((char *)arg, "", text);
}

static int no_such_step(const Steps *steps, const char *run_dir, int64_t step, char *err) {
    char have[256] = "";
    size_t used = 0;
    for (int64_t i = 0; i < steps->n && used < sizeof have - 32; i++)
        used += (size_t)snprintf(have + used, sizeof have - used, "%s%lld", i ? ", " : "", (long long)steps->step[i]);
    return err_set(err, "%s: no checkpoint of step %lld; %s%s", run_dir, (long long)step,
                   steps->n ? "there are " : "there is none at all", have);
}

typedef struct {
    const Device *d;
    const StateTensor *tensors;
    int64_t n;
    CheckpointPart part;
    CheckpointInfo *info;
} LoadRequest;

/* The newest checkpoint that is complete, and (with a request) that can be loaded. */
static int find_newest(const char *run_dir, const LoadRequest *load, char *path, char *note, char *err) {
    Steps steps = list_steps(run_dir, "");
    int result = 1;
    note[0] = 0;
    for (int64_t i = 0; i < steps.n; i++) {
        result = check_step(run_dir, steps.step[i], path, err);
        if (result == 0 && load)
            result = checkpoint_load(path, load->d, load->tensors, load->n, load->part, load->info, err);
        if (result != CHECKPOINT_DAMAGED) break;
        add_note(note, run_dir, err);
    }
    if (result == CHECKPOINT_DAMAGED)
        result = err_set(err, "%s: every checkpoint is damaged: %.500s", run_dir, note);
    else
        each_step(run_dir, ".tmp", note_unfinished, note);
    free(steps.step);
    return result;
}

int checkpoint_find(const char *run_dir, int64_t step, char *path, char *note, char *err) {
    if (step < 0) return find_newest(run_dir, NULL, path, note, err);
    note[0] = 0;
    if (checkpoint_dir_path(path, run_dir, step, "", err) != 0) return -1;
    if (path_exists(path)) return check_step(run_dir, step, path, err) == 0 ? 0 : -1;
    Steps steps = list_steps(run_dir, "");
    int result = no_such_step(&steps, run_dir, step, err);
    free(steps.step);
    return result;
}

int checkpoint_load_newest(const char *run_dir, const Device *d, const StateTensor *tensors, int64_t n,
                           CheckpointPart part, CheckpointInfo *info, char *path, char *note, char *err) {
    const LoadRequest load = {d, tensors, n, part, info};
    return find_newest(run_dir, &load, path, note, err);
}

/* ---- history ----------------------------------------------------------------------------------------------------- */

/* Renames a checkpoint to the first free of step_N.aside, step_N.aside2, ... */
static int set_aside(const char *run_dir, int64_t step, char *err) {
    char path[CHECKPOINT_PATH_LEN], aside[CHECKPOINT_PATH_LEN], suffix[24] = ".aside";
    if (checkpoint_dir_path(path, run_dir, step, "", err) != 0) return -1;
    for (int k = 2;; k++) {
        if (checkpoint_dir_path(aside, run_dir, step, suffix, err) != 0) return -1;
        if (!path_exists(aside)) break;
        snprintf(suffix, sizeof suffix, ".aside%d", k);
    }
    return rename(path, aside) == 0 ? 0 : err_set(err, "%s: cannot rename: %s", path, strerror(errno));
}

int checkpoint_set_aside_after(const char *run_dir, int64_t step, char *note, char *err) {
    Steps steps = list_steps(run_dir, "");
    int result = 0;
    note[0] = 0;
    for (int64_t i = 0; i < steps.n && steps.step[i] > step && result == 0; i++) {
        char name[40];
        step_name(name, steps.step[i]);
        result = set_aside(run_dir, steps.step[i], err);
        if (result == 0) add_note(note, "", name);
    }
    if (note[0] && result == 0) result = file_sync(run_dir, err);
    free(steps.step);
    return result;
}

/* Under another name first: what is half removed must not look like a damaged checkpoint. */
static int remove_step(const char *run_dir, int64_t step, char *err) {
    char path[CHECKPOINT_PATH_LEN], old[CHECKPOINT_PATH_LEN];
    if (checkpoint_dir_path(path, run_dir, step, "", err) != 0 ||
        checkpoint_dir_path(old, run_dir, step, ".old", err) != 0)
        return -1;
    if (path_exists(old) && dir_remove(old, err) != 0) return -1;
    if (rename(path, old) != 0) return err_set(err, "%s: cannot rename: %s", path, strerror(errno));
    return dir_remove(old, err);
}

int checkpoint_prune(const char *run_dir, const CheckpointKeep *keep, char *err) {
    if (keep->last <= 0) return 0;
    Steps steps = list_steps(run_dir, "");
    char path[CHECKPOINT_PATH_LEN], ignored[ERR_LEN];
    int kept = 0, result = 0;
    for (int64_t i = 0; i < steps.n; i++) {
        const int64_t step = steps.step[i];
        const bool is_milestone = keep->every_steps > 0 && step % keep->every_steps == 0;
        const bool is_best = keep->best_step > 0 && step == keep->best_step;
        if (kept < keep->last)
            kept += check_step(run_dir, step, path, ignored) == 0;
        else if (!is_milestone && !is_best && step != keep->saved_step && remove_step(run_dir, step, err) != 0)
            result = -1;
    }
    free(steps.step);
    return result;
}
