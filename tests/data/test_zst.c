/* data/zst.c: packed shards give the tokens of the plain ones, and a damaged one is named, never read short. */
#include "data/zst.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>

#include "data/loader.h"
#include "data/shard.h"
#include "shards.h"
#include "tests/test.h"

enum { N = 40000, FRAME = 4096 };

static const TestZst seekable = {.frame_bytes = FRAME, .has_table = true};

/* Ids that hardly compress, so that damage anywhere hits content. */
static int32_t id_of(int64_t i) {
    return (int32_t)((uint64_t)(i + 1) * 0x9E3779B97F4A7C15u >> 48) % 50000;
}

static void write_plain(const char *name, int64_t n, int width) {
    char path[TEST_PATH_LEN], err[ERR_LEN];
    int32_t *ids = (int32_t *)malloc((size_t)n * sizeof *ids);
    for (int64_t i = 0; i < n; i++) ids[i] = id_of(i);
    REQUIRE(shard_write(test_path(path, name), ids, n, width, err) == 0, "%s", err);
    free(ids);
}

static int open_file(Shard *s, ZstPool *pool, const char *name, char *err, char *hint) {
    char path[TEST_PATH_LEN];
    err[0] = hint[0] = 0;
    return shard_open(s, test_path(path, name), true, pool, err, hint);
}

/* Reads all of it in pieces of `step`, from behind, and compares. */
static void expect_ids(const Shard *s, int64_t n, int64_t step) {
    char err[ERR_LEN] = "";
    int32_t *ids = (int32_t *)malloc((size_t)step * sizeof *ids);
    EXPECT_EQ(s->n_tokens, n);
    for (int64_t at = (n - 1) / step * step; at >= 0; at -= step) {
        const int64_t part = n - at < step ? n - at : step;
        REQUIRE(shard_read(s, ids, at, part, 50000, err) == 0, "%s", err);
        for (int64_t i = 0; i < part; i++) REQUIRE(ids[i] == id_of(at + i), "token %lld", (long long)(at + i));
    }
    free(ids);
}

/* However it was packed: with and without a table, with and without sizes, in one frame or many (cases C11, C12). */
TEST(zst_reads_every_way_of_packing) {
    const TestZst ways[] = {
        seekable,
        {.frame_bytes = FRAME, .has_table = true, .has_checksums = true},
        {.frame_bytes = FRAME},
        {.frame_bytes = FRAME, .no_size = true},
        {.frame_bytes = FRAME, .skippable = true},
        {.frame_bytes = FRAME, .skippable = true, .has_table = true},
        {.frame_bytes = 1},
        {.frame_bytes = 0},
        {.frame_bytes = 0, .no_size = true},
        {.frame_bytes = 0, .has_table = true},
    };
    for (int width = 2; width <= 4; width += 2) {
        for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
            const int64_t n = ways[i].frame_bytes == 1 ? 500 : N;
            write_plain("s.bin", n, width);
            test_pack("s.bin.zst", "s.bin", ways[i]);
            ZstPool *pool = zst_pool_new();
            Shard s;
            char err[ERR_LEN], hint[ERR_LEN];
            REQUIRE(open_file(&s, pool, "s.bin.zst", err, hint) == 0, "way %zu: %s", i, err);
            EXPECT(s.width == width && s.n_bytes == SHARD_HEADER_BYTES + n * width && s.n_file_bytes > 0);
            expect_ids(&s, n, 1000);
            expect_ids(&s, n, n);
            int64_t bytes;
            EXPECT(zst_pool_unpacked(pool, &bytes) == 0 && bytes == 0, "small frames need no temporary file");
            shard_close(&s);
            zst_pool_free(pool);
        }
    }
}

