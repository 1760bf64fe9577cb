/* What a failure from below is told about the run. */
#include "model/train/run.h"

#include <stdio.h>
#include <string.h>

#include "tests/test.h"

TEST(run_says_where_it_stands) {
    char dir[1024], text[ERR_LEN];
    snprintf(dir, sizeof dir, "run.dir=%s/run", test_tmp_dir());
    char *argv[] = {"train_moe", "--config", "configs/bytes_debug.json", dir, "--quiet"};
    const Args args = cli_parse(5, argv);
    const Launch launch = {0, 1, false};
    Run r;
    EXPECT(strcmp(check_about(text, sizeof text), "") == 0, "before a run: %s", text);
    run_open_model(&r, &args, &launch, 0, true);
    EXPECT(strcmp(check_about(text, sizeof text), "") == 0, "before training: %s", text);
    run_open_training(&r);
    EXPECT(strcmp(check_about(text, sizeof text), "in step 1 of 2; no checkpoint yet") == 0, "%s", text);
    StepReport report;
    REQUIRE(train_step(&r.trainer, text) == 0 && train_flush(&r.trainer, &report), "%s", text);
    EXPECT(ops_last() && strcmp(ops_last(), "event_record") == 0, "the last op is %s", ops_last());
    run_save(&r, true);
    check_about(text, sizeof text);
    EXPECT(strstr(text, "in step 2 of 2; last checkpoint ") && strstr(text, "run/step_00000001"), "%s", text);
    run_close(&r);
    EXPECT(strcmp(check_about(text, sizeof text), "") == 0, "after the run: %s", text);
}
