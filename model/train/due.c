/* What happens between steps: validation, samples, saves. See run.h. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/comm/watch.h"
#include "run.h"
#include "stop.h"

enum { HINT_LEN = CHECKPOINT_PATH_LEN + 96 };

static const char *last_good(const Run *r, char hint[HINT_LEN], const char *advice) {
    snprintf(hint, HINT_LEN, "last good checkpoint: %s; %s", r->last_checkpoint[0] ? r->last_checkpoint : "none",
             advice);
    return hint;
}

void run_data_failed(Run *r, const char *err) {
    char hint[HINT_LEN];
    if (r->comm->mesh.world == 1) { /* other ranks are elsewhere: nothing is agreed on any more */
        run_reports(r, true);
        run_saved(r, true);
    }
    if (!r->last_checkpoint[0]) DIE("nothing of this run is saved yet", "%s", err);
    FAIL(last_good(r, hint, "put the file right and give the same command again"), "%s", err);
}

int run_evaluate(Run *r, bool want_val, bool want_choice, ValReport *report, char *err) {
    for (bool again = true; again; again = report->overflow > 0) {
        if (report->overflow > 0) run_make_room(r, "validation");
        report->overflow = 0;
        if (want_val && eval_run(&r->val, &r->model, report, &r->log, err) != 0) return -1;
        if (want_choice) choice_run(&r->choice, &r->model, report, &r->log);
    }
    return 0;
}

void run_validate(Run *r, bool want_val, bool want_choice) {
    char err[ERR_LEN];
    RunState *s = &r->trainer.state;
    want_val = want_val && r->val.n > 0;
    want_choice = want_choice && r->choice.n > 0;
    if (!want_val && !want_choice) return;
    watch_phase("validation", -1);
    ValReport report;
    memset(&report, 0, sizeof report);
    report.step = s->step;
    report.steps_total = r->trainer.length.steps;
    report.tokens = s->tokens;
    if (run_evaluate(r, want_val, want_choice, &report, err) != 0) run_data_failed(r, err);
    if (want_val) {
        report.is_best = report.sets[0].loss < s->best_val;
        if (report.is_best) {
            s->best_val = report.sets[0].loss;
            s->best_step = s->step;
            r->owes_save = r->owes_save || r->config.checkpoint.keep_best;
        }
    }
    if (want_val) r->last_val = report;
    if (want_choice) r->last_choice = report;
    r->has_val = r->has_val || want_val;
    r->has_choice = r->has_choice || want_choice;
    log_val(&r->log, &report);
}

void run_forget_samples(Run *r) {
    for (int i = 0; i < r->n_samples; i++) free(r->samples[i].text);
    r->n_samples = 0;
}

void run_sample(Run *r) {
    const Config *c = &r->config;
    const int64_t room = r->model.generate_len + 1;
    if (!r->tokenizer) return;
    run_forget_samples(r);
    r->sample_step = r->trainer.state.step;
    int32_t *ids = (int32_t *)malloc((size_t)room * sizeof *ids);
    CHECK(ids, "no memory for %lld ids", (long long)room);
    for (int i = 0; i < c->sample.n_prompts; i++) {
        char err[ERR_LEN];
        int64_t n = prompt_ids(r->tokenizer, r->document_token, c->sample.prompts[i], ids, room - 1, err);
        if (n < 0) {
            log_warn(&r->log, r->trainer.state.step, "sample.prompts %d: %s", i, err);
            continue;
        }
        const int64_t n_new = c->sample.tokens < room - n ? c->sample.tokens : room - n;
        Sampling sampling = {.temperature = c->sample.temperature,
                             .top_k = c->sample.top_k,
                             .top_p = c->sample.top_p,
                             .seed = c->run.seed,
                             .step = (uint64_t)r->trainer.state.step};
        sampling_stop_at(&sampling, r->document_token);
        sampling_stop_at(&sampling, c->model.eos_token_id);
        int64_t made = generate(&r->model, ids, n, n_new, &sampling, NULL, NULL);
        char *text = text_of(r->tokenizer, ids + n, made);
        log_sample(&r->log, r->trainer.state.step, c->sample.prompts[i], text);
        r->samples[r->n_samples++] = (ReportSample){c->sample.prompts[i], text};
    }
    free(ids);
}

/* What became of a save. */
static void report_save(Run *r, const SaveResult *save, bool is_last) {
    if (save->failed && is_last) {
        char hint[HINT_LEN];
        FAIL(last_good(r, hint, "make room and give the same command again"), "the last save failed: %s", save->err);
    }
    if (save->failed) log_warn(&r->log, save->step, "save failed, the run goes on: %s", save->err);
    if (save->warning[0]) log_warn(&r->log, save->step, "%s", save->warning);
    if (save->failed) return;
    snprintf(r->last_checkpoint, sizeof r->last_checkpoint, "%s", save->path);
    r->saved_step = save->step;
    const char *slash = strrchr(save->path, '/');
    const SaveReport report = {.step = save->step,
                               .steps_total = r->trainer.length.steps,
                               .tokens = save->tokens,
                               .name = slash ? slash + 1 : save->path,
                               .bytes = save->bytes,
                               .hash = save->hash,
                               .waited_s = save->waited_s,
                               .on_disk_s = save->on_disk_s};
    log_save(&r->log, &report);
}

