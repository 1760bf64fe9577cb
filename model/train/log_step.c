/* See log.h: what is told about a step. */
#include <math.h>

#include "format.h"
#include "kernels/base/check.h"
#include "log.h"
#include "log_parts.h"

static const double spike_z = 4, data_share_shown = 0.05;

const char *skip_reason(int skip) {
    switch (skip) {
    case SKIP_NONE: return "";
    case SKIP_NO_TARGETS: return "no targets";
    case SKIP_LOSS_NOT_FINITE: return "loss not finite";
    case SKIP_NORM_NOT_FINITE: return "gradient norm not finite";
    case SKIP_LOSS_SPIKE: return "loss spike";
    case SKIP_NORM_SPIKE: return "gradient norm spike";
    case SKIP_OVERFLOW: return "expert rows did not fit";
    }
    CHECK(false, "skip reason %d", skip);
    return "";
}

double maxvio(const int32_t *load, int n) {
    int64_t sum = 0;
    int32_t max = 0;
    for (int i = 0; i < n; i++) {
        sum += load[i];
        if (load[i] > max) max = load[i];
    }
    return sum > 0 ? (double)max * n / (double)sum - 1 : 0;
}

void maxvio_of_layers(const int32_t *load, int n_layers, int n_experts, double *worst, double *mean) {
    *worst = *mean = 0;
    for (int i = 0; i < n_layers; i++) {
        double x = maxvio(load + (int64_t)i * n_experts, n_experts);
        if (x > *worst) *worst = x;
        *mean += x / n_layers;
    }
}

/* [least, mean, largest] of each layer. */
static void record_bias(LogFile *f, const StepReport *r) {
    record_open(f, "bias", '[');
    for (int i = 0; i < r->n_layers; i++) {
        const float *bias = r->bias + (int64_t)i * r->n_experts;
        double range[3] = {bias[0], 0, bias[0]};
        for (int e = 0; e < r->n_experts; e++) {
            range[0] = fmin(range[0], bias[e]);
            range[1] += bias[e];
            range[2] = fmax(range[2], bias[e]);
        }
        range[1] /= r->n_experts;
        record_numbers(f, NULL, range, 3);
    }
    record_close(f, ']');
}

/* The share of the peak; negative if it is not known. More than the peak is no share but a wrong peak. */
static double utilisation(const LogRate *rate, double tokens_per_s) {
    const double share = rate->peak_flops > 0 ? tokens_per_s * rate->flops_per_token / rate->peak_flops : -1;
    return share <= 1 ? share : -1;
}

static void record_speed(LogFile *f, const LogRate *rate, double tokens_per_s) {
    record_number(f, "tokens_per_s", tokens_per_s);
    if (rate->flops_per_token <= 0) return;
    record_number(f, "tflops", 1e-12 * tokens_per_s * rate->flops_per_token);
    const double mfu = utilisation(rate, tokens_per_s);
    if (mfu >= 0) record_number(f, "mfu", mfu);
}

static void record_gpu(LogFile *f, const GpuHealth *h) {
    const char *names[GPU_THROTTLE_NAMES_MAX];
    const int n = gpu_health_throttle_names(names, h->throttle);
    record_open(f, "gpu", '{');
    record_number(f, "temperature_c", h->temperature_c);
    record_number(f, "sm_clock_mhz", h->sm_clock_mhz);
    record_number(f, "power_w", h->power_w);
    record_open(f, "throttle", '[');
    for (int i = 0; i < n; i++) record_string(f, NULL, names[i]);
    record_close(f, ']');
    if (h->ecc_uncorrected >= 0) record_integer(f, "ecc_uncorrected", h->ecc_uncorrected);
    record_number(f, "read_ms", h->read_ms);
    record_close(f, '}');
}

static void record_step(Logger *l, const StepReport *r) {
    LogFile *f = &l->file;
    record_start(f, "step", r->step);
    record_integer(f, "tokens", r->tokens);
    record_number(f, "loss", r->loss[0]);
    if (r->n_losses > 1) record_numbers(f, "mtp", r->loss + 1, r->n_losses - 1);
    if (r->n_layers > 0) record_number(f, "balance", r->balance);
    record_number(f, "gnorm", r->gnorm);
    record_number(f, "lr", r->lr);
    record_string(f, "skip", r->skip ? skip_reason(r->skip) : NULL);
    record_number(f, "loss_z", r->loss_z);
    record_number(f, "norm_z", r->norm_z);
    if (r->n_layers > 0) {
        record_number(f, "maxvio", r->maxvio);
        record_number(f, "maxvio_mean", r->maxvio_mean);
    }
    if (r->n_expert_ranks > 1) {
        record_number(f, "rank_load", r->rank_load);
        record_number(f, "rank_load_mean", r->rank_load_mean);
    }
    if (r->n_layers > 0 && r->load) {
        record_open(f, "load", '[');
        for (int i = 0; i < r->n_layers; i++) record_counts(f, r->load + (int64_t)i * r->n_experts, r->n_experts);
        record_close(f, ']');
    }
    if (r->n_layers > 0 && r->bias) record_bias(f, r);
    if (r->has_hash) record_hash(f, "hash", r->hash);
    record_number(f, "ms", r->step_ms);
    record_number(f, "data_wait_ms", r->data_wait_ms);
    record_speed(f, &l->rate, 1000 * (double)r->tokens_in_step / r->step_ms);
    if (r->has_gpu) record_gpu(f, &r->gpu);
    if (r->ranks.n > 1) {
        const double times[3] = {r->ranks.least_ms, r->ranks.median_ms, r->ranks.most_ms};
        record_numbers(f, "ranks_ms", times, 3);
        record_integer(f, "slowest", r->ranks.slowest);
        record_string(f, "slowest_host", r->ranks.host);
    }
    end_record(l);
}

