"""Tables that stay readable at any width: words are not broken, and columns that do not fit go into
further tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BORDER = 3
"""Characters that a column takes in addition to its text."""


class Tables(NamedTuple):
    """One table, split into several below each other if it is too wide.

    The first `left` columns are text and repeated in each; the others are numbers. notes: lines
    below.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int
    notes: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        for chosen in self._groups(options.max_width):
            yield self._table(chosen, options.max_width)
        for note in self.notes:
            yield Text(note)

    def _groups(self, width: int) -> list[list[int]]:
        """Return the columns of each table. Text may be wrapped between words, numbers are not."""
        text, numbers = list(range(self.left)), list(range(self.left, len(self.columns)))
        taken = 1 + sum(self._word(i) + BORDER for i in text)
        groups: list[list[int]] = []
        used = width + 1
        for i in numbers:
            needs = self._width(i) + BORDER
            if used + needs > width:
                groups.append([])
                used = taken
            groups[-1].append(i)
            used += needs
        return [text + group for group in groups] or [text]

    def _table(self, chosen: Sequence[int], width: int) -> Table:
        """Build one table. Headings are in one line if there is room for that."""
        made = Table()
        whole = {i: max(self._width(i), cell_len(self.columns[i])) for i in chosen}
        if 1 + sum(whole[i] + BORDER for i in chosen) > width:
            whole = {i: self._width(i) for i in chosen}
        for i in chosen:
            text = i < self.left
            made.add_column(
                self.columns[i] if text else wrapped(self.columns[i], whole[i]),
                justify="left" if text else "right", overflow="fold",
                min_width=self._word(i) if text else self._width(i), no_wrap=not text,
            )  # fmt: skip
        for row in self.rows:
            made.add_row(*(Text(row[i]) for i in chosen))
        return made

    def _cells(self, i: int) -> list[str]:
        return [row[i] for row in self.rows]

    def _word(self, i: int) -> int:
        """Return the width of the longest word of a column."""
        return max((cell_len(word) for cell in (self.columns[i], *self._cells(i)) for word in cell.split()), default=0)

    def _width(self, i: int) -> int:
        """Return the width of a column of numbers. Cells stay in one line; a heading may break
        between words."""
        heading = max((cell_len(word) for word in self.columns[i].split()), default=0)
        return max([heading, *map(cell_len, self._cells(i))])


def wrapped(text: str, width: int) -> str:
    """Break a text into lines of at most `width`. Longer words get a line of their own."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return "\n".join(lines)


def texts(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return all cells as strings."""
    return [[str(cell) for cell in row] for row in rows]
