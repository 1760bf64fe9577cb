/* safetensors: the bytes that are written, and everything a reader must refuse. */
#include "data/safetensors.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kernels/base/file.h"
#include "kernels/base/rng.h"
#include "tests/test.h"

static char file_path[512];

static const char *test_file(void) {
    snprintf(file_path, sizeof file_path, "%s/x.safetensors", test_tmp_dir());
    return file_path;
}

/* A file of a length field, a header text and `data_bytes` bytes of data. */
static void write_raw(uint64_t length, const char *header, size_t header_bytes, size_t data_bytes) {
    FILE *f = fopen(test_file(), "wb");
    REQUIRE(f, "no test file");
    fwrite(&length, 1, 8, f);
    fwrite(header, 1, header_bytes, f);
    for (size_t i = 0; i < data_bytes; i++) fputc((int)i & 0xFF, f);
    fclose(f);
}

/* Byte i of tensor k in these tests. */
static unsigned char test_byte(int64_t k, int64_t i) {
    return (unsigned char)rng_bits(7, RNG_TEST, (uint64_t)k, (uint64_t)i);
}

static void write_file(SafetensorsEntry *entries, int64_t n, int64_t piece) {
    char err[ERR_LEN] = "";
    SafetensorsWriter w;
    REQUIRE(safetensors_create(&w, test_file(), entries, n, err) == 0, "%s", err);
    for (int64_t k = 0; k < n; k++) {
        unsigned char buffer[64];
        int64_t bytes = entries[k].end - entries[k].begin;
        for (int64_t at = 0; at < bytes; at += piece) {
            int64_t m = bytes - at < piece ? bytes - at : piece;
            for (int64_t i = 0; i < m; i++) buffer[i] = test_byte(k, at + i);
            REQUIRE(safetensors_append(&w, buffer, m, err) == 0, "%s", err);
        }
    }
    REQUIRE(safetensors_finish(&w, err) == 0, "%s", err);
}

/* 4-byte, 2-byte and 1-byte elements, odd counts, a scalar, an empty extent, names of odd length and beyond ASCII. */
static const SafetensorsEntry mixed[] = {
    {.name = "a", .dtype = SAFETENSORS_F32, .ndim = 2, .shape = {3, 5}},
    {.name = "b.\xC3\xA9t\xC3\xA9 \"q\"", .dtype = SAFETENSORS_F32, .ndim = 0},
    {.name = "z", .dtype = SAFETENSORS_F32, .ndim = 2, .shape = {0, 4}},
    {.name = "A", .dtype = SAFETENSORS_BF16, .ndim = 1, .shape = {7}},
    {.name = "c", .dtype = SAFETENSORS_BF16, .ndim = 3, .shape = {1, 9, 1}},
    {.name = "aa", .dtype = SAFETENSORS_F8_E4M3, .ndim = 2, .shape = {3, 3}},
};
enum { N_MIXED = sizeof mixed / sizeof *mixed };

TEST(safetensors_round_trip) {
    for (int64_t n = 0; n <= N_MIXED; n++) {
        SafetensorsEntry entries[N_MIXED];
        SafetensorsFile f;
        char err[ERR_LEN] = "";
        memcpy(entries, mixed, sizeof mixed);
        write_file(entries, n, 1 + n * 3);
        REQUIRE(safetensors_open(&f, test_file(), err) == 0, "%lld tensors: %s", (long long)n, err);
        EXPECT_EQ(f.n, n);
        EXPECT(f.data_start % 8 == 0, "data start at %lld", (long long)f.data_start);
        for (int64_t k = 0; k < n; k++) {
            unsigned char bytes[64];
            const SafetensorsEntry *e = safetensors_find(&f, mixed[k].name);
            REQUIRE(e, "%s is lost", mixed[k].name);
            EXPECT(e->dtype == mixed[k].dtype && e->ndim == mixed[k].ndim, "%s", e->name);
            for (int i = 0; i < e->ndim; i++) EXPECT_EQ(e->shape[i], mixed[k].shape[i]);
            EXPECT(e->begin % safetensors_dtype_width(e->dtype) == 0, "%s is not aligned", e->name);
            REQUIRE(safetensors_read(&f, e, bytes, 0, e->end - e->begin, err) == 0, "%s", err);
            int wrong = 0;
            for (int64_t i = 0; i < e->end - e->begin; i++) wrong += bytes[i] != test_byte(k, i);
            EXPECT(wrong == 0, "%s: %d bytes differ", e->name, wrong);
        }
        EXPECT(!safetensors_find(&f, "absent") && !safetensors_find(&f, ""), "found a tensor that is not there");
        safetensors_close(&f);
    }
}

