/* data/shard.c: what is read is what was written, and nothing else passes for a shard. */
#include "data/shard.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shards.h"
#include "tests/test.h"

static void round_trip(const int32_t *ids, int64_t n, int width, int expected_width) {
    char path[TEST_PATH_LEN], err[ERR_LEN] = "", hint[ERR_LEN];
    int32_t back[8];
    REQUIRE(n <= 8);
    REQUIRE(shard_write(test_path(path, "s.bin"), ids, n, width, err) == 0, "%s", err);
    for (int keep_open = 0; keep_open < 2; keep_open++) {
        Shard s;
        REQUIRE(shard_open(&s, path, keep_open == 1, NULL, err, hint) == 0, "%s", err);
        EXPECT_EQ(s.width, expected_width);
        EXPECT_EQ(s.n_tokens, n);
        EXPECT_EQ(s.n_bytes, SHARD_HEADER_BYTES + n * expected_width);
        EXPECT(shard_read(&s, back, 0, n, INT32_MAX, err) == 0, "%s", err);
        EXPECT(memcmp(back, ids, (size_t)n * sizeof *ids) == 0, "ids differ");
        EXPECT(shard_read(&s, back, 1, 1, INT32_MAX, err) == 0 && back[0] == ids[1], "%d", back[0]);
        shard_close(&s);
    }
}

/* Ids above 65,535 were once cut to 16 bits on writing, and half of a large vocabulary came back as other ids. */
TEST(shard_width_follows_the_ids) {
    const int32_t narrow[] = {0, 1, 50256, 65535}, wide[] = {0, 65535, 65536, 129279};
    round_trip(narrow, 4, 0, 2);
    round_trip(narrow, 4, 2, 2);
    round_trip(narrow, 4, 4, 4);
    round_trip(wide, 4, 0, 4);
    char path[TEST_PATH_LEN], err[ERR_LEN];
    EXPECT(shard_write(test_path(path, "cut.bin"), wide, 4, 2, err) == -1 && strstr(err, "id 129279 does not fit"));
    EXPECT(access(path, F_OK) != 0, "a refused shard was written");
    const int32_t negative[] = {3, -1};
    EXPECT(shard_write(path, negative, 2, 0, err) == -1 && strstr(err, "token 1 is id -1"), "%s", err);
    EXPECT(shard_write(path, wide, (int64_t)1 << 31, 0, err) == -1 && strstr(err, "at most 2147483647"), "%s", err);
}

TEST(shard_header_is_llmc) {
    const int32_t ids[] = {258, 65536};
    char path[TEST_PATH_LEN], err[ERR_LEN];
    unsigned char file[1024 + 8 + 1];
    for (int width = 2; width <= 4; width += 2) {
        REQUIRE(shard_write(test_path(path, "s.bin"), ids, width == 2 ? 1 : 2, width, err) == 0, "%s", err);
        FILE *f = fopen(path, "rb");
        REQUIRE(f);
        size_t size = fread(file, 1, sizeof file, f);
        fclose(f);
        int32_t header[256];
        memcpy(header, file, sizeof header);
        EXPECT_EQ(size, width == 2 ? 1026 : 1032);
        EXPECT_EQ(header[0], width == 2 ? 20240520 : 20240801);
        EXPECT_EQ(header[1], width == 2 ? 1 : 7);
        EXPECT_EQ(header[2], width == 2 ? 1 : 2);
        for (int i = 3; i < 256; i++) EXPECT_EQ(header[i], 0);
        EXPECT_EQ(file[1024], 2);
        EXPECT_EQ(file[1025], 1);
    }
}

/* Writes a file and expects shard_open to refuse it with both texts in the message. */
static void expect_refused(const void *data, size_t size, const char *part, const char *other_part) {
    char path[TEST_PATH_LEN], err[ERR_LEN] = "", hint[ERR_LEN] = "";
    test_write_bytes("bad.bin", data, size);
    Shard s;
    EXPECT(shard_open(&s, test_path(path, "bad.bin"), true, NULL, err, hint) == -1, "accepted; expected '%s'", part);
    EXPECT(strstr(err, "bad.bin"), "no file name in '%s'", err);
    EXPECT(strstr(err, part), "no '%s' in '%s'", part, err);
    EXPECT(!other_part || strstr(err, other_part), "no '%s' in '%s'", other_part, err);
    EXPECT(hint[0], "no hint for '%s'", err);
}

