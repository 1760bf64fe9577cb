#!/usr/bin/env bash
# Gradients of the float build against the double build's, every parameter of every case of tests/model/model_test.c:
# below 1e-4 of the largest gradient of the tensor's kind.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
TRAIN_MOE_TEST_DUMP=$folder/float build/tests/run model_gradients_dump
TRAIN_MOE_TEST_DUMP=$folder/double build/tests/run_double model_gradients_dump
python3 - "$folder/float" "$folder/double" <<'PYTHON'
import re, sys

def read(path):
    tensors, lines = {}, iter(open(path))
    for line in lines:
        case, name, count = line.split()
        tensors[case, name] = [float(next(lines)) for _ in range(int(count))]
    return tensors

def kind(key):
    return key[0], re.sub(r"experts\.\d+", "experts", key[1])

single, double = read(sys.argv[1]), read(sys.argv[2])
assert single.keys() == double.keys() and len(single) > 500, len(single)
largest = {}
for key, values in double.items():
    largest[kind(key)] = max(largest.get(kind(key), 0), max(map(abs, values)))
worst = max((max(abs(a - b) for a, b in zip(single[key], double[key])) / (largest[kind(key)] or 1), key) for key in single)
print(f"{len(single)} tensors, worst difference {worst[0]:.2e} of the largest gradient: {worst[1]}")
assert worst[0] < 1e-4, worst
PYTHON
