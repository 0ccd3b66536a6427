"""Loaders of `grid` (`kernels/attend_grid.py`), which has codes of 1 to 8 bits with a table, scales
and offsets, and of `sparse` (`layouts/sparse.py`), the outliers of whole blocks.

x̂ = scale·table[code] + offset is not computed per element if scales can be multiplied elsewhere. A
scale of the packed axis (keys per channel, values per token) is multiplied with the query or the
softmax weight. A scale per lane (keys per token) is multiplied with the product. Only other groups,
and values with a factor per channel, scale each element.

Outliers are read a few at a time. The product of an outlier with its query or weight is added to
its token or channel by a matrix product with zeros and ones. Atomic adds are not used, because
their order changes from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.leaves import (
    BITS,
    BLOCK,
    CHANNELS,
    FIRST,
    GROUP,
    HAS_FACTOR,
    HAS_OFFSET,
    IS_INTEGER,
    PADDED,
    PER_BLOCK,
    PER_TOKEN,
    SCALES,
    TO_COEFFICIENTS,
    TO_ELEMENTS,
    TO_PRODUCT,
    WIDE,
    WORDS,
)
from tersekv.kernels.triton.tiles import (
    PAIRS,
    block_at,
    blocks_at,
    cos_sin,
    from_block,
    inverse,
    largest,
    load_words,
    numbers,
    product,
)

# Fields of a leaf: codes and their strides of batch row, head and block; scale and offset likewise;
# table and its row stride. A factor and its strides, if there is one.
CODES: tl.constexpr = tl.constexpr(0)
SCALE: tl.constexpr = tl.constexpr(4)
OFFSET: tl.constexpr = tl.constexpr(8)
TABLE: tl.constexpr = tl.constexpr(12)
FACTOR: tl.constexpr = tl.constexpr(14)


@triton.jit
def _entries(leaf, b, h, n0, at, left, S: tl.constexpr, LEAF: tl.constexpr):
    """Load a tile [G, L, 32·U] of the units at `at` [G, L, U], counted from n0's block. The entries
    are divided by `_unit`."""
    words = load_words(block_at(leaf, CODES, b, h, n0, S, LEAF), at, left, S[LEAF][BITS])
    return numbers(words, leaf[TABLE] + b * leaf[TABLE + 1], S[LEAF][BITS], S[LEAF][IS_INTEGER])


@triton.jit
def _unit(S: tl.constexpr, LEAF: tl.constexpr):
    """Factor by which the entries of a tile must be multiplied."""
    return (1 << S[LEAF][BITS]) * 1.0 if S[LEAF][IS_INTEGER] else 1.0


@triton.jit
def plane(leaf, FIRST: tl.constexpr, b, h, n0, token, channel, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Load the scale or offset (float32) of elements; token (counted from n0) and channel are
    broadcast to each other."""
    return stored_plane(leaf, FIRST, b, h, n0, token, channel, ok, S, LEAF).to(tl.float32)


