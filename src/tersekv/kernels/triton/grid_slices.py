"""Products with grids of integers or of a table with 16 entries: codes go from their words to the tensor
cores without passing through shared memory.

A word holds a few codes of a lane: 16/bits in each half. A slice is a pair of codes of every word of a
tile: one shift and mask of the words. The slices are the columns of the tile, one after the other, so
columns are not consecutive channels (keys) or tokens (values). Queries, weights and scales are read in
the order of columns instead.

Integers are the lowest bits of float16: subnormal numbers, multiples of 2^-24. Tensor cores multiply
these exactly. Factors are in float32: 2^24, and powers of two of slices that are above the lowest bits.

Entries of a table are put together of two bytes, which `prmt` reads at the places of four codes at a
time. All operands of such a step are tensors and all its results single, because the compiler would
otherwise pass the entries through shared memory.
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
    IS_SYMMETRIC,
    PADDED,
    SCALES,
    TO_COEFFICIENTS,
    TO_ELEMENTS,
    TO_PRODUCT,
    WIDE,
    WORDS,
)
from tersekv.kernels.triton.tiles import INTERPRETED, block_at, from_block, largest, once, power_of_two, product


@triton.constexpr_function
def sliced(S, LEAF):
    """Return True if a grid's codes are read by slices."""
    spec = S[LEAF]
    bits = (2, 4, 8) if spec[IS_INTEGER] else (4,)
    return spec[BITS] in bits and spec[SCALES] != TO_ELEMENTS.value and not spec[HAS_FACTOR]


SUBNORMAL: tl.constexpr = tl.constexpr(2.0**24)
"""Factor of integers that are the lowest bits of float16."""
FEW: tl.constexpr = tl.constexpr(8)
"""Query rows up to which registers suffice for the query in both orders, and that of columns can be divided by the
units of integers."""
BY_BYTES: tl.constexpr = tl.constexpr(True)
"""False: entries of a table are loaded, as on GPUs without `prmt`."""


@triton.jit
def _slice(words, BITS: tl.constexpr, SLICE: tl.constexpr):
    """Return the codes of a slice in the low bits of pairs of halves. words: int32."""
    MASK: tl.constexpr = (((1 << BITS) - 1) << (BITS * SLICE % 8)) * 0x10001
    if BITS * SLICE >= 8:
        words = words >> 8
    return words & MASK


@triton.jit
def _joined(slices):
    """Join slices int32 [G, L, words] to a tile float16 [G, L, columns], one slice after the other."""
    G: tl.constexpr = slices[0].shape[0]
    L: tl.constexpr = slices[0].shape[1]
    W: tl.constexpr = slices[0].shape[2]
    if len(slices) == 2:
        x = tl.permute(tl.join(slices[0], slices[1]), (0, 1, 3, 2))
    elif len(slices) == 4:
        two, other = tl.join(slices[0], slices[1]), tl.join(slices[2], slices[3])
        x = tl.permute(tl.join(two, other), (0, 1, 4, 3, 2))
    else:
        four = tl.join(tl.join(slices[0], slices[1]), tl.join(slices[2], slices[3]))
        other = tl.join(tl.join(slices[4], slices[5]), tl.join(slices[6], slices[7]))
        x = tl.permute(tl.join(four, other), (0, 1, 5, 4, 3, 2))
    x = tl.reshape(x, (G, L, len(slices) * W))
    low = x.to(tl.int16).to(tl.float16, bitcast=True)
    x = tl.join(low, (x >> 16).to(tl.int16).to(tl.float16, bitcast=True))
    return tl.reshape(x, (G, L, 2 * len(slices) * W))


@triton.jit
def _bytes(a, b, places):
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
def _looked_up(bytes, places, upper):
    """Return four bytes of a table of 16, four int32, at places below 8, or 8 more where the bits `upper` are set."""
    low, high = _bytes(bytes[0], bytes[1], places), _bytes(bytes[2], bytes[3], places)
    return low ^ ((low ^ high) & upper)


