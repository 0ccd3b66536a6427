"""KVQuant's tables: cells share records, calibrations differ where they must, and times are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import benchmark
from tersekv.calibration.calibration import Calibration
from tersekv.errors import UserError
from tersekv.lab.evals import runs
from tersekv.lab.evals.records import SHARED
from tersekv.recipe import Recipe

papers = benchmark("papers")
tables = papers.kvquant_tables
times = papers.kvquant
Corpus, Setting = tables.Corpus, times.Setting
Cell, Windows = tables.Cell, tables.Windows
TEXT = "Keys and values of a short text, again and again. " * 45


def written(tmp_path: Path) -> Path:
    """Return a data folder with one text."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text.txt").write_text(TEXT)
    return tmp_path / "data"


def test_equal_recipes_are_equal_texts() -> None:
    """Tables 11, 12, 14, 17 and 18 have the same rows under different labels, which are evaluated once."""
    cells = [cell for name in tables.EXPERIMENTS for cell in tables.EXPERIMENTS[name].cells]
    assert all(cell.recipe == str(Recipe.parse(cell.recipe)) for cell in cells)
    of = {name: {cell.recipe for cell in tables.EXPERIMENTS[name].cells} for name in tables.EXPERIMENTS}
    dense = {f"kvquant:bits={bits},outliers=0" for bits in (4, 2)} | {"kvquant:outliers=0"}
    assert all(dense <= of[f"table{n}"] for n in (11, 12, 13, 14, 17, 18, 19))
    assert {"kvquant:bits=4", "kvquant", "kvquant:bits=2"} <= of["table21"]


def test_unknown_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column '3 bit': choose from 2 bits; 3 bits; 4 bits"):
        tables.EXPERIMENTS["table9"].run(Setting("none", "float32", tmp_path, values=("3 bit",)))


def test_no_exact_token_means_a_calibration_with_the_first_token() -> None:
    for cell in tables.EXPERIMENTS["table13"].cells:
        assert cell.corpus.sinks == cell.sinks
        assert cell.corpus.name == "wikitext-2-16x2048" + ("" if cell.sinks else "-sinks0")
    assert len({cell.group for cell in tables.EXPERIMENTS["table13"].cells}) == 2


def test_windows_are_calibrated_scored_and_continued(tiny: str, tmp_path: Path) -> None:
    """Each number of exact tokens has its calibration and its records. A second run adds nothing."""
    cells = tuple(
        Cell(f"{sinks} exact", "2 bits", "kvquant:bits=2", Corpus("text.txt", 1, 48, sinks), "text.txt", 1024, sinks)
        for sinks in (0, 1)
    )
    experiment = Windows("Tiny", "How.", "Theirs.", cells=cells, samples=1)
    setting = Setting(tiny, "float32", tmp_path / "out" / "table", written(tmp_path))
    assert experiment.results(setting) == []
    experiment.run(setting)
    files = sorted((tmp_path / "out").rglob("records.jsonl"))
    lines = [path.read_text() for path in files]
    assert [len(text.splitlines()) for text in lines] == [5, 5]  # a header; the full cache and one recipe, two windows
    made = {Calibration.load(path).made.sinks for path in (tmp_path / "out" / "calibrations").rglob("*.safetensors")}
    assert made == {0, 1}
    other = Setting(tiny, "float32", tmp_path / "out" / "other table", setting.data)
    experiment.run(other)
    assert [path.read_text() for path in files] == lines
    results = experiment.results(other)
    assert [(r.row, r.metric, r.samples) for r in results] == [
        *((row, "perplexity", 2) for row in ("full cache", "0 exact", "1 exact")),
        *((row, "perplexity_ratio", 2) for row in ("0 exact", "1 exact")),
    ]
    by = {(r.row, r.metric): r for r in results}
    full, packed = (by[row, "perplexity"].mean for row in ("full cache", "1 exact"))
    assert by["1 exact", "perplexity_ratio"].mean == pytest.approx(packed / full)
    assert by["1 exact", "perplexity_ratio"].stderr is not None
    only = Setting(tiny, "float32", tmp_path / "out" / "table", setting.data, rows=("1 exact",))
    assert {r.row for r in experiment.results(only)} == {"full cache", "1 exact"}


def test_only_windows_that_all_rows_have_count(tmp_path: Path) -> None:
    """A stopped run has one more window of the first recipes."""
    cell = Cell("packed", "2 bits", "kivi:bits=2")
    experiment = Windows("T", "How.", "Theirs.", cells=(cell,))
    setting = Setting("m", "float32", tmp_path / "table")
    folder = tmp_path / "windows" / "m-float32" / "wikitext-2-16x2048-test_gptq_joined-2048"
    folder.mkdir(parents=True)
    options = {"context": 2048, "sinks": 1, "mode": "simulate"}
    made = [("full", 0, 1.0), ("kivi:bits=2", 0, 1.5), ("full", 1, 2.0)]
    fixed = {"task": "perplexity", "options": options, "model": "m", "seed": 0, "bits_per_element": 2.5, "bytes": 10}
    lines = [
        {**fixed, "recipe": recipe, "sample": f"{window}-abc", "metrics": {"nll": nll}} for recipe, window, nll in made
    ]
    (folder / "records.jsonl").write_text("".join(runs.written(lines, SHARED)))
    found = {(r.row, r.metric): r for r in experiment.results(setting)}
    assert found["packed", "perplexity_ratio"].mean == pytest.approx(2.718281828**0.5)
    assert found["full cache", "perplexity"].mean == pytest.approx(2.718281828)
    assert found["packed", "perplexity_ratio"].samples == 1
    assert found["packed", "perplexity_ratio"].wanted == 8


def test_times_of_thresholds_and_of_calibration(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "SHAPES", {"tiny": (64, 64, 32)})
    setting = Setting("none", "float32", tmp_path / "table15", samples=2, values=("1",))
    table = times.EXPERIMENTS["table15"]
    table.run(setting)
    found = table.results(setting)
    assert [r.column for r in found] == ["1 thread"] * 3
    assert all(0 < r.mean < 1e6 for r in found)
    lines = papers.lines_of("kvquant", "table15", setting, found)
    assert "microseconds" in papers.section("kvquant", "table15", lines).body
    table = times.EXPERIMENTS["table16"]
    setting = Setting(tiny, "float32", tmp_path / "table16", samples=2, options={"length": "48"})
    table.run(setting)
    found = table.results(setting)
    assert [r.row for r in found] == [
        "gradients of the loss, all layers, 2 × 48 tokens",
        *(f"{bits} bits, one layer" for bits in (4, 3, 2)),
    ]
    assert all(r.mean > 0 for r in found)
