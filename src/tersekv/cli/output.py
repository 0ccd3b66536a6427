"""Output of commands: results and tables on stdout, progress on stderr, and with --json one JSON
document. Tables are printed as text, Markdown or CSV."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from tersekv.cli.bare import as_csv
from tersekv.cli.tables import Tables, texts, warned
from tersekv.units import human_bytes as human_bytes

Calibrations = Annotated[
    Path | None,
    typer.Option("--calibration", help="File or folder from `tersekv calibrate`. By default the folder it writes to."),
]
Json = Annotated[bool, typer.Option("--json", help="Print only one line of JSON on stdout.")]
Form = Literal["text", "md", "csv", "json"]
MODEL_HELP = "Model: smollm2, a folder, a GGUF file (also on the Hub: owner/name:file.gguf), or a Hub id."
DEFAULT_RECIPE = "default"
RECIPE_HELP = "Recipe: a preset (default, safe, small) or for example kivi:bits=4. See `tersekv list`."
WIDTH_WHEN_PIPED = 132
NARROW = 120
"""Width below which progress has no bar, and its description is cut, so that the times stay whole."""
EVERY = 5.0
"""Seconds between progress lines if stderr is not a terminal. Shorter steps print nothing."""


def stdout() -> Console:
    """Return the console for results and tables. If piped, it has at least 132 columns, even if
    COLUMNS is less."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Return the console for progress."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    width = None if file.isatty() else _piped_width()
    return Console(file=file, width=width, highlight=False, soft_wrap=False)


def _piped_width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return max(WIDTH_WHEN_PIPED, int(columns) if columns.isdecimal() else 0)


def print_json(document: Any) -> None:
    """Print a document as JSON in one line."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(document, ensure_ascii=not utf8), flush=True)


_form: Form = "text"


def use_form(form: Form) -> None:
    """Print the tables of this run in a form. With "csv" stdout gets nothing but tables."""
    global _form
    _form = form


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], left: int = 1, notes: Sequence[str] = (),
    words: Sequence[str] = (), by_column: str = "",
) -> Tables:  # fmt: skip
    """Return a table whose first `left` columns and those in `words` are text, and the others numbers.
    notes: lines below it. by_column: see `Tables`."""
    return Tables(title, columns, texts(rows), left, notes, words, by_column)


def show(item: Tables | str) -> None:
    """Print a table or plain text on stdout."""
    if _form == "text":
        stdout().print(item if isinstance(item, Tables) else warned(item), markup=False)
    elif isinstance(item, Tables):
        stream(f"{as_csv(item) if _form == 'csv' else item.markdown()}\n", is_table=True)
    else:
        stream(f"{item}\n" if _form == "csv" else f"{item}\n\n")


def stream(text: str, is_table: bool = False) -> None:
    """Write a piece of text as it is, and flush it."""
    file = sys.stderr if _form == "csv" and not is_table else sys.stdout
    file.write(text)
    file.flush()


class ProgressStep:
    """A long-running step and its progress.

    what: description. total: number of `unit`s, if known. changed: called after each change.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "") -> None:
        self.changed: Callable[[], None] = lambda: None
        self.begin(what, total, unit)

    def begin(self, what: str, total: int | None = None, unit: str = "") -> None:
        """Continue with another task, and restart the clock."""
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self._start = self._last = time.monotonic()
        self._durations: list[float] = []
        self.changed()

    def at(self, done: int, total: int | None = None, what: str | None = None) -> None:
        """Set the number of units done, and optionally a new total and description."""
        now = time.monotonic()
        if done > self.done:
            self._durations += [(now - self._last) / (done - self.done)] * (done - self.done)
        self.done, self._last = done, now
        self.total, self.what = total or self.total, what or self.what
        self.changed()

    def advance(self) -> None:
        """Count one more unit as done."""
        self.at(self.done + 1)

    def far(self) -> str:
        """Return units done, elapsed time and estimated remaining time as text."""
        count = "" if self.total is None else f"{self.done:,} of {self.total:,} {self.unit}".rstrip() + ", "
        left = self.seconds_left()
        return f"{count}{clock(time.monotonic() - self._start)} so far" + (
            "" if left is None else f", about {clock(left)} left"
        )

    def seconds_left(self) -> float | None:
        """Return the estimated remaining seconds; None if unknown. Units below a hundredth of the
        longest are ignored, because they were already done."""
        slow = [d for d in self._durations if d >= max(self._durations) / 100]
        if self.total is None or not slow:
            return None
        each = sum(slow) / len(slow)
        return each * max(0, self.total - self.done - 1) + max(0.0, each - (time.monotonic() - self._last))


