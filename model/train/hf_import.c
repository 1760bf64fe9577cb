/* See hf.h: the weights of a folder, matched with the list of names. The matching decides everything once, as an Origin
 * per named tensor; reading then only follows it. */
#include <ctype.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "hf.h"
#include "hf_files.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "kernels/base/ints.h"
#include "kernels/base/small_floats.h"

enum { READ_CHUNK = 1 << 16, WALK_CHUNK = 1 << 20 };

/* Where the elements of a named tensor lie. `weight` NULL: nowhere, they are zero. */
typedef struct {
    const HfTensor *weight, *scale; /* scale: of FP8 alone */
    int64_t base;                   /* element of the file's tensor where it begins: not 0 in a stack of experts */
    int64_t scale_base;             /* the same for the blocks of its matrix */
    int64_t first_row;              /* of the matrix that the blocks cover, where it begins: up lies under gate */
} Origin;

typedef struct {
    const char *name;
    int64_t index; /* of the named tensor */
} Name;

struct HfWeights {
    const char *dir; /* borrowed */
    const Params *p;
    const ModelConfig *m;
    HfFiles files;
    Origin *origins; /* one per named tensor */
    Name *names;     /* sorted */
    float *scale;    /* the blocks of scale_of's matrix */
    int64_t scale_of;
    char *note;
};

/* ---- names ------------------------------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b) {
    return strcmp(((const Name *)a)->name, ((const Name *)b)->name);
}

static void sort_names(HfWeights *w) {
    for (int64_t i = 0; i < w->p->n_named; i++) w->names[i] = (Name){w->p->named[i].name, i};
    qsort(w->names, (size_t)w->p->n_named, sizeof *w->names, by_name);
}

/* The named tensor of a name, or -1. */
static int64_t find_named(const HfWeights *w, const char *name) {
    const Name key = {name, -1};
    const Name *found = (const Name *)bsearch(&key, w->names, (size_t)w->p->n_named, sizeof key, by_name);
    return found ? found->index : -1;
}

/* "model.layers.7.mlp.x": 7, and "mlp.x" in tail; else -1. */
static int layer_of(const char *name, const char **tail) {
    static const char prefix[] = "model.layers.";
    char *end;
    if (strncmp(name, prefix, sizeof prefix - 1) != 0 || !isdigit((unsigned char)name[sizeof prefix - 1])) return -1;
    const long layer = strtol(name + sizeof prefix - 1, &end, 10);
    if (*end != '.' || layer > INT_MAX / 2) return -1;
    *tail = end + 1;
    return (int)layer;
}

static bool ends_with(const char *s, const char *end) {
    const size_t n = strlen(s), k = strlen(end);
    return n >= k && strcmp(s + n - k, end) == 0;
}

/* ---- matching ---------------------------------------------------------------------------------------------------- */

static const char *shape_text(char buf[96], int ndim, const int64_t *shape) {
    size_t used = 0;
    buf[0] = 0;
    for (int i = 0; i < ndim && used < 80; i++)
        used += (size_t)snprintf(buf + used, 96 - used, "%s%lld", i ? " x " : "", (long long)shape[i]);
    return ndim ? buf : "one number";
}

static int check_shape(const HfTensor *t, int ndim, const int64_t *shape, char *err) {
    char found[96], wanted[96];
    bool same = t->entry->ndim == ndim;
    for (int i = 0; i < ndim && same; i++) same = t->entry->shape[i] == shape[i];
    if (same) return 0;
    return err_set(err, "%s: %s is %s, but the configuration makes it %s", t->file->path, t->name,
                   shape_text(found, t->entry->ndim, t->entry->shape), shape_text(wanted, ndim, shape));
}

static int check_dtype(const HfTensor *t, bool may_be_fp8, char *err) {
    switch (t->entry->dtype) {
    case SAFETENSORS_F32:
    case SAFETENSORS_BF16:
    case SAFETENSORS_F16: return 0;
    case SAFETENSORS_F8_E4M3:
        if (may_be_fp8) return 0;
        break;
    default: break;
    }
    return err_set(err, "%s: %s is %s, which is not read here; BF16, F32 and F16 are%s", t->file->path, t->name,
                   safetensors_dtype_name(t->entry->dtype), may_be_fp8 ? ", and F8_E4M3" : "");
}

