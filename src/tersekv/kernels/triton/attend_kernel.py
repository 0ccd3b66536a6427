"""Attention in one pass over packed tokens: one kernel for all layouts, and merging by log-sum-exp.

A program handles the query rows (or a tile of them) of one key-value head over one stretch of
tokens. In every matrix product the many tokens or channels are the rows and the few query rows are
the columns. Scores are x̂·q [tokens, rows] and sums v̂ᵀ·p [channels, rows]. The operand that was
unpacked in registers is thus the one that a tensor core reads from registers.

Keys and values are tuples of leaves (`leaves.py`). Each leaf has a loader for its kind, chosen when
the kernel is compiled. The scores of all key leaves are added; each value leaf has an output of its
own. Latents are both: they are decoded once, as the first leaf of the keys.

If tokens are in pages of a pool, a tile is part of one page, and loaders get the tile's first token
in the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.layouts import latent_scores, latent_sums, leaf_query, load_latent, scores, sums, zeros
from tersekv.kernels.triton.leaves import (
    ADDRESS_OF_BFLOAT16,
    ADDRESS_OF_FLOAT8E5,
    ADDRESS_OF_FLOAT16,
    ADDRESS_OF_FLOAT32,
    ADDRESS_OF_INT16,
    ADDRESS_OF_INT32,
    ADDRESS_OF_INT64,
    ADDRESS_OF_UINT8,
    ALIGNED,
    CHANNELS,
    FIRST,
    FLOAT_FIELD,
    INT32_FIELD,
    INT64_FIELD,
    KIND,
    PADDED,
    SPARSE,
)
from tersekv.kernels.triton.maps import map_query, write_tokens

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SHIFT: tl.constexpr = tl.constexpr(10.0)
"""Weights are multiplied by 2^10, so that float16 does not lose the small weights of many distant
tokens."""
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)
"""Largest score of no tokens: below all scores, and finite, so that differences to it are numbers."""
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _pages_end(pages, b, first, end):
    """Return the end of the last existing page among tokens `first` to `end`, at most `end`."""
    last = first
    for i0 in range(first // pages[2], tl.cdiv(end, pages[2]), 64):
        i = i0 + tl.arange(0, 64)
        page = tl.load(pages[0] + b.to(tl.int64) * pages[1] + i, mask=i * pages[2] < end, other=-1)
        last = tl.maximum(last, tl.max(tl.where(page >= 0, (i + 1) * pages[2], 0), axis=0))
    return tl.minimum(last, end)


@triton.jit
def _paged(pages, b, n0):
    """Return the index of token n0 in the pool and the number of tokens in the pool; 0 and 0 if its
    page does not exist."""
    page = tl.load(pages[0] + b.to(tl.int64) * pages[1] + n0 // pages[2])
    there = (page >= 0) & (page < pages[3])
    return tl.where(there, page * pages[2] + n0 % pages[2], 0), tl.where(there, pages[3] * pages[2], 0)


@triton.jit
def _field(at, CODE: tl.constexpr):
    """Load a number or an address from a row of a table int64 [fields]; CODE: see
    `leaves.field_codes`."""
    x = tl.load(at)
    if CODE == FLOAT_FIELD:
        return x.to(tl.int32).to(tl.float32, bitcast=True)
    elif CODE == INT32_FIELD:
        return x.to(tl.int32)
    elif CODE == INT32_FIELD + ALIGNED:
        return tl.multiple_of(x.to(tl.int32), 16)
    elif CODE == INT64_FIELD:
        return x
    elif CODE == INT64_FIELD + ALIGNED:
        return tl.multiple_of(x, 16)
    else:
        return _address(x, CODE - CODE % 2, CODE % 2 == ALIGNED)


@triton.jit
def _address(x, CODE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    if CODE == ADDRESS_OF_UINT8:
        at = x.to(tl.pointer_type(tl.uint8))
    elif CODE == ADDRESS_OF_INT16:
        at = x.to(tl.pointer_type(tl.int16))
    elif CODE == ADDRESS_OF_INT32:
        at = x.to(tl.pointer_type(tl.int32))
    elif CODE == ADDRESS_OF_INT64:
        at = x.to(tl.pointer_type(tl.int64))
    elif CODE == ADDRESS_OF_FLOAT16:
        at = x.to(tl.pointer_type(tl.float16))
    elif CODE == ADDRESS_OF_BFLOAT16:
        at = x.to(tl.pointer_type(tl.bfloat16))
    elif CODE == ADDRESS_OF_FLOAT32:
        at = x.to(tl.pointer_type(tl.float32))
    elif CODE == ADDRESS_OF_FLOAT8E5:
        at = x.to(tl.pointer_type(tl.float8e5))
    else:
        at = x.to(tl.pointer_type(tl.float8e4nv))
    if IS_ALIGNED:  # set here, because the compiler does not see it on the result of another function
        at = tl.multiple_of(at, 16)
    return at


@triton.jit
def _fields(line, FIELDS: tl.constexpr, PART: tl.constexpr):
    """Load the fields of a part (a leaf, or the angles of RoPE) from a page's row of the table.
    FIELDS[PART] begins with the part's column."""
    fields = ()
    for i in tl.static_range(len(FIELDS[PART]) - 1):
        fields = fields + (_field(line + FIELDS[PART][0] + i, FIELDS[PART][i + 1]),)  # type: ignore[assignment]
    return fields


