/* See count.h. */
#include "count.h"

#include <string.h>

static const char *const part_names[PART_COUNT] = {
    [PART_EMBEDDING] = "embedding",           [PART_HEAD] = "head",           [PART_ATTENTION] = "attention",
    [PART_ATTENTION_CORE] = "attention_core", [PART_DENSE_MLP] = "dense_mlp", [PART_ROUTED] = "routed_experts",
    [PART_SHARED] = "shared_experts",         [PART_ROUTER] = "router",       [PART_NORMS] = "norms",
    [PART_MTP_PROJECTION] = "mtp_projection",
};

const char *part_name(Part part) {
    return part_names[part];
}

static Part part_of(const NamedTensor *t, const ModelShape *s) {
    switch (t->weight) {
    case WEIGHT_EMBED: return PART_EMBEDDING;
    case WEIGHT_HEAD: return PART_HEAD;
    case WEIGHT_QKV_A:
    case WEIGHT_Q_B:
    case WEIGHT_KV_B:
    case WEIGHT_O: return PART_ATTENTION;
    case WEIGHT_GATE_UP:
    case WEIGHT_DOWN: return shape_block_is_moe(s, t->block) ? PART_SHARED : PART_DENSE_MLP;
    case WEIGHT_ROUTER:
    case WEIGHT_ROUTER_BIAS: return PART_ROUTER;
    case WEIGHT_EXPERT_GATE_UP:
    case WEIGHT_EXPERT_DOWN: return PART_ROUTED;
    case WEIGHT_EH_PROJ: return PART_MTP_PROJECTION;
    default: return PART_NORMS;
    }
}

static PartCount total_of(const PartCount *parts) {
    PartCount total = {0, 0, 0};
    for (int i = 0; i < PART_COUNT; i++) {
        total.params += parts[i].params;
        total.active += parts[i].active;
        total.flops += parts[i].flops;
    }
    return total;
}

ModelCount count_model(const Params *p) {
    const ModelShape *s = &p->shape;
    ModelCount c;
    memset(&c, 0, sizeof c);
    for (int64_t i = 0; i < p->n_named; i++) {
        const NamedTensor *t = &p->named[i];
        if (t->optimizer == OPTIMIZER_NONE) continue;
        const Part part = part_of(t, s);
        PartCount *at = t->block >= s->L ? &c.mtp[part] : &c.main[part];
        at->params += t->expert >= 0 ? t->numel * s->R : t->numel;
    }
    for (int i = 0; i < 2 * PART_COUNT; i++) {
        PartCount *at = i < PART_COUNT ? &c.main[i] : &c.mtp[i - PART_COUNT];
        const Part part = (Part)(i % PART_COUNT);
        at->active = at->params;
        if (part == PART_ROUTED) at->active = at->params / s->router.n_experts * s->router.n_chosen;
        if (part != PART_EMBEDDING && part != PART_NORMS) at->flops = 6.0 * (double)at->active;
    }
    const AttentionShape *a = &s->attention;
    const double core = 3.0 * 2 * a->n_heads * (double)(a->nope + a->rope + a->value) * ((double)s->S + 1) / 2;
    c.main[PART_ATTENTION_CORE].flops = core * s->L;
    c.mtp[PART_ATTENTION_CORE].flops = core * s->n_mtp;
    c.mtp[PART_HEAD].flops = c.main[PART_HEAD].flops * s->n_mtp;
    c.main_total = total_of(c.main);
    c.mtp_total = total_of(c.mtp);
    c.active_with_head = c.main_total.active - c.main[PART_EMBEDDING].active;
    return c;
}
