/* kernels/base: arenas, random numbers, files, and the three ways to end a job. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/base/arena.h"
#include "kernels/base/check.h"
#include "kernels/base/file.h"
#include "kernels/base/rng.h"
#include "tests/test.h"

/* ---- check ---- */

static void end_by_check(void *arg) {
    CHECK(*(int *)arg == 4, "the value is %d", *(int *)arg);
}

static void end_by_die(void *arg) {
    DIE("lower model.hidden_size", "hidden_size %d is odd", *(int *)arg);
}

static void end_by_fail(void *arg) {
    FAIL(NULL, "disk %d is full", *(int *)arg);
}

TEST(check_ends_in_abort) {
    int value = 3;
    EXPECT(
        expect_exit(128 + 6, "CHECK(*(int *)arg == 4) failed: the value is 3 (rank 0 of 1 on ", end_by_check, &value));
    value = 4;
    EXPECT(expect_exit(EXIT_DONE, NULL, end_by_check, &value), "a CHECK that holds must do nothing");
}

TEST(die_and_fail_have_their_exit_codes) {
    int value = 7;
    EXPECT(expect_exit(EXIT_USER, "error: hidden_size 7 is odd\nhint:  lower model.hidden_size\n", end_by_die, &value));
    EXPECT(expect_exit(EXIT_FAILED, "error: disk 7 is full\n", end_by_fail, &value));
}

static void abort_with_9(int exit_code) {
    fprintf(stderr, "ends the job with %d\n", exit_code);
    _exit(9);
}

static void die_in_a_job(void *arg) {
    check_set_job(3, 8, abort_with_9);
    end_by_die(arg);
}

static void check_in_a_job(void *arg) {
    check_set_job(3, 8, abort_with_9);
    end_by_check(arg);
}

TEST(a_job_is_ended_by_its_own_function) {
    int value = 7;
    EXPECT(expect_exit(9, "ends the job with 2\n", die_in_a_job, &value));
    EXPECT(expect_exit(9, "(rank 3 of 8 on ", check_in_a_job, &value));
}

TEST(err_set_formats_and_truncates) {
    char err[ERR_LEN + 1];
    memset(err, 'x', sizeof err);
    EXPECT_EQ(err_set(err, "%s: line %d", "a.json", 12), -1);
    EXPECT(strcmp(err, "a.json: line 12") == 0, "'%s'", err);

    char text[2 * ERR_LEN];
    memset(text, 'y', sizeof text);
    text[sizeof text - 1] = 0;
    EXPECT_EQ(err_set(err, "%s", text), -1);
    EXPECT_EQ(strlen(err), ERR_LEN - 1);
    EXPECT(err[ERR_LEN] == 'x', "wrote past ERR_LEN bytes");
    EXPECT_EQ(err_set(NULL, "nobody listens"), -1);
}

static void die_of_a_quoted_name(void *name) {
    DIE(NULL, "unknown key \"%s\"", (const char *)name);
}

/* A name quoted from a file neither breaks the line nor reaches the terminal's controls. */
TEST(errors_are_one_line_whatever_they_quote) {
    char err[ERR_LEN], name[] = "a\nb\tc\033[2J\177\xC3\xA9";
    err_set(err, "unknown key \"%s\"", name);
    EXPECT(strcmp(err, "unknown key \"a?b?c?[2J?\xC3\xA9\"") == 0, "'%s'", err);
    EXPECT(expect_exit(EXIT_USER, "error: unknown key \"a?b?c?[2J?\xC3\xA9\"\n", die_of_a_quoted_name, name));
}

/* ---- arena ---- */

/* The same calls count on a NULL base and point on a real one. */
static void lay_out(Arena *a, char *block[3]) {
    block[0] = (char *)arena_alloc(a, 1, "one");
    block[1] = (char *)arena_alloc(a, ARENA_ALIGN + 1, "two");
    block[2] = (char *)arena_alloc(a, 0, "none");
}

TEST(arena_counts_then_points) {
    char *block[3];
    Arena a = arena_make("count", NULL, 12345);
    EXPECT_EQ(a.size, 0);
    lay_out(&a, block);
    EXPECT(!block[0] && !block[1] && !block[2], "a counting arena must not point");
    EXPECT_EQ(a.used, 3 * ARENA_ALIGN);
    size_t size = a.used;

    char *base = (char *)aligned_alloc(ARENA_ALIGN, size);
    REQUIRE(base, "no memory");
    a = arena_make("point", base, size);
    lay_out(&a, block);
    EXPECT(block[0] == base && block[1] == base + ARENA_ALIGN && block[2] == base + size, "blocks at %td %td %td",
           block[0] - base, block[1] - base, block[2] - base);
    EXPECT_EQ(a.used, size);
    free(base);
}

