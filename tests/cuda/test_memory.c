/* The memory plan against what the GPU says. The GPU must be otherwise empty, or at least not change hands meanwhile:
 * bytes of other processes are taken off as they were when this one came. */
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "model/memory.h"
#include "model/train/device.h"
#include "model/train/part.h"
#include "model/train/step.h"
#include "tests/test.h"

enum { STEPS = 3 };

static void print_rows(const DeviceMemory *d, const char *when) {
    for (int i = 0; i < MEMORY_ROWS; i++)
        printf("%s %-20s %8.1f MiB\n", when, memory_row_name[i], (double)d->row[i] / (1 << 20));
}

/* Trains a few steps, so that every kernel has run and every library has loaded what it needs. */
static void train(Model *m, const Config *c) {
    char err[ERR_LEN], hint[ERR_LEN];
    Loader *loader;
    LoaderSpec spec;
    Trainer t;
    StepReport report;
    REQUIRE(loader_spec_train(&spec, c, 1, err, hint) == 0 && loader_open(&loader, &spec, err, hint) == 0, "%s", err);
    REQUIRE(trainer_init(&t, c, m, loader, err) == 0, "%s", err);
    for (int i = 0; i < STEPS; i++) {
        REQUIRE(train_step(&t, err) == 0, "%s", err);
        while (train_flush(&t, &report)) continue;
    }
    trainer_free(&t);
    loader_close(loader);
}

static void check_plan(const char *schedule, const char *micro_batch) {
    const char *sets[] = {"run.device=cuda",
                          "data.train=synthetic",
                          "data.val=[]",
                          "train.global_batch_size=16",
                          "precision.compute=bf16",
                          "memory.recompute=none",
                          "data.tokenizer=",
                          "eval.every_steps=0",
                          "sample.every_steps=0",
                          schedule,
                          micro_batch};
    char err[ERR_LEN], hint[ERR_LEN], text[DEVICE_TEXT_LEN];
    Config c;
    Device d;
    Model m;
    RankPart part;
    DeviceMemory now, expected;
    REQUIRE(config_load(&c, "configs/moe_150m.json", sets, sizeof sets / sizeof *sets, err, hint) == 0, "%s (%s)", err,
            hint);
    device_open(&d, &c, text);
    Comm *comm = comm_self(&d);
    device_memory_expected(&expected);
    print_rows(&expected, "expected");
    print_rows(&d.memory, "measured");
    printf("held at start %.1f MiB, free %.1f of %.1f MiB\n", (double)d.memory.held / (1 << 20),
           (double)d.memory.free / (1 << 20), (double)d.memory.total / (1 << 20));
    EXPECT(d.memory.row[MEMORY_CONTEXT] > 50 << 20, "a context of %lld bytes", (long long)d.memory.row[MEMORY_CONTEXT]);
    memset(&m, 0, sizeof m);
    if (part_is_pipelined(&c, &comm->mesh)) {
        part = part_make(&c, &comm->mesh, d.logits_bytes);
        m.part = &part;
    }
    REQUIRE(model_init(&m, &c, &d, comm, err) == 0, "%s", err);
    model_init_weights(&m);
    cuda_memory(&now);
    printf("held with arenas %.1f MiB\n", (double)now.held / (1 << 20));
    train(&m, &c);
    cuda_memory(&now);
    const double plan = (double)memory_total(&m), held = (double)now.held;
    printf("graphs %.1f MiB; ", (double)memory_row(&m, MEMORY_GRAPHS) / (1 << 20));
    printf("plan %.1f MiB, the GPU says %.1f MiB after %d steps: %+.2f %%\n", plan / (1 << 20), held / (1 << 20), STEPS,
           100 * (plan - held) / held);
    EXPECT_NEAR(plan, held, 0.01 * held);
    model_free(&m);
    comm->free(comm);
    device_close(&d);
}

TEST(cuda_memory_plan_is_exact) {
    check_plan("parallel.schedule=paired", "train.micro_batch_size=8");
}

/* With a graph of sixteen micro-batches. */
TEST(cuda_memory_plan_of_a_pipeline_is_exact) {
    check_plan("parallel.schedule=dualpipev", "train.micro_batch_size=1");
}

/* A plan that is too large is refused before anything is allocated. */
TEST(cuda_memory_refuses_what_cannot_fit) {
    static const char *const sets[] = {"run.device=cuda", "data.train=synthetic"};
    char err[ERR_LEN], hint[ERR_LEN], text[DEVICE_TEXT_LEN];
    Config c;
    Device d;
    Model m;
    REQUIRE(config_load(&c, "configs/deepseek_v3.json", sets, 2, err, hint) == 0, "%s", err);
    device_open(&d, &c, text);
    Comm *comm = comm_self(&d);
    memset(&m, 0, sizeof m);
    model_plan(&m, &c, &d, comm);
    EXPECT(memory_check(&m, err, hint) == -1 && strstr(err, "GiB") && hint[0], "8.9 TiB fit");
    printf("%s\n%s\n", err, hint);
    model_free(&m);
    comm->free(comm);
    device_close(&d);
}
