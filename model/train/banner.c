/* The block at the start of a run: what was understood, before anything is computed. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "model/memory.h"
#include "peak.h"
#include "places.h"
#include "ranks.h"
#include "run.h"

static void model_line(Run *r) {
    const ModelShape *s = &r->model.shape;
    const ParamCount count = params_count(&r->model.params);
    char mtp[64] = "", experts[96] = "all dense";
    if (s->n_mtp) snprintf(mtp, sizeof mtp, " + MTP %s", format_count((double)count.mtp).text);
    if (shape_n_moe(s))
        snprintf(experts, sizeof experts, "%d experts top %d + %d shared", s->router.n_experts, s->router.n_chosen,
                 r->config.model.n_shared_experts);
    log_banner(&r->log, "model", "%s: %s parameters%s, %s active with head, %s FLOPs a token; %d layers, %s",
               r->config.run.name, format_count((double)count.total).text, mtp, format_count((double)count.active).text,
               format_count(shape_flops_per_token(s)).text, s->L, experts);
}

static void config_line(Run *r) {
    const Config *c = &r->config;
    char sets[1200] = "", ignored[1200] = "";
    if (c->n_overrides)
        snprintf(sets, sizeof sets, ", %d override%s (%s)", c->n_overrides, c->n_overrides > 1 ? "s" : "",
                 c->overrides);
    if (c->ignored[0]) snprintf(ignored, sizeof ignored, "; ignored model keys: %s", c->ignored);
    log_banner(&r->log, "config", "%s%s%s", c->path, sets, ignored);
}

/* " (web 94.1B x 0.85, code 18.3B x 0.15)"; of one source, what its data.json says. */
static void describe_sources(const Run *r, char *text, size_t text_len) {
    const Sidecar *side = loader_sidecar(r->loader);
    const int n = loader_n_sources(r->loader);
    size_t used = 0;
    text[0] = 0;
    if (n == 1 && side->found && side->bytes_per_token > 0)
        snprintf(text, text_len, " (%lld ids, %.2f bytes a token)", (long long)side->vocab_size, side->bytes_per_token);
    for (int k = 0; n > 1 && k < n && used < text_len; k++) {
        const LoaderSource s = loader_source(r->loader, k, 0);
        used += (size_t)snprintf(text + used, text_len - used, "%s%s %s x %.3g%s", k ? ", " : " (", s.name,
                                 format_count((double)s.n_tokens).text, s.share, k == n - 1 ? ")" : "");
    }
}

/* "0.90 / 0.82": how often the tokens go through each source. */
static void describe_epochs(const Run *r, int64_t tokens, char *text, size_t text_len) {
    const int n = loader_n_sources(r->loader);
    size_t used = 0;
    text[0] = 0;
    if (n == 1) snprintf(text, text_len, "%.2f", (double)tokens / (double)loader_tokens(r->loader));
    for (int k = 0; n > 1 && k < n && used < text_len; k++) {
        const LoaderSource s = loader_source(r->loader, k, tokens / r->model.shape.S);
        used += (size_t)snprintf(text + used, text_len - used, "%s%.2f", k ? " / " : "",
                                 (double)s.n_used / (double)s.n_samples);
    }
}

static void data_line(Run *r) {
    const int64_t asked = r->trainer.length.tokens;
    char text[512], epochs[256];
    describe_sources(r, text, sizeof text);
    describe_epochs(r, asked, epochs, sizeof epochs);
    if (loader_n_shards(r->loader) == 0)
        log_banner(&r->log, "data", "train synthetic (uniform random ids): asked %s", format_count((double)asked).text);
    else
        log_banner(&r->log, "data", "train %s tokens in %d shard%s%s: asked %s = %s epochs",
                   format_count((double)loader_tokens(r->loader)).text, loader_n_shards(r->loader),
                   loader_n_shards(r->loader) > 1 ? "s" : "", text, format_count((double)asked).text, epochs);
    for (int i = 0; i < r->val.n; i++)
        log_banner(&r->log, "", "val %s: %s tokens", r->val.name[i],
                   format_count((double)loader_tokens(r->val.loader[i])).text);
    for (int i = 0; i < r->choice.n; i++)
        log_banner(&r->log, "", "choice %s: %lld questions", r->choice.name[i],
                   (long long)r->choice.file[i].n_examples);
    for (int k = 0; k < loader_n_sources(r->loader); k++) {
        const char *warning = loader_source(r->loader, k, 0).warning;
        if (warning[0]) log_warn(&r->log, r->trainer.state.step, "%s", warning);
    }
}

/* "fp8", or "fp8 (bf16: wgrad, swiglu_input)". */
static const char *fp8_text(const Fp8Config *c, char *buf, size_t buf_len) {
    const struct {
        const char *name;
        bool is_fp8;
    } parts[] = {{"fprop", c->fprop},
                 {"dgrad", c->dgrad},
                 {"wgrad", c->wgrad},
                 {"swiglu_input", c->swiglu_input},
                 {"attention_output", c->attention_output}};
    size_t n = (size_t)snprintf(buf, buf_len, "fp8");
    const char *separator = " (bf16: ";
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (parts[i].is_fp8) continue;
        n += (size_t)snprintf(buf + n, buf_len - n, "%s%s", separator, parts[i].name);
        separator = ", ";
    }
    snprintf(buf + n, buf_len - n, "%s", n > 3 ? ")" : "");
    return buf;
}