TEST(arena_releases_and_keeps_the_peak) {
    Arena a = arena_make("scratch", NULL, 0);
    arena_alloc(&a, 1000, "base");
    size_t mark = arena_mark(&a);
    EXPECT_EQ(mark, 1024);
    arena_alloc(&a, 5000, "phase");
    arena_release(&a, mark);
    EXPECT_EQ(a.used, 1024);
    EXPECT_EQ(a.peak, 1024 + 5120);
    arena_alloc(&a, 10, "phase");
    EXPECT_EQ(a.peak, 1024 + 5120);
}

TEST(arena_adds_up_blocks_of_one_name) {
    Arena a = arena_make("keep", NULL, 0);
    for (int i = 0; i < 1000; i++) arena_alloc(&a, ARENA_ALIGN, i % 2 ? "weights" : "moments");
    arena_alloc(&a, 3 * ARENA_ALIGN, "weights");
    REQUIRE(a.n_items == 2, "%d names", a.n_items);
    EXPECT(strcmp(a.items[0].name, "moments") == 0 && strcmp(a.items[1].name, "weights") == 0, "names out of order");
    EXPECT_EQ(a.items[0].bytes, 500 * ARENA_ALIGN);
    EXPECT_EQ(a.items[1].bytes, 503 * ARENA_ALIGN);
}

static void overflow_arena(void *arg) {
    Arena a = arena_make("slots", arg, ARENA_ALIGN);
    arena_alloc(&a, ARENA_ALIGN, "fits");
    arena_alloc(&a, 1, "one too many");
}

static void release_too_far(void *arg) {
    (void)arg;
    Arena a = arena_make("slots", NULL, 0);
    arena_release(&a, 1);
}

TEST(arena_overflow_is_our_bug) {
    char *base = (char *)aligned_alloc(ARENA_ALIGN, ARENA_ALIGN);
    REQUIRE(base, "no memory");
    EXPECT(expect_exit(128 + 6, "arena slots: one too many needs", overflow_arena, base));
    EXPECT(expect_exit(128 + 6, "arena slots: released to 1", release_too_far, NULL));
    free(base);
}

TEST(bytes_are_printed_with_units) {
    char buf[32];
    const double mib = 1024 * 1024;
    EXPECT(strcmp(format_bytes(buf, sizeof buf, 1.5 * mib), "1.50 MiB") == 0, "%s", buf);
    EXPECT(strcmp(format_bytes(buf, sizeof buf, 64 * mib), "64 MiB") == 0, "%s", buf);
    EXPECT(strcmp(format_bytes(buf, sizeof buf, 56.6 * 1024 * mib), "56.6 GiB") == 0, "%s", buf);
}

/* ---- rng ---- */

/* Known answers published with Random123 for philox4x32, ten rounds. */
TEST(philox_known_answers) {
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } row[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        philox4x32(out, row[i].counter, row[i].key);
        for (int j = 0; j < 4; j++) EXPECT(out[j] == row[i].out[j], "row %d word %d: %08x", i, j, out[j]);
    }
}

TEST(rng_numbers_differ_in_every_argument) {
    const uint64_t base = rng_bits(1, RNG_TEST, 2, 3);
    EXPECT(rng_bits(1, RNG_TEST, 2, 3) == base, "the same number twice");
    EXPECT(rng_bits(2, RNG_TEST, 2, 3) != base);
    EXPECT(rng_bits(1 + (1ull << 32), RNG_TEST, 2, 3) != base, "the upper half of the seed is lost");
    EXPECT(rng_bits(1, RNG_INIT, 2, 3) != base);
    EXPECT(rng_bits(1, RNG_TEST, 3, 3) != base);
    EXPECT(rng_bits(1, RNG_TEST, 2 + (1ull << 32), 3) != base, "the upper half of the step is lost");
    EXPECT(rng_bits(1, RNG_TEST, 2, 4) != base);
    EXPECT(rng_bits(1, RNG_TEST, 2, 3 + (1ull << 32)) != base, "the upper half of the index is lost");
}

/* 100,000 draws: mean and variance within five standard errors, all ten bins of equal weight. */
TEST(rng_uniform_is_uniform) {
    enum { N = 100000, BINS = 10 };
    int bin[BINS] = {0};
    double sum = 0, sum2 = 0;
    for (int i = 0; i < N; i++) {
        double u = rng_uniform(42, RNG_TEST, 0, (uint64_t)i);
        REQUIRE(u >= 0 && u < 1, "draw %d is %g", i, u);
        bin[(int)(u * BINS)]++;
        sum += u;
        sum2 += u * u;
    }
    EXPECT_NEAR(sum / N, 0.5, 5 * sqrt(1.0 / 12 / N));
    EXPECT_NEAR(sum2 / N, 1.0 / 3, 5 * sqrt(4.0 / 45 / N));
    for (int i = 0; i < BINS; i++) EXPECT_NEAR(bin[i], N / BINS, 5 * sqrt(N * 0.1 * 0.9));
}

