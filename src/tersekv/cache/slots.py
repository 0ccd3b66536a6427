"""Slots of tokens that each head chooses for itself."""

from __future__ import annotations

import torch
from torch import Tensor


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Tokens `index` [B, H, n] of x [B, H, T, D]."""
    return x.gather(2, index.unsqueeze(-1).expand(*index.shape, x.shape[-1]))


def spread(blocks: Tensor, t: int) -> Tensor:
    """Each block index [B, H, n] as the indices of its t slots [B, H, n·t]."""
    return (blocks.unsqueeze(-1) * t + torch.arange(t, device=blocks.device)).flatten(2)
