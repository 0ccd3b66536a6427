"""`tersekv bench attend --device cuda` with a fake clock: the implementations it runs and its
results.

Kernels are interpreted, and no speed is tested.
"""

from __future__ import annotations

import re

import pytest
import torch

from tersekv.errors import CacheError, UserError
from tersekv.kernels import backends, cpu, triton
from tersekv.kernels.attend_packed import attend_packed
from tersekv.lab.bench import attend_gpu as bench
from tersekv.lab.bench import clock_gpu
from tersekv.lab.bench.attend import HeadCounts
from tersekv.lab.bench.clock import Spread
from tersekv.lab.bench.formats import FORMATS, chosen
from tersekv.lab.evals.runs import read

pytestmark = [
    pytest.mark.skipif(triton.why_not_installed() is not None, reason=str(triton.why_not_installed())),
    pytest.mark.skipif(not triton.interpreted(), reason="kernels run on the GPU here"),
]
HEADS = HeadCounts(4, 2, 64)


class Counting:
    """A clock for which every run takes a millisecond. It runs each function once."""

    device, name, cache_bytes = "cpu", "a test", 1 << 16

    def __init__(self) -> None:
        self.ran: dict[str, int] = {}

    def capture(self, run):
        return run

    def turns(self, ways, seconds):
        for name, runs in ways.items():
            self.ran[name] = len({tuple(run().shape) for run in runs}) * len(runs)
        return {name: Spread(1.0, 0.9, 1.2, 20) for name in ways}


@pytest.fixture
def clock():
    with backends.forced("triton"):
        yield Counting()


def test_implementations_and_their_records(clock):
    measured = bench.measure(clock, HEADS, 2, 64, ["grid4"], 1.0)
    packed = 2 * 2 * 2 * 64 * 64 * 5 // 8
    dense = 2 * 2 * 2 * 64 * 64 * 2
    sizes = {row.what: row.bytes for row in measured.rows}
    assert sizes == {
        "sdpa flash bfloat16": dense, "sdpa flash bfloat16, group as rows": dense, "ours bfloat16": dense,
        "ours float8": dense // 2, "scores matmul bfloat16": dense // 2, "scores ours bfloat16": dense // 2,
        "grid4": packed, "scores grid4": packed // 2,
    }  # fmt: skip
    assert list(measured.missing) == ["flashinfer bfloat16"]
    # inputs exceed the cache four times, in at most eight copies
    alone = ("copy", "encode grid4 keys", "encode grid4 values")
    assert clock.ran == dict.fromkeys(sizes, 4) | {"grid4": 8, "scores grid4": 8} | dict.fromkeys(alone, 1)
    assert measured.bandwidth == pytest.approx(2 * (1 << 20) / 1e6)
    results = {result["what"]: result for result in measured.results()}
    assert results["scores grid4"]["bits"] == 5.0
    assert 0 < results["scores grid4"]["relative_error"] < 4e-3
    result = results["grid4"]
    assert (result["what"], result["bits"], result["batch"], result["median_us"]) == ("grid4", 5.0, 2, 1000.0)
    assert result["floor_us"] == pytest.approx(packed / measured.bandwidth / 1e3, rel=1e-3)
    assert result["speedup_bfloat16"] == 1.0
    assert 0 < result["relative_error"] < 4e-3
    assert result["encode_us_per_token"] == pytest.approx(2 * 1e3 / 32)  # one millisecond per side and block
    assert measured.results()[0]["encode_us_per_token"] is None


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_correct_kernel(clock, name, monkeypatch):
    make_segment = bench.make_segment

    def made(*call):
        with backends.forced("auto"):  # interpreted kernels would take long to search trellis codes
            return make_segment(*call)

    monkeypatch.setattr(bench, "make_segment", made)
    monkeypatch.setattr(bench, "_encode_us", lambda *call: 1.0)
    assert all(way.row.error < 4e-3 for way in bench._packed(clock, name, HEADS, 1, 64, 0))


