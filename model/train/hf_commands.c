/* The commands export-hf and import-hf, and --init-from of a Hugging Face folder. See run.h and hf.h. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "format.h"
#include "hf.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "run.h"

static void check_alone(const Launch *launch, const char *command) {
    if (launch->world > 1)
        DIE("start it without a launcher", "%s works in one process, not in %d", command, launch->world);
}

static void print_notes(const char *note) {
    for (const char *line = note; *line;) {
        const int length = (int)strcspn(line, "\n");
        fprintf(stderr, "note: %.*s\n", length, line);
        line += length + (line[length] != 0);
    }
}

/* ---- export ------------------------------------------------------------------------------------------------------ */

typedef struct {
    CheckpointReader *reader;
    Device device;
} Saved;

static void name_master(StateTensor *s, const NamedTensor *t) {
    memset(s, 0, sizeof *s);
    memcpy(s->name, t->name, sizeof s->name);
    s->dtype = DTYPE_F32;
    s->ndim = t->ndim;
    memcpy(s->shape, t->shape, sizeof s->shape);
    s->extent = t->numel;
}

static int read_saved(void *arg, const NamedTensor *t, float *out, char *err) {
    Saved *saved = (Saved *)arg;
    StateTensor s;
    name_master(&s, t);
    s.data = out;
    return checkpoint_read(saved->reader, &saved->device, &s, err) == 0 ? 0 : -1;
}

/* The checkpoint's masters, one at a time, in host memory. Its model has to be the configuration's. */
static void open_saved(Saved *saved, const char *path, const Params *p, const Config *c) {
    char err[ERR_LEN];
    CheckpointInfo info;
    saved->device.ops = ops_cpu();
    StateTensor *list = (StateTensor *)malloc((size_t)p->n_named * sizeof *list);
    CHECK(list, "no memory for a list of %lld tensors", (long long)p->n_named);
    for (int64_t i = 0; i < p->n_named; i++) name_master(&list[i], &p->named[i]);
    if (checkpoint_peek(path, &info, err) != 0) DIE(NULL, "%s", err);
    if (run_compare_model(info.config_json, path, c, err) != 0)
        DIE("export with the configuration that it was trained with", "%s is another model: %s", path, err);
    checkpoint_info_free(&info);
    if (checkpoint_open(&saved->reader, path, list, p->n_named, CHECKPOINT_WEIGHTS, NULL, err) != 0)
        DIE("the checkpoint has to fit the configuration's model", "%s", err);
    free(list);
}

/* data.tokenizer may be a folder; names of built-in tokenizers are no files. */
static const char *tokenizer_file(char *path) {
    struct stat st;
    const size_t length = strlen(path);
    if (!length || stat(path, &st) != 0) return NULL;
    if (S_ISDIR(st.st_mode)) snprintf(path + length, PATH_LEN - length, "/tokenizer.json");
    return path_exists(path) ? path : NULL;
}

int run_command_export_hf(const Args *args, const Launch *launch) {
    char err[ERR_LEN], hint[ERR_LEN], path[CHECKPOINT_PATH_LEN], tokenizer[PATH_LEN];
    Config c;
    Params p;
    Saved saved;
    Bar bar = {0};
    HfReport report;
    check_alone(launch, "export-hf");
    if (config_load(&c, args->config, args->sets, args->n_sets, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    const int dtype = hf_dtype_find(args->dtype);
    if (dtype < 0) DIE("bf16, fp8 or fp32", "--dtype %s is not known", args->dtype);
    if (!args->out) DIE("for example --out exported", "no --out: the folder to write");
    run_find_tokenizer(&c, tokenizer, &c.data.document_token);
    run_find_weights(args, &c, path);

    const Mesh mesh = mesh_make(0, 1, 1, 1);
    const ModelShape shape = shape_make(&c, &mesh, 0);
    params_make(&p, &shape);
    open_saved(&saved, path, &p, &c);
    if (!args->quiet) bar_init(&bar, stderr);
    const HfExport x = {.config = &c,
                        .params = &p,
                        .dtype = (HfDtype)dtype,
                        .shard_bytes_max = HF_SHARD_BYTES,
                        .tokenizer = tokenizer_file(tokenizer),
                        .read = read_saved,
                        .arg = &saved,
                        .bar = &bar};
    if (hf_export(&x, args->out, &report, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    print_notes(report.note);
    printf("exported %s: %lld tensors, %s in %lld file%s, %s\n", args->out, (long long)report.n_tensors,
           format_file_size((double)report.bytes).text, (long long)report.n_files, report.n_files == 1 ? "" : "s",
           hf_dtype_name(x.dtype));
    checkpoint_close(saved.reader);
    params_free(&p);
    return EXIT_DONE;
}

/* ---- import ------------------------------------------------------------------------------------------------------ */

int run_command_import_hf(const Args *args, const Launch *launch) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    Bar bar = {0};
    HfReport report;
    check_alone(launch, "import-hf");
    if (!args->folder)
        DIE("for example train_moe import-hf DIR --out runs/mine", "import-hf what? Name a Hugging Face folder");
    if (!args->out) DIE("for example --out runs/mine", "no --out: the run folder to write");
    if (!args->quiet) bar_init(&bar, stderr);
    if (hf_import(args->folder, args->out, args->sets, args->n_sets, &bar, &c, &report, err, hint) != 0)
        DIE(hint[0] ? hint : NULL, "%s", err);
    print_notes(report.note);
    printf(
        "imported %s: %lld tensors, %s; set data and train in %s/config.json, then train_moe --config %s/config.json\n",
        args->out, (long long)report.n_tensors, format_file_size((double)report.bytes).text, c.run.dir, c.run.dir);
    return EXIT_DONE;
}

void run_init_from_hf(Run *r, const char *dir) {
    char err[ERR_LEN], hint[ERR_LEN], note[HF_NOTE_LEN];
    HfWeights *w;
    Config theirs;
    if (hf_open(&w, dir, &r->model.params, &r->config.model, note, err, hint) != 0)
        DIE(hint[0] ? hint : NULL, "%s", err);
    if (hf_load(w, &r->model.params, &r->device, NULL, err) != 0) DIE(NULL, "%s", err);
    hf_close(w);
    model_cast(&r->model);
    /* Shapes do not show a rope_theta or a scaling factor; to change them may be the purpose, so it is only said. */
    if (hf_import_config(&theirs, dir, "run", NULL, 0, err, hint) == 0) {
        char *json = config_to_json(&theirs);
        if (run_compare_model(json, dir, &r->config, err) != 0)
            log_warn(&r->log, 0, "%s/config.json is not this model: %s", dir, err);
        free(json);
    } else {
        log_warn(&r->log, 0, "not compared with the configuration: %s", err);
    }
    for (char *line = note, *end; *line; line = end + 1) {
        end = strchr(line, '\n');
        *end = 0;
        log_warn(&r->log, 0, "%s", line);
    }
}
