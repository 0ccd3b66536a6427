"""`tersekv bench attend`: its output on a small context and its errors. Speed itself is not tested."""

from __future__ import annotations

import json

import pytest

from tersekv import cli
from tersekv.errors import CacheError, UserError
from tersekv.kernels import backends, cpu
from tersekv.kernels.attend_packed import attend_packed
from tersekv.lab.bench import attend as bench
from tersekv.lab.bench.attend import HeadCounts, Measured, Row, measure
from tersekv.lab.bench.clock import Spread, spread, take_turns
from tersekv.lab.bench.formats import FORMATS, make_segment
from tersekv.lab.evals import runs

KERNELS = pytest.mark.skipif(cpu.why_not_built() is not None, reason=str(cpu.why_not_built()))
KEYS = [
    "format", "tokens", "heads", "threads", "ms", "ms_p10", "ms_p90", "speedup_sdpa", "speedup_dense", "speedup_floor",
    "gbps_packed", "relative_error",
]  # fmt: skip
SMALL = ["bench", "attend", "--tokens", "256", "--heads", "4/2/64", "--seconds", "0.01"]


@KERNELS
def test_json_and_records(tmp_path, capsys):
    out = tmp_path / "records" / "attend.jsonl"
    assert cli.run([*SMALL, "--formats", "grid4,grid2", "--json", "--out", str(out)]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["format"] for r in results] == ["grid4", "grid2"]
    for result in results:
        assert list(result) == KEYS
        assert (result["tokens"], result["heads"], result["threads"]) == (256, "4/2/64", 1)
        assert all(result[key] > 0 for key in KEYS[4:])
        assert result["relative_error"] < 1e-2
    rows = runs.read(out)
    assert [row["what"] for row in rows] == ["grid4", "grid2", "sdpa bfloat16", "matmul bfloat16", "matmul float32"]
    assert [row["bits"] for row in rows] == [5.0, 3.0, None, None, None]
    assert rows[0]["bytes"] == 2 * 2 * 256 * 64 * 5 // 8
    assert cli.run(["plot", "speed", str(out), "-o", str(tmp_path / "speed.png")]) == 0


@KERNELS
def test_table(capsys):
    assert cli.run([*SMALL, "--threads", "1,2", "--formats", "grid3"]) == 0
    said = capsys.readouterr().out
    assert said.count("grid3") == 2
    assert "memory reads" in said


@pytest.mark.parametrize(("arguments", "said"), [
    (("--formats", "grid4,grid9"), "grid9' is not a known format: choose from grid4, grid3"),
    (("--heads", "32/5/128"), "--heads '32/5/128'"),
    (("--heads", "32x8"), "--heads '32x8'"),
    (("--tokens", "many"), "--tokens 'many'"),
    (("--tokens", "33"), "give a multiple of 32, the tokens of a block"),
    (("--threads", "0"), "--threads '0'"),
])  # fmt: skip
def test_refusals(arguments, said, capsys):
    assert cli.run(["bench", "attend", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_formats_without_a_kernel_are_not_timed():
    with backends.forced("reference"), pytest.raises(UserError, match="grid4 is not timed: reference: forced"):
        measure(HeadCounts(2, 1, 32), 64, ["grid4"], 1, 0.01)


@KERNELS
def test_a_wrong_kernel_is_not_timed(monkeypatch):
    right = attend_packed.reference
    monkeypatch.setattr(backends.attend_packed, "direct", lambda *call: (right(*call)[0] * 1.02, None))
    with pytest.raises(CacheError, match="the relative error of its output is"):
        measure(HeadCounts(2, 1, 32), 64, ["grid4"], 1, 0.01)


@pytest.mark.parametrize("name", FORMATS)
def test_a_copy_shares_no_memory(name):
    segment = make_segment(name, 1, 64, 32, 0)
    copy = segment.copy()
    assert copy.bytes == segment.bytes > 0
    for one, two in zip(segment, copy, strict=True):
        for plane in one.planes:
            assert one.planes[plane].equal(two.planes[plane])
            assert not one.planes[plane].numel() or one.planes[plane].data_ptr() != two.planes[plane].data_ptr()


@KERNELS
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_correct_kernel(name):
    row = measure(HeadCounts(4, 2, 64), 256, [name], 1, 0.01).rows[0]
    assert row.error < 1e-2
    assert 1 < row.bits < 7


def test_speedups_are_ratios():
    time = lambda ms: Spread(ms, ms, ms, 5)  # noqa: E731
    heads = HeadCounts(8, 2, 64)
    rows = [
        Row("grid4", 5.0, 1000, heads, 1, time(2.0), 160_000, 1e-3),
        Row("sdpa bfloat16", None, 1000, heads, 1, time(20.0), 512_000),
        Row("matmul bfloat16", None, 1000, heads, 1, time(8.0), 512_000),
        Row("matmul float32", None, 1000, heads, 1, time(6.0), 1_024_000),
    ]
    (result,) = Measured(rows, bandwidth=0.128).results()
    assert (result["speedup_sdpa"], result["speedup_dense"], result["speedup_floor"]) == (10.0, 3.0, 2.0)
    assert result["gbps_packed"] == 0.08


def test_take_turns_and_spread():
    seen = []
    times = take_turns({"a": lambda n: seen.append(("a", n)), "b": lambda n: seen.append(("b", n))}, 0.0)
    assert seen == [(way, n) for n in range(6) for way in "ab"]
    assert times["a"].runs == 5
    assert spread([float(n) for n in range(10, 0, -1)]) == Spread(6.0, 2.0, 10.0, 10)


def test_copies_outgrow_caches():
    assert bench._copies(1 << 20) == bench.MAX_COPIES
    assert bench._copies(64 << 20) == 2
    assert bench._copies(3 << 30) == 1
