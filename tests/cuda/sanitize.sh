#!/usr/bin/env bash
# sanitize.sh TOOL [PART...]: the op tests of build/tests/run_cuda, or those with PART in their name or file, each under
# compute-sanitizer's TOOL, several at a time. Prints those that failed and what was found; the last line adds up.
set -u
cd "$(dirname "$0")/../.."
readonly TEST_TIMEOUT_S=900
tool=$1
shift
sanitizer=$(command -v compute-sanitizer || echo "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer")
[ -x "$sanitizer" ] || { echo "error: no compute-sanitizer: it comes with the CUDA Toolkit (CUDA_HOME=DIR)" >&2; exit 2; }

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
one() {
    local log=$2/$3.log begin=$SECONDS verdict=ok
    "$sanitizer" --tool "$1" --target-processes all --error-exitcode 1 \
        build/tests/run_cuda --timeout "$TEST_TIMEOUT_S" "$3" >"$log" 2>&1 || verdict=FAIL
    printf '%-4s  %-9s %-52s %5d s\n' "$verdict" "$1" "$3" $((SECONDS - begin)) | tee -a "$2/verdicts"
    [ $verdict = ok ] || grep -v '^ok' "$log" | head -n 30 | sed 's/^/      /'
}
export -f one
export sanitizer TEST_TIMEOUT_S CUDA_MODULE_LOADING=LAZY

# Whole models, steps and the memory they plan are not ring 1. Racecheck does not follow a bulk copy that completes on an
# mbarrier: it takes each for a race, in cuBLASLt's kernels as in the grouped FP8 one.
apart='test_(backend|memory|model|nccl|step)[.]c'
[ "$tool" = racecheck ] && apart="$apart|test_gemm|grouped_fp8"
build/tests/run_cuda --list "$@" | awk -v apart="$apart" '$0 !~ apart { print $1 }' |
    xargs -P "$(nproc)" -I{} bash -c 'one "$@"' _ "$tool" "$logs" {}
awk '{ n[$1]++ } END { printf "%d passed, %d failed\n", n["ok"], n["FAIL"]; exit n["FAIL"] > 0 || n["ok"] == 0 }' "$logs/verdicts"
