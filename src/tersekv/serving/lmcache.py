"""LMCache with packed chunks: a serde by the name `tersekv`, for adapters of its second level.

    {"type": "fs", "base_path": "/cache", "serde": {"type": "tersekv", "recipe": "turboquant:bits=4", "head_dim": 64}}

`register()` makes the name known to the process that calls it; LMCache looks for no plug-ins of this kind. What a
chunk's bytes are stands in `tersekv.serving.chunks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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

from tersekv.errors import UserError
from tersekv.recipe import Recipe
from tersekv.serving.chunks import ChunkCoder

NAME = "tersekv"


class PackedSerializer(Serializer):
    """Packs what LMCache holds of a chunk."""

    def __init__(self, coder: ChunkCoder) -> None:
        self.coder = coder

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Write src's tensors [1 or 2, layers, tokens, heads·D] into dst's bytes; how many there are of them."""
        packed, room = self.coder.pack(_tensors(src)), _bytes(dst)
        if room.numel() < packed.numel():
            raise UserError(f"the packed chunk has {packed.numel():,} bytes, there is room for {room.numel():,}")
        room[: packed.numel()].copy_(packed)
        return packed.numel()

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        """Bytes of the packed chunk, exactly."""
        return self.coder.size([tuple(shape) for shape in layout_desc.shapes])


class PackedDeserializer(Deserializer):
    """Decodes packed chunks."""

    def __init__(self, coder: ChunkCoder) -> None:
        self.coder = coder

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Decode src's bytes into dst's tensors, in their type.

        Raises:
            CacheError: the bytes are damaged, or of another recipe or shape.
        """
        self.coder.unpack(_bytes(src), _tensors(dst))


def create(options: Mapping[str, Any]) -> SerdeProcessor:
    """A processor for LMCache from the options of an adapter's "serde": recipe, head_dim, max_workers (1)."""
    known = {"recipe", "head_dim", "max_workers"}
    if unknown := set(options) - known:
        raise UserError(f"serde {NAME!r} has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    if missing := {"recipe", "head_dim"} - set(options):
        raise UserError(f"serde {NAME!r} lacks {' and '.join(sorted(missing))}: give a recipe and the model's head dim")
    coder = ChunkCoder(Recipe.parse(options["recipe"]), int(options["head_dim"]))
    workers = int(options.get("max_workers", 1))
    return AsyncSerdeProcessor(PackedSerializer(coder), PackedDeserializer(coder), max_workers=workers)


def register() -> None:
    """Make the serde known to this process; doing so again changes nothing."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, create)


def _tensors(memory: MemoryObj) -> Sequence[Tensor]:
    """The tensors that a memory object holds, one per group of layers."""
    groups = memory.meta.shapes
    if groups is not None and len(groups) > 1:
        return [memory.get_tensor(i) for i in range(len(groups))]
    if memory.tensor is None:
        raise UserError("LMCache handed over a memory object without a tensor")
    return [memory.tensor]


def _bytes(memory: MemoryObj) -> Tensor:
    """A memory object as uint8 [bytes]."""
    if memory.tensor is None:
        raise UserError("LMCache handed over a memory object without a tensor")
    return memory.tensor.view(-1).view(torch.uint8)
