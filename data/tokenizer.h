/* Text to token ids and back: byte-level BPE read from a Hugging Face tokenizer.json. Floor 1.
 *
 * Read are the files of the GPT-2 kind (pre-tokenizer ByteLevel) and DeepSeek-V3's (three splits, then ByteLevel), with
 * ids equal to those of the library the format comes from, and those that scripts/prepare_data.py writes. Anything else
 * in a file that would change the ids (a normalizer, a prefix, another pre-tokenizer) is refused by name. Any bytes can
 * be encoded, valid UTF-8 or not, and decode to themselves. */
#ifndef TRAIN_MOE_TOKENIZER_H
#define TRAIN_MOE_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Tokenizer Tokenizer;

/* Reads tokenizer.json, or the file of that name in a folder. Returns 0 and a tokenizer that the caller frees, or -1
 * with one line in err (ERR_LEN) that names the file and what is wrong in it. */
int tokenizer_load(Tokenizer **t, const char *path, char *err);
/* The same from the file's text; `name` stands in messages for the path. */
int tokenizer_parse(Tokenizer **t, const char *json, size_t size, const char *name, char *err);
void tokenizer_free(Tokenizer *t);

/* 1 + the largest id. Ids below it may be unused. */
int32_t tokenizer_vocab_size(const Tokenizer *t);

/* The token that stands before each document: the first of <|document|>, <|endoftext|>, <｜begin▁of▁sentence｜>,
 * <|begin_of_text|>, [BOS], <s> among the added tokens; -1 if there is none. */
int32_t tokenizer_document_token(const Tokenizer *t);

/* Writes the ids of text[0..n) to ids, at most max_ids of them, and returns how many the whole text has: never more
 * than n. With `match_added`, the spelling of an added token (the longest where several match) is that token, as in a
 * prompt; without, it is text like any other, as in training data. Threads may share a tokenizer. */
int64_t tokenizer_encode(const Tokenizer *t, const char *text, size_t n, bool match_added, int32_t *ids,
                         int64_t max_ids);

/* The bytes of a token and their number; they belong to the tokenizer and are not terminated. NULL and 0 for an id that
 * is out of range or unused. A token may hold a part of a character: print through Utf8Stream (utf8.h). */
const char *tokenizer_bytes(const Tokenizer *t, int32_t id, size_t *n);

/* An added token marked special (document, padding, ...): not a part of the text. */
bool tokenizer_is_special(const Tokenizer *t, int32_t id);

#endif
