/* See bpe.h. The ids of a piece are a doubly linked list over their places; a merge keeps the left place and removes
 * the right one. Candidates are not taken out of the heap when a neighbour changes: one that no longer stands in the
 * list with its rank is passed over when it comes up. */
#include "bpe.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/rng.h"

typedef struct BpeCandidate {
    int32_t rank, place;
} BpeCandidate;

typedef struct {
    BpeCandidate *items;
    int64_t n;
} Heap;

void bpe_init(BpeMerges *m, int64_t n_merges) {
    m->n_places = 16;
    while (m->n_places < 2 * n_merges) m->n_places *= 2;
    m->places = malloc((size_t)m->n_places * sizeof *m->places);
    CHECK(m->places, "no memory for %lld merges", (long long)n_merges);
    for (int64_t i = 0; i < m->n_places; i++) m->places[i].left = -1;
}

void bpe_free(BpeMerges *m) {
    free(m->places);
    memset(m, 0, sizeof *m);
}

/* The place of a pair, or the empty place where it belongs. */
static BpeMerge *find(const BpeMerges *m, int32_t left, int32_t right) {
    uint64_t at = mix64((uint64_t)(uint32_t)left << 32 | (uint32_t)right);
    for (;; at++) {
        BpeMerge *place = &m->places[at & (uint64_t)(m->n_places - 1)];
        if (place->left < 0 || (place->left == left && place->right == right)) return place;
    }
}

bool bpe_add(BpeMerges *m, int32_t left, int32_t right, int32_t rank, int32_t merged) {
    BpeMerge *place = find(m, left, right);
    if (place->left >= 0) return false;
    *place = (BpeMerge){left, right, rank, merged};
    return true;
}

void bpe_scratch_free(BpeScratch *s) {
    free(s->links);
    free(s->heap);
    memset(s, 0, sizeof *s);
}

static void scratch_reserve(BpeScratch *s, int64_t n) {
    if (n <= s->capacity) return;
    bpe_scratch_free(s);
    s->capacity = n < 64 ? 64 : n + n / 2;
    s->links = malloc((size_t)s->capacity * 2 * sizeof *s->links);
    /* n - 1 candidates at the start, and each of at most n - 1 merges adds two and has taken one out. */
    s->heap = malloc((size_t)s->capacity * 2 * sizeof *s->heap);
    CHECK(s->links && s->heap, "no memory for a piece of %lld bytes", (long long)n);
}

static bool comes_before(BpeCandidate a, BpeCandidate b) {
    return a.rank < b.rank || (a.rank == b.rank && a.place < b.place);
}

static void heap_push(Heap *h, BpeCandidate item) {
    int64_t i = h->n++;
    while (i > 0 && comes_before(item, h->items[(i - 1) / 2])) {
        h->items[i] = h->items[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h->items[i] = item;
}

static BpeCandidate heap_pop(Heap *h) {
    BpeCandidate top = h->items[0], item = h->items[--h->n];
    int64_t i = 0;
    for (int64_t child = 1; child < h->n; child = 2 * i + 1) {
        if (child + 1 < h->n && comes_before(h->items[child + 1], h->items[child])) child++;
        if (!comes_before(h->items[child], item)) break;
        h->items[i] = h->items[child];
        i = child;
    }
    h->items[i] = item;
    return top;
}

static void push_pair(Heap *h, const BpeMerges *m, const int32_t *ids, int32_t left, int32_t right) {
    const BpeMerge *merge = find(m, ids[left], ids[right]);
    if (merge->left >= 0) heap_push(h, (BpeCandidate){merge->rank, left});
}

int64_t bpe_encode(const BpeMerges *m, BpeScratch *s, int32_t *ids, int64_t n) {
    if (n < 2) return n;
    CHECK(n < INT32_MAX, "a piece of %lld bytes", (long long)n);
    scratch_reserve(s, n);
    int32_t *next = s->links, *previous = s->links + n, end = (int32_t)n;
    Heap heap = {s->heap, 0};
    for (int32_t i = 0; i < end; i++) {
        next[i] = i + 1;
        previous[i] = i - 1;
        if (i + 1 < end) push_pair(&heap, m, ids, i, i + 1);
    }
    while (heap.n > 0) {
        BpeCandidate best = heap_pop(&heap);
        int32_t left = best.place, right = next[left];
        if (ids[left] < 0 || right == end) continue;
        const BpeMerge *merge = find(m, ids[left], ids[right]);
        if (merge->left < 0 || merge->rank != best.rank) continue;
        ids[left] = merge->merged;
        ids[right] = -1;
        next[left] = next[right];
        if (next[left] < end) {
            previous[next[left]] = left;
            push_pair(&heap, m, ids, left, next[left]);
        }
        if (previous[left] >= 0) push_pair(&heap, m, ids, previous[left], left);
    }
    int64_t n_left = 0;
    for (int32_t i = 0; i < end; i = next[i]) ids[n_left++] = ids[i];
    return n_left;
}
