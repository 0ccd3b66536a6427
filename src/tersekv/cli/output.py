"""How commands speak: answers and tables on stdout, progress on stderr, and one JSON document for programs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Calibrations = Annotated[
    Path | None,
    typer.Option("--calibration", help="What `tersekv calibrate` made, a file or folder; else from the default place."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on the last line of stdout, nothing else there.")]
MODEL_HELP = "smollm2, a folder, or a Hub id."
DEFAULT_RECIPE = "default"
RECIPE_HELP = "How the cache is packed: small, default or safe, or like kivi:bits=4; `tersekv list` shows the methods."
WIDTH_WHEN_PIPED = 132
_running: list[Progress] = []


def stdout() -> Console:
    """The console of answers and tables. Piped, it is wide enough for every table, whatever COLUMNS says."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console of progress."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    width = None if file.isatty() else _piped_width()
    return Console(file=file, width=width, highlight=False, soft_wrap=False)


def _piped_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return max(WIDTH_WHEN_PIPED, int(columns) if columns.isdecimal() else 0)


def print_json(document: Any) -> None:
    """One line."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(document, ensure_ascii=not utf8), flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1) -> Table:
    """A table whose first `left` columns are text and whose others are numbers."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(str(cell) for cell in row))
    return made


def show(item: Any) -> None:
    """Print a table or a text (no markup in it) on stdout."""
    stdout().print(item, markup=False)


def report(line: str) -> None:
    """A line of progress of something long; above the bar of the step that is running, where there is one."""
    (_running[-1].console if _running else stderr()).print(line, markup=False)


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """A bar with the time it has taken on stderr, where a person sees it."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        _running.append(progress)
        try:
            yield
        finally:
            _running.pop()


def human_bytes(size: float) -> str:
    """Bytes in the decimal unit that leaves a number below 1,000."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size:.0f} B"