static void device_lines(Run *r) {
    const ModelShape *s = &r->model.shape;
    char gemms[DEVICE_NOTE_LEN], share[96] = "", compute[96];
    device_gemm_note(&r->device, r->config.path, gemms);
    log_banner(&r->log, device_is_gpu(&r->device) ? "gpu" : "device", "%s", r->device_text);
    if (gemms[0]) log_banner(&r->log, "", "%s", gemms);
    const double peak = peak_bf16_flops(device_gpu_name());
    if (peak > 0) snprintf(share, sizeof share, "; utilisation against %.4g TF, dense BF16", 1e-12 * peak);
    const char *note = r->config.log.fp8_every_steps > 0 && !s->counts_fp8
                           ? "; nothing is FP8, so log.fp8_every_steps counts nothing"
                           : "";
    log_banner(&r->log, "precision", "compute %s, moments %s; gnorm is before clipping%s%s",
               s->fp8                ? fp8_text(&r->config.precision.fp8, compute, sizeof compute)
               : s->act == DTYPE_F32 ? "fp32"
                                     : "bf16",
               s->moment == DTYPE_F32 ? "fp32" : "bf16", share, note);
}

static void memory_line(Run *r) {
    const Model *m = &r->model;
    char total[32], keep[32], slots[32], scratch[32], text[32], room[64] = "", rows[64] = "", remade[96],
                                                                makes[128] = "";
    const DeviceMemory *d = &r->device.memory;
    if (d->total > 0)
        snprintf(room, sizeof room, " of %s", format_bytes(text, sizeof text, (double)(d->free + d->held)));
    if (memory_rows(m) > 0)
        snprintf(rows, sizeof rows, ", driver and libraries %s",
                 format_bytes(text, sizeof text, (double)memory_rows(m)));
    if (m->shape.recompute & ~RECOMPUTE_UNASKED)
        snprintf(makes, sizeof makes, " (recomputes %s)", recompute_text(remade, sizeof remade, m->shape.recompute));
    log_banner(&r->log, "memory", "%s%s: state %s, activations %s%s, scratch %s%s",
               format_bytes(total, sizeof total, (double)memory_total(m)), room,
               format_bytes(keep, sizeof keep, (double)m->keep.peak),
               format_bytes(slots, sizeof slots, (double)m->slots.peak), makes,
               format_bytes(scratch, sizeof scratch, (double)m->scratch.peak), rows);
}

/* What rank 0 has of the model, and how many micro-batches it has under way. */
static void pipeline_line(Run *r) {
    const RankPart *part = &r->model.shape.part;
    char chunks[160] = "";
    size_t used = 0;
    if (!r->trainer.pipeline) return;
    for (int c = 0; c < part->n_chunks; c++) {
        const Chunk *chunk = &part->chunk[c];
        used += (size_t)snprintf(chunks + used, sizeof chunks - used, "%s%s%d of %d layers%s, %d under way",
                                 c ? "; " : "", chunk->embeds ? "embedding, " : "", chunk->end - chunk->first,
                                 r->model.shape.L, chunk->has_loss ? ", head" : "", chunk->n_slots[SLOT_WEIGHT]);
    }
    log_banner(&r->log, "pipeline", "%s, up to %d micro-batches; rank 0: %s", r->config.parallel.schedule,
               part->n_batches, chunks);
}

void banner_print(Run *r) {
    const ModelShape *s = &r->model.shape;
    char title[256];
    log_title(&r->log, "%s", version_text(title, sizeof title));
    model_line(r);
    config_line(r);
    data_line(r);
    const int64_t first = batch_at(&r->config, 0, r->trainer.batch_unit);
    char split[96], mesh[256];
    const int64_t ranks = r->comm->mesh.n_data;
    if (ranks > 1)
        snprintf(split, sizeof split, ": %lld ranks x micro-batch %lld x %lld", (long long)ranks, (long long)s->B,
                 (long long)(first / (ranks * s->B)));
    else
        snprintf(split, sizeof split, ", micro-batches of %lld", (long long)s->B);
    log_banner(&r->log, "batch", "%lld x %lld = %lld tokens a step%s; %lld steps", (long long)first, (long long)s->S,
               (long long)(first * s->S), split, (long long)r->trainer.length.steps);
    const int world = r->comm->mesh.world;
    RankPlace *places = places_gather(device_gpu_bus());
    ranks_text(r->comm, s, places_n_hosts(places, world), mesh, sizeof mesh);
    if (world > 1 || r->comm->about[0]) log_banner(&r->log, "mesh", "%s", mesh);
    places_print(&r->log, places, world);
    free(places);
    if (r->experts_note[0]) log_banner(&r->log, "experts", "%s", r->experts_note);
    pipeline_line(r);
    device_lines(r);
    memory_line(r);
    const int64_t bytes = ranks_checkpoint_bytes(&r->model.params);
    char keeps[32] = "all";
    if (r->config.checkpoint.keep_last > 0) snprintf(keeps, sizeof keeps, "%d", r->config.checkpoint.keep_last);
    log_banner(&r->log, "files", "%s: checkpoints of %s, keeps %s; log.jsonl", r->config.run.dir,
               format_file_size((double)bytes).text, keeps);
    log_banner(&r->log, "", "%s", r->saver_note);
    log_banner(&r->log, "resume", "%s", r->resume_note);
    if (r->is_fresh && !r->args->init_from && !r->last_checkpoint[0])
        log_banner(&r->log, "", "loss should start near ln %lld = %.2f", (long long)s->V, log((double)s->V));
    log_banner(&r->log, "stop", "Ctrl-C, kill -USR1 or touch %s/STOP: saves, exit 3", r->config.run.dir);
    if (!r->tokenizer && r->config.sample.every_steps > 0)
        log_warn(&r->log, r->trainer.state.step,
                 "no tokenizer (data.tokenizer, or data.json beside the shards): no samples");
}

