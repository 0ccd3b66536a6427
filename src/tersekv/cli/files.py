"""Output files of commands: checked before the work, and written atomically."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tersekv.atomic_write import atomic_write
from tersekv.errors import UserError


def check_out(out: Path, suffixes: Sequence[str] = (), option: str = "--out") -> Path:
    """Return `out` with `~` expanded, if it has one of the suffixes (if any are given) and its
    folder is writable. option: as errors name it.

    Raises:
        UserError: `out` has another suffix or is a folder, a device or a pipe, or its folder does not
            exist or is not writable.
    """
    try:
        path = out.expanduser()
    except RuntimeError as error:
        raise UserError(f"{option} {out} names a home folder that does not exist; write the path in full") from error
    allowed = ", ".join(f".{suffix}" for suffix in suffixes)
    if suffixes and path.suffix.lower().removeprefix(".") not in suffixes:
        came = f"ends in {path.suffix!r}" if path.suffix else "has no suffix"
        raise UserError(f"{option} {out} {came}: give a file that ends in {allowed.replace(', ', ' or ')}")
    refuse_folder(path, option)
    if path.exists() and not path.is_file():
        raise UserError(f"{option} {out} is a device or a pipe, which a file would replace: give a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {out}: there is no folder {path.parent}; make it first, or give another")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UserError(f"{option} {out}: the folder {path.parent} cannot be written; give another")
    return path


def refuse_folder(path: Path, option: str = "--out") -> None:
    """Raise UserError if a path is a folder."""
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: give a file in it")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: under a temporary name, then rename it.

    Raises:
        UserError: the file cannot be written, for example on a full disk.
    """
    with atomic_write(path, "give another --out") as file:
        file.write(data)
