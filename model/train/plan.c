/* See plan.h. */
#include "plan.h"

#include <glob.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "data/source.h"
#include "format.h"
#include "kernels/base/ints.h"
#include "manifest.h"
#include "ranks.h"
#include "saver.h"

/* ---- world ------------------------------------------------------------------------------------------------------- */

PRINTF_LIKE(2, 3) static void note(Plan *p, const char *fmt, ...) {
    if (p->n_notes == PLAN_NOTES_MAX) return;
    va_list args;
    va_start(args, fmt);
    vsnprintf(p->notes[p->n_notes++], sizeof p->notes[0], fmt, args);
    va_end(args);
}

/* Who is who, by the rule of the mesh. A plan without --world is for the one process that this version runs. */
static void make_world(Plan *p) {
    const Config *c = &p->run->config;
    const int64_t asked = p->run->args->world;
    p->world = asked > 1 ? (int)asked : 1;
    const int n_pp = p->world > 1 ? c->parallel.pp : 1;
    const int n_ep = p->world > 1 ? ranks_n_ep(c, p->world / n_pp) : 1; /* as a run with so many ranks */
    if (p->world % (n_pp * n_ep))
        DIE("parallel.pp x parallel.ep has to divide it", "--world %d is no multiple of parallel.pp %d x ep %d",
            p->world, n_pp, n_ep);
    p->mesh = mesh_make(0, p->world, n_pp, n_ep);
    p->ranks = p->mesh.size[GROUP_DATA];
    char err[ERR_LEN], hint[ERR_LEN];
    if (batch_check(c, p->ranks, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
}

static void make_notes(Plan *p) {
    const Config *c = &p->run->config;
    LoaderSpec spec;
    char err[ERR_LEN], hint[ERR_LEN];
    if (p->has_gpu && c->precision.compute == COMPUTE_FP8 && p->gpu.rates.peak_fp8 == 0)
        note(p, "%s has no FP8: times are by its BF16 rates", p->gpu.rates.name);
    if (loader_spec_train(&spec, c, 1, err, hint) != 0) note(p, "%s", err);
}

/* ---- data -------------------------------------------------------------------------------------------------------- */

static void add_source(Plan *p, const char *kind, const Source *from, bool is_named, double asked) {
    const ModelShape *s = &p->run->model.shape;
    PlanSource *to = &p->sources[p->n_sources++];
    glob_t found;
    SampleSource source;
    char hint[ERR_LEN];
    memset(to, 0, sizeof *to);
    snprintf(to->label, sizeof to->label, "%s%s%s", kind, is_named ? " " : "", is_named ? from->name : "");
    to->path = from->path;
    to->asked = asked;
    to->is_there = glob(from->path, 0, NULL, &found) == 0;
    if (to->is_there) globfree(&found);
    if (!to->is_there || source_open(&source, to->label, from->path, s->V, s->S, s->n_mtp, to->problem, hint) != 0)
        return;
    to->problem[0] = 0;
    to->n_shards = source.n_shards;
    to->tokens = source.n_tokens;
    source_close(&source);
}

static void make_sources(Plan *p) {
    const DataConfig *d = &p->run->config.data;
    const double asked = (double)p->length.tokens;
    double weights = 0;
    if (d->synthetic) {
        PlanSource *to = &p->sources[p->n_sources++];
        snprintf(to->label, sizeof to->label, "train");
        to->is_there = true;
        to->asked = asked;
    }
    for (int i = 0; i < d->n_train; i++) weights += d->train[i].weight;
    for (int i = 0; i < d->n_train; i++)
        add_source(p, "train", &d->train[i], d->n_train > 1, asked * d->train[i].weight / weights);
    for (int i = 0; i < d->n_val; i++) add_source(p, "val", &d->val[i], true, 0);
}

/* ---- memory and files -------------------------------------------------------------------------------------------- */

static void make_memory(Plan *p) {
    const Model *m = &p->run->model;
    const ModelShape *s = &m->shape;
    p->device_bytes = memory_total(m);
    /* The loader reads one micro-batch ahead for each set; a trainer keeps one to count targets in. */
    const int64_t batches = 2 * (1 + p->run->config.data.n_val) + 1, batch = (2 * (s->n_mtp + 1) + 2) * s->T * 4;
    const PlanItem host[PLAN_HOST_ITEMS] = {
        {"lists of tensors", m->params.n_named * (int64_t)(sizeof(NamedTensor) + 2 * 3 * sizeof(StateTensor))},
        {"micro-batches", batches * batch},
        {"blocks of a save", MANIFEST_HASH_BLOCK},
        {"copy of the state for saves", saver_bytes(&p->run->config, &m->params)},
    };
    memcpy(p->host, host, sizeof host);
    for (int i = 0; i < PLAN_HOST_ITEMS; i++) p->host_bytes += host[i].bytes;
}

static void make_files(Plan *p) {
    int64_t n;
    StateTensor *tensors = params_state(&p->run->model.params, &n);
    p->checkpoint_bytes = checkpoint_bytes(tensors, n);
    free(tensors);
    for (int dtype = 0; dtype < HF_DTYPES; dtype++) {
        HfExport x = {.config = &p->run->config, .params = &p->run->model.params, .dtype = (HfDtype)dtype};
        p->hf_bytes[dtype] = hf_export_bytes(&x);
    }
}

void plan_make(Plan *p, Run *r) {
    const Config *c = &r->config;
    memset(p, 0, sizeof *p);
    p->run = r;
    make_world(p);
    p->count = count_model(&r->model.params);
    p->length = run_length(c, p->ranks);
    p->batch_first = batch_at(c, 0, p->ranks);
    p->batch_last = batch_at(c, p->length.tokens_at_last, p->ranks);
    make_sources(p);
    make_memory(p);
    make_files(p);
    if (r->args->gpu) plan_make_gpu(p);
    plan_make_experts(p);
    make_notes(p);
}

/* ---- lines ------------------------------------------------------------------------------------------------------- */

static void print_part(Logger *l, const char *name, const PartCount *n) {
    if (n->params == 0 && n->flops == 0) return;
    log_banner(l, "", "  %-15s %19s %16s %10s", name, format_grouped(n->params).text, format_grouped(n->active).text,
               format_count(n->flops).text);
}

static void print_counts(const Plan *p, Logger *l) {
    const ModelCount *c = &p->count;
    log_banner(l, "parameters", "%s: active %s with the head, %s without, %s with the embedding too",
               format_grouped(c->main_total.params).text, format_count((double)c->active_with_head).text,
               format_count((double)(c->active_with_head - c->main[PART_HEAD].active)).text,
               format_count((double)c->main_total.active).text);
    log_banner(l, "", "  %-15s %19s %16s %10s", "part", "parameters", "active", "FLOPs");
    for (int i = 0; i < PART_COUNT; i++) print_part(l, part_name((Part)i), &c->main[i]);
    print_part(l, "mtp", &c->mtp_total);
    const double flops = c->main_total.flops + c->mtp_total.flops;
    const double core = c->main[PART_ATTENTION_CORE].flops + c->mtp[PART_ATTENTION_CORE].flops;
    log_banner(l, "FLOPs", "%s a token: forward %s, backward %s; causal, active, recomputation not counted",
               format_count(flops).text, format_count(flops / 3).text, format_count(flops * 2 / 3).text);
    if (p->run->config.data.document_mask)
        log_banner(l, "", "an upper bound: data.document_mask leaves out a part of the attention core's %.1f %%",
                   100 * core / flops);
}

static void print_sources(const Plan *p, Logger *l) {
    for (int i = 0; i < p->n_sources; i++) {
        const PlanSource *s = &p->sources[i];
        const char *word = i ? "" : "data";
        char text[64] = "", epochs[48] = "";
        if (s->asked > 0) snprintf(text, sizeof text, ": asked %s", format_count(s->asked).text);
        if (s->asked > 0 && s->tokens > 0)
            snprintf(epochs, sizeof epochs, " = %.2f epochs", s->asked / (double)s->tokens);
        if (!s->path)
            log_banner(l, word, "%s synthetic (uniform random ids)%s", s->label, text);
        else if (!s->is_there)
            log_banner(l, word, "%s %s: not there%s", s->label, s->path, text);
        else if (s->problem[0])
            log_banner(l, word, "%s %s: will not do: %s", s->label, s->path, s->problem);
        else
            log_banner(l, word, "%s %s tokens in %d shard%s%s%s", s->label, format_count((double)s->tokens).text,
                       s->n_shards, s->n_shards > 1 ? "s" : "", text, epochs);
    }
}

static void print_batch(const Plan *p, Logger *l) {
    const ModelShape *s = &p->run->model.shape;
    char ramp[96] = "";
    if (p->batch_last != p->batch_first)
        snprintf(ramp, sizeof ramp, ", at the end %s x %lld = %s", format_grouped(p->batch_last).text, (long long)s->S,
                 format_count((double)(p->batch_last * s->S)).text);
    const int64_t tokens = p->batch_first * s->S;
    log_banner(l, "batch", "%s x %lld = %s tokens a step%s: micro-batch %lld x %lld; %s steps",
               format_grouped(p->batch_first).text, (long long)s->S,
               tokens < 100000 ? format_grouped(tokens).text : format_count((double)tokens).text, ramp, (long long)s->B,
               (long long)(p->batch_last / (s->B * p->ranks)), format_grouped(p->length.steps).text);
    if (p->world == 1) return;
    log_banner(
        l, "mesh",
        "%d ranks = pp %d x dp %d x ep %d; %lld sequences of a step each; the memory above is of one copy in one "
        "place",
        p->world, p->mesh.n_pp, p->mesh.n_dp, p->mesh.n_ep, (long long)(p->batch_last / p->ranks));
    plan_print_experts(p, l);
}

static void print_files(const Plan *p, Logger *l) {
    char keeps[32] = "all", bytes[32];
    if (p->run->config.checkpoint.keep_last > 0)
        snprintf(keeps, sizeof keeps, "%d", p->run->config.checkpoint.keep_last);
    log_banner(l, "host", "%s beside the device's", format_bytes(bytes, sizeof bytes, (double)p->host_bytes));
    for (int i = 0; i < PLAN_HOST_ITEMS; i++)
        log_banner(l, "", "%12s  %s", format_bytes(bytes, sizeof bytes, (double)p->host[i].bytes), p->host[i].name);
    log_banner(l, "files", "%s: checkpoints of %s, keeps %s; Hugging Face export %s in bf16, %s in fp8",
               p->run->config.run.dir, format_file_size((double)p->checkpoint_bytes).text, keeps,
               format_file_size((double)p->hf_bytes[HF_BF16]).text, format_file_size((double)p->hf_bytes[HF_FP8]).text);
}

static void print_choices(const Plan *p, Logger *l) {
    const PlanGpu *g = &p->gpu;
    char names[80], bytes[32], rate[32], extra[32];
    log_banner(l, "fit", "%-36s %11s %10s %9s %11s", "memory.recompute", "micro-batch", "memory", "costs", "tok/s/gpu");
    for (int i = 0; i < PLAN_RECOMPUTES; i++) {
        const PlanChoice *c = &g->choices[i];
        rate[0] = extra[0] = 0;
        if (c->has_time) {
            snprintf(rate, sizeof rate, "%s", format_rate(c->tokens_per_s).text);
            snprintf(extra, sizeof extra, "%.1f %%",
                     100 * c->time.of.recompute / (c->time.of.sum - c->time.of.recompute));
        }
        if (c->micro_batch > 0)
            log_banner(l, "", "%-36s %11lld %10s %9s %11s%s", plan_recompute_text(names, sizeof names, c->recompute),
                       (long long)c->micro_batch, format_bytes(bytes, sizeof bytes, (double)c->bytes), extra, rate,
                       c == g->best && c->has_time ? "  fastest" : "");
        else
            log_banner(l, "", "%-36s %11s %10s", plan_recompute_text(names, sizeof names, c->recompute), "none",
                       format_bytes(bytes, sizeof bytes, (double)c->bytes));
    }
}

/* Hours and money: two decimals while they are small. */
static Formatted amount(double x) {
    if (x >= 100) return format_grouped((int64_t)(x + 0.5));
    Formatted d;
    snprintf(d.text, sizeof d.text, "%.2f", x);
    return d;
}

static void print_forecast(const Plan *p, Logger *l) {
    const PlanGpu *g = &p->gpu;
    const PlanChoice *c = g->chosen;
    char price[48] = "", mfu[48] = "";
    if (!c) return;
    if (!c->has_time) {
        log_banner(l, "forecast", "no time: there are no rates for precision.compute fp32 on a GPU");
        return;
    }
    if (g->price > 0) snprintf(price, sizeof price, ", price %s", amount(g->price).text);
    if (g->mfu > 0) snprintf(mfu, sizeof mfu, ", %.1f %% of the BF16 peak", 100 * g->mfu);
    log_banner(l, "forecast", "%s at %s tok/s/gpu; %s GPU-hours%s; validation and saves not counted%s",
               format_duration(g->run_s).text, format_rate(c->tokens_per_s).text, amount(g->gpu_hours).text, price,
               g->rates.measured ? "" : "; not measured on this GPU");
    const StepTime *t = &c->time;
    const double share = 100 / t->of.sum;
    log_banner(l, "", "%s a step, %.0f TF a GPU%s", format_step_time(1e3 * g->step_s).text, g->model_tflops, mfu);
    log_banner(l, "",
               "%s a micro-batch: products %.0f %%, experts %.0f %%, attention %.0f %%, gradients %.0f %%, rest "
               "%.0f %%; update %s",
               format_step_time(1e3 * t->of.sum).text, share * t->of.products, share * t->of.grouped,
               share * t->of.attention, share * t->of.gradients,
               share * (t->of.traffic + t->of.launches + t->of.recompute), format_step_time(1e3 * t->update).text);
}

static void print_gpu(Plan *p, Logger *l) {
    const PlanGpu *g = &p->gpu;
    char has[32], needs[32], fp8[48] = "no FP8";
    if (g->rates.peak_fp8 > 0) snprintf(fp8, sizeof fp8, "%.0f TF FP8", g->rates.peak_fp8);
    log_banner(l, "gpu", "%s: %s, peaks %.0f TF BF16, %s", g->rates.name,
               format_bytes(has, sizeof has, (double)g->bytes), g->rates.peak_bf16, fp8);
    log_banner(l, "", "rates %s", g->rates.source);
    print_choices(p, l);
    format_bytes(needs, sizeof needs, (double)g->configured.bytes);
    if (g->fits)
        log_banner(l, "fits", "%s of %s as configured", needs, has);
    else if (g->best)
        log_banner(l, "refused", "%s of %s; this fits: %s", needs, has, g->sets);
    else
        log_banner(l, "refused",
                   "%s of %s, and no micro-batch fits: state alone is %s; more GPUs that share it are "
                   "needed",
                   needs, has, format_bytes(fp8, sizeof fp8, (double)p->run->model.keep.peak));
    if (p->world == 1) print_forecast(p, l); /* else the cluster's follows */
    if (g->fits && g->sets[0])
        log_banner(l, "faster", "%s tok/s/gpu with %s", format_rate(g->best->tokens_per_s).text, g->sets);
}

/* 'x y' where a shell would read more into it. */
static const char *quoted(char *buf, size_t buf_len, const char *word) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=,:+@%";
    snprintf(buf, buf_len, word[strspn(word, plain)] ? "'%s'" : "%s", word);
    return buf;
}

/* What this version would refuse, and the command that starts what it can. */
static void print_command(const Plan *p, Logger *l) {
    const Args *a = p->run->args;
    char line[2048], word[600];
    int n = snprintf(line, sizeof line, "./train_moe --config %s", quoted(word, sizeof word, a->config));
    for (int i = 0; i < a->n_sets && n < (int)sizeof line; i++)
        n += snprintf(line + n, sizeof line - (size_t)n, " --set %s", quoted(word, sizeof word, a->sets[i]));
    if (p->has_gpu && !p->gpu.fits && p->gpu.sets[0] && n < (int)sizeof line)
        n += snprintf(line + n, sizeof line - (size_t)n, " %s", p->gpu.sets);
    for (int i = 0; i < p->n_notes; i++) log_banner(l, i ? "" : "not yet", "%s", p->notes[i]);
    if (p->has_gpu && !p->gpu.chosen && p->world == 1) return;
    char mpirun[48] = "";
    if (p->world > 1) snprintf(mpirun, sizeof mpirun, "mpirun -q --bind-to none -np %d ", p->world);
    log_banner(l, "launch", "%s%s", mpirun, line);
}

void plan_print(Plan *p, Logger *l) {
    print_counts(p, l);
    print_batch(p, l);
    print_sources(p, l);
    print_files(p, l);
    if (p->has_gpu && p->mesh.n_pp * p->mesh.n_ep == 1) print_gpu(p, l); /* of copies of the whole model */
    print_command(p, l);
}