/* Frames larger than ZST_FRAME_MAX are unpacked once; two files share one temporary file, which has no name. */
TEST(zst_unpacks_large_frames_once) {
    const int64_t n = 3000000; /* 6 MB */
    const TestZst ways[] = {{.frame_bytes = 0},
                            {.frame_bytes = 0, .no_size = true},
                            {.frame_bytes = 5 << 20},
                            {.frame_bytes = 0, .has_table = true}};
    char folder[TEST_PATH_LEN], err[ERR_LEN], hint[ERR_LEN];
    REQUIRE(setenv("TMPDIR", test_path(folder, "."), 1) == 0);
    write_plain("a.bin", n, 2);
    write_plain("b.bin", 1000, 2);
    /* A small frame first: that the second is large, is not known at the start. */
    size_t size;
    unsigned char *data = test_read_bytes("a.bin", &size);
    const size_t first = test_write_zst("front", data, 1024, (TestZst){.frame_bytes = 0});
    const size_t rest = test_write_zst("rest", data + 1024, size - 1024, (TestZst){.frame_bytes = 0});
    free(data);
    unsigned char *front = test_read_bytes("front", &size), *joined = (unsigned char *)malloc(first + rest);
    memcpy(joined, front, first);
    free(front);
    front = test_read_bytes("rest", &size);
    memcpy(joined + first, front, rest);
    free(front);
    test_write_bytes("joined.zst", joined, first + rest);
    free(joined);
    for (int i = 0; i < 5; i++) {
        if (i < 4) test_pack("a.bin.zst", "a.bin", ways[i]);
        ZstPool *pool = zst_pool_new();
        Shard a, b, small;
        test_pack("b.bin.zst", "b.bin", seekable);
        REQUIRE(open_file(&a, pool, i < 4 ? "a.bin.zst" : "joined.zst", err, hint) == 0, "way %d: %s", i, err);
        REQUIRE(open_file(&small, pool, "b.bin.zst", err, hint) == 0, "%s", err);
        REQUIRE(open_file(&b, pool, i < 4 ? "a.bin.zst" : "joined.zst", err, hint) == 0, "%s", err);
        int64_t bytes;
        EXPECT_EQ(zst_pool_unpacked(pool, &bytes), 2);
        EXPECT_EQ(bytes, 2 * (SHARD_HEADER_BYTES + 2 * n));
        expect_ids(&a, n, 100000);
        expect_ids(&small, 1000, 10);
        expect_ids(&b, n, 700001);
        shard_close(&a);
        shard_close(&b);
        shard_close(&small);
        zst_pool_free(pool);
    }
    REQUIRE(setenv("TMPDIR", "/no/such/folder", 1) == 0);
    ZstPool *pool = zst_pool_new();
    Shard s;
    EXPECT(open_file(&s, pool, "a.bin.zst", err, hint) == -1 && strstr(err, "cannot unpack to /no/such/folder") &&
               strstr(hint, "TMPDIR"),
           "%s (%s)", err, hint);
    zst_pool_free(pool);
}

static int64_t number_after(const char *text, const char *words) {
    const char *at = strstr(text, words);
    return at ? strtoll(at + strlen(words), NULL, 10) : -1;
}

/* Opens and, if that works, reads all. Returns whether something was wrong; then the file and a byte of it were
 * named. */
static bool is_refused(const char *name, size_t size, char *err) {
    static int32_t ids[N];
    char hint[ERR_LEN];
    ZstPool *pool = zst_pool_new();
    Shard s;
    int result = open_file(&s, pool, name, err, hint);
    if (result != 0) EXPECT(hint[0], "no hint for '%s'", err);
    if (result == 0) {
        EXPECT_EQ(s.n_tokens, N);
        result = shard_read(&s, ids, 0, N, 50000, err);
        shard_close(&s);
    }
    zst_pool_free(pool);
    if (result == 0) return false;
    EXPECT(strstr(err, name), "no file in '%s'", err);
    const char *const places[] = {"begins at byte ", "at byte ", "of bytes ", "truncated header: ",
                                  "ends at byte ",   "file of ", "magic ",    "version "};
    int64_t at = -1;
    for (size_t i = 0; i < sizeof places / sizeof *places && at < 0; i++) at = number_after(err, places[i]);
    EXPECT(strstr(err, "magic") || (at >= 0 && at <= (int64_t)size), "no byte in '%s'", err);
    return true;
}

