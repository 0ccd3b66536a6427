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

from tersekv.kernels.triton.layouts import leaf_query, scores, sums, zeros
from tersekv.kernels.triton.spec import CHANNELS, FIRST, PADDED

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SHIFT: tl.constexpr = tl.constexpr(10.0)
"""Weights are multiplied by 2^10, so that float16 keeps those of many far tokens."""
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


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
        loaded = loaded + (leaf_query(rows, row_ok, turn, ROPED, KEYS, i),)  # type: ignore[assignment]
    totals = ()
    for i in tl.static_range(len(VALUES)):
        totals = totals + (zeros(ROWS, VALUES, i),)  # type: ignore[assignment]
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
            s += scores(
                keys[i], loaded[i], rows, row_ok, turn, maps[i], b, h, B, H, at, held, ROPED, KEYS, i, NB
            )  # fmt: skip
        s *= scaling
        if HAS_SOFTCAP:
            s = softcap * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
        n = (n0 + tl.arange(0, N))[:, None]
        seen = n < T
        if PAGED:
            seen = n < tl.where(held > 0, T, 0)
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
            added = sums(values[i], p, b, h, B, H, at, held, VALUES, i, NB)
            grown = grown + (totals[i] * shrink[None, :] + added,)  # type: ignore[assignment]
        totals = grown
        most = new
    place = (head.to(tl.int64) * tl.num_programs(0) + split) * R + row
    tl.store(lse + place, tl.where(total == 0, float("-inf"), (most - SHIFT) * LN2 + tl.log(total)), mask=row_ok)
    share = 1.0 / tl.where(total == 0, 1.0, total)
    for i in tl.static_range(len(VALUES)):
        c = tl.arange(0, VALUES[i][PADDED])[:, None]
        written = out + place[None, :] * channels + VALUES[i][FIRST] + c
        tl.store(written, totals[i] * share[None, :], mask=row_ok[None, :] & (c < VALUES[i][CHANNELS]))
