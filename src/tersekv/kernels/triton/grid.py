"""Loaders of `grid` (`kernels/attend_grid.py`): codes of 1 to 8 bits, a table, scales and offsets.

x̂ = scale·table[code] + offset is not computed per element where scales leave it out: where one lies on the packed axis
(keys per channel, values per token), it is multiplied to the query or to the softmax weight, and where each lane has
one (keys per token), to the product. Only other groups scale each element.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.codes import largest, load_words, numbers, product
from tersekv.kernels.triton.places import block_at, from_block
from tersekv.kernels.triton.spec import (
    BITS,
    BLOCK,
    CHANNELS,
    GROUP,
    HAS_OFFSET,
    IS_INTEGER,
    PADDED,
    PER_TOKEN,
    SCALES,
    TO_COEFFICIENTS,
    TO_PRODUCT,
    WIDE,
    WORDS,
)

# A leaf: codes and their strides of batch row, head and block; scale, offset likewise; table and its stride of a row.
CODES: tl.constexpr = tl.constexpr(0)
SCALE: tl.constexpr = tl.constexpr(4)
OFFSET: tl.constexpr = tl.constexpr(8)
TABLE: tl.constexpr = tl.constexpr(12)


@triton.jit
def _entries(leaf, b, h, n0, at, left, S: tl.constexpr, LEAF: tl.constexpr):
    """A tile [G, L, 32·U] of the units at `at` [G, L, U] from n0's block on, in units of `_unit`."""
    words = load_words(block_at(leaf, CODES, b, h, n0, S, LEAF), at, left, S[LEAF][BITS])
    return numbers(words, leaf[TABLE] + b * leaf[TABLE + 1], S[LEAF][BITS], S[LEAF][IS_INTEGER])


@triton.jit
def _unit(S: tl.constexpr, LEAF: tl.constexpr):
    """What an entry of a tile is to be multiplied by."""
    return (1 << S[LEAF][BITS]) * 1.0 if S[LEAF][IS_INTEGER] else 1.0


