/* See hf.h: the tensors of an export. A plan of all of them first, then shard by shard; in a shard the order is that of
 * the format (wider dtypes first), so an FP8 matrix is read twice, once for its scales and once for its bytes: cheaper
 * than holding a shard. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/json.h"
#include "data/safetensors.h"
#include "format.h"
#include "hf.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "kernels/base/small_floats.h"

enum { CHUNK_ROWS_BYTES = 1 << 20, FILE_NAME_LEN = 64 };

static const char *const dtype_names[HF_DTYPES] = {[HF_BF16] = "bf16", [HF_FP8] = "fp8", [HF_FP32] = "fp32"};

const char *hf_dtype_name(HfDtype dtype) {
    return dtype_names[dtype];
}

int hf_dtype_find(const char *name) {
    for (int i = 0; i < HF_DTYPES; i++)
        if (strcmp(dtype_names[i], name) == 0) return i;
    return -1;
}

/* ---- the plan ---------------------------------------------------------------------------------------------------- */

/* One tensor of the folder. */
typedef struct {
    char name[TENSOR_NAME_LEN];
    const NamedTensor *from;
    bool is_scale; /* of the FP8 matrix `from` */
    SafetensorsDtype dtype;
    int64_t shape[2];
    int64_t bytes;
    int64_t shard;
} Item;

typedef struct {
    const HfExport *x;
    const char *folder;
    Item *items;
    int64_t n, n_shards, bytes;
    float *whole;                /* the tensor at hand, as f32 */
    const NamedTensor *in_whole; /* which one */
    float *scale;                /* of an FP8 matrix */
    void *chunk;
    int64_t chunk_bytes, written;
} Export;

static void *new_memory(int64_t n, size_t width) {
    void *p = calloc((size_t)n + 1, width);
    CHECK(p, "no memory for %lld items of an export", (long long)n);
    return p;
}

static int64_t blocks_of(int64_t n) {
    return (n + SCALE_BLOCK - 1) / SCALE_BLOCK;
}

static void add_item(Export *e, const NamedTensor *from, const char *name, SafetensorsDtype dtype, bool is_scale) {
    Item *item = &e->items[e->n++];
    memset(item, 0, sizeof *item);
    CHECK(snprintf(item->name, sizeof item->name, "%s%s", name, is_scale ? "_scale_inv" : "") < TENSOR_NAME_LEN,
          "the name %s is too long", name);
    item->from = from;
    item->is_scale = is_scale;
    item->dtype = dtype;
    item->shape[0] = is_scale ? blocks_of(from->shape[0]) : from->shape[0];
    item->shape[1] = is_scale ? blocks_of(from->shape[1]) : from->shape[1];
    item->bytes = item->shape[0] * (from->ndim == 2 ? item->shape[1] : 1) * safetensors_dtype_width(dtype);
}

static void add_tensor(Export *e, const NamedTensor *t) {
    const bool is_bias = t->weight == WEIGHT_ROUTER_BIAS;
    if (is_bias && e->x->config->model.topk_method != TOPK_NOAUX_TC) return; /* V2's gate has none */
    if (e->x->dtype == HF_FP8 && weight_is_block_linear(t->weight)) {
        add_item(e, t, t->name, SAFETENSORS_F8_E4M3, false);
        add_item(e, t, t->name, SAFETENSORS_F32, true);
    } else {
        add_item(e, t, t->name, is_bias || e->x->dtype == HF_FP32 ? SAFETENSORS_F32 : SAFETENSORS_BF16, false);
    }
}

static const NamedTensor *top_tensor(const Params *p, WeightId id) {
    for (int64_t i = 0; i < p->n_named; i++)
        if (p->named[i].block < 0 && p->named[i].weight == id) return &p->named[i];
    CHECK(false, "no tensor of weight %d", (int)id);
    return NULL;
}

