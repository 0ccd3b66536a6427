"""Studies of methods side by side: tables from records, and the pages made from them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from conftest import benchmark
from tersekv.lab.evals import runs
from tersekv.lab.evals.records import SHARED

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"docs/all-recipes.md": ("recipes", "recipes")}
"""Study and file of records by page."""
SPEEDS = ROOT / "benchmarks" / "records" / "generate_bfloat16.jsonl"


def record(task: str, sample: str, recipe: str, metrics: dict[str, float]) -> dict[str, Any]:
    """Return a record."""
    options = {"text": "test.txt", "context": 2304} if task == "divergence" else {"lengths": "2k"}
    about = {"task": task, "options": options, "sample": sample, "recipe": recipe, "metrics": metrics, "details": {}}
    numbers = {"tokens": 2304, "bits_per_element": 4.0, "bytes": 1, "seconds": 1.0, "bytes_by_part": {}}
    return about | numbers | {"model": "smollm2", "seed": 0}


def test_tables_are_made_from_records(tmp_path: Path) -> None:
    driver, lines = benchmark("studies"), []
    for sample, kl in (("0", 0.1), ("1", 0.3)):
        for recipe in ("full", "kvarn:bits=2", "oscar:bits=2"):
            near = {"kl": kl, "top1_agreement": 0.5, "kl_p99": 10 * kl, "nll": 1.0}
            lines.append(record("divergence", sample, recipe, near))
            if recipe != "oscar:bits=2":
                lines.append(record("passkey", sample, recipe, {"accuracy": float(sample), "gold_nll": 0.25}))
    (tmp_path / "records.jsonl").write_text("".join(runs.written(lines, SHARED)))
    begin, end = benchmark("recorded").marks("studies.py", "2 bits")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter")
    driver.main(["rivals", "--records", str(tmp_path / "records.jsonl"), "--into", str(page)])
    made = page.read_text()
    assert "old" not in made
    assert made.startswith("before\n")
    assert made.endswith("\nafter")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in made.splitlines()[4:-2]]
    assert rows == [
        ["`kvarn:bits=2`", "2.67", "0.2000 ± 0.1000", "2.00 ± 1.00", "0.500", "0.5 (0.25)"],
        ["`oscar:bits=2`", "2.57", "0.2000 ± 0.1000", "2.00 ± 1.00", "0.500", ""],
    ]


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_those_of_the_records(name: str) -> None:
    driver, page, (study, records) = benchmark("studies"), (ROOT / name).read_text(encoding="utf-8"), PAGES[name]
    found = driver.summaries([ROOT / "benchmarks" / "records" / f"{records}.jsonl"], "smollm2")
    tables = driver.tables(study, found, argparse.Namespace(speeds=SPEEDS, dtype="bfloat16"), "smollm2")
    assert benchmark("recorded").filled(page, "studies.py", tables) == page
    assert "made by benchmarks/studies.py" in page
