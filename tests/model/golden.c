#include "golden.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* ---- the file ---------------------------------------------------------------------------------------------------- */

static double element(const void *data, SafetensorsDtype dtype, int64_t i) {
    if (dtype == SAFETENSORS_I32) return ((const int32_t *)data)[i];
    if (dtype == SAFETENSORS_F32) return (double)((const float *)data)[i];
    const uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return (double)value;
}

/* All elements of an entry as doubles. */
static double *read_doubles(const Golden *g, const SafetensorsEntry *e) {
    char err[ERR_LEN];
    const int64_t bytes = e->end - e->begin, n = bytes / safetensors_dtype_width(e->dtype);
    REQUIRE(e->dtype == SAFETENSORS_I32 || e->dtype == SAFETENSORS_F32 || e->dtype == SAFETENSORS_BF16, "%s: dtype %s",
            e->name, safetensors_dtype_name(e->dtype));
    void *raw = malloc((size_t)bytes);
    double *out = (double *)malloc((size_t)n * sizeof *out);
    REQUIRE(raw && out, "no memory for %s", e->name);
    REQUIRE(safetensors_read(&g->file, e, raw, 0, bytes, err) == 0, "%s", err);
    for (int64_t i = 0; i < n; i++) out[i] = element(raw, e->dtype, i);
    free(raw);
    return out;
}

double *golden_tensor(const Golden *g, const char *name, int64_t d0, int64_t d1) {
    const SafetensorsEntry *e = safetensors_find(&g->file, name);
    REQUIRE(e, "%s: no tensor %s in the golden file", g->name, name);
    REQUIRE(e->ndim == (d1 > 0 ? 2 : 1) && e->shape[0] == d0 && (d1 == 0 || e->shape[1] == d1),
            "%s: %s is not (%lld, %lld) in the golden file", g->name, name, (long long)d0, (long long)d1);
    return read_doubles(g, e);
}

double golden_number(const Golden *g, const char *key, int step, int depth) {
    const cJSON *item = cJSON_GetArrayItem(cJSON_GetObjectItem(g->json, key), step);
    if (depth >= 0) item = cJSON_GetArrayItem(item, depth);
    REQUIRE(cJSON_IsNumber(item), "%s: no %s of step %d, depth %d", g->name, key, step, depth);
    return item->valuedouble;
}

int golden_steps(const Golden *g) {
    return cJSON_GetArraySize(cJSON_GetObjectItem(g->json, "losses"));
}

/* ---- the model --------------------------------------------------------------------------------------------------- */

static void load_config(Golden *g) {
    char err[ERR_LEN], hint[ERR_LEN];
    char *text = cJSON_PrintUnformatted(cJSON_GetObjectItem(g->json, "config"));
    REQUIRE(text, "%s: no config", g->name);
    REQUIRE(config_parse(&g->f.config, text, strlen(text), g->name, NULL, 0, err, hint) == 0, "%s (%s)", err, hint);
    free(text);
}

static void load_weights(Golden *g) {
    const Params *p = &g->f.model.params;
    int64_t n_expected = 2; /* logits, windows */
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        n_expected += t->optimizer == OPTIMIZER_NONE ? 1 : 2; /* and a gradient */
        double *value = golden_tensor(g, t->name, t->shape[0], t->ndim == 2 ? t->shape[1] : 0);
        Tensor master = tensor_rows(p->master, t->offset, t->numel);
        for (int64_t k = 0; k < t->numel; k++) t_set(master, k, value[k]);
        free(value);
    }
    params_cast(p, g->f.model.device);
    REQUIRE(g->file.n == n_expected, "%s: %lld tensors in the golden file, the parameter table makes %lld", g->name,
            (long long)g->file.n, (long long)n_expected);
}

