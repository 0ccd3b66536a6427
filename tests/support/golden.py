"""Write hashes of what caches hold, and compare them with those of another commit.

Hash the matrix of one commit, which takes a few minutes, and compare the next one on the same machine:

    python tests/support/golden.py --matrix --out before.json
    python tests/support/golden.py --matrix --against before.json

Write the committed hashes anew:

    python tests/support/golden.py --out tests/support/golden.json
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path += map(str, Path(__file__).resolve().parents[1].glob("**/"))  # as under pytest

from conftest import score_heads
from golden_cases import CASES, matrix
from golden_content import digest
from golden_feeding import Case, Step, run

HASHES = Path(__file__).with_suffix(".json")
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest difference between sums of the same outputs, see `golden_content.signature`."""

ROUNDED = {"bits", "figures"}
"""Parts that differ if outputs of attention, or sums of its weights, are rounded in another way."""

SAME, ROUNDS, WORKS, DIFFERS = "same", "rounds in another way", "now works", "differs"


def brief(case: Case, step: Step) -> Step:
    """Return the part of a step that does not depend on the CPU."""
    left = ROUNDED | (set() if case.exact else {"tokens", "saved"})
    return {name: digest(x) if name == "saved" else x for name, x in step.items() if name not in left}


def compared(case: Case, old: list[Step], new: list[Step]) -> tuple[str, str]:
    """Return a verdict on a case, and the first step that is not the same with the names of its parts."""
    verdict, where = SAME, ""
    for before, after in zip(old, new, strict=False):
        step = before["step"]
        if "refused" in before and "refused" not in after and "failed" not in after:
            return WORKS, step
        parts = [name for name in before if not _same(case, name, before[name], after.get(name))]
        for way in ("refused", "failed"):
            if way in after and way not in before:
                parts = [f"{way} with {after[way]}"]
        if set(parts) - ROUNDED:
            return DIFFERS, f"{step}: {', '.join(parts)}"
        if parts and verdict == SAME:
            verdict, where = ROUNDS, f"{step}: {', '.join(parts)}"
    return (DIFFERS, "number of steps") if len(old) != len(new) else (verdict, where)


def _same(case: Case, name: str, before: Any, after: Any) -> bool:
    if name == "attention" and None not in (before, after):
        return all(abs(a - b) <= TOLERANCE[case.dtype] for a, b in zip(before, after, strict=True))
    return bool(before == after)


def report(found: dict[str, list[Step]], before: dict[str, list[Step]], cases: list[Case]) -> int:
    """Print every case that is not the same, and how many cases have each verdict. Return 1 if one differs."""
    counts: collections.Counter[str] = collections.Counter()
    for case in cases:
        if case.name not in before:
            counts["new"] += 1
            continue
        verdict, where = compared(case, before[case.name], found[case.name])
        counts[verdict] += 1
        if verdict != SAME:
            print(f"{verdict}: {case.name}\n    at {where}")
    counts["missing"] = len(before.keys() - found.keys())
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n))
    return int(counts[DIFFERS] > 0)


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--matrix", action="store_true", help="run the matrix in place of the committed cases")
    parser.add_argument("--out", type=Path, help="file to write the hashes to")
    parser.add_argument("--against", type=Path, help="file of hashes to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    score_heads()
    cases, found = matrix() if options.matrix else CASES, {}
    with tempfile.TemporaryDirectory() as folder:
        for i, case in enumerate(cases):
            if sys.stderr.isatty():
                print(f"\r{i + 1} of {len(cases)}", end="", file=sys.stderr)
            try:
                steps = run(case, Path(folder))
            except Exception as error:  # a fault of one case does not end the others
                steps = [{"step": "new", "failed": f"{type(error).__name__} {error}"}]
            found[case.name] = steps if options.matrix else [brief(case, step) for step in steps]
    if options.out:
        lines = (f" {json.dumps(name)}: {json.dumps(steps)}" for name, steps in found.items())
        options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return report(found, json.loads(options.against.read_text()), cases) if options.against else 0


if __name__ == "__main__":
    sys.exit(main())
