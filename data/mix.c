/* See mix.h. */
#include "mix.h"

#include <math.h>

#include "kernels/base/check.h"

void mix_init(Mix *m, const double *weights, int n) {
    CHECK(n >= 1 && n <= SOURCES_MAX, "%d sources", n);
    m->n = n;
    double behind = 0;
    for (int k = n - 1; k >= 0; k--) {
        CHECK(weights[k] > 0 && isfinite(weights[k]), "weight %g", weights[k]);
        behind += weights[k];
        m->share[k] = (uint64_t)ldexp(weights[k] / behind, 63);
    }
}

/* Of the first n numbers at the choice of source k, those that are its. */
static int64_t count_of(const Mix *m, int k, int64_t n) {
    return k == m->n - 1 ? n : (int64_t)((unsigned __int128)n * m->share[k] >> 63);
}

int mix_at(const Mix *m, int64_t i, int64_t *local) {
    CHECK(i >= 0 && i < INT64_MAX, "sample %lld", (long long)i);
    for (int k = 0;; k++) {
        const int64_t before = count_of(m, k, i);
        if (count_of(m, k, i + 1) > before) {
            *local = before;
            return k;
        }
        i -= before;
    }
}

void mix_counts(const Mix *m, int64_t i, int64_t *counts) {
    for (int k = 0; k < m->n; k++) {
        counts[k] = count_of(m, k, i);
        i -= counts[k];
    }
}
