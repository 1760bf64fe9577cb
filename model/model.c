/* See model.h. */
#include "model.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/ints.h"
#include "kernels/comm/watch.h"
#include "memory.h"
#include "passage.h"

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static Tensor tokens_i32(Arena *a, int64_t n) {
    return tensor_1d(arena_alloc(a, (size_t)n * 4, "micro-batch"), DTYPE_I32, n);
}

static void *step_struct(Arena *a, size_t bytes) {
    return arena_alloc(a, bytes, "step");
}

/* The rows of a micro-batch lie in one piece, as they are copied; each starts at a multiple of ARENA_ALIGN. */
static int64_t batch_stride(int64_t T) {
    return round_up(T, ARENA_ALIGN / 4);
}

/* `other` lies over the same memory. */
static void arena_cover(Arena *a, const Arena *other) {
    if (other->peak > a->peak) a->peak = other->peak;
}

/* Evaluation and generation lie over the training activations, since they never run at the same time. */
static void activations_layout(Model *m) {
    const ModelShape *s = &m->shape;
    acts_layout(&m->train, s, true, &m->slots, &m->scratch);
    if (s->part.pairs) acts_layout_beside(&m->beside, &m->train, &m->scratch);
    const Tensor boundary = tensor_2d(NULL, s->act, max_i64(s->T, m->generate_len), s->D);
    for (int i = 0; i < s->part.n_boundaries; i++) {
        m->boundary[i] =
            tensor_2d(arena_alloc(&m->slots, tensor_bytes(boundary), "between stages"), s->act, s->T, s->D);
    }
    Arena eval_slots = arena_make("eval slots", m->slots.base, m->slots.size);
    Arena eval_scratch = arena_make("eval scratch", m->scratch.base, m->scratch.size);
    acts_layout(&m->eval, s, false, &eval_slots, &eval_scratch);
    arena_cover(&m->slots, &eval_slots);
    arena_cover(&m->scratch, &eval_scratch);
    Arena generate_slots = arena_make("generation slots", m->slots.base, m->slots.size);
    Arena generate_scratch = arena_make("generation scratch", m->scratch.base, m->scratch.size);
    decode_layout(m, m->generate_len, &generate_slots, &generate_scratch);
    arena_cover(&m->slots, &generate_slots);
    arena_cover(&m->scratch, &generate_scratch);
}

/* Everything the run will ever hold. Called twice: counting, then pointing. */
static void model_layout(Model *m) {
    const ModelShape *s = &m->shape;
    params_layout(&m->params, &m->keep);
    m->step_params = (StepParams *)step_struct(&m->keep, sizeof(StepParams));
    m->eval_stats = (StepStats *)step_struct(&m->keep, sizeof(StepStats));
    m->record = record_layout(&m->keep, s);
    m->stats = m->record.stats;
    m->update = m->record.update;
    for (int b = 0, i = 0; b < s->n_blocks; b++)
        if (shape_block_is_moe(s, b)) m->params.blocks[b].counts = tensor_plane(m->record.counts, i++);
    m->inv_freq = tensor_1d(arena_alloc(&m->keep, (size_t)s->attention.rope / 2 * sizeof(real), "step"), DTYPE_F32,
                            s->attention.rope / 2);
    const int64_t T = s->T > m->generate_len ? s->T : m->generate_len;
    m->batch_elements = (2 * (s->n_mtp + 1) + 2) * batch_stride(T);
    m->batch_rows = tokens_i32(&m->keep, s->part.n_batches * m->batch_elements);
    staging_layout(&m->staging, m->device, s, (size_t)m->batch_elements * 4, &m->host);
    activations_layout(m);
}

/* Positions that a sample of the loop may need, in steps of 64; the generate command sets its own. */
static int64_t generate_len_of(const Config *c) {
    int64_t longest = 0;
    for (int i = 0; i < c->sample.n_prompts; i++) {
        int64_t n = (int64_t)strlen(c->sample.prompts[i]); /* a token is at least one byte */
        if (n > longest) longest = n;
    }
    int64_t want = (longest + 1 + c->sample.tokens + 63) / 64 * 64;
    return want < c->train.seq_len ? want : c->train.seq_len;
}

