"""Handle standard streams that are closed (`tersekv list >&-`) or lose their reader (`tersekv list
| head -1`)."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import NoReturn


class Closed(io.TextIOBase):
    """Replacement for a closed standard output; writing to it is an error, because the result would
    be lost."""

    encoding = "utf-8"

    def write(self, text: str) -> NoReturn:
        """Raise OSError."""
        raise OSError(
            errno.EBADF,
            "standard output is closed, so the result cannot be written; redirect it to a file or /dev/null",
        )


def prepare() -> None:
    """Replace closed standard streams by usable ones.

    Files opened later must not get the file numbers 0 to 2, because libraries write warnings there.
    On terminals without UTF-8, unsupported characters are escaped.
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
    """Redirect output to the null device after its reader has left, so that the interpreter's final
    flush does not fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(null, stream.fileno())
