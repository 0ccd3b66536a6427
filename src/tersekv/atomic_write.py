"""Write files atomically: a file is complete or absent, even after a kill or a power failure."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

from tersekv.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".part"
ABANDONED_SECONDS = 60.0
"""Age above which an unlocked temporary file counts as abandoned by a killed writer."""

ELSEWHERE = "give another place with --out or the variable TERSEKV_CACHE"


@contextlib.contextmanager
def atomic_write(path: Path, advice: str = "free some space there, or give another place") -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` when the block ends.

    The file and its folder entry are synced to disk. After an exception `path` is unchanged.
    Abandoned temporary files of earlier writers to `path` are removed.

    Raises:
        UserError: the file cannot be written, for example on a full disk. `advice` ends the message.
    """
    name = None
    try:
        _remove_abandoned(path)
        handle, name = tempfile.mkstemp(prefix=_prefix(path), suffix=SUFFIX, dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            with contextlib.suppress(OSError):  # without file locks, abandoned files are never removed
                lock(file)
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
    """Write a safetensors file atomically. Missing folders are created.

    Raises:
        UserError: the file cannot be written, for example on a full disk.
    """
    from safetensors.torch import save

    advice = f"free some space there, or {ELSEWHERE}"
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
    """Remove temporary files of killed writers: old ones that no process has locked."""
    for left in path.parent.iterdir():
        if not (left.name.startswith(_prefix(path)) and left.name.endswith(SUFFIX)):
            continue
        with contextlib.suppress(OSError), left.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > ABANDONED_SECONDS:
                lock(file)
                left.unlink()


def lock(file: IO[Any], waiting: Callable[[], object] | None = None) -> bool:
    """Lock a file until it is closed. The system releases the lock when the process ends.

    waiting: called before it waits for another process, which it does not do without.

    Returns False where the system has no such locks (Windows).

    Raises:
        BlockingIOError: another process holds the lock, and `waiting` is None.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if waiting is None:
            raise
        waiting()
        fcntl.flock(file, fcntl.LOCK_EX)
    return True


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that the new file name is on disk too, where the system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
