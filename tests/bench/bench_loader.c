/* Speed of the loader on one core: micro-batches out of plain and packed shards that the system has in memory, in order
 * and shuffled. One JSON row a measure: MB of ids (16 bits) a second that arrive in micro-batches, the median of the
 * rounds; mb_per_cpu_s goes by the processor's time, which other work on the machine does not move much. Training takes
 * a few hundredths of one MB a second for each 10,000 tokens a second. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zstd.h>

#include "data/loader.h"
#include "data/shard.h"
#include "kernels/base/check.h"
#include "kernels/base/clock.h"
#include "kernels/base/file.h"
#include "kernels/base/rng.h"

enum { N = 32 << 20, SEQ_LEN = 4096, MICRO_BATCH = 8, VOCAB = 50257, ROUNDS = 5, BATCHES = 100 };

static char folder[64];

/* Ids that pack about as those of text do, to half: unevenly drawn ones, and repetitions of a few from before. */
static void write_plain(const char *path) {
    char err[ERR_LEN];
    int32_t *ids = (int32_t *)malloc((size_t)N * sizeof *ids);
    CHECK(ids, "no memory for %d ids", N);
    for (int64_t i = 0; i < N;) {
        const uint64_t bits = rng_bits(7, RNG_TEST, 1, (uint64_t)i);
        const int64_t back = 1 + (int64_t)(bits >> 8 & 0x3FFF),
                      n = bits & 1 && back < i ? 2 + (int64_t)(bits >> 4 & 7) : 1;
        const double u = rng_uniform(7, RNG_TEST, 0, (uint64_t)i);
        for (int64_t end = i + n < N ? i + n : N; i < end; i++)
            ids[i] = n > 1 ? ids[i - back] : (int32_t)(VOCAB * u * u * u * u);
    }
    CHECK(shard_write(path, ids, N, 2, err) == 0, "%s", err);
    free(ids);
}

static void put_word(char *at, uint32_t word) {
    memcpy(at, &word, sizeof word);
}

/* frame: unpacked bytes of each; a table of them follows. */
static void write_packed(const char *path, const char *plain, size_t frame) {
    char err[ERR_LEN], *data;
    size_t size, end = 0, entries = 8;
    CHECK(file_read_all(&data, &size, plain, (size_t)1 << 30, err) == 0, "%s", err);
    const size_t n = (size + frame - 1) / frame;
    char *out = (char *)malloc(n * ZSTD_compressBound(frame) + 8 * n + 17), *table = (char *)malloc(8 * n + 17);
    CHECK(out && table, "no memory for packing");
    for (size_t i = 0; i < n; i++) {
        const size_t part = i + 1 < n ? frame : size - i * frame;
        const size_t packed = ZSTD_compress(out + end, ZSTD_compressBound(part), data + i * frame, part, 3);
        CHECK(!ZSTD_isError(packed), "%s", ZSTD_getErrorName(packed));
        put_word(table + entries, (uint32_t)packed);
        put_word(table + entries + 4, (uint32_t)part);
        entries += 8;
        end += packed;
    }
    put_word(table, 0x184D2A5E);
    put_word(table + 4, (uint32_t)(8 * n + 9));
    put_word(table + entries, (uint32_t)n);
    table[entries + 4] = 0;
    put_word(table + entries + 5, 0x8F92EAB1);
    memcpy(out + end, table, entries + 9);
    CHECK(file_write_durable(path, out, end + entries + 9, err) == 0, "%s", err);
    free(out);
    free(table);
    free(data);
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void row(const char *name, const char *path, bool shuffle) {
    LoaderSpec *spec = (LoaderSpec *)calloc(1, sizeof *spec);
    char err[ERR_LEN], hint[ERR_LEN];
    CHECK(spec, "no memory");
    spec->n_sources = 1;
    snprintf(spec->sources[0].path, sizeof spec->sources[0].path, "%s", path);
    spec->sources[0].weight = 1;
    spec->vocab_size = VOCAB;
    spec->seq_len = SEQ_LEN;
    spec->micro_batch = spec->stride = MICRO_BATCH;
    spec->shuffle = shuffle;
    spec->document_token = spec->eos_token_id = -1;
    Loader *l;
    MicroBatch mb;
    CHECK(loader_open(&l, spec, err, hint) == 0, "%s", err);
    CHECK(micro_batch_alloc(&mb, MICRO_BATCH, SEQ_LEN, 0, err) == 0, "%s", err);
    double speeds[ROUNDS], cpu_s = 0;
    for (int i = -1; i < ROUNDS; i++) { /* the first is not measured */
        const double start = clock_s(), cpu_start = (double)clock() / CLOCKS_PER_SEC;
        for (int64_t b = 0; b < BATCHES; b++)
            CHECK(loader_fill(l, (i + 1) * BATCHES * MICRO_BATCH + b * MICRO_BATCH, &mb, err) == 0, "%s", err);
        if (i >= 0) cpu_s += (double)clock() / CLOCKS_PER_SEC - cpu_start;
        if (i >= 0) speeds[i] = 2e-6 * BATCHES * MICRO_BATCH * SEQ_LEN / (clock_s() - start);
    }
    qsort(speeds, ROUNDS, sizeof *speeds, by_value);
    printf("{\"name\":\"%s\",\"mb_per_s\":%.0f,\"mb_per_cpu_s\":%.0f,\"file_mb\":%.1f,\"seq_len\":%d}\n", name,
           speeds[ROUNDS / 2], 2e-6 * ROUNDS * BATCHES * MICRO_BATCH * SEQ_LEN / cpu_s, 1e-6 * (double)file_size(path),
           SEQ_LEN);
    fflush(stdout);
    micro_batch_free(&mb);
    loader_close(l);
    free(spec);
}

int main(void) {
    char plain[128], small[128], large[128], err[ERR_LEN];
    snprintf(folder, sizeof folder, "/tmp/bench_loader_XXXXXX");
    CHECK(mkdtemp(folder), "no folder in /tmp");
    snprintf(plain, sizeof plain, "%s/s.bin", folder);
    snprintf(small, sizeof small, "%s/small.bin.zst", folder);
    snprintf(large, sizeof large, "%s/large.bin.zst", folder);
    write_plain(plain);
    write_packed(small, plain, 1 << 15);
    write_packed(large, plain, 1 << 30);
    row("loader/bin/in_order", plain, false);
    row("loader/bin/shuffled", plain, true);
    row("loader/zst/in_order", small, false);
    row("loader/zst/shuffled", small, true);
    row("loader/zst_one_frame/shuffled", large, true);
    return dir_remove(folder, err) == 0 ? 0 : 1;
}
