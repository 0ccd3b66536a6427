"""The benchmark of compiled decode steps, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import benchmark
from tersekv.lab.evals import runs


def test_every_contender_is_timed_and_only_compiled_ones_compile(tiny: str, tmp_path: Path) -> None:
    driver, out = benchmark("decode"), tmp_path / "records" / "compiled.jsonl"
    options = ["--depths", "40", "300", "--dtypes", "float32", "--recipes", "kivi:bits=4", "--new-tokens", "40"]
    driver.main(["compiled", "--model", tiny, "--backend", "eager", "--rounds", "2", "--out", str(out), *options])
    torch.compiler.reset()
    rows = runs.read(out)
    names = [("dynamic", "eager"), ("static", "compiled"), ("kivi:bits=4", "eager"), ("kivi:bits=4", "compiled")]
    assert [(row["depth"], row["cache"], row["mode"]) for row in rows] == [
        (d, *name) for d in (40, 300) for name in names
    ]
    for row in rows:
        assert len(row["rates"]) == 2
        assert min(row["rates"]) > 0
        assert row["graphs"] == (1 if row["mode"] == "compiled" else 0)
        assert (row["compile_seconds"] is not None) == (row["mode"] == "compiled")
        assert row["equal_tokens"] == 43


def test_rates_leave_out_the_first_tokens() -> None:
    driver = benchmark("decode")
    clock = driver.Clock()
    clock.times = [0.0, 5.0, 6.0, 7.0, 8.0, 8.5, 9.0]  # the prompt, three omitted tokens, and three that count
    assert clock.rate == pytest.approx(2.0)
