/* The whole model on the GPU against the CPU: losses, every gradient, updates; equal bits on every run. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/cuda_ops.h"
#include "tests/model/model_test.h"

static void start_gpu(void) {
    char err[ERR_LEN], hint[ERR_LEN];
    CudaDevice info;
    REQUIRE(cuda_start(0, &info, err, hint) == 0, "%s (%s)", err, hint);
}

/* A device tensor's content in host memory. */
static Tensor host_copy(const Fixture *f, Tensor device) {
    Tensor host = t_zeros(device.dtype, 1, device.shape[0], 1, 1);
    op_synchronize(&f->device, STREAM_COMPUTE);
    op_copy_out(&f->device, host.data, device.data, tensor_bytes(host), STREAM_COPY);
    op_synchronize(&f->device, STREAM_COPY);
    return host;
}

static StepStats stats_of(const Fixture *f) {
    StepStats stats;
    op_synchronize(&f->device, STREAM_COMPUTE);
    op_copy_out(&f->device, &stats, f->model.stats, sizeof stats, STREAM_COPY);
    op_synchronize(&f->device, STREAM_COPY);
    return stats;
}

/* Gradients of every weight, relative to the largest of the weight's kind in its block. */
static double gradient_error(Tensor ours, Tensor theirs, const Block *b) {
    double worst = 0;
    for (int id = 0; id < WEIGHT_COUNT; id++) {
        const Weight *w = &b->weight[id];
        if (w->numel == 0 || w->optimizer == OPTIMIZER_NONE) continue;
        double error =
            t_error(tensor_rows(ours, w->offset, w->numel), t_doubles(tensor_rows(theirs, w->offset, w->numel)));
        if (!(error <= worst)) worst = error;
    }
    return worst;
}

TEST(cuda_model_gradients_equal_the_cpus) {
    start_gpu();
    for (int i = 0; i < n_model_cases; i++) {
        Fixture cpu, gpu;
        fixture_open(&cpu, model_cases[i].sets);
        fixture_open_on(&gpu, model_cases[i].sets, ops_cuda());
        if (model_cases[i].document_length) {
            fixture_batch(&cpu, model_cases[i].document_length, 3);
            fixture_batch(&gpu, model_cases[i].document_length, 3);
        }
        fixture_gradients(&cpu);
        fixture_gradients(&gpu);
        StepStats ours = stats_of(&gpu), theirs = stats_of(&cpu);
        for (int k = 0; k <= cpu.model.shape.n_mtp; k++)
            EXPECT_NEAR(ours.loss_sum[k], theirs.loss_sum[k], 1e-5 * theirs.loss_sum[k]);
        EXPECT_NEAR(ours.balance_sum, theirs.balance_sum, 1e-5 * fabs(theirs.balance_sum));
        Tensor grad = host_copy(&gpu, gpu.model.params.grad);
        double error = gradient_error(grad, cpu.model.params.grad, &cpu.model.params.top);
        for (int b = 0; b < cpu.model.shape.n_blocks; b++) {
            double block = gradient_error(grad, cpu.model.params.grad, &cpu.model.params.blocks[b]);
            if (!(block <= error)) error = block;
        }
        EXPECT(error < 5e-5, "%s: %g", model_cases[i].name, error);
        fixture_close(&gpu);
        fixture_close(&cpu);
    }
}

static uint64_t train(const char *const *sets, int steps, double *loss) {
    Fixture f;
    fixture_open_on(&f, sets, ops_cuda());
    for (int step = 0; step < steps; step++) {
        f.params.step = step + 1;
        fixture_batch(&f, 0, 100 + (uint64_t)(step % 4));
        fixture_gradients(&f);
        model_update(&f.model);
    }
    *loss = stats_of(&f).loss_sum[0] / (double)f.model.shape.T;
    uint64_t hash = params_hash(&f.model.params, &f.device);
    fixture_close(&f);
    return hash;
}

TEST(cuda_model_trains_to_the_same_bits_twice) {
    start_gpu();
    static const char *const bf16[] = {"precision.compute=bf16", "precision.moments=bf16", NULL};
    static const char *const fp8[] = {FP8_WIDTHS, "precision.compute=fp8", "precision.moments=bf16", NULL};
    static const char *const *const sets[] = {NULL, bf16, fp8};
    static const char *const names[] = {"fp32", "bf16", "fp8"};
    static const double bound[] = {2.5, 2.5, 3.5}; /* the wide model starts at 3.8 and moves slowly */
    for (int i = 0; i < 3; i++) {
        double first, second;
        uint64_t a = train(sets[i], 50, &first), b = train(sets[i], 50, &second);
        EXPECT(a == b && first == second, "%s: two runs of 50 steps differ", names[i]);
        EXPECT(first < bound[i], "%s: loss after 50 steps: %g", names[i], first);
    }
}

/* A rounding to BF16 that falls the other way moves an FP8 number by a whole step, so gradients are near in direction:
 * much nearer than either is to BF16's (test_fp8.c). */
