/* See log_file.h. */
#include "log_file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "data/json.h"
#include "data/utf8.h"
#include "format.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"

/* -------------------------------------------------------------------------------------------------------- the file */

void log_file_init(LogFile *f) {
    memset(f, 0, sizeof *f);
    f->fd = -1;
}

/* The step of a whole line, or -1 for one that no record_start wrote. */
static int64_t line_step(const char *line) {
    long long step;
    return sscanf(line, "{\"kind\":\"%*[a-z]\",\"step\":%lld", &step) == 1 ? step : -1;
}

/* Copies the lines of steps up to keep_step; lines of unknown step share the fate of those before them. *n_dropped
 * counts the others, an unfinished last line included. */
static int copy_lines(FILE *from, FILE *to, int64_t keep_step, int64_t *n_dropped) {
    char *line = NULL;
    size_t room = 0;
    ssize_t length;
    bool is_kept = true;
    *n_dropped = 0;
    int result = 0;
    while (result == 0 && (length = getline(&line, &room, from)) > 0) {
        int64_t step = line_step(line);
        if (step >= 0) is_kept = step <= keep_step;
        if (line[length - 1] != '\n' || !is_kept)
            ++*n_dropped;
        else if (fwrite(line, 1, (size_t)length, to) != (size_t)length)
            result = -1;
    }
    free(line);
    return result == 0 && !ferror(from) ? 0 : -1;
}

/* Rewrites the file without records behind keep_step. One that needs no change is left alone. */
static int cut_back(const char *path, int64_t keep_step, char *err) {
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.tmp", path) >= (int)sizeof temporary)
        return err_set(err, "%s: path too long", path);
    FILE *from = fopen(path, "rb");
    if (!from) return errno == ENOENT ? 0 : err_set(err, "%s: cannot open: %s", path, strerror(errno));
    int result = -1;
    int64_t n_dropped = 0;
    FILE *to = fopen(temporary, "wb");
    if (!to) {
        err_set(err, "%s: cannot create: %s", temporary, strerror(errno));
        goto done;
    }
    if (copy_lines(from, to, keep_step, &n_dropped) != 0 || fflush(to) != 0 || fsync(fileno(to)) != 0) {
        err_set(err, "%s: cannot cut back to step %lld: %s", path, (long long)keep_step, strerror(errno));
        goto done;
    }
    if (n_dropped > 0 && rename(temporary, path) != 0) {
        err_set(err, "%s: cannot rename: %s", temporary, strerror(errno));
        goto done;
    }
    result = 0;
done:
    fclose(from);
    if (to) fclose(to);
    if (to && (result != 0 || n_dropped == 0)) unlink(temporary);
    return result;
}

/* Gives an earlier run's file the first free name of path.1, path.2, ... */
static int move_aside(LogFile *f, const char *path, char *err) {
    if (file_size(path) <= 0) return 0;
    for (int i = 1; i < 1000000; i++) {
        if (snprintf(f->moved_to, sizeof f->moved_to, "%s.%d", path, i) >= (int)sizeof f->moved_to)
            return err_set(err, "%s: path too long", path);
        if (path_exists(f->moved_to)) continue;
        return rename(path, f->moved_to) == 0 ? 0 : err_set(err, "%s: cannot rename: %s", path, strerror(errno));
    }
    return err_set(err, "%s: no free name beside it", path);
}

int log_file_open(LogFile *f, const char *path, int64_t keep_step, char *err) {
    log_file_init(f);
    if (snprintf(f->path, sizeof f->path, "%s", path) >= (int)sizeof f->path)
        return err_set(err, "%s: path too long", path);
    if ((keep_step > 0 ? cut_back(path, keep_step, err) : move_aside(f, path, err)) != 0) return -1;
    f->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (f->fd < 0) return err_set(err, "%s: cannot open: %s", path, strerror(errno));
    f->size = file_size(path);
    /* The names too, not only the bytes, have to outlive a crash. */
    char folder[PATH_MAX];
    snprintf(folder, sizeof folder, "%s", path);
    char *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder ? 1 : 0] = 0;
    return file_sync(slash ? folder : ".", err);
}

void log_file_close(LogFile *f) {
    if (f->fd >= 0) close(f->fd);
    f->fd = -1;
}

int log_file_sync(LogFile *f, char *err) {
    if (f->fd < 0 || fsync(f->fd) == 0 || errno == EINVAL) return 0;
    return err_set(err, "%s: fsync: %s", f->path, strerror(errno));
}

