#!/usr/bin/env python3
"""Sends a run's log.jsonl to Weights & Biases.

    pip install wandb
    scripts/to_wandb.py RUN [--project NAME] [--follow] [--offline]

RUN is a run's folder or its log.jsonl. The same numbers as in to_tensorboard.py, samples as a table, the effective
configuration as the run's. --follow goes on while the run does, over its restarts, until it is done. --offline writes
RUN/wandb for `wandb sync` later. The account is wandb's own business: `wandb login`, or WANDB_API_KEY.
"""

import argparse
import os
import sys

import run_log


def start(wandb, path, config, arguments):
    folder = os.path.dirname(os.path.abspath(path))
    run = wandb.init(project=arguments.project, name=(config.get("run") or {}).get("name") or os.path.basename(folder),
                     dir=folder, config=config, mode="offline" if arguments.offline else None)
    run.define_metric("*", step_metric="step")
    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--project", default="train_moe")
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--offline", action="store_true")
    arguments = parser.parse_args()
    try:
        import wandb
    except ImportError:
        sys.exit("error: the package wandb is not installed\nhint: pip install wandb; to_tensorboard.py needs no package")
    run, samples = None, []
    try:
        path = run_log.log_path(arguments.run)
        for record in run_log.follow(path, arguments.follow):
            if record["kind"] == "new" and run:
                run.finish()
                run, samples = None, []
            if record["kind"] == "run" and run is None:
                run = start(wandb, path, record.get("config") or {}, arguments)
            if run is None:
                continue
            values = dict(run_log.scalars(record))
            if record["kind"] == "sample":
                samples.append([record["step"], record.get("prompt"), record.get("text")])
                values["samples"] = wandb.Table(columns=["step", "prompt", "text"], data=list(samples))
            if values:
                run.log({**values, "step": record["step"]})
    except (run_log.UserError, OSError) as error:
        sys.exit("error: %s" % error)
    except KeyboardInterrupt:
        pass
    finally:
        if run:
            run.finish()


if __name__ == "__main__":
    main()
