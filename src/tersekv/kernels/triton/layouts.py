"""Dispatch by layout: query, scores, sums, and decoding before RoPE of a leaf. The loader is chosen
when the kernel is compiled."""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv.kernels.triton.grid import (
    decode_keys_grid,
    load_keys_grid,
    load_keys_sparse,
    load_value_grid,
    load_values_grid,
    load_values_sparse,
    value_grid_scores,
    value_grid_sums,
)
from tersekv.kernels.triton.grid_slices import (
    latent_slices_scores,
    latent_slices_sums,
    load_keys_slices,
    load_latent_slices,
    load_values_slices,
    query_slices,
    sliced,
)
from tersekv.kernels.triton.leaves import (
    CHANNELS,
    FIRST,
    GRID,
    KIND,
    MAPPED,
    MAPPED_CHANNELS,
    PADDED,
    POLAR,
    ROTATED_MEAN,
    SCALES,
    SIGNS,
    SKETCH,
    SPARSE,
    TO_PRODUCT,
    TRELLIS,
)
from tersekv.kernels.triton.polar import decode_polar, load_keys_polar, load_values_polar
from tersekv.kernels.triton.tiles import PAIRS, inverse, largest, power_of_two, product, tile_cos_sin
from tersekv.kernels.triton.tokens import (
    decode_exact,
    decode_signs,
    decode_sketch,
    load_keys_exact,
    load_keys_rotated_mean,
    load_keys_signs,
    load_keys_sketch,
    load_values_exact,
    load_values_signs,
    load_values_sketch,
)
from tersekv.kernels.triton.trellis import (
    decode_trellis,
    load_keys_trellis,
    load_latent_trellis,
    load_values_trellis,
    trellis_scores,
    trellis_sums,
)


@triton.jit
def _met(S: tl.constexpr, LEAF: tl.constexpr):
    """Return the channels of the query that a leaf's tile is multiplied with, and a mask of the
    existing ones."""
    if S[LEAF][MAPPED] > 0:
        channel = tl.arange(0, S[LEAF][MAPPED])
        return channel, channel < S[LEAF][MAPPED_CHANNELS]
    else:
        channel = tl.arange(0, S[LEAF][PADDED])
        return channel, channel < S[LEAF][CHANNELS]