static void expect_header_refused(int32_t magic, int32_t version, int32_t n, size_t size, const char *part,
                                  const char *other_part) {
    int32_t file[256 + 16] = {magic, version, n};
    REQUIRE(size <= sizeof file);
    expect_refused(file, size, part, other_part);
}

TEST(shard_refuses_wrong_headers) {
    int32_t swapped = (int32_t)__builtin_bswap32(20240520), swapped_wide = (int32_t)__builtin_bswap32(20240801);
    expect_header_refused(20240520, 2, 4, 1032, "version 2 found", "version 1 expected");
    expect_header_refused(20240520, 7, 4, 1032, "version 7 found", "version 1 expected");
    expect_header_refused(20240801, 1, 4, 1040, "version 1 found", "version 7 expected");
    expect_header_refused(swapped, 1 << 24, 4, 1032, "bytes swapped", "20240520");
    expect_header_refused(swapped_wide, 7 << 24, 4, 1040, "bytes swapped", "20240801");
    expect_header_refused(12345678, 1, 4, 1032, "magic 12345678 found", "20240520 or 20240801 expected");
    expect_header_refused(20240522, 1, 4, 1032, "multiple-choice evaluation file", "20240522");
    expect_header_refused(20240326, 3, 4, 1032, "GPT-2 model", NULL);
    expect_header_refused(20240520, 1, -5, 1032, "-5 tokens", NULL);
}

TEST(shard_refuses_wrong_sizes) {
    expect_header_refused(20240520, 1, 4, 1023, "truncated header: 1023 bytes found", "1024 expected");
    expect_header_refused(20240520, 1, 4, 4, "truncated header: 4 bytes found", "1024 expected");
    expect_header_refused(20240520, 1, 4, 1031, "truncated: 1031 bytes found", "1032 expected");
    expect_header_refused(20240520, 1, 4, 1024, "truncated: 1024 bytes found", "1032 expected");
    expect_header_refused(20240801, 7, 4, 1032, "truncated: 1032 bytes found", "1040 expected");
    expect_header_refused(20240520, 1, 4, 1033, "longer than its header says: 1033", "1032 expected");
    expect_header_refused(20240520, 1, 0, 1024, "without a single token", NULL);
    expect_header_refused(20240520, 1, INT32_MAX, 1032, "truncated: 1032 bytes found", "4294968318 expected");
}

TEST(shard_says_what_another_file_is) {
    expect_refused("", 0, "empty file", NULL);
    expect_refused("It is a truth universally acknowledged", 38, "text", "20240520");
    expect_refused("{}", 2, "text", NULL);
    expect_refused("\x28\xB5\x2F\xFD\x04\x00\x01", 7, "a Zstandard file that ends, at byte 7", NULL);
    expect_refused("\x1F\x8B\x08\x00\x00\x00", 6, "gzip-compressed", NULL);
    expect_refused("PAR1\x15\x04", 6, "parquet", NULL);
    expect_refused("\x00\x00\x00\x00\x00\x00", 6, "magic 0 found", NULL);
    char path[TEST_PATH_LEN], err[ERR_LEN], hint[ERR_LEN];
    Shard s;
    EXPECT(shard_open(&s, test_tmp_dir(), true, NULL, err, hint) == -1 && strstr(err, "is a folder") && hint[0], "%s",
           err);
    EXPECT(shard_open(&s, test_path(path, "none.bin"), true, NULL, err, hint) == -1 && strstr(err, "cannot open"), "%s",
           err);
}