TEST(safetensors_bytes_of_a_file) {
    SafetensorsEntry e[] = {{.name = "w", .dtype = SAFETENSORS_F32, .ndim = 2, .shape = {1, 2}},
                            {.name = "b", .dtype = SAFETENSORS_BF16, .ndim = 1, .shape = {1}}};
    const char *want =
        "{\"__metadata__\":{\"format\":\"pt\"},\"w\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":"
        "[0,8]},\"b\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[8,10]}}";
    char *data, err[ERR_LEN];
    size_t size;
    uint64_t length;
    write_file(e, 2, 64);
    REQUIRE(file_read_all(&data, &size, test_file(), 1 << 20, err) == 0, "%s", err);
    memcpy(&length, data, 8);
    EXPECT_EQ(length, (strlen(want) + 7) / 8 * 8);
    EXPECT_EQ(size, 8 + length + 10);
    EXPECT(memcmp(data + 8, want, strlen(want)) == 0, "header: %.*s", (int)length, data + 8);
    for (size_t i = strlen(want); i < length; i++) EXPECT(data[8 + i] == ' ', "padding 0x%02X", data[8 + i]);
    free(data);
}

static void create_in_wrong_order(void *arg) {
    SafetensorsEntry e[] = {{.name = "a", .dtype = SAFETENSORS_BF16, .ndim = 1, .shape = {1}},
                            {.name = "b", .dtype = SAFETENSORS_F32, .ndim = 1, .shape = {1}}};
    SafetensorsWriter w;
    safetensors_create(&w, (const char *)arg, e, 2, NULL);
}

static void create_twice_named(void *arg) {
    SafetensorsEntry e[] = {{.name = "a", .dtype = SAFETENSORS_F32, .ndim = 1, .shape = {1}},
                            {.name = "a", .dtype = SAFETENSORS_F32, .ndim = 1, .shape = {2}}};
    SafetensorsWriter w;
    safetensors_create(&w, (const char *)arg, e, 2, NULL);
}

static void finish_early(void *arg) {
    SafetensorsEntry e[] = {{.name = "a", .dtype = SAFETENSORS_F32, .ndim = 1, .shape = {2}}};
    SafetensorsWriter w;
    char err[ERR_LEN];
    safetensors_create(&w, (const char *)arg, e, 1, err);
    safetensors_append(&w, "1234", 4, err);
    safetensors_finish(&w, err);
}

TEST(safetensors_writer_contract) {
    EXPECT(expect_exit(128 + SIGABRT, "b after a", create_in_wrong_order, (void *)(uintptr_t)test_file()), "order");
    EXPECT(expect_exit(128 + SIGABRT, "a after a", create_twice_named, (void *)(uintptr_t)test_file()), "duplicate");
    EXPECT(expect_exit(128 + SIGABRT, "after 4 of 8 bytes", finish_early, (void *)(uintptr_t)test_file()),
           "missing bytes");
}

TEST(safetensors_write_to_a_full_disk) {
    SafetensorsEntry e[] = {{.name = "a", .dtype = SAFETENSORS_F32, .ndim = 1, .shape = {1 << 20}}};
    SafetensorsWriter w;
    char err[ERR_LEN] = "";
    char *zeros = (char *)calloc(1, 4 << 20);
    signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit = {1 << 16, RLIM_INFINITY};
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0, "no limit");
    REQUIRE(safetensors_create(&w, test_file(), e, 1, err) == 0, "%s", err);
    EXPECT_EQ(safetensors_append(&w, zeros, 4 << 20, err), -1);
    EXPECT(strstr(err, "x.safetensors: cannot write: File too large"), "%s", err);
    EXPECT(!path_exists(test_file()), "the unfinished file is still there");
    EXPECT_EQ(safetensors_create(&w, "/nowhere/at/all", e, 1, err), -1);
    EXPECT(strstr(err, "/nowhere/at/all: cannot create"), "%s", err);
    free(zeros);
}

