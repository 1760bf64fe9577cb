#!/usr/bin/env bash
# All tests, or those with PART in their name or file: the runner in float, the runner in double, and every
# tests/test_*.sh as one test. The last line adds them up.
set -u
cd "$(dirname "$0")/.."
# Test processes run beside each other and beside whatever the machine does: threads that wait must not spin.
export OMP_WAIT_POLICY=passive

counts=$(mktemp)
log=$(mktemp)
trap 'rm -f "$counts" "$log"' EXIT
readonly SCRIPT_TIMEOUT_S=600

build/tests/run --counts "$counts" "$@"
if compgen -G 'build/tests/run_double' >/dev/null; then
    echo "in double:"
    build/tests/run_double --counts "$counts" "$@"
fi

for script in tests/test_*.sh; do
    [ -f "$script" ] || continue
    name=$(basename "$script" .sh)
    chosen=$([ $# = 0 ] && echo yes)
    for part in "$@"; do
        case $script in *"$part"*) chosen=yes ;; esac
    done
    [ -n "$chosen" ] || continue
    start=$(date +%s.%N)
    if timeout -k 10 $SCRIPT_TIMEOUT_S bash "$script" </dev/null >"$log" 2>&1; then
        verdict="ok  " passed=1
    else
        verdict=FAIL passed=0
    fi
    seconds=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN { printf "%.2f", b - a }')
    printf '%s  %-24s %-52s %7s s\n' "$verdict" "$name.sh" "" "$seconds"
    [ $passed = 1 ] || sed 's/^/      /' "$log"
    echo "$passed $((1 - passed))" >>"$counts"
done

awk '{ passed += $1; failed += $2 }
    END { printf "%d passed, %d failed\n", passed, failed; exit failed > 0 || passed == 0 }' "$counts"