/* The copy of embedding or head that an MTP layer carries. */
static void add_copy(Export *e, int block, const char *tail, WeightId id) {
    char name[TENSOR_NAME_LEN];
    snprintf(name, sizeof name, "model.layers.%d.%s", block, tail);
    add_item(e, top_tensor(e->x->params, id), name, e->x->dtype == HF_FP32 ? SAFETENSORS_F32 : SAFETENSORS_BF16, false);
}

static void plan_items(Export *e) {
    const Params *p = e->x->params;
    const ModelShape *s = &p->shape;
    e->items = (Item *)new_memory(2 * p->n_named + 2 * s->n_mtp, sizeof *e->items);
    for (int64_t i = 0; i < p->n_named; i++) {
        const int block = p->named[i].block;
        if (block >= s->L && p->named[i - 1].block != block) add_copy(e, block, "embed_tokens.weight", WEIGHT_EMBED);
        add_tensor(e, &p->named[i]);
        if (block >= s->L && (i + 1 == p->n_named || p->named[i + 1].block != block))
            add_copy(e, block, "shared_head.head.weight", WEIGHT_HEAD);
    }
}

/* Deals the items out in the order of the model, so that a layer lies in one or two files. */
static void plan_shards(Export *e) {
    int64_t used = 0;
    for (int64_t i = 0; i < e->n; i++) {
        if (i == 0 || e->items[i].bytes > e->x->shard_bytes_max - used) {
            e->n_shards++;
            used = 0;
        }
        used += e->items[i].bytes;
        e->items[i].shard = e->n_shards - 1;
        e->bytes += e->items[i].bytes;
    }
}

int64_t hf_export_bytes(const HfExport *x) {
    Export e;
    memset(&e, 0, sizeof e);
    e.x = x;
    plan_items(&e);
    for (int64_t i = 0; i < e.n; i++) e.bytes += e.items[i].bytes;
    free(e.items);
    return e.bytes;
}

static void shard_name(char name[FILE_NAME_LEN], const Export *e, int64_t shard) {
    if (e->n_shards == 1)
        snprintf(name, FILE_NAME_LEN, "model.safetensors");
    else
        snprintf(name, FILE_NAME_LEN, "model-%05lld-of-%05lld.safetensors", (long long)shard + 1,
                 (long long)e->n_shards);
}

/* ---- bytes ------------------------------------------------------------------------------------------------------- */

static int fetch(Export *e, const NamedTensor *t, char *err) {
    if (e->in_whole == t) return 0;
    e->in_whole = NULL;
    if (e->x->read(e->x->arg, t, e->whole, err) != 0) return -1;
    for (int64_t i = 0; i < t->numel; i++)
        if (!isfinite(e->whole[i]))
            return err_set(err, "%s: element %lld is %g: these weights are broken", t->name, (long long)i,
                           (double)e->whole[i]);
    e->in_whole = t;
    return 0;
}

static int append(Export *e, SafetensorsWriter *w, const void *data, int64_t bytes, char *err) {
    e->written += bytes;
    if (e->x->bar) bar_draw(e->x->bar, e->written >> 20, e->bytes >> 20, "MiB");
    return safetensors_append(w, data, bytes, err);
}

static int append_bf16(Export *e, SafetensorsWriter *w, const NamedTensor *t, char *err) {
    const int64_t room = e->chunk_bytes / 2;
    uint16_t *out = (uint16_t *)e->chunk;
    for (int64_t first = 0; first < t->numel; first += room) {
        const int64_t n = t->numel - first < room ? t->numel - first : room;
        for (int64_t i = 0; i < n; i++) out[i] = bf16_from_float(e->whole[first + i]);
        if (append(e, w, out, n * 2, err) != 0) return -1;
    }
    return 0;
}

static int append_e4m3(Export *e, SafetensorsWriter *w, const NamedTensor *t, char *err) {
    const int64_t cols = t->shape[1], rows_at_once = e->chunk_bytes / cols;
    e4m3_block_scales(e->scale, e->whole, t->shape[0], cols);
    for (int64_t first = 0; first < t->shape[0]; first += rows_at_once) {
        const int64_t n = t->shape[0] - first < rows_at_once ? t->shape[0] - first : rows_at_once;
        e4m3_block_quantize((uint8_t *)e->chunk, e->whole + first * cols, e->scale, first, n, cols);
        if (append(e, w, e->chunk, n * cols, err) != 0) return -1;
    }
    return 0;
}

