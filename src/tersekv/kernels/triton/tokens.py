"""Loaders of `exact`, `signs` and `polar` (`formats/`): a tile of tokens, each decoded from its own numbers."""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.codes import largest, product
from tersekv.kernels.triton.places import head_at, tokens_at
from tersekv.kernels.triton.spec import BLOCK, CHANNELS, FLOAT8, FLOAT32, LEVEL_BITS, LEVELS, PADDED

# exact: the tensor and its strides of batch row, head and token.


@triton.jit
def decode_exact(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """x [N, channels] in its own type, float8 as float16."""
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


# signs: the bytes with strides of batch row, head and block; the norms likewise; the estimator's factor.


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
    """±1 [N, padded rows of the sketch], float16."""
    BYTES: tl.constexpr = PADDED_ROWS // 8
    i, byte = tl.arange(0, N)[:, None], tl.arange(0, BYTES)[None, :]
    at = tokens_at(leaf, 0, b, h, n0, i, S, LEAF) + byte * S[LEAF][BLOCK]
    x = tl.load(at, mask=(n0 + i < T) & (byte * 8 < ROWS), other=0).to(tl.int32)
    low = tl.join(tl.join(_sign(x, 0), _sign(x, 1)), tl.join(_sign(x, 2), _sign(x, 3)))
    high = tl.join(tl.join(_sign(x, 4), _sign(x, 5)), tl.join(_sign(x, 6), _sign(x, 7)))
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 4, 3, 2)), (N, 8 * BYTES))


@triton.jit
def _sign(byte, BIT: tl.constexpr):
    """−1.0, or 1.0 where the bit is set."""
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
    weights = (p * (norms / most)[:, None]).to(tl.float16)
    return product(tl.trans(_signs(leaf, b, h, n0, T, S, LEAF, N)), weights) * most


# polar: angles and radii with strides of batch row, head and block; the radii's unit; cosines and sines of all levels'
# tables as float32 [rows, entries, 2], and the stride of a row.


@triton.jit
def _polar(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """x̂ over the radii's unit and the largest radius, float32 [N, channels], and that radius."""
    L: tl.constexpr = S[LEAF][LEVELS]
    i = tl.arange(0, N)[:, None]
    j = tl.arange(0, S[LEAF][PADDED] >> L)[None, :]
    radii = tokens_at(leaf, 4, b, h, n0, i, S, LEAF) + j * S[LEAF][BLOCK]
    x = tl.load(radii, mask=(n0 + i < T) & (j < S[LEAF][CHANNELS] >> L), other=0.0).to(tl.float32)
    most = largest(x)
    x /= most
    angles = tokens_at(leaf, 0, b, h, n0, i, S, LEAF)
    for up in tl.static_range(L):
        cos, sin = _directions(leaf, b, angles, n0 + i < T, L - 1 - up, S, LEAF)
        x = tl.reshape(tl.join(x * cos, x * sin), (N, 2 * x.shape[1]))
    return x, most


@triton.jit
def _directions(leaf, b, angles, ok, LEVEL: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Cosine and sine of the angles of a level (0 is the paper's 1) of tokens at `angles` (pointers [N, 1]): float32
    [N, padded channels / 2^(level+1)]."""
    start = 0
    entry = 0
    for lower in tl.static_range(LEVEL):
        start += S[LEAF][LEVEL_BITS + lower] * (S[LEAF][CHANNELS] >> (lower + 1))
        entry += 1 << S[LEAF][LEVEL_BITS + lower]
    BITS: tl.constexpr = S[LEAF][LEVEL_BITS + LEVEL]
    j = tl.arange(0, S[LEAF][PADDED] >> (LEVEL + 1))[None, :]
    bit = start + BITS * j
    ok = ok & (j < S[LEAF][CHANNELS] >> (LEVEL + 1))
    code = tl.load(angles + (bit >> 3) * S[LEAF][BLOCK], mask=ok, other=0).to(tl.int32)
    if 8 % BITS != 0 or start % BITS != 0:
        over = ok & ((bit & 7) + BITS > 8)
        code |= tl.load(angles + ((bit >> 3) + 1) * S[LEAF][BLOCK], mask=over, other=0).to(tl.int32) << 8
    at = leaf[9] + b * leaf[10] + 2 * (entry + ((code >> (bit & 7)) & ((1 << BITS) - 1)))
    return tl.load(at), tl.load(at + 1)


@triton.jit
def decode_polar(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """x̂ float32 [N, channels]."""
    x, most = _polar(leaf, b, h, n0, T, S, LEAF, N)
    return x * (leaf[8] * most)


@triton.jit
def load_keys_polar(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores [N, rows] of q float32 [channels, rows]."""
    x, most = _polar(leaf, b, h, n0, T, S, LEAF, N)
    return product(x.to(tl.float16), q.to(tl.float16)) * (leaf[8] * most)


@triton.jit
def load_values_polar(leaf, p, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Σ p·v̂ [channels, rows] of weights p float32 [N, rows]."""
    x, most = _polar(leaf, b, h, n0, T, S, LEAF, N)
    return product(tl.trans(x.to(tl.float16)), p.to(tl.float16)) * (leaf[8] * most)