TEST(rng_normal_has_the_moments_of_a_normal) {
    enum { N = 100000 };
    double moment[5] = {0};
    for (int i = 0; i < N; i++) {
        double x = rng_normal(7, RNG_TEST, 1, (uint64_t)i);
        for (int k = 1; k <= 4; k++) moment[k] += pow(x, k) / N;
    }
    EXPECT_NEAR(moment[1], 0, 5 * sqrt(1.0 / N));
    EXPECT_NEAR(moment[2], 1, 5 * sqrt(2.0 / N));
    EXPECT_NEAR(moment[3], 0, 5 * sqrt(15.0 / N));
    EXPECT_NEAR(moment[4], 3, 5 * sqrt(96.0 / N));
}

/* A rank that draws only its own part, from an odd first index on, gets the same values. */
TEST(rng_normal_fill_equals_single_draws) {
    double out[7];
    for (uint64_t first = 0; first < 4; first++) {
        rng_normal_fill(out, 7, 9, RNG_INIT, 5, first);
        for (uint64_t i = 0; i < 7; i++)
            EXPECT(out[i] == rng_normal(9, RNG_INIT, 5, first + i), "first %d, element %d", (int)first, (int)i);
    }
}

TEST(mix64_spreads_every_bit) {
    for (int bit = 0; bit < 64; bit++) {
        int changed = 0;
        for (uint64_t x = 1; x <= 256; x++)
            changed += __builtin_popcountll(mix64(x * 0x9E3779B97F4A7C15ull) ^
                                            mix64((x * 0x9E3779B97F4A7C15ull) ^ (1ull << bit)));
        EXPECT_NEAR(changed / 256.0, 32, 2.5);
    }
}

/* ---- files ---- */

static const char *in_tmp_dir(char path[512], const char *name) {
    snprintf(path, 512, "%s/%s", test_tmp_dir(), name);
    return path;
}

static void expect_content(const char *path, const char *content) {
    char err[ERR_LEN] = "", *data = NULL;
    size_t size = 0;
    REQUIRE(file_read_all(&data, &size, path, 1 << 20, err) == 0, "%s", err);
    EXPECT(size == strlen(content) && strcmp(data, content) == 0, "%s holds '%s'", path, data);
    free(data);
}

TEST(file_write_durable_replaces_and_leaves_nothing_beside) {
    char path[512], beside[520], err[ERR_LEN] = "";
    in_tmp_dir(path, "manifest.json");
    snprintf(beside, sizeof beside, "%s.tmp", path);
    REQUIRE(file_write_durable(path, "old", 3, err) == 0, "%s", err);
    expect_content(path, "old");
    REQUIRE(file_write_durable(path, "new text", 8, err) == 0, "%s", err);
    expect_content(path, "new text");
    EXPECT(!path_exists(beside), "%s is left", beside);
    EXPECT_EQ(file_size(path), 8);
}

/* The new content cannot be put in place: the old one must stay, and the caller must be told. */
TEST(file_write_durable_keeps_the_old_content_on_failure) {
    char path[512], err[ERR_LEN] = "";
    in_tmp_dir(path, "state");
    REQUIRE(file_write_durable(path, "old", 3, err) == 0, "%s", err);
    char blocked[520];
    snprintf(blocked, sizeof blocked, "%s.tmp", path);
    REQUIRE(mkdir(blocked, 0700) == 0, "no folder");
    EXPECT_EQ(file_write_durable(path, "new", 3, err), -1);
    EXPECT(strstr(err, "state"), "'%s' does not name the file", err);
    expect_content(path, "old");

    in_tmp_dir(path, "no_such_folder/state");
    EXPECT_EQ(file_write_durable(path, "new", 3, err), -1);
    EXPECT(strstr(err, "no_such_folder"), "'%s' does not name the folder", err);
}