static void model_count(Model *m) {
    m->keep = arena_make("state", NULL, 0);
    m->slots = arena_make("activations", NULL, 0);
    m->scratch = arena_make("scratch", NULL, 0);
    m->host = arena_make("pinned host memory", NULL, 0);
    model_layout(m);
}

void model_plan(Model *m, const Config *c, const Device *d, Comm *comm) {
    const int64_t generate_len = m->generate_len;
    const RankPart *const part = m->part;
    memset(m, 0, sizeof *m);
    m->part = part;
    m->config = c;
    m->device = d;
    m->comm = comm;
    m->shape = shape_make(c, &comm->mesh, d->logits_bytes);
    if (part) m->shape.part = *part;
    m->batch = (Batch *)calloc((size_t)m->shape.part.n_batches, sizeof *m->batch);
    m->boundary = (Tensor *)calloc((size_t)m->shape.part.n_boundaries + 1, sizeof *m->boundary);
    CHECK(m->batch && m->boundary, "no memory for %d micro-batches", m->shape.part.n_batches);
    m->generate_len = generate_len > 0 ? generate_len : generate_len_of(c);
    if (m->shape.fp8) m->generate_len = round_up(m->generate_len, SCALE_TILE); /* as a training batch: whole tiles */
    params_make(&m->params, &m->shape);
    model_count(m);
    for (int i = 0; i < RECOMPUTE_CHOICES && c->memory.recompute == RECOMPUTE_AUTO && !memory_fits(m); i++) {
        m->shape.recompute |= recompute_choices[i].bit;
        model_count(m);
    }
}

static int arena_back(Arena *a, const Device *d, bool is_host, char *err) {
    char need[32];
    void *base = is_host ? op_host_alloc(d, a->peak) : op_alloc(d, a->peak);
    if (!base) return err_set(err, "no memory for %s: %s", a->name, format_bytes(need, sizeof need, (double)a->peak));
    *a = arena_make(a->name, base, a->peak);
    return 0;
}

