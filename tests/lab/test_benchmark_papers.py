"""The driver of the papers' tables: resumable runs, tables that say what is left out, pages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conftest import benchmark
from tersekv.errors import UserError
from tersekv.lab.evals import runs

ROWS = {"KIVI": "window:sinks=0,recent=0,start=0+kivi:bits=2,group=16", "float": "exact"}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load benchmarks/papers.py, which imports its neighbours."""
    folder = str(Path(__file__).resolve().parents[2] / "benchmarks")
    monkeypatch.syspath_prepend(folder)
    return benchmark("papers")


@pytest.fixture
def parts(driver: ModuleType) -> ModuleType:
    """Return the module of experiments that the driver uses."""
    return sys.modules["experiments.base"]


def passkey(parts: ModuleType, **options: Any) -> Any:
    return parts.Questions(
        "Passkeys", "How.", "Theirs.", options={"pack": "after-prompt"}, values=("600", "64k"), rows=ROWS, **options
    )


def test_run_continues_in_rounds_and_says_what_is_left_out(
    driver: ModuleType, parts: ModuleType, tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = passkey(parts, samples=3)
    setting = parts.Setting(tiny, "float32", tmp_path, samples=2)
    experiment.run(setting)
    said = capsys.readouterr().out
    assert "64k is left out" in said
    (folder,) = [path.parent for path in tmp_path.rglob("records.jsonl")]
    lines = runs.read(folder / "records.jsonl")
    assert len(lines) == 2 * 3
    assert {line["options"]["pack"] for line in lines} == {"after-prompt"}
    results = experiment.results(setting)
    assert [(r.row, r.column, r.samples, r.wanted) for r in results] == [
        (row, "600", 2, 3) for row in ("full cache", "KIVI", "float")
    ]
    table = driver.tables(driver.lines_of("qjl", "x", setting, results))
    assert "2 of 3 samples per cell" in table
    assert "| full cache | n = 2 | 32.00 |" in table  # too few samples for a result
    experiment.run(parts.Setting(tiny, "float32", tmp_path))
    again = runs.read(folder / "records.jsonl")
    assert again[:6] == lines
    assert len(again) == 9


def test_run_stops_when_its_hours_are_used_up(parts: ModuleType, tiny: str, tmp_path: Path) -> None:
    setting = parts.Setting(tiny, "float32", tmp_path, hours=0.0)
    with pytest.raises(parts.OutOfTimeError):
        passkey(parts).run(setting)
    assert passkey(parts).results(setting) == []


def test_only_samples_that_all_rows_have_count(parts: ModuleType, tiny: str, tmp_path: Path) -> None:
    experiment, setting = passkey(parts, samples=2), parts.Setting(tiny, "float32", tmp_path)
    experiment.run(setting)
    (path,) = tmp_path.rglob("records.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert {r.samples for r in experiment.results(setting)} == {1}


def test_unknown_rows_and_missing_data_are_refused(parts: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no row 'KIVY': choose from KIVI; float"):
        passkey(parts).run(parts.Setting("none", "float32", tmp_path, rows=("KIVY",)))
    with pytest.raises(UserError, match=r"this experiment reads a\.txt: give the folder that holds it with --data"):
        parts.Setting("none", "float32", tmp_path).text("a.txt")


def test_tables_with_many_columns_are_turned(driver: ModuleType, parts: ModuleType) -> None:
    results = [parts.Result("full", f"task {i}", "accuracy", i / 10, 0.01, 5, 5, 16.0) for i in range(8)]
    table = driver.tables(driver.lines_of("qjl", "x", parts.Setting("m", "bfloat16", Path()), results)).splitlines()
    assert table[0] == "accuracy: m in bfloat16, 5 samples per cell."
    assert table[2] == "|  | full |"
    assert table[5] == "| task 1 | 0.100 ± 0.01 |"
    assert table[-1] == "| true bits | 16.00 |"


def test_records_of_a_column_are_replaced(
    driver: ModuleType, parts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "RECORDS", tmp_path / "records")
    setting = parts.Setting("m", "float32", Path())
    for table, *means in (("table2", 0.25, 0.75), ("table2", 0.5), ("table9", 0.125)):
        results = [
            parts.Result("full", column, "accuracy", mean, None, 1, 50)
            for column, mean in zip(("2k", "4k"), means, strict=False)
        ]
        driver.keep("kvquant", table, driver.lines_of("kvquant", table, setting, results))
    lines = [line for line in driver.read_lines("kvquant") if line["table"] == "table2"]
    assert [(line["column"], line["mean"]) for line in lines] == [("2k", 0.5), ("4k", 0.75)]
    assert len(driver.read_lines("kvquant")) == 3
    assert driver.ran(lines) == "m, float32, 1 of 50 samples per cell"
    given = {"command": "papers.py kvquant table2 --model m --print --record"}
    made = str(driver.section("kvquant", "table2", [line | given for line in lines]))
    assert made.startswith("## Table 2: ")
    assert "| full | n = 1 | n = 1 |" in made
    assert "python benchmarks/papers.py kvquant table2 --model m\n" in made
    never = str(driver.section("kvquant", "table2", []))
    assert "Not run." in never
    assert "python benchmarks/papers.py kvquant table2 --out out --data data" in never


def test_two_metrics_share_a_table(driver: ModuleType, parts: ModuleType) -> None:
    setting = parts.Setting("m", "float32", Path())
    results = [
        parts.Result("full", "2k", "perplexity", 19.5),
        parts.Result("packed", "2k", "perplexity", 20.5),
        parts.Result("packed", "2k", "perplexity_ratio", 1.051, 0.002),
    ]
    made = driver.tables(driver.lines_of("kvquant", "x", setting, results)).splitlines()
    assert made[0] == "perplexity, in brackets perplexity / full: m in float32."
    assert made[4:] == ["| full | 19.50 |", "| packed | 20.50 (1.051 ± 0.002) |"]
