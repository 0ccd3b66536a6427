"""safetensors files that are there whole or not at all, also where the program is killed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from tersekv.errors import UserError


def save_whole(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write under another name and rename; the folder is made where it is missing.

    Raises:
        UserError: the file cannot be written, for example on a full disk.
    """
    data = save({name: t.contiguous() for name, t in tensors.items()}, dict(metadata) if metadata else None)
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".part-", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        raise UserError(
            f"cannot write {path}: {error.strerror}; free some space there, or give another --out"
        ) from error
