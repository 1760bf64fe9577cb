/* A model walked through with ops that compute nothing: it must ask for what a run asks for. And the ranges that such a
 * walk names for a profiler. */
#include "kernels/rehearsal.h"

#include <stdio.h>
#include <string.h>

#include "kernels/base/file.h"
#include "kernels/cpu/cpu.h"
#include "model_test.h"

enum { CALLS_MAX = 4096, NAMES_LEN = 1 << 16 };

typedef struct {
    GemmKind kind;
    bool accumulate;
    Tensor y, a, b;
} Call;

typedef struct {
    int n;
    Call call[CALLS_MAX];
} Calls;

static Calls rehearsed, computed, *into;
static void (*cpu_gemm_of_table)(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s);

static bool is_same(const Call *x, const Call *y) {
    return x->kind == y->kind && x->accumulate == y->accumulate && memcmp(&x->y, &y->y, sizeof x->y) == 0 &&
           memcmp(&x->a, &y->a, sizeof x->a) == 0 && memcmp(&x->b, &y->b, sizeof x->b) == 0;
}

static void note(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s) {
    Call call;
    (void)s;
    memset(&call, 0, sizeof call);
    call.kind = kind, call.accumulate = accumulate, call.y = y, call.a = a, call.b = b;
    for (int i = 0; i < into->n; i++)
        if (is_same(&into->call[i], &call)) return;
    REQUIRE(into->n < CALLS_MAX, "more than %d GEMMs", CALLS_MAX);
    into->call[into->n++] = call;
}

static void note_and_compute(Tensor y, Tensor a, Tensor b, GemmKind kind, bool accumulate, Stream s) {
    note(y, a, b, kind, accumulate, s);
    cpu_gemm_of_table(y, a, b, kind, accumulate, s);
}

/* All calls of x that y does not have. */
static void expect_within(const char *what, const Calls *x, const Calls *y) {
    for (int i = 0; i < x->n; i++) {
        bool found = false;
        for (int k = 0; k < y->n && !found; k++) found = is_same(&x->call[i], &y->call[k]);
        const Call *c = &x->call[i];
        EXPECT(found, "%s: kind %d (%lld, %lld) over %lld", what, (int)c->kind, (long long)c->y.shape[0],
               (long long)c->y.shape[1], (long long)c->a.shape[1]);
    }
}

TEST(rehearsal_asks_for_the_gemms_of_a_run) {
    for (int i = 0; i < n_model_cases; i++) {
        Fixture f;
        fixture_open(&f, model_cases[i].sets);
        Model *m = &f.model;
        uint64_t before = hash_bytes(m->keep.base, m->keep.size, 0);
        const Device *device = m->device;
        const Ops rehearsal = ops_rehearsal(note);
        ops_check_complete(&rehearsal);
        rehearsed.n = computed.n = 0;
        into = &rehearsed;
        model_rehearse(m, &rehearsal);
        EXPECT(m->device == device && m->comm->device == device, "the device is back");
        EXPECT(hash_bytes(m->keep.base, m->keep.size, 0) == before, "%s: something was computed", model_cases[i].name);

        Ops noting = *ops_cpu();
        cpu_gemm_of_table = noting.gemm;
        noting.gemm = note_and_compute;
        f.device.ops = &noting;
        into = &computed;
        fixture_gradients(&f);
        model_update(m);
        model_set_batch(m, &m->eval.shape, &f.batch);
        model_forward(m, &m->eval, FORWARD_EVAL);
        MicroBatch one;
        float logits[512];
        char err[ERR_LEN];
        REQUIRE(m->shape.V <= 512 && micro_batch_alloc(&one, 1, m->generate_len, m->shape.n_mtp, err) == 0);
        model_set_batch(m, &m->generate.shape, &one);
        model_forward(m, &m->generate, FORWARD_HIDDEN);
        model_logits(m, &m->generate, 0, logits);
        micro_batch_free(&one);

        REQUIRE(computed.n > 10, "%d GEMMs", computed.n);
        expect_within("not rehearsed", &computed, &rehearsed);
        expect_within("not in a run", &rehearsed, &computed);
        fixture_close(&f);
    }
}

static char names[NAMES_LEN];
static int depth;

static void note_range(const char *name) {
    if (!name) {
        depth--;
        return;
    }
    const size_t used = strlen(names);
    snprintf(names + used, sizeof names - used, "%d %s\n", depth++, name);
}

/* Every range ends where it should, phases lie inside forward and backward. */
TEST(ranges_of_a_step) {
    static const char *const expected[] = {"0 forward\n",
                                           "1 attn forward\n",
                                           "1 experts forward\n",
                                           "1 head forward\n",
                                           "1 mtp input forward\n",
                                           "0 backward\n",
                                           "1 combine backward\n",
                                           "1 attn backward input\n",
                                           "1 attn backward weight\n",
                                           "1 experts backward input\n",
                                           "1 experts backward weight\n",
                                           "0 update\n"};
    Fixture f;
    fixture_open(&f, NULL);
    f.device.range = note_range;
    names[0] = 0;
    fixture_gradients(&f);
    model_update(&f.model);
    EXPECT_EQ(depth, 0);
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
        EXPECT(strstr(names, expected[i]), "no %s in %.600s", expected[i], names);
    fixture_close(&f);
}
