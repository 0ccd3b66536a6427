"""Format `polar`: recursive polar coordinates, angles as codes into a table per level and one radius per 2^L channels.

A block of t = 32 tokens of one head, L levels with b_ℓ bits, D channels:

    angles  uint8 [ceil(Σ b_ℓ·D/2^ℓ / 8), t]   tokens are lanes: byte i of all 32 tokens stands together
    radii   16-bit float [D/2^L, t]            the norm of 2^L neighbouring channels, divided by 2^ceil(L/2)

A token's bytes are one stream of bits, least significant bit first: the codes of level 1 in the order of the channels,
then those of level 2, and so on, without gaps; a code may reach over the end of a byte, and what is left of the last
byte is 0. With D = 64 and 4/2/2/2 bits, where aN is angle N of level 1 (channels 2N, 2N+1), bN of level 2:

    byte    0        1       ...  15        16             ...  20              22
         [a1 a0] [a3 a2]  ...  [a31 a30] [b3 b2 b1 b0]  ...  [c3 c2 c1 c0]   [d3 d2 d1 d0]
    bits  4  4                                2 each              2 each          2 each

23 bytes of angles and 4 radii of 2 bytes, 31 bytes for 64 channels: 3.875 bits per element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.codecs.transforms.polar import from_polar
from tersekv.kernels.encode_polar import pack_angles, places, stream_offsets
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, PlaneSpec, View
from tersekv.tensors import plain


@dataclass(frozen=True)
class Polar:
    """Layout of one side of a layer: bits per level, from level 1 on."""

    level_bits: tuple[int, ...]
    head_dim: int
    radius_dtype: torch.dtype = torch.float16

    @property
    def levels(self) -> int:
        """L."""
        return len(self.level_bits)

    @property
    def radius_unit(self) -> float:
        """Radii are stored divided by this power of two, which keeps them in range and all their digits."""
        return 2.0 ** ((self.levels + 1) // 2)

    def offsets(self) -> list[int]:
        """Where each level's codes begin in a token's stream, in bits, and where the stream ends."""
        return stream_offsets(self.level_bits, self.head_dim)

    def layout(self) -> Layout:
        """angles and radii."""
        return Layout(
            BLOCK_TOKENS,
            {
                "angles": PlaneSpec(((self.offsets()[-1] + 7) // 8, BLOCK_TOKENS), torch.uint8, "codes"),
                "radii": PlaneSpec((self.head_dim >> self.levels, BLOCK_TOKENS), self.radius_dtype, "scales and norms"),
            },
        )

    def pack(self, codes: Sequence[Tensor]) -> Tensor:
        """Codes per level, integers [..., D/2^ℓ, t], to the plane `angles` [..., bytes, t]."""
        return pack_angles(codes, self.level_bits)

    def unpack(self, angles: Tensor, level: int) -> Tensor:
        """Codes of `level` (0 is the paper's 1), int32 [..., D/2^ℓ, t]."""
        byte, shift = self._places(level, angles.device)
        bits = self.level_bits[level]
        word = angles.index_select(-2, byte).to(torch.int32)
        if 8 % bits or self.offsets()[level] % bits:
            after = angles.index_select(-2, (byte + 1).clamp_max(angles.shape[-2] - 1)).to(torch.int32)
            word = word | after << 8
        return (word >> shift) & ((1 << bits) - 1)

    def _places(self, level: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Byte of each code of a level, and its lowest bit there [n, 1]."""
        return places(self.level_bits, self.head_dim, level, device)


class PolarView(View):
    """Packed tensors of a `Polar` segment with the tables of angles per level, each [2^b] for all rows or [B, 2^b]."""

    format = kind = "polar"

    def __init__(self, polar: Polar, planes: PackedTensors, tables: Sequence[Tensor]) -> None:
        self.polar, self.tables = polar, list(tables)
        self.angles, self.radii = planes["angles"], planes["radii"]

    @functools.cached_property
    @plain
    def directions(self) -> Tensor:
        """Cosine and sine of every angle of all levels, one level after the other: float32 [1 or B, entries, 2]."""
        rows = max(table.shape[0] if table.dim() == 2 else 1 for table in self.tables)
        angles = torch.cat([table.expand(rows, -1) for table in self.tables], dim=1)
        return torch.stack([angles.cos(), angles.sin()], dim=-1)

    def native(self, native: ModuleType) -> Any:
        """See `View`."""
        return native.polar(
            head_dim=self.polar.head_dim,
            unit=self.polar.radius_unit,
            level_bits=list(self.polar.level_bits),
            angles=self.angles,
            radii=self.radii,
            tables=self.tables,
        )

    def decode(self) -> Tensor:
        """x̂ as float32 [B, H, T, D]."""
        directions = []
        for level, table in enumerate(self.tables):
            codes = self.polar.unpack(self.angles, level)
            directions.append((_look_up(table.cos(), codes), _look_up(table.sin(), codes)))
        x = from_polar(directions, self.radii.float() * self.polar.radius_unit, dim=-2)  # [B, H, N, D, t]
        return x.transpose(-1, -2).flatten(2, 3)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Entries of [n] or, row by row, of [B, n] for codes int32 [B, ...]."""
    if table.dim() == 1:
        return table[codes]
    rows = torch.arange(table.shape[0], device=codes.device).view(-1, *[1] * (codes.dim() - 1))
    return table[rows, codes]