static int append_item(Export *e, SafetensorsWriter *w, const Item *item, char *err) {
    const NamedTensor *t = item->from;
    if (fetch(e, t, err) != 0) return -1;
    if (item->is_scale) {
        e4m3_block_scales(e->scale, e->whole, t->shape[0], t->shape[1]);
        return append(e, w, e->scale, item->bytes, err);
    }
    if (item->dtype == SAFETENSORS_F32) return append(e, w, e->whole, item->bytes, err);
    return item->dtype == SAFETENSORS_BF16 ? append_bf16(e, w, t, err) : append_e4m3(e, w, t, err);
}

static SafetensorsEntry entry_of(const Item *item) {
    SafetensorsEntry entry = {.name = item->name, .dtype = item->dtype, .ndim = item->from->ndim};
    for (int i = 0; i < entry.ndim; i++) entry.shape[i] = item->shape[i];
    return entry;
}

static int by_file_order(const void *a, const void *b) {
    const SafetensorsEntry x = entry_of(*(const Item *const *)a), y = entry_of(*(const Item *const *)b);
    return safetensors_compare(&x, &y);
}

/* Items [first, first + n) are one file. */
static int write_shard(Export *e, int64_t first, int64_t n, char *err) {
    char name[FILE_NAME_LEN], path[PATH_MAX];
    const Item **order = (const Item **)new_memory(n, sizeof *order);
    SafetensorsEntry *entries = (SafetensorsEntry *)new_memory(n, sizeof *entries);
    for (int64_t i = 0; i < n; i++) order[i] = &e->items[first + i];
    qsort(order, (size_t)n, sizeof *order, by_file_order);
    for (int64_t i = 0; i < n; i++) entries[i] = entry_of(order[i]);
    shard_name(name, e, e->items[first].shard);
    snprintf(path, sizeof path, "%s/%s", e->folder, name);
    SafetensorsWriter w;
    int result = safetensors_create(&w, path, entries, n, err);
    for (int64_t i = 0; i < n && result == 0; i++) result = append_item(e, &w, order[i], err);
    if (result == 0) result = safetensors_finish(&w, err);
    if (result != 0) safetensors_abandon(&w);
    free(order);
    free(entries);
    return result;
}

/* A V2 gate has no correction bias, so there must be none to lose. */
static int check_no_bias(Export *e, char *err) {
    const Params *p = e->x->params;
    for (int64_t i = 0; i < p->n_named && e->x->config->model.topk_method != TOPK_NOAUX_TC; i++) {
        if (p->named[i].weight != WEIGHT_ROUTER_BIAS) continue;
        if (fetch(e, &p->named[i], err) != 0) return -1;
        for (int64_t k = 0; k < p->named[i].numel; k++)
            if (e->whole[k] != 0) return err_set(err, "%s is not zero, and a V2 gate cannot hold it", p->named[i].name);
    }
    return 0;
}

static int write_shards(Export *e, char *err) {
    int64_t numel_max = e->x->params->shape.router.n_experts + 1, blocks_max = 1, cols_max = 1;
    for (int64_t i = 0; i < e->n; i++) {
        const NamedTensor *t = e->items[i].from;
        if (t->numel > numel_max) numel_max = t->numel;
        if (t->ndim == 2 && t->shape[1] > cols_max) cols_max = t->shape[1];
        const int64_t blocks = t->ndim == 2 ? blocks_of(t->shape[0]) * blocks_of(t->shape[1]) : 0;
        if (blocks > blocks_max) blocks_max = blocks;
    }
    e->chunk_bytes = CHUNK_ROWS_BYTES > cols_max ? CHUNK_ROWS_BYTES : cols_max;
    e->chunk = new_memory(e->chunk_bytes, 1);
    e->scale = (float *)new_memory(blocks_max, sizeof(float));
    e->whole = (float *)malloc((size_t)numel_max * sizeof(float));
    int result = e->whole ? 0
                          : err_set(err, "no memory for the largest tensor: %s",
                                    format_file_size((double)numel_max * sizeof(float)).text);
    if (result == 0) result = check_no_bias(e, err);
    for (int64_t first = 0, end; first < e->n && result == 0; first = end) {
        for (end = first; end < e->n && e->items[end].shard == e->items[first].shard;) end++;
        result = write_shard(e, first, end - first, err);
    }
    if (e->x->bar) bar_clear(e->x->bar);
    free(e->whole);
    free(e->scale);
    free(e->chunk);
    return result;
}

