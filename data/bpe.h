/* Byte-pair encoding of one piece of text, by a table of ranked merges. Floor 1.
 *
 * While any two neighbours have a merge, the one of lowest rank is applied, the leftmost first. A heap of candidates
 * keeps a piece of n bytes at O(n log n), so that a megabyte without a space is no trap. */
#ifndef TRAIN_MOE_BPE_H
#define TRAIN_MOE_BPE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct {
    int32_t left, right; /* left < 0: an empty place */
    int32_t rank, merged;
} BpeMerge;

/* Hash table with open addressing. */
typedef struct {
    BpeMerge *places; /* owned */
    int64_t n_places; /* a power of two, at least twice the merges */
} BpeMerges;

/* Makes room for n_merges. bpe_free releases it; so does a zeroed struct. */
void bpe_init(BpeMerges *m, int64_t n_merges);
void bpe_free(BpeMerges *m);

/* left, right -> merged. Ranks are distinct. Returns false, changing nothing, if the pair has a merge already. */
bool bpe_add(BpeMerges *m, int32_t left, int32_t right, int32_t rank, int32_t merged);

/* Working memory of bpe_encode, grown as needed. Start with a zeroed struct. */
typedef struct {
    int32_t *links; /* owned; two of n */
    struct BpeCandidate *heap;
    int64_t capacity;
} BpeScratch;

void bpe_scratch_free(BpeScratch *s);

/* Merges ids[0..n) in place, n < 2^31; returns how many are left. */
int64_t bpe_encode(const BpeMerges *m, BpeScratch *s, int32_t *ids, int64_t n);

#endif
