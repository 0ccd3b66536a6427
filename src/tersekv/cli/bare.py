"""Tables as bare numbers, with the unit in the name of the column, for CSV and JSON."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping

from tersekv.cli.tables import Tables
from tersekv.units import human_bytes

Value = str | int | float | None
_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})–({_NUMBER})")
_PERCENT = re.compile(rf"({_NUMBER})\s?%")
_ABSENT = ("", "-", "–", "unknown")


class Cell(str):
    """Text of a cell, with its bare numbers.

    numbers: by the name of their column, where {} is the heading.
    """

    numbers: Mapping[str, Value]

    def __new__(cls, text: str, numbers: Mapping[str, Value]) -> Cell:
        """Make a cell."""
        made = super().__new__(cls, text)
        made.numbers = numbers
        return made


def size(bytes: int, name: str = "{} (bytes)") -> Cell:
    """Return a cell with a number of bytes in a decimal unit."""
    return Cell(human_bytes(bytes), {name: bytes})


def bare(table: Tables) -> tuple[list[str], list[list[Value]]]:
    """Return headings and rows of a table, with numbers in place of their texts.

    A cell of several numbers gets several columns. Cells without a value are None.
    """
    columns, rows, left, words = list(table.columns), [list(row) for row in table.rows], table.left, table.words
    if table.by_column:
        names = [name or table.title for name in columns[1:]]
        columns, *rows = [list(row) for row in zip([table.by_column, *names], *rows, strict=True)]
        left = 1
    made: dict[str, list[Value]] = {}
    for i, heading in enumerate(columns):
        cells = [row[i] for row in rows]
        if i < left or heading in words:
            made[_line(heading)] = [_line(cell) for cell in cells]
            continue
        split = [_split(cell) for cell in cells]
        for name in dict.fromkeys(name for numbers in split for name in numbers) or ["{}"]:
            made[_named(name, heading)] = [numbers.get(name) for numbers in split]
    return list(made), [list(row) for row in zip(*made.values(), strict=True)]


def as_csv(table: Tables) -> str:
    """Return the headings and the rows as lines of CSV."""
    columns, rows = bare(table)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()


def _split(cell: str) -> Mapping[str, Value]:
    """Return the numbers of a cell by the name of their column."""
    if isinstance(cell, Cell):
        return cell.numbers
    text = _line(cell)
    if text in _ABSENT:
        return {}
    if found := _RANGE.fullmatch(text):
        return {"{}, from": _number(found[1]), "{}, to": _number(found[2])}
    if found := _PERCENT.fullmatch(text):
        return {"{} (%)": _number(found[1])}
    return {"{}": _number(text) if re.fullmatch(_NUMBER, text) else text}


def _number(text: str) -> int | float:
    plain = text.replace(",", "")
    return int(plain) if re.fullmatch(r"[-+]?\d+", plain) else float(plain)


def _named(name: str, heading: str) -> str:
    """Return the name of a column. Numbers in it have no commas."""
    return name.format(re.sub(r"(?<=\d),(?=\d{3})", "", _line(heading)))


def _line(text: str) -> str:
    return " ".join(text.split())
