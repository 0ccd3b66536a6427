"""Print log records and warnings as lines on stderr, without file names and line numbers."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from tersekv.cli import output

LIBRARY = logging.getLogger("tersekv")


class _Lines(logging.Handler):
    """Prints each record as a line of progress, so that it does not break a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        say(f"{kind}{record.getMessage()}")


def say(text: str) -> None:
    """Print one line on stderr."""
    output.report(f"tersekv: {' '.join(text.split())}")


def verbose() -> None:
    """Show all log records of the library, not only warnings."""
    LIBRARY.setLevel(logging.DEBUG)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Show warnings of the library and of Python while the program runs."""
    lines, level = _Lines(), LIBRARY.level
    LIBRARY.addHandler(lines)
    LIBRARY.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.showwarning = _show
        try:
            yield
        finally:
            LIBRARY.removeHandler(lines)
            LIBRARY.setLevel(level)


def _show(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"warning: {message}")
