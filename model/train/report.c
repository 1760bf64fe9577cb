/* See report.h. */
#include "report.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "format.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "run.h"

enum { CELL_LEN = 2048 };

/* A row of the table. What would end the cell or the line is made harmless. */
PRINTF_LIKE(3, 4) static void row(FILE *out, const char *name, const char *fmt, ...) {
    char text[CELL_LEN], clean[CELL_LEN];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    for (int i = 0; i < 2; i++) {
        format_one_line(clean, sizeof clean, i == 0 ? name : text);
        fputs(i == 0 ? "| " : " | ", out);
        for (const char *p = clean; *p; p++) fprintf(out, strchr("|`<\\", *p) ? "\\%c" : "%c", *p);
    }
    fputs(" |\n", out);
}

static void model_rows(FILE *out, const ReportFacts *f) {
    const Config *c = f->config;
    const ModelConfig *m = &c->model;
    const int layers = m->num_hidden_layers;
    char mtp[64] = "", experts[128] = "all dense";
    if (f->count.mtp > 0) snprintf(mtp, sizeof mtp, " + MTP %s", format_count((double)f->count.mtp).text);
    if (m->first_k_dense_replace < layers)
        snprintf(experts, sizeof experts, "%d experts top %d + %d shared from layer %d", m->n_routed_experts,
                 m->num_experts_per_tok, m->n_shared_experts, m->first_k_dense_replace + 1);
    row(out, "model", "%s parameters%s, %s active; hidden %lld, %d layers, %s, vocabulary %lld",
        format_count((double)f->count.total).text, mtp, format_count((double)f->count.active).text,
        (long long)m->hidden_size, layers, experts, (long long)m->vocab_size);
    row(out, "data", "%s", f->data);
    const Schedule *lr = &c->train.lr;
    row(out, "training", "%lld of %lld steps, %s of %s tokens, sequences of %lld; peak lr %g, final %g",
        (long long)f->state->step, (long long)f->steps_total, format_count((double)f->state->tokens).text,
        format_count((double)f->tokens_total).text, (long long)c->train.seq_len, lr->value[0], c->train.lr_final);
    if (f->state->update.skipped_total > 0)
        row(out, "skipped updates", "%lld", (long long)f->state->update.skipped_total);
}

static void loss_rows(FILE *out, const ReportFacts *f) {
    const ZWindow *w = &f->state->loss_z;
    double sum = 0;
    for (int i = 0; i < w->n; i++) sum += w->value[i];
    if (w->n > 0)
        row(out, "training loss", "%.4f in the last step, %.4f on average over the last %d (nats a token)",
            w->value[(w->head + w->n - 1) % w->size], sum / w->n, w->n);
    if (!f->val) row(out, "validation", "none since the last start");
    for (int i = 0; f->val && i < f->val->n_sets; i++) {
        const ValSet *set = &f->val->sets[i];
        const double per_byte = set->bytes_per_token > 0 ? set->loss / set->bytes_per_token : 0;
        char bytes[96] = "", others[160] = "";
        if (per_byte > 0)
            snprintf(bytes, sizeof bytes, ", %.3f bits a byte (%.3f nats)", per_byte / log(2.0), per_byte);
        if (set->comparison) snprintf(others, sizeof others, "; nats a byte of others: %s", set->comparison);
        row(out, set->name, "loss %.4f, perplexity %.*f%s after step %lld%s", set->loss, exp(set->loss) < 1000 ? 2 : 0,
            exp(set->loss), bytes, (long long)f->val->step, others);
    }
    for (int i = 0; f->choice && i < f->choice->n_choices; i++) {
        const ChoiceResult *r = &f->choice->choices[i];
        row(out, r->name, "%.1f %% of %lld questions right after step %lld, chance %.1f %%", 100 * r->accuracy,
            (long long)r->n_examples, (long long)f->choice->step, 100 * r->chance);
    }
}

/* Time and cost are those of the training steps; starting, evaluating and saving are not in wall_s. */
static void cost_rows(FILE *out, const ReportFacts *f) {
    const double wall_s = f->state->wall_s, hours = wall_s / 3600, price = f->config->run.price_per_gpu_hour;
    if (wall_s > 0) {
        const double rate = (double)f->state->tokens / wall_s;
        row(out, "speed", "%s tokens/s on %d x %s, %s model FLOP/s", format_rate(rate).text, f->n_devices, f->device,
            format_count(rate * f->flops_per_token).text);
    }
    row(out, "time", "%s of training steps = %.2f h x %d = %.2f device hours", format_duration(wall_s).text, hours,
        f->n_devices, hours * f->n_devices);
    if (price > 0) row(out, "cost", "%.2f at %g an hour", hours * f->n_devices * price, price);
    row(out, "weights", "%s", f->checkpoint[0] ? f->checkpoint : "not saved");
    row(out, "made by", "%s", f->version);
}

