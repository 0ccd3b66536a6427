"""Loaders of `trellis` (`layouts/trellis.py`): any component by itself, two words of its token's ring and a table.

Which bits a component has is the head's, so that where its window lies is found once for all tokens of a tile. Scales
of components are multiplied to the query and to the sums, gains of tokens to the scores and to the weights: what is
decoded per element is the table's entry.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.codes import largest, product
from tersekv.kernels.triton.places import head_at, tokens_at
from tersekv.kernels.triton.spec import BLOCK, CHANNELS, PADDED, STREAM_WORDS

# A leaf: stream and gains with strides of batch row, head and block; bits and scales with strides of batch row, head
# and component; tables.
STREAM: tl.constexpr = tl.constexpr(0)
GAIN: tl.constexpr = tl.constexpr(4)
BITS: tl.constexpr = tl.constexpr(8)
SCALE: tl.constexpr = tl.constexpr(12)
TABLES: tl.constexpr = tl.constexpr(16)
STATES: tl.constexpr = tl.constexpr(256)
"""Of the trellis: windows of 8 bits."""
UNIT_GAIN: tl.constexpr = tl.constexpr(144)
GAIN_STEPS: tl.constexpr = tl.constexpr(16)


@triton.jit
def _gains(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Of tokens, float32 [N]."""
    i = tl.arange(0, N)
    code = tl.load(tokens_at(leaf, GAIN, b, h, n0, i, S, LEAF), mask=n0 + i < T, other=0).to(tl.float32)
    return tl.where(code > 0, tl.exp2((code - UNIT_GAIN) / GAIN_STEPS), 0.0)


@triton.jit
def _scales(leaf, b, h, S: tl.constexpr, LEAF: tl.constexpr):
    """Of components, float32 [channels]."""
    c = tl.arange(0, S[LEAF][PADDED])
    return tl.load(head_at(leaf, SCALE, b, h) + c, mask=c < S[LEAF][CHANNELS], other=0.0)


@triton.jit
def _entries(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Entries of the tables, float32 [N, channels]."""
    K: tl.constexpr = S[LEAF][PADDED]
    WORDS: tl.constexpr = S[LEAF][STREAM_WORDS]
    if WORDS == 0:
        return tl.zeros((N, K), tl.float32)
    else:
        c = tl.arange(0, K)
        inside = c < S[LEAF][CHANNELS]
        bits = tl.load(head_at(leaf, BITS, b, h) + c, mask=inside, other=0).to(tl.int32)
        begin = (tl.cumsum(bits, 0) + (16 * WORDS - 8)) % (16 * WORDS)
        low = begin >> 4
        high = (low + 1) % WORDS
        i = tl.arange(0, N)[:, None]
        ok = (n0 + i < T) & inside[None, :]
        words = tokens_at(leaf, STREAM, b, h, n0, i, S, LEAF)
        pair = tl.load(words + low[None, :] * S[LEAF][BLOCK], mask=ok, other=0).to(tl.int32) & 0xFFFF
        pair |= tl.load(words + high[None, :] * S[LEAF][BLOCK], mask=ok, other=0).to(tl.int32) << 16
        window = (pair >> (begin & 15)[None, :]) & (STATES - 1)
        return tl.load(leaf[TABLES] + (bits * STATES)[None, :] + window, mask=ok, other=0.0)


@triton.jit
def decode_trellis(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """x̂ float32 [N, channels]."""
    x = _entries(leaf, b, h, n0, T, S, LEAF, N) * _scales(leaf, b, h, S, LEAF)[None, :]
    return x * _gains(leaf, b, h, n0, T, S, LEAF, N)[:, None]


@triton.jit
def load_keys_trellis(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores [N, rows] of q float32 [channels, rows]."""
    q *= _scales(leaf, b, h, S, LEAF)[:, None]
    most = largest(q)
    s = product(_entries(leaf, b, h, n0, T, S, LEAF, N).to(tl.float16), (q / most).to(tl.float16))
    return s * (_gains(leaf, b, h, n0, T, S, LEAF, N) * most)[:, None]


@triton.jit
def load_values_trellis(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [N, rows]."""
    gains = _gains(leaf, b, h, n0, T, S, LEAF, N)
    most = largest(gains)
    weights = (p * (gains / most)[:, None]).to(tl.float16)
    out = product(tl.trans(_entries(leaf, b, h, n0, T, S, LEAF, N).to(tl.float16)), weights)
    return out * (_scales(leaf, b, h, S, LEAF) * most)[:, None]
