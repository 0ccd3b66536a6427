"""Decode attention in one pass over packed tokens: one kernel for all formats.

A program takes the query rows of one key-value head (or of one row tile of it) over one stretch of tokens. Tokens and
channels, of which there are many, are the rows of every matrix product and the few query rows its columns: scores are
x̂·q [tokens, rows] and sums v̂ᵀ·p [channels, rows], so that what was unpacked in registers is the operand that a tensor
core takes from registers. Keys and values are tuples of leaves (`leaves.py`), each with a loader of its own kind; all
leaves of the keys add up in the scores, and each of the values has a sum of its own. Where tokens lie in pages, a tile
is part of one page, and loaders are given its first token in the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.ops.triton.codes import largest, power_of_two, product
from tersekv.ops.triton.grid import decode_keys_grid, load_keys_grid, load_values_grid
from tersekv.ops.triton.sparse import load_keys_sparse, load_values_sparse
from tersekv.ops.triton.spec import (
    CHANNELS,
    FIRST,
    GRID,
    KIND,
    MAPPED,
    MAPPED_CHANNELS,
    PADDED,
    POLAR,
    SIGNS,
    SPARSE,
    TRELLIS,
    TURNED,
)
from tersekv.ops.triton.tokens import (
    decode_exact,
    decode_polar,
    decode_signs,
    load_keys_exact,
    load_keys_polar,
    load_keys_signs,
    load_values_exact,
    load_values_polar,
    load_values_signs,
)
from tersekv.ops.triton.trellis import decode_trellis, load_keys_trellis, load_values_trellis
from tersekv.ops.triton.turned import load_keys_turned

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SHIFT: tl.constexpr = tl.constexpr(10.0)
"""Weights are multiplied by 2^10, so that float16 keeps those of many far tokens."""
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _met(S: tl.constexpr, LEAF: tl.constexpr):
    """Channels of the query that a leaf's tile meets, and which of them there are."""
    if S[LEAF][MAPPED] > 0:
        channel = tl.arange(0, S[LEAF][MAPPED])
        return channel, channel < S[LEAF][MAPPED_CHANNELS]
    else:
        channel = tl.arange(0, S[LEAF][PADDED])
        return channel, channel < S[LEAF][CHANNELS]


