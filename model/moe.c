/* Phases dispatch, experts, combine: the routed experts, the shared experts, or the dense MLP. (V3 eq. 12)
 *
 *   y = shared(u) + sum over the K chosen of  w_k W_down( silu(W_gate u) * (W_up u) )
 *
 * The routing weight is applied at the SwiGLU output, before W_down: the same number, and combine is a plain sum. Rows
 * of each local expert start at a multiple of GROUP_ALIGN, ordered by received token; padding rows are zero. On one
 * expert rank the exchange is the identity, so what would be sent is computed in the place where it would arrive. */
#include "observe.h"

/* Plane of the branch, and of u's gradient, where the routed part starts: behind the MLP that every token passes. */
static int routed_plane(const ModelShape *s) {
    return s->F_shared > 0 ? 1 : 0;
}

int layer_branch_planes(const ModelShape *s, bool is_moe) {
    return is_moe ? routed_plane(s) + s->R : 1;
}

static Tensor branch_of(const ModelShape *s, bool is_moe, Tensor branch) {
    return tensor_3d(branch.data, branch.dtype, layer_branch_planes(s, is_moe), s->T, s->D);
}

/* Planes [first, first + R) of a (J, T, D) tensor. */
static Tensor rank_planes(const ModelShape *s, Tensor t) {
    Tensor first = tensor_plane(t, routed_plane(s));
    return tensor_3d(first.data, first.dtype, s->R, s->T, s->D);
}

static MoeMap map_of(const Layer *l) {
    const Tensor *t = l->a->t;
    const Tensor overflow = tensor_1d(&l->stats->overflow, DTYPE_F64, 1);
    MoeMap map = {t[ACT_ROW_TOKEN], t[ACT_ROW_WEIGHT], t[ACT_TOKEN_ROW], t[ACT_EXPERT_START], overflow};
    return map;
}

static DispatchPlan plan_of(const Layer *l) {
    DispatchPlan plan = {l->a->t[ACT_RECEIVED_IDS], l->a->t[ACT_RECEIVED_WEIGHTS], l->w->slot_of_expert};
    return plan;
}

Tensor expert_rows(const Layer *l, ActId id) {
    Tensor t = l->a->t[id], start = l->a->t[ACT_EXPERT_START];
    t.n_rows = start.data ? (const int32_t *)start.data + l->shape->n_local : NULL;
    return t;
}

/* The tokens received here: u itself on one expert rank. */
static Tensor received(Layer *l) {
    if (l->shape->R == 1) act(l, act_input_id(l->shape, ACT_U));
    return l->a->t[ACT_RECEIVED];
}

/* The gradient of the layer's output, for GEMMs over its rows: made by layer_backward_begin. */
static Tensor dout_rows(const Layer *l) {
    return l->shape->fp8_parts.dgrad ? l->a->t[ACT_DOUT_Q] : l->dout;
}

/* As it travels to the experts. */
static Tensor dout_sent(const Layer *l) {
    return l->shape->fp8_parts.gradients ? l->a->t[ACT_DOUT_Q] : l->dout;
}

static Tensor dreceived(const Layer *l) {
    if (l->shape->R == 1) return dout_sent(l);
    return l->a->t[l->shape->fp8_parts.gradients ? ACT_DRECEIVED_Q : ACT_DRECEIVED];
}

/* ---- SwiGLU ------------------------------------------------------------------------------------------------------ */

/* a = w silu(gate) up for the GEMM behind it, and what backward finds of h = [gate | up]: its tiles; or h itself, with
 * the digits of those tiles where they are asked for. */
static void swiglu_forward(Layer *l, ActId a, ActId h_id, Tensor h, Tensor weight) {
    const Fp8Parts *fp8 = &l->shape->fp8_parts;
    const Tensor y = l->a->t[act_rows_id(l->shape, a)], none = tensor_none();
    const Tensor kept = l->keeps ? act_tiles(l->a, h_id).rows : none;
    if (fp8->fprop)
        op_swiglu_forward(l->device, none, y, kept, h, weight, STREAM_COMPUTE);
    else
        op_swiglu_forward(l->device, y, none, none, h, weight, STREAM_COMPUTE);
    if (fp8->swiglu || tensor_is_none(kept)) return;
    if (!fp8->fprop) layer_quantize(l, (Quantized){kept, none}, h);
    op_copy(l->device, l->a->t[h_id], kept, STREAM_COMPUTE);
}

