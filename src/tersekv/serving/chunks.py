"""Self-contained packed chunks of a cache, for LMCache or any other store of prefixes.

A chunk is one or more tensors [s, L, T, H·D] with L layers and T tokens. s = 2 for keys and values.
s = 1 if a model caches one vector per token, as latent attention does; it is encoded as keys.
Layers are numbered through all tensors of a chunk, as in the recipe. The bytes:

```text
header    "TKVC", version, CRC-32 of recipe, head dim and shapes, CRC-32 of the planes     16 bytes
planes    for each run of layers with one codec: keys, then values; each plane in the layout's order
```

A chunk that is truncated, damaged, or read with another recipe raises an error.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.cache.coding import Tokens, encode
from tersekv.codecs import Codec
from tersekv.errors import CacheError, UserError
from tersekv.layouts.base import PackedTensors
from tersekv.recipe import DEFAULT_POLICY, Recipe, Term

HEADER = struct.Struct("<4sIII")
MAGIC, VERSION = b"TKVC", 1
Shape = Sequence[int]


def why_not_chunks(codec: Codec, head_dim: int) -> str | None:
    """Return the reason why a chunk of this codec would not be self-contained; None if it is."""
    if codec.fits_on is not None:
        return f"it is fitted on the {codec.fits_on}, and the fitted tensors would be outside the chunk"
    if codec.pre_rope:
        return "keys before RoPE need their positions, which a chunk does not contain"
    if codec.layout(head_dim).starts is not None:
        return "its outliers are a list of no fixed size"
    return None


class Run(NamedTuple):
    """Layers first to last (exclusive) of one tensor that share a codec. side: 0 for keys, 1 for
    values."""

    side: int
    first: int
    last: int
    codec: Codec


@dataclass(frozen=True)
class ChunkCoder:
    """Packs and unpacks chunks of a model with `head_dim` channels per head by `recipe`.

    Raises:
        UserError: the recipe has a token policy, or a codec needs data outside the chunk.
    """

    recipe: Recipe
    head_dim: int

    def __post_init__(self) -> None:
        if self.recipe.tokens != Term(DEFAULT_POLICY):
            raise UserError(f"recipe '{self.recipe}' has a token policy: a chunk holds all its tokens, so leave it out")
        if self.head_dim < 1:
            raise UserError(
                f"head_dim={self.head_dim} is out of range; give the model's channels per head, e.g. 64 or 128"
            )
        for coder in (self.recipe.coder, *(coder for _, coder in self.recipe.layers)):
            for codec in coder.at(0):
                self._check(codec)

    def _check(self, codec: Codec) -> None:
        if reason := why_not_chunks(codec, self.head_dim):
            raise UserError(
                f"{type(codec).__name__} for {codec.side} cannot encode self-contained chunks: {reason}; use kivi, "
                "uniform, int4, normalfloat, turboquant (whole bits), polarquant (codebook=offline) or exact"
            )

    def size(self, shapes: Sequence[Shape]) -> int:
        """Return the exact size of a chunk in bytes."""
        total = HEADER.size
        for shape, runs in zip(shapes, self._runs(shapes), strict=True):
            _, _, T, width = shape
            total += sum((run.last - run.first) * self._layer_bytes(run.codec, T, width) for run in runs)
        return total

    def _layer_bytes(self, codec: Codec, T: int, width: int) -> int:
        layout, heads = codec.layout(self.head_dim), width // self.head_dim
        return math.ceil(T / layout.block_tokens) * sum(
            math.prod(spec.shape) * spec.dtype.itemsize * (1 if spec.shared else heads)
            for spec in layout.planes.values()
        )

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Pack tensors [s, L, T, H·D] of any float dtype into uint8 [size]."""
        shapes = [tuple(x.shape) for x in tensors]
        parts = []
        for x, runs in zip(tensors, self._runs(shapes), strict=True):
            for run in runs:
                heads = x[run.side, run.first : run.last].unflatten(2, (-1, self.head_dim)).transpose(1, 2).contiguous()
                planes = encode(run.codec, Tokens(heads))
                parts += [
                    planes[name].contiguous().view(-1).view(torch.uint8) for name in _order(run.codec, self.head_dim)
                ]
        body = torch.cat([part.cpu() for part in parts]) if parts else torch.empty(0, dtype=torch.uint8)
        head = HEADER.pack(MAGIC, VERSION, self._what(shapes), _crc(body))
        return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), body])

    def unpack(self, data: Tensor, out: Sequence[Tensor]) -> None:
        """Unpack uint8 bytes into `out`, tensors of the shapes that were packed. Bytes after the
        chunk's size are ignored.

        Raises:
            CacheError: the bytes are truncated, damaged, or of another recipe, head dim or shape.
        """
        shapes = [tuple(x.shape) for x in out]
        need = self.size(shapes)
        if data.numel() < need:
            raise CacheError(
                f"a chunk of shapes {shapes} with '{self.recipe}' has {need:,} bytes, got {data.numel():,}"
            )
        data = data.cpu()
        magic, version, what, crc = HEADER.unpack(data[: HEADER.size].numpy().tobytes())
        if magic != MAGIC or version != VERSION:
            raise CacheError(f"these bytes are not a chunk of version {VERSION} (they begin with {magic!r}, {version})")
        if what != self._what(shapes):
            raise CacheError(
                f"this chunk was packed with another recipe, head dim or shape than '{self.recipe}', {shapes}"
            )
        body = data[HEADER.size : need].contiguous()
        if _crc(body) != crc:
            raise CacheError("this chunk is damaged: its checksum differs; drop it and compute the tokens again")
        at = 0
        for x, runs in zip(out, self._runs(shapes), strict=True):
            for run in runs:
                planes, at = self._planes(body, at, run, x.shape[2], x.shape[3] // self.head_dim)
                found = run.codec.decode(planes, self.head_dim)[:, :, : x.shape[2]]
                x[run.side, run.first : run.last] = found.transpose(1, 2).flatten(2).to(x.device, x.dtype)

    def _planes(self, body: Tensor, at: int, run: Run, T: int, heads: int) -> tuple[PackedTensors, int]:
        layout, planes = run.codec.layout(self.head_dim), {}
        for name in _order(run.codec, self.head_dim):
            spec = layout.planes[name]
            shape = (run.last - run.first, 1 if spec.shared else heads, math.ceil(T / layout.block_tokens), *spec.shape)
            end = at + math.prod(shape) * spec.dtype.itemsize
            planes[name] = body[at:end].clone().view(spec.dtype).view(shape)
            at = end
        return planes, at

    def _runs(self, shapes: Sequence[Shape]) -> Iterator[list[Run]]:
        """Yield the runs of each tensor."""
        layers = sum(_checked(shape, self.head_dim)[1] for shape in shapes)
        first = 0
        for sides, L, *_ in shapes:
            plans = [self.recipe.plan(first + i, layers) for i in range(L)]
            first += L
            runs = []
            for side in range(sides):
                codecs = [plan.values if side else plan.keys for plan in plans]
                for codec, group in itertools.groupby(range(L), key=lambda i, codecs=codecs: codecs[i]):  # type: ignore[misc]
                    index = list(group)
                    self._check(codec)
                    runs.append(Run(side, index[0], index[-1] + 1, codec))
            yield runs

    def _what(self, shapes: Sequence[Shape]) -> int:
        return zlib.crc32(f"{self.recipe.to_json()} {self.head_dim} {[tuple(shape) for shape in shapes]}".encode())


def _crc(body: Tensor) -> int:
    return zlib.crc32(body.numpy().data)


def _order(codec: Codec, head_dim: int) -> list[str]:
    return list(codec.layout(head_dim).planes)


def _checked(shape: Shape, head_dim: int) -> Shape:
    if len(shape) != 4 or shape[0] not in (1, 2) or shape[2] < 1 or shape[3] < 1 or shape[3] % head_dim:
        raise UserError(
            f"{list(shape)} is not a valid shape of a chunk, [1 or 2, layers, tokens, heads · {head_dim}]; "
            "check head_dim, the model's channels per head"
        )
    return shape
