/* See fuzz.h: the table of targets, and what they share. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/base/file.h"
#include "tests/fuzz/fuzz.h"

#define FUZZ_ROW(NAME) {#NAME, fuzz_##NAME, seeds_##NAME},
const FuzzTarget fuzz_targets[] = {FUZZ_TARGETS(FUZZ_ROW){NULL, NULL, NULL}};

const FuzzTarget *fuzz_find(const char *name) {
    for (const FuzzTarget *t = fuzz_targets; t->name; t++)
        if (strcmp(t->name, name) == 0) return t;
    return NULL;
}

static void expect_line(const char *text, const char *what) {
    const size_t length = strnlen(text, ERR_LEN);
    FUZZ_EXPECT(length < ERR_LEN, "%s is not terminated", what);
    for (size_t i = 0; i < length; i++)
        FUZZ_EXPECT((unsigned char)text[i] >= 0x20 && text[i] != 0x7F, "%s has the control character %d: %s", what,
                    text[i], text);
}

void fuzz_expect_error(const char *err, const char *hint) {
    FUZZ_EXPECT(err[0], "refused without a reason");
    expect_line(err, "the error");
    if (hint) expect_line(hint, "the hint");
}

static char folder[64];
static pid_t folder_owner;

static void remove_folder(void) {
    char err[ERR_LEN];
    if (folder[0] && folder_owner == getpid()) dir_remove(folder, err);
}

const char *fuzz_folder(void) {
    if (folder[0]) return folder;
    strcpy(folder, access("/dev/shm", W_OK) == 0 ? "/dev/shm/fuzz_XXXXXX" : "/tmp/fuzz_XXXXXX");
    CHECK(mkdtemp(folder), "no folder %s", folder);
    folder_owner = getpid();
    atexit(remove_folder);
    return folder;
}

const char *fuzz_file(const char *name, const void *data, size_t size) {
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", fuzz_folder(), name);
    FILE *f = fopen(path, "wb");
    CHECK(f && fwrite(data, 1, size, f) == size && fclose(f) == 0, "cannot write %s", path);
    return path;
}

void fuzz_seed_file(const char *path) {
    char *data, err[ERR_LEN];
    size_t size;
    CHECK(file_read_all(&data, &size, path, FUZZ_BYTES_MAX, err) == 0, "%s", err);
    fuzz_seed(data, size);
    free(data);
}
