"""Cosines and sines of tokens from a table of 256 rows (`codecs/transforms/rope_table.py`), by angle addition.

Fields of angles, from FIRST on: the table, its columns, places with strides of batch row, head and token, 1 where a
token's position is the first one's plus its number (else 0), and RoPE as pairs of channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

PAIRS: tl.constexpr = tl.constexpr(7)

# Where angles come from: rows of the tokens' own, any positions, or positions that follow one another.
GIVEN: tl.constexpr = tl.constexpr(1)
ANYWHERE: tl.constexpr = tl.constexpr(2)
CONSECUTIVE: tl.constexpr = tl.constexpr(3)

DIGITS: tl.constexpr = tl.constexpr(4)
DIGIT_BITS: tl.constexpr = tl.constexpr(6)
BASE: tl.constexpr = tl.constexpr(64)


@triton.jit
def _place(angles, FIRST: tl.constexpr, b, h, n):
    """Positions of tokens n, or their rows in a table of their own."""
    at = angles[FIRST + 2] + b.to(tl.int64) * angles[FIRST + 3] + h.to(tl.int64) * angles[FIRST + 4]
    return tl.load(at + n * angles[FIRST + 5]) + n * angles[FIRST + 6]


@triton.jit
def _row(angles, FIRST: tl.constexpr, row, cos_column, sin_column, mask):
    at = angles[FIRST] + row.to(tl.int64) * 2 * angles[FIRST + 1]
    cos = tl.load(at + cos_column, mask=mask, other=1.0)
    return cos, tl.load(at + angles[FIRST + 1] + sin_column, mask=mask, other=0.0)


@triton.jit
def _digit(angles, FIRST: tl.constexpr, size, DIGIT: tl.constexpr, column, mask):
    row = BASE * DIGIT + ((size >> (DIGIT_BITS * DIGIT)) & (BASE - 1))
    return _row(angles, FIRST, row, column, column, mask)


@triton.jit
def _of_position(angles, FIRST: tl.constexpr, place, column, mask):
    size = tl.abs(place)
    cos, sin = _digit(angles, FIRST, size, DIGITS - 1, column, mask)
    for i in tl.static_range(DIGITS - 1):
        x, y = _digit(angles, FIRST, size, DIGITS - 2 - i, column, mask)
        cos, sin = cos * x - sin * y, sin * x + cos * y
    return cos, tl.where(place < 0, -sin, sin)


@triton.jit
def cos_sin(angles, FIRST: tl.constexpr, b, h, n, cos_column, sin_column, mask, KIND: tl.constexpr):
    """cos and sin of tokens n; columns and mask are broadcast with n. Positions have one column for both."""
    place = _place(angles, FIRST, b, h, n)
    if KIND == GIVEN:
        cos, sin = _row(angles, FIRST, place, cos_column, sin_column, mask)
    else:
        cos, sin = _of_position(angles, FIRST, place, cos_column, mask)
    return cos, sin


@triton.jit
def tile_cos_sin(
    angles, FIRST: tl.constexpr, b, h, n0, T, cos_column, sin_column, mask, N: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """cos and sin [N, channels] of tokens n0 to n0 + N, columns and mask [1, channels]. Of consecutive ones, the first
    token's rotation times those of 0 to N − 1 steps, which all tiles read."""
    if KIND == CONSECUTIVE:
        a, b_ = _of_position(angles, FIRST, _place(angles, FIRST, b, h, n0), cos_column, mask)
        i = tl.arange(0, N)[:, None]
        x, y = _digit(angles, FIRST, i, 0, cos_column, mask)
        if N > BASE:
            u, v = _digit(angles, FIRST, i, 1, cos_column, mask)
            x, y = x * u - y * v, y * u + x * v
        cos, sin = a * x - b_ * y, b_ * x + a * y
    else:
        n = tl.minimum(n0 + tl.arange(0, N), T - 1)[:, None]
        cos, sin = cos_sin(angles, FIRST, b, h, n, cos_column, sin_column, mask, KIND)
    return cos, sin
