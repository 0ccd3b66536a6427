"""Kernels around the search for trellis codes (`kernels/trellis_search.py`), and products with a basis of
6-bit entries (`kernels/basis.py`).

A call that packs vectors launches `units` and `first_gain`, then for each gain the search of
`trellis.py` and `keep_better`, and at last `write_stream`. Components of a row are padded to
CHANNELS, a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.encode_kernels import ROUNDER
from tersekv.kernels.triton.trellis import GAIN_STEPS, LARGEST, STATE_BITS, STATES, UNIT_GAIN

# Constants of `kernels/trellis.py` and `kernels/trellis_search.py`.
WARM_UP_BITS: tl.constexpr = tl.constexpr(48)
LOOK_AHEAD_BITS: tl.constexpr = tl.constexpr(40)
TYPICAL_COST: tl.constexpr = tl.constexpr(3.0)
MOST_MARGIN: tl.constexpr = tl.constexpr(16384.0)
"""256·√MARGIN."""

WIDTHS: tl.constexpr = tl.constexpr(9)
"""Number of codebooks: components have 0 to 8 bits."""


@triton.jit
def _rounded(x):
    """Round float32 below 2^22 to the nearest integer, ties to even."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def _gain(code):
    """Gains float32 of codes int32. float64, because the approximate exponential of float32 differs
    from the reference's in the last bit."""
    power = tl.exp2((code.to(tl.float64) - UNIT_GAIN) / GAIN_STEPS)
    return tl.where(code > 0, power.to(tl.float32), 0.0)


@triton.jit
def _gain_code(gain):
    """Nearest codes int32 of gains float32."""
    code = _rounded(tl.log2(tl.maximum(gain, 1e-30)) * GAIN_STEPS) + UNIT_GAIN
    return tl.minimum(tl.maximum(code, 0.0), 255.0).to(tl.int32)


@triton.jit
def _scaled(y, code, unit, limit):
    """Components y [VECTORS, CHANNELS] divided by their gain, as integers in units of costs."""
    x = tl.div_rn(y, tl.broadcast_to(_gain(tl.maximum(code, 1))[:, None], y.shape)) * unit[None, :]
    x = tl.where(x == x, x, 0.0)
    return _rounded(tl.minimum(tl.maximum(x, -limit[None, :]), limit[None, :])).to(tl.int32)


