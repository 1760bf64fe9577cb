/* See log.h: evaluation, saves, warnings, samples and the end. */
#include <math.h>
#include <stdarg.h>

#include "format.h"
#include "log.h"
#include "log_parts.h"

enum { WARNING_LEN = 1024 };
static const double ln2 = 0.69314718055994531;

static double nats_per_byte(const ValSet *set) {
    return set->bytes_per_token > 0 ? set->loss / set->bytes_per_token : NAN;
}

static void record_sets(LogFile *f, const ValReport *r) {
    record_open(f, "sets", '[');
    for (int i = 0; i < r->n_sets; i++) {
        const ValSet *set = &r->sets[i];
        record_open(f, NULL, '{');
        record_string(f, "name", set->name);
        record_number(f, "loss", set->loss);
        record_number(f, "perplexity", exp(set->loss));
        record_number(f, "nats_per_byte", nats_per_byte(set));
        record_number(f, "bpb", nats_per_byte(set) / ln2);
        if (set->comparison) record_string(f, "comparison", set->comparison);
        record_close(f, '}');
    }
    record_close(f, ']');
}

static void record_choices(LogFile *f, const ValReport *r) {
    record_open(f, "choices", '[');
    for (int i = 0; i < r->n_choices; i++) {
        const ChoiceResult *c = &r->choices[i];
        record_open(f, NULL, '{');
        record_string(f, "name", c->name);
        record_number(f, "accuracy", c->accuracy);
        record_number(f, "accuracy_by_sum", c->accuracy_by_sum);
        record_number(f, "label_nats", c->label_nats);
        record_number(f, "chance", c->chance);
        record_integer(f, "examples", c->n_examples);
        record_close(f, '}');
    }
    record_close(f, ']');
}

static void print_sets(Line *line, const ValReport *r) {
    for (int i = 0; i < r->n_sets; i++) {
        const ValSet *set = &r->sets[i];
        double x = nats_per_byte(set);
        if (set->bytes_per_token <= 0)
            line_add(line, 0, "%s %.4f", set->name, set->loss);
        else if (r->n_sets > 1)
            line_add(line, 0, "%s %.4f bpb %.3f", set->name, set->loss, x / ln2);
        else if (set->comparison)
            line_add(line, 0, "%s %.4f = %.3f nats/byte (%s)", set->name, set->loss, x, set->comparison);
        else
            line_add(line, 0, "%s %.4f = %.3f nats/byte", set->name, set->loss, x);
        if (!r->in_full) continue;
        if (r->n_sets == 1 && set->bytes_per_token > 0) line_add(line, 0, "bpb %.3f", x / ln2);
        line_add(line, 0, "perplexity %.*f", exp(set->loss) < 1000 ? 2 : 0, exp(set->loss));
    }
}

static void print_choices(Line *line, const ValReport *r) {
    for (int i = 0; i < r->n_choices; i++) {
        const ChoiceResult *c = &r->choices[i];
        if (r->in_full)
            line_add(line, 0, "%s %.3f +- %.3f of %lld (chance %.3f, by sum %.3f)", c->name, c->accuracy,
                     sqrt(c->accuracy * (1 - c->accuracy) / (double)c->n_examples), (long long)c->n_examples, c->chance,
                     c->accuracy_by_sum);
        else
            line_add(line, 0, "%s %.3f", c->name, c->accuracy);
    }
}

void log_val(Logger *l, const ValReport *r) {
    LogFile *f = &l->file;
    l->step = r->step;
    l->tokens = r->tokens;
    record_start(f, "val", r->step);
    record_integer(f, "tokens", r->tokens);
    record_sets(f, r);
    if (r->n_choices > 0) record_choices(f, r);
    record_boolean(f, "best", r->is_best);
    record_integer(f, "tokens_evaluated", r->tokens_evaluated);
    record_number(f, "seconds", r->seconds);
    end_record(l);
    if (l->is_quiet) return;

    Line line;
    line_start(&line, "val", r->step, r->steps_total);
    line_add(&line, 3, "%5s", format_count((double)r->tokens).text);
    print_sets(&line, r);
    print_choices(&line, r);
    if (r->n_sets > 0) line_add(&line, 1, "%s tokens", format_count((double)r->tokens_evaluated).text);
    line_add(&line, 2, "%s", format_step_time(1000 * r->seconds).text);
    if (r->is_best) line_add(&line, 0, "best");
    print_columns(l, l->out, &line);
}

