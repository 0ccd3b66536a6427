"""Experiments of QJL and PolarQuant: the times of one layer, and recipes that have the bits they are chosen for."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import benchmark
from tersekv.recipe import Recipe

ours = benchmark("experiments/qjl")
polar = benchmark("experiments/polarquant")
papers = benchmark("papers")


def bits(recipe: str, layers: int = 30, head_dim: int = 64) -> float:
    """Return the mean bits of keys and values over the layers, without exact tokens."""
    plans = [Recipe.parse(recipe).plan(layer, layers) for layer in range(layers)]
    codecs = [codec for plan in plans for codec in (plan.keys, plan.values)]
    return sum(codec.true_bits(head_dim) for codec in codecs) / len(codecs)


def test_times_of_one_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cache is timed at every length, in the same run, and holds less than 16 bits if the text is long."""
    monkeypatch.setattr(ours, "SHAPES", {"tiny (2/1/32)": (2, 1, 32)})
    setting = ours.Setting("tiny", "bfloat16", tmp_path, values=("256", "2k"), options={"rounds": "1", "steps": "2"})
    experiment = ours.EXPERIMENTS["figure3"]
    experiment.run(setting)
    found = experiment.results(setting)
    assert len(found) == len(ours.TIMED) * 2 * 2
    assert {(r.row, r.column) for r in found} == {(label, text) for label in ours.TIMED for text in ("256", "2k")}
    assert len({r.metric for r in found}) == 2
    assert all(r.mean > 0 for r in found)
    held = {r.row: r.bits for r in found if r.column == "2k"}
    assert held.pop("exact") == pytest.approx(16)
    assert held.pop("exact, our kernels") == pytest.approx(16, rel=0.05)
    assert all(3 < bits < 9 for bits in held.values())
    assert "exact" in papers.section("qjl", "figure3", papers.lines_of("qjl", "figure3", setting, found)).body


def test_times_stop_when_the_hours_are_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "SHAPES", {"tiny (2/1/32)": (2, 1, 32)})
    setting = ours.Setting("tiny", "float32", tmp_path, values=("256",), hours=0)
    assert ours.layer_times(setting) == []


def test_rows_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "SHAPES", {"tiny (2/1/32)": (2, 1, 32)})
    options = {"rounds": "1", "steps": "1"}
    setting = ours.Setting("tiny", "float32", tmp_path, values=("256",), rows=("exact", "QJL"), options=options)
    assert {r.row for r in ours.layer_times(setting)} == {"exact", "QJL"}


def test_like_for_like_compares_equal_bits() -> None:
    rows = ours.EXPERIMENTS["like-for-like"].rows
    assert {name: round(bits(rows[name]), 2) for name in rows if "3.00 bits" in name} == {
        name: 3.0 for name in rows if "3.00 bits" in name
    }
    assert bits(rows["default"]) == pytest.approx(3.24, abs=0.005)
    assert bits(rows["PolarQuant, full recursion"]) == 3.25


@pytest.mark.parametrize(
    ("recipe", "large", "small"),
    [
        ("qjl", 3.86, 4.00),
        ("qjl:outliers_per=group", 3.87, 4.02),
        ("qjl:outliers=0", 3.03, 3.13),
        ("qjl:sketch=128,outlier_sketch=224,initial_layers=0", 3.00, None),
        ("qjl:sketch=64,outlier_sketch=96,initial_layers=0", None, 3.00),
        ("kivi:bits=2", 3.00, 3.00),
    ],
)
def test_mean_bits_of_the_documentation(recipe: str, large: float | None, small: float | None) -> None:
    """Means of keys and values over 32 layers with head dim 128, and over 30 with 64: docs/methods/rotations.md."""
    for expected, layers, head_dim in ((large, 32, 128), (small, 30, 64)):
        if expected is not None:
            assert bits(recipe, layers, head_dim) == pytest.approx(expected, abs=0.0055)


@pytest.mark.parametrize(("levels", "head_dim", "formula", "held"), [(6, 64, 16 + 63 * 3, 208), (7, 128, 397, 400)])
def test_the_full_recursion_at_three_bits(levels: int, head_dim: int, formula: int, held: int) -> None:
    """The paper's formula b_FPN + (d − 1)·b, and our bits: codes end at a whole byte."""
    recipe = f"polarquant:bits={'-'.join('3' * levels)}"
    assert bits(recipe, 1, head_dim) == held / head_dim
    assert 0 <= held - formula < 8


def test_recipes_of_the_experiments_parse() -> None:
    for paper in ("qjl", "polarquant"):
        for experiment in papers.PAPERS[paper][1].values():
            for recipe in getattr(experiment, "rows", {}).values():
                assert Recipe.parse(recipe).plan(0, 30)
    assert polar.EXPERIMENTS["recursion"].count == "windows"
