/* Text from the model: sampling, one token after the other. Floor 5.
 *
 * The prompt is one forward of the training mathematics; each token after it is one position through all layers, over
 * the latents that the positions before it have left (model/decode.c). */
#ifndef TRAIN_MOE_GENERATE_H
#define TRAIN_MOE_GENERATE_H

#include "data/tokenizer.h"
#include "model/model.h"

enum { STOPS_MAX = 3 };

typedef struct {
    double temperature; /* 0 = the most likely token */
    int top_k;          /* 0 = off; above V: V */
    double top_p;       /* 1 = off */
    uint64_t seed;
    uint64_t step;           /* names the random numbers, with seed and the token's index */
    int32_t stop[STOPS_MAX]; /* n_stops tokens that end the text */
    int n_stops;
} Sampling;

/* Adds a stop; an id below 0, and one that is there already, adds nothing. */
void sampling_stop_at(Sampling *s, int64_t id);

/* The next id from logits (n): softmax in double after temperature, top-k and top-p; ties to the lower id. Only the n
 * real ids of the vocabulary. `u` uniform in [0, 1). `order` is scratch of n ints. */
int32_t sample_token(const float *logits, int64_t n, const Sampling *s, double u, int32_t *order);

/* Continues ids[0..n_prompt) by at most n_new tokens, in place (ids has room for all), within generate_len positions.
 * emit (or NULL) is called with each new id. Returns the number of new tokens. All ranks call it, and have the text. */
int64_t generate(Model *m, int32_t *ids, int64_t n_prompt, int64_t n_new, const Sampling *s,
                 void (*emit)(void *arg, int32_t id), void *arg);

/* The document token (if >= 0) and the prompt's tokens, into ids (max_ids). Returns their number, or -1 with err if
 * they do not fit. */
int64_t prompt_ids(const Tokenizer *t, int64_t document_token, const char *prompt, int32_t *ids, int64_t max_ids,
                   char *err);

/* The bytes of ids, special tokens left out. malloc'd and terminated; the caller frees it. */
char *text_of(const Tokenizer *t, const int32_t *ids, int64_t n);

#endif