/* dh, in the forms that its GEMMs read, and a for the gradient of the weight behind it. h and dh bound the rows. */
static void swiglu_backward(Layer *l, ActId dh_id, ActId a, Tensor dweight, Tensor dh, Tensor dy, Tensor h,
                            Tensor weight) {
    const Quantized none = quantized_none(), dhq = act_tiles(l->a, dh_id);
    Tensor a_columns = act_tiles(l->a, a).columns;
    if (l->shape->fp8_parts.swiglu) {
        op_swiglu_backward(l->device, tensor_none(), dhq, a_columns, dweight, dy, h, weight, STREAM_COMPUTE);
        return;
    }
    op_swiglu_backward(l->device, dh, none, tensor_none(), dweight, dy, h, weight, STREAM_COMPUTE);
    layer_quantize(l, dhq, dh);
    if (tensor_is_none(a_columns)) return;
    Tensor y = act(l, a);
    y.n_rows = h.n_rows;
    layer_quantize(l, (Quantized){tensor_none(), a_columns}, y);
}

/* ---- made again in backward -------------------------------------------------------------------------------------- */

void remake_xg(Layer *l) {
    op_gather_rows(l->device, l->a->t[ACT_XG], tensor_none(), received(l), map_of(l), STREAM_COMPUTE);
}

void remake_xg_t(Layer *l) {
    const Tensor xg_t = l->a->t[ACT_XG_T];
    const bool is_kept = (l->shape->recompute & RECOMPUTE_EXPERT_ROWS) == 0;
    if (l->shape->fp8_parts.inputs && !is_kept) {
        op_gather_rows(l->device, tensor_none(), xg_t, received(l), map_of(l), STREAM_COMPUTE);
        return;
    }
    const ActId xg = act_input_id(l->shape, ACT_XG);
    act(l, xg);
    layer_quantize(l, (Quantized){tensor_none(), xg_t}, expert_rows(l, xg));
}

/* All forms at once. */
void remake_dyg(Layer *l) {
    const Quantized q = act_tiles(l->a, ACT_DYG);
    l->a->remade[ACT_DYG] = l->a->remade[ACT_DYG_Q] = true;
    if (l->shape->fp8_parts.gradients) {
        op_gather_rows(l->device, q.rows, q.columns, dreceived(l), map_of(l), STREAM_COMPUTE);
        return;
    }
    op_gather_rows(l->device, l->a->t[ACT_DYG], tensor_none(), dreceived(l), map_of(l), STREAM_COMPUTE);
    layer_quantize(l, q, expert_rows(l, ACT_DYG));
}

void remake_a(Layer *l) {
    op_swiglu_forward(l->device, l->a->t[ACT_A], tensor_none(), tensor_none(), expert_rows(l, ACT_H),
                      l->a->t[ACT_ROW_WEIGHT], STREAM_COMPUTE);
}

