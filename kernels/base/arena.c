/* See arena.h. */
#include "arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

Arena arena_make(const char *name, void *base, size_t size) {
    Arena a;
    memset(&a, 0, sizeof a);
    a.name = name;
    a.base = (char *)base;
    a.size = base ? size : 0;
    return a;
}

static void count_item(Arena *a, size_t bytes, const char *item_name) {
    for (int i = 0; i < a->n_items; i++) {
        if (strcmp(a->items[i].name, item_name) == 0) {
            a->items[i].bytes += bytes;
            return;
        }
    }
    CHECK(a->n_items < ARENA_NAMES_MAX, "arena %s: more than %d names", a->name, ARENA_NAMES_MAX);
    a->items[a->n_items].name = item_name;
    a->items[a->n_items].bytes = bytes;
    a->n_items++;
}

void *arena_alloc(Arena *a, size_t bytes, const char *item_name) {
    size_t padded = (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    size_t at = a->used;
    a->used += padded;
    if (a->used > a->peak) a->peak = a->used;
    count_item(a, padded, item_name);
    if (!a->base) return NULL;
    CHECK(a->used <= a->size, "arena %s: %s needs %zu bytes, %zu of %zu are used", a->name, item_name, padded, at,
          a->size);
    return a->base + at;
}

size_t arena_mark(const Arena *a) {
    return a->used;
}

void arena_release(Arena *a, size_t mark) {
    CHECK(mark <= a->used, "arena %s: released to %zu but only %zu are used", a->name, mark, a->used);
    a->used = mark;
}

void *zeroed(int64_t n, size_t size) {
    void *p = calloc((size_t)(n > 0 ? n : 1), size);
    CHECK(p, "no memory for %lld x %zu bytes", (long long)n, size);
    return p;
}

const char *format_bytes(char *buf, size_t buf_len, double bytes) {
    const double mib = 1024.0 * 1024.0;
    if (bytes < 10 * mib)
        snprintf(buf, buf_len, "%.2f MiB", bytes / mib);
    else if (bytes < 1000 * mib)
        snprintf(buf, buf_len, "%.0f MiB", bytes / mib);
    else
        snprintf(buf, buf_len, "%.1f GiB", bytes / mib / 1024);
    return buf;
}
