"""Products with grids of integers or of a table with 16 entries: codes go from their words to the tensor
cores without passing through shared memory.

A word holds a few codes of a lane: 16/bits in each half. A slice is a pair of codes of every word of a
tile: one shift and mask of the words. The slices are the columns of the tile, one after the other, so
columns are not consecutive channels (keys) or tokens (values). Queries, weights and scales are read in
the order of columns instead.

Integers are the lowest bits of float16: subnormal numbers, multiples of 2^-24. Tensor cores multiply
these exactly. Factors are in float32: 2^24, and powers of two of slices that are above the lowest bits.

Entries of a table are put together of two bytes, which are looked up for four codes at a time
(`lookups.py`). All operands of such a step are tensors and all its results single, because the compiler
would otherwise pass the entries through shared memory.

Tensor cores take rows in any order, so each thread reads four lanes that are neighbours in memory.
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
from tersekv.kernels.triton.lookups import bytes_at, of_sixteen, table_words
from tersekv.kernels.triton.tiles import (
    INTERPRETED,
    block_at,
    blocks_at,
    from_block,
    inverse,
    largest,
    once,
    power_of_two,
    product,
)


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
        low, high = table_words(table, 0, True), table_words(table, 1, True)
        places, shifted = (words ^ (words >> 1)) & 0x77777777, words << 4
        for half in tl.static_range(2):  # four codes
            upper = bytes_at(words, shifted, 0x3726 if half else 0x1504)
            at = places >> 16 if half else places
            first, second = bytes_at(low[0], low[1], at), bytes_at(high[0], high[1], at) ^ (upper & -0x7F7F7F80)
            slices = slices + (bytes_at(first, second, 0x5140), bytes_at(first, second, 0x7362))  # type: ignore[assignment]
        return _joined(slices)
    else:
        low, high = table_words(table, 0, False), table_words(table, 1, False)
        places, shifted = words & 0x77777777, words << 4
        for half in tl.static_range(2):  # four codes
            upper = bytes_at(words, shifted, 0xBFAE if half else 0x9D8C)
            at = places >> 16 if half else places
            first, second = of_sixteen(low, at, upper), of_sixteen(high, at, upper)
            slices = slices + (bytes_at(first, second, 0x5140), bytes_at(first, second, 0x7362))  # type: ignore[assignment]
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
def _words(leaf, b, h, n0, i, T, unit, lane, at, ok, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Load words of tokens n0 + i. unit: offsets in a block. lane, at: offsets int64 from there, those of a thread
    and those that all threads share. ok: mask of the words that are no padding, which is not used if no channels are.

    Tokens after the last block are read from it, so that loads need no mask for tokens."""
    if NB <= 4:  # a warp reads one block
        last = tl.maximum(T - 1, 0) // S[LEAF][BLOCK] * S[LEAF][BLOCK]
        words = blocks_at(leaf, CODES, b, h, tl.minimum(n0 + i, last), S, LEAF, lane) + (unit + at)
    else:
        last = tl.maximum(T - 1, 0) // S[LEAF][BLOCK] - n0 // S[LEAF][BLOCK]
        block = tl.minimum(from_block(n0, i, S, LEAF) // S[LEAF][BLOCK], last) * leaf[CODES + 3]
        words = block_at(leaf, CODES, b, h, n0, S, LEAF) + (block + unit) + (lane + at)
    if S[LEAF][CHANNELS] == S[LEAF][PADDED]:
        return tl.load(words)
    else:
        return tl.load(words, mask=ok, other=0)


@triton.jit
def _product(x, y):
    """Return a tile x [G, 32, columns] times float16 y: [32·G, rows] for y [columns, rows], [G, 32, rows] for y
    [G, columns, rows]. Meanwhile, the tile's rows are in an order in which a thread has four consecutive ones."""
    G: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[2]
    R: tl.constexpr = y.shape[len(y.shape) - 1]
    x = tl.reshape(x, (G, 8, 2, 2, K))
    if len(y.shape) == 2:
        s = product(tl.reshape(tl.permute(x, (2, 0, 3, 1, 4)), (32 * G, K)), y)
        return tl.reshape(tl.permute(tl.reshape(s, (2, G, 2, 8, R)), (1, 3, 0, 2, 4)), (32 * G, R))
    else:
        s = product(tl.reshape(tl.permute(x, (0, 2, 3, 1, 4)), (G, 32, K)), y)
        return tl.reshape(tl.permute(tl.reshape(s, (G, 2, 2, 8, R)), (0, 3, 1, 2, 4)), (G, 32, R))


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
    W: tl.constexpr = P * S[LEAF][BITS] // 32
    FOUR: tl.constexpr = 4 if W > 4 else W  # words between which are all blocks, so that a warp reads one block
    word = FOUR * tl.arange(0, W // FOUR)[:, None, None, None] + tl.arange(0, FOUR)[None, None, :, None]
    first = 32 * tl.arange(0, NB)[None, :, None, None]
    unit = from_block(n0, first, S, LEAF) % S[LEAF][BLOCK] * S[LEAF][WORDS]
    lane = tl.arange(0, FOUR).to(tl.int64)[None, None, :, None] * 16 + _lanes(S, LEAF)[None]
    at = tl.arange(0, W // FOUR).to(tl.int64)[:, None, None, None] * (16 * FOUR)
    x = _words(leaf, b, h, n0, first, T, unit, lane, at, word < S[LEAF][WORDS], S, LEAF, NB)
    x = tl.reshape(tl.permute(x, (1, 0, 2, 3)), (NB, W, 32))
    x = _columns(tl.permute(x, (0, 2, 1)), leaf[TABLE] + b * leaf[TABLE + 1], S, LEAF)
    if S[LEAF][SCALES] == TO_COEFFICIENTS:
        token = 32 * tl.arange(0, NB)[:, None]
        channel, unit = _column(tl.arange(0, P)[None, :], P, S, LEAF)
        ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
        scale = stored_plane(leaf, SCALE, b, h, n0, token, channel, ok, S, LEAF)
        most = 1.0
        if S[LEAF][WIDE]:
            most = largest(scale.to(tl.float32))
            scale = (scale.to(tl.float32) * inverse(most)).to(tl.float16)
        if S[LEAF][IS_INTEGER] and R > FEW:
            scale *= (1.0 / unit).to(tl.float16)
        y = q[1][None, :, :] * scale[:, :, None]
        s = _product(x, y) if S[LEAF][IS_INTEGER] else product(x, y)  # tables with outliers lack the registers
        s *= (factor * (most * _unit_of(S, LEAF)))[None, :, :]
        if S[LEAF][HAS_OFFSET]:
            y = q[1]
            if R <= FEW:
                y, channel = q[0], tl.arange(0, P)[None, :]
                ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
            offset = stored_plane(leaf, OFFSET, b, h, n0, token, channel, ok, S, LEAF)
            s += (_offsets(offset, y) * factor)[:, None, :]
        return tl.reshape(s, (N, R))
    else:
        s = _product(x, q[1])
        token = tl.arange(0, N)
        factor = tl.reshape(factor, (1,))
        scale = plane(leaf, SCALE, b, h, n0, token, 0, n0 + token < T, S, LEAF) * (factor * _unit_of(S, LEAF))
        s *= scale[:, None]
        if S[LEAF][HAS_OFFSET]:
            whole = tl.sum(q[0].to(tl.float32), axis=0)
            offset = plane(leaf, OFFSET, b, h, n0, token, 0, n0 + token < T, S, LEAF) * factor
            s += offset[:, None] * whole[None, :]
        return s


@triton.jit
def _offsets(offset, y):
    """offset [groups, K] times float16 y [K, rows]. Offsets of bfloat16 may exceed float16's range."""
    if offset.dtype == tl.float16:
        return product(offset, y)
    else:
        most = largest(offset.to(tl.float32))
        return product((offset.to(tl.float32) * inverse(most)).to(tl.float16), y) * most


@triton.jit
def _by_column(p, NB: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Return weights float16 [32·NB, rows] in the order of columns. For two bits, they are moved in pairs of
    neighbours, which takes fewer passes through shared memory."""
    R: tl.constexpr = p.shape[1]
    B: tl.constexpr = S[LEAF][BITS]
    if S[LEAF][IS_INTEGER] and B == 2:
        low, high = tl.split(tl.permute(tl.reshape(p.to(tl.int16, bitcast=True), (16 * NB, 2, R)), (0, 2, 1)))
        x = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
        x = tl.reshape(tl.permute(tl.reshape(x, (NB * B, 16 // B, R)), (1, 0, 2)), (16 * NB, R))
        low, high = x.to(tl.int16).to(tl.float16, bitcast=True), (x >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        x = tl.permute(tl.join(low, high), (0, 2, 1))
    elif S[LEAF][IS_INTEGER]:
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
    unit = from_block(n0, word // B * 32, S, LEAF) % S[LEAF][BLOCK] // 32 * (B * 16) + word % B * 16
    at = tl.arange(0, G)[:, None, None].to(tl.int64) * (S[LEAF][WORDS] * 32)
    x = _words(leaf, b, h, n0, word // B * 32, T, unit, _lanes(S, LEAF), at, c < S[LEAF][CHANNELS], S, LEAF, NB)
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
        weights = _by_column((p * (scale * inverse(most))[:, None]).to(tl.float16), NB, S, LEAF)
        if S[LEAF][IS_INTEGER]:
            weights *= (1.0 / unit).to(tl.float16)[:, None]
        out = _product(x, weights) * (most * _unit_of(S, LEAF))
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
        scale *= inverse(most)[:, None] * (1.0 / unit)[None, :]
        out = _product(x, _by_column(p, NB, S, LEAF)[None, :, :] * scale.to(tl.float16)[:, :, None])
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
        x = x * (scale * inverse(most)).to(tl.float16)[:, None, :] + (offset * inverse(most)).to(tl.float16)[:, None, :]
    else:
        x *= (scale * inverse(most)).to(tl.float16)[:, None, :]
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
