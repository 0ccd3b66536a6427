"""Verdicts on the papers' claims: tests of differences, and what two of three models decide."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from conftest import benchmark

benchmark("pages")
from measured import claims, verdicts  # noqa: E402  (the folder of the benchmarks is on the path now)

BETTER = verdicts.Claim("kvquant", "Table 1", "a is better than b", "t", "a", "b", ("c",), "kl")
LESS = verdicts.Claim("kvquant", "Table 1", "a loses less than .1", "t", "a", "b", ("c",), "kl", 0.1)
WITHIN = dataclasses.replace(LESS, says="a and b are within .1", either=True)
RATIO = dataclasses.replace(LESS, metric="perplexity_ratio", margin=0.5)
RECALL = verdicts.Claim("kvquant", "Table 1", "a recalls more", "t", "a", "b", ("c",), "recall")
KEPT = verdicts.Claim("kvquant", "Table 1", "a finds as many, but 2 in 100", "t", "a", "b", ("c",), "accuracy", 0.02)
FOUND = verdicts.Claim("kvquant", "Table 1", "a finds more", "t", "a", "b", ("c",), "accuracy")


@pytest.mark.parametrize(
    ("t", "df", "p"), [(2.0, 7, 0.08562), (12.706, 1, 0.05), (3.182, 3, 0.05), (2.306, 8, 0.05), (0.0, 5, 1.0)]
)
def test_t_tail_is_that_of_tables(t: float, df: int, p: float) -> None:
    assert verdicts.t_tail(t, df) == pytest.approx(p, abs=2e-5)
    assert verdicts.t_tail(math.inf, df) == pytest.approx(0.0, abs=1e-9)


def test_signs_of_samples_that_differ_are_flipped() -> None:
    assert verdicts.flip_tail([0, 0, 1, 1, 1, 1, 1, 1]) == 2 / 64
    assert verdicts.flip_tail([1, -1, 0]) == 1.0
    assert verdicts.flip_tail([]) == 1.0
    assert verdicts.flip_tail([0.5, 0.25, 0.25, -0.25]) == 8 / 16


def test_few_losses_are_of_a_binomial_distribution() -> None:
    assert verdicts.few_tail(0, 33, 0.02) == pytest.approx(0.98**33)
    assert verdicts.few_tail(-1, 33, 0.02) == 0.0
    assert verdicts.few_tail(33, 33, 0.02) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("claim", "differences", "holds"),
    [
        (BETTER, [-0.3, -0.2, -0.25, -0.28], True),
        (BETTER, [0.3, 0.2, 0.25, 0.28], False),
        (BETTER, [-0.3, 0.2, -0.25, 0.28], None),
        (BETTER, [-0.3], None),
        (RATIO, [0.42, 0.41, 0.43, 0.42], False),  # logarithms: a margin of a half is 0.405
        (RATIO, [0.39, 0.38, 0.4, 0.39], True),
        (WITHIN, [0.01, -0.01, 0.02, 0.0], True),
        (WITHIN, [0.5, 0.52, 0.49, 0.51], False),
        (WITHIN, [-0.5, -0.52, -0.49, -0.51], False),
        (LESS, [-0.5, -0.52, -0.49, -0.51], True),  # much better is not a loss
        (LESS, [0.5, 0.52, 0.49, 0.51], False),
        (WITHIN, [0.0, 0.2, 0.1, 0.15], None),
        (FOUND, [1.0] * 6 + [0.0] * 4, True),
        (FOUND, [1.0] * 5 + [0.0] * 5, None),
        (FOUND, [-1.0] * 8, False),
        (KEPT, [0.0] * 33, None),  # a loss of 2 in 100 would often not be seen
        (KEPT, [0.0] * 148, None),
        (KEPT, [0.0] * 149, True),
        (KEPT, [0.0] * 149 + [-1.0], None),
        (KEPT, [0.0] * 20 + [-1.0] * 6, False),
        (RECALL, [0.5] * 6 + [-0.1] * 2, True),  # a sign test would not see it
    ],
)
def test_paired_samples(claim: Any, differences: list[float], holds: bool | None) -> None:
    assert verdicts.judged(claim, "m", differences).holds is holds


def _line(model: str, row: str, mean: float, stderr: float | None, values: tuple[float, ...] = ()) -> dict[str, Any]:
    return {
        "table": "t", "model": model, "row": row, "column": "c", "metric": "kl", "mean": mean, "stderr": stderr,
        "samples": 8, "wanted": 8, "values": values, "bits": 4.0,
    }  # fmt: skip


def test_two_of_three_models_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means with errors count as independent rows; samples are paired; without an error nothing is decided."""
    lines = [_line("one", "a", 0.1, 0.01), _line("one", "b", 0.5, 0.02)]
    monkeypatch.setattr(verdicts.papers, "read_lines", lambda paper: lines)
    assert verdicts.line(BETTER)[2:] == ["one: holds", "8", "-0.400 ± 0.022 u", "< .001", "**cannot say**"]
    lines += [_line("two", "a", 0.2, 0.1, (0.1, 0.2, 0.3)), _line("two", "b", 0.5, 0.1, (0.4, 0.51, 0.6))]
    lines += [_line("three", row, 0.1, 0.01) | {"samples": 7} for row in "ab"]  # too few
    assert verdicts.line(BETTER)[2:] == [
        "one: holds; two: holds", "8; 3", "-0.400 ± 0.022 u; -0.303 ± 0.003", "< .001; < .001", "**agrees**",
    ]  # fmt: skip
    lines[:] = [_line("one", "a", 0.1, None), _line("one", "b", 0.5, 0.02)]
    assert verdicts.line(BETTER)[2:] == ["one: open", "8", "-0.400", "–", "**cannot say**"]
    lines.clear()
    assert verdicts.line(BETTER)[-1] == "cannot say"


