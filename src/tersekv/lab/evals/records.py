"""Records of an evaluation: JSON lines, one per task, sample and recipe, appended as soon as each is done.

A record is found again by what was asked for (`KEY`); so a run that was stopped goes on where it was, runs with other
options live in the same file, and a run over more windows of a text uses those that are there. A last line without its
end, which a killed run may leave, is dropped.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from tersekv import __version__
from tersekv.errors import UserError
from tersekv.lab.evals.tasks.base import Result

FILE = "records.jsonl"
KEY = ("task", "options", "sample", "recipe", "model", "seed")
COUNTS = ("windows",)
"""Options that say how many samples there are and nothing of what each of them is."""
Record = dict[str, Any]


def key_of(record: Record) -> str:
    """What was asked for, as one string; with the calibration, where the recipe has one."""
    asked = {name: record[name] for name in KEY} | {"options": of_each_sample(record["options"])}
    return json.dumps([*asked.values(), record.get("calibration")], sort_keys=True)


def of_each_sample(options: Record) -> Record:
    """A task's options without those that only count samples."""
    return {name: value for name, value in options.items() if name not in COUNTS}


def make(asked: Record, result: Result, extras: dict[str, Any], seconds: float) -> Record:
    """The record of one result; `asked` holds the fields of `KEY`. Metrics that are no finite number are null."""
    held = result.footprint.to_dict()
    return {
        **asked,
        "metrics": {name: value if math.isfinite(value) else None for name, value in result.metrics.items()},
        "tokens": result.tokens,
        **{name: held[name] for name in ("bits_per_element", "bytes", "bytes_by_part")},
        "details": {**result.details, **extras},
        "versions": versions(),
        "seconds": round(seconds, 3),
    }


def versions() -> dict[str, str]:
    """Of what can change a figure."""
    found = {"tersekv": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class Records:
    """The records of a run by key: in memory, and in `folder`/records.jsonl where a folder is given.

    Use it as a context; the file is locked inside.

    Raises:
        UserError: a folder that cannot be written, a file that another run writes to, a line that is no record.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path = None if folder is None else folder / FILE
        self._by_key: dict[str, Record] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Records:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a+b")
            except OSError as error:
                raise UserError(
                    f"cannot write records to {self.path}: {error.strerror}; give a folder with --out"
                ) from error
            try:
                _lock(self._file, self.path)
                self._by_key = {key_of(record): record for record in _whole_lines(self._file, self.path)}
            except BaseException:
                self._file.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def find(self, asked: Record) -> Record | None:
        """The record with these fields of `KEY`, if it is there."""
        return self._by_key.get(key_of(asked))

    def add(self, record: Record) -> Record:
        """Keep a record, in the file before anything else; returns it as a later run will read it."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        if self._file is not None:
            self._file.write(line.encode() + b"\n")
            self._file.flush()
        return self._by_key.setdefault(key_of(record), json.loads(line))


def read(path: Path) -> list[Record]:
    """Every whole record of a file, or of the file in a folder, which is left as it is.

    Raises:
        UserError: no file, or a line that is no record.
    """
    path = path / FILE if path.is_dir() else path
    try:
        with path.open("rb") as file:
            return list(_parsed(file.read(), path))
    except OSError as error:
        raise UserError(f"cannot read records from {path}: {error.strerror}") from error


def _whole_lines(file: BinaryIO, path: Path) -> list[Record]:
    """The records of an open file, which ends with its last whole line from now on."""
    file.seek(0)
    data = file.read()
    file.truncate(data.rfind(b"\n") + 1)
    return list(_parsed(data, path))


def _parsed(data: bytes, path: Path) -> Iterator[Record]:
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            key_of(record)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"line {number} of {path} is no record of an evaluation: remove the line or give another folder"
            ) from error
        yield record


def _lock(file: BinaryIO, path: Path) -> None:
    """Held until the file is closed; the system drops it with the process."""
    with contextlib.suppress(ImportError):  # Windows
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another run is writing to {path}: wait for it, or give another folder with --out"
            ) from error
