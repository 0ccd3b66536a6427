"""Loader of `turned` (`layouts/centred.py`): one vector per head, as RoPE turns it at every token. It takes no bytes of
the cache; cosines and sines come from one table, which all heads and layers read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.codes import largest, product
from tersekv.kernels.triton.places import head_at
from tersekv.kernels.triton.rope import PAIRS, tile_cos_sin
from tersekv.kernels.triton.spec import ANGLES_KIND, CHANNELS, PADDED

# A leaf: the vectors with strides of batch row, head and channel; angles (`rope.py`), with `Rope.channels` as pairs.
MEAN: tl.constexpr = tl.constexpr(0)
ANGLES: tl.constexpr = tl.constexpr(4)


@triton.jit
def load_keys_turned(leaf, q, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
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
    cos, sin = tile_cos_sin(leaf, ANGLES, b, h, n0, T, column, sine, moved[None, :], N, S[LEAF][ANGLES_KIND])
    x = mean[None, :] * cos + across[None, :] * sin
    most = largest(x)
    return product((x / most).to(tl.float16), q.to(tl.float16)) * most
