"""Which held tokens a query sees: the model's mask, cut to the positions that a segment holds."""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.cache.layer import LayerStore
from tersekv.cache.selective import SelectiveStore
from tersekv.kernels.attend import Masks

Store = LayerStore | SelectiveStore


def causal(q: int, T: int, device: torch.device) -> Tensor:
    """bool [1, q, T], query i at position T − q + i."""
    return (torch.arange(T, device=device) <= torch.arange(T - q, T, device=device)[:, None])[None]


def at(store: Store, mask: Tensor | None, positions: Tensor | int, tokens: int) -> Tensor | None:
    """Columns of mask [B, q, tokens seen] for a segment: its tokens stand from position `positions` on, or at
    positions [tokens], [B, tokens] or [B, H, tokens], where −1 is none. bool [B, q, tokens] or [B, H, q, tokens]; None:
    all are seen."""
    return Masks(mask, store.hidden).at(positions, tokens)
