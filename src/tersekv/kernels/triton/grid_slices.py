"""Products with grids of integers, slice by slice: codes go from their words to the tensor cores
without passing through shared memory.

A half-word holds 16/bits codes of one lane. Slice p is the p-th code of every half-word of a tile:
one shift and mask of the words. Its columns are not consecutive channels (keys) or tokens (values).
Queries, weights and scales are read in the slice's order instead. The product of a tile is the sum
of the products of its slices.

On an H100 the loaders of `grid.py`, which join codes to consecutive columns, spend most of their
time on bank conflicts of shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tersekv.kernels.triton.grid import CODES, OFFSET, SCALE, TABLE, plane, stored_plane
from tersekv.kernels.triton.leaves import (
    BITS,
    BLOCK,
    CHANNELS,
    HAS_FACTOR,
    HAS_OFFSET,
    IS_INTEGER,
    PADDED,
    SCALES,
    TO_COEFFICIENTS,
    TO_PRODUCT,
    WIDE,
    WORDS,
)
from tersekv.kernels.triton.tiles import INTERPRETED, block_at, from_block, largest, power_of_two, product


@triton.constexpr_function
def sliced(S, LEAF, UNITS):
    """Return True if a grid's tile with this many units of 32 codes per lane is read by slices. They
    are at least 16 columns wide, or 32 in products that `leaves.power` pads."""
    spec = S[LEAF]
    least = {TO_COEFFICIENTS.value: 16, TO_PRODUCT.value: 32}.get(spec[SCALES], 1 << 30)
    bits = (2, 4) if spec[IS_INTEGER] else (4,)
    return spec[BITS] in bits and 2 * spec[BITS] * UNITS >= least and not spec[HAS_FACTOR]


@triton.constexpr_function
def _unpacking(BITS, SLICE):
    """Return PTX that converts slice p of two half-words to float16. Codes are set below the
    exponent of 1024; a multiplication and a subtraction give the integers, exactly."""
    at = BITS * SLICE
    low = at % 8
    mask = ((1 << BITS) - 1) << low
    shift = "shr.b32 w, w, 8;" if at >= 8 else ""
    scale, offset = (15 - low) << 10, 0x8000 | ((25 - low) << 10)
    return (
        "{ .reg .b32 w, a, b; mov.b32 w, $1; " + shift + f" lop3.b32 w, w, {mask * 0x10001:#x}, 0x64006400, 0xEA;"
        f" mov.b32 a, {scale * 0x10001:#x}; mov.b32 b, {offset * 0x10001:#x}; fma.rn.f16x2 $0, w, a, b; }}"
    )


@triton.jit
def _slice(halves, BITS: tl.constexpr, SLICE: tl.constexpr):
    """Return the codes of a slice as float16. halves: int16 half-words."""
    if INTERPRETED or not is_cuda():
        return ((halves.to(tl.int32) >> (BITS * SLICE)) & ((1 << BITS) - 1)).to(tl.float16)
    else:
        return tl.inline_asm_elementwise(_unpacking(BITS, SLICE), "=r,r", [halves], tl.float16, True, 2)


@triton.constexpr_function
def _looking_up():
    """Return PTX that converts two half-words of four 4-bit codes to their four slices of two
    entries. prmt reads eight bytes by the low bits of four codes at once. Bytes of entries 8 to 15
    are taken where a code's high bit, spread over a byte, is set."""
    low, high = (tuple(f"${i + 2 * k}" for k in range(4)) for i in (5, 13))
    lines = [".reg .b32 s0, s1, v, m, a, b, l0, h0, l1, h1;"]
    lines += ["and.b32 s0, $4, 0x77777777;", "shr.b32 s1, s0, 16;", "shl.b32 v, $4, 4;"]
    for half, high_bits in ((0, "0x9D8C"), (1, "0xBFAE")):
        lines += [f"prmt.b32 m, $4, v, {high_bits};"]
        for name, words in (("l", low), ("h", high)):
            for to, (one, other) in (("a", words[:2]), ("b", words[2:])):
                lines += [f"prmt.b32 {to}, {one}, {other}, s{half};"]
            lines += [f"lop3.b32 {name}{half}, a, b, m, 0xD8;"]
    for first, pick in ((0, "0x5140"), (2, "0x7362")):
        lines += [f"prmt.b32 a, l0, h0, {pick};", f"prmt.b32 b, l1, h1, {pick};"]
        lines += [f"prmt.b32 ${first}, a, b, 0x5410;", f"prmt.b32 ${first + 1}, a, b, 0x7632;"]
    return "{ " + " ".join(lines) + " }"


LOOKED_UP: tl.constexpr = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 17))


@triton.jit
def _table_words(table, HIGH: tl.constexpr):
    """Return the low or high bytes of 16 float16 entries as a tuple of four int32."""
    words = ()
    for k in tl.static_range(4):
        word = 0
        for i in tl.static_range(4):
            entry = tl.load(table + 4 * k + i).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            word |= ((entry >> (8 * HIGH)) & 255) << (8 * i)
        words = words + (word,)  # type: ignore[assignment]
    return words