/* Every row is a header, with `data` bytes behind it, and what the refusal must say. */
#define T4(offsets) "{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":" offsets "}"
static const struct {
    const char *header;
    size_t data;
    const char *part;
} malformed[] = {
    {"", 0, "not one {...}"},
    {"   ", 0, "not one {...}"},
    {"[]", 0, "not one {...}"},
    {" {}", 0, "not one {...}"},
    {"{}\n", 0, "not one {...}"},
    {"{} }", 0, "extra text"},
    {"{\"a\":" T4("[0,4]"), 4, "in the header"},
    {"{\"a\":" T4("[0,4]") ",}", 4, "trailing comma"},
    {"{\"a\":" T4("[0,4]") ",\"a\":" T4("[4,8]") "}", 8, "key \"a\" is given twice"},
    {"{\"//\":" T4("[0,4]") ",\"//\":" T4("[4,8]") "}", 8, "tensor //: given twice"},
    {"{\"a\":" T4("[4,8]") "}", 8, "tensor a: begins at byte 4, leaving a hole: behind 0 where the header ends"},
    {"{\"a\":" T4("[0,4]") ",\"b\":" T4("[8,12]") "}", 12, "tensor b: begins at byte 8, leaving a hole"},
    {"{\"a\":" T4("[0,4]") ",\"b\":" T4("[2,6]") "}", 6,
     "tensor b: begins at byte 2, overlapping: before 4 where a ends"},
    {"{\"a\":" T4("[0,4]") ",\"b\":" T4("[0,4]") "}", 4, "overlapping"},
    {"{\"a\":" T4("[0,4]") "}", 3, "cut off: tensor a ends at byte 4"},
    {"{\"a\":" T4("[0,4]") "}", 5, "5 bytes of data, but its tensors end at 4"},
    {"{}", 1, "1 bytes of data, but its tensors end at 0"},
    {"{\"a\":" T4("[0,5]") "}", 5, "tensor a: bytes 0 to 5, but its shape and dtype need 4"},
    {"{\"a\":" T4("[4,0]") "}", 4, "tensor a: bytes 4 to 0"},
    {"{\"a\":" T4("[-4,0]") "}", 4, "tensor a: \"data_offsets\" is not a list of two counts"},
    {"{\"a\":" T4("[0.0,4.0]") "}", 4, "two counts"},
    {"{\"a\":" T4("[0,4e0]") "}", 4, "two counts"},
    {"{\"a\":" T4("[0,\"4\"]") "}", 4, "two counts"},
    {"{\"a\":" T4("[0]") "}", 4, "two counts"},
    {"{\"a\":" T4("[0,4,4]") "}", 4, "two counts"},
    {"{\"a\":" T4("[]") "}", 4, "two counts"},
    {"{\"a\":" T4("[0,99999999999999999999]") "}", 4, "two counts"},
    {"{\"a\":" T4("[0,9223372036854775807]") "}", 4, "tensor a: bytes 0 to 9223372036854775807"},
    {"{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "tensor a: unknown dtype, the string \"F31\""},
    {"{\"a\":{\"dtype\":\"f32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype"},
    {"{\"a\":{\"dtype\":\"F4\",\"shape\":[2],\"data_offsets\":[0,1]}}", 1, "unknown dtype"},
    {"{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "unknown dtype, the number 7"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4, "\"shape\" must be a list"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "an extent of \"shape\""},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[null],\"data_offsets\":[0,4]}}", 4, "an extent of \"shape\""},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", 4, "an extent of \"shape\""},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904,4],\"data_offsets\":[0,0]}}", 0, "its shape overflows"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "more than 8 dimensions"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "tensor a: not an object of"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4, "tensor a: not an object of"},
    {"{\"a\":[0,4]}", 4, "tensor a: not an object of"},
    {"{\"a\":null}", 4, "tensor a: not an object of"},
    {"{\"__metadata__\":1}", 0, "\"__metadata__\" must be an object"},
    {"{\"__metadata__\":{\"n\":1}}", 0, "\"n\" must be a string"},
    {"{\"a\xFF\":" T4("[0,4]") "}", 4, "not UTF-8"},
    {"{\"a\\u0000\":" T4("[0,4]") "}", 4, "\\u0000"},
};

TEST(safetensors_malformed_headers) {
    SafetensorsFile f;
    char err[ERR_LEN];
    for (size_t i = 0; i < sizeof malformed / sizeof *malformed; i++) {
        err[0] = 0;
        write_raw(strlen(malformed[i].header), malformed[i].header, strlen(malformed[i].header), malformed[i].data);
        if (safetensors_open(&f, test_file(), err) == 0) {
            EXPECT(false, "accepted: %s", malformed[i].header);
            safetensors_close(&f);
        }
        EXPECT(strstr(err, malformed[i].part), "%s\n  says: %s", malformed[i].header, err);
        EXPECT(strstr(err, "x.safetensors"), "%s\n  names no file: %s", malformed[i].header, err);
        EXPECT(!strchr(err, '\n'), "more than one line: %s", err);
    }
}

