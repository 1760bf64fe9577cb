/* See observe.h. */
#include "observe.h"

#define TILES(name, id, phase)                                                                                         \
    { name, phase, id, WEIGHT_COUNT, false }
#define EXPERT_TILES(name, id, phase)                                                                                  \
    { name, phase, id, WEIGHT_COUNT, true }
#define BLOCKS(name, id)                                                                                               \
    { name, IN_ATTN, ACT_COUNT, id, false }

static const struct {
    const char *name;
    int phase;       /* behind which it is there */
    ActId tiles;     /* ACT_COUNT: a weight */
    WeightId weight; /* WEIGHT_COUNT: tiles */
    bool is_of_experts;
} table[OBSERVED_COUNT] = {
    TILES("xn", ACT_XN_Q, IN_ATTN),
    TILES("cq", ACT_CQ_Q, IN_ATTN),
    TILES("ckv", ACT_CKV_Q, IN_ATTN),
    TILES("o", ACT_O_Q, IN_ATTN),
    TILES("u", ACT_U_Q, IN_ATTN),
    EXPERT_TILES("xg", ACT_XG_Q, IN_EXPERTS),
    EXPERT_TILES("h", ACT_H_Q, IN_EXPERTS),
    EXPERT_TILES("a", ACT_A_Q, IN_EXPERTS),
    TILES("hs", ACT_HS_Q, IN_EXPERTS),
    TILES("as", ACT_AS_Q, IN_EXPERTS),
    TILES("dout", ACT_DOUT_Q, IN_EXPERTS_BACK),
    EXPERT_TILES("dyg", ACT_DYG_Q, IN_EXPERTS_BACK),
    EXPERT_TILES("dh", ACT_DH_Q, IN_EXPERTS_BACK),
    TILES("dhs", ACT_DHS_Q, IN_EXPERTS_BACK),
    TILES("dx1", ACT_DX1_Q, IN_ATTN_BACK),
    TILES("dq", ACT_DQ_Q, IN_ATTN_BACK),
    TILES("dkv", ACT_DKV_Q, IN_ATTN_BACK),
    TILES("dqkv_a", ACT_DQKV_A_Q, IN_ATTN_BACK),
    BLOCKS("w_qkv_a", WEIGHT_QKV_A),
    BLOCKS("w_q_b", WEIGHT_Q_B),
    BLOCKS("w_kv_b", WEIGHT_KV_B),
    BLOCKS("w_o", WEIGHT_O),
    BLOCKS("w_gate_up", WEIGHT_GATE_UP),
    BLOCKS("w_down", WEIGHT_DOWN),
    BLOCKS("w_expert_gate_up", WEIGHT_EXPERT_GATE_UP),
    BLOCKS("w_expert_down", WEIGHT_EXPERT_DOWN),
};

const char *observed_name(int i) {
    return table[i].name;
}

static Tensor observed_tensor(const Layer *l, int i) {
    if (table[i].tiles == ACT_COUNT) return l->w->weight[table[i].weight].w;
    return table[i].is_of_experts ? expert_rows(l, table[i].tiles) : l->a->t[table[i].tiles];
}

void layer_observe(Layer *l, int phase) {
    if (!l->observed) return;
    for (int i = 0; i < OBSERVED_COUNT; i++) {
        if (table[i].phase != phase) continue;
        const Tensor x = observed_tensor(l, i);
        if (x.dtype == DTYPE_E4M3) op_tile_stats(l->device, &l->observed[i], x, STREAM_COMPUTE);
    }
}