void remake_as(Layer *l) {
    op_swiglu_forward(l->device, l->a->t[ACT_AS], tensor_none(), tensor_none(), l->a->t[ACT_HS], tensor_none(),
                      STREAM_COMPUTE);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

void layer_dispatch_forward(Layer *l) {
    RANGE(l->device, "dispatch forward");
    if (!l->is_moe) return;
    Tensor *t = l->a->t;
    l->comm->dispatch(l->comm, t[ACT_RECEIVED], plan_of(l), t[act_input_id(l->shape, ACT_U)], t[ACT_IDS],
                      t[ACT_WEIGHTS], STREAM_COMM);
}

/* The dense MLP, or the shared experts as one MLP. */
static void mlp_forward(Layer *l, Tensor y) {
    Tensor *t = l->a->t;
    op_gemm(l->device, t[ACT_HS], t[act_rows_id(l->shape, ACT_U)], weight_fprop(l, WEIGHT_GATE_UP), GEMM_FPROP, false,
            STREAM_COMPUTE);
    swiglu_forward(l, ACT_AS, ACT_HS, t[ACT_HS], tensor_none());
    op_gemm(l->device, y, t[act_rows_id(l->shape, ACT_AS)], weight_fprop(l, WEIGHT_DOWN), GEMM_FPROP, false,
            STREAM_COMPUTE);
}

static void routed_forward(Layer *l, Tensor y) {
    Tensor *t = l->a->t, start = t[ACT_EXPERT_START];
    op_moe_map(l->device, map_of(l), t[ACT_RECEIVED_IDS], t[ACT_RECEIVED_WEIGHTS], l->w->slot_of_expert,
               l->shape->first_slot, STREAM_COMPUTE);
    const Tensor xg = t[act_rows_id(l->shape, ACT_XG)];
    op_gather_rows(l->device, t[act_input_id(l->shape, ACT_XG)], tensor_none(), t[ACT_RECEIVED], map_of(l),
                   STREAM_COMPUTE);
    if (!l->shape->fp8_parts.inputs) layer_quantize(l, (Quantized){t[ACT_XG_Q], tensor_none()}, expert_rows(l, ACT_XG));
    op_grouped_gemm(l->device, t[ACT_H], xg, weight_fprop(l, WEIGHT_EXPERT_GATE_UP), start, GEMM_FPROP, STREAM_COMPUTE);
    swiglu_forward(l, ACT_A, ACT_H, expert_rows(l, ACT_H), t[ACT_ROW_WEIGHT]);
    op_grouped_gemm(l->device, t[ACT_Y], t[act_rows_id(l->shape, ACT_A)], weight_fprop(l, WEIGHT_EXPERT_DOWN), start,
                    GEMM_FPROP, STREAM_COMPUTE);
    op_reduce_rows(l->device, y, t[ACT_Y], map_of(l), false, STREAM_COMPUTE);
}

void layer_experts_forward(Layer *l, Tensor branch) {
    RANGE(l->device, "experts forward");
    const ModelShape *s = l->shape;
    branch = branch_of(s, l->is_moe, branch);
    if (!l->is_moe || s->F_shared > 0) mlp_forward(l, tensor_plane(branch, 0));
    if (l->is_moe) routed_forward(l, s->R > 1 ? l->a->t[ACT_ROUTED] : tensor_plane(branch, routed_plane(s)));
    layer_observe(l, IN_EXPERTS);
}

void layer_combine_forward(Layer *l, Tensor branch) {
    RANGE(l->device, "combine forward");
    if (!l->is_moe) return;
    const ModelShape *s = l->shape;
    Tensor planes = rank_planes(s, branch_of(s, true, branch));
    Tensor sums = s->R > 1 ? l->a->t[ACT_ROUTED] : tensor_plane(planes, 0);
    l->comm->combine(l->comm, planes, tensor_none(), sums, tensor_none(), plan_of(l), STREAM_COMM);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* The gradient of every branch row is that of the sum: combine's backward is a dispatch of dout. */
void layer_combine_backward(Layer *l) {
    RANGE(l->device, "combine backward");
    if (!l->is_moe) return;
    l->comm->dispatch(l->comm, dreceived(l), plan_of(l), dout_sent(l), l->a->t[ACT_IDS], tensor_none(), STREAM_COMM);
}

static void mlp_backward_input(Layer *l, Tensor du) {
    Tensor *t = l->a->t;
    op_gemm(l->device, t[ACT_DAS], dout_rows(l), weight_dgrad(l, WEIGHT_DOWN), GEMM_DGRAD, false, STREAM_COMPUTE);
    swiglu_backward(l, ACT_DHS, ACT_AS, tensor_none(), t[ACT_DHS], t[ACT_DAS], t[act_rows_id(l->shape, ACT_HS)],
                    tensor_none());
    op_gemm(l->device, du, t[act_rows_id(l->shape, ACT_DHS)], weight_dgrad(l, WEIGHT_GATE_UP), GEMM_DGRAD, false,
            STREAM_COMPUTE);
}

static void routed_backward_input(Layer *l, Tensor du, Tensor dweights) {
    Tensor *t = l->a->t, start = t[ACT_EXPERT_START];
    op_grouped_gemm(l->device, t[ACT_DA], act_rows(l, ACT_DYG), weight_dgrad(l, WEIGHT_EXPERT_DOWN), start, GEMM_DGRAD,
                    STREAM_COMPUTE);
    swiglu_backward(l, ACT_DH, ACT_A, t[ACT_DROW_WEIGHT], expert_rows(l, ACT_DH), t[ACT_DA],
                    expert_rows(l, act_rows_id(l->shape, ACT_H)), t[ACT_ROW_WEIGHT]);
    op_grouped_gemm(l->device, t[ACT_DXG], t[act_rows_id(l->shape, ACT_DH)], weight_dgrad(l, WEIGHT_EXPERT_GATE_UP),
                    start, GEMM_DGRAD, STREAM_COMPUTE);
    op_reduce_rows(l->device, du, t[ACT_DXG], map_of(l), false, STREAM_COMPUTE);
    op_unmap_weights(l->device, dweights, t[ACT_DROW_WEIGHT], map_of(l), STREAM_COMPUTE);
}

void layer_experts_backward_input(Layer *l) {
    RANGE(l->device, "experts backward input");
    const ModelShape *s = l->shape;
    Tensor *t = l->a->t;
    if (!l->is_moe || s->F_shared > 0) mlp_backward_input(l, tensor_plane(t[ACT_DU], 0));
    if (l->is_moe && s->R > 1)
        routed_backward_input(l, t[ACT_DROUTED], t[ACT_DRECEIVED_WEIGHTS]);
    else if (l->is_moe)
        routed_backward_input(l, tensor_plane(t[ACT_DU], routed_plane(s)), t[ACT_DWEIGHTS]);
    layer_observe(l, IN_EXPERTS_BACK);
}

void layer_dispatch_backward(Layer *l) {
    RANGE(l->device, "dispatch backward");
    if (!l->is_moe) return;
    const ModelShape *s = l->shape;
    Tensor *t = l->a->t, planes = rank_planes(s, t[ACT_DU]);
    Tensor sums = s->R > 1 ? t[ACT_DROUTED] : tensor_plane(planes, 0);
    Tensor dweights = s->R > 1 ? t[ACT_DRECEIVED_WEIGHTS] : t[ACT_DWEIGHTS];
    l->comm->combine(l->comm, planes, t[ACT_DWEIGHTS], sums, dweights, plan_of(l), STREAM_COMM);
}

void layer_experts_backward_weight(Layer *l) {
    RANGE(l->device, "experts backward weight");
    const Device *d = l->device;
    const Weight *w = l->w->weight;
    Tensor *t = l->a->t, start = t[ACT_EXPERT_START];
    if (!l->is_moe || l->shape->F_shared > 0) {
        Tensor dout = l->shape->fp8_parts.wgrad ? t[ACT_DOUT_T] : l->dout;
        op_gemm(d, w[WEIGHT_GATE_UP].dw, act_columns(l, ACT_DHS), act_columns(l, ACT_U), GEMM_WGRAD, true,
                STREAM_COMPUTE);
        op_gemm(d, w[WEIGHT_DOWN].dw, dout, act_columns(l, ACT_AS), GEMM_WGRAD, true, STREAM_COMPUTE);
    }
    if (!l->is_moe) return;
    op_grouped_wgrad(d, w[WEIGHT_EXPERT_GATE_UP].dw, act_columns(l, ACT_DH), act_columns(l, ACT_XG), start,
                     STREAM_COMPUTE);
    op_grouped_wgrad(d, w[WEIGHT_EXPERT_DOWN].dw, act_columns(l, ACT_DYG), act_columns(l, ACT_A), start,
                     STREAM_COMPUTE);
}