def test_layers_take_the_place_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's rows and metric have its name; more than half of the layers decide."""
    claim = dataclasses.replace(BETTER, first="a {name}", metric="ms of {size}", layers={"w": "1", "x": "2"})
    lines = [_line("m", "a w", 0.1, 0.01) | {"metric": "ms of 1, 2 threads"}]
    lines += [_line("m", "a x", 0.1, 0.01) | {"metric": "ms of 2, 2 threads"}]
    lines += [
        _line("m", "b", mean, 0.01) | {"metric": f"ms of {size}, 2 threads"} for size, mean in ((1, 0.5), (2, 0.2))
    ]
    monkeypatch.setattr(verdicts.papers, "read_lines", lambda paper: lines)
    assert verdicts.line(claim)[2:4] == ["w: holds; x: holds", "8; 8"]
    assert verdicts.line(claim)[-1] == "**agrees**"
    more = dataclasses.replace(claim, layers={"w": "1", "x": "2", "y": "3", "z": "4"})
    assert verdicts.line(more)[-1] == "**cannot say**"


def test_rows_of_unequal_bytes_are_left_out_where_a_claim_is_of_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [_line("one", "a", 0.1, 0.01), _line("one", "b", 0.5, 0.02) | {"bits": 6.1}]
    monkeypatch.setattr(verdicts.papers, "read_lines", lambda paper: lines)
    assert len(verdicts.differences(BETTER)) == 1
    assert verdicts.differences(dataclasses.replace(BETTER, same_bytes=True)) == []


def test_of_two_dtypes_the_one_with_more_samples_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [_line("one", "a", 0.1, 0.01), _line("one", "b", 0.5, 0.02)]
    lines += [_line("one", "a", 0.5, 0.01) | {"samples": 99}, _line("one", "b", 0.1, 0.02) | {"samples": 99}]
    monkeypatch.setattr(verdicts.papers, "read_lines", lambda paper: lines)
    assert verdicts.line(BETTER)[2:5] == ["one: fails", "99", "+0.400 ± 0.022 u"]


def test_claims_name_rows_that_their_experiments_have() -> None:
    for claim in [*(one for of in claims.CLAIMS.values() for one in of), *claims.PERPLEXITIES]:
        if not claim.experiment:
            continue
        experiment = verdicts.papers.PAPERS[claim.paper][1][claim.experiment]
        cells = {cell.row for cell in getattr(experiment, "cells", ()) if hasattr(cell, "row")}
        rows = cells | set(getattr(experiment, "rows", ()))
        recorded = {
            line["row"] for line in verdicts.papers.read_lines(claim.paper) if line["table"] == claim.experiment
        }
        for one in (verdicts.of_layer(claim, *layer) for layer in claim.layers.items() or [("", "")]):
            assert {one.first, one.second} <= rows | recorded | {verdicts.FULL}, one
