/* See shards.h. */
#include "shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

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

static void put_word(unsigned char *at, uint32_t word) {
    memcpy(at, &word, sizeof word);
}

size_t test_write_zst(const char *name, const void *data, size_t size, TestZst how) {
    const size_t frame = how.frame_bytes ? (size_t)how.frame_bytes : size, n = (size + frame - 1) / frame;
    const size_t entry = how.has_checksums ? 12 : 8;
    unsigned char *out = (unsigned char *)malloc(n * (ZSTD_compressBound(frame) + entry + 64) + 64), *end = out;
    unsigned char *table = (unsigned char *)calloc(n, entry);
    ZSTD_CCtx *packer = ZSTD_createCCtx();
    REQUIRE(out && table && packer, "no memory");
    ZSTD_CCtx_setParameter(packer, ZSTD_c_checksumFlag, 1);
    ZSTD_CCtx_setParameter(packer, ZSTD_c_contentSizeFlag, !how.no_size);
    for (size_t i = 0; i < n; i++) {
        const size_t part = i + 1 < n ? frame : size - i * frame;
        const unsigned char *from = (const unsigned char *)data + i * frame, *begin = end;
        if (how.skippable) {
            put_word(end, 0x184D2A50);
            put_word(end + 4, 4);
            put_word(end + 8, 12345);
            end += 12;
        }
        const size_t packed = ZSTD_compress2(packer, end, ZSTD_compressBound(part), from, part);
        REQUIRE(!ZSTD_isError(packed), "%s", ZSTD_getErrorName(packed));
        end += packed;
        put_word(table + i * entry, (uint32_t)(end - begin));
        put_word(table + i * entry + 4, (uint32_t)part);
    }
    if (how.has_table) {
        put_word(end, 0x184D2A5E);
        put_word(end + 4, (uint32_t)(n * entry + 9));
        memcpy(end + 8, table, n * entry);
        end += 8 + n * entry;
        put_word(end, (uint32_t)n);
        end[4] = how.has_checksums ? 0x80 : 0;
        put_word(end + 5, 0x8F92EAB1);
        end += 9;
    }
    const size_t written = (size_t)(end - out);
    test_write_bytes(name, out, written);
    ZSTD_freeCCtx(packer);
    free(table);
    free(out);
    return written;
}

unsigned char *test_read_bytes(const char *name, size_t *size) {
    char path[TEST_PATH_LEN];
    FILE *f = fopen(test_path(path, name), "rb");
    REQUIRE(f && fseek(f, 0, SEEK_END) == 0, "cannot open %s", path);
    *size = (size_t)ftell(f);
    rewind(f);
    unsigned char *data = (unsigned char *)malloc(*size + 1);
    REQUIRE(data && fread(data, 1, *size, f) == *size, "cannot read %s", path);
    fclose(f);
    return data;
}

size_t test_pack(const char *name, const char *from, TestZst how) {
    size_t size;
    unsigned char *data = test_read_bytes(from, &size);
    const size_t written = test_write_zst(name, data, size, how);
    free(data);
    return written;
}
