"""Encoding kernels: grids and signs, Hadamard rotations, outliers, polar angles.

Grids (`kernels/encode_grid.py`): ranges of groups, nearest codes, and their packing into lanes. A
*unit* is 32 codes of a lane, as in `tiles.py`; its 16 pairs of half-words become `bits` words. The
place of each code is fixed at compile time, so packing is only shifts and ors of registers.

The fast Hadamard transform (`kernels/rotate.py`) needs D·log₂D additions per vector, in registers.

Outliers (`kernels/encode_sparse.py`): thresholds, and entries packed by block.

Polar (`kernels/encode_polar.py`): codes of all levels, then their bit stream. No angle is computed.
The side of a boundary on which a vector is follows from the sign of a float64 product with the
boundary's direction. Codes differ from the reference's only for angles that float32 cannot
distinguish from a boundary.
"""

from __future__ import annotations

import triton
import triton.language as tl

CODES: tl.constexpr = tl.constexpr(0)
INTEGERS: tl.constexpr = tl.constexpr(1)
TABLE: tl.constexpr = tl.constexpr(2)
"""Input of packing: codes, elements for the nearest integers, or elements for the nearest entries
of a table."""

ROUNDER: tl.constexpr = tl.constexpr(12582912.0)
"""1.5·2^23: adding and subtracting it rounds to the nearest integer, ties to even."""


@triton.jit
def pairs_of(codes):
    """Return the 16 pairs of units from their codes int32 [L, U, 32]. Pair i has code 2i in its low
    half and 2i + 1 in its high half; a tuple of int32 [L, U]."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1], 16, 2)))
    tiles = (low | (high << 16),)
    for level in tl.static_range(4):
        halves = ()
        for i in tl.static_range(1 << level):
            even, odd = tl.split(tl.reshape(tiles[i], (codes.shape[0], codes.shape[1], 8 >> level, 2)))
            halves = halves + (even, odd)  # type: ignore[assignment]
        tiles = halves  # type: ignore[assignment]
    pairs = ()
    for i in tl.static_range(16):  # each split removed the lowest bit of a pair's number
        tile = tiles[(i & 1) * 8 + (i & 2) * 2 + (i & 4) // 2 + i // 8]
        pairs = pairs + (tl.reshape(tile, (codes.shape[0], codes.shape[1])),)  # type: ignore[assignment]
    return pairs


@triton.jit
def words_of(pairs, BITS: tl.constexpr):
    """Pack the 16 pairs of units into words: a tuple of BITS int32 tensors."""
    DIRECT: tl.constexpr = 16 // BITS
    SPARE: tl.constexpr = 16 - BITS * DIRECT
    WORDS: tl.constexpr = 1 if SPARE == 0 else (3 if BITS == 6 else BITS)
    CODES_: tl.constexpr = DIRECT if SPARE == 0 else (8 if BITS == 6 else 16)
    words = ()
    for w in tl.static_range(BITS):
        word = pairs[0] & 0
        for s in tl.static_range(DIRECT):
            word |= pairs[w // WORDS * CODES_ + w % WORDS * DIRECT + s] << (s * BITS)
        for j in tl.static_range(SPARE):  # the remaining codes of a unit, bit by bit in the words' spare bits
            spare = pairs[w // WORDS * CODES_ + WORDS * DIRECT + (w % WORDS * SPARE + j) // BITS]
            word |= ((spare >> ((w % WORDS * SPARE + j) % BITS)) & 0x10001) << (DIRECT * BITS + j)
        words = words + (word,)  # type: ignore[assignment]
    return words


@triton.jit
def nearest(y, table, BITS: tl.constexpr):
    """Index int32 of the nearest entry of an ascending table for y float32, by bisection. Ties go
    to the lower entry."""
    code = tl.zeros(y.shape, tl.int32)
    for k in tl.static_range(BITS):
        middle = code + ((1 << (BITS - 1 - k)) - 1)
        above = y > (tl.load(table + middle + 1) + tl.load(table + middle)) * 0.5
        code += tl.where(above, 1 << (BITS - 1 - k), 0)
    return code


@triton.jit
def _of_group(plane, b, h, n, token, channel, GROUP: tl.constexpr, PER_TOKEN: tl.constexpr):
    """Return pointers to the scale or offset of elements. plane: a tensor and five strides; token
    and channel count inside the block."""
    at = plane[0] + b.to(tl.int64) * plane[1] + h.to(tl.int64) * plane[2] + n.to(tl.int64) * plane[3]
    if PER_TOKEN:
        return at + (channel // GROUP) * plane[4] + token * plane[5]
    else:
        return at + (token // GROUP) * plane[4] + channel * plane[5]


@triton.jit
def _code(
    x, scale, offset, table, b, h, n, token, channel, ok, BITS: tl.constexpr, GROUP: tl.constexpr,
    PER_TOKEN: tl.constexpr, WHAT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Compute the codes int32 of elements at x (pointers); 0 where not ok."""
    y = tl.load(x, mask=ok, other=0)
    if WHAT == CODES:
        return y.to(tl.int32)
    else:
        if HAS_OFFSET:
            at = _of_group(offset, b, h, n, token, channel, GROUP, PER_TOKEN)
            y -= tl.load(at, mask=ok, other=0.0).to(tl.float32)
        if HAS_SCALE:
            at = _of_group(scale, b, h, n, token, channel, GROUP, PER_TOKEN)
            step = tl.load(at, mask=ok, other=1.0).to(tl.float32)
            y = tl.div_rn(y, tl.where(step == 0, 1.0, step))
        if WHAT == INTEGERS:
            y = tl.minimum(tl.maximum(y, 0.0), ((1 << BITS) - 1) * 1.0)
            code = ((y + ROUNDER) - ROUNDER).to(tl.int32)
        else:
            code = nearest(y, table, BITS)
        return tl.where(ok, code, 0)


