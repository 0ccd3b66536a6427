"""Layout `signs`: the signs of a sketch S·x, one bit each, and the norm of x.

A block of t = 32 tokens of one head, with a sketch of M rows, has two tensors:

    signs   uint8 [ceil(M/8), t]   tokens are lanes: byte i of all 32 tokens is contiguous. Bit m of a
                                   token is byte m // 8, bit m % 8 (least significant first). It is 1 for
                                   S_m·x >= 0, so that sign(0) = +1. Bits past M are 0.
    norms   16-bit float [t]

    token t, byte 0           token t, byte 1 (32 bytes further)
    [m7 m6 m5 m4 m3 m2 m1 m0] [m15 ... m8] ...

A view may hold several sketches of different channels, whose estimates are added. QJL has one of
ordinary channels and one of outlier channels.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.encode_signs import pack_blocks as pack_blocks
from tersekv.kernels.encode_signs import pack_signs as pack_signs
from tersekv.layouts.base import BLOCK_TOKENS, PlaneSpec, View, sum_of
from tersekv.tensors import cached_table


def signs_planes(sketch_dim: int, norm_dtype: torch.dtype, prefix: str = "") -> dict[str, PlaneSpec]:
    """Return the specifications of one sketch's packed tensors. sketch_dim: number of rows."""
    row_bytes = (sketch_dim + 7) // 8
    return {
        f"{prefix}signs": PlaneSpec((row_bytes, BLOCK_TOKENS), torch.uint8, "codes", token_axis=1),
        f"{prefix}norms": PlaneSpec((BLOCK_TOKENS,), norm_dtype, "scales and norms", token_axis=0),
    }


def unpack_signs(packed: Tensor, M: int) -> Tensor:
    """Unpack uint8 [..., ceil(M/8)] to float32 ±1 [..., M]."""
    rows = _byte_signs(str(packed.device)).index_select(0, packed.flatten().int())
    return rows.reshape(*packed.shape[:-1], -1)[..., :M]


@cached_table
def _byte_signs(device: str) -> Tensor:
    """Return the eight signs of each byte value: float32 ±1 [256, 8]."""
    bits = torch.bitwise_and(torch.bitwise_right_shift(torch.arange(256)[:, None], torch.arange(8)), 1)
    return (bits * 2 - 1).to(device, torch.float32)


class SignSketch(NamedTuple):
    """One sketch of a segment: x̂ = factor · norms · Sᵀ·signs on its channels.

    signs: uint8 [B, H, N, ceil(M/8), t].
    norms: [B, H, N, t].
    sketch: S, float32 [M, n].
    factor: the estimator's constant divided by M.
    channels: int64 [B, H, 1 or N, n], the n sketched channels, None if n = D and they are in order.
    dropped: int64 [B, H, 1 or N, m], channels whose estimate is set to 0 because another sketch
        holds them, or None.
    """

    signs: Tensor
    norms: Tensor
    sketch: Tensor
    factor: float
    channels: Tensor | None = None
    dropped: Tensor | None = None

    @property
    def varies(self) -> bool:
        """True if channels differ between blocks, so that each block needs its own query sketch."""
        return any(c is not None and c.shape[2] > 1 for c in (self.channels, self.dropped))

    def unpacked(self) -> Tensor:
        """Return the signs as float32 ±1 [B, H, T, M]."""
        return unpack_signs(self.signs.transpose(-1, -2).flatten(2, 3), self.sketch.shape[0])

    def weights(self) -> Tensor:
        """Return factor · norms, float32 [B, H, T]."""
        return self.norms.float().flatten(2, 3) * self.factor

    def query(self, query: Tensor) -> Tensor:
        """Return S·q on this sketch's channels: float32 [B, H, R, D] -> [B, H, R, M]."""
        R = query.shape[2]
        if self.channels is not None:
            query = query.gather(-1, self.channels.expand(-1, -1, R, -1))
        if self.dropped is not None:
            query = query.scatter(-1, self.dropped.expand(-1, -1, R, -1), 0.0)
        return torch.matmul(query, self.sketch.T)

    def decode(self, head_dim: int) -> Tensor:
        """Return x̂ as float32 [B, H, T, D], 0 outside the sketch's channels."""
        x = torch.matmul(self.unpacked(), self.sketch) * self.weights().unsqueeze(-1)
        if self.channels is not None:
            x = x.new_zeros(*x.shape[:-1], head_dim).scatter(-1, self._of_tokens(self.channels), x)
        if self.dropped is not None:
            x = x.scatter(-1, self._of_tokens(self.dropped), 0.0)
        return x

    def _of_tokens(self, channels: Tensor) -> Tensor:
        N, t = self.norms.shape[2:]
        return channels.expand(-1, -1, N, -1).repeat_interleave(t, dim=2)


class SignsView(View):
    """Sum of sign sketches.

    The query is sketched once, so scores need no product of S and cached signs.
    """

    format = kind = "signs"

    def __init__(self, sketches: list[SignSketch], head_dim: int) -> None:
        self.sketches = sketches
        self.head_dim = head_dim

    def native(self, native: ModuleType) -> Any:
        views = [
            native.signs(
                head_dim=self.head_dim,
                factor=float(s.factor),
                signs=s.signs,
                norms=s.norms,
                sketch=s.sketch,
                channels=s.channels,
                dropped=s.dropped,
            )
            for s in self.sketches
        ]
        return views[0] if len(views) == 1 else native.sum(views)

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D], the vector whose inner product with q is the
        estimate.
        """
        return sum_of([s.decode(self.head_dim) for s in self.sketches])

    def scores(self, query: Tensor) -> Tensor:
        """Return factor·‖k‖·⟨S·q, sign(S·k)⟩, summed over the sketches: float32 [B, H, R, T]."""
        if any(s.varies for s in self.sketches):
            return super().scores(query)
        return sum_of(
            [
                torch.matmul(s.query(query), s.unpacked().transpose(-1, -2)) * s.weights()[:, :, None]
                for s in self.sketches
            ]
        )
