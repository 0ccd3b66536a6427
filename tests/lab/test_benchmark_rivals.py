"""The benchmark of OSCAR and KVarN beside other methods: its tables and the pages made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import benchmark

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/methods/kvarn.md", "docs/methods/oscar.md")


def record(task: str, sample: str, recipe: str, metrics: dict[str, float]) -> str:
    """Return a line of a file of records."""
    options = {"text": "test.txt", "context": 2304} if task == "divergence" else {"lengths": "2k"}
    about = {"task": task, "options": options, "sample": sample, "recipe": recipe, "metrics": metrics, "details": {}}
    numbers = {"tokens": 2304, "bits_per_element": 4.0, "bytes": 1, "seconds": 1.0, "bytes_by_part": {}}
    return json.dumps(about | numbers | {"model": "smollm2", "seed": 0})


def test_tables_are_made_from_records(tmp_path: Path) -> None:
    driver, lines = benchmark("rivals"), []
    for sample, kl in (("0", 0.1), ("1", 0.3)):
        for recipe in ("full", "kvarn:bits=2", "oscar:bits=2"):
            near = {"kl": kl, "top1_agreement": 0.5, "kl_p99": 10 * kl, "nll": 1.0}
            lines.append(record("divergence", sample, recipe, near))
            if recipe != "oscar:bits=2":
                lines.append(record("passkey", sample, recipe, {"accuracy": float(sample), "gold_nll": 0.25}))
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    begin, end = driver.BEGIN.format("2 bits"), driver.END.format("2 bits")
    made = driver.filled(f"before\n{begin}\nold\n{end}\nafter", [tmp_path / "records.jsonl"])
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
    driver, page = benchmark("rivals"), (ROOT / name).read_text(encoding="utf-8")
    assert driver.filled(page, [ROOT / "benchmarks" / "records" / "rivals.jsonl"]) == page
    assert page.count("made by benchmarks/rivals.py") >= 1
