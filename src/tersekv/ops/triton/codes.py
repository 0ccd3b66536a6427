"""Pieces that all loaders share: packed words to numbers in registers, and the order in which they come.

A tile of codes is [groups, 32 lanes, packed axis]. A *unit* is 32 packed codes of a lane: `bits` words for every width
(`ops/lanes.py`), 16 pairs of half-words. The packed axis of a tile runs over (pair i, unit u, half j), not over
u·32 + 2i + j: a sum over it may take any order, and in this one a thread of a 16×16 matrix product owns whole words
of one unit, whose halves are neighbours, so that words go from memory to registers once, 16 lanes (64 bytes) side by
side, and are unpacked by a shift and a mask per pair. Coefficients (query or softmax weight) are loaded in that order.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Kernels run on the CPU, where bfloat16 has no arithmetic."""


@triton.jit
def unit_order(UNITS: tl.constexpr, PAIRS: tl.constexpr):
    """Index on the packed axis of each place of a tile: int32 [UNITS·PAIRS·2]."""
    k = tl.arange(0, UNITS * PAIRS * 2)
    unit = (k // 2) % UNITS
    return unit * (2 * PAIRS) + (k // (2 * UNITS)) * 2 + k % 2


@triton.jit
def power_of_two(most):
    """The power of two that begins float32 numbers, 1 for 0: dividing by it loses nothing."""
    power = (most.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power == 0, 1.0, power)


@triton.jit
def largest(x):
    """A power of two near the largest absolute value of a tile: what it is divided by to fit float16."""
    return power_of_two(tl.max(tl.reshape(tl.abs(x), (x.numel,)), axis=0))


@triton.jit
def product(x, y):
    """x·y of 16-bit operands, float32."""
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    else:
        return tl.dot(x, y)


@triton.jit
def word_pairs(codes, at, left, BITS: tl.constexpr):
    """Pairs of codes, one in each half of an int32: [G, L, 16, U] from units that begin at `codes + at` [G, L, U] and
    have `left` words (broadcast to it; past them there is nothing). Words of a unit lie 16 apart."""
    DIRECT: tl.constexpr = 16 // BITS
    SPARE: tl.constexpr = 16 - BITS * DIRECT
    UNIT_WORDS: tl.constexpr = 1 if SPARE == 0 else (3 if BITS == 6 else BITS)
    UNIT_CODES: tl.constexpr = DIRECT if SPARE == 0 else (8 if BITS == 6 else 16)
    MASK: tl.constexpr = ((1 << BITS) - 1) * 0x10001
    i = tl.arange(0, 16)[None, None, :, None]
    sub, place = i // UNIT_CODES, i % UNIT_CODES
    direct = place < UNIT_WORDS * DIRECT
    pair = tl.zeros((1, 1, 16, 1), tl.int32)
    for v in tl.static_range(BITS):
        word = tl.load(codes + at + v * 16, mask=left > v, other=0)[:, :, None, :]
        mine = (sub == v // UNIT_WORDS) & direct & (place // DIRECT == v % UNIT_WORDS)
        pair = tl.where(mine, (word >> ((place % DIRECT) * BITS)) & MASK, pair)
        if SPARE > 0:
            for at_bit in tl.static_range(SPARE):
                # bit of the stream of spare bits: which code, and which of its bits
                stream = (v % UNIT_WORDS) * SPARE + at_bit
                mine = (sub == v // UNIT_WORDS) & (place == UNIT_WORDS * DIRECT + stream // BITS)
                bit = ((word >> (DIRECT * BITS + at_bit)) & 0x10001) << (stream % BITS)
                pair = pair | tl.where(mine, bit, 0)
    return pair


@triton.jit
def halves(pair):
    """The two codes of each pair: int32 [G, L, 16, U, 2]."""
    return (pair[:, :, :, :, None] >> (16 * tl.arange(0, 2))[None, None, None, None, :]) & 0xFFFF


@triton.jit
def integers(pair):
    """Codes as float16 [G, L, 16, U, 2]: the code's bits below those of 1024, which is subtracted, so that no
    instruction converts an integer."""
    return halves(pair | 0x64006400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