@triton.jit
def _sevens(words):
    """Return 7 for each code of four bits in int32 whose highest bit is set, else 0."""
    highest = (words & -0x77777778).to(tl.uint32, bitcast=True)
    return tl.umulhi(highest, tl.full((1, 1, 1), 0xE0000000, tl.uint32)).to(tl.int32, bitcast=True)


@triton.jit
def _table_words(table, HIGH: tl.constexpr, WORDS: tl.constexpr):
    """Return the low or high bytes of float16 entries as a tuple of int32 [1, 1, 1], four in each."""
    words = ()
    for k in tl.static_range(WORDS):
        word = 0
        for i in tl.static_range(4):
            entry = tl.load(table + (4 * k + i) + tl.zeros((1, 1, 1), tl.int32)).to(tl.float16)
            entry = entry.to(tl.int16, bitcast=True).to(tl.int32)
            word |= ((entry >> (8 * HIGH)) & 255) << (8 * i)
        words = words + (word,)  # type: ignore[assignment]
    return words


@triton.jit
def _columns(words, table, S: tl.constexpr, LEAF: tl.constexpr):
    """Return a tile float16 [G, L, columns] of words [G, L, W]: codes of integers, times a power of
    two, else entries of the table. `_column` says which codes the columns are."""
    B: tl.constexpr = S[LEAF][BITS]
    slices = ()
    if S[LEAF][IS_INTEGER]:
        for k in tl.static_range(16 // B):
            slices = slices + (_slice(words, B, k),)  # type: ignore[assignment]
        return _joined(slices)
    elif not BY_BYTES or not (INTERPRETED or is_cuda()):
        for k in tl.static_range(4):
            low, high = tl.load(table + ((words >> 8 * k) & 15)), tl.load(table + ((words >> (8 * k + 4)) & 15))
            slices = slices + (_half(low) | (_half(high) << 16),)  # type: ignore[assignment]
        return _joined(slices)
    elif S[LEAF][IS_SYMMETRIC]:
        # An entry of the upper half is minus the one at the place with its three bits inverted.
        low, high = _table_words(table, 0, 2), _table_words(table, 1, 2)
        places, shifted = (words ^ _sevens(words)) & 0x77777777, words << 4
        for half in tl.static_range(2):  # four codes
            upper = _bytes(words, shifted, 0x3726 if half else 0x1504)
            at = places >> 16 if half else places
            first, second = _bytes(low[0], low[1], at), _bytes(high[0], high[1], at) ^ (upper & -0x7F7F7F80)
            slices = slices + (_bytes(first, second, 0x5140), _bytes(first, second, 0x7362))  # type: ignore[assignment]
        return _joined(slices)
    else:
        low, high = _table_words(table, 0, 4), _table_words(table, 1, 4)
        places, shifted = words & 0x77777777, words << 4
        for half in tl.static_range(2):  # four codes
            upper = _bytes(words, shifted, 0xBFAE if half else 0x9D8C)
            at = places >> 16 if half else places
            first, second = _looked_up(low, at, upper), _looked_up(high, at, upper)
            slices = slices + (_bytes(first, second, 0x5140), _bytes(first, second, 0x7362))  # type: ignore[assignment]
        return _joined(slices)


@triton.jit
def _half(x):
    """Return the bits of x as float16 in the low half of int32."""
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _column(k, COLUMNS: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Return the channels or tokens of columns k of a tile, and the power of two by which the codes are
    too large."""
    B: tl.constexpr = S[LEAF][BITS]
    D: tl.constexpr = 16 // B
    slice, j = k // (COLUMNS // D), k % (COLUMNS // D)
    word = j // 2
    if S[LEAF][IS_INTEGER]:
        pair, half, unit = word % B * D + slice, j % 2, 1 << (B * slice % 8)
    else:
        code = 2 * slice + j % 2
        pair, half, unit = word % B * D + code % D, code // D, slice * 0 + 1
    at = word // B * 32 + 2 * pair + half
    if S[LEAF][IS_INTEGER]:  # columns 2i and 2i + 1 are neighbours; the compiler cannot derive that
        RUN: tl.constexpr = (2,) if len(k.shape) == 1 else (1, 2) if k.shape[0] == 1 else (2, 1)
        at = tl.max_contiguous(tl.multiple_of(at, RUN), RUN)
    return at, unit


@triton.jit
def query_slices(q, most, rows, row_ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Load a leaf's query again in the order of columns, float16 [columns, rows]. most: powers of two
    [1, rows] that divide it."""
    P: tl.constexpr = S[LEAF][PADDED]
    channel, unit = _column(tl.arange(0, P)[:, None], P, S, LEAF)
    x = tl.load(rows[None, :] + channel, mask=row_ok[None, :] & (channel < S[LEAF][CHANNELS]), other=0.0)
    x = x.to(tl.float32) / most
    if S[LEAF][IS_INTEGER] and (S[LEAF][SCALES] == TO_PRODUCT or x.shape[1] <= FEW):
        x /= unit
    return q.to(tl.float16), x.to(tl.float16)


@triton.jit
def _lanes(S: tl.constexpr, LEAF: tl.constexpr):
    """Offsets in words of 32 lanes from the first one, [1, 1, 32]."""
    lane = tl.arange(0, 32)[None, None, :]
    return (lane // 16 * (S[LEAF][WORDS] * 16) + lane % 16).to(tl.int64)


@triton.jit
def _words(leaf, b, h, n0, n, T, unit, at, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Load words of lanes. n: tokens counted from n0's block. unit: offsets of their words in a block. at: offsets
    int64 from there. ok: mask of the words that are no padding, which is not used if no channels are.

    Tokens after the last block are read from it, so that loads need no mask for tokens."""
    last = tl.maximum(T - 1, 0) // S[LEAF][BLOCK] - n0 // S[LEAF][BLOCK]
    block = tl.minimum(n // S[LEAF][BLOCK], last) * leaf[CODES + 3]
    words = block_at(leaf, CODES, b, h, n0, S, LEAF) + (block + unit) + at
    if S[LEAF][CHANNELS] == S[LEAF][PADDED]:
        return tl.load(words)
    else:
        return tl.load(words, mask=ok, other=0)


@triton.jit
def _unit_of(S: tl.constexpr, LEAF: tl.constexpr):
    """Factor by which products with columns must be multiplied."""
    return SUBNORMAL if S[LEAF][IS_INTEGER] else 1.0


@triton.jit
def load_keys_slices(leaf, q, factor, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Scores [32·NB, rows], times a factor [1, rows], of a query: itself, and by columns, float16 [channels, rows]."""
    N: tl.constexpr = NB * 32
    P: tl.constexpr = S[LEAF][PADDED]
    R: tl.constexpr = q[0].shape[1]
    word = tl.arange(0, P * S[LEAF][BITS] // 32)[None, :, None]
    first = 32 * tl.arange(0, NB)[:, None, None]
    n = from_block(n0, first, S, LEAF)
    first = n % S[LEAF][BLOCK] * S[LEAF][WORDS]
    at = word.to(tl.int64) * 16 + _lanes(S, LEAF)
    x = _words(leaf, b, h, n0, n, T, first, at, word < S[LEAF][WORDS], S, LEAF)
    x = _columns(tl.permute(x, (0, 2, 1)), leaf[TABLE] + b * leaf[TABLE + 1], S, LEAF)
    if S[LEAF][SCALES] == TO_COEFFICIENTS:
        token = 32 * tl.arange(0, NB)[:, None]
        channel, unit = _column(tl.arange(0, P)[None, :], P, S, LEAF)
        ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
        scale = stored_plane(leaf, SCALE, b, h, n0, token, channel, ok, S, LEAF)
        most = 1.0
        if S[LEAF][WIDE]:
            most = largest(scale.to(tl.float32))
            scale = (scale.to(tl.float32) * (1.0 / most)).to(tl.float16)
        if S[LEAF][IS_INTEGER] and R > FEW:
            scale *= (1.0 / unit).to(tl.float16)
        s = product(x, q[1][None, :, :] * scale[:, :, None]) * (factor * (most * _unit_of(S, LEAF)))[None, :, :]
        if S[LEAF][HAS_OFFSET]:
            y = q[1]
            if R <= FEW:
                y, channel = q[0], tl.arange(0, P)[None, :]
                ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
            offset = stored_plane(leaf, OFFSET, b, h, n0, token, channel, ok, S, LEAF)
            s += (_offsets(offset, y) * factor)[:, None, :]
        return tl.reshape(s, (N, R))
    else:
        s = product(tl.reshape(x, (N, P)), q[1])
        token = tl.arange(0, N)
        s *= (plane(leaf, SCALE, b, h, n0, token, 0, n0 + token < T, S, LEAF) * _unit_of(S, LEAF))[:, None]
        if S[LEAF][HAS_OFFSET]:
            whole = tl.sum(q[0].to(tl.float32), axis=0)
            s += plane(leaf, OFFSET, b, h, n0, token, 0, n0 + token < T, S, LEAF)[:, None] * whole[None, :]
        return s * factor


@triton.jit
def _offsets(offset, y):
    """offset [groups, K] times float16 y [K, rows]. Offsets of bfloat16 may exceed float16's range."""
    if offset.dtype == tl.float16:
        return product(offset, y)
    else:
        most = largest(offset.to(tl.float32))
        return product((offset.to(tl.float32) * (1.0 / most)).to(tl.float16), y) * most


@triton.jit
def _by_column(p, NB: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Return weights [32·NB, rows] in the order of columns."""
    R: tl.constexpr = p.shape[1]
    B: tl.constexpr = S[LEAF][BITS]
    if S[LEAF][IS_INTEGER]:
        x = tl.permute(tl.reshape(p, (NB * B, 16 // B, 2, R)), (1, 0, 2, 3))
    else:
        x = tl.permute(tl.reshape(p, (NB * B, 2, 2, 2, R)), (3, 1, 0, 2, 4))
    return tl.reshape(x, (32 * NB, R))


@triton.jit
def _by_token(s, NB: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Inverse of `_by_column`."""
    R: tl.constexpr = s.shape[1]
    B: tl.constexpr = S[LEAF][BITS]
    if S[LEAF][IS_INTEGER]:
        x = tl.permute(tl.reshape(s, (16 // B, NB * B, 2, R)), (1, 0, 2, 3))
    else:
        x = tl.permute(tl.reshape(s, (2, 2, NB * B, 2, R)), (2, 1, 3, 0, 4))
    return tl.reshape(x, (32 * NB, R))


@triton.jit
def _value_columns(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Load values by columns, float16 [channel groups, 32, columns]."""
    G: tl.constexpr = S[LEAF][PADDED] // 32
    B: tl.constexpr = S[LEAF][BITS]
    word = tl.arange(0, B * NB)[None, :, None]
    c = 32 * tl.arange(0, G)[:, None, None] + tl.arange(0, 32)[None, None, :]
    n = from_block(n0, word // B * 32, S, LEAF)
    unit = (n % S[LEAF][BLOCK]) // 32 * (B * 16) + word % B * 16
    at = tl.arange(0, G)[:, None, None].to(tl.int64) * (S[LEAF][WORDS] * 32) + _lanes(S, LEAF)
    x = _words(leaf, b, h, n0, n, T, unit, at, c < S[LEAF][CHANNELS], S, LEAF)
    return _columns(tl.permute(x, (0, 2, 1)), leaf[TABLE] + b * leaf[TABLE + 1], S, LEAF)


@triton.jit
def load_values_slices(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [32·NB, rows]."""
    G: tl.constexpr = S[LEAF][PADDED] // 32
    N: tl.constexpr = NB * 32
    R: tl.constexpr = p.shape[1]
    x = _value_columns(leaf, b, h, n0, T, S, LEAF, NB)
    token = tl.arange(0, N)
    column, unit = _column(token, N, S, LEAF)
    if S[LEAF][SCALES] == TO_PRODUCT:
        scale = plane(leaf, SCALE, b, h, n0, token, 0, n0 + token < T, S, LEAF)
        most = largest(scale)
        weights = _by_column((p * (scale * (1.0 / most))[:, None]).to(tl.float16), NB, S, LEAF)
        if S[LEAF][IS_INTEGER]:
            weights *= (1.0 / unit).to(tl.float16)[:, None]
        out = product(tl.reshape(x, (32 * G, N)), weights) * (most * _unit_of(S, LEAF))
        if S[LEAF][HAS_OFFSET]:
            offset = plane(leaf, OFFSET, b, h, n0, token, 0, n0 + token < T, S, LEAF)
            out += tl.sum(p * offset[:, None], axis=0)[None, :]
        return out
    else:
        channel = 32 * tl.arange(0, G)[:, None]
        ok = (n0 + column < T)[None, :] & (channel < S[LEAF][CHANNELS])
        scale = plane(leaf, SCALE, b, h, n0, column[None, :], channel, ok, S, LEAF)
        most = power_of_two(tl.max(scale, axis=1))
        p = p.to(tl.float16)
        scale *= (1.0 / most)[:, None] * (1.0 / unit)[None, :]
        out = product(x, _by_column(p, NB, S, LEAF)[None, :, :] * scale.to(tl.float16)[:, :, None])
        out *= (most * _unit_of(S, LEAF))[:, None, None]
        if S[LEAF][HAS_OFFSET]:
            ok = (n0 + token < T)[None, :] & (channel < S[LEAF][CHANNELS])
            offset = stored_plane(leaf, OFFSET, b, h, n0, token[None, :], channel, ok, S, LEAF)
            out += _offsets(offset, p)[:, None, :]
        return tl.reshape(out, (32 * G, R))


@triton.jit
def load_latent_slices(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Decode values that are keys, too: float16 [channels, columns], and the power of two that divides them."""
    G: tl.constexpr = S[LEAF][PADDED] // 32
    x = _value_columns(leaf, b, h, n0, T, S, LEAF, NB)
    column, unit = _column(tl.arange(0, NB * 32)[None, :], NB * 32, S, LEAF)
    channel = 32 * tl.arange(0, G)[:, None]
    ok = (n0 + column < T) & (channel < S[LEAF][CHANNELS])
    scale = plane(leaf, SCALE, b, h, n0, column, channel, ok, S, LEAF)
    MOST: tl.constexpr = 1 << S[LEAF][BITS] if S[LEAF][IS_INTEGER] else 1
    most = largest(scale) * MOST
    if S[LEAF][IS_INTEGER]:
        x *= 32768.0  # 2^15, the largest power of two
        scale *= 512.0 / unit
    if S[LEAF][HAS_OFFSET]:
        offset = plane(leaf, OFFSET, b, h, n0, column, channel, ok, S, LEAF)
        most = tl.maximum(most, largest(offset))
        x = x * (scale * (1.0 / most)).to(tl.float16)[:, None, :] + (offset * (1.0 / most)).to(tl.float16)[:, None, :]
    else:
        x *= (scale * (1.0 / most)).to(tl.float16)[:, None, :]
    return tl.reshape(once(x), (32 * G, NB * 32)), most


@triton.jit
def latent_slices_scores(loaded, q, S: tl.constexpr, LEAF: tl.constexpr):
    """Scores [tokens, rows] of q float32 [channels, rows], whose elements are at most 1."""
    s = product(tl.trans(loaded[0]), q.to(tl.float16)) * loaded[1]
    return _by_token(s, loaded[0].shape[1] // 32, S, LEAF)


@triton.jit
def latent_slices_sums(loaded, p, S: tl.constexpr, LEAF: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [tokens, rows]."""
    return product(loaded[0], _by_column(p.to(tl.float16), loaded[0].shape[1] // 32, S, LEAF)) * loaded[1]