@triton.jit
def pack(
    out, x, x_b, x_h, x_t, x_c, scale, offset, table, H, N, t, P, L, lanes, W, BITS: tl.constexpr,
    OF_KEYS: tl.constexpr, GROUP: tl.constexpr, PER_TOKEN: tl.constexpr, WHAT: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr, LANES: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Encode and pack. Grid (B·H·N, tiles of lanes). x is [B, H, N·t, channels] with these strides;
    a block of it is P packed × L lanes. out: int32 [B·H·N, lanes/16, W, 16]. OF_KEYS: lanes are
    tokens, else channels."""
    block = tl.program_id(0)
    n, h, b = block % N, block // N % H, block // N // H
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)[:, None, None]
    unit = tl.arange(0, UNITS)[None, :, None]
    first = x + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + (n * t).to(tl.int64) * x_t
    packed = unit * 32 + tl.arange(0, 32)[None, None, :]
    ok = (lane < L) & (packed < P)
    if OF_KEYS:
        token, channel = lane, packed
    else:
        token, channel = packed, lane
    code = _code(
        first + token.to(tl.int64) * x_t + channel * x_c, scale, offset, table, b, h, n, token, channel, ok, BITS,
        GROUP, PER_TOKEN, WHAT, HAS_SCALE, HAS_OFFSET,
    )  # fmt: skip
    words = words_of(pairs_of(code), BITS)
    lane, unit = tl.reshape(lane, (LANES, 1)), tl.reshape(unit, (1, UNITS))
    for v in tl.static_range(BITS):
        word = unit * BITS + v
        at = ((block.to(tl.int64) * (lanes // 16) + lane // 16) * W + word) * 16 + lane % 16
        tl.store(out + at, words[v], mask=(lane < lanes) & (word < W))


@triton.jit
def ranges(
    low, high, x, x_b, x_h, x_t, x_c, H, N, t, rows, columns, GROUP: tl.constexpr, PER_TOKEN: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Compute ranges of groups. Grid (B·H·N, tiles of a plane). x as in `pack`, to low and high
    float32 [B·H·N, rows, columns]: rows are groups, columns are tokens (PER_TOKEN) or channels."""
    block = tl.program_id(0)
    n, h, b = block % N, block // N % H, block // N // H
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    ok = entry < rows * columns
    group, column = entry // columns, entry % columns
    first = x + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + (n * t).to(tl.int64) * x_t
    if PER_TOKEN:
        at, step = first + column.to(tl.int64) * x_t + group * GROUP * x_c, x_c
    else:
        at, step = first + (group * GROUP).to(tl.int64) * x_t + column * x_c, x_t
    least = tl.load(at, mask=ok, other=0.0)
    most = least
    for _ in range(1, GROUP):
        at += step
        y = tl.load(at, mask=ok, other=0.0)
        least = tl.minimum(least, y, propagate_nan=tl.PropagateNan.ALL)
        most = tl.maximum(most, y, propagate_nan=tl.PropagateNan.ALL)
    out = block.to(tl.int64) * rows * columns + entry
    tl.store(low + out, least, mask=ok)
    tl.store(high + out, most, mask=ok)


@triton.jit
def signs(out, x, sketch, t, D, M, rows, TOKENS: tl.constexpr, BYTES: tl.constexpr):
    """Compute the signs of S·x in float64. Grid (blocks, tiles of tokens, tiles of bytes). x
    float32 [blocks, t, D] and S float32 [M, D], to out uint8 [blocks, rows, t]."""
    block = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(2) * (BYTES * 8) + tl.arange(0, BYTES * 8)
    x += (block * t + token) * D
    sketch += row * D
    sketched = tl.zeros((TOKENS, BYTES * 8), tl.float64)
    for _ in range(D):
        component = tl.load(x, mask=token < t, other=0.0).to(tl.float64)
        sketched += component[:, None] * tl.load(sketch, mask=row < M, other=0.0).to(tl.float64)[None, :]
        x += 1
        sketch += 1
    bit = ((sketched >= 0) & (row < M)[None, :]).to(tl.int32)
    bit = tl.reshape(bit, (TOKENS, BYTES, 8)) << tl.arange(0, 8)[None, None, :]
    byte = tl.program_id(2) * BYTES + tl.arange(0, BYTES)[None, :]
    at = out + (block * rows + byte) * t + token[:, None]
    tl.store(at, tl.sum(bit, axis=2).to(tl.uint8), mask=(token < t)[:, None] & (byte < rows))


@triton.jit
def hadamard(
    out, x, matrix, order, signs, rows, D, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG: tl.constexpr
):  # fmt: skip
    """Apply a random Hadamard rotation. Grid (tiles of rows, blocks of the matrix). x float32
    [rows, D] to out of its shape; a program handles BLOCK = 2^LOG channels."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    taken = row * D + tl.load(order + channel)[None, :]
    y = tl.load(x + taken, mask=row < rows, other=0.0).to(tl.float64) * tl.load(signs + channel)[None, :]
    for _ in tl.static_range(LOG):  # the lowest bit of a channel's number is done, and becomes the highest
        first, second = tl.split(tl.reshape(y, (ROWS, BLOCK // 2, 2)))
        y = tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (ROWS, BLOCK))
    entry = matrix + tl.program_id(1) * BLOCK * D + tl.load(order + tl.program_id(1) * BLOCK)
    y *= tl.abs(tl.load(entry)).to(tl.float64)
    tl.store(out + row * D + channel[None, :], y.to(tl.float32), mask=row < rows)


BLOCK_TOKENS: tl.constexpr = tl.constexpr(32)
CHANNEL_BITS: tl.constexpr = tl.constexpr(11)


@triton.jit
def _block(block, x, x_b, x_h, x_t, B, H):
    """Return a pointer to the beginning of a block. Blocks are numbered by block, then batch row,
    then head."""
    h, b, n = block % H, block // H % B, block // H // B
    return x + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + (n * BLOCK_TOKENS).to(tl.int64) * x_t


@triton.jit
def count_outliers(
    counts, chosen, x_b, x_h, x_t, x_c, B, H, D, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Count outliers per block. Grid (N·B·H). chosen uint8 [B, H, N·32, D] with these strides, to
    counts int32 [N·B·H]."""
    at = _block(tl.program_id(0), chosen, x_b, x_h, x_t, B, H)
    token, c = tl.arange(0, TOKENS)[:, None], tl.arange(0, CHANNELS)[None, :]
    found = tl.zeros((TOKENS, CHANNELS), tl.int32)
    for t0 in range(0, BLOCK_TOKENS, TOKENS):
        found += tl.load(at + (t0 + token) * x_t + c * x_c, mask=c < D, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(tl.reshape(found, (TOKENS * CHANNELS,)), axis=0))


@triton.jit
def pack_outliers(
    places, values, starts, chosen, x_b, x_h, x_t, x_c, residual, y_b, y_h, y_t, y_c, B, H, D, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Pack outliers. Grid (N·B·H). The entries of a block are stored in places and values from
    starts int32 [N·B·H] on, ordered by token and channel."""
    x = _block(tl.program_id(0), chosen, x_b, x_h, x_t, B, H)
    y = _block(tl.program_id(0), residual, y_b, y_h, y_t, B, H)
    entry = tl.load(starts + tl.program_id(0))
    i = tl.arange(0, TOKENS * CHANNELS)
    token, c = i // CHANNELS, i % CHANNELS
    for t0 in range(0, BLOCK_TOKENS, TOKENS):
        kept = tl.load(x + (t0 + token) * x_t + c * x_c, mask=c < D, other=0).to(tl.int32)
        at = entry + tl.cumsum(kept, 0) - kept
        value = tl.load(y + (t0 + token) * y_t + c * y_c, mask=kept != 0, other=0.0)
        tl.store(places + at, (((t0 + token) << CHANNEL_BITS) | c).to(tl.int16), mask=kept != 0)
        tl.store(values + at, value.to(tl.float16), mask=kept != 0)
        entry += tl.sum(kept, axis=0)


@triton.jit
def quantiles(low, high, vectors, n, first, second, rest, part, ENTRIES: tl.constexpr):
    """Interpolate quantiles. Grid (vectors). float32 [vectors, n] to low and high [vectors]: the
    elements of ranks `first` and `second` from either end, weighted by `rest` and `part`."""
    i = tl.arange(0, ENTRIES)
    row = tl.program_id(0).to(tl.int64)
    x = tl.sort(tl.load(vectors + row * n + i, mask=i < n, other=float("inf")))
    tl.store(low + row, _ranked(x, i, first) * rest + _ranked(x, i, second) * part)
    tl.store(high + row, _ranked(x, i, n - 1 - first) * rest + _ranked(x, i, n - 1 - second) * part)


@triton.jit
def _ranked(x, i, rank):
    return tl.sum(tl.where(i == rank, x, 0.0), axis=0)


CIRCLE: tl.constexpr = tl.constexpr(6.283185307179586)
HALF_CIRCLE: tl.constexpr = tl.constexpr(3.141592653589793)


@triton.jit
def _circular(x, y, table, BITS: tl.constexpr):
    """Codes int32 of directions (x, y), float64: the nearest of the angles on a circle."""
    x = tl.where((x == 0) & (y == 0), 1.0, x)  # the angle of a zero vector is 0
    seam = (tl.load(table + ((1 << BITS) - 1)) - CIRCLE + tl.load(table)) * 0.5
    cos, sin = tl.cos(seam.to(tl.float64)), tl.sin(seam.to(tl.float64))
    # Relative to the seam, the circle is a line.
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
    """Codes int32 of directions with x, y >= 0, that is angles up to π/2."""
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
    """Compute polar codes. Grid (blocks, tiles of radii). x float32 [blocks, t, D] to codes uint8
    [blocks, entries, t], one level after the other, and radii float32 [blocks, D/2^L, t]. tables:
    the table of each level and the stride of its rows."""
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
    """Pack polar codes. Grid (blocks, tiles of bytes). codes as `polar_codes` writes them, to the
    stream uint8 [blocks, rows, t]."""
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
