/* Integer arithmetic that layouts need everywhere; arguments are not negative. Floor 0. */
#ifndef TRAIN_MOE_INTS_H
#define TRAIN_MOE_INTS_H

#include <stdint.h>

static inline int64_t min_i64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static inline int64_t max_i64(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static inline int64_t ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* The next multiple of `to`. */
static inline int64_t round_up(int64_t n, int64_t to) {
    return ceil_div(n, to) * to;
}

#endif
