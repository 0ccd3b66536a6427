"""safetensors files that are there whole or not at all, also where the program is killed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from tersekv.errors import UserError
from tersekv.whole_file import whole_file


def save_whole(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write under another name and rename; the folder is made where it is missing.

    Raises:
        UserError: the file cannot be written, for example on a full disk.
    """
    advice = "free some space there, or give another --out"
    data = save({name: t.contiguous() for name, t in tensors.items()}, dict(metadata) if metadata else None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; {advice}") from error
    with whole_file(path, advice) as file:
        file.write(data)
