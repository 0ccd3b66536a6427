"""Tables that stay readable at any width, and the same tables as Markdown.

Numbers and words are never broken. Recipes and paths that take more than half of the width are broken
after their punctuation. Columns that do not fit go into further tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BORDER = 3
"""Characters that a column takes in addition to its text."""

LEAST_BROKEN = 24
"""Width up to which a word is not broken, however narrow the terminal."""

WARNING = "RUINED"
"""Cells and lines that begin with this word are red."""

_PARTS = re.compile(r"(?<=[+:;/])|(?<=,)(?=[a-z])")


class Tables(NamedTuple):
    """One table, split into several below each other if it is too wide.

    The first `left` columns are text and repeated in each. Of the others, those in `words` are text
    and the rest are numbers. notes: lines below.

    by_column: what a column is about, if each column has the values of one thing and each row a
        quantity; `words` then names rows. In CSV such a table is turned.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    notes: Sequence[str] = ()
    words: Sequence[str] = ()
    by_column: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield Text(self.title, style="bold")
        for chosen in self._groups(width):
            yield self._table(chosen, width)
        for note in self.notes:
            yield warned(note)

    def markdown(self) -> str:
        """Return the table in Markdown, whatever its width, with the title above and the notes below."""
        marks = ["---" if self._is_text(i) else "---:" for i in range(len(self.columns))]
        rows = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (self.columns, *self.rows)]
        lines = ["| " + " | ".join(row) + " |" for row in (rows[0], marks, *rows[1:])]
        return "\n".join([f"**{self.title}**", "", *lines, *(f"\n{note}" for note in self.notes)]) + "\n"

    def _is_text(self, i: int) -> bool:
        return i < self.left or self.columns[i] in self.words

    def _groups(self, width: int) -> list[list[int]]:
        """Return the columns of each table. Only the first one is repeated if the others are too wide."""
        every = range(len(self.columns))
        widest = max((self._least(i, width) + BORDER for i in every[self.left :]), default=0)
        repeated = self.left if 1 + self._taken(every[: self.left], width) + widest <= width else 1
        keys, groups = list(every[:repeated]), [list(every[:repeated])]
        for i in every[repeated:]:
            if len(groups[-1]) > repeated and 1 + self._taken([*groups[-1], i], width) > width:
                groups.append(keys.copy())
            groups[-1].append(i)
        return groups

    def _taken(self, chosen: Sequence[int], width: int) -> int:
        return sum(self._least(i, width) + BORDER for i in chosen)

    def _table(self, chosen: Sequence[int], width: int) -> Table:
        """Build one table. Columns of text take the room that is left, then headings of numbers if they
        all fit in one line."""
        made = Table()
        widths = {i: self._least(i, width) for i in chosen}
        free = width - 1 - sum(widths[i] + BORDER for i in chosen)
        wishes = {i: self._most(i) - widths[i] for i in chosen}
        numbers = [i for i in chosen if not self._is_text(i)]
        for i in sorted(set(chosen) - set(numbers), key=wishes.__getitem__):
            more = max(0, min(wishes[i], free))
            widths[i], free = widths[i] + more, free - more
        if sum(wishes[i] for i in numbers) <= free:
            widths |= {i: widths[i] + wishes[i] for i in numbers}
        for i in chosen:
            made.add_column(
                wrapped(self.columns[i], widths[i]), justify="left" if self._is_text(i) else "right",
                width=widths[i], no_wrap=True,
            )  # fmt: skip
        for row in self.rows:
            made.add_row(*(warned(wrapped(row[i], widths[i]) if self._is_text(i) else row[i]) for i in chosen))
        return made

    def _lines(self, i: int) -> list[str]:
        return [line for row in self.rows for line in row[i].split("\n")]

    def _most(self, i: int) -> int:
        """Return the width at which no cell and no heading of a column is broken."""
        return max(cell_len(line) for line in (self.columns[i], *self._lines(i)))

    def _least(self, i: int, width: int) -> int:
        """Return the least width of a column. Headings break between words, and so do cells of text."""
        cells = [part for line in self._lines(i) for part in (words(line, width) if self._is_text(i) else [line])]
        return max(map(cell_len, (*words(self.columns[i], width), *cells)), default=0)


def words(text: str, width: int) -> list[str]:
    """Return the words of a text. Those of more than half of `width` are broken after punctuation."""
    longest = max(LEAST_BROKEN, width // 2)
    found: list[str] = []
    for word in text.split():
        found += wrapped(word, longest).split("\n") if cell_len(word) > longest else [word]
    return found


def wrapped(text: str, width: int) -> str:
    """Break a text into lines of at most `width`, between words, and longer words after punctuation."""
    lines: list[str] = []
    for line in text.split("\n"):
        lines.append("")
        for word in line.split():
            if not lines[-1] or cell_len(lines[-1]) + 1 + cell_len(word) <= width:
                lines[-1] += f" {word}" if lines[-1] else word
            else:
                lines.append(word)
            if cell_len(lines[-1]) > width:
                lines += _broken(lines.pop(), width)
    return "\n".join(lines)


def _broken(word: str, width: int) -> list[str]:
    lines = [""]
    for part in _PARTS.split(word):
        if lines[-1] and cell_len(lines[-1]) + cell_len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines


def warned(text: str) -> Text:
    """Return a text in red if it is a warning."""
    return Text(text, style="bold red" if WARNING in text else "")


def texts(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return all cells as strings."""
    return [[cell if isinstance(cell, str) else str(cell) for cell in row] for row in rows]
