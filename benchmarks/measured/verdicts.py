"""Verdicts on claims of the papers: the difference of two rows of the records, its error, and what follows from it.

A row with the values of its samples is compared sample by sample. Older records have only means and standard errors;
their rows count as independent, which makes the error too large where both read the same samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import papers
from measured.base import MODELS, rows

ENOUGH_MODELS = 2
LEVEL = 0.05
HIGHER_IS_BETTER = ("accuracy", "recall")
"""Metrics that are shares of answers. Their differences are mostly 0, so samples are counted by a sign test."""
RELATIVE = ("perplexity", "ms", "seconds", "microseconds")
"""Metrics that are compared by their ratio."""
FULL = "full cache"
UNKNOWN = math.nan


@dataclass(frozen=True)
class Claim:
    """A statement of a paper about two rows of an experiment.

    - where: table or section of the paper. says: the statement.
    - experiment: of `papers.py`, "" if there is none, or a file of records of evaluations; then `columns` has its task,
      with options after semicolons, and the rows are recipes.
    - first, second: rows. The claim is that the first is better, or with a margin that they differ by less than it.
      A margin is a share of relative metrics.
    - columns: of the experiment; those that a model was not run with are left out. other: columns of the second row,
      if they differ.
    - more: the same claim in other records, for models that these lack.
    - of_layer: times of one layer of random numbers, which no other model changes, so that one line decides.
    """

    paper: str
    where: str
    says: str
    experiment: str = ""
    first: str = ""
    second: str = ""
    columns: tuple[str, ...] = ()
    metric: str = "perplexity_ratio"
    margin: float = 0.0
    other: tuple[str, ...] = ()
    more: tuple[Claim, ...] = ()
    of_layer: bool = False


@dataclass(frozen=True)
class Difference:
    """First row minus second row for one model; of relative metrics the logarithm of their ratio.

    stderr: NaN if it is not known. p: two-sided; with a margin, one-sided for the more likely side of it.
    """

    model: str
    n: int
    mean: float
    stderr: float
    p: float
    holds: bool | None
    paired: bool
    relative: bool


def t_tail(t: float, df: int) -> float:
    """Return the probability that |T| exceeds t, for Student's distribution.

    With T = √df · tan θ the density is proportional to cos^(df − 1) θ, which a sum integrates; a table of the
    distribution would be a dependency more.
    """
    theta = np.linspace(math.atan(abs(t) / math.sqrt(df)), math.pi / 2, 4001)
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2)) / 2
    density = np.cos(theta) ** (df - 1)
    return min(1.0, float(((density[1:] + density[:-1]) / 2 * np.diff(theta)).sum()) / whole)


def sign_tail(differences: Sequence[float]) -> float:
    """Return the two-sided probability of the signs of differences, those of 0 left out."""
    up, down = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return min(1.0, 2 * sum(math.comb(up + down, i) for i in range(min(up, down) + 1)) / 2 ** (up + down))


def judged(claim: Claim, model: str, differences: Sequence[float]) -> Difference:
    """Return the verdict of paired samples."""
    n, mean = len(differences), statistics.fmean(differences)
    stderr = statistics.stdev(differences) / math.sqrt(n) if n > 1 else UNKNOWN
    p = None
    if claim.metric in HIGHER_IS_BETTER and not claim.margin:
        p = sign_tail(differences)
    return _judged(claim, model, n, mean, stderr, n - 1, True, p)


def _judged(
    claim: Claim, model: str, n: int, mean: float, stderr: float, df: int, paired: bool, p: float | None = None
) -> Difference:
    relative = claim.metric.startswith(RELATIVE)
    beyond = mean if not claim.margin else abs(mean) - claim.margin
    if p is None:
        known, spread = math.isfinite(stderr) and df > 0, stderr
        if claim.metric in HIGHER_IS_BETTER:  # samples that all agree have no spread, but could have lost the margin
            spread = max(stderr, math.sqrt(claim.margin * (1 - claim.margin) / n))
        t = UNKNOWN if not known else beyond / spread if spread else math.copysign(math.inf, beyond) if beyond else 0.0
        p = UNKNOWN if math.isnan(t) else t_tail(t, df)
        if claim.margin:
            p = p / 2 if beyond < 0 else 1 - p / 2  # that the rows differ by more than the margin
    holds = None
    if claim.margin:
        holds = True if p < LEVEL else False if p > 1 - LEVEL else None
    elif p < LEVEL:
        holds = (mean > 0) == (claim.metric in HIGHER_IS_BETTER)
    return Difference(model, n, mean, stderr, min(p, 1 - p) if claim.margin else p, holds, paired, relative)


def differences(claim: Claim) -> list[Difference]:
    """Return the differences of all models with records, once per model, in the order of the records."""
    found: dict[str, Difference] = {}
    for one in (claim, *claim.more):
        for difference in _differences(one):
            found.setdefault(MODELS.get(difference.model, difference.model), difference)
    return list(found.values())


def _differences(claim: Claim) -> list[Difference]:
    if not claim.experiment:
        return []
    if claim.experiment.endswith(".jsonl"):
        return _of_evaluations(claim)
    lines = [line for line in papers.read_lines(claim.paper) if line["table"] == claim.experiment]
    models = dict.fromkeys(line["model"] for line in lines)
    found = (_of_lines(claim, model, [line for line in lines if line["model"] == model]) for model in models)
    return [difference for difference in found if difference is not None]


def _of_evaluations(claim: Claim) -> list[Difference]:
    task, *options = claim.columns[0].split(";")
    wanted = dict(option.split("=") for option in options)
    by_model: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows(claim.experiment):
        if row["task"] == task and all(str(row["options"].get(name)) == value for name, value in wanted.items()):
            name = "nll" if claim.metric == "perplexity_ratio" else claim.metric
            by_model.setdefault(row["model"], {}).setdefault(row["recipe"], {})[row["sample"]] = row["metrics"][name]
    found = []
    for model, recipes in by_model.items():
        first, second = recipes.get(claim.first, {}), recipes.get(claim.second, {})
        if common := [sample for sample in first if sample in second]:
            found.append(judged(claim, model, [first[sample] - second[sample] for sample in common]))
    return found


def _of_lines(claim: Claim, model: str, lines: Sequence[dict[str, Any]]) -> Difference | None:
    pairs = []
    for column, other in zip(claim.columns, claim.other or claim.columns, strict=True):
        first, second = _line(claim, lines, claim.first, column), _line(claim, lines, claim.second, other)
        if first is not None and second is not None:
            pairs.append((first, second))
    if not pairs:
        return None
    if not claim.other and all(line.get("values") for pair in pairs for line in pair):
        return judged(claim, model, [a - b for x, y in pairs for a, b in zip(x["values"], y["values"], strict=True)])
    relative = claim.metric.startswith(RELATIVE)
    means = [math.log(a["mean"] / b["mean"]) if relative else a["mean"] - b["mean"] for a, b in pairs]
    errors = [_error(line, relative) for pair in pairs for line in pair]
    stderr = math.hypot(*errors) / len(pairs)
    n = min(line["samples"] for pair in pairs for line in pair if line["samples"])
    return _judged(claim, model, n * len(pairs), statistics.fmean(means), stderr, n * len(pairs) - 1, False)


def _line(claim: Claim, lines: Sequence[dict[str, Any]], row: str, column: str) -> dict[str, Any] | None:
    """Return the line of a cell. The full cache's ratio to itself is 1 and has no line."""
    for line in lines:
        if (line["row"], line["column"]) == (row, column) and line["metric"].startswith(claim.metric):
            return line
    if row == FULL and claim.metric == "perplexity_ratio":
        for line in lines:
            if (line["row"], line["column"], line["metric"]) == (row, column, "perplexity"):
                return line | {"mean": 1.0, "stderr": 0.0}
    return None


