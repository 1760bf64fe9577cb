/* Documents in a stream of tokens: how many, how long, which of them twice. Floor 1.
 *
 * A document begins at its document token and goes to the next one, also across shards. Its length is its tokens
 * without that one; 0 is an empty document. Tokens before the first document token of a stream are a document too,
 * whose beginning is not known.
 *
 * Two documents are the same if a 64-bit hash over their ids is: among 100 million, a false pair in one corpus of
 * 2,000. The hashes are all that is kept of a document, 8 bytes in a table that is at most three quarters full and
 * grows to DOCUMENT_HASHES_MAX places (2 GiB); documents beyond that are counted, not compared. */
#ifndef TRAIN_MOE_DOCUMENTS_H
#define TRAIN_MOE_DOCUMENTS_H

#include <stdbool.h>
#include <stdint.h>

enum { LENGTH_CLASSES = 40, DUPLICATE_PLACES = 3, DOCUMENT_HASHES_MAX = 1 << 28 };

typedef struct {
    int file;
    int64_t token, length; /* of the document token in its file; tokens behind it */
} DocumentPlace;

typedef struct {
    int64_t n, n_tokens, longest;
    int64_t n_headless;                                         /* of n: without a document token */
    int64_t count[LENGTH_CLASSES], n_tokens_of[LENGTH_CLASSES]; /* class 0: empty; c: 2^(c-1) .. 2^c - 1 tokens */
    int64_t n_compared, n_duplicates, n_duplicate_tokens;       /* not the empty ones; without the first of a kind */
    DocumentPlace duplicates[DUPLICATE_PLACES];                 /* the first ones */
    int32_t document_token;                                     /* the rest is the counter's own */
    bool is_open;
    DocumentPlace now;
    uint64_t hash;
    uint64_t *hashes; /* 0 = free */
    int64_t n_places, n_hashes;
} Documents;

void documents_init(Documents *d, int32_t document_token);
void documents_free(Documents *d);

/* Goes on with ids[0..n), which are the tokens first .. first + n of a file (any number for messages). */
void documents_add(Documents *d, const int32_t *ids, int64_t n, int file, int64_t first);
/* The stream ends: so does its last document. */
void documents_end(Documents *d);
/* The stream breaks off: its last document is not counted. */
void documents_drop(Documents *d);

#endif
