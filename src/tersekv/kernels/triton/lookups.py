"""Look-ups in tables of at most 16 entries that are held in registers, by the instruction `prmt`: it returns four of
eight bytes, at places of four bits."""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.tiles import INTERPRETED


@triton.jit
def bytes_at(a, b, places):
    """Return four of the eight bytes of a and b, int32. places: four bits of each. The fourth bit asks for the
    byte's sign in all its bits."""
    if INTERPRETED:
        found = (a & 0) | (b & 0) | (places & 0)
        for i in tl.static_range(4):
            place = (places >> (4 * i)) & 15
            byte = (tl.where(place & 4 > 0, b, a) >> (8 * (place & 3))) & 255
            found |= tl.where(place & 8 > 0, 255 * (byte >> 7), byte) << (8 * i)
        return found
    else:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, places], tl.int32, True, 1)


@triton.jit
def in_lanes(word):
    """Return int32 words in a register of each lane. The compiler keeps words that are equal in all lanes in registers
    of the warp, from which `bytes_at` would copy them every time. It does not know that the lane is below 32."""
    if INTERPRETED:
        return word
    else:
        asm: tl.constexpr = "{ .reg .b32 z; mov.u32 z, %laneid; shr.u32 z, z, 5; add.u32 $0, $1, z; }"
        return tl.inline_asm_elementwise(asm, "=r,r", [word], tl.int32, True, 1)


@triton.jit
def of_sixteen(bytes, places, upper):
    """Return four bytes of a table of 16, four int32, at places below 8, or 8 more where the bits `upper` are set."""
    low, high = bytes_at(bytes[0], bytes[1], places), bytes_at(bytes[2], bytes[3], places)
    return low ^ ((low ^ high) & upper)


@triton.constexpr_function
def of_gray(code):
    """Return the number whose Gray code, number ^ (number >> 1), has the three bits of `code`."""
    return code ^ (code >> 1) ^ (code >> 2)


@triton.jit
def table_words(table, HIGH: tl.constexpr, OF_GRAY: tl.constexpr):
    """Return the low or high bytes of float16 entries as a tuple of int32 [1, 1, 1], four in each. OF_GRAY: of the
    first 8 entries in the order of their Gray codes, else of 16 entries."""
    words = ()
    for k in tl.static_range(2 if OF_GRAY else 4):
        word = 0
        for i in tl.static_range(4):
            at = table + (of_gray(4 * k + i) if OF_GRAY else 4 * k + i)
            entry = tl.load(at + tl.zeros((1, 1, 1), tl.int32)).to(tl.float16)
            entry = entry.to(tl.int16, bitcast=True).to(tl.int32)
            word |= ((entry >> (8 * HIGH)) & 255) << (8 * i)
        words = words + (in_lanes(word),)  # type: ignore[assignment]
    return words
