"""Loaders of `polar` (`layouts/polar.py`): a radius is multiplied with cosines and sines of its angles, level by level.

A thread computes all 2^L channels of a radius. It holds its values in pairs of float16. Cosines and sines of an angle
are loaded together, as the pair that its value becomes. Angles of two bits are looked up in registers instead: for the
two values of a pair at once, first both cosines, then both sines.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tersekv.kernels.triton.leaves import BLOCK, CHANNELS, LEVEL_BITS, LEVELS, PADDED
from tersekv.kernels.triton.lookups import bytes_at, in_lanes
from tersekv.kernels.triton.tables import first_entry
from tersekv.kernels.triton.tiles import INTERPRETED, inverse, largest, product, stored_at, tokens_at

# Fields of a polar leaf: angles and radii with strides of batch row, head and block; the radii's
# unit; cosines and sines of all levels' tables as pairs of float16, int32 [rows, entries] (see
# `tables.first_entry`), and the row stride.


@triton.constexpr_function
def _turning(HIGH):
    """Return PTX that multiplies one half of a pair with the cosine and sine at a place of a table in
    bytes. The row of the table is at a multiple of its size, so that places are or-ed to the low half
    of its address."""
    half = "h" if HIGH else "l"
    return (
        "{ .reg .b64 a; .reg .b32 p, x; .reg .b16 l, h; or.b32 p, $2, $3; mov.b64 a, {p, $4}; "
        f"ld.global.nc.b32 p, [a]; mov.b32 {{l, h}}, $1; mov.b32 x, {{{half}, {half}}}; mul.rn.f16x2 $0, x, p; }}"
    )


@triton.constexpr_function
def _entry(S, LEAF, LEVEL):
    """Return the place of a level's first entry in bytes."""
    return 4 * first_entry(S[LEAF][LEVEL_BITS.value :], LEVEL)


@triton.constexpr_function
def _first_bit(S, LEAF, LEVEL):
    """Return the first bit of a level's codes in a token's stream."""
    spec = S[LEAF]
    return sum(spec[LEVEL_BITS.value + i] * (spec[CHANNELS.value] >> (i + 1)) for i in range(LEVEL))


@triton.constexpr_function
def _in_order(L):
    """Return the axes of a tile of 2^L channels that were joined pair by pair, in the channels' order."""
    return (0, 1, *range(L + 1, 1, -1))


