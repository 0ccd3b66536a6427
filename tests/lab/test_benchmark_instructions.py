"""Counting instructions: every counted operator runs, fixed costs cancel, and missing tools are
named."""

import shutil

import pytest
import torch

from conftest import benchmark
from tersekv.lab.bench.attend import HeadCounts
from tersekv.lab.bench.formats import make_segment
from test_ops_parity import pytestmark  # noqa: F401

HEADS = HeadCounts(2, 1, 32)


@pytest.fixture
def program():
    return benchmark("instructions")


def test_every_op_runs(program):
    torch.manual_seed(0)
    segments = {name: make_segment(name, 1, 64, 32, seed=0) for name in ("grid4", "polar")}
    calls = [
        *program.attention(HEADS, 64, segments), *program.encoding(HEADS, 64), *program.searching(HEADS, 4)
    ]  # fmt: skip
    names = [name for name, _ in calls]
    assert len(set(names)) == len(names) == 14
    assert {"grid4", "exact", "encode_polar, 4-2-2-2", "encode_trellis, 4 bits"} <= set(names)
    for _, call in calls:
        made = call()
        assert all(x.numel() for x in (made if isinstance(made, tuple) else [made]))


def test_fixed_cost_of_a_call_cancels(program, monkeypatch, tmp_path):
    found = {("attend", "grid4", times): 5000 + 1024 * 3 * 200 * times for times in (1, 2)}
    monkeypatch.setattr(program, "counts", lambda *call: found)
    (row,) = program.measure("avx2", HeadCounts(9, 3, 64), tmp_path)
    assert row["per_token_and_head"] == 200


@pytest.mark.parametrize("there", ["cc", "valgrind"])
def test_missing_tools_are_named(program, monkeypatch, tmp_path, there):
    monkeypatch.setattr(shutil, "which", lambda name: name if name == there else None)
    with pytest.raises(SystemExit, match="needs valgrind and a C compiler"):
        program.prepare(tmp_path, HEADS)
