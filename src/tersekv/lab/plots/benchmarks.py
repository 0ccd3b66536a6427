"""Records of benchmarks: JSON lines whose rows have the fields that a picture needs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tersekv.errors import UserError

DRAWN_BY = {"attend": "speed", "generate": "decoding"}
"""Kinds of pictures that draw the records of `tersekv bench`."""


@dataclass(frozen=True)
class Benchmark:
    """A file of `benchmarks/records/` without its suffix, the command that makes it, what a row of it is, and a row's
    fields, those of `measured` positive numbers."""

    name: str
    command: str
    row: str
    fields: tuple[str, ...]
    measured: tuple[str, ...]

    @property
    def bench(self) -> str:
        """How its records name it."""
        return self.command.split()[-1]

    def read(self, paths: Sequence[Path]) -> list[dict[str, Any]]:
        """Every row of the files.

        Raises:
            UserError: no file, or records of something else.
        """
        if not paths:
            raise UserError(f"no records were given: give a file like benchmarks/records/{self.name}.jsonl")
        rows = [self._parsed(line, number, path) for path in paths for number, line in enumerate(self.lines(path), 1)]
        if not rows:
            raise UserError(f"{', '.join(map(str, paths))} is empty: run `{self.command} --out FILE`")
        return rows

    def lines(self, path: Path) -> list[str]:
        """The lines of a file that are not blank."""
        try:
            return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except IsADirectoryError as error:
            raise UserError(f"{path} is a folder: give a file like benchmarks/records/{self.name}.jsonl") from error
        except OSError as error:
            raise UserError(f"cannot read records from {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 text: give a file of JSON lines") from error

    def _parsed(self, line: str, number: int, path: Path) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"line {number} of {path} is not JSON: give a file of JSON lines") from error
        whole = isinstance(row, dict) and all(name in row for name in self.fields)
        if not (whole and all(isinstance(row[n], int | float) and 0 < row[n] < math.inf for n in self.measured)):
            kind = row.get("what") or row.get("task") or row.get("bench") if isinstance(row, dict) else None
            drawn = DRAWN_BY.get(row.get("bench", "")) if isinstance(row, dict) else None
            raise UserError(
                f"line {number} of {path} is no {self.row}{f' (it is of {kind!r})' if kind else ''}: "
                + (
                    f"`tersekv plot {drawn} {path}` draws those"
                    if drawn and row.get("bench") != self.bench
                    else f"give records of `{self.command}`"
                )
            )
        return row