/* Cut anywhere, it is refused: never a short epoch, never a hang (case C11). */
TEST(zst_truncation_is_an_error) {
    const TestZst ways[] = {seekable, {.frame_bytes = FRAME}, {.frame_bytes = 0}, {.frame_bytes = 0, .no_size = true}};
    write_plain("s.bin", N, 2);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        char err[ERR_LEN];
        size_t size;
        test_pack("s.bin.zst", "s.bin", ways[i]);
        unsigned char *data = test_read_bytes("s.bin.zst", &size);
        EXPECT(!is_refused("s.bin.zst", size, err), "%s", err);
        const size_t cuts[] = {1, 2, 5, 9, 10, 17, 100, 1000, 4000, 4096, size / 2, size - 1, size - 4, size - 20};
        for (size_t k = 0; k < sizeof cuts / sizeof *cuts; k++) {
            test_write_bytes("cut.zst", data, size - cuts[k]);
            EXPECT(is_refused("cut.zst", size, err), "way %zu without its last %zu bytes was read", i, cuts[k]);
        }
        free(data);
    }
    /* Between two frames, where nothing but the count is wrong. */
    size_t size;
    unsigned char *data = test_read_bytes("s.bin", &size);
    char err[ERR_LEN];
    const size_t packed = test_write_zst("half.zst", data, 1024 + FRAME, (TestZst){.frame_bytes = FRAME});
    free(data);
    EXPECT(is_refused("half.zst", packed, err) && strstr(err, "truncated: it unpacks to 5120 bytes, its header says"),
           "%s", err);
}

/* One byte changed anywhere: either it does not matter (a skippable frame's content), or it is refused. */
TEST(zst_flipped_bytes_are_errors) {
    const TestZst ways[] = {seekable, {.frame_bytes = FRAME}, {.frame_bytes = 0}};
    static int32_t ids[N];
    write_plain("s.bin", N, 2);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        char err[ERR_LEN];
        size_t size;
        test_pack("s.bin.zst", "s.bin", ways[i]);
        unsigned char *data = test_read_bytes("s.bin.zst", &size);
        for (size_t at = 0; at < size; at += at < 40 || at + 60 > size ? 1 : 977) {
            data[at] ^= 0x10;
            test_write_bytes("flipped.zst", data, size);
            if (!is_refused("flipped.zst", size, err)) {
                ZstPool *pool = zst_pool_new();
                char hint[ERR_LEN];
                Shard s;
                REQUIRE(open_file(&s, pool, "flipped.zst", err, hint) == 0 &&
                            shard_read(&s, ids, 0, N, 50000, err) == 0,
                        "%s", err);
                for (int64_t k = 0; k < N; k++)
                    REQUIRE(ids[k] == id_of(k), "byte %zu of way %zu changed token %lld", at, i, (long long)k);
                shard_close(&s);
                zst_pool_free(pool);
            }
            data[at] ^= 0x10;
        }
        free(data);
    }
}

/* A frame or a table that claims terabytes is refused; nothing of that size is allocated or written (case C12). */
TEST(zst_absurd_sizes_are_refused) {
    char err[ERR_LEN];
    write_plain("s.bin", N, 2);
    test_pack("s.bin.zst", "s.bin", (TestZst){.frame_bytes = 0});
    size_t size;
    unsigned char *data = test_read_bytes("s.bin.zst", &size);
    /* Magic, descriptor (8-byte size, single segment or not), then a window or the size. */
    unsigned char *file = (unsigned char *)malloc(size + 16);
    const int64_t huge = (int64_t)5 << 40;
    memcpy(file, "\x28\xB5\x2F\xFD\xC4\x58", 6); /* with a window of 2 MiB: the size is content alone */
    memcpy(file + 6, &huge, 8);
    const size_t header = 4 + 1 + 1 + (data[4] >> 6 == 1 ? 2 : data[4] >> 6 == 2 ? 4 : 8) - (data[4] & 0x20 ? 1 : 0);
    memcpy(file + 14, data + header, size - header);
    test_write_bytes("huge.zst", file, 14 + size - header);
    EXPECT(is_refused("huge.zst", size + 16, err) && strstr(err, "at byte 0 claims 5497558138880 bytes"), "%s", err);
    free(file);
    free(data);

    const size_t packed = test_pack("t.zst", "s.bin", seekable);
    data = test_read_bytes("t.zst", &size);
    const uint32_t many = 0xFFFFFFFF;
    memcpy(data + packed - 9, &many, 4); /* frames in the table */
    test_write_bytes("table.zst", data, size);
    EXPECT(is_refused("table.zst", size, err) && strstr(err, "the table of 4294967295 frames"), "%s", err);
    free(data);
    data = test_read_bytes("t.zst", &size);
    memcpy(data + packed - 9 - 4, &many, 4); /* the last frame's size */
    test_write_bytes("table.zst", data, size);
    EXPECT(is_refused("table.zst", size, err) && strstr(err, "longer than its header says"), "%s", err);
    free(data);

    /* A bomb: frames that unpack to far more than the header's count. */
    char *zeros = (char *)calloc(1, 1 << 20);
    const int32_t head[3] = {20240520, 1, 100};
    memcpy(zeros, head, sizeof head);
    test_write_zst("bomb.zst", zeros, 1 << 20, (TestZst){.frame_bytes = 1 << 10, .no_size = true});
    EXPECT(is_refused("bomb.zst", 1 << 20, err) && strstr(err, "longer than its header says"), "%s", err);
    free(zeros);
}

