"""Pieces that all loaders share: packed words to numbers in registers.

A *unit* is 32 packed codes of a lane: `bits` words for every width (`kernels/lanes.py`), 16 pairs of half-words. Which
word, shift and mask makes a pair is written out at compile time, pair by pair, and the pairs are joined along new axes:
a tile made with index arithmetic instead lets the compiler spread one unit over threads, which then load and shift
every word many times. A shift and a mask place two codes below the exponents of 1.0 in float16, 1 + code/2^bits, and
the 1 is subtracted: exact, with no conversion of integers.
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
def load_words(codes, at, left, BITS: tl.constexpr):
    """The words of units that begin at `codes + at`: a tuple of BITS int32 tensors of its shape. Words lie 16 apart;
    past `left` of them there is nothing."""
    words = ()
    for v in tl.static_range(BITS):
        words = words + (tl.load(codes + at + v * 16, mask=left > v, other=0),)  # type: ignore[assignment]
    return words


@triton.jit
def _pairs(words, BITS: tl.constexpr):
    """The 16 pairs of codes of a unit, each code in bits 10 − BITS to 9 of its half of an int32: a tuple."""
    DIRECT: tl.constexpr = 16 // BITS
    SPARE: tl.constexpr = 16 - BITS * DIRECT
    WORDS: tl.constexpr = 1 if SPARE == 0 else (3 if BITS == 6 else BITS)
    CODES: tl.constexpr = DIRECT if SPARE == 0 else (8 if BITS == 6 else 16)
    UP: tl.constexpr = 10 - BITS
    MASK: tl.constexpr = (((1 << BITS) - 1) << UP) * 0x10001
    pairs = ()
    for i in tl.static_range(16):
        if i % CODES < WORDS * DIRECT:
            pair = words[i // CODES * WORDS + i % CODES // DIRECT]
            if i % CODES % DIRECT * BITS >= UP:
                pair = (pair >> (i % CODES % DIRECT * BITS - UP)) & MASK
            else:
                pair = (pair << (UP - i % CODES % DIRECT * BITS)) & MASK
        else:  # its bits are spare ones of several words
            pair = words[0] & 0
            for k in tl.static_range(BITS):
                word = words[i // CODES * WORDS + ((i % CODES - WORDS * DIRECT) * BITS + k) // SPARE]
                at = DIRECT * BITS + ((i % CODES - WORDS * DIRECT) * BITS + k) % SPARE
                pair |= ((word >> at) & 0x10001) << (k + UP)
        pairs = pairs + (pair,)  # type: ignore[assignment]
    return pairs


@triton.jit
def numbers(words, table, BITS: tl.constexpr, IS_INTEGER: tl.constexpr):
    """A tile [G, L, 32·U] of float16 from words [G, L, U] of its units: entries of a table, or of integers
    code/2^BITS."""
    pairs = _pairs(words, BITS)
    two = ()
    for i in tl.static_range(16):
        if IS_INTEGER:
            pair = pairs[i] | 0x3C003C00
            low = pair.to(tl.int16).to(tl.float16, bitcast=True) - 1.0
            high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True) - 1.0
        else:
            low = tl.load(table + ((pairs[i] & 0xFFFF) >> (10 - BITS))).to(tl.float16)
            high = tl.load(table + (pairs[i] >> (26 - BITS))).to(tl.float16)
        two = two + (tl.join(low, high),)  # type: ignore[assignment]
    four = ()
    for i in tl.static_range(8):
        four = four + (tl.join(two[2 * i], two[2 * i + 1]),)  # type: ignore[assignment]
    eight = ()
    for i in tl.static_range(4):
        eight = eight + (tl.join(four[2 * i], four[2 * i + 1]),)  # type: ignore[assignment]
    x = tl.join(tl.join(eight[0], eight[1]), tl.join(eight[2], eight[3]))  # type: ignore[misc]
    K: tl.constexpr = 32 * x.shape[2]
    return tl.reshape(tl.permute(x, (0, 1, 2, 7, 6, 5, 4, 3)), (x.shape[0], x.shape[1], K))
