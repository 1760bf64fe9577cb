/* train_moe: trains DeepSeek-V3-architecture language models end to end.
 *
 * This file is main and the training loop, in plain C (a build without nvcc compiles it with `cc -x c`). Read on in
 * model/train/step.c (one optimizer step), model/model.c (forward and backward), model/mla.c and model/moe.c (a layer
 * in the order of the report), kernels/ops.h (what a device computes). */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/base/check.h"
#include "kernels/cpu/threads.h"
#include "model/train/run.h"
#include "model/train/stop.h"

/* One line in a run's end: what to do next. */
static int finish(Run *r, const char *stopped_by) {
    char hint[PATH_LEN + 64];
    run_reports(r, true);
    run_saved(r, true);
    if (stopped_by) {
        if (r->saved_step != r->trainer.state.step) run_save(r, true);
        snprintf(hint, sizeof hint, "stopped by %s; the same command goes on", stopped_by);
    } else {
        snprintf(hint, sizeof hint, "try: ./train_moe generate --config %s --prompt \"...\"", r->args->config);
    }
    if (r->comm->mesh.rank == 0) run_report(r, !stopped_by);
    log_done(&r->log, !stopped_by, r->has_val ? &r->last_val : NULL, r->trainer.state.wall_s, hint);
    return stopped_by ? EXIT_STOPPED : EXIT_DONE;
}

static int train(const Args *args, const Launch *launch) {
    Run r;
    run_open_model(&r, args, launch, 0, true);
    run_open_training(&r);
    banner_print(&r);
    stop_watch();

    const char *stopped_by = NULL;
    while (r.trainer.state.step < r.trainer.length.steps && !stopped_by) {
        char err[ERR_LEN];
        run_profile(&r);
        if (train_step(&r.trainer, err) != 0) run_data_failed(&r, err);
        run_due(&r);
        if (r.trainer.state.step < r.trainer.length.steps) stopped_by = stop_requested(&r.config, r.started_s);
    }
    run_profile(&r);
    int exit_code = finish(&r, stopped_by);
    run_close(&r);
    return exit_code;
}

static int print_version(void) {
    char text[256];
    puts(version_text(text, sizeof text));
    return EXIT_DONE;
}

static int print_config(const Args *args) {
    char err[ERR_LEN], hint[ERR_LEN];
    Config c;
    if (config_load(&c, args->config, args->sets, args->n_sets, err, hint) != 0) DIE(hint[0] ? hint : NULL, "%s", err);
    char *json = config_to_json(&c);
    puts(json);
    free(json);
    return EXIT_DONE;
}

int main(int argc, char **argv) {
    cpu_threads_wait_short(argv);
    Launch launch = launch_start(&argc, &argv); /* first, so that what all ranks refuse is said once */
    const Args args = cli_parse(argc, argv);
    int exit_code = EXIT_FAILED;
    switch (args.version || args.print_config ? COMMAND_COUNT : args.command) {
    case COMMAND_TRAIN: exit_code = args.overfit ? run_overfit(&args, &launch) : train(&args, &launch); break;
    case COMMAND_PLAN: exit_code = run_command_plan(&args, &launch); break;
    case COMMAND_EVAL: exit_code = run_command_eval(&args, &launch); break;
    case COMMAND_GENERATE: exit_code = run_command_generate(&args, &launch); break;
    case COMMAND_EXPORT_HF: exit_code = run_command_export_hf(&args, &launch); break;
    case COMMAND_IMPORT_HF: exit_code = run_command_import_hf(&args, &launch); break;
    case COMMAND_CHECK_DATA: exit_code = run_command_check_data(&args, &launch); break;
    case COMMAND_HELP: exit_code = launch.rank > 0 ? EXIT_DONE : cli_help(&args); break;
    case COMMAND_COUNT:
        exit_code = launch.rank > 0 ? EXIT_DONE : args.version ? print_version() : print_config(&args);
        break;
    }
    launch_end(&launch);
    return exit_code;
}
