/* The plan for one kind of GPU: what fits, what to set so that it does, how long and for how much. See plan.h. */
#include <stdlib.h>
#include <string.h>

#include "kernels/base/ints.h"
#include "kernels/cpu/cpu.h"
#include "plan.h"

const char *plan_recompute_text(char *buf, size_t buf_len, int bits) {
    static const char *const names[] = {"norms", "up_projections", "swiglu"};
    if (bits == 0 || bits == RECOMPUTE_AUTO) {
        snprintf(buf, buf_len, "%s", bits ? "auto" : "none");
        return buf;
    }
    int n = 0;
    for (int i = 0; i < 3; i++)
        if (bits & 1 << i) n += snprintf(buf + n, buf_len - (size_t)n, "%s\"%s\"", n ? "," : "[", names[i]);
    snprintf(buf + n, buf_len - (size_t)n, "]");
    return buf;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

typedef struct {
    ModelShape shape;
    int64_t bytes; /* of the device */
} Sized;

/* The memory plan of the run with other settings: what model_init would ask the GPU for. */
static Sized size_of(const Plan *p, const PlanChoice *c, int64_t micro_batch) {
    Config config = p->run->config;
    config.memory.recompute = c->recompute;
    config.precision.moments = c->moments;
    config.train.micro_batch_size = micro_batch;
    Model m;
    memset(&m, 0, sizeof m);
    model_plan(&m, &config, &p->run->device, p->run->comm);
    const Sized sized = {m.shape, memory_total(&m)};
    model_free(&m);
    return sized;
}

/* Ids of expert rows and tokens have 32 bits. */
static bool is_countable(const ModelShape *s, int64_t micro_batch) {
    const double tokens = (double)micro_batch * (double)s->S;
    return tokens * s->router.n_chosen + 128.0 * s->router.n_experts < INT32_MAX;
}

/* The largest number that divides every batch of the schedule and the ranks' shares of it. */
static int64_t largest_micro_batch(const Plan *p) {
    const Schedule *batch = &p->run->config.train.global_batch_size;
    int64_t all = 0;
    for (int i = 0; i < batch->n; i++) {
        int64_t a = all, b = (int64_t)batch->value[i];
        while (b) {
            const int64_t rest = a % b;
            a = b, b = rest;
        }
        all = a;
    }
    return all / p->ranks;
}

/* The largest divisor of `all` that fits. Memory grows with the micro-batch, so divisors are tried from below until
 * one does not. */
static void fit(const Plan *p, PlanChoice *c, int64_t all, Sized *sized) {
    for (int64_t micro_batch = 1; micro_batch <= all; micro_batch++) {
        if (all % micro_batch || !is_countable(&p->run->model.shape, micro_batch)) continue;
        const Sized now = size_of(p, c, micro_batch);
        if (now.bytes > p->gpu.bytes) {
            if (micro_batch == 1) c->bytes = now.bytes;
            return;
        }
        c->micro_batch = micro_batch;
        c->bytes = now.bytes;
        *sized = now;
    }
}

/* ---- time -------------------------------------------------------------------------------------------------------- */

static void clock_choice(const Plan *p, PlanChoice *c, const ModelShape *s) {
    c->has_time = step_time(&c->time, s, &p->count, p->run->config.precision.compute, &p->gpu.rates);
    if (!c->has_time) return;
    const double tokens = (double)p->length.tokens / p->ranks, micro_batches = tokens / (double)s->T;
    c->tokens_per_s = tokens / (micro_batches * c->time.of.sum + (double)p->length.steps * c->time.update);
}

static bool is_better(const PlanChoice *a, const PlanChoice *b) {
    if (!b || b->micro_batch == 0) return a->micro_batch > 0;
    if (a->micro_batch == 0) return false;
    return a->has_time ? a->tokens_per_s > b->tokens_per_s : a->micro_batch > b->micro_batch;
}

static void make_choices(Plan *p, Moments moments) {
    PlanGpu *g = &p->gpu;
    const int64_t all = largest_micro_batch(p);
    g->best = NULL;
    for (int bits = 0; bits < PLAN_RECOMPUTES; bits++) {
        PlanChoice *c = &g->choices[bits];
        Sized sized;
        memset(c, 0, sizeof *c);
        c->recompute = bits;
        c->moments = moments;
        fit(p, c, all, &sized);
        if (c->micro_batch == 0) continue;
        clock_choice(p, c, &sized.shape);
        if (is_better(c, g->best)) g->best = c;
    }
}

static void make_configured(Plan *p) {
    const Config *c = &p->run->config;
    PlanChoice *now = &p->gpu.configured;
    now->recompute = c->memory.recompute;
    now->moments = c->precision.moments;
    now->micro_batch = c->train.micro_batch_size;
    const Sized sized = size_of(p, now, now->micro_batch);
    now->recompute = sized.shape.recompute & ~(RECOMPUTE_AUTO | RECOMPUTE_UNASKED); /* what "auto" has become */
    now->bytes = sized.bytes;
    p->gpu.fits = now->bytes <= p->gpu.bytes;
    clock_choice(p, now, &sized.shape);
}

/* What leads from the configuration to the best choice; nothing if it is no faster. */
static void make_sets(Plan *p) {
    PlanGpu *g = &p->gpu;
    const PlanChoice *now = &g->configured, *best = g->best;
    if (!best || (g->fits && (!best->has_time || best->tokens_per_s < 1.03 * now->tokens_per_s))) return;
    char names[80];
    int n = 0;
    if (best->micro_batch != now->micro_batch)
        n += snprintf(g->sets, PLAN_SET_LEN, "--set train.micro_batch_size=%lld", (long long)best->micro_batch);
    if (best->recompute != now->recompute) {
        plan_recompute_text(names, sizeof names, best->recompute);
        n += snprintf(g->sets + n, (size_t)(PLAN_SET_LEN - n), "%s--set %s%s%s%s", n ? " " : "",
                      best->recompute ? "'" : "", "memory.recompute=", names, best->recompute ? "'" : "");
    }
    if (best->moments != now->moments)
        snprintf(g->sets + n, (size_t)(PLAN_SET_LEN - n), "%s--set precision.moments=bf16", n ? " " : "");
}

static void make_forecast(Plan *p) {
    PlanGpu *g = &p->gpu;
    const PlanChoice *c = g->chosen;
    if (!c || !c->has_time) return;
    const double S = (double)p->run->model.shape.S, batch = (double)p->batch_last * S / p->ranks;
    g->step_s = batch / ((double)c->micro_batch * S) * c->time.of.sum + c->time.update;
    g->run_s = (double)p->length.tokens / p->ranks / c->tokens_per_s;
    const double flops = p->count.main_total.flops + p->count.mtp_total.flops;
    g->model_tflops = 1e-12 * flops * c->tokens_per_s;
    g->mfu = g->model_tflops / g->rates.peak_bf16;
    if (g->mfu > 1) g->mfu = 0; /* products in FP8 only: then the BF16 peak says nothing */
    g->gpu_hours = g->run_s / 3600 * p->world;
    g->price = g->gpu_hours * p->run->config.run.price_per_gpu_hour;
}

void plan_make_gpu(Plan *p) {
    PlanGpu *g = &p->gpu;
    char err[ERR_LEN], hint[ERR_LEN];
    if (rates_find(&g->rates, p->run->args->gpu, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    p->has_gpu = true;
    g->bytes = (int64_t)(g->rates.memory_gib * (double)(1 << 30));
    make_configured(p);
    const Moments moments = p->run->config.precision.moments;
    make_choices(p, moments);
    if (!g->best && moments == MOMENTS_FP32) make_choices(p, MOMENTS_BF16);
    make_sets(p);
    g->chosen = g->fits ? &g->configured : g->best;
    make_forecast(p);
}
