"""Kernels that keep elements apart (`kernels/encode_sparse.py`): thresholds, and entries packed by block."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_TOKENS: tl.constexpr = tl.constexpr(32)
CHANNEL_BITS: tl.constexpr = tl.constexpr(11)


@triton.jit
def _block(block, x, x_b, x_h, x_t, B, H):
    """Where a block begins; they are numbered by block, batch row, head."""
    h, b, n = block % H, block // H % B, block // H // B
    return x + b.to(tl.int64) * x_b + h.to(tl.int64) * x_h + (n * BLOCK_TOKENS).to(tl.int64) * x_t


@triton.jit
def count_outliers(
    counts, chosen, x_b, x_h, x_t, x_c, B, H, D, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    """Grid (N·B·H). chosen uint8 [B, H, N·32, D] with these strides, to counts int32 [N·B·H]."""
    at = _block(tl.program_id(0), chosen, x_b, x_h, x_t, B, H)
    token, c = tl.arange(0, TOKENS)[:, None], tl.arange(0, CHANNELS)[None, :]
    found = tl.zeros((TOKENS, CHANNELS), tl.int32)
    for t0 in range(0, BLOCK_TOKENS, TOKENS):
        found += tl.load(at + (t0 + token) * x_t + c * x_c, mask=c < D, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0), tl.sum(tl.reshape(found, (TOKENS * CHANNELS,)), axis=0))


@triton.jit
def pack_outliers(
    places, values, starts, chosen, x_b, x_h, x_t, x_c, residual, y_b, y_h, y_t, y_c, B, H, D, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (N·B·H). Entries of a block go to places and values from starts int32 [N·B·H] on, by token and channel."""
    x = _block(tl.program_id(0), chosen, x_b, x_h, x_t, B, H)
    y = _block(tl.program_id(0), residual, y_b, y_h, y_t, B, H)
    entry = tl.load(starts + tl.program_id(0))
    i = tl.arange(0, TOKENS * CHANNELS)
    token, c = i // CHANNELS, i % CHANNELS
    for t0 in range(0, BLOCK_TOKENS, TOKENS):
        kept = tl.load(x + (t0 + token) * x_t + c * x_c, mask=c < D, other=0).to(tl.int32)
        at = entry + tl.cumsum(kept, 0) - kept
        value = tl.load(y + (t0 + token) * y_t + c * y_c, mask=kept != 0, other=0.0)
        tl.store(places + at, (((t0 + token) << CHANNEL_BITS) | c).to(tl.int16), mask=kept != 0)
        tl.store(values + at, value.to(tl.float16), mask=kept != 0)
        entry += tl.sum(kept, axis=0)


@triton.jit
def quantiles(low, high, vectors, n, first, second, rest, part, ENTRIES: tl.constexpr):
    """Grid (vectors). float32 [vectors, n] to low and high [vectors]: elements of these ranks from either end, times
    rest and part."""
    i = tl.arange(0, ENTRIES)
    row = tl.program_id(0).to(tl.int64)
    x = tl.sort(tl.load(vectors + row * n + i, mask=i < n, other=float("inf")))
    tl.store(low + row, _ranked(x, i, first) * rest + _ranked(x, i, second) * part)
    tl.store(high + row, _ranked(x, i, n - 1 - first) * rest + _ranked(x, i, n - 1 - second) * part)


@triton.jit
def _ranked(x, i, rank):
    return tl.sum(tl.where(i == rank, x, 0.0), axis=0)