TEST(file_read_all_names_what_is_wrong) {
    char path[512], err[ERR_LEN] = "", *data = NULL;
    size_t size = 0;
    in_tmp_dir(path, "ten");
    REQUIRE(file_write_durable(path, "0123456789", 10, err) == 0, "%s", err);
    EXPECT_EQ(file_read_all(&data, &size, path, 9, err), -1);
    EXPECT(strstr(err, "ten: 10 bytes") && !data, "'%s'", err);
    EXPECT_EQ(file_read_all(&data, &size, in_tmp_dir(path, "absent"), 9, err), -1);
    EXPECT(strstr(err, "absent: cannot open"), "'%s'", err);
    EXPECT_EQ(file_read_all(&data, &size, test_tmp_dir(), 1 << 20, err), -1);
    EXPECT(strstr(err, "not a plain file"), "'%s'", err);
    REQUIRE(mkfifo(in_tmp_dir(path, "pipe"), 0600) == 0, "no pipe");
    EXPECT_EQ(file_read_all(&data, &size, path, 9, err), -1); /* at once, though nobody writes to it */
    EXPECT(strstr(err, "pipe: not a plain file"), "'%s'", err);
}

TEST(file_read_all_ends_in_a_zero_byte) {
    char path[512], err[ERR_LEN] = "", *data = NULL;
    size_t size = 99;
    in_tmp_dir(path, "empty");
    REQUIRE(file_write_durable(path, "", 0, err) == 0, "%s", err);
    REQUIRE(file_read_all(&data, &size, path, 0, err) == 0, "%s", err);
    EXPECT_EQ(size, 0);
    EXPECT_EQ(data[0], 0);
    free(data);
    EXPECT_EQ(file_size(path), 0);
    EXPECT_EQ(file_size(in_tmp_dir(path, "absent")), -1);
    EXPECT_EQ(file_size(test_tmp_dir()), -1);
}

TEST(dir_make_makes_parents) {
    char path[512], err[ERR_LEN] = "";
    in_tmp_dir(path, "a/b/c");
    REQUIRE(dir_make(path, err) == 0, "%s", err);
    EXPECT(path_exists(path), "%s is not there", path);
    EXPECT_EQ(dir_make(path, err), 0);
    char file[512];
    in_tmp_dir(file, "a/file");
    REQUIRE(file_write_durable(file, "x", 1, err) == 0, "%s", err);
    EXPECT_EQ(dir_make(file, err), -1);
    EXPECT(strstr(err, "a/file"), "'%s'", err);
    EXPECT_EQ(dir_make(in_tmp_dir(path, "a/file/below"), err), -1);
    EXPECT_EQ(dir_make("", err), -1);
}

/* A checkpoint folder may hold links put there by the user: what they point at is not ours to remove. */
TEST(dir_remove_does_not_follow_links) {
    char step[512], path[512], outside[512], err[ERR_LEN] = "";
    REQUIRE(dir_make(in_tmp_dir(step, "step/sub"), err) == 0, "%s", err);
    REQUIRE(file_write_durable(in_tmp_dir(path, "step/sub/shard"), "x", 1, err) == 0, "%s", err);
    REQUIRE(file_write_durable(in_tmp_dir(path, "step/manifest"), "x", 1, err) == 0, "%s", err);
    REQUIRE(dir_make(in_tmp_dir(outside, "outside"), err) == 0, "%s", err);
    REQUIRE(file_write_durable(in_tmp_dir(path, "outside/kept"), "x", 1, err) == 0, "%s", err);
    REQUIRE(symlink(outside, in_tmp_dir(path, "step/link")) == 0, "no link");

    REQUIRE(dir_remove(in_tmp_dir(step, "step"), err) == 0, "%s", err);
    EXPECT(!path_exists(step), "step is still there");
    expect_content(in_tmp_dir(path, "outside/kept"), "x");
    EXPECT_EQ(dir_remove(step, err), -1);
    EXPECT(strstr(err, "step"), "'%s'", err);
}

/* A mistaken run.dir is not swept away: below one level of folders it stops. */
TEST(dir_remove_refuses_deep_trees) {
    char path[512], err[ERR_LEN] = "";
    REQUIRE(dir_make(in_tmp_dir(path, "top/one/two"), err) == 0, "%s", err);
    EXPECT_EQ(dir_remove(in_tmp_dir(path, "top"), err), -1);
    EXPECT(path_exists(in_tmp_dir(path, "top/one/two")), "a deep folder is gone");
}

TEST(hash_bytes_sees_every_byte) {
    unsigned char data[67];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * 7);
    const uint64_t hash = hash_bytes(data, sizeof data, 0);
    EXPECT(hash_bytes(data, sizeof data, 0) == hash, "not a function");
    EXPECT(hash_bytes(data, sizeof data, 1) != hash, "the seed is lost");
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] ^= 0x80;
        EXPECT(hash_bytes(data, sizeof data, 0) != hash, "byte %zu is lost", i);
        data[i] ^= 0x80;
    }
    const unsigned char zeros[16] = {0};
    for (size_t n = 0; n < 16; n++)
        EXPECT(hash_bytes(zeros, n, 0) != hash_bytes(zeros, n + 1, 0), "%zu and %zu zeros are the same", n, n + 1);
}
