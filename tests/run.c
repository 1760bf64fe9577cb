/* The test runner: `run [--list] [--counts FILE] [--timeout SECONDS] [PART...]`.
 *
 * Runs the tests whose name or file contains one of PART, all without it, one after the other, each in its own process
 * group with a time limit. One line a test; the output of a test that failed follows its line. The last line is
 * "N passed, N failed", or goes as two numbers to the end of FILE where several runners are added up. Exit 1 if a test
 * failed or PART matches nothing. */
#define _GNU_SOURCE /* nftw */
#include "tests/run.h"

#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/test.h"

static Test *first_test;
static int timeout_s = TEST_TIMEOUT_S;

/* Kept sorted by file and line, so that the order does not depend on the linker. */
void test_register(Test *test) {
    Test **at = &first_test;
    while (*at) {
        int order = strcmp((*at)->file, test->file);
        if (order > 0 || (order == 0 && (*at)->line > test->line)) break;
        at = &(*at)->next;
    }
    test->next = *at;
    *at = test;
}

static bool is_chosen(const Test *test, char **parts, int n_parts) {
    for (int i = 0; i < n_parts; i++) {
        if (strstr(test->name, parts[i]) || strstr(test->file, parts[i])) return true;
    }
    return n_parts == 0;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int remove_entry(const char *path, const struct stat *st, int kind, struct FTW *walk) {
    (void)st, (void)kind, (void)walk;
    return remove(path);
}

static void remove_tree(const char *path) {
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

static void print_indented(FILE *output) {
    char line[1024];
    rewind(output);
    while (fgets(line, sizeof line, output)) printf("      %s%s", line, strchr(line, '\n') ? "" : "\n");
}

/* Waits for SIGCHLD, which is blocked, until the deadline. Returns false when time ran out and the group was killed. */
static bool wait_for_child(pid_t pid, double deadline, int *status) {
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    bool in_time = true;
    while (waitpid(pid, status, WNOHANG) == 0) {
        double left = deadline - now_s();
        if (left <= 0) {
            in_time = false;
            kill(-pid, SIGKILL);
            waitpid(pid, status, 0);
            break;
        }
        struct timespec t = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
        sigtimedwait(&child, NULL, &t);
    }
    kill(-pid, SIGKILL); /* what the test may have left running */
    return in_time;
}

static void run_child(const Test *test, FILE *output, const sigset_t *signals) {
    setpgid(0, 0);
    sigprocmask(SIG_SETMASK, signals, NULL);
    dup2(fileno(output), STDOUT_FILENO);
    dup2(fileno(output), STDERR_FILENO);
    setvbuf(stdout, NULL, _IOLBF, 0);
    test->run();
    test_end();
}

/* Has the test passed? If not, why, unless its own EXPECT has said so. */
static bool verdict(char *text, size_t size, bool in_time, int status) {
    if (!in_time)
        snprintf(text, size, "stopped after %d s", timeout_s);
    else if (WIFSIGNALED(status))
        snprintf(text, size, "ended by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (!*test_process.has_ended)
        snprintf(text, size, "ended early, with exit code %d", WEXITSTATUS(status));
    else
        text[0] = 0;
    return text[0] == 0 && WEXITSTATUS(status) == EXIT_DONE;
}

static bool run_test(const Test *test, const char *tmp_root) {
    FILE *output = tmpfile();
    CHECK(output, "no temporary file");
    snprintf(test_process.tmp_dir, sizeof test_process.tmp_dir, "%s/%s", tmp_root, test->name);
    *test_process.has_ended = false;
    sigset_t child, before;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, &before);
    fflush(stdout);
    double start = now_s();
    pid_t pid = fork();
    CHECK(pid >= 0, "cannot fork");
    if (pid == 0) run_child(test, output, &before);
    setpgid(pid, pid);

    int status = 0;
    bool in_time = wait_for_child(pid, start + timeout_s, &status);
    sigprocmask(SIG_SETMASK, &before, NULL);
    char text[128];
    bool passed = verdict(text, sizeof text, in_time, status);
    const char *slash = strrchr(test->file, '/');
    printf("%s  %-24s %-52s %7.2f s\n", passed ? "ok  " : "FAIL", slash ? slash + 1 : test->file, test->name,
           now_s() - start);
    if (!passed) {
        print_indented(output);
        if (text[0]) printf("      %s:%d: %s\n", test->file, test->line, text);
        if (access(test_process.tmp_dir, F_OK) == 0) printf("      its files: %s\n", test_process.tmp_dir);
    } else {
        remove_tree(test_process.tmp_dir);
    }
    fclose(output);
    return passed;
}

static int usage(void) {
    fprintf(stderr, "usage: run [--list] [--counts FILE] [--timeout SECONDS] [PART OF A NAME]...\n");
    return EXIT_USER;
}

static int report(const char *counts_path, int n_passed, int n_failed) {
    if (counts_path) {
        FILE *counts = fopen(counts_path, "a");
        bool ok = counts && fprintf(counts, "%d %d\n", n_passed, n_failed) > 0;
        ok = counts && fclose(counts) == 0 && ok;
        if (!ok) {
            fprintf(stderr, "error: cannot write %s\n", counts_path);
            return EXIT_FAILED;
        }
    } else {
        printf("%d passed, %d failed\n", n_passed, n_failed);
    }
    return n_failed > 0 ? EXIT_FAILED : EXIT_DONE;
}

int main(int argc, char **argv) {
    const char *counts_path = NULL;
    bool list = false;
    int arg = 1;
    for (; arg < argc && argv[arg][0] == '-'; arg++) {
        if (strcmp(argv[arg], "--list") == 0)
            list = true;
        else if (strcmp(argv[arg], "--counts") == 0 && arg + 1 < argc)
            counts_path = argv[++arg];
        else if (strcmp(argv[arg], "--timeout") == 0 && arg + 1 < argc && atoi(argv[arg + 1]) > 0)
            timeout_s = atoi(argv[++arg]);
        else
            return usage();
    }
    char tmp_root[PATH_MAX - 256];
    const char *tmp = getenv("TMPDIR");
    snprintf(tmp_root, sizeof tmp_root, "%s/train_moe_test_XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!list && !mkdtemp(tmp_root)) {
        fprintf(stderr, "error: cannot make %s\n", tmp_root);
        return EXIT_FAILED;
    }
    test_process.has_ended = mmap(NULL, sizeof(bool), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(test_process.has_ended != MAP_FAILED, "no shared memory");
    int n_passed = 0, n_failed = 0;
    for (const Test *test = first_test; test; test = test->next) {
        if (!is_chosen(test, argv + arg, argc - arg)) continue;
        if (list)
            printf("%-52s %s:%d\n", test->name, test->file, test->line);
        else if (run_test(test, tmp_root))
            n_passed++;
        else
            n_failed++;
    }
    if (list) return EXIT_DONE;
    rmdir(tmp_root); /* stays while a failed test has files in it */
    if (n_passed + n_failed == 0 && !counts_path) {
        fprintf(stderr, "error: no test has this in its name; `run --list` shows all\n");
        return EXIT_FAILED;
    }
    return report(counts_path, n_passed, n_failed);
}
