"""Loaders of layouts that decode each token from its own data: exact, signs, the rotated mean,
and signs whose channels differ between blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.leaves import (
    ANGLES_KIND,
    BLOCK,
    CHANNELS,
    CHOSEN,
    CONSECUTIVE,
    FLOAT8,
    FLOAT32,
    OF_CHOSEN,
    PADDED,
    PADDED_CHOSEN,
    PADDED_SKETCH_ROWS,
    SKETCH_ROWS,
)
from tersekv.kernels.triton.tiles import (
    PAIRS,
    block_at,
    first_cos_sin,
    head_at,
    inverse,
    largest,
    product,
    step_cos_sin,
    tile_cos_sin,
    tokens_at,
)

# Fields of an exact leaf: the tensor and its strides of batch row, head and token.


@triton.jit
def decode_exact(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Load x [N, channels] in its own type, float8 as float16."""
    n, c = n0 + tl.arange(0, N)[:, None], tl.arange(0, S[LEAF][PADDED])[None, :]
    ok = (n < T) & (c < S[LEAF][CHANNELS])
    x = tl.load(head_at(leaf, 0, b, h) + n.to(tl.int64) * leaf[3] + c, mask=ok, other=0.0)
    if S[LEAF][FLOAT8]:
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def load_keys_exact(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores [N, rows] of q float32 [channels, rows]."""
    x = decode_exact(leaf, b, h, n0, T, S, LEAF, N)
    if S[LEAF][FLOAT32]:
        return tl.dot(x, q, input_precision="ieee")
    else:
        return product(x, q.to(x.dtype))


@triton.jit
def load_values_exact(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Σ p·v [channels, rows] of weights p float32 [N, rows]."""
    x = tl.trans(decode_exact(leaf, b, h, n0, T, S, LEAF, N))
    if S[LEAF][FLOAT32]:
        return tl.dot(x, p, input_precision="ieee")
    else:
        return product(x, p.to(x.dtype))


# Fields of a signs leaf: the bytes with strides of batch row, head and block; the norms likewise;
# the estimator's factor.


@triton.jit
def norms_of(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """factor · norms, float32 [N]."""
    i = tl.arange(0, N)
    at = tokens_at(leaf, 4, b, h, n0, i, S, LEAF)
    return tl.load(at, mask=n0 + i < T, other=0.0).to(tl.float32) * leaf[8]


@triton.jit
def signs_of(
    leaf, b, h, n0, T, ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Unpack ±1 [N, padded rows of the sketch], float16."""
    BYTES: tl.constexpr = PADDED_ROWS // 8
    i, byte = tl.arange(0, N)[:, None], tl.arange(0, BYTES)[None, :]
    at = tokens_at(leaf, 0, b, h, n0, i, S, LEAF) + byte * S[LEAF][BLOCK]
    x = tl.load(at, mask=(n0 + i < T) & (byte * 8 < ROWS), other=0).to(tl.int32)
    low = tl.join(tl.join(_sign(x, 0), _sign(x, 1)), tl.join(_sign(x, 2), _sign(x, 3)))
    high = tl.join(tl.join(_sign(x, 4), _sign(x, 5)), tl.join(_sign(x, 6), _sign(x, 7)))
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 4, 3, 2)), (N, 8 * BYTES))


@triton.jit
def _sign(byte, BIT: tl.constexpr):
    """Return 1.0 where the bit is set, else −1.0."""
    return ((((byte >> BIT) & 1) << 15) ^ 0xBC00).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _signs(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    return signs_of(leaf, b, h, n0, T, S[LEAF][CHANNELS], S[LEAF][PADDED], S, LEAF, N)


@triton.jit
def decode_signs(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """factor · norm · signs, float32 [N, rows of the sketch]."""
    return _signs(leaf, b, h, n0, T, S, LEAF, N).to(tl.float32) * norms_of(leaf, b, h, n0, T, S, LEAF, N)[:, None]


@triton.jit
def load_keys_signs(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores [N, rows] of the sketched q float32 [rows of the sketch, rows]."""
    s = product(_signs(leaf, b, h, n0, T, S, LEAF, N), q.to(tl.float16))
    return s * norms_of(leaf, b, h, n0, T, S, LEAF, N)[:, None]


@triton.jit
def load_values_signs(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Σ p·factor·norm·signs [rows of the sketch, rows] of weights p float32 [N, rows]."""
    norms = norms_of(leaf, b, h, n0, T, S, LEAF, N)
    most = largest(norms)
    weights = (p * (norms * inverse(most))[:, None]).to(tl.float16)
    return product(tl.trans(_signs(leaf, b, h, n0, T, S, LEAF, N)), weights) * most


# Fields of a leaf of signs with channels per block: those of `signs`; the sketch and its row
# stride; the chosen channels with strides of batch row, head and block; the index of the query
# itself after the sketched query.
SKETCH: tl.constexpr = tl.constexpr(9)
CHANNEL: tl.constexpr = tl.constexpr(11)
BEHIND: tl.constexpr = tl.constexpr(15)


@triton.jit
def _columns(leaf, column, ok, S: tl.constexpr, LEAF: tl.constexpr):
    """Load columns of the sketch, float32 [padded rows, columns]."""
    m = tl.arange(0, S[LEAF][PADDED_SKETCH_ROWS])[:, None]
    at = leaf[SKETCH] + m * leaf[SKETCH + 1] + column[None, :]
    return tl.load(at, mask=(m < S[LEAF][SKETCH_ROWS]) & ok[None, :], other=0.0)


@triton.jit
def _sketch_signs(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
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
        chosen = tl.load(rows[None, :] + leaf[BEHIND] + channel, mask=row_ok[None, :], other=0.0).to(tl.float32)
        column = tl.zeros_like(channel) + j if S[LEAF][OF_CHOSEN] else channel
        sketch = tl.load(leaf[SKETCH] + m * leaf[SKETCH + 1] + column, mask=m < S[LEAF][SKETCH_ROWS], other=0.0)
        q += sketch[:, :, None] * chosen[:, None, :]
    if not S[LEAF][OF_CHOSEN]:
        ok = (m < S[LEAF][SKETCH_ROWS])[:, :, None] & row_ok[None, None, :]
        q = tl.load(rows[None, None, :] + m[:, :, None], mask=ok, other=0.0).to(tl.float32) - q
    most = largest(q)
    signs = tl.reshape(_sketch_signs(leaf, b, h, n0, T, S, LEAF, NB * 32), (NB, 32, P))
    s = tl.reshape(product(signs, (q * inverse(most)).to(tl.float16)) * most, (NB * 32, R))
    return s * norms_of(leaf, b, h, n0, T, S, LEAF, NB * 32)[:, None]


@triton.jit
def decode_sketch(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Decode to x̂, float32 [32·NB, channels]."""
    D: tl.constexpr = S[LEAF][PADDED]
    C: tl.constexpr = S[LEAF][PADDED_CHOSEN]
    i, j = tl.arange(0, NB)[:, None], tl.arange(0, C)[None, :]
    at = block_at(leaf, CHANNEL, b, h, n0, S, LEAF) + i * leaf[CHANNEL + 3] + j
    channel = tl.load(at, mask=(n0 + 32 * i < T) & (j < S[LEAF][CHOSEN]), other=-1).to(tl.int32)
    hot = (channel[:, :, None] == tl.arange(0, D)[None, None, :]).to(tl.float16)
    signs = _sketch_signs(leaf, b, h, n0, T, S, LEAF, NB * 32)
    if S[LEAF][OF_CHOSEN]:
        own = tl.arange(0, C)
        sketch = _columns(leaf, own, own < S[LEAF][CHOSEN], S, LEAF)
        most = largest(sketch)
        x = product(signs, (sketch * inverse(most)).to(tl.float16))
        size = largest(x)
        x = product(tl.reshape((x * inverse(size)).to(tl.float16), (NB, 32, C)), hot) * (size * most)
    else:
        d = tl.arange(0, D)
        sketch = _columns(leaf, d, d < S[LEAF][CHANNELS], S, LEAF)
        most = largest(sketch)
        x = tl.reshape(product(signs, (sketch * inverse(most)).to(tl.float16)) * most, (NB, 32, D))
        x *= 1.0 - tl.max(hot, axis=1).to(tl.float32)[:, None, :]
    return tl.reshape(x, (NB * 32, D)) * norms_of(leaf, b, h, n0, T, S, LEAF, NB * 32)[:, None]


@triton.jit
def load_values_sketch(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [32·NB, rows]."""
    x = decode_sketch(leaf, b, h, n0, T, S, LEAF, NB)
    most = largest(x)
    return product(tl.trans((x * inverse(most)).to(tl.float16)), p.to(tl.float16)) * most


# Fields of a rotated-mean leaf: the vectors with strides of batch row, head and channel; angles
# (`rope.py`), with `Rope.channels` as pairs.
MEAN: tl.constexpr = tl.constexpr(0)
ANGLES: tl.constexpr = tl.constexpr(4)


@triton.jit
def load_keys_rotated_mean(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores [N, rows] of q float32 [channels, rows]."""
    c = tl.arange(0, S[LEAF][PADDED])
    inside = c < S[LEAF][CHANNELS]
    pairs = leaf[ANGLES + PAIRS] + 4 * c
    partner = tl.load(pairs, mask=inside, other=-1)
    moved = partner >= 0
    column = tl.load(pairs + 1, mask=moved, other=0)[None, :]
    sine = tl.load(pairs + 2, mask=moved, other=0)[None, :]
    sign = tl.load(pairs + 3, mask=moved, other=0)
    mean = tl.load(head_at(leaf, MEAN, b, h) + c, mask=inside, other=0.0)
    across = tl.load(head_at(leaf, MEAN, b, h) + partner, mask=moved, other=0.0) * sign.to(tl.float32)
    if S[LEAF][ANGLES_KIND] == CONSECUTIVE:
        # the vector is rotated to the tile's first token, and all tiles share the steps from there
        a, z = first_cos_sin(leaf, ANGLES, b, h, n0, column, moved[None, :])
        a, z = tl.reshape(a, (c.shape[0],)), tl.reshape(z, (c.shape[0],))
        most = largest(tl.abs(mean) + tl.abs(across))
        own, other = (mean * a + across * z) * inverse(most), (across * a - mean * z) * inverse(most)
        cos, sin = step_cos_sin(leaf, ANGLES, column, moved[None, :], N)
        s = product(cos.to(tl.float16), (q * own[:, None]).to(tl.float16))
        return (s + product(sin.to(tl.float16), (q * other[:, None]).to(tl.float16))) * most
    else:
        cos, sin = tile_cos_sin(leaf, ANGLES, b, h, n0, T, column, sine, moved[None, :], N, S[LEAF][ANGLES_KIND])
        x = mean[None, :] * cos + across[None, :] * sin
        most = largest(x)
        return product((x * inverse(most)).to(tl.float16), q.to(tl.float16)) * most