static void set_params(Golden *g) {
    const TrainConfig *train = &g->f.config.train;
    StepParams *p = &g->f.params;
    p->balance_scale = train->balance_alpha * (double)g->f.model.shape.S;
    p->lr = train->lr.value[0];
    p->beta1 = train->beta1;
    p->beta2 = train->beta2;
    p->eps = train->eps;
    p->weight_decay = train->weight_decay;
    p->grad_clip = train->grad_clip;
    p->bias_speed = train->bias_update_speed.value[0];
    p->skip_loss_above = p->skip_norm_above = INFINITY;
}

void golden_open(Golden *g, const char *name) {
    char path[128], err[ERR_LEN], hint[ERR_LEN];
    memset(g, 0, sizeof *g);
#ifdef _OPENMP
    omp_set_num_threads(1); /* too small to share */
#endif
    snprintf(g->name, sizeof g->name, "%s", name);
    snprintf(path, sizeof path, "tests/golden/%s.json", name);
    g->json = json_load(path, 1 << 20, err, hint);
    REQUIRE(g->json, "%s (%s)", err, hint);
    snprintf(path, sizeof path, "tests/golden/%s.safetensors", name);
    REQUIRE(safetensors_open(&g->file, path, err) == 0, "%s", err);
    const char *precision = cJSON_GetStringValue(cJSON_GetObjectItem(g->json, "precision"));
    REQUIRE(precision, "%s: no precision", name);
    g->is_f64 = strcmp(precision, "f64") == 0;
    load_config(g);
    Fixture *f = &g->f;
    f->device.ops = ops_cpu();
    f->comm = comm_self(&f->device);
    REQUIRE(model_init(&f->model, &f->config, &f->device, f->comm, err) == 0, "%s", err);
    model_init_weights(&f->model);
    load_weights(g);
    set_params(g);
    const ModelShape *s = &f->model.shape;
    REQUIRE(micro_batch_alloc(&f->batch, s->B, s->S, s->n_mtp, err) == 0, "%s", err);
}

void golden_close(Golden *g) {
    fixture_close(&g->f);
    safetensors_close(&g->file);
    cJSON_Delete(g->json);
}

/* As the trainer does it (model/train/step.c): sums inside the step, every depth a mean over its own targets. */
static void set_scales(Golden *g) {
    const int64_t *n_targets = g->f.batch.n_targets;
    const int depths = g->f.model.shape.n_mtp;
    StepParams *p = &g->f.params;
    p->inv_tokens = 1.0 / (double)n_targets[0];
    p->loss_scale[0] = 1;
    for (int k = 1; k <= depths; k++)
        p->loss_scale[k] =
            g->f.config.train.mtp_loss_weight.value[0] / depths * (double)n_targets[0] / (double)n_targets[k];
}

void golden_batch(Golden *g, int step) {
    const ModelShape *s = &g->f.model.shape;
    const DataConfig *data = &g->f.config.data;
    const int64_t length = s->S + 1 + s->n_mtp;
    const cJSON *n_scored = cJSON_GetObjectItem(g->json, "n_scored");
    const SafetensorsEntry *e = safetensors_find(&g->file, "windows");
    REQUIRE(cJSON_IsNumber(n_scored), "%s: no n_scored", g->name);
    REQUIRE(e && e->ndim == 3 && step < e->shape[0] && e->shape[1] == s->B && e->shape[2] == length,
            "%s: no windows of step %d", g->name, step);
    double *id = read_doubles(g, e);
    int32_t window[256];
    REQUIRE(length <= 256, "window of %lld", (long long)length);
    for (int64_t b = 0; b < s->B; b++) {
        for (int64_t i = 0; i < length; i++) window[i] = (int32_t)id[(step * s->B + b) * length + i];
        micro_batch_set(&g->f.batch, b, window, data->document_mask ? data->document_token : NO_DOCUMENT_MASK,
                        (int64_t)n_scored->valuedouble);
    }
    free(id);
    micro_batch_count(&g->f.batch);
    set_scales(g);
    g->f.params.step = step + 1;
}
