"""Outliers stored as sparse entries (layout `sparse`), their thresholds and packing: contract and
torch reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tersekv.kernels.registry import operator

BLOCK_TOKENS = 32
CHANNEL_BITS = 11
MAX_CHANNELS = 1 << CHANNEL_BITS


class Entries(NamedTuple):
    """starts int32 [B, H, N], places int16 and values float16 [entries], see
    `tersekv.layouts.sparse`."""

    starts: Tensor
    places: Tensor
    values: Tensor


def _fake_outliers(residual: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, H, T, _ = residual.shape
    n = torch.library.get_ctx().new_dynamic_size()
    starts = residual.new_empty((B, H, T // BLOCK_TOKENS), dtype=torch.int32)
    return starts, residual.new_empty(n, dtype=torch.int16), residual.new_empty(n, dtype=torch.float16)


@operator("(Tensor residual, Tensor chosen) -> (Tensor, Tensor, Tensor)", _fake_outliers)
def pack_outliers(residual: Tensor, chosen: Tensor) -> Entries:
    """Pack the chosen elements as sparse entries.

    Entries are ordered by block, batch row and head, then by token and channel.

    Args:
        residual: float32 [B, H, T, D], T whole blocks of 32, D at most 2,048.
        chosen: bool, of the same shape.
    """
    B, H, T, _ = residual.shape
    by_block = chosen.unflatten(2, (-1, BLOCK_TOKENS)).permute(2, 0, 1, 3, 4)  # [N, B, H, t, D]
    values = residual.unflatten(2, (-1, BLOCK_TOKENS)).permute(2, 0, 1, 3, 4)[by_block]
    *_, token, channel = by_block.nonzero(as_tuple=True)
    places = token << CHANNEL_BITS | channel
    counts = by_block.sum((-1, -2)).flatten()
    starts = (counts.cumsum(0) - counts).view(T // BLOCK_TOKENS, B, H).permute(1, 2, 0)
    # convert to int16 without changing the low 16 bits
    starts = starts.to(torch.int32).contiguous()
    return Entries(starts, (places - (places >> 15 << 16)).to(torch.int16), values.to(torch.float16))


def ranks_of(share: float, n: int) -> tuple[int, int, float]:
    """Ranks of the two elements, counted from either end, that the threshold is interpolated
    between, and the second one's weight."""
    place = share / 2 * (n - 1)
    below = int(place)
    return below, min(below + 1, n - 1), place - below


def _fake_quantiles(vectors: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return vectors.new_empty(vectors.shape[:-1]), vectors.new_empty(vectors.shape[:-1])


@operator("(Tensor vectors, float share) -> (Tensor, Tensor)", _fake_quantiles)
def quantiles(vectors: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the lower and the upper threshold of each vector float32 [..., n]. All elements but
    `share` are between them, half of `share` on each side. Thresholds are interpolated between
    neighbouring elements; with share 0 they are the smallest and the largest element."""
    first, second, part = ranks_of(share, vectors.shape[-1])
    high = vectors.topk(second + 1, dim=-1).values[..., first:]
    low = vectors.topk(second + 1, dim=-1, largest=False).values[..., first:]
    low, high = (ends[..., 0] * (1 - part) + ends[..., -1] * part for ends in (low, high))
    return low, high
