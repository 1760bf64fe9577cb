/* See hf.h: a run's folder out of a Hugging Face folder. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "checkpoint.h"
#include "data/tokenizer.h"
#include "hf.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "zscore.h"

/* What the checkpoint is made of, as it asks for it. */
typedef struct {
    HfWeights *weights;
    const Params *p;
    const StateTensor *tensors;
    CheckpointInfo *info;
    Bar *bar;
    int64_t read, total; /* bytes */
} Feed;

static int read_feed(void *arg, const StateTensor *t, int64_t at, void *out, int64_t n, char *err) {
    Feed *s = (Feed *)arg;
    const int64_t index = t - s->tensors, first = at / (int64_t)sizeof(float), count = n / (int64_t)sizeof(float);
    if (hf_read(s->weights, index, first, count, (float *)out, err) != 0) return -1;
    s->info->param_hash += params_hash_part(&s->p->named[index], first, (const float *)out, count);
    s->read += n;
    if (s->bar) bar_draw(s->bar, s->read >> 20, s->total >> 20, "MiB");
    return 0;
}

/* The masters and the router biases, one StateTensor per named tensor in its order. malloc'd. */
static StateTensor *list_weights(const Params *p) {
    StateTensor *list = (StateTensor *)calloc((size_t)p->n_named + 1, sizeof *list);
    CHECK(list, "no memory for a list of %lld tensors", (long long)p->n_named);
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        StateTensor *s = &list[i];
        memcpy(s->name, t->name, sizeof s->name);
        s->dtype = DTYPE_F32;
        s->ndim = t->ndim;
        memcpy(s->shape, t->shape, sizeof s->shape);
        s->extent = t->numel;
    }
    return list;
}

static int write_checkpoint(const char *folder, HfWeights *weights, const Params *p, const Config *c, Bar *bar,
                            HfReport *report, char *err) {
    char path[CHECKPOINT_PATH_LEN];
    CheckpointInfo info;
    memset(&info, 0, sizeof info);
    info.state.best_val = INFINITY;
    zscore_init(&info.state.loss_z, c->train.z_window);
    zscore_init(&info.state.norm_z, c->train.z_window);
    info.config_json = config_to_json(c);
    StateTensor *tensors = list_weights(p);
    Feed feed = {weights, p, tensors, &info, bar, 0, checkpoint_bytes(tensors, p->n_named)};
    const CheckpointSource source = {read_feed, &feed};
    int result = checkpoint_save_from(folder, &source, tensors, p->n_named, &info, CHECKPOINT_FILE_BYTES, path,
                                      &report->bytes, err);
    if (bar) bar_clear(bar);
    report->n_tensors = p->n_named;
    report->n_files = 1;
    free(tensors);
    free(info.config_json);
    return result;
}

/* Brings the tokenizer along, and names it in the configuration if it is one that can be read here. */
static int bring_tokenizer(const char *unfinished, const char *dir, Config *c, char *note, char *err) {
    char path[PATH_MAX], reason[ERR_LEN];
    Tokenizer *t;
    if (snprintf(path, sizeof path, "%s/tokenizer.json", dir) >= (int)sizeof path || !path_exists(path)) return 0;
    if (hf_tokenizer_write(unfinished, path, c, err) != 0) return -1;
    if (tokenizer_load(&t, path, reason) != 0) {
        hf_note(note, "the tokenizer is brought along, but not used for samples: %s", reason);
        return 0;
    }
    tokenizer_free(t);
    if (c->data.tokenizer[0]) return 0;
    if (snprintf(c->data.tokenizer, sizeof c->data.tokenizer, "%s/tokenizer.json", c->run.dir) >= PATH_LEN)
        return err_set(err, "%s: the path is too long", c->run.dir);
    return 0;
}

static int write_config(const char *unfinished, const Config *c, char *err) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/config.json", unfinished);
    char *json = config_to_json(c);
    int result = file_write_durable(path, json, strlen(json), err);
    free(json);
    return result;
}

int hf_import(const char *dir, const char *out, const char *const *sets, int n_sets, Bar *bar, Config *c,
              HfReport *report, char *err, char *hint) {
    char unfinished[HF_PATH_LEN];
    HfWeights *weights = NULL;
    Params p;
    memset(report, 0, sizeof *report);
    err[0] = hint[0] = 0;
    if (hf_import_config(c, dir, out, sets, n_sets, err, hint) != 0) return -1;
    const Mesh mesh = mesh_make(0, 1, 1, 1);
    const ModelShape shape = shape_make(c, &mesh, 0);
    params_make(&p, &shape);
    int result = hf_open(&weights, dir, &p, &c->model, report->note, err, hint);
    if (result == 0) {
        result = hf_folder_begin(unfinished, out, p.numel * (int64_t)sizeof(float), err, hint);
        if (result == 0) {
            result = bring_tokenizer(unfinished, dir, c, report->note, err);
            if (result == 0) result = write_config(unfinished, c, err);
            if (result == 0) result = write_checkpoint(unfinished, weights, &p, c, bar, report, err);
            if (result == 0) result = hf_folder_commit(unfinished, out, err);
            if (result != 0) dir_remove(unfinished, NULL);
        }
    }
    hf_close(weights);
    params_free(&p);
    return result;
}
