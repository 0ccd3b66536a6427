"""Slots: packed tokens of a fixed size, written one at a time into blocks of 32.

A page of an engine holds p tokens of all KV heads of a layer, with p a multiple of 32. It consists
of p/32 blocks; each block has all heads. A head has the packed tensors ("planes") of its keys, then
of its values, wider types first:

```text
page   [ block 0 | block 1 | … ]          block   [ head 0 | head 1 | … ]
head   [ codes of keys | scales | … | codes of values | scales | … | rounded up to 32 bytes ]
```

A token of one head thus takes `token_bytes` on average. Blocks of all pages have equal distances in
memory, as kernels require. In the codes of keys a token is a lane, and in planes whose last axis is
tokens it is a column. In the codes of values lanes are channels, and a token is a bit field of
every int32 (`kernels/lanes.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tersekv.cache.coding import Tokens, encode
from tersekv.codecs import Codec
from tersekv.codecs.exact import Exact
from tersekv.errors import UserError
from tersekv.kernels.lanes import LANES, pack_lanes, unpack_lanes
from tersekv.layouts.base import BLOCK_TOKENS, PackedTensors, PlaneSpec
from tersekv.tensors import cached_table

Way = Literal["column", "lane", "field"]
"""Position of a token in a block's plane: "column" of the last axis, "lane" of [groups, words, 16],
or bit "field" of all words."""


def why_not_slots(codec: Codec, head_dim: int) -> str | None:
    """Return the reason why this codec does not support slots; None if it does."""
    if codec.fits_on is not None:
        return f"it must be fitted on the {codec.fits_on} before it can encode a token"
    if codec.pre_rope:
        return "keys before RoPE need a position for each token as they are read, which pages do not hold"
    if getattr(codec, "axis", "token") != "token":
        return "its ranges span several tokens, so a token cannot be encoded alone (use axis=token)"
    if isinstance(codec, Exact):
        return "its tokens are not packed (a layer with exact keys and exact values is left to the engine)"
    layout = codec.layout(head_dim)
    if layout.block_tokens != BLOCK_TOKENS:
        return f"its blocks hold {layout.block_tokens} tokens, not {BLOCK_TOKENS}"
    for name, spec in layout.planes.items():
        if spec.shared or spec.ragged is not None or way_of(codec, name, spec) is None:
            return f"its plane {name!r} has no fixed size per token and head"
    return None


def way_of(codec: Codec, name: str, spec: PlaneSpec) -> Way | None:
    """Return the position of a token in a plane; None if tokens have no fixed position."""
    if name.endswith("codes") and spec.dtype is torch.int32:
        return "lane" if codec.side == "keys" else "field"
    return "column" if spec.shape and spec.shape[-1] == BLOCK_TOKENS else None


class Plane(NamedTuple):
    """One packed tensor of a block's head. start: its first byte there; way: position of a token in
    it."""

    name: str
    spec: PlaneSpec
    start: int
    way: Way

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Slots:
    """Layout of a layer's tokens in an engine's pages.

    Raises:
        UserError: a codec does not encode each token alone in a fixed size.
    """

    keys: Codec
    values: Codec
    head_dim: int

    def __post_init__(self) -> None:
        for codec in (self.keys, self.values):
            if reason := why_not_slots(codec, self.head_dim):
                raise UserError(
                    f"{type(codec).__name__} for {codec.side} cannot be used in an engine's pages: {reason}; use "
                    "turboquant (whole bits), polarquant (codebook=offline), uniform, int4 or normalfloat"
                )

    @functools.cached_property
    def planes(self) -> tuple[tuple[Plane, ...], tuple[Plane, ...]]:
        """Planes of keys and of values."""
        at, sides = 0, []
        for codec in (self.keys, self.values):
            at, side = math.ceil(at / 4) * 4, []
            specs = codec.layout(self.head_dim).planes
            for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
                way = way_of(codec, name, specs[name])
                assert way is not None
                side.append(Plane(name, specs[name], at, way))
                at += side[-1].bytes
            sides.append(tuple(side))
        return sides[0], sides[1]

    @property
    def token_bytes(self) -> int:
        """Bytes per token and KV head, keys and values together."""
        last = max((plane for side in self.planes for plane in side), key=lambda plane: plane.start)
        return math.ceil((last.start + last.bytes) / BLOCK_TOKENS)

    def views(self, memory: Tensor) -> tuple[PackedTensors, PackedTensors]:
        """Return views [1, H, N, …] of the packed keys and values in memory uint8 [N, H,
        32·token_bytes]."""
        return self._planes(memory, 0), self._planes(memory, 1)

    def _planes(self, memory: Tensor, side: int) -> PackedTensors:
        found = {}
        for plane in self.planes[side]:
            part = memory[:, :, plane.start : plane.start + plane.bytes].view(plane.spec.dtype)
            found[plane.name] = part.unflatten(-1, plane.spec.shape).transpose(0, 1).unsqueeze(0)
        return found


class Places(NamedTuple):
    """Destinations of tokens.

    block, token: block of each token and its position in the block, int64 [T].
    blocks: distinct blocks, int64 [U]. of_token: index of each token's block in `blocks`, int64
    [T].
    """

    block: Tensor
    token: Tensor
    blocks: Tensor
    of_token: Tensor

    @staticmethod
    def of(slots: Tensor) -> Places:
        """Build from slot numbers int64 [T], each 32 times the block plus the position in the
        block."""
        block, token = slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
        return Places(block, token, *torch.unique(block, return_inverse=True))


def write(codec: Codec, planes: PackedTensors, specs: tuple[Plane, ...], x: Tensor, places: Places) -> None:
    """Encode x float32 [T, H, D] and write each token to its slot in planes [1, H, N, …]. Other
    tokens are unchanged."""
    T = x.shape[0]
    coded = encode(codec, Tokens(x.transpose(0, 1).unsqueeze(0)))
    for plane in specs:
        new, held = coded[plane.name][0], planes[plane.name][0]  # [H, n, …], [H, N, …]
        if plane.way == "field":
            _write_fields(held, new, x.shape[-1], places)
        elif plane.way == "lane":
            by_token = held.transpose(-1, -2)  # [H, N, groups, 16, words]
            source = new.transpose(-1, -2).flatten(1, 3)[:, :T]
            by_token[:, places.block, places.token // LANES, places.token % LANES] = source
        else:
            by_token = held.movedim(-1, 2)  # [H, N, 32, …]
            by_token[:, places.block, places.token] = new.movedim(-1, 2).flatten(1, 2)[:, :T]


def _write_fields(held: Tensor, new: Tensor, D: int, places: Places) -> None:
    """Write codes of values into int32 words [H, N, groups, W, 16]. Codes have W bits, because 32
    tokens of b bits fill b words exactly."""
    bits = held.shape[-2]
    codes = unpack_lanes(new, bits, BLOCK_TOKENS, D).flatten(1, 2)[:, : len(places.token)]
    blocks = codes.new_zeros((held.shape[0], len(places.blocks), BLOCK_TOKENS, D))
    blocks[:, places.of_token, places.token] = codes
    written = held.new_zeros((len(places.blocks), BLOCK_TOKENS))
    written[places.of_token, places.token] = 1
    fields = _fields(bits, str(held.device))
    mask = (written.unsqueeze(-1) * fields).sum(1, dtype=torch.int32)  # they do not overlap: the sum is their or
    held[:, places.blocks] = (held[:, places.blocks] & ~mask[:, None, :, None]) | pack_lanes(blocks, bits)


@cached_table
def _fields(bits: int, device: str) -> Tensor:
    """Return the bit mask of each token in a lane's words: int32 [32, W]."""
    full = torch.zeros(BLOCK_TOKENS, BLOCK_TOKENS, LANES, dtype=torch.uint8)
    full[torch.arange(BLOCK_TOKENS), torch.arange(BLOCK_TOKENS)] = 2**bits - 1
    return pack_lanes(full, bits)[:, 0, :, 0].to(device)