int model_init(Model *m, const Config *c, const Device *d, Comm *comm, char *err) {
    model_plan(m, c, d, comm);
    if (arena_back(&m->keep, d, false, err) || arena_back(&m->slots, d, false, err) ||
        arena_back(&m->scratch, d, false, err) || arena_back(&m->host, d, true, err)) {
        model_free(m);
        return -1;
    }
    model_layout(m);
    params_write_tables(&m->params, d);
    const int64_t half = m->shape.attention.rope / 2;
    double exact[4096];
    real rounded[4096];
    CHECK(half <= 4096, "qk_rope_head_dim / 2 = %lld", (long long)half);
    shape_inv_freq(exact, &c->model.rope, m->shape.attention.rope);
    for (int64_t i = 0; i < half; i++) rounded[i] = (real)(float)exact[i];
    op_copy_in(d, m->inv_freq.data, rounded, (size_t)half * sizeof(real), STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
    return 0;
}

Model model_plan_as(const Model *m, const Config *c) {
    Model other;
    memset(&other, 0, sizeof other);
    other.generate_len = m->generate_len;
    other.part = m->part;
    model_plan(&other, c, m->device, m->comm);
    return other;
}

int model_set_capacity(Model *m, double capacity, char *err, char *hint) {
    Config c = *m->config;
    c.moe.capacity = capacity;
    Model planned = model_plan_as(m, &c);
    const int fits = memory_check(&planned, err, hint);
    if (fits == 0) {
        m->shape = planned.shape;
        op_release(m->device, m->slots.base);
        op_release(m->device, m->scratch.base);
        m->slots = planned.slots;
        m->scratch = planned.scratch;
    }
    model_free(&planned);
    if (fits != 0) return -1;
    hint[0] = 0;
    if (arena_back(&m->slots, m->device, false, err) || arena_back(&m->scratch, m->device, false, err)) return -1;
    activations_layout(m);
    return 0;
}

void model_init_weights(Model *m) {
    params_init(&m->params, m->device, m->config->run.seed, m->config->train.init_std);
    model_cast(m);
}

void model_free(Model *m) {
    op_release(m->device, m->keep.base);
    op_release(m->device, m->slots.base);
    op_release(m->device, m->scratch.base);
    op_host_release(m->device, m->host.base);
    params_free(&m->params);
    acts_free(&m->train);
    acts_free(&m->beside);
    acts_free(&m->eval);
    acts_free(&m->generate);
    acts_free(&m->decode);
    free(m->batch);
    free(m->boundary);
    memset(m, 0, sizeof *m);
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

void model_set_params(Model *m, const StepParams *params) {
    memcpy(staging_take(&m->staging), params, sizeof *params);
    staging_send(&m->staging, m->step_params, sizeof *params);
}

void model_zero(Model *m) {
    op_zero(m->device, m->params.grad, STREAM_COMPUTE);
    op_zero(m->device, tensor_1d(m->stats, DTYPE_E4M3, (int64_t)sizeof *m->stats), STREAM_COMPUTE);
    op_zero(m->device, m->record.counts, STREAM_COMPUTE);
    if (m->observes)
        op_zero(m->device, tensor_1d(m->record.fp8, DTYPE_E4M3, (int64_t)record_fp8_bytes(&m->shape)), STREAM_COMPUTE);
}

/* The next row of the micro-batch, from the caller into the slot; returns it as it will be on the device. */
static Tensor batch_row(int32_t *device, int32_t *slot, int64_t *row, const int32_t *from, int64_t T) {
    const int64_t at = (*row)++ * batch_stride(T);
    memcpy(slot + at, from, (size_t)T * sizeof *from);
    return tensor_1d(device + at, DTYPE_I32, T);
}

void model_set_batch(Model *m, const ModelShape *s, const MicroBatch *mb) {
    model_set_batch_at(m, 0, s, mb);
}

void model_set_batch_at(Model *m, int i, const ModelShape *s, const MicroBatch *mb) {
    const int64_t T = s->T;
    Batch *b = &m->batch[i];
    int32_t *device = (int32_t *)m->batch_rows.data + i * m->batch_elements;
    watch_beat(); /* whatever is computed goes through here */
    CHECK(i >= 0 && i < s->part.n_batches, "micro-batch %d of %d", i, s->part.n_batches);
    CHECK(mb->n_tokens == T && mb->depth == s->n_mtp, "micro-batch of %lld tokens, depth %d", (long long)mb->n_tokens,
          mb->depth);
    int32_t *slot = (int32_t *)staging_take(&m->staging);
    int64_t row = 0;
    for (int k = 0; k <= s->n_mtp; k++) {
        b->tokens[k] = batch_row(device, slot, &row, mb->tokens + k * T, T);
        b->targets[k] = batch_row(device, slot, &row, mb->targets + k * T, T);
    }
    b->position = batch_row(device, slot, &row, mb->position, T);
    b->doc_start = batch_row(device, slot, &row, mb->doc_start, T);
    staging_send(&m->staging, device, (size_t)(row * batch_stride(T)) * sizeof *slot);
}

/* ---- forward and backward ---------------------------------------------------------------------------------------- */

void model_forward(Model *m, Acts *a, ForwardMode mode) {
    RANGE(m->device, "forward");
    if (m->stages.forward && mode != FORWARD_TRAIN) {
        m->stages.forward(m->stages.arg, a, mode);
        return;
    }
    Passage p = passage_of(m, a, 0, mode);
    passage_forward(&p);
}

bool model_has_output(const Model *m) {
    return !m->stages.forward || m->stages.is_last;
}

void model_backward(Model *m, Acts *a) {
    RANGE(m->device, "backward");
    Passage p = passage_of(m, a, 0, FORWARD_TRAIN);
    passage_backward(&p);
}