static void plan_arena(Run *r, const Arena *a, const char *word) {
    char total[32], bytes[32];
    log_banner(&r->log, word, "%s", format_bytes(total, sizeof total, (double)a->peak));
    for (int i = 0; i < a->n_items; i++)
        log_banner(&r->log, "", "%12s  %s", format_bytes(bytes, sizeof bytes, (double)a->items[i].bytes),
                   a->items[i].name);
}

/* What the device takes beside the arenas, and what the host pins for it. */
static void plan_rows(Run *r) {
    char bytes[32];
    const DeviceMemory *d = &r->device.memory;
    if (memory_rows(&r->model) > 0)
        log_banner(&r->log, "driver", "%s and libraries, %s",
                   format_bytes(bytes, sizeof bytes, (double)memory_rows(&r->model)),
                   d->is_measured ? "measured" : "as expected without looking at the GPU");
    for (int i = 0; i < MEMORY_ROWS; i++) {
        const int64_t row = memory_row(&r->model, (MemoryRow)i);
        if (row > 0)
            log_banner(&r->log, "", "%12s  %s", format_bytes(bytes, sizeof bytes, (double)row), memory_row_name[i]);
    }
    if (r->model.host.n_items > 0) plan_arena(r, &r->model.host, "host");
}

/* What each choice of memory.recompute saves, given the others as they are, and what it costs. */
static void plan_recompute(Run *r) {
    const Model *m = &r->model;
    const double flops = shape_flops_per_token(&m->shape);
    char bytes[32], cost[64], remade[96];
    log_banner(&r->log, "recompute", "%s", recompute_text(remade, sizeof remade, m->shape.recompute));
    log_banner(&r->log, "", "%14s  %12s  %s", "choice", "saves", "FLOPs a token");
    for (int i = 0; i < RECOMPUTE_CHOICES; i++) {
        const RecomputeChoice *choice = &recompute_choices[i];
        const int64_t saved = memory_saved_by(m, choice->bit);
        const double extra = shape_recompute_flops(&m->shape, choice->bit);
        snprintf(cost, sizeof cost, "+%s (%.2f %%)", format_count(extra).text, 100 * extra / flops);
        log_banner(&r->log, "", "%14s  %12s  %s%s", choice->name, format_bytes(bytes, sizeof bytes, (double)saved),
                   cost, m->shape.recompute & choice->bit ? ", chosen" : "");
    }
}

void banner_plan(Run *r) {
    char title[256], err[ERR_LEN], hint[ERR_LEN];
    log_title(&r->log, "%s", version_text(title, sizeof title));
    model_line(r);
    config_line(r);
    const RunLength length = run_length(&r->config, 1);
    log_banner(&r->log, "run", "%lld steps, %s tokens, %.3g FLOPs", (long long)length.steps,
               format_count((double)length.tokens).text,
               (double)length.tokens * shape_flops_per_token(&r->model.shape));
    memory_line(r);
    plan_arena(r, &r->model.keep, "state");
    plan_arena(r, &r->model.slots, "activations");
    char bytes[32];
    const ModelShape *s = &r->model.shape;
    log_banner(&r->log, "generation",
               "%lld positions over the activations; latent kv cache %s, %lld numbers a token and layer",
               (long long)r->model.generate_len,
               format_bytes(bytes, sizeof bytes, (double)tensor_bytes(r->model.cache)),
               (long long)(s->Dc + s->attention.rope));
    log_banner(&r->log, "scratch", "%s, shared by all blocks",
               format_bytes(bytes, sizeof bytes, (double)r->model.scratch.peak));
    plan_rows(r);
    plan_recompute(r);
    if (memory_check(&r->model, err, hint) != 0) log_banner(&r->log, "too large", "%s; %s", err, hint);
}
