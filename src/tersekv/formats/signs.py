"""Format `signs`: the signs of a sketch S·x, one bit each, and the norm of x.

A block of t = 32 tokens of one head, sketch of M rows:

    signs   uint8 [t, ceil(M/8)]   bit m of a token's row is byte m // 8, bit m % 8 (least significant first);
                                   1 stands for S_m·x >= 0, so that sign(0) = +1; bits past M are 0
    norms   16-bit float [t]

    byte 0                    byte 1
    [m7 m6 m5 m4 m3 m2 m1 m0] [m15 ... m8] ...

A view may hold several such sketches, each of its own channels, whose estimates add up (QJL: ordinary and outlier
channels).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.formats.base import BLOCK_TOKENS, PlaneSpec, View
from tersekv.tensors import cached_table


def signs_planes(sketch_dim: int, norm_dtype: torch.dtype, prefix: str = "") -> dict[str, PlaneSpec]:
    """Planes of one sketch with `sketch_dim` rows."""
    row_bytes = (sketch_dim + 7) // 8
    return {
        f"{prefix}signs": PlaneSpec((BLOCK_TOKENS, row_bytes), torch.uint8, "codes"),
        f"{prefix}norms": PlaneSpec((BLOCK_TOKENS,), norm_dtype, "scales and norms"),
    }


def pack_signs(sketched: Tensor) -> Tensor:
    """Sketched vectors [..., M] to uint8 [..., ceil(M/8)], bit 1 where the entry is >= 0."""
    M = sketched.shape[-1]
    positive = torch.nn.functional.pad(sketched >= 0, (0, -M % 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=sketched.device)
    return (positive.unflatten(-1, (-1, 8)).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor, M: int) -> Tensor:
    """uint8 [..., ceil(M/8)] to float32 ±1 [..., M]."""
    rows = _byte_signs(str(packed.device)).index_select(0, packed.flatten().int())
    return rows.reshape(*packed.shape[:-1], -1)[..., :M]


@cached_table
def _byte_signs(device: str) -> Tensor:
    """The eight signs of each byte: float32 ±1 [256, 8]."""
    bits = torch.bitwise_and(torch.bitwise_right_shift(torch.arange(256)[:, None], torch.arange(8)), 1)
    return (bits * 2 - 1).to(device, torch.float32)


class SignSketch(NamedTuple):
    """One sketch of a segment: x̂ = factor · norms · Sᵀ·signs on its channels.

    signs uint8 [B, H, T, ceil(M/8)]; norms [B, H, T]; sketch float32 [M, n]; factor: the estimator's constant over M.
    channels int64 [B, H, 1 or T, n]: where the n sketched channels lie in the head, None if n = D and in order.
    dropped int64 [B, H, 1 or T, m]: channels whose estimate is set to 0 (another sketch holds them), or None.
    """

    signs: Tensor
    norms: Tensor
    sketch: Tensor
    factor: float
    channels: Tensor | None = None
    dropped: Tensor | None = None

    @property
    def varies_by_token(self) -> bool:
        """Whether tokens differ in their channels, so that no sketched query serves them all."""
        return any(c is not None and c.shape[2] > 1 for c in (self.channels, self.dropped))

    def query(self, query: Tensor) -> Tensor:
        """S·q on this sketch's channels: float32 [B, H, R, D] -> [B, H, R, M]."""
        R = query.shape[2]
        if self.channels is not None:
            query = query.gather(-1, self.channels.expand(-1, -1, R, -1))
        if self.dropped is not None:
            query = query.scatter(-1, self.dropped.expand(-1, -1, R, -1), 0.0)
        return torch.matmul(query, self.sketch.T)

    def decode(self, head_dim: int) -> Tensor:
        """x̂ as float32 [B, H, T, D], 0 outside its channels."""
        x = torch.matmul(unpack_signs(self.signs, self.sketch.shape[0]), self.sketch)
        x = x * (self.norms.float() * self.factor).unsqueeze(-1)
        T = x.shape[2]
        if self.channels is not None:
            x = x.new_zeros(*x.shape[:-1], head_dim).scatter(-1, self.channels.expand(-1, -1, T, -1), x)
        if self.dropped is not None:
            x = x.scatter(-1, self.dropped.expand(-1, -1, T, -1), 0.0)
        return x


class SignsView(View):
    """Sum of sign sketches. The query is sketched once; cached signs are not multiplied by S for scores."""

    format = "signs"

    def __init__(self, sketches: list[SignSketch], head_dim: int) -> None:
        self.sketches = sketches
        self.head_dim = head_dim

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]: the vector whose inner product with q is the estimate."""
        return torch.stack([s.decode(self.head_dim) for s in self.sketches]).sum(0)

    def scores(self, query: Tensor) -> Tensor:
        """factor·‖k‖·⟨S·q, sign(S·k)⟩, summed over the sketches: float32 [B, H, R, T]."""
        if any(s.varies_by_token for s in self.sketches):
            return super().scores(query)
        parts = []
        for s in self.sketches:
            signs = unpack_signs(s.signs, s.sketch.shape[0])
            parts.append(
                torch.matmul(s.query(query), signs.transpose(-1, -2)) * (s.norms.float() * s.factor)[:, :, None]
            )
        return torch.stack(parts).sum(0)
