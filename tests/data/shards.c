/* See shards.h. */
#include "shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/shard.h"
#include "tests/test.h"

const char *test_path(char buf[TEST_PATH_LEN], const char *name) {
    snprintf(buf, TEST_PATH_LEN, "%s/%s", test_tmp_dir(), name);
    return buf;
}

void test_write_bytes(const char *name, const void *data, size_t size) {
    char path[TEST_PATH_LEN];
    FILE *f = fopen(test_path(path, name), "wb");
    REQUIRE(f, "cannot create %s", path);
    size_t written = fwrite(data, 1, size, f);
    REQUIRE(fclose(f) == 0 && written == size, "cannot write %s", path);
}

void test_write_text(const char *name, const char *text) {
    test_write_bytes(name, text, strlen(text));
}

void test_write_shard(const char *name, int32_t first_id, int64_t n) {
    char path[TEST_PATH_LEN], err[ERR_LEN];
    int32_t *ids = (int32_t *)malloc((size_t)(n + 1) * sizeof *ids);
    for (int64_t i = 0; i < n; i++) ids[i] = first_id + (int32_t)i;
    int rc = shard_write(test_path(path, name), ids, n, 0, err);
    free(ids);
    REQUIRE(rc == 0, "%s", err);
}