@triton.constexpr_function
def _adds_later(KEYS, VALUES, LATENT):
    """Return True if each token of a tile has its own sum of weights, and these are added after the
    last tile. Warps then wait less often for each other, but kernels of latents and of outliers lack
    the registers."""
    return not LATENT and all(leaf[KIND.value] != SPARSE.value for leaf in (*KEYS, *VALUES))


@triton.jit
def _segment(
    most, total, totals, loaded, queries, maps, keys, values, rope, pages, mask, column, b, h, B, H, R, T, start, row,
    first, end, softcap, KEYS: tl.constexpr, VALUES: tl.constexpr, ROPED: tl.constexpr, PAGED: tl.constexpr,
    LATENT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROWS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Add tokens `first` to `end` of one segment to the largest score, the sums of weights and the
    weighted sums of values. Scores are in base 2, because the factors of the queries contain log2(e).
    column: mask column of the segment's first token. T: number of the head's tokens, which begin at
    token `start` of the segment."""
    N: tl.constexpr = NB * 32
    row_ok = row < R
    head = b.to(tl.int64) * H + h
    if PAGED:
        end = _pages_end(pages, b, first, end)
    for n0 in range(first, end, N):
        at, held = start + n0, start + T
        if PAGED:
            at, held = _paged(pages, b, n0)
        at = tl.multiple_of(at, 32)
        n = (n0 + tl.arange(0, N))[:, None]
        seen = n < T
        if PAGED:
            seen = n < tl.where(held > 0, T, 0)
        s = tl.zeros((N, ROWS), tl.float32)
        if not HAS_SOFTCAP and not HAS_MASK:
            s += tl.where(seen, 0.0, float("-inf"))
        if LATENT:
            latents = load_latent(keys[0], b, h, at, held, KEYS, 0, NB)
            s += latent_scores(latents, loaded[0], KEYS, 0)
            for i in tl.static_range(1, len(KEYS)):
                s += latent_scores(load_latent(keys[i], b, h, at, held, KEYS, i, NB), loaded[i], KEYS, i)
        for i in tl.static_range(len(KEYS) * (1 - LATENT)):
            rows = queries[i][0] + (head * R + row) * queries[i][1]
            s += scores(
                keys[i], loaded[i], rows, row_ok, rope, maps[i], b, h, B, H, at, held, ROPED, KEYS, i, NB
            )  # fmt: skip
        if HAS_SOFTCAP:
            s = (softcap * LOG2E) * (1.0 - 2.0 / (tl.exp(2.0 * s / softcap) + 1.0))
        if HAS_MASK:
            byte = b.to(tl.int64) * mask[1] + h.to(tl.int64) * mask[2] + (row % mask[5])[None, :] * mask[3]
            byte += (column + start + n) * mask[4]
            seen = seen & (tl.load(mask[0] + byte, mask=seen & row_ok[None, :], other=0) != 0)
        if HAS_SOFTCAP or HAS_MASK:
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(most, tl.max(s, axis=0))
        shrink = tl.exp2(most - new)
        p = tl.exp2(s - (new - SHIFT)[None, :])
        if _adds_later(KEYS, VALUES, LATENT):  # noqa: SIM108
            total = total * shrink[None, :] + p
        else:
            total = total * shrink + tl.sum(p, axis=0)
        grown = ()
        for i in tl.static_range(len(VALUES)):
            if LATENT:
                added = latent_sums(latents, p, VALUES, i)
            else:
                added = sums(values[i], p, b, h, B, H, at, held, VALUES, i, NB)
            grown = grown + (totals[i] * shrink[None, :] + added,)  # type: ignore[assignment]
        totals = grown
        most = new
    return most, total, totals


@triton.jit
def _store_output(at, x, row_ok, VALUES: tl.constexpr, LEAF: tl.constexpr):
    """Write the output [padded channels, rows] of a leaf to rows at `at` [1, rows]."""
    c = tl.arange(0, VALUES[LEAF][PADDED])[:, None]
    tl.store(at + VALUES[LEAF][FIRST] + c, x, mask=row_ok[None, :] & (c < VALUES[LEAF][CHANNELS]))


@triton.jit
def _score_bias(correction, b, h, head, R, row, CHANNELS: tl.constexpr):
    """Σ_d query_d²·correction_d of rows, float32 [rows]."""
    c = tl.arange(0, CHANNELS)
    inside = c < correction[3]
    at = correction[0] + b.to(tl.int64) * correction[1] + h.to(tl.int64) * correction[2] + c
    query = correction[4] + (head.to(tl.int64) * R + row)[None, :] * correction[5] + c[:, None]
    q = tl.load(query, mask=inside[:, None] & (row < R)[None, :], other=0.0).to(tl.float32)
    return tl.sum(q * q * tl.load(at, mask=inside, other=0.0)[:, None], axis=0)


@triton.jit(do_not_specialize=["first_split", "splits", "table_width"])
def attend(
    out, lse, queries, maps, pairs, segments, table, table_width, runs, masks, pages, mapping, written, correction, B,
    H, R, channels, first_split, splits, split_tokens, scaling, softcap, KEYS: tl.constexpr, VALUES: tl.constexpr,
    FIELDS: tl.constexpr, ROPED: tl.constexpr, LATENT: tl.constexpr, PAGED: tl.constexpr, MASKED: tl.constexpr,
    MAPPING: tl.constexpr, WRITES: tl.constexpr, CORRECTED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """Attention over segments of the same layouts. Grid (this launch's splits, B·H, row tiles).

    Writes out float32 [B·H, splits, R, channels] and lse [B·H, splits, R] from `first_split` on;
    each split is attention over its own tokens. Segments are passed in one of two ways:

    - FIELDS is empty: `segments` is a tuple of (fields of the key leaves, of the value leaves,
      angles, T). A split is `split_tokens` tokens of all segments one after the other, each padded
      to whole tiles. `masks` has one mask per segment.
    - FIELDS describes the fields of `table`, int64 [pages, table_width]. A row has T, the page's
      first mask column, 0 or the address of the heads' first tokens int64 [B·H + 1], and the fields.
      `runs`, int32 [grid's splits + 1 + 3·runs], has the first run of each split and the number of
      runs, then page, first token and end of each run.

    pairs: channels of RoPE. LATENT: True if the first leaf of the keys is the values, which have no
    fields. PAGED: `pages` has the page table int32 [B, P], the stride of its rows, tokens per page (a
    multiple of 32·NB) and pages in the pool. A mask has its bytes, its strides of batch row, head,
    query and token, and its number of queries.

    MAPPING: empty, or the number of tiles and the constants of `maps.map_query`. Further programs of
    the grid's first axis then map queries. WRITES: 0, or padded channels of the tokens that one more
    program copies, see `maps.write_tokens`; no segment has these copies yet. CORRECTED: 0, or
    padded channels of `correction`, see `softmax.score_bias`: float32 with strides of batch row and
    head, number of channels, the query and its row stride.
    """
    N: tl.constexpr = NB * 32
    split, head = tl.program_id(0), tl.program_id(1)
    b, h = head // H, head % H
    attending = tl.num_programs(0)
    if WRITES > 0:
        attending -= 1
        if split == attending:
            if tl.program_id(2) == 0:
                write_tokens(written, head, H, WRITES)
            return
    if len(MAPPING) > 0:
        tile = split - (attending - MAPPING[0])
        if tile >= 0:
            first = tl.program_id(2) * ROWS
            map_query(
                mapping[0], mapping[1], mapping[2], mapping[3], mapping[4], mapping[5], tile, head, H, R, first,
                tl.minimum(first + ROWS, R), MAPPING[1], MAPPING[2], MAPPING[3],
            )  # fmt: skip
            return
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row_ok = row < R
    loaded = ()
    for i in tl.static_range(len(KEYS)):
        rows = queries[i][0] + (head.to(tl.int64) * R + row) * queries[i][1]
        q, across, factor = leaf_query(rows, row_ok, pairs, ROPED, LATENT, KEYS, i)
        factor *= scaling if HAS_SOFTCAP else scaling * LOG2E
        loaded = loaded + ((q, across, factor),)  # type: ignore[assignment]
    totals = ()
    for i in tl.static_range(len(VALUES)):
        totals = totals + (zeros(ROWS, VALUES, i),)  # type: ignore[assignment]
    most = tl.full((ROWS,), LOWEST, tl.float32)
    LATER: tl.constexpr = _adds_later(KEYS, VALUES, LATENT)
    total = tl.zeros((N, ROWS) if LATER else (ROWS,), tl.float32)
    if len(FIELDS) > 0:
        last = tl.load(runs + split + 1)
        for run in range(tl.load(runs + split), last):
            at = runs + tl.num_programs(0) + 1 + 3 * run
            line = table + tl.load(at).to(tl.int64) * table_width
            keys = ()
            for i in tl.static_range(len(KEYS)):
                keys = keys + (_fields(line, FIELDS, i),)  # type: ignore[assignment]
            values = ()
            for i in tl.static_range(len(VALUES)):
                values = values + (_fields(line, FIELDS, len(KEYS) + i),)  # type: ignore[assignment]
            rope = _fields(line, FIELDS, len(KEYS) + len(VALUES)) + (pairs,)
            starts = tl.load(line + 2)
            own = starts.to(tl.pointer_type(tl.int64)) + head
            start = tl.multiple_of(tl.load(own, mask=starts != 0, other=0).to(tl.int32), 32)
            T = tl.load(own + 1, mask=starts != 0, other=tl.load(line)).to(tl.int32) - start
            most, total, totals = _segment(
                most, total, totals, loaded, queries, maps, keys, values, rope, pages, masks[0],
                tl.load(line + 1).to(tl.int32), b, h, B, H, R, T, start, row, tl.load(at + 1),
                tl.minimum(tl.load(at + 2), T), softcap, KEYS, VALUES, ROPED, PAGED, LATENT, MASKED[0],
                HAS_SOFTCAP, ROWS, NB,
            )  # fmt: skip
    else:
        start = 0
        for i in tl.static_range(len(segments)):
            T = segments[i][3]
            most, total, totals = _segment(
                most, total, totals, loaded, queries, maps, segments[i][0], segments[i][1],
                segments[i][2] + (pairs,), pages, masks[i], 0, b, h, B, H, R, T, 0, row,
                tl.maximum(split * split_tokens - start, 0), tl.minimum((split + 1) * split_tokens - start, T),
                softcap, KEYS, VALUES, ROPED, PAGED, LATENT, MASKED[i], HAS_SOFTCAP, ROWS, NB,
            )  # fmt: skip
            start += tl.cdiv(T, N) * N
    if LATER:
        total = tl.sum(total, axis=0)
    place = (head.to(tl.int64) * splits + first_split + split) * R + row
    whole = (most - SHIFT) * LN2 + tl.log(total)
    if CORRECTED > 0:
        whole += _score_bias(correction, b, h, head, R, row, CORRECTED) * (scaling * scaling)
    tl.store(lse + place, tl.where(total == 0, float("-inf"), whole), mask=row_ok)
    share = 1.0 / tl.where(total == 0, 1.0, total)
    for i in tl.static_range(len(VALUES)):
        if i == 0:
            x = totals[i]  # type: ignore[var-annotated]
        elif VALUES[i][FIRST] == VALUES[i - 1][FIRST]:  # the outputs of leaves at the same channels are added
            x += totals[i]
        else:
            x = totals[i]
        at = out + place[None, :] * channels
        if i + 1 == len(VALUES):  # noqa: SIM114
            _store_output(at, x * share[None, :], row_ok, VALUES, i)
        elif VALUES[i + 1][FIRST] != VALUES[i][FIRST]:
            _store_output(at, x * share[None, :], row_ok, VALUES, i)


@triton.jit
def merge_parts(out, lse, outs, lses, channels, PARTS: tl.constexpr, CHANNELS_: tl.constexpr):
    """Merge parts. Grid (B·H·R). outs and lses: tuples of PARTS tensors [B·H·R, channels] and
    [B·H·R]."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHANNELS_)
    most = float("-inf")
    for i in tl.static_range(PARTS):
        most = tl.maximum(most, tl.load(lses[i] + row))
    base = tl.where(most == float("-inf"), 0.0, most)
    total = 0.0
    x = tl.zeros((CHANNELS_,), tl.float32)
    for i in tl.static_range(PARTS):
        weight = tl.exp(tl.load(lses[i] + row) - base)
        total += weight
        x += tl.load(outs[i] + row * channels + c, mask=c < channels, other=0.0) * weight
    tl.store(out + row * channels + c, x / tl.where(total == 0, 1.0, total), mask=c < channels)
    tl.store(lse + row, tl.where(total == 0, float("-inf"), base + tl.log(total)))
