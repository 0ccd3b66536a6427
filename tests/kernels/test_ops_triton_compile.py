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
ELSEWHERE = [
    "exact before RoPE, head dim 256", "polar, head dim 256", "trellis beside a mean", "a step with bases",
    "pages of outliers before RoPE by address", "latents of trellis, 128 heads",
]  # fmt: skip
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


@pytest.fixture(scope="module")
def records():
    """Return the records of every call for H100 and H200."""
    return compiled("sm_90")


def check(records, target):
    """Check that all kernels compiled and fit into shared memory."""
    errors = {record["call"]: record["error"] for record in records if record["error"]}
    assert not errors
    for record in records:
        assert record["kernels"], f"{record['call']} launches nothing"
        for kernel in record["kernels"]:
            assert kernel["binary_bytes"] > 0
            assert kernel["shared_bytes"] <= SHARED_BYTES[target], f"{record['call']}: {kernel}"


def test_every_call_compiles(records):
    check(records, "sm_90")


def test_pages_by_address_are_loaded_as_wide_as_arguments(records):
    """The compiler knows that addresses in a table are multiples of 16 bytes.

    Otherwise it would load exact tokens one by one, without asynchronous copies.
    """
    by_call = {record["call"]: record["kernels"] for record in records}
    pages, exact, _ = by_call["pages of exact tokens by address"]
    assert (pages["narrow_loads"], pages["shared_bytes"]) == (exact["narrow_loads"], exact["shared_bytes"])
    assert pages["narrow_loads"] == 0


def test_calls_compile_for_amd():
    """`test_ops_triton_counts.py` compiles for other GPUs of NVIDIA, some of which have 99 KB of shared memory."""
    made = compiled("gfx942", *ELSEWHERE)
    assert [record["call"] for record in made] == ELSEWHERE
    check(made, "gfx942")


def kernels_in(path: Path) -> set[str]:
    """Return the functions of a file that read their program id."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any(getattr(node, "attr", "") == "program_id" for node in ast.walk(f))}


def test_every_kernel_is_among_them(records):
    compiled = {kernel["name"] for record in records for kernel in record["kernels"]}
    assert compiled == set().union(*map(kernels_in, Path(triton.__file__).parent.glob("*.py")))


@pytest.mark.parametrize("side", ["keys", "keys before RoPE", "values"])
def test_every_layout_is_among_them(records, side):
    from tersekv.kernels.triton import leaves

    found = {layout for record in records for kernel in record["kernels"] for layout in kernel["layouts"].get(side, ())}
    assert found == set(leaves.LAYOUTS) | ({"rotated mean"} if side == "keys" else set())