/* Seconds to the end of the run; negative if there is nothing to tell it by. */
static double seconds_left(const Logger *l, const StepReport *r) {
    double rate = speed_rate(&l->speed);
    if (rate <= 0 || r->tokens_total <= 0) return -1;
    int64_t left = r->tokens_total - r->tokens;
    return left > 0 ? (double)left / rate : 0;
}

static void add_speed(Line *line, const LogRate *rate, double tokens_per_s) {
    line_add(line, 3, "%5s tok/s%s", format_rate(tokens_per_s).text, rate->is_gpu ? "/gpu" : "");
    if (!rate->is_gpu || rate->flops_per_token <= 0) return;
    const double tflops = 1e-12 * tokens_per_s * rate->flops_per_token, mfu = utilisation(rate, tokens_per_s);
    char share[16] = "";
    if (mfu >= 0) snprintf(share, sizeof share, " %4.1f%%", 100 * mfu);
    line_add(line, 6, "%3.*f TF%s", tflops < 9.95, tflops, share);
}

/* Do the others wait for one rank, a fifth of a step that is long enough to tell? */
static bool is_held_up(const StepReport *r) {
    enum { SHORT_MS = 100 };
    return r->ranks.n > 1 && r->step_ms > SHORT_MS && r->ranks.most_ms - r->ranks.median_ms > r->step_ms / 5;
}

/* The priorities decide what a narrow terminal shows: the larger, the sooner it goes. */
static void print_step(Logger *l, const StepReport *r) {
    Line line;
    SpeedInterval interval = speed_close(&l->speed);
    line_start(&line, "step", r->step, r->steps_total);
    line_add(&line, 4, "%5s", format_count((double)r->tokens).text);
    line_add(&line, 0, "loss %6.4f", r->loss[0]);
    for (int i = 1; i < r->n_losses; i++) line_add(&line, 6, "mtp %6.4f", r->loss[i]);
    line_add(&line, 2, "gnorm %5.*f", r->gnorm < 99.995 ? 2 : r->gnorm < 999.95 ? 1 : 0, r->gnorm);
    line_add(&line, 5, "lr %.2e", r->lr);
    if (r->n_layers > 0) line_add(&line, 7, "maxvio %.2f", r->maxvio);
    if (interval.seconds > 0) {
        line_add(&line, 8, "%7s", format_step_time(1000 * interval.seconds / (double)interval.steps).text);
        add_speed(&line, &l->rate, (double)interval.tokens / interval.seconds);
    }
    double left = seconds_left(l, r);
    if (left >= 0) line_add(&line, 1, "eta %-6s", format_duration(left).text);
    if (r->skip) line_flag(&line, "skip (%s)", skip_reason(r->skip));
    if (l->worst_z > spike_z) line_flag(&line, "spike %s%.1f", l->worst_is_norm ? "gnorm " : "", l->worst_z);
    if (l->was_throttled) line_flag(&line, "throttle");
    if (l->ecc_errors > 0) line_flag(&line, "ecc %lld", (long long)l->ecc_errors);
    l->worst_z = 0;
    l->was_throttled = false;
    l->ecc_errors = 0;
    if (interval.seconds > 0 && l->data_wait_s >= data_share_shown * interval.seconds)
        line_flag(&line, "data %.0f %%", 100 * l->data_wait_s / interval.seconds);
    l->data_wait_s = 0;
    if (is_held_up(r))
        line_flag(&line, "rank %d (%.40s) is slow: %.0f%%", r->ranks.slowest, r->ranks.host,
                  100 * r->ranks.most_ms / r->ranks.median_ms);
    print_columns(l, l->out, &line);
}

void log_step(Logger *l, const StepReport *r) {
    l->step = r->step;
    l->steps_total = r->steps_total;
    l->tokens = r->tokens;
    speed_add(&l->speed, r->step_ms / 1000, r->tokens_in_step);
    l->data_wait_s += r->data_wait_ms / 1000;
    double z = fmax(r->loss_z, r->norm_z);
    if (z > l->worst_z) {
        l->worst_z = z;
        l->worst_is_norm = r->norm_z > r->loss_z;
    }
    if (r->has_gpu) {
        l->was_throttled |= gpu_health_is_throttled(&r->gpu);
        if (r->gpu.ecc_since_opening > l->ecc_seen) l->ecc_errors = l->ecc_seen = r->gpu.ecc_since_opening;
    }
    record_step(l, r);
    if (l->is_quiet) return;
    if (r->step == 1 || r->step == r->steps_total || r->step % l->every_steps == 0 || r->skip) print_step(l, r);
    char text[64];
    snprintf(text, sizeof text, "%lld/%lld  eta %s", (long long)r->step, (long long)r->steps_total,
             format_duration(seconds_left(l, r)).text);
    bar_draw(&l->bar, r->step, r->steps_total, text);
}
