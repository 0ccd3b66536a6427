"""Layout `polar`: recursive polar coordinates, as codes of angles and one radius per 2^L channels.

Each level has a codebook. A block of t = 32 tokens of one head, with L levels of b_ℓ bits and D
channels, has two tensors:

    angles  uint8 [ceil(Σ b_ℓ·D/2^ℓ / 8), t]   tokens are lanes: byte i of all 32 tokens is contiguous
    radii   16-bit float [D/2^L, t]            the norm of 2^L neighbouring channels, divided by 2^ceil(L/2)

A token's bytes are one stream of bits, least significant bit first. It holds the codes of level 1
in channel order, then those of level 2, and so on, without gaps. A code may cross a byte boundary;
unused bits of the last byte are 0. With D = 64 and 4/2/2/2 bits, aN is angle N of level 1 (channels
2N, 2N+1) and bN of level 2:

    byte    0        1       ...  15        16             ...  20              22
         [a1 a0] [a3 a2]  ...  [a31 a30] [b3 b2 b1 b0]  ...  [c3 c2 c1 c0]   [d3 d2 d1 d0]
    bits  4  4                                2 each              2 each          2 each

23 bytes of angles and 4 radii of 2 bytes are 31 bytes for 64 channels: 3.875 bits per element.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.kernels.encode_polar import pack_angles, places, stream_offsets
from tersekv.layouts.base import BLOCK_TOKENS, Layout, PackedTensors, PlaneSpec, View
from tersekv.tensors import plain
from tersekv.transforms.polar import from_polar


@dataclass(frozen=True)
class Polar:
    """Layout of one side of a layer.

    level_bits: bits per level, from level 1 on.
    """

    level_bits: tuple[int, ...]
    head_dim: int
    radius_dtype: torch.dtype = torch.float16

    @property
    def levels(self) -> int:
        """Number of levels L."""
        return len(self.level_bits)

    @property
    def radius_unit(self) -> float:
        """Power of two by which stored radii are divided.

        It keeps them in range without loss of precision.
        """
        return 2.0 ** ((self.levels + 1) // 2)

    def offsets(self) -> list[int]:
        """Return the start of each level's codes in a token's stream, and its end, in bits."""
        return stream_offsets(self.level_bits, self.head_dim)

    def layout(self) -> Layout:
        """Return the layout with angles and radii."""
        bytes_, radii = (self.offsets()[-1] + 7) // 8, self.head_dim >> self.levels
        return Layout(
            BLOCK_TOKENS,
            {
                "angles": PlaneSpec((bytes_, BLOCK_TOKENS), torch.uint8, "codes", token_axis=1),
                "radii": PlaneSpec((radii, BLOCK_TOKENS), self.radius_dtype, "scales and norms", token_axis=1),
            },
        )

    def pack(self, codes: Sequence[Tensor]) -> Tensor:
        """Pack codes per level, integers [..., D/2^ℓ, t], to the tensor `angles`
        [..., bytes, t].
        """
        return pack_angles(codes, self.level_bits)

    def unpack(self, angles: Tensor, level: int) -> Tensor:
        """Return the codes of `level` (0 is the paper's 1), int32 [..., D/2^ℓ, t]."""
        byte, shift = self._places(level, angles.device)
        bits = self.level_bits[level]
        word = angles.index_select(-2, byte).to(torch.int32)
        if 8 % bits or self.offsets()[level] % bits:
            after = angles.index_select(-2, (byte + 1).clamp_max(angles.shape[-2] - 1)).to(torch.int32)
            word = word | after << 8
        return (word >> shift) & ((1 << bits) - 1)

    def _places(self, level: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the byte of each code of a level, and the code's lowest bit in it [n, 1]."""
        return places(self.level_bits, self.head_dim, level, device)


class PolarView(View):
    """Packed tensors of a `Polar` segment, and codebooks of angles per level.

    tables: per level [2^b] for all batch rows, or [B, 2^b].
    """

    format = kind = "polar"

    def __init__(self, polar: Polar, planes: PackedTensors, tables: Sequence[Tensor]) -> None:
        self.polar, self.tables = polar, list(tables)
        self.angles, self.radii = planes["angles"], planes["radii"]

    @functools.cached_property
    @plain
    def directions(self) -> Tensor:
        """Cosine and sine of every angle, levels concatenated: float32 [1 or B, entries, 2]."""
        rows = max(table.shape[0] if table.dim() == 2 else 1 for table in self.tables)
        angles = torch.cat([table.expand(rows, -1) for table in self.tables], dim=1)
        return torch.stack([angles.cos(), angles.sin()], dim=-1)

    def native(self, native: ModuleType) -> Any:
        return native.polar(
            head_dim=self.polar.head_dim,
            unit=self.polar.radius_unit,
            level_bits=list(self.polar.level_bits),
            angles=self.angles,
            radii=self.radii,
            tables=self.tables,
        )

    def decode(self) -> Tensor:
        """Return x̂ as float32 [B, H, T, D]."""
        directions = []
        for level, table in enumerate(self.tables):
            codes = self.polar.unpack(self.angles, level)
            directions.append((_look_up(table.cos(), codes), _look_up(table.sin(), codes)))
        x = from_polar(directions, self.radii.float() * self.polar.radius_unit, dim=-2)  # [B, H, N, D, t]
        return x.transpose(-1, -2).flatten(2, 3)


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """Look up int32 codes [B, ...] in a codebook [n], or in one per batch row [B, n]."""
    if table.dim() == 1:
        return table[codes]
    rows = torch.arange(table.shape[0], device=codes.device).view(-1, *[1] * (codes.dim() - 1))
    return table[rows, codes]