static int set_origin(HfWeights *w, int64_t index, const HfTensor *t, int64_t base, int64_t scale_base,
                      int64_t first_row, char *err) {
    Origin *s = &w->origins[index];
    if (s->weight)
        return err_set(err, "%s: %s is given twice, as %s and as %s", w->dir, w->p->named[index].name, s->weight->name,
                       t->name);
    *s = (Origin){t, NULL, base, scale_base, first_row};
    return 0;
}

static int64_t blocks_of(int64_t n) {
    return (n + SCALE_BLOCK - 1) / SCALE_BLOCK;
}

/* The experts of a layer as one tensor (transformers 5): gate_up_proj (E, 2F, D), gate over up; down_proj (E, D, F). */
static int match_stack(HfWeights *w, const HfTensor *t, int layer, bool is_down, char *err) {
    const ModelShape *s = &w->p->shape;
    const int64_t E = s->router.n_experts, D = s->D, F = s->F;
    const int64_t rows = is_down ? D : 2 * F, cols = is_down ? F : D, shape[3] = {E, rows, cols};
    if (check_shape(t, 3, shape, err) != 0 || check_dtype(t, true, err) != 0) return -1;
    const int64_t blocks = blocks_of(rows) * blocks_of(cols);
    for (int64_t e = 0; e < E; e++)
        for (int part = 0; part < (is_down ? 1 : 2); part++) {
            char name[TENSOR_NAME_LEN];
            snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%lld.%s.weight", layer, (long long)e,
                     is_down ? "down_proj"
                     : part  ? "up_proj"
                             : "gate_proj");
            const int64_t index = find_named(w, name), first_row = part * F;
            if (index < 0) return err_set(err, "%s: %s: the configuration has no %s", t->file->path, t->name, name);
            if (set_origin(w, index, t, (e * rows + first_row) * cols, e * blocks, first_row, err) != 0) return -1;
        }
    return 0;
}

/* " (and 3 more)", into buf, returned. */
static const char *and_more(char buf[40], int64_t n) {
    buf[0] = 0;
    if (n > 1) snprintf(buf, 40, " (and %lld more)", (long long)n - 1);
    return buf;
}

typedef enum { MATCH_DONE, MATCH_UNKNOWN, MATCH_EXTRA_LAYER, MATCH_ERROR } Match;

/* One tensor of the folder that is no scale. */
static Match match_tensor(HfWeights *w, HfTensor *t, char *err) {
    const ModelShape *s = &w->p->shape;
    const char *tail = "";
    const int layer = layer_of(t->name, &tail);
    const int64_t index = find_named(w, t->name);
    if (index >= 0) {
        const NamedTensor *named = &w->p->named[index];
        if (check_shape(t, named->ndim, named->shape, err) != 0 ||
            check_dtype(t, weight_is_block_linear(named->weight), err) != 0)
            return MATCH_ERROR;
        return set_origin(w, index, t, 0, 0, 0, err) == 0 ? MATCH_DONE : MATCH_ERROR;
    }
    if (ends_with(t->name, "rotary_emb.inv_freq")) return MATCH_DONE;
    if (layer >= s->n_blocks) return MATCH_EXTRA_LAYER;
    if (layer >= s->L && (strcmp(tail, "embed_tokens.weight") == 0 || strcmp(tail, "shared_head.head.weight") == 0))
        return MATCH_DONE; /* a copy: compared later */
    if (layer >= 0 && strcmp(tail, "mlp.experts.gate_up_proj") == 0)
        return match_stack(w, t, layer, false, err) == 0 ? MATCH_DONE : MATCH_ERROR;
    if (layer >= 0 && strcmp(tail, "mlp.experts.down_proj") == 0)
        return match_stack(w, t, layer, true, err) == 0 ? MATCH_DONE : MATCH_ERROR;
    return MATCH_UNKNOWN;
}

