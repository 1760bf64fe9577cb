#!/usr/bin/env python3
"""tests/bench/results.jsonl -> tests/bench/RESULTS.md. A row is one measure: name, ratio, and whatever explains it."""
import json
import os

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "bench")
HEAD = """# Measured

Rendered from results.jsonl by scripts/render_results.py. A ratio is ours over the peer's, side by side in one run on random
data, after a check of the result; above 1 is faster.

| measure | ratio | details |
|---|---|---|
"""


def main():
    with open(os.path.join(FOLDER, "results.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names), "one row a measure"
    with open(os.path.join(FOLDER, "RESULTS.md"), "w", encoding="utf-8") as file:
        file.write(HEAD)
        for row in rows:
            ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
            details = ", ".join(f"{key} {value}" for key, value in row.items() if key not in ("name", "ratio"))
            file.write(f"| {row['name']} | {ratio} | {details} |\n")


main()
