/* What expert parallelism sends over which link. Pure. Floor 5.
 *
 * A token goes once to each node that has experts of its choice, to the GPU with its own place in that node, and from
 * there over NVLink to the others that need it (V3 3.2.2); sums come back the same way. Ranks of an expert group are
 * neighbours, so R of them fill R / gpus_per_node nodes. Routing is taken as even; where the groups of group-limited
 * routing are the nodes, topk_group of them are the most that a token sees. */
#ifndef TRAIN_MOE_EXCHANGE_H
#define TRAIN_MOE_EXCHANGE_H

#include "model/parallel/overlap.h"
#include "model/shape.h"
#include "rates.h"

/* Of one GPU. */
typedef struct {
    double nvlink, ib;
} LinkBytes;

/* What travels, of a micro-batch in a layer. In FP8 rows are tiles with their scales, where both GEMMs that read them
 * multiply such (Fp8Parts.inputs, .gradients). */
typedef enum {
    TOKENS_OUT,     /* dispatch: rows, ids, weights */
    SUMS_BACK,      /* combine: BF16 or f32 */
    GRADIENTS_OUT,  /* combine's backward: rows */
    GRADIENTS_BACK, /* dispatch's: sums, and the weights' gradients */
    TRAVELS
} Travel;

typedef struct {
    double ranks, nodes; /* that have experts of a token, on average, its own among them */
    LinkBytes bytes[TRAVELS];
    double seconds[TRAVELS]; /* on the slower of the two links, which run at once */
} Exchange;

/* Nothing where R = 1. */
Exchange exchange_of(const ModelShape *s, const GpuRates *r);
/* What a launch of dispatch or combine, forward or backward, sends. */
Travel exchange_travel(Phase phase, Pass pass);

/* Seconds of bytes over both links at once. */
double link_seconds(LinkBytes bytes, const GpuRates *r);
/* What each of n ranks sends when `bytes` of every one are summed and scattered, or gathered: nodes inside first.
 * `in_node` of them share a node. */
LinkBytes link_bytes_of_group(double bytes, int64_t n, int64_t in_node);

#endif
