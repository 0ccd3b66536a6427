"""Studies of methods side by side: tables from records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import benchmark
from tersekv.lab.evals import runs
from tersekv.lab.evals.records import SHARED


def record(task: str, sample: str, recipe: str, metrics: dict[str, float]) -> dict[str, Any]:
    """Return a record."""
    options = {"text": "test.txt", "context": 2304} if task == "divergence" else {"lengths": "2k"}
    about = {"task": task, "options": options, "sample": sample, "recipe": recipe, "metrics": metrics, "details": {}}
    numbers = {"tokens": 2304, "bits_per_element": 4.0, "bytes": 1, "seconds": 1.0, "bytes_by_part": {}}
    return about | numbers | {"model": "smollm2", "seed": 0}


def test_tables_are_made_from_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver, lines = benchmark("studies"), []
    for sample, kl in (("0", 0.1), ("1", 0.3)):
        for recipe in ("full", "kvarn:bits=2", "oscar:bits=2"):
            near = {"kl": kl, "top1_agreement": 0.5, "kl_p99": 10 * kl, "nll": 1.0}
            lines.append(record("divergence", sample, recipe, near))
            if recipe != "oscar:bits=2":
                lines.append(record("passkey", sample, recipe, {"accuracy": float(sample), "gold_nll": 0.25}))
    (tmp_path / "records.jsonl").write_text("".join(runs.written(lines, SHARED)))
    driver.main(["rivals", "--records", str(tmp_path / "records.jsonl")])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [
        ["`oscar:bits=2`", "2.57", "0.2000 ± 0.1000", "2.00 ± 1.00", "0.500", ""],
        ["`kvarn:bits=2`", "2.67", "0.2000 ± 0.1000", "2.00 ± 1.00", "0.500", "0.5 (0.25)"],
    ]