/* An id without a row in the embedding: file, offset, id and vocabulary are named, before it reaches a kernel. */
TEST(shard_checks_ids_against_the_vocabulary) {
    char path[TEST_PATH_LEN], err[ERR_LEN] = "", hint[ERR_LEN];
    enum { N = 10000 };
    static int32_t ids[N], back[N];
    ids[8999] = 1025;
    REQUIRE(shard_write(test_path(path, "s.bin"), ids, N, 0, err) == 0, "%s", err);
    Shard s;
    REQUIRE(shard_open(&s, path, true, NULL, err, hint) == 0, "%s", err);
    EXPECT(shard_read(&s, back, 0, N, 1026, err) == 0, "%s", err);
    EXPECT(shard_read(&s, back, 5, 8994, 1025, err) == 0, "%s", err);
    EXPECT(shard_read(&s, back, 5, 8995, 1025, err) == -1);
    EXPECT(strstr(err, "s.bin: token 8999 is id 1025, outside the vocabulary of 1025"), "%s", err);
    shard_close(&s);

    int32_t file[256 + 2] = {20240801, 7, 2};
    file[257] = -1;
    test_write_bytes("max.bin", file, sizeof file);
    REQUIRE(shard_open(&s, test_path(path, "max.bin"), true, NULL, err, hint) == 0, "%s", err);
    EXPECT(shard_read(&s, back, 0, 2, INT32_MAX, err) == -1 && strstr(err, "token 1 is id 4294967295"), "%s", err);
    shard_close(&s);
}

/* Byte offsets were once narrowed to 32 bits before seeking. The files are sparse: a few blocks on the disk. */
static void read_far(int32_t magic, int32_t version, int width, int64_t n) {
    char path[TEST_PATH_LEN], err[ERR_LEN] = "", hint[ERR_LEN];
    const int32_t header[3] = {magic, version, (int32_t)n};
    int fd = open(test_path(path, "far.bin"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    REQUIRE(fd >= 0 && ftruncate(fd, SHARD_HEADER_BYTES + n * width) == 0, "no sparse file");
    REQUIRE(pwrite(fd, header, sizeof header, 0) == sizeof header);
    /* Beyond 2 GiB, beyond 4 GiB (32-bit ids), and the very end; decoys where a narrowed offset would land. */
    const int64_t at[] = {5, ((int64_t)1 << 31) / width + 77, n - 3 - ((int64_t)1 << 32) / width, n - 3};
    for (int i = 0; i < 4; i++) {
        const int32_t id = 1000 + i;
        if (at[i] < 0) continue;
        REQUIRE(pwrite(fd, &id, (size_t)width, SHARD_HEADER_BYTES + at[i] * width) == width);
    }
    close(fd);
    Shard s;
    REQUIRE(shard_open(&s, path, true, NULL, err, hint) == 0, "%s", err);
    for (int i = 0; i < 4; i++) {
        int32_t ids[3] = {-1, -1, -1};
        if (at[i] < 0) continue;
        REQUIRE(shard_read(&s, ids, at[i] - 1, 3, 2000, err) == 0, "%s", err);
        EXPECT(ids[0] == 0 && ids[1] == 1000 + i && ids[2] == 0, "at %lld: %d %d %d", (long long)at[i], ids[0], ids[1],
               ids[2]);
    }
    shard_close(&s);
    unlink(path);
}

TEST(shard_beyond_two_gib) {
    read_far(20240520, 1, 2, 1200000000);
    read_far(20240801, 7, 4, 1200000000);
}

TEST(shard_that_shrinks_is_an_error) {
    char path[TEST_PATH_LEN], err[ERR_LEN] = "", hint[ERR_LEN];
    int32_t ids[4];
    test_write_shard("s.bin", 10, 100);
    Shard s;
    REQUIRE(shard_open(&s, test_path(path, "s.bin"), false, NULL, err, hint) == 0, "%s", err);
    REQUIRE(truncate(path, 1024 + 2 * 97) == 0);
    EXPECT(shard_read(&s, ids, 93, 4, 1000, err) == 0 && ids[3] == 106, "%s", err);
    EXPECT(shard_read(&s, ids, 94, 4, 1000, err) == -1 && strstr(err, "has shrunk"), "%s", err);
    unlink(path);
    EXPECT(shard_read(&s, ids, 0, 4, 1000, err) == -1 && strstr(err, "cannot open"), "%s", err);
    shard_close(&s);
}
