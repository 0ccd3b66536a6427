"""Loaders of `signs` whose channels differ between blocks (QJL with outliers per group): a sketch of a few channels of
each block, or one that leaves them out.

Scores: the sketched query is the block's own. With the rows' columns at the block's channels, S·q is that product alone
(a sketch of these channels) or what is left of the whole one without it. Elsewhere tokens are decoded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.codes import largest, product
from tersekv.kernels.triton.places import block_at
from tersekv.kernels.triton.spec import (
    CHANNELS,
    CHOSEN,
    OF_CHOSEN,
    PADDED,
    PADDED_CHOSEN,
    PADDED_SKETCH_ROWS,
    SKETCH_ROWS,
)
from tersekv.kernels.triton.tokens import norms_of, signs_of

# A leaf: what one of `signs` has; the sketch and the stride of its rows; the chosen channels with strides of batch row,
# head and block; how far behind the sketched query the query itself lies.
SKETCH: tl.constexpr = tl.constexpr(9)
CHANNEL: tl.constexpr = tl.constexpr(11)
BEHIND: tl.constexpr = tl.constexpr(15)


@triton.jit
def _columns(leaf, column, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Of the sketch, float32 [padded rows, columns]."""
    m = tl.arange(0, S[LEAF][PADDED_SKETCH_ROWS])[:, None]
    at = leaf[SKETCH] + m * leaf[SKETCH + 1] + column[None, :]
    return tl.load(at, mask=(m < S[LEAF][SKETCH_ROWS]) & ok[None, :], other=0.0)


@triton.jit
def _signs(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    return signs_of(leaf, b, h, n0, T, S[LEAF][SKETCH_ROWS], S[LEAF][PADDED_SKETCH_ROWS], S, LEAF, N)


@triton.jit
def load_keys_sketch(
    leaf, rows, row_ok, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """Scores [32·NB, rows] of queries at `rows` (pointers [rows])."""
    R: tl.constexpr = rows.shape[0]
    P: tl.constexpr = S[LEAF][PADDED_SKETCH_ROWS]
    i, m = tl.arange(0, NB), tl.arange(0, P)[None, :]
    at = block_at(leaf, CHANNEL, b, h, n0, S, LEAF) + i * leaf[CHANNEL + 3]
    q = tl.zeros((NB, P, R), tl.float32)
    for j in range(S[LEAF][CHOSEN]):
        channel = tl.load(at + j, mask=n0 + 32 * i < T, other=0).to(tl.int32)[:, None]
        chosen = tl.load(rows[None, :] + leaf[BEHIND] + channel, mask=row_ok[None, :], other=0.0)
        column = tl.zeros_like(channel) + j if S[LEAF][OF_CHOSEN] else channel
        sketch = tl.load(leaf[SKETCH] + m * leaf[SKETCH + 1] + column, mask=m < S[LEAF][SKETCH_ROWS], other=0.0)
        q += sketch[:, :, None] * chosen[:, None, :]
    if not S[LEAF][OF_CHOSEN]:
        ok = (m < S[LEAF][SKETCH_ROWS])[:, :, None] & row_ok[None, None, :]
        q = tl.load(rows[None, None, :] + m[:, :, None], mask=ok, other=0.0) - q
    most = largest(q)
    signs = tl.reshape(_signs(leaf, b, h, n0, T, S, LEAF, NB * 32), (NB, 32, P))
    s = tl.reshape(product(signs, (q / most).to(tl.float16)) * most, (NB * 32, R))
    return s * norms_of(leaf, b, h, n0, T, S, LEAF, NB * 32)[:, None]


@triton.jit
def decode_sketch(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """x̂ float32 [32·NB, channels]."""
    D: tl.constexpr = S[LEAF][PADDED]
    C: tl.constexpr = S[LEAF][PADDED_CHOSEN]
    i, j = tl.arange(0, NB)[:, None], tl.arange(0, C)[None, :]
    at = block_at(leaf, CHANNEL, b, h, n0, S, LEAF) + i * leaf[CHANNEL + 3] + j
    channel = tl.load(at, mask=(n0 + 32 * i < T) & (j < S[LEAF][CHOSEN]), other=-1).to(tl.int32)
    hot = (channel[:, :, None] == tl.arange(0, D)[None, None, :]).to(tl.float16)
    signs = _signs(leaf, b, h, n0, T, S, LEAF, NB * 32)
    if S[LEAF][OF_CHOSEN]:
        own = tl.arange(0, C)
        sketch = _columns(leaf, own, own < S[LEAF][CHOSEN], S, LEAF)
        most = largest(sketch)
        x = product(signs, (sketch / most).to(tl.float16))
        size = largest(x)
        x = product(tl.reshape((x / size).to(tl.float16), (NB, 32, C)), hot) * (size * most)
    else:
        d = tl.arange(0, D)
        sketch = _columns(leaf, d, d < S[LEAF][CHANNELS], S, LEAF)
        most = largest(sketch)
        x = tl.reshape(product(signs, (sketch / most).to(tl.float16)) * most, (NB, 32, D))
        x *= 1.0 - tl.max(hot, axis=1).to(tl.float32)[:, None, :]
    return tl.reshape(x, (NB * 32, D)) * norms_of(leaf, b, h, n0, T, S, LEAF, NB * 32)[:, None]


@triton.jit
def load_values_sketch(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [32·NB, rows]."""
    x = decode_sketch(leaf, b, h, n0, T, S, LEAF, NB)
    most = largest(x)
    return product(tl.trans((x / most).to(tl.float16)), p.to(tl.float16)) * most
