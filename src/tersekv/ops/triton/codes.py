"""Pieces that all loaders share: packed words to numbers in registers.

A *unit* is 32 packed codes of a lane: `bits` words for every width (`ops/lanes.py`), 16 pairs of half-words. Codes are
unpacked as [pair, half, group, unit, lane]: lanes, side by side in memory, are the threads of a warp, and pairs
and halves are registers of one thread, so that which word, shift and mask makes a code is known to the compiler and no
word is loaded twice. A shift and a mask place a code below the exponent of 1.0 in float16: 1 + code/2^bits, with no
conversion of integers; the 1 is taken off after the product.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Kernels run on the CPU, where bfloat16 has no arithmetic."""


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
    """Pairs of codes, one in bits 10 − BITS to 9 of each half of an int32: [16, G, U, L], from units that begin at
    `codes + at` [G, U, L] and have `left` words (broadcast to it; past them there is nothing). Words lie 16 apart."""
    DIRECT: tl.constexpr = 16 // BITS
    SPARE: tl.constexpr = 16 - BITS * DIRECT
    UNIT_WORDS: tl.constexpr = 1 if SPARE == 0 else (3 if BITS == 6 else BITS)
    UNIT_CODES: tl.constexpr = DIRECT if SPARE == 0 else (8 if BITS == 6 else 16)
    UP: tl.constexpr = 10 - BITS
    MASK: tl.constexpr = (((1 << BITS) - 1) << UP) * 0x10001
    i = tl.arange(0, 16)[:, None, None, None]
    sub, place = i // UNIT_CODES, i % UNIT_CODES
    direct = place < UNIT_WORDS * DIRECT
    down = (place % DIRECT) * BITS - UP
    pair = tl.zeros((16, 1, 1, 1), tl.int32)
    for v in tl.static_range(BITS):
        word = tl.load(codes + at + v * 16, mask=left > v, other=0)[None, :, :, :]
        mine = (sub == v // UNIT_WORDS) & direct & (place // DIRECT == v % UNIT_WORDS)
        shifted = tl.where(down >= 0, word >> tl.maximum(down, 0), word << tl.maximum(-down, 0))
        pair = tl.where(mine, shifted & MASK, pair)
        if SPARE > 0:
            for at_bit in tl.static_range(SPARE):
                # bit of the stream of spare bits: which code, and which of its bits
                stream = (v % UNIT_WORDS) * SPARE + at_bit
                mine = (sub == v // UNIT_WORDS) & (place == UNIT_WORDS * DIRECT + stream // BITS)
                bit = ((word >> (DIRECT * BITS + at_bit)) & 0x10001) << (stream % BITS + UP)
                pair = pair | tl.where(mine, bit, 0)
    return pair


@triton.jit
def halves(pair):
    """Both halves of each pair: int32 [16, 2, G, U, L]."""
    return (pair[:, None, :, :, :] >> (16 * tl.arange(0, 2))[None, :, None, None, None]) & 0xFFFF


@triton.jit
def fractions(pair):
    """1 + code/2^bits, float16 [16, 2, G, U, L]."""
    return halves(pair | 0x3C003C00).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def tile(x):
    """[16, 2, G, U, L] to [G, L, 32·U]: the packed axis in its own order."""
    G: tl.constexpr = x.shape[2]
    L: tl.constexpr = x.shape[4]
    K: tl.constexpr = 32 * x.shape[3]
    return tl.reshape(tl.permute(x, (2, 4, 3, 0, 1)), (G, L, K))
