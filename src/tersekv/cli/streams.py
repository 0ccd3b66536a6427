"""Standard streams that are closed (`tersekv list >&-`), or whose reader has left (`tersekv list | head -1`)."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import NoReturn


class Closed(io.TextIOBase):
    """In place of a standard output that the caller has closed: an answer that cannot be given is an error."""

    encoding = "utf-8"

    def write(self, text: str) -> NoReturn:
        """Raises OSError."""
        raise OSError(
            errno.EBADF, "standard output is closed, so the answer has nowhere to go; give a file or /dev/null"
        )


def prepare() -> None:
    """Make every standard stream one that can be used.

    Files that are opened later must not take the numbers of closed ones, which libraries write warnings to. A terminal
    without UTF-8 still gets its answer.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
    sys.stdout = sys.stdout or Closed()
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (for the rest of the program)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def abandon() -> None:
    """Whoever read our output has left; the interpreter's own last flush must not complain either."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null, stream.fileno())
