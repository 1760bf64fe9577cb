/* A generated text on its way to the terminal: whole characters as tokens come, and, with --show-experts, each token in
 * the colour of the expert that took it first, a table at the end. Floor 5. */
#ifndef TRAIN_MOE_TEXT_OUT_H
#define TRAIN_MOE_TEXT_OUT_H

#include <stdio.h>

#include "data/tokenizer.h"
#include "data/utf8.h"

typedef struct {
    FILE *out;                  /* borrowed, as is the tokenizer */
    const Tokenizer *tokenizer; /* special tokens are not a part of the text */
    Utf8Stream stream;
    /* with experts */
    int n_experts;
    bool is_coloured;
    int64_t n, n_max;
    int32_t *ids, *experts; /* of the tokens so far */
} TextOut;

/* Plain text. */
TextOut text_out_make(FILE *out, const Tokenizer *t);
/* Keeps up to n_max tokens with their experts of n_experts for the table; text_out_table frees them. Colours on a
 * terminal, unless NO_COLOR is set or TERM is dumb; CLICOLOR_FORCE colours files too. Prints what the colours mean:
 * `legend`, one line. */
void text_out_show_experts(TextOut *t, int n_experts, int64_t n_max, const char *legend);

/* The token's characters, in the colour of its expert (-1: none, no colour). Flushes. */
void text_out_token(TextOut *t, int32_t id, int expert);
/* What is held back of a character, and a line end. */
void text_out_end(TextOut *t);

/* The experts by the number of tokens they took first, at most `n_rows`: share, and the tokens they took most often. */
void text_out_table(TextOut *t, int n_rows);

#endif
