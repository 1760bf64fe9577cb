/* The commands beside train. See run.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "plan.h"
#include "plan_cluster.h"
#include "plan_schedule.h"
#include "text_out.h"

int run_command_plan(const Args *args, const Launch *launch) {
    Run r;
    Plan plan;
    run_open_model(&r, args, launch, 0, false);
    log_init(&r.log, 1, false, run_out(stdout), run_out(stderr));
    plan_make(&plan, &r);
    const PipelinePlan pipeline = plan_schedule_make(&r.config, &r.model.shape, args, plan.ranks);
    plan_cluster_make(&plan, &pipeline);
    if (args->json) {
        plan_json(&plan, run_out(stdout));
    } else {
        banner_plan(&r);
        plan_print(&plan, &r.log);
        plan_schedule_print(&pipeline, &r.log);
        plan_cluster_print(&plan, &r.log);
    }
    if (plan.has_cluster) cluster_free(&plan.cluster);
    run_close(&r);
    return EXIT_DONE;
}

/* The first micro-batch of the first validation set; without one, of the training data. */
static void write_logits(Run *r, const char *path) {
    char err[ERR_LEN], hint[ERR_LEN];
    MicroBatch mb;
    if (r->config.data.document_mask)
        DIE("add --set data.document_mask=false", "--dump-logits is for implementations without a document mask");
    if (r->val.n == 0) {
        LoaderSpec spec;
        if (loader_spec_train(&spec, &r->config, 1, err, hint) != 0 || loader_open(&r->loader, &spec, err, hint) != 0)
            DIE(hint[0] ? hint : NULL, "%s", err);
    }
    if (loader_next(r->val.n ? r->val.loader[0] : r->loader, 0, &mb, err) != 0 ||
        dump_logits(&r->model, &mb, path, err) != 0)
        DIE(NULL, "%s", err);
    fprintf(stderr, "logits: %s\n", path);
}

