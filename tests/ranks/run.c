/* Tests that several ranks run together: `mpirun -np N build/tests/run_ranks`. All ranks walk the same tests in one
 * process each; a failure prints where and on which rank, and the job exits with 1. Rank 0 prints the last line.
 *
 *     run_ranks --lose FOLDER        a library tells rank 1 that it has lost the others, while all of them wait: the
 *                                    job has to end. */
#include "tests/run.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "kernels/comm/comm.h"
#include "kernels/comm/watch.h"
#include "tests/test.h"

static Test *first_test, **last = &first_test;

void test_register(Test *test) {
    test->next = NULL;
    *last = test;
    last = &test->next;
}

static const char *trouble_of_rank_1(void *arg) {
    (void)arg;
    return job_rank() == 1 ? "remote process exited" : NULL;
}

static void let_go(void *arg) {
    (void)arg;
    fprintf(stderr, "rank %d lets go\n", job_rank());
}

__attribute__((noreturn)) static void lose_the_others(const char *folder) {
    watch_guard(&(WatchGuard){trouble_of_rank_1, let_go, NULL});
    watch_start(folder, 600);
    for (;;) pause();
}

int main(int argc, char **argv) {
    bool has_ended;
    test_process.has_ended = &has_ended;
    Launch launch = launch_start(&argc, &argv);
    if (argc == 3 && strcmp(argv[1], "--lose") == 0) lose_the_others(argv[2]);
    int n_tests = 0;
    for (const Test *test = first_test; test; test = test->next, n_tests++) {
        const int before = test_process.n_failures;
        test->run();
        if (test_process.n_failures > before)
            fprintf(stderr, "%s:%d: %s failed on rank %d of %d\n", test->file, test->line, test->name, launch.rank,
                    launch.world);
    }
    uint64_t n_failures = (uint64_t)test_process.n_failures;
    job_sum(&n_failures, 1);
    if (launch.rank == 0)
        printf("%d ranks: %d tests, %llu failures\n", launch.world, n_tests, (unsigned long long)n_failures);
    launch_end(&launch);
    return n_failures > 0 || n_tests == 0 ? EXIT_FAILED : EXIT_DONE;
}
