"""Read the records of benchmarks: rows with the fields that a plot needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tersekv.errors import UserError
from tersekv.lab.evals import runs

DRAWN_BY = {"attend": "speed", "generate": "decoding"}
"""Kind of plot that draws the records of each `tersekv bench` command."""


@dataclass(frozen=True)
class Benchmark:
    """A records file of a benchmark.

    - name: file in `benchmarks/records/` without its suffix.
    - command: the command that writes it.
    - row: description of one row, for error messages.
    - fields: fields that each row needs. Those in `measured` must be positive numbers.
    """

    name: str
    command: str
    row: str
    fields: tuple[str, ...]
    measured: tuple[str, ...]

    @property
    def bench(self) -> str:
        """Name of the benchmark in its records."""
        return self.command.split()[-1]

    def read(self, paths: Sequence[Path]) -> list[dict[str, Any]]:
        """Return all rows of the files.

        Raises:
            UserError: no file is given, or the files hold other records.
        """
        if not paths:
            raise UserError(f"no records were given: give a file like benchmarks/records/{self.name}.jsonl")
        rows = [self._checked(row, number, path) for path in paths for number, row in runs.expanded(self._lines(path))]
        if not rows:
            raise UserError(f"{', '.join(map(str, paths))} is empty: run `{self.command} --out FILE`")
        return rows

    def _lines(self, path: Path) -> list[str]:
        try:
            return path.read_text(encoding="utf-8").splitlines()
        except IsADirectoryError as error:
            raise UserError(f"{path} is a folder: give a file like benchmarks/records/{self.name}.jsonl") from error
        except OSError as error:
            raise UserError(f"cannot read records from {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: give a file of JSON lines") from error

    def _checked(self, row: Any, number: int, path: Path) -> dict[str, Any]:
        if row is None:
            raise UserError(f"line {number} of {path} is not JSON: give a file of JSON lines")
        whole = isinstance(row, dict) and all(name in row for name in self.fields)
        if not (whole and all(isinstance(row[n], int | float) and 0 < row[n] < math.inf for n in self.measured)):
            kind = row.get("what") or row.get("task") or row.get("bench") if isinstance(row, dict) else None
            drawn = DRAWN_BY.get(row.get("bench", "")) if isinstance(row, dict) else None
            raise UserError(
                f"line {number} of {path} is not a {self.row}{f' (it is of {kind!r})' if kind else ''}: "
                + (
                    f"`tersekv plot {drawn} {path}` draws those"
                    if drawn and row.get("bench") != self.bench
                    else f"give records of `{self.command}`"
                )
            )
        return row