TEST(cuda_model_fp8_is_near_the_cpus) {
    static const char *const plain[] = {FP8_WIDTHS, "precision.compute=fp8", NULL};
    static const char *const remade[] = {FP8_WIDTHS, "model.q_lora_rank=128", "precision.compute=fp8",
                                         "memory.recompute=[\"norms\",\"up_projections\",\"swiglu\"]", NULL};
    static const char *const fprop[] = {FP8_WIDTHS, "precision.compute=fp8", "precision.fp8.fprop=bf16", NULL};
    static const char *const dgrad[] = {FP8_WIDTHS, "precision.compute=fp8", "precision.fp8.dgrad=bf16", NULL};
    static const char *const wgrad[] = {FP8_WIDTHS, "precision.compute=fp8", "precision.fp8.wgrad=bf16", NULL};
    static const char *const kept[] = {FP8_WIDTHS, "precision.compute=fp8", "precision.fp8.swiglu_input=bf16",
                                       "precision.fp8.attention_output=bf16", NULL};
    static const char *const *const sets[] = {plain, remade, fprop, dgrad, wgrad, kept};
    start_gpu();
    for (size_t i = 0; i < sizeof sets / sizeof *sets; i++) {
        Fixture cpu, gpu;
        fixture_open(&cpu, sets[i]);
        fixture_open_on(&gpu, sets[i], ops_cuda());
        fixture_fix_routing(&cpu);
        fixture_fix_routing(&gpu);
        fixture_gradients(&cpu);
        fixture_gradients(&gpu);
        const double ours = stats_of(&gpu).loss_sum[0], theirs = stats_of(&cpu).loss_sum[0];
        EXPECT(fabs(ours - theirs) < 1e-3 * theirs, "case %zu: losses %g and %g", i, ours, theirs);
        const Tensor grad = host_copy(&gpu, gpu.model.params.grad);
        for (int64_t k = 0; k < cpu.model.params.n_named; k++) {
            const NamedTensor *t = &cpu.model.params.named[k];
            if (t->optimizer == OPTIMIZER_NONE) continue;
            const Weight *w = fixture_weight(&cpu, t);
            const double c = fixture_cosine(tensor_rows(grad, w->offset, w->numel),
                                            tensor_rows(cpu.model.params.grad, w->offset, w->numel));
            EXPECT(c > 0.98, "case %zu: %s: cosine %g", i, t->name, c);
        }
        fixture_gradients(&gpu);
        EXPECT(t_same_bits(grad, host_copy(&gpu, gpu.model.params.grad)), "case %zu: other bits", i);
        fixture_close(&gpu);
        fixture_close(&cpu);
    }
}

/* The CPU goes on from what the GPU trained: equal bits of the weights, near losses. */
TEST(cuda_model_hands_over_to_the_cpu) {
    start_gpu();
    Fixture gpu, cpu;
    fixture_open_on(&gpu, NULL, ops_cuda());
    fixture_open(&cpu, NULL);
    for (int step = 0; step < 5; step++) {
        fixture_gradients(&gpu);
        model_update(&gpu.model);
    }
    Tensor master = host_copy(&gpu, gpu.model.params.master);
    memcpy(cpu.model.params.master.data, master.data, tensor_bytes(master));
    EXPECT(params_hash(&gpu.model.params, &gpu.device) == params_hash(&cpu.model.params, &cpu.device), "hashes differ");
    fixture_gradients(&gpu);
    fixture_gradients(&cpu);
    EXPECT_NEAR(stats_of(&gpu).loss_sum[0], stats_of(&cpu).loss_sum[0], 1e-4 * stats_of(&cpu).loss_sum[0]);
    fixture_close(&gpu);
    fixture_close(&cpu);
}

/* Walking through the model chooses every algorithm that a step asks for; a resumed run takes the checkpoint's, but not
 * those of another library. */
TEST(cuda_model_gemm_algorithms_are_chosen_and_resumed) {
    start_gpu();
    static const char *const bf16[] = {"precision.compute=bf16", NULL};
    char err[ERR_LEN], place[128];
    Fixture f;
    fixture_open_on(&f, bf16, ops_cuda());
    model_rehearse(&f.model, ops_cuda_prepare());
    const GemmCount chosen = cuda_gemm_count();
    EXPECT(chosen.total > 10 && chosen.resumed == 0, "%d GEMMs, %d resumed", chosen.total, chosen.resumed);
    fixture_gradients(&f);
    model_update(&f.model);
    EXPECT_EQ(cuda_gemm_count().total, chosen.total);

    char *rows = cuda_gemm_rows();
    cuda_gemm_forget();
    REQUIRE(cuda_gemm_resume(rows, err) == 0, "%s", err);
    model_rehearse(&f.model, ops_cuda_prepare());
    char *again = cuda_gemm_rows();
    EXPECT(cuda_gemm_count().resumed == chosen.total && strcmp(rows, again) == 0, "%d of %d resumed",
           cuda_gemm_count().resumed, chosen.total);

    const char *version = strstr(cuda_gemm_place(place, sizeof place), "cuBLASLt ");
    REQUIRE(version, "%s", place);
    for (char *at = again; (at = strstr(at, version + 9)) != NULL; at++) at[0] = at[0] == '9' ? '8' : '9';
    cuda_gemm_forget();
    REQUIRE(cuda_gemm_resume(again, err) == 0, "%s", err);
    model_rehearse(&f.model, ops_cuda_prepare());
    EXPECT_EQ(cuda_gemm_count().resumed, 0);
    cuda_gemm_forget();
    EXPECT(cuda_gemm_resume("no row", err) != 0, "accepted");
    free(rows);
    free(again);
    fixture_close(&f);
}