@triton.jit
def _slices(halves, table, S: tl.constexpr, LEAF: tl.constexpr):
    """Return all slices of half-words as float16: codes of integers, else entries of the table."""
    slices = ()
    if S[LEAF][IS_INTEGER]:
        for k in tl.static_range(16 // S[LEAF][BITS]):
            slices = slices + (_slice(halves, S[LEAF][BITS], k),)  # type: ignore[assignment]
    elif INTERPRETED or not is_cuda():
        for k in tl.static_range(16 // S[LEAF][BITS]):
            code = (halves.to(tl.int32) >> (S[LEAF][BITS] * k)) & 15
            slices = slices + (tl.load(table + code).to(tl.float16),)  # type: ignore[assignment]
    else:
        a, b, c, d = _table_words(table, 0)
        e, f, g, h = _table_words(table, 1)
        slices = tl.inline_asm_elementwise(
            _looking_up(), LOOKED_UP, [halves, a, b, c, d, e, f, g, h],
            (tl.float16, tl.float16, tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    return slices


@triton.jit
def _column(j, BITS: tl.constexpr, SLICE: tl.constexpr):
    """Return the columns (channels or tokens) that half-words j of a lane hold in a slice."""
    pair = (j // 2) % BITS * (16 // BITS) + SLICE
    return j // (2 * BITS) * 32 + 2 * pair + j % 2


@triton.jit
def query_slices(q, most, rows, row_ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Load a leaf's query again by slices: a tuple of float16 [half-words, rows]. most: powers of two
    [1, rows] that divide it."""
    B: tl.constexpr = S[LEAF][BITS]
    j = tl.arange(0, S[LEAF][PADDED] * B // 16)[:, None]
    slices = (q.to(tl.float16),)
    for i in tl.static_range(16 // B):
        channel = _column(j, B, i)
        x = tl.load(rows[None, :] + channel, mask=row_ok[None, :] & (channel < S[LEAF][CHANNELS]), other=0.0)
        slices = slices + ((x.to(tl.float32) / most).to(tl.float16),)  # type: ignore[assignment]
    return slices


@triton.jit
def _halves(leaf, b, h, n0, at, j, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Load half-words j of lanes. at: offsets of the lanes from n0's block in words."""
    codes = block_at(leaf, CODES, b, h, n0, S, LEAF).to(tl.pointer_type(tl.int16), bitcast=True)
    return tl.load(codes + 2 * at + j % 2, mask=ok, other=0)


@triton.jit
def load_keys_slices(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Scores [32·NB, rows] of a query: itself, then its slices, float16 [channels, rows]."""
    N: tl.constexpr = NB * 32
    B: tl.constexpr = S[LEAF][BITS]
    R: tl.constexpr = q[0].shape[1]
    j = tl.arange(0, S[LEAF][PADDED] * B // 16)
    i = 32 * tl.arange(0, NB)[:, None, None] + tl.arange(0, 32)[None, :, None]
    n = from_block(n0, i, S, LEAF)
    inside = n % S[LEAF][BLOCK]
    lane = (n // S[LEAF][BLOCK]) * leaf[CODES + 3] + (inside // 16) * (S[LEAF][WORDS] * 16) + inside % 16
    word = j[None, None, :] // 2
    x = _halves(leaf, b, h, n0, lane + word * 16, j[None, None, :], (word < S[LEAF][WORDS]) & (n0 + i < T), S, LEAF)
    table = leaf[TABLE] + b * leaf[TABLE + 1]
    if S[LEAF][SCALES] == TO_COEFFICIENTS:
        x = _slices(x, table, S, LEAF)
        token = 32 * tl.arange(0, NB)[:, None]
        s = tl.zeros((NB, 32, R), tl.float32)
        for k in tl.static_range(16 // B):
            channel = _column(j, B, k)[None, :]
            ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
            scale = stored_plane(leaf, SCALE, b, h, n0, token, channel, ok, S, LEAF)
            if S[LEAF][WIDE]:
                most = largest(scale.to(tl.float32))
                y = q[1 + k][None, :, :] * (scale.to(tl.float32) * (1.0 / most)).to(tl.float16)[:, :, None]
                s += product(x[k], y) * most
            else:
                s += product(x[k], q[1 + k][None, :, :] * scale[:, :, None])
        if S[LEAF][HAS_OFFSET]:
            channel = tl.arange(0, S[LEAF][PADDED])[None, :]
            ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
            offset = stored_plane(leaf, OFFSET, b, h, n0, token, channel, ok, S, LEAF)
            s += _offsets(offset, q[0])[:, None, :]
        return tl.reshape(s, (N, R))
    else:
        x = _slices(tl.reshape(x, (N, j.shape[0])), table, S, LEAF)
        s = tl.zeros((N, R), tl.float32)
        for k in tl.static_range(16 // B):
            s += product(x[k], q[1 + k])
        token = tl.arange(0, N)
        s *= plane(leaf, SCALE, b, h, n0, token, 0, n0 + token < T, S, LEAF)[:, None]
        if S[LEAF][HAS_OFFSET]:
            whole = tl.sum(q[0].to(tl.float32), axis=0)
            s += plane(leaf, OFFSET, b, h, n0, token, 0, n0 + token < T, S, LEAF)[:, None] * whole[None, :]
        return s


@triton.jit
def _offsets(offset, y):
    """offset [groups, K] times float16 y [K, rows]. Offsets of bfloat16 may exceed float16's range."""
    if offset.dtype == tl.float16:
        return product(offset, y)
    else:
        most = largest(offset.to(tl.float32))
        return product((offset.to(tl.float32) * (1.0 / most)).to(tl.float16), y) * most


@triton.constexpr_function
def _reversed(k, B):
    """Return the number of a slice with its two bits (of 4-bit codes) or three bits reversed."""
    return (k & 1) * 4 + (k & 2) + k // 4 if B == 2 else (k & 1) * 2 + k // 2


@triton.jit
def _weight_slices(p, B: tl.constexpr, NB: tl.constexpr):
    """Cut weights [32·NB, rows] into slices [half-words, rows], a tuple."""
    R: tl.constexpr = p.shape[1]
    D: tl.constexpr = 16 // B
    x = tl.permute(tl.reshape(p, (NB * B, D, 2, R)), (0, 2, 3, 1))
    parts = (x,)
    for level in tl.static_range(3 if B == 2 else 2):
        halves = ()
        for i in tl.static_range(1 << level):
            low, high = tl.split(tl.reshape(parts[i], (NB * B, 2, R, D >> (level + 1), 2)))
            halves = halves + (low, high)  # type: ignore[assignment]
        parts = halves  # type: ignore[assignment]
    slices = ()
    for k in tl.static_range(D):  # each split removed the lowest bit of a slice's number
        slices = slices + (tl.reshape(parts[_reversed(k, B)], (NB * B * 2, R)),)  # type: ignore[assignment]
    return slices


@triton.jit
def load_values_slices(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [32·NB, rows]."""
    G: tl.constexpr = S[LEAF][PADDED] // 32
    B: tl.constexpr = S[LEAF][BITS]
    R: tl.constexpr = p.shape[1]
    j = tl.arange(0, 2 * B * NB)
    c = 32 * tl.arange(0, G)[:, None, None] + tl.arange(0, 32)[None, :, None]
    i = j[None, None, :] // (2 * B) * 32
    first = from_block(n0, i, S, LEAF)
    unit = (first // S[LEAF][BLOCK]) * leaf[CODES + 3] + ((first % S[LEAF][BLOCK]) // 32) * (B * 16)
    at = (c // 16) * (S[LEAF][WORDS] * 16) + c % 16 + unit + j[None, None, :] // 2 % B * 16
    x = _halves(leaf, b, h, n0, at, j[None, None, :], (c < S[LEAF][CHANNELS]) & (n0 + i < T), S, LEAF)
    table = leaf[TABLE] + b * leaf[TABLE + 1]
    token = tl.arange(0, 32 * NB)
    if S[LEAF][SCALES] == TO_PRODUCT:
        scale = plane(leaf, SCALE, b, h, n0, token, 0, n0 + token < T, S, LEAF)
        most = largest(scale)
        weights = _weight_slices((p * (scale * (1.0 / most))[:, None]).to(tl.float16), B, NB)
        x = _slices(tl.reshape(x, (32 * G, j.shape[0])), table, S, LEAF)
        out = tl.zeros((32 * G, R), tl.float32)
        for k in tl.static_range(16 // B):
            out += product(x[k], weights[k])
        out *= most
        if S[LEAF][HAS_OFFSET]:
            offset = plane(leaf, OFFSET, b, h, n0, token, 0, n0 + token < T, S, LEAF)
            out += tl.sum(p * offset[:, None], axis=0)[None, :]
        return out
    else:
        x = _slices(x, table, S, LEAF)
        channel = 32 * tl.arange(0, G)[:, None]
        ok = (n0 + token < T)[None, :] & (channel < S[LEAF][CHANNELS])
        most = power_of_two(tl.max(plane(leaf, SCALE, b, h, n0, token[None, :], channel, ok, S, LEAF), axis=1))
        p = p.to(tl.float16)
        weights = _weight_slices(p, B, NB)
        out = tl.zeros((G, 32, R), tl.float32)
        for k in tl.static_range(16 // B):
            n = _column(j, B, k)[None, :]
            inside = (n0 + n < T) & (channel < S[LEAF][CHANNELS])
            scale = plane(leaf, SCALE, b, h, n0, n, channel, inside, S, LEAF) * (1.0 / most)[:, None]
            out += product(x[k], weights[k][None, :, :] * scale.to(tl.float16)[:, :, None])
        out *= most[:, None, None]
        if S[LEAF][HAS_OFFSET]:
            offset = stored_plane(leaf, OFFSET, b, h, n0, token[None, :], channel, ok, S, LEAF)
            out += _offsets(offset, p)[:, None, :]
        return tl.reshape(out, (32 * G, R))
