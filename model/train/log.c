/* See log.h. This file: the logger itself and the lines in front; log_step.c: steps; log_event.c: all other kinds. */
#include "log.h"

#include <stdarg.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "format.h"
#include "log_parts.h"

enum { LOG_VERSION = 1 };

static bool is_terminal(FILE *f) {
    return fileno(f) >= 0 && isatty(fileno(f));
}

void log_init(Logger *l, int64_t every_steps, bool is_quiet, FILE *out, FILE *err_out) {
    memset(l, 0, sizeof *l);
    l->out = out;
    l->err_out = err_out;
    l->is_quiet = is_quiet;
    l->out_is_terminal = is_terminal(out);
    l->err_is_terminal = is_terminal(err_out);
    l->every_steps = every_steps > 0 ? every_steps : 1;
    log_file_init(&l->file);
    if (!is_quiet) bar_init(&l->bar, err_out);
}

void log_set_rate(Logger *l, LogRate rate) {
    l->rate = rate;
}

void print_line(Logger *l, FILE *to, bool with_time, const char *text) {
    bool to_terminal = to == l->out ? l->out_is_terminal : l->err_is_terminal;
    bar_clear(&l->bar);
    if (with_time && !to_terminal) fprintf(to, "%s ", format_utc((double)time(NULL)).text);
    fprintf(to, "%s\n", text);
    fflush(to);
}

void print_columns(Logger *l, FILE *to, const Line *line) {
    bool to_terminal = to == l->out ? l->out_is_terminal : l->err_is_terminal;
    char text[LINE_LEN];
    line_text(line, to_terminal ? terminal_width(fileno(to)) : 0, text);
    print_line(l, to, true, text);
}

void log_title(Logger *l, const char *fmt, ...) {
    char title[LINE_LEN], text[LINE_LEN + 64];
    va_list args;
    va_start(args, fmt);
    vsnprintf(title, sizeof title, fmt, args);
    va_end(args);
    Formatted now = format_utc((double)time(NULL));
    snprintf(text, sizeof text, "%s   %.10s %.8s UTC", title, now.text, now.text + 11);
    if (!l->is_quiet) print_line(l, l->out, false, text);
}

void log_banner(Logger *l, const char *word, const char *fmt, ...) {
    char rest[LINE_LEN], text[LINE_LEN + 64];
    va_list args;
    va_start(args, fmt);
    vsnprintf(rest, sizeof rest, fmt, args);
    va_end(args);
    snprintf(text, sizeof text, "%-10s %s", word, rest);
    if (!l->is_quiet) print_line(l, l->out, false, text);
}

void end_record(Logger *l) {
    char err[ERR_LEN];
    if (record_end(&l->file, err) == 0 || l->has_warned_of_file) return;
    l->has_warned_of_file = true;
    log_warn(l, l->step, "%s; training goes on, records are missing from here", err);
}

int log_open(Logger *l, const LogRun *run, char *err) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/log.jsonl", run->dir) >= (int)sizeof path)
        return err_set(err, "%s: path too long", run->dir);
    if (log_file_open(&l->file, path, run->step, err) != 0) return -1;
    l->step = run->step;
    l->steps_total = run->steps_total;
    l->tokens = run->tokens;
    record_start(&l->file, "run", run->step);
    record_integer(&l->file, "version", LOG_VERSION);
    record_string(&l->file, "commit", run->commit);
    record_json(&l->file, "config", run->config_json);
    end_record(l);
    if (l->file.moved_to[0]) log_banner(l, "log", "%s; an earlier run's is kept as %s", path, l->file.moved_to);
    return 0;
}

void log_close(Logger *l) {
    bar_clear(&l->bar);
    log_file_close(&l->file);
}
