"""Records of benchmarks that time attention over a number of tokens (`tersekv bench attend --out`)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tersekv.plots.benchmarks import Benchmark

FIELDS = ("what", "shape", "T", "threads", "median_us")
ATTEND = Benchmark("bench_attend", "tersekv bench attend", "timing of attention", FIELDS, FIELDS[-1:])
OURS = "tersekv"


@dataclass(frozen=True)
class Timing:
    """One way of attending. shape: query heads/KV heads/head dim; bits: None for dense tensors. Times are µs; runs of
    the same thing are one timing, the median of theirs."""

    what: str
    bits: int | None
    shape: str
    tokens: int
    threads: int
    median_us: float
    p10_us: float
    p90_us: float

    @property
    def packed(self) -> bool:
        """Whether it reads packed bytes."""
        return self.bits is not None

    @property
    def name(self) -> str:
        """What a legend says."""
        return f"{self.what}, {self.bits} bits" if self.packed else self.what


def read_timings(paths: Sequence[Path]) -> list[Timing]:
    """Every timing in files of JSON lines, in order of first appearance.

    Raises:
        UserError: no file, or records of something else.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in ATTEND.read(paths):
        found[row["what"], row.get("bits"), row["shape"], row["T"], row["threads"]].append(row)
    return [
        Timing(*key, *(median(row.get(name, row["median_us"]) for row in rows) for name in ("median_us", "p10", "p90")))
        for key, rows in found.items()
    ]


def machine(paths: Sequence[Path]) -> str:
    """The machines that the records name, with what their kernels were built for."""
    rows = [json.loads(line) for path in paths for line in ATTEND.lines(path)]
    return "; ".join(dict.fromkeys(", ".join(str(r[k]) for k in ("cpu", "isa") if r.get(k)) for r in rows))