def _error(line: dict[str, Any], relative: bool) -> float:
    if line["stderr"] is None:
        return UNKNOWN
    return line["stderr"] / line["mean"] if relative else line["stderr"]


def verdict(found: Sequence[Difference], enough: int = ENOUGH_MODELS) -> str:
    """Return "agrees" or "differs" if at least so many models say so, "cannot say" otherwise."""
    for said, holds in (("agrees", True), ("differs", False)):
        if sum(one.holds is holds for one in found) >= enough:
            return said
    return "cannot say"


def line(claim: Claim) -> list[str]:
    """Return the claim's line in the table of agreement, with a part per model in each cell."""
    found = differences(claim)
    if not found:
        return [claim.where, claim.says, "not run", "–", "–", "–", "cannot say"]
    names = ["one layer" if claim.of_layer else MODELS.get(one.model, one.model) for one in found]
    said = verdict(found, 1 if claim.of_layer else ENOUGH_MODELS)
    words = {True: "holds", False: "fails", None: "open"}
    models = "; ".join(f"{name}: {words[one.holds]}" for name, one in zip(names, found, strict=True))
    cells = [
        "; ".join(cell(one) for one in found) for cell in (lambda one: f"{one.n}", _difference, lambda one: _p(one.p))
    ]
    return [claim.where, claim.says, models, *cells, f"**{said}**"]


def _difference(one: Difference) -> str:
    mean, stderr, unit = one.mean, one.stderr, ""
    if one.relative:
        mean, unit = 100 * math.expm1(one.mean), " %"
        stderr = 100 * math.exp(one.mean) * one.stderr
    digits = 0 if abs(mean) >= 100 else 1 if unit else 3
    error = f" ± {stderr:.{digits}f}" if math.isfinite(stderr) else ""
    return f"{mean:+,.{digits}f}{error}{unit}{'' if one.paired or not error else ' u'}"


def _p(p: float) -> str:
    return "–" if math.isnan(p) else "< .001" if p < 0.001 else f"{p:.3f}".lstrip("0") if p < 0.9995 else "1"