int run_command_eval(const Args *args, const Launch *launch) {
    Run r;
    char err[ERR_LEN], hint[ERR_LEN];
    run_open_model(&r, args, launch, 0, true);
    log_init(&r.log, 1, args->quiet, run_out(stdout), run_out(stderr));
    if (r.config.data.n_val == 0 && r.config.eval.n_choice == 0 && !args->dump_logits)
        DIE("name validation files in data.val", "%s has no data.val and no eval.choice", args->config);
    if (eval_open(&r.val, &r.config, r.comm->mesh.n_data, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    run_open_choice(&r);
    run_load_weights(&r);
    if (args->dump_logits) write_logits(&r, args->dump_logits);
    if (r.val.n == 0 && r.choice.n == 0) {
        run_close(&r);
        return EXIT_DONE;
    }
    ValReport report;
    memset(&report, 0, sizeof report);
    report.step = r.trainer.state.step;
    report.steps_total = run_length(&r.config, 1).steps;
    report.tokens = r.trainer.state.tokens;
    report.in_full = true;
    if (run_evaluate(&r, r.val.n > 0, r.choice.n > 0, &report, err) != 0) DIE(NULL, "%s", err);
    r.log.is_quiet = false; /* the one line that was asked for */
    log_val(&r.log, &report);
    run_close(&r);
    return EXIT_DONE;
}

/* ---- generate ---------------------------------------------------------------------------------------------------- */

static char *read_prompt(void) {
    size_t size = 0, room = 1 << 16;
    char *text = (char *)malloc(room + 1);
    CHECK(text, "no memory for the prompt");
    for (size_t n; (n = fread(text + size, 1, room - size, stdin)) > 0;) {
        size += n;
        if (size < room) continue;
        if (room >= 1 << 24) DIE(NULL, "the prompt on standard input is larger than 16 MiB");
        room *= 2;
        text = (char *)realloc(text, room + 1);
        CHECK(text, "no memory for the prompt");
    }
    text[size] = 0;
    if (strlen(text) != size) DIE("is it a text?", "the prompt on standard input holds a zero byte");
    return text;
}

/* Standard input is rank 0's. */
static char *prompt_of(const Args *args) {
    if (!args->prompt || strcmp(args->prompt, "-") != 0) return strdup(args->prompt ? args->prompt : "");
    char *text = job_rank() == 0 ? read_prompt() : NULL;
    size_t size = text ? strlen(text) + 1 : 0;
    job_spread(&size, sizeof size);
    if (!text) text = (char *)malloc(size);
    CHECK(text, "no memory for a prompt of %zu bytes", size);
    job_spread(text, size);
    return text;
}

void run_find_tokenizer(const Config *c, char *path, int64_t *document_token) {
    char err[ERR_LEN];
    Sidecar sidecar;
    path[0] = 0;
    *document_token = c->data.document_token;
    sidecar.found = false;
    for (int i = 0; i < c->data.n_train && !sidecar.found; i++)
        if (sidecar_read(&sidecar, c->data.train[i].path, err) != 0) sidecar.found = false;
    if (sidecar.found) {
        if (*document_token < 0) *document_token = sidecar.document_token;
        if (sidecar.tokenizer[0] && sidecar_tokenizer_path(path, PATH_LEN, &sidecar, err) != 0) DIE(NULL, "%s", err);
    }
    if (c->data.tokenizer[0]) snprintf(path, PATH_LEN, "%s", c->data.tokenizer);
}

/* Known before the model is allocated, since the prompt's length decides the size of the sequence. */
static Tokenizer *open_tokenizer(const Config *c, int64_t *document_token) {
    char err[ERR_LEN], path[PATH_LEN];
    run_find_tokenizer(c, path, document_token);
    if (!path[0])
        DIE("set data.tokenizer to a tokenizer.json or its folder",
            "no tokenizer: none in the configuration, none named by "
            "a data.json beside the shards");
    Tokenizer *t;
    if (tokenizer_load(&t, path, err) != 0) DIE(NULL, "%s", err);
    if (*document_token < 0) *document_token = tokenizer_document_token(t);
    return t;
}

static Sampling sampling_of(const Args *args, const Config *c, const Tokenizer *t, int64_t document_token) {
    Sampling s = {.temperature = args->temperature,
                  .top_k = (int)args->top_k,
                  .top_p = args->top_p,
                  .seed = (uint64_t)args->seed};
    if (args->stop && strcmp(args->stop, "none") == 0) return s;
    sampling_stop_at(&s, document_token);
    sampling_stop_at(&s, c->model.eos_token_id);
    if (!args->stop) return s;
    int32_t id;
    char *end;
    const long long number = strtoll(args->stop, &end, 10);
    if (*args->stop && !*end && number >= 0 && number < tokenizer_vocab_size(t))
        id = (int32_t)number;
    else if (tokenizer_encode(t, args->stop, strlen(args->stop), true, &id, 1) != 1)
        DIE("one token of the tokenizer, its id, or none", "--stop %s is not one token", args->stop);
    sampling_stop_at(&s, id);
    return s;
}

/* The text while it is made. A token's expert is known once the token has gone through the model, one step behind. */
typedef struct {
    TextOut text;
    Model *model;
    const int32_t *ids;
    int64_t n_printed; /* of ids */
} TextStream;

static void print_known(TextStream *s, int64_t n) {
    for (; s->n_printed < n; s->n_printed++)
        text_out_token(&s->text, s->ids[s->n_printed], model_top_expert(s->model, s->n_printed));
}

static void print_token(void *arg, int32_t id) {
    TextStream *s = (TextStream *)arg;
    if (s->text.experts)
        print_known(s, s->model->n_cached);
    else
        text_out_token(&s->text, id, -1);
}

static void show_experts(TextStream *s, const Args *args, int64_t n_max) {
    Model *m = s->model;
    char legend[160];
    if (m->shown_block < 0) DIE("leave --show-experts out", "the model has no layer with experts");
    if (args->layer >= m->shape.L || (args->layer >= 0 && !shape_block_is_moe(&m->shape, (int)args->layer))) {
        char range[64];
        snprintf(range, sizeof range, "layers %d to %d have experts", m->shape.n_dense, m->shape.L - 1);
        DIE(range, "--layer %lld has no experts", (long long)args->layer);
    }
    if (args->layer >= 0) m->shown_block = (int)args->layer;
    snprintf(legend, sizeof legend,
             "experts of layer %d (0 to %d): a token has the colour of the one of largest weight", m->shown_block,
             m->shape.L - 1);
    text_out_show_experts(&s->text, m->shape.router.n_experts, n_max, legend);
}

/* The last token has not gone through the model; it may be the one that no position is left for. */
static void show_last(TextStream *s, int64_t n) {
    Model *m = s->model;
    float *logits = (float *)malloc((size_t)m->shape.V * sizeof *logits);
    CHECK(logits, "no memory for logits");
    if (m->n_cached < m->generate_len) model_decode(m, s->ids[n - 1], logits);
    free(logits);
    print_known(s, m->n_cached);
    if (s->n_printed < n) text_out_token(&s->text, s->ids[n - 1], -1);
    text_out_end(&s->text);
    text_out_table(&s->text, 12);
}

int run_command_generate(const Args *args, const Launch *launch) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    if (config_load(&c, args->config, args->sets, args->n_sets, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    if (args->show_experts && launch->world > 1 && c.parallel.pp > 1)
        DIE("set parallel.pp to 1", "--show-experts with parallel.pp = %d: no rank has all layers", c.parallel.pp);
    if (args->layer >= 0 && !args->show_experts) DIE("add --show-experts", "--layer alone shows nothing");
    int64_t document_token;
    Tokenizer *tokenizer = open_tokenizer(&c, &document_token);
    const int64_t longest = c.model.max_position_embeddings;
    int32_t *ids = (int32_t *)malloc((size_t)(longest + 1) * sizeof *ids);
    CHECK(ids, "no memory for %lld ids", (long long)longest);
    char *prompt = prompt_of(args);
    const int64_t n = prompt_ids(tokenizer, document_token, prompt, ids, longest, err);
    if (n < 0)
        DIE(*prompt ? "model.max_position_embeddings bounds the sequence" : "say how the text begins: --prompt TEXT",
            "%s", err);
    const int64_t n_new = args->tokens < longest + 1 - n ? args->tokens : longest + 1 - n;
    const Sampling sampling = sampling_of(args, &c, tokenizer, document_token);

    Run r;
    int64_t positions = (n + n_new + 31) / 32 * 32;
    run_open_model(&r, args, launch, positions < longest ? positions : longest, true);
    r.tokenizer = tokenizer;
    run_load_weights(&r);
    FILE *out = run_out(stdout);
    TextStream stream = {.text = text_out_make(out, tokenizer), .model = &r.model, .ids = ids};
    if (args->show_experts)
        show_experts(&stream, args, n + n_new);
    else
        fputs(prompt, out), fflush(out);
    const int64_t made = generate(&r.model, ids, n, n_new, &sampling, print_token, &stream);
    if (args->show_experts)
        show_last(&stream, n + made);
    else
        text_out_end(&stream.text);
    free(prompt);
    free(ids);
    run_close(&r);
    return EXIT_DONE;
}
