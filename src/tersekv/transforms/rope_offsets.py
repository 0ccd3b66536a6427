"""Offset tables: cosines and sines of RoPE for the tokens after any token.

cos(n + m)θ and sin(n + m)θ follow from those of n and of m. For a pair that rotates slowly, they
are a polynomial of m over the M tokens of a block. All slow pairs together therefore need as many
terms as one polynomial has.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.transforms.rope_table import relative

OFFSETS = 256
"""Number of tokens in a block."""

INT16_OFFSETS = 64
"""Number of tokens in a block for keys rotated in int16. Their table fits in the L1 cache."""

TERMS = 16
"""Number of Chebyshev polynomials, of degree 0 to 15."""

LARGEST_ERROR = 1e-6
"""Maximum error of the cosine or sine of a slow pair in a block."""


class OffsetTable(NamedTuple):
    """Cosines and sines of offsets m = 0 to M − 1.

    table: float32 [rows, M]: cos mθ of each fast column, then sin mθ of each, then T_0(m) to
        T_15(m) if there are slow columns.
    matrix: float32 [2·slow, TERMS]: coefficients of cos mθ of each slow column in these
        polynomials, then of sin mθ.
    place: int32 [columns]: a column's index i among the fast ones, or −1 − i for index i among the
        slow ones.
    words: int16 [rows / 2, M, 2]: the table as returned by `in_words`.
    """

    table: Tensor
    matrix: Tensor
    place: Tensor
    words: Tensor


def in_words(rows: Tensor) -> Tensor:
    """Convert rows [n, M], n even, |x| ≤ 1, to int16 [n / 2, M, 2] with unit 1/32767, rows
    interleaved in pairs.
    """
    words = (rows.double() * 32767).round().clamp(-32767, 32767).to(torch.int16)
    return words.unflatten(0, (-1, 2)).transpose(1, 2).contiguous()


def int16_rope_offset_table(cos: Tensor, sin: Tensor, channels: Tensor) -> Tensor | None:
    """Return cosines and sines of offsets 0 to INT16_OFFSETS − 1 for a kernel that rotates keys in
    int16.

    The result is int16 [D/4, 2, INT16_OFFSETS, 2] with those of RoPE pairs 2i and 2i + 1
    interleaved. None if channels d and d + D/2 are not pairs of one column.

    cos, sin: float32 [INT16_OFFSETS, columns] of positions 0, 1, ….
    channels: int32 [D, 4] of `Rope.channels`.
    """
    D, half = len(channels), len(channels) // 2
    first, second, place = channels[:half], channels[half:], torch.arange(half)
    column = first[:, 1].long()
    if D % 4 or not (
        torch.equal(first[:, 0].long(), place + half)
        and bool((first[:, 3] == -1).all())
        and torch.equal(first[:, 1:3], second[:, 1:3])
        and torch.equal(first[:, 1], first[:, 2])
    ):
        return None
    return torch.stack([in_words(x[:, column].T) for x in relative(cos, sin)], 1).contiguous()


def rope_offset_table(cos: Tensor, sin: Tensor) -> OffsetTable:
    """Build the offset table.

    cos, sin: float32 [OFFSETS, columns] of positions 0, 1, …, all columns different. They may have
        a common factor.
    """
    rotated = relative(cos, sin)  # [cos and sin, M, columns]
    at = torch.linspace(-1, 1, OFFSETS, dtype=torch.float64)
    terms = torch.cos(torch.arange(TERMS) * torch.acos(at)[:, None])
    fitted = torch.linalg.lstsq(terms.expand(2, -1, -1), rotated).solution
    slow = (terms @ fitted - rotated).abs().amax((0, 1)) <= LARGEST_ERROR
    if 2 * int(slow.sum()) <= TERMS:  # otherwise they would need more terms than they save
        slow = torch.zeros_like(slow)
    place = torch.zeros(len(slow), dtype=torch.int32)
    place[~slow] = torch.arange(int((~slow).sum()), dtype=torch.int32)
    place[slow] = -1 - torch.arange(int(slow.sum()), dtype=torch.int32)
    fast_rows = rotated[:, :, ~slow].transpose(1, 2).flatten(0, 1)
    table = torch.cat([fast_rows, terms.T]) if slow.any() else fast_rows
    matrix = fitted[:, :, slow].transpose(1, 2).flatten(0, 1)
    return OffsetTable(table.float().contiguous(), matrix.float().contiguous(), place, in_words(table))