@triton.jit
def units(
    entries, factor, unit, limit, reach, place, stop, weight, bits, tables, D, CHANNELS: tl.constexpr
):  # fmt: skip
    """Compute `cost_units`, the factors of `first_gains`, and `first_search`. Grid (R,).

    weight float32 and bits uint8 [R, D], tables float32 [9, 256]. entries int16 [9, 256]; factor
    int16, unit, limit and reach float32 [R, D]; place and stop int32 [R] are written.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, CHANNELS)
    inside = d < D
    width = tl.load(bits + row * D + d, mask=inside, other=0).to(tl.int32)
    own = tl.load(weight + row * D + d, mask=inside, other=0.0)

    b = tl.arange(0, 16)  # codebooks, padded to a power of two
    at = b[:, None] * STATES + tl.arange(0, STATES)[None, :]
    table = tl.load(tables + at, mask=(b < WIDTHS)[:, None], other=0.0)
    ends = tl.max(tl.abs(table), axis=1)
    least = tl.maximum(ends, 1e-30)
    to_integers = tl.div_rn(least * 0.0 + LARGEST, least)
    codebook = _rounded(table * to_integers[:, None]).to(tl.int16)
    tl.store(entries + at, codebook, mask=(b < WIDTHS)[:, None] & (row == 0))
    end = tl.sum(tl.where(width[:, None] == b[None, :], ends[None, :], 0.0), axis=1)
    most = tl.maximum(end, 1e-30)

    expected = own * ((127 - 2 * width) << 23).to(tl.float32, bitcast=True)  # weight·4^−bits
    counted = (width > 0) & (expected > 0)
    number = tl.sum(counted.to(tl.int32), axis=0)
    ordered = tl.sort(tl.where(counted, expected, float("inf")))
    median = tl.sum(tl.where(d == (number - 1) // 2, ordered, 0.0), axis=0)
    median = tl.where(number > 0, median, 1.0)
    power = ((width * 0 + 1) << tl.maximum(width - 4, 0)).to(tl.float32)
    size = tl.sqrt_rn(tl.div_rn(own * TYPICAL_COST, own * 0.0 + median))
    factors = _rounded(tl.minimum(tl.div_rn(256.0 * size, power) * most, LARGEST + 1.0))
    factors = tl.minimum(factors, LARGEST * 1.0)
    units_ = tl.div_rn(factors, most)
    margin = tl.minimum(tl.div_rn(power * 0.0 + MOST_MARGIN, power), units_)
    tl.store(factor + row * D + d, factors.to(tl.int16), mask=inside)
    tl.store(unit + row * D + d, units_, mask=inside)
    tl.store(limit + row * D + d, tl.minimum(_rounded(factors + margin), LARGEST * 1.0), mask=inside)

    own = tl.where(width > 0, own, 0.0)
    total = tl.sum(tl.where(width > 0, expected, 0.0), axis=0)
    reached = tl.div_rn(own * end, tl.maximum(own * end * end + total, 1e-30))
    tl.store(reach + row * D + d, reached, mask=inside)

    brought = tl.cumsum(width, 0) - width
    early = inside & (brought < WARM_UP_BITS)
    begin = tl.sum(early.to(tl.int32), axis=0)
    most = tl.sum(tl.where(early, width, 0), axis=0) + LOOK_AHEAD_BITS
    again = (inside & (brought + tl.sum(width, axis=0) < most)).to(tl.int32)
    read = tl.sum((inside & (brought < most)).to(tl.int32) + again, axis=0)
    tl.store(place + row, begin)
    tl.store(stop + row, tl.minimum(read, begin + D))


@triton.jit
def first_gain(
    scaled, length, tried, kept, least, last, y, bits, unit, limit, reach, enough, n, D, VECTORS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Choose the first gains and scale components with them. Grid (tiles of vectors, R).

    y float32 [R, n, D]; enough float32 [R]; the rest see `units`. scaled int32 [R, n, D] is written,
    and per vector: length float32, the root mean square; tried uint8, the first gain; kept uint8, the
    gain of the length; least float32, infinity; last float32, the error below which no gain is tried.
    """
    row = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    d = tl.arange(0, CHANNELS)
    inside = d < D
    vector = row * n + v
    ok = (v < n)[:, None] & inside[None, :]
    x = tl.load(y + vector[:, None] * D + d[None, :], mask=ok, other=0.0)
    held = (tl.load(bits + row * D + d, mask=inside, other=0) > 0).to(tl.float32)
    number = tl.maximum(tl.sum(held, axis=0), 1.0)
    mean = tl.sum(x * x * held[None, :], axis=1)
    mean = tl.div_rn(mean, mean * 0.0 + number)
    root = tl.sqrt_rn(mean)
    code = _gain_code(root)
    far = tl.max(tl.abs(x) * tl.load(reach + row * D + d, mask=inside, other=0.0)[None, :], axis=1)
    first = tl.maximum(tl.minimum(code, 254) + 1, _gain_code(far))
    own = _gain(code)
    tl.store(length + vector, root, mask=v < n)
    tl.store(tried + vector, first.to(tl.uint8), mask=v < n)
    tl.store(kept + vector, code.to(tl.uint8), mask=v < n)
    tl.store(least + vector, own * 0.0 + float("inf"), mask=v < n)
    tl.store(last + vector, tl.load(enough + row) * (own * own), mask=v < n)
    own_unit = tl.load(unit + row * D + d, mask=inside, other=0.0)
    own_limit = tl.load(limit + row * D + d, mask=inside, other=0.0)
    tl.store(scaled + vector[:, None] * D + d[None, :], _scaled(x, first, own_unit, own_limit), mask=ok)


