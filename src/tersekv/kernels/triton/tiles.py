"""Functions that all loaders share: addresses of tokens, packed words to numbers in registers, and
RoPE.

Blocks of a head are at equal distances. The address of a tile's first token, a multiple of 32, is
computed in 64 bits, because a pool of pages may be large. The offsets of its other tokens are
small.

A *unit* is 32 packed codes of a lane: `bits` words for every width (`kernels/lanes.py`), 16 pairs
of half-words. The word, shift and mask of each pair are fixed at compile time, and the pairs are
joined along new axes. With index arithmetic instead, the compiler would spread one unit over
threads, which would load and shift every word many times. A shift and a mask place two codes below
the exponents of 1.0 in float16, 1 + code/2^bits, and the 1 is subtracted. That is exact, and
converts no integers.

Entries of tables are loaded by PTX where their places are. `tl.load` would move 64-bit addresses through shared
memory to a layout of the compiler's choice, and the entries back.

Cosines and sines of tokens come from a table of 256 rows (`transforms/rope_table.py`) by
angle addition. Fields of angles, from FIRST on: the table; its columns; positions with strides of
batch row, head and token; 1 if positions are consecutive, else 0. The last field is RoPE as pairs
of channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tersekv.kernels.triton.leaves import BLOCK, CONSECUTIVE, GIVEN

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True if Triton interprets kernels on the CPU, where bfloat16 has no arithmetic."""


