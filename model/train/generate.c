/* See generate.h. */
#include "generate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/rng.h"
#include "kernels/comm/watch.h"

/* ---- one token --------------------------------------------------------------------------------------------------- */

/* Sorts order by descending logit, equal logits by ascending id: heap sort, no state outside. */
static bool comes_first(const float *logits, int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
}

static void sift_down(int32_t *order, int64_t root, int64_t n, const float *logits) {
    for (;;) {
        int64_t child = 2 * root + 1;
        if (child >= n) return;
        if (child + 1 < n && comes_first(logits, order[child], order[child + 1])) child++;
        if (!comes_first(logits, order[root], order[child])) return;
        int32_t swap = order[root];
        order[root] = order[child];
        order[child] = swap;
        root = child;
    }
}

static void sort_by_logit(int32_t *order, int64_t n, const float *logits) {
    for (int64_t i = n / 2 - 1; i >= 0; i--) sift_down(order, i, n, logits);
    for (int64_t end = n - 1; end > 0; end--) {
        int32_t swap = order[0];
        order[0] = order[end];
        order[end] = swap;
        sift_down(order, 0, end, logits);
    }
}

int32_t sample_token(const float *logits, int64_t n, const Sampling *s, double u, int32_t *order) {
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    if (s->temperature <= 0 || s->top_k == 1) return best;
    for (int32_t i = 0; i < n; i++) order[i] = i;
    int64_t kept = n;
    const bool cut = (s->top_k > 0 && s->top_k < n) || s->top_p < 1;
    if (cut) sort_by_logit(order, n, logits);
    if (s->top_k > 0 && s->top_k < n) kept = s->top_k;
    double sum = 0;
    for (int64_t i = 0; i < kept; i++) sum += exp(((double)logits[order[i]] - logits[best]) / s->temperature);
    if (s->top_p < 1) { /* the shortest head of the list that holds top_p of the mass, at least one */
        double head = 0, total = sum;
        int64_t i = 0;
        while (i < kept && (i == 0 || head < s->top_p * total))
            head += exp(((double)logits[order[i++]] - logits[best]) / s->temperature);
        kept = i;
        sum = head;
    }
    double left = u * sum;
    for (int64_t i = 0; i < kept; i++) {
        left -= exp(((double)logits[order[i]] - logits[best]) / s->temperature);
        if (left < 0) return order[i];
    }
    return order[kept - 1];
}

void sampling_stop_at(Sampling *s, int64_t id) {
    if (id < 0) return;
    for (int i = 0; i < s->n_stops; i++)
        if (s->stop[i] == id) return;
    CHECK(s->n_stops < STOPS_MAX, "more than %d stop tokens", STOPS_MAX);
    s->stop[s->n_stops++] = (int32_t)id;
}

static bool is_stop(const Sampling *s, int32_t id) {
    for (int i = 0; i < s->n_stops; i++)
        if (s->stop[i] == id) return true;
    return false;
}

/* ---- a text ------------------------------------------------------------------------------------------------------ */

/* On all ranks the id that one has drawn: those with logits may differ in a last bit, and must not part. */
static int32_t agree(const Model *m, int32_t id) {
    const Mesh *mesh = &m->comm->mesh;
    if (mesh->world == 1) return id;
    uint64_t word = model_has_output(m) && mesh->data == 0 ? (uint64_t)id : 0;
    job_sum(&word, 1);
    return (int32_t)word;
}

int64_t generate(Model *m, int32_t *ids, int64_t n_prompt, int64_t n_new, const Sampling *s,
                 void (*emit)(void *arg, int32_t id), void *arg) {
    const int64_t S = m->generate_len, V = m->shape.V;
    CHECK(n_prompt > 0 && n_prompt + n_new <= S + 1, "%lld + %lld tokens in %lld positions", (long long)n_prompt,
          (long long)n_new, (long long)S);
    float *logits = (float *)malloc((size_t)V * sizeof *logits);
    int32_t *order = (int32_t *)malloc((size_t)V * sizeof *order);
    CHECK(logits && order, "no memory for %lld logits", (long long)V);
    int64_t made = 0;
    while (made < n_new) {
        if (made == 0)
            model_prefill(m, ids, n_prompt, logits);
        else
            model_decode(m, ids[n_prompt + made - 1], logits);
        const double u = rng_uniform(s->seed, RNG_SAMPLE, s->step, (uint64_t)made);
        const int32_t id = agree(m, model_has_output(m) ? sample_token(logits, V, s, u, order) : 0);
        watch_phase("sample", made);
        ids[n_prompt + made] = id;
        made++;
        if (emit) emit(arg, id);
        if (is_stop(s, id)) break;
    }
    free(order);
    free(logits);
    return made;
}

int64_t prompt_ids(const Tokenizer *t, int64_t document_token, const char *prompt, int32_t *ids, int64_t max_ids,
                   char *err) {
    int64_t n = 0;
    if (document_token >= 0 && max_ids > 0) ids[n++] = (int32_t)document_token;
    int64_t text = tokenizer_encode(t, prompt, strlen(prompt), true, ids + n, max_ids - n);
    if (n + text > max_ids)
        return err_set(err, "the prompt has %lld tokens, at most %lld fit", (long long)(n + text), (long long)max_ids);
    if (n + text == 0) return err_set(err, "an empty prompt needs a document token to start from");
    return n + text;
}

char *text_of(const Tokenizer *t, const int32_t *ids, int64_t n) {
    size_t size = 0, length;
    for (int64_t i = 0; i < n; i++)
        if (!tokenizer_is_special(t, ids[i]) && tokenizer_bytes(t, ids[i], &length)) size += length;
    char *text = (char *)malloc(size + 1);
    CHECK(text, "no memory for %zu bytes of text", size);
    size = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *bytes = tokenizer_is_special(t, ids[i]) ? NULL : tokenizer_bytes(t, ids[i], &length);
        if (!bytes) continue;
        memcpy(text + size, bytes, length);
        size += length;
    }
    text[size] = 0;
    return text;
}