TEST(safetensors_malformed_lengths) {
    SafetensorsFile f;
    char err[ERR_LEN] = "", deep[400];
    const uint64_t lengths[] = {(uint64_t)1 << 60, UINT64_MAX, UINT64_MAX - 7, SAFETENSORS_HEADER_MAX + 1};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        write_raw(lengths[i], "{}", 2, 0);
        EXPECT(safetensors_open(&f, test_file(), err) == -1, "length %llu", (unsigned long long)lengths[i]);
        EXPECT(strstr(err, "at most 100000000 are read"), "%s", err);
    }
    write_raw(SAFETENSORS_HEADER_MAX, "{}", 2, 0);
    EXPECT(safetensors_open(&f, test_file(), err) == -1 && strstr(err, "cut off: 10 bytes"), "%s", err);
    write_raw(3, "{}", 2, 0);
    EXPECT(safetensors_open(&f, test_file(), err) == -1 && strstr(err, "cut off"), "%s", err);
    for (int bytes = 0; bytes < 8; bytes++) {
        write_raw(2, "{}", 2, 0);
        REQUIRE(truncate(test_file(), bytes) == 0, "truncate");
        EXPECT(safetensors_open(&f, test_file(), err) == -1 && strstr(err, "too short"), "%s", err);
    }
    snprintf(deep, sizeof deep, "{\"a\":%0200d%0100d}", 0, 0);
    memset(deep + 5, '[', 150);
    memset(deep + 155, ']', 150);
    write_raw(strlen(deep), deep, strlen(deep), 0);
    EXPECT(safetensors_open(&f, test_file(), err) == -1 && strstr(err, "nested deeper"), "%s", err);
    EXPECT(safetensors_open(&f, test_tmp_dir(), err) == -1 && strstr(err, "not a plain file"), "%s", err);
    EXPECT(safetensors_open(&f, "/nowhere/x", err) == -1 && strstr(err, "/nowhere/x: cannot open"), "%s", err);
}

/* Whatever still opens is consistent: its tensors can be read to the last byte. */
static bool opens_or_refuses(void) {
    SafetensorsFile f;
    char err[ERR_LEN] = "";
    if (safetensors_open(&f, test_file(), err) != 0) {
        EXPECT(err[0], "refused without a word");
        return false;
    }
    for (int64_t k = 0; k < f.n; k++) {
        const SafetensorsEntry *e = &f.entries[k];
        char *bytes = (char *)malloc((size_t)(e->end - e->begin) + 1);
        EXPECT(safetensors_read(&f, e, bytes, 0, e->end - e->begin, err) == 0, "%s", err);
        free(bytes);
    }
    safetensors_close(&f);
    return true;
}

TEST(safetensors_random_damage) {
    SafetensorsEntry entries[N_MIXED];
    char *data, err[ERR_LEN];
    size_t size;
    int opened = 0, refused = 0;
    memcpy(entries, mixed, sizeof mixed);
    write_file(entries, N_MIXED, 64);
    REQUIRE(file_read_all(&data, &size, test_file(), 1 << 20, err) == 0, "%s", err);
    char *mutant = (char *)malloc(size);
    uint64_t length;
    memcpy(&length, data, 8);
    for (uint64_t trial = 0; trial < 500; trial++) {
        memcpy(mutant, data, size);
        int n_changes = 1 + (int)(rng_bits(1, RNG_TEST, trial, 0) % 3);
        for (int k = 0; k < n_changes; k++) {
            uint64_t at = rng_bits(2, RNG_TEST, trial, (uint64_t)k) % (8 + length),
                     how = rng_bits(3, RNG_TEST, trial, (uint64_t)k);
            const char *likely = "0123456789[]{}\",:- ";
            mutant[at] = how % 2 ? likely[(how >> 8) % strlen(likely)] : (char)(mutant[at] ^ (1 << (how >> 8) % 8));
        }
        FILE *f = fopen(test_file(), "wb");
        REQUIRE(f, "no test file");
        fwrite(mutant, 1, size, f);
        fclose(f);
        *(opens_or_refuses() ? &opened : &refused) += 1;
    }
    EXPECT(refused > 300 && opened > 0, "%d refused, %d opened", refused, opened);
    for (size_t cut = 0; cut < size; cut++) {
        REQUIRE(cut > 0 || file_write_durable(test_file(), data, size, err) == 0, "%s", err);
        REQUIRE(truncate(test_file(), (off_t)(size - 1 - cut)) == 0, "truncate");
        EXPECT(!opens_or_refuses(), "a file that lacks %zu bytes was accepted", cut + 1);
    }
    free(mutant);
    free(data);
}

TEST(safetensors_file_shrinks_while_read) {
    SafetensorsEntry e[] = {{.name = "a", .dtype = SAFETENSORS_F32, .ndim = 1, .shape = {16}}};
    SafetensorsFile f;
    char err[ERR_LEN] = "", bytes[64];
    write_file(e, 1, 64);
    REQUIRE(safetensors_open(&f, test_file(), err) == 0, "%s", err);
    REQUIRE(truncate(test_file(), f.data_start + 63) == 0, "truncate");
    EXPECT_EQ(safetensors_read(&f, f.entries, bytes, 0, 63, err), 0);
    EXPECT_EQ(safetensors_read(&f, f.entries, bytes, 60, 4, err), -1);
    EXPECT(strstr(err, "x.safetensors: ends at byte"), "%s", err);
    safetensors_close(&f);
}
