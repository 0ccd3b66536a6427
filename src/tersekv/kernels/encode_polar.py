"""Encode vectors to recursive polar coordinates with quantised angles (layout `polar`): contract
and torch reference.

Shapes: t tokens per block, D channels, L levels; level ℓ has D/2^ℓ angles of b_ℓ bits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tersekv.kernels.registry import operator


def to_polar(x: Tensor, levels: int) -> tuple[list[Tensor], Tensor]:
    """Convert x [..., D] to the angles of levels 1 to L, [..., D/2^ℓ] each, and the radii
    [..., D/2^L]. 2^L divides D."""
    angles = []
    radii = x
    for level in range(1, levels + 1):
        first, second = radii[..., 0::2], radii[..., 1::2]
        angle = torch.atan2(second, first)
        if level == 1:
            angle = torch.where(angle < 0, angle + 2 * math.pi, angle)
        angles.append(angle)
        radii = torch.hypot(first, second)
    return angles, radii


def nearest_angle(angle: Tensor, table: Tensor, circular: bool) -> Tensor:
    """Index of the nearest entry of an ascending table [n], or of each row's table in [B, n], for
    angles [B, ...]. circular: distances are measured on the circle of 2π."""
    if table.dim() == 2:
        return torch.stack([nearest_angle(a, t, circular) for a, t in zip(angle, table, strict=True)])
    if circular:
        # Start the circle half-way between the last entry and the first, so that it becomes a line.
        seam = (table[-1] - 2 * math.pi + table[0]) / 2
        angle, table = torch.remainder(angle - seam, 2 * math.pi), table - seam
    return torch.bucketize(angle.contiguous(), (table[1:] + table[:-1]) / 2)


def stream_offsets(level_bits: Sequence[int], D: int) -> list[int]:
    """Return the bit offset of each level in a token's stream, and the stream's length in bits."""
    return [0, *itertools.accumulate(bits * (D >> level) for level, bits in enumerate(level_bits, start=1))]


def places(level_bits: Sequence[int], D: int, level: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the byte of each code of a level (index 0 is level 1 of the paper) and the code's
    lowest bit in it [n, 1]."""
    codes = torch.arange(D >> (level + 1), device=device)
    start = stream_offsets(level_bits, D)[level] + level_bits[level] * codes
    return start >> 3, (start & 7).unsqueeze(-1).to(torch.int32)


def pack_angles(codes: Sequence[Tensor], level_bits: Sequence[int]) -> Tensor:
    """Pack the codes of all levels, integers [..., D/2^ℓ, t], to `angles` uint8 [..., bytes, t]."""
    D = 2 * codes[0].shape[-2]
    total = -(-stream_offsets(level_bits, D)[-1] // 8)
    stream = codes[0].new_zeros((*codes[0].shape[:-2], total + 1, codes[0].shape[-1]), dtype=torch.int32)
    for level, code in enumerate(codes):
        byte, shift = places(level_bits, D, level, code.device)
        # Codes do not overlap, so adding them is the same as OR. A code covers at most two bytes.
        word = code.to(torch.int32) << shift
        stream.index_add_(-2, byte, word & 0xFF)
        stream.index_add_(-2, byte + 1, word >> 8)
    return stream[..., :total, :].to(torch.uint8)


def _fake_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    t, D = x.shape[-2:]
    angles = x.new_empty((*x.shape[:-2], (stream_offsets(level_bits, D)[-1] + 7) // 8, t), dtype=torch.uint8)
    return angles, x.new_empty((*x.shape[:-2], D >> len(level_bits), t))


@operator("(Tensor x, int[] level_bits, Tensor[] tables) -> (Tensor, Tensor)", _fake_polar)
def encode_polar(x: Tensor, level_bits: Sequence[int], tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Quantise angles to the nearest entries of their level's table, and return the radii.

    An angle half-way between two entries, in float32, may go to either.

    Args:
        x: float32 [B, ..., t, D], 2^L divides D.
        level_bits: b_ℓ, 1 to 8, of levels 1 to L.
        tables: float32 per level, ascending, [2^b_ℓ] or [B, 2^b_ℓ]. Level 1 is on the circle of 2π.

    Returns:
        angles uint8 [B, ..., ceil(Σ b_ℓ·D/2^ℓ / 8), t], drawn in `layouts/polar.py`;
        radii float32 [B, ..., D/2^L, t].
    """
    angles, radii = to_polar(x, len(level_bits))
    codes = [
        nearest_angle(angle, table, circular=level == 0).transpose(-1, -2)
        for level, (angle, table) in enumerate(zip(angles, tables, strict=True))
    ]
    return pack_angles(codes, level_bits), radii.transpose(-1, -2).contiguous()
