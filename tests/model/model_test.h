/* What the tests of the whole model share: small models from JSON, a micro-batch, one step. Both builds use it. */
#ifndef TRAIN_MOE_TESTS_MODEL_TEST_H
#define TRAIN_MOE_TESTS_MODEL_TEST_H

#include "model/model.h"
#include "model/parallel/pipeline.h"
#include "tests/kernels/op_test.h"
#include "tests/test.h"

typedef struct {
    Config config;
    Device device;
    Comm *comm;
    RankPart part; /* in a pipeline */
    bool checks_streams;
    Model model;
    MicroBatch batch;
    StepParams params;
} Fixture;

/* A small model: hidden 24, three layers (the first dense), two heads, eight experts in four groups, top 2, one shared,
 * one MTP depth; two sequences of 16. `sets` are "section.field=value" on top, NULL at the end. Weights are init_std
 * 0.2, so that nothing is nearly linear; router biases are set apart from zero. */
void fixture_open(Fixture *f, const char *const *sets);
/* The same on another backend: then only fixture_batch and fixture_gradients are for it, and its memory is not ours. */
void fixture_open_on(Fixture *f, const char *const *sets, const Ops *ops);
/* The same on all ranks of the job, n_ep of them sharing the experts. */
void fixture_open_ranks(Fixture *f, const char *const *sets, int n_ep);
/* The same as a rank of a pipeline of the job's ranks, or of one, for steps of at most M micro-batches. The order of
 * its streams is checked (check_streams.h). */
void fixture_open_pipeline(Fixture *f, const char *const *sets, int n_pp, int n_ep, ScheduleKind kind, int M);
/* The same as any rank of `mesh`, on a backend and over the Comm of the caller's choice (NULL: comm_self). Nobody
 * watches the ops: they may be captured. */
typedef Comm *MakeComm(const Device *d, Mesh mesh);
void fixture_open_stage(Fixture *f, const char *const *sets, const Ops *ops, Mesh mesh, MakeComm *make,
                        ScheduleKind kind, int M);
void fixture_close(Fixture *f);
/* Experts lie elsewhere, in each block otherwise; those of a group of two stay together. Weights and biases are those
 * that it was opened with. */
void fixture_place_experts(Fixture *f);
/* Sets router biases so far apart that no rounding changes a choice of experts. */
void fixture_fix_routing(Fixture *f);
/* The weight that a named tensor is a part of. */
const Weight *fixture_weight(const Fixture *f, const NamedTensor *t);
/* cosine of the angle between two gradients of one weight */
double fixture_cosine(Tensor a, Tensor b);

/* Random ids. document_length > 0: documents of that many tokens and the document mask. */
void fixture_batch(Fixture *f, int64_t document_length, uint64_t seed);

/* The sum whose gradient backward computes: losses by their scale, and the balance loss. Runs a forward of f->batch. */
double fixture_loss(Fixture *f);
/* Which experts were chosen in the last forward, as a hash. */
uint64_t fixture_routing(Fixture *f);
/* Everything of a step but its update, with the one micro-batch. */
void fixture_gradients(Fixture *f);

/* Sets that make every width one that FP8 takes. */
#define FP8_WIDTHS                                                                                                     \
    "model.hidden_size=128", "model.kv_lora_rank=128", "model.v_head_dim=64", "model.qk_nope_head_dim=16",             \
        "model.qk_rope_head_dim=16", "model.intermediate_size=256", "model.moe_intermediate_size=128",                 \
        "train.seq_len=64", "train.init_std=0.05"

/* The configurations that every whole-model test walks. */
typedef struct {
    const char *name;
    const char *sets[8];
    int64_t document_length;
} ModelCase;
extern const ModelCase model_cases[];
extern const int n_model_cases;

#endif
