"""Read records of benchmarks that time attention by number of tokens (`tersekv bench attend
--out`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tersekv.errors import UserError
from tersekv.lab.plots.benchmarks import Benchmark

FIELDS = ("what", "shape", "T", "threads", "median_us")
ATTEND = Benchmark("bench_attend", "tersekv bench attend", "timing of attention", FIELDS, FIELDS[-1:])


@dataclass(frozen=True)
class Timing:
    """Timing of one attention implementation.

    - shape: query heads/KV heads/head dim.
    - bits: None for dense tensors.
    - median_us, p10_us, p90_us: in µs. Repeated runs are merged into their median.
    - name: text of the legend.
    """

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
        """True if packed bytes are read."""
        return self.bits is not None


def read_timings(paths: Sequence[Path]) -> list[Timing]:
    """Return every timing in the files, in order of first appearance.

    Raises:
        UserError: no file is given, or the files hold other records, or records of several CPUs.
    """
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    read = ATTEND.read(paths)
    machines = dict.fromkeys(f"{row.get('cpu')} ({row.get('isa')})" for row in read)
    if len(machines) > 1:
        raise UserError(f"the records are of {' and of '.join(machines)}: draw each CPU's records alone")
    for row in read:
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
    """Return the legend text of each key (what, bits, shape, tokens, threads).

    A format is one line, although its bits may vary with shape and length.
    """
    names = {}
    for what, *_ in keys:
        bits = sorted({key[1] for key in keys if key[0] == what and key[1] is not None})
        names[what] = f"{what}, {_range(bits)} bits" if bits else what
    return {key: names[key[0]] for key in keys}


def _range(bits: Sequence[float]) -> str:
    """Format bits as 4 or, rounded, as 4.24–4.4."""
    low, high = (f"{round(end, 2):g}" for end in (bits[0], bits[-1]))
    return low if low == high else f"{low}–{high}"