@triton.jit
def _query(rows, row_ok, turn, ROPED: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """A leaf's query and, with RoPE, the channels that it meets across: float32 [channels, rows] divided by a power of
    two near the largest of each row, and these powers."""
    channel, inside = _met(S, LEAF)
    ok = row_ok[None, :] & inside[:, None]
    q = tl.load(rows[None, :] + channel[:, None], mask=ok, other=0.0)
    most = tl.max(tl.abs(q), axis=0)[None, :]
    across = q
    if ROPED:
        partner = tl.load(turn[8] + 4 * (S[LEAF][FIRST] + channel) + 1, mask=inside, other=0)
        sign = tl.load(turn[8] + 4 * (S[LEAF][FIRST] + channel) + 3, mask=inside, other=0)
        across = tl.load(rows[None, :] + (partner - S[LEAF][FIRST])[:, None], mask=ok, other=0.0)
        across *= sign.to(tl.float32)[:, None]
        most = tl.maximum(most, tl.max(tl.abs(across), axis=0)[None, :])
    most = 2.0 * power_of_two(most)  # so that nothing exceeds 1
    return q / most, across / most, most


@triton.jit
def _leaf_query(rows, row_ok, turn, ROPED: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """What `_query` gives; `sparse` loads what its entries want."""
    if S[LEAF][KIND] == SPARSE:
        one = tl.full((1, rows.shape[0]), 1.0, tl.float32)
        return one, one, one
    else:
        return _query(rows, row_ok, turn, ROPED, S, LEAF)


@triton.jit
def _decoded(leaf, map, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Keys as they are in front of RoPE, float32 [tokens, channels]."""
    if S[LEAF][KIND] == GRID:
        x = decode_keys_grid(leaf, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == SIGNS:
        x = decode_signs(leaf, b, h, n0, T, S, LEAF, NB * 32)
    elif S[LEAF][KIND] == POLAR:
        x = decode_polar(leaf, b, h, n0, T, S, LEAF, NB * 32)
    elif S[LEAF][KIND] == TRELLIS:
        x = decode_trellis(leaf, b, h, n0, T, S, LEAF, NB * 32)
    else:
        x = decode_exact(leaf, b, h, n0, T, S, LEAF, NB * 32).to(tl.float32)
    if S[LEAF][MAPPED] > 0:
        k, c = tl.arange(0, S[LEAF][PADDED])[:, None], tl.arange(0, S[LEAF][MAPPED])[None, :]
        at = map[0] + b.to(tl.int64) * map[1] + h.to(tl.int64) * map[2] + k * map[3] + c
        matrix = tl.load(at, mask=(k < S[LEAF][CHANNELS]) & (c < S[LEAF][MAPPED_CHANNELS]), other=0.0)
        most = largest(x)
        x = product((x / most).to(tl.float16), matrix.to(tl.float16)) * most
    return x


@triton.jit
def _turned(x, q, across, turn, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr):
    """Scores of keys x [N, channels] whose RoPE is put on the query: q·RoPE(x) = Σ x·(q·cos + across·sin)."""
    channel, inside = _met(S, LEAF)
    c = S[LEAF][FIRST] + tl.where(inside, channel, 0)
    column, sine = tl.load(turn[8] + 4 * c), tl.load(turn[8] + 4 * c + 2)
    moved = (column >= 0)[None, :]
    n = tl.minimum(n0 + tl.arange(0, N), T - 1)
    row = b.to(tl.int64) * turn[1] + h.to(tl.int64) * turn[2]
    cos = tl.load(turn[0] + row + n[:, None] * turn[3] + column[None, :], mask=moved, other=1.0)
    row = b.to(tl.int64) * turn[5] + h.to(tl.int64) * turn[6]
    sin = tl.load(turn[4] + row + n[:, None] * turn[7] + sine[None, :], mask=moved, other=0.0)
    most = largest(x)
    x /= most
    s = product((x * cos).to(tl.float16), q.to(tl.float16))
    return (s + product((x * sin).to(tl.float16), across.to(tl.float16))) * most


@triton.jit
def _scores(
    leaf, query, rows, row_ok, turn, map, b, h, B, H, n0, T, ROPED: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """q·k̂ [32·NB, rows] of one leaf of the keys."""
    q, across, most = query
    if S[LEAF][KIND] == SPARSE:
        return load_keys_sparse(leaf, rows, row_ok, turn, b, h, B, H, n0, T, S, LEAF, NB, ROPED)
    elif ROPED:
        x = _decoded(leaf, map, b, h, n0, T, S, LEAF, NB)
        return _turned(x, q, across, turn, b, h, n0, T, S, LEAF, NB * 32) * most
    elif S[LEAF][KIND] == GRID:
        return load_keys_grid(leaf, q, b, h, n0, T, S, LEAF, NB) * most
    elif S[LEAF][KIND] == SIGNS:
        return load_keys_signs(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most
    elif S[LEAF][KIND] == POLAR:
        return load_keys_polar(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most
    elif S[LEAF][KIND] == TRELLIS:
        return load_keys_trellis(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most
    elif S[LEAF][KIND] == TURNED:
        return load_keys_turned(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most
    else:
        return load_keys_exact(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most


@triton.jit
def _sums(leaf, p, b, h, B, H, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Σ p·v̂ [channels, rows] of one leaf of the values, weights p float32 [32·NB, rows]."""
    if S[LEAF][KIND] == GRID:
        return load_values_grid(leaf, p, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == SPARSE:
        return load_values_sparse(leaf, p, b, h, B, H, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == SIGNS:
        return load_values_signs(leaf, p, b, h, n0, T, S, LEAF, NB * 32)
    elif S[LEAF][KIND] == POLAR:
        return load_values_polar(leaf, p, b, h, n0, T, S, LEAF, NB * 32)
    elif S[LEAF][KIND] == TRELLIS:
        return load_values_trellis(leaf, p, b, h, n0, T, S, LEAF, NB * 32)
    else:
        return load_values_exact(leaf, p, b, h, n0, T, S, LEAF, NB * 32)


@triton.jit
def _zeros(ROWS: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """A leaf's sum of no tokens."""
    P: tl.constexpr = S[LEAF][PADDED]
    return tl.zeros((P, ROWS), tl.float32)


@triton.jit
def _pages_end(pages, b, first, end):
    """Where the last page that there is of tokens first to end ends, at most at end."""
    last = first
    for i0 in range(first // pages[2], tl.cdiv(end, pages[2]), 64):
        i = i0 + tl.arange(0, 64)
        page = tl.load(pages[0] + b.to(tl.int64) * pages[1] + i, mask=i * pages[2] < end, other=-1)
        last = tl.maximum(last, tl.max(tl.where(page >= 0, (i + 1) * pages[2], 0), axis=0))
    return tl.minimum(last, end)


@triton.jit
def _paged(pages, b, n0):
    """The place of token n0 in the pool, and the tokens there: none where its page is not there."""
    page = tl.load(pages[0] + b.to(tl.int64) * pages[1] + n0 // pages[2])
    there = (page >= 0) & (page < pages[3])
    return tl.where(there, page * pages[2] + n0 % pages[2], 0), tl.where(there, pages[3] * pages[2], 0)


@triton.jit
def attend(
    out, lse, queries, maps, keys, values, turn, pages, mask, mask_b, mask_h, mask_q, mask_t, B, H, R, T, channels,
    positions, split_tokens, scaling, softcap, KEYS: tl.constexpr, VALUES: tl.constexpr, ROPED: tl.constexpr,
    PAGED: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROWS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Grid (splits, B·H, row tiles). Writes out float32 [B·H, splits, R, channels] and lse [B·H, splits, R] of each
    split's tokens, as of a segment of its own. PAGED: pages are int32 [B, P], the stride of its rows, tokens per page
    (a multiple of 32·NB) and pages in the pool."""
    N: tl.constexpr = NB * 32
    split, head = tl.program_id(0), tl.program_id(1)
    b, h = head // H, head % H
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row_ok = row < R
    loaded = ()
    for i in tl.static_range(len(KEYS)):
        rows = queries[i][0] + (head.to(tl.int64) * R + row) * queries[i][1]
        loaded = loaded + (_leaf_query(rows, row_ok, turn, ROPED, KEYS, i),)  # type: ignore[assignment]
    sums = ()
    for i in tl.static_range(len(VALUES)):
        sums = sums + (_zeros(ROWS, VALUES, i),)  # type: ignore[assignment]
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    first = split * split_tokens
    end = tl.minimum(T, first + split_tokens)
    if PAGED:
        end = _pages_end(pages, b, first, end)
    for n0 in range(first, end, N):
        at, held = n0, T
        if PAGED:
            at, held = _paged(pages, b, n0)
        at = tl.multiple_of(at, 32)
        s = tl.zeros((N, ROWS), tl.float32)
        for i in tl.static_range(len(KEYS)):
            rows = queries[i][0] + (head.to(tl.int64) * R + row) * queries[i][1]
            s += _scores(
                keys[i], loaded[i], rows, row_ok, turn, maps[i], b, h, B, H, at, held, ROPED, KEYS, i, NB
            )  # fmt: skip
        s *= scaling
        if HAS_SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
        n = (n0 + tl.arange(0, N))[:, None]
        seen = (n < T) & (held > 0)
        if HAS_MASK:
            byte = b.to(tl.int64) * mask_b + h.to(tl.int64) * mask_h + (row % positions)[None, :] * mask_q + n * mask_t
            seen = seen & (tl.load(mask + byte, mask=seen & row_ok[None, :], other=0) != 0)
        s = tl.where(seen, s * LOG2E, float("-inf"))
        new = tl.maximum(most, tl.max(s, axis=0))
        base = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(most - base)
        p = tl.exp2(s - (base - SHIFT)[None, :])
        total = total * shrink + tl.sum(p, axis=0)
        grown = ()
        for i in tl.static_range(len(VALUES)):
            added = _sums(values[i], p, b, h, B, H, at, held, VALUES, i, NB)
            grown = grown + (sums[i] * shrink[None, :] + added,)  # type: ignore[assignment]
        sums = grown
        most = new
    place = (head.to(tl.int64) * tl.num_programs(0) + split) * R + row
    tl.store(lse + place, tl.where(total == 0, float("-inf"), (most - SHIFT) * LN2 + tl.log(total)), mask=row_ok)
    share = 1.0 / tl.where(total == 0, 1.0, total)
    for i in tl.static_range(len(VALUES)):
        c = tl.arange(0, VALUES[i][PADDED])[:, None]
        written = out + place[None, :] * channels + VALUES[i][FIRST] + c
        tl.store(written, sums[i] * share[None, :], mask=row_ok[None, :] & (c < VALUES[i][CHANNELS]))
