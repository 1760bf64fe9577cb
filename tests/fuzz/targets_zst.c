/* Target: data/zst.h, on a file that has to unpack to FILE_BYTES. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>

#include "data/zst.h"
#include "tests/fuzz/fuzz.h"

enum { FILE_BYTES = 3000, FRAME_BYTES = 700 };

int fuzz_zst(const uint8_t *data, size_t size) {
    static uint8_t bytes[FILE_BYTES];
    char err[ERR_LEN] = "", hint[ERR_LEN] = "";
    const char *path = fuzz_file("x.zst", data, size);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0, "cannot open %s", path);
    ZstPool *pool = zst_pool_new();
    ZstFile *z = NULL;
    const int64_t n_head = zst_head(path, fd, bytes, 1024, FILE_BYTES, err);
    FUZZ_EXPECT(n_head <= 1024, "%lld bytes of 1024", (long long)n_head);
    if (n_head < 0) fuzz_expect_error(err, NULL);
    if (zst_open(&z, pool, path, fd, FILE_BYTES, err, hint) != 0) {
        fuzz_expect_error(err, hint);
    } else {
        static const struct {
            int64_t n, offset;
        } reads[] = {{FILE_BYTES, 0}, {1, FILE_BYTES - 1}, {100, FRAME_BYTES - 50}, {0, FILE_BYTES}};
        for (size_t i = 0; i < sizeof reads / sizeof *reads; i++)
            if (zst_read(z, fd, bytes, reads[i].n, reads[i].offset, err) != 0) fuzz_expect_error(err, NULL);
        zst_close(z);
    }
    zst_pool_free(pool);
    close(fd);
    return 0;
}

/* Frames of `frame_bytes`, with their sizes and a checksum or without both; a seek table behind them if asked for. */
static void seed_zst(size_t frame_bytes, bool is_stated, bool has_table) {
    static uint8_t plain[FILE_BYTES], packed[2 * FILE_BYTES + 4096];
    uint32_t table[2 * FILE_BYTES / 64], n = 0;
    size_t at = 0;
    for (int i = 0; i < FILE_BYTES; i++) plain[i] = (uint8_t)(i * i / 97);
    ZSTD_CCtx *c = ZSTD_createCCtx();
    ZSTD_CCtx_setParameter(c, ZSTD_c_checksumFlag, is_stated);
    ZSTD_CCtx_setParameter(c, ZSTD_c_contentSizeFlag, is_stated);
    for (size_t from = 0; from < FILE_BYTES; from += frame_bytes) {
        const size_t size = FILE_BYTES - from < frame_bytes ? FILE_BYTES - from : frame_bytes;
        const size_t made = ZSTD_compress2(c, packed + at, sizeof packed - at, plain + from, size);
        CHECK(!ZSTD_isError(made), "%s", ZSTD_getErrorName(made));
        at += made;
        table[2 * n] = (uint32_t)made;
        table[2 * n++ + 1] = (uint32_t)size;
    }
    if (has_table) {
        const uint32_t head[2] = {0x184D2A5E, 8 * n + 9}, seekable = 0x8F92EAB1;
        memcpy(packed + at, head, 8);
        memcpy(packed + at + 8, table, 8 * n);
        memcpy(packed + at + 8 + 8 * n, &n, 4);
        packed[at + 12 + 8 * n] = 0;
        memcpy(packed + at + 13 + 8 * n, &seekable, 4);
        at += 17 + 8 * n;
    }
    ZSTD_freeCCtx(c);
    fuzz_seed(packed, at);
}

void seeds_zst(void) {
    seed_zst(FRAME_BYTES, true, true);
    seed_zst(FRAME_BYTES, true, false);
    seed_zst(FRAME_BYTES, false, false);
    seed_zst(FILE_BYTES, false, false);
}
