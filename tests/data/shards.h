/* Small token shards for tests of data/. */
#ifndef TRAIN_MOE_TESTS_SHARDS_H
#define TRAIN_MOE_TESTS_SHARDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TEST_PATH_LEN = 512 };

/* buf = the path of `name` in the test's folder; returned. */
const char *test_path(char buf[TEST_PATH_LEN], const char *name);

/* Writes raw bytes, or a text, to `name` in the test's folder. */
void test_write_bytes(const char *name, const void *data, size_t size);
void test_write_text(const char *name, const char *text);

/* Writes a shard of n ids first_id, first_id + 1, ... (16 bits if they fit) to `name` in the test's folder. */
void test_write_shard(const char *name, int32_t first_id, int64_t n);

/* How test_write_zst packs. */
typedef struct {
    int64_t frame_bytes; /* unpacked bytes of a frame; 0 = all in one */
    bool has_table;      /* the seekable format's, at the end */
    bool has_checksums;  /* in the table: entries of 12 bytes */
    bool no_size;        /* frames do not say how much they hold */
    bool skippable;      /* a skippable frame before each, as pzstd writes */
} TestZst;

/* Packs data to `name` in the test's folder; returns the bytes written. */
size_t test_write_zst(const char *name, const void *data, size_t size, TestZst how);
/* Packs the file `from` of the test's folder. */
size_t test_pack(const char *name, const char *from, TestZst how);

/* The whole file in malloc'd memory. */
unsigned char *test_read_bytes(const char *name, size_t *size);

#endif
