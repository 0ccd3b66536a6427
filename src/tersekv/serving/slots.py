"""Bytes of packed pages: blocks of 32 tokens in memory that an engine has divided into pages.

A page of an engine holds p tokens of all KV heads of a layer, with p a multiple of 32. It consists
of p/32 blocks; each block has all heads. A head has the packed tensors ("planes") of its keys, then
of its values, wider types first:

```text
page   [ block 0 | block 1 | … ]          block   [ head 0 | head 1 | … ]
head   [ codes of keys | scales | … | codes of values | scales | … | rounded up to 32 bytes ]
```

A token of one head thus takes `token_bytes` on average. Blocks of all pages have equal distances in
memory, as kernels require. A tensor that all heads share is in head 0; the other heads leave its
place empty.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tersekv.codecs import Codec
from tersekv.codecs.exact import Exact
from tersekv.errors import UserError
from tersekv.layouts.base import BLOCK_TOKENS, PackedTensors, PlaneSpec


def why_not_slots(codec: Codec, head_dim: int) -> str | None:
    """Return the reason why blocks of this codec do not fit into pages; None if they do."""
    if isinstance(codec, Exact):
        return "its tokens are not packed (a layer with exact keys and exact values is left to the engine)"
    if codec.fits_on == "prompt":
        advice = "; use calibration=corpus" if hasattr(codec, "calibration") else ""
        return f"it is fitted on every prompt, and pages are shared by prompts{advice}"
    layout = codec.layout(head_dim)
    if layout.block_tokens != BLOCK_TOKENS:
        return f"its blocks hold {layout.block_tokens} tokens, not {BLOCK_TOKENS}"
    for name, spec in layout.planes.items():
        if spec.ragged is not None:
            advice = "; use room=1.5, or outliers=0" if hasattr(codec, "room") else ""
            return f"the size of its {name} differs from block to block{advice}"
        # kernels skip sparse entries whose channel is outside the head
        if spec.channels is not None and spec.channel_bits is None:
            return f"its {name} are channel numbers of each block, which kernels must check before they read them"
    return None


class Plane(NamedTuple):
    """One packed tensor of a block's head. start: its first byte there."""

    name: str
    spec: PlaneSpec
    start: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.spec.shape) * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Slots:
    """Layout of a layer's tokens in an engine's pages.

    Raises:
        UserError: the blocks of a codec have no fixed size.
    """

    keys: Codec
    values: Codec
    head_dim: int

    def __post_init__(self) -> None:
        for codec in (self.keys, self.values):
            if reason := why_not_slots(codec, self.head_dim):
                raise UserError(
                    f"{codec.label} for {codec.side} cannot be used in an engine's pages: {reason}. Others "
                    "are trellis with a calibration, kivi, turboquant, polarquant, uniform, normalfloat"
                )

    @functools.cached_property
    def planes(self) -> tuple[tuple[Plane, ...], tuple[Plane, ...]]:
        """Planes of keys and of values."""
        at, sides = 0, []
        for codec in (self.keys, self.values):
            at, side = math.ceil(at / 4) * 4, []
            specs = codec.layout(self.head_dim).planes
            for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
                side.append(Plane(name, specs[name], at))
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
            heads = memory[:, :1] if plane.spec.shared else memory
            part = heads[:, :, plane.start : plane.start + plane.bytes].view(plane.spec.dtype)
            found[plane.name] = part.unflatten(-1, plane.spec.shape).transpose(0, 1).unsqueeze(0)
        return found
