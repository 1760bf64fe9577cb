/* See memory.h. */
#include "memory.h"

#include <stdio.h>
#include <string.h>

#include "kernels/base/check.h"

const RecomputeChoice recompute_choices[RECOMPUTE_CHOICES] = {
    {"norms", RECOMPUTE_NORMS},
    {"swiglu", RECOMPUTE_SWIGLU},
    {"up_projections", RECOMPUTE_UP_PROJECTIONS},
};

/* ---- text -------------------------------------------------------------------------------------------------------- */

typedef struct {
    char text[32];
} Bytes;
static Bytes bytes_of(int64_t bytes) {
    Bytes b;
    format_bytes(b.text, sizeof b.text, (double)bytes);
    return b;
}

/* Appends to a list, `separator` in front of all but the first. */
static void append(char *buf, size_t buf_len, const char *separator, const char *text) {
    const size_t used = strlen(buf);
    snprintf(buf + used, buf_len - used, "%s%s", used ? separator : "", text);
}

const char *recompute_text(char *buf, size_t buf_len, int bits) {
    buf[0] = 0;
    for (int i = 0; i < RECOMPUTE_CHOICES; i++)
        if (bits & recompute_choices[i].bit) append(buf, buf_len, ", ", recompute_choices[i].name);
    if (!buf[0]) snprintf(buf, buf_len, "nothing");
    return buf;
}

/* ---- sums -------------------------------------------------------------------------------------------------------- */

/* Forward and backward of a step's first micro-batch and of any other, or of all micro-batches through the blocks of
 * this rank; under DualPipe half of them go through each of its two chunks. */
static int64_t graph_bytes(const Model *m) {
    const ModelShape *s = &m->shape;
    int64_t n_blocks = 0;
    if (!m->config->run.graphs || m->comm->needs_host || m->device->memory.row[MEMORY_CONTEXT] == 0) return 0;
    for (int c = 0; c < s->part.n_chunks; c++) n_blocks += shape_chunk_blocks(s, c);
    const int64_t n_passes =
        m->part ? n_blocks * s->part.n_batches / (m->comm->mesh.is_mirrored ? 2 : 1) : 2 * n_blocks;
    return device_memory_graphs(n_passes, n_blocks);
}

int64_t memory_row(const Model *m, MemoryRow row) {
    return row == MEMORY_GRAPHS ? graph_bytes(m) : m->device->memory.row[row];
}

int64_t memory_rows(const Model *m) {
    int64_t bytes = 0;
    for (int i = 0; i < MEMORY_ROWS; i++) bytes += memory_row(m, (MemoryRow)i);
    return bytes;
}

int64_t memory_total(const Model *m) {
    return (int64_t)(m->keep.peak + m->slots.peak + m->scratch.peak) + memory_rows(m);
}

static int64_t total_with(const Model *m, int recompute) {
    Config c = *m->config;
    c.memory.recompute = recompute;
    Model other = model_plan_as(m, &c);
    const int64_t bytes = memory_total(&other);
    model_free(&other);
    return bytes;
}

int64_t memory_saved_by(const Model *m, int bit) {
    return total_with(m, m->shape.recompute & ~bit) - total_with(m, m->shape.recompute | bit);
}

/* Expert rows are as many as could be needed; at least T_received * min(K, El) of N are written if routing stays on
 * this rank, so one rank alone is sure of them. */
static int64_t surely_written(const Model *m) {
    const ModelShape *s = &m->shape;
    double share = 1;
    if (shape_n_moe(s) > 0 && s->N > 0)
        share = s->R > 1 ? 0 : (double)(s->N - (GROUP_ALIGN - 1) * (int64_t)s->n_local) / (double)s->N;
    return (int64_t)m->keep.peak + (int64_t)(share * (double)m->slots.peak);
}

static int64_t needed(const Model *m) {
    return m->device->memory.on_touch ? surely_written(m) : memory_total(m);
}

static int64_t room(const Model *m) {
    return m->device->memory.free + m->device->memory.held;
}

bool memory_fits(const Model *m) {
    return m->device->memory.total == 0 || needed(m) <= room(m);
}

