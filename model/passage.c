/* See passage.h. */
#include "passage.h"

#include <string.h>

#include "kernels/base/check.h"

static bool has_loss(ForwardMode mode) {
    return mode == FORWARD_TRAIN || mode == FORWARD_EVAL;
}

static const Chunk *chunk_of(const Passage *p) {
    return &p->a->shape.part.chunk[p->chunk];
}

/* Main layers. */
static int n_main(const Passage *p) {
    return chunk_of(p)->end - chunk_of(p)->first;
}

static const Batch *batch_of(const Passage *p) {
    return &p->model->batch[p->a->batch];
}

Passage passage_of(Model *m, Acts *a, int chunk, ForwardMode mode) {
    Passage p;
    memset(&p, 0, sizeof p);
    p.model = m;
    p.a = a;
    p.chunk = chunk;
    p.mode = mode;
    p.n_blocks = has_loss(mode) ? shape_chunk_blocks(&a->shape, chunk) : n_main(&p); /* MTP is for training */
    p.last = STREAM_COMPUTE;
    p.event = EVENT_PASSAGE;
    return p;
}

static Layer layer_of(const Passage *p, int i) {
    Model *m = p->model;
    const int block = shape_chunk_block(&p->a->shape, p->chunk, i);
    Layer l;
    memset(&l, 0, sizeof l);
    l.device = m->device;
    l.comm = m->comm;
    l.shape = &p->a->shape;
    l.w = &m->params.blocks[block];
    l.a = &p->a->blocks[block];
    l.batch = batch_of(p);
    l.inv_freq = m->inv_freq;
    l.params = m->step_params;
    l.stats = p->mode == FORWARD_TRAIN ? m->stats : m->eval_stats;
    l.cache = decode_cache(m, p->a, block, p->mode);
    l.dout = l.a->dout;
    l.is_moe = shape_block_is_moe(l.shape, block);
    l.keeps = p->a->training;
    l.count = p->mode == FORWARD_TRAIN;
    if (m->observes && l.count) l.observed = m->record.fp8 + (int64_t)block * OBSERVED_COUNT;
    return l;
}

/* ---- streams ----------------------------------------------------------------------------------------------------- */

/* What follows on `stream` waits for the phase before, if that ran on another. */
static void begin_on(Passage *p, Stream stream) {
    const Device *d = p->model->device;
    if (stream == p->last) return;
    if (p->last == STREAM_COMPUTE) op_event_record(d, p->event, STREAM_COMPUTE);
    op_event_wait(d, p->event, stream);
    p->last = stream;
}

/* A transfer is recorded where it stands: behind it may come another's, for which nobody here has to wait. */
static void end_on(const Passage *p, Stream stream) {
    if (stream != STREAM_COMPUTE) op_event_record(p->model->device, p->event, stream);
}

/* On one expert rank nothing travels: the phases between copy nothing, or what is computed. */
static Stream stream_of(const Passage *p, const Layer *l, Phase phase) {
    const bool travels = phase == PHASE_DISPATCH || phase == PHASE_COMBINE;
    return travels && l->is_moe && p->a->shape.R > 1 ? STREAM_COMM : STREAM_COMPUTE;
}

/* ---- seams ------------------------------------------------------------------------------------------------------- */

static const Weight *final_norm(const Passage *p, int depth) {
    const Params *params = &p->model->params;
    return depth == 0 ? &params->top.weight[WEIGHT_FINAL_NORM]
                      : &params->blocks[p->a->shape.L + depth - 1].weight[WEIGHT_MTP_NORM];
}

static void enter(Passage *p, Tensor x) {
    p->residual = x;
    p->branch = tensor_none();
}

/* The stage hands on one tensor: the sum of the pair. */
static void hand_on(Passage *p) {
    const Tensor none = tensor_none();
    op_residual_rmsnorm_forward(p->model->device, p->out, none, none, none, p->residual, p->branch, none,
                                p->a->shape.eps, STREAM_COMPUTE);
}

static void depth_end_forward(Passage *p, int depth) {
    Acts *a = p->a;
    op_residual_rmsnorm_forward(p->model->device, a->depth[depth].x_final, a->depth[depth].hidden, tensor_none(),
                                a->depth[depth].hidden_rstd, p->residual, p->branch, final_norm(p, depth)->w,
                                a->shape.eps, STREAM_COMPUTE);
    if (has_loss(p->mode)) head_forward(p->model, a, depth, p->mode);
}

void passage_seam_forward(Passage *p, int i) {
    const Chunk *c = chunk_of(p);
    Model *m = p->model;
    Acts *a = p->a;
    const int depth = i - n_main(p); /* that ends here, if it is none before the first */
    begin_on(p, STREAM_COMPUTE);
    if (i == 0 && c->embeds)
        op_embed_forward(m->device, a->x0, batch_of(p)->tokens[0], m->params.top.weight[WEIGHT_EMBED].w,
                         STREAM_COMPUTE);
    if (i == 0) enter(p, c->embeds ? a->x0 : p->in);
    if (depth < 0) return;
    if (!c->has_loss) {
        hand_on(p);
        return;
    }
    depth_end_forward(p, depth);
    if (depth == a->shape.n_mtp || !has_loss(p->mode)) return;
    mtp_input_forward(m, a, depth + 1);
    enter(p, a->x0);
}

/* Where the gradient of block i's input goes: to the block before, or to a seam that has more to do. */
static Tensor input_gradient(const Passage *p, int i) {
    const ModelShape *s = &p->a->shape;
    if (i > 0 && i < n_main(p)) return p->a->blocks[shape_chunk_block(s, p->chunk, i - 1)].dout;
    return i == 0 && n_main(p) > 0 && !chunk_of(p)->embeds ? p->dx : p->a->dout[1];
}

