/* See manifest.h: the writer, and what both sides share. The reader is in manifest_read.c. */
#include "manifest.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "manifest_state.h"

/* A new member of RunState changes this sum; it needs a row here too. But update.has_overflow, which is 0 whenever a
 * run is saved. */
_Static_assert(sizeof(RunState) == 9 * sizeof(int64_t) + 2 * sizeof(ZWindow) + 4 * sizeof(double),
               "RunState has a member that checkpoints do not hold: add a row to state_fields");

const StateField state_fields[] = {
    {"tokens", STATE_INT, offsetof(RunState, tokens), false},
    {"samples", STATE_INT, offsetof(RunState, samples), false},
    {"adam_t", STATE_INT, offsetof(RunState, update.adam_t), false},
    {"skipped_total", STATE_INT, offsetof(RunState, update.skipped_total), false},
    {"skipped_in_a_row", STATE_INT, offsetof(RunState, update.skipped_in_a_row), false},
    {"best_val", STATE_DOUBLE, offsetof(RunState, best_val), false},
    {"best_step", STATE_INT, offsetof(RunState, best_step), true},
    {"wall_s", STATE_DOUBLE, offsetof(RunState, wall_s), false},
    {"loss_z", STATE_WINDOW, offsetof(RunState, loss_z), false},
    {"norm_z", STATE_WINDOW, offsetof(RunState, norm_z), false},
    {"pending", STATE_INT, offsetof(RunState, pending.is_set), true},
    {"pending_loss", STATE_DOUBLE, offsetof(RunState, pending.loss), true},
    {"pending_norm", STATE_DOUBLE, offsetof(RunState, pending.norm), true},
};
const int n_state_fields = sizeof state_fields / sizeof *state_fields;

uint64_t manifest_hash_block(uint64_t hash, const void *data, int64_t bytes) {
    return hash_bytes(data, (size_t)bytes, hash);
}

int64_t manifest_numel(const ManifestTensor *t) {
    int64_t numel = 1;
    for (int i = 0; i < t->ndim; i++) numel *= t->shape[i];
    return numel;
}

void manifest_free(Manifest *m) {
    for (int64_t i = 0; i < m->n_tensors; i++) free(m->tensors[i].slices);
    free(m->tensors);
    free(m->files);
    checkpoint_info_free(&m->info);
    memset(m, 0, sizeof *m);
}

/* Reads back to the same bits. JSON has no infinities and no NaN: these are strings. */
static void write_double(FILE *out, double x) {
    if (isfinite(x))
        fprintf(out, "%.17g", x);
    else
        fprintf(out, "\"%s\"", isnan(x) ? "nan" : x > 0 ? "inf" : "-inf");
}

/* All `size` places of the ring, whichever of them hold values. */
static void write_window(FILE *out, const ZWindow *z) {
    CHECK(z->size >= 0 && z->size <= Z_WINDOW_MAX && z->n >= 0 && z->n <= z->size && z->head >= 0 &&
              z->head <= (z->size > 0 ? z->size - 1 : 0),
          "z window of %d: %d held, head %d", z->size, z->n, z->head);
    fprintf(out, "{\"size\": %d, \"n\": %d, \"head\": %d, \"value\": [", z->size, z->n, z->head);
    for (int i = 0; i < z->size; i++) {
        fputs(i ? ", " : "", out);
        write_double(out, z->value[i]);
    }
    fputs("]}", out);
}

static void write_state(FILE *out, const RunState *state) {
    fputs("  \"state\": {", out);
    for (int i = 0; i < n_state_fields; i++) {
        const char *member = (const char *)state + state_fields[i].offset;
        fprintf(out, "%s\n    \"%s\": ", i ? "," : "", state_fields[i].name);
        switch (state_fields[i].kind) {
        case STATE_INT: fprintf(out, "%lld", (long long)*(const int64_t *)(const void *)member); break;
        case STATE_DOUBLE: write_double(out, *(const double *)(const void *)member); break;
        case STATE_WINDOW: write_window(out, (const ZWindow *)(const void *)member); break;
        }
    }
    fputs("\n  },\n", out);
}

