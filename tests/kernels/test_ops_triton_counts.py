"""Loops of the Triton kernels do not get longer, spill more or wait more often than in the record of counts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tersekv.kernels import triton
from tersekv.lab.evals import runs

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "records" / "instructions_gpu.jsonl"

pytestmark = [
    pytest.mark.skipif(triton.why_not_installed() is not None, reason=str(triton.why_not_installed())),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton includes ptxas for x86-64 only"),
]


TARGETS = ["sm_80", "sm_90", "sm_120"]


@pytest.mark.parametrize("target", TARGETS)
def test_counts_are_those_of_the_record(tmp_path, target, request):
    """Each GPU has its seventh of the layouts, with `--every` all: a compiler takes a minute for all of one GPU."""
    held = {row["format"]: row for row in runs.read(RECORD) if row["target"] == target}
    assert len(held) == 28
    if not request.config.getoption("every"):
        held = {name: held[name] for name in sorted(held)[TARGETS.index(target) :: 7]}
    from tersekv.versions import package_version

    if (used := package_version("triton")) != (recorded := next(iter(held.values()))["triton"]):
        pytest.skip(f"the record is of Triton {recorded}, not {used}")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    call = [sys.executable, str(ROOT / "benchmarks" / "instructions_gpu.py"), "--target", target]
    call += ["--formats", ",".join(held), "--out", str(tmp_path / "counts.jsonl")]
    done = subprocess.run(call, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = runs.read(tmp_path / "counts.jsonl")
    assert len(found) == len(held)
    for row in found:
        for name in ("lane_instructions_per_code", "barriers", "stack_bytes", "shared"):
            assert row[name] <= held[row["format"]][name], (row["format"], name, json.dumps(row))
        assert row["programs"] >= held[row["format"]]["programs"], (row["format"], json.dumps(row))