@triton.jit
def _query(rows, row_ok, pairs, ROPED: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Load a leaf's query and, with RoPE, its partner channels: float32 [channels, rows], divided
    by a power of two near each row's largest element. Also return these powers."""
    channel, inside = _met(S, LEAF)
    ok = row_ok[None, :] & inside[:, None]
    q = tl.load(rows[None, :] + channel[:, None], mask=ok, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(q), axis=0)[None, :]
    across = q
    if ROPED:
        partner = tl.load(pairs + 4 * (S[LEAF][FIRST] + channel) + 1, mask=inside, other=0)
        sign = tl.load(pairs + 4 * (S[LEAF][FIRST] + channel) + 3, mask=inside, other=0)
        across = tl.load(rows[None, :] + (partner - S[LEAF][FIRST])[:, None], mask=ok, other=0.0).to(tl.float32)
        across *= sign.to(tl.float32)[:, None]
        most = tl.maximum(most, tl.max(tl.abs(across), axis=0)[None, :])
    most = 2.0 * power_of_two(most)  # factor 2, so that no element exceeds 1
    return q / most, across / most, most


@triton.jit
def leaf_query(
    rows, row_ok, pairs, ROPED: tl.constexpr, LATENT: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr
):  # fmt: skip
    """Return the query, its partner under RoPE, and the factor of their scores. Sketches with channels per block
    load their query themselves, and sparse leaves, whose first result is its powers of two."""
    if S[LEAF][KIND] == SPARSE:
        _, _, most = _query(rows, row_ok, pairs, ROPED, S, LEAF)
        return most, most, most
    elif S[LEAF][KIND] == SKETCH and not ROPED:
        one = tl.full((1, rows.shape[0]), 1.0, tl.float32)
        return one, one, one
    elif S[LEAF][KIND] == GRID and not ROPED and not LATENT and sliced(S, LEAF):
        q, _, most = _query(rows, row_ok, pairs, ROPED, S, LEAF)
        if S[LEAF][SCALES] == TO_PRODUCT:
            all = tl.max(most, axis=1)[:, None]
            q, most = q * (most * inverse(all)), all
        return query_slices(q, most, rows, row_ok, S, LEAF), most, most
    else:
        return _query(rows, row_ok, pairs, ROPED, S, LEAF)


@triton.jit
def _decoded(leaf, map, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Decode keys before RoPE, float32 [tokens, channels]."""
    if S[LEAF][KIND] == GRID:
        x = decode_keys_grid(leaf, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == SIGNS:
        x = decode_signs(leaf, b, h, n0, T, S, LEAF, NB * 32)
    elif S[LEAF][KIND] == SKETCH:
        x = decode_sketch(leaf, b, h, n0, T, S, LEAF, NB)
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
        x = product((x * inverse(most)).to(tl.float16), matrix.to(tl.float16)) * most
    return x


@triton.jit
def load_latent(leaf, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Load latents or rotated keys once, for scores and sums. Their grids are packed as those of values."""
    if S[LEAF][KIND] == GRID and sliced(S, LEAF):
        return load_latent_slices(leaf, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == GRID:
        return load_value_grid(leaf, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == TRELLIS:
        return load_latent_trellis(leaf, b, h, n0, T, S, LEAF, NB * 32)
    else:
        x = _decoded(leaf, (), b, h, n0, T, S, LEAF, NB)
        most = largest(x)
        return (x * inverse(most)).to(tl.float16), most, most


@triton.jit
def latent_scores(loaded, query, S: tl.constexpr, LEAF: tl.constexpr):
    """q·k̂ [tokens, rows] of what `load_latent` returned."""
    q, _, most = query
    if S[LEAF][KIND] == GRID and sliced(S, LEAF):
        return latent_slices_scores(loaded, q, S, LEAF) * most
    elif S[LEAF][KIND] == GRID:
        return value_grid_scores(loaded, q, S, LEAF) * most
    elif S[LEAF][KIND] == TRELLIS:
        return trellis_scores(loaded, q) * most
    else:
        return product(loaded[0], q.to(tl.float16)) * (loaded[1] * most)


@triton.jit
def latent_sums(loaded, p, S: tl.constexpr, LEAF: tl.constexpr):
    """Σ p·v̂ [channels, rows] of what `load_latent` returned."""
    if S[LEAF][KIND] == GRID and sliced(S, LEAF):
        return latent_slices_sums(loaded, p, S, LEAF)
    elif S[LEAF][KIND] == GRID:
        return value_grid_sums(loaded, p, S, LEAF)
    elif S[LEAF][KIND] == TRELLIS:
        return trellis_sums(loaded, p)
    else:
        return product(tl.trans(loaded[0]), p.to(tl.float16)) * loaded[1]


@triton.jit
def _roped_scores(
    x, q, across, rope, b, h, n0, T, S: tl.constexpr, LEAF: tl.constexpr, N: tl.constexpr, ROPED: tl.constexpr
):  # fmt: skip
    """Scores of keys x [N, channels], with their RoPE applied to the query: q·RoPE(x) = Σ x·(q·cos
    + across·sin)."""
    channel, inside = _met(S, LEAF)
    c = S[LEAF][FIRST] + tl.where(inside, channel, 0)
    column, sine = tl.load(rope[PAIRS] + 4 * c), tl.load(rope[PAIRS] + 4 * c + 2)
    moved = (column >= 0)[None, :]
    cos, sin = tile_cos_sin(rope, 0, b, h, n0, T, column[None, :], sine[None, :], moved, N, ROPED)
    most = largest(x)
    x *= inverse(most)
    s = product((x * cos).to(tl.float16), q.to(tl.float16))
    return (s + product((x * sin).to(tl.float16), across.to(tl.float16))) * most


@triton.jit
def scores(
    leaf, query, rows, row_ok, rope, map, b, h, B, H, n0, T, ROPED: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr,
    NB: tl.constexpr,
):  # fmt: skip
    """q·k̂ [32·NB, rows] of one leaf of the keys."""
    q, across, most = query
    if S[LEAF][KIND] == SPARSE:
        return load_keys_sparse(leaf, rows, row_ok, q, rope, b, h, B, H, n0, T, S, LEAF, NB, ROPED) * most
    elif ROPED:
        x = _decoded(leaf, map, b, h, n0, T, S, LEAF, NB)
        return _roped_scores(x, q, across, rope, b, h, n0, T, S, LEAF, NB * 32, ROPED) * most
    elif S[LEAF][KIND] == GRID and sliced(S, LEAF):
        return load_keys_slices(leaf, q, most, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == GRID:
        return load_keys_grid(leaf, q, b, h, n0, T, S, LEAF, NB) * most
    elif S[LEAF][KIND] == SIGNS:
        return load_keys_signs(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most
    elif S[LEAF][KIND] == SKETCH:
        return load_keys_sketch(leaf, rows, row_ok, b, h, n0, T, S, LEAF, NB) * most
    elif S[LEAF][KIND] == POLAR:
        return load_keys_polar(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most
    elif S[LEAF][KIND] == TRELLIS:
        return load_keys_trellis(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most
    elif S[LEAF][KIND] == ROTATED_MEAN:
        return load_keys_rotated_mean(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most
    else:
        return load_keys_exact(leaf, q, b, h, n0, T, S, LEAF, NB * 32) * most


@triton.jit
def sums(leaf, p, b, h, B, H, n0, T, S: tl.constexpr, LEAF: tl.constexpr, NB: tl.constexpr):
    """Σ p·v̂ [channels, rows] of one leaf of the values, weights p float32 [32·NB, rows]."""
    if S[LEAF][KIND] == GRID and sliced(S, LEAF):
        return load_values_slices(leaf, p, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == GRID:
        return load_values_grid(leaf, p, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == SPARSE:
        return load_values_sparse(leaf, p, b, h, B, H, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == SIGNS:
        return load_values_signs(leaf, p, b, h, n0, T, S, LEAF, NB * 32)
    elif S[LEAF][KIND] == SKETCH:
        return load_values_sketch(leaf, p, b, h, n0, T, S, LEAF, NB)
    elif S[LEAF][KIND] == POLAR:
        return load_values_polar(leaf, p, b, h, n0, T, S, LEAF, NB * 32)
    elif S[LEAF][KIND] == TRELLIS:
        return load_values_trellis(leaf, p, b, h, n0, T, S, LEAF, NB * 32)
    else:
        return load_values_exact(leaf, p, b, h, n0, T, S, LEAF, NB * 32)


@triton.jit
def zeros(ROWS: tl.constexpr, S: tl.constexpr, LEAF: tl.constexpr):
    """Return a leaf's sum over no tokens."""
    P: tl.constexpr = S[LEAF][PADDED]
    return tl.zeros((P, ROWS), tl.float32)
