/* See documents.h. */
#include "documents.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/base/check.h"
#include "kernels/base/rng.h"

enum { PLACES_FIRST = 1 << 12 };

void documents_init(Documents *d, int32_t document_token) {
    memset(d, 0, sizeof *d);
    d->document_token = document_token;
    d->n_places = PLACES_FIRST;
    d->hashes = (uint64_t *)calloc(PLACES_FIRST, sizeof *d->hashes);
    CHECK(d->hashes, "no memory for hashes");
}

void documents_free(Documents *d) {
    free(d->hashes);
    memset(d, 0, sizeof *d);
}

/* The place of a hash, or the free one where it belongs. */
static uint64_t *place_of(uint64_t *hashes, int64_t n_places, uint64_t hash) {
    uint64_t i = hash & (uint64_t)(n_places - 1);
    while (hashes[i] != 0 && hashes[i] != hash) i = (i + 1) & (uint64_t)(n_places - 1);
    return &hashes[i];
}

/* False: there is no more room. */
static bool make_room(Documents *d) {
    if (4 * (d->n_hashes + 1) <= 3 * d->n_places) return true;
    if (d->n_places >= DOCUMENT_HASHES_MAX) return false;
    uint64_t *larger = (uint64_t *)calloc((size_t)(2 * d->n_places), sizeof *larger);
    if (!larger) return false;
    for (int64_t i = 0; i < d->n_places; i++)
        if (d->hashes[i] != 0) *place_of(larger, 2 * d->n_places, d->hashes[i]) = d->hashes[i];
    free(d->hashes);
    d->hashes = larger;
    d->n_places *= 2;
    return true;
}

static void compare(Documents *d) {
    const uint64_t hash = mix64(d->hash + (uint64_t)d->now.length) | 1; /* never 0 */
    uint64_t *place = place_of(d->hashes, d->n_places, hash);
    const bool is_known = *place == hash;
    if (!is_known) {
        if (!make_room(d)) return;
        *place_of(d->hashes, d->n_places, hash) = hash;
        d->n_hashes++;
    }
    d->n_compared++;
    if (!is_known) return;
    if (d->n_duplicates < DUPLICATE_PLACES) d->duplicates[d->n_duplicates] = d->now;
    d->n_duplicates++;
    d->n_duplicate_tokens += d->now.length;
}

void documents_end(Documents *d) {
    if (!d->is_open) return;
    d->is_open = false;
    const int64_t length = d->now.length;
    const int class = length == 0 ? 0 : 64 - __builtin_clzll((uint64_t)length);
    CHECK(class < LENGTH_CLASSES, "a document of %lld tokens", (long long)length);
    d->n++;
    d->n_tokens += length;
    d->count[class]++;
    d->n_tokens_of[class] += length;
    if (length > d->longest) d->longest = length;
    if (length > 0) compare(d);
}

void documents_drop(Documents *d) {
    d->is_open = false;
}

void documents_add(Documents *d, const int32_t *ids, int64_t n, int file, int64_t first) {
    for (int64_t i = 0; i < n; i++) {
        const bool is_start = ids[i] == d->document_token;
        if (is_start) documents_end(d);
        if (!d->is_open) {
            d->is_open = true;
            d->now = (DocumentPlace){file, first + i, 0};
            d->hash = 0;
            d->n_headless += !is_start;
        }
        if (is_start) continue;
        d->now.length++;
        d->hash = (d->hash ^ (uint64_t)(uint32_t)ids[i]) * 0x9E3779B97F4A7C15u;
        d->hash ^= d->hash >> 29;
    }
}
