/* Arenas: one allocation, then pointers into it. Floor 0.
 *
 * An arena whose base is NULL only counts. So the function that lays memory out is also the function that sizes it: run
 * it on a NULL base to measure, allocate once, run it again to point. Both runs make the same calls in the same order.
 * Every block has a name; the memory plan is the list of names with their bytes, largest first. */
#ifndef TRAIN_MOE_ARENA_H
#define TRAIN_MOE_ARENA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { ARENA_ALIGN = 256, ARENA_NAMES_MAX = 96 };

typedef struct {
    const char *name; /* borrowed, a string literal or a table's name */
    size_t bytes;
} ArenaItem;

typedef struct {
    const char *name;
    char *base;  /* NULL: counting */
    size_t used; /* bytes handed out since the last reset */
    size_t size; /* bytes behind base; 0 while counting */
    size_t peak; /* largest `used` seen */
    int n_items; /* distinct names; blocks of one name are added up */
    ArenaItem items[ARENA_NAMES_MAX];
} Arena;

/* An empty arena over `size` bytes at `base` (borrowed, ARENA_ALIGN-aligned), or a counting one if base is NULL. */
Arena arena_make(const char *name, void *base, size_t size);

/* `bytes` more, aligned to ARENA_ALIGN, under `item_name`. Returns NULL while counting. Overflow is our bug (CHECK). */
void *arena_alloc(Arena *a, size_t bytes, const char *item_name);

/* Phases of a stack: `mark` now, `release` back to it later (LIFO). */
size_t arena_mark(const Arena *a);
void arena_release(Arena *a, size_t mark);

/* Memory of the C library for n elements, at least one, all zero; CHECKed. */
void *zeroed(int64_t n, size_t size);

/* "56.6 GiB", "0.09 GiB", "12.3 MiB": into buf, returned. */
const char *format_bytes(char *buf, size_t buf_len, double bytes);

#ifdef __cplusplus
}
#endif
#endif