/* Offsets stay 64-bit in packed shards too (case X1): 2.4 GB of zeros, which are one frame over and over, and ids at
 * the end. Neither is the file large nor is more of it unpacked than asked for. */
TEST(zst_beyond_two_gib) {
    enum { ZEROS = 1 << 20, TIMES = 2400 };
    const int64_t n = (int64_t)ZEROS / 2 * TIMES + 100;
    const int32_t header[256] = {20240520, 1, (int32_t)n};
    uint16_t last[100];
    for (int i = 0; i < 100; i++) last[i] = (uint16_t)(1000 + i);
    char *zeros = (char *)calloc(1, ZEROS), frames[3][4096];
    const void *const parts[3] = {header, zeros, last};
    const size_t sizes[3] = {sizeof header, ZEROS, sizeof last};
    size_t packed[3], end = 0;
    for (int i = 0; i < 3; i++) packed[i] = ZSTD_compress(frames[i], sizeof frames[i], parts[i], sizes[i], 3);
    char *file = (char *)malloc(TIMES * (packed[1] + 8) + 3 * 4096), *table = (char *)malloc(TIMES * 8 + 64);
    uint32_t *entry = (uint32_t *)(void *)table;
    *entry++ = 0x184D2A5E;
    *entry++ = (TIMES + 2) * 8 + 9;
    for (int i = 0; i < TIMES + 2; i++) {
        const int kind = i == 0 ? 0 : i <= TIMES ? 1 : 2;
        REQUIRE(!ZSTD_isError(packed[kind]));
        memcpy(file + end, frames[kind], packed[kind]);
        end += packed[kind];
        *entry++ = (uint32_t)packed[kind];
        *entry++ = (uint32_t)sizes[kind];
    }
    *entry++ = TIMES + 2;
    memcpy((char *)entry, "\x00\xB1\xEA\x92\x8F", 5);
    const size_t table_size = (size_t)((char *)entry - table) + 5;
    memcpy(file + end, table, table_size);
    test_write_bytes("far.bin.zst", file, end + table_size);
    free(file);
    free(table);
    free(zeros);
    ZstPool *pool = zst_pool_new();
    Shard s;
    char err[ERR_LEN], hint[ERR_LEN];
    int32_t ids[103];
    REQUIRE(open_file(&s, pool, "far.bin.zst", err, hint) == 0, "%s", err);
    EXPECT(s.n_tokens == n && s.n_file_bytes < 1 << 20, "%lld bytes", (long long)s.n_file_bytes);
    REQUIRE(shard_read(&s, ids, n - 103, 103, 2000, err) == 0, "%s", err);
    EXPECT(ids[2] == 0 && ids[3] == 1000 && ids[102] == 1099, "%d %d %d", ids[2], ids[3], ids[102]);
    REQUIRE(shard_read(&s, ids, (int64_t)1 << 30, 103, 2000, err) == 0 && ids[0] == 0, "%s", err);
    shard_close(&s);
    zst_pool_free(pool);
}