@triton.jit
def stored_plane(leaf, FIRST: tl.constexpr, b, h, n0, token, channel, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """The same in the stored type."""
    inside = from_block(n0, token, S, LEAF) % S[LEAF][BLOCK]
    if S[LEAF][PER_TOKEN]:
        at = (channel // S[LEAF][GROUP]) * S[LEAF][BLOCK] + inside
    else:
        at = (inside // S[LEAF][GROUP]) * S[LEAF][CHANNELS] + channel
    if len(token.shape) == 1:
        first = blocks_at(leaf, FIRST, b, h, n0 + token, S, LEAF)
    else:
        first = block_at(leaf, FIRST, b, h, n0, S, LEAF)
        first += from_block(n0, token, S, LEAF) // S[LEAF][BLOCK] * leaf[FIRST + 3]
    return tl.load(first + at, mask=ok, other=0.0)


@triton.jit
def _factor(leaf, b, h, n0, token, channel, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Load the second scale (float32) of elements, see `plane`."""
    token = from_block(n0, token, S, LEAF)
    block, inside = token // S[LEAF][BLOCK], token % S[LEAF][BLOCK]
    at = block * leaf[FACTOR + 3]
    at += channel if S[LEAF][PER_TOKEN] else inside
    return tl.load(block_at(leaf, FACTOR, b, h, n0, S, LEAF) + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, leaf, b, h, n0, token, channel, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """factor·(scale·entry + offset), float32, from a tile of `_entries`."""
    x = x.to(tl.float32) * _unit(S, LEAF)
    x *= plane(leaf, SCALE, b, h, n0, token, channel, ok, S, LEAF)
    if S[LEAF][HAS_OFFSET]:
        x += plane(leaf, OFFSET, b, h, n0, token, channel, ok, S, LEAF)
    if S[LEAF][HAS_FACTOR]:
        x *= _factor(leaf, b, h, n0, token, channel, ok, S, LEAF)
    return x


@triton.jit
def _offsets(offset, coefficients):
    """offset [G, K] times coefficients [K, rows]: [G, 1, rows]."""
    most = largest(offset)
    return (product((offset * inverse(most)).to(tl.float16), coefficients.to(tl.float16)) * most)[:, None, :]


@triton.jit
def _key_entries(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Load the entries of keys from token n0 on: [NB, 32, K]."""
    U: tl.constexpr = S[LEAF][PADDED] // 32
    i = 32 * tl.arange(0, NB)[:, None, None] + tl.arange(0, 32)[None, :, None]
    n, u = from_block(n0, i, S, LEAF), tl.arange(0, U)[None, None, :]
    inside = n % S[LEAF][BLOCK]
    lane = (n // S[LEAF][BLOCK]) * leaf[CODES + 3] + (inside // 16) * (S[LEAF][WORDS] * 16) + inside % 16
    left = tl.where(n0 + i < T, S[LEAF][WORDS] - u * S[LEAF][BITS], 0)
    return _entries(leaf, b, h, n0, lane + u * (S[LEAF][BITS] * 16), left, S, LEAF)


@triton.jit
def decode_keys_grid(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Decode keys to x̂, float32 [32·NB, K]."""
    K: tl.constexpr = S[LEAF][PADDED]
    x = tl.reshape(_key_entries(leaf, b, h, n0, T, S, LEAF, NB), (NB * 32, K))
    token, channel = tl.arange(0, NB * 32)[:, None], tl.arange(0, K)[None, :]
    return _scaled(x, leaf, b, h, n0, token, channel, (n0 + token < T) & (channel < S[LEAF][CHANNELS]), S, LEAF)


@triton.jit
def load_keys_grid(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Scores [32·NB, rows] of q float32 [K, rows], whose elements are at most 1."""
    N: tl.constexpr = NB * 32
    K: tl.constexpr = S[LEAF][PADDED]
    if S[LEAF][SCALES] == TO_COEFFICIENTS:
        x = _key_entries(leaf, b, h, n0, T, S, LEAF, NB)
        token, channel = 32 * tl.arange(0, NB)[:, None], tl.arange(0, K)[None, :]
        ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
        scale = plane(leaf, SCALE, b, h, n0, token, channel, ok, S, LEAF)
        most = 1.0
        if S[LEAF][WIDE]:
            most = largest(scale)
            scale *= inverse(most)
        coefficients = (q[None, :, :] * scale[:, :, None]).to(tl.float16)
        s = product(x, coefficients) * (most * _unit(S, LEAF))
        if S[LEAF][HAS_OFFSET]:
            offset = plane(leaf, OFFSET, b, h, n0, token, channel, ok, S, LEAF)
            s += _offsets(offset, q)
        s = tl.reshape(s, (N, q.shape[1]))
        if S[LEAF][HAS_FACTOR]:
            one = tl.arange(0, N)
            s *= _factor(leaf, b, h, n0, one, 0, n0 + one < T, S, LEAF)[:, None]
        return s
    elif S[LEAF][SCALES] == TO_PRODUCT:
        token = tl.arange(0, N)
        x = tl.reshape(_key_entries(leaf, b, h, n0, T, S, LEAF, NB), (N, K))
        s = product(x, q.to(tl.float16)) * _unit(S, LEAF)
        s *= plane(leaf, SCALE, b, h, n0, token, 0, n0 + token < T, S, LEAF)[:, None]
        if S[LEAF][HAS_OFFSET]:
            s += plane(leaf, OFFSET, b, h, n0, token, 0, n0 + token < T, S, LEAF)[:, None] * tl.sum(q, axis=0)[None, :]
        return s
    else:
        x = decode_keys_grid(leaf, b, h, n0, T, S, LEAF, NB)
        most = largest(x)
        return product((x * inverse(most)).to(tl.float16), q.to(tl.float16)) * most


@triton.jit
def _value_entries(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Load the entries of values from token n0 on: [channel groups, 32, 32·NB]."""
    G: tl.constexpr = S[LEAF][PADDED] // 32
    c = 32 * tl.arange(0, G)[:, None, None] + tl.arange(0, 32)[None, :, None]
    i = 32 * tl.arange(0, NB)[None, None, :]
    first = from_block(n0, i, S, LEAF)
    unit = (first // S[LEAF][BLOCK]) * leaf[CODES + 3] + ((first % S[LEAF][BLOCK]) // 32) * (S[LEAF][BITS] * 16)
    left = tl.where((c < S[LEAF][CHANNELS]) & (n0 + i < T), S[LEAF][BITS], 0)
    return _entries(leaf, b, h, n0, (c // 16) * (S[LEAF][WORDS] * 16) + c % 16 + unit, left, S, LEAF)


@triton.jit
def _value_planes(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Load scales and offsets (float32) of values: [32·NB], or [channel groups, 32·NB] if scales are multiplied with
    the coefficients."""
    token = tl.arange(0, 32 * NB)
    if S[LEAF][SCALES] == TO_COEFFICIENTS:
        channel = 32 * tl.arange(0, S[LEAF][PADDED] // 32)[:, None]
        token = token[None, :]
        ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
    else:
        channel = 0
        ok = n0 + token < T
    scale = plane(leaf, SCALE, b, h, n0, token, channel, ok, S, LEAF)
    offset = scale
    if S[LEAF][HAS_OFFSET]:
        offset = plane(leaf, OFFSET, b, h, n0, token, channel, ok, S, LEAF)
    return scale, offset


@triton.jit
def load_value_grid(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Load values that are keys, too: entries float16 [channel groups, 32, 32·NB], scales and offsets."""
    x = _value_entries(leaf, b, h, n0, T, S, LEAF, NB)
    if S[LEAF][SCALES] == TO_ELEMENTS:
        P: tl.constexpr = S[LEAF][PADDED]
        token, channel = tl.arange(0, 32 * NB)[None, :], tl.arange(0, P)[:, None]
        ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
        y = _scaled(tl.reshape(x, (P, 32 * NB)), leaf, b, h, n0, token, channel, ok, S, LEAF)
        most = largest(y)
        scale = tl.zeros((32 * NB,), tl.float32) + most
        return tl.reshape((y * inverse(most)).to(tl.float16), (P // 32, 32, 32 * NB)), scale, scale
    else:
        scale, offset = _value_planes(leaf, b, h, n0, T, S, LEAF, NB)
        return x, scale, offset


@triton.jit
def value_grid_scores(loaded, q, S: tl.constexpr, LEAF: tl.constexpr):
    """Scores [tokens, rows] of q float32 [K, rows], whose elements are at most 1."""
    x, scale, offset = loaded
    G: tl.constexpr = S[LEAF][PADDED] // 32
    N: tl.constexpr = x.shape[2]
    R: tl.constexpr = q.shape[1]
    if S[LEAF][SCALES] == TO_COEFFICIENTS:
        groups = tl.reshape(q, (G, 32, R))
        s = product(tl.permute(x, (0, 2, 1)), groups.to(tl.float16)) * (scale * _unit(S, LEAF))[:, :, None]
        if S[LEAF][HAS_OFFSET]:
            s += offset[:, :, None] * tl.sum(groups, axis=1)[:, None, :]
        return tl.sum(s, axis=0)
    else:
        unit = 1.0 if S[LEAF][SCALES] == TO_ELEMENTS else _unit(S, LEAF)
        s = product(tl.trans(tl.reshape(x, (32 * G, N))), q.to(tl.float16)) * (scale * unit)[:, None]
        if S[LEAF][HAS_OFFSET] and S[LEAF][SCALES] == TO_PRODUCT:
            s += offset[:, None] * tl.sum(q, axis=0)[None, :]
        return s


@triton.jit
def value_grid_sums(loaded, p, S: tl.constexpr, LEAF: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [tokens, rows]."""
    x, scale, offset = loaded
    G: tl.constexpr = S[LEAF][PADDED] // 32
    N: tl.constexpr = x.shape[2]
    R: tl.constexpr = p.shape[1]
    most = largest(scale)
    if S[LEAF][SCALES] == TO_COEFFICIENTS:
        coefficients = (p[None, :, :] * (scale * inverse(most))[:, :, None]).to(tl.float16)
        out = product(x, coefficients) * (most * _unit(S, LEAF))
        if S[LEAF][HAS_OFFSET]:
            out += _offsets(offset, p)
        return tl.reshape(out, (32 * G, R))
    else:  # a scale per token goes to the weight, and one product serves all channels
        unit = 1.0 if S[LEAF][SCALES] == TO_ELEMENTS else _unit(S, LEAF)
        out = product(tl.reshape(x, (32 * G, N)), (p * (scale * inverse(most))[:, None]).to(tl.float16)) * (most * unit)
        if S[LEAF][HAS_OFFSET] and S[LEAF][SCALES] == TO_PRODUCT:
            out += tl.sum(p * offset[:, None], axis=0)[None, :]
        return out


@triton.jit
def load_values_grid(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [32·NB, rows]."""
    return value_grid_sums(load_value_grid(leaf, b, h, n0, T, S, LEAF, NB), p, S, LEAF)


ENTRIES: tl.constexpr = tl.constexpr(32)
"""Entries of a block that are read at a time."""


@triton.jit
def _start(leaf, b, h, block, ok):
    return tl.load(leaf[0] + b * leaf[1] + h * leaf[2] + block * leaf[3], mask=ok, other=0)


@triton.jit
def _ranges(leaf, b, h, B, H, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Return begin and end of the entries of NB blocks, [NB], clamped to the existing
    entries. A leaf with PER_BLOCK has as many entries in each block, and no starts."""
    if S[LEAF][PER_BLOCK] > 0:
        block = n0 // 32 + tl.arange(0, NB)
        first = b * leaf[1] + h * leaf[2] + block.to(tl.int64) * leaf[3]
        return first, tl.where(block * 32 < T, first + S[LEAF][PER_BLOCK], first)
    else:
        return _listed(leaf, b, h, B, H, n0, T, NB)


@triton.jit
def _listed(leaf, b, h, B, H, n0, T, NB: tl.constexpr):
    """Return begin and end of the entries of NB blocks of a list, int32 [NB]."""
    block = n0 // 32 + tl.arange(0, NB)
    base = tl.load(leaf[0])
    # Entries of the next block in the order block, batch row, head; its beginning is the end of
    # this one. Heads whose tokens are one after the other share one list, with strides of 0.
    next_h, next_b, next_block = h + 1, b, block
    next_b = tl.where(next_h == H, b + 1, b)
    next_h = tl.where(next_h == H, 0, next_h)
    next_block = tl.where((next_b == B) | (leaf[1] + leaf[2] == 0), block + 1, block)
    next_b = tl.where(next_b == B, 0, next_b)
    here, there = block * 32 < T, next_block < leaf[7]
    begin = _start(leaf, b, h, block, here) - base
    end = tl.where(there, _start(leaf, next_b, next_h, next_block, there) - base, leaf[6])
    begin = tl.minimum(tl.maximum(begin, 0), leaf[6])
    return begin, tl.where(here, tl.minimum(tl.maximum(end, begin), leaf[6]), begin)


@triton.jit
def _outliers(leaf, at, end, S: tl.constexpr, LEAF: tl.constexpr):
    """Return the token in the block, the channel and the value (float16) of entries `at` [NB, E];
    value 0 past the end."""
    ok = at < end
    place = tl.load(leaf[4] + at, mask=ok, other=0).to(tl.int32) & 0xFFFF
    value = tl.load(leaf[5] + at, mask=ok, other=0.0)
    channel = place & 2047
    inside = channel < S[LEAF][CHANNELS]
    return place >> 11, tl.where(inside, channel, 0), tl.where(inside, value, 0.0).to(tl.float16)


@triton.jit
def load_keys_sparse(
    leaf, rows, row_ok, most, rope, b, h, B, H, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr,
    ROPED: tl.constexpr,
):  # fmt: skip
    """Scores [32·NB, rows] of queries at `rows` (pointers [rows] to their first channel), divided by powers of two
    `most` [1, rows], which are at least the queries' elements."""
    begin, end = _ranges(leaf, b, h, B, H, n0, T, S, LEAF, NB)
    s = tl.zeros((NB, 32, rows.shape[0]), tl.float32)
    for e in range(0, tl.max((end - begin).to(tl.int32), axis=0), ENTRIES):
        at = begin[:, None] + e + tl.arange(0, ENTRIES)[None, :]
        token, channel, value = _outliers(leaf, at, end[:, None], S, LEAF)
        ok = row_ok[None, None, :] & (value != 0)[:, :, None]
        q = tl.load(rows[None, None, :] + channel[:, :, None], mask=ok, other=0.0).to(tl.float32)
        if ROPED:
            n = tl.minimum(n0 + 32 * tl.arange(0, NB)[:, None] + token, T - 1)
            c = S[LEAF][FIRST] + channel
            cos, sin, partner = rope_at(rope, b, h, n, c, ROPED)
            across = tl.load(rows[None, None, :] + (partner - S[LEAF][FIRST])[:, :, None], mask=ok, other=0.0)
            q = q * cos[:, :, None] + across.to(tl.float32) * sin[:, :, None]
        own = token[:, None, :] == tl.arange(0, 32)[None, :, None]
        s += product(
            tl.where(own, value[:, None, :], 0.0).to(tl.float16), (q * inverse(most)[None, :, :]).to(tl.float16)
        )
    return tl.reshape(s, (NB * 32, rows.shape[0]))


@triton.jit
def rope_at(rope, b, h, n, c, ROPED: tl.constexpr):
    """Return cos, sin and partner for channel c of token n: x contributes x·(q[c]·cos +
    q[partner]·sin). sin includes the sign."""
    column = tl.load(rope[PAIRS] + 4 * c)
    partner = tl.load(rope[PAIRS] + 4 * c + 1)
    across = tl.load(rope[PAIRS] + 4 * c + 2)
    sign = tl.load(rope[PAIRS] + 4 * c + 3).to(tl.float32)
    moved = column >= 0
    cos, sin = cos_sin(rope, 0, b, h, n, column, across, moved, ROPED)
    return cos, sin * sign, partner


@triton.jit
def load_values_sparse(
    leaf, p, b, h, B, H, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """Σ p·v̂ [channels, rows] of weights p float32 [32·NB, rows]."""
    R: tl.constexpr = p.shape[1]
    begin, end = _ranges(leaf, b, h, B, H, n0, T, S, LEAF, NB)
    p = tl.reshape(p.to(tl.float16), (NB, 32, R))
    P: tl.constexpr = S[LEAF][PADDED]
    out = tl.zeros((P, R), tl.float32)
    for e in range(0, tl.max((end - begin).to(tl.int32), axis=0), ENTRIES):
        at = begin[:, None] + e + tl.arange(0, ENTRIES)[None, :]
        token, channel, value = _outliers(leaf, at, end[:, None], S, LEAF)
        own = (token[:, :, None] == tl.arange(0, 32)[None, None, :]).to(tl.float16)
        weights = tl.reshape(product(own, p).to(tl.float16), (NB * ENTRIES, R))
        channel, value = tl.reshape(channel, (1, NB * ENTRIES)), tl.reshape(value, (1, NB * ENTRIES))
        out += product(tl.where(tl.arange(0, P)[:, None] == channel, value, 0.0).to(tl.float16), weights)
    return out