static const char scale_end[] = "_scale_inv";

static int match_tensors(HfWeights *w, char *err, char *hint) {
    const char *unknown = NULL;
    char more[40];
    int64_t n_unknown = 0, n_extra = 0;
    for (int64_t i = 0; i < w->files.n; i++) {
        HfTensor *t = &w->files.tensors[i];
        const char *tail;
        if (ends_with(t->name, scale_end) && layer_of(t->name, &tail) < w->p->shape.n_blocks) continue;
        switch (match_tensor(w, t, err)) {
        case MATCH_DONE: t->is_used = true; break;
        case MATCH_EXTRA_LAYER: n_extra++; break;
        case MATCH_ERROR: return -1;
        case MATCH_UNKNOWN:
            if (n_unknown++ == 0) unknown = t->name;
            break;
        }
    }
    if (n_extra > 0)
        hf_note(w->note,
                "left out: %lld tensors of layers %d and after (MTP, or layers that the configuration has not)",
                (long long)n_extra, w->p->shape.n_blocks);
    if (n_unknown == 0) return 0;
    snprintf(hint, ERR_LEN, "the configuration decides which tensors there are");
    return err_set(err, "%s: unknown tensor %s%s", w->dir, unknown, and_more(more, n_unknown));
}

/* Gives every FP8 matrix its scales. */
static int match_scales(HfWeights *w, char *err) {
    for (int64_t i = 0; i < w->p->n_named; i++) {
        Origin *s = &w->origins[i];
        if (!s->weight || s->weight->entry->dtype != SAFETENSORS_F8_E4M3) continue;
        char name[TENSOR_NAME_LEN + 16];
        snprintf(name, sizeof name, "%.*s%s", TENSOR_NAME_LEN, s->weight->name, scale_end);
        HfTensor *t = hf_files_find(&w->files, name);
        if (!t) return err_set(err, "%s: %s is F8_E4M3, but there is no %s", w->dir, s->weight->name, name);
        const SafetensorsEntry *e = s->weight->entry;
        int64_t shape[3] = {e->shape[0], 0, 0};
        for (int k = e->ndim - 2; k < e->ndim; k++) shape[k] = blocks_of(e->shape[k]);
        if (check_shape(t, e->ndim, shape, err) != 0 || check_dtype(t, false, err) != 0) return -1;
        s->scale = t;
        t->is_used = true;
    }
    for (int64_t i = 0; i < w->files.n; i++) {
        const HfTensor *t = &w->files.tensors[i];
        const char *tail;
        if (!t->is_used && ends_with(t->name, scale_end) && layer_of(t->name, &tail) < w->p->shape.n_blocks)
            return err_set(err, "%s: %s does not belong to an F8_E4M3 matrix", t->file->path, t->name);
    }
    return 0;
}

static int check_none_missing(const HfWeights *w, char *err, char *hint) {
    const NamedTensor *first = NULL;
    char more[40];
    int64_t n = 0;
    for (int64_t i = 0; i < w->p->n_named; i++) {
        const NamedTensor *t = &w->p->named[i];
        const bool may_lack = t->weight == WEIGHT_ROUTER_BIAS && w->m->topk_method != TOPK_NOAUX_TC;
        if (w->origins[i].weight || may_lack) continue;
        if (n++ == 0) first = t;
    }
    if (n == 0) return 0;
    if (first->block >= w->p->shape.L)
        snprintf(hint, ERR_LEN,
                 "the folder has no MTP layer (transformers drops it): --set model.num_nextn_predict_layers=0");
    else
        snprintf(hint, ERR_LEN, "the configuration decides which tensors there are");
    return err_set(err, "%s: missing tensor %s%s", w->dir, first->name, and_more(more, n));
}

/* ---- what lies beside -------------------------------------------------------------------------------------------- */

