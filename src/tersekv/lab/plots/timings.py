"""Records of benchmarks that time attention over a number of tokens (`tersekv bench attend --out`)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tersekv.lab.plots.benchmarks import Benchmark

FIELDS = ("what", "shape", "T", "threads", "median_us")
ATTEND = Benchmark("bench_attend", "tersekv bench attend", "timing of attention", FIELDS, FIELDS[-1:])
OURS = "tersekv"


@dataclass(frozen=True)
class Timing:
    """One way of attending. shape: query heads/KV heads/head dim; bits: None for dense tensors. Times are µs; runs of
    the same thing are one timing, the median of theirs. name: what a legend says."""

    what: str
    bits: float | None
    shape: str
    tokens: int
    threads: int
    median_us: float
    p10_us: float
    p90_us: float
    name: str = ""

    @property
    def packed(self) -> bool:
        """Whether it reads packed bytes."""
        return self.bits is not None


def read_timings(paths: Sequence[Path]) -> list[Timing]:
    """Every timing in files of JSON lines, in order of first appearance.

    Raises:
        UserError: no file, or records of something else.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in ATTEND.read(paths):
        found[row["what"], row.get("bits"), row["shape"], row["T"], row["threads"]].append(row)
    names = _names(list(found))
    made = []
    for key, rows in found.items():
        middle, p10, p90 = (
            median(row.get(field, row["median_us"]) for row in rows) for field in ("median_us", "p10", "p90")
        )
        what, bits, shape, tokens, threads = key
        made.append(Timing(what, bits, shape, tokens, threads, middle, p10, p90, names[key]))
    return made


def _names(keys: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], str]:
    """What a legend calls each key (what, bits, shape, tokens, threads).

    A format is one line whose bits may vary with shape and length. Only where one name stands for several formats, as
    in older records, bits are told apart."""
    names = {}
    for what in dict.fromkeys(key[0] for key in keys):
        own = [key for key in keys if key[0] == what]
        several = len({key[2:] for key in own}) < len(own)
        bits = sorted({key[1] for key in own if key[1] is not None})
        for key in own:
            of = [key[1]] if several and key[1] is not None else bits
            names[key] = f"{what}, {_range(of)} bits" if of else what
    return names


def _range(bits: Sequence[float]) -> str:
    """4 or, rounded, 4.24–4.4."""
    low, high = (f"{round(end, 2):g}" for end in (bits[0], bits[-1]))
    return low if low == high else f"{low}–{high}"


def machine(paths: Sequence[Path]) -> str:
    """The machines that the records name, with what their kernels were built for."""
    rows = [json.loads(line) for path in paths for line in ATTEND.lines(path)]
    return "; ".join(dict.fromkeys(", ".join(str(r[k]) for k in ("cpu", "isa") if r.get(k)) for r in rows))
