"""Loaders of `sparse` (`layouts/sparse.py`): the outliers of whole blocks, a few at a time.

An entry's product with its query or weight goes to its token or channel by a product with zeros and ones: no atomic
adds, no order that changes from run to run. A leaf: the starts and their strides of batch row, head and block; places;
values; the number of entries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.rope import PAIRS, cos_sin
from tersekv.kernels.triton.spec import CHANNELS, FIRST, PADDED

ENTRIES: tl.constexpr = tl.constexpr(32)
"""Entries of a block taken at a time."""


@triton.jit
def _start(leaf, b, h, block, ok):
    return tl.load(leaf[0] + b * leaf[1] + h * leaf[2] + block * leaf[3], mask=ok, other=0)


@triton.jit
def _ranges(leaf, b, h, B, H, n0, T, NB: tl.constexpr):
    """Where the entries of NB blocks begin and end, int32 [NB], cut to those that are there."""
    block = n0 // 32 + tl.arange(0, NB)
    base = tl.load(leaf[0])
    # the next in the order block, batch row, head
    next_h, next_b, next_block = h + 1, b, block
    next_b = tl.where(next_h == H, b + 1, b)
    next_h = tl.where(next_h == H, 0, next_h)
    next_block = tl.where(next_b == B, block + 1, block)
    next_b = tl.where(next_b == B, 0, next_b)
    here, there = block * 32 < T, next_block * 32 < T
    begin = _start(leaf, b, h, block, here) - base
    end = tl.where(there, _start(leaf, next_b, next_h, next_block, there) - base, leaf[6])
    begin = tl.minimum(tl.maximum(begin, 0), leaf[6])
    return begin, tl.where(here, tl.minimum(tl.maximum(end, begin), leaf[6]), begin)


@triton.jit
def _entries(leaf, at, end, S: tl.constexpr, LEAF: tl.constexpr):
    """Token in the block, channel, and value (float32) of entries `at` [NB, E]; value 0 past the end."""
    ok = at < end
    place = tl.load(leaf[4] + at, mask=ok, other=0).to(tl.int32) & 0xFFFF
    value = tl.load(leaf[5] + at, mask=ok, other=0.0).to(tl.float32)
    channel = place & 2047
    inside = channel < S[LEAF][CHANNELS]
    return place >> 11, tl.where(inside, channel, 0), tl.where(inside, value, 0.0)


@triton.jit
def load_keys_sparse(
    leaf, rows, row_ok, turn, b, h, B, H, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr,
    ROPED: tl.constexpr,
):  # fmt: skip
    """Scores [32·NB, rows] of queries at `rows` (pointers [rows] to their first channel)."""
    begin, end = _ranges(leaf, b, h, B, H, n0, T, NB)
    s = tl.zeros((NB, 32, rows.shape[0]), tl.float32)
    for e in range(0, tl.max(end - begin, axis=0), ENTRIES):
        at = begin[:, None] + e + tl.arange(0, ENTRIES)[None, :]
        token, channel, value = _entries(leaf, at, end[:, None], S, LEAF)
        ok = row_ok[None, None, :] & (value != 0)[:, :, None]
        product = tl.load(rows[None, None, :] + channel[:, :, None], mask=ok, other=0.0)
        if ROPED:
            n = tl.minimum(n0 + 32 * tl.arange(0, NB)[:, None] + token, T - 1)
            c = S[LEAF][FIRST] + channel
            cos, sin, partner = turned_by(turn, b, h, n, c, ROPED)
            across = tl.load(rows[None, None, :] + (partner - S[LEAF][FIRST])[:, :, None], mask=ok, other=0.0)
            product = product * cos[:, :, None] + across * sin[:, :, None]
        product *= value[:, :, None]
        hot = (token[:, None, :] == tl.arange(0, 32)[None, :, None]).to(tl.float32)
        s += tl.dot(hot, product)
    return tl.reshape(s, (NB * 32, rows.shape[0]))


@triton.jit
def turned_by(turn, b, h, n, c, ROPED: tl.constexpr):
    """How channel c of token n meets the query with RoPE: x·(q[c]·cos + q[partner]·sin), with the sign in sin."""
    column = tl.load(turn[PAIRS] + 4 * c)
    partner = tl.load(turn[PAIRS] + 4 * c + 1)
    across = tl.load(turn[PAIRS] + 4 * c + 2)
    sign = tl.load(turn[PAIRS] + 4 * c + 3).to(tl.float32)
    moved = column >= 0
    cos, sin = cos_sin(turn, 0, b, h, n, column, across, moved, ROPED)
    return cos, sin * sign, partner


@triton.jit
def load_values_sparse(
    leaf, p, b, h, B, H, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """Σ p·v̂ [channels, rows] of weights p float32 [32·NB, rows]."""
    R: tl.constexpr = p.shape[1]
    begin, end = _ranges(leaf, b, h, B, H, n0, T, NB)
    p = tl.reshape(p, (NB, 32, R))
    P: tl.constexpr = S[LEAF][PADDED]
    out = tl.zeros((P, R), tl.float32)
    for e in range(0, tl.max(end - begin, axis=0), ENTRIES):
        at = begin[:, None] + e + tl.arange(0, ENTRIES)[None, :]
        token, channel, value = _entries(leaf, at, end[:, None], S, LEAF)
        hot = (token[:, :, None] == tl.arange(0, 32)[None, None, :]).to(tl.float32)
        product = tl.reshape(tl.dot(hot, p) * value[:, :, None], (NB * ENTRIES, R))
        channel = tl.reshape(channel, (NB * ENTRIES,))
        out += tl.dot((tl.arange(0, P)[:, None] == channel[None, :]).to(tl.float32), product)
    return out
