/* The executor on one rank: whatever the schedule, a step leaves the bits of micro-batches that go one after the other.
 * Stages of one rank hand over to each other, backwards are split, forwards run beside backwards; several ranks:
 * tests/ranks/test_pipeline.c. */
#include "model/parallel/pipeline.h"

#include <string.h>

#include "model/parallel/overlap.h"
#include "tests/model/model_test.h"

enum { MICROS = 5 };

/* The last two split backwards, overlap, and hand over. */
static const ScheduleKind kinds[] = {SCHEDULE_PAIRED,      SCHEDULE_GPIPE, SCHEDULE_1F1B,
                                     SCHEDULE_INTERLEAVED, SCHEDULE_ZB1P,  SCHEDULE_DUALPIPEV};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

static void begin(Fixture *f) {
    model_set_params(&f->model, &f->params);
    model_zero(&f->model);
}

static void one_after_the_other(Fixture *f, int64_t document_length, int n) {
    begin(f);
    for (int i = 0; i < n; i++) {
        fixture_batch(f, document_length, 1 + (uint64_t)i);
        model_set_batch(&f->model, &f->model.shape, &f->batch);
        model_forward(&f->model, &f->model.train, FORWARD_TRAIN);
        model_backward(&f->model, &f->model.train);
    }
}

static void through_the_pipeline(Fixture *f, Pipeline *p, int64_t document_length, int n) {
    begin(f);
    for (int i = 0; i < n; i++) {
        fixture_batch(f, document_length, 1 + (uint64_t)i);
        model_set_batch_at(&f->model, i, &f->model.shape, &f->batch);
    }
    pipeline_run(p, n);
}

/* Words that are NaN as f32, as double and as two bf16, and far outside as an index. */
static void poison(Arena *a) {
    for (size_t i = 0; i + 4 <= a->size; i += 4) memcpy(a->base + i, &(uint32_t){0x7FFF7FFF}, 4);
}

/* Twice, the second time over memory that holds nothing, and once a shorter step between. */
static void check_kind(Fixture *plain, const char *const *sets, ScheduleKind kind, int64_t document_length,
                       const char *name) {
    Fixture f;
    fixture_open_pipeline(&f, sets, 1, 1, kind, MICROS);
    Model *m = &f.model;
    Pipeline *p = pipeline_open(m, kind);
    for (int n = MICROS, round = 0; round < 3; n = round == 0 ? 2 : MICROS, round++) {
        one_after_the_other(plain, document_length, n);
        poison(&m->slots);
        poison(&m->scratch);
        through_the_pipeline(&f, p, document_length, n);
        EXPECT(t_is_finite(plain->model.params.grad) && t_same_bits(m->params.grad, plain->model.params.grad),
               "%s, %s, %d micro-batches: gradients", name, schedule_name(kind), n);
        EXPECT(memcmp(m->stats->loss_sum, plain->model.stats->loss_sum, sizeof m->stats->loss_sum) == 0,
               "%s, %s: losses", name, schedule_name(kind));
        EXPECT(tensor_numel(m->record.counts) == 0 || t_same_bits(m->record.counts, plain->model.record.counts),
               "%s, %s: counts", name, schedule_name(kind));
    }
    pipeline_close(p);
    fixture_close(&f);
}

static void check_kinds(const char *const *sets, int64_t document_length, const char *name, int n_kinds) {
    Fixture plain;
    fixture_open(&plain, sets);
    for (int k = N_KINDS - n_kinds; k < N_KINDS; k++) check_kind(&plain, sets, kinds[k], document_length, name);
    fixture_close(&plain);
    t_free_all();
}

TEST(pipeline_of_one_rank_leaves_the_bits_of_lone_micro_batches) {
    for (int i = 0; i < n_model_cases; i++)
        check_kinds(model_cases[i].sets, model_cases[i].document_length, model_cases[i].name, N_KINDS);
    check_kinds((const char *const[]){"precision.compute=bf16", NULL}, 0, "bf16", N_KINDS);
}