/* Are two tensors of the folder equal, bit for bit? */
static int compare(bool *equal, const HfTensor *a, const HfTensor *b, char *err) {
    enum { BYTES = 1 << 16 };
    const int64_t bytes = a->entry->end - a->entry->begin;
    char x[BYTES], y[BYTES];
    *equal = a->entry->dtype == b->entry->dtype && bytes == b->entry->end - b->entry->begin;
    for (int64_t at = 0; at < bytes && *equal; at += BYTES) {
        const int64_t n = bytes - at < BYTES ? bytes - at : BYTES;
        if (safetensors_read(a->file, a->entry, x, at, n, err) != 0 ||
            safetensors_read(b->file, b->entry, y, at, n, err) != 0)
            return -1;
        *equal = memcmp(x, y, (size_t)n) == 0;
    }
    return 0;
}

/* MTP shares embedding and head, so copies that differ lose something. */
static int compare_copies(HfWeights *w, char *err) {
    static const char *const copies[2][2] = {{"embed_tokens.weight", "model.embed_tokens.weight"},
                                             {"shared_head.head.weight", "lm_head.weight"}};
    for (int block = w->p->shape.L; block < w->p->shape.n_blocks; block++)
        for (int k = 0; k < 2; k++) {
            char name[TENSOR_NAME_LEN];
            bool equal = true;
            snprintf(name, sizeof name, "model.layers.%d.%s", block, copies[k][0]);
            const HfTensor *copy = hf_files_find(&w->files, name);
            if (copy && compare(&equal, copy, hf_files_find(&w->files, copies[k][1]), err) != 0) return -1;
            if (!equal) hf_note(w->note, "left out: %s, which is not equal to %s", name, copies[k][1]);
        }
    return 0;
}

/* Scales are understood in blocks of 128 x 128 alone, and other quantisations not at all. */
static int check_quantization(const char *dir, char *err, char *hint) {
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/config.json", dir) >= (int)sizeof path || !path_exists(path)) return 0;
    cJSON *root = json_load(path, 1 << 24, err, hint);
    if (!root) return -1;
    const cJSON *q = cJSON_GetObjectItemCaseSensitive(root, "quantization_config");
    const cJSON *method = cJSON_GetObjectItemCaseSensitive(q, "quant_method");
    const cJSON *size = cJSON_GetObjectItemCaseSensitive(q, "weight_block_size");
    int64_t rows = SCALE_BLOCK, cols = SCALE_BLOCK;
    int result = 0;
    if (size && (cJSON_GetArraySize(size) != 2 || json_int64(size->child, &rows) != 0 ||
                 json_int64(size->child->next, &cols) != 0))
        rows = 0;
    if (cJSON_IsObject(q) && !(cJSON_IsString(method) && strcmp(method->valuestring, "fp8") == 0))
        result = err_set(err, "%s: quantization_config.quant_method is not \"fp8\", the only one that is read", path);
    else if (rows != SCALE_BLOCK || cols != SCALE_BLOCK)
        result = err_set(err, "%s: quantization_config.weight_block_size is not [128, 128]", path);
    cJSON_Delete(root);
    return result;
}

/* ---- opening and reading ----------------------------------------------------------------------------------------- */

int hf_open(HfWeights **out, const char *dir, const Params *p, const ModelConfig *m, char *note, char *err,
            char *hint) {
    HfWeights *w = *out = (HfWeights *)calloc(1, sizeof *w);
    CHECK(w, "no memory");
    *w = (HfWeights){.dir = dir, .p = p, .m = m, .note = note, .scale_of = -1};
    note[0] = err[0] = hint[0] = 0;
    int64_t blocks_max = 1;
    for (int64_t i = 0; i < p->n_named; i++) {
        const int64_t blocks = (blocks_of(p->named[i].shape[0]) + 1) * 2 * blocks_of(p->named[i].shape[1]);
        if (blocks > blocks_max) blocks_max = blocks;
    }
    w->origins = (Origin *)calloc((size_t)p->n_named + 1, sizeof *w->origins);
    w->names = (Name *)calloc((size_t)p->n_named + 1, sizeof *w->names);
    w->scale = (float *)calloc((size_t)blocks_max, sizeof *w->scale);
    CHECK(w->origins && w->names && w->scale, "no memory for the origins of %lld tensors", (long long)p->n_named);
    sort_names(w);
    int result = check_quantization(dir, err, hint);
    if (result == 0) result = hf_files_open(&w->files, dir, err, hint);
    if (result == 0) result = match_tensors(w, err, hint);
    if (result == 0) result = match_scales(w, err);
    if (result == 0) result = check_none_missing(w, err, hint);
    if (result == 0) result = compare_copies(w, err);
    if (result == 0) return 0;
    hf_close(w);
    *out = NULL;
    return -1;
}