/* The gradient of what block i-1, or where there is none the stage before, has left. */
static Tensor output_gradient(const Passage *p, int i) {
    if (i > 0) return p->a->blocks[shape_chunk_block(&p->a->shape, p->chunk, i - 1)].dout;
    return chunk_of(p)->embeds ? p->a->dout[1] : p->dx;
}

static void depth_end_backward(Passage *p, int depth, Tensor dout) {
    Acts *a = p->a;
    const Weight *norm = final_norm(p, depth);
    Tensor partial = tensor_2d(a->partial.data, a->partial.dtype, a->partial.shape[0], a->shape.D);
    op_residual_rmsnorm_backward(p->model->device, dout, norm->dw, partial, a->depth[depth].dhidden, tensor_none(),
                                 a->depth[depth].x_final, a->depth[depth].hidden_rstd, norm->w, STREAM_COMPUTE);
}

void passage_seam_backward(Passage *p, int i) {
    const Chunk *c = chunk_of(p);
    Model *m = p->model;
    Acts *a = p->a;
    const int depth = i - n_main(p);
    begin_on(p, STREAM_COMPUTE);
    if (depth >= 0 && c->has_loss) {
        if (depth < a->shape.n_mtp) mtp_input_backward(m, a, depth + 1, a->dout[1]);
        depth_end_backward(p, depth, output_gradient(p, i));
    } else if (depth >= 0) {
        op_copy(m->device, output_gradient(p, i), p->dout, STREAM_COMPUTE);
    }
    if (i == 0 && c->embeds)
        op_embed_backward(m->device, m->params.top.weight[WEIGHT_EMBED].dw, a->dout[1], batch_of(p)->tokens[0],
                          STREAM_COMPUTE);
}

/* ---- phases ------------------------------------------------------------------------------------------------------ */

static void attn_forward(Passage *p, Layer *l, int block) {
    if (p->mode == FORWARD_DECODE)
        layer_attn_decode(l, p->residual, p->branch);
    else
        layer_attn_forward(l, p->residual, p->branch);
    if (p->mode == FORWARD_PREFILL) layer_cache_forward(l);
    decode_keep_routing(p->model, l, block, p->mode);
}

static void phase_forward(Passage *p, Layer *l, int block, Phase phase) {
    Tensor branch = p->a->branch;
    switch (phase) {
    case PHASE_ATTN: attn_forward(p, l, block); return;
    case PHASE_DISPATCH: layer_dispatch_forward(l); return;
    case PHASE_EXPERTS: layer_experts_forward(l, branch); return;
    case PHASE_COMBINE:
        layer_combine_forward(l, branch);
        p->residual = l->a->t[ACT_X1];
        p->branch =
            tensor_3d(branch.data, branch.dtype, layer_branch_planes(l->shape, l->is_moe), l->shape->T, l->shape->D);
        return;
    case PHASE_COUNT: return;
    }
}

static void phase_backward_input(Layer *l, Phase phase, Tensor dx) {
    switch (phase) {
    case PHASE_COMBINE: layer_combine_backward(l); return;
    case PHASE_EXPERTS: layer_experts_backward_input(l); return;
    case PHASE_DISPATCH: layer_dispatch_backward(l); return;
    case PHASE_ATTN: layer_attn_backward_input(l, dx); return;
    case PHASE_COUNT: return;
    }
}

void passage_phase(Passage *p, int i, Phase phase, Pass pass) {
    Layer l = layer_of(p, i);
    if (pass == PASS_BACKWARD_WEIGHT) {
        CHECK(phase == PHASE_EXPERTS || phase == PHASE_ATTN, "phase %d has no weights", phase);
        phase == PHASE_EXPERTS ? layer_experts_backward_weight(&l) : layer_attn_backward_weight(&l);
        return;
    }
    if (pass == PASS_BACKWARD_INPUT && phase == PHASE_COMBINE) layer_backward_begin(&l);
    const Stream stream = stream_of(p, &l, phase);
    begin_on(p, stream);
    if (pass == PASS_FORWARD)
        phase_forward(p, &l, shape_chunk_block(l.shape, p->chunk, i), phase);
    else
        phase_backward_input(&l, phase, input_gradient(p, i));
    end_on(p, stream);
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

void passage_forward(Passage *p) {
    for (int i = 0; i < p->n_blocks; i++) {
        passage_seam_forward(p, i);
        for (int phase = 0; phase < PHASE_COUNT; phase++) passage_phase(p, i, (Phase)phase, PASS_FORWARD);
    }
    passage_seam_forward(p, p->n_blocks);
}

void passage_backward(Passage *p) {
    for (int i = p->n_blocks - 1; i >= 0; i--) {
        passage_seam_backward(p, i + 1);
        passage_phase(p, i, PHASE_COMBINE, PASS_BACKWARD_INPUT);
        passage_phase(p, i, PHASE_EXPERTS, PASS_BACKWARD_INPUT);
        passage_phase(p, i, PHASE_DISPATCH, PASS_BACKWARD_INPUT);
        passage_phase(p, i, PHASE_EXPERTS, PASS_BACKWARD_WEIGHT);
        passage_phase(p, i, PHASE_ATTN, PASS_BACKWARD_INPUT);
        passage_phase(p, i, PHASE_ATTN, PASS_BACKWARD_WEIGHT);
    }
    passage_seam_backward(p, 0);
}
