/* See log.h: what FP8 tensors held. */
#include <string.h>

#include "log.h"
#include "log_parts.h"

static const double saturated_warned = 0.05;

static double share(int64_t n, const TileStats *s) {
    return s->values > 0 ? (double)n / (double)s->values : 0;
}

static double amax_of_stats(const TileStats *s) {
    const uint32_t bits = (uint32_t)s->amax_bits;
    float amax;
    memcpy(&amax, &bits, sizeof amax);
    return (double)amax;
}

/* From the first exponent that there is to the last. */
static void record_scales(LogFile *f, const TileStats *s) {
    int first = 0, end = SCALE_EXPONENTS;
    while (first < end && !s->scales[first]) first++;
    while (end > first && !s->scales[end - 1]) end--;
    record_open(f, "scales", '[');
    if (first < end) record_integer(f, NULL, SCALE_EXPONENT_FIRST + first);
    for (int i = first; i < end; i++) record_integer(f, NULL, s->scales[i]);
    record_close(f, ']');
}

static void record_tensor(LogFile *f, const char *name, const TileStats *s) {
    record_open(f, name, '{');
    record_number(f, "amax", amax_of_stats(s));
    record_number(f, "zero", share(s->zeros, s));
    record_number(f, "subnormal", share(s->subnormals, s));
    record_number(f, "saturated", share(s->largest, s));
    record_integer(f, "nan", s->nans);
    record_scales(f, s);
    record_close(f, '}');
}

/* NaN is worse than any share of saturated values. */
static double badness(const TileStats *s) {
    if (s->nans > 0) return 1 + share(s->nans, s);
    return share(s->largest, s) > saturated_warned ? share(s->largest, s) : 0;
}

static void warn_of_worst(Logger *l, const StepReport *r) {
    int worst = -1, n_bad = 0;
    for (int i = 0; i < r->n_blocks * OBSERVED_COUNT; i++) {
        const double bad = badness(&r->fp8[i]);
        n_bad += bad > 0;
        if (bad > (worst < 0 ? 0 : badness(&r->fp8[worst]))) worst = i;
    }
    if (worst < 0) return;
    const TileStats *s = &r->fp8[worst];
    char others[64] = "";
    if (n_bad > 1) snprintf(others, sizeof others, "; and %d other tensors", n_bad - 1);
    if (s->nans > 0)
        log_warn(l, r->step, "fp8: layer %d %s has %lld NaN of %lld values%s", worst / OBSERVED_COUNT,
                 observed_name(worst % OBSERVED_COUNT), (long long)s->nans, (long long)s->values, others);
    else
        log_warn(l, r->step, "fp8: layer %d %s is saturated, %.1f %% of its values are 448 times their scale%s",
                 worst / OBSERVED_COUNT, observed_name(worst % OBSERVED_COUNT), 100 * share(s->largest, s), others);
}

void log_fp8(Logger *l, const StepReport *r) {
    LogFile *f = &l->file;
    record_start(f, "fp8", r->step);
    record_open(f, "layers", '[');
    for (int block = 0; block < r->n_blocks; block++) {
        record_open(f, NULL, '{');
        for (int i = 0; i < OBSERVED_COUNT; i++) {
            const TileStats *s = &r->fp8[block * OBSERVED_COUNT + i];
            if (s->values > 0) record_tensor(f, observed_name(i), s);
        }
        record_close(f, '}');
    }
    record_close(f, ']');
    end_record(l);
    warn_of_worst(l, r);
}
