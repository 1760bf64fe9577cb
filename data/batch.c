/* See batch.h. */
#include "batch.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"

int micro_batch_alloc(MicroBatch *mb, int64_t n_sequences, int64_t seq_len, int depth, char *err) {
    CHECK(n_sequences >= 1 && seq_len >= 1 && depth >= 0 && depth <= MTP_DEPTH_MAX, "%lld x %lld, depth %d",
          (long long)n_sequences, (long long)seq_len, depth);
    memset(mb, 0, sizeof *mb);
    if (n_sequences > INT32_MAX / seq_len)
        return err_set(err, "a micro-batch of %lld sequences of %lld tokens: more than %d tokens",
                       (long long)n_sequences, (long long)seq_len, INT32_MAX);
    int64_t T = n_sequences * seq_len;
    mb->n_sequences = n_sequences;
    mb->seq_len = seq_len;
    mb->n_tokens = T;
    mb->depth = depth;
    int32_t *block = (int32_t *)calloc((size_t)(2 * (depth + 1) + 2) * (size_t)T, sizeof *block);
    if (!block) return err_set(err, "no memory for a micro-batch of %lld tokens", (long long)T);
    mb->tokens = block;
    mb->targets = mb->tokens + (depth + 1) * T;
    mb->position = mb->targets + (depth + 1) * T;
    mb->doc_start = mb->position + T;
    return 0;
}

void micro_batch_free(MicroBatch *mb) {
    free(mb->tokens); /* the other arrays lie in the same block */
    memset(mb, 0, sizeof *mb);
}

void micro_batch_set(MicroBatch *mb, int64_t b, const int32_t *window, int64_t document_token, int64_t n_scored) {
    int64_t S = mb->seq_len, T = mb->n_tokens, row = b * S;
    for (int k = 0; k <= mb->depth; k++) {
        int32_t *tokens = mb->tokens + k * T + row, *targets = mb->targets + k * T + row;
        int64_t last_start = -1; /* the last document start seen at or before t + k */
        for (int64_t i = 1; i < k; i++)
            if (window[i] == document_token) last_start = i;
        for (int64_t t = 0; t < S; t++) {
            if (window[t + k] == document_token) last_start = t + k;
            bool is_crossed = last_start > t;
            tokens[t] = window[t + k];
            targets[t] = t < n_scored && !is_crossed ? window[t + k + 1] : -1;
        }
    }
    int64_t start = 0;
    for (int64_t t = 0; t < S; t++) {
        if (window[t] == document_token) start = t;
        mb->position[row + t] = (int32_t)(t - start);
        mb->doc_start[row + t] = (int32_t)(row + start);
    }
}

void micro_batch_pad(MicroBatch *mb, int64_t b) {
    int64_t S = mb->seq_len, T = mb->n_tokens, row = b * S;
    for (int64_t t = row; t < row + S; t++) {
        for (int k = 0; k <= mb->depth; k++) {
            mb->tokens[k * T + t] = 0;
            mb->targets[k * T + t] = -1;
        }
        mb->position[t] = -1;
        mb->doc_start[t] = (int32_t)row;
    }
}

void micro_batch_count(MicroBatch *mb) {
    for (int k = 0; k <= mb->depth; k++) {
        int64_t n = 0;
        for (int64_t t = 0; t < mb->n_tokens; t++) n += mb->targets[k * mb->n_tokens + t] >= 0;
        mb->n_targets[k] = n;
    }
}
