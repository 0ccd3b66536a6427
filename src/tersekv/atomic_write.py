"""Files that are there whole or not at all, also where the program is killed or the machine stops."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tersekv.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".part"
ABANDONED_SECONDS = 60.0
"""So old is a file at least that a killed writer has left; it is unlocked, too."""


@contextlib.contextmanager
def atomic_write(path: Path, advice: str = "free some space there, or give another place") -> Iterator[BinaryIO]:
    """A file to write to. When the block ends it takes the place of `path`, on the disk and in its folder; after an
    exception nothing has changed. What killed writers to the same path have left is removed.

    Raises:
        UserError: the file cannot be written, for example on a full disk; `advice` ends the sentence.
    """
    name = None
    try:
        _remove_abandoned(path)
        handle, name = tempfile.mkstemp(prefix=_prefix(path), suffix=SUFFIX, dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(OSError):  # some file systems have no locks; then nothing is ever removed
                _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            os.replace(name, path)
        name = None
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; {advice}") from error
    finally:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)


def save_whole(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file under another name and rename; the folder is made where it is missing.

    Raises:
        UserError: the file cannot be written, for example on a full disk.
    """
    from safetensors.torch import save

    advice = "free some space there, or give another --out"
    data = save({name: t.contiguous() for name, t in tensors.items()}, dict(metadata) if metadata else None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; {advice}") from error
    with atomic_write(path, advice) as file:
        file.write(data)


def _prefix(path: Path) -> str:
    return f".{path.name[:60]}."


def _remove_abandoned(path: Path) -> None:
    """Files of writers that were killed: old, and locked by nobody."""
    for left in path.parent.iterdir():
        if not (left.name.startswith(_prefix(path)) and left.name.endswith(SUFFIX)):
            continue
        with contextlib.suppress(OSError), left.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > ABANDONED_SECONDS:
                _lock(file)
                left.unlink()


def _lock(file: BinaryIO) -> None:
    """Held until the file is closed; the system drops it with the process.

    Raises:
        OSError: another process holds it.
    """
    with contextlib.suppress(ImportError):  # Windows
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync_folder(folder: Path) -> None:
    """The new name itself is on the disk, where the system can say so."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    """The permissions that new files lack; they can only be read by setting them."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