@triton.jit
def _turned(parts, place, table, ENTRY: tl.constexpr, HELD: tl.constexpr):
    """Return the value of `_held` times cosine and sine, as int32 pairs of float16."""
    x = parts[HELD[0]]
    HIGH: tl.constexpr = HELD[1]
    if INTERPRETED or not is_cuda():
        pair = tl.load(table + (ENTRY + place) // 4)
        half = (x >> (16 * HIGH)).to(tl.int16).to(tl.float16, bitcast=True)
        cos = half * pair.to(tl.int16).to(tl.float16, bitcast=True)
        sin = half * (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        low, high = cos.to(tl.int16, bitcast=True).to(tl.int32), sin.to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 0xFFFF) | (high << 16)
    else:
        address = table.to(tl.int64)
        low, high = address.to(tl.int32) | ENTRY, (address >> 32).to(tl.int32)
        return tl.inline_asm_elementwise(_turning(HIGH), "=r,r,r,r,r", [x, place, low, high], tl.int32, True, 1)


@triton.constexpr_function
def _paired(S, LEAF):
    """Return the number of levels below the highest one whose angles are looked up for two values at once."""
    spec = S[LEAF]
    levels, bits = spec[LEVELS.value], spec[LEVEL_BITS.value :]
    found = 0
    for up in range(1, min(levels - 1, 3)):
        start = _first_bit(S, LEAF, levels - 1 - up)
        if bits[levels - 1 - up] != 2 or start % (2 << up):
            break
        found = up
    return found


@triton.constexpr_function
def _held(value, up, paired):
    """Return the pair and the half that hold a value before level `up` from the highest one. Values whose angles were
    looked up for two at once are in a pair with one of the other half of the channels."""
    pairs = 1 << max(up - 1, 0)
    return (value % pairs, value // pairs) if 0 < up - 1 <= paired else (value // 2, value % 2)


@triton.jit
def _directions(table, ENTRY: tl.constexpr, SINES: tl.constexpr):
    """Return the cosines or sines of four angles, two int32 [1, 1] of float16."""
    words = ()
    for k in tl.static_range(2):
        low = tl.load(table + (ENTRY // 4 + 2 * k) + tl.zeros((1, 1), tl.int32))
        high = tl.load(table + (ENTRY // 4 + 2 * k + 1) + tl.zeros((1, 1), tl.int32))
        words = words + (in_lanes(bytes_at(low, high, 0x7632 if SINES else 0x5410)),)  # type: ignore[assignment]
    return words


BOTH: tl.constexpr = tl.constexpr("{ .reg .b32 p; prmt.b32 p, $2, $3, $4; mul.rn.f16x2 $0, $1, p; }")
"""PTX that multiplies a pair with two entries of a table of four."""


@triton.jit
def _both(x, words, places):
    """Return pairs of float16, int32, times entries of a table of four. places: those of the entries' bytes."""
    if INTERPRETED:
        y = bytes_at(words[0], words[1], places)
        low = x.to(tl.int16).to(tl.float16, bitcast=True) * y.to(tl.int16).to(tl.float16, bitcast=True)
        high = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True) * (y >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        low, high = low.to(tl.int16, bitcast=True).to(tl.int32), high.to(tl.int16, bitcast=True).to(tl.int32)
        return (low & 0xFFFF) | (high << 16)
    else:
        return tl.inline_asm_elementwise(BOTH, "=r,r,r,r,r", [x, words[0], words[1], places], tl.int32, True, 1)


@triton.jit
def _turned_in_pairs(parts, angles, j, table, UP: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Return the pairs of a level, whose angles have two bits, from those of the level above. Twice an angle's code is
    brought to the places of a pair: to bits 0 to 3, and for the second value to bits 8 to 11."""
    LEVEL: tl.constexpr = S[LEAF][LEVELS] - 1 - UP
    ENTRY: tl.constexpr = _entry(S, LEAF, LEVEL)
    bit = _first_bit(S, LEAF, LEVEL) + (2 << UP) * j
    code = tl.load(angles + (bit >> 3) * S[LEAF][BLOCK]).to(tl.int32)
    if UP == 1:
        places = ((((code >> (bit & 7)) & 15) * 0x82) & 0x606) * 0x11 + 0x1010
    else:  # the places of the second pair are the upper half
        code = (code * 0x4001) & 0x330033
        places = ((code * 0x22) & 0x6060606) * 0x11 + 0x10101010
    directions = (_directions(table, ENTRY, False), _directions(table, ENTRY, True))
    grown = ()
    for k in tl.static_range(2 * UP):
        grown = grown + (_both(parts[k // 2], directions[k % 2], places >> (16 * (k // 2))),)  # type: ignore[assignment]
    return grown


@triton.jit
def _polar(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Return x̂ divided by the radii's unit and by a power of two, float16 [N, channels], and that
    power: 1, or near the largest radius where bfloat16 may exceed float16. A thread computes all
    2^L channels of a radius."""
    L: tl.constexpr = S[LEAF][LEVELS]
    J: tl.constexpr = S[LEAF][PADDED] >> L
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, J)[None, :]
    radii = tokens_at(leaf, 4, b, h, n0, i, S, LEAF) + j * S[LEAF][BLOCK]
    x = tl.load(radii, mask=(n0 + i < T) & (j < S[LEAF][CHANNELS] >> L), other=0.0)
    most = 1.0
    if x.dtype != tl.float16:
        most = largest(x.to(tl.float32))
        x = (x.to(tl.float32) * inverse(most)).to(tl.float16)
    angles = stored_at(leaf, 0, b, h, n0, i, T, S, LEAF)
    table = leaf[9] + b * leaf[10]
    if S[LEAF][CHANNELS] != S[LEAF][PADDED]:
        j = tl.minimum(j, (S[LEAF][CHANNELS] >> L) - 1)
    parts = (x.to(tl.int16, bitcast=True).to(tl.int32),)
    PAIRED: tl.constexpr = _paired(S, LEAF) if INTERPRETED or is_cuda() else 0
    for up in tl.static_range(L):
        if up > 0 and up <= PAIRED:
            parts = _turned_in_pairs(parts, angles, j, table, up, S, LEAF)
        else:
            places = _places(angles, j, up, S, LEAF)
            grown = ()
            for k in tl.static_range(1 << up):
                grown = grown + (_turned(parts, places[k], table, _entry(S, LEAF, L - 1 - up), _held(k, up, PAIRED)),)  # type: ignore[assignment]
            parts = grown  # type: ignore[assignment]
    joined = ()
    for k in tl.static_range(1 << (L - 1)):
        low = parts[k].to(tl.int16).to(tl.float16, bitcast=True)
        joined = joined + (tl.join(low, (parts[k] >> 16).to(tl.int16).to(tl.float16, bitcast=True)),)  # type: ignore[assignment]
    for level in tl.static_range(L - 1):
        larger = ()
        for k in tl.static_range(1 << (L - 2 - level)):
            larger = larger + (tl.join(joined[2 * k], joined[2 * k + 1]),)  # type: ignore[assignment]
        joined = larger
    return tl.reshape(tl.permute(joined[0], _in_order(L)), (N, S[LEAF][PADDED])), most  # type: ignore[misc]


@triton.jit
def _places(angles, j, UP: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Return the places in bytes of the 2^UP angles of a level that belong to the radii j [1, J], a
    tuple of int32 [N, J]. angles: pointers [N, 1] to tokens."""
    LEVEL: tl.constexpr = S[LEAF][LEVELS] - 1 - UP
    B: tl.constexpr = S[LEAF][LEVEL_BITS + LEVEL]
    ALL: tl.constexpr = B << UP
    START: tl.constexpr = _first_bit(S, LEAF, LEVEL)
    MASK: tl.constexpr = ((1 << B) - 1) << 2
    places = ()
    if ALL % 8 == 0 and START % 8 == 0:
        bytes = ()
        for i in tl.static_range(ALL // 8):
            at = START // 8 + ALL // 8 * j + i
            bytes = bytes + (tl.load(angles + at * S[LEAF][BLOCK]).to(tl.int32),)  # type: ignore[assignment]
        for k in tl.static_range(1 << UP):
            code = bytes[B * k // 8] >> (B * k % 8)
            if B * k % 8 + B > 8:
                code |= bytes[B * k // 8 + 1] << (8 - B * k % 8)
            places = places + ((code << 2) & MASK,)  # type: ignore[assignment]
    else:
        for k in tl.static_range(1 << UP):
            bit = START + ALL * j + B * k
            code = tl.load(angles + (bit >> 3) * S[LEAF][BLOCK]).to(tl.int32)
            if 8 % B != 0 or START % B != 0:
                over = (bit & 7) + B > 8
                code |= tl.load(angles + ((bit >> 3) + 1) * S[LEAF][BLOCK], mask=over, other=0).to(tl.int32) << 8
            places = places + (((code >> (bit & 7)) << 2) & MASK,)  # type: ignore[assignment]
    return places


@triton.jit
def decode_polar(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Decode to x̂, float32 [N, channels]."""
    x, most = _polar(leaf, b, h, n0, T, S, LEAF, N)
    return x.to(tl.float32) * (leaf[8] * most)


@triton.jit
def load_keys_polar(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores [N, rows] of q float32 [channels, rows]."""
    x, most = _polar(leaf, b, h, n0, T, S, LEAF, N)
    return product(x, q.to(tl.float16)) * (leaf[8] * most)


@triton.jit
def load_values_polar(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [N, rows]."""
    x, most = _polar(leaf, b, h, n0, T, S, LEAF, N)
    return product(tl.trans(x), p.to(tl.float16)) * (leaf[8] * most)
