/* The engine of clang: libFuzzer with our mutator beside its own. FUZZ_TARGET in the environment names the target
 * ("list" prints all), FUZZ_SEEDS a folder that the valid files are written to first. libfuzzer.sh runs it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/base/file.h"
#include "tests/fuzz/fuzz.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static const FuzzTarget *target;
static const char *seed_folder;
static int n_seeds;

void fuzz_seed(const void *data, size_t size) {
    char path[512], err[ERR_LEN];
    if (!seed_folder) return;
    snprintf(path, sizeof path, "%s/seed_%d", seed_folder, n_seeds++);
    CHECK(file_write_durable(path, data, size, err) == 0, "%s", err);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    char err[ERR_LEN];
    const char *name = getenv("FUZZ_TARGET");
    seed_folder = getenv("FUZZ_SEEDS");
    for (const FuzzTarget *t = fuzz_targets; name && strcmp(name, "list") == 0; t++) {
        if (!t->name) exit(EXIT_DONE);
        puts(t->name);
    }
    target = name ? fuzz_find(name) : NULL;
    if (!target) DIE("set FUZZ_TARGET to one of tests/fuzz/fuzz.h", "there is no target %s", name ? name : "");
    if (seed_folder && dir_make(seed_folder, err) != 0) DIE(NULL, "%s", err);
    target->seeds();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return size <= FUZZ_BYTES_MAX ? target->run(data, size) : 0;
}

/* Pieces "from elsewhere" come from the same input: libFuzzer crosses inputs itself. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    static uint8_t room[FUZZ_BYTES_MAX], other[FUZZ_BYTES_MAX];
    FuzzRandom r = {seed};
    if (size > FUZZ_BYTES_MAX || fuzz_below(&r, 2)) return LLVMFuzzerMutate(data, size, max_size);
    memcpy(room, data, size);
    memcpy(other, data, size);
    const size_t n = fuzz_mutate(room, size, other, size, &r);
    memcpy(data, room, n < max_size ? n : max_size);
    return n < max_size ? n : max_size;
}
