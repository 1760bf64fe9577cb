/* Fuzzing: every reader of files against damaged files.
 *
 * A target is one function. It hands the bytes to a reader; what the reader accepts, it uses as the program would, and
 * FUZZ_EXPECT holds it to the reader's header. It returns 0. A reader that ends the process, writes outside its memory,
 * leaks, asks for memory without bound or takes longer than FUZZ_INPUT_TIMEOUT_S has a bug.
 *
 * A new target NAME: fuzz_NAME and seeds_NAME in a targets_*.c, and NAME in FUZZ_TARGETS. Two engines drive them:
 * main.c, which needs gcc alone (a seeded mutator, coverage by -fsanitize-coverage=trace-pc), and libfuzzer.c. */
#ifndef TRAIN_MOE_FUZZ_H
#define TRAIN_MOE_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/base/check.h"

enum { FUZZ_BYTES_MAX = 1 << 16, FUZZ_INPUT_TIMEOUT_S = 20 };

#define FUZZ_TARGETS(ROW)                                                                                              \
    ROW(json)                                                                                                          \
    ROW(config) ROW(sidecar) ROW(tokenizer) ROW(manifest) ROW(shard) ROW(safetensors) ROW(choice) ROW(zst)

typedef struct {
    const char *name;
    int (*run)(const uint8_t *data, size_t size);
    void (*seeds)(void); /* gives valid files to fuzz_seed */
} FuzzTarget;

#define FUZZ_DECLARE(NAME)                                                                                             \
    int fuzz_##NAME(const uint8_t *data, size_t size);                                                                 \
    void seeds_##NAME(void);
FUZZ_TARGETS(FUZZ_DECLARE)

extern const FuzzTarget fuzz_targets[]; /* ends with a row without a name */

/* The target of this name; NULL if there is none. */
const FuzzTarget *fuzz_find(const char *name);

#define FUZZ_EXPECT(cond, ...) CHECK(cond, __VA_ARGS__)

/* What a refusal has to be: one line of text, not empty. */
void fuzz_expect_error(const char *err, const char *hint);

/* Writes the bytes as a file of this name in a folder of the process; returns its path, valid until the next call. */
const char *fuzz_file(const char *name, const void *data, size_t size);
/* The folder itself: in memory where that can be, removed when the process ends. */
const char *fuzz_folder(void);

/* Takes a copy of a valid file, of at most FUZZ_BYTES_MAX bytes, into the corpus of the running engine. */
void fuzz_seed(const void *data, size_t size);
void fuzz_seed_file(const char *path);

/* Words that mutations put into a text: the keys and choices of the configuration's table, members of the other
 * formats, and JSON's own awkward spellings. */
const char *fuzz_word(uint64_t random);

/* A random number generator: mix64 of a counter. */
typedef struct {
    uint64_t state;
} FuzzRandom;
uint64_t fuzz_random(FuzzRandom *r);
/* Uniform enough in [0, n), n > 0. */
uint64_t fuzz_below(FuzzRandom *r, uint64_t n);

/* Changes data[0..size) in one to eight places and returns the new size, at most FUZZ_BYTES_MAX, the size of the
 * buffer. Half of the changes know JSON: they replace, swap, copy and remove whole values and members, of this text or
 * of `other`. The rest changes bytes, and integers of 2, 4 and 8 bytes. */
size_t fuzz_mutate(uint8_t *data, size_t size, const uint8_t *other, size_t other_size, FuzzRandom *r);

#endif
