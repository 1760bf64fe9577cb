/* log.jsonl: one JSON object a line, everything that happened. Floor 5.
 *
 *     {"kind":"run","step":0,"version":1,...}        a process starts, behind step 0
 *     {"kind":"step","step":1,"loss":6.93,...,"time":"2026-11-30T22:10:05Z"}
 *
 * Every record starts with its kind and step: that is how the file is cut back on a resume. Numbers are written so that
 * they read back to the same double; NaN and infinities, which JSON does not have, as null. A record is one write, at
 * once; one that fails (disk full) is taken back, so that the file stays whole lines, and never ends the run. */
#ifndef TRAIN_MOE_LOG_FILE_H
#define TRAIN_MOE_LOG_FILE_H

#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
    int fd;       /* -1: closed; records are dropped */
    int64_t size; /* bytes of whole lines */
    char path[PATH_MAX];
    char moved_to[PATH_MAX]; /* where log_file_open put an earlier run's file, or "" */
    FILE *record;            /* while one is being written */
    char *text;
    size_t text_size;
} LogFile;

/* A file that is closed. */
void log_file_init(LogFile *f);

/* Opens path for appending behind keep_step. keep_step > 0, a resume: records of later steps and an unfinished last
 * line are removed first, durably (the file is rewritten and renamed). keep_step 0, a new run: a file that is already
 * there is renamed to path.1, path.2, ... and a new one started. Returns -1 with err. */
int log_file_open(LogFile *f, const char *path, int64_t keep_step, char *err);
void log_file_close(LogFile *f);

/* One record: start, members in order, end, which adds the time and writes; it returns -1 with err if it could not. */
void record_start(LogFile *f, const char *kind, int64_t step);
void record_integer(LogFile *f, const char *name, int64_t x);
void record_number(LogFile *f, const char *name, double x);
void record_numbers(LogFile *f, const char *name, const double *x, int n);
void record_boolean(LogFile *f, const char *name, bool x);
void record_string(LogFile *f, const char *name, const char *text); /* NULL: null; invalid UTF-8 becomes U+FFFD */
void record_hash(LogFile *f, const char *name, uint64_t hash);      /* as a string of 16 hexadecimal digits */
void record_json(LogFile *f, const char *name, const char *json);   /* a valid value, taken as it is but on one line */
/* Nested: a list [..] or object {..} as a member, or (name NULL) as an element. */
void record_open(LogFile *f, const char *name, char bracket);
void record_close(LogFile *f, char bracket);
/* Elements of an open list. */
void record_counts(LogFile *f, const int32_t *x, int n);
int record_end(LogFile *f, char *err);

/* What is written is on the disk. Returns -1 with err. */
int log_file_sync(LogFile *f, char *err);

#endif
