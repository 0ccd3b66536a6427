"""Bit packing for SIMD lanes: the layout that every `grid` kernel reads.

A matrix of b-bit codes has a *packed axis* (P codes that are added to the same accumulator) and a
*lane axis* (L independent results). Scores need one result per token, so keys have tokens on lanes
and channels on the packed axis. Value sums need one result per channel, so values have channels on
lanes and tokens on the packed axis. One micro-kernel serves both:
`acc[lane] += coef[p] * table[code[p, lane]]`.

Sixteen lanes make a group; a lane holds 32-bit words. Packed index p = 2i + j is in half-word j:

    word w of one lane, b = 4                       word w, b = 3 (one spare bit per half-word)
    bit 31      16 15       0                       bit 31           16 15            0
       [7 5 3 1]    [6 4 2 0]   + 8w                   [s 9 7 5 3 1]    [s 8 6 4 2 0]   + 10w
        j = 1        j = 0                              j = 1            j = 0

A 16-lane load followed by one shift thus yields the codes of one p for sixteen lanes (32-bit lanes,
float32 arithmetic). It also yields those of a pair p, p+1 in 32 half-words (bfloat16 dot products).
Slot s of a half-word starts at bit b*s; `16 // b` codes fit directly. If b does not divide 16, the
spare high bits of consecutive half-words form one stream (first word first, low bit first). It
holds the remaining codes of the unit:

    b   direct/half-word  spare bits  half-words per unit  codes per unit (direct + from spare bits)
    3          5              1               3                 16 (15 + 1)
    5          3              1               5                 16 (15 + 1)
    6          2              4               3                  8 ( 6 + 2)
    7          2              2               7                 16 (14 + 2)

No bit is lost if P/2 is a multiple of the unit; a last, partial unit takes ceil(codes / direct)
words.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tersekv.kernels.registry import operator

LANES = 16


@dataclass(frozen=True)
class HalfWords:
    """Layout of n codes of b bits in 16-bit half-words (see the module's docstring)."""

    direct: int
    spare_bits: int
    unit_words: int
    unit_codes: int
    words: int

    @property
    def spare_codes(self) -> int:
        """Number of codes per unit that are stored in spare bits."""
        return self.unit_codes - self.unit_words * self.direct


@functools.lru_cache(maxsize=256)
def half_words(bits: int, n: int) -> HalfWords:
    """Layout of `n` codes of `bits` bits (1 to 8) in one half-word stream."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be 1 to 8, got {bits}")
    direct = 16 // bits
    spare = 16 - bits * direct
    if spare == 0:
        return HalfWords(direct, 0, 1, direct, math.ceil(n / direct))
    gcd = math.gcd(16, bits)
    unit_words, unit_codes = bits // gcd, 16 // gcd
    full, rest = divmod(n, unit_codes)
    rest_words = min(unit_words, math.ceil(rest / direct))
    return HalfWords(direct, spare, unit_words, unit_codes, full * unit_words + rest_words)


def packed_words(bits: int, packed: int) -> int:
    """Return the number of 32-bit words per lane for `packed` codes of `bits` bits."""
    return half_words(bits, math.ceil(packed / 2)).words


def packed_shape(bits: int, packed: int, lanes: int) -> tuple[int, int, int]:
    """Return the shape [lane groups, words, 16] of the int32 tensor that holds a [packed, lanes]
    matrix of codes."""
    return (math.ceil(lanes / LANES), packed_words(bits, packed), LANES)


def _fake(codes: Tensor, bits: int) -> Tensor:
    return codes.new_empty((*codes.shape[:-2], *packed_shape(bits, *map(int, codes.shape[-2:]))), dtype=torch.int32)


@operator("(Tensor codes, int bits) -> Tensor", _fake)
def pack_lanes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes [..., P, L] (any integer dtype, 0 <= code < 2**bits) into int32
    [..., ceil(L/16), W, 16]."""
    *lead, P, L = codes.shape
    half = half_words(bits, math.ceil(P / 2))
    slots = _slots(half)
    padded = codes.new_zeros((*lead, 2 * slots, math.ceil(L / LANES) * LANES), dtype=torch.int32)
    padded[..., :P, :L] = codes
    # [..., slots, 2, Lg, 16] -> two half-word streams per lane
    streams = padded.unflatten(-1, (-1, LANES)).unflatten(-3, (slots, 2))
    low, high = (_pack_stream(streams[..., j, :, :], bits, half) for j in (0, 1))
    words = torch.bitwise_or(low, torch.bitwise_left_shift(high, 16))
    return words.movedim(-3, -2).contiguous()


def unpack_lanes(words: Tensor, bits: int, P: int, L: int) -> Tensor:
    """Inverse of `pack_lanes`: int32 [..., ceil(L/16), W, 16] to uint8 codes [..., P, L]."""
    half = half_words(bits, math.ceil(P / 2))
    by_word = words.movedim(-3, -2)  # [..., W, Lg, 16]
    low = torch.bitwise_and(by_word, 0xFFFF)
    high = torch.bitwise_and(torch.bitwise_right_shift(by_word, 16), 0xFFFF)
    streams = torch.stack([_unpack_stream(part, bits, half) for part in (low, high)], dim=-3)
    codes = streams.flatten(-2).flatten(-3, -2)  # [..., slots * 2, Lg * 16]
    return codes[..., :P, :L].to(torch.uint8)


def _slots(half: HalfWords) -> int:
    """Number of codes of one stream, rounded up to whole units; a partial last unit is cut after
    packing."""
    units = math.ceil(half.words / half.unit_words)
    return units * half.unit_codes


def _pack_stream(codes: Tensor, bits: int, half: HalfWords) -> Tensor:
    """Pack codes [..., slots, Lg, 16] to half-words [..., W, Lg, 16]."""
    unit = codes.unflatten(-3, (-1, half.unit_codes))
    in_words = unit[..., : half.unit_words * half.direct, :, :].unflatten(-3, (half.unit_words, half.direct))
    shifts = torch.arange(half.direct, device=codes.device, dtype=torch.int32) * bits
    words = torch.bitwise_left_shift(in_words, shifts[:, None, None]).sum(-3, dtype=torch.int32)
    for spare in range(half.spare_codes):
        code = unit[..., half.unit_words * half.direct + spare, :, :]
        for bit in range(bits):
            word, at = divmod(spare * bits + bit, half.spare_bits)
            value = torch.bitwise_and(torch.bitwise_right_shift(code, bit), 1)
            words[..., word, :, :] |= torch.bitwise_left_shift(value, half.direct * bits + at)
    return words.flatten(-4, -3)[..., : half.words, :, :]


def _unpack_stream(words: Tensor, bits: int, half: HalfWords) -> Tensor:
    """Unpack half-words [..., W, Lg, 16] to codes [..., slots, Lg, 16]."""
    short = -half.words % half.unit_words
    if short:
        words = torch.cat([words, words.new_zeros((*words.shape[:-3], short, *words.shape[-2:]))], dim=-3)
    unit = words.unflatten(-3, (-1, half.unit_words))
    shifts = torch.arange(half.direct, device=words.device, dtype=torch.int32) * bits
    codes = torch.bitwise_right_shift(unit.unsqueeze(-3), shifts[:, None, None])
    codes = torch.bitwise_and(codes, (1 << bits) - 1).flatten(-4, -3)
    spares = []
    for spare in range(half.spare_codes):
        code = torch.zeros_like(unit[..., 0, :, :])
        for bit in range(bits):
            word, at = divmod(spare * bits + bit, half.spare_bits)
            value = torch.bitwise_and(torch.bitwise_right_shift(unit[..., word, :, :], half.direct * bits + at), 1)
            code |= torch.bitwise_left_shift(value, bit)
        spares.append(code)
    if spares:
        codes = torch.cat([codes, torch.stack(spares, dim=-3)], dim=-3)
    return codes.flatten(-4, -3)
