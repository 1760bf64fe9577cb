/* See model.h. */
#include "model.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/ints.h"
#include "kernels/comm/watch.h"
#include "memory.h"

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

/* Evaluation and generation lie over the training activations, since they never run at the same time. */
static void activations_layout(Model *m) {
    acts_layout(&m->train, &m->shape, true, &m->slots, &m->scratch);
    Arena eval_slots = arena_make("eval slots", m->slots.base, m->slots.size);
    Arena eval_scratch = arena_make("eval scratch", m->scratch.base, m->scratch.size);
    acts_layout(&m->eval, &m->shape, false, &eval_slots, &eval_scratch);
    Arena generate_slots = arena_make("generation slots", m->slots.base, m->slots.size);
    Arena generate_scratch = arena_make("generation scratch", m->scratch.base, m->scratch.size);
    decode_layout(m, m->generate_len, &generate_slots, &generate_scratch);
    const size_t slots = eval_slots.peak > generate_slots.peak ? eval_slots.peak : generate_slots.peak;
    const size_t scratch = eval_scratch.peak > generate_scratch.peak ? eval_scratch.peak : generate_scratch.peak;
    if (slots > m->slots.peak) m->slots.peak = slots;
    if (scratch > m->scratch.peak) m->scratch.peak = scratch;
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
    m->slot_of_expert = tokens_i32(&m->keep, s->router.n_experts > 0 ? s->router.n_experts : 1);
    const int64_t T = s->T > m->generate_len ? s->T : m->generate_len;
    m->batch_rows = tokens_i32(&m->keep, (2 * (s->n_mtp + 1) + 2) * batch_stride(T));
    staging_layout(&m->staging, m->device, s, tensor_bytes(m->batch_rows), &m->host);
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
    memset(m, 0, sizeof *m);
    m->config = c;
    m->device = d;
    m->comm = comm;
    m->shape = shape_make(c, &comm->mesh, d->logits_bytes);
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

/* Slot = expert, until a placement says otherwise. */
static int place_experts(Model *m, char *err) {
    const int n = m->shape.router.n_experts;
    int32_t *slots = (int32_t *)malloc((size_t)(n + 1) * sizeof *slots);
    if (!slots) return err_set(err, "no memory for the slots of %d experts", n);
    for (int e = 0; e < n; e++) slots[e] = e;
    op_copy_in(m->device, m->slot_of_expert.data, slots, (size_t)n * sizeof *slots, STREAM_COPY);
    op_synchronize(m->device, STREAM_COPY);
    free(slots);
    return 0;
}

int model_init(Model *m, const Config *c, const Device *d, Comm *comm, char *err) {
    model_plan(m, c, d, comm);
    if (arena_back(&m->keep, d, false, err) || arena_back(&m->slots, d, false, err) ||
        arena_back(&m->scratch, d, false, err) || arena_back(&m->host, d, true, err)) {
        model_free(m);
        return -1;
    }
    if (m->shape.fp8) m->text = (int32_t *)calloc((size_t)m->generate_len, sizeof *m->text);
    CHECK(m->text || !m->shape.fp8, "no memory for %lld ids", (long long)m->generate_len);
    model_layout(m);
    params_write_intervals(&m->params, d);
    const int64_t half = m->shape.attention.rope / 2;
    double exact[4096];
    real rounded[4096];
    CHECK(half <= 4096, "qk_rope_head_dim / 2 = %lld", (long long)half);
    shape_inv_freq(exact, &c->model.rope, m->shape.attention.rope);
    for (int64_t i = 0; i < half; i++) rounded[i] = (real)(float)exact[i];
    op_copy_in(d, m->inv_freq.data, rounded, (size_t)half * sizeof(real), STREAM_COPY);
    op_synchronize(d, STREAM_COPY);
    if (place_experts(m, err) == 0) return 0;
    model_free(m);
    return -1;
}

int model_set_capacity(Model *m, double capacity, char *err, char *hint) {
    Config c = *m->config;
    Model planned;
    memset(&planned, 0, sizeof planned);
    planned.generate_len = m->generate_len;
    c.moe.capacity = capacity;
    model_plan(&planned, &c, m->device, m->comm);
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
    acts_free(&m->eval);
    acts_free(&m->generate);
    acts_free(&m->decode);
    free(m->text);
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
}

/* The next row of the micro-batch, from the caller into the slot; returns it as it will be on the device. */
static Tensor batch_row(Model *m, int32_t *slot, int64_t *row, const int32_t *from, int64_t T) {
    const int64_t at = (*row)++ * batch_stride(T);
    memcpy(slot + at, from, (size_t)T * sizeof *from);
    return tensor_1d((int32_t *)m->batch_rows.data + at, DTYPE_I32, T);
}

void model_set_batch(Model *m, const ModelShape *s, const MicroBatch *mb) {
    const int64_t T = s->T;
    watch_beat(); /* whatever is computed goes through here */
    CHECK(mb->n_tokens == T && mb->depth == s->n_mtp, "micro-batch of %lld tokens, depth %d", (long long)mb->n_tokens,
          mb->depth);
    int32_t *slot = (int32_t *)staging_take(&m->staging);
    int64_t row = 0;
    for (int k = 0; k <= s->n_mtp; k++) {
        m->batch.tokens[k] = batch_row(m, slot, &row, mb->tokens + k * T, T);
        m->batch.targets[k] = batch_row(m, slot, &row, mb->targets + k * T, T);
    }
    m->batch.position = batch_row(m, slot, &row, mb->position, T);
    m->batch.doc_start = batch_row(m, slot, &row, mb->doc_start, T);
    staging_send(&m->staging, m->batch_rows.data, (size_t)(row * batch_stride(T)) * sizeof *slot);
}

/* ---- forward and backward ---------------------------------------------------------------------------------------- */

static Layer layer_of(Model *m, Acts *a, int block, ForwardMode mode) {
    Layer l;
    memset(&l, 0, sizeof l);
    l.device = m->device;
    l.comm = m->comm;
    l.shape = &a->shape;
    l.w = &m->params.blocks[block];
    l.a = &a->blocks[block];
    l.batch = &m->batch;
    l.inv_freq = m->inv_freq;
    l.slot_of_expert = m->slot_of_expert;
    l.params = m->step_params;
    l.stats = mode == FORWARD_TRAIN ? m->stats : m->eval_stats;
    l.is_moe = shape_block_is_moe(&a->shape, block);
    l.keeps = a->training;
    l.count = mode == FORWARD_TRAIN;
    l.cache = decode_cache(m, a, block, mode);
    return l;
}

/* What goes between two layers: the sum of residual and branch rows is the residual stream. */
typedef struct {
    Tensor residual, branch;
} Pair;

static Pair block_forward(Model *m, Acts *a, int block, Pair in, ForwardMode mode) {
    Layer l = layer_of(m, a, block, mode);
    if (mode == FORWARD_DECODE)
        layer_attn_decode(&l, in.residual, in.branch);
    else
        layer_attn_forward(&l, in.residual, in.branch);
    if (mode == FORWARD_PREFILL && !a->shape.fp8) layer_cache_forward(&l);
    decode_keep_routing(m, &l, block, mode);
    layer_dispatch_forward(&l);
    layer_experts_forward(&l, a->branch);
    layer_combine_forward(&l, a->branch);
    const ModelShape *s = &a->shape;
    const int planes = layer_branch_planes(s, l.is_moe);
    Pair out = {l.a->t[ACT_X1], tensor_3d(a->branch.data, a->branch.dtype, planes, s->T, s->D)};
    return out;
}

/* Input-backward of a block, then its weight-backward. dx is written. */
static void block_backward(Model *m, Acts *a, int block, Tensor dx, Tensor dout) {
    Layer l = layer_of(m, a, block, FORWARD_TRAIN);
    l.dout = dout;
    layer_backward_begin(&l);
    layer_combine_backward(&l);
    layer_experts_backward_input(&l);
    layer_dispatch_backward(&l);
    layer_attn_backward_input(&l, dx);
    layer_experts_backward_weight(&l);
    layer_attn_backward_weight(&l);
}

static const Weight *final_norm(Model *m, int depth) {
    return depth == 0 ? &m->params.top.weight[WEIGHT_FINAL_NORM]
                      : &m->params.blocks[m->shape.L + depth - 1].weight[WEIGHT_MTP_NORM];
}

/* The blocks of one depth: the main model's L, or the one of an MTP module. */
static void depth_blocks(const ModelShape *s, int depth, int *first, int *end) {
    *first = depth == 0 ? 0 : s->L + depth - 1;
    *end = depth == 0 ? s->L : s->L + depth;
}

static bool has_loss(ForwardMode mode) {
    return mode == FORWARD_TRAIN || mode == FORWARD_EVAL;
}

static void depth_forward(Model *m, Acts *a, int depth, ForwardMode mode) {
    int first, end;
    depth_blocks(&a->shape, depth, &first, &end);
    Pair pair = {a->depth[depth].x0, tensor_none()};
    for (int b = first; b < end; b++) pair = block_forward(m, a, b, pair, mode);
    op_residual_rmsnorm_forward(m->device, a->depth[depth].x_final, a->depth[depth].hidden, tensor_none(),
                                a->depth[depth].hidden_rstd, pair.residual, pair.branch, final_norm(m, depth)->w,
                                a->shape.eps, STREAM_COMPUTE);
    if (has_loss(mode)) head_forward(m, a, depth, mode);
}

void model_forward(Model *m, Acts *a, ForwardMode mode) {
    RANGE(m->device, "forward");
    op_embed_forward(m->device, a->depth[0].x0, m->batch.tokens[0], m->params.top.weight[WEIGHT_EMBED].w,
                     STREAM_COMPUTE);
    depth_forward(m, a, 0, mode);
    for (int depth = 1; depth <= a->shape.n_mtp && has_loss(mode); depth++) {
        mtp_input_forward(m, a, depth);
        depth_forward(m, a, depth, mode);
    }
}

/* Writes the gradient of x0 of the depth and returns it. */
static Tensor depth_backward(Model *m, Acts *a, int depth) {
    const Weight *norm = final_norm(m, depth);
    Tensor dout = a->dout[0], dx = a->dout[1];
    Tensor partial = tensor_2d(a->partial.data, a->partial.dtype, a->partial.shape[0], a->shape.D);
    op_residual_rmsnorm_backward(m->device, dout, norm->dw, partial, a->depth[depth].dhidden, tensor_none(),
                                 a->depth[depth].x_final, a->depth[depth].hidden_rstd, norm->w, STREAM_COMPUTE);
    int first, end;
    depth_blocks(&a->shape, depth, &first, &end);
    for (int b = end - 1; b >= first; b--) {
        block_backward(m, a, b, dx, dout);
        Tensor swap = dout;
        dout = dx;
        dx = swap;
    }
    return dout;
}

void model_backward(Model *m, Acts *a) {
    RANGE(m->device, "backward");
    for (int depth = a->shape.n_mtp; depth >= 1; depth--) {
        Tensor dx0 = depth_backward(m, a, depth);
        mtp_input_backward(m, a, depth, dx0);
    }
    Tensor dx0 = depth_backward(m, a, 0);
    op_embed_backward(m->device, m->params.top.weight[WEIGHT_EMBED].dw, dx0, m->batch.tokens[0], STREAM_COMPUTE);
}
