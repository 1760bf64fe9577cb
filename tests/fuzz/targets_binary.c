/* Targets: readers of binary files. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/choice_file.h"
#include "data/safetensors.h"
#include "data/shard.h"
#include "tests/fuzz/fuzz.h"

/* ---- token shards ------------------------------------------------------------------------------------------------ */

int fuzz_shard(const uint8_t *data, size_t size) {
    enum { VOCAB = 1000, ROOM = 100 };
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    Shard s;
    static ZstPool *pool; /* one for all inputs, as a source has one for all its shards */
    if (!pool) pool = zst_pool_new();
    if (shard_open(&s, fuzz_file("tokens.bin", data, size), size % 2, pool, err, hint) != 0) {
        fuzz_expect_error(err, hint);
        return 0;
    }
    int32_t ids[ROOM];
    for (int64_t at = 0; at < s.n_tokens; at += ROOM) {
        const int64_t n = s.n_tokens - at < ROOM ? s.n_tokens - at : ROOM;
        if (shard_read(&s, ids, at, n, VOCAB, err) != 0) {
            fuzz_expect_error(err, NULL);
            break;
        }
        for (int64_t i = 0; i < n; i++) FUZZ_EXPECT(ids[i] >= 0 && ids[i] < VOCAB, "id %d", ids[i]);
    }
    shard_close(&s);
    return 0;
}

static void seed_shard(int64_t n, int32_t largest, int width) {
    char path[128], err[ERR_LEN];
    int32_t ids[300];
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)(i * 7919) % (largest + 1);
    snprintf(path, sizeof path, "%s", fuzz_file("seed.bin", "", 0));
    CHECK(shard_write(path, ids, n, width, err) == 0, "%s", err);
    fuzz_seed_file(path);
}

void seeds_shard(void) {
    seed_shard(1, 0, 2);
    seed_shard(300, 999, 2);
    seed_shard(300, 999, 4);
    seed_shard(50, 70000, 4);
}

/* ---- safetensors ------------------------------------------------------------------------------------------------- */

static void read_safetensors(const void *data, size_t size) {
    char err[ERR_LEN] = "";
    SafetensorsFile f;
    if (safetensors_open(&f, fuzz_file("x.safetensors", data, size), err) != 0) {
        fuzz_expect_error(err, NULL);
        return;
    }
    static uint8_t bytes[FUZZ_BYTES_MAX];
    int64_t total = 0;
    for (int64_t i = 0; i < f.n; i++) {
        const SafetensorsEntry *e = &f.entries[i];
        const int64_t n = e->end - e->begin;
        int64_t expected = safetensors_dtype_width(e->dtype);
        for (int k = 0; k < e->ndim; k++) expected *= e->shape[k];
        FUZZ_EXPECT(n == expected && n <= (int64_t)size, "%s: %lld bytes", e->name, (long long)n);
        FUZZ_EXPECT(safetensors_find(&f, e->name) == e, "%s is not found", e->name);
        FUZZ_EXPECT(safetensors_read(&f, e, bytes, 0, n, err) == 0, "%s", err);
        total += n;
    }
    FUZZ_EXPECT(total == f.data_bytes, "%lld of %lld bytes", (long long)total, (long long)f.data_bytes);
    safetensors_close(&f);
}

/* As it stands; then with the length of the header that its last bracket says, so that more get behind that check. */
int fuzz_safetensors(const uint8_t *data, size_t size) {
    static uint8_t mended[FUZZ_BYTES_MAX];
    uint64_t length = 0, found;
    read_safetensors(data, size);
    for (size_t i = sizeof length; i < size; i++)
        if (data[i] == '}') length = i + 1 - sizeof length;
    if (size <= sizeof length || memcmp(data, &length, sizeof length) == 0) return 0;
    memcpy(&found, data, sizeof found);
    for (uint64_t i = length; i < found && i + sizeof length < size && data[i + sizeof length] == ' ';) length = ++i;
    memcpy(mended, data, size);
    memcpy(mended, &length, sizeof length);
    read_safetensors(mended, size);
    return 0;
}

static void seed_safetensors(SafetensorsEntry *entries, int64_t n) {
    static const uint8_t zeros[1024];
    char path[128], err[ERR_LEN];
    SafetensorsWriter w;
    snprintf(path, sizeof path, "%s", fuzz_file("seed.bin", "", 0));
    CHECK(safetensors_create(&w, path, entries, n, err) == 0, "%s", err);
    CHECK(safetensors_append(&w, zeros, w.data_bytes, err) == 0 && safetensors_finish(&w, err) == 0, "%s", err);
    fuzz_seed_file(path);
}

void seeds_safetensors(void) {
    SafetensorsEntry several[] = {
        {.name = "a.weight", .dtype = SAFETENSORS_F32, .ndim = 2, .shape = {3, 5}},
        {.name = "b", .dtype = SAFETENSORS_F32, .ndim = 0},
        {.name = "c.weight", .dtype = SAFETENSORS_BF16, .ndim = 3, .shape = {2, 2, 7}},
        {.name = "empty", .dtype = SAFETENSORS_F8_E4M3, .ndim = 1, .shape = {0}},
        {.name = "d", .dtype = SAFETENSORS_U8, .ndim = 1, .shape = {9}},
    };
    seed_safetensors(several, sizeof several / sizeof *several);
    seed_safetensors(several + 1, 1);
    seed_safetensors(several, 0);
}

/* ---- multiple choice --------------------------------------------------------------------------------------------- */

enum { CHOICE_VOCAB = 100 };

int fuzz_choice(const uint8_t *data, size_t size) {
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    ChoiceFile f;
    if (choice_file_open(&f, fuzz_file("choice.bin", data, size), CHOICE_VOCAB, err, hint) != 0) {
        fuzz_expect_error(err, hint);
        return 0;
    }
    for (int64_t i = 0; i < f.n_examples; i++) {
        const ChoiceExample *e = &f.examples[i];
        FUZZ_EXPECT(e->label >= 0 && e->label < e->n_choices && e->n_choices <= CHOICES_MAX, "label %d", e->label);
        for (int c = -1; c < e->n_choices; c++) {
            const int32_t *ids = c < 0 ? choice_context(&f, i) : choice_ids(&f, i, c),
                          n = c < 0 ? e->n_context : e->length[c];
            FUZZ_EXPECT(n > 0, "%d ids", n);
            for (int32_t k = 0; k < n; k++) FUZZ_EXPECT(ids[k] >= 0 && ids[k] < CHOICE_VOCAB, "id %d", ids[k]);
        }
    }
    choice_file_close(&f);
    return 0;
}

/* Two questions of two and three choices, in both widths. */
void seeds_choice(void) {
    static const uint32_t numbers[] = {
        0, 13, 0, 1, 2, 2, 10, 11, 1, 20, 2, 21, 22, 0, 14, 1, 0, 3, 1, 12, 1, 30, 2, 31, 32, 1, 99,
    };
    enum { N = sizeof numbers / sizeof *numbers, SECOND = 13 };
    for (int width = 2; width <= 4; width += 2) {
        uint8_t file[1024 + 4 * N] = {0};
        const int32_t header[4] = {20240522, width == 2 ? 1 : 7, 2, 14 * width};
        memcpy(file, header, sizeof header);
        for (int i = 0; i < N; i++) {
            uint32_t number = numbers[i];
            if (i == 0 || i == SECOND) number = UINT32_MAX;
            if (i == 1 || i == SECOND + 1) number *= (uint32_t)width;
            memcpy(file + 1024 + i * width, &number, (size_t)width);
        }
        fuzz_seed(file, 1024 + (size_t)(N * width));
    }
}
