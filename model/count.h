/* Parameters and FLOPs of a model, by part: one walk over the parameter table. Floor 3.
 *
 * FLOPs of a token, forward and backward, as Megatron counts them (backward is twice forward; what is recomputed does
 * not count):
 *
 *   6 for each weight of every matrix the token passes: K of the E routed experts, the shared ones, the router, the
 *     head once, and once more for every MTP depth; not the embedding it is looked up in, no norm, no router bias;
 *   3 x 2 x H x (Dqk + Dv) x (S + 1) / 2 in every block, MTP's included, for the attention core: causal pairs alone.
 *
 * S is train.seq_len, not max_position_embeddings. Documents packed into a sequence count as one, whatever
 * data.document_mask says: with the mask the core does less, so it is then an upper bound (the core's share is known).
 * Tokens a second count all tokens. */
#ifndef TRAIN_MOE_COUNT_H
#define TRAIN_MOE_COUNT_H

#include "params.h"

typedef enum {
    PART_EMBEDDING,
    PART_HEAD,
    PART_ATTENTION,      /* its projections */
    PART_ATTENTION_CORE, /* no parameters */
    PART_DENSE_MLP,
    PART_ROUTED,
    PART_SHARED,
    PART_ROUTER,
    PART_NORMS,
    PART_MTP_PROJECTION, /* eh_proj; the only part that the main model has not */
    PART_COUNT
} Part;

/* "embedding", "routed_experts" */
const char *part_name(Part part);

typedef struct {
    int64_t params; /* named parameters, of all expert ranks; router biases and padding not counted */
    int64_t active; /* that one token passes */
    double flops;   /* of a token, forward and backward */
} PartCount;

typedef struct {
    PartCount main[PART_COUNT], mtp[PART_COUNT]; /* embedding and head are main's; mtp's head has FLOPs only */
    PartCount main_total, mtp_total;
    int64_t active_with_head; /* of the main model, the embedding not: ParamCount.active */
} ModelCount;

ModelCount count_model(const Params *p);

#endif
