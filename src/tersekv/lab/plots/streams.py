"""Read records of benchmarks that feed a long stream to a cache (`benchmarks/streams.py growth`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tersekv.lab.plots.benchmarks import Benchmark

FIELDS = ("recipe", "context_tokens", "bytes", "step_microseconds")
COMMAND = "python benchmarks/streams.py growth"
SUBGEN = Benchmark("subgen", COMMAND, "step of a stream", (*FIELDS, "relative_error"), FIELDS[1:])


@dataclass(frozen=True)
class StreamStep:
    """A recipe's cache after `tokens` tokens. Repeated runs are merged into their median.

    bytes: size. step_us: time of one more token and its attention, in µs. error: relative error of
    attention.
    """

    recipe: str
    tokens: int
    bytes: float
    step_us: float
    error: float


def read_streams(paths: Sequence[Path]) -> list[StreamStep]:
    """Return every step in the files: recipes in order of first appearance, steps by tokens.

    Raises:
        UserError: no file is given, or the files hold other records.
    """
    rows = SUBGEN.read(paths)
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    steps = []
    for recipe in recipes:
        for tokens in sorted({row["context_tokens"] for row in rows if row["recipe"] == recipe}):
            same = [row for row in rows if (row["recipe"], row["context_tokens"]) == (recipe, tokens)]
            middle = (median(row[name] for row in same) for name in ("bytes", "step_microseconds", "relative_error"))
            steps.append(StreamStep(recipe, tokens, *middle))
    return steps
