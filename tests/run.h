/* What the runner (run.c) tells the process of a test (test.c). Test files include test.h. */
#ifndef TRAIN_MOE_TESTS_RUN_H
#define TRAIN_MOE_TESTS_RUN_H

#include <limits.h>
#include <stdbool.h>

typedef struct {
    int n_failures;
    char tmp_dir[PATH_MAX]; /* named by the runner, made by test_tmp_dir */
    bool tmp_dir_made;
    bool *has_ended;          /* in shared memory: the test came to its end and did not exit on the way */
    bool is_expected_to_exit; /* inside expect_exit's child */
} TestProcess;

extern TestProcess test_process;

#endif
