"""Verdicts on claims of the papers: the difference of two rows of the records, its error, and what follows from it.

A row with the values of its samples is compared sample by sample. Older records have only means and standard errors;
their rows count as independent, which makes the error too large where both read the same samples.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import papers
from measured.base import MODELS

ENOUGH_MODELS = 2
LEVEL = 0.05
HIGHER_IS_BETTER = ("accuracy", "recall")
"""Metrics that are shares of answers. Their differences are mostly 0, so p is of flipped signs, not Student's."""
RELATIVE = ("perplexity", "ms", "seconds", "microseconds")
"""Metrics that are compared by their ratio."""
SAME_BYTES = 1.5
FULL = papers.FULL
UNKNOWN = math.nan


@dataclass(frozen=True)
class Claim:
    """A statement of a paper about two rows of an experiment.

    - where: table or section of the paper. says: the statement.
    - experiment: of `papers.py`, "" if there is none.
    - first, second: rows. The claim is that the first is better, or with a margin that it is worse by less than that.
      A margin is a share of relative metrics.
    - columns: of the experiment; those that a model was not run with are left out. other: columns of the second row,
      if they differ.
    - either: with a margin, the first row is neither worse nor better by more.
    - same_bytes: leave out models on which the rows' bytes differ by more than a factor of `SAME_BYTES`.
    - layers: names and sizes of layers of random numbers, which take the place of models. Rows and metric name both.
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
    either: bool = False
    other: tuple[str, ...] = ()
    same_bytes: bool = False
    layers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """First row minus second row for one model; of relative metrics the logarithm of their ratio.

    stderr: NaN if it is not known. p: two-sided; with a margin, of what `holds` says, or of True if that is None.
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


def flip_tail(differences: Sequence[float]) -> float:
    """Return the two-sided probability of a sum of differences if each had either sign by chance.

    For answers that are right or wrong, this is the sign test.
    """
    sums = {0.0: 1.0}
    for one in filter(None, differences):
        flipped: dict[float, float] = {}
        for total, p in sums.items():
            for moved in (round(total + one, 6), round(total - one, 6)):
                flipped[moved] = flipped.get(moved, 0.0) + p / 2
        sums = flipped
    observed = abs(sum(differences)) - 1e-5
    return min(1.0, sum(p for total, p in sums.items() if abs(total) >= observed))


def few_tail(found: int, n: int, share: float) -> float:
    """Return the probability of at most `found` of n samples, each with the probability `share`."""
    return sum(math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(found + 1))


def judged(claim: Claim, model: str, differences: Sequence[float]) -> Difference:
    """Return the verdict of paired samples."""
    n, mean = len(differences), statistics.fmean(differences)
    stderr = statistics.stdev(differences) / math.sqrt(n) if n > 1 else UNKNOWN
    return _judged(claim, model, n, mean, stderr, differences)


def _judged(
    claim: Claim, model: str, n: int, mean: float, stderr: float, paired: Sequence[float] | None = None
) -> Difference:
    """paired: differences of the samples, None if only means are known."""
    answers = claim.metric in HIGHER_IS_BETTER
    holds: bool | None = None
    if not claim.margin:
        p = flip_tail(paired) if answers and paired is not None else _two_sided(mean, stderr, n)
        if p < LEVEL:
            holds = (mean > 0) is answers
    else:
        p, fails = _margin(claim, n, mean, stderr, answers, paired)
        if p < LEVEL or fails < LEVEL:
            holds, p = p < LEVEL, min(p, fails)
    return Difference(model, n, mean, stderr, p, holds, paired is not None, relative=claim.metric.startswith(RELATIVE))


def _margin(
    claim: Claim, n: int, mean: float, stderr: float, answers: bool, paired: Sequence[float] | None
) -> tuple[float, float]:
    """Return the probabilities of the samples if a margin is just exceeded, and if it is just kept.

    Answers that are all equal have no spread. So it is at least that of a loss of the margin, and the lost answers must
    be as few, or as many, as a binomial distribution allows.
    """
    worse, margin = -mean if answers else mean, claim.margin
    if claim.metric.startswith(RELATIVE):  # the means are logarithms
        margin = math.log1p(claim.margin if worse > 0 or not claim.either else -claim.margin)
    worse, margin = (abs(worse), abs(margin)) if claim.either else (worse, margin)
    floor = math.sqrt(margin * (1 - margin) / n) if answers else 0.0
    p = _two_sided(worse - margin, stderr or floor if paired is None else max(stderr, floor), n) / 2
    holds, fails = (p, 1 - p) if worse < margin else (1 - p, p)
    if answers and paired is not None:
        lost = -sum(min(one, 0.0) for one in paired)
        lost = max(lost, lost + sum(paired)) if claim.either else lost
        holds = max(holds, few_tail(math.ceil(lost - 1e-6), n, margin))
        fails = max(fails, 1 - few_tail(math.floor(worse * n + 1e-6) - 1, n, margin))
    return holds, min(1.0, 2 * fails) if claim.either else fails


