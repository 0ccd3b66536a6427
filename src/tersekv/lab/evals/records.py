"""Records of an evaluation: one per task, sample and recipe, appended as soon as each is done. Headers
hold what the records of a run share (`runs.py`).

A record is identified by its request (`KEY` and `OF_CONTENT`). A stopped run therefore continues where it was, and
runs with other options can share the file. A run over more windows or samples reuses the existing
ones. An incomplete last line, which a killed run may leave, is dropped, but nothing of a file of another kind.
"""

from __future__ import annotations

import json
import logging
import math
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tersekv import __version__
from tersekv.atomic_write import lock
from tersekv.errors import UserError
from tersekv.lab.evals import runs
from tersekv.lab.evals.tasks.base import Result
from tersekv.versions import package_version

log = logging.getLogger(__name__)

FILE = "records.jsonl"
KEY = ("task", "options", "sample", "recipe", "model", "seed")
SHARED = ("task", "options", "model", "weights", "seed", "versions")
"""Fields of the header, besides those of the run."""
COUNTS = ("windows", "samples")
"""Options that only set the number of samples and do not affect any one of them."""
GIVEN = "given"
OF_CONTENT = ("calibration", "content", "weights", GIVEN)
"""Further fields of the request, which not all records have: hashes of the recipe's calibration, of the text that a
sample reads, of the model's weights and of the sample's token ids."""
ADDED = {"pack": "before-question"}
"""Options that older records lack, with the value that they were made with."""
Record = dict[str, Any]


def key_of(record: Record) -> str:
    """Return the request as one string."""
    asked = {name: record[name] for name in KEY} | {"options": of_each_sample(record["options"])}
    return json.dumps([*asked.values(), *map(record.get, OF_CONTENT)], sort_keys=True)


def of_each_sample(options: Record) -> Record:
    """Return a task's options without those that only set the number of samples."""
    return ADDED | {name: value for name, value in options.items() if name not in COUNTS}


def make(asked: Record, result: Result, extras: dict[str, Any], seconds: float) -> Record:
    """Build the record of one result. `asked` holds the fields of `KEY`.

    Metrics that are not finite become null.
    """
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
    """Return the versions of Python and the packages that can affect results."""
    packages = {package: package_version(package) for package in ("torch", "transformers")}
    return {"tersekv": __version__, "python": platform.python_version(), **packages}


class Records:
    """The records of a run by key, in memory and, if a folder is given, in `folder`/records.jsonl.

    It is a context manager that locks the file. about: fields of the run for the headers, for
    example its command and machine.

    Raises:
        UserError: the folder cannot be written, another run writes to the file, or a line is not a record.
    """

    def __init__(self, folder: Path | None = None, about: Record | None = None) -> None:
        self.path = None if folder is None else folder / FILE
        self._about = about or {}
        self._header: Record | None = None
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
                lock(self._file)
                lines, records = _mended(self._file, self.path)
                self._by_key = {key_of(record): record for record in records}
                self._header = runs.last_header(lines)
            except BlockingIOError as error:
                self._file.close()
                raise UserError(
                    f"another run is writing to {self.path}: wait for it, or give another folder with --out"
                ) from error
            except BaseException:
                self._file.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def find(self, asked: Record) -> Record | None:
        """Return the record with these fields of `KEY`, or None. Older records have no hash of token ids."""
        found = self._by_key.get(key_of(asked))
        return self._by_key.get(key_of(asked | {GIVEN: None})) if found is None else found

    def warn_of_others(self, asked: Iterable[Record]) -> None:
        """Warn of the records of these requests that another version made, or that do not tell their token ids."""
        now, others = _maker(self._about | {"versions": versions()}), Counter[str]()
        for one in asked:
            found = self.find(one) or {}
            unknown = " without a hash of the tokens read" if found.get(GIVEN) != one.get(GIVEN) else ""
            if found and (unknown or _maker(found) != now):
                others[_maker(found) + unknown] += 1
        if others:
            said = " and ".join(f"{count:,} result{'s' * (count > 1)} of {maker}" for maker, count in others.items())
            log.warning(
                f"{self.path} holds {said}, which this run of {now} uses: give another folder with --out to make them "
                "again"
            )

    def add(self, record: Record) -> Record:
        """Append a record, first to the file. Return it as a later run will read it."""
        lines = list(runs.written([self._about | record], (*self._about, *SHARED), self._header))
        if self._file is not None:
            self._file.write("".join(lines).encode())
            self._file.flush()
        self._header = runs.last_header(lines) or self._header
        return self._by_key.setdefault(key_of(record), (self._header or {}) | json.loads(lines[-1]))


def _maker(record: Record) -> str:
    """Return the version that made a record, and its commit if the header has one."""
    version, commit = record.get("versions", {}).get("tersekv", "of unknown version"), record.get("commit")
    return f"tersekv {version}" + (f" at {commit}" if commit else "")


def read(path: Path) -> list[Record]:
    """Return every complete record of a file, or of the file in a folder, without changing the
    file.

    Raises:
        UserError: the file is missing, or a line is not a record.
    """
    path = path / FILE if path.is_dir() else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read records from {path}: {error.strerror}") from error
    return list(_parsed(_lines(data), path))


def _mended(file: BinaryIO, path: Path) -> tuple[list[str], list[Record]]:
    """Return the lines of an open file of records, and the records.

    An incomplete last line is removed from the file, and a complete one gets the line end that it lacks. Files of
    another kind stay as they are.
    """
    file.seek(0)
    data = file.read()
    end = data.rfind(b"\n") + 1
    lines, last = _lines(data), data[end:].decode(errors="replace")
    whole = bool(last) and next(runs.expanded([last]), (1, {}))[1] is not None
    if whole or not last.startswith("{"):
        lines += [last] if last else []
    records = list(_parsed(lines, path))  # before the file is changed
    if whole:
        file.write(b"\n")
    else:
        file.truncate(end)
    return lines, records


def _lines(data: bytes) -> list[str]:
    return [line.decode(errors="replace") for line in data.split(b"\n")[:-1]]


def _parsed(lines: Sequence[str], path: Path) -> Iterator[Record]:
    for number, record in runs.expanded(lines):
        try:
            key_of(record)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"line {number} of {path} is not a record of an evaluation: remove the line or give another folder"
            ) from error
        yield record
