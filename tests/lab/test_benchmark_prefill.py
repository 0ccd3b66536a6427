"""The benchmark of packing within a prefill, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import benchmark
from tersekv.lab.evals import runs


def test_all_parts_write_records(tiny: str, tmp_path: Path) -> None:
    driver, out = benchmark("prefill"), tmp_path / "records" / "prefill.jsonl"
    threads = torch.get_num_threads()
    recipes = ["--recipes", "trellis:bits=3,calibration=prompt", "kivi:bits=4", "mixed:rest=2+kivi:bits=4"]
    options = ["--tokens", "300", "--dtypes", "float32", "--rounds", "2", "--threads", "1"]
    try:
        driver.main(["--model", tiny, "--out", str(out), *options, *recipes])
    finally:
        torch.set_num_threads(threads)
    rows = runs.read(out)
    assert {row["model"] for row in rows if row["what"] == "prefill"} == {tiny}
    full, *others = (row for row in rows if row["what"] == "prefill")
    assert full["share"] == 0
    assert all(0 < row["packing_seconds"] < row["seconds"] for row in others)
    assert [row["ranking_share"] > 0 for row in others if "ranking_share" in row] == [True]
    assert [row["recipe"] for row in rows if row["what"] == "memory"] == recipes[1:3]
    assert all(row["peak_over_held"] > 0.5 for row in rows if row["what"] == "memory")
    assert [row["what"] for row in rows].count("block") == 2
    wide = next(row for row in rows if row.get("head_dim") == 128 and row["what"] == "vectors")
    (estimate,) = (row for row in rows if row["what"] == "estimate")
    assert estimate["us_per_token"] == pytest.approx(512 * wide["us_per_vector"], rel=0.01)