#ifndef REAL_IS_DOUBLE
/* Transposes are made again from what waits, or wait themselves. */
TEST(pipeline_of_one_rank_in_fp8) {
    static const char *const parts[] = {"precision.fp8.wgrad=fp8", "precision.fp8.wgrad=bf16",
                                        "precision.fp8.dgrad=bf16", "precision.fp8.fprop=bf16"};
    for (int i = 0; i < 4; i++)
        check_kinds((const char *const[]){FP8_WIDTHS, "precision.compute=fp8", "precision.moments=bf16", parts[i],
                                          "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]", NULL},
                    0, parts[i], i == 0 ? 2 : 1);
}
#endif

/* The losses of an evaluation come out of the last stage, whoever holds it. */
TEST(pipeline_evaluates) {
    Fixture plain;
    fixture_open(&plain, NULL);
    model_set_batch(&plain.model, &plain.model.shape, &plain.batch);
    model_forward(&plain.model, &plain.model.eval, FORWARD_EVAL);
    for (int k = 0; k < N_KINDS; k++) {
        Fixture f;
        fixture_open_pipeline(&f, NULL, 1, 1, kinds[k], MICROS);
        Pipeline *p = pipeline_open(&f.model, kinds[k]);
        model_set_batch(&f.model, &f.model.shape, &f.batch);
        model_forward(&f.model, &f.model.eval, FORWARD_EVAL);
        EXPECT(plain.model.eval_stats->loss_sum[1] > 0 &&
                   memcmp(f.model.eval_stats, plain.model.eval_stats, sizeof *f.model.eval_stats) == 0,
               "%s", schedule_name(kinds[k]));
        pipeline_close(p);
        fixture_close(&f);
    }
    fixture_close(&plain);
}

/* A text goes through the stages too: a prompt, then tokens over the cache that each stage has of its layers. */
TEST(pipeline_continues_a_text) {
    enum { PROMPT = 5, NEW = 3 };
    Fixture plain;
    fixture_open(&plain, NULL);
    const int64_t V = plain.model.shape.V;
    REQUIRE(V <= 512, "%lld ids", (long long)V);
    for (int k = 0; k < N_KINDS; k++) {
        Fixture f;
        fixture_open_pipeline(&f, NULL, 1, 1, kinds[k], MICROS);
        Pipeline *p = pipeline_open(&f.model, kinds[k]);
        EXPECT(model_has_output(&f.model), "one rank has the last stage");
        const int32_t ids[PROMPT + NEW] = {1, 7, 3, 3, 9, 2, 11, 5};
        float expected[512], logits[512];
        model_prefill(&plain.model, ids, PROMPT, expected);
        model_prefill(&f.model, ids, PROMPT, logits);
        for (int i = PROMPT;; i++) {
            EXPECT(memcmp(logits, expected, (size_t)V * sizeof *logits) == 0 && logits[0] != logits[1], "%s, token %d",
                   schedule_name(kinds[k]), i);
            if (i == PROMPT + NEW) break;
            model_decode(&plain.model, ids[i], expected);
            model_decode(&f.model, ids[i], logits);
        }
        pipeline_close(p);
        fixture_close(&f);
    }
    fixture_close(&plain);
}

/* ---- the part of a rank ------------------------------------------------------------------------------------------ */

static ModelShape deep_shape(Fixture *f) {
    fixture_open(f, (const char *const[]){"model.num_hidden_layers=31", NULL});
    return f->model.shape;
}

