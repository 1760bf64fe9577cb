/* The model: memory, forward, backward, update. Floor 3.
 *
 * One Model holds the weights and what belongs to a step; one Acts (acts.h) holds a micro-batch. Training, evaluation
 * and generation are the same forward over different Acts. Nothing is allocated after model_init. */
#ifndef TRAIN_MOE_MODEL_H
#define TRAIN_MOE_MODEL_H

#include "data/batch.h"
#include "layer.h"
#include "staging.h"

/* TRAIN leaves d(hidden) and the head's weight gradient, counts routing, adds losses to stats. EVAL adds losses to
 * eval_stats. HIDDEN is the main model alone, without head or loss. PREFILL is HIDDEN, and fills the latent cache from
 * its position 0 on; DECODE is HIDDEN for tokens behind what is cached, and adds them. */
typedef enum { FORWARD_TRAIN, FORWARD_EVAL, FORWARD_HIDDEN, FORWARD_PREFILL, FORWARD_DECODE } ForwardMode;

/* How a forward without gradients goes through layers of which other ranks have some. */
typedef struct {
    void (*forward)(void *arg, Acts *a, ForwardMode mode); /* NULL: this rank has all layers, in one chunk */
    void *arg;
    bool is_last; /* this rank has the last of them */
} Stages;

typedef struct {
    const Config *config;
    const Device *device;
    Comm *comm;
    const RankPart *part; /* set before model_plan, borrowed by it; NULL: the whole model, a micro-batch at a time */
    Stages stages;        /* of the pipeline that is open (parallel/pipeline.h) */
    ModelShape shape;     /* of a training micro-batch */
    Params params;
    Acts train;  /* a micro-batch with its gradients */
    Acts beside; /* RankPart.pairs: a micro-batch that goes forward while `train` goes backward */
    Acts eval;   /* a micro-batch, forward only; shares the training memory */
    /* Generation shares the training memory too, its cache included: a step in between ends a text. (decode.c) */
    int64_t generate_len; /* positions of a text: prompt and new tokens */
    Acts generate;        /* a prompt, forward only */
    Acts decode;          /* the next token */
    Tensor cache;         /* (L, generate_len, Dc + Dr) act: normed kv latent and rotated k_pe of each position */
    int64_t n_cached;     /* positions the cache holds */
    int shown_block;      /* MoE layer whose choices are kept for model_top_expert */
    Tensor shown_ids, shown_weights; /* (generate_len, K) i32, f32: by position */
    Batch *batch;            /* the device's micro-batches: RankPart.n_batches, of which all but training use one */
    Tensor batch_rows;       /* their memory */
    int64_t batch_elements;  /* of one */
    Tensor *boundary;        /* (T, D) each, RankPart.n_boundaries: between stages; with room for generate_len rows */
    StepParams *step_params; /* on the device */
    StepRecord record;       /* what a step leaves for the host */
    bool observes;           /* training: what FP8 tensors hold is counted into it (observe.h) */
    StepStats *stats, *eval_stats; /* stats and update are the record's */
    UpdateState *update;
    Staging staging; /* pinned host memory between the device and us */
    Tensor inv_freq;
    /* memory: what was laid out, and what is behind it */
    Arena keep, slots, scratch;
    Arena host; /* what a device copies from and to; on the host in any case */
} Model;

/* The memory plan without allocating: arenas are counting ones. memory.recompute "auto" becomes the first of its
 * choices (memory.h), added up, with which the plan fits the device; none of them where that is not known. */
void model_plan(Model *m, const Config *c, const Device *d, Comm *comm);
/* The plan of the same model with another configuration; model_free releases it. */
Model model_plan_as(const Model *m, const Config *c);
/* Plans, allocates once, points. Returns -1 with err if the device has not enough memory. Weights are not written yet:
 * model_init_weights or a checkpoint does that. */
