/* The gate. The bias chooses, the unbiased score weighs: a bias that leaked into the weights would keep all shapes and
 * train a worse model. The balance loss has its own choice: the K largest unbiased scores, without groups (V3 eq. 18).
 */
#include "cpu.h"
#include "cpu_ops.h"

#define WEIGHT_SUM_MIN                                                                                                 \
    ((real)1e-20) /* added to sums of scores that are divided by; all scores may have underflowed   \
                                      */

/* The k largest values among those allowed (NULL: all), in descending order, ties to the lower index. Marks, not
 * values, exclude: the result is k different allowed indices even if all values are -inf or NaN. At least k must be
 * allowed. */
static void top_k(int32_t *chosen, int k, const real *values, const bool *allowed, int n) {
    int found = 0;
    for (int i = 0; i < n; i++) {
        if (allowed && !allowed[i]) continue;
        if (found == k && !(values[i] > values[chosen[k - 1]])) continue;
        int at = found < k ? found++ : k - 1;
        for (; at > 0 && values[i] > values[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = i;
    }
}

static void sort_ascending(int32_t *ids, int n) {
    for (int i = 1; i < n; i++) {
        int32_t id = ids[i];
        int at = i;
        for (; at > 0 && ids[at - 1] > id; at--) ids[at] = ids[at - 1];
        ids[at] = id;
    }
}

/* Marks the experts of the topk_group best groups. */
static void allow_groups(bool *allowed, const real *z, RouterShape shape) {
    const int size = shape.n_experts / shape.n_group;
    real group_score[shape.n_group];
    int32_t chosen[shape.topk_group];
    for (int g = 0; g < shape.n_group; g++) {
        int32_t best[2];
        const bool two = shape.group_score == GROUP_SCORE_TOP2 && size > 1;
        top_k(best, two ? 2 : 1, z + g * size, NULL, size);
        group_score[g] = z[g * size + best[0]] + (two ? z[g * size + best[1]] : 0);
    }
    top_k(chosen, shape.topk_group, group_score, NULL, shape.n_group);
    memset(allowed, 0, (size_t)shape.n_experts * sizeof *allowed);
    for (int i = 0; i < shape.topk_group; i++)
        for (int e = 0; e < size; e++) allowed[chosen[i] * size + e] = true;
}

static CPU_CLONES void score_row(real *score, const real *logit, int n, RouterScore kind) {
    if (kind == ROUTER_SIGMOID) {
        for (int i = 0; i < n; i++) score[i] = sigmoid_real(logit[i]);
        return;
    }
    real largest = logit[0], sum = 0;
    for (int i = 1; i < n; i++) largest = logit[i] > largest ? logit[i] : largest;
    for (int i = 0; i < n; i++) score[i] = exp_real(logit[i] - largest);
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += score[i];
    for (int i = 0; i < n; i++) score[i] /= sum;
}

static void choose_row(int32_t *ids, real *weights, const real *score, const real *bias, RouterShape shape) {
    const int E = shape.n_experts, K = shape.n_chosen;
    real z[E];
    bool allowed[E];
    for (int i = 0; i < E; i++) z[i] = bias ? score[i] + bias[i] : score[i];
    const bool has_groups = shape.topk_group < shape.n_group;
    if (has_groups) allow_groups(allowed, z, shape);
    top_k(ids, K, z, has_groups ? allowed : NULL, E);
    sort_ascending(ids, K);
    real sum = 0;
    for (int k = 0; k < K; k++) sum += score[ids[k]];
    const real factor = shape.normalize ? (real)shape.scale / (sum + WEIGHT_SUM_MIN) : (real)shape.scale;
    for (int k = 0; k < K; k++) weights[k] = score[ids[k]] * factor;
}

static void count_chosen(int32_t *count, const Tensor *ids) {
    for (int64_t t = 0; t < ids->shape[0]; t++) {
        const int32_t *id = (const int32_t *)ids->data + t * ids->ld;
        for (int64_t k = 0; k < ids->shape[1]; k++)
            if (id[k] >= 0) count[id[k]]++;
    }
}

/* share[i] += s_i / sum_j s_j. In double, because a sequence is long. */
static CPU_CLONES void add_shares(double *share, const real *score, int n) {
    real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < n; i++) sum += score[i];
    const real inverse = 1 / (sum + WEIGHT_SUM_MIN);
    for (int i = 0; i < n; i++) share[i] += (double)(score[i] * inverse);
}

/* Writes the counts of one sequence and returns its sum_i f_i P_i. One thread owns a sequence. */
static double balance_of_sequence(int32_t *count, const Tensor *scores, const int32_t *position, int64_t first,
                                  RouterShape shape) {
    const int E = shape.n_experts, K = shape.n_chosen;
    double share[E];
    int64_t n_tokens = 0;
    for (int i = 0; i < E; i++) count[i] = 0, share[i] = 0;
    for (int64_t t = first; t < first + shape.seq_len; t++) {
        if (position[t] < 0) continue;
        int32_t best[K];
        const real *score = (const real *)scores->data + t * scores->ld;
        top_k(best, K, score, NULL, E);
        for (int k = 0; k < K; k++) count[best[k]]++;
        add_shares(share, score, E);
        n_tokens++;
    }
    if (n_tokens == 0) return 0;
    double sum = 0;
    for (int i = 0; i < E; i++) sum += count[i] * share[i];
    return sum * E / ((double)K * (double)n_tokens * (double)n_tokens);
}

void cpu_router_forward(Tensor ids, Tensor weights, Tensor scores, Tensor counts, Tensor seq_count, StepStats *stats,
                        Tensor logits, Tensor bias, Tensor position, RouterShape shape, Stream s) {
    (void)s;
    const int64_t T = logits.shape[0], B = seq_count.shape[0];
    const int K = shape.n_chosen;
    const int32_t *at = (const int32_t *)position.data;
#pragma omp parallel for schedule(static) if (T > 1)
    for (int64_t t = 0; t < T; t++) {
        real *score = (real *)scores.data + t * scores.ld, *weight = (real *)weights.data + t * weights.ld;
        int32_t *id = (int32_t *)ids.data + t * ids.ld;
        score_row(score, (const real *)logits.data + t * logits.ld, shape.n_experts, shape.score);
        choose_row(id, weight, score, (const real *)bias.data, shape);
        if (at[t] >= 0) continue;
        for (int k = 0; k < K; k++) id[k] = -1, weight[k] = 0;
    }
    if (!tensor_is_none(counts)) count_chosen((int32_t *)counts.data, &ids);
    double balance[B + 1];
#pragma omp parallel for schedule(static) if (B > 1)
    for (int64_t b = 0; b < B; b++)
        balance[b] =
            balance_of_sequence((int32_t *)seq_count.data + b * seq_count.ld, &scores, at, b * shape.seq_len, shape);
    double sum = 0;
    for (int64_t b = 0; b < B; b++) sum += balance[b];
    stats->balance_sum += sum;
}

typedef struct {
    Tensor dlogits, dweights, ids, weights, scores, seq_count;
    RouterShape shape;
} RouterGrad;

/* With sigma = the sum of the chosen scores and w_k = scale s_k / sigma:  ds_k = (scale dw_k - sum_j dw_j w_j) / sigma.
 * With Sigma = the sum of all scores and s' = s / Sigma, the balance loss adds c / S (f_i - sum_j f_j s'_j) / Sigma;
 * balance_factor = c E / (K S^2) turns counts into c f_i / S. */
static CPU_CLONES void backward_row(const RouterGrad *a, real balance_factor, int64_t t) {
    const int E = a->shape.n_experts, K = a->shape.n_chosen;
    const real *score = (const real *)a->scores.data + t * a->scores.ld;
    const real *weight = (const real *)a->weights.data + t * a->weights.ld;
    const real *dweight = (const real *)a->dweights.data + t * a->dweights.ld;
    const int32_t *id = (const int32_t *)a->ids.data + t * a->ids.ld;
    const int32_t *count = (const int32_t *)a->seq_count.data + t / a->shape.seq_len * a->seq_count.ld;
    real ds[E], dlogit_buf[row_buf(a->dlogits)], *dlogit = row_out(a->dlogits, t, dlogit_buf);

    real sum = WEIGHT_SUM_MIN, mean_count = 0;
#pragma omp simd reduction(+ : sum, mean_count)
    for (int i = 0; i < E; i++) {
        sum += score[i];
        mean_count += (real)count[i] * score[i];
    }
    mean_count /= sum;
    for (int i = 0; i < E; i++) ds[i] = balance_factor * ((real)count[i] - mean_count) / sum;

    real chosen_sum = WEIGHT_SUM_MIN, dot = 0;
    for (int k = 0; k < K; k++) chosen_sum += score[id[k]];
    for (int k = 0; k < K; k++) dot += dweight[k] * weight[k];
    for (int k = 0; k < K; k++) {
        real scaled = (real)a->shape.scale * dweight[k];
        ds[id[k]] += a->shape.normalize ? (scaled - dot) / chosen_sum : scaled;
    }

    if (a->shape.score == ROUTER_SIGMOID) {
        for (int i = 0; i < E; i++) dlogit[i] = ds[i] * score[i] * (1 - score[i]);
    } else {
        real along = 0;
#pragma omp simd reduction(+ : along)
        for (int i = 0; i < E; i++) along += ds[i] * score[i];
        for (int i = 0; i < E; i++) dlogit[i] = score[i] * (ds[i] - along);
    }
    row_done(a->dlogits, t, dlogit);
}

static void zero_row(const Tensor *y, int64_t t) {
    real buf[row_buf(*y)], *row = row_out(*y, t, buf);
    for (int64_t i = 0; i < y->shape[1]; i++) row[i] = 0;
    row_done(*y, t, row);
}

void cpu_router_backward(Tensor dlogits, Tensor dweights, Tensor ids, Tensor weights, Tensor scores, Tensor seq_count,
                         Tensor position, const StepParams *params, RouterShape shape, Stream s) {
    (void)s;
    const RouterGrad grad = {dlogits, dweights, ids, weights, scores, seq_count, shape};
    const int32_t *at = (const int32_t *)position.data;
    for (int64_t b = 0; b < seq_count.shape[0]; b++) {
        const int64_t first = b * shape.seq_len, last = first + shape.seq_len;
        double n_tokens = 0;
        for (int64_t t = first; t < last; t++) n_tokens += at[t] >= 0;
        const double factor = params->balance_scale * shape.n_experts / (shape.n_chosen * n_tokens * n_tokens);
#pragma omp parallel for schedule(static)
        for (int64_t t = first; t < last; t++) {
            if (at[t] < 0)
                zero_row(&dlogits, t);
            else
                backward_row(&grad, (real)factor, t);
        }
    }
}