@triton.jit
def keep_better(
    scaled, windows, tried, middle, kept, least, last, found, y, weight, bits, tables, unit, limit, n, D, step,
    FIRST: tl.constexpr, NEXT: tl.constexpr, VECTORS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compare windows found with the gain `tried`. Grid (tiles of vectors, R).

    found and windows uint8 [R, n, D]. windows, kept and least are overwritten where the error with
    the gain tried, or with the gain of least squares, is below `least`. Vectors with least < last
    stay as they are. FIRST: the gain of least squares is written to middle uint8 [R, n]. NEXT: the
    gain `step` above `middle` is written to `tried`, and components are scaled with it.
    """
    row = tl.program_id(1).to(tl.int64)
    v = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    d = tl.arange(0, CHANNELS)
    inside = d < D
    vector = row * n + v
    at = vector[:, None] * D + d[None, :]
    ok = (v < n)[:, None] & inside[None, :]
    error = tl.load(least + vector, mask=v < n, other=0.0)
    due = (v < n) & (error >= tl.load(last + vector, mask=v < n, other=1.0))
    x = tl.load(y + at, mask=ok, other=0.0)
    width = tl.load(bits + row * D + d, mask=inside, other=0).to(tl.int32)
    own = tl.where(width > 0, tl.load(weight + row * D + d, mask=inside, other=0.0), 0.0)[None, :]
    window = tl.load(found + at, mask=ok & due[:, None], other=0)
    entry = tl.load(tables + (width * STATES)[None, :] + window.to(tl.int32), mask=ok, other=0.0)
    part = own * entry
    along, across = tl.sum(part * x, axis=1), tl.sum(part * entry, axis=1)
    fitting = _gain_code(tl.div_rn(along, tl.maximum(across, 1e-20)))
    first = tl.load(tried + vector, mask=v < n, other=0).to(tl.int32)
    gain = tl.load(kept + vector, mask=v < n, other=0).to(tl.int32)

    off = x - _gain(first)[:, None] * entry
    with_first = tl.sum(own * off * off, axis=1)
    better = due & (with_first < error)
    error, gain = tl.where(better, with_first, error), tl.where(better, first, gain)
    off = x - _gain(fitting)[:, None] * entry
    with_fitting = tl.sum(own * off * off, axis=1)
    best = due & (with_fitting < error)
    error, gain = tl.where(best, with_fitting, error), tl.where(best, fitting, gain)
    better = better | best
    tl.debug_barrier()  # warps that hold the same vectors have loaded what is overwritten now
    tl.store(least + vector, error, mask=better)
    tl.store(kept + vector, gain.to(tl.uint8), mask=better)
    if FIRST:
        tl.store(windows + at, tl.where(better[:, None], window, 0), mask=ok)
        tl.store(middle + vector, fitting.to(tl.uint8), mask=v < n)
    else:
        tl.store(windows + at, window, mask=ok & better[:, None])
        fitting = tl.load(middle + vector, mask=v < n, other=0).to(tl.int32)
    if NEXT:
        following = tl.minimum(tl.maximum(fitting + step, 0), 255)
        tl.store(tried + vector, following.to(tl.uint8), mask=v < n)
        own_unit = tl.load(unit + row * D + d, mask=inside, other=0.0)
        own_limit = tl.load(limit + row * D + d, mask=inside, other=0.0)
        tl.store(scaled + at, _scaled(x, following, own_unit, own_limit), mask=ok)


@triton.jit
def write_stream(stream, windows, bits, n, D, words, WORDS: tl.constexpr, CHANNELS: tl.constexpr):
    """Write streams int16 [R, n, words] of windows uint8 [R, n, D], see `pack_stream`. Grid (n, R,
    tiles of words)."""
    row = tl.program_id(1).to(tl.int64)
    vector = row * n + tl.program_id(0)
    word = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    d = tl.arange(0, CHANNELS)
    width = tl.load(bits + row * D + d, mask=d < D, other=0).to(tl.int32)
    new = tl.load(windows + vector * D + d, mask=d < D, other=0).to(tl.int32) >> (-width + STATE_BITS)
    place = (tl.cumsum(width, 0) - width)[None, :] - 16 * word[:, None]  # of the first bit in each word
    left = tl.minimum(tl.maximum(place, 0), 15)
    right = tl.minimum(tl.maximum(-place, 0), 15)
    part = tl.where((place > -STATE_BITS) & (place < 16), new[None, :] << left >> right, 0)
    # No two codes share a bit, so adding is OR.
    tl.store(stream + vector * words + word, tl.sum(part & 0xFFFF, axis=1).to(tl.int16), mask=word < words)


@triton.jit
def basis_entries(basis, d, c, ok, D):
    """Entries of a basis in rows d and channels c, float32. An entry has 6 bits, in one byte or
    two."""
    at = d * D + c
    bit = (at & 3) * 6
    first = basis + (at >> 2) * 3 + (bit >> 3)
    low = tl.load(first, mask=ok, other=0).to(tl.int32)
    high = tl.load(first + 1, mask=ok & (bit < 18), other=0).to(tl.int32)
    return ((((high << 8) | low) >> (bit & 7)) & 63).to(tl.float32) - 32.0


@triton.jit
def basis_product(
    out, x, x_b, x_h, x_r, x_c, basis, basis_b, basis_h, channels, channels_b, channels_h, H, R, D,
    COMBINE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Multiply vectors with a basis. Grid (B·H, tiles of outputs, tiles of rows); out is float32
    [B, H, R, D]. A program decodes its part of the basis once."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    basis += b.to(tl.int64) * basis_b + h.to(tl.int64) * basis_h
    channels += b.to(tl.int64) * channels_b + h.to(tl.int64) * channels_h
    x += b.to(tl.int64) * x_b + h.to(tl.int64) * x_h
    out += tl.program_id(0).to(tl.int64) * R * D
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, CHANNELS)
    if COMBINE:
        entries = basis_entries(basis, k[:, None], o[None, :], (k < D)[:, None] & (o < D)[None, :], D)
        factor = tl.load(channels + o, mask=o < D, other=0.0).to(tl.float32)
    else:
        entries = basis_entries(basis, o[:, None], k[None, :], (o < D)[:, None] & (k < D)[None, :], D)
        factor = tl.load(channels + k, mask=k < D, other=0.0).to(tl.float32)
    begin = tl.program_id(2) * ROWS
    for r in range(begin, tl.minimum(begin + ROWS, R)):
        own = tl.load(x + r * x_r + k * x_c, mask=k < D, other=0.0)
        if COMBINE:
            result = tl.sum(entries * own[:, None], axis=0) * factor
        else:
            result = tl.sum(entries * (own * factor)[None, :], axis=1)
        tl.store(out + r * D + o, result, mask=o < D)


@triton.jit
def basis_inverse(out, basis, basis_b, basis_h, channels, channels_b, channels_h, H, D, CHANNELS: tl.constexpr):
    """Invert the rows of a basis by Gauss-Jordan elimination with row pivots. Grid (rows·H,); out is
    float64 [rows·H, D, D].

    Step k exchanges component k with the channel of the largest remaining coefficient, so that rows
    are never swapped: their order is applied when the result is written.
    """
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    basis += b.to(tl.int64) * basis_b + h.to(tl.int64) * basis_h
    channels += b.to(tl.int64) * channels_b + h.to(tl.int64) * channels_h
    i = tl.arange(0, CHANNELS)
    ok = (i < D)[:, None] & (i < D)[None, :]
    a = basis_entries(basis, i[:, None], i[None, :], ok, D).to(tl.float64)
    a *= tl.load(channels + i, mask=i < D, other=0.0).to(tl.float64)[None, :]
    a = tl.where(ok, a, 0.0)
    pivot_of = i * 0  # row of each step
    step_of = i * 0 - 1  # step of each row
    for k in range(D):
        column = tl.sum(tl.where(i[None, :] == k, a, 0.0), axis=1)
        free = (i < D) & (step_of < 0)
        p = tl.argmax(tl.where(free, tl.abs(column), -1.0), axis=0)
        row = tl.sum(tl.where(i[:, None] == p, a, 0.0), axis=0)
        pivot = tl.sum(tl.where(i == p, column, 0.0), axis=0)
        row = tl.where(i == k, 1.0, row) / pivot
        rest = tl.where(i[None, :] == k, 0.0, a) - column[:, None] * row[None, :]
        a = tl.where(i[:, None] == p, row[None, :], rest)
        pivot_of = tl.where(i == k, p, pivot_of)
        step_of = tl.where(i == p, k, step_of)
    at = tl.program_id(0).to(tl.int64) * D * D + step_of[:, None] * D + pivot_of[None, :]
    # Rows that are dependent have no pivot for some step; nothing is written for those.
    tl.store(out + at, a, mask=ok & (step_of >= 0)[:, None])
