"""Kernels that encode the layout `polar` (`kernels/encode_polar.py`): codes of all levels, then their stream of bits.

No angle is computed: which side of a boundary a vector lies on is the sign of a product with the boundary's direction,
in float64, so that only angles that float32 cannot tell from a boundary go another way than the reference's.
"""

from __future__ import annotations

import triton
import triton.language as tl

CIRCLE: tl.constexpr = tl.constexpr(6.283185307179586)
HALF_CIRCLE: tl.constexpr = tl.constexpr(3.141592653589793)


@triton.jit
def _circular(x, y, table, BITS: tl.constexpr):
    """Codes int32 of directions (x, y), float64: the nearest of angles on a circle."""
    x = tl.where((x == 0) & (y == 0), 1.0, x)  # the angle of nothing is 0
    seam = (tl.load(table + ((1 << BITS) - 1)) - CIRCLE + tl.load(table)) * 0.5
    cos, sin = tl.cos(seam.to(tl.float64)), tl.sin(seam.to(tl.float64))
    # seen from the seam the circle is a line
    x, y = x * cos + y * sin, y * cos - x * sin
    code = tl.zeros(x.shape, tl.int32)
    for i in range((1 << BITS) - 1):
        middle = ((tl.load(table + i) - seam) + (tl.load(table + i + 1) - seam)) * 0.5
        ahead = y * tl.cos(middle.to(tl.float64)) - x * tl.sin(middle.to(tl.float64)) > 0
        far = tl.zeros(x.shape, tl.float32) + middle >= HALF_CIRCLE
        code += tl.where(far, (y < 0) & ahead, (y < 0) | ahead).to(tl.int32)
    return code


@triton.jit
def _quarter(x, y, table, BITS: tl.constexpr):
    """The same of x, y >= 0, angles up to π/2."""
    code = tl.zeros(x.shape, tl.int32)
    for i in range((1 << BITS) - 1):
        middle = ((tl.load(table + i) + tl.load(table + i + 1)) * 0.5).to(tl.float64)
        code += (y * tl.cos(middle) - x * tl.sin(middle) > 0).to(tl.int32)
    return code


@triton.jit
def polar_codes(
    codes, radii, x, tables, blocks_per_row, t, D, entries, LEVEL_BITS: tl.constexpr, TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks, tiles of radii). x float32 [blocks, t, D] to codes uint8 [blocks, entries, t], one level after the
    other, and radii float32 [blocks, D/2^L, t]. tables: of each level with the stride of a row."""
    L: tl.constexpr = len(LEVEL_BITS)
    block = tl.program_id(0).to(tl.int64)
    row = block // blocks_per_row
    token = tl.arange(0, TOKENS)[:, None]
    c = tl.program_id(1) * (CHUNKS << L) + tl.arange(0, CHUNKS << L)[None, :]
    r = tl.load(x + (block * t + token) * D + c, mask=(token < t) & (c < D), other=0.0)
    start = 0
    for level in tl.static_range(L):
        first, second = tl.split(tl.reshape(r, (TOKENS, r.shape[1] // 2, 2)))
        first, second = first.to(tl.float64), second.to(tl.float64)
        table = tables[level][0] + row * tables[level][1]
        if level == 0:
            code = _circular(first, second, table, LEVEL_BITS[level])
        else:
            code = _quarter(first, second, table, LEVEL_BITS[level])
        j = tl.program_id(1) * r.shape[1] // 2 + tl.arange(0, r.shape[1] // 2)[None, :]
        ok = (token < t) & (j < (D >> (level + 1)))
        tl.store(codes + (block * entries + start + j) * t + token, code.to(tl.uint8), mask=ok)
        start += D >> (level + 1)
        r = tl.sqrt(first * first + second * second).to(tl.float32)
    j = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)[None, :]
    tl.store(radii + (block * (D >> L) + j) * t + token, r, mask=(token < t) & (j < (D >> L)))


@triton.jit
def polar_pack(
    out, codes, t, D, entries, rows, LEVEL_BITS: tl.constexpr, TOKENS: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Grid (blocks, tiles of bytes). codes as `polar_codes` leaves them, to the stream uint8 [blocks, rows, t]."""
    block = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, TOKENS)[None, None, :]
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)[None, :, None]
    at = byte[:, None, None] * 8 + bit
    joined = tl.zeros((BYTES, 8, TOKENS), tl.int32)
    entry = 0
    start = 0
    for level in tl.static_range(len(LEVEL_BITS)):
        count = D >> (level + 1)
        inside = at - start
        ok = (inside >= 0) & (inside < count * LEVEL_BITS[level]) & (token < t)
        place = codes + (block * entries + entry + inside // LEVEL_BITS[level]) * t + token
        code = tl.load(place, mask=ok, other=0).to(tl.int32)
        joined |= tl.where(ok, ((code >> (inside % LEVEL_BITS[level])) & 1) << bit, 0)
        entry += count
        start += count * LEVEL_BITS[level]
    word = tl.sum(joined, axis=1).to(tl.uint8)
    ok = (byte < rows)[:, None] & (tl.arange(0, TOKENS) < t)[None, :]
    tl.store(out + (block * rows + byte[:, None]) * t + tl.arange(0, TOKENS)[None, :], word, mask=ok)