/* ---- the rest of the folder -------------------------------------------------------------------------------------- */

/* model.safetensors.index.json: which file holds which tensor. One file needs none. */
static int write_index(const Export *e, char *err) {
    if (e->n_shards == 1) return 0;
    char *text = NULL, path[PATH_MAX], name[FILE_NAME_LEN];
    size_t size;
    FILE *out = open_memstream(&text, &size);
    CHECK(out, "no memory for an index");
    fprintf(out, "{\n  \"metadata\": {\n    \"total_size\": %lld\n  },\n  \"weight_map\": {", (long long)e->bytes);
    for (int64_t i = 0; i < e->n; i++) {
        shard_name(name, e, e->items[i].shard);
        fputs(i ? ",\n    " : "\n    ", out);
        json_write_string(out, e->items[i].name);
        fprintf(out, ": \"%s\"", name);
    }
    fputs("\n  }\n}\n", out);
    CHECK(fclose(out) == 0 && text, "no memory for an index");
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", e->folder);
    int result = file_write_durable(path, text, size, err);
    free(text);
    return result;
}

static void note_what_readers_need(const HfExport *x, char *note) {
    const ModelShape *s = &x->params->shape;
    if (s->n_mtp > 0)
        hf_note(note, "MTP is model.layers.%d%s: transformers has no such module and reports its tensors as unexpected",
                s->L, s->n_mtp > 1 ? " and after" : "");
    if (s->n_mtp > 0 && s->L == 1) hf_note(note, "SGLang cannot serve the MTP layer of a model with one main layer");
    if (s->n_dense == s->L && s->n_mtp > 0)
        hf_note(note, "the MTP layer is dense as the model is; servers expect experts there: set "
                      "num_nextn_predict_layers to 0 in its config.json");
    if (x->config->model.rms_norm_eps != 1e-6)
        hf_note(note, "rms_norm_eps is %g: transformers uses 1e-6 in q_a_layernorm and kv_a_layernorm whatever it is",
                x->config->model.rms_norm_eps);
    if (!x->tokenizer) hf_note(note, "no tokenizer is known, so none is in the folder");
}

int hf_export(const HfExport *x, const char *out, HfReport *report, char *err, char *hint) {
    char unfinished[HF_PATH_LEN];
    Export e = {.x = x, .folder = unfinished};
    memset(report, 0, sizeof *report);
    err[0] = hint[0] = 0;
    plan_items(&e);
    plan_shards(&e);
    int result = hf_folder_begin(unfinished, out, e.bytes + (e.n << 9), err, hint);
    if (result == 0) {
        result = write_shards(&e, err);
        if (result == 0) result = write_index(&e, err);
        if (result == 0) result = hf_config_write(unfinished, x->config, x->dtype, err);
        if (result == 0 && x->tokenizer) result = hf_tokenizer_write(unfinished, x->tokenizer, x->config, err);
        if (result == 0) result = hf_folder_commit(unfinished, out, err);
        if (result != 0) dir_remove(unfinished, NULL);
    }
    if (result == 0) {
        *report = (HfReport){.n_tensors = e.n, .n_files = e.n_shards, .bytes = e.bytes};
        note_what_readers_need(x, report->note);
    }
    free(e.items);
    return result;
}
