"""What the file of a cache says of itself, beside its tensors (`cache/tensor_file.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tersekv.cache import tensor_file
from tersekv.cache.schema import MOST, anything, number, optional, record, text, whole
from tersekv.errors import UserError

HELD = record({"tokens": whole(1), "bytes": whole(1, 2**63), "ratio_bf16": number}, open_ended=True)


def read_said(path: Path) -> tuple[dict[str, Any], int]:
    """What a cache's file says of itself and its size in bytes; only the header is read and checked.

    Raises:
        UserError: no such file, one that is damaged in its header, or that holds no cache.
    """
    said, size = tensor_file.read_said(path)
    check_said(path, said, size)
    return said, size


def check_said(path: Path, said: dict[str, Any], size: int) -> None:
    """Raise UserError unless a file of so many bytes says all that a cache's file says."""
    if "state" not in said:
        raise UserError(f"{path} holds tensors, but no cache; give what `cache.save` or `tersekv prompt-cache` wrote")
    texts = dict.fromkeys(("tersekv", "recipe", "model_type", "architecture", "model"), text)
    entries = {**texts, "batch": whole(1, min(size, MOST)), "ids_sha256": optional(text), "cache": HELD}
    try:
        record({**entries, "state": anything}, open_ended=True)(said, "")
    except UserError as error:
        raise UserError(f"{path} does not say what a cache's file says: {error}; {tensor_file.AGAIN}") from error
