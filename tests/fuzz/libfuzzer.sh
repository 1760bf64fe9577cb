#!/usr/bin/env bash
# libfuzzer.sh SECONDS [NAME...]: each target under libFuzzer. Corpora stay in build/fuzz/corpus and are gone on with; what
# is found lies in build/fuzz as NAME-crash-..., NAME-timeout-..., NAME-leak-... .
set -u
cd "$(dirname "$0")/../.."
seconds=$1
shift
names=("$@")
[ $# -gt 0 ] || mapfile -t names < <(FUZZ_TARGET=list build/fuzz/run)
failed=0
for name in "${names[@]}"; do
    mkdir -p "build/fuzz/corpus/$name"
    FUZZ_TARGET=$name FUZZ_SEEDS=build/fuzz/corpus/$name build/fuzz/run -max_total_time="$seconds" -timeout=20 \
        -rss_limit_mb=1024 -malloc_limit_mb=256 -max_len=65536 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/$name-" "build/fuzz/corpus/$name" >"build/fuzz/$name.log" 2>&1
    code=$?
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "build/fuzz/$name.log")
    if [ $code = 0 ]; then
        echo "ok    $name: ${runs:-?} inputs in $seconds s, $(ls "build/fuzz/corpus/$name" | wc -l) kept"
    else
        failed=1
        echo "FAIL  $name: exit $code, see build/fuzz/$name.log"
        tail -n 25 "build/fuzz/$name.log" | sed 's/^/      /'
    fi
done
exit $failed
