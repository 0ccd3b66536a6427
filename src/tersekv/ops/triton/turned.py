"""Loader of `turned` (`formats/centred.py`): one vector per head, as RoPE turns it at every token. It takes no bytes of
the cache; cosines and sines are the model's table, which all heads and layers read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.ops.triton.codes import largest, product
from tersekv.ops.triton.places import head_at
from tersekv.ops.triton.spec import CHANNELS, PADDED

# A leaf: the vectors with strides of batch row, head and channel; cos and sin with strides of batch row, head and
# token; RoPE as pairs of channels, `Rope.channels`.
MEAN: tl.constexpr = tl.constexpr(0)
COS: tl.constexpr = tl.constexpr(4)
SIN: tl.constexpr = tl.constexpr(8)
PAIRS: tl.constexpr = tl.constexpr(12)


@triton.jit
def load_keys_turned(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores [N, rows] of q float32 [channels, rows]."""
    c = tl.arange(0, S[LEAF][PADDED])
    inside = c < S[LEAF][CHANNELS]
    partner = tl.load(leaf[PAIRS] + 4 * c, mask=inside, other=-1)
    moved = partner >= 0
    column = tl.load(leaf[PAIRS] + 4 * c + 1, mask=moved, other=0)[None, :]
    sine = tl.load(leaf[PAIRS] + 4 * c + 2, mask=moved, other=0)[None, :]
    sign = tl.load(leaf[PAIRS] + 4 * c + 3, mask=moved, other=0)
    mean = tl.load(head_at(leaf, MEAN, b, h) + c, mask=inside, other=0.0)
    across = tl.load(head_at(leaf, MEAN, b, h) + partner, mask=moved, other=0.0) * sign.to(tl.float32)
    n = tl.minimum(n0 + tl.arange(0, N), T - 1)[:, None]
    cos = tl.load(head_at(leaf, COS, b, h) + n * leaf[COS + 3] + column, mask=moved[None, :], other=1.0)
    sin = tl.load(head_at(leaf, SIN, b, h) + n * leaf[SIN + 3] + sine, mask=moved[None, :], other=0.0)
    x = mean[None, :] * cos + across[None, :] * sin
    most = largest(x)
    return product((x / most).to(tl.float16), q.to(tl.float16)) * most
