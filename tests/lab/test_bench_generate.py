"""The decoding benchmark: timed caches, context lengths and errors."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tersekv import UserError, cli
from tersekv.cli.bench import speeds
from tersekv.hf import peers
from tersekv.lab.bench import generate
from tersekv.lab.evals import runs
from tersekv.models.loading import load


@pytest.fixture(scope="module")
def loaded(tiny: str) -> tuple[Any, Any]:
    return load(tiny)


def test_caches_take_turns(loaded) -> None:
    said: list[str] = []
    found = list(
        generate.run(
            *loaded, ["kivi:bits=2", "full", "snapkv:budget=0.5+exact"], [100, 300], [None, 64], new_tokens=2,
            rounds=2, report=said.append,
        )
    )  # fmt: skip
    names = ["full", "kivi:bits=2", "snapkv:budget=0.5+exact"]
    assert [(f.cache, f.context, f.prefill_chunk) for f in found] == [
        (name, context, chunk) for chunk in (None, 64) for context in (100, 300) for name in names
    ]
    for one in found:
        for rounds in (one.step_ms, one.baseline_ms, one.prefill_seconds, one.times_full):
            assert len(rounds) == 2
            assert min(rounds) > 0
        assert (one.dtype, one.execution, one.seed) == ("float32", "eager", 0)
        assert one.peak_bytes is not None
        assert 0 <= one.peak_bytes < 2**30
    full, packed, kept = found[3:6]
    assert full.bits_per_element == 32
    assert full.times_full == [1, 1]
    assert packed.bytes < kept.bytes < full.bytes
    assert packed.times_full == [theirs / mine for theirs, mine in zip(full.step_ms, packed.step_ms, strict=True)]
    assert len(said) == 8
    assert "300 tokens, prompt in chunks of 64, round 2 of 2" in said[-1]


def test_tokens_fed_to_a_cache(loaded, monkeypatch) -> None:
    """The prompt, whole or in chunks, then one token at a time; the number of cached tokens equals
    the record."""
    calls: list[tuple[int, int]] = []

    def feed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        calls.append((cache.get_seq_length(), ids.shape[1]))
        return fed(model, cache, ids)

    fed = generate.feed
    monkeypatch.setattr(generate, "feed", feed)
    list(generate.run(*loaded, [], [150], [None, 64], new_tokens=2, rounds=1))
    steps = [(0, 16)] + [(16 + i, 1) for i in range(5)]
    after = [(150 + i, 1) for i in range(5)]
    turn = (155, generate.TURN)
    assert calls == [*steps, (0, 150), *after, turn, *steps, (0, 64), (64, 64), (128, 22), *after, turn]


def test_results_of_a_round(loaded, monkeypatch) -> None:
    """Every forward pass advances a fake clock by 10 ms plus 1 ms per 100 cached tokens."""
    now = 0.0

    def feed(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        nonlocal now
        now += 0.010 + 0.001 * (cache.get_seq_length() >= 100)
        return fed(model, cache, ids)

    fed = generate.feed
    monkeypatch.setattr(generate, "feed", feed)
    monkeypatch.setattr(generate, "_clock", lambda _: now)
    (found,) = generate.run(*loaded, [], [100], [25], new_tokens=4, rounds=3)
    assert found.step_ms == pytest.approx([11] * 3)
    assert found.baseline_ms == pytest.approx([10] * 3)
    assert found.prefill_seconds == pytest.approx([0.040] * 3)
    assert found.turn_seconds == pytest.approx([0.011] * 3)
    document = found.document()
    assert document["adds_ms"] == pytest.approx([1] * 3)
    assert document["tokens_per_second"] == pytest.approx(1000 / 11)
    assert (document["bench"], document["baseline_context"]) == ("generate", 16)


def test_a_turn_beyond_the_limit_is_left_out(loaded, monkeypatch) -> None:
    monkeypatch.setattr(generate, "_limit", lambda _: 200 + generate.TURN)
    (found,) = generate.run(*loaded, [], [197], new_tokens=1, rounds=1)
    assert found.turn_seconds == []


def test_peak_memory_is_of_one_cache(loaded, monkeypatch) -> None:
    """64 MB more in a cache are measured; memory freed before is not."""
    made = generate._caches

    def wasteful(*of: Any) -> Any:
        caches = made(*of)
        waste = caches["kivi:bits=4"]

        def more() -> Any:
            reading = waste()
            reading.cache.waste = torch.ones(16 * 2**20)
            return reading

        return {**caches, "kivi:bits=4": more}

    monkeypatch.setattr(generate, "_caches", wasteful)
    full, other = generate.run(*loaded, ["kivi:bits=4"], [40], new_tokens=1, rounds=2)
    assert other.peak_bytes > 60 * 2**20 > full.peak_bytes


@pytest.mark.parametrize(
    ("names", "contexts", "more", "match"),
    [
        (["kivy"], [32], {}, "did you mean"),
        ([], [2048], {}, "exceed the model's limit of 2,048: give at most 2,013"),
        ([], [16], {}, "give more than 16"),
        ([], [32], {"execution": "compiled"}, "execution 'compiled' is not one of: eager"),
    ],
)
def test_refused(loaded, names, contexts, more, match) -> None:
    with pytest.raises(UserError, match=match):
        list(generate.run(*loaded, names, contexts, **more))


def test_a_missing_peer_is_named(loaded, monkeypatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError

    monkeypatch.setattr(peers, "QuantizedCache", missing)
    with pytest.raises(UserError, match="hqq-4 needs the package hqq: pip install hqq"):
        list(generate.run(*loaded, ["hqq-4"], [32]))


def test_program(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "generate.jsonl"
    asked = ["bench", "generate", "-m", tiny, "-r", "kivi:bits=4", "--context", "100,200", "--new-tokens", "1"]
    asked += ["--dtype", "float32,bfloat16", "--prefill-chunk", "whole,64"]
    assert cli.run([*asked, "--rounds", "2", "--out", str(out), "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    rows = runs.read(out)
    assert [(r["dtype"], r["prefill_chunk"], r["context"], r["cache"]) for r in rows] == [
        (dtype, chunk, context, cache)
        for dtype in ("float32", "bfloat16")
        for chunk in (None, 64)
        for context in (100, 200)
        for cache in ("full", "kivi:bits=4")
    ]
    assert [{**row, **result} for row, result in zip(rows, results, strict=True)] == rows
    same = {(r["bench"], r["new_tokens"], r["execution"], r["seed"], len(r["step_ms"])) for r in rows}
    assert same == {("generate", 1, "eager", 0, 2)}
    for name in ("command", "cpu", "flags", "isa", "threads", "versions", "load"):
        assert name in rows[0]
    half = {r["bytes"] * 2 for r in rows if (r["cache"], r["dtype"]) == ("full", "bfloat16")}
    assert half == {r["bytes"] for r in rows if (r["cache"], r["dtype"]) == ("full", "float32")}
    one = ["--dtype", "bfloat16", "--prefill-chunk", "64", "--context", "100", "--rounds", "1"]  # the later one counts
    assert cli.run([*asked, *one]) == 0
    said = capsys.readouterr().out
    assert f"{Path(tiny).name}, bfloat16, prompt in chunks of 64, " in said
    assert cli.run(["plot", "decoding", str(out), "-o", str(tmp_path / "a.png")]) == 0


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--dtype", "float64", "--dtype 'float64'"),
        ("--prefill-chunk", "0", "--prefill-chunk '0'"),
        ("--prefill-chunk", "all", "write `whole`"),
        ("--context", "some", "--context 'some' is not a number of tokens"),
        ("--context", "4k", "give at most"),
        ("--threads", "4096", "--threads 4096"),
    ],
)
def test_refused_options(option: str, value: str, said: str, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "generate", "-m", tiny, option, value]) == 2
    assert said in capsys.readouterr().err


def test_the_table_fits_100_columns() -> None:
    """Steps, lengths and names are as long as they get on a slow machine."""
    decodings = [
        generate.Decoding(
            cache, "bfloat16", 8000, 512, "eager", 0, [222.2, 230.1, 219.8], [61.4, 60.2, 62.0], [101.2, 99.8, 104.1],
            [112.2, 99.9, 118.4], [2.68, 2.75, 2.31], 368_640_000, 32.0,
        )
        for cache in ("full", "trellis:bits=3.5,calibration=prompt", "kivi:bits=4", "turboquant:bits=4")
    ]  # fmt: skip
    written = io.StringIO()
    Console(file=written, width=100).print(*speeds("smollm2", decodings, ["default", "kivi:bits=4"]))
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("┃ cache") for line in lines) == 1
    row = next(line for line in lines if "│ default" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["default", "8,000", "222 (220–230)", "2.68 (2.31–2.75)", "101", "112", "368.64 MB"]
    assert "default = trellis:bits=3.5,calibration=prompt" in lines


def test_random_weights_of_a_config(loaded, tmp_path, capsys) -> None:
    loaded[0].config.to_json_file(tmp_path / "some.json")
    call = ["bench", "generate", "-m", str(tmp_path / "some.json"), "--context", "100", "--dtype", "float32"]
    assert cli.run([*call, "--prefill-chunk", "whole", "--rounds", "1", "--new-tokens", "1", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(one["cache"], one["context"]) for one in results] == [
        ("full", 100),
        ("trellis:bits=3.5,calibration=prompt", 100),
    ]


@pytest.mark.parametrize("device", ["cuda", "tpu"])
def test_a_missing_device_is_one_line(device, capsys) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert cli.run(["bench", "generate", "--device", device]) == 2
    said = {"cuda": "this machine has no CUDA device", "tpu": "allowed are cpu and cuda"}
    assert said[device] in capsys.readouterr().err
