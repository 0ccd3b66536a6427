"""Self-contained packed chunks of a cache, for LMCache or any other store of prefixes.

A chunk is one or more tensors [s, L, T, H·D] with L layers and T tokens. s = 2 for keys and values.
s = 1 if a model caches one vector per token, as latent attention does; it is encoded as keys.
Layers are numbered through all tensors of a chunk, as in the recipe. The bytes:

```text
header    "TKVC", version, CRC-32 of recipe, calibration, head dim and shapes, CRC-32 of the planes
          16 bytes
planes    for each run of layers with one codec: keys, then values; each plane in the layout's order
```

A chunk that is truncated, damaged, or read with another recipe or calibration raises an error.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tersekv.cache.coding import Tokens, encode
from tersekv.codecs import Codec
from tersekv.errors import CacheError, UserError
from tersekv.layouts.base import PackedTensors
from tersekv.plan import LayerPlan
from tersekv.recipe import DEFAULT_POLICY, Recipe, Term

if TYPE_CHECKING:
    from tersekv.calibration.calibration import Calibration

HEADER = struct.Struct("<4sIII")
MAGIC, VERSION = b"TKVC", 1
Shape = Sequence[int]


def why_not_chunks(codec: Codec, head_dim: int, calibrated: bool = False) -> str | None:
    """Return the reason why chunks of this codec cannot be read alone; None if they can.

    calibrated: True if there is a calibration.
    """
    if codec.fits_on == "prompt":
        advice = "; use calibration=corpus" if hasattr(codec, "calibration") else ""
        return f"it is fitted on the prompt, and the fitted tensors would be outside the chunk{advice}"
    if codec.needs_rope:
        advice = "centre=false" if codec.centred else "pre_rope=false"
        return f"its keys are coded without RoPE, and a chunk does not contain their positions; use {advice}"
    if codec.layout(head_dim).starts is not None:
        advice = "; use room=1.5, or outliers=0" if hasattr(codec, "room") else ""
        return f"its outliers are a list of no fixed size{advice}"
    if codec.needs_fit is not None and not calibrated:
        return "it is fitted on a corpus; give the file of `tersekv calibrate` as calibration"
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

    calibration: of codecs that are fitted on a corpus. Chunks then hold all KV heads of the model.

    Raises:
        UserError: the recipe has a token policy, or a codec needs data that it does not get.
    """

    recipe: Recipe
    head_dim: int
    calibration: Calibration | None = None
    _plans: dict[tuple[int, int], dict[int, LayerPlan]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.recipe.tokens != Term(DEFAULT_POLICY):
            raise UserError(f"recipe '{self.recipe}' has a token policy: a chunk holds all its tokens, so leave it out")
        if self.head_dim < 1:
            raise UserError(
                f"head_dim={self.head_dim} is out of range; give the model's channels per head, e.g. 64 or 128"
            )
        for coder in self.recipe.coders:
            for codec in coder.at(0):
                self._check(codec)

    def _check(self, codec: Codec) -> None:
        if reason := why_not_chunks(codec, self.head_dim, self.calibration is not None):
            raise UserError(
                f"{codec.label} for {codec.side} cannot encode self-contained chunks: {reason}. Others are "
                "kivi, uniform, int4, normalfloat, turboquant (whole bits), polarquant (codebook=offline) and exact"
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
        return torch.cat([header(self._what(shapes), body), body])

    def unpack(self, data: Tensor, out: Sequence[Tensor]) -> None:
        """Unpack uint8 bytes into `out`, tensors of the shapes that were packed. Bytes after the
        chunk's size are ignored.

        Raises:
            CacheError: the bytes are truncated, damaged, or of another recipe, head dim or shape.
        """
        shapes = [tuple(x.shape) for x in out]
        said = f"'{self.recipe}', {shapes}"
        body = checked_body(data, self._what(shapes), self.size(shapes), said)
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
        of_layers = self._plans_of(layers, {shape[3] // self.head_dim for shape in shapes})
        first = 0
        for sides, L, *_ in shapes:
            plans = [of_layers[first + i] for i in range(L)]
            first += L
            runs = []
            for side in range(sides):
                codecs = [plan.values if side else plan.keys for plan in plans]
                # codecs with fitted tensors are equal if only these differ
                keys = [(codec, i if codec.fitted else -1) for i, codec in enumerate(codecs)]
                for (codec, _), group in itertools.groupby(range(L), key=lambda i, keys=keys: keys[i]):  # type: ignore[misc]
                    index = list(group)
                    self._check(codec)
                    runs.append(Run(side, index[0], index[-1] + 1, codec))
            yield runs

    def _plans_of(self, layers: int, heads: set[int]) -> dict[int, LayerPlan]:
        """Return the plans of all layers, with their calibration. heads: numbers of KV heads of the tensors."""
        if self.calibration is None:
            return {i: self.recipe.plan(i, layers) for i in range(layers)}
        key = layers, max(heads)
        if len(heads) > 1:
            raise UserError(
                f"with a calibration all layers have the same number of KV heads; got {sorted(heads)}, so use a recipe "
                "without one"
            )
        if key not in self._plans:
            try:
                self._plans[key] = self.calibration.plans_by_shape(self.recipe, *key, self.head_dim)
            except UserError as error:
                raise UserError(
                    f"the calibration does not fit chunks of {layers} layers with {key[1]} KV heads of "
                    f"{self.head_dim} channels: {error}. Under tensor parallelism a process has some of the heads, "
                    "which needs a recipe without a calibration"
                ) from error
        return self._plans[key]

    def _what(self, shapes: Sequence[Shape]) -> int:
        bound = f"{self.recipe.to_json()} {self.head_dim} {[tuple(shape) for shape in shapes]}"
        return zlib.crc32((bound if self._digest is None else f"{bound} {self._digest}").encode())

    @functools.cached_property
    def _digest(self) -> str | None:
        return None if self.calibration is None else self.calibration.digest


def header(what: int, body: Tensor) -> Tensor:
    """Return the header of a chunk, uint8. what: CRC-32 of all that chunks of one kind share."""
    return torch.frombuffer(bytearray(HEADER.pack(MAGIC, VERSION, what, _crc(body))), dtype=torch.uint8)


def checked_body(data: Tensor, what: int, need: int, said: str) -> Tensor:
    """Return the bytes of a chunk of `need` bytes after its header, contiguous and on the CPU.

    said: the recipe and shapes that `what` belongs to.

    Raises:
        CacheError: the bytes are truncated, damaged, or of another recipe, head dim or shape.
    """
    if data.numel() < need:
        raise CacheError(f"a chunk of {said} has {need:,} bytes, got {data.numel():,}")
    data = data.cpu()
    magic, version, found, crc = HEADER.unpack(data[: HEADER.size].numpy().tobytes())
    if magic != MAGIC or version != VERSION:
        raise CacheError(f"these bytes are not a chunk of version {VERSION} (they begin with {magic!r}, {version})")
    if found != what:
        raise CacheError(f"this chunk was packed with another recipe, calibration, head dim or shape than {said}")
    body = data[HEADER.size : need].contiguous()
    if _crc(body) != crc:
        raise CacheError("this chunk is damaged: its checksum differs; drop it and compute the tokens again")
    return body


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
