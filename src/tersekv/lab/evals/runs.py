"""Files of records: JSON lines in which a header gives the fields that the rows below it share.

    {"run": {"bench": "encode", "cpu": "AMD EPYC", "threads": 1}}
    {"recipe": "kivi:bits=4", "median_ms": 3.1}
    {"recipe": "qjl", "median_ms": 7.4}

A header holds for all rows up to the next one, so a run needs one header. Readers get every row
with the fields of its header.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tersekv.errors import UserError

HEADER = "run"
Row = dict[str, Any]


def expanded(lines: Iterable[str]) -> Iterator[tuple[int, Any]]:
    """Yield the number of the line of each row, and the row with the fields of its header.

    A line that is not JSON gives None. Blank lines are left out.
    """
    shared: Row = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get(HEADER), dict):
            shared = row[HEADER]
        else:
            yield number, shared | row if isinstance(row, dict) else row


def read(path: Path) -> list[Row]:
    """Return every row of a file.

    Raises:
        UserError: a line is not a JSON object.
    """
    found = []
    for number, row in expanded(path.read_text(encoding="utf-8").split("\n")):
        if not isinstance(row, dict):
            raise UserError(f"line {number} of {path} is not a JSON object: give a file of records")
        found.append(row)
    return found


def last_header(lines: Iterable[str]) -> Row | None:
    """Return the fields of the last header, None without one."""
    start = f'{{"{HEADER}": {{'
    found = [line for line in lines if line.startswith(start)]
    return json.loads(found[-1])[HEADER] if found else None


def written(rows: Iterable[Row], shared: Collection[str], last: Row | None = None) -> Iterator[str]:
    """Yield the lines of whole rows: a header each time that fields in `shared` change, and the other fields.

    last: fields of the header that is already written.
    """
    for row in rows:
        about = {name: row[name] for name in shared if name in row}
        if about != (last or {}):
            yield _line({HEADER: about})
            last = about
        yield _line({name: value for name, value in row.items() if name not in about})


def append(path: Path, about: Row, rows: Iterable[Row]) -> None:
    """Append rows to a file, after a header with the fields of `about` unless they are those of the last header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    last = last_header(path.read_text(encoding="utf-8").splitlines()) if path.exists() else None
    with path.open("a", encoding="utf-8") as file:
        file.writelines(written((about | row for row in rows), about, last))


def _line(fields: Row) -> str:
    return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"
