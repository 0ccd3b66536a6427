"""The benchmark of decoding: which caches it times, at which depth, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tersekv import UserError, cli
from tersekv.hf import peers
from tersekv.hf.models import load
from tersekv.lab.bench import generate


@pytest.fixture(scope="module")
def loaded(tiny: str) -> tuple[Any, Any]:
    return load(tiny)


def test_caches_take_turns_at_every_depth(loaded) -> None:
    said: list[str] = []
    found = list(
        generate.run(
            *loaded, ["kivi:bits=2", "full", "snapkv:budget=0.5+exact"], [0, 300], new_tokens=2, rounds=2,
            report=said.append,
        )
    )  # fmt: skip
    names = ["full", "kivi:bits=2", "snapkv:budget=0.5+exact"]
    assert [(f.cache, f.depth) for f in found] == [(name, depth) for depth in (0, 300) for name in names]
    assert all(len(f.rates) == 2 and min(f.rates) > 0 for f in found)
    full, packed, kept = found[3:]
    assert full.bits_per_element == 32
    assert packed.bytes < kept.bytes < full.bytes
    assert len(said) == 4
    assert all(f.peak_bytes is not None and 0 <= f.peak_bytes < 2**30 for f in found)


def test_peak_is_of_what_a_round_takes(loaded, monkeypatch) -> None:
    """A cache that takes 64 MB more is seen, one that was freed before is not."""
    import torch

    reader = generate._packed

    def wasteful(one: Any) -> Any:
        read = reader(one)

        def more(ids: Any) -> Any:
            return read(ids)._replace(attention=Waste() if one.recipe != "full" else read(ids).attention)

        return more

    class Waste:
        def __enter__(self) -> None:
            self.held = torch.ones(16 * 2**20)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(generate, "_packed", wasteful)
    monkeypatch.setattr(generate, "feed", lambda *_: torch.zeros(3))
    full, other = generate.run(*loaded, ["kivi:bits=4"], [40], new_tokens=1, rounds=2)
    assert other.peak_bytes > 60 * 2**20 > full.peak_bytes


def test_documents_hold_the_median(loaded) -> None:
    (found,) = generate.run(*loaded, [], [10], new_tokens=1, rounds=3)
    document = found.document()
    assert document["tokens_per_second"] == sorted(found.rates)[1]
    assert (document["bench"], document["cache"], document["depth"]) == ("generate", "full", 10)


@pytest.mark.parametrize(
    ("names", "depths", "match"),
    [(["kivy"], [0], "did you mean"), ([], [4096], "more than the model's")],
)
def test_refused(loaded, names, depths, match) -> None:
    with pytest.raises(UserError, match=match):
        list(generate.run(*loaded, names, depths))


def test_a_missing_peer_is_named(loaded, monkeypatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError

    monkeypatch.setattr(peers, "QuantizedCache", missing)
    with pytest.raises(UserError, match="hqq-4 needs the package hqq: pip install hqq"):
        list(generate.run(*loaded, ["hqq-4"], [0]))


def test_program(tiny: str, tmp_path, capsys) -> None:
    out = tmp_path / "generate.jsonl"
    asked = ["bench", "generate", "-m", tiny, "-r", "kivi:bits=4", "--depths", "0,200", "--new-tokens", "1"]
    assert cli.run([*asked, "--rounds", "2", "--out", str(out), "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(r["cache"], r["depth"]) for r in results] == [(r["cache"], r["depth"]) for r in rows]
    assert len(rows) == 4
    assert {(r["bench"], r["new_tokens"], len(r["rates"])) for r in rows} == {("generate", 1, 2)}
    assert cli.run([*asked, "--rounds", "1"]) == 0
    assert "kivi:bits=4" in capsys.readouterr().out
