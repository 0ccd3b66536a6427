"""The causal mask."""

from __future__ import annotations

import torch
from torch import Tensor


def causal(q: int, T: int, device: torch.device) -> Tensor:
    """Return the causal mask, bool [1, q, T], with query i at position T − q + i."""
    return (torch.arange(T, device=device) <= torch.arange(T - q, T, device=device)[:, None])[None]
