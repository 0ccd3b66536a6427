"""Where tokens lie in a plane: blocks of a head at equal distances. A tile's first token, a multiple of 32, is found in
64 bits, since a pool of pages may be large; what its others add is small."""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.spec import BLOCK


@triton.jit
def head_at(leaf, FIRST: tl.constexpr, b, h):
    """Where a head begins in a plane; FIRST: of the plane's fields in the leaf, a tensor and its strides of batch row,
    head and block."""
    return leaf[FIRST] + b.to(tl.int64) * leaf[FIRST + 1] + h.to(tl.int64) * leaf[FIRST + 2]


@triton.jit
def block_at(leaf, FIRST: tl.constexpr, b, h, n0, S: tl.constexpr, LEAF: tl.constexpr):
    """Where the block of token n0 begins."""
    return head_at(leaf, FIRST, b, h) + (n0 // S[LEAF][BLOCK]).to(tl.int64) * leaf[FIRST + 3]


@triton.jit
def from_block(n0, i, S: tl.constexpr, LEAF: tl.constexpr):
    """Tokens n0 + i counted from the beginning of n0's block."""
    if S[LEAF][BLOCK] == 32:
        return i
    else:
        return n0 % S[LEAF][BLOCK] + i


@triton.jit
def tokens_at(leaf, FIRST: tl.constexpr, b, h, n0, i, S: tl.constexpr, LEAF: tl.constexpr):
    """Where tokens n0 + i begin in a plane with tokens last."""
    i = from_block(n0, i, S, LEAF)
    at = (i // S[LEAF][BLOCK]) * leaf[FIRST + 3] + i % S[LEAF][BLOCK]
    return block_at(leaf, FIRST, b, h, n0, S, LEAF) + at
