#!/usr/bin/env bash
# Runs a training command until it is done, and starts it again when it fails, as long as that leads anywhere.
#
#     scripts/restart.sh RUN_DIR COMMAND...
#
# COMMAND ends with train_moe's codes: 0 done; 2 your input, which another start does not mend; 3 stopped early and saved.
# Those are this script's too. Anything else (a rank that died, a lost GPU) starts it again after PAUSE (default 10)
# seconds; after RESTARTS (default 3) of these without a new checkpoint in RUN_DIR it gives up with 1. So does a
# COMMAND that stopped early without one: the next start would not get further.
#
# USR1, TERM and INT reach COMMAND as USR1, which mpirun and srun hand on to their ranks: they save and end with 3.
set -u
[ $# -ge 2 ] || {
    printf 'error: restart.sh takes a folder and a command\nhint:  scripts/restart.sh runs/x mpirun ... ./train_moe ...\n' >&2
    exit 2
}
run_dir=$1
shift
pause=${PAUSE:-10} most=${RESTARTS:-3}
child= is_stopping=

newest() { # the last whole checkpoint's folder
    ls -d "$run_dir"/step_[0-9]*/manifest.json 2>/dev/null | sort | tail -n 1 | sed 's|/manifest.json$||'
}

stop() {
    is_stopping=1
    [ -z "$child" ] || kill -USR1 "$child" 2>/dev/null
}
trap stop USR1 TERM INT

# Sets code. A signal ends `wait`, not the command.
run() {
    setsid "$@" </dev/null & # a session of its own: Ctrl-C is this script's to hand on
    child=$!
    [ -z "$is_stopping" ] || stop # it came too early for this child
    while true; do
        wait "$child"
        code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    child=
}

tell() {
    printf 'restart: %s\n' "$*" >&2
}

restarts=0
at=$(newest)
first=$at
while true; do
    run "$@"
    now=$(newest)
    case $code in
    0 | 2) exit $code ;;
    3)
        [ "$now" != "$first" ] && exit 3
        tell "stopped early without a new checkpoint: it would be the same again"
        exit 1
        ;;
    esac
    if [ -n "$is_stopping" ]; then
        tell "exit code $code while it was asked to stop; not started again"
        exit 1
    fi
    if [ "$now" != "$at" ]; then
        at=$now restarts=0
    fi
    if [ $restarts -ge "$most" ]; then
        tell "exit code $code, and no new checkpoint in $restarts restarts: given up"
        exit 1
    fi
    restarts=$((restarts + 1))
    tell "exit code $code; restart $restarts of $most without a new checkpoint, from ${at:-the beginning}"
    sleep "$pause" &
    wait $!
    [ -z "$is_stopping" ] || exit 1
done
