"""Which held tokens a query sees: the model's mask, cut to the positions that a segment holds."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.cache.layer import LayerStore
from tersekv.cache.selective import SelectiveStore

Store = LayerStore | SelectiveStore


def causal(q: int, T: int, device: torch.device) -> Tensor:
    """bool [1, q, T], query i at position T − q + i."""
    return (torch.arange(T, device=device) <= torch.arange(T - q, T, device=device)[:, None])[None]


def padded(store: Store, mask: Tensor | None, q: int) -> Tensor | None:
    """A mask [B, q, tokens seen] where the store needs one: rows with padding hide what stands in front of their own
    tokens, and in their sinks' places."""
    if store.hidden is None or mask is not None:
        return mask
    ones = torch.ones(1, 1, store.seen, dtype=torch.bool, device=store.hidden.device)
    return ones.expand(store.batch_size, q, -1)


def at(store: Store, mask: Tensor | None, positions: Tensor | int, tokens: int) -> Tensor | None:
    """Columns of mask [B, q, tokens seen] for a segment: its tokens stand from position `positions` on, or at
    positions [tokens], [B, tokens] or [B, H, tokens], where −1 is none. bool [B, q, tokens] or [B, H, q, tokens]; None:
    all are seen."""
    if isinstance(positions, Tensor) and positions.dim() == 3:
        return _per_head(mask, positions)
    if mask is None:
        return None
    if isinstance(positions, Tensor) and positions.dim() == 2:
        return mask.gather(2, positions[:, None].expand(-1, mask.shape[1], -1))
    if isinstance(positions, Tensor):
        places, columns = positions, mask.index_select(2, positions)
    else:
        columns = mask[:, :, positions : positions + tokens]
        places = torch.arange(positions, positions + tokens, device=columns.device)
    if store.hidden is not None:
        columns = columns & (places >= store.hidden[:, None])[:, None]
    return columns


def _per_head(mask: Tensor | None, positions: Tensor) -> Tensor | None:
    held = positions >= 0
    if mask is None:
        return None if bool(held.all()) else held.unsqueeze(2)
    B, H = positions.shape[:2]
    index = positions.clamp(min=0).long().unsqueeze(2).expand(-1, -1, mask.shape[1], -1)
    return mask.unsqueeze(1).expand(B, H, *mask.shape[1:]).gather(3, index) & held.unsqueeze(2)