static void end_save(Run *r, bool wait, bool is_last) {
    SaveResult save;
    if (saver_end(&r->saver, wait, &save)) report_save(r, &save, is_last);
}

void run_saved(Run *r, bool wait) {
    end_save(r, wait, false);
}

void run_save(Run *r, bool is_last) {
    char identity[DEVICE_TEXT_LEN];
    const RunState *s = &r->trainer.state;
    watch_phase("save", -1);
    run_saved(r, false);
    if (r->saver.stage != SAVER_IDLE) {
        const int64_t before = r->saver.result.step;
        const double start = clock_s();
        run_saved(r, true);
        log_warn(&r->log, s->step, "the save of step %lld was still being written: the run waited %.1f s for it",
                 (long long)before, clock_s() - start);
    }
    CheckpointInfo info = {.state = *s,
                           .data_identity = loader_identity(r->loader),
                           .config_json = config_to_json(&r->config),
                           .device = strdup(device_identity(&r->device, identity)),
                           .gemms = device_gemms(&r->device),
                           .loads = loads_copy(&r->trainer.loads)};
    saver_begin(&r->saver, &info);
    r->trainer.is_copied = saver_is_copying(&r->saver);
    r->owes_save = false;
    r->saved_at_s = clock_s();
    end_save(r, is_last, is_last);
}

static bool is_due(int64_t step, int64_t every) {
    return every > 0 && step % every == 0;
}

void run_profile(Run *r) {
    const int64_t next = r->trainer.state.step + 1;
    if (!r->args->profile || (next != r->args->profile_first && next != r->args->profile_end)) return;
    if (run_reports(r, true) == SKIP_OVERFLOW) return; /* it is another step that comes next */
    (void)device_profile(&r->device, next == r->args->profile_first);
}

static void count_skips(Run *r, const StepReport *report) {
    const int64_t in_a_row = r->trainer.state.update.skipped_in_a_row, allowed = r->config.train.max_skipped_in_a_row;
    if (!report->skip) return;
    log_warn(&r->log, report->step, "%s: update skipped, %lld in a row, %lld end the run", skip_reason(report->skip),
             (long long)in_a_row, (long long)allowed);
    if (in_a_row < allowed) return;
    char hint[HINT_LEN];
    run_saved(r, true);
    FAIL(last_good(r, hint, "a lower train.lr or data.skip may help"),
         "step %lld: %lld updates skipped in a row (%s); nothing of them is saved", (long long)report->step,
         (long long)in_a_row, skip_reason(report->skip));
}

int run_reports(Run *r, bool all) {
    Trainer *t = &r->trainer;
    const int64_t hash_every = r->config.log.hash_every_steps;
    StepReport report;
    int skip = SKIP_NONE;
    while (all ? train_flush(t, &report) : train_report(t, &report)) {
        if (report.skip == SKIP_OVERFLOW) {
            char what[32];
            snprintf(what, sizeof what, "step %lld", (long long)report.step);
            run_make_room(r, what);
            return SKIP_OVERFLOW;
        }
        if (is_due(report.step, hash_every)) {
            report.has_hash = true;
            report.hash = params_hash_of_job(&r->model.params, &r->device);
        }
        if (is_due(report.step, r->config.log.gpu_every_steps))
            report.has_gpu = device_health(&r->device, &report.gpu) == 0;
        log_step(&r->log, &report);
        if (report.fp8) log_fp8(&r->log, &report);
        count_skips(r, &report);
        skip = report.skip;
    }
    return skip;
}

void run_due(Run *r) {
    const Config *c = &r->config;
    const int64_t step = r->trainer.state.step;
    saver_copied(&r->saver, true);
    run_saved(r, false);
    const bool is_end = step >= r->trainer.length.steps;
    const bool val_due = is_due(step, c->eval.every_steps) || (is_end && c->eval.every_steps > 0);
    const bool choice_due = is_due(step, c->eval.choice_every_steps) || (is_end && c->eval.choice_every_steps > 0);
    const bool sample_due = is_due(step, c->sample.every_steps) || (is_end && c->sample.every_steps > 0);
    bool time_due = c->checkpoint.every_minutes > 0 && clock_s() - r->saved_at_s >= 60 * c->checkpoint.every_minutes;
    if (c->checkpoint.every_minutes > 0) job_spread(&time_due, sizeof time_due); /* by rank 0's clock */
    if (is_due(step, c->checkpoint.every_steps) || time_due) r->owes_save = true;
    const bool is_asked = val_due || choice_due || sample_due || r->owes_save || is_end;
    const int skip = run_reports(r, is_asked || is_due(step, c->log.hash_every_steps));
    if (skip == SKIP_OVERFLOW) return; /* nothing is due before the step is trained */
    run_validate(r, val_due, choice_due);
    if (sample_due) run_sample(r);
    /* A row of skipped updates may be the end of the run: it must not push the last good checkpoint out. */
    if (is_end || (r->owes_save && !skip)) run_save(r, is_end);
}
