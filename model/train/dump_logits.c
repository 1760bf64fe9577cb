/* See eval.h: logits as a file, for holding them against another implementation's. */
#include <stdlib.h>
#include <string.h>

#include "data/safetensors.h"
#include "eval.h"
#include "kernels/base/check.h"

/* Sequences before the first padding one. */
static int64_t n_real_sequences(const MicroBatch *mb) {
    int64_t n = 0;
    while (n < mb->n_sequences && mb->position[n * mb->seq_len] >= 0) n++;
    return n;
}

int dump_logits(Model *m, const MicroBatch *mb, const char *path, char *err) {
    const int64_t B = n_real_sequences(mb), S = mb->seq_len, V = m->shape.V;
    SafetensorsEntry entries[2] = {
        {.name = "logits", .dtype = SAFETENSORS_F32, .ndim = 3, .shape = {B, S, V}},
        {.name = "tokens", .dtype = SAFETENSORS_I32, .ndim = 2, .shape = {B, S}},
    };
    float *row = (float *)malloc((size_t)V * sizeof *row);
    CHECK(row, "no memory for %lld logits", (long long)V);
    SafetensorsWriter w;
    int result = safetensors_create(&w, path, entries, 2, err);
    if (result == 0) {
        model_set_batch(m, &m->eval.shape, mb);
        model_forward(m, &m->eval, FORWARD_HIDDEN);
    }
    for (int64_t t = 0; t < B * S && result == 0; t++) {
        model_logits(m, &m->eval, t, row);
        result = safetensors_append(&w, row, V * (int64_t)sizeof *row, err);
    }
    if (result == 0) result = safetensors_append(&w, mb->tokens, B * S * (int64_t)sizeof *mb->tokens, err);
    if (result == 0) result = safetensors_finish(&w, err);
    free(row);
    return result;
}
