/* See test.h: what runs inside the process of a test. */
#include "tests/test.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/run.h"

#ifdef _OPENMP
#include <omp.h>
#endif

enum { FAILURES_SHOWN = 20, STDERR_KEPT = 1 << 16 };

TestProcess test_process;

void test_fail(const char *file, int line, const char *what, const char *fmt, ...) {
    test_process.n_failures++;
    if (test_process.n_failures == FAILURES_SHOWN + 1) fprintf(stderr, "further failures of this test are not shown\n");
    if (test_process.n_failures > FAILURES_SHOWN) return;
    fflush(stdout);
    fprintf(stderr, "%s:%d: %s", file, line, what);
    va_list args;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fprintf(stderr, "\n");
}

bool test_near(double a, double b, double tolerance) {
    return fabs(a - b) <= tolerance || (isinf(a) && a == b);
}

void test_end(void) {
    *test_process.has_ended = true;
    exit(test_process.n_failures > 0 ? 1 : 0);
}

const char *test_tmp_dir(void) {
    if (!test_process.tmp_dir_made && mkdir(test_process.tmp_dir, 0700) != 0) {
        test_fail(__FILE__, __LINE__, "", "cannot make %s", test_process.tmp_dir);
        test_end();
    }
    test_process.tmp_dir_made = true;
    return test_process.tmp_dir;
}

/* Sanitizers ask this at exit. A process that ends in DIE leaves its memory to the system, by design. */
int __lsan_is_turned_off(void);
int __lsan_is_turned_off(void) {
    return test_process.is_expected_to_exit;
}

static void run_child(int stderr_fd, void (*fn)(void *), void *arg) {
    test_process.is_expected_to_exit = true;
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
    dup2(stderr_fd, STDERR_FILENO);
    fn(arg);
    exit(0);
}

bool expect_exit(int code, const char *stderr_part, void (*fn)(void *), void *arg) {
    FILE *stderr_file = tmpfile();
    CHECK(stderr_file, "no temporary file");
    fflush(stdout);
    fflush(stderr);
    pid_t pid = fork();
    CHECK(pid >= 0, "cannot fork");
    if (pid == 0) run_child(fileno(stderr_file), fn, arg);

    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid, "lost the child process");
    int got = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    char *text = (char *)malloc(STDERR_KEPT);
    CHECK(text, "no memory");
    rewind(stderr_file);
    text[fread(text, 1, STDERR_KEPT - 1, stderr_file)] = 0;
    fclose(stderr_file);

    bool has_part = !stderr_part || strstr(text, stderr_part);
    if (got != code) fprintf(stderr, "expect_exit: the exit code is %d, expected %d\n", got, code);
    if (!has_part) fprintf(stderr, "expect_exit: stderr does not contain \"%s\"\n", stderr_part);
    if (got != code || !has_part) fprintf(stderr, "expect_exit: stderr was:\n%s\n", text);
    free(text);
    return got == code && has_part;
}