/* A pool keeps a few frames: reading in order unpacks each once, and the file's end of life empties its places. */
TEST(zst_pool_is_shared_and_reused) {
    char err[ERR_LEN], hint[ERR_LEN];
    ZstPool *pool = zst_pool_new();
    Shard s[12];
    write_plain("s.bin", N, 2);
    test_pack("s.bin.zst", "s.bin", seekable);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 12; i++) REQUIRE(open_file(&s[i], pool, "s.bin.zst", err, hint) == 0, "%s", err);
        for (int64_t at = 0; at < N; at += 1111)
            for (int i = 0; i < 12; i++) {
                int32_t id;
                REQUIRE(shard_read(&s[i], &id, at, 1, 50000, err) == 0 && id == id_of(at), "%s", err);
            }
        for (int i = 0; i < 12; i++) shard_close(&s[i]);
    }
    zst_pool_free(pool);
}

/* Damage behind a whole table is met when it is read, and told with the micro-batch, as any error of the thread. */
TEST(zst_damage_is_met_in_the_run) {
    write_plain("s.bin", N, 2);
    test_pack("s.bin.zst", "s.bin", seekable);
    size_t size;
    unsigned char *data = test_read_bytes("s.bin.zst", &size);
    data[size / 2] ^= 1;
    test_write_bytes("s.bin.zst", data, size);
    free(data);
    LoaderSpec spec = {.vocab_size = 50000, .seq_len = 100, .micro_batch = 1, .stride = 1, .n_sources = 1};
    char err[ERR_LEN] = "", hint[ERR_LEN];
    spec.sources[0].weight = 1;
    test_path(spec.sources[0].path, "s.bin.zst");
    spec.document_token = spec.eos_token_id = -1;
    Loader *l;
    REQUIRE(loader_open(&l, &spec, err, hint) == 0, "%s", err);
    int64_t n = 0;
    MicroBatch mb;
    while (n < loader_samples(l) && loader_next(l, n, &mb, err) == 0) n++;
    EXPECT(n > 150 && n < 250, "%lld samples", (long long)n);
    EXPECT(strstr(err, "s.bin.zst: the frame of bytes ") && strstr(err, "is damaged"), "%s", err);
    loader_close(l);
}

/* Same tokens, same data: a packed shard takes the place of a plain one in the order, the identity and as a copy. */
TEST(zst_is_the_same_data) {
    LoaderSpec spec = {.vocab_size = 50000, .seq_len = 50, .micro_batch = 4, .stride = 4, .n_sources = 1};
    char err[ERR_LEN] = "", hint[ERR_LEN], path[TEST_PATH_LEN];
    spec.shuffle = true;
    spec.seed = 3;
    spec.sources[0].weight = 1;
    spec.document_token = spec.eos_token_id = -1;
    write_plain("t_0.bin", N, 2);
    write_plain("t_1.bin", 5000, 4);
    write_plain("t_2.bin", 9000, 2);
    test_path(spec.sources[0].path, "t_*");
    Loader *plain, *mixed;
    REQUIRE(loader_open(&plain, &spec, err, hint) == 0, "%s", err);
    test_pack("t_1.bin.zst", "t_1.bin", seekable);
    EXPECT(loader_open(&mixed, &spec, err, hint) == -1 && strstr(err, "t_1.bin.zst hold the same tokens"), "%s", err);
    unlink(test_path(path, "t_1.bin"));
    test_pack("t_2.bin.zst", "t_2.bin", (TestZst){.frame_bytes = 0});
    unlink(test_path(path, "t_2.bin"));
    REQUIRE(loader_open(&mixed, &spec, err, hint) == 0, "%s", err);
    EXPECT(loader_identity(plain) == loader_identity(mixed), "packing changed the identity");
    EXPECT(loader_shared_shard(plain, mixed) != NULL, "a packed copy is not seen");
    EXPECT_EQ(loader_tokens(plain), loader_tokens(mixed));
    for (int64_t i = 0; i < loader_samples(plain); i += 4) { /* the plain files, though unlinked, are still open */
        MicroBatch x, y;
        REQUIRE(loader_next(plain, i, &x, err) == 0 && loader_next(mixed, i, &y, err) == 0, "%s", err);
        EXPECT(memcmp(x.tokens, y.tokens, (size_t)x.n_tokens * sizeof *x.tokens) == 0, "sample %lld", (long long)i);
    }
    loader_close(plain);
    loader_close(mixed);
}
