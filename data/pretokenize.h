/* Cutting text into the pieces inside which byte pairs are merged. Floor 1.
 *
 * The cuts are those of the regular expressions in the tokenizers' files, written out as code: no general expression is
 * read. Character classes are those of unicode_classes.h; a byte outside UTF-8 is a character of no class. */
#ifndef TRAIN_MOE_PRETOKENIZE_H
#define TRAIN_MOE_PRETOKENIZE_H

#include <stdbool.h>
#include <stddef.h>

typedef enum {
    /* 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+ */
    PRETOKENIZE_GPT2,
    /* Three cuts, each inside the pieces of the one before: \p{N}{1,3}, runs of Chinese characters and kana, and
     * [ASCII punctuation][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
     */
    PRETOKENIZE_DEEPSEEK_V3
} PretokenizePattern;

typedef struct {
    PretokenizePattern pattern;
    const char *text; /* borrowed */
    size_t n, position;
    size_t segment_end; /* DEEPSEEK_V3: the third cut stays before this */
} Pretokenizer;

Pretokenizer pretokenizer_make(PretokenizePattern pattern, const char *text, size_t n);

/* The next piece, a part of the text with length > 0; false at the end. The pieces joined are the text. */
bool pretokenizer_next(Pretokenizer *p, const char **piece, size_t *piece_len);

#endif
