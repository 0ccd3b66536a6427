"""Records of benchmarks that time attention over a number of tokens (`benchmarks/attend.py`)."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tersekv.errors import UserError

FIELDS = ("what", "shape", "T", "threads", "median_us")
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
    if not paths:
        raise UserError("no records were given: give a file like benchmarks/records/attend.jsonl")
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            row = _parsed(line, number, path)
            found[row["what"], row.get("bits"), row["shape"], row["T"], row["threads"]].append(row)
    if not found:
        raise UserError(f"{', '.join(map(str, paths))} is empty: run `python benchmarks/attend.py --out FILE`")
    return [
        Timing(*key, *(median(row.get(name, row["median_us"]) for row in rows) for name in ("median_us", "p10", "p90")))
        for key, rows in found.items()
    ]


def machine(paths: Sequence[Path]) -> str:
    """The machines that the records name, with what their kernels were built for."""
    rows = [json.loads(line) for path in paths for line in _lines(path)]
    return "; ".join(dict.fromkeys(", ".join(str(r[k]) for k in ("cpu", "isa") if r.get(k)) for r in rows))


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder: give a file like benchmarks/records/attend.jsonl") from error
    except OSError as error:
        raise UserError(f"cannot read records from {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: give a file of JSON lines") from error


def _parsed(line: str, number: int, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"line {number} of {path} is not JSON: give a file of JSON lines") from error
    whole = isinstance(row, dict) and all(name in row for name in FIELDS)
    if not (whole and isinstance(row["median_us"], int | float) and 0 < row["median_us"] < math.inf):
        kind = row.get("what") or row.get("task") if isinstance(row, dict) else None
        raise UserError(
            f"line {number} of {path} is no timing of attention{f' (it is of {kind!r})' if kind else ''}: "
            "give records of benchmarks/attend.py"
        )
    return row
