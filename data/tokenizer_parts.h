/* What a tokenizer is made of: filled by tokenizer_file.c, used by tokenizer.c, and no one else's business. Floor 1. */
#ifndef TRAIN_MOE_TOKENIZER_PARTS_H
#define TRAIN_MOE_TOKENIZER_PARTS_H

#include "bpe.h"
#include "pretokenize.h"
#include "tokenizer.h"

typedef struct {
    const char *bytes; /* in the tokenizer's pool; NULL: unused id */
    size_t n;
    bool added, special;
} Token;

typedef struct {
    int32_t id;
    size_t n; /* bytes of its spelling */
} AddedToken;

struct Tokenizer {
    PretokenizePattern pattern;
    int32_t vocab_size, document_token;
    Token *tokens; /* vocab_size */
    char *pool;
    size_t pool_used;
    int32_t byte_ids[256];
    BpeMerges merges;
    AddedToken *added; /* longest spelling first */
    int32_t n_added;
    bool added_starts[256]; /* first bytes of added tokens */
};

#endif
