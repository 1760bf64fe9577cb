/* Softmax and cross entropy of one row of logits, and its gradient in place of the logits. Padded columns never enter:
 * they are no tokens. */
#include <tgmath.h>

#include "cpu.h"
#include "cpu_ops.h"

enum { MAX_LANES = 16 };

/* In lanes of its own, because without fast-math a maximum is not reduced in vectors. A NaN may be passed over here; it
 * comes through the sum of exponentials. */
static inline real largest_of(const real *x, int64_t n) {
    real lane[MAX_LANES], largest = x[0];
    for (int64_t l = 0; l < MAX_LANES; l++) lane[l] = x[0];
    int64_t i = 0;
    for (; i + MAX_LANES <= n; i += MAX_LANES)
        for (int64_t l = 0; l < MAX_LANES; l++) lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
    for (; i < n; i++) largest = x[i] > largest ? x[i] : largest;
    for (int64_t l = 0; l < MAX_LANES; l++) largest = lane[l] > largest ? lane[l] : largest;
    return largest;
}

/* Returns the loss. gradient_scale NULL: the logits stay. */
static CPU_CLONES real cross_entropy_row(const Tensor *logits, int64_t row, int32_t target, int64_t vocab,
                                         const real *gradient_scale) {
    const int64_t width = logits->shape[1];
    real buf[row_buf(*logits)], loss = 0;
    if (target < 0) {
        if (!gradient_scale) return 0;
        real *out = row_out(*logits, row, buf);
        for (int64_t i = 0; i < width; i++) out[i] = 0;
        row_done(*logits, row, out);
        return 0;
    }
    const real *x = row_in(*logits, row, buf);
    const real largest = largest_of(x, vocab);
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < vocab; i++) sum += exp_real(x[i] - largest);
    loss = log(sum) - (x[target] - largest);
    if (!gradient_scale) return loss;
    real *out = row_out(*logits, row, buf); /* x itself, element by element */
    const real factor = *gradient_scale / sum;
    for (int64_t i = 0; i < vocab; i++) out[i] = exp_real(x[i] - largest) * factor;
    out[target] -= *gradient_scale;
    for (int64_t i = vocab; i < width; i++) out[i] = 0;
    row_done(*logits, row, out);
    return loss;
}

void cpu_cross_entropy(Tensor loss, Tensor logits, Tensor targets, int64_t vocab, int depth, bool want_gradient,
                       const StepParams *params, Stream s) {
    (void)s;
    const real scale = want_gradient ? (real)params->loss_scale[depth] : 0;
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < logits.shape[0]; c++)
        ((real *)loss.data)[c] =
            cross_entropy_row(&logits, c, ((const int32_t *)targets.data)[c], vocab, want_gradient ? &scale : NULL);
}
