/* The commands beside train. See run.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/utf8.h"
#include "kernels/base/check.h"
#include "plan.h"

int run_command_plan(const Args *args, const Launch *launch) {
    Run r;
    Plan plan;
    run_open_model(&r, args, launch, 0, false);
    log_init(&r.log, 1, false, stdout, stderr);
    plan_make(&plan, &r);
    if (args->json) {
        plan_json(&plan, stdout);
    } else {
        banner_plan(&r);
        plan_print(&plan, &r.log);
    }
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
    log_init(&r.log, 1, args->quiet, stdout, stderr);
    if (r.config.data.n_val == 0 && r.config.eval.n_choice == 0 && !args->dump_logits)
        DIE("name validation files in data.val", "%s has no data.val and no eval.choice", args->config);
    if (eval_open(&r.val, &r.config, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
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
    if (eval_run(&r.val, &r.model, &report, &r.log, err) != 0) DIE(NULL, "%s", err);
    choice_run(&r.choice, &r.model, &report, &r.log);
    r.log.is_quiet = false; /* the one line that was asked for */
    log_val(&r.log, &report);
    run_close(&r);
    return EXIT_DONE;
}

/* ---- generate ---------------------------------------------------------------------------------------------------- */

static char *read_prompt(const Args *args) {
    if (!args->prompt || strcmp(args->prompt, "-") != 0) return strdup(args->prompt ? args->prompt : "");
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
    return text;
}

typedef struct {
    const Tokenizer *tokenizer;
    Utf8Stream stream;
} Printer;

static void print_token(void *arg, int32_t id) {
    Printer *p = (Printer *)arg;
    size_t n;
    const char *bytes = tokenizer_is_special(p->tokenizer, id) ? NULL : tokenizer_bytes(p->tokenizer, id, &n);
    if (!bytes) return;
    char out[UTF8_STREAM_OUT_MAX(256)];
    while (n > 0) {
        size_t part = n < 256 ? n : 256;
        size_t length = utf8_stream_put(&p->stream, bytes, part, out);
        fwrite(out, 1, length, stdout);
        bytes += part;
        n -= part;
    }
    fflush(stdout);
}

void run_find_tokenizer(const Config *c, char *path, int64_t *document_token) {
    char err[ERR_LEN];
    Sidecar sidecar;
    path[0] = 0;
    *document_token = c->data.document_token;
    if (c->data.n_train > 0 && sidecar_read(&sidecar, c->data.train[0].path, err) == 0 && sidecar.found) {
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

int run_command_generate(const Args *args, const Launch *launch) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    if (config_load(&c, args->config, args->sets, args->n_sets, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    int64_t document_token;
    Tokenizer *tokenizer = open_tokenizer(&c, &document_token);
    const int64_t longest = c.model.max_position_embeddings;
    int32_t *ids = (int32_t *)malloc((size_t)(longest + 1) * sizeof *ids);
    CHECK(ids, "no memory for %lld ids", (long long)longest);
    char *prompt = read_prompt(args);
    const int64_t n = prompt_ids(tokenizer, document_token, prompt, ids, longest, err);
    if (n < 0)
        DIE(*prompt ? "model.max_position_embeddings bounds the sequence" : "say how the text begins: --prompt TEXT",
            "%s", err);
    const int64_t n_new = args->tokens < longest + 1 - n ? args->tokens : longest + 1 - n;

    Run r;
    int64_t positions = (n + n_new + 31) / 32 * 32;
    run_open_model(&r, args, launch, positions < longest ? positions : longest, true);
    r.tokenizer = tokenizer;
    run_load_weights(&r);
    Printer printer;
    memset(&printer, 0, sizeof printer);
    printer.tokenizer = tokenizer;
    const Sampling sampling = {args->temperature, (int)args->top_k, args->top_p, (uint64_t)args->seed, 0,
                               document_token};
    fputs(prompt, stdout);
    generate(&r.model, ids, n, n_new, &sampling, print_token, &printer);
    char rest[UTF8_STREAM_OUT_MAX(0)];
    fwrite(rest, 1, utf8_stream_end(&printer.stream, rest), stdout);
    fputs("\n", stdout);
    free(prompt);
    free(ids);
    run_close(&r);
    return EXIT_DONE;
}
