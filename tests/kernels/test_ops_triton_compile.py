"""Every Triton kernel compiles for sm_90, and some for a GPU of AMD, without a GPU.

The compiler may refuse code that the interpreter runs, or need more shared memory than exists.
"""

from __future__ import annotations

import ast
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tersekv.kernels import triton

PROGRAM = Path(__file__).parents[1] / "support" / "compile_triton.py"
SHARED_BYTES = {"sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Maximum shared memory of a program."""
FEW = [
    "signs and a grid of 3 bits", "signs per block", "signs per block before RoPE", "polar", "outliers before RoPE",
    "outliers after RoPE", "signs before RoPE", "polar before RoPE", "trellis before RoPE", "trellis beside a mean",
    "exact before RoPE", "pages of exact tokens by address", "a step without exact tokens", "merge",
    "codes of keys per channel", "signs of a sketch", "polar angles", "Hadamard", "packed trellis codes", "basis",
    "outliers", "a rotation before RoPE, head dim 128",
]  # fmt: skip
"""Calls that reach every kernel and every layout. With `--every` all calls are compiled, which takes minutes."""
ELSEWHERE = ["polar, head dim 256", "trellis beside a mean", "a step with bases"]
"""Calls that are also compiled for a GPU of AMD."""

pytestmark = [
    pytest.mark.skipif(triton.why_not_installed() is not None, reason=str(triton.why_not_installed())),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton includes ptxas for x86-64 only"),
]


def compiled(target: str, *calls: str):
    """Return the output of `compile_triton.py` by call."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, str(PROGRAM), target, *calls]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(records, target):
    """Check that all kernels compiled and fit into shared memory."""
    errors = {record["call"]: record["error"] for record in records if record["error"]}
    assert not errors
    for record in records:
        assert record["kernels"], f"{record['call']} launches nothing"
        for kernel in record["kernels"]:
            assert kernel["binary_bytes"] > 0
            assert kernel["undefined"] == 0, f"{record['call']}: {kernel}"
            assert kernel["shared_bytes"] <= SHARED_BYTES[target], f"{record['call']}: {kernel}"


def test_calls_compile_for_amd():
    """`test_ops_triton_counts.py` compiles for other GPUs of NVIDIA, some of which have 99 KB of shared memory."""
    made = compiled("gfx942", *ELSEWHERE)
    assert [record["call"] for record in made] == ELSEWHERE
    check(made, "gfx942")


def kernels_in(path: Path) -> set[str]:
    """Return the functions of a file that read their program id."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any(getattr(node, "attr", "") == "program_id" for node in ast.walk(f))}


def test_calls_compile(request):
    """All are checked in one test, because each process that runs tests would compile them again."""
    from tersekv.kernels.triton import leaves

    records = compiled("sm_90", *([] if request.config.getoption("every") else FEW))
    check(records, "sm_90")
    made = [kernel for record in records for kernel in record["kernels"]]
    assert {kernel["name"] for kernel in made} == set().union(
        *map(kernels_in, Path(triton.__file__).parent.glob("*.py"))
    )
    for side in ("keys", "keys before RoPE", "values"):
        found = {layout for kernel in made for layout in kernel["layouts"].get(side, ())}
        assert found == set(leaves.LAYOUTS) | ({"rotated mean"} if side == "keys" else set()), side
    # The compiler knows that addresses in a table are multiples of 16 bytes. Otherwise it would load exact tokens one
    # by one, without asynchronous copies.
    pages, exact, _ = next(r["kernels"] for r in records if r["call"] == "pages of exact tokens by address")
    assert (pages["narrow_loads"], pages["shared_bytes"]) == (exact["narrow_loads"], exact["shared_bytes"])
    assert pages["narrow_loads"] == 0