int model_init(Model *m, const Config *c, const Device *d, Comm *comm, char *err);
/* Lays the activations out again for `capacity` times the average of expert rows, in memory of their own size: between
 * steps, with nothing under way. All else stays where it is. Returns -1 with err and a hint, and nothing changed, if
 * the plan does not fit the device; with err alone, and no activations, if the device does not give the memory. */
int model_set_capacity(Model *m, double capacity, char *err, char *hint);
void model_init_weights(Model *m);
void model_free(Model *m);

/* The head of a step, asynchronous: StepParams to the device. The memory is the caller's again at once. */
void model_set_params(Model *m, const StepParams *params);
/* And gradients, counts and statistics to zero; those of FP8 tensors where they are counted anew. */
void model_zero(Model *m);
/* A micro-batch to the device, likewise. */
void model_set_batch(Model *m, const ModelShape *shape, const MicroBatch *mb);
/* The same for number i of a step's micro-batches. */
void model_set_batch_at(Model *m, int i, const ModelShape *shape, const MicroBatch *mb);

/* All blocks, all depths, head and loss, of micro-batch 0. Without gradients, through all stages; training takes a rank
 * that holds the whole model (else: passage.h). */
void model_forward(Model *m, Acts *a, ForwardMode mode);
/* Has this rank what comes out of a forward without gradients: hidden states, logits, losses? */
bool model_has_output(const Model *m);
/* Adds every gradient of the sum of losses to the gradient arena. After model_forward(FORWARD_TRAIN). */
void model_backward(Model *m, Acts *a);

/* What of a step's statistics is summed over the ranks: losses by depth, balance, and the word that somewhere expert
 * rows did not fit. f64; a rank leaves what is another's at zero. */
Tensor model_sums(StepStats *stats);
/* Norm, clip, skip rules, AdamW, router biases; these also into the record. (model/update.c) */
void model_update(Model *m);
/* What ops read, from the masters of all ranks: after they were loaded. All ranks call it. Waits for the device. */
void model_cast(Model *m);

/* All calls of a step, an evaluation and a generation, once, with ops that compute nothing (kernels/rehearsal.h): so
 * that a backend sees its shapes before the first step. (model/rehearse.c) */
void model_rehearse(Model *m, const Ops *ops);

/* Logits of position t of the last forward over `a`: V f32 on the host, where the model has output; on other
 * ranks nothing is written. Waits for the device. */
void model_logits(Model *m, Acts *a, int64_t t, float *logits);

/* ---- generation (model/decode.c) ---- */

/* Cache, prompt and next token over the memory of training: one part of the plan. The prompt's activations are as long
 * as n_prompt, at most generate_len. */
void decode_layout(Model *m, int64_t n_prompt, Arena *slots, Arena *scratch);
/* The rows of a layer's cache that a forward of `a` in this mode reads and writes; none in modes without a cache. */
Tensor decode_cache(const Model *m, const Acts *a, int block, ForwardMode mode);
/* Keeps the layer's choices if it is the one shown. */
void decode_keep_routing(Model *m, const Layer *l, int block, ForwardMode mode);

/* One forward over ids[0..n), n <= generate_len, which the cache holds from then on: until a step or an evaluation,
 * which use its memory. The last position's logits, as model_logits. All ranks of a pipeline call it. */
void model_prefill(Model *m, const int32_t *ids, int64_t n, float *logits);
/* The next position, of n_cached < generate_len: one token through all layers. */
void model_decode(Model *m, int32_t id, float *logits);
/* The expert of largest weight that layer shown_block chose for the token at `position` < n_cached; ties to the lower
 * id. -1 if no layer routes. */
int model_top_expert(Model *m, int64_t position);

/* Losses of one depth over a's hidden states. (model/head.c) */
void head_forward(Model *m, Acts *a, int depth, ForwardMode mode);

/* The MTP module around its block (model/mtp.c): x0 of `depth` from the depth before, and the way back. */
void mtp_input_forward(Model *m, Acts *a, int depth);
void mtp_input_backward(Model *m, Acts *a, int depth, Tensor dx0);

#endif