@triton.jit
def power_of_two(x):
    """Return a power of two between half of a float32 number x ≥ 0 and twice of it, in two instructions: of an odd
    exponent, at least 2^-126 and at most 2^126."""
    bits = (x.to(tl.int32, bitcast=True) & 0x7F000000) | 0x00800000
    return tl.minimum(bits, 0x7E800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse(power):
    """Return the inverse of a result of `power_of_two`. Multiplying by it is exact and takes one instruction, where a
    division takes ten."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def largest(x):
    """Return a power of two near the largest absolute value of a tile. Divided by it, the tile fits
    float16. Bits of numbers are compared as integers, for which a warp has one instruction."""
    bits = tl.reshape(tl.abs(x), (x.numel,)).to(tl.int32, bitcast=True)
    return power_of_two(tl.max(bits, axis=0).to(tl.float32, bitcast=True))


@triton.jit
def product(x, y):
    """x·y of 16-bit operands, float32."""
    if INTERPRETED:
        return tl.dot(x.to(tl.float32), y.to(tl.float32))
    else:
        return tl.dot(x, y)


@triton.jit
def once(x):
    """Return float16 x of at least two elements per thread. The compiler would otherwise compute x again for each
    product that it is an operand of."""
    if INTERPRETED or not is_cuda():
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float16, False, 2)


@triton.jit
def load_words(codes, at, left, BITS: tl.constexpr):
    """Load the words of units that begin at `codes + at`: a tuple of BITS int32 tensors of its
    shape. Consecutive words are 16 apart; words from `left` on do not exist."""
    words = ()
    for v in tl.static_range(BITS):
        words = words + (tl.load(codes + at + v * 16, mask=left > v, other=0),)  # type: ignore[assignment]
    return words


@triton.jit
def entries_at(table, places):
    """Return entries of a table float32 as float16, in the layout of places int32."""
    if INTERPRETED or not is_cuda():
        return tl.load(table + places).to(tl.float16)
    else:
        # One element at a time: of two, a thread that has only one would load the other from any address.
        return tl.inline_asm_elementwise(
            "{ .reg .b64 a; .reg .f32 x; mad.wide.u32 a, $1, 4, $2; ld.global.nc.f32 x, [a]; cvt.rn.f16.f32 $0, x; }",
            "=h,r,l", [places, table.to(tl.int64)], tl.float16, True, 1,
        )  # fmt: skip


@triton.jit
def _pairs(words, BITS: tl.constexpr):
    """Return the 16 pairs of codes of a unit as a tuple; each code is in bits 10 − BITS to 9 of its
    half of an int32."""
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
        else:  # its bits are spare bits of several words
            pair = words[0] & 0
            for k in tl.static_range(BITS):
                word = words[i // CODES * WORDS + ((i % CODES - WORDS * DIRECT) * BITS + k) // SPARE]
                at = DIRECT * BITS + ((i % CODES - WORDS * DIRECT) * BITS + k) % SPARE
                pair |= ((word >> at) & 0x10001) << (k + UP)
        pairs = pairs + (pair,)  # type: ignore[assignment]
    return pairs


@triton.jit
def numbers(words, table, BITS: tl.constexpr, IS_INTEGER: tl.constexpr):
    """Return a tile [G, L, 32·U] of float16 from words [G, L, U] of its units: entries of a table,
    or code/2^BITS for integers."""
    pairs = _pairs(words, BITS)
    two = ()
    for i in tl.static_range(16):
        if IS_INTEGER:
            pair = pairs[i] | 0x3C003C00
            low = pair.to(tl.int16).to(tl.float16, bitcast=True) - 1.0
            high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True) - 1.0
        else:
            low = entries_at(table, (pairs[i] & 0xFFFF) >> (10 - BITS))
            high = entries_at(table, pairs[i] >> (26 - BITS))
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


@triton.jit
def head_at(leaf, FIRST: tl.constexpr, b, h):
    """Return a pointer to the beginning of a head. FIRST: index of a tensor in the leaf, followed
    by its strides of batch row, head and block."""
    return leaf[FIRST] + b.to(tl.int64) * leaf[FIRST + 1] + h.to(tl.int64) * leaf[FIRST + 2]


@triton.jit
def block_at(leaf, FIRST: tl.constexpr, b, h, n0, S: tl.constexpr, LEAF: tl.constexpr):
    """Return a pointer to the beginning of the block of token n0."""
    return head_at(leaf, FIRST, b, h) + (n0 // S[LEAF][BLOCK]).to(tl.int64) * leaf[FIRST + 3]


@triton.jit
def blocks_at(leaf, FIRST: tl.constexpr, b, h, n, S: tl.constexpr, LEAF: tl.constexpr, at=0):
    """Return pointers to the beginnings of the blocks of tokens n. With one block per thread, this takes fewer
    instructions than the place in a tile, added to `block_at`."""
    block = n.to(tl.uint32, bitcast=True) // S[LEAF][BLOCK]  # the compiler does not know that n is not negative
    return (head_at(leaf, FIRST, b, h) + at) + block.to(tl.int64) * leaf[FIRST + 3]


@triton.jit
def from_block(n0, i, S: tl.constexpr, LEAF: tl.constexpr):
    """Return tokens n0 + i counted from the beginning of n0's block."""
    if S[LEAF][BLOCK] == 32:
        return i
    else:
        return n0 % S[LEAF][BLOCK] + i


@triton.jit
def tokens_at(leaf, FIRST: tl.constexpr, b, h, n0, i, S: tl.constexpr, LEAF: tl.constexpr):
    """Return pointers to tokens n0 + i in a tensor whose last axis is tokens."""
    if len(i.shape) == 1:
        return blocks_at(leaf, FIRST, b, h, n0 + i, S, LEAF) + from_block(n0, i, S, LEAF) % S[LEAF][BLOCK]
    else:
        i = from_block(n0, i, S, LEAF)
        at = (i // S[LEAF][BLOCK]) * leaf[FIRST + 3] + i % S[LEAF][BLOCK]
        return block_at(leaf, FIRST, b, h, n0, S, LEAF) + at


@triton.jit
def stored_at(leaf, FIRST: tl.constexpr, b, h, n0, i, T, S: tl.constexpr, LEAF: tl.constexpr):
    """Return the same, but for tokens after the last block pointers into that block. Loads need no mask then, for
    which the compiler would set registers to 0 first."""
    i = from_block(n0, i, S, LEAF)
    last = tl.maximum(T - 1, 0) // S[LEAF][BLOCK] - n0 // S[LEAF][BLOCK]
    at = tl.minimum(i // S[LEAF][BLOCK], last) * leaf[FIRST + 3] + i % S[LEAF][BLOCK]
    return block_at(leaf, FIRST, b, h, n0, S, LEAF) + at


PAIRS: tl.constexpr = tl.constexpr(7)

DIGITS: tl.constexpr = tl.constexpr(4)
DIGIT_BITS: tl.constexpr = tl.constexpr(6)
BASE: tl.constexpr = tl.constexpr(64)


@triton.jit
def _place(angles, FIRST: tl.constexpr, b, h, n):
    """Load the positions of tokens n, or their rows in a table of their own."""
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
    """Return cos and sin of tokens n; columns and mask are broadcast with n. Positions use one
    column for both."""
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
    """Return cos and sin [N, channels] of tokens n0 to n0 + N, columns and mask [1, channels]. For
    consecutive positions they are the first token's rotation times the rotations of 0 to N − 1
    steps, which all tiles share."""
    if KIND == CONSECUTIVE:
        a, b_ = first_cos_sin(angles, FIRST, b, h, n0, cos_column, mask)
        x, y = step_cos_sin(angles, FIRST, cos_column, mask, N)
        cos, sin = a * x - b_ * y, b_ * x + a * y
    else:
        n = tl.minimum(n0 + tl.arange(0, N), T - 1)[:, None]
        cos, sin = cos_sin(angles, FIRST, b, h, n, cos_column, sin_column, mask, KIND)
    return cos, sin


@triton.jit
def first_cos_sin(angles, FIRST: tl.constexpr, b, h, n0, column, mask):
    """Return cos and sin of token n0, of the columns' shape."""
    return _of_position(angles, FIRST, _place(angles, FIRST, b, h, n0), column, mask)


@triton.jit
def step_cos_sin(angles, FIRST: tl.constexpr, column, mask, N: tl.constexpr):
    """Return cos and sin [N, channels] of the rotations by 0 to N − 1 steps, column and mask
    [1, channels]."""
    i = tl.arange(0, N)[:, None]
    x, y = _digit(angles, FIRST, i, 0, column, mask)
    if N > BASE:
        u, v = _digit(angles, FIRST, i, 1, column, mask)
        x, y = x * u - y * v, y * u + x * v
    return x, y