void log_save(Logger *l, const SaveReport *r) {
    LogFile *f = &l->file;
    record_start(f, "save", r->step);
    record_integer(f, "tokens", r->tokens);
    record_string(f, "name", r->name);
    record_integer(f, "bytes", r->bytes);
    record_hash(f, "hash", r->hash);
    record_number(f, "waited_s", r->waited_s);
    if (r->on_disk_s >= 0) record_number(f, "on_disk_s", r->on_disk_s);
    end_record(l);
    if (l->is_quiet) return;

    Line line;
    line_start(&line, "save", r->step, r->steps_total);
    line_add(&line, 2, "%5s", format_count((double)r->tokens).text);
    line_add(&line, 0, "%s, %s, hash %016llx", r->name, format_file_size((double)r->bytes).text,
             (unsigned long long)r->hash);
    if (r->on_disk_s >= 0)
        line_add(&line, 1, "run waited %.1f s, on disk after %.1f s", r->waited_s, r->on_disk_s);
    else
        line_add(&line, 1, "run waited %.1f s", r->waited_s);
    print_columns(l, l->out, &line);
}

void log_warn(Logger *l, int64_t step, const char *fmt, ...) {
    char warning[WARNING_LEN], text[WARNING_LEN + 128];
    va_list args;
    va_start(args, fmt);
    vsnprintf(warning, sizeof warning, fmt, args);
    va_end(args);
    Line line;
    line_start(&line, "warn", step, l->steps_total);
    snprintf(text, sizeof text, "%s | %s", line.front, warning);
    print_line(l, l->err_out, true, text);
    record_start(&l->file, "warn", step);
    record_string(&l->file, "text", warning);
    end_record(l);
}

void log_sample(Logger *l, int64_t step, const char *prompt, const char *text) {
    record_start(&l->file, "sample", step);
    record_string(&l->file, "prompt", prompt);
    record_string(&l->file, "text", text);
    end_record(l);
    if (l->is_quiet) return;
    char joined[LINE_LEN / 2], clean[LINE_LEN / 2], whole[LINE_LEN];
    snprintf(joined, sizeof joined, "%s%s", prompt, text);
    format_one_line(clean, sizeof clean, joined);
    Line line;
    line_start(&line, "sample", step, l->steps_total);
    snprintf(whole, sizeof whole, "%s | %s", line.front, clean);
    print_line(l, l->out, true, whole);
}

void log_done(Logger *l, bool is_finished, const ValReport *val, double wall_s, const char *hint) {
    const char *kind = is_finished ? "done" : "stop";
    record_start(&l->file, kind, l->step);
    record_integer(&l->file, "tokens", l->tokens);
    if (val) record_sets(&l->file, val);
    record_number(&l->file, "wall_s", wall_s);
    end_record(l);

    Line line;
    line_start(&line, kind, l->step, l->steps_total);
    line_add(&line, 2, "%5s", format_count((double)l->tokens).text);
    for (int i = 0; val && i < val->n_sets; i++) {
        const ValSet *set = &val->sets[i];
        const char *name = val->n_sets > 1 ? set->name : "val";
        if (set->bytes_per_token > 0)
            line_add(&line, 0, "%s %.4f = %.3f nats/byte", name, set->loss, nats_per_byte(set));
        else
            line_add(&line, 0, "%s %.4f", name, set->loss);
    }
    line_add(&line, 1, "%s", format_duration(wall_s).text);
    if (hint && hint[0]) line_add(&line, 0, "%s", hint);
    print_columns(l, l->out, &line);
}

void log_progress(Logger *l, const char *what, int64_t done, int64_t total) {
    char text[128];
    snprintf(text, sizeof text, "%s %lld/%lld", what, (long long)done, (long long)total);
    bar_draw(&l->bar, done, total, text);
}
