#!/usr/bin/env bash
# Trains on hosts that ssh reaches, one rank for each GPU, and starts again what fails (scripts/restart.sh says when that
# ends). All hosts see the tree and run.dir under the same path.
#
#     scripts/hosts.sh HOSTS --config configs/moonlight_16b.json --set train.lr=3e-4
#
# HOSTS is a file with a line for each host, "gpu-17 slots=8", slots being its GPUs. Each rank is bound to CORES cores
# (default: this host's, divided by its slots), and gets the NCCL_ variables that are set here. Ctrl-C or kill -USR1
# saves and ends with 3.
set -u
cd "$(dirname "$0")/.."
fail() { # MESSAGE HINT
    printf 'error: %s\nhint:  %s\n' "$1" "$2" >&2
    exit 2
}
[ $# -ge 2 ] && [ -f "$1" ] || fail "hosts.sh takes a file of hosts, then what train_moe takes" \
    "scripts/hosts.sh hosts.txt --config configs/moonlight_16b.json; a line of it: gpu-17 slots=8"
[ -x ./train_moe ] || fail "no ./train_moe" "make"
hosts=$1
shift
slots=$(sed -nE 's/^[^#]*slots=([0-9]+).*/\1/p' "$hosts" | sort -n | tail -n 1)
[ -n "$slots" ] && [ "$slots" -gt 0 ] || fail "$hosts: no line has slots=N" "gpu-17 slots=8"
run_dir=$(./train_moe --print-config "$@" | sed -n '/^  "run": {/,/^  }/ s/^    "dir": "\(.*\)",*$/\1/p')
[ -n "$run_dir" ] || exit 2 # it has said why

cores=${CORES:-$(($(lscpu -p=core,socket | grep -v '^#' | sort -u | wc -l) / slots))}
passed=()
for name in $(compgen -e NCCL_); do passed+=(-x "$name"); done
exec scripts/restart.sh "$run_dir" mpirun -q --hostfile "$hosts" --map-by "slot:PE=$((cores > 0 ? cores : 1))" \
    --bind-to core "${passed[@]}" ./train_moe "$@"