static void write_tensors(FILE *out, const Manifest *m) {
    fputs("  \"tensors\": {", out);
    for (int64_t i = 0; i < m->n_tensors; i++) {
        const ManifestTensor *t = &m->tensors[i];
        fputs(i ? ",\n    " : "\n    ", out);
        json_write_string(out, t->name);
        fprintf(out, ": {\"dtype\": \"%s\", \"shape\": [", safetensors_dtype_name(t->dtype));
        for (int k = 0; k < t->ndim; k++) fprintf(out, "%s%lld", k ? ", " : "", (long long)t->shape[k]);
        fputs("], \"slices\": [", out);
        for (int64_t k = 0; k < t->n_slices; k++) {
            const ManifestSlice *s = &t->slices[k];
            fprintf(out, "%s{\"offset\": %lld, \"extent\": %lld, \"file\": \"%s\", \"hash\": \"%016llx\"}",
                    k ? ", " : "", (long long)s->offset, (long long)s->extent, m->files[s->file].name,
                    (unsigned long long)s->hash);
        }
        fputs("]}", out);
    }
    fputs("\n  },\n  ", out);
}

/* A configuration that is no object would make a checkpoint that nothing can read. */
static void check_config(const char *text) {
    char err[ERR_LEN], hint[ERR_LEN];
    cJSON *config = text ? json_parse(text, strlen(text), "config", err, hint, NULL) : NULL;
    CHECK(cJSON_IsObject(config), "the configuration of a checkpoint is no JSON object: %.100s", text ? text : "NULL");
    cJSON_Delete(config);
}

static void write_device(FILE *out, const CheckpointInfo *info) {
    if (info->device) {
        fputs("  \"device\": ", out);
        json_write_string(out, info->device);
        fputs(",\n", out);
    }
    if (!info->gemms) return;
    fputs("  \"gemms\": [", out);
    const char *separator = "\n    ";
    for (const char *line = info->gemms; *line;) {
        const size_t length = strcspn(line, "\n");
        char *row = strndup(line, length);
        CHECK(row, "no memory for a row of the GEMM table");
        fputs(separator, out);
        json_write_string(out, row);
        free(row);
        separator = ",\n    ";
        line += length + (line[length] == '\n');
    }
    fputs("\n  ],\n", out);
}

static void write_loads(FILE *out, const ExpertLoads *l) {
    if (l->n_layers == 0) return;
    fputs("  \"expert_load\": [", out);
    for (int64_t i = 0; i < (int64_t)l->n_layers * l->n_experts; i++) {
        const int64_t e = i % l->n_experts;
        fputs(e > 0 ? ", " : i > 0 ? "],\n    [" : "\n    [", out);
        fprintf(out, "%lld", (long long)l->load[i]);
    }
    fputs("]\n  ],\n", out);
}

int manifest_write(const Manifest *m, const char *folder, char *err) {
    char path[PATH_MAX], *text = NULL;
    size_t size;
    check_config(m->info.config_json);
    CHECK(m->info.state.step >= 0, "a checkpoint of step %lld", (long long)m->info.state.step);
    snprintf(path, sizeof path, "%s/" MANIFEST_NAME, folder);
    FILE *out = open_memstream(&text, &size);
    if (!out) return err_set(err, "%s: no memory to write it", path);
    fprintf(out, "{\n  \"format\": %d,\n  \"step\": %lld,\n  \"ranks\": %lld,\n", MANIFEST_FORMAT,
            (long long)m->info.state.step, (long long)m->ranks);
    fprintf(out, "  \"data_identity\": \"%016llx\",\n  \"param_hash\": \"%016llx\",\n",
            (unsigned long long)m->info.data_identity, (unsigned long long)m->info.param_hash);
    write_state(out, &m->info.state);
    write_device(out, &m->info);
    write_loads(out, &m->info.loads);
    fprintf(out, "  \"config\": %s,\n  \"files\": {", m->info.config_json);
    for (int64_t i = 0; i < m->n_files; i++)
        fprintf(out, "%s\n    \"%s\": %lld", i ? "," : "", m->files[i].name, (long long)m->files[i].bytes);
    fputs("\n  },\n", out);
    write_tensors(out, m);
    fflush(out);
    if (text) fprintf(out, MANIFEST_TAIL_FORMAT, (unsigned long long)hash_bytes(text, size, 0));
    int result = fclose(out) == 0 && text ? file_write_durable(path, text, size, err)
                                          : err_set(err, "%s: no memory to write it", path);
    free(text);
    return result;
}