def test_a_format_without_a_kernel_is_not_timed(clock):
    segment = bench.make_segment("grid4", 2, 64, 64, 0)
    reason = cpu.why_not_built() or "query is torch.float64"
    with backends.forced("auto"), pytest.raises(UserError, match=re.escape(f"not timed: reference: {reason}")):
        bench._error("grid4", torch.randn(1, 2, 2, 64, dtype=torch.float64), *segment.operands(), 1.0)


def test_all_formats_are_named_at_once():
    assert chosen("all") == tuple(FORMATS)


def test_a_wrong_kernel_is_not_timed(clock, monkeypatch):
    right = attend_packed.reference
    monkeypatch.setattr(backends.attend_packed, "direct", lambda *call: (right(*call)[0] * 1.02, None))
    with pytest.raises(CacheError, match="the relative error of its output is"):
        bench._packed(clock, "grid4", HEADS, 1, 64, 0)


def test_scores_are_compared_with_scores():
    times = {"ours bfloat16": 4.0, "scores ours bfloat16": 2.0, "grid4": 2.0, "scores grid4": 0.5}
    rows = [bench.Row(what, 5.0 if "grid" in what else None, 1, Spread(ms, ms, ms, 20)) for what, ms in times.items()]
    results = bench.Measured("a test", HEADS, 1, 64, 1.0, rows, {}).results()
    assert [result["speedup_bfloat16"] for result in results] == [1.0, 1.0, 2.0, 4.0]


def test_failing_formats_are_skipped_and_others_timed(clock, monkeypatch):
    from triton.runtime.errors import OutOfResources

    make = bench._packed
    errors = {"grid3": OutOfResources(300_000, 232_448, "shared memory"), "grid2": CacheError("an error of 0.5")}

    def packed(clock, name, *call):
        if name in errors:
            raise errors[name]
        return make(clock, name, *call)

    monkeypatch.setattr(bench, "_packed", packed)
    measured = bench.measure(clock, HEADS, 1, 64, ["grid3", "grid2", "grid1"], 1.0)
    assert measured.rows[-1].what == "grid1"
    assert "shared memory" in measured.missing["grid3"]
    assert measured.missing["grid2"] == "an error of 0.5"


def test_no_format_starts_after_the_time_limit(clock):
    measured = bench.measure(clock, HEADS, 1, 64, ["grid4"], 1.0, stop=0.0)
    assert measured.missing["grid4"] == "no time was left"
    assert "ours bfloat16" in [row.what for row in measured.rows]


def test_a_missing_gpu_is_one_line(capsys):
    from tersekv import cli

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cli.run(["bench", "attend", "--device", "cuda"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert cli.run(["bench", "attend", "--device", "tpu"]) == 2
    assert "allowed are cpu and cuda" in capsys.readouterr().err


def test_the_table(clock, capsys, monkeypatch, tmp_path):

    from tersekv import cli

    monkeypatch.setattr(clock_gpu, "CudaClock", lambda: clock)
    out = tmp_path / "gpu.jsonl"
    small = ["--tokens", "64", "--heads", "2/1/32", "--formats", "grid2", "--batch", "1,2", "--out", str(out)]
    assert cli.run(["bench", "attend", "--device", "cuda", *small]) == 0
    said = capsys.readouterr().out
    assert said.count("grid2") == 2
    assert said.count("a test") == 2
    rows = read(out)
    assert {row["gpu"] for row in rows} == {"a test"}
    assert {row["batch"] for row in rows} == {1, 2}
    assert cli.run(["bench", "attend", "--device", "cuda", *small, "--limit", "0"]) == 2
    said = capsys.readouterr()
    assert said.out.count("ours float8") == 2
    assert "not timed everywhere: grid2 (grid2: no time was left)" in said.err


def test_only_gpus_are_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device"):
        clock_gpu.CudaClock()
