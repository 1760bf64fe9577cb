/* What happens between steps: validation, samples, saves. See run.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "run.h"
#include "stop.h"

void run_validate(Run *r) {
    char err[ERR_LEN];
    RunState *s = &r->trainer.state;
    if (r->val.n == 0) return;
    ValReport *report = &r->last_val;
    memset(report, 0, sizeof *report);
    report->step = s->step;
    report->steps_total = r->trainer.length.steps;
    report->tokens = s->tokens;
    if (eval_run(&r->val, &r->model, report, &r->log, err) != 0) DIE(NULL, "%s", err);
    report->is_best = report->sets[0].loss < s->best_val;
    if (report->is_best) s->best_val = report->sets[0].loss;
    r->has_val = true;
    log_val(&r->log, report);
}

void run_sample(Run *r) {
    const Config *c = &r->config;
    const int64_t room = r->model.generate_len + 1;
    if (!r->tokenizer) return;
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
        const Sampling sampling = {c->sample.temperature, c->sample.top_k, c->sample.top_p, c->run.seed,
                                   (uint64_t)r->trainer.state.step, r->document_token};
        int64_t made = generate(&r->model, ids, n, n_new, &sampling, NULL, NULL);
        char *text = text_of(r->tokenizer, ids + n, made);
        log_sample(&r->log, r->trainer.state.step, c->sample.prompts[i], text);
        free(text);
    }
    free(ids);
}

void run_save(Run *r, bool is_last) {
    char err[ERR_LEN], path[CHECKPOINT_PATH_LEN];
    const RunState *s = &r->trainer.state;
    const double start = clock_s();
    int64_t bytes;
    CheckpointInfo info = {*s, loader_identity(r->loader), params_hash(&r->model.params, &r->device), NULL};
    info.config_json = config_to_json(&r->config);
    int failed = checkpoint_save(r->config.run.dir, &r->device, r->tensors, r->n_tensors, &info, CHECKPOINT_FILE_BYTES,
                                 path, &bytes, err);
    free(info.config_json);
    if (failed && is_last)
        FAIL(r->last_checkpoint[0] ? r->last_checkpoint : NULL, "the last save failed: %s", err);
    if (failed) {
        log_warn(&r->log, s->step, "save failed, the run goes on: %s", err);
        return;
    }
    snprintf(r->last_checkpoint, sizeof r->last_checkpoint, "%s", path);
    const char *slash = strrchr(path, '/');
    SaveReport report = {s->step, r->trainer.length.steps, s->tokens, slash ? slash + 1 : path, bytes, info.param_hash,
                         clock_s() - start, -1};
    log_save(&r->log, &report);
    r->saved_at_s = clock_s();
    if (checkpoint_prune(r->config.run.dir, s->step, r->config.checkpoint.keep_last, r->config.checkpoint.keep_every_steps,
                         err) != 0)
        log_warn(&r->log, s->step, "%s", err);
}

static bool is_due(int64_t step, int64_t every) {
    return every > 0 && step % every == 0;
}

void run_due(Run *r, const StepReport *report) {
    const Config *c = &r->config;
    const RunState *s = &r->trainer.state;
    const bool is_end = s->step >= r->trainer.length.steps;
    if (s->update.skipped_in_a_row >= c->train.max_skipped_in_a_row) {
        char hint[CHECKPOINT_PATH_LEN + 96];
        snprintf(hint, sizeof hint, "last good checkpoint: %s; a lower train.lr or data.skip may help",
                 r->last_checkpoint[0] ? r->last_checkpoint : "none");
        FAIL(hint, "step %lld: %lld updates skipped in a row (%s); nothing of them is saved", (long long)s->step,
             (long long)s->update.skipped_in_a_row, skip_reason(report->skip));
    }
    if (c->eval.every_steps > 0 && (is_due(s->step, c->eval.every_steps) || is_end)) run_validate(r);
    if (c->sample.every_steps > 0 && (is_due(s->step, c->sample.every_steps) || is_end)) run_sample(r);
    const bool time_due = c->checkpoint.every_minutes > 0 && clock_s() - r->saved_at_s >= 60 * c->checkpoint.every_minutes;
    if (is_due(s->step, c->checkpoint.every_steps) || time_due || is_end) run_save(r, is_end);
}
