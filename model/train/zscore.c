/* See zscore.h. */
#include "zscore.h"

#include <math.h>

#include "kernels/base/check.h"

enum { VALUES_NEEDED = 16 };

void zscore_init(ZWindow *w, int size) {
    CHECK(size >= 1 && size <= Z_WINDOW_MAX, "a z-score window of %d, at most %d", size, Z_WINDOW_MAX);
    *w = (ZWindow){.size = size};
}

void zscore_push(ZWindow *w, double x) {
    if (!isfinite(x)) return;
    if (w->n < w->size) {
        w->value[w->n++] = x;
        return;
    }
    w->value[w->head] = x;
    w->head = (w->head + 1) % w->size;
}

/* False if the values held give no scale. Equal values may differ from their rounded mean in the last bits: a deviation
 * of that order is none. */
static bool mean_and_deviation(const ZWindow *w, double *mean, double *deviation) {
    if (w->n < VALUES_NEEDED && w->n < w->size) return false;
    double sum = 0, squares = 0;
    for (int i = 0; i < w->n; i++) sum += w->value[i];
    *mean = sum / w->n;
    for (int i = 0; i < w->n; i++) squares += (w->value[i] - *mean) * (w->value[i] - *mean);
    *deviation = sqrt(squares / w->n);
    return isfinite(*deviation) && *deviation > 1e-13 * fabs(*mean);
}

double zscore_of(const ZWindow *w, double x) {
    double mean, deviation;
    return isfinite(x) && mean_and_deviation(w, &mean, &deviation) ? (x - mean) / deviation : 0;
}

double zscore_threshold(const ZWindow *w, double z) {
    double mean, deviation;
    return z > 0 && mean_and_deviation(w, &mean, &deviation) ? mean + z * deviation : INFINITY;
}
