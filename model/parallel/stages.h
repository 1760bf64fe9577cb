/* Which layers a pipeline stage holds. Pure. Floor 4.
 *
 * Stages are runs of neighbouring main layers. The first stage also embeds; the last one has the final norm, the head,
 * the loss and all MTP depths, which read the state that the final norm gives. As many main layers as balance asks for
 * go beside them, none included; every other stage has at least one. A stage may have dense layers only.
 *
 * MTP shares embedding and head with the main model, weights and gradients. The head is where MTP is. The embedding is
 * on the rank of the first stage, and with MTP on that of the last: the same rank in dualpipe (ranks 0 and P-1 hold
 * both stages, one for each direction) and dualpipev (rank 0), as V3 has it; else two ranks hold equal copies and sum
 * their gradients (GROUP_EMBED). */
#ifndef TRAIN_MOE_STAGES_H
#define TRAIN_MOE_STAGES_H

#include "model/shape.h"
#include "schedule.h"

typedef struct {
    int first, end; /* main layers [first, end) */
    double flops;   /* of a token, forward and backward, with what the first and the last stage have beside layers */
} Stage;

/* Cuts L layers of the given cost into n_stages runs so that the largest stage is as small as it can be; of all such
 * cuts the one with the least sum of squares, then the one with fewer layers at the end. `last_flops` is what the last
 * stage has beside layers. Returns 0, or -1 with err if there are fewer than n_stages - 1 layers. */
int stages_balance(Stage *stages, int n_stages, const double *layer_flops, int L, double last_flops, char *err);

/* The same for a model, by the FLOPs of its blocks. (shape_block_flops) */
int stages_of_model(Stage *stages, int n_stages, const ModelShape *s, char *err);

/* Times of the stages in units of their mean, as schedule_simulate takes them; returns the largest. */
double stages_scale(double *scale, const Stage *stages, int n_stages);

/* What a rank holds beside layers; tensors that several ranks of a pipeline hold have their gradients summed. */
typedef struct {
    bool embeds;    /* has the first stage: takes tokens in */
    bool has_loss;  /* has the last stage: final norm, head, MTP depths; takes targets */
    bool embedding; /* holds the embedding: embeds, or has the loss of a model with MTP */
} RankTop;
RankTop stages_rank_top(const ScheduleShape *schedule, int rank, int n_mtp);

#endif