class _Far(ProgressColumn):
    """Column of a progress bar with the text of `ProgressStep.far`."""

    def render(self, task: Any) -> Text:
        return Text(task.fields["step"].far())


class _Shown:
    """Display of the running steps: one bar each on a terminal, otherwise a line every few seconds.

    It keeps the stderr of its creation, because libraries may replace sys.stderr in the meantime.
    """

    def __init__(self) -> None:
        self.console = stderr()
        self.steps: list[ProgressStep] = []
        self.rows: dict[int, TaskID] = {}
        narrow = self.console.width < NARROW
        cut = Column(no_wrap=True, overflow="ellipsis", ratio=1 if narrow else None)
        what = TextColumn("{task.description}", markup=False, table_column=cut)
        columns = [what, *([] if narrow else [BarColumn()]), _Far(table_column=Column(no_wrap=True))]
        bars = Progress(*columns, console=self.console, transient=True, expand=narrow)
        self.bars = bars if self.console.is_terminal else None
        self._stop = threading.Event()
        self._lines: threading.Thread | None = None

    def start(self) -> None:
        if self.bars is not None:
            self.bars.start()
        else:
            self._lines = threading.Thread(target=self._say_now_and_then, daemon=True)
            self._lines.start()

    def stop(self) -> None:
        self._stop.set()
        if self._lines is not None:
            self._lines.join()
        if self.bars is not None:
            self.bars.stop()

    def add(self, step: ProgressStep) -> None:
        """Show a step until it is removed."""
        self.steps.append(step)
        if self.bars is not None:
            bars, row = self.bars, self.bars.add_task(step.what, total=step.total, step=step)
            self.rows[id(step)] = row
            step.changed = lambda: bars.update(row, description=step.what, completed=step.done, total=step.total)

    def remove(self, step: ProgressStep) -> None:
        self.steps.remove(step)
        if self.bars is not None:
            self.bars.remove_task(self.rows.pop(id(step)))

    def say(self, line: str) -> None:
        global _silent_since
        _silent_since = time.monotonic()
        with contextlib.suppress(ValueError, OSError):  # a closed stream must not end the work
            self.console.print(line, markup=False, soft_wrap=self.bars is None)

    def _say_now_and_then(self) -> None:
        while not self._stop.wait(max(0.0, _silent_since + EVERY - time.monotonic())):
            step = self.steps[-1]  # never empty: the outermost step stays until this thread has ended
            self.say(f"{step.what}: {step.far()}")


_shown: _Shown | None = None
_silent_since = time.monotonic()


def begin() -> None:
    """Start a run of the program: its tables are text, and the time without output is measured from now."""
    global _silent_since
    _silent_since = time.monotonic()
    use_form("text")


def report(line: str) -> None:
    """Print a line of progress on stderr, above the bar of the running step if there is one."""
    if _shown is None:
        stderr().print(line, markup=False)
    else:
        _shown.say(line)


@contextlib.contextmanager
def step(what: str, total: int | None = None, unit: str = "") -> Iterator[ProgressStep]:
    """Show a long-running step on stderr: a bar on a terminal, otherwise a line every few seconds.
    Steps may be nested; lines describe the innermost one."""
    global _shown
    outermost = _shown is None
    if _shown is None:
        _shown = _Shown()
    shown, made = _shown, ProgressStep(what, total, unit)
    shown.add(made)
    if outermost:
        shown.start()
    try:
        yield made
    finally:
        if outermost:
            _shown = None
            shown.stop()
        else:
            shown.remove(made)


@contextlib.contextmanager
def steps_at(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a step that the library starts, see `tersekv.steps`."""
    with step(what, total, unit) as shown:
        yield shown.at


def shares_a_place() -> bool:
    """True if stdout and stderr go to the same terminal or file, where their outputs would mix."""
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError, AttributeError, io.UnsupportedOperation):
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


def clock(seconds: float) -> str:
    """Return a duration as text: 12 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