/* Indented, so that nothing in the text is markup. */
static void put_sample(FILE *out, const char *prompt, const char *text) {
    fputs("\n    ", out);
    for (const char *part = prompt;; part = text) {
        for (const char *p = part; *p; p++) {
            if (*p == '\n')
                fputs("\n    ", out);
            else
                fputc((unsigned char)*p < 32 && *p != '\t' ? ' ' : *p, out);
        }
        if (part == text) break;
    }
    fputc('\n', out);
}

char *report_text(const ReportFacts *f) {
    char *text = NULL, name[NAME_LEN];
    size_t size;
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "no memory for a report");
    format_one_line(name, sizeof name, f->config->run.name);
    fprintf(out, "# %s\n\n%s at step %lld of %lld, %s.\n\n| | |\n|---|---|\n", name,
            f->is_finished ? "Finished" : "Stopped early and saved,", (long long)f->state->step,
            (long long)f->steps_total, format_utc((double)time(NULL)).text);
    model_rows(out, f);
    loss_rows(out, f);
    cost_rows(out, f);
    fputs("\n## Samples\n", out);
    if (f->n_samples > 0)
        fprintf(out, "\nAfter step %lld, temperature %g.\n", (long long)f->sample_step, f->config->sample.temperature);
    else
        fputs("\nNone were drawn (sample.every_steps, sample.prompts).\n", out);
    for (int i = 0; i < f->n_samples; i++) {
        put_sample(out, f->samples[i].prompt, f->samples[i].text);
        if (i + 1 < f->n_samples) fputs("\n---\n", out);
    }
    char *json = config_to_json(f->config);
    fputs("\n## Configuration\n\n    ", out);
    for (const char *p = json; *p; p++) {
        fputc(*p, out);
        if (*p == '\n' && p[1]) fputs("    ", out);
    }
    free(json);
    CHECK(fclose(out) == 0 && text, "no memory for a report");
    return text;
}

/* ---- of a run ---------------------------------------------------------------------------------------------------- */

static void describe_data(const Run *r, char *text, size_t text_len) {
    const DataConfig *d = &r->config.data;
    if (d->synthetic) {
        snprintf(text, text_len, "synthetic: uniform random ids");
        return;
    }
    const double tokens = (double)loader_tokens(r->loader);
    const int64_t samples = r->trainer.state.samples, S = r->model.shape.S;
    size_t used = (size_t)snprintf(text, text_len, "%s tokens in %d shard%s", format_count(tokens).text,
                                   loader_n_shards(r->loader), loader_n_shards(r->loader) > 1 ? "s" : "");
    if (d->n_train == 1)
        snprintf(text + used, text_len - used, ", seen %.2f times: %s", (double)r->trainer.state.tokens / tokens,
                 d->train[0].path);
    for (int k = 0; d->n_train > 1 && k < d->n_train && used < text_len; k++) {
        const LoaderSource s = loader_source(r->loader, k, samples);
        used +=
            (size_t)snprintf(text + used, text_len - used, "; %s: %s of %s, seen %.2f times, share %.3g: %s", s.name,
                             format_count((double)(s.n_used * S)).text, format_count((double)s.n_tokens).text,
                             (double)s.n_used / (double)s.n_samples, s.share, d->train[k].path);
    }
}

void run_report(Run *r, bool is_finished) {
    char data[CELL_LEN], version[256], path[PATH_LEN + 16], err[ERR_LEN];
    describe_data(r, data, sizeof data);
    ReportFacts f;
    memset(&f, 0, sizeof f);
    f.config = &r->config;
    f.state = &r->trainer.state;
    f.is_finished = is_finished;
    f.steps_total = r->trainer.length.steps;
    f.tokens_total = r->trainer.length.tokens;
    f.count = params_count(&r->model.params);
    f.flops_per_token = shape_flops_per_token(&r->model.shape);
    f.data = data;
    f.device = "cpu";
    f.n_devices = 1;
    f.val = r->has_val ? &r->last_val : NULL;
    f.choice = r->has_choice ? &r->last_choice : NULL;
    f.sample_step = r->sample_step;
    f.n_samples = r->n_samples;
    f.samples = r->samples;
    f.checkpoint = r->last_checkpoint;
    f.version = version_text(version, sizeof version);
    char *text = report_text(&f);
    snprintf(path, sizeof path, "%s/report.md", r->config.run.dir);
    if (file_write_durable(path, text, strlen(text), err) != 0)
        log_warn(&r->log, r->trainer.state.step, "the report is missing: %s", err);
    free(text);
}
