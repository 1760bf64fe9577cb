/* A micro-batch: the four int32 arrays that the model reads, on the host. Floor 1.
 *
 * B sequences of S positions, T = B * S tokens, D = depth + 1 rows (the main model and the MTP layers):
 *
 *   tokens    (D, T)  row k holds the ids shifted by k: of the sequence's window w, tokens[k][t] = w[t + k]
 *   targets   (D, T)  targets[k][t] = w[t + k + 1], or -1 = no loss
 *   position  (T)     0 .. S-1 in the sequence; under the document mask, in the document; -1 in a padding sequence
 *   doc_start (T)     the first token, of 0 .. T-1, that this token may attend to: the start of its sequence, or of its
 *                     document under the document mask
 *
 * Documents begin at their document token (llm.c's convention: it precedes each document). So as a target it ends the
 * text before it, and as an input it begins the next. What follows from that under the document mask:
 *
 *   - Depth 0 masks nothing: the last token of a document learns that the document ends.
 *   - Depth k > 0 masks t if a document starts in t+1 .. t+k: then its target lies behind the end. A target that is
 *     itself the next document token, at t+k+1, stays: it is the end of the text.
 *   - The MTP inputs tokens[k] are not changed. Those that come from the next document belong to the last k tokens of a
 *     document, which are the ones masked at depth k, and no other token attends to them: no loss sees them.
 *
 * Without the document mask nothing is masked and positions run through the sequence, as in DeepSeek-V3.
 *
 * A padding sequence (behind the end of a validation set) has tokens 0, targets -1, position -1 and doc_start at its
 * own first token; position < 0 is the mark by which rope and the router's statistics know it. */
#ifndef TRAIN_MOE_BATCH_H
#define TRAIN_MOE_BATCH_H

#include <stdint.h>

enum { MTP_DEPTH_MAX = 4, NO_DOCUMENT_MASK = -1 };

typedef struct {
    int64_t n_sequences, seq_len, n_tokens; /* B, S, T */
    int depth;
    int64_t first_sample; /* consumed-sample number of sequence 0 */
    int32_t *tokens, *targets, *position, *doc_start;
    int64_t n_targets[MTP_DEPTH_MAX + 1]; /* targets that are not -1, by depth */
} MicroBatch;

/* Returns -1 with err if there is no memory or T is too large for int32. */
int micro_batch_alloc(MicroBatch *mb, int64_t n_sequences, int64_t seq_len, int depth, char *err);
void micro_batch_free(MicroBatch *mb);

/* Writes sequence b from its window of seq_len + 1 + depth ids. document_token cuts documents for the mask, or is
 * NO_DOCUMENT_MASK. Only the first n_scored positions keep their targets. */
void micro_batch_set(MicroBatch *mb, int64_t b, const int32_t *window, int64_t document_token, int64_t n_scored);
void micro_batch_pad(MicroBatch *mb, int64_t b);

/* Counts n_targets, after the last sequence is written. */
void micro_batch_count(MicroBatch *mb);

#endif
