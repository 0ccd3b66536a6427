"""The benchmark of selection, codecs and both at equal bytes: fitted sizes and tables from records."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from conftest import benchmark
from made_records import SHAPE, record, write
from tersekv.lab.evals.records import Record


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    """Load benchmarks/selection.py."""
    return benchmark("selection")


def test_a_row_fills_its_budget_and_no_more(driver: ModuleType) -> None:
    for template in driver.ROWS.values():
        recipe = driver.fitted(template, SHAPE, 1000, 1 / 5)
        if recipe is None:
            assert driver.held(SHAPE, template.format(n=driver.SMALLEST), 1000) > 1 / 5
            continue
        number = int("".join(c for c in recipe.split("+")[0].split(",")[0] if c.isdigit() or c == "=").split("=")[1])
        assert driver.held(SHAPE, recipe, 1000) <= 1 / 5 < driver.held(SHAPE, template.format(n=number + 1), 1000)
    assert driver.fitted(driver.ROWS["kivi2"], SHAPE, 1000, 1 / 16) is None


def test_the_table_pools_seeds_and_compares_on_common_samples(driver: ModuleType) -> None:
    both, selection = "subgen:budget=400,recent=32+turboquant", "subgen:budget=100,recent=32+exact"
    scores = {"full": [1, 1, 1], both: [1, 1, 0], selection: [0, 1], "window:recent=9+turboquant:bits=2": [0, 0, 0]}
    records = [made(recipe, i, score) for recipe, found in scores.items() for i, score in enumerate(found)]
    other = made("full", 0, 1) | {"options": {"lengths": "2k", "samples": 3}}
    table = driver.written(driver.CELLS["passkey-1k"], [*records, other], "smollm2").splitlines()
    assert [line.split("`")[1] for line in table if line.startswith("| `")] == [
        *("full", "window:recent=9+turboquant:bits=2", selection, both)
    ]
    assert "| 3 | 0.70 | 1.00 | 0.67 ± 0.33 |" in table[-3]
    assert table[-1] == f"`{both}` less `{selection}`, 2 samples: +0.50 ± 0.50."


def made(recipe: str, sample: int, score: int) -> Record:
    """Return a record of passkey at 1k. Every third sample has another seed."""
    return {
        "task": "passkey", "options": {"lengths": "1k", "samples": 2}, "recipe": recipe, "model": "smollm2",
        "sample": str(sample), "seed": sample // 2, "metrics": {"accuracy": float(score), "gold_nll": 0.5},
        "bytes": 1_000_000, "bits_per_element": 32.0, "bytes_by_part": {"slack": 300_000},
    }  # fmt: skip


def test_ablations_name_the_mode_that_their_records_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call sets KVQuant's protocol and records are searched for it, independent of the tasks'
    default."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "benchmarks"))
    ablation, calls = benchmark("ablation"), []
    monkeypatch.setattr(ablation, "program", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(ablation, "load_config", lambda _: None)
    monkeypatch.setattr(ablation, "needs_corpus", lambda *_: False)
    row = ablation.Row("kivi", "kivi:bits=2", ablation.Setting(sinks=0))
    study = ablation.Study({"1": ("a title", [row])}, {"1": ""}, "perplexity")
    args = argparse.Namespace(out=tmp_path, model="tiny", windows=1, context=64, test="text", workers=1)
    study.run(args, ["1"])
    assert calls[0][calls[0].index("--mode") + 1] == "simulate"
    for mode, found in (("cache", False), ("simulate", True)):
        options = {"text": "text", "context": 64, "windows": 1, "mode": mode}
        records = [record("perplexity", options, "0-a", recipe, {"nll": 2.0}) for recipe in ("full", "kivi:bits=2")]
        folder = ablation.records_folder(tmp_path, row.setting)
        folder.parent.mkdir(exist_ok=True)
        write(folder, records)
        assert (study.summary(row, args) is not None) is found
