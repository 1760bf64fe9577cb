/* The end of a step: sums over everything, the decision whether to update, AdamW, the router bias. */
#include <tgmath.h>

#include "cpu.h"
#include "cpu_ops.h"

enum { PARTIALS_AT_ONCE = 64 };

/* ---- sums -------------------------------------------------------------------------------------------------------- */

static CPU_CLONES double sum_of(const real *x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)x[i];
    return sum;
}

static CPU_CLONES double sum_of_squares(const real *x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

/* Partials of SUM_PARTIAL elements, added in order; threads share the partials. */
static double sum_in_partials(const real *x, int64_t n) {
    const int64_t n_partials = (n + SUM_PARTIAL - 1) / SUM_PARTIAL;
    double total = 0;
    for (int64_t first = 0; first < n_partials; first += PARTIALS_AT_ONCE) {
        double partial[PARTIALS_AT_ONCE];
        const int64_t count = n_partials - first < PARTIALS_AT_ONCE ? n_partials - first : PARTIALS_AT_ONCE;
#pragma omp parallel for schedule(static)
        for (int64_t p = 0; p < count; p++) {
            const int64_t at = (first + p) * SUM_PARTIAL;
            partial[p] = sum_of(x + at, n - at < SUM_PARTIAL ? n - at : SUM_PARTIAL);
        }
        for (int64_t p = 0; p < count; p++) total += partial[p];
    }
    return total;
}

void cpu_loss_sum(StepStats *stats, Tensor loss, int depth, Stream s) {
    (void)s;
    stats->loss_sum[depth] += sum_in_partials((const real *)loss.data, loss.shape[0]);
}

void cpu_grad_squares(Tensor partial, Tensor g, const Interval *intervals, Stream s) {
    (void)s;
    double *sum = (double *)partial.data;
#pragma omp parallel for schedule(dynamic)
    for (int64_t i = 0; i < partial.shape[0]; i++)
        sum[i] = sum_of_squares((const real *)g.data + intervals[i].first, intervals[i].n);
}

void cpu_grad_norm(StepStats *stats, Tensor partial, Stream s) {
    (void)s;
    double sum = 0;
    for (int64_t i = 0; i < partial.shape[0]; i++) sum += ((const double *)partial.data)[i];
    stats->grad_norm_sq = sum;
}

/* ---- gate -------------------------------------------------------------------------------------------------------- */

static int32_t skip_reason(const StepStats *stats, const UpdateState *state, const StepParams *params) {
    if (state->has_overflow) return SKIP_OVERFLOW;
    if (params->inv_tokens == 0) return SKIP_NO_TARGETS;
    for (int depth = 0; depth < LOSSES_MAX; depth++)
        if (params->loss_scale[depth] != 0 && !isfinite(stats->loss_sum[depth])) return SKIP_LOSS_NOT_FINITE;
    if (!isfinite(stats->grad_norm)) return SKIP_NORM_NOT_FINITE;
    if (stats->loss_sum[0] * params->inv_tokens > params->skip_loss_above) return SKIP_LOSS_SPIKE;
    if (stats->grad_norm > params->skip_norm_above) return SKIP_NORM_SPIKE;
    return SKIP_NONE;
}

void cpu_update_gate(StepStats *stats, UpdateState *state, const StepParams *params, Stream s) {
    (void)s;
    const double norm = params->inv_tokens == 0 ? 0 : sqrt(stats->grad_norm_sq) * params->inv_tokens;
    const bool is_clipped = params->grad_clip > 0 && norm > params->grad_clip;
    stats->grad_norm = norm;
    if (stats->overflow > 0) state->has_overflow = 1;
    stats->skip = skip_reason(stats, state, params);
    stats->grad_scale = stats->skip ? 0 : params->inv_tokens * (is_clipped ? params->grad_clip / norm : 1);
    if (stats->skip == SKIP_OVERFLOW) return; /* not the last word on this step */
    if (stats->skip) {
        state->skipped_total++;
        state->skipped_in_a_row++;
    } else {
        state->skipped_in_a_row = 0;
        state->adam_t++;
    }
}

/* ---- AdamW ------------------------------------------------------------------------------------------------------- */

typedef struct {
    real lr, beta1, beta2, eps, decay, grad_scale;
    real m_correction, v_correction; /* 1 / (1 - beta^t) */
} AdamW;

/* The moments of this step are used as computed and rounded when stored. */
static CPU_CLONES void adamw_piece(const Tensor *copy, const Tensor *master, const Tensor *m, const Tensor *v,
                                   const Tensor *grad, AdamW a) {
    const int64_t n = master->shape[0];
    real m_buf[row_buf(*m)], v_buf[row_buf(*v)], copy_buf[row_buf(*copy)];
    const real *g = (const real *)grad->data, *m_in = row_in(*m, 0, m_buf), *v_in = row_in(*v, 0, v_buf);
    real *w = (real *)master->data, *m_out = row_out(*m, 0, m_buf), *v_out = row_out(*v, 0, v_buf);
    for (int64_t i = 0; i < n; i++) {
        const real gi = g[i] * a.grad_scale;
        const real mi = a.beta1 * m_in[i] + (1 - a.beta1) * gi;
        const real vi = a.beta2 * v_in[i] + (1 - a.beta2) * (gi * gi);
        m_out[i] = mi;
        v_out[i] = vi;
        const real root = sqrt(vi * a.v_correction);
        w[i] -= a.lr * (mi * a.m_correction / (root + a.eps) + a.decay * w[i]);
    }
    row_done(*m, 0, m_out);
    row_done(*v, 0, v_out);
    if (tensor_is_none(*copy)) return;
    real *rounded = row_out(*copy, 0, copy_buf);
    for (int64_t i = 0; i < n; i++) rounded[i] = w[i];
    row_done(*copy, 0, rounded);
}

void cpu_adamw_cast(Tensor copy, Tensor copy_t, Tensor master, Tensor m, Tensor v, Tensor grad, bool decay,
                    const StepParams *params, const StepStats *stats, const UpdateState *state, Stream s) {
    if (stats->skip) return;
    const double t = (double)state->adam_t;
    const AdamW a = {.lr = (real)params->lr,
                     .beta1 = (real)params->beta1,
                     .beta2 = (real)params->beta2,
                     .eps = (real)params->eps,
                     .decay = decay ? (real)params->weight_decay : 0,
                     .grad_scale = (real)stats->grad_scale,
                     .m_correction = (real)(1 / (1 - pow(params->beta1, t))),
                     .v_correction = (real)(1 / (1 - pow(params->beta2, t)))};
    const int64_t n = master.shape[0];
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < n; first += SUM_PARTIAL) {
        const int64_t count = n - first < SUM_PARTIAL ? n - first : SUM_PARTIAL;
        const Tensor w_piece = tensor_rows(master, first, count), g_piece = tensor_rows(grad, first, count);
        const Tensor m_piece = tensor_rows(m, first, count), v_piece = tensor_rows(v, first, count);
        const Tensor copy_piece = copy.dtype == DTYPE_BF16 ? tensor_rows(copy, first, count) : tensor_none();
        adamw_piece(&copy_piece, &w_piece, &m_piece, &v_piece, &g_piece, a);
    }
    if (copy.dtype == DTYPE_E4M3) cpu_quantize_weight(copy, copy_t, master, s);
}

/* ---- router bias ------------------------------------------------------------------------------------------------- */

/* The sign of mean(counts) - counts[i] in integers: exact. */
void cpu_bias_step(Tensor bias, Tensor counts, const StepParams *params, const StepStats *stats, Stream s) {
    (void)s;
    if (stats->skip) return;
    const int64_t E = bias.shape[0];
    const int32_t *count = (const int32_t *)counts.data;
    const real speed = (real)params->bias_speed;
    int64_t total = 0;
    for (int64_t i = 0; i < E; i++) total += count[i];
    for (int64_t i = 0; i < E; i++) {
        const int64_t missing = total - count[i] * E;
        ((real *)bias.data)[i] += missing > 0 ? speed : missing < 0 ? -speed : 0;
    }
}