@triton.jit
def _plane(leaf, FIRST: tl.constexpr, b, h, n0, token, channel, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Scale or offset (float32) of elements; token (counted from n0) and channel are broadcast to each other."""
    token = from_block(n0, token, S, LEAF)
    block, inside = token // S[LEAF][BLOCK], token % S[LEAF][BLOCK]
    if S[LEAF][PER_TOKEN]:
        at = (channel // S[LEAF][GROUP]) * S[LEAF][BLOCK] + inside
    else:
        at = (inside // S[LEAF][GROUP]) * S[LEAF][CHANNELS] + channel
    first = block_at(leaf, FIRST, b, h, n0, S, LEAF)
    return tl.load(first + block * leaf[FIRST + 3] + at, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _scaled(x, leaf, b, h, n0, token, channel, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """scale·entry + offset, float32, from a tile of `_entries`."""
    x = x.to(tl.float32) * _unit(S, LEAF)
    x *= _plane(leaf, SCALE, b, h, n0, token, channel, ok, S, LEAF)
    if S[LEAF][HAS_OFFSET]:
        x += _plane(leaf, OFFSET, b, h, n0, token, channel, ok, S, LEAF)
    return x


@triton.jit
def _offsets(offset, coefficients):
    """offset [G, K] times coefficients [K, rows]: [G, 1, rows]."""
    most = largest(offset)
    return (product((offset / most).to(tl.float16), coefficients.to(tl.float16)) * most)[:, None, :]


@triton.jit
def _key_entries(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Entries of tokens n0 on: [NB, 32, K]."""
    U: tl.constexpr = S[LEAF][PADDED] // 32
    i = 32 * tl.arange(0, NB)[:, None, None] + tl.arange(0, 32)[None, :, None]
    n, u = from_block(n0, i, S, LEAF), tl.arange(0, U)[None, None, :]
    inside = n % S[LEAF][BLOCK]
    lane = (n // S[LEAF][BLOCK]) * leaf[CODES + 3] + (inside // 16) * (S[LEAF][WORDS] * 16) + inside % 16
    left = tl.where(n0 + i < T, S[LEAF][WORDS] - u * S[LEAF][BITS], 0)
    return _entries(leaf, b, h, n0, lane + u * (S[LEAF][BITS] * 16), left, S, LEAF)


@triton.jit
def decode_keys_grid(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """x̂ float32 [32·NB, K]."""
    K: tl.constexpr = S[LEAF][PADDED]
    x = tl.reshape(_key_entries(leaf, b, h, n0, T, S, LEAF, NB), (NB * 32, K))
    token, channel = tl.arange(0, NB * 32)[:, None], tl.arange(0, K)[None, :]
    return _scaled(x, leaf, b, h, n0, token, channel, (n0 + token < T) & (channel < S[LEAF][CHANNELS]), S, LEAF)


@triton.jit
def load_keys_grid(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Scores [32·NB, rows] of q float32 [K, rows], no larger than 1."""
    N: tl.constexpr = NB * 32
    K: tl.constexpr = S[LEAF][PADDED]
    if S[LEAF][SCALES] == TO_COEFFICIENTS:
        x = _key_entries(leaf, b, h, n0, T, S, LEAF, NB)
        token, channel = 32 * tl.arange(0, NB)[:, None], tl.arange(0, K)[None, :]
        ok = (n0 + token < T) & (channel < S[LEAF][CHANNELS])
        scale = _plane(leaf, SCALE, b, h, n0, token, channel, ok, S, LEAF)
        most = 1.0
        if S[LEAF][WIDE]:
            most = largest(scale)
            scale /= most
        coefficients = (q[None, :, :] * scale[:, :, None]).to(tl.float16)
        s = product(x, coefficients) * (most * _unit(S, LEAF))
        if S[LEAF][HAS_OFFSET]:
            offset = _plane(leaf, OFFSET, b, h, n0, token, channel, ok, S, LEAF)
            s += _offsets(offset, q)
        return tl.reshape(s, (N, q.shape[1]))
    elif S[LEAF][SCALES] == TO_PRODUCT:
        token = tl.arange(0, N)
        x = tl.reshape(_key_entries(leaf, b, h, n0, T, S, LEAF, NB), (N, K))
        s = product(x, q.to(tl.float16)) * _unit(S, LEAF)
        s *= _plane(leaf, SCALE, b, h, n0, token, 0, n0 + token < T, S, LEAF)[:, None]
        if S[LEAF][HAS_OFFSET]:
            s += _plane(leaf, OFFSET, b, h, n0, token, 0, n0 + token < T, S, LEAF)[:, None] * tl.sum(q, axis=0)[None, :]
        return s
    else:
        x = decode_keys_grid(leaf, b, h, n0, T, S, LEAF, NB)
        most = largest(x)
        return product((x / most).to(tl.float16), q.to(tl.float16)) * most


@triton.jit
def _value_entries(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Entries of tokens n0 on: [channel groups, 32, 32·NB]."""
    G: tl.constexpr = S[LEAF][PADDED] // 32
    c = 32 * tl.arange(0, G)[:, None, None] + tl.arange(0, 32)[None, :, None]
    i = 32 * tl.arange(0, NB)[None, None, :]
    first = from_block(n0, i, S, LEAF)
    unit = (first // S[LEAF][BLOCK]) * leaf[CODES + 3] + ((first % S[LEAF][BLOCK]) // 32) * (S[LEAF][BITS] * 16)
    left = tl.where((c < S[LEAF][CHANNELS]) & (n0 + i < T), S[LEAF][BITS], 0)
    return _entries(leaf, b, h, n0, (c // 16) * (S[LEAF][WORDS] * 16) + c % 16 + unit, left, S, LEAF)


@triton.jit
def load_values_grid(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [32·NB, rows]."""
    G: tl.constexpr = S[LEAF][PADDED] // 32
    x = _value_entries(leaf, b, h, n0, T, S, LEAF, NB)
    token = tl.arange(0, 32 * NB)
    if S[LEAF][SCALES] == TO_PRODUCT:  # one per token: it goes to the weight, and one product serves all channels
        scale = _plane(leaf, SCALE, b, h, n0, token, 0, n0 + token < T, S, LEAF)
        most = largest(scale)
        coefficients = (p * (scale / most)[:, None]).to(tl.float16)
        out = product(tl.reshape(x, (32 * G, 32 * NB)), coefficients) * (most * _unit(S, LEAF))
        if S[LEAF][HAS_OFFSET]:
            offset = _plane(leaf, OFFSET, b, h, n0, token, 0, n0 + token < T, S, LEAF)
            out += tl.sum(p * offset[:, None], axis=0)[None, :]
        return out
    elif S[LEAF][SCALES] == TO_COEFFICIENTS:
        channel = 32 * tl.arange(0, G)[:, None]
        ok = (n0 + token < T)[None, :] & (channel < S[LEAF][CHANNELS])
        scale = _plane(leaf, SCALE, b, h, n0, token[None, :], channel, ok, S, LEAF)
        most = largest(scale)
        coefficients = (p[None, :, :] * (scale / most)[:, :, None]).to(tl.float16)
        out = product(x, coefficients) * (most * _unit(S, LEAF))
        if S[LEAF][HAS_OFFSET]:
            offset = _plane(leaf, OFFSET, b, h, n0, token[None, :], channel, ok, S, LEAF)
            out += _offsets(offset, p)
        return tl.reshape(out, (32 * G, p.shape[1]))
    else:
        channel = tl.arange(0, 32 * G)[:, None]
        ok = (n0 + token < T)[None, :] & (channel < S[LEAF][CHANNELS])
        x = _scaled(tl.reshape(x, (32 * G, 32 * NB)), leaf, b, h, n0, token[None, :], channel, ok, S, LEAF)
        most = largest(x)
        return product((x / most).to(tl.float16), p.to(tl.float16)) * most
