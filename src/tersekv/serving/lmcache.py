"""Serializer for LMCache that packs chunks: a serde named `tersekv`, for adapters of its L2
storage.

```json
{"type": "fs", "base_path": "/cache", "serde": {"type": "tersekv", "recipe": "kivi:bits=4",
"head_dim": 64}}
```

With `"storage": 2, "model": FOLDER, "calibration": FILE` in place of recipe and head_dim, chunks
have the storage codec (`tersekv.serving.stored_chunks`).

`register()` registers the name in the calling process, because LMCache does not look for serde
plug-ins. `tersekv.serving.chunks` defines the bytes of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj
from torch import Tensor

from tersekv.calibration.calibration import Calibration
from tersekv.errors import UserError
from tersekv.recipe import Recipe
from tersekv.serving.chunks import ChunkCoder

if TYPE_CHECKING:
    from tersekv.serving.stored_chunks import StoredChunkCoder

NAME = "tersekv"


Coder: TypeAlias = "ChunkCoder | StoredChunkCoder"


class PackedSerializer(Serializer):
    """Packs the tensors of a chunk."""

    def __init__(self, coder: Coder) -> None:
        self.coder = coder

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Pack src's tensors [1 or 2, layers, tokens, heads·D] into dst; return the number of
        bytes.

        Raises:
            UserError: dst is too small.
        """
        packed, room = self.coder.pack(_tensors(src)), _bytes(dst)
        if room.numel() < packed.numel():
            raise UserError(f"the packed chunk has {packed.numel():,} bytes, there is room for {room.numel():,}")
        room[: packed.numel()].copy_(packed)
        return packed.numel()

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Return the exact size of the packed chunk in bytes."""
        return self.coder.size([tuple(shape) for shape in layout_desc.shapes])


class PackedDeserializer(Deserializer):
    """Decodes packed chunks."""

    def __init__(self, coder: Coder) -> None:
        self.coder = coder

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decode src's bytes into dst's tensors, with their dtype.

        Raises:
            CacheError: the bytes are damaged, or of another recipe or shape.
        """
        self.coder.unpack(_bytes(src), _tensors(dst))


def create(options: Mapping[str, Any]) -> SerdeProcessor:
    """Create a processor from the options of an adapter's "serde": recipe and head_dim, or storage (bits per
    number) and model; calibration (a file, for codecs that need one) and max_workers (default 1).

    Raises:
        UserError: an option is missing or unknown, or chunks are not supported.
    """
    needed = {"storage", "model", "calibration"} if "storage" in options else {"recipe", "head_dim"}
    known = needed | {"calibration", "max_workers"}
    if unknown := set(options) - known:
        raise UserError(f"serde {NAME!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    if missing := needed - set(options):
        raise UserError(f"serde {NAME!r} lacks {' and '.join(sorted(missing))}: give {', '.join(sorted(needed))}")
    coder: Coder
    if "storage" in options:
        from tersekv.serving.stored_chunks import StoredChunkCoder

        coder = StoredChunkCoder(float(options["storage"]), options["model"], options["calibration"])
    else:
        file = options.get("calibration")
        calibration = None if file is None else Calibration.load(file)
        coder = ChunkCoder(Recipe.parse(options["recipe"]), int(options["head_dim"]), calibration)
    workers = int(options.get("max_workers", 1))
    return AsyncSerdeProcessor(PackedSerializer(coder), PackedDeserializer(coder), max_workers=workers)


def register() -> None:
    """Register the serde in this process. A second call does nothing."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, create)


def _tensors(memory: MemoryObj) -> Sequence[Tensor]:
    """Return the tensors of a memory object, one per group of layers."""
    groups = memory.meta.shapes
    if groups is not None and len(groups) > 1:
        return [memory.get_tensor(i) for i in range(len(groups))]
    if memory.tensor is None:
        raise UserError("LMCache passed a memory object without a tensor")
    return [memory.tensor]


def _bytes(memory: MemoryObj) -> Tensor:
    """Return a memory object as uint8 [bytes]."""
    if memory.tensor is None:
        raise UserError("LMCache passed a memory object without a tensor")
    return memory.tensor.view(-1).view(torch.uint8)