def _two_sided(mean: float, stderr: float, n: int) -> float:
    """Return the two-sided probability of a mean of n samples by Student's distribution."""
    if not math.isfinite(stderr) or n < 2:
        return UNKNOWN
    return t_tail(mean / stderr if stderr else math.copysign(math.inf, mean) if mean else 0.0, n - 1)


def differences(claim: Claim) -> list[Difference]:
    """Return the differences of all models, or layers, with enough samples."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for line in papers.read_lines(claim.paper):
        if line["table"] == claim.experiment:
            by_model.setdefault(MODELS.get(line["model"], line["model"]), []).append(line)
    if claim.layers:
        lines = [line for found in by_model.values() for line in found]
        layers = {name: of_layer(claim, name, size) for name, size in claim.layers.items()}
        return [found for name, one in layers.items() if (found := _of_lines(one, name, lines)) is not None]
    names = sorted(by_model, key=lambda name: [*MODELS.values(), name].index(name))
    return [found for name in names if (found := _of_lines(claim, name, by_model[name])) is not None]


def of_layer(claim: Claim, name: str, size: str) -> Claim:
    """Return the claim about one of its layers."""
    first, second, metric = (text.format(name=name, size=size) for text in (claim.first, claim.second, claim.metric))
    return replace(claim, first=first, second=second, metric=metric)


def _of_lines(claim: Claim, model: str, lines: Sequence[dict[str, Any]]) -> Difference | None:
    pairs = []
    for column, other in zip(claim.columns, claim.other or claim.columns, strict=True):
        first, second = _line(claim, lines, claim.first, column), _line(claim, lines, claim.second, other)
        if first and second and all(one["samples"] >= min(papers.FEWEST, one["wanted"]) for one in (first, second)):
            pairs.append((first, second))
    if not pairs or (claim.same_bytes and any(_unequal(a["bits"], b["bits"]) for a, b in pairs)):
        return None
    if all(a.get("values") and len(a["values"]) == len(b["values"]) for a, b in pairs) and not claim.other:
        return judged(claim, model, [a - b for x, y in pairs for a, b in zip(x["values"], y["values"], strict=True)])
    relative = claim.metric.startswith(RELATIVE)
    means = [math.log(a["mean"] / b["mean"]) if relative else a["mean"] - b["mean"] for a, b in pairs]
    errors = [_error(line, relative) for pair in pairs for line in pair]
    stderr = math.hypot(*errors) / len(pairs)
    n = sum(min(line["samples"] for line in pair) for pair in pairs)
    return _judged(claim, model, n, statistics.fmean(means), stderr)


def _unequal(a: float, b: float) -> bool:
    return max(a, b) > SAME_BYTES * min(a, b)


def _line(claim: Claim, lines: Sequence[dict[str, Any]], row: str, column: str) -> dict[str, Any] | None:
    """Return the line of a cell, of several dtypes the one with the most samples. The full cache's ratio to itself is 1
    and has no line."""
    cell = [x for x in lines if (x["row"], x["column"]) == (row, column) and x["metric"].startswith(claim.metric)]
    if cell:
        return max(cell, key=lambda line: line["samples"])
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
    """Return "agrees" or "differs" if at least so many models, or layers, say so, "cannot say" otherwise."""
    for said, holds in (("agrees", True), ("differs", False)):
        if sum(one.holds is holds for one in found) >= enough:
            return said
    return "cannot say"


def line(claim: Claim) -> list[str]:
    """Return the claim's line in the table of agreement, with a part per model in each cell."""
    found = differences(claim)
    if not found:
        return [claim.where, claim.says, "not run, or too few samples", "–", "–", "–", "cannot say"]
    said = verdict(found, max(ENOUGH_MODELS, len(claim.layers) // 2 + 1))
    words = {True: "holds", False: "fails", None: "open"}
    models = "; ".join(f"{one.model}: {words[one.holds]}" for one in found)
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
