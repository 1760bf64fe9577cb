/* Tests: what a test file needs. The runner is tests/run.c.
 *
 *     TEST(rmsnorm_of_one_row) {
 *         REQUIRE(file != NULL, "no golden file");        ends the test
 *         EXPECT(n == 3, "got %d rows", n);               notes the failure and goes on
 *         EXPECT_EQ(n, 3);                                integers
 *         EXPECT_NEAR(y, 0.5, 1e-6);                      |y - 0.5| <= 1e-6; a NaN fails
 *     }
 *
 * TEST registers itself before main; names are unique in the whole suite (a second one fails to link). Every test runs
 * in its own process under a time limit, so it may crash, leak memory into globals or call exit; what it prints is
 * shown only if it fails. Without one EXPECT that fails, and with a normal return, it has passed. */
#ifndef TRAIN_MOE_TEST_H
#define TRAIN_MOE_TEST_H

#include <stdbool.h>

#include "kernels/base/check.h"

enum { TEST_TIMEOUT_S = 120 };

typedef struct Test {
    const char *name;
    const char *file;
    int line;
    void (*run)(void);
    struct Test *next;
} Test;

void test_register(Test *test);

#define TEST(NAME)                                                                                                     \
    void test_##NAME(void);                                                                                            \
    __attribute__((constructor)) static void register_##NAME(void) {                                                   \
        static Test test = {#NAME, __FILE__, __LINE__, test_##NAME, 0};                                                \
        test_register(&test);                                                                                          \
    }                                                                                                                  \
    void test_##NAME(void)

/* Counts a failure of the running test and prints "file:line: what fmt..." (the first 20 of a test). */
void test_fail(const char *file, int line, const char *what, const char *fmt, ...) PRINTF_LIKE(4, 5);
bool test_near(double a, double b, double tolerance);
__attribute__((noreturn)) void test_end(void);

#define EXPECT(cond, ...)                                                                                              \
    do {                                                                                                               \
        if (!(cond)) test_fail(__FILE__, __LINE__, "EXPECT(" #cond "):", " " __VA_ARGS__);                             \
    } while (0)

#define REQUIRE(cond, ...)                                                                                             \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            test_fail(__FILE__, __LINE__, "REQUIRE(" #cond "):", " " __VA_ARGS__);                                     \
            test_end();                                                                                                \
        }                                                                                                              \
    } while (0)

#define EXPECT_EQ(a, b)                                                                                                \
    do {                                                                                                               \
        long long expect_a = (long long)(a), expect_b = (long long)(b);                                                \
        if (expect_a != expect_b)                                                                                      \
            test_fail(__FILE__, __LINE__, "", "%s is %lld, expected %s = %lld", #a, expect_a, #b, expect_b);           \
    } while (0)

#define EXPECT_NEAR(a, b, tolerance)                                                                                   \
    do {                                                                                                               \
        double expect_a = (double)(a), expect_b = (double)(b), expect_tol = (double)(tolerance);                       \
        if (!test_near(expect_a, expect_b, expect_tol))                                                                \
            test_fail(__FILE__, __LINE__, "", "%s is %.9g, expected %s = %.9g within %.3g (off by %.3g)", #a,          \
                      expect_a, #b, expect_b, expect_tol, expect_a - expect_b);                                        \
    } while (0)

/* Runs fn(arg) in a child process and waits for it. True if it ended with exit code `code` (a process ended by signal s
 * counts as 128 + s; a normal return as 0) and its stderr contains `stderr_part` (NULL: whatever). Otherwise false, and
 * what happened is printed. OpenMP inside fn runs on one thread: its thread pool does not survive the fork. */
bool expect_exit(int code, const char *stderr_part, void (*fn)(void *), void *arg);

/* An empty folder of the running test, made by the first call and removed with its content when the test has passed. */
const char *test_tmp_dir(void);

#endif
