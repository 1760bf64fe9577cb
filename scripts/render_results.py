#!/usr/bin/env python3
"""tests/bench/results.jsonl -> tests/bench/RESULTS.md. One row a measure (`bench`); the newest is the one that stands."""
import json
import os

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "bench")
HEAD = """# Measured

Rendered from results.jsonl by scripts/render_results.py. A ratio is ours over the peer's, both measured in one run on random
data (prepare_data: on text), after a check of the result; above 1 is faster.

| bench | ours | peer | ratio | unit | on | commit, date |
|---|---|---|---|---|---|---|
"""


def main():
    with open(os.path.join(FOLDER, "results.jsonl"), encoding="utf-8") as file:
        rows = {row["bench"]: row for row in map(json.loads, filter(str.strip, file))}
    with open(os.path.join(FOLDER, "RESULTS.md"), "w", encoding="utf-8") as file:
        file.write(HEAD)
        for row in rows.values():
            peer = f"{row['peer_value']} ({row['peer']})" if "peer" in row else ""
            where = row.get("gpu") or row.get("device", "")
            ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
            file.write(f"| {row['bench']} | {row['value']} | {peer} | {ratio} | {row['unit']} | {where} "
                       f"| {row['commit']}, {row['date']} |\n")


main()