void hf_close(HfWeights *w) {
    if (!w) return;
    hf_files_close(&w->files);
    free(w->origins);
    free(w->names);
    free(w->scale);
    free(w);
}

static float widen(const void *raw, int64_t i, SafetensorsDtype dtype) {
    switch (dtype) {
    case SAFETENSORS_BF16: return float_from_bf16(((const uint16_t *)raw)[i]);
    case SAFETENSORS_F16: return float_from_f16(((const uint16_t *)raw)[i]);
    case SAFETENSORS_F8_E4M3: return float_from_e4m3(((const uint8_t *)raw)[i]);
    default: return ((const float *)raw)[i];
    }
}

/* Elements [first, first + n) of a tensor of the folder. */
static int read_elements(const HfTensor *t, int64_t first, int64_t n, float *out, char *err) {
    float raw[READ_CHUNK / sizeof(float)];
    const int64_t width = safetensors_dtype_width(t->entry->dtype), room = READ_CHUNK / width;
    for (int64_t at = 0; at < n; at += room) {
        const int64_t part = n - at < room ? n - at : room;
        if (safetensors_read(t->file, t->entry, raw, (first + at) * width, part * width, err) != 0) return -1;
        for (int64_t i = 0; i < part; i++) out[at + i] = widen(raw, i, t->entry->dtype);
    }
    return 0;
}

int hf_read(HfWeights *w, int64_t index, int64_t first, int64_t n, float *out, char *err) {
    const Origin *s = &w->origins[index];
    const NamedTensor *t = &w->p->named[index];
    CHECK(first >= 0 && n >= 0 && n <= t->numel - first, "%s: elements %lld + %lld of %lld", t->name, (long long)first,
          (long long)n, (long long)t->numel);
    if (!s->weight) {
        memset(out, 0, (size_t)n * sizeof *out);
        return 0;
    }
    if (read_elements(s->weight, s->base + first, n, out, err) != 0) return -1;
    if (!s->scale) return 0;
    const int64_t cols = t->shape[1], per_row = blocks_of(cols), rows = s->first_row + t->shape[0];
    if (w->scale_of != index && read_elements(s->scale, s->scale_base, blocks_of(rows) * per_row, w->scale, err) != 0)
        return -1;
    w->scale_of = index;
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = s->first_row + (first + i) / cols, col = (first + i) % cols;
        out[i] *= w->scale[row / SCALE_BLOCK * per_row + col / SCALE_BLOCK];
    }
    return 0;
}

int hf_load(HfWeights *w, const Params *p, const Device *d, Bar *bar, char *err) {
    real *chunk = (real *)malloc(WALK_CHUNK * sizeof *chunk);
    CHECK(chunk, "no memory for a chunk of the weights");
    int result = 0;
    for (int64_t i = 0; i < p->n_named && result == 0; i++) {
        const NamedTensor *t = &p->named[i];
        const Interval held = params_held(p, t);
        for (int64_t first = held.first, n; first < held.first + held.n && result == 0; first += n) {
            n = min_i64(held.first + held.n - first, WALK_CHUNK);
            result = hf_read(w, i, first, n, chunk, err);
            if (result != 0) break;
            op_copy_in(d, (real *)p->master.data + params_master_at(p, t, first), chunk, (size_t)n * sizeof *chunk,
                       STREAM_COPY);
            op_synchronize(d, STREAM_COPY);
        }
        if (bar) bar_draw(bar, i + 1, p->n_named, "tensors");
    }
    if (bar) bar_clear(bar);
    free(chunk);
    return result;
}
