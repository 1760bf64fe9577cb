/* Small token shards for tests of data/. */
#ifndef TRAIN_MOE_TESTS_SHARDS_H
#define TRAIN_MOE_TESTS_SHARDS_H

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

#endif