/* Slots are what the schedule says that a rank has under way; a backward has its own while it runs, waiting or not. */
static void check_slots(ScheduleKind kind, int P, int M, const ModelShape *s) {
    char err[ERR_LEN];
    ScheduleShape shape;
    if (schedule_shape(&shape, kind, P, M, err, NULL) != 0) return;
    PipeSchedule schedule = schedule_make(shape);
    for (int r = 0; r < P; r++) {
        RankPart part;
        const SchedulePeak peak = schedule_peak(&schedule, r, NULL);
        REQUIRE(pipeline_part(&part, &shape, r, s, err) == 0, "%s", err);
        EXPECT_EQ(part.n_batches, M);
        EXPECT(part.n_boundaries <= P + 4, "%s, P %d, M %d, rank %d: %d tensors between stages", schedule_name(kind), P,
               M, r, part.n_boundaries);
        for (int c = 0; c < shape.n_chunks; c++) {
            const int *n = part.chunk[c].n_slots, waiting = peak.pending > 0 ? peak.pending_of[c] + 1 : 0;
            EXPECT_EQ(n[SLOT_INPUT], peak.live_of[c]);
            EXPECT(n[SLOT_WEIGHT] >= n[SLOT_INPUT] && n[SLOT_WEIGHT] <= n[SLOT_INPUT] + peak.pending_of[c],
                   "%s, P %d, M %d, rank %d: %d slots for weights", schedule_name(kind), P, M, r, n[SLOT_WEIGHT]);
            EXPECT(n[SLOT_GRADIENT] <= waiting && (n[SLOT_GRADIENT] > 0) == (waiting > 0),
                   "%s, P %d, M %d, rank %d: %d slots for gradients, %d wait", schedule_name(kind), P, M, r,
                   n[SLOT_GRADIENT], peak.pending_of[c]);
        }
    }
    schedule_free(&schedule);
}

TEST(pipeline_has_the_slots_that_its_schedule_fills) {
    Fixture f;
    const ModelShape s = deep_shape(&f);
    for (int kind = 0; kind < SCHEDULE_COUNT; kind++)
        for (int P = 1; P <= 16; P *= 2)
            for (int M = 2 * P; M <= 6 * P; M += 2 * P) check_slots((ScheduleKind)kind, P, M, &s);
    fixture_close(&f);
}

/* Each block is trained by one rank, or by two that hold copies; what a step of fewer micro-batches needs is there. */
TEST(pipeline_parts_make_the_model) {
    Fixture f;
    const ModelShape s = deep_shape(&f);
    for (int kind = SCHEDULE_GPIPE; kind < SCHEDULE_COUNT; kind++) {
        enum { P = 4 };
        char err[ERR_LEN];
        int holders[64] = {0}, n_copies = 0, n_embedding = 0, n_loss = 0;
        ScheduleShape shape, shorter;
        REQUIRE(schedule_shape(&shape, (ScheduleKind)kind, P, 24, err, NULL) == 0 &&
                    schedule_shape(&shorter, (ScheduleKind)kind, P, 8, err, NULL) == 0,
                "%s", err);
        for (int r = 0; r < P; r++) {
            RankPart part, less;
            ModelShape own = s;
            REQUIRE(pipeline_part(&part, &shape, r, &s, err) == 0 && pipeline_part(&less, &shorter, r, &s, err) == 0,
                    "%s", err);
            own.part = part;
            for (int b = 0; b < s.n_blocks; b++) holders[b] += shape_chunk_of(&own, b) >= 0;
            for (int c = 0; c < part.n_chunks; c++)
                for (int k = 0; k < SLOT_KINDS; k++)
                    EXPECT(less.chunk[c].n_slots[k] <= part.chunk[c].n_slots[k], "%s", schedule_name(shape.kind));
            EXPECT(less.n_boundaries <= part.n_boundaries, "%s", schedule_name(shape.kind));
            n_copies += part.is_copy;
            n_embedding += part.embedding;
            n_loss += shape_has_loss(&own);
        }
        const int copies = schedule_copies(shape.kind);
        for (int b = 0; b < s.n_blocks; b++) EXPECT_EQ(holders[b], copies);
        EXPECT_EQ(n_copies, copies == 2 ? P / 2 : 0);
        EXPECT_EQ(n_loss, copies);
        EXPECT_EQ(n_embedding, kind == SCHEDULE_DUALPIPEV ? 1 : 2); /* MTP shares it */
    }
    fixture_close(&f);
}

TEST(pipeline_refuses_more_stages_than_layers) {
    Fixture f;
    RankPart part;
    ScheduleShape shape;
    char err[ERR_LEN];
    fixture_open(&f, NULL);
    REQUIRE(schedule_shape(&shape, SCHEDULE_1F1B, 8, 8, err, NULL) == 0, "%s", err);
    EXPECT(pipeline_part(&part, &shape, 0, &f.model.shape, err) != 0 &&
               strstr(err, "3 layers are too few for 8 stages"),
           "%s", err);
    fixture_close(&f);
}