enum { TEXT = 16, LOGITS_MAX = 64 };
typedef float Logits[TEXT][LOGITS_MAX];

/* Logits behind a prompt of five and each token after it. */
static void text_logits(Fixture *f, Logits logits) {
    memset(logits, 0xFF, sizeof(Logits)); /* NaN */
    model_prefill(&f->model, f->batch.tokens, 5, logits[4]);
    for (int t = 5; t < TEXT; t++) model_decode(&f->model, f->batch.tokens[t], logits[t]);
}

/* Largest difference from position `first` on, as a share of the largest logit. */
static double logits_error(const Fixture *f, const Logits got, const Logits want, int first) {
    double largest = 0, off = 0;
    for (int t = first; t < TEXT; t++)
        for (int64_t k = 0; k < f->model.shape.V; k++) {
            const double d = fabs((double)got[t][k] - (double)want[t][k]);
            largest = fmax(largest, fabs((double)want[t][k]));
            off = d > off || isnan(d) ? d : off;
        }
    return off / largest;
}

/* Generation on the GPU: near the CPU, the same bits twice, and near its own forward over the whole text. */
TEST(cuda_model_generates_as_the_cpu) {
    start_gpu();
    static const char *const bf16[] = {"precision.compute=bf16", NULL};
    for (int i = -1; i < n_model_cases; i++) {
        const char *const *sets = i < 0 ? bf16 : model_cases[i].sets;
        Fixture cpu, gpu;
        static Logits theirs, ours, again, full;
        fixture_open(&cpu, sets);
        fixture_open_on(&gpu, sets, ops_cuda());
        text_logits(&cpu, theirs);
        text_logits(&gpu, ours);
        text_logits(&gpu, again);
        EXPECT(memcmp(ours, again, sizeof ours) == 0, "case %d: two runs differ", i);
        model_prefill(&gpu.model, gpu.batch.tokens, TEXT, full[TEXT - 1]);
        const double off = logits_error(&cpu, ours, theirs, 4), off_full = logits_error(&gpu, ours, full, TEXT - 1);
        const double tolerance = i < 0 ? 0.06 : 2e-5;
        EXPECT(off <= tolerance, "case %d: off by %g", i, off);
        EXPECT(off_full <= tolerance, "case %d: off by %g from a whole forward", i, off_full);
        model_prefill(&cpu.model, cpu.batch.tokens, TEXT, full[TEXT - 1]);
        for (int64_t t = 0; t < TEXT && i >= 0; t++)
            EXPECT_EQ(model_top_expert(&gpu.model, t), model_top_expert(&cpu.model, t));
        fixture_close(&gpu);
        fixture_close(&cpu);
    }
}

/* The same in FP8, where a rounding that falls the other way moves a number by a whole step. */
TEST(cuda_model_generates_in_fp8) {
    start_gpu();
    static const char *const cases[][16] = {
        {FP8_WIDTHS, "precision.compute=fp8", NULL},
        {FP8_WIDTHS, "precision.compute=fp8", "model.q_lora_rank=128", NULL},
        {FP8_WIDTHS, "precision.compute=fp8", "precision.fp8.dgrad=bf16", "precision.fp8.wgrad=bf16", NULL},
    };
    for (int i = 0; i < 3; i++) {
        Fixture cpu, gpu;
        static Logits theirs, ours, again, full;
        fixture_open(&cpu, cases[i]);
        fixture_open_on(&gpu, cases[i], ops_cuda());
        fixture_fix_routing(&cpu);
        fixture_fix_routing(&gpu);
        text_logits(&cpu, theirs);
        text_logits(&gpu, ours);
        text_logits(&gpu, again);
        EXPECT(memcmp(ours, again, sizeof ours) == 0, "case %d: two runs differ", i);
        for (int t = 4; t < TEXT; t++) model_prefill(&gpu.model, gpu.batch.tokens, t + 1, full[t]);
        const double off = logits_error(&cpu, ours, theirs, 4), off_full = logits_error(&gpu, ours, full, 4);
        EXPECT(off <= 0.1, "case %d: off by %g", i, off);
        EXPECT(off_full <= 0.1, "case %d: off by %g from whole forwards", i, off_full);
        fixture_close(&gpu);
        fixture_close(&cpu);
    }
}