/* ---- refusal ----------------------------------------------------------------------------------------------------- */

enum { LARGEST = 3, ITEMS_MAX = 2 * ARENA_NAMES_MAX + MEMORY_ROWS + 1 };

/* Rows of the plan by name. Scratch counts as one: its parts share their memory. */
static int list_items(const Model *m, ArenaItem *items) {
    int n = 0;
    const Arena *arenas[] = {&m->keep, &m->slots};
    for (int a = 0; a < 2; a++)
        for (int i = 0; i < arenas[a]->n_items; i++) items[n++] = arenas[a]->items[i];
    items[n].name = m->scratch.name;
    items[n++].bytes = m->scratch.peak;
    for (int i = 0; i < MEMORY_ROWS; i++) {
        items[n].name = memory_row_name[i];
        items[n++].bytes = (size_t)memory_row(m, (MemoryRow)i);
    }
    return n;
}

static void largest_text(const Model *m, char *text, size_t text_len) {
    ArenaItem items[ITEMS_MAX];
    const int n = list_items(m, items);
    text[0] = 0;
    for (int k = 0; k < LARGEST && k < n; k++) {
        int largest = 0;
        for (int i = 1; i < n; i++)
            if (items[i].bytes > items[largest].bytes) largest = i;
        char item[128];
        snprintf(item, sizeof item, "%s %s", items[largest].name, bytes_of((int64_t)items[largest].bytes).text);
        append(text, text_len, ", ", item);
        items[largest].bytes = 0;
    }
}

/* Settings that are not at their smallest, in the order in which they cost least. */
static void what_to_change(const Model *m, char *hint) {
    const Config *c = m->config;
    const ModelShape *s = &m->shape;
    char item[ERR_LEN];
    hint[0] = 0;
    int all = 0;
    for (int i = 0; i < RECOMPUTE_CHOICES; i++) all |= recompute_choices[i].bit;
    if (c->train.micro_batch_size > 1) {
        snprintf(item, sizeof item, "lower train.micro_batch_size (now %lld)", (long long)c->train.micro_batch_size);
        append(hint, ERR_LEN, "; ", item);
    }
    if (s->part.pairs && m->comm->mesh.n_pp == 1)
        append(hint, ERR_LEN, "; ", "set parallel.schedule to \"1f1b\": one micro-batch at a time");
    if ((s->recompute & all) != all)
        append(hint, ERR_LEN, "; ", "set memory.recompute to [\"norms\", \"swiglu\", \"up_projections\"]");
    if (s->act == DTYPE_F32) append(hint, ERR_LEN, "; ", "set precision.compute to \"bf16\"");
    if (s->moment == DTYPE_F32) append(hint, ERR_LEN, "; ", "set precision.moments to \"bf16\"");
    if (s->head_chunk > 1024 && m->scratch.peak > 0) {
        snprintf(item, sizeof item, "lower memory.head_chunk_tokens (now %lld)", (long long)s->head_chunk);
        append(hint, ERR_LEN, "; ", item);
    }
    if (!hint[0])
        snprintf(hint, ERR_LEN, "lower train.seq_len (now %lld), or a smaller model: train_moe plan shows its memory",
                 (long long)c->train.seq_len);
}

int memory_check(const Model *m, char *err, char *hint) {
    hint[0] = 0;
    if (memory_fits(m)) return 0;
    const DeviceMemory *d = &m->device->memory;
    /* A driver keeps a little for itself; more than that is somebody's. */
    const int64_t others = d->total - room(m);
    char largest[512], who[128] = "";
    largest_text(m, largest, sizeof largest);
    what_to_change(m, hint);
    if (others > d->total / 64) {
        snprintf(who, sizeof who, "; other processes hold %s", bytes_of(others).text);
        append(hint, ERR_LEN, "; ", d->on_touch ? "end other programs (top)" : "nvidia-smi lists who holds the GPU");
    }
    return err_set(err, "the memory plan needs %s%s, this process can have %s of the device's %s%s; largest: %s",
                   d->on_touch ? "at least " : "", bytes_of(needed(m)).text, bytes_of(room(m)).text,
                   bytes_of(d->total).text, who, largest);
}
