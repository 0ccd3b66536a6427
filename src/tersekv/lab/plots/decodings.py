"""Records of `tersekv bench generate`: tokens per second of a cache after so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tersekv.lab.plots.benchmarks import Benchmark

FIELDS = ("model", "cache", "depth", "rates")
GENERATE = Benchmark("generate", "tersekv bench generate", "timing of decoding", (*FIELDS, "tokens_per_second"), ())


class Rate(NamedTuple):
    """Tokens per second of one cache at one depth: the median of all rounds, the slowest and the fastest."""

    model: str
    cache: str
    depth: int
    middle: float
    low: float
    high: float


def read_decodings(paths: Sequence[Path]) -> list[Rate]:
    """Every cache and depth in files of JSON lines, in order of first appearance; runs of the same are one.

    Raises:
        UserError: no file, or records of something else.
    """
    found: dict[tuple[str, str, int], list[float]] = {}
    for row in GENERATE.read(paths):
        found.setdefault((row["model"], row["cache"], row["depth"]), []).extend(row["rates"])
    return [Rate(*key, median(rates), min(rates), max(rates)) for key, rates in found.items()]