/* -------------------------------------------------------------------------------------------------------- records */

/* The comma and the name before a value. A comma stands behind everything but an opening bracket. */
static void begin_value(LogFile *f, const char *name) {
    fflush(f->record);
    char last = f->text_size > 0 ? f->text[f->text_size - 1] : '{';
    if (last != '{' && last != '[') fputc(',', f->record);
    if (name) fprintf(f->record, "\"%s\":", name);
}

static void put_number(FILE *out, double x) {
    if (isfinite(x))
        json_write_double(out, x);
    else
        fputs("null", out);
}

void record_start(LogFile *f, const char *kind, int64_t step) {
    CHECK(!f->record, "a log record %s inside another", kind);
    f->text = NULL;
    f->text_size = 0;
    f->record = open_memstream(&f->text, &f->text_size);
    CHECK(f->record, "no memory for a log record");
    fprintf(f->record, "{\"kind\":\"%s\",\"step\":%lld", kind, (long long)step);
}

void record_integer(LogFile *f, const char *name, int64_t x) {
    begin_value(f, name);
    fprintf(f->record, "%lld", (long long)x);
}

void record_number(LogFile *f, const char *name, double x) {
    begin_value(f, name);
    put_number(f->record, x);
}

void record_numbers(LogFile *f, const char *name, const double *x, int n) {
    record_open(f, name, '[');
    for (int i = 0; i < n; i++) record_number(f, NULL, x[i]);
    record_close(f, ']');
}

void record_boolean(LogFile *f, const char *name, bool x) {
    begin_value(f, name);
    fputs(x ? "true" : "false", f->record);
}

void record_string(LogFile *f, const char *name, const char *text) {
    begin_value(f, name);
    if (!text) {
        fputs("null", f->record);
        return;
    }
    size_t n = strlen(text);
    char *valid = (char *)malloc(UTF8_STREAM_OUT_MAX(n) + UTF8_STREAM_OUT_MAX(0) + 1);
    CHECK(valid, "no memory for a log record");
    Utf8Stream stream = {0};
    size_t used = utf8_stream_put(&stream, text, n, valid);
    used += utf8_stream_end(&stream, valid + used);
    valid[used] = 0;
    json_write_string(f->record, valid);
    free(valid);
}

void record_hash(LogFile *f, const char *name, uint64_t hash) {
    begin_value(f, name);
    fprintf(f->record, "\"%016llx\"", (unsigned long long)hash);
}

void record_json(LogFile *f, const char *name, const char *json) {
    begin_value(f, name);
    /* Line ends stand between values only: inside strings they are escaped. */
    bool is_at_line_start = false;
    for (const char *p = json; *p; p++) {
        if (*p == '\n' || *p == '\r') {
            is_at_line_start = true;
        } else if (!(is_at_line_start && *p == ' ')) {
            is_at_line_start = false;
            fputc(*p, f->record);
        }
    }
}

void record_open(LogFile *f, const char *name, char bracket) {
    begin_value(f, name);
    fputc(bracket, f->record);
}

void record_close(LogFile *f, char bracket) {
    fputc(bracket, f->record);
}

void record_counts(LogFile *f, const int32_t *x, int n) {
    begin_value(f, NULL);
    for (int i = 0; i < n; i++) fprintf(f->record, "%c%d", i == 0 ? '[' : ',', (int)x[i]);
    fputs(n == 0 ? "[]" : "]", f->record);
}

/* Writes all or nothing. */
static int append(LogFile *f, const char *text, size_t size, char *err) {
    if (f->fd < 0) return 0;
    size_t written = 0;
    while (written < size) {
        ssize_t n = write(f->fd, text + written, size - written);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            err_set(err, "%s: cannot write: %s", f->path, strerror(n < 0 ? errno : ENOSPC));
            if (written > 0 && ftruncate(f->fd, f->size) != 0) f->size += (int64_t)written;
            return -1;
        }
        written += (size_t)n;
    }
    f->size += (int64_t)size;
    return 0;
}

int record_end(LogFile *f, char *err) {
    record_string(f, "time", format_utc((double)time(NULL)).text);
    fputs("}\n", f->record);
    bool is_whole = fclose(f->record) == 0;
    f->record = NULL;
    CHECK(is_whole, "no memory for a log record");
    int result = append(f, f->text, f->text_size, err);
    free(f->text);
    f->text = NULL;
    return result;
}
